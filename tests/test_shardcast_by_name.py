"""A step that is asked for by name: by a lease that names it, or a relay that skipped it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ReasonCode, TransportError
from shardcast.errors import SourceError
from shardcast.layout import root_of_safetensors
from shardcast.publication import pack_frames, split_frames
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    MadeRun,
    holds,
    lying,
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


@pytest.mark.parametrize("kept_back", ["head", "manifest"])
async def test_a_source_that_keeps_ends_back_neither_ends_a_relay_nor_holds_it_back(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_back: str
) -> None:
    """A step that is asked for by name: one parent leaves out its head, or sends the open record and then nothing."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)

    def change(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if not path.startswith("p/0-1/records") or status != 200:
            return status, body
        if kept_back == "head":
            return 200, pack_frames(split_frames(body)[:-1])
        return (200, pack_frames(split_frames(body)[:1])) if "from=0" in path else (204, b"")

    folders = [write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step) for step in range(3)]
    async with publishing(small) as origin:
        await until(lambda: (0, 2) in origin.store.keys, "three publications")
        async with (
            lying(origin.server.url, change) as liar,
            relaying(small, [liar, origin.server.url], tmp_path / "relay") as relay,
            pulling(small, [relay.url], tmp_path / "child") as child,
        ):
            await child.wait_newer((0, 1), WAIT_S)
            policy = await child.fetch(0, 1, root_of_safetensors(folders[1] / "model.safetensors"), WAIT_S)
            assert holds(policy, SMALL_SHAPES, seed=1)
            await until(lambda: (0, 1) in relay.store.keys, "the step at the relay")
            relay._follower.check()
            assert kept_back == "head" or liar in relay.problems


async def test_a_policy_that_was_let_go_can_be_asked_for_again(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.puller.GRACE_S", 0.0)
    roots = []
    for step in range(3):
        folder = write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
        roots.append(root_of_safetensors(folder / "model.safetensors"))
    async with (
        publishing(small) as origin,
        pulling(small, [origin.server.url], tmp_path / "node", keep=2) as puller,
    ):
        await puller.wait_newer((0, 1), WAIT_S)
        for step in (0, 1, 0, 1):
            assert holds(await puller.fetch(0, step, roots[step], WAIT_S), SMALL_SHAPES, seed=step)


async def test_a_step_that_every_source_has_removed_is_refused_long_before_its_deadline(
    small: MadeRun, tmp_path: Path
) -> None:
    """A node that comes back is sent its old lease again: it must hand that back, not sit on it until it expires."""
    steps = 12
    folders = [write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step) for step in range(steps)]
    root = root_of_safetensors(folders[0] / "model.safetensors")
    async with publishing(small) as origin:
        await until(lambda: (0, steps - 1) in origin.store.keys, "all publications")
        async with (
            relaying(small, [origin.server.url], tmp_path / "relay", keep=2) as relay,
            pulling(small, [relay.url], tmp_path / "node") as node,
        ):
            await node.wait_newer((0, steps - 2), WAIT_S)
            with pytest.raises(SourceError, match="e0000-s00000000 is held nowhere any more; the newest is") as refused:
                await node.fetch(0, 0, root, WAIT_S)
            assert refused.value.code == ReasonCode.RECORD_MISSING
            # what only this relay does not have yet is waited for as before
            with pytest.raises(TransportError, match="did not arrive within 4 s"):
                await node.fetch(0, steps, bytes(32), 4)
