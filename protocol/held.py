"""How many bytes of strangers' requests are kept at once: pure counting, at each of the coordinator's doors.

Bytes count as they arrive, never when they are announced: who sends nothing holds nothing. One address (IPv6: /64) may
hold a quarter of all, so that it takes several to fill a door; a part that only small requests may use keeps heartbeats
going even then. Loopback has no share of its own: behind it are this machine's own processes.

Not covered: what is done with a request that has no room (`visitors`, `control`), and how slowly one may arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.admission import is_loopback
from protocol.limits import KIB

SMALL_BYTES = 64 * KIB
"""Requests up to this size may use the reserve. Heartbeats, leases and jobs are far below."""

SHARE = 4
"""One address may hold this part of all. More lets three fill the door, fewer hurts machines behind one NAT."""


@dataclass
class HeldBytes:
    """Bytes held behind one door.

    Args:
        most: for all together. This bounds the process.
        reserve: part of them that only small requests may use.
    """

    most: int
    reserve: int
    total: int = 0
    _of: dict[str, int] = field(default_factory=dict)
    """Address group -> bytes, for those that hold any."""

    def fits(self, group: str, more: int, *, small: bool) -> bool:
        """Whether `more` bytes from an address still have room."""
        share = self.most if is_loopback(group) else self.most // SHARE
        most = self.most if small else self.most - self.reserve
        return self.total + more <= most and self._of.get(group, 0) + more <= share

    def take(self, group: str, more: int, *, small: bool) -> bool:
        """Count bytes that arrived; False, and nothing is counted, when they have no room."""
        if not self.fits(group, more, small=small):
            return False
        self.total += more
        self._of[group] = self._of.get(group, 0) + more
        return True

    def give_back(self, group: str, count: int) -> None:
        """Bytes are no longer kept."""
        self.total -= count
        left = self._of.get(group, 0) - count
        if left > 0:
            self._of[group] = left
        else:
            self._of.pop(group, None)
