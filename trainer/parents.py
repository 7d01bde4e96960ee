"""Tells each member whom to pull weights from, and gives it the passes to be served there.

The plan is `tree.grow`; here is what it looks at (admitted relays, proven addresses, who was heard from, who lied, who
sends how much, below whom others fall behind) and what it becomes: `weights` URLs and `weights.pass` envelopes of a
join's or heartbeat's reply, signed once and handed out again until two thirds of their life are left.

Not covered: the plan, what a pass is (`shardcast.passes`), proving addresses (`members`).
"""

from __future__ import annotations

import functools
import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.envelope import Envelope
from protocol.state import NodeState
from shardcast.passes import PASS_RENEW_MS, issue
from trainer.book import Book
from trainer.config import RunConfig
from trainer.tree import LAGGING_STEPS, Place, RelayView, Tree, grow, places

AWAITED_AT_START_S = 60.0
"""How long after the coordinator's start an admitted relay that never came keeps its place."""

AWAITED_PROOF_S = 30.0
"""How long a relay that joined keeps its place while its address isn't proven."""

LATE_S = 600.0
"""How long a relay below which others fell behind has none below it. Then it is tried again, as addresses are."""

LATE_CHILDREN = 2
"""Relays that must fall behind below one that doesn't. One alone may itself be what is slow."""

_KEPT_PASSES = 8192


@dataclass(frozen=True)
class Seen:
    """What the members' side knows of one admitted relay."""

    url: str = ""
    """Its proven address, if it was heard from lately."""
    age_s: float | None = None
    """Seconds since its address was registered, infinite once it was proven; None if it has not joined since the
    coordinator's start."""
    lag: int = 0
    """Steps it was behind the newest policy when it was last heard from."""
    uplink: float = 0.0
    """Most bytes of weights a second that it said it sent, lately."""
    address: str = ""
    """What the name in `url` resolved to when it was proven."""


@dataclass
class Parents:
    """Plans and passes of one run.

    Args:
        seen: looks at one relay's key.
        distrusted: relays that members of several networks complained about, without proof.
        uptime_s: since the coordinator's start.
    """

    book: Book
    config: RunConfig
    seen: Callable[[bytes], Seen]
    distrusted: Callable[[], set[bytes]]
    uptime_s: Callable[[], float]
    _passes: dict[tuple[bytes, Place], Envelope] = field(default_factory=dict)
    tree: Tree = field(default_factory=Tree)
    """As it was last planned."""
    _planned_from: list[RelayView] | None = None
    _late_until: dict[bytes, float] = field(default_factory=dict)
    """By `uptime_s`."""

    def places(self, node: NodeState) -> tuple[Place, ...]:
        """Where `node` pulls from, best first."""
        if node.state == "suspended":
            return ()
        granted = self.config.grants.keys("relay")
        origin = Place(self.book.run.manifest.origin, f"http://{self.config.origin.listen}")
        self._plan(self.relays(granted))
        admitted = node.role == "relay" and node.key in granted
        return places(
            self.tree, node.key, node.role, origin, self.book.secret, planned=bool(granted), admitted=admitted
        )

    def _plan(self, views: list[RelayView]) -> None:
        """Plan anew when anything it rests on changed."""
        if views != self._planned_from:
            self.tree, self._planned_from = grow(views, self.tree), views

    def _late(self, seen: dict[bytes, Seen]) -> set[bytes]:
        """Relays below which others fell behind, though they themselves did not."""
        now = self.uptime_s()
        behind = {key for key, one in seen.items() if one.url and one.lag >= LAGGING_STEPS}
        for key in seen.keys() - behind:
            below = [child for child, parents in self.tree.parents.items() if parents[0] == key]
            if 2 * len(behind.intersection(below)) >= max(2 * LATE_CHILDREN, len(below)):
                self._late_until[key] = now + LATE_S
        self._late_until = {key: until for key, until in self._late_until.items() if until > now}
        return set(self._late_until)

    def relays(self, granted: list[bytes]) -> list[RelayView]:
        """The admitted relays that may be used, in the order of the grants. Those distrusted without proof are among
        them only while nobody could be served otherwise: suspicion must not cost a run its last relay."""
        nodes = self.book.state.nodes
        free = [key for key in granted if key not in nodes or nodes[key].state != "suspended"]
        found = {key: self.seen(key) for key in free}
        late = self._late(found)
        views = []
        for key, seen in found.items():
            never = seen.age_s is None
            awaited = self.uptime_s() < AWAITED_AT_START_S if never else (seen.age_s or 0.0) < AWAITED_PROOF_S
            # Coarsely: what changes at every heartbeat would be a new plan each time.
            lag = seen.lag if seen.lag >= LAGGING_STEPS else 0
            uplink = 2.0 ** int(math.log2(seen.uplink)) if seen.uplink >= 1 else 0.0
            network = network_of(seen.address) or ""
            views.append(RelayView(key, seen.url, awaited and not seen.url, lag, key in late, uplink, network))
        distrusted = self.distrusted()
        others = [view for view in views if view.key not in distrusted]
        return others if any(view.usable for view in others) else views

    def sent_to(self, child: bytes, relay: bytes) -> bool:
        """Whether `child` holds a pass for `relay` that still counts."""
        now = self.book.now_ms()
        return any(
            holder == child and place.key == relay and envelope.expires_at > now
            for (holder, place), envelope in self._passes.items()
        )

    def passes(self, node: NodeState, places: tuple[Place, ...]) -> tuple[bytes, ...]:
        """One pass per place; those still fresh are handed out again."""
        return tuple(self._pass(node.key, place).raw for place in places)

    def _pass(self, child: bytes, place: Place) -> Envelope:
        known, now = self._passes.get((child, place)), self.book.now_ms()
        if known is not None and known.expires_at - now > PASS_RENEW_MS:
            return known
        if len(self._passes) >= _KEPT_PASSES:
            self._passes.clear()
        made = issue(self.book.coordinator, self.book.sequences, self.book.run.id, now, child, place.key, place.url)
        self._passes[child, place] = made
        return made


@functools.lru_cache(maxsize=1024)
def network_of(address: str | None) -> str | None:
    """The network an address counts for: its first 16 bits (IPv4) or 32 bits (IPv6), of which one person rarely has
    three. None for no address."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return None
    return str(ipaddress.ip_network((found, 16 if found.version == 4 else 32), strict=False))
