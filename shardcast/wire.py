"""One HTTP/1.1 connection to one source: requests sent ahead, bodies read by a blocking socket into given memory.

    bytes out   GET /v1/{run}/p/0-12/shard/3 HTTP/1.1 ...     as many as the caller sends, without waiting for answers
    bytes in    status line and header, at most 16 KiB        -> Answer
                exactly Content-Length bytes                  -> straight into the caller's memory, hashed on the way

Everything a server sends is bounded before memory is taken for it: no chunks, no interim answers, no redirects, no
content encodings, one Content-Length. A server that says nothing for 3 s, or keeps below 16 KiB/s, is left.

Not covered: which request comes next (`pipeline`), what an answer is worth (`source`), proxies and HTTP/2.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from protocol.errors import ReasonCode
from protocol.limits import KIB, MIB, MINIMUM_RATE_BYTES_S
from shardcast.errors import SourceError
from shardcast.limits import ANSWER_DEADLINE_S, STALL_S
from shardcast.rates import Bucket

MAX_HEAD_BYTES = 16 * KIB
"""Status line and header of one answer."""

_MAX_HEADERS = 64
_STATUS = re.compile(r"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")

_GRACE_S = ANSWER_DEADLINE_S
"""For how long a body may come slower than the minimum rate: a link may hiccup, and the first packets are slow."""

_READ_BYTES = 4 * MIB
"""Read and hashed at a time, while bytes keep coming. 1 MiB costs a fifth more CPU: more wake-ups, shorter hashing."""

_PAUSE_MAX_S = 1.0
"""Longest pause for a limit of our own, so that the end of a download is noticed."""

_LOOKS = 4
"""How often within the time of a stall a read gives up waiting to look at the clock."""


@dataclass(frozen=True)
class Answer:
    """What was said before a body."""

    status: int
    headers: dict[str, str]
    """By lower-case name; the first of each."""
    length: int
    """Bytes of the body."""
    old: bool = False
    """HTTP/1.0: the connection ends unless the server says otherwise."""

    @property
    def last(self) -> bool:
        """The server closes the connection after this answer."""
        kept = self.headers.get("connection", "close" if self.old else "").lower()
        return "close" in kept


@dataclass
class Progress:
    """How far the answer being read is; read by other threads."""

    began: float = 0.0
    """Monotonic time at which reading of this answer began; 0 before."""
    got: int = 0
    """Bytes of its body."""


Connect = Callable[[], socket.socket]
"""Opens a connection within `CONNECT_DEADLINE_S`. Raises SourceError or OSError."""


class Wire:
    """One connection. Reads belong to one thread; `send` may be called by another meanwhile, and never waits."""

    def __init__(self, address: str, connect: Connect, down: Bucket | None = None) -> None:
        """Connect. Blocking.

        Args:
            down: limits the bytes of bodies received.

        Raises:
            SourceError(`unreachable`, or what `connect` says).
        """
        self.address = address
        self._down = down
        start = time.monotonic()
        try:
            self._socket = connect()
        except OSError as exc:
            raise SourceError(address, f"{type(exc).__name__}: {exc}", ReasonCode.UNREACHABLE) from exc
        self.round_trip_s = time.monotonic() - start
        """What connecting took: one round trip, and seldom more."""
        self._piece_bytes = _READ_BYTES if down is None else down.piece_bytes
        self.answers = 0
        """Whole answers that came."""
        self._plain = type(self._socket) is socket.socket
        tick = STALL_S / _LOOKS
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._plain:
            # A blocking socket with the kernel's own timeout: Python's would ask `poll` before each read.
            self._socket.settimeout(None)
            kernel = struct.pack("@ll", int(tick), int(tick % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, kernel)
        else:
            self._socket.settimeout(tick)
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._left = memoryview(b"")
        """Read, but behind the answer it came with."""

    @property
    def sends_at_once(self) -> bool:
        """Whether `send` may be called while another thread reads; not so for TLS, whose state both would change."""
        return self._plain

    def send(self, data: bytes) -> None:
        """Send as much as the kernel takes now; the rest goes out between reads. Raises SourceError(`unreachable`)."""
        with self._sending:
            self._unsent += data
        self.flush()

    def flush(self) -> None:
        if not self._unsent:
            return
        with self._sending:
            try:
                if self._plain:
                    sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                else:
                    sent = self._socket.send(self._unsent)
            except (BlockingIOError, TimeoutError):
                return
            except OSError as exc:
                raise self._gone(exc) from exc
            del self._unsent[:sent]

    def read_answer(self, name: str, first_s: float | None) -> Answer:
        """Status line and header of the next answer.

        Args:
            name: of what was asked, for errors.
            first_s: how long its first byte may take; as long as a body may be silent if None.

        Raises:
            SourceError: `too-slow`, `oversize`, `malformed`, `unreachable` (closed: nothing of an answer came),
                `length-mismatch` (closed within).
        """
        head = bytearray()
        first_s = STALL_S if first_s is None else first_s
        start = time.monotonic()
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) >= MAX_HEAD_BYTES:
                raise SourceError(self.address, f"{name}: a header over {MAX_HEAD_BYTES} bytes", ReasonCode.OVERSIZE)
            waited = time.monotonic() - start
            if waited > (ANSWER_DEADLINE_S if head else first_s):
                raise SourceError(self.address, f"{name}: no answer in time", ReasonCode.TOO_SLOW)
            if self._left:
                head += self._left
                self._left = memoryview(b"")
                continue
            piece = self._receive_some(name)
            if piece == b"":
                code = ReasonCode.LENGTH_MISMATCH if head else ReasonCode.UNREACHABLE
                raise SourceError(self.address, f"{name}: the connection was closed before an answer", code)
            head += piece or b""
        if end > MAX_HEAD_BYTES:
            raise SourceError(self.address, f"{name}: a header over {MAX_HEAD_BYTES} bytes", ReasonCode.OVERSIZE)
        self._left = memoryview(bytes(head[end + 4 :]))
        return _parse_head(self.address, name, bytes(head[:end]))

    def read_body(self, name: str, body: memoryview, progress: Progress) -> bytes:
        """Exactly as many bytes as `body` has, into it; returns their BLAKE3.

        Raises:
            SourceError: `too-slow`, `length-mismatch` (closed within), `unreachable`.
        """
        hasher = blake3()
        got = min(len(self._left), len(body))
        body[:got] = self._left[:got]
        self._left = self._left[got:]
        hasher.update(body[:got])
        progress.got = got
        start = heard = time.monotonic()
        while got < len(body):
            self.flush()
            count = self._receive_into(name, body[got : got + self._piece_bytes])
            now = time.monotonic()
            if count == 0:
                raise SourceError(self.address, f"{name}: cut after {got} bytes", ReasonCode.LENGTH_MISMATCH)
            if count > 0:
                hasher.update(body[got : got + count])
                got += count
                heard = now
                progress.got = got
                if self._down is not None and (wait_s := min(self._down.take(count), _PAUSE_MAX_S)) > 0:
                    time.sleep(wait_s)  # ours, so that no clock of the source's runs meanwhile
                    start, heard = start + wait_s, time.monotonic()
            if now - heard > STALL_S:
                raise SourceError(self.address, f"{name}: nothing came for {STALL_S:g} s", ReasonCode.TOO_SLOW)
            if now - start > _GRACE_S + got / MINIMUM_RATE_BYTES_S:
                raise SourceError(self.address, f"{name}: {got} bytes in {now - start:.0f} s", ReasonCode.TOO_SLOW)
        self.answers += 1
        return hasher.digest()

    def _receive_some(self, name: str) -> bytes | None:
        """Up to 16 KiB; empty when the server closed, None when nothing came within a tick."""
        self.flush()
        try:
            return self._socket.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as exc:
            raise self._gone(exc, name) from exc

    def _receive_into(self, name: str, view: memoryview) -> int:
        """Bytes received, 0 when the server closed, -1 when nothing came within a tick."""
        try:
            if self._plain:
                # One call fills the whole piece while bytes keep coming.
                return self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            return self._socket.recv_into(view)
        except (BlockingIOError, TimeoutError):
            return -1
        except OSError as exc:
            raise self._gone(exc, name) from exc

    def _gone(self, exc: OSError, name: str = "") -> SourceError:
        what = f"{name}: " if name else ""
        return SourceError(self.address, f"{what}{type(exc).__name__}: {exc}", ReasonCode.UNREACHABLE)

    def interrupt(self) -> None:
        """End whatever read is under way in another thread; the connection is of no use afterwards."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _parse_head(address: str, name: str, head: bytes) -> Answer:
    """Raises SourceError(`malformed`, `oversize`)."""

    def wrong(what: str) -> SourceError:
        return SourceError(address, f"{name}: {what}", ReasonCode.MALFORMED)

    first, *lines = head.decode("latin-1").split("\r\n")
    status = _STATUS.fullmatch(first)
    if status is None or len(lines) > _MAX_HEADERS:
        raise wrong("that is no answer of a web server")
    headers: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if not colon or _NAME.fullmatch(key) is None or "\n" in value or "\0" in value:
            raise wrong("a header line that is none")
        if headers.setdefault(key.lower(), value.strip()) != value.strip() and key.lower() == "content-length":
            raise wrong("two lengths for one answer")
    code = int(status[1])
    if not 200 <= code <= 599:
        raise wrong(f"answered {code}, which nobody asked for")
    if "transfer-encoding" in headers or headers.get("content-encoding", "identity") != "identity":
        raise wrong("an encoding nobody asked for")
    length = headers.get("content-length", "0" if code in (204, 304) else "")
    if not (length.isascii() and length.isdecimal() and len(length) <= 15):
        raise wrong("no Content-Length")
    return Answer(code, headers, int(length), first.startswith("HTTP/1.0"))
