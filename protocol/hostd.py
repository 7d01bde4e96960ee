"""The libp2p host process: `python -m protocol.hostd`. It holds a transport key and nothing else of value.

    application ==== local socket ==== [ hostd ] ==== one stream per peer and direction ==== peers' hosts

It moves packed frames (`frames`) between the application's local socket and libp2p streams, and never opens an
envelope. Requests to one peer share one long-lived stream (`lines`); a peer's requests arrive on a stream of its own
and are answered in any order (`visitors`). Everything a stranger can make it hold is bounded: connections per
address and in total (`admission`), streams per connection and bytes per stream (`libp2p_fixes`), requests in flight
per peer, bytes of requests in flight together (`visitors`), and the memory of the process.

It ends within 2 s of SIGTERM, and when its application's socket closes or its application dies.

Not covered: supervision and restarts (`host`), signatures and meaning (`control`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import trio

from protocol import codec
from protocol.admission import Admission
from protocol.errors import HeadwaterError, TransportError, UsageError
from protocol.frames import MAX_MESSAGE_BYTES, Message
from protocol.identity import load_identity
from protocol.libp2p_fixes import Multiaddr, new_swarm, run_service
from protocol.limits import MIB
from protocol.lines import Lines
from protocol.records import ErrorReply
from protocol.trio_turns import QuickLock, write_now
from protocol.visitors import Visitors

EXIT_FATAL = 2
STOP_S = 1.0
"""Time to say goodbye to peers; the rest of the 2 s after SIGTERM is for the interpreter to end."""

_LOG_LINES_PER_MINUTE = 60
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("headwater.hostd")


class LocalSocket:
    """The application's side of the process: length-prefixed messages over an inherited socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._lock = QuickLock()

    async def send(self, message: Message, number: int, body: bytes = b"") -> None:
        """Hand one message to the application. Blocks while it is busy; ends with the process if it never reads."""
        packed = struct.pack(">IBQ", 9 + len(body), message, number) + body
        async with self._lock:
            sent = write_now(self._stream.socket, packed)
            if sent < len(packed):
                with trio.CancelScope(shield=True):  # half a message would end the process's only way to speak
                    await self._stream.send_all(packed[sent:])

    async def receive(self) -> tuple[Message, int, bytes] | None:
        """The next message, or None when the application has gone."""
        while len(self._buffer) < 4 or len(self._buffer) < 4 + struct.unpack_from(">I", self._buffer)[0]:
            chunk = await self._stream.receive_some(262144)
            if not chunk:
                return None
            self._buffer += chunk
            if len(self._buffer) > 2 * MAX_MESSAGE_BYTES:
                raise TransportError("the application sent a message over its bound; this is a bug of headwater")
        (size,) = struct.unpack_from(">I", self._buffer)
        message, number = struct.unpack_from(">BQ", self._buffer, 4)
        body = bytes(self._buffer[13 : 4 + size])
        del self._buffer[: 4 + size]
        return Message(message), number, body


class QuietHandler(logging.StreamHandler[Any]):
    """Writes at most so many lines a minute: strangers cause most of what libp2p logs, and may not fill a disk."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._minute = 0
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines <= _LOG_LINES_PER_MINUTE:
            super().emit(record)


def configure_logging() -> None:
    handler = QuietHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message).300s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # every failed dial and handshake is an error to it


def limit_memory(mebibytes: int) -> None:
    """Bound what the process may allocate from here on, whatever strangers send."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * MIB, used + mebibytes * MIB))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))


def resident_kib() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its application dies, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


