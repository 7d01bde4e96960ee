"""Patches and states from those who lie: nothing wrong becomes visible, and the guilty one is named."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import aiohttp
import pytest
import zstandard

import shardcast.origin
from protocol.errors import ReasonCode
from shardcast.archive import open_published
from shardcast.codecs import Codec
from shardcast.encoding import wire_bytes
from shardcast.limits import WIRE_SLACK_BYTES
from tests.shardcast_run import (
    MadeRun,
    drifted,
    holds,
    lying,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)

SHAPES = {"embed.weight": (2112, 1024)}
"""Two shards, the second one short."""


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SHAPES)


def step(made: MadeRun, number: int) -> None:
    write_checkpoint(made.directory, 0, number, SHAPES, 0, drifted(SHAPES, number))


def bomb(declared: bool) -> bytes:
    """An anchor's frame whose first plane is a gigabyte of zeros, with or without saying so."""
    params = zstandard.ZstdCompressionParameters.from_level(3, write_content_size=declared)
    work = zstandard.ZstdCompressor(compression_params=params).compressobj(size=1 << 30 if declared else -1)
    piece = bytes(1 << 20)
    body = b"".join([work.compress(piece) for _ in range(1 << 10)] + [work.flush()])
    return b"\x01" + struct.pack(">I", len(body) | 1 << 31) + body


@pytest.mark.parametrize("lie", ["other shard", "no frame", "other codec"])
async def test_an_origin_that_signs_a_frame_of_something_else_is_named(
    wide: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Its wire hash matches, so no relay is charged: the publication is refused, the next one is taken."""
    wrong = {"no frame": b"\x02\x09", "other codec": b"\x09"}

    def lies(codec, old, new, segments):  # type: ignore[no-untyped-def]
        frame = wire_bytes(codec, old, new, segments)
        if len(new) == 8 << 20 and codec is Codec.GAPS:
            return wrong.get(lie) or wire_bytes(codec, old, new[:-1] + bytes([new[-1] ^ 1]), segments)
        return frame

    async with (
        publishing(wide, codec=Codec.GAPS) as origin,
        relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
        pulling(wide, [relay.url], tmp_path / "a") as puller,
    ):
        step(wide, 0)
        await until(lambda: puller.current is not None, "the first step")
        monkeypatch.setattr(shardcast.origin, "wire_bytes", lies)
        step(wide, 1)
        await until(lambda: origin.store.keys[-1:] == [(0, 1)], "the lie")
        if lie != "other codec":  # which a relay sees, too
            await until(lambda: relay.store.keys[-1:] == [(0, 1)], "the relay passes on what was signed")
        monkeypatch.setattr(shardcast.origin, "wire_bytes", wire_bytes)
        await asyncio.sleep(0.5)
        assert puller.current is not None and puller.current.key == (0, 0)
        origin._open.close()  # a base that nobody can use: the next one is an anchor
        step(wide, 2)
        await until(lambda: puller.current is not None and puller.current.key == (0, 2), "the honest step")
        assert holds(puller.current, SHAPES, 0, drifted(SHAPES, 2))
        assert all(error.code != ReasonCode.SHARD_MISMATCH for error in puller.problems.values())
    problems = list(open_published(wide.directory, wide.run).problems())
    assert [problem.record for problem in problems] == ["published/e0000-s00000001/shard-000000.bin"]
    assert "the origin signed" in problems[0].message


@pytest.mark.parametrize("lie", ["other bytes", "empty", "long", "bomb", "undeclared bomb", "patch to nothing"])
async def test_a_server_that_makes_wrong_states_is_charged_and_the_pull_ends_elsewhere(
    wide: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    bodies = {
        "empty": b"",
        "long": bytes((8 << 20) + WIRE_SLACK_BYTES + 1),
        "bomb": bomb(True) if "bomb" in lie else b"",
        "undeclared bomb": bomb(False) if "bomb" in lie else b"",
        "patch to nothing": b"\x02\x00",
    }
    told: list[str] = []

    def change(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if "/state/" not in path:
            return status, body
        told.append(path)
        return 200, bodies[lie] if lie in bodies else body[:-1] + bytes([body[-1] ^ 1])

    async with publishing(wide, codec=Codec.GAPS) as origin:
        for number in range(3):
            step(wide, number)
            await until(lambda number=number: origin.store.keys[-1:] == [(0, number)], "the origin's step")
        async with (
            lying(origin.server.url, change) as liar,
            pulling(wide, [liar, origin.server.url], tmp_path / "a") as puller,
        ):
            await until(lambda: puller.current is not None, "the policy")
            assert puller.current is not None and holds(puller.current, SHAPES, 0, drifted(SHAPES, 2))
            charged = [record.getMessage() for record in caplog.records if record.name == "shardcast.download"]
            assert told and all(liar in message for message in charged)
            assert charged or lie == "long", "a long answer may be overtaken"


async def test_states_are_answered_truthfully(wide: MadeRun) -> None:
    """What can't be made is not here, what is no hash is no question, and an unknown shard gets what needs none."""
    async with publishing(wide, codec=Codec.GAPS) as origin, aiohttp.ClientSession() as session:
        for number in range(2):
            step(wide, number)
            await until(lambda number=number: origin.store.keys[-1:] == [(0, number)], "the origin's step")
        base = f"{origin.server.url}/v1/{wide.run.id.hex()}/p/0-1"

        async def ask(path: str) -> tuple[int, bytes]:
            async with session.get(f"{base}/{path}") as response:
                return response.status, await response.read()

        feed = origin.store.feed((0, 1))
        assert feed is not None
        assert (await ask("state/2"))[0] == 404 and (await ask("state/x"))[0] == 404
        assert (await ask("state/0?old=..%2f"))[0] == 400 and (await ask(f"state/0?old={'g' * 64}"))[0] == 400
        status, anchor = await ask(f"state/0?old={'7' * 64}")
        assert status == 200 and anchor[0] == Codec.ANCHOR
        status, patch = await ask(f"state/0?old={feed.shards[0].old_hash.hex()}")
        assert status == 200 and patch[0] == Codec.GAPS and len(patch) < 0.1 * len(anchor)
        status, same = await ask(f"state/0?old={feed.shards[0].new_hash.hex()}")
        assert status == 200 and same == b"\x02\x00"
