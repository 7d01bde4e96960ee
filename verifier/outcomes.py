"""What became of each lease of one key, from the ledger: was it lost, and what would it have brought?

    lost     given up, expired, or sent so late that no batch could take it any more
    late     not lost, but sent when only the last batch could take it: a verdict may well come too late then
    x        the lease's mean verified reward, less the mean of what other keys' rollouts of about the same policy had
             brought when the lease was issued

Four things keep anybody from steering this for a key that is not theirs:

- A lease enters with the entry that decided its fate (its submission, or `lease.closed`), and its baseline is fixed
  when it is issued. When, in what order and in how many pieces others do a lost lease again changes nothing.
- x is known when every task of the lease came back and was accepted whole, from whomever: its tokens are forced. Until
  then it is None, which the test (`drops`) reads in the key's favour: who sits on a bad or a good piece frames nobody.
- An acceptance counts that a validator gave who was not found to be wrong by then.
- Only fresh leases count. Which of a nonce's tasks are issued again is the choice of those who had it before.

No torch, no clock, no files: coordinator and audit call the same functions and get the same numbers.

Not covered: the statistics (`drops`), doing lost leases again (`trainer.leases`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protocol.errors import ReasonCode
from protocol.lease_rules import EXPIRED, FAILED
from protocol.records import ACCEPT
from protocol.standing import gone
from protocol.state import ACCEPTED, LeaseState, RolloutOutcome, RunState, SubmissionState

BASELINE_STEPS = 5
"""Policy steps before a lease's own that its baseline covers too: when a lease is issued little of its own step is
there. Fewer leave a few leases' noise, which hides most of what a key does; more lag behind a policy that learns."""

MAX_REWARD = 1e6
"""Rewards beyond it, either way, count as it: sums stay finite whatever a validator claims."""

Seen = Callable[[int, int], tuple[float, int] | None]
"""(submission's ledger index, rollout) -> (reward, sampled tokens) in the details of the verdict that accepted it; None
when they can't be read."""


@dataclass(frozen=True)
class LeaseOutcome:
    """One lease of the key under test."""

    lost: bool
    x: float | None
    """Mean reward, less that of the others at about the same policy step; None while not all of it is known."""
    late: bool = False
    tokens: int = 0
    """Sampled tokens of the whole lease; nothing while x is None."""
    longest: int = 0
    """Those of its longest rollout."""
    index: int = 0
    """Ledger index of the entry that decided its fate; outcomes are taken in this order."""


@dataclass(frozen=True)
class _Group:
    """The rollouts of one task, all accepted."""

    index: int
    """Of the deciding verdict."""
    owner: bytes
    total: float
    count: int
    tokens: int
    longest: int


@dataclass
class _Baseline:
    """What others' groups of one policy step brought, readable as of any ledger index."""

    indices: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0])
    counts: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(groups: Iterable[_Group]) -> _Baseline:
        found = _Baseline()
        for group in sorted(groups, key=lambda group: group.index):
            found.indices.append(group.index)
            found.totals.append(found.totals[-1] + group.total)
            found.counts.append(found.counts[-1] + group.count)
        return found

    def before(self, index: int) -> tuple[float, int]:
        """(sum of rewards, number of rollouts) decided below ledger entry `index`."""
        number = bisect_left(self.indices, index)
        return self.totals[number], self.counts[number]


def lease_outcomes(state: RunState, key: bytes, seen: Seen, upto: int) -> list[LeaseOutcome]:
    """Every fresh lease of `key` whose fate the ledger held below entry `upto`, in the order in which it came.

    Left out: leases that were open while the coordinator was away or closed because their owner was suspended, and
    those for which nobody else's rewards were known yet when they were issued. Neither has to do with the reward.
    """
    closings = closing_indices(state)
    own = [
        (lease, index)
        for lease in state.leases.values()
        if lease.owner == key and lease.reissue_of is None
        for index in [_fate(state, lease, upto)]
        if index is not None
    ]
    nonces = {lease.lease.nonce for lease, _ in own}
    steps = {step for lease, _ in own for step in _baseline_of(lease)}
    liars = frozenset(
        other for other, node in state.nodes.items() if node.reason == ReasonCode.VALIDATOR_WRONG and gone(node, upto)
    )
    known: dict[tuple[bytes, int], _Group] = {}
    by_step: dict[tuple[int, int], list[_Group]] = {}
    for submission in state.submissions.values():
        decided, outcomes = submission.decided_below(upto)
        if decided is None or decided >= upto:
            continue
        asked = state.leases[submission.lease_id].lease
        step = (asked.epoch, asked.step)
        if asked.nonce not in nonces and (submission.owner == key or step not in steps):
            continue
        outcomes = _without(liars, submission, outcomes, upto)
        for task, group in _whole_groups(submission, decided, outcomes, asked.tasks, asked.samples, seen):
            first = known.get((asked.nonce, task))
            if first is None or group.index < first.index:
                known[(asked.nonce, task)] = group
            if submission.owner != key:
                by_step.setdefault(step, []).append(group)
    baselines = {step: _Baseline.of(groups) for step, groups in by_step.items()}
    out = []
    for lease, index in own:
        others = [baselines[step].before(lease.index) for step in _baseline_of(lease) if step in baselines]
        rollouts = sum(count for _, count in others)
        if not rollouts:
            continue
        mean = math.fsum(total for total, _ in others) / rollouts
        out.append(_outcome(state, lease, index, closings, known, mean))
    return sorted(out, key=lambda outcome: outcome.index)


