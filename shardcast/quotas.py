"""How many bytes a day one network may take: a count for each /24 (IPv4) or /48 (IPv6), from midnight to midnight UTC.

Who is over it is refused with the time at which the count starts again; what is under way is finished. Counts survive
a restart (`quotas.json`), are written at most every few seconds, and are for this server alone.

Not covered: networks that have many prefixes. `MAX_PREFIXES` bounds the table: beyond it, all new ones share one count.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable
from pathlib import Path

from shardcast.heads import replace_file

DAY_S = 86_400
MAX_PREFIXES = 65_536
"""Networks counted apart. More takes memory (about 150 bytes each); fewer lets strangers fill the table sooner."""

_REST = "others"


def prefix_of(address: str) -> str:
    """The network whose members share a quota: /24 or /48; an address that is none stands for itself."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(ipaddress.ip_network((found, 24 if found.version == 4 else 48), strict=False))


class Quota:
    """Bytes a day by network."""

    def __init__(self, limit: int, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        """
        Args:
            limit: bytes a day of one network.
            path: where counts are kept; a damaged file starts them again.
            now: seconds since the epoch.
        """
        self.limit = limit
        self._path = path
        self._now = now
        self._day = int(now() // DAY_S)
        self._used: dict[str, int] = {}
        self._saved = True
        if path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text())
            if int(stored["day"]) == self._day:
                self._used = {str(name): int(count) for name, count in dict(stored["used"]).items()}
        except (OSError, ValueError, KeyError, TypeError):
            self._used = {}

    def wait_s(self, address: str) -> int:
        """0 while the address's network may have more; else seconds until it may again."""
        self._turn()
        if self._used.get(self._name(address), 0) < self.limit:
            return 0
        return max(1, round((self._day + 1) * DAY_S - self._now()))

    def count(self, address: str, count: int) -> None:
        """`count` bytes were given to an address."""
        self._turn()
        name = self._name(address)
        self._used[name] = self._used.get(name, 0) + count
        self._saved = False

    def save(self) -> None:
        if self._path is not None and not self._saved:
            replace_file(self._path, json.dumps({"day": self._day, "used": self._used}).encode())
            self._saved = True

    def _name(self, address: str) -> str:
        name = prefix_of(address)
        return name if name in self._used or len(self._used) < MAX_PREFIXES else _REST

    def _turn(self) -> None:
        day = int(self._now() // DAY_S)
        if day != self._day:
            self._day, self._used, self._saved = day, {}, False
