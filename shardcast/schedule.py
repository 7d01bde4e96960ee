"""Which source is asked for which shard next: pure decisions. Time and chance are parameters, nothing waits here.

    announced, nobody fetches it    -> the better of two random sources that hold it and have room (load per rate)
    nothing is left to assign       -> a source with nothing to do gets a shard that another would bring much later too
    a source fails                  -> rests for a while, in this download; what was behind it goes elsewhere
    the plan names it no more       -> let go at once

Sources are *planned*, *spare* (the origin, where the plan names relays), or *suspect*: they sent something wrong in
this download. Spares and suspects are asked once no better source brought verified bytes for a while (`patience`),
whatever else is being tried meanwhile: so a download ends if any source is honest and alive.

Not covered: requests themselves (`pipeline`), and what is learnt about a publication (`follower`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import ReasonCode
from protocol.limits import MIB, SHARD_BYTES
from shardcast.errors import LieError, SourceError
from shardcast.limits import SHARDS_IN_FLIGHT

SPARE_AFTER_S = 2.0
"""How long planned sources may bring nothing before a spare one is asked. Shorter loads the origin whenever a relay
hiccups; longer is what a dead parent costs each of its children."""

PATIENCE_MAX_S = 10.0
"""Bounds the patience with planned sources that were measured to be slow."""

MAX_SOURCES = 8
"""Sources one download asks at once; each has a connection, and a buffer of a shard."""

_MAX_PENALTY_S = 30.0
_MAX_ABSENCE_S = 5.0
_FIRST_PENALTY_S = 0.25
_FIRST_RATE = 4.0 * MIB

_MAX_REQUESTS = 64
"""Outstanding at one source, where wire shards are short."""
_SHORT_BYTES = 1 * MIB
"""Outstanding at one source at least, so that many short ones cost no round trip each."""
_ASKED_MAX_BYTES = SHARDS_IN_FLIGHT * SHARD_BYTES

_HEDGE_GAIN = 2.0
"""A second source must be done in this part of the time the first one still needs."""
_HEDGE_AFTER_S = 0.25
"""A request younger than this is no slow one."""
_HEDGE_SHARE = 0.1
"""Of a publication's bytes may come twice, or one shard if that is more."""

_REPLACE_S = 5.0
"""What would take this long, and be much faster elsewhere, is asked elsewhere instead of twice."""

_SCOUT_AFTER_S = 0.25
_SCOUT_WORTH_S = 0.5
"""Further planned sources are asked what they hold once a download takes longer than the first, and those it has would
take longer than the second."""

_WRONG = frozenset(
    {
        ReasonCode.SHARD_MISMATCH,
        ReasonCode.HASH_MISMATCH,
        ReasonCode.OVERSIZE,
        ReasonCode.LENGTH_MISMATCH,
        ReasonCode.BAD_SIGNATURE,
        ReasonCode.MALFORMED,
    }
)
"""What an honest source doesn't send. Cut short counts: a source that vanishes is asked later anyway."""


@dataclass
class SourceHealth:
    """How one source behaved, by its address; shared by all downloads and by whoever asks it for news."""

    address: str
    rate: float = _FIRST_RATE
    """Bytes per second of verified shards, moving average; a guess until `measured`."""
    measured: bool = False
    round_trip_s: float = 0.0
    failures: int = 0
    """In a row."""
    resting_until: float = 0.0
    """Monotonic time before which it is not asked for news again."""
    last_error: SourceError | None = None
    lied: bool = False
    """It validly signed a wrong hash: it is never asked again."""

    def worked(self, bytes_received: int, seconds: float) -> None:
        self.failures = 0
        if bytes_received:
            now = bytes_received / max(seconds, 1e-4)
            self.rate += (0.3 if self.measured else 1.0) * (now - self.rate)
            self.measured = True

    def slowed(self, bytes_received: int, seconds: float) -> None:
        """It brought only so much in that time; nothing was finished, and nobody is blamed."""
        self.rate += 0.3 * (min(self.rate, bytes_received / seconds) - self.rate)

    def failed(self, error: SourceError, now: float, chance: float = 0.5) -> None:
        """Rest for a time that doubles with each failure in a row: up to 5 s when it could not answer, up to 30 s
        when what it sent was wrong. Not having something is no failure here."""
        self.last_error = error
        self.lied = self.lied or isinstance(error, LieError)
        if self.lied:
            penalty = math.inf
        elif error.code == ReasonCode.RECORD_MISSING:
            penalty = _FIRST_PENALTY_S
        else:
            self.failures += 1
            limit = _MAX_PENALTY_S if error.code in _WRONG else _MAX_ABSENCE_S
            penalty = min(limit, _FIRST_PENALTY_S * 2.0 ** min(self.failures - 1, 10))
        self.resting_until = now + max(penalty * (0.7 + 0.6 * chance), error.retry_after_s)


