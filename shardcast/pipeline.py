"""Requests to one source in one queue, answered one after another over one connection by a thread of their own.

    event loop   ask(requests) ----------> queue --> sent ahead, in order
    thread       connect, read an answer into memory, hash it, hand it over --> Request.done, from a thread
    event loop   cancel(request): not sent yet: forgotten; being read: the connection is ended, the rest asked again

The thread begins with the first request and ends, with its connection, once nothing was asked for `_IDLE_S`. Memory:
one buffer as long as the longest wire shard per busy source, and up to `SHARDS_IN_FLIGHT` more per process for
shards that are being decoded while the next one comes.

Not covered: HTTP itself (`wire`), which source is asked for what (`schedule`, `download`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import ReasonCode
from protocol.limits import KIB, SHARD_BYTES
from shardcast.errors import SourceError
from shardcast.limits import SHARDS_IN_FLIGHT, WIRE_SLACK_BYTES
from shardcast.rates import Bucket
from shardcast.wire import Answer, Connect, Progress, Wire

log = logging.getLogger("shardcast.pipeline")

_IDLE_S = 8.0
"""Below the 10 s after which servers close idle connections, so that requests seldom run into that."""

_MAX_BODY_BYTES = SHARD_BYTES + WIRE_SLACK_BYTES
_MAX_REFUSAL_BYTES = 64 * KIB

MAX_RETRY_AFTER_S = 3600.0
"""Longest rest that a source can ask for."""

_DRAIN_BYTES = 256 * KIB
"""An answer nobody wants any more is read to its end when it is at most this long: cheaper than a new connection."""


class ReturnedError(Exception):
    """A request that was not answered through no fault of anybody: what stood before it ended the connection."""


class _State(Enum):
    WAITING = "waiting"
    READING = "reading"
    TAKING = "taking"
    OVER = "over"


@dataclass(eq=False)
class Request:
    """One GET, and who is told of its answer."""

    name: str
    """For errors."""
    head: bytes
    """The whole request."""
    limit: int
    """Most bytes of the body."""
    length: int | None
    """Exactly as many, if known."""
    digest: bytes | None
    """BLAKE3 of the body, if known."""
    look: Callable[[dict[str, str]], None]
    """Checks the answer's header lines. In the thread; raises SourceError."""
    take: Callable[[memoryview], bool]
    """Takes the body, which has length and digest. In a thread; the memory is used again afterwards."""
    done: Callable[[BaseException | None], None]
    """Called once, from a thread, unless `cancel` said that it won't be: the error, or None."""
    first_s: float | None = None
    """How long the first byte of the answer may take, if longer than a body may be silent."""
    progress: Progress = field(default_factory=Progress)
    finished: bool = False
    """What `take` returned."""
    seconds: float = 0.0
    """From the end of the answer before it to the end of this one."""
    state: _State = _State.WAITING
    sent: bool = False
    again: bool = False
    """It was asked a second time, because the connection had been idle for too long."""
    cancelled: bool = False
    pipeline: Pipeline | None = None

    def cancel(self) -> bool:
        """Nobody wants it any more. Returns False once its body is being taken: then `done` is still to come. Else it
        may come, too, if it was on its way."""
        return self.pipeline is None or self.pipeline.cancel(self)

    def tell(self, error: BaseException | None) -> None:
        """Call `done`, unless nobody waits for it any more."""
        if not self.cancelled:
            self.done(error)


