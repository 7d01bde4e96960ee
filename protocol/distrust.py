"""Who checks validators, and what follows when one is found to be wrong: pure functions of the folded state.

The coordinator checks a drawn share of the accepted rollouts itself (`to_check`) and enters `evidence.verdict` where it
contradicts their verdict. Then that validator is suspended, and its verdicts are void, everywhere and for good. What is
still open is weighed without them. A decision is taken back where a rollout that a batch could still take was accepted
on nothing but them: a validator is drawn for it in another round. Where none can be, because the secret of its draw
period is known, what was accepted so becomes inconclusive, and its tasks are leased again under the same nonce.

    open                                    goes on without the void verdicts
    accepted, not trained, may still be     taken back, and judged again
    accepted and trained                    stays in its batch; `unverified` counts it from here on
    rejected, its owner suspended           unless two others reject it too, the owner is heard again (`standing`), and
                                            the submission is judged again for that: others sampled it by now
    inconclusive                            stays: it may have been leased again by now
    suspensions by sums over verdicts       end; the coordinator makes the sums again without the void ones

Not covered: whether the accusation is true (the audit makes the check again: `verifier.spot_audit`), what ends trust in
the validator itself (`state`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from protocol import decision, draws, standing
from protocol.errors import LedgerError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.manifest import RunManifest
from protocol.records import ACCEPT, REJECT
from protocol.state_types import (
    ACCEPTED,
    DISCARDED,
    PENDING,
    NodeState,
    PeriodState,
    RolloutOutcome,
    SubmissionState,
    TakenBack,
)

_REJECTIONS = frozenset(
    {
        ReasonCode.FORMAT,
        ReasonCode.WRONG_TASK,
        ReasonCode.TOKEN_RANGE,
        ReasonCode.TERMINATION,
        ReasonCode.PROOF_MALFORMED,
        ReasonCode.PROOF_MISMATCH,
        ReasonCode.TOKEN_NOT_FORCED,
        ReasonCode.LOGPROB_MISMATCH,
        ReasonCode.ROUTES_MALFORMED,
        ReasonCode.ROUTES_FORGED,
        ReasonCode.REWARD_MISMATCH,
    }
)


def to_check(
    submission: SubmissionState, samples: int, secret: bytes, outcomes: Sequence[RolloutOutcome] | None = None
) -> list[tuple[int, int]]:
    """(ledger index of its verdict, position) of each accepted rollout that the coordinator is to check itself: all
    those of the groups that are drawn.

    Args:
        samples: rollouts of a group, as the lease says.
        secret: of the submission's draw period.
        outcomes: an earlier decision's; those of now by default.
    """
    rounds = {state.index: number for number, state in submission.verdicts.items()}
    drawn = _drawn(submission, secret)
    return [
        (outcome.verdict, position)
        for position, outcome in enumerate(submission.outcomes if outcomes is None else outcomes)
        if outcome.status == ACCEPTED
        and outcome.verdict is not None
        and drawn(rounds[outcome.verdict], position // samples)
    ]


def _drawn(submission: SubmissionState, secret: bytes) -> Callable[[int, int], bool]:
    """Whether (round, place of a task) is drawn: asked of every rollout, and the same for a whole group."""
    digest, number = submission.intent.digest, submission.number
    return functools.cache(lambda round_number, task: draws.wants_check(secret, digest, number, round_number, task))


def accused(said: VerdictEvidence, submissions: Iterable[SubmissionState]) -> bytes:
    """The key of the validator whose verdict is said to be wrong.

    Raises:
        LedgerError: no such verdict, or what is said would not contradict it.
    """
    found = next(
        (state for one in submissions for state in one.verdicts.values() if state.index == said.verdict),
        None,
    )
    if found is None or said.rollout >= len(found.verdict.outcomes):
        raise LedgerError(f"there is no verdict {said.verdict} on a rollout {said.rollout}")
    given = found.verdict.outcomes[said.rollout].outcome
    if given == ACCEPT:
        rejected = said.outcome == REJECT and said.reason in _REJECTIONS
        contradicts = rejected or (said.outcome == ACCEPT and said.reason == ReasonCode.VERDICT_WRONG)
    else:
        contradicts = given == REJECT and said.outcome == ACCEPT and said.reason == ReasonCode.HOLDS
    if not contradicts:
        raise LedgerError("what it says does not contradict what the verdict says of this rollout")
    return found.validator


def rejections_to_check(submission: SubmissionState, samples: int, secret: bytes) -> list[tuple[int, int]]:
    """The same of the rollouts that its verdicts reject, whatever became of them: the same draw, of the same groups."""
    drawn = _drawn(submission, secret)
    return [
        (state.index, position)
        for round_number, state in submission.verdicts.items()
        for position, outcome in enumerate(state.verdict.outcomes)
        if outcome.outcome == REJECT and drawn(round_number, position // samples)
    ]


def all_said(submission: SubmissionState) -> list[tuple[int, int]]:
    """The same of everything that its verdicts say, decided or not: a phantom's work is checked whole (`phantoms`)."""
    return [
        (state.index, position)
        for state in submission.verdicts.values()
        for position, outcome in enumerate(state.verdict.outcomes)
        if outcome.outcome in (ACCEPT, REJECT)
    ]


