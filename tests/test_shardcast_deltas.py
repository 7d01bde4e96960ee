"""Patches from origin to puller over real relays: what is sent, who starts late, who skips, and who holds nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardcast.archive import open_published
from shardcast.codecs import Codec
from shardcast.errors import PublicationError
from shardcast.puller import Puller
from shardcast.store import read_publication
from tests.shardcast_run import (
    MadeRun,
    drifted,
    holds,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)

SHAPES = {"embed.weight": (2112, 1024), "norm.weight": (77,)}
"""Two shards, the second one short."""

SIZE = 4 * (2112 * 1024 + 77)


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SHAPES)


def step(made: MadeRun, number: int, epoch: int = 0) -> None:
    write_checkpoint(made.directory, epoch, number, SHAPES, 0, drifted(SHAPES, number))


async def has(puller: Puller, number: int, epoch: int = 0) -> bool:
    """Whether the puller comes to hold exactly this step."""
    key = (epoch, number)
    await until(lambda: puller.current is not None and puller.current.key >= key, f"step {number}")
    assert puller.current is not None and puller.current.key == key
    return holds(puller.current, SHAPES, 0, drifted(SHAPES, number))


@pytest.mark.parametrize("codec", [Codec.GAPS, Codec.CLASSES])
async def test_a_step_travels_as_a_patch_and_arrives_bit_for_bit(wide: MadeRun, tmp_path: Path, codec: Codec) -> None:
    async with (
        publishing(wide, codec=codec) as origin,
        relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
        pulling(wide, [relay.url], tmp_path / "a") as puller,
    ):
        step(wide, 0)
        assert await has(puller, 0)
        first = puller.bytes_received
        assert 0.7 * SIZE < first < SIZE, "an anchor"
        for number in (1, 2):
            step(wide, number)
            assert await has(puller, number)
        assert puller.bytes_received - first < 0.1 * SIZE, "two patches"
        assert relay.server.counters.bytes_sent < 0.5 * relay.server.counters.bytes_full
    publication = read_publication(wide.directory / "published" / "e0000-s00000002", wide.run)
    assert publication.open.codec == codec and publication.head is not None and publication.head.anchor == 0
    archive = open_published(wide.directory, wide.run)
    assert list(archive.problems()) == []
    for number in (2, 0, 1):
        assert holds(archive.materialise(0, number, tmp_path / "out"), SHAPES, 0, drifted(SHAPES, number))


async def test_a_joiner_and_one_that_skipped_steps_fetch_no_frame_in_between(wide: MadeRun, tmp_path: Path) -> None:
    async with (
        publishing(wide, codec=Codec.GAPS) as origin,
        relaying(wide, [origin.server.url], tmp_path / "relay", keep=8) as relay,
    ):
        step(wide, 0)
        async with pulling(wide, [relay.url], tmp_path / "away") as puller:
            assert await has(puller, 0)
        for number in range(1, 6):
            step(wide, number)
            await until(lambda number=number: relay.store.keys[-1:] == [(0, number)], "the relay's step")
        async with pulling(wide, [relay.url], tmp_path / "away") as back:
            assert await has(back, 5)
            assert back.bytes_received < 0.12 * SIZE, "one joined patch"
        async with pulling(wide, [relay.url], tmp_path / "new") as joiner:
            assert await has(joiner, 5)
            assert joiner.bytes_received < SIZE, "one anchor, made by the relay"
        assert origin.server.counters.bytes_sent < 1.2 * SIZE, "nobody but the relay asked the origin"


async def test_a_relay_that_joins_late_serves_patches_and_states(wide: MadeRun, tmp_path: Path) -> None:
    async with publishing(wide, codec=Codec.GAPS) as origin:
        for number in range(3):
            step(wide, number)
            await until(lambda number=number: origin.store.keys[-1:] == [(0, number)], "the origin's step")
        async with (
            relaying(wide, [origin.server.url], tmp_path / "relay", keep=2) as relay,
            pulling(wide, [relay.url], tmp_path / "a") as puller,
        ):
            assert await has(puller, 2)
            for number in range(3, 8):
                step(wide, number)
                assert await has(puller, number)
            async with pulling(wide, [relay.url], tmp_path / "b") as joiner:
                assert await has(joiner, 7)
            held = list((tmp_path / "relay" / "states").iterdir())
            assert len(held) == 2, "one state of two shards; the others follow from frames"
        async with (
            relaying(wide, [origin.server.url], tmp_path / "relay", keep=2) as relay,
            pulling(wide, [relay.url], tmp_path / "c") as joiner,
        ):
            assert await has(joiner, 7), "states are found again after a restart"


async def test_the_first_step_of_an_epoch_and_of_a_restarted_origin(wide: MadeRun, tmp_path: Path) -> None:
    async with publishing(wide, codec=Codec.GAPS) as origin, pulling(wide, [origin.server.url], tmp_path / "a") as one:
        step(wide, 0)
        assert await has(one, 0)
    async with publishing(wide, codec=Codec.GAPS) as origin, pulling(wide, [origin.server.url], tmp_path / "a") as one:
        step(wide, 1)
        assert await has(one, 1)
        step(wide, 0, epoch=1)
        assert await has(one, 0, epoch=1)
    published = wide.directory / "published"
    kinds = {p.name: read_publication(p, wide.run).open.codec for p in sorted(published.glob("e*"))}
    assert kinds == {
        "e0000-s00000000": Codec.ANCHOR,
        "e0000-s00000001": Codec.GAPS,
        "e0001-s00000000": Codec.ANCHOR,
    }


async def test_an_origin_keeps_states_so_that_no_chain_grows_long(
    wide: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that lost its checkpoints serves joiners, and the archive is decoded from the state that was kept."""
    monkeypatch.setattr("shardcast.origin.KEEP_STATE_EVERY", 3)
    async with publishing(wide, codec=Codec.GAPS) as origin:
        for number in range(6):
            step(wide, number)
            await until(lambda number=number: origin.store.keys[-1:] == [(0, number)], "the origin's step")
    published = wide.directory / "published"
    kept = sorted(path.parent.name for path in published.glob("*/state-000000.bin"))
    assert kept == ["e0000-s00000003"]
    shutil.rmtree(wide.directory / "checkpoints")
    (wide.directory / "checkpoints").mkdir()
    for number in (0, 1, 2):
        (published / f"e0000-s0000000{number}" / "shard-000000.bin").write_bytes(b"damaged")
    async with publishing(wide, codec=Codec.GAPS) as origin, pulling(wide, [origin.server.url], tmp_path / "a") as one:
        assert await has(one, 5)
    archive = open_published(wide.directory, wide.run)
    assert len(list(archive.problems())) == 3, "what rests on them is not named again"
    assert holds(archive.materialise(0, 4, tmp_path / "out"), SHAPES, 0, drifted(SHAPES, 4))
    state = published / "e0000-s00000003" / "state-000001.bin"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    archive = open_published(wide.directory, wide.run)
    assert "published/e0000-s00000003/state-000001.bin" in [problem.record for problem in archive.problems()]
    with pytest.raises(PublicationError, match="state-000001"):
        archive.materialise(0, 5, tmp_path / "out")
