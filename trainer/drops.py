"""Runs the drop test while the run goes on: does a node keep back the leases that went badly? (`verifier.drops`)

The rewards and lengths are those of the verdicts' details, as validators found them. A node that lost a lease, or sent
one too late, is looked at again whenever something became known that could change its numbers; when they are beyond
chance the evidence goes into the ledger, which suspends the key, and the audit computes the same numbers from the
archive.

Not covered: the statistics, and doing lost leases again (`leases`), without which there would be nothing to compare.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from protocol.errors import LedgerError
from protocol.evidence import DROP_LOG_E
from protocol.records import DropEvidence, VerdictDetails
from protocol.state import NodeState, SubmissionState
from trainer import batches
from trainer.book import Book
from trainer.news import News
from verifier.drops import drop_evidence
from verifier.outcomes import batches_left, closing_indices

FEWEST_LOST = 4
"""Lost or late leases before a node is tested at all: fewer are no evidence, and most honest runs cost nothing."""

IDLE_SHARE = 50
"""The next test of any node comes no sooner than this many times what the last one took: 2% of one core at most,
however long the run is. Later tests only find the same a little later."""

LATE_IDLE_SHARE = 400
"""The same for nodes that lost nothing but were late: honest ones are, in a run that uses all the staleness it may."""

PATIENCE = 4
"""Times the staleness, in batches, that a test waits for a moment with nothing of the node's about to be done again."""

MAX_PAUSE_S = 0.1
"""Nobody else is tested in the same turn once this has gone by: the coordinator answers nobody meanwhile."""

MAX_REMEMBERED = 65_536
"""Verdicts whose rewards are kept in memory, some 500 bytes each; older ones are read from the archive again."""


@dataclass
class Drops:
    """The drop test of one run. `suspend` is called right after the evidence was entered; the caller commits."""

    book: Book
    files: batches.Files
    news: News
    suspend: Callable[[NodeState], None]
    monotonic: Callable[[], float] = time.monotonic
    _details: OrderedDict[int, tuple[array[float], array[int]]] = field(default_factory=OrderedDict)
    """Ledger index of a verdict -> reward, and number of tokens, of each rollout in its details."""
    _late: Counter[bytes] = field(default_factory=Counter)
    """Key -> leases it returned when at most the last batch could still take them."""
    _closings: list[int] = field(default_factory=list)
    _due: dict[bytes, int] = field(default_factory=dict)
    """Who is to be tested -> batches closed when that was found."""
    _cleared: int = 0
    """Suspensions taken back so far whose nodes were put to the test again."""
    _not_before: float = 0.0
    _late_not_before: float = 0.0

    def __post_init__(self) -> None:
        state = self.book.state
        closings = self._closings = closing_indices(state)
        for submission in state.submissions.values():
            if submission.verdict_index is not None:
                self._count_if_late(submission, closings)
        self._cleared = len(state.cleared)
        # What became known before this start was maybe not looked at.
        for key in [*self.book.window.losses, *self._late]:
            self._due.setdefault(key, self.book.window.batches)

    def note(self, submission: SubmissionState, verdict: int, details: VerdictDetails) -> None:
        """A verdict was entered: remember what it measured, and whose numbers it may change."""
        self._keep(verdict, details)
        if submission.verdict_index is None:
            return
        state = self.book.state
        if submission.verdict_index == verdict:
            self._count_if_late(submission, self._closings_so_far())
        first = state.leases[submission.lease_id].reissue_of or submission.lease_id
        for key in (submission.owner, state.leases[first].owner):
            self._due.setdefault(key, self.book.window.batches)

    def seen(self, submission: int, rollout: int) -> tuple[float, int] | None:
        """Reward and tokens of an accepted rollout, from the details of the verdict that accepted it."""
        verdict = self.book.state.submissions[submission].accepting(rollout)
        if verdict is None:
            return None
        known = self._details.get(verdict)
        if known is None:
            try:
                known = self._keep(verdict, batches.read_details(self.book.state, self.files, submission, verdict))
            except LedgerError as exc:
                self.news.say_once(f"the drop test goes on without one verdict: {exc}")
                return None
        rewards, tokens = known
        return (rewards[rollout], tokens[rollout]) if rollout < len(rewards) else None

    def run(self) -> bool:
        """Test who is due; True when evidence was entered. Costs nothing while nobody loses leases."""
        losses, state, window = self.book.window.losses, self.book.state, self.book.window
        for key in state.cleared[self._cleared :]:  # the sum that suspended it read verdicts that count no more
            self._due.setdefault(key, window.batches)
        self._cleared = len(state.cleared)
        for key in list(self._due):
            if losses[key] + self._late[key] < FEWEST_LOST or state.nodes[key].state == "suspended":
                del self._due[key]
        # What a node lost last is about to be done again: by the time it is suspended, all it kept back is known. One
        # that loses leases all the time gets a few chances to have none out; whoever sits on them can't add to those.
        held_up = {lost.owner for lost in window.lost.values()}
        patience = PATIENCE * window.max_staleness
        begun, found = self.monotonic(), False
        ready = [
            key
            for key, since in self._due.items()
            if (key not in held_up or window.batches - since > patience)
            and (losses[key] >= FEWEST_LOST or begun >= self._late_not_before)
        ]
        if not ready or begun < self._not_before or state.finished is not None:
            return False
        for key in sorted(ready, key=lambda key: (self._due[key], key)):
            found = self._test(state.nodes[key]) or found
            del self._due[key]
            if self.monotonic() - begun > MAX_PAUSE_S:
                break
        done = self.monotonic()
        self._not_before = done + IDLE_SHARE * (done - begun)
        self._late_not_before = max(self._late_not_before, done + LATE_IDLE_SHARE * (done - begun))
        return found

    def _closings_so_far(self) -> list[int]:
        """`closing_indices`, without sorting a long run's batches again at every verdict."""
        later = islice(self.book.state.batches.values(), len(self._closings), None)
        self._closings.extend(batch.index for batch in later)  # in the ledger's order, so they rise
        return self._closings

    def _count_if_late(self, submission: SubmissionState, closings: list[int]) -> None:
        lease = self.book.state.leases[submission.lease_id]
        self._late[submission.owner] += batches_left(self.book.state, lease, submission.index, closings) <= 1

    def _test(self, node: NodeState) -> bool:
        evidence = drop_evidence(self.book.state, node.key, self.seen, self.book.ledger.size)
        if evidence.log_e < DROP_LOG_E or evidence.lost_mean >= evidence.returned_mean:
            return False
        self.book.append("evidence.drop", evidence)
        self.suspend(node)
        self.news.say(f"{node.name} is suspended: {in_words(evidence)} (dropped-results)")
        return True

    def _keep(self, verdict: int, details: VerdictDetails) -> tuple[array[float], array[int]]:
        rewards = array("d", (rollout.reward for rollout in details.rollouts))
        tokens = array("I", (len(rollout.logprobs) // 4 for rollout in details.rollouts))
        self._details[verdict] = rewards, tokens
        while len(self._details) > MAX_REMEMBERED:
            self._details.popitem(last=False)
        return rewards, tokens


def in_words(evidence: DropEvidence) -> str:
    """What the numbers say, for people."""
    return (
        f"the {evidence.lost} leases it gave up or sent too late, as far as others did them again, brought "
        f"{evidence.lost_mean:+.2f} against the others' average, the {evidence.returned} it returned "
        f"{evidence.returned_mean:+.2f}; by chance that happens less than once in "
        f"{10 ** min(18, int(evidence.log_e / 2.302585)):,} honest nodes"
    )
