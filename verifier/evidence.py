"""What many rollouts of one node say together: a running sum for each hypothesis, which may be looked at at any time.

Per row of the manifest (`EvidenceRow`) and node, over its numbers x in the order in which the ledger took the verdicts:

    e = 1 + bet (min(x, clip) / honest - 1)        M = max(M, 1) e        log M >= log_bar: beyond chance

x >= 0, and an honest node's mean is at most `honest`, so e is a bet that is fair at best: E[e | the past] <= 1. M is
the CUSUM over it (Page 1954; Shin, Ramdas, Rinaldo, "E-detectors", NEJSDS 2023): good numbers are no credit for bad
ones later. Started at every rollout anew, such a product reaches a bar A with chance 1/A at most (Ville), so an honest
node gets there within n rollouts with chance n/A at most: `log_bar` = ln(rows * rollouts a day / 1e-7) keeps false bans
below 1e-7 a node-day, however often one looks and however x is distributed. What it takes against a dishonest one is
about log_bar / E[log e] rollouts.

Numbers are a validator's word, so that one of them could frame a node. Three rules keep that from happening:

1. A submission's numbers count from the validator that was drawn for it first, if that one answered. Whether a later
   draw takes place, and so what its numbers are about, is the choice of those before it.
2. A node is condemned only if its sum clears the bar without the numbers of any one validator. What is left does not
   depend on that one at all. With a single validator nobody is ever condemned.
3. A node is condemned only while at least half of the others, and there are some, stay within `honest` with their
   newest numbers, again without any one validator's. If most of a run is above it, the bound is not honest noise's
   any more: the policy has grown sharper, answers repeat, or the environment ties margins to rewards.

All numbers follow from the ledger and the verdicts' details, and nothing at or after `upto` is read, so coordinator and
audit get the same from whichever later state.

Not covered: what x is (`statistics`), the rows (`evidence_rows`), lost leases (`drops`), two validators that lie
together (they can also reject), keys of one owner, which are summed up apart.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.evidence import FEWEST_VALIDATORS
from protocol.manifest import EvidenceRow
from protocol.records import NodeEvidence, VerdictDetails
from protocol.state import RunState, SubmissionState, VerdictState
from verifier import statistics

RECENT = 256
"""Newest numbers of a node that say what it is like now, for rule 3. Fewer scatter more, more lag behind a policy that
changes."""

FEWEST_RECENT = 32
"""Numbers without which a node tells nothing about the others."""

RowKey = tuple[str, str]
"""(hypothesis, statistic)."""


def key_of(row: EvidenceRow) -> RowKey:
    return row.hypothesis, row.statistic


def log_factors(row: EvidenceRow, x: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln e of each number, float64 of x's shape; minus infinity where e is 0."""
    counted = np.clip(np.asarray(x, dtype=np.float64), 0.0, row.clip)
    with np.errstate(divide="ignore"):
        return np.log1p(row.bet * (counted / row.honest - 1.0))


@dataclass
class Cusum:
    """The sum of one node under one row."""

    row: EvidenceRow
    numbers: int = 0
    log_all: float = 0.0
    """ln M over everybody's numbers."""
    without: dict[bytes, float] = field(default_factory=dict)
    """Validator -> ln M over the numbers of all the others."""
    recent: array[float] = field(default_factory=lambda: array("d"))
    """The newest numbers, at most `clip` each; number n lies at n % `RECENT`. An array: each node and row has one."""
    _whose: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """Of each of them, its validator's place in `without`."""
    _means: dict[bytes | None, float | None] = field(default_factory=dict, repr=False, compare=False)
    """Validator left out -> `mean`, since the newest number."""

    def add(self, validator: bytes, x: Sequence[float]) -> None:
        """Take in the numbers of one verdict, in order."""
        if not x:
            return
        self.without.setdefault(validator, self.log_all)  # nothing of it so far
        place = list(self.without).index(validator)
        self._means.clear()
        for value, log in zip(x, log_factors(self.row, x).tolist(), strict=True):
            self.log_all = max(self.log_all, 0.0) + log
            for other, before in self.without.items():
                if other != validator:
                    self.without[other] = max(before, 0.0) + log
            at = slice(self.numbers % RECENT, self.numbers % RECENT + 1)
            self.recent[at], self._whose[at] = array("d", [min(value, self.row.clip)]), array("I", [place])
            self.numbers += 1

    @property
    def log_e(self) -> float:
        """ln M without the one validator whose numbers weigh most; 0 while it is all one validator's word."""
        if len(self.without) < FEWEST_VALIDATORS:
            return 0.0
        return max(0.0, min(self.log_all, *self.without.values()))

    @property
    def suspicious(self) -> bool:
        """Beyond chance, if every validator can be believed."""
        return self.log_all >= self.row.log_bar

    @property
    def condemns(self) -> bool:
        """Beyond chance, whichever single validator lies (rule 2)."""
        return self.log_e >= self.row.log_bar

    def mean(self, excluded: bytes | None = None) -> float | None:
        """Of the newest numbers, without one validator's; None when they are too few."""
        if excluded not in self._means:
            place = list(self.without).index(excluded) if excluded in self.without else -1
            kept = [value for value, whose in zip(self.recent, self._whose, strict=True) if whose != place]
            self._means[excluded] = sum(kept) / len(kept) if len(kept) >= FEWEST_RECENT else None
        return self._means[excluded]

    def within(self, excluded: bytes | None = None) -> bool | None:
        """Whether that mean is one of an honest node; None when it tells nothing."""
        mean = self.mean(excluded)
        return None if mean is None else mean <= self.row.honest


