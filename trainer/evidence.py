"""Sums up what validators measured while the run goes on, and ends trust in a node that is beyond chance.

    a verdict is entered -> queue -> its details -> the node's sums -> over the bar? -> `evidence.node`, suspension

The queue is worked off in the ledger's order, so that the sums are those an audit makes of the archive. After a start
it holds every verdict there was; until it is empty again nobody is looked at, and the coordinator gives it a share of
each second only.

Not covered: the sums and when they condemn (`verifier.evidence`), who keeps results back (`drops`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import LedgerError
from protocol.evidence_rows import EvidenceRow
from protocol.records import NodeEvidence
from protocol.state import NodeState, SubmissionState, VerdictState
from trainer import batches
from trainer.book import Book
from trainer.news import News
from verifier.evidence import RowKey, Sums, counted, distrusted, in_order, key_of

MAX_PAUSE_S = 0.1
"""The queue is left for the next turn once this has gone by: the coordinator answers nobody meanwhile."""


@dataclass
class Evidence:
    """The sums of one run. `suspend` is called right after evidence was entered; the caller commits."""

    book: Book
    files: batches.Files
    news: News
    suspend: Callable[[NodeState], None]
    monotonic: Callable[[], float] = time.monotonic
    _sums: Sums = field(init=False)
    _queue: deque[tuple[SubmissionState, VerdictState]] = field(default_factory=deque)
    """Counted verdicts that are not summed up yet."""
    _suspects: set[bytes] = field(default_factory=set)
    """Nodes with a sum over its bar."""
    _changed: bool = False
    """Numbers came since nodes were last looked at."""
    _told: set[tuple[bytes, RowKey, str]] = field(default_factory=set)
    _cleared: int = 0
    """Suspensions taken back that were told of."""
    _blind: bool = False
    """Details were lost: sums made without them are not those of an audit that has them."""

    def __post_init__(self) -> None:
        self._cleared = len(self.book.state.cleared)
        self._begin(self.book.run.manifest.evidence, distrusted(self.book.state, self.book.ledger.size))

    def _begin(self, rows: tuple[EvidenceRow, ...], wrong: frozenset[bytes]) -> None:
        self._sums, self._blind = Sums(rows, wrong), False
        self._suspects.clear()
        self._queue = deque(in_order(self.book.state) if rows else ())

    def note(self, submission: SubmissionState, number: int) -> None:
        """The verdict of round `number` was entered: sum it up, and look at its owner."""
        verdict = counted(submission)
        if verdict is None or verdict is not submission.verdicts.get(number) or not self._sums.rows:
            return
        self._queue.append((submission, verdict))
        if len(self._queue) == 1:  # else it waits for what a start left to do
            self.run()

    def run(self) -> bool:
        """Work the queue off for a while; True when evidence was entered."""
        rows, wrong = self.book.run.manifest.evidence, distrusted(self.book.state, self.book.ledger.size)
        if (rows, wrong) != (self._sums.rows, self._sums.distrusted):
            self._begin(rows, wrong)  # both hold for the past too
        self._tell_cleared()
        begun = self.monotonic()
        while self._queue and not self._blind and self.monotonic() - begun <= MAX_PAUSE_S:
            self._take_in(*self._queue.popleft())
        if self._queue or self._blind or not self._changed or self.book.state.finished is not None:
            return False
        self._changed = False
        return any([self._look(row) for row in self._sums.rows])  # noqa: C419 (every row, also after one that found)

    def _take_in(self, submission: SubmissionState, verdict: VerdictState) -> None:
        try:
            details = batches.read_details(self.book.state, self.files, submission.index, verdict.index)
        except LedgerError as exc:
            self._blind = True
            self.news.say(f"no node is suspended by pooled evidence any more: {exc}. Restore the file and start again")
            return
        self._sums.add(self.book.state, submission, verdict, details)
        self._changed = True
        over = any(cusum.suspicious for cusum in self._sums.of(submission.owner).values())
        (self._suspects.add if over else self._suspects.discard)(submission.owner)

    def _look(self, row: EvidenceRow) -> bool:
        """Suspend whom one row condemns, and tell the operator once whom it would if others were believed."""
        state, upto = self.book.state, self.book.ledger.size
        sums = {node: self._sums.of(node).get(key_of(row)) for node in sorted(self._suspects)}
        over = {node: cusum for node, cusum in sums.items() if cusum is not None and cusum.suspicious}
        over = {node: cusum for node, cusum in over.items() if state.nodes[node].state != "suspended"}
        condemned = [node for node, cusum in over.items() if cusum.condemns]
        vouched = self._sums.vouched(state, condemned, row, upto)
        for node, cusum in over.items():
            if not cusum.condemns:
                self._tell(node, row, "but not without one of them, or of the two of them: nobody is suspended on one "
                           "validator's word")  # fmt: skip
            elif node not in vouched:
                self._tell(node, row, "but most other nodes are no better, or there are none: the bound may be wrong, "
                           "and nobody is suspended. The operator should calibrate again")  # fmt: skip
        for node in sorted(vouched):
            said = self._sums.evidence(node, key_of(row), upto)
            self.book.append("evidence.node", said)
            self.suspend(state.nodes[node])
            self._suspects.discard(node)
            name, reason = state.nodes[node].name, state.nodes[node].reason
            self.news.say(f"{name} is suspended: {in_words(said, row)} ({reason})")
        return bool(vouched)

    def _tell_cleared(self) -> None:
        state = self.book.state
        for key in state.cleared[self._cleared :]:
            node = state.nodes[key]
            self.news.say(
                f"{node.name} is suspended no more, but {node.state}: what ended trust in it "
                f"({node.cleared[-1].reason}) rested on a validator that is believed no more, or on a row of evidence "
                "that was withdrawn or loosened"
            )
        self._cleared = len(state.cleared)

    def _tell(self, node: bytes, row: EvidenceRow, why: str) -> None:
        if (node, key_of(row), why) not in self._told:
            self._told.add((node, key_of(row), why))
            name = self.book.state.nodes[node].name
            self.news.say(
                f"what validators measured on the rollouts of {name} is beyond chance ({row.hypothesis}), {why}"
            )


def in_words(evidence: NodeEvidence, row: EvidenceRow) -> str:
    """What the numbers say, for people."""
    return (
        f"the {evidence.statistic} of its rollouts, lately {evidence.mean:.3g} where honest nodes are at "
        f"{row.honest:.3g} at most, adds up to {evidence.hypothesis} beyond chance over {evidence.rollouts} of them "
        f"(log e {evidence.log_e:.1f}, bar {row.log_bar:.1f}), whichever of {evidence.validators} validators is left "
        "out"
    )