def closing_indices(state: RunState) -> list[int]:
    """Ledger indices of the batches so far, rising."""
    return sorted(batch.index for batch in state.batches.values())


def batches_left(state: RunState, lease: LeaseState, index: int, closings: list[int]) -> int:
    """How many batches, from the next one on at ledger entry `index`, could still take this lease's rollouts."""
    assert state.chain is not None
    staleness = state.chain.at(lease.lease.manifest).manifest.leases.max_staleness
    return max(0, lease.lease.step + staleness + 1 - bisect_left(closings, index))


def _outcome(
    state: RunState,
    lease: LeaseState,
    index: int,
    closings: list[int],
    known: dict[tuple[bytes, int], _Group],
    mean: float,
) -> LeaseOutcome:
    assert state.chain is not None
    left = batches_left(state, lease, index, closings)
    lost = lease.status == "closed" or left == 0
    # With a staleness of 0 the last batch is the only one: to be there for it is not late.
    late = not lost and left == 1 and state.chain.at(lease.lease.manifest).manifest.leases.max_staleness > 0
    groups = [known[(lease.lease.nonce, task)] for task in lease.lease.tasks if (lease.lease.nonce, task) in known]
    if len(groups) < len(lease.lease.tasks):
        return LeaseOutcome(lost, None, late, index=index)
    reward = math.fsum(group.total for group in groups) / sum(group.count for group in groups)
    tokens, longest = sum(group.tokens for group in groups), max(group.longest for group in groups)
    return LeaseOutcome(lost, reward - mean, late, tokens, longest, index)


def _fate(state: RunState, lease: LeaseState, upto: int) -> int | None:
    """The entry that decided what became of a lease; None when none did, or one that tells nothing of its owner."""
    if lease.status == "closed" and (lease.reason == EXPIRED or lease.reason.startswith(FAILED)):
        index = lease.closed_index
    else:
        index = lease.submission
    if index is None or index >= upto or any(lease.index < restart < index for restart in state.restarts):
        return None
    return index


def _baseline_of(lease: LeaseState) -> list[tuple[int, int]]:
    """(epoch, step) of the policies whose rollouts a lease is held against."""
    step = lease.lease.step
    return [(lease.lease.epoch, one) for one in range(max(0, step - BASELINE_STEPS), step + 1)]


def _without(
    liars: frozenset[bytes], submission: SubmissionState, outcomes: tuple[RolloutOutcome, ...], upto: int
) -> tuple[RolloutOutcome, ...]:
    """The outcomes without what was accepted on the word of these validators alone."""
    if not any(state.validator in liars for state in submission.verdicts.values()):
        return outcomes
    verdicts = submission.verdicts.values()
    heard = [state.verdict.outcomes for state in verdicts if state.validator not in liars and state.index < upto]
    return tuple(
        outcome if any(said[i].outcome == ACCEPT for said in heard) else RolloutOutcome()
        for i, outcome in enumerate(outcomes)
    )


def _whole_groups(
    submission: SubmissionState,
    decided: int,
    outcomes: tuple[RolloutOutcome, ...],
    tasks: tuple[int, ...],
    samples: int,
    seen: Seen,
) -> list[tuple[int, _Group]]:
    """What each task's rollouts brought, for the tasks of which every rollout was accepted and can be read. What is
    left of a group of which some are refused would tell more of who refused them."""
    found = []
    for place, task in enumerate(tasks):
        positions = range(place * samples, (place + 1) * samples)
        if any(outcomes[position].status != ACCEPTED for position in positions):
            continue
        read = [seen(submission.index, position) for position in positions]
        whole = [one for one in read if one is not None and math.isfinite(one[0])]
        if len(whole) < samples:
            continue
        total = math.fsum(min(MAX_REWARD, max(-MAX_REWARD, reward)) for reward, _ in whole)
        tokens = [length for _, length in whole]
        group = _Group(decided, submission.owner, total, samples, sum(tokens), max(tokens))
        found.append((task, group))
    return found