class _Spares:
    """Threads and buffers of the process for shards that are decoded while the next ones come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = SHARDS_IN_FLIGHT
        self._buffers: list[bytearray] = []
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], None]) -> bool:
        """Do `work` in another thread if one is free."""
        with self._lock:
            if not self._free:
                return False
            self._free -= 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SHARDS_IN_FLIGHT, thread_name_prefix="shard-take")
        self._pool.submit(work)
        return True

    def give(self, buffer: bytearray) -> None:
        """What `run` was for is over, and this is its buffer."""
        with self._lock:
            self._free += 1
            if len(self._buffers) < SHARDS_IN_FLIGHT:
                self._buffers.append(buffer)

    def buffer(self, old: bytearray | None, length: int) -> bytearray:
        """Memory for a body: `old` if it is long enough."""
        if old is not None and len(old) >= length:
            return old
        with self._lock:
            while self._buffers:
                if len(found := self._buffers.pop()) >= length:
                    return found
        return bytearray(length)


_spares = _Spares()


class Pipeline:
    """The queue of one source."""

    def __init__(self, address: str, connect: Connect, down: Bucket | None = None) -> None:
        """
        Args:
            down: limits the bytes of bodies received.
        """
        self.address = address
        self._connect = connect
        self._down = down
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        """Not answered, in the order of asking; those that were sent come first."""
        self._wire: Wire | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._buffer: bytearray | None = None
        self.round_trip_s = 0.0
        """Of the newest connection; 0 before the first."""

    def ask(self, requests: list[Request]) -> None:
        """Queue requests; never waits."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self.address} is not asked any more")
            for request in requests:
                request.pipeline = self
            self._queue.extend(requests)
            if self._wire is not None and self._wire.sends_at_once:
                with contextlib.suppress(SourceError):  # the thread, which reads, finds out as well
                    self._send_new(self._wire)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"shards {self.address}", daemon=True)
                self._thread.start()
            self._changed.notify()

    def cancel(self, request: Request) -> bool:
        """See `Request.cancel`."""
        with self._changed:
            if request.state in (_State.TAKING, _State.OVER):
                return request.cancelled
            request.cancelled = True
            if not request.sent:
                self._queue.remove(request)
                request.state = _State.OVER
            elif self._queue[0] is request and self._wire is not None and _left(request) > _DRAIN_BYTES:
                self._wire.interrupt()
            return True

    def close(self) -> None:
        """Let go of the connection; what was asked ends with `ReturnedError` soon."""
        with self._changed:
            self._closed = True
            if self._wire is not None:
                self._wire.interrupt()
            self._changed.notify()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (request := self._next()) is not None:
            try:
                if request.cancelled and _left(request) > _DRAIN_BYTES:
                    self._begin_again(request)
                else:
                    self._read(request)
            except SourceError as exc:
                wire = self._wire
                idle = wire is not None and wire.answers > 0 and exc.code == ReasonCode.UNREACHABLE
                if request.cancelled or self._closed:
                    self._begin_again(request if request.cancelled else None)
                elif idle and request.state is _State.WAITING and not request.again:
                    request.again = True  # the server closed a connection that had been idle
                    self._begin_again(None)
                else:
                    self._fail(request, exc)
            except Exception as exc:  # ours: it must be seen, and cost no more than this request
                log.exception("%s: reading %s failed", self.address, request.name)
                self._fail(request, SourceError(self.address, f"{request.name}: {exc!r}", ReasonCode.INTERNAL))

    def _next(self) -> Request | None:
        """The request to answer now; None when this thread is to end."""
        end = time.monotonic() + _IDLE_S
        with self._changed:
            while not self._closed and not self._queue and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._queue and not self._closed:
                return self._queue[0]
            self._thread = None
            self._buffer = None
            rest = self._let_go()
        _return(rest)
        return None

    def _read(self, request: Request) -> None:
        """One answer, from its first byte to its end. Raises SourceError; the connection is then of no use."""
        wire = self._ready_wire()
        if not request.sent:
            return  # cancelled while we connected
        request.progress.began = time.monotonic()
        answer = wire.read_answer(request.name, request.first_s)
        request.state = _State.READING
        if answer.status != 200:
            refusal = self._refusal(wire, request, answer)
            self._over(request)
            request.tell(refusal)
        else:
            self._check(request, answer)
            buffer = self._buffer = _spares.buffer(self._buffer, answer.length)
            body = memoryview(buffer)[: answer.length]
            digest = wire.read_body(request.name, body, request.progress)
            request.seconds = time.monotonic() - request.progress.began
            if request.digest is not None and digest != request.digest:
                raise SourceError(
                    self.address, f"{request.name} has another hash than the origin signed", ReasonCode.SHARD_MISMATCH
                )
            self._hand_over(request, buffer, body)
        if answer.last:
            self._begin_again(None)

    def _ready_wire(self) -> Wire:
        """The connection, with everything sent that was asked by now."""
        wire = self._wire
        if wire is None:
            wire = Wire(self.address, self._connect, self._down)
            self.round_trip_s = wire.round_trip_s
        with self._changed:
            self._wire = wire
            if self._closed:
                raise SourceError(self.address, "it is not asked any more", ReasonCode.UNREACHABLE)
            self._send_new(wire)
        return wire

    def _send_new(self, wire: Wire) -> None:
        """Under the lock: send what was not sent yet."""
        new = [request for request in self._queue if not request.sent]
        if new:
            for request in new:
                request.sent = True
            wire.send(b"".join(request.head for request in new))
        else:
            wire.flush()

    def _check(self, request: Request, answer: Answer) -> None:
        """What is said of a body before it comes: how long it is, and who stands for it."""
        request.look(answer.headers)
        wanted = request.length if request.length is not None else request.limit
        if answer.length > wanted:
            raise SourceError(
                self.address, f"{request.name} of {answer.length} bytes, over {wanted}", ReasonCode.OVERSIZE
            )
        if request.length is not None and answer.length < request.length:
            raise SourceError(
                self.address,
                f"{request.name} of {answer.length} bytes, not {request.length}",
                ReasonCode.LENGTH_MISMATCH,
            )

    def _refusal(self, wire: Wire, request: Request, answer: Answer) -> SourceError:
        """What the source said instead of a body; its words are quoted, bounded, never acted on."""
        if answer.length > _MAX_REFUSAL_BYTES:
            raise SourceError(self.address, f"{request.name}: answered {answer.status} at length", ReasonCode.OVERSIZE)
        text = bytearray(answer.length)
        wire.read_body(request.name, memoryview(text), Progress())
        return refusal(
            self.address, request.name, answer.status, answer.headers.get("retry-after", ""), text[: 4 * KIB]
        )

    def _hand_over(self, request: Request, buffer: bytearray, body: memoryview) -> None:
        """Let the body be taken: by another thread while more answers are coming, else by this one."""
        more = self._over(request, _State.TAKING)
        if request.cancelled:
            return

        def elsewhere() -> None:
            try:
                self._take(request, body)
            finally:
                _spares.give(buffer)

        if more and _spares.run(elsewhere):
            self._buffer = None
        else:
            self._take(request, body)

    def _take(self, request: Request, body: memoryview) -> None:
        try:
            request.finished = request.take(body)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, whoever asked decides
            request.tell(exc)
        else:
            request.tell(None)

    def _over(self, request: Request, state: _State = _State.OVER) -> bool:
        """Its answer was read to the end; returns whether others are still to come."""
        with self._changed:
            self._queue.popleft()
            request.state = state
            return bool(self._queue)

    def _begin_again(self, dropped: Request | None) -> None:
        """End the connection; what was sent over it, but for `dropped`, is asked again over a new one."""
        with self._changed:
            if dropped is not None and dropped in self._queue:
                self._queue.remove(dropped)
                dropped.state = _State.OVER
            self._let_go_wire()
            for request in self._queue:
                request.sent = False
                request.state = _State.WAITING
                request.progress.began, request.progress.got = 0.0, 0
            # Those that were cancelled meanwhile need not be asked again.
            for request in [one for one in self._queue if one.cancelled]:
                self._queue.remove(request)
                request.state = _State.OVER

    def _fail(self, request: Request, error: Exception) -> None:
        """This request failed, and with it the connection: those behind it are returned unharmed."""
        with self._changed:
            rest = [one for one in self._let_go() if one is not request]
        request.state = _State.OVER
        request.tell(error)
        _return(rest)

    def _let_go(self) -> list[Request]:
        """Under the lock: end the connection and empty the queue."""
        self._let_go_wire()
        rest = list(self._queue)
        self._queue.clear()
        for request in rest:
            request.state = _State.OVER
        return rest

    def _let_go_wire(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


_REFUSALS = {404: ReasonCode.RECORD_MISSING, 403: ReasonCode.NOT_GRANTED, 429: ReasonCode.QUOTA}


def refusal(address: str, name: str, status: int, retry_after: str, text: bytes | bytearray) -> SourceError:
    """What a source said instead of what was asked for; its words are quoted, bounded, never acted on.

    Args:
        retry_after: the header of that name; whole seconds.
        text: the start of the body.
    """
    try:
        table = json.loads(text)
        message = str(table["message"])[:500] if isinstance(table, dict) else ""
    except (ValueError, KeyError, RecursionError):
        message = ""
    seconds = int(retry_after) if retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 10 else 0
    return SourceError(
        address,
        f"{name}: answered {status} {message!r}",
        _REFUSALS.get(status, ReasonCode.UNREACHABLE),
        retry_after_s=min(seconds, MAX_RETRY_AFTER_S),
    )


def _left(request: Request) -> int:
    """Bytes of its body that are still to come, at most."""
    return (request.limit if request.length is None else request.length) - request.progress.got


def _return(requests: list[Request]) -> None:
    for request in requests:
        request.tell(ReturnedError())
