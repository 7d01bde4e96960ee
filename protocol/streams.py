"""One negotiated libp2p stream carrying control frames, with a deadline on every read and write.

Used on both sides of the host process: `lines` opens streams, `visitors` accepts them. Frames are written in pieces
of at most 32 KiB that are never cut in half (`libp2p_fixes`); a message that is abandoned half-way ends its stream.

Not covered: what is in a frame (`frames`), and multiplexing of requests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import trio

from protocol.errors import ReasonCode, TransportError
from protocol.frames import MAX_FRAME_BYTES
from protocol.libp2p_fixes import (
    STREAM_ERRORS,
    abort,
    accept_protocol,
    remote_group,
    remote_key,
    select_protocol,
)
from protocol.limits import CONTROL_PROTOCOL, HEADER_DEADLINE_S, MINIMUM_RATE_BYTES_S
from protocol.trio_turns import QuickLock

_HEAD = struct.Struct(">IQ")
_READ_BYTES = 64 * 1024
_LINGER_READS = 64
"""Reads of what a refused peer still sends, so that its refusal is not lost in a reset."""


def transfer_deadline_s(size: int) -> float:
    """Seconds a peer may take for `size` bytes at the slowest rate we accept."""
    return HEADER_DEADLINE_S + size / MINIMUM_RATE_BYTES_S


class ControlStream:
    """A stream of frames: `u32 length | u64 request id | packed frame`.

    Every method raises TransportError when the peer, the connection or a deadline fails; the stream is then over.
    """

    def __init__(self, net_stream: Any) -> None:
        self._net = net_stream
        self._muxed = net_stream.muxed_stream
        self._buffer = bytearray()
        self._lock = QuickLock()
        self.connection = net_stream.swarm_conn
        self.received_at = trio.current_time()
        self.key = remote_key(self.connection)
        self.group = remote_group(self.connection)

    @staticmethod
    async def open(connection: Any) -> ControlStream:
        """Open our stream on a live connection."""
        try:
            net_stream = await connection.new_stream()
            await select_protocol(net_stream, CONTROL_PROTOCOL, HEADER_DEADLINE_S)
            return ControlStream(net_stream)
        except STREAM_ERRORS as exc:
            raise TransportError(f"the peer does not speak {CONTROL_PROTOCOL}: {describe(exc)}") from exc

    @staticmethod
    async def accept(net_stream: Any) -> ControlStream:
        """Agree on the protocol of a stream that a peer opened."""
        try:
            await accept_protocol(net_stream, CONTROL_PROTOCOL, HEADER_DEADLINE_S)
            return ControlStream(net_stream)
        except STREAM_ERRORS as exc:
            raise TransportError(f"no protocol was agreed: {describe(exc)}") from exc

    async def _fill(self, size: int, deadline_s: float) -> None:
        if len(self._buffer) >= size:
            return  # one read mostly brings the whole frame: a deadline for what is here costs more than the rest
        end = trio.current_time() + deadline_s
        while len(self._buffer) < size:
            await self._receive(end)

    async def _receive(self, end: float) -> None:
        """Take in what comes next. Raises TransportError: nothing came by `end` (trio's clock), or the stream ended."""
        try:
            with trio.fail_at(end):
                self._buffer += await self._muxed.read(_READ_BYTES)
        except trio.TooSlowError as exc:
            raise TransportError("the peer sent too slowly", ReasonCode.TOO_SLOW) from exc
        except STREAM_ERRORS as exc:
            raise TransportError(f"the peer's stream ended: {describe(exc)}") from exc
        self.received_at = trio.current_time()

    async def wait_readable(self, idle_s: float) -> bool:
        """True once bytes are there, False if none came within `idle_s`."""
        end = trio.current_time() + idle_s
        try:
            while not self._buffer:
                await self._receive(end)
        except TransportError as exc:
            if exc.code != ReasonCode.TOO_SLOW:
                raise
        return bool(self._buffer)

    async def read_head(self) -> tuple[int, int]:
        """Length of the next packed frame and its request id. Announces more than a frame may have: `oversize`."""
        await self._fill(_HEAD.size, HEADER_DEADLINE_S)
        length, number = _HEAD.unpack_from(self._buffer)
        del self._buffer[: _HEAD.size]
        return length - 8, number

    async def read_body(self, size: int, keep: Callable[[int], bool] = lambda arrived: True) -> bytes | None:
        """The packed frame after a head, at no less than the minimum rate from its first byte on.

        Args:
            keep: told of bytes as they arrive, never of what was only announced. Once it says False the rest is read
                away and None returned.
        """
        started, kept = trio.current_time(), 0
        while True:
            arrived = min(len(self._buffer), size) - kept
            if arrived > 0 and not keep(arrived):
                await self.skip_body(size)
                return None
            kept += max(arrived, 0)
            if kept == size:
                break
            await self._receive(started + transfer_deadline_s(kept))
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return body

    async def skip_body(self, size: int) -> None:
        """Read a frame away without keeping it, at no less than the minimum rate."""
        started, read = trio.current_time(), 0
        while True:
            here = min(len(self._buffer), size - read)
            del self._buffer[:here]
            read += here
            if read == size:
                return
            await self._receive(started + transfer_deadline_s(read))

    async def send(self, number: int, packed: bytes) -> None:
        """Write one frame, after those before it. Abandoned half-way, by a deadline or a cancel, it ends the stream."""
        if len(packed) > MAX_FRAME_BYTES:
            raise TransportError("a frame over the bound was to be sent; this is a bug of headwater")
        async with self._lock:
            await self._write(_HEAD.pack(len(packed) + 8, number) + packed)

    async def _write(self, raw: bytes) -> None:
        whole = False
        try:
            with trio.fail_after(transfer_deadline_s(len(raw))):
                await self._muxed.write(raw)
                whole = True
        except trio.TooSlowError as exc:
            raise TransportError("the peer took our frame too slowly", ReasonCode.TOO_SLOW) from exc
        except STREAM_ERRORS as exc:
            raise TransportError(f"the peer's stream ended: {describe(exc)}") from exc
        finally:
            if not whole:
                await self.abort()

    async def finish(self, linger_s: float = 2.0) -> None:
        """Say no more, let what was sent arrive, then end the connection."""
        with trio.move_on_after(linger_s):
            try:
                await self._muxed.close()
                for _ in range(_LINGER_READS):
                    await self._muxed.read(_READ_BYTES)
            except STREAM_ERRORS:
                pass
        await self.abort()

    async def abort(self) -> None:
        """End the stream and its connection at once."""
        with trio.CancelScope(shield=True):
            await abort(self.connection)


def describe(exc: BaseException) -> str:
    """An error's own words and its cause's, for messages people read."""
    cause = exc.__cause__
    words = f"{type(exc).__name__} {exc}".strip()
    return words if cause is None else f"{words} ({type(cause).__name__} {cause})"
