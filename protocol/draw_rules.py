"""What draw periods and jobs may follow, as pure functions of the folded state: rules of `draws.*` and `job` entries.

Not covered: whether a draw is the right one (the audit: it needs the secret that is revealed later), how verdicts
decide a submission (`decision`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blake3 import blake3

from protocol import decision, draws
from protocol.errors import LedgerError
from protocol.manifest import RunManifest
from protocol.records import DrawsOpened, DrawsRevealed, JobDrawn
from protocol.state_types import PeriodState, SubmissionState


def check_opened(opened: DrawsOpened, periods: Sequence[PeriodState], manifest: RunManifest) -> None:
    """Raise LedgerError unless the next period may begin, at these rates."""
    if opened.period != len(periods):
        raise LedgerError(f"period {opened.period} came where {len(periods)} was expected")
    if periods and periods[-1].submissions < draws.PERIOD_SUBMISSIONS:
        raise LedgerError(f"a new secret after {periods[-1].submissions} of {draws.PERIOD_SUBMISSIONS} submissions")
    if opened.second_draw < manifest.leases.second_draw:
        raise LedgerError("fewer second draws than the run's manifest promises")
    if opened.probation_factor < draws.SECOND_DRAW_IN_PROBATION:
        raise LedgerError("fewer second draws in probation than the protocol asks for")


def check_revealed(revealed: DrawsRevealed, periods: Sequence[PeriodState], all_closed: bool) -> PeriodState:
    """The period whose secret this is.

    Args:
        all_closed: every batch of the run is closed: what has no verdict by now never will.

    Raises:
        LedgerError: no such period, shown before, another secret, or one that open jobs still rest on.
    """
    if revealed.period >= len(periods):
        raise LedgerError(f"period {revealed.period} was never opened")
    period = periods[revealed.period]
    if period.secret is not None:
        raise LedgerError(f"period {revealed.period} is already revealed")
    if blake3(revealed.secret).digest() != period.opened.commitment:
        raise LedgerError(f"not the secret that period {revealed.period} is bound to")
    if period.open_jobs and not all_closed:
        raise LedgerError(f"{len(period.open_jobs)} jobs of period {revealed.period} still wait for their verdict")
    return period


def check_round(job: JobDrawn, submission: SubmissionState | None, used: bool, undecided: bool) -> SubmissionState:
    """The submission of a job whose round may be drawn now.

    Args:
        used: an earlier job has this id.
        undecided: the owner still waits for this submission's decision: it is not suspended.

    Raises:
        LedgerError: no such submission or round, decided already, or nothing asks for it.
    """
    if submission is None:
        raise LedgerError("no submission has this index")
    if not 1 <= job.round <= decision.last_round(submission):
        raise LedgerError(f"there is no round {job.round}")
    if used or job.round in submission.verdicts:
        raise LedgerError("the job id is used, or the round already has its verdict")
    if submission.verdict_index is not None:
        raise LedgerError("the submission is already decided")
    needed = job.round in submission.jobs or decision.next_round(submission) == job.round
    if not needed and (job.round >= decision.ROUNDS or job.round - 1 not in submission.jobs) and undecided:
        raise LedgerError(f"nothing asks for round {job.round} yet")
    return submission


def check_draw(
    job: JobDrawn, submission: SubmissionState, periods: Sequence[PeriodState], present: Collection[bytes]
) -> PeriodState:
    """The period a job is drawn in.

    Raises:
        LedgerError: not the submission's period, not the next attempt, its secret is known, or its validator may not
            judge this submission.
    """
    if decision.others(submission, job.round).get(job.validator) is False:
        raise LedgerError("the second validator must be another one than the first")
    if submission.period is None:
        raise LedgerError("the submission came while no draw period was open")
    if job.period != submission.period or job.attempt != submission.attempts.get(job.round, 0):
        raise LedgerError("another draw period or attempt than the submission's")
    period = periods[submission.period]
    if period.secret is not None:
        raise LedgerError("drawn with a secret that was already revealed")
    if job.validator not in present:
        raise LedgerError("the validator was not present")
    return period