class Outcome(Enum):
    """How an attempt ended."""

    VERIFIED = "verified"
    """The shard is here."""
    MORE = "more"
    """What came was right; something is still missing of the shard."""
    OTHERWISE = "otherwise"
    """Refused, but it can be asked in another form: no failure."""
    RETURNED = "returned"
    """Not answered through no fault of its source, or not wanted any more."""
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class Attempt:
    """One request for one shard at one source."""

    index: int
    address: str
    size: int
    """Bytes it will bring, at most."""
    asked: float
    began: float = 0.0
    """When its answer began to be read; 0 before."""
    got: int = 0


@dataclass(eq=False, slots=True)
class _Standing:
    """One source in one download."""

    health: SourceHealth
    spare: bool
    named: bool = True
    everything: bool = False
    shards: set[int] = field(default_factory=set)
    failures: int = 0
    """In a row."""
    wrong: int = 0
    resting_until: float = 0.0
    out: list[Attempt] = field(default_factory=list)
    """In the order of asking."""
    scouted: bool = False

    @property
    def tier(self) -> int:
        return 2 if self.wrong else 1 if self.spare else 0

    def holds(self, index: int) -> bool:
        return self.everything or index in self.shards

    @property
    def load(self) -> float:
        """Lower is better: shards in its queue over what it delivers."""
        return (len(self.out) + 1) / (self.health.rate * 0.5 ** min(self.failures, 20))

    def has_room(self, size: int) -> bool:
        """One is being answered, one is behind it; more where the line is long, or shards are short."""
        if len(self.out) < 2:
            return True
        asked = sum(attempt.size for attempt in self.out)
        wanted = max(_SHORT_BYTES, 1.5 * self.health.round_trip_s * self.health.rate + self.out[0].size)
        return len(self.out) < _MAX_REQUESTS and asked < wanted and asked + size <= _ASKED_MAX_BYTES


