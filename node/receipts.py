"""Receipts: the coordinator's signed promise that a submission is in its ledger.

A receipt is believed only after its signature, its lease and its digest were checked, and a node deletes its own
copy of a submission only after the receipt is on disk.

Not covered: whether the ledger later kept the promise (`node receipts --ledger`).
"""

from __future__ import annotations

from pathlib import Path

from protocol.envelope import open_envelope
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.files import write_atomic
from protocol.manifest import Run
from protocol.records import Receipt

RECEIPT_KIND = "receipt"


def check_receipt(raw: bytes, *, run: Run, owner: bytes, lease_id: bytes, digest: bytes) -> Receipt:
    """The receipt inside `raw`, if it promises exactly this submission.

    Args:
        owner: our public key; a receipt addressed to somebody else is refused.
        digest: BLAKE3 of the compressed submission.

    Raises:
        DecodeError, EnvelopeError: with `code` saying what does not hold.
    """
    envelope = open_envelope(raw, run=run.id, kind=RECEIPT_KIND, signer=run.manifest.coordinator, audience=owner)
    receipt = envelope.record(Receipt)
    if receipt.lease_id != lease_id:
        raise EnvelopeError("the receipt names another lease", ReasonCode.UNKNOWN_LEASE)
    if receipt.digest != digest:
        raise EnvelopeError("the receipt names other bytes than were sent", ReasonCode.HASH_MISMATCH)
    if receipt.index >= receipt.tree_size:
        raise DecodeError("the receipt's leaf lies outside the tree it names")
    return receipt


class ReceiptStore:
    """Receipts on disk, one envelope a file, named by lease."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, lease_id: bytes, raw: bytes) -> None:
        """Durable when this returns."""
        write_atomic(self._directory / f"{lease_id.hex()}.hw", raw, mode=0o600)

    def __contains__(self, lease_id: bytes) -> bool:
        return (self._directory / f"{lease_id.hex()}.hw").exists()
