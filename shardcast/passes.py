"""Passes: who may pull from whom, decided by the coordinator, shown by the child, checked by the parent.

    coordinator --weights.pass (audience: child; names parent and URL)--> child, with its join or a heartbeat
    child --header X-Headwater-Pass: pass.shown--> parent, on every request; `shown` is signed by the child for
                                                   this parent, anew every minute
    parent: both signatures once per header, afterwards a look-up

A pass of another parent, another child's pass, a copied header from another network address and anything expired are
refused with HTTP 403 and the code `not-granted`; the body says what to do. Weights stay public: a pass keeps the
origin's and relays' uplinks for those the plan names, and tells a child whose stamp to expect.

Not covered: the plan itself (`trainer.tree`), and secrecy: whoever reads the wire reads the weights.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.envelope import Envelope, open_envelope, parse, seal
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode
from protocol.identity import Identity
from protocol.manifest import Run
from protocol.sequences import Sequences
from shardcast.records import PASS_KIND, SHOWN_KIND, PassShown, WeightsPass

PASS_HEADER = "X-Headwater-Pass"  # noqa: S105

PASS_LIFETIME_MS = 900_000
"""How long a pass holds. It outlasts a restart of the coordinator; a suspended relay pulls for at most this long."""

PASS_RENEW_MS = 600_000
"""A pass with less than this left is made anew."""

SHOWN_LIFETIME_MS = 120_000
SHOW_AGAIN_S = 60.0
"""A child signs a new `shown` this often: two signatures a minute per parent instead of one per request."""

MAX_SHOWN_CHARS = 4096
_REMEMBERED = 1024
"""Headers a parent remembers as checked. More children than this only cost signatures checked again."""

ClockMs = Callable[[], int]


@dataclass(frozen=True)
class Parent:
    """One place to pull from."""

    url: str
    key: bytes = b""
    """Who must answer there; empty when nobody told us (a URL typed by hand): then no stamp is asked for."""
    admission: bytes = b""
    """The `weights.pass` envelope, if the run hands out passes."""
    pin: bytes = b""
    """SHA-256 of the certificate that must be shown there (`tls`); for `https://` only."""
    cached: bool = False
    """A public HTTP cache of somebody: what it sends is charged to its address alone."""


def parents_of(given: Iterable[str | Parent]) -> list[Parent]:
    """Plain URLs stand for open sources."""
    return [Parent(one) if isinstance(one, str) else one for one in given]


def issue(
    coordinator: Identity, sequences: Sequences, run: bytes, now_ms: int, child: bytes, parent: bytes, url: str
) -> Envelope:
    """A pass for `child` (public key) to pull from `parent` at `url`."""
    return seal(
        coordinator,
        PASS_KIND,
        WeightsPass(parent, url),
        run=run,
        sequence=sequences.next(PASS_KIND),
        issued_at=now_ms,
        lifetime_ms=PASS_LIFETIME_MS,
        audience=child,
    )


def open_passes(run: Run, own: bytes, raws: Sequence[bytes]) -> list[Parent]:
    """The parents that a join or heartbeat reply names, best first.

    Raises:
        ProtocolError: one of them is no pass of this run's coordinator for us.
    """
    found = []
    for raw in raws:
        envelope = open_envelope(raw, run=run.id, kind=PASS_KIND, signer=run.manifest.coordinator, audience=own)
        given = envelope.record(WeightsPass)
        found.append(Parent(given.url, given.parent, raw))
    return found


class Presenter:
    """A child's side: the header for each parent."""

    def __init__(self, run: bytes, identity: Identity, sequences: Sequences, clock_ms: ClockMs) -> None:
        self._run = run
        self._identity = identity
        self._sequences = sequences
        self._clock_ms = clock_ms
        self._made: dict[bytes, tuple[float, bytes, str]] = {}

    def header(self, parent: Parent) -> str:
        """The value of `X-Headwater-Pass`; empty when there is no pass to show."""
        if not parent.admission:
            return ""
        known = self._made.get(parent.key)
        now = time.monotonic()
        if known is not None and now - known[0] < SHOW_AGAIN_S and known[1] == parent.admission:
            return known[2]
        shown = seal(
            self._identity,
            SHOWN_KIND,
            PassShown(parse(parent.admission).digest),
            run=self._run,
            sequence=self._sequences.next(SHOWN_KIND),
            issued_at=self._clock_ms(),
            lifetime_ms=SHOWN_LIFETIME_MS,
            audience=parent.key,
        )
        text = f"{_text(parent.admission)}.{_text(shown.raw)}"
        self._made[parent.key] = (now, parent.admission, text)
        return text


class PassCheck:
    """A parent's side: which child a request comes from.

    Args:
        run: with the newest manifest known; a callable when that may change.
        own: this server's public key.
    """

    def __init__(self, run: Run | Callable[[], Run], own: bytes, clock_ms: ClockMs) -> None:
        self._run = run
        self._own = own
        self._clock_ms = clock_ms
        self._checked: OrderedDict[str, tuple[bytes, str, int]] = OrderedDict()

    def child(self, header: str, address: str) -> bytes:
        """The public key of the child that shows this header from this network address.

        Raises:
            EnvelopeError(`not-granted`): there is no pass, or it does not hold here; says what to do.
        """
        known = self._checked.get(header)
        if known is not None and known[2] > self._clock_ms():
            if known[1] != address:
                raise _refusal("this pass was already shown from another address; show it with a fresh signature")
            return known[0]
        try:
            child, until = self._check(header)
        except EnvelopeError as exc:
            raise _refusal(str(exc)) from exc
        except ProtocolError as exc:
            raise _refusal(f"that is no pass ({exc})") from exc
        self._checked[header] = (child, address, until)
        while len(self._checked) > _REMEMBERED:
            self._checked.popitem(last=False)
        return child

    def _check(self, header: str) -> tuple[bytes, int]:
        """Child and the time until which the header counts. What costs no signature is checked first."""
        if not header:
            raise EnvelopeError("only nodes that the run's plan sends here are served, and none was shown")
        first, _, second = header.partition(".")
        raw, shown_raw = _bytes(first), _bytes(second)
        now, run = self._clock_ms(), self._run() if callable(self._run) else self._run
        admission, shown = parse(raw), parse(shown_raw)
        if admission.signer != run.manifest.coordinator:
            raise EnvelopeError("the pass is not the run's coordinator's")
        if admission.record(WeightsPass).parent != self._own:
            raise EnvelopeError("the pass names another parent")
        if not admission.audience or shown.signer != admission.audience:
            raise EnvelopeError("the pass belongs to another key")
        if shown.audience != self._own or shown.record(PassShown).admission != admission.digest:
            raise EnvelopeError("the pass was shown to somebody else")
        open_envelope(shown_raw, run=run.id, kind=SHOWN_KIND, now=now)
        open_envelope(raw, run=run.id, kind=PASS_KIND, now=now)
        return admission.audience, min(admission.expires_at, shown.expires_at)


def _refusal(message: str) -> EnvelopeError:
    return EnvelopeError(
        f"{message}. Pull from the parents that the coordinator names: take part with `node join`, or ask the run's "
        "operator to admit this peer id as a relay (or to publish with --open)",
        ReasonCode.NOT_GRANTED,
    )


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise EnvelopeError("the pass is no base64") from exc
