"""The signed envelope every message of a run travels in (RULES 2).

Wire layout, big-endian:

    u8 length + kind | u16 version | run 32 | signer 32 | u8 length + audience (0 or 32)
    | u64 sequence | u64 issued_at ms | u64 expires_at ms | u32 length + payload | signature 64

The signature covers `b"headwater/1\\0"`, then the same header fields, then BLAKE3(payload) in the payload's place.

Not covered: what a payload means (`records`), and who may send it (the receiver's business).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from protocol import codec
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.identity import Identity, check_public_key, verify
from protocol.limits import FRESHNESS_MS, MAX_ENVELOPE_BYTES, PROTOCOL_VERSION

R = TypeVar("R")

DOMAIN = b"headwater/1\0"
"""Prefix of all signed bytes. Changing it makes every stored signature invalid."""

_MAX_KIND = 32
_SIGNATURE_BYTES = 64
_BEFORE = struct.Struct(">H32s32sB")
"""After the kind: version, run, signer, length of the audience."""
_AFTER = struct.Struct(">QQQI")
"""After the audience: sequence, issued at, expires at, length of the payload."""


@dataclass(frozen=True)
class Envelope:
    """One signed message. `raw` is what arrived: hash that, never a re-encoding."""

    kind: str
    version: int
    run: bytes
    signer: bytes
    audience: bytes
    sequence: int
    issued_at: int
    expires_at: int
    payload: bytes
    signature: bytes
    raw: bytes

    def record(self, cls: type[R]) -> R:
        """Decode the payload. Raises DecodeError."""
        return codec.decode(cls, self.payload)

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the envelope's bytes, 32 bytes."""
        return blake3(self.raw).digest()


def _header(
    kind: str, version: int, run: bytes, signer: bytes, audience: bytes, sequence: int, issued_at: int, expires_at: int
) -> bytes:
    name = kind.encode("ascii")
    return (
        struct.pack(">B", len(name))
        + name
        + struct.pack(">H", version)
        + run
        + signer
        + struct.pack(">B", len(audience))
        + audience
        + struct.pack(">QQQ", sequence, issued_at, expires_at)
    )


def seal(
    identity: Identity,
    kind: str,
    record: object,
    *,
    run: bytes,
    sequence: int,
    issued_at: int,
    lifetime_ms: int = FRESHNESS_MS,
    audience: bytes = b"",
) -> Envelope:
    """Sign a record.

    Args:
        kind: the message kind, at most 32 ASCII letters.
        run: the run id, 32 bytes.
        sequence: from a `Sequences` that has already persisted it.
        issued_at: milliseconds since the epoch in the coordinator's corrected time.
        audience: the addressee's public key (32 bytes) or empty.

    Raises:
        DecodeError: the record or envelope is over its own bounds.
    """
    payload = codec.encode(record)
    expires_at = issued_at + lifetime_ms
    header = _header(kind, PROTOCOL_VERSION, run, identity.public, audience, sequence, issued_at, expires_at)
    signature = identity.sign(DOMAIN + header + blake3(payload).digest())
    raw = header + struct.pack(">I", len(payload)) + payload + signature
    return parse(raw)


def parse(raw: bytes) -> Envelope:
    """Split bytes into an envelope without checking the signature. Total: raises only DecodeError."""
    if len(raw) > MAX_ENVELOPE_BYTES:
        raise DecodeError(f"envelope of {len(raw)} bytes, over the bound of {MAX_ENVELOPE_BYTES}", ReasonCode.OVERSIZE)
    try:
        at = 1 + raw[0]
        version, run, signer, addressed = _BEFORE.unpack_from(raw, at)
        name, at = raw[1:at], at + _BEFORE.size
        audience, at = raw[at : at + addressed], at + addressed
        sequence, issued_at, expires_at, size = _AFTER.unpack_from(raw, at)
    except (IndexError, struct.error) as exc:
        raise DecodeError("envelope ends early") from exc
    if not 1 <= len(name) <= _MAX_KIND or not name.isascii():
        raise DecodeError("envelope kind is empty, too long or not ASCII")
    if len(audience) not in (0, 32):
        raise DecodeError("envelope audience is neither empty nor a public key")
    at += _AFTER.size
    payload, signature = raw[at : at + size], raw[at + size :]
    if len(signature) < _SIGNATURE_BYTES:
        raise DecodeError("envelope ends early")
    if len(signature) > _SIGNATURE_BYTES:
        raise DecodeError("envelope has trailing bytes")
    return Envelope(
        name.decode("ascii"), version, run, signer, audience, sequence, issued_at, expires_at, payload, signature, raw
    )


def check_signature(envelope: Envelope) -> None:
    """Raise EnvelopeError unless the signer's canonical key signed exactly this envelope."""
    check_public_key(envelope.signer)
    header = _header(
        envelope.kind,
        envelope.version,
        envelope.run,
        envelope.signer,
        envelope.audience,
        envelope.sequence,
        envelope.issued_at,
        envelope.expires_at,
    )
    verify(envelope.signer, envelope.signature, DOMAIN + header + blake3(envelope.payload).digest())


def open_envelope(
    raw: bytes,
    *,
    run: bytes,
    kind: str | None = None,
    signer: bytes | None = None,
    audience: bytes | None = None,
    now: int | None = None,
) -> Envelope:
    """Parse and check an envelope; each argument given is enforced.

    Args:
        now: milliseconds in corrected time; None skips freshness (offline audit uses ledger time).
        audience: our own public key. An envelope addressed to nobody is accepted, one to somebody else is not.

    Raises:
        DecodeError: not an envelope.
        EnvelopeError: with `code` saying which check failed.
    """
    envelope = parse(raw)
    if envelope.version >> 8 != PROTOCOL_VERSION >> 8:
        raise EnvelopeError(
            f"protocol major {envelope.version >> 8} is not spoken here", ReasonCode.UNSUPPORTED_VERSION
        )
    if envelope.run != run:
        raise EnvelopeError("the envelope belongs to another run", ReasonCode.WRONG_RUN)
    if kind is not None and envelope.kind != kind:
        raise EnvelopeError(f"expected {kind}, got {envelope.kind}", ReasonCode.WRONG_KIND)
    if signer is not None and envelope.signer != signer:
        raise EnvelopeError("signed by another key than the one expected here", ReasonCode.BAD_SIGNATURE)
    if audience is not None and envelope.audience not in (b"", audience):
        raise EnvelopeError("addressed to somebody else", ReasonCode.WRONG_AUDIENCE)
    check_signature(envelope)
    if now is not None and (envelope.issued_at > now + FRESHNESS_MS or envelope.expires_at + FRESHNESS_MS < now):
        raise EnvelopeError("the envelope is not fresh; check this machine's clock", ReasonCode.EXPIRED)
    return envelope
