"""What strangers send to a server of weights: every answer has a reason, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path

import aiohttp
import pytest
from blake3 import blake3

from protocol.errors import ReasonCode
from shardcast.gate import CappedServer
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    make_run,
    publishing,
    until,
    write_checkpoint,
)


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    return made


async def ask(url: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes; status, headers (lower case) and body of what comes back until the server closes or is done."""
    host, port = url.split("//")[1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
            size = 0 if request.startswith(b"HEAD ") else int(headers.get("content-length", "0"))
            body = await reader.readexactly(size)
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


async def test_what_is_no_plain_request_gets_a_typed_answer(small: MadeRun) -> None:
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        run = small.run.id.hex()
        shard = f"/v1/{run}/p/0-0/shard/0"
        for request, status in (
            (f"GET {shard} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1,5-9\r\n\r\n", 416),
            (f"GET {shard} HTTP/1.1\r\nHost: x\r\nRange: bytes={'0-,' * 1000}\r\n\r\n", 416),
            (f"DELETE {shard} HTTP/1.1\r\nHost: x\r\n\r\n", 405),
            (f"PUT {shard} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
            (f"HEAD {shard} HTTP/1.1\r\nHost: x\r\n\r\n", 405),
            (f"BREW {shard} HTTP/1.1\r\nHost: x\r\n\r\n", 400),
            ("CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
            (f"GET /v1/{run}/p/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (f"GET /v1/{run}/blob/..%2f..%2fmanifest.hw HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (f"GET /v1/{run}/wire/0-0/0/..%2f..%2fpublication.hw HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (f"GET /v1/{run}/p/0-0/shard/0%00 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (f"GET /v1/{run}/p/0-0/shard/{'9' * 4000} HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (f"GET /v1/{run}/p/٣-0/open HTTP/1.1\r\nHost: x\r\n\r\n", 400),
            (f"GET http://169.254.169.254/v1/{run}/head HTTP/1.1\r\nHost: x\r\n\r\n", 200),  # ours, not theirs
            (f"GET {shard} HTTP/1.1\r\nHost: x\r\nX-Long: {'a' * 100_000}\r\n\r\n", 400),
            (f"GET /{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n\r\n", 400),
            (f"GET {shard} HTTP/1.1\r\n" + "".join(f"X-{n}: {n}\r\n" for n in range(20_000)) + "\r\n", 400),
            (f"GET {shard} HTTP/9.9\r\nHost: x\r\n\r\n", 400),
            ("\x16\x03\x01 is no HTTP\r\n\r\n", 400),
        ):
            try:
                got, headers, body = await ask(origin.server.url, request.encode("utf-8"))
            except (ConnectionError, asyncio.IncompleteReadError):
                assert status == 400, request[:80]  # too much of it to be read to its end
                continue
            assert got == status, request[:80]
            if got != 200 and body:
                assert json.loads(body)["code"] in set(ReasonCode), request[:80]
                assert headers["cache-control"] == "no-store"
        assert (await ask(origin.server.url, f"GET {shard} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))[0] == 200


async def test_five_hundred_idle_sockets_of_strangers_hold_up_nobody(
    small: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    monkeypatch.setattr("shardcast.server.HEADER_DEADLINE_S", 2.0)
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        host, port = origin.server.url.removeprefix("http://").split(":")
        idle = [
            await asyncio.open_connection(host, int(port), local_addr=(f"127.0.0.{2 + n % 5}", 0)) for n in range(500)
        ]
        for number, (_, writer) in enumerate(idle):
            if number % 3 == 0:
                writer.write(b"GET /v1/ HTTP/1.1\r\nX-Slow: ")  # and never more
        async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):
            answer = await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/p/0-0/shard/0")
            assert (answer.status, len(await answer.read())) == (200, 4 * (64 * 32 + 32 * 32 + 32))
        for reader, writer in idle:
            async with asyncio.timeout(WAIT_S):
                try:
                    while await reader.read(1000):
                        pass
                except ConnectionError:
                    pass
            writer.close()


async def test_over_the_caps_a_connection_is_cut_and_its_place_is_free_again(
    small: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.gate.MAX_CONNECTIONS", 4)
    entered: list[CappedServer] = []
    real = CappedServer.enter
    monkeypatch.setattr(
        CappedServer, "enter", lambda self, who, transport: entered.append(self) or real(self, who, transport)
    )
    async with publishing(small) as origin:
        host, port = origin.server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(7)]
        await until(lambda: len(entered) >= 7, "the connections")
        assert entered[0].turned_away == 3
        for _, writer in held:
            writer.close()
        await until(lambda: not entered[0].open, "their ends")
        assert (await ask(origin.server.url, b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 404


async def test_a_shard_that_is_being_made_is_waited_for_and_one_that_never_comes_is_not(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    async with publishing(made) as origin, aiohttp.ClientSession() as session:
        base = f"{origin.server.url}/v1/{made.run.id.hex()}"
        write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0)
        await until(lambda: origin.store.newest(None) is not None, "its first shard")
        answer = await session.get(f"{base}/p/0-0/shard/2?wait=20000")  # the last one, asked ahead
        assert answer.status == 200
        feed = origin.store.feed((0, 0))
        assert feed is not None
        assert blake3(await answer.read()).digest() == feed.shards[2].wire_hash
        async with asyncio.timeout(5):
            assert (await session.get(f"{base}/p/0-0/shard/3?wait=20000")).status == 404


async def test_bytes_by_hash_may_be_kept_for_ever_and_everything_else_not_at_all(small: MadeRun) -> None:
    async with publishing(small) as origin, aiohttp.ClientSession() as session:
        await until(lambda: bool(origin.store.keys), "the publication")
        base = f"{origin.server.url}/v1/{small.run.id.hex()}"
        feed = origin.store.feed((0, 0))
        assert feed is not None
        name = feed.shards[0].wire_hash.hex()
        blob = small.run.manifest.model.files[0].digest.hex()
        for path, digest in ((f"wire/0-0/0/{name}", name), (f"blob/{blob}", blob)):
            answer = await session.get(f"{base}/{path}")
            assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
            assert answer.headers["ETag"] == f'"{digest}"'
            assert "X-Headwater-Stamp" not in answer.headers
            assert blake3(await answer.read()).hexdigest() == digest
        for path in ("head", "news", "stats", "p/0-0/open", "p/0-0/manifest", "p/0-0/records", "p/0-0/shard/0"):
            assert (await session.get(f"{base}/{path}")).headers["Cache-Control"] == "no-store", path
        for path in (f"wire/0-0/0/{'0' * 64}", f"wire/0-0/1/{name}", f"wire/0-1/0/{name}", "wire/0-0/0/", "wire"):
            answer = await session.get(f"{base}/{path}")
            assert (answer.status, answer.headers["Cache-Control"]) == (404, "no-store"), path
