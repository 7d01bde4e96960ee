"""Checkpoints are whole or not there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from shardcast.layout import open_safetensors
from trainer import checkpoints
from trainer.checkpoints import CheckpointError, find_checkpoints, newest_resumable, write_checkpoint

WEIGHTS = {"b.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
OPTIMIZER = {"exp_avg.a.bias": torch.zeros(2), "step.a.bias": torch.tensor(3.0)}


def _make(root: Path, steps: int, every: int = 2) -> None:
    for step in range(steps):
        own = step % every == 0
        write_checkpoint(
            root,
            epoch=0,
            step=step,
            weights={name: tensor + step for name, tensor in WEIGHTS.items()},
            optimizer=OPTIMIZER if own else None,
            state={"step": step} if own else None,
        )


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    _make(tmp_path, 3)
    said: list[str] = []
    found = find_checkpoints(tmp_path, said.append)
    assert [c.step for c in found] == [0, 1, 2]
    assert [c.resumable for c in found] == [True, False, True]
    newest = newest_resumable(found, said.append)
    assert newest is not None
    assert newest.step == 2
    loaded = checkpoints.load_tensors(newest, checkpoints.WEIGHTS)
    assert sorted(loaded) == ["a.bias", "b.weight"]
    assert torch.equal(loaded["b.weight"], WEIGHTS["b.weight"] + 2)
    assert checkpoints.load_state(newest) == {"step": 2}
    assert said == []


def test_weights_lie_in_the_file_in_canonical_order(tmp_path: Path) -> None:
    mixed = {"z": torch.ones(3, dtype=torch.float32), "a": torch.ones(5, dtype=torch.bfloat16), "b": torch.ones(2)}
    checkpoint = write_checkpoint(tmp_path, epoch=0, step=0, weights=mixed)
    canonical = open_safetensors(checkpoint.directory / checkpoints.WEIGHTS)
    assert [t.name for t in canonical.layout.tensors] == ["b", "z", "a"]
    assert len(canonical.segments) == 1


def test_half_written_ones_are_ignored_by_name_and_leftovers_removed(tmp_path: Path) -> None:
    _make(tmp_path, 4)
    (tmp_path / "step-00000003" / "checkpoint.json").unlink()
    weights = tmp_path / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000004.abc.part")
    said: list[str] = []
    found = find_checkpoints(tmp_path, said.append)
    assert [c.step for c in found] == [0, 1]
    assert any("step-00000003" in line and "half-written (checkpoint.json is missing)" in line for line in said)
    assert any("step-00000002" in line and "half-written" in line for line in said)
    assert any(".part" in line and "removing" in line for line in said)
    assert not (tmp_path / ".step-00000004.abc.part").exists()
    # Writing such a step again replaces what lies there.
    write_checkpoint(tmp_path, epoch=0, step=3, weights=WEIGHTS)
    assert [c.step for c in find_checkpoints(tmp_path, said.append)] == [0, 1, 3]


def test_any_flipped_bit_means_going_on_from_an_older_one(tmp_path: Path) -> None:
    _make(tmp_path, 5)
    rng = random.Random(3)
    for name in (checkpoints.WEIGHTS, checkpoints.OPTIMIZER, checkpoints.STATE):
        path = tmp_path / "step-00000004" / name
        good = path.read_bytes()
        for _ in range(5):
            raw = bytearray(good)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
            said: list[str] = []
            chosen = newest_resumable(find_checkpoints(tmp_path, said.append), said.append)
            assert chosen is not None
            assert chosen.step == 2
            assert any("step-00000004" in line for line in said)
        path.write_bytes(good)
    for step in (0, 2, 4):
        (tmp_path / f"step-{step:08d}" / checkpoints.OPTIMIZER).write_bytes(b"")
    with pytest.raises(CheckpointError, match="backup"):
        newest_resumable(find_checkpoints(tmp_path, lambda _: None), lambda _: None)


def test_pruning_keeps_the_newest_and_the_one_to_resume_from(tmp_path: Path) -> None:
    _make(tmp_path, 12, every=5)
    found = find_checkpoints(tmp_path, lambda _: None)
    kept = checkpoints.prune(found, 4)
    assert [c.step for c in kept] == [8, 9, 10, 11]
    assert [c.step for c in checkpoints.prune(kept, 1)] == [9, 10, 11], "never fewer than three"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009", "step-00000010", "step-00000011"]
    shutil.rmtree(tmp_path)
    _make(tmp_path, 9, every=5)
    kept = checkpoints.prune(find_checkpoints(tmp_path, lambda _: None), 3)
    assert [c.step for c in kept] == [5, 6, 7, 8]


def test_a_full_disk_leaves_no_checkpoint_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, epoch=0, step=0, weights=WEIGHTS)
    assert list(tmp_path.iterdir()) == []
