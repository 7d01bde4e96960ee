"""Where a stranger's address may lead: global unicast, or private networks where a run or person allows them.

Codes and plans are written by others: an address in them could name this machine's own services, a cloud's metadata
service, or somebody who is to be flooded. Every address is resolved once, checked, and that number is what is
connected to; a name that answers differently later changes nothing. Redirects and proxies are followed nowhere.

Link-local, multicast and reserved addresses, and the metadata services of clouds, are refused even where private ones
are allowed; so is an IPv4 address of those kinds inside an IPv6 one (mapped, NAT64, 6to4, Teredo).

Not covered: addresses that a person typed (`--source`), and proof that a server's key answers there (`challenge`).
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.addresses import parse_http
from protocol.errors import DecodeError, ReasonCode
from shardcast.errors import SourceError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "fd00:ec2::254", "168.63.129.16")))
"""Metadata services that are not link-local (Alibaba, AWS over IPv6, Azure): they hand out credentials."""


@dataclass(frozen=True)
class Place:
    """What a URL leads to, once and for all."""

    host: str
    """As it was written, for the `Host` header and TLS's server name."""
    ip: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        """The pinned address, to connect to; `authority` belongs into the `Host` header then."""
        return f"{'https' if self.tls else 'http'}://{f'[{self.ip}]' if ':' in self.ip else self.ip}:{self.port}"

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_url(url: str) -> tuple[str, int, bool]:
    """Host, port and whether TLS, of `http://HOST[:PORT]` or `https://HOST[:PORT]`.

    Raises:
        DecodeError: anything else.
    """
    if url[:8].lower() != "https://":
        plain = parse_http(url)
        return plain.host, plain.port, False
    plain = parse_http("http" + url[5:])
    return plain.host, plain.port if urlsplit(url).port is not None else 443, True


def _inside(address: IpAddress) -> list[IpAddress]:
    """The address, and the IPv4 addresses it stands for."""
    found: list[IpAddress] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        found.extend(inner for inner in (address.ipv4_mapped, address.sixtofour) if inner is not None)
        if address.teredo is not None:
            found.extend(address.teredo)
    return found


def may_connect(ip: str, *, allow_private: bool) -> bool:
    """Whether an IP address may be connected to because somebody else named it."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    for one in _inside(address):
        if one.is_multicast or one.is_unspecified or one.is_link_local or one in _METADATA:
            return False
        mapped = isinstance(one, ipaddress.IPv6Address) and one.ipv4_mapped is not None
        if one.is_reserved and not one.is_loopback and not mapped and one not in _NAT64:
            return False
        if not allow_private and not (one.is_global or mapped):
            return False
    return True


def resolve(url: str, *, allow_private: bool) -> Place:
    """The one address that a URL stands for from now on. Blocking: call it in a thread, with a deadline.

    Raises:
        SourceError: `malformed`, `unreachable` (no such name), or `not-granted` (it may not be connected to).
    """
    try:
        host, port, tls = parse_url(url)
    except DecodeError as exc:
        raise SourceError(ascii(url[:100]), str(exc), exc.code) from exc
    return Place(host, _first(url, host, port, allow_private), port, tls)


def _first(named: str, host: str, port: int, allow_private: bool) -> str:
    try:
        found = [str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as exc:
        raise SourceError(named, f"there is no host {host!r} ({exc})", ReasonCode.UNREACHABLE) from exc
    for ip in found:
        if may_connect(ip, allow_private=allow_private):
            return ip
    shown = found[0] if found else "nothing"
    raise SourceError(
        named,
        f"leads to {shown}, which a code or plan may not name"
        + ("" if allow_private else "; whoever means a machine of this network must allow it (--allow-private)"),
        ReasonCode.NOT_GRANTED,
    )
