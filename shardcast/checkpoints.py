"""Checkpoints as others write them: found in a folder, judged whole, and copied into one canonical weights file.

    FOLDER/checkpoint-500/     model.safetensors, or model-00001-of-00004.safetensors ..., config.json, tokenizer.json
    FOLDER/                    the same, when FOLDER is itself one checkpoint

A subfolder is the checkpoint of the number its name ends with. It counts once every weights file is as long as its
header says and nothing in it changed for `QUIET_S`. Names that begin with a dot or `tmp` are somebody's work in
progress. The copy is what is published: it cannot change under us, and the next checkpoint is compared with it.

Not covered: pickled checkpoints (`.bin`, `.pt`), which are never opened, and optimizer state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from protocol.errors import ReasonCode
from protocol.files import fsync_dir, open_regular, write_atomic
from protocol.limits import MAX_MODEL_FILE_BYTES, MAX_MODEL_FILES
from shardcast.errors import LayoutError, PublishError, StoreError, UnfinishedFileError
from shardcast.layout import Canonical, Layout, make_layout, open_safetensors, safetensors_header
from shardcast.limits import PIECE_BYTES
from shardcast.store import read_bounded

QUIET_S = 2.0
"""How long nothing may have changed in a checkpoint before it is read. Writers pause between files: shorter publishes
weights without their tokenizer."""

_STEP = re.compile(r"(?:.*?[^0-9])??([0-9]{1,12})")
_PART = re.compile(r".+-([0-9]{5})-of-([0-9]{5})\.safetensors")
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_PARTS = 4096

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "README.txt",
)
"""What is passed on beside the weights. A trainer's own state is not: it changes with every checkpoint."""

Mark = tuple[tuple[str, int, int, int], ...]
"""(name, inode, bytes, mtime in ns) of everything that is read: another mark is another checkpoint."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that somebody wrote, as far as can be seen from outside."""

    folder: Path
    step: int | None
    """From the folder's name; None for a folder that is itself the checkpoint."""
    weights: tuple[Path, ...]
    files: tuple[Path, ...]
    mark: Mark
    age_s: float
    """Since its youngest file was written to."""


