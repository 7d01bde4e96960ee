"""The HTTP side of a store: heads and news by long-poll, shards by sendfile. Origin and relay serve the same.

    GET /v1/{run}/head?after=E.S&wait=MS        newest head envelope; 204 when none is newer within the wait
    GET /v1/{run}/news?after=E.S&wait=MS        frames of the newest publication after E.S, also while it is made
    GET /v1/{run}/p/{E}-{S}/records?from=N&wait=MS   frames N.. of one publication; 204 when none came
    GET /v1/{run}/p/{E}-{S}/open | manifest     one envelope
    GET /v1/{run}/p/{E}-{S}/shard/{I}           bytes of a shard that was verified here
    GET /v1/{run}/blob/{HASH}                   layout or model file
    GET /v1/{run}/challenge?nonce=HEX           `challenge` envelope signed with this process's identity
    GET /v1/{run}/stats                         JSON: bytes sent, children, lag, stamps; for people, not evidence

Security: everything is read-only; all path parts are integers or hashes; a connection without a whole request
header is closed after 10 s, a receiver below 16 KiB/s is cut, connections are capped in total and per address. With a
`PassCheck`, only children that show a pass for this server get more than a head, a challenge or stats.

Not covered: TLS (weights of public runs are public, and everything is signed above the transport).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_protocol import RequestHandler

from protocol.envelope import seal
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode, UsageError
from protocol.identity import Identity
from protocol.limits import HEADER_DEADLINE_S, MINIMUM_RATE_BYTES_S
from protocol.sequences import Sequences
from shardcast.heads import replace_file
from shardcast.limits import (
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_FEED_BYTES,
    MAX_WAIT_MS,
)
from shardcast.passes import MAX_SHOWN_CHARS, PASS_HEADER, PassCheck
from shardcast.publication import Key, pack_frames
from shardcast.records import CHALLENGE_KIND, Challenge, ShardRecord
from shardcast.stamps import STAMP_HEADER, make_stamp
from shardcast.stats import SAVE_S, Counters
from shardcast.store import Feed, Store

log = logging.getLogger("shardcast.server")

Clock = Callable[[], int]
"""Milliseconds since the epoch, in corrected time where there is one."""

_PLACE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_AFTER = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")
_BINARY = {"Content-Type": "application/octet-stream"}


def wall_clock_ms() -> int:
    """This machine's clock; nodes pass their corrected one instead."""
    return time.time_ns() // 1_000_000


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"listen address {text!r} is not HOST:PORT, e.g. 127.0.0.1:0")
    return host.strip("[]"), int(port)


