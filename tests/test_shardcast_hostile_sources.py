"""Sources that trickle, withhold, replay or forge: their child loses seconds, and neither its room nor its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import open_envelope, seal
from protocol.errors import ReasonCode
from protocol.identity import Identity
from shardcast.errors import SourceError
from shardcast.limits import WATCHED_SOURCES
from shardcast.records import HEAD_KIND, Head
from shardcast.source import Source, new_session
from shardcast.turns import TURN_S, Turns
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    MadeRun,
    holds,
    lying,
    make_run,
    publishing,
    pulling,
    until,
    write_checkpoint,
)
from tests.test_shardcast_rotation import rotate


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    return made


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that reads a request's header and then does what it likes."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()


ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "a header line": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "a trickled body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x"),
    "a chunk's extension": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x"),
    "silence": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b""),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_an_answer_that_never_ends_is_left_by_what_came_of_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by how long the longest answer could take: 17 minutes for a layout of 16 MiB."""
    monkeypatch.setattr("shardcast.source.ANSWER_DEADLINE_S", 0.6)
    monkeypatch.setattr("shardcast.source.CONNECT_DEADLINE_S", 0.6)
    first, piece = ENDLESS[what]

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)

    async with answering(trickle) as url, new_session() as session:
        source = Source(session, url, bytes(32))
        with pytest.raises(SourceError) as caught:
            async with asyncio.timeout(WAIT_S):
                await source.blob(bytes(32), 16 << 20)
        assert caught.value.code in (ReasonCode.TOO_SLOW, ReasonCode.UNREACHABLE), what


async def test_a_source_that_keeps_to_the_minimum_rate_with_rubbish_holds_nobody_up(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take 17 minutes to send as much as a layout may have; meanwhile others are asked."""
    monkeypatch.setattr("shardcast.gathering._NEXT_AFTER_S", 0.2)
    drips: list[str] = []

    async with publishing(small) as origin:
        layout = small.run.manifest.model.layout.hex()

        async def drip(writer: asyncio.StreamWriter) -> None:
            drips.append(layout)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 16000000\r\n\r\n")
            while True:
                writer.write(bytes(8 << 10))
                await writer.drain()
                await asyncio.sleep(0.1)

        async with AsyncExitStack() as stack:
            bad = [await stack.enter_async_context(answering(drip)) for _ in range(2)]
            puller = await stack.enter_async_context(pulling(small, [*bad, origin.server.url], tmp_path / "a"))
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
            assert drips, "the bad ones were asked"


async def test_three_sources_that_withhold_news_are_got_round(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.turns.TURN_S", 0.5)
    monkeypatch.setattr("shardcast.follower.SPARE_LOOK_S", 0.05)
    monkeypatch.setattr("shardcast.follower._RECONCILE_S", 0.1)

    def withhold(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (204, b"") if path.startswith(("news", "head")) else (status, body)

    async with publishing(small) as origin, AsyncExitStack() as stack:
        bad = [await stack.enter_async_context(lying(origin.server.url, withhold)) for _ in range(5)]
        puller = await stack.enter_async_context(pulling(small, [*bad, origin.server.url], tmp_path / "a"))
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)


@given(count=st.integers(0, 12), busy=st.booleans())
def test_everybody_has_a_turn_and_the_first_always_have_theirs(count: int, busy: bool) -> None:
    named = [f"http://{n}" for n in range(count)]
    turns = Turns()
    seen: set[str] = set()
    for look in range(1000):
        watched = turns.watched(named, look * TURN_S)
        assert len(watched) == len(set(watched)) == min(count, WATCHED_SOURCES)
        assert watched[: WATCHED_SOURCES - 1] == named[: WATCHED_SOURCES - 1]
        seen.update(watched)
        if busy and watched:
            turns.heard(watched[-1]).__enter__()  # it never ends
    assert seen == set(named)


async def test_old_publications_that_are_announced_again_take_no_room(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each genuine, each never continued: without a bound, one file as long as the model for every one of them."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 100)
    monkeypatch.setattr("shardcast.schedule._FIRST_PENALTY_S", 0.01)
    monkeypatch.setattr("shardcast.schedule._MAX_ABSENCE_S", 0.02)
    monkeypatch.setattr("shardcast.schedule._MAX_PENALTY_S", 0.02)
    async with publishing(small) as origin:
        for step in range(1, 12):
            write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
            await until(lambda step=step: origin.store.keys[-1:] == [(0, step)], "the step")
        feeds = [origin.store.feed(key) for key in origin.store.keys]
        opens = [feed.frames[0] for feed in feeds if feed is not None]
        asked: list[int] = []

        def replay(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            if path.startswith("news"):
                asked.append(len(asked))
                raw = opens[len(asked) % len(opens)]
                return 200, len(raw).to_bytes(4, "big") + raw
            if "/records" in path:
                return 200, b"\0\0\0\1x"  # wrong: so it is asked for news again
            return status, body

        async with lying(origin.server.url, replay) as liar, pulling(small, [liar], tmp_path / "a") as puller:
            most = 0

            def many() -> bool:
                nonlocal most
                most = max(most, len(list((tmp_path / "a" / "policies").glob(".part-*/model.safetensors"))))
                return len(asked) >= 60

            await until(many, "sixty announcements")
            assert puller.current is None
            assert 1 <= most <= 5, "those given up are being removed meanwhile"


async def test_a_head_forged_with_a_revoked_key_stops_nobody(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another root for the step that is here, by the key that the origin had: a thief's word, and no fork."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 100)
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "a") as puller:
        await puller.wait_newer(None, WAIT_S)
        genuine = origin.store.head
    assert genuine is not None
    head = open_envelope(genuine, run=small.run.id, kind=HEAD_KIND).record(Head)
    now = time.time_ns() // 1_000_000
    forged = seal(
        small.origin, HEAD_KIND, replace(head, root=bytes(32), manifest=bytes(32)), run=small.run.id,
        sequence=1 << 40, issued_at=now, lifetime_ms=3_600_000,
    ).raw  # fmt: skip
    key = Identity.generate()
    run = rotate(small, key.public, revoke=True).current
    told: list[str] = []

    def forge(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        if path.startswith("head"):
            told.append(path)
            return 200, forged
        return status, body

    async with publishing(replace(small, origin=key)) as origin:
        await until(lambda: origin.store.head not in (None, genuine), "the head by the new key")
        async with (
            lying(origin.server.url, forge) as liar,
            pulling(small, [liar, origin.server.url], tmp_path / "a", run=lambda: run) as puller,
        ):
            await until(lambda: bool(told), "the forged head")
            write_checkpoint(small.directory, 0, 1, SMALL_SHAPES, seed=1)
            assert holds(await puller.wait_newer((0, 0), WAIT_S), SMALL_SHAPES, seed=1)
    assert not (tmp_path / "a" / "fork-evidence.hw").exists()
