"""Proofs about members that anybody can check from signed bytes alone.

    a relay lied      its signed stamp and the origin's signed shard record name the same shard and different bytes
    results dropped   numbers that follow from ledger and archive; here only the bar they must clear
    pooled            the same, of what all verdicts on a node's rollouts measured
    a wrong verdict   which verdict, which rollout, and what it really is; anybody can make the check again

Not covered: computing those numbers (`verifier.drops`, `verifier.evidence`), collecting reports (`trainer`), stamping
(`shardcast`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from protocol import codec
from protocol.envelope import open_envelope
from protocol.errors import LedgerError, ReasonCode
from protocol.evidence_rows import EvidenceRow
from protocol.limits import KIB
from protocol.records import U8, U32, U64, DropEvidence, Float, Hash, Id, NodeEvidence, RelayReport, RelayStamp, Word

STAMP_KIND = "relay.stamp"
REPORT_KIND = "relay.report"
SHARD_KIND = "shard"

DROP_LOG_E = math.log(1e7)
"""Natural logarithm of the e-value at which a key is suspended. It bounds the chance, over a key's whole life, that an
honest one ever gets there: 1e-7. Lowering it suspends honest keys; raising it lets more kept-back results through."""


@codec.record(1 * KIB)
@dataclass(frozen=True)
class ShardView:
    """The leading fields of `shardcast.records.ShardRecord`: what a stamp is held against."""

    publication: Id
    index: U32
    wire_bytes: U32
    raw_bytes: U32
    wire_hash: Hash


@codec.record(1 * KIB)
@dataclass(frozen=True)
class VerdictEvidence:
    """A validator accepted or rejected a rollout, and the coordinator's own check of it says otherwise.

    Everybody with the archive can repeat the check.
    """

    verdict: U64
    """Ledger index of the verdict."""
    rollout: U32
    """Position in the submission."""
    outcome: U8
    """What the check gives: REJECT, also with wider bounds; ACCEPT, also with narrower ones, of what the verdict
    rejected; or ACCEPT with other numbers than the verdict's details."""
    reason: Word
    """The `ReasonCode` of a REJECT; `holds` of a rollout that was rejected; `verdict-wrong` for other numbers."""
    reward: Float
    """The reward as the check gives it; 0 for a REJECT."""
    difference: Float
    """How far the details are off, of the rollout, in `number`; 0 where that can't be said."""
    number: Word = ""
    """What of the details is off: `logprobs`, `reward`, `digest` or the name of a number; empty for an outcome."""


def check_relay_lie(report: RelayReport, run: bytes, origins: Collection[bytes]) -> None:
    """Return when the report proves that its relay signed other bytes than the origin did.

    Args:
        run: the run id, 32 bytes.
        origins: public keys the run's origin has had, without those that are revoked: whoever stole one could sign a
            record beside any honest stamp.

    Raises:
        ProtocolError: a signature does not hold, or the two signed records do not contradict each other.
    """
    stamp = open_envelope(report.stamp, run=run, kind=STAMP_KIND, signer=report.relay).record(RelayStamp)
    envelope = open_envelope(report.shard, run=run, kind=SHARD_KIND)
    if envelope.signer not in origins:
        raise LedgerError("the shard record is not signed by the run's origin", ReasonCode.BAD_SIGNATURE)
    shard = envelope.record(ShardView)
    if (stamp.publication, stamp.index) != (shard.publication, shard.index):
        raise LedgerError("stamp and shard record are about different shards")
    if stamp.wire_hash == shard.wire_hash:
        raise LedgerError("the relay stamped the bytes that the origin signed: that proves nothing")


def check_drop_bar(evidence: DropEvidence) -> None:
    """Raise LedgerError unless the evidence, if true, is enough to suspend its key."""
    if evidence.log_e < DROP_LOG_E:
        raise LedgerError(f"log e {evidence.log_e:.3g} is below the bar of {DROP_LOG_E:.3g}")
    if not evidence.lost_mean < evidence.returned_mean:
        raise LedgerError("what the key gave up was no worse than what it returned")


FEWEST_VALIDATORS = 2
"""Validators whose numbers a key must have against it: with fewer, one validator's word would end trust in it."""


def check_node_bar(evidence: NodeEvidence, rows: Iterable[EvidenceRow]) -> EvidenceRow:
    """The row of the manifest by which the evidence, if true, is enough to suspend its key; LedgerError without."""
    named = (evidence.hypothesis, evidence.statistic)
    row = next((row for row in rows if (row.hypothesis, row.statistic) == named), None)
    if row is None:
        raise LedgerError(f"the run's manifest sums up no {evidence.statistic} for {evidence.hypothesis}")
    if evidence.log_e < row.log_bar:
        raise LedgerError(f"log e {evidence.log_e:.3g} is below the bar of {row.log_bar:.3g}")
    if evidence.validators < FEWEST_VALIDATORS:
        raise LedgerError(f"the numbers of {evidence.validators} validators: nobody is condemned on one word")
    return row
