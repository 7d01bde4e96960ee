"""Draws validators: decided before anybody could choose them, written down, and shown afterwards (RULES 6).

    draws.opened n -> submissions and their jobs -> draws.opened n + 1 -> all of n has its verdict -> draws.revealed n

Each period has a secret that follows from the coordinator's own; its hash is in the ledger before the first submission
it judges, itself when nothing depends on it any more. Whom was drawn from is in the ledger too (`validators`), so
anybody can repeat every draw. Whatever is missing after a crash is written by the next `keep_in_step`.

Not covered: who is a candidate and what a draw is (`protocol.draws`), which round is due (`protocol.decision`), handing
jobs out (`judging`).
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from protocol import decision, draws
from protocol.records import DrawsOpened, DrawsRevealed, JobDrawn, ValidatorsPresent
from protocol.state import DISCARDED, SubmissionState
from trainer.book import Book
from trainer.members import Members


@dataclass
class Drawing:
    """The draws of one run. Every method appends entries; the caller commits."""

    book: Book
    members: Members

    # --- periods --------------------------------------------------------------------------------------------------

    def keep_in_step(self) -> None:
        """Open a period if none is open or the newest is full, reveal those that are done, note who is present."""
        state = self.book.state
        if state.finished is not None:
            return
        self.note_present()
        waiting = {state.submissions[index].period for index in self.book.window.unjudged}
        unrevealed = [n for n, period in enumerate(state.periods[:-1]) if period.secret is None]
        for number in unrevealed:
            if number not in waiting and not state.periods[number].open_jobs:
                self._reveal(number)
        self.open_if_due()

    def open_if_due(self) -> None:
        """Open the next period when a submission could not belong to the newest one."""
        state = self.book.state
        newest = state.periods[-1] if state.periods else None
        if newest is not None and newest.secret is None:
            behind = any(period.secret is None for period in state.periods[:-1])
            if behind or newest.submissions < draws.PERIOD_SUBMISSIONS:
                return  # at most two are unrevealed: a judge that never answers makes a period long, never a queue
        number = len(state.periods)
        commitment = blake3(self.secret(number)).digest()
        rate = self.book.run.manifest.leases.second_draw
        opened = DrawsOpened(number, commitment, rate, draws.SECOND_DRAW_IN_PROBATION)
        self.book.append("draws.opened", opened)

    def reveal_all(self) -> None:
        """Before the run's end: what is not decided by now never will be."""
        for number, period in enumerate(self.book.state.periods):
            if period.secret is None:
                self._reveal(number)

    def _reveal(self, number: int) -> None:
        self.book.append("draws.revealed", DrawsRevealed(number, self.secret(number)))

    def secret(self, period: int | None) -> bytes:
        """A period's secret; the coordinator's own for submissions from before there were periods."""
        return self.book.secret if period is None else draws.period_secret(self.book.secret, period)

    def note_present(self) -> None:
        """Write down whom the next draw is made from, if that changed."""
        present = tuple(sorted(self.members.validators()))
        if present != self.book.state.present:
            self.book.append("validators", ValidatorsPresent(present))

    # --- jobs -----------------------------------------------------------------------------------------------------

    def first(self, index: int) -> None:
        """The jobs a submission begins with: round 1 and, by rate, round 2 at once."""
        submission = self.book.state.submissions[index]
        if submission.outcomes and submission.outcomes[0].status == DISCARDED:
            return  # its owner is suspended
        if not self.draw(submission, 1):
            return
        assert self.book.state.present is not None
        rate = self.book.run.manifest.leases.second_draw
        if submission.period is not None:
            rate = self.book.state.periods[submission.period].opened.second_draw
        secret = self.secret(submission.period)
        if len(self.book.state.present) > 1 and draws.wants_second(
            secret, submission.intent.digest, submission.number, rate, submission.probation
        ):
            self.draw(submission, 2)

    def draw(self, submission: SubmissionState, number: int) -> bool:
        """Draw a validator for one round. False when nobody is there, or only the one drawn before for it."""
        self.note_present()
        before = submission.jobs.get(number)
        previous = None if before is None else before.validator
        present = self.book.state.present or ()
        found = draws.candidates(present, decision.others(submission, number), previous)
        if not found or found == [previous]:
            return False
        secret = self.secret(submission.period)
        attempt = submission.attempts.get(number, 0)
        drawn = draws.draw_validator(secret, submission.intent.digest, submission.number, number, attempt, found)
        assert drawn is not None
        name = draws.job_id(secret, submission.number, number, attempt)
        self.book.append("job", JobDrawn(name, submission.index, drawn, number, submission.period or 0, attempt))
        return True

    def after_verdict(self, submission: SubmissionState) -> None:
        """Draw the round that a verdict made necessary, in the verdict's own transaction."""
        number = decision.next_round(submission)
        if number is not None:
            self.draw(submission, number)
