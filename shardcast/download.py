"""Fetches the shards of one publication from whichever sources hold them, into a sink.

A sink is where verified bytes go: a relay's store or a puller's model file. A shard is asked for once a source
announced it, from the better of two random holders; what fails is asked for elsewhere, and a source that failed
rests for a while. Memory does not depend on the size of the checkpoint.

Not covered: hedging of the last shards (two writers for one region would need a second buffer), and which
publication to fetch (`follower`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from shardcast.errors import SourceError
from shardcast.limits import PIECE_BYTES, SHARDS_IN_FLIGHT
from shardcast.publication import Publication
from shardcast.records import ShardRecord
from shardcast.source import Source, SourceHealth, choose

log = logging.getLogger("shardcast.download")

_LOOK_AGAIN_S = 0.25
"""How often a download with nothing to ask looks whether a resting source is ready again."""


class Sink(Protocol):
    """Where one publication's shards go. Calls come from one task per shard, in order of offset."""

    def write(self, index: int, offset: int, piece: bytes) -> None:
        """Put unverified bytes aside; nothing may be able to load them."""

    def present(self, record: ShardRecord) -> bool:
        """Whether an earlier process left exactly this shard here (re-hashed, not believed). Blocking."""

    def verified(self, record: ShardRecord) -> None:
        """All bytes of this shard were written and have the signed hash."""

    def let_go(self, index: int) -> None:
        """This shard is not finished by the task that wrote it: the part that came is of no use."""

    def abandon(self) -> None:
        """Remove what was written."""


class Download:
    """One publication on its way into one sink."""

    def __init__(
        self,
        publication: Publication,
        sink: Sink,
        resume: bool,
        blame: Callable[[Publication, Source, ShardRecord, SourceError], None] | None = None,
    ) -> None:
        """
        Args:
            resume: an earlier process may have left shards in the sink.
            blame: told of every shard that a source failed to deliver.
        """
        self.publication = publication
        self.sink = sink
        self._blame = blame
        self.missing: set[int] = set(range(publication.shards))
        self.bytes_received = 0
        self._resume = resume
        self._holders: dict[int, set[str]] = {}
        self._everything: set[str] = set()
        self._low = 0
        self._high = -1
        """Nothing below `_low` is missing, nothing above `_high` was announced."""
        self._sources: dict[str, tuple[Source, SourceHealth]] = {}
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        """What the sink refused. Kept beside the tasks: one may end just as the download is given up, and nobody waits
        for it any more."""
        self._offered = asyncio.Event()

    @property
    def whole(self) -> bool:
        """All shards are here and verified."""
        return not self.missing

    def offer(self, source: Source, health: SourceHealth, index: int | None) -> None:
        """`source` has shard `index`, or all of them (None)."""
        self._sources[source.address] = (source, health)
        if index is None:
            self._everything.add(source.address)
            self._high = self.publication.shards - 1
        else:
            self._high = max(self._high, index)
            self._holders.setdefault(index, set()).add(source.address)
        self._offered.set()

    async def run(self) -> None:
        """Fetch until nothing is missing; the caller cancels it, or puts a deadline around it.

        Raises:
            StoreError, OSError: the sink cannot take the bytes.
        """
        try:
            while self.missing:
                self._offered.clear()
                self._launch()
                waiter = asyncio.create_task(self._offered.wait())
                try:
                    await asyncio.wait(
                        {*self._busy.values(), waiter}, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    waiter.cancel()
                if self._failure is not None:
                    raise self._failure
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _launch(self) -> None:
        """Start as many fetches as there is room and sources for, lowest index first."""
        now = time.monotonic()
        while self._low <= self._high and self._low not in self.missing:
            self._low += 1
        for index in range(self._low, self._high + 1):
            if len(self._busy) >= SHARDS_IN_FLIGHT:
                return
            if index not in self.missing or index in self._busy:
                continue
            record = self.publication.expect(index)
            if record is None:
                continue
            ready = []
            for address in self._holders.get(index, set()) | self._everything:
                health = self._sources[address][1]
                if health.resting_until <= now:
                    ready.append(health)
            if not ready:
                continue
            health = choose(ready)
            health.in_flight += 1
            task = asyncio.create_task(self._fetch(self._sources[health.address][0], health, record))
            task.add_done_callback(self._ended)
            self._busy[index] = task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Take what a fetch ended with, so that it is never left unread: `run` raises it, unless it is over itself."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None:
            self._failure = error
        self._offered.set()

    async def _fetch(self, source: Source, health: SourceHealth, record: ShardRecord) -> None:
        try:
            if self._resume and await asyncio.to_thread(self.sink.present, record):
                self._done(record)
                return
            start = time.monotonic()
            got = await source.shard(
                self.publication.key, record, lambda offset, piece: self.sink.write(record.index, offset, piece)
            )
            health.worked(got, time.monotonic() - start)
            self.bytes_received += got
            self._done(record)
        except SourceError as exc:
            health.failed(exc)
            log.warning("%s; asking another source", exc)
            if self._blame is not None:
                self._blame(self.publication, source, record, exc)
        finally:
            if record.index in self.missing:
                self.sink.let_go(record.index)
            health.in_flight -= 1
            self._busy.pop(record.index, None)

    def _done(self, record: ShardRecord) -> None:
        self.sink.verified(record)
        self.missing.discard(record.index)


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


def write_region(fd: int, start: int, piece: bytes) -> None:
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
