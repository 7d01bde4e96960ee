"""Sources that answer badly, over real sockets: a typed reason, bounded memory and time, and the rest goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from blake3 import blake3

from protocol.errors import ReasonCode
from shardcast.asks import Ask
from shardcast.errors import SourceError
from shardcast.records import NO_HASH, ShardRecord
from shardcast.source import Source, new_session
from tests.shardcast_run import WAIT_S

RUN = bytes(32)
BODY = bytes(range(256)) * 4096
"""1 MiB."""


def record(index: int, body: bytes = BODY) -> ShardRecord:
    digest = blake3(body).digest()
    return ShardRecord(bytes(16), index, len(body), len(body), digest, NO_HASH, digest)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[Source]:
    """A source whose connections are handled by the test."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with new_session() as session:
        source = Source(session, f"http://127.0.0.1:{port}", RUN)
        try:
            yield source
        finally:
            source.stop()
            server.close()


def sending(data: bytes, *, rest: bool = True) -> Handler:
    """Answers the first request with these bytes; then says nothing more (`rest`), or hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        if rest:
            await reader.read()

    return handle


def ok(*lines: str, length: int | str = len(BODY)) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {length}", *lines, "", ""]).encode()


WRONG: dict[str, tuple[bytes, bool, ReasonCode]] = {
    "longer than said": (ok(length=len(BODY) + 1), True, ReasonCode.OVERSIZE),
    "said to have ten gigabytes": (ok(length=10**10), True, ReasonCode.OVERSIZE),
    "shorter than said": (ok(length=len(BODY) - 1) + BODY[:-1], True, ReasonCode.LENGTH_MISMATCH),
    "cut in the middle": (ok() + BODY[:1000], False, ReasonCode.LENGTH_MISMATCH),
    "other bytes": (ok() + bytes(len(BODY)), True, ReasonCode.SHARD_MISMATCH),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", True, ReasonCode.MALFORMED),
    "chunks beside a length": (ok("Transfer-Encoding: chunked"), True, ReasonCode.MALFORMED),
    "two lengths": (ok("content-length: 5") + BODY, True, ReasonCode.MALFORMED),
    "no length": (b"HTTP/1.1 200 OK\r\n\r\n", True, ReasonCode.MALFORMED),
    "a length below zero": (ok(length=-5), True, ReasonCode.MALFORMED),
    "a length that is none": (ok(length="0x10"), True, ReasonCode.MALFORMED),
    "an encoding": (ok("Content-Encoding: gzip"), True, ReasonCode.MALFORMED),
    "an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n" + ok() + BODY, True, ReasonCode.MALFORMED),
    "a flood of header bytes": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000, True, ReasonCode.OVERSIZE),
    "a flood of header lines": (ok(*["X: y"] * 100) + BODY, True, ReasonCode.MALFORMED),
    "a line that is no header": (ok("no colon here") + BODY, True, ReasonCode.MALFORMED),
    "something else": (b"SSH-2.0-OpenSSH_9.7\r\n\r\n", True, ReasonCode.MALFORMED),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n", True,
                   ReasonCode.UNREACHABLE),
    "a refusal at length": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 1000000\r\n\r\n", True, ReasonCode.OVERSIZE),
    "a refusal": (b'HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}', True, ReasonCode.RECORD_MISSING),
    "a quota": (b"HTTP/1.1 429 Too Many\r\nRetry-After: 60\r\nContent-Length: 2\r\n\r\n{}", True, ReasonCode.QUOTA),
    "nothing but an end": (b"", False, ReasonCode.UNREACHABLE),
    "the end of a header": (b"HTTP/1.1 200 OK\r\nContent-", False, ReasonCode.LENGTH_MISMATCH),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_an_answer_that_is_wrong_has_its_reason(name: str) -> None:
    data, rest, code = WRONG[name]
    async with answering(sending(data, rest=rest)) as source:
        with pytest.raises(SourceError) as caught:
            await source.shard((0, 0), record(0))
        assert caught.value.code == code
        assert caught.value.address == source.address


async def test_what_a_source_says_about_asking_again_is_kept() -> None:
    async with answering(sending(WRONG["a quota"][0])) as source:
        with pytest.raises(SourceError) as caught:
            await source.shard((0, 0), record(0))
        assert caught.value.retry_after_s == 60


async def dribble(writer: asyncio.StreamWriter, data: bytes, times: int) -> None:
    for at in range(times):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("what", ["nothing", "header", "body"])
async def test_a_source_that_is_too_slow_is_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing; or a byte now and then, of the header or of the body."""
    monkeypatch.setattr("shardcast.wire.STALL_S", 0.4)
    monkeypatch.setattr("shardcast.wire.ANSWER_DEADLINE_S", 0.8)
    monkeypatch.setattr("shardcast.wire._GRACE_S", 0.8)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if what == "body":
            writer.write(ok())
        if what != "nothing":
            await dribble(writer, (ok("X: y") if what == "header" else b"") + BODY, 100_000)
        await reader.read()

    async with answering(handle) as source:
        with pytest.raises(SourceError) as caught:
            await source.shard((0, 0), record(0))
        assert caught.value.code == ReasonCode.TOO_SLOW


