"""What many rollouts of one node say together: a running sum for each hypothesis, which may be looked at at any time.

Per row of the manifest (`EvidenceRow`) and node, over its numbers x in the order in which the ledger took the verdicts:

    e = 1 + bet (min(x, clip) / honest - 1)        M = max(M, 1) e        log M >= log_bar: beyond chance

x >= 0, and an honest node's mean is at most `honest`, so e is a bet that is fair at best: E[e | the past] <= 1. M is
the CUSUM over it (Page 1954; Shin, Ramdas, Rinaldo, "E-detectors", NEJSDS 2023): good numbers are no credit for bad
ones later. Started at every rollout anew, such a product reaches a bar A with chance 1/A at most (Ville), so an honest
node gets there within n rollouts with chance n/A at most: `log_bar` = ln(rows * rollouts a day / 1e-7) keeps false bans
below 1e-7 a node-day, however often one looks and however x is distributed. What it takes against a dishonest one is
about log_bar / E[log e] rollouts.

Numbers are a validator's word, so that one of them could frame a node, or shield it. Rules:

1. A submission's numbers count from the validator that was drawn for it first, if that one answered. Whether a later
   draw takes place, and so what its numbers are about, is the choice of those before it.
2. A node is condemned only if, whichever validator u is left out, the numbers of the others clear the bar: all of them,
   or those without one more, w, whose numbers may hide what the node does. So one liar among three or more neither
   frames (what is left without it does not depend on it at all) nor shields (it is a w for each u). That one may pick
   w is paid for: e-values are weighted, 1/2 for nobody and 1 / (2 r (r + 1)) for the r-th validator seen. With one
   validator nobody is ever condemned; of two, either can shield.
3. A node is condemned only while others vouch for the bound: at least half of them, weighted by their work, are within
   `honest` with their newest numbers. If most of a run is above it, the bound is not honest noise's any more: the
   policy has grown sharper, answers repeat, or the environment ties margins to rewards. Another node's mean is the
   median of what its validators say (of two the higher), so that here too one liar among three moves nothing.
4. A row counts rollouts of leases that were issued under it, or under one that was no looser: who took a lease knew
   what would be held against it.

All numbers follow from the ledger and the verdicts' details, and nothing at or after `upto` is read, so coordinator and
audit get the same from whichever later state.

Not covered: what x is (`statistics`), the rows (`evidence_rows`), lost leases (`drops`), two validators that lie
together (they can also reject; the coordinator's own checks find numbers that are wrong), keys of one owner, which are
summed up apart.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.evidence import FEWEST_VALIDATORS
from protocol.evidence_rows import EvidenceRow, as_loose
from protocol.records import NodeEvidence, VerdictDetails
from protocol.standing import gone
from protocol.state import RunState, SubmissionState, VerdictState
from verifier import statistics

RECENT = 256
"""Newest numbers of a node that say what it is like now, for rule 3. Fewer scatter more, more lag behind a policy that
changes. Also the most work that a node's voice there is weighted by: large nodes would shield each other."""

FEWEST_RECENT = 32
"""Numbers without which a node tells nothing about the others."""

