"""`verifier ledger`: a run's log in words, one line an entry, read from its sealed segments.

Not covered: whether the entries are right (`audit`); only signatures, tree heads and what they rest on are checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from protocol import codec
from protocol.envelope import parse
from protocol.errors import ProtocolError
from protocol.identity import peer_id_text
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    BatchClosed,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    RoleGrant,
    RunFinished,
    UploadIntent,
    Verdict,
)
from protocol.state import PolicyHead
from verifier.archive import MANIFEST, RunArchive


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


def line(row: dict[str, object]) -> str:
    """A row for people."""
    time_ms = row["time"]
    assert isinstance(time_ms, int)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ms / 1000))
    return f"{row['index']:>7}  {clock}  {row['event']:<13} {row['text']}"


def _signer(entry: LedgerEntry) -> str:
    try:
        return peer_id_text(parse(entry.subject).signer) if entry.subject else ""
    except ProtocolError:
        return ""


def describe(entry: LedgerEntry) -> str:
    """What an entry says, in words. Total: an entry that does not decode says so."""
    try:
        return _describe(entry)
    except ProtocolError as exc:
        return f"does not decode: {exc}"


def _describe(entry: LedgerEntry) -> str:
    who = _signer(entry)[-8:]
    match entry.event:
        case "grant":
            grant = codec.decode(RoleGrant, entry.body)
            return f"{peer_id_text(grant.key)[-8:]} may be a {grant.role}"
        case "node.joined":
            join = parse(entry.subject).record(JoinRequest)
            return f"{who} joins as {join.role} {join.name!r}"
        case "policy":
            head = parse(entry.subject).record(PolicyHead)
            return f"epoch {head.epoch} step {head.step}, root {head.root.hex()[:16]}"
        case "lease":
            envelope = parse(entry.subject)
            lease = envelope.record(Lease)
            owner = peer_id_text(envelope.audience)[-8:] if envelope.audience else "nobody"
            return (
                f"{lease.lease_id.hex()} to {owner}: {len(lease.tasks)} x {lease.samples} rollouts, step {lease.step}"
            )
        case "lease.closed":
            closed = codec.decode(LeaseClosed, entry.body)
            return f"{closed.lease_id.hex()}: {closed.reason}"
        case "submission":
            intent = parse(entry.subject).record(UploadIntent)
            return f"{intent.lease_id.hex()} from {who}: {intent.length} bytes"
        case "job":
            job = codec.decode(JobDrawn, entry.body)
            return f"round {job.round} of submission {job.submission} to {peer_id_text(job.validator)[-8:]}"
        case "verdict":
            return _verdict(parse(entry.subject).record(Verdict), who)
        case "batch":
            batch = codec.decode(BatchClosed, entry.body)
            return f"step {batch.step}: {len(batch.entries)} rollouts"
        case "run.finished":
            finished = codec.decode(RunFinished, entry.body)
            return f"after {finished.steps} steps: {finished.reason}"
    return ""


def _verdict(verdict: Verdict, who: str) -> str:
    counts = [sum(o.outcome == wanted for o in verdict.outcomes) for wanted in (ACCEPT, REJECT, INCONCLUSIVE)]
    words = [f"{n} {word}" for n, word in zip(counts, ("accepted", "rejected", "inconclusive"), strict=True) if n]
    reasons = sorted({o.reason for o in verdict.outcomes if o.outcome != ACCEPT})
    return f"round {verdict.round} by {who}: {', '.join(words)}" + (f" ({', '.join(reasons)})" if reasons else "")
