"""`RUN/updates`: the manifest's updates as files, held against the chain that the ledger tells.

    000001.hw is the ledger's update 1            nothing to say
    ... is gone, or other bytes                   `record-missing`, `hash-mismatch`
    ... is another update 1, signed by the root   `manifest-forked`: two rules for one place, both the root's word
    000002.hw continues the ledger's chain        its end was cut off, or the coordinator passed over the root's word;
                                                  after the run's end nobody was left to enter it
    anything else                                 somebody added it

The ledger holds every update it took, so the files are not needed to audit it. They are where the root's word comes in,
and what a coordinator starts from: who restores a run from this directory follows them.

Not covered: whether the links in the ledger hold (`protocol.segments`).
"""

from __future__ import annotations

import re
from pathlib import Path

from protocol.chain import Chain
from protocol.envelope import parse
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import peer_id_text
from protocol.limits import FRESHNESS_MS, MAX_ENVELOPE_BYTES
from protocol.run_files import update_file
from verifier.archive import RunArchive, read_bounded
from verifier.report import Report

_NAME = re.compile(r"[0-9]{6}\.hw")


def check_updates(archive: RunArchive, report: Report) -> None:
    """Every file of the folder against the chain, and every link of the chain against the files."""
    chain = archive.chain
    expected = {update_file(archive.root, number).name for number in range(1, len(chain.links) + 1)}
    found = _names(archive.root, report)
    if found is None:
        return
    for number in range(1, len(chain.links) + 1):
        _check_link(archive, number, report)
    further = sorted(found - expected)
    longer = chain
    for name in further:
        if name == update_file(archive.root, len(longer.links) + 1).name:
            longer = _check_further(archive, longer, name, report)
        elif _NAME.fullmatch(name):
            report.fail(f"updates/{name}", ReasonCode.LEDGER_BROKEN, "continues no update that is there before it")
        else:
            _unnamed(f"updates/{name}", "is no update of the manifest: somebody added it", report)
    _check_revoked(archive, longer, report)


def _names(root: Path, report: Report) -> set[str] | None:
    """What the folder holds, without what a killed writer left (`.000001.hw.*.part`); None if it can't be read."""
    try:
        return {path.name for path in (root / "updates").iterdir() if not path.name.startswith(".")}
    except FileNotFoundError:
        return set()
    except OSError as exc:
        report.unchecked.append(("updates", f"can't be read: {exc.strerror}"))
        return None


def _read(archive: RunArchive, name: str, report: Report) -> bytes | None:
    """A file's bytes; None when they can't be had, which the report then says."""
    try:
        return read_bounded(archive.root / "updates" / name, MAX_ENVELOPE_BYTES)
    except FileNotFoundError:
        report.fail(f"updates/{name}", ReasonCode.RECORD_MISSING, "is named by the ledger but is not there")
    except ProtocolError as exc:
        report.fail(f"updates/{name}", exc.code, str(exc))
    except OSError as exc:
        report.unchecked.append((f"updates/{name}", f"can't be read: {exc.strerror}"))
    return None


def _check_link(archive: RunArchive, number: int, report: Report) -> None:
    link = archive.chain.links[number - 1]
    name = update_file(archive.root, number).name
    raw = _read(archive, name, report)
    if raw is None or raw == link.raw:
        return
    try:
        before = Chain(archive.run)
        for earlier in archive.chain.links[: number - 1]:
            before = before.extend(earlier.raw)
        forked = before.extend(raw).hash != link.digest
    except ProtocolError:
        forked = False
    if forked:
        text = f"is another update {number} than the ledger's, and the run's root signed both"
        report.fail(f"updates/{name}", ReasonCode.MANIFEST_FORKED, text)
    else:
        text = f"is not the update {number} that the ledger holds"
        report.fail(f"updates/{name}", ReasonCode.HASH_MISMATCH, text)


def _check_further(archive: RunArchive, chain: Chain, name: str, report: Report) -> Chain:
    """A file behind the ledger's chain; returns the chain with it, if it holds."""
    record = f"updates/{name}"
    raw = _read(archive, name, report)
    if raw is None:
        return chain
    try:
        longer = chain.extend(raw)
    except ProtocolError as exc:
        report.fail(record, exc.code, f"is in no entry of the sealed ledger, and continues its chain as little: {exc}")
        return chain
    text = (
        "is signed by the run's root, but no entry of the sealed ledger takes it: the ledger's end was cut off, or the "
    )
    text += "coordinator passed over it"
    end = _end(archive) if report.finished else None
    if end is None:
        report.unchecked.append((record, f"{text}, or it is newer than the last seal of a run that goes on"))
    elif parse(raw).issued_at + FRESHNESS_MS >= end:
        pass  # the run was over, or as good as: nobody was left who had to enter it
    elif longer.untimely(len(chain.delegations), end) is not None:
        report.unchecked.append((record, f"{text}, or its delegations had not begun, or were over, at the run's end"))
    else:
        report.fail(record, ReasonCode.LEDGER_BROKEN, text)
    return longer


def _end(archive: RunArchive) -> int | None:
    """When the run was over, in ledger time (ms)."""
    return next((sealed.entry.time for sealed in archive.log.entries if sealed.entry.event == "run.finished"), None)


def _check_revoked(archive: RunArchive, longer: Chain, report: Report) -> None:
    """Entries that keys signed which an update beside the ledger takes back from there on."""
    for item in longer.revocations[len(archive.chain.revocations) :]:
        first = next(archive.signed_from(item.key, item.index), None)
        if first is not None:
            text = (
                f"signed by {peer_id_text(item.key)}, which an update that the ledger does not hold revokes from entry "
                f"{item.index} on; it is the first of these"
            )
            report.unchecked.append((f"ledger/{first}", text))


def _unnamed(record: str, text: str, report: Report) -> None:
    if report.finished:
        report.fail(record, ReasonCode.LEDGER_BROKEN, text)
    else:
        report.unchecked.append((record, text))
