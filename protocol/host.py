"""The libp2p host of an asyncio process: starts `protocol.hostd`, keeps it alive, speaks to it over a socket pair.

    host = HostProcess(home=home, key=home / "transport.pem", listen="/ip4/127.0.0.1/tcp/0", handler=answer)
    await host.start()
    reply = await host.request(address, ControlFrame("join", envelope.raw), deadline_s=30)

A killed or crashed host process is restarted with jitter and gets the same port back. Requests in flight then fail
with TransportError; new ones wait for the restart inside their own deadline. The socket pair is inherited, so nobody
else can speak to the host process, and it ends when this process does.

Not covered: signing, retries and the HTTP fallback (`control`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from protocol.errors import DecodeError, ReasonCode, TransportError, UsageError
from protocol.frames import (
    MAX_MESSAGE_BYTES,
    ControlFrame,
    Message,
    pack_frame,
    read_error,
    refusal,
    unpack_frame,
)
from protocol.identity import load_or_create_identity
from protocol.limits import FALLBACK_AFTER_S, MIB

__all__ = ["ControlFrame", "Handler", "HostProcess"]

Handler = Callable[[bytes, ControlFrame], Awaitable[ControlFrame]]
"""Answers one request: the peer's 32-byte transport key and its frame, to the reply's frame."""

RESTART_MAX_S = 2.0
"""Longest pause before a restart. With the interpreter's own start it must stay well under 10 s."""

START_S = 150.0
"""Importing libp2p on a slow machine that starts many processes at once takes over a minute. Less ends a coordinator
that would have been up."""

STOP_S = 3.0
MAX_LOG_BYTES = 8 * MIB

OWNER_STOPS_S = 5.0
"""Whoever stops a service or a whole run tells all its processes to end, this one too; its owner, told the same, closes
it within this long. Until then nobody is alarmed, and none is started that would only have to end again."""

_TOLD_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGALRM})
"""Exit statuses of a host process that somebody asked to end; SIGALRM is its own last resort."""

logger = logging.getLogger("headwater.host")