class Asked:
    """Requests to one source, and what became of them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.taken: list[int] = []
        self.errors: list[tuple[int, BaseException]] = []
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def request(self, index: int, body: bytes = BODY) -> Any:
        made = record(index, body)
        ask = Ask(index, f"p/0-0/shard/{index}", made.wire_bytes, made.wire_bytes, made.wire_hash)

        def done(error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(self._done, index, error)

        return self.source.request(ask, made, lambda received: bytes(received) == body, done)

    def _done(self, index: int, error: BaseException | None) -> None:
        if error is None:
            self.taken.append(index)
        else:
            self.errors.append((index, error))
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.taken) + len(self.errors) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_requests_go_ahead_of_answers_and_are_answered_in_order() -> None:
    paths: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(40):  # all of them come before anything is answered
            paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        for _ in range(40):
            writer.write(ok() + BODY)
            await writer.drain()
        await reader.read()

    async with answering(handle) as source:
        asked = Asked(source)
        source.pipeline.ask([asked.request(index) for index in range(40)])
        await asked.until(40)
        assert sorted(asked.taken) == list(range(40)) and asked.errors == []
        assert [path.rsplit(b"/", 1)[1] for path in paths] == [str(n).encode() for n in range(40)]


@pytest.mark.parametrize("said", [True, False])
async def test_a_server_that_ends_connections_between_answers_is_asked_again_and_not_blamed(said: bool) -> None:
    """It says so before, or it closes what was idle for a while."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(*(["Connection: close"] if said else [])) + BODY)
        await writer.drain()
        if not said:
            await asyncio.sleep(0.05)

    async with answering(handle) as source:
        asked = Asked(source)
        if said:
            source.pipeline.ask([asked.request(index) for index in range(4)])
            await asked.until(4)
        else:
            for index in range(4):
                source.pipeline.ask([asked.request(index)])
                await asked.until(index + 1)
                await asyncio.sleep(0.2)
        assert sorted(asked.taken) == [0, 1, 2, 3] and asked.errors == []
        assert connections == 4


async def test_what_is_cancelled_costs_the_others_nothing() -> None:
    """The first answer never ends: it is cancelled, and those behind it are asked again over a new connection."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            if path.endswith(b"/0"):
                writer.write(ok() + BODY[:100])
                await writer.drain()
                await reader.read()
                return
            writer.write(ok() + BODY)
            await writer.drain()

    async with answering(handle) as source:
        asked = Asked(source)
        requests = [asked.request(index) for index in range(4)]
        source.pipeline.ask(requests)
        async with asyncio.timeout(WAIT_S):
            while not requests[0].progress.got:
                await asyncio.sleep(0.01)
        assert requests[0].cancel() and requests[2].cancel()
        await asked.until(2)
        assert sorted(asked.taken) == [1, 3] and asked.errors == [] and connections == 2


async def test_those_behind_a_failure_are_returned_unharmed() -> None:
    async with answering(sending(ok() + bytes(len(BODY)))) as source:
        asked = Asked(source)
        source.pipeline.ask([asked.request(index) for index in range(3)])
        await asked.until(3)
        assert [index for index, error in asked.errors if isinstance(error, SourceError)] == [0]
        assert len(asked.errors) == 3
