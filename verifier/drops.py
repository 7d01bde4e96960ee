"""Does a key keep back what did badly? A test over all its leases that may be looked at after each of them.

Only what comes back can be checked, so whoever gives up the leases that went wrong and returns the rest would teach the
model from a sample of its own choice. But a lost lease is done again by another node under the same seeds: its reward
is known after all. For each lease of one key whose reward is known:

    label   lost (given up, or expired) or returned
    x       its mean verified reward, less the mean over all other nodes' accepted rollouts of the same policy step and
            the four before it
    cell    x below or above 0; exactly 0 says nothing and is left out

Honest losses have nothing to do with the reward: the label is independent of the cell. The e-value of a block of leases
is the likelihood of its labels when each cell has a rate of its own (Krichevsky-Trofimov mixture), over the largest
likelihood with one rate for both. It is at most 1 in expectation for honest keys, whatever their rate, and so are
products over blocks: the chance that it ever reaches 1/a is at most a (Ville's inequality), however often one looks.
It is a universal-inference e-value (Wasserman, Ramdas, Balakrishnan, "Universal inference", PNAS 2020).

Blocks of 128 leases, because an honest key's rate of losses and the run's rewards both drift: a node that was flaky
while rewards were low looks like one that drops low rewards when everything is pooled (log e 33 for an honest key, in
simulation). Inside a block there is little drift, and each block has its own rate. A key may turn late, so the product
is begun anew at every block, with weights that sum to one.

No torch, no clock, no files: coordinator and audit call the same functions and get the same numbers.

Not covered: reasons for losses that do depend on the reward in honest machines (an engine that dies on long answers):
such a key is suspended too, and `verifier explain dropped-results` says so. Several keys of one owner are tested apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from protocol.evidence import DROP_LOG_E
from protocol.records import DropEvidence
from protocol.state import ACCEPTED, LeaseState, RunState, SubmissionState

BLOCK = 128
"""Leases that share one rate of losses. Longer blocks mistake drift for a choice, shorter ones cost power: each pays
for learning its rates anew."""

BASELINE_STEPS = 4
"""Policy steps before a lease's own that its baseline covers too. One step has a few leases, whose noise would hide
most of what a key does; later steps would enter only for lost leases, which become known later, and bias them down."""

Reward = Callable[[int, int], float | None]
"""(submission's ledger index, rollout) -> the reward its accepting verdict's details hold, None when they can't be
read."""


@dataclass(frozen=True)
class LeaseOutcome:
    """One lease of the key under test whose reward is known."""

    lost: bool
    x: float
    """Mean reward, less the mean of the others at about the same policy step."""
    index: int = 0
    """Ledger index of the verdict that made it known; outcomes are taken in this order."""


@dataclass(frozen=True)
class DropResult:
    lost: int
    returned: int
    log_e: float
    """Natural logarithm of the e-value; 0 unless the lost ones did worse."""
    lost_mean: float
    returned_mean: float

    @property
    def condemns(self) -> bool:
        """Whether it is enough to suspend the key."""
        return self.log_e >= DROP_LOG_E and self.lost_mean < self.returned_mean


@dataclass
class DropTest:
    """The running test of one key: `add` each lease in order, read `result` whenever you like."""

    counts: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])
    """[cell below 0, above 0][returned, lost] of the block under way."""
    blocks: int = 0
    """Whole blocks behind it."""
    begun: float = -math.inf
    """Logarithm of the weighted sum of the products begun at an earlier block, whole blocks only."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    """Sum of x and number of leases, [returned, lost]."""

    def add(self, outcome: LeaseOutcome) -> None:
        self.sums[outcome.lost] += outcome.x
        self.numbers[outcome.lost] += 1
        if outcome.x == 0.0:
            return
        self.counts[outcome.x > 0][outcome.lost] += 1
        if sum(map(sum, self.counts)) == BLOCK:
            self.begun = self._log_sum() + _block_log_e(self.counts)
            self.blocks += 1
            self.counts = [[0, 0], [0, 0]]

    @property
    def result(self) -> DropResult:
        returned, lost = (total / max(1, n) for total, n in zip(self.sums, self.numbers, strict=True))
        worse = bool(self.numbers[0] and self.numbers[1]) and lost < returned
        # Weight that no product has been given yet stays at 1: it is as if those began later.
        late = math.log(1.0 / (self.blocks + 2))
        log_e = _log_add(self._log_sum() + _block_log_e(self.counts), late) if worse else 0.0
        return DropResult(self.numbers[1], self.numbers[0], log_e, lost, returned)

    def _log_sum(self) -> float:
        """Products begun so far, with the one that begins at this block: weight 1 / ((b + 1)(b + 2)) at block b."""
        return _log_add(self.begun, -math.log((self.blocks + 1) * (self.blocks + 2)))


def _log_add(one: float, two: float) -> float:
    high, low = max(one, two), min(one, two)
    return high + math.log1p(math.exp(low - high)) if low > -math.inf else high


def _block_log_e(counts: Sequence[Sequence[int]]) -> float:
    """Labels given the cell, against labels that do not care for the cell."""
    returned, lost = (counts[0][label] + counts[1][label] for label in (0, 1))
    return sum(_log_kt(*cell) for cell in counts) - _log_most_likely(returned, lost)


def _log_kt(a: int, b: int) -> float:
    """Logarithm of the Krichevsky-Trofimov mixture's probability of one sequence with these two counts."""
    return math.lgamma(a + 0.5) + math.lgamma(b + 0.5) - math.log(math.pi) - math.lgamma(a + b + 1)


def _log_most_likely(a: int, b: int) -> float:
    return sum(n * math.log(n / (a + b)) for n in (a, b) if n)


def drop_result(outcomes: Iterable[LeaseOutcome]) -> DropResult:
    """The test over leases in the order their rewards became known."""
    test = DropTest()
    for outcome in outcomes:
        test.add(outcome)
    return test.result


def drop_evidence(state: RunState, key: bytes, reward: Reward, upto: int) -> DropEvidence:
    """The test of one key over what the ledger held below entry `upto`; the same from every later state."""
    found = drop_result(lease_outcomes(state, key, reward, upto))
    return DropEvidence(key, upto, found.lost, found.returned, found.log_e, found.lost_mean, found.returned_mean)


# --- from the ledger ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decided:
    """The accepted rollouts of one decided submission."""

    index: int
    """Of the deciding verdict."""
    owner: bytes
    total: float
    count: int


def lease_outcomes(state: RunState, key: bytes, reward: Reward, upto: int) -> list[LeaseOutcome]:
    """Every lease of `key` that was returned or lost and whose reward was known below entry `upto`, in that order.

    A lost lease's reward is that of the first re-issue, by another key, that was decided with an accepted rollout.
    Leases that were open while the coordinator was away, or closed because their owner was suspended, are left out.
    """
    own = [lease for lease in state.leases.values() if lease.owner == key]
    nonces = {lease.lease.nonce for lease in own}
    steps = {step for lease in own for step in _baseline(lease)}
    again: dict[bytes, list[LeaseState]] = {}
    for lease in state.leases.values():
        if lease.lease.nonce in nonces and lease.owner != key:
            again.setdefault(lease.lease.nonce, []).append(lease)
    decided: dict[bytes, _Decided] = {}
    by_step: dict[tuple[int, int], list[_Decided]] = {}
    for submission in state.submissions.values():
        lease = state.leases[submission.lease_id]
        step = (lease.lease.epoch, lease.lease.step)
        found = _read(submission, reward, upto) if step in steps else None
        if found is not None:
            decided[submission.lease_id] = found
            by_step.setdefault(step, []).append(found)
    out = []
    for lease in own:
        if lease.status == "submitted":
            found = decided.get(lease.lease_id)
        elif _counts_as_lost(state, lease, upto):
            candidates = [decided[one.lease_id] for one in again.get(lease.lease.nonce, ()) if one.lease_id in decided]
            found = min((one for one in candidates if one.index > lease.index), key=lambda d: d.index, default=None)
        else:
            found = None
        if found is None:
            continue
        others = [
            one
            for step in _baseline(lease)
            for one in by_step.get(step, ())
            if one.owner != key and one is not found and one.index <= found.index
        ]
        rollouts = sum(one.count for one in others)
        if rollouts:
            x = found.total / found.count - sum(one.total for one in others) / rollouts
            out.append(LeaseOutcome(lease.status == "closed", x, found.index))
    return sorted(out, key=lambda outcome: outcome.index)


def _baseline(lease: LeaseState) -> list[tuple[int, int]]:
    """(epoch, step) of the policies whose rollouts a lease is held against."""
    step = lease.lease.step
    return [(lease.lease.epoch, one) for one in range(max(0, step - BASELINE_STEPS), step + 1)]


def _counts_as_lost(state: RunState, lease: LeaseState, upto: int) -> bool:
    if lease.status != "closed" or lease.closed_index is None or lease.closed_index >= upto:
        return False
    if not lease.reason.startswith(("expired", "failed")):
        return False
    return not any(lease.index < restart < lease.closed_index for restart in state.restarts)


def _read(submission: SubmissionState, reward: Reward, upto: int) -> _Decided | None:
    if submission.verdict_index is None or submission.verdict_index >= upto:
        return None
    rewards = [
        reward(submission.index, position)
        for position, outcome in enumerate(submission.outcomes)
        if outcome.status == ACCEPTED
    ]
    known = [value for value in rewards if value is not None]
    if not known or len(known) < len(rewards):
        return None
    return _Decided(submission.verdict_index, submission.owner, math.fsum(known), len(known))
