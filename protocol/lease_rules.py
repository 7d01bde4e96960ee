"""What a lease may ask for, and when it may be closed, as pure functions: the rules of `lease` and `lease.closed`.

A lease that is closed counts against its node in the drop test, so nobody but the node may end it early: it is lost by
the node's own signed word, or when the time that every lease of the run has is over.

Not covered: who may have a lease (`state`), whom to give one (`trainer.leases`).
"""

from __future__ import annotations

from protocol.envelope import Envelope
from protocol.errors import LedgerError
from protocol.limits import MAX_ROLLOUTS_PER_LEASE, submission_raw_bound
from protocol.manifest import RunManifest, routes_bound
from protocol.records import Lease, LeaseClosed, LeaseFailed
from protocol.state_types import LeaseState, NodeState

FAILED_KIND = "lease.failed"
EXPIRED, FAILED, SUSPENDED = "expired", "failed: ", "owner suspended: "
"""How the reasons in `lease.closed` begin; the last two go on in words."""


def check_terms(lease: Lease, manifest: RunManifest, chain_hash: bytes, max_bytes: int | None) -> None:
    """Whoever issues a lease may not change what is sampled or checked, nor how long or how large the answer may be.

    Args:
        chain_hash: of the newest link of the manifest's chain.
        max_bytes: bound on the uploads of earlier leases of this start of the coordinator; None for its first.

    Raises:
        LedgerError: the first rule it breaks.
    """
    if lease.manifest != chain_hash:
        raise LedgerError("it names another manifest than the newest of the run's chain")
    if lease.environment not in {spec.digest for spec in manifest.environments}:
        raise LedgerError("its environment is none of the run's")
    if lease.max_new_tokens != manifest.sampling.max_new_tokens:
        raise LedgerError(f"it allows {lease.max_new_tokens} tokens, not the run's number")
    if lease.duration_ms != manifest.leases.lease_ms:
        raise LedgerError(f"it lasts {lease.duration_ms} ms, not the run's {manifest.leases.lease_ms}")
    if max_bytes is not None and lease.max_bytes != max_bytes:
        raise LedgerError("it bounds its upload otherwise than the leases before it, with no restart between")
    if not lease.tasks or len(set(lease.tasks)) != len(lease.tasks) or not lease.samples:
        raise LedgerError("it asks for no rollouts, or for a task twice")
    if len(lease.tasks) * lease.samples > MAX_ROLLOUTS_PER_LEASE:
        raise LedgerError("it asks for more rollouts than a submission can hold")


def answer_bound(lease: Lease, manifest: RunManifest) -> int:
    """Bytes, decompressed, above which nothing is an answer to this lease."""
    return submission_raw_bound(len(lease.tasks) * lease.samples, lease.max_new_tokens, routes_bound(manifest.model))


def check_reissue(lease: Lease, first: Lease) -> None:
    """A nonce used before: the same tokens are asked for again, all of them or some. Raises LedgerError."""
    if (lease.epoch, lease.step, lease.root) != (first.epoch, first.step, first.root):
        raise LedgerError("its nonce was used under another policy")
    if (lease.samples, lease.environment) != (first.samples, first.environment) or not set(lease.tasks) <= set(
        first.tasks
    ):
        raise LedgerError("its nonce was used for other tasks")


def check_closed(closed: LeaseClosed, lease: LeaseState, owner: NodeState, now: int, outage_ms: int) -> None:
    """A lease may be closed without its node's word when its time or its node's standing is over.

    Args:
        now: the entry's time.
        outage_ms: how long the coordinator was away since the lease.

    Raises:
        LedgerError: too early, or for no reason that is one.
    """
    if closed.reason == EXPIRED:
        left = lease.time + lease.lease.duration_ms + outage_ms - now
        if left > 0:
            raise LedgerError(f"its time is not over for {left} ms")
    elif not (closed.reason.startswith(SUSPENDED) and owner.state == "suspended"):
        raise LedgerError("it is closed neither by its node nor for a reason that is one")


def check_given_up(envelope: Envelope, report: LeaseFailed, lease: LeaseState) -> None:
    """Raises LedgerError unless it is the node's own word that it gives this lease up."""
    if envelope.kind != FAILED_KIND or envelope.signer != lease.owner or report.lease_id != lease.lease_id:
        raise LedgerError("it is not its node's own word that the lease failed")
