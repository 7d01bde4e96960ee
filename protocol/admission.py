"""Who may connect to a host process: pure counting over connections, half-open handshakes and charges.

One address may hold a bounded share of the slots, all addresses together a bounded number. IPv6 addresses count
by their /64, since one machine owns a whole one. Charges (malformed or forged input) count against a connection
and its address: a connection is cut at `CHARGES_PER_CONNECTION`, an address waits `PAUSE_S` after
`CHARGES_PER_ADDRESS` within that time. Loopback is never paused and has no share of its own unless one is set:
behind it are this machine's own processes, and pausing it would let one of them lock out the others.

What the operator blocks (`Blocked`) is refused whoever it is, loopback included.

Not covered: what a charge is for (`hostd`, `control`), and firewalls in front.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CHARGES_PER_CONNECTION = 16
"""Bad frames until a connection is cut. Lower cuts peers with one buggy record; higher costs CPU per attacker."""

CHARGES_PER_ADDRESS = 64
PAUSE_S = 60.0
DEFAULT_PER_ADDRESS = 64
"""Connections of one public address or /64. Lower hurts machines behind one NAT, higher helps a flooder."""

MAX_HALF_OPEN_PER_ADDRESS = 32
"""Handshakes in progress of one address: they hold slots without having proven a key. Loopback may hold half of all."""

_MAX_TRACKED = 4096


def address_group(address: str) -> str:
    """The unit that is counted: an IPv4 address or an IPv6 /64."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def is_loopback(group: str) -> bool:
    return group.startswith("127.") or group == "::/64"


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_network(text: str) -> Network:
    """An address or network (`203.0.113.7`, `203.0.113.0/24`, `2001:db8::/48`). Raises ValueError."""
    return ipaddress.ip_network(text.strip(), strict=False)


class Blocked:
    """Addresses and networks that no traffic is taken from, and none sent to."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self.networks: tuple[Network, ...] = tuple(parse_network(text) for text in addresses)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def covers(self, group: str) -> bool:
        """Whether an address, or any address of a group, is blocked. What is no address is not."""
        if not self.networks:
            return False
        try:
            network = parse_network(address_group(group) if "/" not in group else group)
        except ValueError:
            return False
        return any(network.version == other.version and network.overlaps(other) for other in self.networks)


@dataclass
class Admission:
    """Counts of one host process.

    Args:
        total: connections that strangers may hold at once.
        per_address: connections of one address group; None takes the default and exempts loopback.
        clock: seconds, monotonic.
    """

    total: int
    per_address: int | None
    clock: Callable[[], float]
    connections: int = 0
    refused: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    _half_open: dict[str, int] = field(default_factory=dict)
    _charges: dict[str, tuple[float, int]] = field(default_factory=dict)
    _blocked: Blocked = field(default_factory=Blocked)

    def block(self, addresses: Iterable[str]) -> None:
        """Take nothing from these addresses and networks any more, and from no others that were blocked before."""
        self._blocked = Blocked(addresses)

    def blocked(self, group: str) -> bool:
        return self._blocked.covers(group)

    def _share(self, group: str) -> int:
        if self.per_address is not None:
            return self.per_address
        return self.total if is_loopback(group) else DEFAULT_PER_ADDRESS

    def _half_open_share(self, group: str) -> int:
        return max(1, self.total // 2) if is_loopback(group) else MAX_HALF_OPEN_PER_ADDRESS

    def admit(self, group: str) -> bool:
        """Take a slot for a connection whose handshake starts now. False: close it at once."""
        if (
            self.connections >= self.total
            or self._open.get(group, 0) >= self._share(group)
            or self._half_open.get(group, 0) >= self._half_open_share(group)
            or self.paused(group)
            or self.blocked(group)
        ):
            self.refused += 1
            return False
        self.connections += 1
        self._open[group] = self._open.get(group, 0) + 1
        self._half_open[group] = self._half_open.get(group, 0) + 1
        return True

    def handshake_ended(self, group: str) -> None:
        """The connection proved a key, or failed to."""
        _decrement(self._half_open, group)

    def release(self, group: str) -> None:
        """Give the slot back."""
        self.connections -= 1
        _decrement(self._open, group)

    def charge(self, group: str) -> None:
        """Count one malformed or forged input against an address."""
        if is_loopback(group):
            return
        now = self.clock()
        since, count = self._charges.get(group, (now, 0))
        if now - since > PAUSE_S:
            since, count = now, 0
        if len(self._charges) >= _MAX_TRACKED and group not in self._charges:
            self._charges.pop(next(iter(self._charges)))
        self._charges[group] = (since if count + 1 < CHARGES_PER_ADDRESS else now, count + 1)

    def paused(self, group: str) -> bool:
        since, count = self._charges.get(group, (0.0, 0))
        if count < CHARGES_PER_ADDRESS:
            return False
        if self.clock() - since < PAUSE_S:
            return True
        del self._charges[group]
        return False


def _decrement(counts: dict[str, int], group: str) -> None:
    left = counts.get(group, 0) - 1
    if left > 0:
        counts[group] = left
    else:
        counts.pop(group, None)
