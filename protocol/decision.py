"""How verdicts decide a submission, as pure functions of what the ledger holds of it.

Per rollout, over the verdicts so far, each validator counted once:

    two REJECT                          rejected
    a REJECT and two ACCEPT             accepted
    a REJECT and an ACCEPT              a tie: open while a third validator may settle it, then inconclusive
    an ACCEPT, no REJECT                accepted
    one REJECT and nothing else         open: nobody is condemned on one word
    nothing but INCONCLUSIVE            open: nobody has said anything yet

A submission waits while a job drawn for it is open. After that, while a rollout is open, another round is drawn, three
rounds at most; what is still open then is inconclusive. Two REJECTs on one rollout end it at once: its owner is
suspended, and nothing else of it can be learned from.

A tie is between two validators of which one is wrong, so neither can keep the other's word from counting. It is
inconclusive at once when nobody else is present, and when the third one did not answer for `TIE_LEASES` lease durations
(`tie.lapsed`): a run with two validators, or one whose third vanished, does not hang on it.

The verdict of a validator that was found to be wrong is void (`distrust`): it counts as if it was never given, and its
round is no longer one of the three.

Not covered: who is drawn (`draws`), what a decision means for the owner (`state`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from protocol import draws
from protocol.errors import LedgerError
from protocol.records import ACCEPT, REJECT, Outcome
from protocol.state_types import (
    ACCEPTED,
    DISCARDED,
    PENDING,
    REJECTED,
    UNDECIDED,
    RolloutOutcome,
    SubmissionState,
    VerdictState,
)

ROUNDS = 3
"""Most verdicts a submission gets. A fourth would only help who can make validators fail at will; with two, one
validator that runs out of memory decides that honest work is lost."""


TIE_LEASES = 2
"""Lease durations a tie waits for its third validator: long enough to judge anything a lease can hold, and to draw
another one when the first vanished. Less lets a slow validator shield what a colluding one accepted; more keeps a
node in probation, which has one lease at a time, idle for longer over somebody else's machine."""


def weigh(submission: SubmissionState) -> tuple[RolloutOutcome, ...]:
    """What the verdicts so far say of each rollout; PENDING where another round could still settle it."""
    verdicts = sorted(standing(submission), key=lambda state: state.index)
    if not verdicts and not submission.kept:
        return (RolloutOutcome(),) * len(submission.outcomes)
    said: dict[tuple[Outcome, ...], RolloutOutcome] = {}  # most rollouts of a lease are told the same
    weighed = []
    for position in range(len(submission.outcomes)):
        if position in submission.kept:
            weighed.append(submission.kept[position])
            continue
        words = tuple(state.verdict.outcomes[position] for state in verdicts)
        outcome = said.get(words)
        if outcome is None:
            outcome = said[words] = _weigh_one(verdicts, position, _may_settle(submission))
        weighed.append(outcome)
    return tuple(weighed)


def standing(submission: SubmissionState) -> list[VerdictState]:
    """The verdicts that count."""
    return [state for number, state in submission.verdicts.items() if number not in submission.void]


def last_round(submission: SubmissionState) -> int:
    """The last round that may be drawn for it."""
    return ROUNDS + len(submission.void)


def _may_settle(submission: SubmissionState) -> bool:
    """Whether a tie still waits for its third validator."""
    return not submission.tie_over and last_round(submission) not in submission.verdicts


def _weigh_one(verdicts: list[VerdictState], position: int, may_settle: bool) -> RolloutOutcome:
    accepts: dict[bytes, VerdictState] = {}
    rejects: dict[bytes, VerdictState] = {}
    reason = ""
    for state in verdicts:
        outcome = state.verdict.outcomes[position]
        if outcome.outcome == ACCEPT:
            accepts[state.validator] = state
        elif outcome.outcome == REJECT:
            rejects[state.validator] = state
        reason = outcome.reason
    if rejects:
        reason = [*rejects.values()][-1].verdict.outcomes[position].reason
    if len(rejects) >= 2:
        return RolloutOutcome(REJECTED, reason)
    if rejects and accepts and len(accepts.keys() - rejects.keys()) < 2:
        return RolloutOutcome(PENDING if may_settle else UNDECIDED, reason)
    if accepts:
        newest = [*accepts.values()][-1]
        return RolloutOutcome(ACCEPTED, newest.verdict.outcomes[position].reason, newest.index)
    return RolloutOutcome(PENDING, reason)


def contested(submission: SubmissionState) -> str:
    """The reason of a REJECT that waits to be repeated or contradicted; empty when there is none.

    A tie is contradicted: its owner works on, so that one validator that rejects everything holds up nobody.
    """
    return next((outcome.reason for outcome, said in _open(submission) if said == {REJECT}), "")


def tied(submission: SubmissionState) -> bool:
    """Whether a rollout has a REJECT and an ACCEPT and waits for a third validator, with no job open."""
    if submission.open_rounds or len(standing(submission)) < 2:
        return False
    return any(said == {ACCEPT, REJECT} for _, said in _open(submission))


def _open(submission: SubmissionState) -> Iterator[tuple[RolloutOutcome, set[int]]]:
    """Of each rollout that is open: what `weigh` says, and what its verdicts said either way."""
    heard = [state.verdict.outcomes for state in standing(submission)]
    if not any(outcome.outcome == REJECT for outcomes in heard for outcome in outcomes):
        return
    for position, outcome in enumerate(weigh(submission)):
        if outcome.status == PENDING:
            yield outcome, {outcomes[position].outcome for outcomes in heard} & {ACCEPT, REJECT}