class Host:
    """Everything that lives while the process serves."""

    def __init__(self, seed: bytes, admission: Admission, app: LocalSocket) -> None:
        self.app = app
        self.admission = admission
        self.swarm = new_swarm(seed, admission)
        self.lines = Lines(self.swarm)
        self.visitors = Visitors(self.swarm, admission, app.send)
        self.requests: dict[int, trio.CancelScope] = {}

    async def run(self, listen: str | None) -> int:
        """Serve until the application's socket closes; the process's exit code."""
        self.swarm.set_stream_handler(self.visitors.serve)
        async with run_service(self.swarm), trio.open_nursery() as nursery:
            try:
                addresses = [await self.listen(listen)] if listen else []
            except UsageError as exc:
                await self.app.send(Message.FATAL, 0, json.dumps({"message": str(exc)}).encode())
                return EXIT_FATAL
            ready = {"transport": self.swarm.get_peer_id().to_bytes()[-32:].hex(), "addresses": addresses}
            nursery.start_soon(self.visitors.close_idle)
            await nursery.start(self.lines.run)
            await self.app.send(Message.READY, 0, json.dumps(ready).encode())
            while (message := await self.app.receive()) is not None:
                await self.dispatch(nursery, *message)
            nursery.cancel_scope.cancel()
        return 0

    async def listen(self, address: str) -> str:
        if not await self.swarm.listen(Multiaddr(address)):
            raise UsageError(
                f"cannot listen on {address}: the port is in use or not ours; "
                "its owner must stop the other program, or name another port in the configuration"
            )
        listener = next(iter(self.swarm.listeners.values()))
        return f"{listener.get_addrs()[0]}/p2p/{self.swarm.get_peer_id()}"

    async def dispatch(self, nursery: trio.Nursery, message: Message, number: int, body: bytes) -> None:
        if message is Message.REQUEST:
            nursery.start_soon(self.request, number, body)
        elif message is Message.REPLY:
            self.visitors.reply(number, body[1:], charge=body[:1] == b"\1")
        elif message is Message.CANCEL and number in self.requests:
            self.requests[number].cancel()
        elif message is Message.BLOCK:
            self.admission.block(json.loads(body))
            await self.visitors.close_blocked()
        elif message is Message.STATS:
            await self.app.send(Message.STATS, number, json.dumps(self.stats()).encode())

    async def request(self, number: int, body: bytes) -> None:
        deadline_ms, dial_ms, size = struct.unpack_from(">IIH", body)
        address = body[10 : 10 + size].decode("utf-8", "replace")
        with trio.CancelScope() as scope:
            self.requests[number] = scope
            try:
                reply = await self.lines.request(address, body[10 + size :], deadline_ms / 1000, dial_ms / 1000)
                await self.app.send(Message.RESULT, number, reply)
            except TransportError as exc:
                error = codec.encode(ErrorReply(exc.code.value, str(exc)[:1000]))
                await self.app.send(Message.FAILED, number, error)
            finally:
                del self.requests[number]

    def stats(self) -> dict[str, int]:
        return {
            "connections": self.swarm.get_total_connections(),
            "inbound": self.admission.connections,
            "refused": self.admission.refused,
            "visitors": len(self.visitors.open),
            "in_flight": self.visitors.in_flight,
            "held_bytes": self.visitors.held.total,
            "lines": self.lines.count,
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "rss_kib": resident_kib(),
            "cpu_ms": int(1000 * time.process_time()),
        }


async def serve(seed: bytes, fd: int, listen: str | None, admission: Admission) -> int:
    app = LocalSocket(trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd))))
    host = Host(seed, admission, app)

    async def stop_on_signal(scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as received:
            async for _ in received:
                signal.alarm(2)  # whatever hangs while closing ends then
                scope.cancel()

    code = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_signal, nursery.cancel_scope)
        try:
            code = await host.run(listen)
        finally:
            signal.alarm(2)
            with trio.CancelScope(shield=True), trio.move_on_after(STOP_S):
                await host.swarm.close()
        nursery.cancel_scope.cancel()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m protocol.hostd",
        description="The libp2p host process of one headwater process; protocol.host starts it.",
        epilog="example: python -m protocol.hostd --socket-fd 3 --key keys/transport.pem --listen /ip4/127.0.0.1/tcp/0",
    )
    parser.add_argument("--socket-fd", type=int, required=True, help="inherited end of the application's socket pair")
    parser.add_argument("--key", type=Path, required=True, help="Ed25519 transport key (PEM, mode 0600)")
    parser.add_argument("--listen", default="none", help="multiaddr, or none for a host that only dials")
    parser.add_argument("--max-connections", type=int, default=1024)
    parser.add_argument("--max-per-address", type=int, default=None, help="default: 64, loopback exempt")
    parser.add_argument("--memory-mib", type=int, default=384, help="may be allocated beyond the start")
    parser.add_argument("--parent", type=int, required=True, help="process id of the application")
    args = parser.parse_args()
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application, which says goodbye through us first
    die_with_parent(args.parent)
    admission = Admission(args.max_connections, args.max_per_address, time.monotonic)
    try:
        seed = load_identity(args.key).private_seed()
        limit_memory(args.memory_mib)
        code = trio.run(serve, seed, args.socket_fd, None if args.listen == "none" else args.listen, admission)
    except HeadwaterError as exc:
        logger.error("%s", exc)
        return EXIT_FATAL
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # peers were told; anything libp2p still holds may not delay the end