def step_of(name: str) -> int | None:
    """The number a folder's name ends with: `checkpoint-500` is 500; None where there is none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def find(folder: Path, now: float) -> list[Found]:
    """The checkpoints in a folder, in order of their steps; unfinished ones too.

    Args:
        now: seconds since the epoch.

    Raises:
        OSError: the folder cannot be read.
    """
    own = _look(folder, None, now)
    if own is not None:
        return [own]
    found: dict[int, Found] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        step = step_of(entry.name)
        if entry.name.startswith((".", "tmp")) or step is None or not _is(entry.is_dir):
            continue
        one = _look(Path(entry.path), step, now)
        if one is not None:
            found.setdefault(step, one)
    return [found[step] for step in sorted(found)]


def _look(folder: Path, step: int | None, now: float) -> Found | None:
    try:
        names = {entry.name for entry in os.scandir(folder) if _is(entry.is_file)}
        weights = _weights(folder, names)
        files = tuple(folder / name for name in MODEL_FILES if name in names)[:MAX_MODEL_FILES]
        if not weights:
            return None
        rows = [(path.name, path.stat()) for path in (*weights, *files)]
    except OSError:
        return None  # it is being written or removed, or may not be read: it is looked at again
    mark = tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in rows)
    return Found(folder, step, weights, files, mark, now - max(stat.st_mtime for _, stat in rows))


def _is(kind: Callable[[], bool]) -> bool:
    """Whether an entry is of a kind; a link that leads in a circle, or where nobody may look, is of none."""
    try:
        return kind()
    except OSError:
        return False


def _weights(folder: Path, names: set[str]) -> tuple[Path, ...]:
    """The weights files of one checkpoint, in order; none while they are not all there."""
    if _INDEX in names:
        wanted = _named_by_index(folder / _INDEX)
    elif "model.safetensors" in names:
        wanted = ["model.safetensors"]
    elif parts := sorted(name for name in names if _PART.fullmatch(name)):
        of = {int(_PART.fullmatch(name)[2]) for name in parts}  # type: ignore[index]
        wanted = parts if of == {len(parts)} else []
    elif "adapter_model.safetensors" in names:
        wanted = ["adapter_model.safetensors"]
    else:
        wanted = sorted(name for name in names if name.endswith(".safetensors") and "optimizer" not in name)
    return tuple(folder / name for name in wanted) if wanted and names.issuperset(wanted) else ()


def _named_by_index(path: Path) -> list[str]:
    """The files of an index; none while it is half written. Only plain names in the same folder count."""
    try:
        table = json.loads(read_bounded(path, _MAX_INDEX_BYTES))["weight_map"]
        found = sorted({str(name) for name in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    plain = [name for name in found if name == Path(name).name and name.endswith(".safetensors")]
    return plain if plain == found and len(found) <= _MAX_PARTS else []


def is_whole(found: Found) -> bool:
    """Whether every weights file is as long as its header says, and may be read. One that more bytes won't mend is
    whole: publishing says at once what is wrong with it."""
    try:
        for path in found.weights:
            _header(path)
    except (UnfinishedFileError, OSError):
        return False
    except LayoutError:
        return True
    return True


def weights_name(found: Found) -> str:
    """The name that what loads such a checkpoint looks for."""
    adapter = [path.name for path in found.weights] == ["adapter_model.safetensors"]
    return "adapter_model.safetensors" if adapter else "model.safetensors"


def layout_of(found: Found) -> Layout:
    """The layout over all tensors of all weights files.

    Raises:
        LayoutError: no safetensors files, or a tensor that is in two of them.
        PublishError(`length-mismatch`): it is gone, or may not be read.
    """
    return _merged(_open(found))[0]


def _open(found: Found) -> list[Canonical]:
    try:
        return [_header(path) for path in found.weights]
    except OSError as exc:
        raise _unreadable(found, exc) from exc


def _header(path: Path) -> Canonical:
    """What a weights file holds. Raises LayoutError, OSError: for a pipe, too, which would never answer."""
    open_regular(path).close()
    return open_safetensors(path)


def _unreadable(found: Found, error: OSError) -> PublishError:
    """What its owner does to a checkpoint while it is read ends no publishing."""
    return PublishError(
        f"{found.folder} can't be read now ({error}); it is looked at again", ReasonCode.LENGTH_MISMATCH
    )


def _merged(parts: list[Canonical]) -> tuple[Layout, dict[str, tuple[int, int]]]:
    """The common layout, and for each tensor (part, offset in that part's canonical data)."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    places: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for spec in part.layout.tensors:
            if any("\ud800" <= char <= "\udfff" for char in spec.name):
                raise LayoutError(f"tensor {spec.name!r} has a name that is no text; rename it")
            if spec.name in tensors:
                raise LayoutError(
                    f"tensor {spec.name!r} is in {part.path.name} and in another file; remove one of them"
                )
            tensors[spec.name] = (spec.dtype, spec.shape)
            places[spec.name] = (number, spec.offset)
    return make_layout(tensors), places


def stage(found: Found, step: int, target: Path, stop: Callable[[], bool] = lambda: False) -> Layout:
    """Copy a checkpoint into a folder as one canonical weights file with its `checkpoint.json`. Blocking.

    Args:
        target: made anew; it counts once `checkpoint.json` is in it.
        stop: asked between pieces; true gives up with PublishError.

    Raises:
        LayoutError: its files are no weights that can be published.
        PublishError(`length-mismatch`): it changed while it was read, or cannot be read.
        OSError: the disk is full.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    parts = _open(found)
    layout, places = _merged(parts)
    header = safetensors_header(layout)
    hasher = blake3(header)
    files: list[int] = []

    def read(number: int, start: int, size: int) -> bytes:
        try:
            return parts[number].read(files[number], start, size)
        except OSError as exc:
            raise _unreadable(found, exc) from exc

    try:
        for part in parts:
            try:
                files.append(os.open(part.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            except OSError as exc:
                raise _unreadable(found, exc) from exc
        with (target / "model.safetensors").open("wb") as out:
            os.posix_fallocate(out.fileno(), 0, len(header) + layout.nbytes)
            out.write(header)
            for spec in layout.tensors:
                number, offset = places[spec.name]
                for at in range(0, spec.nbytes, PIECE_BYTES):
                    if stop():
                        raise PublishError("given up: this process ends", ReasonCode.DEADLINE)
                    piece = read(number, offset + at, min(PIECE_BYTES, spec.nbytes - at))
                    hasher.update(piece)
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    finally:
        for fd in files:
            os.close(fd)
    again = _look(found.folder, found.step, 0.0)
    if again is None or again.mark != found.mark:
        raise PublishError(
            f"{found.folder} changed while it was read; it is looked at again", ReasonCode.LENGTH_MISMATCH
        )
    table = {
        "epoch": 0,
        "step": step,
        "files": {"model.safetensors": {"size": len(header) + layout.nbytes, "blake3": hasher.hexdigest()}},
    }
    write_atomic(target / "checkpoint.json", json.dumps(table).encode())
    fsync_dir(target)
    return layout


def read_model_files(found: Found) -> dict[str, bytes]:
    """The small files beside the weights.

    Raises:
        PublishError: one is too large to be what its name says, or cannot be read now (`length-mismatch`).
    """
    try:
        return {path.name: read_bounded(path, MAX_MODEL_FILE_BYTES) for path in found.files}
    except StoreError as exc:
        raise PublishError(str(exc), exc.code) from exc
    except OSError as exc:
        raise _unreadable(found, exc) from exc
