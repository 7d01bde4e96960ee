"""Children that ask for what costs their server much more than the question: it is made once, or not at all."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import aiohttp
import pytest

from shardcast.codecs import Codec
from shardcast.retention import to_remove
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    MadeRun,
    drifted,
    lying,
    make_run,
    publishing,
    relaying,
    until,
    write_checkpoint,
)

SHAPES = {"embed.weight": (512, 1024)}


async def test_states_of_hashes_that_strangers_invent_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run(tmp_path / "run", SHAPES)
    async with publishing(made, codec=Codec.GAPS) as origin, aiohttp.ClientSession() as session:
        for number in range(2):
            write_checkpoint(made.directory, 0, number, SHAPES, 0, drifted(SHAPES, number))
            await until(lambda number=number: origin.store.keys[-1:] == [(0, number)], "the step")
        base = f"{origin.server.url}/v1/{made.run.id.hex()}/p/0-1/state/0"

        async def ask(query: str) -> tuple[int, bytes]:
            async with session.get(base + query) as response:
                return response.status, await response.read()

        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*(ask(f"?old={secrets.token_hex(32)}") for _ in range(90)))
            alone = await ask("")
        assert alone[0] == 200 and set(answers) == {alone}, "nobody is turned away, and all get what needs nothing"
        assert len(list((made.directory / "published" / "made").iterdir())) == 1
        feed = origin.store.feed((0, 1))
        assert feed is not None
        status, patch = await ask(f"?old={feed.shards[0].old_hash.hex()}")
        assert status == 200 and patch[0] == Codec.GAPS, "a hash that leads there still gets its patch"


async def test_a_child_cannot_make_a_relay_ask_for_everything(tmp_path: Path) -> None:
    """A relay that keeps by bytes takes no publication for too old: it could be asked for millions that never were."""
    made: MadeRun = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 100_000, SMALL_SHAPES, seed=0)
    asked: set[str] = set()

    def count(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if path.startswith("p/") and "/records" in path and not path.startswith("p/0-100000/"):
            asked.add(path)
        return status, body

    async with (
        publishing(made) as origin,
        lying(origin.server.url, count) as parent,
        relaying(made, [parent], tmp_path / "relay", keep=1 << 30) as relay,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=200)) as session,
    ):
        await until(lambda: relay.store.keys == [(0, 100_000)], "the newest")
        base = f"{relay.server.url}/v1/{made.run.id.hex()}"

        async def ask(step: int) -> int:
            async with session.get(f"{base}/p/0-{step}/records?from=0") as response:
                return response.status

        async with asyncio.timeout(WAIT_S):
            assert set(await asyncio.gather(*(ask(step) for step in range(150)))) == {404}
        assert 1 <= len(asked) <= 32


def test_strangers_who_touch_everything_keep_twice_the_limit_and_no_more() -> None:
    sizes = {(0, step): 10 for step in range(9)}
    assert to_remove(sizes, 20, (), lambda key: True) == [(0, step) for step in range(5)]
    assert to_remove(dict.fromkeys(list(sizes)[:4], 10), 20, (), lambda key: True) == []
