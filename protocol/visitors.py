"""Requests that peers send to us (part of the host process): bounded, answered in any order, never fatal.

    peer's stream -> read frame -> [checks and budgets] -> application -> reply -> peer's stream

What a peer does ends at most its own connection. Over a budget the frame is read away and answered `busy`, so that
a full host never leaves a stranger's bytes in memory and never stops reading.

Not covered: connection slots (`admission`), signatures and meaning (`control`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from protocol.admission import CHARGES_PER_CONNECTION, Admission
from protocol.errors import DecodeError, ReasonCode, TransportError
from protocol.frames import MAX_FRAME_BYTES, Message, pack_frame, refusal, unpack_frame
from protocol.held import SMALL_BYTES, HeldBytes
from protocol.libp2p_fixes import STREAM_ERRORS, HardenedSwarm, abort, remote_group
from protocol.limits import MIB
from protocol.streams import ControlStream, describe

MAX_IN_FLIGHT_PER_PEER = 32
"""Requests of one connection handled at once, long-polls included. A member needs one per kind."""

MAX_HELD_BYTES = 64 * MIB
"""Request bytes held for all peers together, from their arrival until the application has replied. This bounds the
process."""

MAX_HELD_BYTES_PER_PEER = 20 * MIB
"""Of them, for one connection: two of the largest frames."""

SMALL_RESERVE_BYTES = 16 * MIB
"""Part of the bytes that only small frames may use, so that uploads of large ones never keep heartbeats out."""

MAX_STREAMS_PER_KEY = 4
"""Streams one transport key may hold; a further one ends its oldest, so a restarted peer never waits."""

HANDLER_DEADLINE_S = 120.0
"""The application must have replied by then; it is told that the peer no longer waits."""

IDLE_S = 180.0
UNUSED_CONNECTION_S = 20.0
"""A connection on which no control stream was opened within this time gives its slot back."""

logger = logging.getLogger("headwater.visitors")


@dataclass(eq=False)
class Visitor:
    """One stream that a peer opened."""

    stream: ControlStream
    in_flight: int = 0
    held_bytes: int = 0
    charges: int = 0


@dataclass(eq=False)
class _Job:
    visitor: Visitor
    event: trio.Event = field(default_factory=trio.Event)
    reply: bytes | None = None


class Visitors:
    """All streams that peers have open.

    Args:
        send: hands a message to the application.
    """

    def __init__(
        self, swarm: HardenedSwarm, admission: Admission, send: Callable[[Message, int, bytes], Awaitable[None]]
    ) -> None:
        self._swarm = swarm
        self._admission = admission
        self._send = send
        self._jobs: dict[int, _Job] = {}
        self._next = 1
        self.open: list[Visitor] = []
        self.held = HeldBytes(MAX_HELD_BYTES, SMALL_RESERVE_BYTES)

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    async def serve(self, net_stream: Any) -> None:
        """The swarm's stream handler: lives as long as the peer's stream and raises nothing."""
        try:
            stream = await ControlStream.accept(net_stream)
        except TransportError as exc:
            logger.debug("%s", exc)
            await abort(net_stream.swarm_conn)
            return
        visitor = Visitor(stream)
        mine = [v for v in self.open if v.stream.key == stream.key]
        self.open.append(visitor)
        if len(mine) >= MAX_STREAMS_PER_KEY:
            await mine[0].stream.abort()
        try:
            async with trio.open_nursery() as nursery:
                await self._read_requests(visitor, nursery)
                nursery.cancel_scope.cancel()
        except Exception:
            # A MemoryError at the process's bound, or a bug of ours: it may cost this connection, not the host.
            logger.exception("serving %s failed", stream.group)
        finally:
            self.open.remove(visitor)
            await stream.abort()

    async def _read_requests(self, visitor: Visitor, nursery: trio.Nursery) -> None:
        try:
            while await visitor.stream.wait_readable(IDLE_S):
                size, number = await visitor.stream.read_head()
                if size > MAX_FRAME_BYTES or size <= 0:
                    code = ReasonCode.OVERSIZE if size > 0 else ReasonCode.MALFORMED
                    await self._refuse(
                        visitor, number, code, f"a frame of {size} bytes; the bound is {MAX_FRAME_BYTES}"
                    )
                    await visitor.stream.finish()
                    return
                if self._is_full(visitor, size):
                    await visitor.stream.skip_body(size)
                    nursery.start_soon(self._say_busy, visitor, number)
                    continue
                body = await self._read_body(visitor, size)
                if body is None:
                    nursery.start_soon(self._say_busy, visitor, number)
                    continue
                visitor.in_flight += 1
                nursery.start_soon(self._answer, visitor, number, body)
        except TransportError as exc:
            logger.debug("%s: %s", visitor.stream.group, exc)

    async def _read_body(self, visitor: Visitor, size: int) -> bytes | None:
        """A frame's body, counted as it arrives; None when there was no room for all of it."""
        counted = 0

        def keep(arrived: int) -> bool:
            nonlocal counted
            taken = self.held.take(visitor.stream.group, arrived, small=size <= SMALL_BYTES)
            if taken:
                counted += arrived
                visitor.held_bytes += arrived
            else:  # what came of it is read away, so it is nobody's room any more
                self._let_go(visitor, counted)
                counted = 0
            return taken

        try:
            return await visitor.stream.read_body(size, keep)
        except BaseException:
            self._let_go(visitor, counted)
            raise

    def _is_full(self, visitor: Visitor, size: int) -> bool:
        return (
            visitor.in_flight >= MAX_IN_FLIGHT_PER_PEER
            or visitor.held_bytes + size > MAX_HELD_BYTES_PER_PEER
            or not self.held.fits(visitor.stream.group, size, small=size <= SMALL_BYTES)
        )

    def _let_go(self, visitor: Visitor, size: int) -> None:
        visitor.held_bytes -= size
        self.held.give_back(visitor.stream.group, size)

    async def _answer(self, visitor: Visitor, number: int, body: bytes) -> None:
        """Let the application answer one request."""
        local, self._next = self._next, self._next + 1
        job = self._jobs[local] = _Job(visitor)
        size = len(body)
        try:
            try:
                unpack_frame(body)
            except DecodeError as exc:
                await self._refuse(visitor, number, exc.code, str(exc))
                return
            group = visitor.stream.group.encode()[:255]
            await self._send(Message.INBOUND, local, visitor.stream.key + bytes([len(group)]) + group + body)
            del body
            with trio.move_on_after(HANDLER_DEADLINE_S):
                await job.event.wait()
            self._let_go(visitor, size)
            size = 0
            reply = job.reply or pack_frame(refusal(ReasonCode.DEADLINE, "the application did not reply in time"))
            await visitor.stream.send(number, reply)
            if visitor.charges >= CHARGES_PER_CONNECTION:
                await visitor.stream.finish()
        except TransportError as exc:
            logger.debug("%s: %s", visitor.stream.group, exc)
            await visitor.stream.abort()
        finally:
            del self._jobs[local]
            self._let_go(visitor, size)
            visitor.in_flight -= 1
            if not job.event.is_set():
                with trio.CancelScope(shield=True):
                    await self._send(Message.CANCEL, local, b"")

    async def _say_busy(self, visitor: Visitor, number: int) -> None:
        busy = refusal(ReasonCode.BUSY, "too many requests are in flight; try again in a second")
        try:
            await visitor.stream.send(number, pack_frame(busy))
        except TransportError as exc:
            logger.debug("%s: %s", visitor.stream.group, exc)

    async def _refuse(self, visitor: Visitor, number: int, code: ReasonCode, message: str) -> None:
        self._charge(visitor)
        await visitor.stream.send(number, pack_frame(refusal(code, message)))
        if visitor.charges >= CHARGES_PER_CONNECTION:
            await visitor.stream.finish()

    def _charge(self, visitor: Visitor) -> None:
        visitor.charges += 1
        self._admission.charge(visitor.stream.group)

    def reply(self, local: int, packed: bytes, *, charge: bool) -> None:
        """The application's answer to a request; one that no longer waits is dropped."""
        job = self._jobs.get(local)
        if job is None or job.event.is_set():
            return
        if charge:
            self._charge(job.visitor)
        job.reply = packed
        job.event.set()

    async def close_blocked(self) -> None:
        """Cut every connection of an address that was blocked since it came."""
        for connection in self._swarm.inbound_connections():
            if self._admission.blocked(remote_group(connection)):
                try:
                    await abort(connection)
                except STREAM_ERRORS as exc:
                    logger.debug("closing a blocked connection: %s", describe(exc))

    async def close_idle(self) -> None:
        """Take slots back from connections that never opened a control stream."""
        while True:
            await trio.sleep(5)
            used = {id(v.stream.connection) for v in self.open}
            for connection in self._swarm.inbound_connections():
                if id(connection) not in used and time.time() - connection._created_at > UNUSED_CONNECTION_S:
                    try:
                        await abort(connection)
                    except STREAM_ERRORS as exc:
                        logger.debug("closing an unused connection: %s", describe(exc))
