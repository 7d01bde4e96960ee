"""A download over real sources, well behaved and not: what it ends with, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from protocol.limits import SHARD_BYTES
from shardcast.asks import Ask
from shardcast.download import Download
from shardcast.errors import StoreError
from shardcast.publication import Publication, publication_from, split_frames
from shardcast.records import ShardRecord
from shardcast.schedule import SourceHealth
from shardcast.source import Source, new_session
from shardcast.store import PUBLICATION_NAME
from tests.shardcast_run import MadeRun, make_run, publishing, until, write_checkpoint

SHARDS = 3


class MemorySink:
    """Keeps whole shards in memory; a test may hold them back, or have them refused."""

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        self.shards: dict[int, bytes] = {}
        self.shown: list[int] = []
        self.taking = 0
        self.let_through = threading.Event()
        self.let_through.set()
        self.refusal: Exception | None = None
        self.here: set[int] = set()
        self.abandoned_while: int | None = None

    def asks(self, record: ShardRecord) -> list[Ask]:
        path = f"p/{self.publication.key[0]}-{self.publication.key[1]}/shard/{record.index}"
        return [Ask(record.index, path, record.wire_bytes, record.wire_bytes, record.wire_hash)]

    def may_be_present(self, record: ShardRecord) -> bool:
        return bool(self.here)

    def present(self, record: ShardRecord) -> bool:
        return record.index in self.here

    def take(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        self.taking += 1
        assert self.let_through.wait(60)
        try:
            if self.refusal is not None:
                raise self.refusal
            self.shards[record.index] = bytes(body)
        finally:
            self.taking -= 1
        return True

    def verified(self, record: ShardRecord) -> None:
        self.shown.append(record.index)

    def abandon(self) -> None:
        self.abandoned_while = self.taking


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", SHARDS * SHARD_BYTES)
    write_checkpoint(made.directory, 0, 0, made.shapes, 1)
    return made


async def published(made: MadeRun, origin: Any) -> Publication:
    await until(lambda: bool(origin.store.keys), "the publication")
    raw = (origin.store.folder((0, 0)) / PUBLICATION_NAME).read_bytes()
    return publication_from(made.run, split_frames(raw))


async def test_every_shard_comes_once_and_what_is_here_is_not_asked_for(made: MadeRun) -> None:
    async with publishing(made) as origin, new_session() as session:
        sink = MemorySink(await published(made, origin))
        sink.here = {1}
        source = Source(session, origin.server.url, made.run.id)
        download = Download(sink.publication, sink)
        download.offer(source, SourceHealth(source.address), None)
        await asyncio.wait_for(download.run(), 60)
        source.stop()
        assert sorted(sink.shown) == [0, 1, 2] and sorted(sink.shards) == [0, 2]
        assert download.whole and download.bytes_received == 2 * SHARD_BYTES
        assert origin.server.counters.shards_sent == 2


async def test_a_download_that_is_given_up_removes_what_came_only_once_no_thread_is_storing(made: MadeRun) -> None:
    unread: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context["message"]))
    async with publishing(made) as origin, new_session() as session:
        sink = MemorySink(await published(made, origin))
        sink.let_through.clear()
        source = Source(session, origin.server.url, made.run.id)
        download = Download(sink.publication, sink)
        download.offer(source, SourceHealth(source.address), None)
        run = asyncio.create_task(download.run())
        await until(lambda: sink.taking > 0, "a shard being stored")
        run.cancel()
        await asyncio.sleep(0.1)
        assert not run.done(), "a thread is in the sink"
        sink.let_through.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        await download.give_up()
        assert sink.abandoned_while == 0 and sink.shown == []
        source.stop()
    del run, download
    await asyncio.sleep(0)
    gc.collect()
    assert unread == []


async def test_a_sink_that_refuses_ends_the_download_with_its_reason(made: MadeRun) -> None:
    async with publishing(made) as origin, new_session() as session:
        sink = MemorySink(await published(made, origin))
        sink.refusal = StoreError("the disk is full")
        source = Source(session, origin.server.url, made.run.id)
        download = Download(sink.publication, sink)
        download.offer(source, SourceHealth(source.address), None)
        with pytest.raises(StoreError, match="disk is full"):
            await asyncio.wait_for(download.run(), 60)
        source.stop()