FEWEST_EACH = 8
"""The same of one validator's among them."""

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
    """The sum of one node under one row, and the same without any one or two of its validators."""

    row: EvidenceRow
    numbers: int = 0
    validators: list[bytes] = field(default_factory=list)
    """In the order in which their first numbers came."""
    recent: array[float] = field(default_factory=lambda: array("d"))
    """The newest numbers, at most `clip` each; number n lies at n % `RECENT`. An array: each node and row has one."""
    _whose: array[int] = field(default_factory=lambda: array("I"), repr=False)
    """Of each of them, its validator's place."""
    _logs_VV: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, 1)), repr=False, compare=False)
    """[i, j]: ln M without the numbers of validators i and j; 0 is nobody, i the i-th of `validators`."""
    _mean: tuple[int, float | None] = field(default=(0, None), repr=False, compare=False)
    """(numbers, `mean` then)."""

    def add(self, validator: bytes, x: Sequence[float]) -> None:
        """Take in the numbers of one verdict, in order."""
        if not x:
            return
        if validator not in self.validators:  # nothing of it so far: without it all is as it is
            self.validators.append(validator)
            self._logs_VV = np.pad(self._logs_VV, ((0, 1), (0, 1)))
            self._logs_VV[-1, :-1] = self._logs_VV[:-1, -1] = self._logs_VV[:-1, 0]
            self._logs_VV[-1, -1] = self._logs_VV[0, 0]
        place = self.validators.index(validator) + 1
        logs = log_factors(self.row, x)
        ends = logs[::-1].cumsum()  # of the last one, of the last two, ...
        own = self._logs_VV[place].copy()
        # Either it goes on from before, or it begins at the second number or later.
        self._logs_VV = np.maximum(np.maximum(self._logs_VV, 0.0) + ends[-1], ends[:-1].max(initial=-np.inf))
        self._logs_VV[place] = self._logs_VV[:, place] = own
        for value in x:
            at = slice(self.numbers % RECENT, self.numbers % RECENT + 1)
            self.recent[at], self._whose[at] = array("d", [min(value, self.row.clip)]), array("I", [place])
            self.numbers += 1

    @property
    def log_all(self) -> float:
        """ln M over everybody's numbers."""
        return float(self._logs_VV[0, 0])

    @property
    def log_e(self) -> float:
        """What condemns (rule 2), whichever single validator lies; 0 while it is all one validator's word."""
        if len(self.validators) < FEWEST_VALIDATORS:
            return 0.0
        return max(0.0, float(log_condemning(self._logs_VV)))

    @property
    def suspicious(self) -> bool:
        """Beyond chance, if the right validators can be believed."""
        return float(self._logs_VV.max()) >= self.row.log_bar

    @property
    def condemns(self) -> bool:
        """Beyond chance, whichever single validator lies."""
        return self.log_e >= self.row.log_bar

    @property
    def mean(self) -> float | None:
        """Of the newest numbers, as the median of its validators has it; None when they are too few, or one's word."""
        if self._mean[0] != self.numbers:  # asked for of all nodes with each verdict on one
            self._mean = self.numbers, self._median_of_means()
        return self._mean[1]

    def _median_of_means(self) -> float | None:
        if self.numbers < FEWEST_RECENT:
            return None
        numbers, whose = np.frombuffer(self.recent), np.frombuffer(self._whose, dtype=np.uint32)
        each = [numbers[whose == place] for place in range(1, len(self.validators) + 1)]
        means = sorted(float(own.mean()) for own in each if len(own) >= FEWEST_EACH)
        return means[len(means) // 2] if len(means) >= FEWEST_VALIDATORS else None


def log_condemning(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln of the e-value that counts, by rule 2.

    Args:
        logs: [..., i, j] as in `Cusum`, two validators or more.

    Returns:
        The smallest over all i of the largest, weighted, over all j; of shape `...`.
    """
    ranks = np.arange(1, logs.shape[-1])
    price = math.log(2.0) + np.concatenate([[0.0], np.log(ranks * (ranks + 1.0))])
    found: npt.NDArray[np.float64] = (logs[..., 1:, :] - price).max(axis=-1).min(axis=-1)
    return found


@dataclass
class Sums:
    """All nodes' sums under all rows of one manifest. Feed it verdicts in the ledger's order (`counted`)."""

    rows: tuple[EvidenceRow, ...]
    distrusted: frozenset[bytes] = frozenset()
    """Validators whose numbers count no more (`distrusted`): rule 2 allows for one liar beside those that are known."""
    _by_node: dict[bytes, dict[RowKey, Cusum]] = field(default_factory=dict)
    _counting: dict[bytes, tuple[EvidenceRow, ...]] = field(default_factory=dict, repr=False)
    """Hash of a lease's manifest -> rows under which its rollouts count (rule 4)."""

    def add(self, state: RunState, submission: SubmissionState, verdict: VerdictState, details: VerdictDetails) -> None:
        """Take in what one verdict measured."""
        if verdict.validator in self.distrusted:
            return
        lease = state.leases[submission.lease_id].lease
        rollouts = statistics.measured(details, verdict.verdict.outcomes, lease.samples)
        node = self._by_node.setdefault(submission.owner, {})
        for row in self._rows_for(state, lease.manifest):
            x = statistics.values(row.statistic, rollouts)
            if x:
                node.setdefault(key_of(row), Cusum(row)).add(verdict.validator, x)

    def _rows_for(self, state: RunState, manifest: bytes) -> tuple[EvidenceRow, ...]:
        found = self._counting.get(manifest)
        if found is None:
            assert state.chain is not None
            then = {key_of(row): row for row in state.chain.at(manifest).manifest.evidence}
            found = tuple(row for row in self.rows if key_of(row) in then and as_loose(row, then[key_of(row)]))
            self._counting[manifest] = found
        return found

    def of(self, node: bytes) -> Mapping[RowKey, Cusum]:
        """A node's sums, of the rows for which it has numbers."""
        return self._by_node.get(node, {})

    def vouched(self, state: RunState, nodes: Iterable[bytes], row: EvidenceRow, upto: int) -> set[bytes]:
        """Rule 3: those of `nodes` beside whom others of enough weight are within the row's bound."""
        nodes, key = set(nodes), key_of(row)
        if not nodes:
            return nodes
        weights = {True: 0, False: 0}
        own: dict[bytes, tuple[bool, int]] = {}
        for node, held in self._by_node.items():
            mean = held[key].mean if key in held and not gone(state.nodes[node], upto) else None
            if mean is not None:
                own[node] = mean <= row.honest, min(RECENT, held[key].numbers)
                weights[own[node][0]] += own[node][1]
        found = set()
        for node in nodes:
            within, weight = own.get(node, (False, 0))
            for_it, against = (weights[side] - (weight if within == side else 0) for side in (True, False))
            if for_it > 0 and for_it >= against:
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
            validators=len(cusum.validators),
            log_e=cusum.log_e,
            log_all=max(0.0, cusum.log_all),
            mean=sum(cusum.recent) / len(cusum.recent),
        )


def counted(submission: SubmissionState) -> VerdictState | None:
    """The verdict whose numbers count for a submission (rule 1): of the first validator drawn, if it answered."""
    return submission.verdicts.get(1) if submission.attempts.get(1) == 1 else None


def distrusted(state: RunState, upto: int) -> frozenset[bytes]:
    """Validators in whom trust ended below entry `upto`."""
    return frozenset(key for key, node in state.nodes.items() if node.role == "validator" and gone(node, upto))


def in_order(state: RunState) -> Iterator[tuple[SubmissionState, VerdictState]]:
    """Every counted verdict in the ledger's order."""
    found = [(verdict.index, one, verdict) for one in state.submissions.values() if (verdict := counted(one))]
    for _, submission, verdict in sorted(found, key=lambda item: item[0]):
        yield submission, verdict
