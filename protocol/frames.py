"""Control frames: how one request or reply is laid out on a libp2p stream, over HTTP, and on the host's local socket.

    packed frame   u8 length + kind | u32 length + envelope | attachment (the rest)
    on a stream    u32 length of what follows | u64 request id | packed frame
    local socket   u32 length of what follows | u8 message | u64 id | body (see `Message`)

Big-endian. The opener of a stream sends requests, the other side replies with the same id, in any order.
A reply of kind `refused` comes from the peer's host process, not from its application: it is unsigned, has no
envelope, and its attachment is an `ErrorReply`. Everything else is signed inside its envelope.

Not covered: what an envelope means (`envelope`, `control`) and how the bytes travel (`hostd`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from protocol import codec
from protocol.errors import DecodeError, ReasonCode
from protocol.limits import KIB, MAX_ATTACHMENT_BYTES, MAX_ENVELOPE_BYTES
from protocol.records import ErrorReply

MAX_KIND_BYTES = 40
"""Longest kind: an envelope's 32 letters and `.reply`. Longer kinds of newer peers would be refused."""

MAX_FRAME_BYTES = 1 + MAX_KIND_BYTES + 4 + MAX_ENVELOPE_BYTES + MAX_ATTACHMENT_BYTES
"""Largest packed frame. A stream that announces more is refused and cut before anything is allocated."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 2 * KIB
"""Largest message on the local socket: a frame and its routing."""

REFUSED = "refused"
ERROR = "error"


class Message(IntEnum):
    """Messages between an application and its host process."""

    READY = 1
    """host -> app, JSON: `transport`, `addresses`."""
    FATAL = 2
    """host -> app, JSON: `message`; the host cannot run and exits."""
    REQUEST = 3
    """app -> host: u32 deadline ms | u32 dial ms | u16 length + multiaddr | packed frame."""
    RESULT = 4
    """host -> app: packed frame of the reply."""
    FAILED = 5
    """host -> app: an `ErrorReply`; the request brought no reply."""
    CANCEL = 6
    """app -> host: the caller gave up. host -> app: the peer that asked has gone."""
    INBOUND = 7
    """host -> app: 32-byte transport key of the peer | u8 length + address group | packed frame."""
    REPLY = 8
    """app -> host: u8 charge | packed frame."""
    STATS = 9
    """app -> host: empty; host -> app: JSON numbers for operators and tests."""
    BLOCK = 10
    """app -> host, JSON: all addresses and networks that are blocked from now on; their connections are cut."""


@dataclass(frozen=True)
class ControlFrame:
    """One request or reply.

    `charge` never travels: a handler sets it on its reply when what arrived was forged or malformed, and the host
    process then counts it against the connection and its address, never against the key it named (RULES 2).
    `address` never travels either: the unit that is counted (`admission.address_group`) a request came from.
    """

    kind: str
    envelope: bytes
    attachment: bytes = b""
    charge: bool = False
    address: str = ""


def pack_frame(frame: ControlFrame) -> bytes:
    """The bytes of a frame. Raises DecodeError if a part is over its bound (a bug of the sender)."""
    kind = frame.kind.encode("ascii", "replace")
    if not 1 <= len(kind) <= MAX_KIND_BYTES:
        raise DecodeError(f"frame kind of {len(kind)} bytes, allowed are 1 to {MAX_KIND_BYTES}")
    if len(frame.envelope) > MAX_ENVELOPE_BYTES:
        raise DecodeError(f"envelope of {len(frame.envelope)} bytes, over the bound", ReasonCode.OVERSIZE)
    if len(frame.attachment) > MAX_ATTACHMENT_BYTES:
        raise DecodeError(f"attachment of {len(frame.attachment)} bytes, over the bound", ReasonCode.OVERSIZE)
    return b"".join(
        (bytes([len(kind)]), kind, struct.pack(">I", len(frame.envelope)), frame.envelope, frame.attachment)
    )


def unpack_frame(raw: bytes) -> ControlFrame:
    """The inverse of `pack_frame`. Total: raises only DecodeError."""
    if len(raw) > MAX_FRAME_BYTES:
        raise DecodeError(f"frame of {len(raw)} bytes, over the bound of {MAX_FRAME_BYTES}", ReasonCode.OVERSIZE)
    if not raw or not 1 <= raw[0] <= MAX_KIND_BYTES:
        raise DecodeError("frame kind is empty or too long")
    at = 1 + raw[0]
    kind = raw[1:at]
    if len(kind) != raw[0] or not kind.isascii() or len(raw) < at + 4:
        raise DecodeError("frame ends inside its head, or its kind is not ASCII")
    (size,) = struct.unpack_from(">I", raw, at)
    at += 4
    if size > MAX_ENVELOPE_BYTES:
        raise DecodeError(f"envelope of {size} bytes, over the bound of {MAX_ENVELOPE_BYTES}", ReasonCode.OVERSIZE)
    if len(raw) < at + size:
        raise DecodeError("frame ends inside its envelope")
    if len(raw) - at - size > MAX_ATTACHMENT_BYTES:
        raise DecodeError("attachment over the bound", ReasonCode.OVERSIZE)
    return ControlFrame(kind.decode("ascii"), bytes(raw[at : at + size]), bytes(raw[at + size :]))


def refusal(code: ReasonCode, message: str) -> ControlFrame:
    """A host process's own answer: unsigned, and only about transport."""
    return ControlFrame(REFUSED, b"", codec.encode(ErrorReply(code.value, message[:1000])))


def read_error(raw: bytes) -> tuple[ReasonCode, str]:
    """Code and message of an encoded ErrorReply. Total: anything else reads as `malformed`."""
    try:
        error = codec.decode(ErrorReply, raw)
        return ReasonCode(error.code), error.message
    except (DecodeError, ValueError):
        return ReasonCode.MALFORMED, "the peer's refusal could not be read"
