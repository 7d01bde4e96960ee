"""Hands submissions to validators and takes their verdicts.

    submission -> round 1 job, drawn -> verdict --any REJECT, or by rate--> round 2 job, another validator -> verdict

A verdict counts only from the validator its job drew. The details file is on disk before the ledger entry, the entry
before the acknowledgement; the same verdict again gets the same answer. A job nobody answers is drawn again.

Not covered: what the verdicts do to a node (`protocol.state`), whether they are right (the audit, a second draw).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protocol import codec, draws
from protocol.control import Member
from protocol.envelope import seal
from protocol.errors import DecodeError, ProtocolError, ReasonCode
from protocol.files import write_atomic
from protocol.records import REJECT, Ack, Job, JobDrawn, JobReply, JobRequest, Verdict
from protocol.state import NodeState, SubmissionState
from trainer import batches
from trainer.book import Book
from trainer.leasing import CLOCK_S, MAX_WAIT_S, RETRY_MS, Leasing
from trainer.members import Members
from trainer.news import News, in_words

VERDICT_WAIT_S = 20.0
"""How long a verdict waits for another one of the same job that is being written down."""

REDELIVER_S = 15.0
"""A job asked for again this long after it was sent is sent again: the reply may have been lost."""


@dataclass
class Judging:
    """The validators' desk of one run."""

    book: Book
    members: Members
    leasing: Leasing
    files: batches.Files
    news: News
    job_deadline_s: float
    monotonic: Callable[[], float] = time.monotonic
    delivered: dict[bytes, float] = field(default_factory=dict)
    """Job id -> when it was last handed to its validator."""
    _writing: set[tuple[int, int]] = field(default_factory=set)
    """(submission, round) whose details are being written. Two at once would leave one verdict's details on the disk
    and the other verdict in the ledger."""

    # --- drawing --------------------------------------------------------------------------------------------------

    def draw_for(self, index: int) -> None:
        """Append the jobs a fresh submission gets: the first round, and by rate the second. The caller commits."""
        submission = self.book.state.submissions[index]
        if submission.outcomes and submission.outcomes[0].status != "pending":
            return  # discarded with its owner
        self._draw(submission, 1)
        node = self.book.state.nodes[submission.owner]
        rate = self.book.run.manifest.leases.second_draw
        if len(self.members.validators()) > 1 and draws.wants_second(
            self.book.secret, submission.intent.digest, index, rate, node.state == "probation"
        ):
            self._draw(submission, 2)

    def _draw(self, submission: SubmissionState, round_number: int) -> None:
        """Draw a validator for one round, avoiding the other round's and the one drawn before."""
        before = submission.jobs.get(round_number)
        other = submission.jobs.get(3 - round_number)
        candidates = set(self.members.validators()) - ({other.validator} if other else set())
        if before is not None:
            if not candidates - {before.validator}:
                self.delivered.pop(before.job_id, None)  # nobody else is there: ask the same one again
                return
            candidates.discard(before.validator)
            self.delivered.pop(before.job_id, None)
        attempt = self.book.ledger.size
        drawn = draws.draw_validator(
            self.book.secret, submission.intent.digest, submission.index, round_number, attempt, candidates
        )
        if drawn is None:
            return
        name = draws.job_id(self.book.secret, submission.index, round_number, attempt)
        self.book.append("job", JobDrawn(name, submission.index, drawn, round_number, 0, 0))

    def open_jobs(self) -> Iterator[tuple[SubmissionState, JobDrawn]]:
        """Drawn jobs without a verdict, oldest submission first."""
        for index in self.book.window.unjudged:
            submission = self.book.state.submissions[index]
            for number, job in submission.jobs.items():
                if number not in submission.verdicts:
                    yield submission, job

    async def redraw_forever(self) -> None:
        """Once a second, draw jobs that have no validator yet, or one that vanished or let the deadline pass."""
        while True:
            await asyncio.sleep(CLOCK_S)
            size = self.book.ledger.size
            for index in list(self.book.window.undecided):
                submission = self.book.state.submissions[index]
                for round_number in self._rounds_needed(submission):
                    if self._is_due(submission.jobs.get(round_number)):
                        self._draw(submission, round_number)
            if self.book.ledger.size > size:
                await self.book.commit()

    @staticmethod
    def _rounds_needed(submission: SubmissionState) -> list[int]:
        first = submission.verdicts.get(1)
        rejected = first is not None and any(o.outcome == REJECT for o in first.verdict.outcomes)
        wanted = [1] + ([2] if rejected or 2 in submission.jobs else [])
        return [number for number in wanted if number not in submission.verdicts]

    def _is_due(self, job: JobDrawn | None) -> bool:
        if job is None:
            return True
        sent = self.delivered.get(job.job_id)
        if sent is not None and self.monotonic() - sent > self.job_deadline_s:
            return True
        if self.monotonic() - self.members.started < self.members.config.coordinator.member_timeout_s:
            return False  # just started: validators had no chance to be heard yet
        return not self.members.live(job.validator) and bool(self.members.validators())

    # --- answering ------------------------------------------------------------------------------------------------

    async def next(self, member: Member, request: JobRequest, attachment: bytes) -> JobReply:
        """Hold the request until a job is drawn for this validator or its wait is over."""
        node = self.members.require(member, "validator")
        if not self.members.granted(node.key, "validator"):
            raise ProtocolError("this key is not admitted as a validator", ReasonCode.NOT_GRANTED)
        loop = asyncio.get_running_loop()
        end = loop.time() + min(request.wait_ms / 1000, MAX_WAIT_S)
        while True:
            ticket = self.book.changes.ticket()
            for submission, job in self.open_jobs():
                sent = self.delivered.get(job.job_id)
                if job.validator == node.key and (sent is None or self.monotonic() - sent > REDELIVER_S):
                    self.delivered[job.job_id] = self.monotonic()
                    await self.book.commit()
                    return JobReply(self._seal(node, submission, job), 0)
            left = end - loop.time()
            if left <= 0:
                return JobReply(None, RETRY_MS)
            self.members.require(member)  # still here: it holds a request open
            await self.book.changes.wait(ticket, left)

    def forget_deliveries(self, validator: bytes) -> None:
        """A validator that joined again lost what it was working on: its jobs are sent again."""
        for _, job in self.open_jobs():
            if job.validator == validator:
                self.delivered.pop(job.job_id, None)

    def _seal(self, node: NodeState, submission: SubmissionState, drawn: JobDrawn) -> bytes:
        job = Job(
            job_id=drawn.job_id,
            round=drawn.round,
            lease=codec.encode(self.book.state.leases[submission.lease_id].lease),
            digest=submission.intent.digest,
            length=submission.intent.length,
            raw_length=submission.intent.raw_length,
            token=draws.job_token(self.book.secret, drawn.job_id),
        )
        return seal(
            self.book.coordinator,
            "job",
            job,
            run=self.book.run.id,
            sequence=self.book.sequences.next("job"),
            issued_at=self.book.now_ms(),
            audience=node.key,
        ).raw

    async def verdict(self, member: Member, verdict: Verdict, attachment: bytes) -> Ack:
        """Take one verdict: details to disk, entry to the ledger, then the answer.

        Raises:
            ProtocolError: no such job for this key, or details that do not fit the verdict.
        """
        node = self.members.require(member, "validator")
        found = await self._take(node, verdict)
        if found is None:
            return Ack("already counted")
        submission, job = found
        try:
            return await self._take_down(member, verdict, attachment, submission, job)
        finally:
            self._writing.discard((submission.index, job.round))
            self.book.changes.notify()

    async def _take(self, node: NodeState, verdict: Verdict) -> tuple[SubmissionState, JobDrawn] | None:
        """The open job a verdict answers, with the place for its details held; None when it was already counted."""
        loop = asyncio.get_running_loop()
        end = loop.time() + VERDICT_WAIT_S
        while True:
            ticket = self.book.changes.ticket()
            found = self._find(node, verdict)
            if found is None:
                return None
            place = (found[0].index, found[1].round)
            if place not in self._writing:
                self._writing.add(place)
                return found
            if loop.time() >= end:
                raise ProtocolError("another verdict on this job is still being written", ReasonCode.BUSY)
            await self.book.changes.wait(ticket, end - loop.time())

    async def _take_down(
        self, member: Member, verdict: Verdict, attachment: bytes, submission: SubmissionState, job: JobDrawn
    ) -> Ack:
        node = self.book.state.nodes[member.key]
        held = self.book.state.leases[submission.lease_id]
        batches.check_details(
            verdict, attachment, submission, held.lease, lambda: read_upload(self.files.submission(held.lease_id))
        )
        path = self.files.details(held.lease_id, job.round)
        await asyncio.to_thread(write_atomic, path, attachment)
        if self._find(node, verdict) is None:
            return Ack("already counted")
        self._count(member.envelope.raw, submission, job)
        await self.book.commit()
        self.delivered.pop(job.job_id, None)
        return Ack("counted")

    def _find(self, node: NodeState, verdict: Verdict) -> tuple[SubmissionState, JobDrawn] | None:
        """The open job a verdict answers; None when it was already counted."""
        for submission, job in self.open_jobs():
            if job.job_id == verdict.job_id:
                if job.validator != node.key or job.round != verdict.round:
                    raise ProtocolError("this job was drawn for another validator or round", ReasonCode.NOT_OWNER)
                if verdict.digest != submission.intent.digest:
                    raise ProtocolError("the verdict is about other bytes than the job's", ReasonCode.HASH_MISMATCH)
                return submission, job
        for earlier in reversed(self.book.state.submissions.values()):
            for held in earlier.verdicts.values():
                if held.verdict.job_id == verdict.job_id and held.validator == node.key:
                    return None
        raise ProtocolError("no job with this id is open; it was drawn again or never existed", ReasonCode.UNKNOWN_JOB)

    def _count(self, raw: bytes, submission: SubmissionState, job: JobDrawn) -> None:
        """Append the verdict and what follows from it at once, so that both are durable or neither."""
        owner = self.book.state.nodes[submission.owner]
        before = owner.state
        self.book.append("verdict", subject=raw)
        counted = submission.verdicts[job.round].verdict
        rejected = [outcome.reason for outcome in counted.outcomes if outcome.outcome == REJECT]
        if rejected and job.round == 1 and 2 not in submission.jobs and submission.index in self.book.window.undecided:
            self._draw(submission, 2)
        if owner.state == "suspended" and before != "suspended":
            self.leasing.close_all_of(owner, f"owner suspended: {owner.reason}")
        self._tell(owner, before, rejected, len(counted.outcomes))

    def _tell(self, owner: NodeState, before: str, rejected: list[str], total: int) -> None:
        if owner.state == before and not rejected:
            return
        if owner.state == "suspended" and before != "suspended":
            self.news.say(
                f"{owner.name} is suspended: a second validator, drawn independently, also found that "
                f"{in_words(owner.reason)} ({owner.reason})"
            )
        elif owner.state == "paused" and before != "paused":
            self.news.say(
                f"a validator rejected {len(rejected)} of {total} rollouts of {owner.name}: "
                f"{in_words(owner.reason)} ({owner.reason}); no new leases until a second validator has looked"
            )
        elif before == "paused" and owner.state in ("active", "probation"):
            self.news.say(f"the second validator did not repeat it: {owner.name} is {owner.state} again")
        elif before == "probation" and owner.state == "active":
            self.news.say(f"{owner.name} is active: {owner.accepted} of its rollouts were accepted")


def read_upload(path: Path) -> bytes:
    """The compressed bytes of a submission. Raises DecodeError when the archive lost them."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise DecodeError(f"{path} cannot be read: {exc}", ReasonCode.RECORD_MISSING) from exc