def may_train(step: int, batches: int, manifest: RunManifest) -> bool:
    """Whether some batch to come could take rollouts of policy `step`, after so many batches."""
    return batches < manifest.steps and step >= batches - manifest.leases.max_staleness


def first_verdict(submissions: Iterable[SubmissionState], validator: bytes) -> int:
    """Ledger index of the first verdict of a validator that gave some."""
    return min(state.index for one in submissions for state in one.verdicts.values() if state.validator == validator)


def void(
    submissions: Iterable[SubmissionState], validator: bytes, nodes: Mapping[bytes, NodeState]
) -> Iterator[SubmissionState]:
    """Make every verdict of a validator void, and the counts those of the others; yields the submissions that held
    one."""
    for submission in submissions:
        rounds = {number for number, state in submission.verdicts.items() if state.validator == validator}
        if rounds - submission.void:
            standing.count(submission, nodes, -1)
            submission.void |= rounds
            standing.count(submission, nodes)
            if submission.verdict_index is None:
                _keep_what_stands(submission)
            yield submission


def _keep_what_stands(submission: SubmissionState) -> None:
    """Of what is kept of an open submission, what was accepted on void verdicts alone is open as well."""
    heard = [state.verdict.outcomes for state in decision.standing(submission)]
    for i, outcome in list(submission.kept.items()):
        if outcome.status == ACCEPTED and not any(outcomes[i].outcome == ACCEPT for outcomes in heard):
            del submission.kept[i]
    if submission.kept or submission.taken_back:
        pending = RolloutOutcome(PENDING)
        submission.outcomes = tuple(
            one if one.status == DISCARDED else submission.kept.get(i, pending)
            for i, one in enumerate(submission.outcomes)
        )


def take_back(
    submission: SubmissionState, nodes: Mapping[bytes, NodeState], trained: Collection[tuple[int, int]], index: int
) -> bool:
    """Open a decided submission again if a rollout of it that is not trained was accepted on void verdicts alone.

    Its owner's counts become what they were before it was decided, and it waits for a verdict. What is not opened again
    rests on the verdicts that count from here on.

    Args:
        trained: (submission, rollout) of everything in a batch.
        index: of the entry that makes verdicts void.
    """
    outcomes, decided, kept, owner = submission.outcomes, submission.verdict_index, submission.kept, submission.owner
    if decided is None or nodes[owner].state == "suspended":
        return False
    accepted = {i for i, outcome in enumerate(outcomes) if outcome.status == ACCEPTED}
    submission.kept = {i: outcome for i, outcome in enumerate(outcomes) if i not in accepted}
    weighed = decision.weigh(submission)
    free = {i for i in accepted if (submission.index, i) not in trained}
    if all(weighed[i].status == ACCEPTED for i in free):  # somebody else accepted them too: their numbers are taken
        submission.outcomes = tuple(weighed[i] if i in free else outcome for i, outcome in enumerate(outcomes))
        submission.kept = kept
        return False
    standing.count(submission, nodes, -1)
    submission.taken_back.append(TakenBack(index, decided, outcomes))
    submission.verdict_index = None
    submission.tie_time, submission.tie_over = None, False
    submission.outcomes = tuple(submission.kept.get(i, RolloutOutcome(PENDING)) for i in range(len(outcomes)))
    nodes[owner].undecided.add(submission.index)
    return True


def ends_here(submission: SubmissionState, periods: Sequence[PeriodState]) -> bool:
    """Whether a submission that was taken back waits for a draw that can't be made: its period's secret is known."""
    if not submission.taken_back or submission.verdict_index is not None or submission.open_rounds:
        return False
    return submission.period is not None and periods[submission.period].secret is not None


def unverified(submissions: Mapping[int, SubmissionState], trained: Iterable[tuple[int, int]]) -> int:
    """Rollouts in batches whose acceptance no verdict that counts supports now."""
    count = 0
    for index, rollout in trained:
        submission = submissions[index]
        if submission.outcomes[rollout].status != ACCEPTED:
            count += 1
        elif submission.void:
            said = [state.verdict.outcomes[rollout].outcome for state in decision.standing(submission)]
            count += ACCEPT not in said
    return count
