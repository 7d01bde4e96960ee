"""Promises of the coordinator that somebody kept, held against a ledger: receipts, and signed tree heads.

    signature   a coordinator key of the run signed it, at that place of the ledger
    leaf        the ledger has the promised entry at the promised index: this lease, these bytes, this owner
    root        the first `tree_size` entries of the ledger have the promised root

An archive alone can't say that it is the one that was promised: whoever holds its keys can write all of it anew. What
others kept of it can.

Not covered: how a node comes by them and keeps them (`node.receipts`, `node.heads`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.chain import Chain
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import LedgerError, ProtocolError, ReasonCode, UsageError
from protocol.files import read_at_most
from protocol.ledger import TREE_KIND
from protocol.limits import MAX_ENVELOPE_BYTES
from protocol.manifest import Run
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import Receipt, TreeHead, UploadIntent
from protocol.segments import SealedLog
from verifier.archive import RunArchive
from verifier.report import Report

RECEIPT_KIND = "receipt"


@dataclass(frozen=True)
class Unkept:
    """Why a promise is not confirmed by a ledger."""

    message: str
    code: ReasonCode = ReasonCode.PROMISE_BROKEN
    cut: bool = False
    """The ledger merely ends before the promise: it was cut off, or goes on elsewhere."""
    moot: bool = False
    """Nothing can be said: an entry before it can't be read, which is told elsewhere, or its key was revoked."""


class Promises:
    """A ledger that promises are held against.

    Args:
        sizes: the tree sizes that will be asked for; each entry is hashed once for all of them.
    """

    def __init__(self, run: Run, log: SealedLog, sizes: Collection[int]) -> None:
        self._run = run
        self._log = log
        self._chain = log.chain or Chain(run)
        self._entries = {sealed.index: sealed for sealed in log.entries}
        self._roots = _roots(log, set(sizes))

    def head(self, envelope: Envelope, size: int, root: bytes) -> Unkept | None:
        """Whether the first `size` entries have this root; None when they do."""
        return self._reached(envelope, size) or self._root(size, root)

    def receipt(self, envelope: Envelope, receipt: Receipt, owner: bytes) -> Unkept | None:
        """Whether the ledger holds what a receipt promised `owner`; None when it does."""
        try:
            open_envelope(envelope.raw, run=self._run.id, kind=RECEIPT_KIND, audience=owner)
        except ProtocolError as exc:
            return Unkept(f"its signature does not hold for this node: {exc}", exc.code)
        return (
            self._reached(envelope, receipt.tree_size)
            or self._entry(receipt, owner)
            or self._root(receipt.tree_size, receipt.tree_root)
        )

    def _reached(self, envelope: Envelope, size: int) -> Unkept | None:
        if envelope.signer not in self._chain.keys("coordinator"):
            # Not the coordinator's failure: anybody can sign a promise, and show it around.
            text = "it was not signed by a coordinator of this run, as far as the archive's manifest chain tells"
            return Unkept(text, ReasonCode.BAD_SIGNATURE)
        if self._chain.revoked(envelope.signer, size - 1):
            text = "it was signed by a coordinator key that the run's root revoked from an entry before its last one on"
            return Unkept(text, ReasonCode.KEY_REVOKED, moot=True)
        if size > self._log.size:
            return Unkept(f"the archive's ledger ends after {self._log.size} entries, {size} were promised", cut=True)
        return None

    def _entry(self, receipt: Receipt, owner: bytes) -> Unkept | None:
        if receipt.index >= receipt.tree_size:
            return Unkept("the promised entry lies outside the promised tree")
        sealed = self._entries.get(receipt.index)
        if sealed is None:
            return Unkept(f"entry {receipt.index} of the archive's ledger is missing or damaged", moot=True)
        if leaf_hash(sealed.envelope.raw) != receipt.leaf:
            return Unkept(f"the archive's ledger has another entry {receipt.index} than was promised")
        if sealed.entry.event != "submission" or not _names(sealed.entry.subject, owner, receipt):
            return Unkept(f"entry {receipt.index} is not this node's submission of these bytes")
        return None

    def _root(self, size: int, root: bytes) -> Unkept | None:
        found = self._roots.get(size)
        if found is None:
            return Unkept(f"an entry before {size} is damaged, so the promised root can't be computed", moot=True)
        if found != root:
            message = f"the first {size} entries of the archive's ledger have another root than was promised"
            return Unkept(message, ReasonCode.HEADS_CONFLICT)
        return None


