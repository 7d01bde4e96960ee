"""Checkpoints of the learner: whole or not there, and found again after a kill.

    checkpoints/step-00000012/
        model.safetensors       weights in storage dtypes, canonical order: what is published
        optimizer.safetensors   every `checkpoint_every` steps: moments, step counts, and full-precision weights when
        trainer_state.json      the storage dtype rounds them
        checkpoint.json         written last: epoch, step, and size and BLAKE3 of each file above

A checkpoint is written into a hidden folder beside its place, fsynced, and renamed. Whatever lies in `checkpoints/`
without a `checkpoint.json` that fits its files is not a checkpoint: it is named in the log and never loaded.

Not covered: publishing (`shardcast.origin`), which steps to take (`trainer.learner`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file

from protocol.errors import ReasonCode
from protocol.files import fsync_dir
from protocol.limits import MIB
from shardcast.layout import Layout, TensorSpec, safetensors_header
from trainer.errors import TrainerError

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
RECORD = "checkpoint.json"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What weights may be stored as, by safetensors' names."""

KEEP_AT_LEAST = 3
"""Never fewer: a batch closes up to two steps after the oldest policy that the origin may still have to publish."""


class CheckpointError(TrainerError):
    """A checkpoint that does not hold, or none to go on from."""

    code = ReasonCode.HASH_MISMATCH


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. files: name -> (size in bytes, BLAKE3 in hex)."""

    directory: Path
    epoch: int
    step: int
    files: Mapping[str, tuple[int, str]]

    @property
    def resumable(self) -> bool:
        """Whether the optimiser's state is in it."""
        return OPTIMIZER in self.files and STATE in self.files


def write_checkpoint(
    root: Path,
    *,
    epoch: int,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Write one checkpoint; when this returns it is durable.

    Args:
        root: RUN/checkpoints.
        weights: tensors in storage dtypes, as they will be published.
        optimizer, state: given together, or neither.

    Raises:
        OSError: the disk is full or not writable; no checkpoint of this step is there then.
    """
    root.mkdir(parents=True, exist_ok=True)
    place = root / f"step-{step:08d}"
    aside = root / f".step-{step:08d}.{uuid.uuid4().hex}.part"
    aside.mkdir()
    try:
        files = {WEIGHTS: _write_tensors(aside / WEIGHTS, weights)}
        if optimizer is not None and state is not None:
            files[OPTIMIZER] = _write_tensors(aside / OPTIMIZER, optimizer)
            files[STATE] = _write(aside / STATE, [json.dumps(state, indent=1).encode()])
        table = {name: {"size": size, "blake3": digest} for name, (size, digest) in files.items()}
        record = {"epoch": epoch, "step": step, "files": table}
        _write(aside / RECORD, [json.dumps(record, indent=1).encode()])
        fsync_dir(aside)
        if place.exists():
            # Only something that is no whole checkpoint can lie here (the learner never writes a step twice).
            shutil.rmtree(place)
        aside.rename(place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_dir(root)
    return Checkpoint(place, epoch, step, files)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """A safetensors file in the canonical order of `shardcast.layout`: largest items first, then by name."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    specs, offset = [], 0
    for name in names:
        tensor = tensors[name]
        specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), offset, tensor.nbytes))
        offset += tensor.nbytes
    flat = (tensors[name].detach().contiguous().reshape(-1).view(torch.uint8) for name in names)
    return _write(path, itertools.chain([safetensors_header(Layout(tuple(specs)))], (one.numpy().data for one in flat)))


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Make the file durable; its size and BLAKE3 are taken on the way. Its folder gets its name only when whole."""
    digest = blake3()
    with path.open("xb", buffering=MIB) as out:
        for part in parts:
            out.write(part)
            digest.update(part)
        out.flush()
        os.fsync(out.fileno())
        return out.tell(), digest.hexdigest()


def find_checkpoints(root: Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first, told from record and file sizes.

    Args:
        say: told once about each thing that is not a checkpoint, and about what a kill left and is removed.
    """
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".step-") and path.name.endswith(".part"):
            say(f"removing {path}: a checkpoint that was being written when the learner was killed")
            shutil.rmtree(path)
            continue
        if not path.name.startswith("step-"):
            continue
        try:
            found.append(_open(path))
        except CheckpointError as exc:
            say(f"ignoring {path}: {exc}. It is not loaded or published; the learner writes that step again")
    return found


def _open(path: Path) -> Checkpoint:
    try:
        record = json.loads((path / RECORD).read_bytes())
        files = {str(n): (int(f["size"]), str(f["blake3"])) for n, f in record["files"].items()}
        checkpoint = Checkpoint(path, int(record["epoch"]), int(record["step"]), files)
        sizes = {name: (path / name).stat().st_size for name in files}
    except FileNotFoundError as exc:
        raise CheckpointError(f"it is half-written ({Path(exc.filename).name} is missing)") from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"its {RECORD} does not read ({type(exc).__name__})") from exc
    wrong = sorted(name for name, (size, _) in files.items() if sizes[name] != size)
    if wrong or WEIGHTS not in files or path.name != f"step-{checkpoint.step:08d}":
        raise CheckpointError(f"it is half-written ({', '.join(wrong) or RECORD} does not fit)")
    return checkpoint


def load_tensors(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file of a checkpoint, after comparing its BLAKE3 with the record.

    Raises:
        CheckpointError: damaged.
    """
    _check(checkpoint, name)
    try:
        tensors: dict[str, torch.Tensor] = load_file(checkpoint.directory / name)
    except SafetensorError as exc:
        raise CheckpointError(f"{checkpoint.directory / name} is no safetensors file ({exc})") from exc
    return tensors


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """`trainer_state.json`, after comparing its BLAKE3 with the record. Raises CheckpointError."""
    _check(checkpoint, STATE)
    state: dict[str, Any] = json.loads((checkpoint.directory / STATE).read_bytes())
    return state


def _check(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint.directory / name
    if blake3().update_mmap(path).hexdigest() != checkpoint.files[name][1]:
        raise CheckpointError(f"{path} is not what {RECORD} says it is: the disk or somebody changed it")


def newest_resumable(found: list[Checkpoint], say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint to go on from, every file of it compared with its hash; None when there is none.

    Raises:
        CheckpointError: there are checkpoints, but none to go on from.
    """
    for checkpoint in reversed(found):
        if not checkpoint.resumable:
            continue
        try:
            for name in checkpoint.files:
                _check(checkpoint, name)
        except CheckpointError as exc:
            say(f"not resuming from {checkpoint.directory}: {exc}")
            continue
        return checkpoint
    if found:
        raise CheckpointError(
            f"{found[-1].directory.parent} holds checkpoints but none whose optimiser state is whole; the operator "
            "must restore one from a backup (published weights alone cannot be trained on from where they stood)"
        )
    return None


def prune(found: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Delete old checkpoints and return those that stay: the newest `keep` (at least 3) and the newest resumable."""
    resumable = [c for c in found if c.resumable]
    stay = found[-max(keep, KEEP_AT_LEAST) :] + resumable[-1:]
    for checkpoint in found:
        if checkpoint not in stay:
            # The record goes first: a kill in between leaves something that is plainly not a checkpoint.
            for name in (RECORD, *checkpoint.files):
                (checkpoint.directory / name).unlink(missing_ok=True)
            try:
                checkpoint.directory.rmdir()
            except OSError:  # somebody's own files lie there too
                shutil.rmtree(checkpoint.directory)
    return [c for c in found if c in stay]
