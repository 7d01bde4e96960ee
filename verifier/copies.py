"""Files beside the archive that say again what the archive binds: held against it, where they are there.

    model/                           configuration and tokenizer against the manifest's hashes, the base weights'
                                     tensors (names, shapes, dtypes) against its layout
    checkpoints/*/model.safetensors  the weights against the root their step was published under
    metrics.jsonl                    `reward_mean` and `rollouts` of each step against the batch it trained

Nobody else needs these files, so one that is missing, not yet published or not yet trained is no failure; one that
says something else is. A checkpoint counts once its `checkpoint.json` is there, and a kill may tear the last line of
metrics.

Not covered: what no signed record binds. The values of the base weights, the optimiser's state, every other number of
metrics, and the operator's views and settings (`status.json`, `summary.json`, `run.toml`, ...: docs/protocol.md).
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from blake3 import blake3

from protocol.errors import ProtocolError, ReasonCode
from protocol.files import open_regular
from protocol.limits import MAX_MODEL_FILE_BYTES
from shardcast.archive import Archive
from shardcast.layout import layout_of_safetensors, require_layout, root_of_safetensors
from verifier.archive import RunArchive, read_bounded
from verifier.batches import Trained
from verifier.report import Report

WEIGHTS = "model.safetensors"
METRICS = "metrics.jsonl"
_MAX_LINE_BYTES = 1 << 20
"""A row of metrics is about 1 KB; a longer line is none, and memory stays bounded."""

_MAX_WRONG_ROWS = 100
"""So many rows are named; a file made of wrong ones is as long as whoever wrote it likes."""


def check_copies(
    archive: RunArchive, published: Archive | None, batches: Mapping[int, list[Trained]], report: Report
) -> None:
    """Check them all; failures go into `report`. `batches` is what `check_batches` returned."""
    _check_model(archive, report)
    _check_checkpoints(archive, published, report)
    _attempt(METRICS, lambda: _check_metrics(archive, batches, report), report)


def _attempt(name: str, check: Callable[[], None], report: Report) -> None:
    """Run one check: what is gone needs none (a learner removes old checkpoints while it runs)."""
    try:
        check()
    except (FileNotFoundError, NotADirectoryError):
        return
    except ProtocolError as exc:
        report.fail(name, exc.code, str(exc))
    except OSError as exc:
        report.unchecked.append((name, f"can't be read: {exc.strerror or exc}"))


def _check_model(archive: RunArchive, report: Report) -> None:
    spec = archive.run.manifest.model

    def same_file(name: str, digest: bytes) -> None:
        if blake3(read_bounded(archive.root / name, MAX_MODEL_FILE_BYTES)).digest() != digest:
            report.fail(name, ReasonCode.HASH_MISMATCH, "is not the file whose hash the manifest holds")

    for file in spec.files:
        name = f"model/{file.name}"
        _attempt(name, functools.partial(same_file, name, file.digest), report)

    def same_tensors() -> None:
        open_regular(archive.root / "model" / WEIGHTS).close()
        require_layout(layout_of_safetensors(archive.root / "model" / WEIGHTS), spec.layout, "it")

    _attempt(f"model/{WEIGHTS}", same_tensors, report)


def _check_checkpoints(archive: RunArchive, published: Archive | None, report: Report) -> None:
    """Whole checkpoints of steps that were published: the same weights, or the trainer keeps others than it shows."""
    roots: dict[int, set[bytes]] = {}
    for (_, step), root in archive.announced().items():
        roots.setdefault(step, set()).add(root)
    for (_, step), one in (published.publications if published is not None else {}).items():
        roots.setdefault(step, set()).add(one.root)

    def same_weights(name: str, known: set[bytes]) -> None:
        open_regular(archive.root / name).close()
        require_layout(layout_of_safetensors(archive.root / name), archive.run.manifest.model.layout, "it")
        root = root_of_safetensors(archive.root / name)
        if root not in known:
            said = " or ".join(sorted(one.hex()[:16] for one in known))
            text = f"has root {root.hex()[:16]}, but its step was published with {said}"
            report.fail(name, ReasonCode.HASH_MISMATCH, text)

    for record in sorted((archive.root / "checkpoints").glob("step-*/checkpoint.json")):
        number = record.parent.name.removeprefix("step-")
        known = roots.get(int(number)) if number.isdecimal() else None
        if known:
            name = f"checkpoints/{record.parent.name}/{WEIGHTS}"
            _attempt(name, functools.partial(same_weights, name, known), report)


def _check_metrics(archive: RunArchive, batches: Mapping[int, list[Trained]], report: Report) -> None:
    """The reward curve: each step's row says what the batch of that step holds. A step may have several rows: a learner
    that was killed repeats what it had not saved."""
    closed = {one.step for one in archive.facts.batches.values()}
    seen: set[int] = set()  # no more of them than the ledger has
    low, high, wrong_rows = math.inf, -math.inf, 0
    with open_regular(archive.root / METRICS) as raw, io.BufferedReader(cast("io.RawIOBase", raw)) as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                break
            row = _row(line)
            if row is None:
                if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
                    report.fail(f"{METRICS}:{number}", ReasonCode.MALFORMED, "is no row of metrics: it was damaged")
                    return  # what it stood for can't be known, nor whether a step is missing
            elif row.get("event") == "step":
                step = row.get("step")
                if isinstance(step, int):
                    low, high = min(low, step), max(high, step)
                    seen |= closed & {step}
                wrong = _contradicts(row, step, closed, batches, whole=report.finished and not archive.problems)
                if wrong:
                    report.fail(f"{METRICS}:{number}", ReasonCode.BATCH_WRONG, wrong)
                    wrong_rows += 1
                if wrong_rows == _MAX_WRONG_ROWS:
                    report.unchecked.append(
                        (METRICS, f"{wrong_rows} rows are wrong; those after row {number} were not read")
                    )
                    return
    gaps = sorted(step for step in closed - seen if low < step < high)
    if gaps:
        text = f"trained steps without a row, between others that have one: {len(gaps)}, the first is step {gaps[0]}"
        report.unchecked.append((METRICS, text))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _contradicts(
    row: dict[str, Any], step: object, closed: set[int], batches: Mapping[int, list[Trained]], *, whole: bool
) -> str:
    """What is wrong with the row of a step; empty when nothing is, or its batch is not there to compare with."""
    if not isinstance(step, int) or (whole and step not in closed):
        return f"says that step {step!r:.40} was trained; the ledger of the finished run has no batch of it"
    known = batches.get(step, [])
    if not known or any(one.told_by(row.get("reward_mean"), row.get("rollouts")) for one in known):
        return ""
    return (
        f"says reward_mean {row.get('reward_mean')!r:.40} over {row.get('rollouts')!r:.40} rollouts of step {step}; "
        f"its batch holds {known[0].reward_mean:.6g} over {known[0].rollouts}"
    )
