"""Fetches the shards of one publication from whichever sources hold them, into a sink.

    offer(source, shard) -> present? -> Schedule.next -> Source.pipeline -> length, hash -> Sink.take -> verified
                                            ^                                   |
                                            +------ failed, refused, returned --+

A wire shard is received whole, into memory, and checked there; only then the sink decodes and stores it, in a thread.
So two sources may be asked for one shard, and nothing unverified reaches a file. `schedule` decides, this module acts:
requests, answers, and asking further sources what they hold (`scout`) when those known are slow, or bring nothing.

Not covered: which publication to fetch (`follower`), and what a shard's bytes mean (the sinks).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from protocol.errors import ReasonCode
from shardcast.asks import Ask, Sink
from shardcast.errors import SourceError, WrongBodyError
from shardcast.limits import PIECE_BYTES
from shardcast.pipeline import Request, ReturnedError
from shardcast.publication import Publication
from shardcast.records import ShardRecord
from shardcast.schedule import Attempt, Outcome, Schedule, SourceHealth
from shardcast.source import Source

__all__ = ["Download", "Place", "Sink", "hash_region", "preallocate", "write_region"]

log = logging.getLogger("shardcast.download")

_LOOK_AGAIN_S = 0.25
"""How often a download looks at how its requests get on, though nothing happened."""

_NAMES_S = 1.0
"""How often it reads whom the plan names."""

_PRESENT_AT_ONCE = 8
"""Shards looked for on the own disk in one go."""

_GIVE_UP_S = 60.0
"""How long shards may take to be stored once nobody wants them."""

Place = tuple[Source, SourceHealth, bool]
"""A source that the plan names now, and whether it is a spare one."""


class Download:
    """One publication on its way into one sink."""

    def __init__(
        self,
        publication: Publication,
        sink: Sink,
        *,
        places: Callable[[], Iterable[Place]] | None = None,
        scout: Callable[[Source, SourceHealth], Coroutine[Any, Any, None]] | None = None,
        gather: Callable[[Publication], Coroutine[Any, Any, None]] | None = None,
        blame: Callable[[Publication, Source, ShardRecord, SourceError], None] | None = None,
    ) -> None:
        """
        Args:
            places: the sources that may be asked now; None takes those that offer something.
            scout: asks a source what it holds, and calls `offer`; raises SourceError.
            gather: asks around until every shard's signed record is known.
            blame: told of every shard that a source failed to deliver, of those whose bytes were signed.
        """
        self.publication = publication
        self.sink = sink
        self.missing: set[int] = set(range(publication.shards))
        self.bytes_received = 0
        self._places, self._scout, self._gather, self._blame = places, scout, gather, blame
        self._gathering = False
        self._schedule = Schedule(publication.open.max_wire_bytes, time.monotonic())
        self._sources: dict[str, tuple[Source, SourceHealth]] = {}
        self._named_at = 0.0
        self._offered: set[int] = set()
        """Shards that somebody announced."""
        self._unlooked: deque[int] = deque()
        """Of those, the ones that were not looked for on the own disk yet."""
        self._waiting: set[int] = set()
        """Of those, the ones for which nothing can be asked yet."""
        self._requests: dict[Attempt, tuple[Request, Ask, ShardRecord]] = {}
        self._refused: set[tuple[str, str]] = set()
        """(address, path) of what a source would not give."""
        self._claims = threading.Lock()
        self._taken: set[int] = set()
        """Shards that a thread is storing or has stored."""
        self._storing = 0
        self._given_up = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def whole(self) -> bool:
        """All shards are here and verified."""
        return not self.missing

    def offer(self, source: Source, health: SourceHealth, index: int | None) -> None:
        """`source` has shard `index`, or all of them (None)."""
        if source.address not in self._sources:
            self._name(source, health, spare=False)
        self._schedule.announced(source.address, index)
        for one in range(self.publication.shards) if index is None else (index,):
            if one not in self._offered:
                self._offered.add(one)
                self._unlooked.append(one)
        self._changed.set()

    async def run(self) -> None:
        """Fetch until nothing is missing; the caller cancels it, or puts a deadline around it.

        Raises:
            PublicationError: the origin signed bytes that are not the shard they should be.
            StoreError, OSError: the sink cannot take the bytes.
        """
        self._schedule.begin(time.monotonic())
        try:
            while self.missing:
                self._changed.clear()
                self._act(time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._changed.wait()
                if self._failure is not None:
                    raise self._failure
        finally:
            await self._stop()

    async def give_up(self) -> None:
        """Stop, and remove what came; once `run` is cancelled or over."""
        await self._stop()
        self.sink.abandon()

    # --- deciding --------------------------------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        """Everything that can be done now."""
        self._read_names(now)
        for index in sorted(self._waiting):
            self._plan(index)
        if self._waiting and self.publication.manifest is not None and self._gather is not None and not self._gathering:
            # Whoever sent the manifest kept records back that nothing can be asked for without.
            self._gathering = True
            self._spawn(self._gather(self.publication))
        if self._unlooked and self._looking is None and (batch := self._to_look_for()):
            self._looking = self._spawn(self._look(batch))
        for attempt, (request, _, _) in self._requests.items():
            attempt.began, attempt.got = request.progress.began, request.progress.got
        batches: dict[str, list[Request]] = {}
        while (attempt_now := self._schedule.next(now)) is not None:
            self._cancel(self._schedule.replaced)
            self._schedule.replaced.clear()
            self._start(attempt_now, now, batches)
        for address, requests in batches.items():
            self._sources[address][0].pipeline.ask(requests)
        if self._scout is not None:
            for address in self._schedule.scouts(now):
                self._spawn(self._ask_what(address, self._scout))

    def _read_names(self, now: float) -> None:
        if self._places is None or now - self._named_at < _NAMES_S:
            return
        self._named_at = now
        named = {source.address: (source, health, spare) for source, health, spare in self._places()}
        for address in [one for one in self._sources if one not in named]:
            self._cancel(self._schedule.unname(address))
        for source, health, spare in named.values():
            self._name(source, health, spare=spare)

    def _name(self, source: Source, health: SourceHealth, *, spare: bool) -> None:
        known = self._sources.get(source.address)
        if known is not None and known[0] is not source:  # another key answers at that address
            self._cancel(self._schedule.unname(source.address, forget=True))
        self._sources[source.address] = (source, health)
        self._schedule.name(health, spare=spare)

    def _plan(self, index: int) -> None:
        """Have a shard fetched, once something can be asked for it."""
        record = self.publication.expect(index)
        asks = self.sink.asks(record) if record is not None else ()
        if asks:
            self._waiting.discard(index)
            size = asks[0].length
            self._schedule.missing(index, asks[0].limit if size is None else size)
        else:
            self._waiting.add(index)
            self._schedule.postpone(index)

    def _to_look_for(self) -> list[int]:
        """The next shards that may be on the own disk; those before them that can't be are planned."""
        batch: list[int] = []
        while self._unlooked and len(batch) < _PRESENT_AT_ONCE:
            index = self._unlooked.popleft()
            record = self.publication.expect(index)
            if record is not None and self.sink.may_be_present(record):
                batch.append(index)
            else:
                self._plan(index)
        return batch

    async def _look(self, batch: list[int]) -> None:
        """Which of these shards are here already, or need no request."""
        try:
            known = [(index, self.publication.expect(index)) for index in batch]
            records = [record for _, record in known if record is not None]
            found = await asyncio.to_thread(lambda: [self.sink.present(record) for record in records])
            if self._given_up:
                return
            for record, here in zip(records, found, strict=True):
                if here:
                    self._done(record)
                    self._schedule.done(record.index)
                else:
                    self._plan(record.index)
            self._waiting.update(index for index, record in known if record is None)
        finally:
            self._looking = None
            self._changed.set()

    async def _ask_what(self, address: str, scout: Callable[[Source, SourceHealth], Coroutine[Any, Any, None]]) -> None:
        error = None
        try:
            await scout(*self._sources[address])
        except SourceError as exc:
            error = exc
        self._schedule.scout_ended(address, time.monotonic(), error)

    # --- requests --------------------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt, now: float, batches: dict[str, list[Request]]) -> None:
        record = self.publication.expect(attempt.index)
        source = self._sources[attempt.address][0]
        asks = source.forms(self.sink.asks(record), record, self.publication.key) if record is not None else []
        if record is None or not asks:
            self._schedule.ended(attempt, Outcome.RETURNED, now)
            self._plan(attempt.index)
            return
        ask = next((one for one in asks if (source.address, one.path) not in self._refused), asks[0])

        def take(body: memoryview) -> bool:
            return self._take(record, ask, body)

        def done(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                self._loop.call_soon_threadsafe(self._answered, attempt, error)

        request = source.request(ask, record, take, done)
        self._requests[attempt] = (request, ask, record)
        batches.setdefault(source.address, []).append(request)

    def _take(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        """In a thread: store what came, unless another source was faster; returns whether the shard is done."""
        with self._claims:
            if self._given_up or record.index in self._taken:
                raise ReturnedError
            self._taken.add(record.index)
            self._storing += 1
        finished = False
        try:
            finished = self.sink.take(record, ask, body)
        finally:
            with self._claims:
                self._storing -= 1
                if not finished:
                    self._taken.discard(record.index)
                waited_for = self._is_given_up()
            if waited_for:  # by `_stop`; otherwise `_answered` comes next, and waking the loop twice costs twice
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._changed.set)
        return finished

    def _is_given_up(self) -> bool:
        """A call, because it may have changed since this thread looked."""
        return self._given_up

    def _answered(self, attempt: Attempt, error: BaseException | None) -> None:
        """In the loop: what became of a request."""
        held = self._requests.pop(attempt, None)
        self._changed.set()
        if held is None or self._given_up:
            return
        request, ask, record = held
        source, health = self._sources[attempt.address]
        attempt.got = request.progress.got
        now = time.monotonic()
        if error is None:
            self._arrived(attempt, request, source, health, record, now)
        elif isinstance(error, ReturnedError):
            self._schedule.ended(attempt, Outcome.RETURNED, now)
        elif isinstance(error, SourceError | WrongBodyError):
            self._failed(attempt, source, health, ask, record, error, now)
        else:
            self._schedule.ended(attempt, Outcome.RETURNED, now)
            if self._failure is None:
                self._failure = error

    def _arrived(
        self,
        attempt: Attempt,
        request: Request,
        source: Source,
        health: SourceHealth,
        record: ShardRecord,
        now: float,
    ) -> None:
        self.bytes_received += request.progress.got
        health.worked(request.progress.got, request.seconds)
        health.round_trip_s = source.pipeline.round_trip_s
        if request.finished:
            self._cancel(self._schedule.ended(attempt, Outcome.VERIFIED, now))
            self._done(record)
        else:
            self._schedule.ended(attempt, Outcome.MORE, now)
            self._plan(record.index)

    def _failed(
        self,
        attempt: Attempt,
        source: Source,
        health: SourceHealth,
        ask: Ask,
        record: ShardRecord,
        error: SourceError | WrongBodyError,
        now: float,
    ) -> None:
        if isinstance(error, WrongBodyError):
            error = SourceError(source.address, str(error), error.code)
        asks = source.forms(self.sink.asks(record), record, self.publication.key)
        refused = error.code == ReasonCode.RECORD_MISSING or source.may_be_spoilt(ask)
        self._refused.add((source.address, ask.path))
        if refused and any((source.address, one.path) not in self._refused for one in asks):
            self._schedule.ended(attempt, Outcome.OTHERWISE, now)
            return
        self._refused -= {(source.address, one.path) for one in asks}
        health.failed(error, now)
        self._schedule.ended(attempt, Outcome.FAILED, now, error)
        log.warning("%s; asking another source", error)
        if self._blame is not None and not ask.by_name:
            self._blame(self.publication, source, record, error)

    def _cancel(self, attempts: Iterable[Attempt]) -> None:
        """Not wanted any more; the schedule knows already."""
        for attempt in attempts:
            held = self._requests.get(attempt)
            if held is not None and held[0].cancel():
                del self._requests[attempt]

    def _done(self, record: ShardRecord) -> None:
        if record.index in self.missing:
            self.sink.verified(record)
            self.missing.discard(record.index)

    # --- ending ----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Take what a task ended with, so that it is never left unread: `run` raises it, unless it is over itself."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None:
            self._failure = error
        self._changed.set()

    async def _stop(self) -> None:
        """No request is out, and no thread is in the sink, once this returns."""
        with self._claims:
            self._given_up = True
        self._cancel(list(self._requests))
        tasks = list(self._tasks)
        looking = self._looking
        for task in tasks:
            if task is not looking:  # its thread is in the sink
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        end = time.monotonic() + _GIVE_UP_S
        while self._storing and time.monotonic() < end:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._changed.wait()


def hash_region(fd: int, start: int, length: int) -> bytes:
    """BLAKE3 of `length` bytes of an open file from `start`, read in pieces of 1 MiB."""
    hasher = blake3()
    at = start
    while at < start + length:
        piece = os.pread(fd, min(PIECE_BYTES, start + length - at), at)
        if not piece:
            break
        hasher.update(piece)
        at += len(piece)
    return hasher.digest()


def write_region(fd: int, start: int, piece: bytes | memoryview) -> None:
    """Write all of `piece` at `start`. Raises OSError."""
    view = memoryview(piece)
    while view:
        count = os.pwrite(fd, view, start)
        view = view[count:]
        start += count


def preallocate(path: Path, size: int) -> int:
    """Open a file for random writes with `size` bytes reserved; returns its descriptor.

    Raises:
        OSError: the disk has no room for it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, size)
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
