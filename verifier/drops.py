"""Does a key keep back what did badly? A test over all its leases that may be looked at after each of them.

Only what comes back can be checked, so whoever gives up the leases that went wrong and returns the rest would teach the
model from a sample of its own choice. But a lost lease is done again by another node under the same seeds: its reward
is known after all. For each fresh lease of one key (`outcomes`):

    label   lost (given up, expired, too late for any batch) or returned
    cell    its reward below the others' mean, or not
    length  sampled tokens, of the whole lease and of its longest rollout

Honest losses may depend on the length, as on any machine that runs out of time or memory, but at equal length not on
the reward: P(lost) = p(length), with any p that does not fall as leases get longer. The e-value of a block of leases is
the likelihood of its labels when losses depend on the cell and are more likely below (a mixture over a grid), over the
largest likelihood under any such p (isotonic regression). It is at most 1 in expectation for honest keys, and so are
products over blocks: the chance that it ever reaches 1/a is at most a (Ville's inequality), however often one looks. It
is a universal-inference e-value (Wasserman, Ramdas, Balakrishnan, "Universal inference", PNAS 2020). That it is the
total or the longest rollout that matters is up to the machine: the smaller of the two e-values counts.

What is not known yet is read in the key's favour: an unknown lost lease did well and was longer than any other, an
unknown returned one did badly and was shorter. Whatever it turns out to be, the e-value can only rise: none of the
choices others have (what of it comes back, when, in which pieces) takes it above that of the truth.

A lease that came when only the last batch could take it was maybe not trained on; the test is run with those as
returned and with those as lost, and the mean of two e-values is one.

Blocks of 128 leases, because an honest key's rate of losses and the run's rewards both drift: a node that was flaky
while rewards were low looks like one that drops low rewards when everything is pooled (log e 33 for an honest key, in
simulation). Inside a block there is little drift, and each block has its own rate. A key may turn late, so the product
is begun anew at every block, with weights that sum to one.

Not covered: what became of the leases (`outcomes`); several keys of one owner, which are tested apart; a key that gives
up what is long where long means wrong, which can't be told from a machine that dies on long answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.evidence import DROP_LOG_E
from protocol.records import DropEvidence
from protocol.state import RunState
from verifier.outcomes import LeaseOutcome, Seen, lease_outcomes

BLOCK = 128
"""Leases that share one rate of losses. Longer blocks mistake drift for a choice, shorter ones cost power: each pays
for learning its rates anew."""

GRID = 12
"""Rates of the mixture: sin^2((2k + 1) pi / 4 GRID), k = 0 .. GRID - 1, every pair of a higher one below the mean and a
lower one above weighted alike. A finer grid costs more to search than it wins."""

_RATES = [math.sin((2 * k + 1) * math.pi / (4 * GRID)) ** 2 for k in range(GRID)]
_LOGS = [(math.log1p(-rate), math.log(rate)) for rate in _RATES]
"""Logarithm of the chance of [returned, lost]."""


@dataclass(frozen=True)
class DropResult:
    lost: int
    returned: int
    log_e: float
    """Natural logarithm of the e-value; 0 unless the lost ones did worse."""
    lost_mean: float
    """Mean x of those of which it is known."""
    returned_mean: float

    @property
    def condemns(self) -> bool:
        """Whether it is enough to suspend the key."""
        return self.log_e >= DROP_LOG_E and self.lost_mean < self.returned_mean


@dataclass(frozen=True)
class _Row:
    """One lease as one test reads it, unknowns in the key's favour."""

    lost: bool
    below: bool
    tokens: float
    longest: float

    @staticmethod
    def of(outcome: LeaseOutcome, lost: bool) -> _Row:
        if outcome.x is None:
            extreme = math.inf if lost else -math.inf
            return _Row(lost, not lost, extreme, extreme)
        return _Row(lost, outcome.x < 0, outcome.tokens, outcome.longest)