class Schedule:
    """The decisions of one download."""

    def __init__(self, total_bytes: int, now: float, chance: Callable[[], float] = random.random) -> None:
        """
        Args:
            total_bytes: of the publication on the wire, at most; bounds what comes twice.
            chance: numbers from 0 to 1.
        """
        self._chance = chance
        self._sizes: dict[int, int] = {}
        """Wire bytes of each shard that is missing and was announced."""
        self._unassigned: list[int] = []
        """Sorted, lowest last."""
        self._attempts: dict[int, list[Attempt]] = {}
        self._sources: dict[str, _Standing] = {}
        self._done: set[int] = set()
        self._started = now
        self._brought = [now, now]
        """When a source of tier 0, and of tier 0 or 1, last brought a verified shard."""
        self._twice_left = max(_HEDGE_SHARE * total_bytes, SHARD_BYTES)
        self.bytes_twice = 0
        """Received of shards that another source brought first."""
        self.replaced: list[Attempt] = []
        """To be cancelled, and taken from this list, by the caller of `next`: asked elsewhere instead."""

    # --- what is known ---------------------------------------------------------------------------------------------

    def name(self, health: SourceHealth, *, spare: bool) -> None:
        """The plan names this source."""
        known = self._sources.get(health.address)
        if known is None:
            self._sources[health.address] = _Standing(health, spare)
        else:
            known.health = health
            known.spare, known.named = spare, True

    def unname(self, address: str, *, forget: bool = False) -> list[Attempt]:
        """The plan names it no more: the attempts to cancel there, which are `ended` already.

        Args:
            forget: also what it announced and how it behaved: somebody else is there now.
        """
        standing = self._sources.get(address)
        if standing is None:
            return []
        standing.named = False
        dropped = list(standing.out)
        for attempt in dropped:
            self.ended(attempt, Outcome.RETURNED, 0.0)
        if forget:
            del self._sources[address]
        return dropped

    def begin(self, now: float) -> None:
        """The download starts now: patience with planned sources is counted from here."""
        self._started = now
        self._brought = [now, now]

    def announced(self, address: str, index: int | None) -> None:
        """A named source has shard `index`, or all of them (None)."""
        standing = self._sources[address]
        if index is None:
            standing.everything = True
            standing.shards.clear()
        elif not standing.everything:
            standing.shards.add(index)

    def missing(self, index: int, size: int) -> None:
        """Shard `index` is to be fetched, and comes as `size` bytes at most; again after MORE with what is left."""
        if index in self._done:
            return
        if index not in self._sizes and index not in self._attempts:
            self._put_back(index)
        self._sizes[index] = size

    def done(self, index: int) -> None:
        """Shard `index` need not be fetched."""
        self._done.add(index)
        self.postpone(index)

    def postpone(self, index: int) -> None:
        """Nothing can be asked for shard `index` until `missing` names it again."""
        self._sizes.pop(index, None)
        if index in self._unassigned:
            self._unassigned.remove(index)

    # --- what to do ------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Attempt | None:
        """One more request to send now, if any."""
        ready = [one for one in self._sources.values() if self._usable(one, now)]
        roomy = [one for one in ready if one.has_room(0)]
        if not roomy:
            return None
        for index in reversed(self._unassigned):
            size = self._sizes[index]
            holders = [one for one in roomy if one.holds(index) and one.has_room(size)]
            if holders:
                self._unassigned.remove(index)
                return self._start(self._choose(holders), index, now)
        return self._hedge([one for one in roomy if not one.out], now)

    def ended(self, attempt: Attempt, outcome: Outcome, now: float, error: SourceError | None = None) -> list[Attempt]:
        """An attempt is over; returns others for the same shard, to be cancelled, which are `ended` already.

        One that was cancelled may still bring its shard, if it was being stored."""
        standing = self._sources.get(attempt.address)
        attempts = self._attempts.get(attempt.index, [])
        if standing is not None and attempt in standing.out:
            standing.out.remove(attempt)
            attempts.remove(attempt)
        elif standing is None or outcome is not Outcome.VERIFIED:
            return []  # cancelled before
        others: list[Attempt] = []
        if outcome is Outcome.VERIFIED:
            standing.failures = 0
            self._progress(standing, now)
            self.done(attempt.index)
            others = list(attempts)
        elif outcome is Outcome.FAILED and error is not None:
            self._failed(standing, error, now)
        elif outcome is Outcome.MORE:
            self._progress(standing, now)
        if attempts and not others:
            self._twice_left += attempt.size  # what the other one brings doesn't come twice
        for other in others:
            self._give_up(other, now)
        if not attempts:
            self._attempts.pop(attempt.index, None)
            if attempt.index in self._sizes:
                self._put_back(attempt.index)
        return others

    def scouts(self, now: float) -> list[str]:
        """Sources to ask what they hold of the publication; each is named once, until `scout_ended`."""
        if now - self._started < _SCOUT_AFTER_S or not self._worth_scouting(now):
            return []
        busy = sum(one.scouted or one.everything or bool(one.shards) for one in self._sources.values() if one.named)
        found: list[str] = []
        for one in self._sources.values():
            known = one.scouted or one.everything or one.shards
            if busy + len(found) < MAX_SOURCES and not known and self._usable(one, now):
                one.scouted = True
                found.append(one.health.address)
        return found

    def scout_ended(self, address: str, now: float, error: SourceError | None = None) -> None:
        """Asking that source what it holds is over."""
        standing = self._sources.get(address)
        if standing is not None:
            standing.scouted = False
            if error is not None:
                self._failed(standing, error, now)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _usable(self, standing: _Standing, now: float) -> bool:
        if not standing.named or standing.health.lied or standing.resting_until > now:
            return False
        if standing.tier == 0:
            return True
        better = [one for one in self._sources.values() if one.named and one.tier < standing.tier]
        if not better:
            return True
        return now - self._brought[standing.tier - 1] >= self._patience(better)

    def _patience(self, better: Iterable[_Standing]) -> float:
        """How long those may bring nothing: two shards' time of the fastest, as it was measured."""
        size = max(self._sizes.values(), default=0)
        fastest = max((one.health.rate for one in better if one.health.measured), default=math.inf)
        return min(PATIENCE_MAX_S, max(SPARE_AFTER_S, 2 * size / max(fastest, 1.0)))

    def _choose(self, holders: list[_Standing]) -> _Standing:
        """Power of two choices."""
        if len(holders) == 1:
            return holders[0]
        first = int(self._chance() * len(holders)) % len(holders)
        second = int(self._chance() * (len(holders) - 1)) % (len(holders) - 1)
        one, other = holders[first], holders[second + (second >= first)]
        return one if one.load <= other.load else other

    def _start(self, standing: _Standing, index: int, now: float) -> Attempt:
        attempt = Attempt(index, standing.health.address, self._sizes[index], now)
        standing.out.append(attempt)
        self._attempts.setdefault(index, []).append(attempt)
        return attempt

    def _hedge(self, idle: list[_Standing], now: float) -> Attempt | None:
        """A second request for the shard that would come last, where a source with nothing to do is much faster.

        It takes the place of the slower one of two; or of the first, if that would last very long and there is no room
        for bytes that come twice."""
        best: tuple[float, _Standing, int] | None = None
        for index, attempts in self._attempts.items():
            if index not in self._sizes or now - attempts[-1].asked < _HEDGE_AFTER_S:
                continue
            size = self._sizes[index]
            first_s = min(self._left_s(attempt, now) for attempt in attempts)
            if len(attempts) == 1 and size > self._twice_left and first_s < _REPLACE_S:
                continue
            for one in idle:
                own_s = size / one.health.rate + one.health.round_trip_s
                if one.holds(index) and _HEDGE_GAIN * own_s < first_s and (best is None or first_s > best[0]):
                    best = (first_s, one, index)
        if best is None:
            return None
        attempts = self._attempts[best[2]]
        if len(attempts) > 1 or self._sizes[best[2]] > self._twice_left:
            self._replace(max(attempts, key=lambda attempt: self._left_s(attempt, now)), now)
        hedge = self._start(best[1], best[2], now)
        if len(attempts) > 1:
            self._twice_left -= hedge.size
        return hedge

    def _replace(self, attempt: Attempt, now: float) -> None:
        """Nobody waits for this one any more: no failure, but its source is slow."""
        self._slowed(attempt, now)
        self._sources[attempt.address].out.remove(attempt)
        attempts = self._attempts[attempt.index]
        attempts.remove(attempt)
        if attempts:
            self._twice_left += attempt.size
        self.replaced.append(attempt)

    def _left_s(self, attempt: Attempt, now: float) -> float:
        """How long an attempt still needs, by what came of it and of those before it."""
        standing = self._sources[attempt.address]
        bytes_left = 0
        for one in standing.out:
            bytes_left += max(0, one.size - one.got)
            if one is attempt:
                break
        first = standing.out[0]
        rate = standing.health.rate
        seconds = now - (first.began or first.asked)
        if seconds > _HEDGE_AFTER_S:
            rate = min(rate, first.got / seconds)
        return bytes_left / rate if rate > 0 else math.inf

    def _give_up(self, attempt: Attempt, now: float) -> None:
        """Another source was faster: no failure."""
        self._slowed(attempt, now)
        self._sources[attempt.address].out.remove(attempt)
        self._attempts[attempt.index].remove(attempt)
        self.bytes_twice += attempt.got
        self._twice_left += max(0, attempt.size - attempt.got)

    def _slowed(self, attempt: Attempt, now: float) -> None:
        """What an attempt brought until now is what its source can."""
        if attempt.began and now - attempt.began > _HEDGE_AFTER_S:
            self._sources[attempt.address].health.slowed(attempt.got, now - attempt.began)

    def _failed(self, standing: _Standing, error: SourceError, now: float) -> None:
        standing.failures += 1
        limit = _MAX_ABSENCE_S
        if error.code in _WRONG:
            standing.wrong += 1
            limit = _MAX_PENALTY_S
        penalty = min(limit, _FIRST_PENALTY_S * 2.0 ** min(standing.failures - 1, 10))
        standing.resting_until = now + max(penalty * (0.7 + 0.6 * self._chance()), error.retry_after_s)

    def _progress(self, standing: _Standing, now: float) -> None:
        for tier in range(standing.tier, 2):
            self._brought[tier] = now

    def _worth_scouting(self, now: float) -> bool:
        if now - self._brought[1] >= SPARE_AFTER_S / 2:
            return True
        rate = sum(one.health.rate for one in self._sources.values() if one.everything or one.shards)
        return rate <= 0 or sum(self._sizes.values()) / rate > _SCOUT_WORTH_S

    def _put_back(self, index: int) -> None:
        """Keep `_unassigned` sorted, lowest last."""
        at = len(self._unassigned)
        while at and self._unassigned[at - 1] < index:
            at -= 1
        if not at or self._unassigned[at - 1] != index:
            self._unassigned.insert(at, index)