class _Link(asyncio.Protocol):
    """The local socket: hands each message over as it arrives, which costs less than a stream that a task reads.

    Args:
        receive: told of every message: what it is, its number, its body.
    """

    def __init__(self, receive: Callable[[Message, int, bytes], None]) -> None:
        self._receive = receive
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed; failed when it broke, or when what came can't be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := self._take()) is not None:
                self._receive(*message)
        except Exception as exc:  # noqa: BLE001  (the supervisor's to raise: whoever waits for `ended`)
            self._end(exc)
            self.close()

    def _take(self) -> tuple[Message, int, bytes] | None:
        """The next whole message. Raises TransportError: its length can't be."""
        if len(self._buffer) < 4 or self.is_closing():
            return None
        (size,) = struct.unpack_from(">I", self._buffer)
        if not 9 <= size <= MAX_MESSAGE_BYTES:
            raise TransportError(f"the host process sent a message of {size} bytes; this is a bug of headwater")
        if len(self._buffer) < 4 + size:
            return None
        message, number = struct.unpack_from(">BQ", self._buffer, 4)
        body = bytes(self._buffer[13 : 4 + size])
        del self._buffer[: 4 + size]
        return Message(message), number, body

    def write(self, message: Message, number: int, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(struct.pack(">IBQ", 9 + len(body), message, number) + body)

    async def drain(self) -> None:
        """Return when there is room for more. It ends with the host process, if that never reads."""
        await self._room.wait()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        self._end(exc)

    def _end(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)

    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class HostProcess:
    """One libp2p host process under supervision.

    Args:
        home: folder for its log, and for the key if `key` does not exist yet.
        key: Ed25519 transport key file (PEM, 0600); made if missing.
        listen: a TCP multiaddr, port 0 for any; None for a host that only dials.
        handler: answers peers' requests; None refuses them.
        log: where the process's own messages go; `home/host.log` by default.
        max_connections: connections that peers may hold at once.
        max_per_address: of them, per address; None means 64, loopback exempt.
        memory_mib: what the process may allocate after its start.
    """

    def __init__(
        self,
        *,
        home: Path,
        key: Path,
        listen: str | None,
        handler: Handler | None = None,
        log: Path | None = None,
        max_connections: int = 1024,
        max_per_address: int | None = None,
        memory_mib: int = 384,
    ) -> None:
        self._home = home
        self._key = key
        self._listen = listen
        self._handler = handler
        self._log = log or home / "host.log"
        self._arguments = ["--max-connections", str(max_connections), "--memory-mib", str(memory_mib)]
        if max_per_address is not None:
            self._arguments += ["--max-per-address", str(max_per_address)]
        self._process: asyncio.subprocess.Process | None = None
        self._link: _Link | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._first: asyncio.Future[None] | None = None
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._next = 1
        self._closing = False
        self._close_asked = asyncio.Event()
        self._pause = 0.05
        self._blocked: list[str] = []
        self.restarts = 0
        self.transport = b""
        self.addresses: list[str] = []

    @property
    def pid(self) -> int:
        """Process id of the host process now running, 0 while it restarts."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def start(self, deadline_s: float = START_S) -> None:
        """Start the process and wait until it listens.

        Raises:
            UsageError: the key file or the address cannot be used; the message says who must act.
            TransportError: it was not up within the deadline.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        self.transport = load_or_create_identity(self._key).public
        self._first = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="libp2p host supervisor")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._first)
        except TimeoutError as exc:
            await self.close()
            raise TransportError(
                f"the libp2p host process was not up within {deadline_s:.0f} s; look into {self._log}",
                ReasonCode.DEADLINE,
            ) from exc
        except UsageError:
            await self.close()
            raise

    async def request(
        self, address: str, frame: ControlFrame, deadline_s: float, *, dial_s: float = FALLBACK_AFTER_S
    ) -> ControlFrame:
        """Send a frame to a peer and return its reply.

        Args:
            address: a TCP multiaddr that ends in /p2p/ and the peer's transport id.
            deadline_s: for everything together.
            dial_s: of that, at most this long for reaching the peer.

        Raises:
            TransportError: `unreachable`, `deadline`, or the code of the peer's host (`busy`, `oversize`, ...). After a
                lost connection nobody knows whether the peer acted; asking again needs a new envelope.
        """
        packed = pack_frame(frame)
        until = time.monotonic() + deadline_s
        try:
            async with asyncio.timeout(min(deadline_s, dial_s)):
                await self._ready.wait()
        except TimeoutError as exc:
            raise TransportError("our own libp2p host process is restarting", ReasonCode.UNREACHABLE) from exc
        left = max(0.001, until - time.monotonic())
        route = struct.pack(">IIH", int(1000 * left), int(1000 * min(dial_s, left)), len(address.encode()))
        raw = await self._ask(Message.REQUEST, route + address.encode() + packed, left + 2.0)
        try:
            reply = unpack_frame(raw)
        except DecodeError as exc:
            raise TransportError(f"the peer's reply cannot be read: {exc}", exc.code) from exc
        if reply.kind == "refused":
            code, message = read_error(reply.attachment)
            raise TransportError(f"the peer's host refused: {message}", code)
        return reply

    async def stats(self, deadline_s: float = 5) -> dict[str, int]:
        """Numbers of the host process: connections, inbound, in_flight, tasks, rss_kib, cpu_ms, ..."""
        numbers: dict[str, int] = json.loads(await self._ask(Message.STATS, b"", deadline_s))
        return numbers

    def block(self, addresses: Iterable[str]) -> None:
        """From now on take no connection from these addresses and networks (and from no others blocked before), and
        cut those that are open. A restarted host process is told again."""
        self._blocked = sorted(addresses)
        if self._ready.is_set():
            self._write(Message.BLOCK, 0, json.dumps(self._blocked).encode())

    async def close(self) -> None:
        """End the process. Requests in flight fail; peers are told."""
        self._closing = True
        self._close_asked.set()
        if not self._ready.is_set() and self._process is not None and self._process.returncode is None:
            self._process.kill()  # still importing: it has spoken to nobody, and would hear of our end seconds later
        self._ready.clear()
        if self._link is not None:
            self._link.close()
        if self._supervisor is not None:
            done, _ = await asyncio.wait([self._supervisor], timeout=STOP_S)
            if not done:
                self._supervisor.cancel()
                await asyncio.wait([self._supervisor], timeout=STOP_S)
        for task in list(self._answering.values()):
            task.cancel()
        await asyncio.gather(*self._answering.values(), return_exceptions=True)

    # --- the process -------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while not self._closing:
            started = time.monotonic()
            try:
                await self._run_once()
            except OSError as exc:
                logger.error("the libp2p host process could not be started: %s", exc)
            finally:
                self._drop_everything()
            await self._pause_before_restart(started)

    async def _pause_before_restart(self, started: float) -> None:
        """Return when the process is to be started again, or at once when it is not, because we are being closed."""
        code = self._process.returncode if self._process is not None else None
        if not self._closing and code in _TOLD_TO_END:
            await self._closed_within(OWNER_STOPS_S)
        if self._closing:
            return
        self.restarts += 1
        self._pause = 0.05 if time.monotonic() - started > 30 else min(2 * self._pause, RESTART_MAX_S)
        logger.warning("the libp2p host process ended; restarting it (restart %d)", self.restarts)
        await self._closed_within(self._pause * random.uniform(0.5, 1.5))

    async def _closed_within(self, seconds: float) -> None:
        """Wait, but no longer than until we are being closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._close_asked.wait()

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._open_log() as log:
            command = [sys.executable, "-m", "protocol.hostd", "--socket-fd", str(theirs.fileno())]
            command += ["--key", str(self._key), "--listen", self._listen or "none", "--parent", str(os.getpid())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._arguments,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PY_YAMUX_RELEASE_ON_READ": "0", "MALLOC_ARENA_MAX": "2"},
            )
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_connection(lambda: _Link(self._receive), sock=ours)
        try:
            await self._link.ended
        except ConnectionError:
            pass
        finally:
            self._ready.clear()
            self._link.close()
            await self._reap(self._process)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        """Its socket is closed, so it ends by itself; if it hangs it is killed."""
        try:
            async with asyncio.timeout(STOP_S - 0.5):
                await process.wait()
        except (TimeoutError, asyncio.CancelledError) as exc:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if isinstance(exc, asyncio.CancelledError):
                raise

    def _open_log(self) -> IO[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES:
            self._log.replace(self._log.with_suffix(self._log.suffix + ".old"))
        return self._log.open("ab")

    def _receive(self, message: Message, number: int, body: bytes) -> None:
        if message in (Message.RESULT, Message.STATS):
            self._resolve(number, body)
        elif message is Message.FAILED:
            code, text = read_error(body)
            future = self._pending.get(number)
            if future is not None and not future.done():
                future.set_exception(TransportError(text, code))
        elif message is Message.INBOUND:
            self._answering[number] = asyncio.create_task(self._answer(number, body))
        elif message is Message.CANCEL and number in self._answering:
            self._answering[number].cancel()
        elif message is Message.READY:
            self._on_ready(json.loads(body))
        elif message is Message.FATAL:
            error = UsageError(str(json.loads(body)["message"]))
            if self._first is not None and not self._first.done():
                self._first.set_exception(error)
                self._closing = True
            else:
                logger.error("%s", error)

    def _on_ready(self, ready: dict[str, Any]) -> None:
        self.addresses = list(ready["addresses"])
        if self.addresses:
            self._listen = self.addresses[0].rpartition("/p2p/")[0]
        self._ready.set()
        if self._blocked:
            self._write(Message.BLOCK, 0, json.dumps(self._blocked).encode())
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _drop_everything(self) -> None:
        self._ready.clear()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(TransportError("our libp2p host process ended while the request was in flight"))
        for task in self._answering.values():
            task.cancel()

    # --- messages ----------------------------------------------------------------------------------------------

    def _write(self, message: Message, number: int, body: bytes) -> None:
        if self._link is None or self._link.is_closing():
            raise TransportError("our libp2p host process is not running")
        self._link.write(message, number, body)

    async def _ask(self, message: Message, body: bytes, deadline_s: float) -> bytes:
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._write(message, number, body)
            async with asyncio.timeout(deadline_s):
                return await future
        except (TimeoutError, asyncio.CancelledError) as exc:
            if self._ready.is_set():
                with contextlib.suppress(TransportError):  # it ended meanwhile
                    self._write(Message.CANCEL, number, b"")
            if isinstance(exc, asyncio.CancelledError):
                raise
            raise TransportError(
                f"our libp2p host process did not answer within {deadline_s:.1f} s", ReasonCode.DEADLINE
            ) from exc
        finally:
            del self._pending[number]

    def _resolve(self, number: int, body: bytes) -> None:
        future = self._pending.get(number)
        if future is not None and not future.done():
            future.set_result(body)

    async def _answer(self, number: int, body: bytes) -> None:
        reply = refusal(ReasonCode.WRONG_KIND, "this host answers no requests")
        try:
            if self._handler is not None:
                try:
                    at = 33 + body[32]
                    address = body[33:at].decode("utf-8", "replace")
                    reply = await self._handler(body[:32], replace(unpack_frame(body[at:]), address=address))
                except Exception:
                    logger.exception("a control handler failed")
                    reply = refusal(ReasonCode.INTERNAL, "the request failed here; the operator finds it in the log")
            self._write(Message.REPLY, number, bytes([reply.charge]) + pack_frame(reply))
            if self._link is not None:
                await self._link.drain()
        except (TransportError, ConnectionError) as exc:
            logger.debug("a reply could not be handed over: %s", exc)
        finally:
            del self._answering[number]