@dataclass
class _Process:
    """Products of block e-values, under one way to label leases."""

    rows: list[_Row] = field(default_factory=list)
    """Of the block under way."""
    blocks: int = 0
    """Whole blocks behind it."""
    begun: float = -math.inf
    """Logarithm of the weighted sum of the products begun at an earlier block, whole blocks only."""
    leases: list[int] = field(default_factory=lambda: [0, 0])
    """[returned, lost]."""
    known: list[int] = field(default_factory=lambda: [0, 0])
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Number of those whose x is known, and the sum of it."""

    def add(self, outcome: LeaseOutcome, lost: bool) -> None:
        self.leases[lost] += 1
        if outcome.x is not None:
            self.known[lost] += 1
            self.sums[lost] += outcome.x
        self.rows.append(_Row.of(outcome, lost))
        if len(self.rows) == BLOCK:
            self.begun = self._log_sum() + block_log_e(self.rows)
            self.blocks += 1
            self.rows = []

    @property
    def means(self) -> tuple[float, float]:
        """Mean x of the lost, and of the returned."""
        returned, lost = (total / max(1, n) for total, n in zip(self.sums, self.known, strict=True))
        return lost, returned

    @property
    def log_e(self) -> float:
        """Minus infinity unless the lost ones did worse."""
        lost, returned = self.means
        if not all(self.known) or lost >= returned:
            return -math.inf
        # Weight that no product has been given yet stays at 1: it is as if those began later.
        late = math.log(1.0 / (self.blocks + 2))
        return _log_add(self._log_sum() + block_log_e(self.rows), late)

    def _log_sum(self) -> float:
        """Products begun so far, with the one that begins at this block: weight 1 / ((b + 1)(b + 2)) at block b."""
        return _log_add(self.begun, -math.log((self.blocks + 1) * (self.blocks + 2)))


@dataclass
class DropTest:
    """The running test of one key: `add` each lease in order, read `result` whenever you like."""

    strict: _Process = field(default_factory=_Process)
    """Late leases are returned ones."""
    wide: _Process = field(default_factory=_Process)
    """Late leases are lost ones."""
    alike: bool = True
    """No lease was late so far."""

    def add(self, outcome: LeaseOutcome) -> None:
        self.alike = self.alike and not outcome.late
        self.strict.add(outcome, outcome.lost)
        self.wide.add(outcome, outcome.lost or outcome.late)

    @property
    def result(self) -> DropResult:
        """Counts and means are those of the labels that say more."""
        strict = self.strict.log_e
        wide = strict if self.alike else self.wide.log_e
        told = self.wide if wide > strict else self.strict
        log_e = _log_add(strict, wide) - math.log(2.0) if max(strict, wide) > -math.inf else 0.0
        return DropResult(told.leases[1], told.leases[0], log_e, *told.means)


def drop_result(outcomes: Iterable[LeaseOutcome]) -> DropResult:
    """The test over leases in the order in which their fates came."""
    test = DropTest()
    for outcome in outcomes:
        test.add(outcome)
    return test.result


def drop_evidence(state: RunState, key: bytes, seen: Seen, upto: int) -> DropEvidence:
    """The test of one key over what the ledger held below entry `upto`; the same from every later state."""
    found = drop_result(lease_outcomes(state, key, seen, upto))
    return DropEvidence(key, upto, found.lost, found.returned, found.log_e, found.lost_mean, found.returned_mean)


# --- one block ------------------------------------------------------------------------------------------------------


def block_log_e(rows: list[_Row]) -> float:
    """Labels that depend on the cell, against labels that depend on the length alone."""
    if not rows:
        return 0.0
    counts = [[0, 0], [0, 0]]
    for row in rows:
        counts[row.below][row.lost] += 1
    lengths = ([row.tokens for row in rows], [row.longest for row in rows])
    lost = [row.lost for row in rows]
    return _log_mixture(counts) - max(log_most_likely(one, lost) for one in lengths)


def _log_mixture(counts: list[list[int]]) -> float:
    """Logarithm of the mean likelihood over all pairs of rates of which the one below the mean is higher.

    Args:
        counts: [not below, below][returned, lost].
    """
    above, below = (
        [returned * log_returned + lost * log_lost for log_returned, log_lost in _LOGS] for returned, lost in counts
    )
    terms = [below[high] + above[low] for high in range(GRID) for low in range(high)]
    top = max(terms)
    return top + math.log(math.fsum(math.exp(term - top) for term in terms) / len(terms))


def log_most_likely(lengths: list[float], lost: list[bool]) -> float:
    """Logarithm of the largest likelihood when the rate of losses is a function of the length that never falls: pool
    adjacent violators (Ayer et al., 1955)."""
    groups: dict[float, list[int]] = {}
    for length, label in zip(lengths, lost, strict=True):
        group = groups.setdefault(length, [0, 0])
        group[0] += label
        group[1] += 1
    pools: list[list[int]] = []
    for length in sorted(groups):
        gone, total = groups[length]
        while pools and pools[-1][0] * total >= gone * pools[-1][1]:
            before = pools.pop()
            gone, total = gone + before[0], total + before[1]
        pools.append([gone, total])
    return math.fsum(n * math.log(n / total) for gone, total in pools for n in (gone, total - gone) if n)


def _log_add(one: float, two: float) -> float:
    high, low = max(one, two), min(one, two)
    return high + math.log1p(math.exp(low - high)) if low > -math.inf else high
