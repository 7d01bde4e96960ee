"""Runs the drop test while the run goes on: does a node keep back the leases that went badly? (`verifier.drops`)

The rewards are those of the verdicts' details, as validators found them. A node that lost a lease is looked at again
whenever something became known that could change its numbers; when they are beyond chance the evidence goes into the
ledger, which suspends the key, and the audit computes the same numbers from the archive.

Not covered: the statistics, and doing lost leases again (`leases`), without which there would be nothing to compare.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import LedgerError
from protocol.evidence import DROP_LOG_E
from protocol.records import DropEvidence, VerdictDetails
from protocol.state import NodeState, SubmissionState
from trainer import batches
from trainer.book import Book
from trainer.news import News
from verifier.drops import drop_evidence

FEWEST_LOST = 4
"""Lost leases before a node is tested at all: with fewer no evidence is strong enough, and honest runs cost nothing."""

IDLE_SHARE = 50
"""The next test of any node comes no sooner than this many times what the last one took: 2% of one core at most,
however long the run is. Later tests only find the same a little later."""

MAX_REMEMBERED = 65_536
"""Verdicts whose rewards are kept in memory, some 300 bytes each; older ones are read from the archive again."""


@dataclass
class Drops:
    """The drop test of one run. `suspend` is called right after the evidence was entered; the caller commits."""

    book: Book
    files: batches.Files
    news: News
    suspend: Callable[[NodeState], None]
    monotonic: Callable[[], float] = time.monotonic
    _rewards: OrderedDict[int, array[float]] = field(default_factory=OrderedDict)
    """Ledger index of a verdict -> the reward of each rollout in its details."""
    _due: set[bytes] = field(default_factory=set)
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        self._due.update(self.book.window.losses)  # what became known before this start was maybe not looked at

    def note(self, submission: SubmissionState, verdict: int, details: VerdictDetails) -> None:
        """A verdict was entered: remember its rewards, and whose numbers they may change."""
        self._keep(verdict, details)
        if submission.verdict_index is None:
            return
        nonce = self.book.state.leases[submission.lease_id].lease.nonce
        self._due.update(self.book.window.owners.get(nonce, ()))
        self._due.add(submission.owner)

    def reward(self, submission: int, rollout: int) -> float | None:
        """The reward of an accepted rollout, from the details of the verdict that accepted it."""
        verdict = self.book.state.submissions[submission].outcomes[rollout].verdict
        if verdict is None:
            return None
        known = self._rewards.get(verdict)
        if known is None:
            try:
                known = self._keep(verdict, batches.read_details(self.book.state, self.files, submission, verdict))
            except LedgerError as exc:
                self.news.say_once(f"the drop test goes on without one verdict: {exc}")
                return None
        return known[rollout] if rollout < len(known) else None

    def run(self) -> bool:
        """Test who is due; True when evidence was entered. Costs nothing while nobody loses leases."""
        losses, state = self.book.window.losses, self.book.state
        self._due = {key for key in self._due if losses[key] >= FEWEST_LOST and state.nodes[key].state != "suspended"}
        # What a node lost last is about to be done again: by the time it is suspended, all it kept back is known.
        ready = self._due - {lost.owner for lost in self.book.window.lost.values()}
        if not ready or self.monotonic() < self._not_before or state.finished is not None:
            return False
        begun, found = self.monotonic(), False
        for key in sorted(ready):
            found = self._test(state.nodes[key]) or found
        self._due -= ready
        done = self.monotonic()
        self._not_before = done + IDLE_SHARE * (done - begun)
        return found

    def _test(self, node: NodeState) -> bool:
        evidence = drop_evidence(self.book.state, node.key, self.reward, self.book.ledger.size)
        if evidence.log_e < DROP_LOG_E or evidence.lost_mean >= evidence.returned_mean:
            return False
        self.book.append("evidence.drop", evidence)
        self.suspend(node)
        self.news.say(f"{node.name} is suspended: {in_words(evidence)} (dropped-results)")
        return True

    def _keep(self, verdict: int, details: VerdictDetails) -> array[float]:
        rewards = array("d", (rollout.reward for rollout in details.rollouts))
        self._rewards[verdict] = rewards
        while len(self._rewards) > MAX_REMEMBERED:
            self._rewards.popitem(last=False)
        return rewards


def in_words(evidence: DropEvidence) -> str:
    """What the numbers say, for people."""
    return (
        f"the {evidence.lost} leases it gave up, done again by others, brought {evidence.lost_mean:+.2f} against the "
        f"others' average, the {evidence.returned} it returned {evidence.returned_mean:+.2f}; by chance that happens "
        f"less than once in {10 ** min(18, int(evidence.log_e / 2.302585)):,} honest nodes"
    )