class _RefusedError(Exception):
    """An answer other than 200, raised inside a handler."""

    def __init__(self, status: int, code: ReasonCode, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class TimedFile(web.StreamResponse):
    """A whole file by sendfile, whose receiver must keep to the minimum rate.

    aiohttp's own file response opens, stats and closes in other threads, and looks for compressed twins and ranges:
    more CPU than sending a small model takes.
    """

    def __init__(self, path: Path, size: int, headers: dict[str, str] = _BINARY) -> None:
        """Raises OSError when the file is not there, or is not as long as it should be."""
        super().__init__(headers=headers)
        self._file = path.open("rb", buffering=0)
        found = os.fstat(self._file.fileno()).st_size
        if found != size:
            self._file.close()
            raise OSError(f"{path} has {found} bytes instead of {size}")
        self.content_length = self._size = size

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        try:
            async with asyncio.timeout(HEADER_DEADLINE_S + self._size / MINIMUM_RATE_BYTES_S):
                writer = await super().prepare(request)
                if request.transport is None:
                    raise ConnectionResetError("the receiver is gone")
                if self._size:
                    await asyncio.get_running_loop().sendfile(request.transport, self._file, 0, self._size)
                await super().write_eof()
                return writer
        except TimeoutError as exc:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the receiver fell below the minimum rate") from exc
        finally:
            self._file.close()


class _Answer(web.Response):
    """Bytes from memory, whose receiver must keep to the minimum rate: unread answers of many would fill it."""

    _request: web.BaseRequest | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._request = request
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        size = len(self.body) if isinstance(self.body, bytes) else 0
        try:
            async with asyncio.timeout(HEADER_DEADLINE_S + size / MINIMUM_RATE_BYTES_S):
                await super().write_eof(data)
        except TimeoutError as exc:
            if self._request is not None and self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the receiver fell below the minimum rate") from exc


class _CappedServer(web.Server):
    """Closes connections over the caps before anything is read from them."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **options: Any) -> None:
        super().__init__(handler, **options)
        self._open: dict[str, int] = {}
        self._address_of: dict[int, str] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        self._address_of[id(handler)] = address
        self._open[address] = self._open.get(address, 0) + 1
        if self._open[address] > MAX_CONNECTIONS_PER_ADDRESS or len(self._address_of) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        address = self._address_of.pop(id(handler), None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]


class WeightsServer:
    """Serves one store over HTTP."""

    def __init__(
        self,
        store: Store,
        *,
        identity: Identity,
        sequences: Sequences,
        listen: str,
        clock_ms: Clock = wall_clock_ms,
        passes: PassCheck | None = None,
        stamped: bool = False,
        missing: Callable[[Key], float] = lambda key: 0.0,
    ) -> None:
        """
        Args:
            passes: whom to serve; None serves everybody.
            stamped: sign which bytes are sent, as relays do.
            missing: told that a child asked for a publication that is not here; seconds it may wait, 0 when in vain.
        """
        self._missing = missing
        self._passes = passes
        self._stamped = stamped
        self._store = store
        self._identity = identity
        self._sequences = sequences
        self._listen = listen
        self._clock_ms = clock_ms
        self._prefix = f"/v1/{store.run.id.hex()}/"
        self._runner: web.ServerRunner | None = None
        self._saver: asyncio.Task[None] | None = None
        self.counters = Counters(store.root)
        self.url = ""
        """`http://HOST:PORT` once started."""

    async def start(self) -> None:
        """Bind and serve; `url` is then known and also written to `server.json` of the store.

        Raises:
            UsageError: the address cannot be bound.
        """
        host, port = parse_listen(self._listen)
        # An idle connection is one without a whole request header, so this timeout is also the header's deadline.
        server = _CappedServer(self._handle, keepalive_timeout=HEADER_DEADLINE_S, access_log=None, lingering_time=1.0)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as exc:
            await runner.cleanup()
            raise UsageError(
                f"cannot listen on {self._listen}: {exc.strerror}; stop the program that uses it or choose another port"
            ) from exc
        self._runner = runner
        bound = runner.addresses[0]
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url = f"http://{name}:{bound[1]}"
        replace_file(self._store.root / "server.json", json.dumps({"url": self.url, "pid": os.getpid()}).encode())
        self._saver = asyncio.create_task(self._save_counters())

    async def close(self) -> None:
        if self._saver is not None:
            self._saver.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self.counters.save()
            (self._store.root / "server.json").unlink(missing_ok=True)

    async def _save_counters(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.counters.save()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except _RefusedError as refusal:
            status, code, message = refusal.status, refusal.code, str(refusal)
        except (ProtocolError, OSError) as exc:
            log.error("%s: %s", request.path, exc)
            code = exc.code if isinstance(exc, ProtocolError) else ReasonCode.RECORD_MISSING
            status, code, message = 500, code, "the publication is damaged here; ask another source"
        return web.json_response({"code": str(code), "message": message}, status=status)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "GET":
            raise _RefusedError(405, ReasonCode.WRONG_KIND, "only GET is served here")
        path = request.path
        if not path.startswith(self._prefix):
            raise _RefusedError(404, ReasonCode.WRONG_RUN, "another run is served here")
        parts = path[len(self._prefix) :].split("/")
        match parts:
            case ["head"]:
                return await self._head(request)
            case ["challenge"]:
                return self._challenge(request)
            case ["stats"]:
                return web.json_response(self.counters.table())
        who = self._admit(request)
        if parts[-2:-1] == ["shard"] or _wait_s(request):
            self.counters.child(who)  # not those who only look whether their first parent withholds something
        match parts:
            case ["news"]:
                return await self._news(request)
            case ["p", place, "records"]:
                return await self._records(request, await self._feed_or_wait(place))
            case ["p", place, "open"]:
                return _Answer(body=self._feed(place).frames[0], headers=_BINARY)
            case ["p", place, "manifest"]:
                feed = self._feed(place)
                if not feed.complete:
                    raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this publication has no manifest yet")
                return _Answer(body=feed.frames[-2], headers=_BINARY)
            case ["p", place, "shard", index]:
                return self._shard(self._feed(place), index)
            case ["blob", name]:
                return self._blob(name)
        raise _RefusedError(404, ReasonCode.MALFORMED, "no such resource")

    def _admit(self, request: web.BaseRequest) -> str | bytes:
        """Who asks: a child's key, or an address where passes aren't asked for."""
        address = request.remote or ""
        if self._passes is None:
            return address
        try:
            header = request.headers.get(PASS_HEADER, "")
            return self._passes.child(header[:MAX_SHOWN_CHARS], address)
        except EnvelopeError as exc:
            self.counters.refused += 1
            raise _RefusedError(403, exc.code, str(exc)) from exc

    def _feed(self, place: str) -> Feed:
        match = _PLACE.fullmatch(place)
        feed = self._store.feed((int(match[1]), int(match[2]))) if match else None
        if feed is None:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this publication is not here")
        return feed

    async def _feed_or_wait(self, place: str) -> Feed:
        """The feed, also of a publication that is about to come, or was skipped here and is fetched when asked for."""
        match = _PLACE.fullmatch(place)
        key = (int(match[1]), int(match[2])) if match else None
        start = time.monotonic()
        while key is not None and self._store.feed(key) is None and (wait_s := self._missing(key)):
            if not await self._store.changed(max(0.0, start + wait_s - time.monotonic())):
                break
        return self._feed(place)

    async def _news(self, request: web.BaseRequest) -> web.StreamResponse:
        after = _after(request)
        deadline = time.monotonic() + _wait_s(request)
        while True:
            feed = self._store.newest(after)
            if feed is not None:
                return self._frames(feed, 0)
            if not await self._store.changed(max(0.0, deadline - time.monotonic())):
                return web.Response(status=204)

    async def _head(self, request: web.BaseRequest) -> web.StreamResponse:
        after = _after(request)
        deadline = time.monotonic() + _wait_s(request)
        while True:
            keys = self._store.keys
            if self._store.head is not None and keys and (after is None or keys[-1] > after):
                return _Answer(body=self._store.head, headers=_BINARY)
            if not await self._store.changed(max(0.0, deadline - time.monotonic())):
                return web.Response(status=204)

    async def _records(self, request: web.BaseRequest, feed: Feed) -> web.StreamResponse:
        start = _integer(request, "from", 0)
        deadline = time.monotonic() + _wait_s(request)
        while len(feed.frames) <= start:
            if feed.gone:
                raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this publication was given up here; ask for news")
            if feed.complete and start > len(feed.frames):
                raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this publication has fewer frames; start from 0")
            if feed.complete or not await self._store.changed(max(0.0, deadline - time.monotonic())):
                return web.Response(status=204)
        return self._frames(feed, start)

    def _frames(self, feed: Feed, start: int) -> _Answer:
        chosen = []
        size = 0
        for frame in self._store.frames_of(feed)[start:]:
            chosen.append(frame)
            size += len(frame) + 4
            if size > MAX_FEED_BYTES:
                break
        return _Answer(body=pack_frames(chosen), headers=_BINARY)

    def _shard(self, feed: Feed, index_text: str) -> web.StreamResponse:
        if not (index_text.isdecimal() and len(index_text) <= 7) or int(index_text) not in feed.shards:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this shard is not here, or not yet")
        record = feed.shards[int(index_text)]
        self.counters.sent(record.wire_bytes, record.raw_bytes)
        return self.shard(feed, record)

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        """The answer that carries one shard."""
        headers = _BINARY
        if self._stamped:
            headers = {**_BINARY, STAMP_HEADER: self._stamp(feed, record)}
        return TimedFile(self._store.shard_path(feed.key, record.index), record.wire_bytes, headers)

    def _stamp(self, feed: Feed, record: ShardRecord) -> str:
        """Our signature on what this shard's bytes are: made once."""
        if record.index not in feed.stamps:
            feed.stamps[record.index] = self.sign(record.publication, record.index, record.wire_hash)
            self.counters.stamps += 1
        return feed.stamps[record.index]

    def sign(self, publication: bytes, index: int, wire_hash: bytes) -> str:
        """A stamp, as it travels."""
        return make_stamp(
            self._identity, self._sequences, self._store.run.id, self._clock_ms(), publication, index, wire_hash
        )

    def _blob(self, name: str) -> web.StreamResponse:
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            raise _RefusedError(404, ReasonCode.MALFORMED, "a blob is named by 64 hex digits")
        path = self._store.blob(bytes.fromhex(name))
        if not path.exists():
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this blob is not here")
        return TimedFile(path, path.stat().st_size)

    def _challenge(self, request: web.BaseRequest) -> web.StreamResponse:
        nonce = request.query.get("nonce", "")
        if not re.fullmatch(r"[0-9a-f]{32}", nonce):
            raise _RefusedError(400, ReasonCode.MALFORMED, "a nonce is 32 hex digits")
        envelope = seal(
            self._identity,
            CHALLENGE_KIND,
            Challenge(bytes.fromhex(nonce)),
            run=self._store.run.id,
            sequence=self._sequences.next(CHALLENGE_KIND),
            issued_at=self._clock_ms(),
        )
        return _Answer(body=envelope.raw, headers=_BINARY)


def _integer(request: web.BaseRequest, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise _RefusedError(400, ReasonCode.MALFORMED, f"{name} is not a number")
    return int(text)


def _wait_s(request: web.BaseRequest) -> float:
    return min(_integer(request, "wait", 0), MAX_WAIT_MS) / 1000


def _after(request: web.BaseRequest) -> Key | None:
    text = request.query.get("after")
    if text is None:
        return None
    match = _AFTER.fullmatch(text)
    if match is None:
        raise _RefusedError(400, ReasonCode.MALFORMED, "after is not EPOCH.STEP")
    return int(match[1]), int(match[2])
