"""The example configuration in front of a real origin, with the real nginx: what it keeps, and what one spoilt does."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from protocol.records import RelayReport
from shardcast.origin import Origin
from shardcast.passes import Parent
from shardcast.stamps import STAMP_HEADER
from tests.shardcast_run import (
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "nginx.conf"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt-get install nginx-light)"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def nginx(folder: Path, upstream: str) -> AsyncIterator[tuple[str, Path]]:
    """The example's server on a free port in front of `upstream`; its URL and its cache's folder."""
    assert NGINX is not None
    folder.mkdir()
    port = free_port()
    text = EXAMPLE.read_text()
    for old, new in (
        ("/var/cache/nginx/shardcast", str(folder / "cache")),
        ("127.0.0.1:8100", upstream.removeprefix("http://")),
        ("listen 80;", f"listen 127.0.0.1:{port};"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "shardcast.conf").write_text(text)
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nuser root;\npid {folder}/pid;\nerror_log {folder}/error.log;\nworker_processes 1;\n"
        f"events {{}}\nhttp {{\naccess_log {folder}/access.log;\n{temporary}include {folder}/shardcast.conf;\n}}\n"
    )
    args = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    tested = subprocess.run([*args, "-t"], capture_output=True, text=True, timeout=WAIT_S)
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except OSError:
                    assert process.poll() is None, (folder / "error.log").read_text()
                    await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}", folder / "cache"
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0)
    return made


def sent(origin: Origin) -> int:
    return origin.server.counters.shards_sent


async def test_what_is_named_by_its_hash_is_fetched_once_and_what_is_newest_never_kept(
    wide: MadeRun, tmp_path: Path
) -> None:
    async with publishing(wide) as origin, nginx(tmp_path / "nginx", origin.server.url) as (url, cache):
        await until(lambda: bool(origin.store.keys), "the publication")
        for name in ("a", "b", "c"):
            async with pulling(wide, [Parent(url, cached=True)], tmp_path / name) as puller:
                assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)
                assert puller.problems == {}
            assert sent(origin) == 3, "the origin sends each shard once, whoever comes"
        async with pulling(wide, [Parent(url, cached=True)], tmp_path / "a") as puller:
            await puller.wait_newer(None, WAIT_S)
            write_checkpoint(wide.directory, 0, 1, WIDE_SHAPES, seed=1)
            assert holds(await puller.wait_newer((0, 0), WAIT_S), WIDE_SHAPES, seed=1)
        async with aiohttp.ClientSession() as session:
            base = f"{url}/v1/{wide.run.id.hex()}"
            for path in ("head", "news", "stats", "p/0-0/records", "p/0-0/shard/0"):
                answer = await session.get(f"{base}/{path}")
                assert (answer.status, answer.headers.get("X-Cache")) == (200, None), path
            absent = f"wire/0-9/0/{'0' * 64}"
            for _ in range(2):  # that something is not here is not kept either: it may come
                assert (await session.get(f"{base}/{absent}")).status == 404
            assert not [path for path in cache.rglob("*") if path.is_file() and b"record-missing" in path.read_bytes()]
            assert (await session.post(f"{base}/head", data=b"x")).status in (403, 405)
            assert (await session.get(f"{url}/etc/passwd")).status == 404


async def test_a_spoilt_cache_is_asked_past_and_nobody_else_is_blamed(wide: MadeRun, tmp_path: Path) -> None:
    reports: list[RelayReport] = []
    async with publishing(wide) as origin, nginx(tmp_path / "nginx", origin.server.url) as (url, cache):
        await until(lambda: bool(origin.store.keys), "the publication")
        async with pulling(wide, [Parent(url, cached=True)], tmp_path / "first") as puller:
            await puller.wait_newer(None, WAIT_S)
        spoilt = 0
        for path in cache.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
                spoilt += 1
        assert spoilt == 3
        real = Parent(origin.server.url, wide.origin.public)
        for name, parents in (("behind", [Parent(url, cached=True)]), ("both", [Parent(url, cached=True), real])):
            async with pulling(wide, parents, tmp_path / name, report=reports.append) as puller:
                assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)
                assert origin.server.url not in puller.problems
            if name == "behind":
                assert sent(origin) == 3 + 3, "each spoilt shard was asked for once, past the cache"
        assert reports == []


async def test_bytes_that_a_cache_may_keep_carry_no_stamp(wide: MadeRun, tmp_path: Path) -> None:
    """Else a spoilt cache would hold a relay's signature beside bytes that the relay never sent."""
    async with (
        publishing(wide) as origin,
        relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: bool(relay.store.keys), "the publication")
        feed = relay.store.feed((0, 0))
        assert feed is not None
        base = f"{relay.url}/v1/{wide.run.id.hex()}"
        assert STAMP_HEADER in (await session.get(f"{base}/p/0-0/shard/0")).headers
        answer = await session.get(f"{base}/wire/0-0/0/{feed.shards[0].wire_hash.hex()}")
        assert answer.status == 200
        assert STAMP_HEADER not in answer.headers
