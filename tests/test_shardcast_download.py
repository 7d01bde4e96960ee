"""A download that is given up: what its fetches end with is nobody's any more, and no error of asyncio's."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from protocol.limits import SHARD_BYTES
from shardcast.download import Download
from shardcast.errors import StoreError
from shardcast.publication import publication_from, split_frames
from shardcast.puller import PolicySink
from shardcast.source import SourceHealth
from shardcast.store import PUBLICATION_NAME
from tests.shardcast_run import make_run, publishing, pulling, write_checkpoint


class Held:
    """A source whose shards arrive when the test says so, all in one turn of the loop."""

    address = "http://held"

    def __init__(self) -> None:
        self.arrive = asyncio.Event()
        self.asked = 0

    async def shard(self, key: Any, record: Any, write: Any) -> int:
        self.asked += 1
        await self.arrive.wait()
        write(0, b"x")
        return 1


@pytest.mark.parametrize("order", ["closed, then cancelled", "cancelled, then closed"])
async def test_fetches_of_a_download_that_was_given_up_leave_no_unread_error(tmp_path: Path, order: str) -> None:
    made = make_run(tmp_path / "run", 3 * SHARD_BYTES)
    write_checkpoint(made.directory, 0, 0, made.shapes, 1)
    async with publishing(made) as origin, pulling(made, [origin.server.url], tmp_path / "a") as puller:
        policy = await puller.wait_newer(None, 60)
    publication = publication_from(made.run, split_frames((policy.directory / PUBLICATION_NAME).read_bytes()))

    unread: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context["message"]))
    source, sink = Held(), PolicySink(tmp_path / "part", publication, b"header")
    download = Download(publication, sink, resume=False)
    download.offer(source, SourceHealth(source.address), None)  # type: ignore[arg-type]
    run = asyncio.create_task(download.run())
    while source.asked < 2:
        await asyncio.sleep(0.01)
    source.arrive.set()  # the bytes are there just as the download is given up
    for step in order.split(", then "):
        if step == "cancelled":
            run.cancel()
        else:
            sink.abandon()
    with pytest.raises((asyncio.CancelledError, StoreError)):
        await run
    del run, download
    await asyncio.sleep(0)
    gc.collect()
    assert unread == []


async def test_a_sink_that_refuses_ends_the_download_with_its_reason(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", 2 * SHARD_BYTES)
    write_checkpoint(made.directory, 0, 0, made.shapes, 1)
    async with publishing(made) as origin, pulling(made, [origin.server.url], tmp_path / "a") as puller:
        policy = await puller.wait_newer(None, 60)
    publication = publication_from(made.run, split_frames((policy.directory / PUBLICATION_NAME).read_bytes()))
    source, sink = Held(), PolicySink(tmp_path / "part", publication, b"header")
    source.arrive.set()
    sink.close()
    download = Download(publication, sink, resume=False)
    download.offer(source, SourceHealth(source.address), None)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="given up"):
        await asyncio.wait_for(download.run(), 5)
