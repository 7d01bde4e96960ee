"""Whose news are followed: the first sources all the time, and in the last place each of the others in turn.

So a few sources that are named first can't withhold news together for longer than a round takes. Who brings something
keeps the turn until it was heard, for `MOST_S` at the longest. Time is a parameter; nothing waits here.

Not covered: which source is asked by long-poll, and what news are worth (`follower`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardcast.limits import WATCHED_SOURCES

TURN_S = 10.0
"""Long enough for a few looks (`limits.SPARE_LOOK_S`). Longer makes a round of many sources longer than leases last."""

MOST_S = 60.0
"""Of one that goes on bringing something: a publication that never ends must not take the others' turns."""


class Turns:
    """The turns of one follower."""

    def __init__(self) -> None:
        self._who = ""
        self._began = 0.0
        self._busy: set[str] = set()

    @contextmanager
    def heard(self, address: str) -> Iterator[None]:
        """While something is learnt from a source."""
        self._busy.add(address)
        try:
            yield
        finally:
            self._busy.discard(address)

    def watched(self, named: Sequence[str], now: float) -> list[str]:
        """Those of the named sources, best first, whose news are followed now."""
        first, rest = list(named[: WATCHED_SOURCES - 1]), list(named[WATCHED_SOURCES - 1 :])
        if not rest:
            return first
        over = now - self._began >= (MOST_S if self._who in self._busy else TURN_S)
        if self._who not in rest or over:
            self._who = rest[(rest.index(self._who) + 1) % len(rest)] if self._who in rest else rest[0]
            self._began = now
        return [*first, self._who]
