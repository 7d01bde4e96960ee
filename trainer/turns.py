"""One waiting request per key: a newer one takes the older one's place, and the older is answered at once.

Every change of the ledger wakes whoever waits, and each decides again. A member waits once; without this a stranger
could wait two thousand times over its connections and make each change cost a quarter of a second.

Not covered: what is waited for (`leasing`, `judging`), how many connections one address has (`protocol.admission`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Turn:
    """One request that may wait."""

    over: bool = False
    """A newer one came: answer with nothing."""
    _waits: asyncio.Timeout | None = None

    def end(self) -> None:
        self.over = True
        if self._waits is not None and not self._waits.expired():
            self._waits.reschedule(asyncio.get_running_loop().time())

    async def wait(self, ticket: asyncio.Event, deadline_s: float) -> None:
        """Return when something changed after the ticket was taken, after `deadline_s`, or when this turn is over."""
        if self.over:
            return
        try:
            async with asyncio.timeout(deadline_s) as self._waits:
                await ticket.wait()
        except TimeoutError:
            pass
        finally:
            self._waits = None


@dataclass
class Turns:
    """The newest waiting request of each key, of one kind."""

    _held: dict[bytes, Turn] = field(default_factory=dict)

    @contextmanager
    def take(self, key: bytes) -> Iterator[Turn]:
        """The turn of a request that just came; the one before it ends."""
        older, mine = self._held.get(key), Turn()
        self._held[key] = mine
        if older is not None:
            older.end()
        try:
            yield mine
        finally:
            if self._held.get(key) is mine:
                del self._held[key]
