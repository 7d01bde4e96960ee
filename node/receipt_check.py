"""`node receipts`: the promises this home holds, and whether an archive of the run kept them.

What a receipt promises and how it is held against a ledger: `verifier.promises`, which `verifier audit --receipt` uses.
A receipt that an archive can't confirm is named and makes the exit code 1, also when the archive merely ends before the
promised entry: a ledger that was cut short looks the same.

Not covered: whether the verdicts on these submissions are right (`verifier audit`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from protocol.commands import printable
from protocol.envelope import Envelope, parse
from protocol.errors import ProtocolError, UsageError
from protocol.identity import load_identity
from protocol.limits import MAX_ENVELOPE_BYTES
from protocol.manifest import Run, open_manifest
from protocol.records import Receipt
from protocol.segments import SealedLog, read_segments
from verifier.promises import Promises

SHOWN = 20
"""Rows of the table for people; `--json` has all."""


@dataclass(frozen=True)
class Kept:
    """One receipt of this home, and what was found out about it."""

    lease: str
    """Lease id, hex."""
    index: int = 0
    tree_size: int = 0
    time: int = 0
    digest: str = ""
    """BLAKE3 of the submission, hex."""
    problem: str = ""
    """What does not hold; empty when nothing was found wrong."""


def show_receipts(home: Path, *, ledger: Path | None, as_json: bool) -> int:
    """Print the receipts, checked against an archive if one is named.

    Args:
        ledger: a run directory with a sealed ledger.

    Returns:
        0 when everything checked holds, 1 otherwise.

    Raises:
        UsageError: no receipts here, or no such archive.
    """
    home = home.expanduser().absolute()
    archive = _open_archive(ledger) if ledger is not None else None
    runs = sorted(path.parent for path in home.glob("runs/*/receipts") if any(path.glob("*.hw")))
    if archive is not None:
        runs = [run for run in runs if run.name == archive[0].id.hex()]
    if not runs:
        where = f" of run {archive[0].id.hex()[:16]}" if archive is not None else ""
        raise UsageError(
            f"{home} holds no receipts{where}; a node gets one for each finished lease. If it worked with another "
            "--home, name that one"
        )
    owner = load_identity(home / "identity.pem").public
    found = {run.name: kept_receipts(run / "receipts", owner, archive) for run in runs}
    if as_json:
        sys.stdout.write(json.dumps({name: [asdict(kept) for kept in rows] for name, rows in found.items()}) + "\n")
    else:
        for name, rows in found.items():
            sys.stdout.write("\n".join(printable(line) for line in as_lines(name, rows, ledger)) + "\n")
    return 1 if any(kept.problem for rows in found.values() for kept in rows) else 0


def kept_receipts(folder: Path, owner: bytes, archive: tuple[Run, SealedLog] | None) -> list[Kept]:
    """Every receipt of a folder, oldest promise first, each checked as far as `archive` allows."""
    opened: list[tuple[Kept, Envelope, Receipt]] = []
    broken: list[Kept] = []
    for path in sorted(folder.glob("*.hw")):
        try:
            with path.open("rb") as file:
                envelope = parse(file.read(MAX_ENVELOPE_BYTES + 1))
            receipt = envelope.record(Receipt)
        except ProtocolError as exc:
            broken.append(Kept(path.stem, problem=f"the file {path} is damaged: {exc}"))
            continue
        kept = Kept(receipt.lease_id.hex(), receipt.index, receipt.tree_size, receipt.time, receipt.digest.hex())
        if kept.lease != path.stem:
            kept = replace(kept, problem=f"the file {path} holds the receipt of another lease")
        opened.append((kept, envelope, receipt))
    if archive is not None:
        opened = _checked(opened, owner, *archive)
    return sorted([kept for kept, _, _ in opened], key=lambda kept: (kept.index, kept.lease)) + broken


def _checked(
    opened: Sequence[tuple[Kept, Envelope, Receipt]], owner: bytes, run: Run, log: SealedLog
) -> list[tuple[Kept, Envelope, Receipt]]:
    ledger = Promises(run, log, {receipt.tree_size for _, _, receipt in opened})

    def problem(envelope: Envelope, receipt: Receipt) -> str:
        unkept = ledger.receipt(envelope, receipt, owner)
        return unkept.message if unkept is not None else ""

    return [
        (replace(kept, problem=kept.problem or problem(envelope, receipt)), envelope, receipt)
        for kept, envelope, receipt in opened
    ]


def _open_archive(directory: Path) -> tuple[Run, SealedLog]:
    try:
        with (directory / "manifest.hw").open("rb") as file:
            run = open_manifest(file.read(MAX_ENVELOPE_BYTES + 1))
        return run, read_segments(directory / "ledger", run)
    except FileNotFoundError as exc:
        raise UsageError(
            f"{directory} is no archive of a run ({exc.filename} is not there); name the run's directory, or ask its "
            "operator for it"
        ) from exc
    except ProtocolError as exc:
        raise UsageError(f"the manifest in {directory} does not hold: {exc}; ask the run's operator") from exc


def as_lines(run: str, rows: Sequence[Kept], ledger: Path | None) -> list[str]:
    """The table for a person: the newest rows, and every row that does not hold."""
    wrong = [kept for kept in rows if kept.problem]
    lines = [f"run {run[:16]}: {len(rows)} receipts"]
    lines.append(f"  {'lease':<18}{'ledger entry':>12}{'of':>9}  {'promised':<20}{'bytes (BLAKE3)':<18}")
    lines += [_row(kept) for kept in rows[-SHOWN:] if not kept.problem]
    if len(rows) > SHOWN:
        lines.append(f"  ... and {len(rows) - SHOWN} older; --json shows all")
    for kept in wrong:
        lines += [_row(kept), f"    DOES NOT HOLD: {kept.problem}"]
    if ledger is not None:
        lines.append(
            f"  {len(rows) - len(wrong)} of {len(rows)} hold against {ledger}"
            + ("; keep the others and show them to the run's operator" if wrong else "")
        )
    elif wrong:
        lines.append(f"  {len(wrong)} do not hold")
    else:
        lines.append("  check them against an archive with: node receipts --ledger RUN")
    return lines


def _row(kept: Kept) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(kept.time, 253402300799000) / 1000))
    return f"  {kept.lease[:16]:<18}{kept.index:>12}{kept.tree_size:>9}  {when:<20}{kept.digest[:16]:<18}"
