"""`verifier ledger`: a run's log in words, one line an entry, read from its sealed segments.

Not covered: whether the entries are right (`audit`); only signatures, tree heads and what they rest on are checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from protocol.chain import ONLINE_ROLES, RunUpdate
from protocol.commands import several
from protocol.envelope import Envelope, parse
from protocol.errors import ProtocolError, UsageError
from protocol.identity import peer_id_text
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    BatchClosed,
    DrawsOpened,
    DrawsRevealed,
    DropEvidence,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    RelayReport,
    RoleGrant,
    RunFinished,
    TieLapsed,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
)
from protocol.state import PolicyHead
from verifier.archive import BODIES, MANIFEST, NOT_STARTED, SUBJECTS, RunArchive, read_entry

__all__ = ["NOT_STARTED", "describe", "line", "only", "open_ledger", "rows"]

_BARE = ("run.opened", "incarnation")
"""Events without a record of their own."""


def open_ledger(path: Path) -> RunArchive:
    """The archive a path belongs to: a run directory, or the `ledger` folder inside one. Raises as RunArchive.open."""
    inside = path.name == "ledger" and not (path / MANIFEST).exists()
    return RunArchive.open(path.parent if inside else path)


def rows(archive: RunArchive) -> Iterator[dict[str, object]]:
    """One JSON-ready object an entry: index, time (ms), incarnation, event, signer of the subject, text."""
    for sealed in archive.log.entries:
        entry = sealed.entry
        yield {
            "index": sealed.index,
            "time": entry.time,
            "incarnation": entry.incarnation,
            "event": entry.event,
            "signer": _signer(entry),
            "text": describe(entry),
        }


def only(listed: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    """The rows of one event; all for "".

    Raises:
        UsageError: no ledger has such an event, nor does this one.
    """
    chosen = [row for row in listed if event in ("", row["event"])]
    known = sorted({*_BARE, *BODIES, *SUBJECTS, *(str(row["event"]) for row in listed)})
    if not chosen and event and event not in known:
        raise UsageError(f"--event {event}: there is no such event; the known ones are {', '.join(known)}")
    return chosen


def line(row: dict[str, object]) -> str:
    """A row for people."""
    time_ms = row["time"]
    assert isinstance(time_ms, int)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ms / 1000))
    return f"{row['index']:>7}  {clock}  {row['event']:<14} {row['text']}"


def _signer(entry: LedgerEntry) -> str:
    try:
        return peer_id_text(parse(entry.subject).signer) if entry.subject else ""
    except ProtocolError:
        return ""


def describe(entry: LedgerEntry) -> str:
    """What an entry says, in words. Total: an entry that does not decode says so."""
    try:
        envelope, record = read_entry(entry)
        return _describe(envelope, record)
    except ProtocolError as exc:
        return f"does not decode: {exc}"


def _short(key: bytes) -> str:
    return peer_id_text(key)[-8:] if key else "nobody"


def _describe(envelope: Envelope | None, record: object) -> str:
    who = _short(envelope.signer) if envelope is not None else ""
    match record:
        case RunUpdate():
            return _update(record)
        case RoleGrant():
            return f"{_short(record.key)} may be a {record.role}"
        case JoinRequest():
            return f"{who} joins as {record.role} {record.name!r}"
        case PolicyHead():
            return f"epoch {record.epoch} step {record.step}, root {record.root.hex()[:16]}"
        case Lease():
            owner = _short(envelope.audience if envelope is not None else b"")
            size = f"{len(record.tasks)} x {several(record.samples, 'rollout')}"
            return f"{record.lease_id.hex()} to {owner}: {size}, step {record.step}"
        case LeaseClosed():
            return f"{record.lease_id.hex()}: {record.reason}"
        case UploadIntent():
            return f"{record.lease_id.hex()} from {who}: {several(record.length, 'byte')}"
        case DrawsOpened():
            return f"period {record.period}: {record.second_draw:g} checked twice, {record.commitment.hex()[:16]}"
        case DrawsRevealed():
            return f"period {record.period}: {record.secret.hex()[:16]}"
        case ValidatorsPresent():
            return ", ".join(_short(key) for key in record.keys) or "none"
        case JobDrawn():
            again = f", draw {record.attempt + 1}" if record.attempt else ""
            return f"round {record.round} of submission {record.submission} to {_short(record.validator)}{again}"
        case TieLapsed():
            return f"submission {record.submission}: one ACCEPT, one REJECT, and no third validator settled it"
        case Verdict():
            return _verdict(record, who)
        case DropEvidence():
            return (
                f"{_short(record.key)} gave up {several(record.lost, 'lease')} with {record.lost_mean:+.3g} and "
                f"returned {record.returned} with {record.returned_mean:+.3g}: log e {record.log_e:.3g}"
            )
        case RelayReport():
            return f"{_short(record.relay)}, shown by {who}: {record.detail}"
        case BatchClosed():
            return f"step {record.step}: {several(len(record.entries), 'rollout')}"
        case RunFinished():
            return f"after {several(record.steps, 'step')}: {record.reason}"
    return ""


def _update(update: RunUpdate) -> str:
    changed = [
        name for name in (*ONLINE_ROLES, "thresholds", "leases", "routes", "bf16") if getattr(update, name) is not None
    ]
    changed += [name for name in ("control", "ingress", "evidence") if getattr(update, name)]
    gone = [f"{_short(item.key)} revoked from entry {item.index} on: {item.reason}" for item in update.revocations]
    said = [f"new {', '.join(changed)}"] * bool(changed) + ["no rows of evidence"] * update.no_evidence
    return f"update {update.number}: {'; '.join([*said, *gone]) or 'nothing'}" + (
        f" ({update.note})" * bool(update.note)
    )


def _verdict(verdict: Verdict, who: str) -> str:
    counts = [sum(o.outcome == wanted for o in verdict.outcomes) for wanted in (ACCEPT, REJECT, INCONCLUSIVE)]
    words = [f"{n} {word}" for n, word in zip(counts, ("accepted", "rejected", "inconclusive"), strict=True) if n]
    reasons = sorted({o.reason for o in verdict.outcomes if o.outcome != ACCEPT})
    return f"round {verdict.round} by {who}: {', '.join(words)}" + (f" ({', '.join(reasons)})" if reasons else "")
