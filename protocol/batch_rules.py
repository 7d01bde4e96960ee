"""What a batch may hold, as a pure function of the folded state: the rules of `batch` entries.

Not covered: the batch file's bytes (`verifier.batches`), which groups to choose (`trainer.batches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from protocol.errors import LedgerError
from protocol.manifest import RunManifest
from protocol.records import BatchClosed, Lease
from protocol.state_types import ACCEPTED, LeaseState, NodeState, PolicyState, SubmissionState

Sample = tuple[bytes, int, int]
"""(nonce, task, sample): the same tokens, whoever sampled them."""


def check_batch(
    closed: BatchClosed,
    manifest: RunManifest,
    newest: PolicyState | None,
    nodes: Mapping[bytes, NodeState],
    leases: Mapping[bytes, LeaseState],
    submissions: Mapping[int, SubmissionState],
    trained: Collection[Sample],
) -> list[Sample]:
    """The samples a batch trains, in its order.

    Raises:
        LedgerError: the first rule it breaks.
    """
    if closed.step >= manifest.steps:
        raise LedgerError(f"batch {closed.step} of a run of {manifest.steps} steps")
    if newest is None or closed.epoch != newest.epoch:
        raise LedgerError(f"batch {closed.step} is of another epoch than the newest policy")
    samples: list[Sample] = []
    groups: Counter[tuple[int, int]] = Counter()
    known: dict[int, Lease] = {}
    for item in closed.entries:
        submission = submissions.get(item.submission)
        if submission is None or item.rollout >= len(submission.outcomes):
            raise LedgerError(f"it names rollout {item.rollout} of submission {item.submission}: there is none")
        outcome = submission.outcomes[item.rollout]
        if outcome.status != ACCEPTED or submission.verdict_index is None or outcome.verdict != item.verdict:
            raise LedgerError(
                f"rollout {item.rollout} of submission {item.submission} was not accepted by verdict {item.verdict}"
            )
        lease = known.get(item.submission)
        if lease is None:
            lease = known[item.submission] = _trainable(closed, manifest, submission, nodes, leases)
        task, sample = divmod(item.rollout, lease.samples)
        groups[(item.submission, task)] += 1
        samples.append((lease.nonce, lease.tasks[task], sample))
    if len(set(samples)) != len(samples) or any(sample in trained for sample in samples):
        raise LedgerError("a rollout is trained twice")
    for (number, _), count in groups.items():
        if count != leases[submissions[number].lease_id].lease.samples:
            raise LedgerError(f"a part of a group of submission {number}: groups are trained whole or not at all")
    return samples


def _trainable(
    closed: BatchClosed,
    manifest: RunManifest,
    submission: SubmissionState,
    nodes: Mapping[bytes, NodeState],
    leases: Mapping[bytes, LeaseState],
) -> Lease:
    """The lease of a submission this batch may take rollouts of; raises LedgerError otherwise."""
    if nodes[submission.owner].state == "suspended":
        raise LedgerError(f"submission {submission.index} is from a suspended node")
    lease = leases[submission.lease_id].lease
    if not 0 <= closed.step - lease.step <= manifest.leases.max_staleness:
        raise LedgerError(f"submission {submission.index} was sampled by policy {lease.step}: too old, or too new")
    return lease
