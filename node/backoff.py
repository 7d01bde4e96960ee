"""Waiting longer and longer, with jitter, so that a returning coordinator isn't met by everybody at once."""

from __future__ import annotations

import asyncio
import random

FIRST_S = 0.2
LONGEST_S = 10.0
"""A node finds a returned coordinator within this long. Larger slows recovery, smaller hammers a struggling one."""

LONGEST_ASKED_S = 600.0
"""Longer waits a peer asks for are cut to this: a quota's window is minutes, and a wrong header must not silence a node
for a day."""


class Backoff:
    """Delays that double from 0.2 to 10 s, each multiplied by a random factor between 0.5 and 1."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._next = FIRST_S

    def delay(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait now, never under `at_least_s` (a peer's Retry-After, capped at `LONGEST_ASKED_S`)."""
        chosen = self._next * self._rng.uniform(0.5, 1.0)
        self._next = min(LONGEST_S, self._next * 2)
        return max(chosen, min(at_least_s, LONGEST_ASKED_S))

    async def wait(self, at_least_s: float = 0.0) -> None:
        await asyncio.sleep(self.delay(at_least_s))

    def reset(self) -> None:
        self._next = FIRST_S