@dataclass
class Sums:
    """All nodes' sums under all rows of one manifest. Feed it verdicts in the ledger's order (`counted`)."""

    rows: tuple[EvidenceRow, ...]
    distrusted: frozenset[bytes] = frozenset()
    """Validators whose numbers count no more (`distrusted`): rule 2 allows for one liar beside those that are known."""
    _by_node: dict[bytes, dict[RowKey, Cusum]] = field(default_factory=dict)

    def add(self, state: RunState, submission: SubmissionState, verdict: VerdictState, details: VerdictDetails) -> None:
        """Take in what one verdict measured."""
        if verdict.validator in self.distrusted:
            return
        samples = state.leases[submission.lease_id].lease.samples
        rollouts = statistics.measured(details, verdict.verdict.outcomes, samples)
        node = self._by_node.setdefault(submission.owner, {})
        for row in self.rows:
            x = statistics.values(row.statistic, rollouts)
            if x:
                node.setdefault(key_of(row), Cusum(row)).add(verdict.validator, x)

    def of(self, node: bytes) -> Mapping[RowKey, Cusum]:
        """A node's sums, of the rows for which it has numbers."""
        return self._by_node.get(node, {})

    def vouched(self, state: RunState, nodes: Iterable[bytes], row: EvidenceRow, upto: int) -> set[bytes]:
        """Rule 3: those of `nodes` beside whom enough others are within the row's bound, whichever validator lies."""
        key = key_of(row)
        sums = {node: held[key] for node, held in self._by_node.items() if key in held}
        measure = [cusum for node, cusum in sums.items() if not _gone(state, node, upto)]
        counts: dict[bytes | None, Counter[bool | None]] = {}
        found = set()
        for node in nodes:
            own, is_measure = sums[node], not _gone(state, node, upto)
            for liar in (None, *own.without):
                if liar not in counts:
                    counts[liar] = Counter(cusum.within(liar) for cusum in measure)
                others = counts[liar].copy()
                others[own.within(liar)] -= is_measure
                if not others[True] or others[True] < others[False]:
                    break
            else:
                found.add(node)
        return found

    def evidence(self, node: bytes, row: RowKey, upto: int) -> NodeEvidence:
        """The record of one sum as it is now.

        Args:
            upto: the ledger index before which every counted verdict was added, and no other.
        """
        cusum = self.of(node).get(row)
        if cusum is None:
            return NodeEvidence(node, *row, upto, 0, 0, 0.0, 0.0, 0.0)
        return NodeEvidence(
            key=node,
            hypothesis=row[0],
            statistic=row[1],
            upto=upto,
            rollouts=cusum.numbers,
            validators=len(cusum.without),
            log_e=cusum.log_e,
            log_all=max(0.0, cusum.log_all),
            mean=sum(cusum.recent) / len(cusum.recent),
        )


def counted(submission: SubmissionState) -> VerdictState | None:
    """The verdict whose numbers count for a submission (rule 1): of the first validator drawn, if it answered."""
    return submission.verdicts.get(1) if submission.attempts.get(1) == 1 else None


def distrusted(state: RunState, upto: int) -> frozenset[bytes]:
    """Validators in whom trust ended below entry `upto`."""
    return frozenset(key for key, node in state.nodes.items() if node.role == "validator" and _gone(state, key, upto))


def in_order(state: RunState) -> Iterator[tuple[SubmissionState, VerdictState]]:
    """Every counted verdict in the ledger's order."""
    found = [(verdict.index, one, verdict) for one in state.submissions.values() if (verdict := counted(one))]
    for _, submission, verdict in sorted(found, key=lambda item: item[0]):
        yield submission, verdict


def _gone(state: RunState, key: bytes, upto: int) -> bool:
    """Whether a node was suspended below entry `upto`: what it showed is no measure for others."""
    ended = state.nodes[key].suspended_index
    return ended is not None and ended < upto
