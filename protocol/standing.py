"""What its record makes of a node: probation, active, paused or suspended, and the way back from the last.

    settle     probation, active or paused, from its counts and from what waits
    suspend    trust ends; what is undecided is discarded
    rests_on   whether a suspension rests on the word of a validator that was found to be wrong
    release    its ground is gone: the node is what it would be without, unless there is another ground
    gone       whether it was suspended as of some entry, from whichever later state

A suspension ends when what it rested on counts no more: two REJECTs of which one is void; a sum (`evidence.node`,
`evidence.drop`) that such a validator's verdicts went into, which the coordinator makes again without them; a row of
the manifest that was withdrawn or loosened. What was discarded meanwhile was sampled again by others and stays so.

Counts of a node (`count`) are of the verdicts that count: an acceptance that rests on void ones alone is no step
towards the end of probation, and two validators of whom one was wrong outvote nobody.

Not covered: how verdicts decide a submission (`decision`), whose verdicts are void (`distrust`), when (`state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protocol import decision
from protocol.chain import Chain
from protocol.errors import ReasonCode
from protocol.evidence_rows import EvidenceRow, as_loose
from protocol.manifest import RunManifest
from protocol.records import ACCEPT
from protocol.state_types import (
    ACCEPTED,
    DISCARDED,
    PENDING,
    REJECTED,
    UNDECIDED,
    Cleared,
    NodeState,
    RolloutOutcome,
    SubmissionState,
    TakenBack,
)

SUMMED_UP = (ReasonCode.POOLED_EVIDENCE.value, ReasonCode.DROPPED_RESULTS.value)
"""Reasons of suspensions by numbers that many verdicts went into."""


def settle(node: NodeState, manifest: RunManifest | None) -> None:
    """Paused, active or probation, from the node's counts alone. A suspension stays one."""
    if node.state == "suspended":
        return
    if node.contested:
        node.state = "paused"
        return
    node.reason = ""
    assert manifest is not None  # no node joins before the run is open
    node.state = "active" if node.accepted >= manifest.leases.probation_accepted else "probation"


def suspend(
    node: NodeState,
    submissions: Mapping[int, SubmissionState],
    index: int,
    reason: str,
    *,
    case: int | None = None,
    row: EvidenceRow | None = None,
) -> None:
    """End trust with entry `index`.

    Args:
        case: the submission that was rejected. row: the row whose sum was too high.
    """
    node.state, node.suspended_index, node.reason, node.case, node.row = "suspended", index, reason, case, row
    for number in node.undecided:
        other = submissions[number]
        other.outcomes = (RolloutOutcome(DISCARDED, reason),) * len(other.outcomes)
    node.undecided.clear()
    node.contested.clear()


def gone(node: NodeState, upto: int) -> bool:
    """Whether it was suspended as of entry `upto`: by an entry below it, and not taken back below it."""
    if node.suspended_index is not None and node.suspended_index < upto:
        return True
    return any(earlier.suspended < upto <= earlier.index for earlier in node.cleared)


def count(submission: SubmissionState, nodes: Mapping[bytes, NodeState], sign: int = 1) -> None:
    """Add to its owner's counts, and those of validators, what a decided submission says; -1 takes it away."""
    if submission.verdict_index is None:
        return
    owner = nodes[submission.owner]
    statuses = [outcome.status for outcome in submission.outcomes]
    owner.accepted += sign * credited(submission)
    owner.rejected += sign * statuses.count(REJECTED)
    owner.inconclusive += sign * statuses.count(UNDECIDED)
    for validator, rollouts in decision.outvoted(submission).items():
        nodes[validator].outvoted += sign * rollouts


def credited(submission: SubmissionState) -> int:
    """Its accepted rollouts whose acceptance a verdict that counts supports."""
    accepted = [i for i, outcome in enumerate(submission.outcomes) if outcome.status == ACCEPTED]
    if not submission.void:
        return len(accepted)
    heard = [state.verdict.outcomes for state in decision.standing(submission)]
    return sum(any(outcomes[i].outcome == ACCEPT for outcomes in heard) for i in accepted)


def rests_on(node: NodeState, since: int, submissions: Mapping[int, SubmissionState]) -> bool:
    """Whether a suspension could be another without the verdicts of a validator, which are void by now.

    A sum could: any verdict of it that the sum could have read is enough, since the fold can't read numbers.

    Args:
        since: ledger index of its first verdict.
    """
    if node.state != "suspended":
        return False
    if node.case is not None:
        return not _rejected(submissions[node.case])
    return node.reason in SUMMED_UP and since < (node.suspended_index or 0)


def overruled(node: NodeState, rows: Iterable[EvidenceRow], unheard: bool) -> bool:
    """Whether a sum suspended a node whose row is none of the manifest any more, or lets more pass now.

    Args:
        unheard: a validator was revoked: its numbers count no more, so that every sum is another.
    """
    if node.state != "suspended" or node.row is None:
        return False
    if unheard:
        return True
    now = next((row for row in rows if row.statistic == node.row.statistic), None)
    return now is None or not as_loose(node.row, now)


def release(
    node: NodeState,
    submissions: Mapping[int, SubmissionState],
    nodes: Mapping[bytes, NodeState],
    index: int,
    chain: Chain | None,
) -> SubmissionState | None:
    """Take a suspension back with entry `index`, or leave it with the ground that is left.

    Args:
        chain: of the manifest, which names the keys that were revoked.

    Returns:
        The submission whose rejections were the ground, open again; it is judged for its owner's sake alone, since
        others have sampled what was rejected by now. None when there was none, or the node stays suspended.
    """
    case = None if node.case is None else submissions[node.case]
    assert chain is not None  # nobody is suspended before the run is open
    revoked = any(one.key == node.key for one in chain.revocations)
    reason, left = _other_ground(node, submissions, revoked)
    if case is not None:
        count(case, nodes, -1)
        case.taken_back.append(TakenBack(index, case.verdict_index or 0, case.outcomes))
        case.verdict_index, case.tie_time, case.tie_over = None, None, False
    if reason:
        node.reason, node.case, node.row = reason, left, None
        if case is not None:
            case.outcomes = (RolloutOutcome(DISCARDED, reason),) * len(case.outcomes)
            case.spent.update(range(len(case.outcomes)))
        return None
    node.cleared.append(Cleared(node.suspended_index or 0, index, node.reason))
    node.state, node.suspended_index, node.reason, node.case, node.row = "probation", None, "", None, None
    if case is None:
        return None
    weighed = decision.weigh(case)
    for i, outcome in enumerate(case.outcomes):
        if outcome.status == UNDECIDED or outcome.status == weighed[i].status == ACCEPTED:
            case.kept[i] = outcome if outcome.status == UNDECIDED else weighed[i]
        else:
            case.spent.add(i)
    case.outcomes = tuple(case.kept.get(i, RolloutOutcome(PENDING)) for i in range(len(case.outcomes)))
    node.undecided.add(case.index)
    return case


def _other_ground(node: NodeState, submissions: Mapping[int, SubmissionState], revoked: bool) -> tuple[str, int | None]:
    """(reason, submission) of what else would have suspended it; ("", None) without."""
    if revoked:
        return ReasonCode.KEY_REVOKED.value, None
    for other in submissions.values():
        if other.owner == node.key and other.index != node.case and (reason := _rejected(other)):
            return reason, other.index
    return "", None


def _rejected(submission: SubmissionState) -> str:
    """The reason of a rollout that two validators whose verdicts count reject; empty without."""
    return next((outcome.reason for outcome in decision.weigh(submission) if outcome.status == REJECTED), "")
