"""HTTP addresses that somebody else wrote, read by one total parser: an address that holds, or DecodeError.

The standard library's parsers raise whatever they like on hostile text (`ValueError` for a port, `UnicodeError` for a
long label, later, from the resolver). Here all of it is found at once, before anything is written down or asked.

Not covered: whether anybody answers there (`trainer.members`), libp2p multiaddrs (`libp2p_fixes.parse_address`).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.errors import DecodeError

MAX_ADDRESS_CHARS = 512
"""A host name has at most 253 characters. Longer is no address, and would be printed and kept."""


@dataclass(frozen=True)
class HttpAddress:
    """`http://host[:port]` without user, path, query or fragment."""

    host: str
    """A name or an IP address, the latter without brackets."""
    port: int
    authority: str
    """As it was written: what a `Host` header says."""


def parse_http(text: str) -> HttpAddress:
    """Read a plain http address.

    Raises:
        DecodeError: anything else, whatever it is. The message quotes at most 100 characters, printable.
    """
    shown = ascii(text[:100])
    if len(text) > MAX_ADDRESS_CHARS or not text.isprintable() or " " in text:
        raise DecodeError(f"{shown} is no address: one word of at most {MAX_ADDRESS_CHARS} printable characters")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", 80 if parts.port is None else parts.port
        if ":" not in host:
            host.encode("idna")  # what the resolver does first: it refuses labels that are empty or over 63 bytes
    except ValueError as exc:
        raise DecodeError(f"{shown} is no http address: {exc}") from exc
    whole = parts.scheme == "http" and host and port and not (parts.path.strip("/") or parts.query or parts.fragment)
    if not whole or "@" in parts.netloc:
        raise DecodeError(f"{shown} is no plain http address; write http://HOST:PORT and nothing behind it")
    return HttpAddress(host, port, parts.netloc)