def _names(subject: bytes, owner: bytes, receipt: Receipt) -> bool:
    try:
        envelope = parse(subject)
        intent = envelope.record(UploadIntent)
    except ProtocolError:
        return False
    return (envelope.signer, intent.lease_id, intent.digest) == (owner, receipt.lease_id, receipt.digest)


def _roots(log: SealedLog, sizes: set[int]) -> dict[int, bytes]:
    """Tree size -> root, for those that can be computed from the archive: every entry before must be readable."""
    tree, roots = MerkleLog(), {}
    for sealed in log.entries:
        if sealed.index != tree.size:
            break
        tree.append(leaf_hash(sealed.envelope.raw))
        if tree.size in sizes:
            roots[tree.size] = tree.root()
    return roots


# --- what an auditor brings along -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Brought:
    """A file with a promise in it."""

    path: Path
    envelope: Envelope
    receipt: Receipt | None
    size: int
    root: bytes

    @property
    def record(self) -> str:
        return f"receipt {self.path}" if self.receipt is not None else f"head {self.path}"


def read_promises(receipts: Sequence[Path], heads: Sequence[Path]) -> list[Brought]:
    """The files that `--receipt` and `--head` name. A head may be a receipt: it promises one too.

    Raises:
        UsageError: a file can't be read, is damaged, or holds something else.
    """
    return [_read(path, (RECEIPT_KIND,)) for path in receipts] + [
        _read(path, (TREE_KIND, RECEIPT_KIND)) for path in heads
    ]


def _read(path: Path, kinds: tuple[str, ...]) -> Brought:
    try:
        envelope = parse(read_at_most(path, MAX_ENVELOPE_BYTES + 1))
        open_envelope(envelope.raw, run=envelope.run)
        if envelope.kind not in kinds:
            raise LedgerError(f"it is a message of the kind {envelope.kind!r}")
        if envelope.kind == RECEIPT_KIND:
            receipt = envelope.record(Receipt)
            return Brought(path, envelope, receipt, receipt.tree_size, receipt.tree_root)
        head = envelope.record(TreeHead)
        if head.size < 1:
            raise LedgerError("it promises an empty ledger, which every ledger keeps")
    except OSError as exc:
        raise UsageError(f"{path} can't be read ({exc.strerror or exc}); name a file of a node's home") from exc
    except ProtocolError as exc:
        raise UsageError(
            f"{path} is no {' and no '.join(kinds)} that a coordinator signed ({exc}); a node keeps them in its home: "
            "runs/<run id>/receipts/*.hw and runs/<run id>/head.hw"
        ) from exc
    return Brought(path, envelope, None, head.size, head.root)


def check_promises(archive: RunArchive, brought: Sequence[Brought], report: Report) -> None:
    """Hold what an auditor brought against the archive's ledger."""
    ledger = Promises(archive.run, archive.log, {one.size for one in brought})
    for one in brought:
        if one.envelope.run != archive.run.id:
            message = f"it is a promise about run {one.envelope.run.hex()}, and this archive is of another run"
            report.fail(one.record, ReasonCode.WRONG_RUN, message)
            continue
        if one.receipt is not None:
            found = ledger.receipt(one.envelope, one.receipt, one.envelope.audience)
        else:
            found = ledger.head(one.envelope, one.size, one.root)
        if found is None:
            report.promises_kept += 1
        elif found.moot or (found.cut and not report.finished):
            report.unchecked.append((one.record, found.message))
        else:
            report.fail(one.record, found.code, found.message)
