"""Simulated sources under `shardcast.schedule`: time passes by events, so that hours of misbehaviour cost milliseconds.

Each source has a connection like `pipeline`'s: requests are answered one after another, a failure returns those behind
it. What a source does is drawn by the tests; the loop here does what `download` does, with a clock of its own.

Not covered: sockets, and several downloads over one connection.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.errors import ReasonCode
from protocol.limits import SHARD_BYTES
from shardcast.errors import LieError, SourceError
from shardcast.schedule import Attempt, Outcome, Schedule, SourceHealth

STALL_S = 3.0
CONNECT_S = 5.0
LOOK_S = 0.25


@dataclass
class Peer:
    """What one source does."""

    address: str
    kind: str = "honest"
    """honest, dead (refuses connections), silent (no connection comes about), missing (404), stalls (answers the
    first half of a shard), lies, forges (validly signs something wrong), trickles (20 KB/s), vanishes (stalls from
    `until` on)"""
    rate: float = 20e6
    spare: bool = False
    until: float = 1e9
    named: tuple[float, float] = (0.0, 1e9)
    """From when to when the plan names it."""
    queue: list[tuple[Attempt, float]] = field(default_factory=list)
    health: SourceHealth = field(init=False)
    hears_at: float | None = None
    """When asking what it holds is answered."""

    def __post_init__(self) -> None:
        self.health = SourceHealth(self.address)

    def outcome(self, attempt: Attempt, began: float) -> tuple[float, ReasonCode | None]:
        """When the answer at the head of the queue ends, and how."""
        whole = began + 0.01 + attempt.size / self.rate
        match self.kind:
            case "dead":
                return began + 0.01, ReasonCode.UNREACHABLE
            case "silent":
                return began + CONNECT_S, ReasonCode.UNREACHABLE
            case "missing":
                return began + 0.01, ReasonCode.RECORD_MISSING
            case "stalls":
                return began + STALL_S, ReasonCode.TOO_SLOW
            case "lies":
                return whole, ReasonCode.SHARD_MISMATCH
            case "forges":
                return began + 0.01, ReasonCode.RELAY_LIED
            case "trickles":
                return began + attempt.size / 20e3, None
            case "vanishes" if whole > self.until:
                return max(began, self.until) + STALL_S, ReasonCode.TOO_SLOW
        return whole, None

    def got(self, attempt: Attempt, began: float, now: float) -> int:
        """Bytes that came of the answer at the head of the queue."""
        if self.kind in ("dead", "silent", "missing", "forges"):
            return 0
        rate = 20e3 if self.kind == "trickles" else self.rate
        end = min(now, self.until) if self.kind == "vanishes" else now
        came = int(max(0.0, end - began) * rate)
        return min(attempt.size // 2 if self.kind == "stalls" else attempt.size, came)


class Simulation:
    """One download over such sources."""

    def __init__(self, peers: list[Peer], shards: int, size: int, seed: int) -> None:
        self.now = 100.0
        self.peers = {peer.address: peer for peer in peers}
        self.shards, self.size = shards, size
        self.missing = set(range(shards))
        self.schedule = Schedule(shards * size, self.now, random.Random(seed).random)
        self.first_spare: float | None = None
        self.charged: set[str] = set()

    def run(self, limit_s: float) -> float:
        """Seconds until nothing was missing. Raises AssertionError after `limit_s`."""
        start = self.now
        for peer in self.peers.values():
            peer.named = (start + peer.named[0], start + peer.named[1])
            peer.until += start
        self._names()
        for index in range(self.shards):
            self.schedule.missing(index, self.size)
        # The first planned source that is named tells of all shards, as the one that brought the news does.
        first = next(peer for peer in self.peers.values() if not peer.spare and peer.named[0] <= self.now)
        self.schedule.announced(first.address, None)
        while self.missing:
            assert self.now - start < limit_s, f"not done after {limit_s} s: {self.missing}"
            self._act()
            self._pass()
        return self.now - start

    def _names(self) -> None:
        for peer in self.peers.values():
            if peer.named[0] <= self.now < peer.named[1]:
                self.schedule.name(peer.health, spare=peer.spare)
            else:
                self._cancel(self.schedule.unname(peer.address))

    def _act(self) -> None:
        self._names()
        for peer in self.peers.values():
            if peer.queue:
                attempt, began = peer.queue[0]
                attempt.began, attempt.got = began, peer.got(attempt, began, self.now)
        while (attempt_now := self.schedule.next(self.now)) is not None:
            self._cancel(self.schedule.replaced)
            self.schedule.replaced.clear()
            peer = self.peers[attempt_now.address]
            if peer.spare and self.first_spare is None:
                self.first_spare = self.now
            peer.queue.append((attempt_now, self.now))
        for address in self.schedule.scouts(self.now):
            peer = self.peers[address]
            peer.hears_at = self.now + {"silent": CONNECT_S}.get(peer.kind, 0.02)

    def _pass(self) -> None:
        """Let time pass to the next event, and deal with it."""
        ends = [(peer.outcome(*peer.queue[0]), peer) for peer in self.peers.values() if peer.queue]
        hears = [peer for peer in self.peers.values() if peer.hears_at is not None]
        times = [end for (end, _), _ in ends] + [peer.hears_at for peer in hears if peer.hears_at is not None]
        self.now = max(self.now + 1e-6, min([self.now + LOOK_S, *times]))
        for peer in hears:
            if peer.hears_at is not None and peer.hears_at <= self.now:
                self._heard(peer)
        for (end, code), peer in ends:
            if end <= self.now and peer.queue:
                self._answered(peer, code)

    def _heard(self, peer: Peer) -> None:
        peer.hears_at = None
        gone = peer.kind in ("dead", "silent") or (peer.kind == "vanishes" and self.now > peer.until)
        error = SourceError(peer.address, "gone", ReasonCode.UNREACHABLE) if gone else None
        if error is None:
            self.schedule.announced(peer.address, None)
        self.schedule.scout_ended(peer.address, self.now, error)

    def _answered(self, peer: Peer, code: ReasonCode | None) -> None:
        attempt, began = peer.queue.pop(0)
        attempt.began, attempt.got = began, peer.got(attempt, began, self.now)
        if code is None:
            attempt.got = attempt.size
            peer.health.worked(attempt.size, self.now - began)
            self.missing.discard(attempt.index)
            self._cancel(self.schedule.ended(attempt, Outcome.VERIFIED, self.now))
            if peer.queue:
                peer.queue[0] = (peer.queue[0][0], self.now)
            return
        error = SourceError(peer.address, "failed", code)
        if code == ReasonCode.RELAY_LIED:
            error = LieError(peer.address, "forged", b"")
            peer.health.lied = True
        self.charged.add(peer.address)
        self.schedule.ended(attempt, Outcome.FAILED, self.now, error)
        rest, peer.queue = peer.queue, []
        if code == ReasonCode.RECORD_MISSING:
            peer.queue = [(one, self.now) for one, _ in rest]
            return
        for behind, _ in rest:
            self.schedule.ended(behind, Outcome.RETURNED, self.now)

    def _cancel(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            peer = self.peers[attempt.address]
            peer.queue = [(one, began) for one, began in peer.queue if one is not attempt]
            if peer.queue:
                peer.queue[0] = (peer.queue[0][0], self.now)


def bound_s(shards: int, size: int, honest_rate: float, appears_s: float) -> float:
    """Within how long a download ends when one source of this rate is honest from `appears_s` on: the patience with
    better sources, the time to hear of the honest one, and all shards from it, one after another, with a margin for
    what was asked elsewhere meanwhile."""
    return appears_s + 12.0 + 2 * CONNECT_S + 3 * shards * (0.01 + size / honest_rate) + 10 * SHARD_BYTES / 20e6
