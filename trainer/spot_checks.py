"""The coordinator's own check of a share of what validators said (DESIGN 3.9: the trainer audits them too).

    a submission is decided -> 2% of its accepted groups are drawn,   -> queue   -> first look -> agrees: checked
                               and 2% of those that verdicts reject      in a process      -> does not: a suspect
                                                                         of its own (`spot_process`), lowest priority
    a suspect -> judged once more, the whole upload, in a new process -> again: `evidence.verdict`, the validator is
              ^                   |                                      suspended, what it alone let in is judged again
              +-- late, or died --+                                   -> not again: nobody is accused

The draw is keyed with the draw period's secret, so a validator can't know what will be looked at, and an audit can.
Nobody waits for a check: batches close and validators are served meanwhile. The queue holds `MAX_WAITING` submissions;
what does not fit, what can't be had any more and what fails at the first look is left out and counted, never repeated.
Rejections come after all acceptances and get a tenth of the time at most: whoever sends garbage makes them.

A contradiction is found twice, by two processes that share nothing but the disk, before anybody is accused: a bit that
fell over in one process's weights would otherwise suspend every validator in turn. The second finding may be late, and
its process may die; a suspect is tried again, with more time and after a longer pause each time, `MOST_TRIES` times.
Those that are not confirmed yet, or never were, are counted apart (`unconfirmed`).

Counts and suspects are kept in `state_dir/checks.json` over a restart; if it is lost, what may still be trained is
checked again and the counts begin anew. Nothing else depends on that file.

Not covered: what a check is (`verifier.spot`), what the entry means (`protocol.distrust`), phantoms (`plants`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
from trainer.spot_request import Answer, Request, Said, answer_s

MAX_WAITING = 64
"""Submissions that wait for their check. A machine that falls further behind would check what was trained long ago;
the oldest are left out, since a new lie can still be kept out of a batch."""

MAX_REJECTIONS = 8
"""The same of submissions of which rejections are checked: no batch is harmed while they wait."""

REJECTIONS_SHARE = 0.1
"""Of the process's time that their checks may take. They are as cheap to cause as garbage is to send."""

MAX_SUSPECTS = 32
"""Submissions whose contradiction waits to be found again. More than a few means that this machine can't confirm any;
the oldest are given up."""

MOST_TRIES = 8
RETRY_S, RETRY_MAX_S = 30.0, 3600.0
"""Pause after the first failure, doubled after each, and the longest: eight tries take about an hour and a half, longer
than whatever else keeps a machine that busy. Fewer let a lie pass because of one busy hour."""

IDLE_S = 5.0

Drawn = list[tuple[int, int]]
"""(verdict, position)."""


