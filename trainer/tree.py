"""Who pulls weights from whom: a pure plan over the relays the operator admitted, in the order of the grants.

    origin -> relay-1 -> relay-2 -> everybody else            two relays: a chain
                      -> relay-3 ...                          more: a tree, two below each

A relay's parents all come before it in the grants' order, so no ring is ever planned. The first usable one pulls from
the origin and is the only one that may; with it gone the next takes its place. Everybody else pulls from a relay
without relays below it, then from any other; the operator's own validators know the origin as their last resort. In a
run without relays everybody pulls from the origin.

A relay that may still come (the run just began, or its address is being proven) keeps its place for a while: whoever
would otherwise be sent past it waits.

Not covered: what makes a relay usable (`members`, `reports`), and passes (`parents`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.draws import keyed

BELOW = 2
"""Relays directly below each relay. A hop costs about the time of one shard; more children share one uplink."""

MAX_PARENTS = 4
"""Places one member is told: the first and its alternatives. Bounded by `HeartbeatReply.passes`."""

LAGGING_STEPS = 3
"""A relay this many steps behind the newest policy is used after all others."""


@dataclass(frozen=True)
class Place:
    """Somewhere to pull from: whose key must answer, and where."""

    key: bytes
    url: str


@dataclass(frozen=True)
class RelayView:
    """What the plan knows of one admitted relay, in the order of the grants."""

    key: bytes
    url: str = ""
    """An address that it proved to be its own; empty when there is none now."""
    awaited: bool = False
    """It has no such address yet, but may have one in a moment."""
    lag: int = 0
    """Steps behind the newest policy, as it says itself."""

    @property
    def usable(self) -> bool:
        return bool(self.url)


def plan(
    child: bytes, role: str, relays: Sequence[RelayView], origin: Place, secret: bytes, *, planned: bool
) -> tuple[Place, ...]:
    """Where `child` pulls from, best first; empty while it should wait for a relay that may still come.

    Args:
        child: its public key.
        role: `relay`, `inference`, `validator` or `trainer`.
        relays: the admitted ones that may be used (`Parents.relays`), in the order of the grants.
        secret: spreads children over equals; the same child always gets the same order.
        planned: the operator admitted relays at all; without any, everybody pulls from the origin.
    """
    if not planned:
        return (origin,)
    known = [relay for relay in relays if relay.usable or relay.awaited]
    mine = [number for number, relay in enumerate(relays) if relay.key == child] if role == "relay" else []
    if mine:
        before = [relay for relay in relays[: mine[0]] if relay in known]
        return (origin,) if not before else _usable(_above(before))
    spread = sorted(known, key=lambda relay: keyed(secret, "parents", child, relay.key))
    depth = {relay.key: _has_below(number, len(known)) for number, relay in enumerate(known)}
    urls = _usable(sorted(spread, key=lambda relay: (relay.lag >= LAGGING_STEPS, depth[relay.key])))
    return (*urls[: MAX_PARENTS - 1], origin) if role == "validator" else urls


def _above(before: Sequence[RelayView]) -> list[RelayView]:
    """The parents of the relay that comes right after `before`: its place in the tree, the way up, then the rest."""
    way = []
    number = len(before)
    while number:
        number = (number - 1) // BELOW
        way.append(before[number])
    rest = [relay for relay in reversed(before) if relay not in way]
    return sorted([*way, *rest], key=lambda relay: relay.lag >= LAGGING_STEPS)


def _has_below(number: int, count: int) -> bool:
    return BELOW * number + 1 < count


def _usable(relays: Sequence[RelayView]) -> tuple[Place, ...]:
    """Those that can be asked now. Awaited ones only keep their place."""
    return tuple(Place(relay.key, relay.url) for relay in relays if relay.usable)[:MAX_PARENTS]
