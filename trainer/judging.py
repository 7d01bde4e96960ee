"""Hands submissions to validators and takes their verdicts.

    submission -> round 1 job, drawn -> verdict --not decided, or by rate--> round 2, another validator -> verdict ...

A verdict counts only from the validator its job drew. The details file is on disk before the ledger entry, the entry
before the acknowledgement; the same verdict again gets the same answer. A job nobody answers is drawn again. Nodes that
have earned trust are judged first; a tenth of a busy validator's work stays for those in probation, and no more.

Not covered: who is drawn (`drawing`), what the verdicts decide (`protocol.decision`), what they do to a node
(`protocol.state`), whether they are right (`spot_checks`, the audit, a second draw).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protocol import codec, decision, draws
from protocol.control import Member
from protocol.envelope import seal
from protocol.errors import DecodeError, ProtocolError, ReasonCode
from protocol.files import write_atomic
from protocol.records import REJECT, Ack, Job, JobDrawn, JobReply, JobRequest, TieLapsed, Verdict, VerdictDetails
from protocol.state import NodeState, SubmissionState
from trainer import batches
from trainer.book import Book, Changes
from trainer.drawing import Drawing
from trainer.drops import Drops
from trainer.errors import RefusedEntryError
from trainer.evidence import Evidence
from trainer.leasing import CLOCK_S, MAX_WAIT_S, RETRY_MS, Leasing
from trainer.members import Members
from trainer.news import News, in_words
from trainer.spot_checks import SpotChecks
from trainer.spot_process import CheckProcess
from trainer.trainable import Trainable
from trainer.turns import Turn, Turns
from verifier.claims import scored_purely
from verifier.compare import required

VERDICT_WAIT_S = 20.0
"""How long a verdict waits for another one of the same job that is being written down."""

REDELIVER_S = 15.0
"""A job asked for again this long after it was sent is sent again: the reply may have been lost."""

PROBATION_TURN = 10
"""While others wait, one in this many rollouts that a validator is given is from owners in probation. They are free to
make and dear to refute: more lets garbage slow honest nodes down, less makes honest strangers wait for their first
verdict."""


@dataclass
class Judging:
    """The validators' desk of one run."""

    book: Book
    members: Members
    leasing: Leasing
    files: batches.Files
    news: News
    job_deadline_s: float
    drawing: Drawing
    drops: Drops
    trainable: Trainable
    prompt_ids: batches.PromptIds
    monotonic: Callable[[], float] = time.monotonic
    evidence: Evidence = field(init=False)
    checks: SpotChecks = field(init=False)
    delivered: dict[bytes, float] = field(default_factory=dict)
    """Job id -> when it was last handed to its validator."""
    taken: dict[bytes, float] = field(default_factory=dict)
    """Job id -> when it was first handed to its validator: asking for it again does not move its deadline."""
    given: dict[bytes, Counter[str]] = field(default_factory=dict)
    """Validator -> rollouts it was given by class of owner, while both classes waited."""
    _turns: Turns = field(default_factory=Turns)
    _told: int | None = None
    """Validators present when the operator was last told that more are needed."""
    _writing: set[tuple[int, int]] = field(default_factory=set)
    """(submission, round) whose details are being written. Two at once would leave one verdict's details on the disk
    and the other verdict in the ledger."""
    _written: Changes = field(default_factory=Changes)
    """One of these is done."""

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.book, self.files, self.news, self.leasing.close_all_of)
        run_dir, state_dir = self.files.run_dir, self.book.ledger.path.parent
        process = CheckProcess(run_dir, state_dir / "checks", run_dir / "logs" / "checks.log")
        secret, path = self.drawing.secret, state_dir / "checks.json"
        self.checks = SpotChecks(self.book, self.news, process, secret, self._draw_again, path)

    # --- drawing --------------------------------------------------------------------------------------------------

    def enter(self, intent: bytes) -> int:
        """Append a submission with the jobs it begins with; returns its ledger index. The caller commits.

        Args:
            intent: the owner's `intent` envelope; the bytes it names are on the disk.
        """
        self.drawing.open_if_due()
        index = self.book.append("submission", subject=intent).index
        self.drawing.first(index)
        return index

    def open_jobs(self) -> Iterator[tuple[SubmissionState, JobDrawn]]:
        """Drawn jobs without a verdict, oldest submission first."""
        for index in self.book.window.unjudged:
            submission = self.book.state.submissions[index]
            for number in submission.open_rounds:
                yield submission, submission.jobs[number]

    async def redraw_forever(self) -> None:
        """Once a second, draw jobs that have no validator yet, or one that vanished or let the deadline pass; beside it
        check what validators accepted."""
        checking = asyncio.create_task(self.checks.run_forever(), name="checks of validators")
        try:
            while not checking.done():
                await asyncio.sleep(CLOCK_S)
                size = self.book.ledger.size
                self.tick()
                if self.book.ledger.size > size:
                    await self.book.commit()
            checking.result()
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    def tick(self) -> None:
        """Append whatever the passing of time made necessary; the caller commits."""
        self.drawing.keep_in_step()
        self.drops.run()
        self.evidence.run()
        waiting = self._draw_again()
        self._say_who_is_missing(sum(decision.next_round(one) is not None for one in waiting))

    def _draw_again(self) -> list[SubmissionState]:
        """Draw whatever is due for the submissions that wait; returns them."""
        waiting = [self.book.state.submissions[index] for index in self.book.window.unjudged]
        for submission in waiting:
            self._redraw(submission)
        return waiting

    def _redraw(self, submission: SubmissionState) -> None:
        if not submission.jobs:
            self.drawing.first(submission.index)
            return
        for number in submission.open_rounds:
            job = submission.jobs[number]
            if self._is_due(job):
                self._forget(job.job_id)  # if nobody else is there, the same one is asked again
                gone = self.book.state.nodes[job.validator].state == "suspended"
                if self.drawing.draw(submission, number) and not gone:
                    self.news.say(f"{self._name(job.validator)} does not answer; another validator is drawn")
        number = decision.next_round(submission) or 0
        if number:
            self.drawing.draw(submission, number)
        self._give_up_tie(submission)

    def _give_up_tie(self, submission: SubmissionState) -> None:
        """Two validators contradict each other, and no third one answered in time: nobody's word counts."""
        if submission.tie_time is None or submission.tie_over or submission.index not in self.book.window.undecided:
            return
        since = max(state.index for state in submission.verdicts.values())
        waited = self.book.now_ms() - submission.tie_time - self.book.window.outage_ms(since)
        if waited < decision.TIE_LEASES * self.book.run.manifest.leases.lease_ms:
            return
        if decision.last_round(submission) not in submission.jobs and decision.somebody_else(
            submission, self.book.state.present
        ):
            return  # drawn just now, or as soon as it can be
        self.book.append("tie.lapsed", TieLapsed(submission.index))
        self.checks.note(submission)
        owner = self.book.state.nodes[submission.owner]
        self._tell_tie(owner)

    def _tell_tie(self, owner: NodeState) -> None:
        self.news.say_once(
            f"two validators contradict each other about rollouts of {owner.name}, and no third one settled it: they "
            "are not trained on. The operator must admit another validator to learn who is wrong"
        )

    def _say_who_is_missing(self, waiting: int) -> None:
        """Tell the operator, once, that what waits cannot be drawn: only another validator helps."""
        present = len(self.book.state.present or ())
        if waiting and present != self._told:
            what = f"{waiting} submission{'s' * (waiting > 1)}"
            if present == 0:
                self.news.say(f"{what} can't be checked: no admitted validator is here. The operator must start one")
            elif present == 1:
                self.news.say(
                    f"{what} can't be settled by the one validator that is here: a rejection needs a second one to "
                    "repeat it. The operator must start another (`node join --role validator`, admitted in run.toml)"
                )
        self._told = present if waiting else None

    def _is_due(self, job: JobDrawn) -> bool:
        if self.book.state.nodes[job.validator].state == "suspended":
            return True  # revoked: its verdict would be refused
        taken = self.taken.get(job.job_id)
        if taken is not None and self.monotonic() - taken > self.job_deadline_s:
            return True
        return not self.members.live(job.validator)

    def _forget(self, job_id: bytes) -> float | None:
        """No deadline any more. Returns when the job was last handed out."""
        self.taken.pop(job_id, None)
        return self.delivered.pop(job_id, None)

    def _name(self, key: bytes) -> str:
        node = self.book.state.nodes.get(key)
        return (node.name if node is not None else "") or key.hex()[:8]

    # --- answering ------------------------------------------------------------------------------------------------

    async def next(self, member: Member, request: JobRequest, attachment: bytes) -> JobReply:
        """Hold the request until a job is drawn for this validator, its wait is over, or a newer one came."""
        node = self.members.require(member, "validator")
        if node.state == "suspended":
            raise ProtocolError(f"this validator is suspended: {node.reason}", ReasonCode.SUSPENDED)
        if not self.members.granted(node.key, "validator"):
            raise ProtocolError("this key is not admitted as a validator", ReasonCode.NOT_GRANTED)
        with self._turns.take(node.key) as turn:
            return await self._next(member, node, request, turn)

    async def _next(self, member: Member, node: NodeState, request: JobRequest, turn: Turn) -> JobReply:
        loop = asyncio.get_running_loop()
        end = loop.time() + min(request.wait_ms / 1000, MAX_WAIT_S)
        while not turn.over:
            ticket = self.book.jobs.ticket()
            found = self._choose(node.key)
            if found is not None:
                self.delivered[found[1].job_id] = self.monotonic()
                self.taken.setdefault(found[1].job_id, self.monotonic())
                await self.book.commit()
                return JobReply(self._seal(node, *found), 0)
            left = end - loop.time()
            if left <= 0:
                break
            self.members.require(member)  # still here: it holds a request open
            await turn.wait(ticket, left)
        return JobReply(None, RETRY_MS)

    def _choose(self, validator: bytes) -> tuple[SubmissionState, JobDrawn] | None:
        """The job this validator gets next: the oldest of the class whose turn it is."""
        first: dict[str, tuple[SubmissionState, JobDrawn]] = {}
        for submission, job in self.open_jobs():
            sent = self.delivered.get(job.job_id)
            if job.validator == validator and (sent is None or self.monotonic() - sent > REDELIVER_S):
                first.setdefault(self._class(submission), (submission, job))
        if "trusted" in first and "probation" in first:
            given = self.given.setdefault(validator, Counter())
            turn = "probation" if given["probation"] * (PROBATION_TURN - 1) < given["trusted"] else "trusted"
            given[turn] += len(first[turn][0].outcomes)
            return first[turn]
        return first.get("trusted") or first.get("probation") or first.get("suspended")

    def _class(self, submission: SubmissionState) -> str:
        """A node that earned trust keeps its place while a single rejection is looked into."""
        owner = self.book.state.nodes[submission.owner]
        if owner.state == "suspended":
            return "suspended"
        trusted = owner.accepted >= self.book.run.manifest.leases.probation_accepted
        return "trusted" if trusted else "probation"

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
            self._written.notify()

    async def _take(self, node: NodeState, verdict: Verdict) -> tuple[SubmissionState, JobDrawn] | None:
        """The open job a verdict answers, with the place for its details held; None when it was already counted."""
        loop = asyncio.get_running_loop()
        end = loop.time() + VERDICT_WAIT_S
        while True:
            ticket = self._written.ticket()
            found = self._find(node, verdict)
            if found is None:
                return None
            place = (found[0].index, found[1].round)
            if place not in self._writing:
                self._writing.add(place)
                return found
            if loop.time() >= end:
                raise ProtocolError("another verdict on this job is still being written", ReasonCode.BUSY)
            await self._written.wait(ticket, end - loop.time())

    async def _take_down(
        self, member: Member, verdict: Verdict, attachment: bytes, submission: SubmissionState, job: JobDrawn
    ) -> Ack:
        node = self.book.state.nodes[member.key]
        held = self.book.state.leases[submission.lease_id]
        opens = lambda: batches.read_submission(self.files, submission)  # noqa: E731
        assert self.book.state.chain is not None
        manifest = self.book.state.chain.at(held.lease.manifest).manifest
        bound, needed = manifest.thresholds.logprob, required(manifest)
        pure = scored_purely(manifest, held.lease)
        try:
            details = batches.check_details(
                verdict, attachment, submission, held.lease, opens, self.trainable, self.prompt_ids, bound, needed, pure
            )
        except DecodeError as exc:
            self.taken[job.job_id] = -math.inf  # it will say the same again: somebody else is drawn
            self.news.say_once(f"a verdict of {self._name(member.key)} is refused: {exc}")
            raise
        path = self.files.details(held.lease_id, job.round)
        await asyncio.to_thread(write_atomic, path, attachment)
        self.files.decoded.keep(verdict.details, details, len(attachment), len(details.rollouts))
        if self._find(node, verdict) is None:
            return Ack("already counted")
        try:
            self._count(member.envelope.raw, submission, job, details)
        except RefusedEntryError:  # this key was revoked while its details were being written
            if job.round not in submission.verdicts:
                path.unlink(missing_ok=True)
            raise
        await self.book.commit()
        self._time(member.key, self._forget(job.job_id))
        return Ack("counted")

    def _time(self, validator: bytes, sent: float | None) -> None:
        session = self.members.sessions.get(validator)
        if sent is None or session is None:
            return
        took = self.monotonic() - sent
        session.verdict_s = took if session.verdict_s is None else session.verdict_s + (took - session.verdict_s) / 8

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

    def _count(self, raw: bytes, submission: SubmissionState, job: JobDrawn, details: VerdictDetails) -> None:
        """Append the verdict and what follows from it at once, so that both are durable or neither."""
        owner = self.book.state.nodes[submission.owner]
        before = owner.state
        self.drawing.note_present()  # whether a third validator is there to settle a tie
        index = self.book.append("verdict", subject=raw).index
        self.drops.note(submission, index, details)
        counted = submission.verdicts[job.round].verdict
        rejected = [outcome.reason for outcome in counted.outcomes if outcome.outcome == REJECT]
        self.drawing.after_verdict(submission)
        if owner.state == "suspended" and before != "suspended":
            self.leasing.close_all_of(owner)
        self._tell(owner, before, rejected, len(counted.outcomes))
        self._tell_outvoted(owner, submission)
        self.evidence.note(submission, job.round)
        self.checks.note(submission)
        self.book.log.event(
            "verdict",
            node=owner.key,
            lease=submission.lease_id,
            step=self.book.state.leases[submission.lease_id].lease.step,
            index=index,
            validator=job.validator,
            round=job.round,
            rejected=len(rejected),
            reason=rejected[0] if rejected else "",
            decided=submission.verdict_index is not None,
        )

    def _tell_outvoted(self, owner: NodeState, submission: SubmissionState) -> None:
        """One validator of three is wrong: its machine, or its owner. Only the operator can tell, and end its grant."""
        if submission.verdict_index is None:
            return
        if submission.tie_over:
            self._tell_tie(owner)
        for key, rollouts in sorted(decision.outvoted(submission).items()):
            so_far = self.book.state.nodes[key].outvoted
            self.news.say(
                f"two validators contradict {self._name(key)} on {rollouts} rollouts of {owner.name} ({so_far} so far)"
            )

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