def outvoted(submission: SubmissionState) -> dict[bytes, int]:
    """Validator -> rollouts of a decided submission of which two others found the opposite of what it said."""
    wrong: Counter[bytes] = Counter()
    decided = submission.verdict_index or 0
    heard = [state for state in standing(submission) if state.index <= decided]
    if not any(one.outcome == REJECT for state in heard for one in state.verdict.outcomes) and not any(
        outcome.status == REJECTED for outcome in submission.outcomes
    ):
        return {}  # nearly all submissions, and this is asked twice of each
    opposite = {ACCEPTED: REJECT, REJECTED: ACCEPT}
    for position, outcome in enumerate(submission.outcomes):
        if outcome.status in opposite:
            wrong.update(
                {
                    state.validator
                    for state in heard
                    if state.verdict.outcomes[position].outcome == opposite[outcome.status]
                }
            )
    return dict(wrong)


def next_round(submission: SubmissionState) -> int | None:
    """The round a validator must be drawn for now; None when it is decided, discarded, or waits for an answer.

    A second draw by rate is not in here: it needs the period's secret (`draws.wants_second`).
    """
    return _next_round(submission, None)


def _next_round(submission: SubmissionState, outcomes: tuple[RolloutOutcome, ...] | None) -> int | None:
    """The same, with what `weigh` says for who knows it already."""
    if submission.verdict_index is not None or (submission.outcomes and submission.outcomes[0].status == DISCARDED):
        return None
    if submission.open_rounds:
        return None
    if not submission.jobs:
        return 1
    statuses = {outcome.status for outcome in (weigh(submission) if outcomes is None else outcomes)}
    if REJECTED in statuses or PENDING not in statuses:
        return None
    used = max(submission.jobs)
    return used + 1 if used < last_round(submission) else None


def decide(submission: SubmissionState) -> tuple[RolloutOutcome, ...] | None:
    """The final outcomes, one per rollout, or None while a job is open or another round must be drawn."""
    if not submission.verdicts:
        return None
    outcomes = weigh(submission)
    statuses = {outcome.status for outcome in outcomes}
    lapsed = submission.tie_over and PENDING not in statuses  # the third round's job is not waited for any more
    waits = submission.open_rounds or _next_round(submission, outcomes) is not None
    if REJECTED not in statuses and waits and not lapsed:
        return None
    return settled(outcomes, submission.spent)


def settled(outcomes: Iterable[RolloutOutcome], spent: Collection[int] = ()) -> tuple[RolloutOutcome, ...]:
    """What is open stays so for good: inconclusive. So does what others have sampled again by now (`spent`), even if
    it holds: the same samples would be there twice."""
    return tuple(
        RolloutOutcome(UNDECIDED, outcome.reason)
        if outcome.status == PENDING or (i in spent and outcome.status == ACCEPTED)
        else outcome
        for i, outcome in enumerate(outcomes)
    )


def others(submission: SubmissionState, round_number: int) -> Mapping[bytes, bool]:
    """The validators of the other rounds' current jobs, for `draws.candidates`.

    The value says whether that validator may be asked once more when nobody else is there: it answered, and found
    nothing, either way, about any rollout that is still open (about none at all, when no rollout is).
    """
    if submission.jobs.keys() <= {round_number}:
        return {}
    count = len(submission.outcomes)
    still_open = [i for i, outcome in enumerate(weigh(submission)) if outcome.status == PENDING] or range(count)
    found: dict[bytes, bool] = {}
    for number, job in submission.jobs.items():
        if number == round_number:
            continue
        state = submission.verdicts.get(number)
        silent = state is not None and all(
            state.verdict.outcomes[i].outcome not in (ACCEPT, REJECT) for i in still_open
        )
        found[job.validator] = silent and found.get(job.validator, True)
    return found


def somebody_else(submission: SubmissionState, present: Collection[bytes]) -> bool:
    """Whether the third round of a tie could go to one of the validators present."""
    return bool(draws.candidates(present, others(submission, last_round(submission)), None))


def note_tie(submission: SubmissionState, present: Collection[bytes], time: int) -> None:
    """After a verdict: begin the wait for a third validator if there is a tie now, or settle that there is none."""
    if not submission.tie_over and tied(submission):
        if somebody_else(submission, present):
            submission.tie_time = time
        else:
            submission.tie_over = True


def end_tie(submission: SubmissionState | None, present: Collection[bytes], time: int, lease_ms: int) -> None:
    """The third validator did not answer: the tie stays one.

    Args:
        time: of the ledger entry that says so.
        lease_ms: how long a lease of this run lasts.

    Raises:
        LedgerError: there is no tie, or it may still be settled. Nothing was changed.
    """
    if submission is None or submission.tie_time is None or submission.tie_over:
        raise LedgerError("no such tie waits for a third validator")
    last = last_round(submission)
    if last in submission.verdicts:
        raise LedgerError("no such tie waits for a third validator")
    if time < submission.tie_time + TIE_LEASES * lease_ms:
        raise LedgerError("the tie may still be settled")
    if last not in submission.jobs and somebody_else(submission, present):
        raise LedgerError("a third validator is there and was never asked")
    submission.tie_over = True
