"""The HTTP side of a store: heads and news by long-poll, shards by sendfile. Origin and relay serve the same.

    GET /v1/{run}/head?after=E.S&wait=MS        newest head envelope; 204 when none is newer within the wait
    GET /v1/{run}/news?after=E.S&wait=MS        frames of the newest publication after E.S, also while it is made
    GET /v1/{run}/p/{E}-{S}/records?from=N&wait=MS   frames N.. of one publication; 204 when none came
    GET /v1/{run}/p/{E}-{S}/open | manifest     one envelope
    GET /v1/{run}/p/{E}-{S}/shard/{I}?wait=MS   bytes of a shard that was verified here, or is within the wait
    GET /v1/{run}/p/{E}-{S}/state/{I}?old=HASH  a frame of the shard after it, from the one with that state hash or from
                                                nothing (`states`); also ?wait=MS
    GET /v1/{run}/wire/{E}-{S}/{I}/{HASH}       the same bytes by their BLAKE3: caches may keep them for ever
    GET /v1/{run}/blob/{HASH}                   layout or model file; caches may keep it
    GET /v1/{run}/share                         envelope of the share, where one is served; also /v1/share
    GET /v1/{run}/challenge?nonce=HEX           `challenge` envelope signed with this process's identity
    GET /v1/{run}/stats                         JSON: bytes sent, children, lag, stamps; for people, not evidence

Security: everything is read-only; all path parts are integers or hashes; a connection without a whole request
header is closed after 10 s, a receiver below 16 KiB/s is cut, connections are capped in total and per address (`gate`).
With a `PassCheck`, only children that show a pass for this server get more than a head, a challenge or stats. `Terms`
add limits of bytes, a list of those who are served, and TLS. What a cache may keep carries no stamp: nobody is to be
blamed by our signature for what a cache made of it.

Not covered: single ranges (the whole is sent; shards are small) and what lies behind a proxy: it has one address.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from protocol.envelope import seal
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode, UsageError
from protocol.identity import Identity
from protocol.limits import HEADER_DEADLINE_S
from protocol.sequences import Sequences
from shardcast.allow import KeyCheck
from shardcast.gate import CappedServer, listen, refusal
from shardcast.heads import replace_file
from shardcast.limits import MAX_FEED_BYTES, MAX_WAIT_MS
from shardcast.passes import MAX_SHOWN_CHARS, PASS_HEADER
from shardcast.publication import Key, pack_frames
from shardcast.records import CHALLENGE_KIND, Challenge, ShardRecord
from shardcast.sending import BINARY, Answer, TimedFile
from shardcast.stamps import STAMP_HEADER, make_stamp
from shardcast.states import StateMaker
from shardcast.stats import SAVE_S, Counters
from shardcast.store import Feed, Store
from shardcast.terms import OPEN_TERMS, Terms

log = logging.getLogger("shardcast.server")

Clock = Callable[[], int]
"""Milliseconds since the epoch, in corrected time where there is one."""

_PLACE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_AFTER = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")


_REMEMBERED_USES = 1024
"""Publications whose last request is remembered. More than any store keeps at once."""


def wall_clock_ms() -> int:
    """This machine's clock; nodes pass their corrected one instead."""
    return time.time_ns() // 1_000_000


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"listen address {text!r} is not HOST:PORT, e.g. 127.0.0.1:0")
    return host.strip("[]"), int(port)


_FOR_EVER = "public, max-age=31536000, immutable"
"""Bytes named by their hash never change: browsers' and caches' word for it."""


class Admission(Protocol):
    """Decides who a request comes from (`passes.PassCheck`, `allow.KeyCheck`)."""

    def child(self, header: str, address: str) -> str | bytes:
        """A key, or an address. Raises EnvelopeError(`not-granted`)."""


