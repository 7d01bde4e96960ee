"""Were validators drawn, or chosen? Every draw of a revealed period, made again from the ledger alone (RULES 6).

    ledger/<index>   the job there went to another validator than the draw gives, carries another id, is a second draw
                     that neither the rate nor a verdict asks for, or is not followed by the second draw that was due
    ledger/<index>   the draw period opened there is over, and its secret was never shown

A period's secret is due when the run is finished, or when two periods were opened after it. A run that was stopped
before that has failed nothing: its draws wait.

Not covered: whether the coordinator drew again until it liked the answer. The redraws are counted and reported; a draw
is made again when a validator does not answer, and only validators know whether they were asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol import codec, decision, draws
from protocol.errors import DecodeError, ReasonCode
from protocol.identity import peer_id_text
from protocol.records import JobDrawn
from protocol.state import RunState
from verifier.archive import RunArchive
from verifier.report import Report


@dataclass(frozen=True)
class Drawn:
    """One job entry that the fold took, and what it was drawn from."""

    index: int
    job: JobDrawn
    candidates: tuple[bytes, ...]
    present: int
    """Validators present when it was drawn."""
    first: bool
    """The first job of its round."""
    needed: bool
    """A verdict, or the absence of any, asked for this round."""


@dataclass
class Draws:
    """Follows a ledger entry by entry beside the fold."""

    state: RunState = field(default_factory=RunState)
    jobs: list[Drawn] = field(default_factory=list)

    def fold(self, archive: RunArchive) -> RunState:
        """The state after the archive's unbroken entries, noting each draw on the way."""
        for sealed in archive.unbroken():
            drawn = self._look(sealed.index, sealed.entry.body) if sealed.entry.event == "job" else None
            known = len(self.state.problems)
            self.state.apply(sealed.index, sealed.entry)
            if drawn is not None and len(self.state.problems) == known:
                self.jobs.append(drawn)
        return self.state

    def _look(self, index: int, body: bytes) -> Drawn | None:
        """What the state just before a job entry says of its draw."""
        try:
            job = codec.decode(JobDrawn, body)
        except DecodeError:
            return None  # the fold will name it
        submission = self.state.submissions.get(job.submission)
        if submission is None:
            return None
        before = submission.jobs.get(job.round)
        present = self.state.present
        chosen = draws.candidates(
            present, decision.others(submission, job.round), before.validator if before is not None else None
        )
        needed = decision.next_round(submission) == job.round
        return Drawn(index, job, tuple(chosen), len(present), before is None, needed)

    def check(self, report: Report) -> None:
        """Make every draw again whose secret is known; what differs goes into the report."""
        state = self.state
        report.jobs_redrawn = sum(not drawn.first for drawn in self.jobs)
        report.jobs_unanswered = sum(len(submission.open_rounds) for submission in state.submissions.values())
        by_index = {drawn.index: drawn for drawn in self.jobs}
        for drawn in self.jobs:
            submission = state.submissions[drawn.job.submission]
            period = state.periods[submission.period] if submission.period is not None else None
            if period is None or period.secret is None:
                report.draws_waiting += 1
                continue
            report.draws_checked += 1
            for wrong in self._wrong(drawn, period.secret, by_index):
                report.fail(f"ledger/{drawn.index}", ReasonCode.DRAW_WRONG, wrong)
        self._check_reveals(report)

    def _wrong(self, drawn: Drawn, secret: bytes, by_index: dict[int, Drawn]) -> list[str]:
        job, state = drawn.job, self.state
        submission = state.submissions[job.submission]
        digest, number = submission.intent.digest, submission.number
        out = []
        expected = draws.draw_validator(secret, digest, number, job.round, job.attempt, drawn.candidates)
        if job.validator != expected:
            who = peer_id_text(expected) if expected is not None else "nobody"
            took = peer_id_text(job.validator)
            out.append(f"round {job.round} of submission {job.submission} went to {took}, but the draw gives {who}")
        if job.job_id != draws.job_id(secret, number, job.round, job.attempt):
            out.append("the job's id is not the one that the period's secret gives")
        if not drawn.first or job.round > 2:
            return out
        assert submission.period is not None
        rates = state.periods[submission.period].opened
        due = draws.wants_second(
            secret, digest, number, rates.second_draw, submission.probation, rates.probation_factor
        )
        if job.round == 2:
            first = by_index.get(drawn.index - 1)
            by_rate = first is not None and (first.job.submission, first.job.round) == (job.submission, 1) and due
            if not drawn.needed and not (by_rate and first is not None and first.present > 1):
                out.append(f"a second draw for submission {job.submission} that neither rate nor verdict asks for")
        elif due and drawn.present > 1 and drawn.index + 1 < state.size:
            following = by_index.get(drawn.index + 1)
            if following is None or (following.job.submission, following.job.round) != (job.submission, 2):
                out.append(f"submission {job.submission} had to get a second validator with this draw and got none")
        return out

    def _check_reveals(self, report: Report) -> None:
        periods = self.state.periods
        for number, period in enumerate(periods):
            over = number + 2 < len(periods) or self.state.finished is not None
            if period.secret is None and over:
                report.fail(
                    f"ledger/{period.index}",
                    ReasonCode.DRAW_NOT_REVEALED,
                    f"draw period {number} is over, but its secret was never shown",
                )
