"""Who pulls weights from whom: a pure plan over the relays that the operator admitted.

    origin -> first relay -> 2 or 3 relays -> 2 or 3 below each -> ...  everybody else
                   \\________ a second parent for each ________/

Relays stand in a line, each parent before its children, so there is never a ring. The first one that can be used pulls
from the origin. Every other one has two parents: a main one, the highest with room (two children, three where it sent
at least as fast as half of them), and a second: from another network where there is one, no deeper than the main one
where that is possible. Who has only one relay before it has the origin as a second, spare parent. So no single relay's
end cuts anybody off, and the origin serves two relays however many there are.

    grow(relays, before)  ->  Tree        places(tree, child)  ->  whom it is told to pull from

`grow` moves as few as it can: the line keeps its order, whoever comes new or slow goes to its end, and a relay keeps
the parents it has while those can be used. A relay that may still come (the run just began, or its address is being
proven) keeps its place for a while: whoever would be sent past it waits.

Everybody who is no admitted relay pulls from relays without relays below them, then from any other; the operator's own
validators know the origin as their last resort. In a run without relays everybody pulls from the origin.

Not covered: what makes a relay usable (`members`, `reports`), what was measured and passes (`parents`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.draws import keyed

BELOW, BELOW_WIDE = 2, 3
"""Relays whose main parent one relay is. A hop costs about the time of one shard; more children share one uplink."""

SECOND_BELOW = 3
"""Relays whose second parent one relay is."""

PARENTS = 2
"""What each relay is told, where there are so many: all are pulled from at once."""

TOO_DEEP = 2
"""Hops that a main parent is kept below the highest one with room. Lower moves more; higher lets chains grow."""

_LOOKED_AT = 64
"""Relays with room that are compared for one place: they stand in the order of their depth, or nearly. More cost a
coordinator of a thousand relays more than the plan gains."""

MAX_PARENTS = 4
"""Places one member is told. Bounded by `HeartbeatReply.passes`."""

LAGGING_STEPS = 3
"""A relay this many steps behind the newest policy is used after all others."""


@dataclass(frozen=True)
class Place:
    """Somewhere to pull from: whose key must answer, and where."""

    key: bytes
    url: str


@dataclass(frozen=True)
class RelayView:
    """What the plan knows of one admitted relay."""

    key: bytes
    url: str = ""
    """An address that it proved to be its own; empty when there is none now."""
    awaited: bool = False
    """It has no such address yet, but may have one in a moment."""
    lag: int = 0
    """Steps behind the newest policy, as it says itself."""
    late: bool = False
    """Relays below it fell behind though it did not: its uplink is too thin for them."""
    uplink: float = 0.0
    """Most bytes of weights a second that it sent lately, as it says itself; 0 when not known."""
    network: str = ""
    """Where its proven address is, as `parents.network_of` groups addresses; empty when not known."""

    @property
    def usable(self) -> bool:
        return bool(self.url)

    @property
    def slow(self) -> bool:
        return self.late or self.lag >= LAGGING_STEPS


@dataclass(frozen=True)
class Tree:
    """Relays in a line with the parents of each."""

    line: tuple[RelayView, ...] = ()
    parents: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """Of each relay but the first: the main parent, and the second where there is one. All stand before it."""

    def below(self, key: bytes) -> list[bytes]:
        """Relays that pull from this one, as their main parent or their second."""
        return [child for child, parents in self.parents.items() if key in parents]

    def depth(self, key: bytes) -> int:
        """Hops to the first relay by main parents."""
        hops = 0
        while self.parents.get(key):
            key = self.parents[key][0]
            hops += 1
        return hops


def grow(relays: Sequence[RelayView], before: Tree | None = None) -> Tree:
    """The tree of those relays that can be used or awaited.

    Args:
        relays: the admitted ones that may be used (`Parents.relays`), in the order of the grants.
        before: the tree until now; the new one differs as little as it can.
    """
    known = {relay.key: relay for relay in relays if relay.usable or relay.awaited}
    line = _line(known, before)
    build = _Build(line, before)
    for number, relay in enumerate(line):
        if number:
            build.add(relay, line[:number])
        else:
            build.open(relay)
    return Tree(tuple(line), build.parents)


def _line(known: Mapping[bytes, RelayView], before: Tree | None) -> list[RelayView]:
    """Those that stood there keep their order; new ones come after them, slow ones last."""
    stood = [relay.key for relay in before.line] if before is not None else []
    kept = [key for key in stood if key in known]
    keys = [*kept, *(key for key in known if key not in set(stood))]
    return sorted((known[key] for key in keys), key=lambda relay: relay.slow)


class _Build:
    """Parents given so far. What can be kept is set apart first, so that nobody new takes it."""

    def __init__(self, line: Sequence[RelayView], before: Tree | None) -> None:
        self.parents: dict[bytes, tuple[bytes, ...]] = {}
        self._views = {relay.key: relay for relay in line}
        shown = [relay.uplink for relay in line if relay.uplink > 0]
        self._median = statistics.median(shown) if shown else 0.0
        self._main: dict[bytes, int] = {}
        self._second: dict[bytes, int] = {}
        self._depth: dict[bytes, int] = {}
        self._main_open: list[RelayView] = []
        self._second_open: list[RelayView] = []
        self._kept: dict[bytes, tuple[bytes | None, bytes | None]] = {}
        standing = {relay.key: number for number, relay in enumerate(line)}
        for relay in line[1:]:
            had = before.parents.get(relay.key, ()) if before is not None else ()
            self._keep(relay, [key for key in had if standing.get(key, len(line)) < standing[relay.key]])

    def _keep(self, relay: RelayView, had: Sequence[bytes]) -> None:
        """Set apart the parents it had, as far as they may stay."""
        main = second = None
        for key in had:
            if self._views[key].slow and not relay.slow:
                continue
            if main is None and self._main.get(key, 0) < BELOW_WIDE:
                main = key
                self._main[key] = self._main.get(key, 0) + 1
            elif second is None and self._second.get(key, 0) < SECOND_BELOW:
                second = key
                self._second[key] = self._second.get(key, 0) + 1
        self._kept[relay.key] = main, second

    def open(self, relay: RelayView) -> None:
        """From here on others may come below this one."""
        if self._main.get(relay.key, 0) < self._room(relay):
            self._main_open.append(relay)
        if self._second.get(relay.key, 0) < SECOND_BELOW:
            self._second_open.append(relay)

    def add(self, relay: RelayView, before: Sequence[RelayView]) -> None:
        """Parents for a relay, out of those `before` it in the line."""
        main, second = self._kept[relay.key]
        if main is None or self._hops(main) > self._hops(self._highest(before)) + TOO_DEEP:
            if main is not None:
                self._main[main] -= 1
            main = self._highest(before)
            self._fill(main, 0, self._main, self._main_open, self._room(self._views[main]))
        if second == main:
            self._second[main] -= 1
            second = None
        if second is None and len(before) > 1:
            second = self._beside(self._views[main], before)
            self._fill(second, 1, self._second, self._second_open, SECOND_BELOW)
        self._depth[relay.key] = self._hops(main) + 1
        self.parents[relay.key] = (main,) if second is None else (main, second)
        self.open(relay)

    def _fill(self, key: bytes, which: int, count: dict[bytes, int], opened: list[RelayView], room: int) -> None:
        """Someone new comes below `key`. Where that has no room left, the last one in the line that would have stayed
        there must look for another."""
        count[key] = count.get(key, 0) + 1
        if count[key] == room and self._views[key] in opened:
            opened.remove(self._views[key])
        if count[key] <= room:
            return
        for child, kept in reversed(self._kept.items()):
            if kept[which] == key and child not in self.parents:
                self._kept[child] = (None, kept[1]) if which == 0 else (kept[0], None)
                count[key] -= 1
                return

    def _placed(self, key: bytes, which: int) -> int:
        return sum(parents[which : which + 1] == (key,) for parents in self.parents.values())

    def _highest(self, before: Sequence[RelayView]) -> bytes:
        """The main parent: few hops, then few children."""

        def cost(view: RelayView) -> tuple[bool, int, int]:
            return view.slow, self._hops(view.key), self._main.get(view.key, 0)

        if not self._main_open:  # all room is kept for some that stand further back
            return min(before, key=lambda view: (view.slow, self._placed(view.key, 0))).key
        return min(self._main_open[:_LOOKED_AT], key=cost).key

    def _beside(self, main: RelayView, before: Sequence[RelayView]) -> bytes:
        """The second parent: somewhere else, not deeper than the main one, with few children."""

        def cost(view: RelayView) -> tuple[bool, bool, bool, int, int]:
            deeper = self._hops(view.key) > self._hops(main.key)
            near = bool(main.network) and view.network == main.network
            return view.slow, near, deeper, self._second.get(view.key, 0), self._hops(view.key)

        found = [view for view in self._second_open[: _LOOKED_AT + 1] if view.key != main.key]
        if not found:
            others = [view for view in before if view.key != main.key]
            return min(others, key=lambda view: (view.slow, self._placed(view.key, 1))).key
        return min(found, key=cost).key

    def _hops(self, key: bytes) -> int:
        return self._depth.get(key, 0)

    def _room(self, view: RelayView) -> int:
        return BELOW_WIDE if view.uplink and view.uplink >= self._median else BELOW


def places(
    tree: Tree, child: bytes, role: str, origin: Place, secret: bytes, *, planned: bool, admitted: bool = False
) -> tuple[Place, ...]:
    """Where `child` pulls from, best first; empty while it should wait for a relay that may still come.

    Args:
        child: its public key.
        role: `relay`, `inference`, `validator` or `trainer`.
        secret: spreads children over equals; the same child always gets the same order.
        planned: the operator admitted relays at all; without any, everybody pulls from the origin.
        admitted: it is one of those. While nobody can be sent to it, it pulls like everybody else; while there is no
            relay at all, from the origin.
    """
    if not planned:
        return (origin,)
    views = {relay.key: relay for relay in tree.line}
    if role == "relay" and child in views:
        return _of_relay(tree, child, views, origin)
    if admitted and not tree.line:
        return (origin,)
    spread = sorted(tree.line, key=lambda relay: keyed(secret, "parents", child, relay.key))
    has_below = {key for parents in tree.parents.values() for key in parents[:1]}
    told = _usable(sorted(spread, key=lambda relay: (relay.slow, relay.key in has_below)))
    return (*told[: MAX_PARENTS - 1], origin) if role == "validator" else told[:MAX_PARENTS]


def _of_relay(tree: Tree, child: bytes, views: Mapping[bytes, RelayView], origin: Place) -> tuple[Place, ...]:
    if child not in tree.parents:
        return (origin,)
    told = _usable([views[key] for key in tree.parents[child]])
    return (*told, origin) if told and len(tree.parents[child]) < PARENTS else told


def _usable(relays: Sequence[RelayView]) -> tuple[Place, ...]:
    """Those that can be asked now. Awaited ones only keep their place."""
    return tuple(Place(relay.key, relay.url) for relay in relays if relay.usable)
