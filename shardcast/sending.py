"""Answers whose receivers must keep to the minimum rate: whole files by sendfile, and bytes from memory.

Time that an answer waits for this server's own upload limit is not held against its receiver.

Not covered: who gets an answer (`server`), and connections (`gate`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from protocol.limits import HEADER_DEADLINE_S, KIB, MINIMUM_RATE_BYTES_S
from shardcast.rates import Bucket

BINARY = {"Content-Type": "application/octet-stream", "Cache-Control": "no-store"}
"""Of everything that another answer may replace, or that says what is newest: a cache must not keep it."""


_TLS_PIECE_BYTES = 256 * KIB


class TimedFile(web.StreamResponse):
    """A whole file by sendfile, whose receiver must keep to the minimum rate.

    aiohttp's own file response opens, stats and closes in other threads, and looks for compressed twins and ranges:
    more CPU than sending a small model takes.
    """

    def __init__(self, path: Path, size: int, headers: dict[str, str] = BINARY, up: Bucket | None = None) -> None:
        """
        Args:
            size: bytes that the file must have.
            up: the upload limit; None sends as fast as the receiver takes it.

        Raises:
            OSError: the file is not there, or is not as long as it should be.
        """
        super().__init__(headers=headers)
        self._file = path.open("rb", buffering=0)
        found = os.fstat(self._file.fileno()).st_size
        if found != size:
            self._file.close()
            raise OSError(f"{path} has {found} bytes instead of {size}")
        self.content_length = self._size = size
        self._up = up

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        left_s = HEADER_DEADLINE_S + self._size / MINIMUM_RATE_BYTES_S
        try:
            if self._up is not None:
                return await self._in_pieces(request, self._up, left_s)
            async with asyncio.timeout(left_s):
                writer = await super().prepare(request)
                await self._send(request, 0, self._size)
                await super().write_eof()
                return writer
        except TimeoutError as exc:
            raise _too_slow(request) from exc
        finally:
            self._file.close()

    async def _in_pieces(self, request: web.BaseRequest, up: Bucket, left_s: float) -> AbstractStreamWriter | None:
        """The same under a limit: only what is not spent waiting for it counts against the receiver."""
        now = asyncio.get_running_loop().time
        start = now()
        async with asyncio.timeout(left_s):
            writer = await super().prepare(request)
        left_s -= now() - start
        for at in range(0, self._size, up.piece_bytes):
            piece = min(up.piece_bytes, self._size - at)
            await asyncio.sleep(up.take(piece))
            start = now()
            async with asyncio.timeout(max(0.0, left_s)):
                await self._send(request, at, piece)
            left_s -= now() - start
        async with asyncio.timeout(HEADER_DEADLINE_S):
            await super().write_eof()
        return writer

    async def _send(self, request: web.BaseRequest, at: int, count: int) -> None:
        """`count` bytes from `at`. The caller holds the deadline."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the receiver is gone")
        if transport.get_extra_info("sslcontext") is not None:
            # asyncio's stand-in for sendfile takes a thread's turn for each 16 KiB, and goes on to the end, with a line
            # of the log each, when the receiver hangs up.
            for start in range(at, at + count, _TLS_PIECE_BYTES):
                await self.write(os.pread(self._file.fileno(), min(_TLS_PIECE_BYTES, at + count - start), start))
            return
        sent = _send_now(transport, self._file.fileno(), at, count)
        if sent < count:
            await asyncio.get_running_loop().sendfile(transport, self._file, at + sent, count - sent)


class Answer(web.Response):
    """Bytes from memory, whose receiver must keep to the minimum rate: unread answers of many would fill it."""

    _request: web.BaseRequest | None = None
    up: Bucket | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._request = request
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        size = len(self.body) if isinstance(self.body, bytes) else 0
        if self.up is not None:
            await asyncio.sleep(self.up.take(size))
        try:
            async with asyncio.timeout(HEADER_DEADLINE_S + size / MINIMUM_RATE_BYTES_S):
                await super().write_eof(data)
        except TimeoutError as exc:
            raise _too_slow(self._request) from exc


def _send_now(transport: asyncio.Transport, file: int, at: int, count: int) -> int:
    """Send what the connection takes at once, for a small model all of it; returns how much that was. The loop's own
    sendfile takes three times the CPU to find out that nobody has to wait. What goes wrong here goes wrong there
    again, and is told there."""
    if not count or transport.is_closing() or transport.get_write_buffer_size():
        return 0
    socket = transport.get_extra_info("socket")
    if socket is None:
        return 0
    try:
        return os.sendfile(socket.fileno(), file, at, count)
    except OSError:
        return 0


def _too_slow(request: web.BaseRequest | None) -> ConnectionResetError:
    if request is not None and request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("the receiver fell below the minimum rate")
