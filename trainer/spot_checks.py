"""The coordinator's own check of a share of what validators accepted (DESIGN 3.9: the trainer audits them too).

    a submission is decided -> 2% of its accepted groups are drawn -> queue   -> first look -> agrees: checked
                                                                       in a process      -> does not: once more, the
       of its own (`spot_process`), lowest priority                                      whole upload, in a new process
                                                                    -> again: `evidence.verdict`, the validator is
                                                                       suspended, what it alone let in is judged again

The draw is keyed with the draw period's secret, so a validator can't know what will be looked at, and an audit can.
Nobody waits for a check: batches close and validators are served meanwhile. The queue holds `MAX_WAITING` submissions;
what does not fit, what can't be had any more and what fails is left out and counted, never repeated.

A contradiction is found twice, by two processes that share nothing but the disk, before anybody is accused: a bit that
fell over in one process's weights would otherwise suspend every validator in turn.

Counts are kept in `state_dir/checks.json` over a restart; if it is lost, what may still be trained is checked again and
the counts begin anew. Nothing else depends on that file.

Not covered: what a check is (`verifier.spot`), what the entry means (`protocol.distrust`), plants (docs/decisions/022).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protocol import codec, distrust
from protocol.errors import ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.identity import peer_id_text
from protocol.records import ACCEPT, REJECT
from protocol.state import SubmissionState
from shardcast.heads import replace_file
from trainer.book import Book
from trainer.errors import RefusedEntryError
from trainer.news import News, in_words
from trainer.spot_request import Answer, Request, Said

MAX_WAITING = 64
"""Submissions that wait for their check. A machine that falls further behind would check what was trained long ago;
the oldest are left out, since a new lie can still be kept out of a batch."""

IDLE_S = 5.0


class Asked(Protocol):
    """Who makes the checks: `spot_process.CheckProcess`, or something in its place."""

    async def start(self) -> None: ...

    async def ask(self, request: Request) -> Answer: ...

    async def fresh(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class SpotChecks:
    """The checks of one run. `again` draws what a suspension opened again; this commits."""

    book: Book
    news: News
    process: Asked
    secret: Callable[[int | None], bytes]
    """A draw period's secret, by number."""
    again: Callable[[], object]
    path: Path
    checked: int = 0
    """Rollouts that were judged here."""
    left_out: int = 0
    """Rollouts that were drawn and not judged."""
    waiting: OrderedDict[int, list[tuple[int, int]]] = field(default_factory=OrderedDict)
    """Submission -> (verdict, position) of its drawn rollouts."""
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        since = self._load()
        for submission in self.book.state.submissions.values():
            decided = submission.verdict_index
            lease = self.book.state.leases[submission.lease_id]
            if decided is not None and (decided >= since if since is not None else self.book.window.fresh(lease)):
                self.note(submission)

    # --- what is drawn ----------------------------------------------------------------------------------------------

    def note(self, submission: SubmissionState) -> None:
        """A submission was decided: draw what of it is checked."""
        if submission.verdict_index is None or submission.period is None:
            return
        samples = self.book.state.leases[submission.lease_id].lease.samples
        drawn = distrust.to_check(submission, samples, self.secret(submission.period))
        if not drawn:
            return
        self.waiting[submission.index] = drawn
        while len(self.waiting) > MAX_WAITING:
            _, oldest = self.waiting.popitem(last=False)
            self._leave_out(len(oldest), "more was drawn than this machine can check")
        self._came.set()

    # --- checking ---------------------------------------------------------------------------------------------------

    async def run_forever(self) -> None:
        """Check what is drawn, one submission after another."""
        started = False
        try:
            while True:
                if not started and self.book.state.present:
                    started = True
                    await self.process.start()
                if not await self.turn():
                    self._came.clear()
                    try:
                        async with asyncio.timeout(IDLE_S):
                            await self._came.wait()
                    except TimeoutError:
                        continue
        finally:
            await self.process.close()

    async def turn(self) -> bool:
        """Check the submission that waits longest; False when none does."""
        if not self.waiting or self.book.state.finished is not None:
            return False
        index = next(iter(self.waiting))
        drawn = self.waiting[index]
        await self._check(self.book.state.submissions[index], drawn)
        if self.waiting.get(index) is drawn:  # a decision that was taken back and made again is drawn anew
            del self.waiting[index]
        self._save()
        return True

    async def _check(self, submission: SubmissionState, drawn: list[tuple[int, int]]) -> None:
        count = len(drawn)
        request = self._request(submission, drawn)
        if request is None:
            return  # every validator that accepted it is suspended: nothing rests on their word any more
        answer = await self.process.ask(request)
        if answer.suspicious:
            await self.process.fresh()
            answer = await self.process.ask(Request(**{**vars(request), "confirm": True}))
            if not answer.failed and not answer.evidence:
                self._say_once(
                    "a check of a validator found something that could not be found again: rounding near a bound, or "
                    "this machine's memory. Nobody is accused. If it happens again the operator should test the memory"
                )
        if answer.failed:
            self._leave_out(count, answer.failed)
            return
        self.checked += answer.decided
        if answer.decided < count:
            self._leave_out(count - answer.decided, "this machine could not decide it")
        for said in answer.evidence:
            await self._accuse(submission, said)

    def _request(self, submission: SubmissionState, drawn: list[tuple[int, int]]) -> Request | None:
        """About the drawn rollouts, and every verdict that accepted one of them and counts."""
        positions = tuple(position for _, position in drawn)
        nodes = self.book.state.nodes
        said = tuple(
            Said(state.index, number, state.verdict.details, tuple(one.outcome for one in state.verdict.outcomes))
            for number, state in submission.verdicts.items()
            if number not in submission.void
            and nodes[state.validator].state != "suspended"
            and any(state.verdict.outcomes[position].outcome == ACCEPT for position in positions)
        )
        lease = self.book.state.leases[submission.lease_id].lease
        intent = submission.intent
        return Request(codec.encode(lease), intent.digest, intent.raw_length, positions, said) if said else None

    async def _accuse(self, submission: SubmissionState, said: VerdictEvidence) -> None:
        """Enter what was found; the fold ends the trust."""
        state = next(one for one in submission.verdicts.values() if one.index == said.verdict)
        node = self.book.state.nodes[state.validator]
        if node.state == "suspended":
            return  # for another rollout of the same submission
        before = distrust.unverified(self.book.state.submissions, self.book.state.trained)
        try:
            self.book.append("evidence.verdict", said)
        except RefusedEntryError as exc:
            self._say_once(f"a validator was found to be wrong, but the ledger does not take it: {exc}")
            return
        self.again()
        await self.book.commit()
        late = distrust.unverified(self.book.state.submissions, self.book.state.trained) - before
        found = (
            f"{in_words(said.reason)} ({said.reason})"
            if said.outcome == REJECT
            else "it is what it says, but the validator handed other numbers to the learner"
        )
        self.news.say(
            f"validator {node.name} is suspended: it accepted a rollout of which the coordinator's own check says: "
            f"{found}. What it alone had let in is judged again; {late} rollouts of that were already trained"
        )
        self.book.log.event(
            "validator.wrong", validator=peer_id_text(node.key), verdict=said.verdict, rollout=said.rollout,
            reason=said.reason, trained=late,
        )  # fmt: skip

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def contradicted(self) -> int:
        """Validators that this run suspended for what they accepted."""
        return sum(node.reason == ReasonCode.VALIDATOR_WRONG for node in self.book.state.nodes.values())

    def counts(self) -> dict[str, int]:
        """For status.json."""
        return {
            "checked": self.checked,
            "contradicted": self.contradicted,
            "left_out": self.left_out,
            "waiting": sum(len(drawn) for drawn in self.waiting.values()),
        }

    def _leave_out(self, count: int, why: str) -> None:
        self.left_out += count
        self.book.log.event("check.left_out", rollouts=count, total=self.left_out, reason=why)
        self._say_once(f"a check of what validators accepted was left out: {why}. How many are is in status.json")

    def _say_once(self, text: str) -> None:
        self.news.say_once(text)

    def _load(self) -> int | None:
        """The counts of earlier starts, and the entry from which decisions were not looked at; None without a file."""
        try:
            raw = json.loads(self.path.read_text())
            self.checked, self.left_out, since = int(raw["checked"]), int(raw["left_out"]), int(raw["since"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return since

    def _save(self) -> None:
        submissions = self.book.state.submissions
        open_still = [submissions[index].verdict_index for index in self.waiting]
        since = min((index for index in open_still if index is not None), default=self.book.ledger.size)
        try:
            replace_file(
                self.path,
                json.dumps({"checked": self.checked, "left_out": self.left_out, "since": since}).encode(),
            )
        except OSError as exc:
            self._say_once(f"{self.path} can't be written ({exc}); after a restart some checks are made again")