class Asked(Protocol):
    """Who makes the checks: `spot_process.CheckProcess`, or something in its place."""

    async def start(self) -> None: ...

    async def ask(self, request: Request) -> Answer: ...

    async def fresh(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Suspect:
    """A submission on which a verdict was contradicted once."""

    drawn: Drawn
    tries: int = 0
    """That came to nothing."""
    due: float = 0.0
    """Monotonic time of the next one; at once after a restart."""


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
    monotonic: Callable[[], float] = time.monotonic
    checked: int = 0
    """Rollouts that were judged here."""
    left_out: int = 0
    """Rollouts that were drawn and not judged."""
    given_up: int = 0
    """Rollouts of suspects that could not be confirmed or cleared."""
    waiting: OrderedDict[int, Drawn] = field(default_factory=OrderedDict)
    """Submission -> its drawn rollouts that a batch may take."""
    rejections: OrderedDict[int, Drawn] = field(default_factory=OrderedDict)
    """Submission -> its drawn rollouts that a verdict rejects."""
    suspects: OrderedDict[int, Suspect] = field(default_factory=OrderedDict)
    _rest_until: float = 0.0
    """No rejection is checked before."""
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        since = self._load()
        for submission in self.book.state.submissions.values():
            decided = submission.verdict_index
            lease = self.book.state.leases[submission.lease_id]
            if decided is None or (decided >= since if since is not None else self.book.window.fresh(lease)):
                self.note(submission)

    # --- what is drawn ----------------------------------------------------------------------------------------------

    def note(self, submission: SubmissionState) -> None:
        """A verdict came. Draw what is checked once the submission is decided; of a phantom's all is, at once."""
        if self.book.plants.phantom(submission.owner) is not None:
            self._wait(self.waiting, MAX_WAITING, submission.index, distrust.all_said(submission))
            return
        if submission.verdict_index is None or submission.period is None:
            return
        samples, secret = self._samples(submission), self.secret(submission.period)
        self._wait(self.waiting, MAX_WAITING, submission.index, distrust.to_check(submission, samples, secret))
        rejected = distrust.rejections_to_check(submission, samples, secret)
        self._wait(self.rejections, MAX_REJECTIONS, submission.index, rejected)

    def _wait(self, queue: OrderedDict[int, Drawn], most: int, index: int, drawn: Drawn) -> None:
        if not drawn:
            return
        queue[index] = drawn
        while len(queue) > most:
            _, oldest = queue.popitem(last=False)
            self._leave_out(len(oldest), "more was drawn than this machine can check")
        self._came.set()

    def _samples(self, submission: SubmissionState) -> int:
        return self.book.state.leases[submission.lease_id].lease.samples

    # --- checking ---------------------------------------------------------------------------------------------------

    async def run_forever(self) -> None:
        """Check what is drawn, one submission after another."""
        try:
            await self.process.start()
            while True:
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
        """Make the next check: a suspect's, else of what was accepted, else of what was rejected. False when there is
        none to make now."""
        if self.book.state.finished is not None:
            return False
        begun = self.monotonic()
        due = next((index for index, suspect in self.suspects.items() if suspect.due <= begun), None)
        if due is not None:
            await self._confirm(due)
        elif self.waiting:
            await self._look(self.waiting)
        elif self.rejections and begun >= self._rest_until:
            await self._look(self.rejections)
            now = self.monotonic()
            self._rest_until = now + (now - begun) * (1 / REJECTIONS_SHARE - 1)
        else:
            return False
        self._save()
        return True

    async def _look(self, queue: OrderedDict[int, Drawn]) -> None:
        """A first look at the submission that waits longest."""
        index = next(iter(queue))
        drawn = queue[index]
        request = self._request(index, drawn)
        if request is not None:  # else every validator that said it is suspended: nothing rests on their word any more
            answer = await self.process.ask(request)
            if answer.suspicious:
                self._suspect(index, drawn)
            elif answer.failed:
                self._leave_out(len(drawn), answer.failed)
            else:
                self._count(answer, drawn)
        if queue.get(index) is drawn:  # a decision that was taken back and made again is drawn anew
            del queue[index]

    def _suspect(self, index: int, drawn: Drawn) -> None:
        earlier = self.suspects.get(index)
        if earlier is not None:
            drawn = sorted({*earlier.drawn, *drawn})
        self.suspects[index] = Suspect(drawn, due=self.monotonic())
        while len(self.suspects) > MAX_SUSPECTS:
            self._give_up(next(iter(self.suspects)), "too many wait for it")

    async def _confirm(self, index: int) -> None:
        """Find it again, by a process that shares nothing with the one that found it."""
        suspect = self.suspects[index]
        request = self._request(index, suspect.drawn, suspect.tries, confirm=True)
        if request is None:
            del self.suspects[index]
            return
        await self.process.fresh()
        answer = await self.process.ask(request)
        if answer.failed:
            self._put_off(index, suspect, answer.failed)
            return
        del self.suspects[index]
        self._count(answer, suspect.drawn)
        if not answer.evidence:
            self._say_once(
                "a check of a validator found something that could not be found again: rounding near a bound, or this "
                "machine's memory. Nobody is accused. If it happens again the operator should test the memory"
            )
        for said in answer.evidence:
            await self._accuse(self.book.state.submissions[index], said)

    def _put_off(self, index: int, suspect: Suspect, why: str) -> None:
        suspect.tries += 1
        suspect.due = self.monotonic() + min(RETRY_MAX_S, RETRY_S * 2.0 ** (suspect.tries - 1))
        self.book.log.event("check.unconfirmed", submission=index, tries=suspect.tries, reason=why)
        if suspect.tries >= MOST_TRIES:
            self._give_up(index, why)
            return
        self._say_once(
            f"a check contradicts a verdict on submission {index}, and could not be made a second time yet ({why}). It "
            "is tried again, with more time; nobody is accused before. How many wait for it is in status.json "
            "(unconfirmed). The operator should look at how busy this machine is"
        )

    def _give_up(self, index: int, why: str) -> None:
        self.given_up += len(self.suspects.pop(index).drawn)
        self._say_once(
            f"a check that contradicts a verdict on submission {index} could not be confirmed and is given up: {why}. "
            f"The operator should run `verifier audit`, which makes it again, and look at logs/checks.log"
        )

    def _request(self, index: int, drawn: Drawn, tries: int = 0, *, confirm: bool = False) -> Request | None:
        """About the drawn rollouts, and every verdict that says something of one of them and counts. None without."""
        submission = self.book.state.submissions[index]
        positions = tuple(sorted({position for _, position in drawn}))
        nodes = self.book.state.nodes
        said = tuple(
            Said(
                state.index,
                number,
                state.verdict.details,
                tuple(one.outcome for one in state.verdict.outcomes),
                tuple(one.reason for one in state.verdict.outcomes),
            )
            for number, state in submission.verdicts.items()
            if number not in submission.void
            and nodes[state.validator].state != "suspended"
            and any(state.verdict.outcomes[position].outcome in (ACCEPT, REJECT) for position in positions)
        )
        if not said:
            return None
        lease = self.book.state.leases[submission.lease_id].lease
        intent = submission.intent
        read = len(lease.tasks) * lease.samples if confirm else len(positions)
        # A sampled token takes eight bytes at least: its id and its log-probability.
        deadline_s = answer_s(min(read * lease.max_new_tokens, intent.raw_length // 8), tries)
        raw = codec.encode(lease)
        return Request(raw, intent.digest, intent.raw_length, positions, said, confirm, deadline_s)

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
        given = state.verdict.outcomes[said.rollout].outcome
        did = "accepted" if given == ACCEPT else "rejected"
        self.news.say(
            f"validator {node.name} is suspended: it {did} a rollout of which the coordinator's own check says: "
            f"{_what(said)}. What it alone had let in is judged again; {late} rollouts of that were already trained"
        )
        self.book.log.event(
            "validator.wrong", validator=peer_id_text(node.key), verdict=said.verdict, rollout=said.rollout,
            reason=said.reason, number=said.number, trained=late,
        )  # fmt: skip

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def contradicted(self) -> int:
        """Validators that this run suspended for what they said."""
        return sum(node.reason == ReasonCode.VALIDATOR_WRONG for node in self.book.state.nodes.values())

    def counts(self) -> dict[str, int]:
        """For status.json."""
        return {
            "checked": self.checked,
            "contradicted": self.contradicted,
            "left_out": self.left_out,
            "unconfirmed": self.given_up + sum(len(suspect.drawn) for suspect in self.suspects.values()),
            "waiting": sum(len(drawn) for queue in (self.waiting, self.rejections) for drawn in queue.values()),
        }

    def _count(self, answer: Answer, drawn: Drawn) -> None:
        self.checked += answer.decided
        asked = len({position for _, position in drawn})  # two verdicts may say something of one rollout
        if answer.decided < asked:
            self._leave_out(asked - answer.decided, "this machine could not decide it")

    def _leave_out(self, count: int, why: str) -> None:
        self.left_out += count
        self.book.log.event("check.left_out", rollouts=count, total=self.left_out, reason=why)
        self._say_once(f"a check of what validators said was left out: {why}. How many are is in status.json")

    def _say_once(self, text: str) -> None:
        self.news.say_once(text)

    def _load(self) -> int | None:
        """The counts and suspects of earlier starts, and the entry from which decisions were not looked at; None
        without a file."""
        try:
            raw = json.loads(self.path.read_text())
            checked, left_out, since = int(raw["checked"]), int(raw["left_out"]), int(raw["since"])
            given_up = int(raw.get("given_up", 0))
            suspects = [self._suspect_of(one) for one in raw.get("suspects", ())]
        except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return None
        self.checked, self.left_out, self.given_up = checked, left_out, given_up
        self.suspects.update(suspects[:MAX_SUSPECTS])
        return since

    def _suspect_of(self, raw: dict[str, Any]) -> tuple[int, Suspect]:
        """Raises what Python does for one that this run has no submission of."""
        index, tries = int(raw["submission"]), int(raw["tries"])
        submission = self.book.state.submissions[index]
        known = {state.index for state in submission.verdicts.values()}
        drawn = [(int(verdict), int(position)) for verdict, position in raw["drawn"]]
        if not drawn or any(v not in known or not 0 <= i < len(submission.outcomes) for v, i in drawn):
            raise LookupError("no verdict of this submission")
        return index, Suspect(drawn, max(0, min(MOST_TRIES - 1, tries)))

    def _save(self) -> None:
        submissions = self.book.state.submissions
        open_still = [submissions[index].verdict_index for queue in (self.waiting, self.rejections) for index in queue]
        since = min((index for index in open_still if index is not None), default=self.book.ledger.size)
        suspects = [
            {"submission": index, "drawn": suspect.drawn, "tries": suspect.tries}
            for index, suspect in self.suspects.items()
        ]
        counts = {"checked": self.checked, "left_out": self.left_out, "given_up": self.given_up, "since": since}
        try:
            replace_file(self.path, json.dumps(counts | {"suspects": suspects}).encode())
        except OSError as exc:
            self._say_once(f"{self.path} can't be written ({exc}); after a restart some checks are made again")


def _what(said: VerdictEvidence) -> str:
    """What a check found, for people."""
    if said.outcome == REJECT:
        return f"{in_words(said.reason)} ({said.reason})"
    if said.reason == ReasonCode.HOLDS:
        return "it holds, also under narrower bounds"
    return (
        "it is what it says, but the validator handed over other numbers: "
        f"{said.number} is off by {said.difference:.3g}"
    )
