"""The HTTP server of origin and relay: what it serves, to whom, and for how long it waits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import aiohttp
import pytest

from protocol.envelope import open_envelope
from protocol.limits import SHARD_BYTES
from shardcast.origin import Origin
from shardcast.records import CHALLENGE_KIND, Challenge
from shardcast.server import wall_clock_ms
from shardcast.source import Source, new_session
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", WIDE_SHAPES)


async def test_only_what_exists_is_served_and_everything_else_has_a_reason(small: MadeRun) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin, aiohttp.ClientSession() as session:
        await until(lambda: bool(origin.store.keys), "the publication")
        base = f"{origin.server.url}/v1/{small.run.id.hex()}"
        for path in ("head", "news", "p/0-0/open", "p/0-0/manifest", "p/0-0/records?from=2", "p/0-0/shard/0"):
            assert (await session.get(f"{base}/{path}")).status == 200, path
        assert (await session.get(f"{base}/head?after=0.0&wait=50")).status == 204
        for path in (
            "p/0-1/open",
            "p/0-0/shard/1",
            "p/0-0/shard/-1",
            "p/0-0/shard/999999999999",
            "p/00000000000000000000000-0/open",
            "p/../open",
            "blob/zz",
            f"blob/{'0' * 64}",
            "blob/..%2f..%2fmanifest.hw",
            "p/0-0/records?from=99",
            "nothing",
        ):
            response = await session.get(f"{base}/{path}")
            assert response.status == 404, path
            assert (await response.json())["code"]
        for path in ("head?after=x", "news?wait=-1", "p/0-0/records?from=1e9", "challenge?nonce=1"):
            assert (await session.get(f"{base}/{path}")).status == 400, path
        assert (await session.get(f"{origin.server.url}/v1/{'0' * 64}/head")).status == 404
        assert (await session.post(f"{base}/head", data=b"x")).status == 405


async def test_whoever_serves_proves_its_key(small: MadeRun, tmp_path: Path) -> None:
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "relay") as relay,
        new_session() as session,
    ):
        nonce = os.urandom(16)
        raw = await Source(session, relay.url, small.run.id).challenge(nonce)
        envelope = open_envelope(
            raw, run=small.run.id, kind=CHALLENGE_KIND, signer=relay.server._identity.public, now=wall_clock_ms()
        )
        assert envelope.record(Challenge).nonce == nonce


async def test_idle_and_dripping_connections_are_closed_and_do_not_block_others(
    small: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.server.HEADER_DEADLINE_S", 0.5)
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        host, port = origin.server.url.removeprefix("http://").split(":")
        idle = await asyncio.open_connection(host, int(port))
        dripping = await asyncio.open_connection(host, int(port))
        dripping[1].write(b"GET /v1/x HTTP/1.1\r\nHost: ")
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/head?wait=5000")).status == 200
        for reader, writer in (idle, dripping):
            async with asyncio.timeout(10):
                assert await reader.read(1) == b""
            writer.close()


@pytest.mark.parametrize("resource", ["p/0-0/shard/0", "news"])
async def test_a_receiver_below_the_minimum_rate_is_cut(
    wide: MadeRun, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    """Also of an answer from memory: unread ones would otherwise fill it, for as long as a stranger likes."""
    monkeypatch.setattr("shardcast.server.pack_frames", lambda frames: bytes(SHARD_BYTES))
    monkeypatch.setattr("shardcast.sending.HEADER_DEADLINE_S", 0.3)
    monkeypatch.setattr("shardcast.sending.MINIMUM_RATE_BYTES_S", 64 << 20)
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
    async with publishing(wide) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        host, port = origin.server.url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, (host, int(port)))
            path = f"/v1/{wide.run.id.hex()}/{resource}"
            await loop.sock_sendall(slow, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await asyncio.sleep(1.5)
            got = 0
            with pytest.raises((ConnectionResetError, BrokenPipeError, EOFError)):
                async with asyncio.timeout(10):
                    while True:
                        piece = await loop.sock_recv(slow, 1 << 20)
                        got += len(piece)
                        if not piece:
                            raise EOFError
            assert got < SHARD_BYTES


async def test_connections_of_one_address_are_capped(small: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.gate.MAX_CONNECTIONS_PER_ADDRESS", 3)
    async with publishing(small) as origin:
        host, port = origin.server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(5):
            with pytest.raises((ConnectionResetError, EOFError)):
                if await reader.read(1) == b"":
                    raise EOFError
        for _, other in [*held, (reader, writer)]:
            other.close()
        await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"{origin.server.url}/v1/{small.run.id.hex()}/head")).status == 204


async def test_byte_counters_survive_a_restart(small: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "a") as puller:
        await puller.wait_newer(None, WAIT_S)
        sent = origin.server.counters.bytes_sent
    stats = json.loads((small.directory / "published" / "stats.json").read_text())
    assert (stats["bytes_sent"], stats["bytes_full"]) == (sent, sent)
    origin = Origin(small.directory, identity=small.origin)
    assert origin.server.counters.bytes_sent == sent
    await origin.close()
