"""Whom a server of weights serves, by a list: network addresses, and keys of people.

    server --allow 203.0.113.0/24 --allow 12D3Koo... --allow friends.txt
    child  --key FILE: X-Headwater-Pass: key.BASE64(`weights.shown`), signed for this server, anew every minute

The header is the one that passes of a run travel in (`passes`), with another beginning. A header that was shown from
one address is refused from another, so a copied one is of no use elsewhere.

Not covered: servers behind a proxy or cache. They see its address only; let it keep its own list.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.envelope import open_envelope, seal
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode, UsageError
from protocol.identity import Identity, parse_peer_id
from protocol.sequences import Sequences
from shardcast.passes import MAX_SHOWN_CHARS, SHOW_AGAIN_S, SHOWN_LIFETIME_MS, Parent, Presenter
from shardcast.records import SHOWN_KIND, PassShown

_PREFIX = "key."
_REMEMBERED = 1024
_MAX_LIST_BYTES = 1 << 20

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class AllowList:
    """Networks and public keys (32 bytes) that are served; everybody else is refused."""

    networks: tuple[Network, ...]
    keys: frozenset[bytes]

    def covers(self, address: str) -> bool:
        """Whether an IP address is on the list."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if found.version == 6 and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found.version == network.version and found in network for network in self.networks)


def read_allow(given: Iterable[str]) -> AllowList | None:
    """Addresses, networks, peer ids, or files with one of these a line (`#` begins a comment); None for none given.

    Raises:
        UsageError: one of them is none of that.
    """
    networks: list[Network] = []
    keys: set[bytes] = set()
    words = list(given)
    if not words:
        return None
    for word in words:
        for one in _lines(word):
            try:
                networks.append(ipaddress.ip_network(one, strict=False))
                continue
            except ValueError:
                pass
            try:
                keys.add(parse_peer_id(one))
            except EnvelopeError as exc:
                raise UsageError(
                    f"--allow {one[:100]!r} is no IP address, network (203.0.113.0/24), peer id (12D3Koo..., from "
                    "`node id`), nor a file with such lines"
                ) from exc
    return AllowList(tuple(networks), frozenset(keys))


def _lines(word: str) -> list[str]:
    path = Path(word)
    try:
        if not path.is_file():
            return [word]
        if path.stat().st_size > _MAX_LIST_BYTES:
            raise UsageError(f"--allow {word}: a list of more than 1 MiB; name networks instead of addresses")
        text = path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"--allow {word} is no text file") from exc
    return [line for row in text.splitlines() if (line := row.partition("#")[0].strip())]


class KeyCheck:
    """A server's side: which key of the list a request comes from."""

    def __init__(self, allow: AllowList, run: bytes, own: bytes, clock_ms: Callable[[], int]) -> None:
        """
        Args:
            run: id of the run or share that is served.
            own: this server's public key.
        """
        self._allow = allow
        self._run = run
        self._own = own
        self._clock_ms = clock_ms
        self._checked: OrderedDict[str, tuple[bytes, str, int]] = OrderedDict()

    def child(self, header: str, address: str) -> str | bytes:
        """Who asks: an address of the list, or the key that the header proves.

        Raises:
            EnvelopeError(`not-granted`): neither.
        """
        if self._allow.covers(address):
            return address
        known = self._checked.get(header)
        if known is not None and known[2] > self._clock_ms() and known[1] == address:
            return known[0]
        if known is not None and known[1] != address:
            raise _refusal("this key was already shown from another address; show it with a fresh signature")
        if not header.startswith(_PREFIX) or len(header) > MAX_SHOWN_CHARS:
            raise _refusal("this server serves a list of addresses and keys, and this address is not on it")
        try:
            raw = base64.b64decode(header[len(_PREFIX) :], validate=True)
            envelope = open_envelope(raw, run=self._run, kind=SHOWN_KIND, now=self._clock_ms())
            shown = envelope.record(PassShown)
        except (binascii.Error, ValueError) as exc:
            raise _refusal("what was shown is no base64") from exc
        except ProtocolError as exc:
            raise _refusal(f"what was shown does not hold ({exc})") from exc
        if envelope.audience != self._own or shown.admission != self._run:
            raise _refusal("the key was shown to somebody else")
        if envelope.signer not in self._allow.keys:
            raise _refusal("this key is not on the list")
        self._checked[header] = (envelope.signer, address, envelope.expires_at)
        while len(self._checked) > _REMEMBERED:
            self._checked.popitem(last=False)
        return envelope.signer


class KeyPresenter(Presenter):
    """A child's side: shows its own key to every parent whose key it knows."""

    def __init__(self, run: bytes, identity: Identity, sequences: Sequences, clock_ms: Callable[[], int]) -> None:
        super().__init__(run, identity, sequences, clock_ms)
        self._last: dict[bytes, tuple[float, str]] = {}

    def header(self, parent: Parent) -> str:
        """The value of `X-Headwater-Pass`; empty for a parent whose key nobody told us."""
        if not parent.key:
            return ""
        known = self._last.get(parent.key)
        now = time.monotonic()
        if known is None or now - known[0] >= SHOW_AGAIN_S:
            shown = seal(
                self._identity,
                SHOWN_KIND,
                PassShown(self._run),
                run=self._run,
                sequence=self._sequences.next(SHOWN_KIND),
                issued_at=self._clock_ms(),
                lifetime_ms=SHOWN_LIFETIME_MS,
                audience=parent.key,
            )
            known = self._last[parent.key] = (now, _PREFIX + base64.b64encode(shown.raw).decode("ascii"))
        return known[1]


def _refusal(message: str) -> EnvelopeError:
    return EnvelopeError(
        f"{message}. Whoever runs this server must add your address, or your peer id and you pull with --key",
        ReasonCode.NOT_GRANTED,
    )