class _RefusedError(Exception):
    """An answer other than 200, raised inside a handler."""

    def __init__(self, status: int, code: ReasonCode, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


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
        passes: Admission | None = None,
        stamped: bool = False,
        terms: Terms = OPEN_TERMS,
        missing: Callable[[Key], float] = lambda key: 0.0,
    ) -> None:
        """
        Args:
            passes: whom to serve; None serves everybody.
            stamped: sign which bytes are sent, as relays do.
            terms: limits of what is served, whom, and over what. Its list, if there is one, counts instead of passes.
            missing: told that a child asked for a publication that is not here; seconds it may wait, 0 when in vain.
        """
        self._missing = missing
        allow = terms.allow
        self._passes = KeyCheck(allow, store.run.id, identity.public, clock_ms) if allow is not None else passes
        self._terms = terms
        self._last_use: dict[Key, float] = {}
        """Publication -> monotonic time of the last request for its bytes."""
        self._stamped = stamped
        self.states: StateMaker | None = None
        """Makes states; whoever owns the store sets it."""
        self._store = store
        self._identity = identity
        self._sequences = sequences
        self._listen = listen
        self._clock_ms = clock_ms
        self._prefix = f"/v1/{store.run.id.hex()}/"
        self._runner: web.ServerRunner | None = None
        self._listener: asyncio.Server | None = None
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
        server = CappedServer(self._handle, keepalive_timeout=HEADER_DEADLINE_S, access_log=None, lingering_time=1.0)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            certificate = self._terms.certificate
            self._listener = await listen(server, host, port, certificate.context if certificate is not None else None)
        except OSError as exc:
            await runner.cleanup()
            raise UsageError(
                f"cannot listen on {self._listen}: {exc.strerror}; stop the program that uses it or choose another port"
            ) from exc
        self._runner = runner
        bound = self._listener.sockets[0].getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url = f"http{'s' if certificate is not None else ''}://{name}:{bound[1]}"
        replace_file(self._store.root / "server.json", json.dumps({"url": self.url, "pid": os.getpid()}).encode())
        self._saver = asyncio.create_task(self._save_counters())

    async def close(self) -> None:
        if self._saver is not None:
            self._saver.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._save()
            (self._store.root / "server.json").unlink(missing_ok=True)

    async def _save_counters(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self._save()

    def _save(self) -> None:
        """Keep the numbers. They are for people: a disk that is full must not hide, at `close`, whom it stopped."""
        try:
            self.counters.save()
            if self._terms.quota is not None:
                self._terms.quota.save()
        except OSError as exc:
            log.warning("what was sent could not be noted down: %s", exc)

    def in_use(self, key: Key) -> bool:
        """Whether somebody is downloading a publication, as far as can be seen: it must not be removed now."""
        return time.monotonic() - self._last_use.get(key, -1e9) < self._terms.in_use_s

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = None
        try:
            answer = await self._answer(request)
            if self._terms.quota is not None:
                self._terms.quota.count(request.remote or "", answer.content_length or 0)
            return answer
        except _RefusedError as said:
            status, code, message, headers = said.status, said.code, str(said), said.headers
        except (ProtocolError, OSError) as exc:
            log.error("%s: %s", request.path, exc)
            code = exc.code if isinstance(exc, ProtocolError) else ReasonCode.RECORD_MISSING
            status, code, message = 500, code, "the publication is damaged here; ask another source"
        return refusal(status, code, message, headers)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "GET":
            raise _RefusedError(405, ReasonCode.WRONG_KIND, "only GET is served here")
        if "," in request.headers.get("Range", ""):
            raise _RefusedError(
                416, ReasonCode.MALFORMED, "several ranges in one request are not served; ask one by one"
            )
        if self._terms.allow is not None:
            self._admit(request)
        path = request.path
        if path == "/v1/share":
            return self._share()
        if not path.startswith(self._prefix):
            raise _RefusedError(404, ReasonCode.WRONG_RUN, "another run is served here")
        parts = path[len(self._prefix) :].split("/")
        match parts:
            case ["head"]:
                return await self._head(request)
            case ["challenge"]:
                return self._challenge(request)
            case ["stats"]:
                return web.json_response(self.counters.table(), headers={"Cache-Control": "no-store"})
            case ["share"]:
                return self._share()
        who = self._admit(request)
        self._within_quota(request)
        if parts[-2:-1] in (["shard"], ["state"]) or parts[0] == "wire" or _wait_s(request):
            self.counters.child(who)  # not those who only look whether their first parent withholds something
        match parts:
            case ["news"]:
                return await self._news(request)
            case ["p", place, "records"]:
                return await self._records(request, await self._feed_or_wait(place))
            case ["p", place, "open"]:
                return self._from_memory(self._feed(place).frames[0])
            case ["p", place, "manifest"]:
                feed = self._feed(place)
                if not feed.complete:
                    raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this publication has no manifest yet")
                return self._from_memory(feed.frames[-2])
            case ["p", place, "shard", index]:
                return self._shard(await self._shard_or_wait(request, place, index), index)
            case ["p", place, "state", index]:
                return await self._state(request, await self._shard_or_wait(request, place, index), index)
            case ["wire", place, index, name]:
                return self._wire(self._feed(place), index, name)
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

    def _within_quota(self, request: web.BaseRequest) -> None:
        quota = self._terms.quota
        wait_s = quota.wait_s(request.remote or "") if quota is not None else 0
        if wait_s:
            self.counters.refused += 1
            raise _RefusedError(
                429,
                ReasonCode.QUOTA,
                "your network has had what this server gives a network a day; ask another source, or come back later",
                {"Retry-After": str(wait_s)},
            )

    def _share(self) -> web.StreamResponse:
        if self._terms.share is None:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "a run is served here, no share; use its manifest")
        return self._from_memory(self._terms.share())

    def _from_memory(self, body: bytes) -> Answer:
        answer = Answer(body=body, headers=BINARY)
        answer.up = self._terms.up
        return answer

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
                return self._from_memory(self._store.head)
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

    def _frames(self, feed: Feed, start: int) -> Answer:
        chosen = []
        size = 0
        for frame in self._store.frames_of(feed)[start:]:
            chosen.append(frame)
            size += len(frame) + 4
            if size > MAX_FEED_BYTES:
                break
        return self._from_memory(pack_frames(chosen))

    async def _shard_or_wait(self, request: web.BaseRequest, place: str, index_text: str) -> Feed:
        """The feed of a shard, once the shard is verified here or the wait that was asked for is over."""
        feed = self._feed(place)
        deadline = time.monotonic() + _wait_s(request)
        while not (feed.complete or feed.gone) and index_text.isdecimal() and _index(index_text) not in feed.shards:
            if not await self._store.changed(max(0.0, deadline - time.monotonic())):
                break
        return feed

    def _record(self, feed: Feed, index_text: str) -> ShardRecord:
        """The record of a shard that is here and may be sent: counted as such."""
        record = self._here(feed, index_text)
        self.counters.sent(record.wire_bytes, record.raw_bytes)
        return record

    def _here(self, feed: Feed, index_text: str) -> ShardRecord:
        """The record of a shard that is here. Raises _RefusedError."""
        index = _index(index_text)
        if feed.gone or index not in feed.shards:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this shard is not here, or not yet")
        record = feed.shards[index]
        self._last_use[feed.key] = time.monotonic()
        while len(self._last_use) > _REMEMBERED_USES:
            del self._last_use[next(iter(self._last_use))]
        return record

    async def _state(self, request: web.BaseRequest, feed: Feed, index_text: str) -> web.StreamResponse:
        """A shard's state as a frame that we make: nobody signed it, its receiver compares the state hash."""
        record = self._here(feed, index_text)
        old = request.query.get("old", "0" * 64)
        if not re.fullmatch(r"[0-9a-f]{64}", old):
            raise _RefusedError(400, ReasonCode.MALFORMED, "old is a state hash of 64 hex digits")
        if self.states is not None and self.states.busy:
            raise _RefusedError(503, ReasonCode.TOO_SLOW, "too many ask for states here; ask another source")
        made = await self.states.frame(feed.key, record.index, bytes.fromhex(old)) if self.states is not None else None
        if made is None:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "this state can't be made here; ask another source")
        answer = TimedFile(*made, BINARY, self._terms.up)
        self.counters.sent(made[1], record.raw_bytes)
        return answer

    def _shard(self, feed: Feed, index_text: str) -> web.StreamResponse:
        return self.shard(feed, self._record(feed, index_text))

    def _wire(self, feed: Feed, index_text: str, name: str) -> web.StreamResponse:
        """A shard's bytes by their hash: for caches, so without a stamp, and only if it is that hash."""
        index = _index(index_text)
        if index not in feed.shards or feed.shards[index].wire_hash.hex() != name:
            raise _RefusedError(404, ReasonCode.RECORD_MISSING, "no shard with this hash is here, or not yet")
        record = self._record(feed, index_text)
        path = self._store.shard_path(feed.key, record.index)
        return TimedFile(path, record.wire_bytes, _for_ever(name), self._terms.up)

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        """The answer that carries one shard."""
        headers = BINARY
        if self._stamped:
            headers = {**BINARY, STAMP_HEADER: self._stamp(feed, record)}
        path = self._store.shard_path(feed.key, record.index)
        return TimedFile(path, record.wire_bytes, headers, self._terms.up)

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
        return TimedFile(path, path.stat().st_size, _for_ever(name), self._terms.up)

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
        return self._from_memory(envelope.raw)


def _index(text: str) -> int:
    """A shard's index; -1 for what is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 7 else -1


def _for_ever(name: str) -> dict[str, str]:
    """Headers of bytes that are named by their hash."""
    return {**BINARY, "Cache-Control": _FOR_EVER, "ETag": f'"{name}"'}


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
