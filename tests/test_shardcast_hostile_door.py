"""Strangers at the door of a weights server: places, files, memory and time that one of them can take from others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcast.gate import CappedServer, network_of
from shardcast.server import WeightsServer
from tests.shardcast_run import SMALL_SHAPES, WAIT_S, MadeRun, make_run, publishing, until, write_checkpoint
from tests.share_rig import tensors, write


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    return made


@contextlib.asynccontextmanager
async def serving(small: MadeRun) -> AsyncIterator[WeightsServer]:
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        yield origin.server


def door_of(server: WeightsServer) -> CappedServer:
    assert server._runner is not None
    door = server._runner.server
    assert isinstance(door, CappedServer)
    return door


async def connect(url: str, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), local_addr=(source, 0))


async def status(url: str, request: str, source: str = "127.0.0.1") -> int:
    """The status of the answer to one request; 0 when the connection is cut instead."""
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await connect(url, source)
            try:
                writer.write(request.encode())
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    except (ConnectionError, IndexError):
        return 0


async def test_a_full_house_makes_room_for_who_has_no_place(
    small: MadeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardcast.gate.MAX_CONNECTIONS", 12)
    path = f"/v1/{small.run.id.hex()}"
    async with serving(small) as server:
        held = []
        with caplog.at_level(logging.ERROR):
            for number in range(40):
                reader, writer = await connect(server.url, f"127.0.0.{2 + number % 3}")
                writer.write(f"GET {path}/news?after=0.9&wait=20000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                held.append((reader, writer))
            await until(lambda: door_of(server).turned_away >= 28, "the crowd's end")
            got = await asyncio.gather(
                *(status(server.url, f"GET {path}/p/0-0/shard/0 HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3))
            )
            assert got == [200, 200, 200], "who holds nothing is let in, and the crowd gives places up"
            assert door_of(server).open <= 12
            for _, writer in held:
                writer.close()
            await until(lambda: door_of(server).open == 0, "their ends")
        assert not caplog.records, "who is turned away writes nothing into anybody's log"


async def test_a_client_that_hangs_up_leaves_no_request_behind(small: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.server.MAX_WAIT_MS", 10**9)
    path = f"/v1/{small.run.id.hex()}"
    async with serving(small) as server:
        before = len(asyncio.all_tasks())
        for what in ("news?after=0.9", "head?after=0.9", "p/0-0/records?from=4"):
            waiting = [await connect(server.url, "127.0.0.1") for _ in range(20)]
            for _, writer in waiting:
                writer.write(f"GET {path}/{what}&wait=999999999 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await until(lambda: door_of(server).requests_count % 20 == 0, "the requests")
            for _, writer in waiting:
                writer.close()
        await until(lambda: len(asyncio.all_tasks()) <= before, "the end of every waiting request")


async def test_a_request_has_no_body(small: MadeRun) -> None:
    path = f"/v1/{small.run.id.hex()}/news?after=0.9&wait=20000"
    async with serving(small) as server:
        for lines in (
            "Content-Length: 99999999999\r\n\r\nx",
            "Transfer-Encoding: chunked\r\n\r\n1;" + "x" * 1000,
            "Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n5\r\nhello\r\n",
        ):
            assert await status(server.url, f"GET {path} HTTP/1.1\r\nHost: x\r\n{lines}") == 400, lines[:40]
        await until(lambda: door_of(server).open == 0, "their ends")


async def test_places_are_a_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_of("203.0.113.7") == "203.0.113.7"
    assert network_of("::ffff:203.0.113.7") == "203.0.113.7"
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2::9%eth0") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::4") != network_of("2001:db8:1:2::4")
    assert network_of("") == ""


def test_with_few_files_a_crowd_takes_none_from_the_shards(tmp_path: Path) -> None:
    """As on a system that lets a process open 96 files: connections stop where shards still can be opened."""
    write(tmp_path / "out" / "checkpoint-1", tensors(1))
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)); "
        "from shardcast.cli import main; sys.exit(main())"
    )
    held: list[socket.socket] = []
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", limited, "publish", str(tmp_path / "out"), "--json"], stdout=said, stderr=said
        )
    try:
        table = _told(process, tmp_path / "said")
        host, port = str(table["url"]).removeprefix("http://").split(":")
        for number in range(200):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, int(port)), WAIT_S, (f"127.0.0.{2 + number % 5}", 0)))
        path = f"/v1/{table['share']}/p/0-1/shard/0"
        for _ in range(3):
            with socket.create_connection((host, int(port)), WAIT_S, ("127.0.0.9", 0)) as asked:
                asked.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                assert asked.recv(64).split()[1] == b"200"
        assert process.poll() is None
    finally:
        for one in held:
            one.close()
        process.kill()
        process.wait(WAIT_S)
    assert "Too many open files" not in (tmp_path / "said").read_text()


def _told(process: subprocess.Popen[bytes], said: Path) -> dict[str, object]:
    """What a publishing process said first, once it has published something."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and process.poll() is None:
        lines = said.read_text().splitlines()
        if any('"published"' in line for line in lines):
            table: dict[str, object] = json.loads(next(line for line in lines if '"share"' in line))
            return table
        time.sleep(0.1)
    raise AssertionError(f"nothing was published: {said.read_text()}")
