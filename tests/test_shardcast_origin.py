"""The origin: each whole checkpoint once, in order, and never anything else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from protocol.envelope import open_envelope
from protocol.errors import UsageError
from protocol.identity import Identity
from shardcast.errors import LayoutError, PublishError
from shardcast.layout import root_of_safetensors
from shardcast.origin import Origin, read_checkpoint
from shardcast.publication import split_frames
from shardcast.records import Head, ShardRecord
from shardcast.server import wall_clock_ms
from shardcast.store import published_heads, read_publication
from shardcast.watch import FolderWatch
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    MadeRun,
    holds,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    weights,
    write_checkpoint,
)


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


def write_raw(directory: Path, step: int, order: list[str], seed: int) -> None:
    """A checkpoint whose tensors lie in the file in this order."""
    tensors, table, data = weights(SMALL_SHAPES, seed), {}, b""
    for name in order:
        end = len(data) + tensors[name].nbytes
        table[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [len(data), end]}
        data += tensors[name].tobytes()
    text = json.dumps(table).encode()
    file = struct.pack("<Q", len(text)) + text + data
    folder = directory / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(file)
    entry = {"size": len(file), "blake3": blake3(file).hexdigest()}
    (folder / "checkpoint.json").write_text(
        json.dumps({"epoch": 0, "step": step, "files": {"model.safetensors": entry}})
    )


async def test_a_half_written_checkpoint_is_not_published(small: MadeRun, tmp_path: Path) -> None:
    folder = write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    text = (folder / "checkpoint.json").read_text()
    (folder / "checkpoint.json").unlink()
    origin = Origin(small.directory, identity=small.origin)
    assert await origin.publish_ready() == 0
    (folder / "checkpoint.json").write_text(text)
    assert await origin.publish_ready() == 1
    assert await origin.publish_ready() == 0
    await origin.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch": 0, "step": 0, "files": {"model.safetensors": 3}}'])
async def test_a_malformed_checkpoint_json_is_refused(small: MadeRun, text: str) -> None:
    folder = write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    (folder / "checkpoint.json").write_text(text)
    origin = Origin(small.directory, identity=small.origin)
    with pytest.raises(PublishError, match=r"checkpoint\.json"):
        await origin.publish_ready()
    await origin.close()


async def test_weights_that_are_not_the_ones_named_are_never_announced(small: MadeRun) -> None:
    folder = write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    origin = Origin(small.directory, identity=small.origin)
    with pytest.raises(PublishError, match="changed or damaged"):
        await origin.publish_ready()
    assert origin.store.keys == []
    assert origin.store.head is None
    await origin.close()


async def test_weights_of_another_shape_are_refused(small: MadeRun) -> None:
    write_checkpoint(small.directory, 0, 0, {**SMALL_SHAPES, "norm.weight": (33,)}, seed=0)
    origin = Origin(small.directory, identity=small.origin)
    with pytest.raises(LayoutError):
        await origin.publish_ready()
    await origin.close()


async def test_steps_are_published_in_order_and_once_across_restarts(small: MadeRun) -> None:
    for step in (2, 0, 1):
        write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
    origin = Origin(small.directory, identity=small.origin)
    assert await origin.publish_ready() == 3
    first = published_heads(origin.store.root, small.run)
    await origin.close()
    assert [head.step for _, head in first] == [0, 1, 2]
    issued = [open_envelope(raw, run=small.run.id).sequence for raw, _ in first]
    assert issued == sorted(issued)

    write_checkpoint(small.directory, 0, 3, SMALL_SHAPES, seed=3)
    write_checkpoint(small.directory, 1, 2, SMALL_SHAPES, seed=7)  # a new epoch repeats a step
    origin = Origin(small.directory, identity=small.origin)
    assert await origin.publish_ready() == 2
    heads = published_heads(origin.store.root, small.run)
    assert heads[:3] == first, "what was published stays as it was"
    assert [(head.epoch, head.step) for _, head in heads] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    assert [(head.epoch, head.step) for _, head in published_heads(origin.store.root, small.run, (0, 3))] == [(1, 2)]
    await origin.close()


async def test_another_root_at_a_published_step_is_refused(small: MadeRun) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    origin = Origin(small.directory, identity=small.origin)
    await origin.publish_ready()
    head = origin.store.head
    await origin.close()
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=5)
    origin = Origin(small.directory, identity=small.origin)
    with pytest.raises(PublishError, match="new epoch"):
        await origin.publish_ready()
    assert origin.store.head == head
    await origin.close()


async def test_a_crash_before_the_head_leaves_nothing_and_the_step_gets_a_new_publication(
    small: MadeRun, tmp_path: Path
) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    origin = Origin(small.directory, identity=small.origin)
    await origin.publish_ready()
    folder = origin.store.folder((0, 0))
    before = (folder / "publication.hw").read_bytes()
    (folder / "publication.hw").unlink()  # the last thing written
    await origin.close()
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "a") as puller:
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        assert split_frames((folder / "publication.hw").read_bytes())[0] != split_frames(before)[0]


async def test_a_crash_between_a_publication_and_its_head_file_is_made_good(small: MadeRun) -> None:
    """The coordinator reads HEAD.hw: without it the run would wait for a policy that is there."""
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    origin = Origin(small.directory, identity=small.origin)
    await origin.publish_ready()
    (origin.store.root / "HEAD.hw").unlink()
    await origin.close()
    async with publishing(small) as origin:
        assert (origin.store.root / "HEAD.hw").read_bytes() == origin.store.head


async def test_a_second_publisher_is_refused_and_told_who_holds_the_run(small: MadeRun) -> None:
    origin = Origin(small.directory, identity=small.origin)
    with pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        Origin(small.directory, identity=small.origin)
    await origin.close()
    with pytest.raises(UsageError, match="origin key"):
        Origin(small.directory, identity=Identity.generate())


async def test_a_port_in_use_is_one_clear_message(small: MadeRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        origin = Origin(small.directory, identity=small.origin, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UsageError, match="another port"):
            await origin.start()
        await origin.close()


async def test_the_head_is_signed_again_before_it_goes_stale_and_relays_pass_it_on(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    now = [wall_clock_ms()]
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    origin = Origin(small.directory, identity=small.origin, clock_ms=lambda: now[0])
    await origin.start()
    task = asyncio.create_task(origin.run_forever())
    async with relaying(small, [origin.server.url], tmp_path / "relay") as relay:
        relay._follower._clock_ms = lambda: now[0]
        await until(lambda: relay.store.head is not None, "the head at the relay")
        first = relay.store.head
        now[0] += 2_000_000
        await until(lambda: relay.store.head != first, "the newer signature at the relay")
        head = open_envelope(relay.store.head or b"", run=small.run.id, signer=small.origin.public)
        assert head.record(Head) == open_envelope(first or b"", run=small.run.id).record(Head)
        assert head.issued_at == now[0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await origin.close()


async def test_a_small_file_in_any_order_of_tensors_is_published_as_what_it_is(small: MadeRun) -> None:
    """A small file is read once, as a whole; its tensors may lie in it in any order."""
    origin = Origin(small.directory, identity=small.origin)
    for step, order in enumerate((sorted(SMALL_SHAPES), sorted(SMALL_SHAPES, reverse=True))):
        write_raw(small.directory, step, order, seed=step)
        assert await origin.publish_ready() == 1
        path = small.directory / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        publication = read_publication(origin.store.folder((0, step)), small.run)
        assert publication.manifest is not None and publication.manifest.root == root_of_safetensors(path)
    await origin.close()


async def test_a_publication_that_is_cancelled_leaves_nothing_and_is_made_anew(
    small: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Origin(small.directory, identity=small.origin)
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    checkpoint = read_checkpoint(small.directory / "checkpoints" / "step-00000000")
    assert checkpoint is not None
    storing, go_on, store = threading.Event(), threading.Event(), origin._store_shard

    def held(*args: Any) -> ShardRecord:
        storing.set()
        assert go_on.wait(WAIT_S)
        return store(*args)

    monkeypatch.setattr(origin, "_store_shard", held)
    task = asyncio.create_task(origin.publish(checkpoint))
    await until(storing.is_set, "the shard")
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done(), "the thread still writes"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert origin.store.keys == [] and not origin.store.folder((0, 0)).exists()
    await origin.publish(checkpoint)
    assert origin.store.keys == [(0, 0)]
    await origin.close()


async def test_hidden_names_wake_nobody(tmp_path: Path) -> None:
    """A learner writes checkpoints under hidden names first: each would be looked for in vain."""
    watch = FolderWatch()
    if not watch.works:
        pytest.skip("no inotify here")
    watch.add(tmp_path, looks_after=True)
    (tmp_path / ".step.part").mkdir()
    (tmp_path / ".file").write_bytes(b"x")
    assert not await watch.wait(0.3)
    (tmp_path / ".step.part").rename(tmp_path / "step")
    assert await watch.wait(WAIT_S)
    (tmp_path / "file").write_bytes(b"x")
    assert await watch.wait(WAIT_S)
    watch.close()
