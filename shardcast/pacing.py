"""When a machine that works by leases should look for the next policy: pure decisions over what it measured itself.

A node needs the weights its next lease names, and no others. Between two of its leases several policies may come, and
each pull costs it and its relay a download. So news are held back in two cases:

    working       until the rest of the lease in work is as long as a pull takes, so that the newest policy is here when
                  the lease ends, and those superseded meanwhile are never fetched
    superfluous   always, when much of what it pulls while it waits is for nothing: other nodes get the leases of
                  those policies, and a pull is short beside the time between two policies. The lease then names the
                  policy, and it is fetched by name; relays' uplinks are left to those who need them

Both follow from moving averages of this machine's own leases and pulls: leases shorter than a pull, a slow line, a node
that gets a lease of every policy, and whoever measured nothing yet look for news all the time. The follower bounds each
hold (`follower.HOLD_MAX_S`), so heads are still seen and compared.

A validator is paced the same way, by its jobs: each names one policy, and where several validators share them most
policies are never needed here.

Not covered: relays, who may be asked for any policy and hold back nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ENOUGH = 4
"""Samples before an average is believed. Fewer, and a node's first short leases decide how it pulls the next ones."""

PULLS_AHEAD = 1.5
"""The next pull begins this many typical pulls before the lease's end: pulls vary, and an engine that waits costs more
than a policy fetched in vain."""

FOR_NOTHING = 1.5
"""Policies that come from a lease's end to the next lease, which names the last of them. From here on every third pull
or more is in vain; lower, and a node that is needed for nearly every policy gets its weights later for little."""

LEFT_OUT = 8
"""Policies that come without a lease until a node takes itself for superfluous, whatever went before."""

SHORT_PULL = 0.25
"""A pull of at most this share of the time between two policies delays a lease's rollouts by no more of a step."""


@dataclass
class Average:
    """A moving average and how far samples stray from it (as TCP estimates round trips, RFC 6298)."""

    value: float = 0.0
    stray: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        if self.samples == 1:
            self.value = sample
            return
        self.stray += 0.25 * (abs(sample - self.value) - self.stray)
        self.value += 0.125 * (sample - self.value)

    @property
    def enough(self) -> bool:
        return self.samples >= ENOUGH


@dataclass
class Pacing:
    """What one node measured. All times are seconds of one monotonic clock, given by the caller."""

    pull: Average = field(default_factory=Average)
    """From a publication's first record to its last verified byte."""
    work: Average = field(default_factory=Average)
    """Of one rollout: from weights in the engine to the finished lease, divided by its rollouts."""
    round: Average = field(default_factory=Average)
    """From one lease to the next."""
    steps: Average = field(default_factory=Average)
    """Policies between two leases: how much newer the second one's is."""
    came: Average = field(default_factory=Average)
    """Policies from a lease's end to the next lease. No sample counts for much: being away for a day is one wait."""
    _step: tuple[int, int] | None = None
    _leased: float = 0.0
    _ended: float | None = None
    _working: float | None = None
    _rollouts: int = 0

    def pulled(self, seconds: float) -> None:
        """A policy arrived."""
        self.pull.add(seconds)

    def leased(self, now: float, epoch: int, step: int, rollouts: int) -> None:
        """A lease was given to this node; its policy may still have to come."""
        if self._step is not None and self._step[0] == epoch and self._ended is not None and now > self._leased:
            steps = max(0, step - self._step[1])
            self.steps.add(steps)
            self.round.add(now - self._leased)
            worked = (self._ended - self._leased) / self.interval if self.interval else 0.0
            self.came.add(min(2 * FOR_NOTHING, max(0, steps - int(worked))))
        self._step, self._leased, self._ended = (epoch, step), now, None
        self._working, self._rollouts = now, rollouts

    def loaded(self, now: float) -> None:
        """The lease's policy is in the engine."""
        self._working = now

    def ended(self, now: float, *, done: bool) -> None:
        """The lease is finished, or given back."""
        if done and self._working is not None and self._rollouts:
            self.work.add((now - self._working) / self._rollouts)
        self._working, self._ended = None, now

    def hold_s(self, now: float) -> float:
        """For how long from now news are of no use; 0 to look at once, infinite until a lease says more."""
        if not self.pull.enough:
            return 0.0
        if self._superfluous(now):
            return math.inf
        if self._working is None or not self.work.enough:
            return 0.0
        whole = (self.work.value - self.work.stray) * self._rollouts
        return max(0.0, self._working + whole - PULLS_AHEAD * self.pull.value - self.pull.stray - now)

    @property
    def interval(self) -> float:
        """Seconds between two policies, 0 while none were seen."""
        return self.round.value / self.steps.value if self.steps.value else 0.0

    def _superfluous(self, now: float) -> bool:
        if not self.came.enough or not self.interval or self.pull.value > SHORT_PULL * self.interval:
            return False
        left_out = self._ended is not None and now - self._ended >= LEFT_OUT * self.interval
        return left_out or self.came.value >= FOR_NOTHING
