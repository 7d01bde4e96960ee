"""The run's time on this machine (RULES 3): nobody's wall clock is trusted after the coordinator's was learned.

Not covered: how the coordinator's time is learned (a join's reply echoes a nonce, see `control`).
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Milliseconds since the epoch in the coordinator's time: a monotonic clock and an offset.

    Args:
        wall: seconds since the epoch, read once.
        monotonic: seconds, never stepped.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._offset_ms = int(1000 * wall()) - self._monotonic_ms()
        self.skew_ms = 0
        """How far this machine's wall clock was behind the coordinator's at the last `adjust`; warn above a minute."""

    def _monotonic_ms(self) -> int:
        return int(1000 * self._monotonic())

    def now_ms(self) -> int:
        return self._monotonic_ms() + self._offset_ms

    def adjust(self, their_ms: int, round_trip_ms: int = 0) -> None:
        """Take over the coordinator's time, which was read about half a round trip ago."""
        offset = their_ms + round_trip_ms // 2 - self._monotonic_ms()
        self.skew_ms += offset - self._offset_ms
        self._offset_ms = offset
