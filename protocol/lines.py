"""Outgoing requests: one long-lived libp2p stream per peer, many requests in flight (part of the host process).

A `Line` is one open stream. It ends as a whole: every request in flight on it fails, and the next request dials
anew. Dialing goes on with backoff up to 1 s until the dial deadline. A request that was written is never written
again (its envelope's sequence would be refused), so its caller decides what to do.

Not covered: requests that peers send to us (`visitors`).
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Any

import trio

from protocol.errors import ReasonCode, TransportError
from protocol.frames import MAX_FRAME_BYTES
from protocol.libp2p_fixes import STREAM_ERRORS, HardenedSwarm, parse_address
from protocol.streams import ControlStream

BACKOFF_MAX_S = 1.0
"""Longest pause between dials. Longer, and a restarted peer is not reached within 10 s on a busy machine."""

ATTEMPT_S = 6.0
"""One dial with its handshake. Shorter fails honest peers on a loaded machine."""

IDLE_S = 150.0
"""A line without requests is closed after this, before the peer's host closes it (`visitors`)."""

SILENT_S = 8.0
"""A request unanswered at its deadline ends the line if nothing at all was heard for this long."""

logger = logging.getLogger("headwater.lines")


@dataclass
class _Waiting:
    event: trio.Event = field(default_factory=trio.Event)
    reply: bytes | None = None


class Line:
    """One open stream and the requests in flight on it."""

    def __init__(self, stream: ControlStream) -> None:
        self.stream = stream
        self.ended: str = ""
        self._waiting: dict[int, _Waiting] = {}
        self._next = 1

    async def request(self, packed: bytes) -> bytes:
        """Send one frame and wait for its reply; the caller holds the deadline. Raises TransportError."""
        number, self._next = self._next, self._next + 1
        waiting = self._waiting[number] = _Waiting()
        started = trio.current_time()
        try:
            await self.stream.send(number, packed)
            await waiting.event.wait()
        except trio.Cancelled:
            now = trio.current_time()
            if now - max(started, self.stream.received_at) > SILENT_S:
                await self.stream.abort()
            raise
        finally:
            del self._waiting[number]
        if waiting.reply is None:
            raise TransportError(f"the connection was lost before the reply came ({self.ended})")
        return waiting.reply

    async def read_replies(self) -> None:
        """Hand replies to their requests until the stream ends."""
        try:
            while True:
                if not await self.stream.wait_readable(IDLE_S):
                    if self._waiting:
                        continue
                    raise TransportError("idle")
                size, number = await self.stream.read_head()
                if not 0 < size <= MAX_FRAME_BYTES:
                    raise TransportError("the peer announced a frame over the bound", ReasonCode.OVERSIZE)
                body = await self.stream.read_body(size)
                waiting = self._waiting.get(number)
                if waiting is not None:
                    waiting.reply = body
                    waiting.event.set()
        except TransportError as exc:
            self.ended = str(exc)
        finally:
            self.ended = self.ended or "the host process stopped"
            await self.stream.abort()
            for waiting in self._waiting.values():
                waiting.event.set()


_DIAL_WORDS = (
    ("to any resolved address", "its name has no address that can be reached"),
    ("all attempts to connect", "nothing accepts connections there"),
    ("open TCP stream", "nothing accepts connections there"),
    ("secure protocol", "no secure channel came about: another program or another key is there, or something between"),
    ("upgrade security", "no secure channel came about: another program or another key is there, or something between"),
    ("muxer", "what answers there does not speak yamux"),
)
"""What libp2p's dialing errors say somewhere in their nested texts, and what that means. Shown, never decided on."""


def dial_failure_in_words(exc: BaseException) -> str:
    """The cause of a failed dial as one clause; libp2p wraps it in two or three errors that repeat the address."""
    nested, link = str(exc), exc
    while link.__cause__ is not None:
        link = link.__cause__
        nested += f" {link}"
    return next((words for mark, words in _DIAL_WORDS if mark in nested), f"{type(link).__name__} {link}".strip())


@dataclass
class _Peer:
    lock: trio.Lock = field(default_factory=trio.Lock)
    line: Line | None = None


class Lines:
    """All peers we call."""

    def __init__(self, swarm: HardenedSwarm) -> None:
        self._swarm = swarm
        self._peers: dict[str, _Peer] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def count(self) -> int:
        return sum(p.line is not None and not p.line.ended for p in self._peers.values())

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the tasks that read replies."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def request(self, address: str, packed: bytes, deadline_s: float, dial_s: float) -> bytes:
        """Send a packed frame to `address` (a multiaddr with /p2p/) and return the packed reply.

        Raises:
            TransportError: `unreachable` within `dial_s` or lost on the way, `deadline`, or a bad address.
        """
        until = trio.current_time() + deadline_s
        line = await self._line(address, min(dial_s, deadline_s))
        with trio.move_on_at(until):
            return await line.request(packed)
        raise TransportError(f"{address} did not reply within {deadline_s:.1f} s", ReasonCode.DEADLINE)

    async def _line(self, address: str, dial_s: float) -> Line:
        peer = self._peers.setdefault(address, _Peer())
        last = ["nothing was tried yet"]
        with trio.move_on_after(dial_s):
            async with peer.lock:
                if peer.line is None or peer.line.ended:
                    peer.line = await self._dial(address, last)
                    assert self._nursery is not None
                    self._nursery.start_soon(peer.line.read_replies)
                return peer.line
        raise TransportError(
            f"{address.partition('/p2p/')[0]} could not be reached within {dial_s:.1f} s: {last[0]}; whoever runs it "
            "must start it, or let this machine through"
        )

    async def _dial(self, address: str, last: list[str]) -> Line:
        multiaddr, peer_id = parse_address(address)
        pause = 0.05
        while True:
            with trio.move_on_after(ATTEMPT_S) as attempt:
                try:
                    connection = await self._swarm.dial(multiaddr, peer_id)
                    return Line(await ControlStream.open(connection))
                except TransportError as exc:
                    last[0] = str(exc)
                except STREAM_ERRORS as exc:
                    last[0] = dial_failure_in_words(exc)
            if attempt.cancelled_caught:
                last[0] = f"no answer within {ATTEMPT_S:.0f} s"
            await self._swarm.drop(peer_id)
            await trio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, BACKOFF_MAX_S)
