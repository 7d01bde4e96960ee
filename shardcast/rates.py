"""A limit on bytes per second, shared by everything that moves bytes in one process.

A token bucket in its virtual-time form (GCRA): who wants to move n bytes is told how long to wait first. Short bursts
of `BURST_S` are let through at once, so that small answers are not held up by timers.

Not covered: sharing between processes, and fairness between those who wait: pieces go in the order they are asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.1
"""Seconds of the rate that may go at once. Longer makes peaks that a link's queue has to hold; shorter costs timers."""

PIECE_MIN_BYTES = 16 * 1024
PIECE_MAX_BYTES = 1024 * 1024


class Bucket:
    """Bytes per second for all who share this object. Thread-safe."""

    def __init__(self, rate: float, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            rate: bytes per second, above 0.
            now: monotonic seconds.
        """
        if rate <= 0:
            raise ValueError("a rate is above 0 bytes per second")
        self.rate = rate
        self._now = now
        self._lock = threading.Lock()
        self._due = now() - BURST_S

    @property
    def piece_bytes(self) -> int:
        """How much to move at a time, so that nobody holds the line for much longer than `BURST_S`."""
        return int(min(PIECE_MAX_BYTES, max(PIECE_MIN_BYTES, self.rate * BURST_S)))

    def take(self, count: int) -> float:
        """Seconds to wait before moving `count` bytes; they are counted as moved."""
        with self._lock:
            now = self._now()
            wait_s = max(0.0, self._due - now)
            self._due = max(self._due, now - BURST_S) + count / self.rate
            return wait_s
