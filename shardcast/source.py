"""One source of weights, asked over HTTP. Everything it sends is bounded and nothing is believed here but a hash.

News, records and blobs go over the session that all sources share; wire shards over a connection of the source's own
(`pipeline`). Every failure is a `SourceError` that names the address and a reason code: unreachable, too slow,
oversize, truncated, wrong hash, a refusal. A source whose key the run's plan names (`passes.Parent`) is shown our pass,
and must stamp its shards (`stamps`).

Not covered: the origin's signatures (`publication`) and which source to ask for what (`schedule`, `follower`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp
from blake3 import blake3

from protocol.errors import DecodeError, ReasonCode
from protocol.limits import KIB, MAX_ENVELOPE_BYTES, MINIMUM_RATE_BYTES_S
from shardcast.addresses import Place, resolve
from shardcast.asks import Ask
from shardcast.errors import SourceError
from shardcast.limits import ANSWER_DEADLINE_S, CONNECT_DEADLINE_S, MAX_ANSWER_BYTES, PIECE_BYTES
from shardcast.passes import PASS_HEADER, Parent, Presenter
from shardcast.pipeline import Pipeline, Request, refusal
from shardcast.publication import Key, split_frames
from shardcast.rates import Bucket
from shardcast.records import ShardRecord
from shardcast.stamps import STAMP_HEADER, check_stamp
from shardcast.tls import check_pin, client_context, for_aiohttp, words_of

WRONG_PIN = "another certificate is shown there than the code or plan names"

_BY_HASH = "wire/"
"""Where servers have wire shards by their hash, so that caches may keep them."""


def new_session() -> aiohttp.ClientSession:
    """The session all sources share: keep-alive, no proxies, no cookies, no decompression behind our back."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=8.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=PIECE_BYTES,
        headers={"Accept-Encoding": "identity", "User-Agent": "headwater"},
        max_line_size=8 * KIB,
        max_field_size=8 * KIB,
    )


class Source:
    """Requests to one address for one run.

    Attributes:
        parent: who answers there, with our pass for it; replaced as passes are renewed.
        stamped_by: the key that must have stamped each shard; empty for the origin, and where none is known.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        parent: Parent | str,
        run: bytes,
        *,
        stamped_by: bytes = b"",
        presenter: Presenter | None = None,
        allow_private: bool = True,
        down: Bucket | None = None,
    ) -> None:
        """
        Args:
            down: limits the bytes of shards received, of all sources that share it.
            allow_private: addresses of private networks may be connected to: somebody typed it, or the run allows them.
        """
        self.parent = Parent(parent) if isinstance(parent, str) else parent
        self.address = self.parent.url
        self.stamped_by = stamped_by
        self._run = run
        self._session = session
        self._presenter = presenter
        parts = urlsplit(f"{self.address.rstrip('/')}/v1/{run.hex()}")
        self._host, self._path = parts.netloc, parts.path
        self._allow_private = allow_private
        self._down = down
        self._place: Place | None = None
        self._pipeline: Pipeline | None = None

    async def news(self, after: Key | None, wait_ms: int) -> list[bytes]:
        """Frames of the newest publication after `after`; empty when there was none within the wait."""
        query = "" if after is None else f"after={after[0]}.{after[1]}&"
        return await self._frames(f"news?{query}wait={wait_ms}", wait_ms)

    async def records(self, key: Key, start: int, wait_ms: int) -> list[bytes]:
        """Frames from `start` on of one publication; empty when none came within the wait."""
        return await self._frames(f"p/{key[0]}-{key[1]}/records?from={start}&wait={wait_ms}", wait_ms)

    async def head(self) -> bytes | None:
        """The newest head's envelope, unverified; None when the source has none."""
        return await self._small("head?wait=0", MAX_ENVELOPE_BYTES, 0) or None

    async def stats(self) -> dict[str, int]:
        """What the server says of itself: numbers by name. Empty when it says nothing we understand."""
        try:
            table = json.loads(await self._small("stats", 4 * KIB, 0))
        except (ValueError, RecursionError):
            return {}
        items = table.items() if isinstance(table, dict) else ()
        return {str(name)[:32]: value for name, value in items if type(value) is int}

    async def challenge(self, nonce: bytes) -> bytes:
        """The `challenge` envelope over a 16-byte nonce, unverified."""
        return await self._small(f"challenge?nonce={nonce.hex()}", MAX_ENVELOPE_BYTES, 0)

    async def blob(self, digest: bytes, limit: int) -> bytes:
        """A blob of at most `limit` bytes, verified."""
        data = await self._small(f"blob/{digest.hex()}", limit, 0)
        if blake3(data).digest() != digest:
            raise SourceError(self.address, f"blob {digest.hex()[:16]} has another hash", ReasonCode.SHARD_MISMATCH)
        return data

    # --- shards, over a connection of their own ---------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """Requests for shards; the connection is made with the first, and again after `stop`."""
        if self._pipeline is None:
            self._pipeline = Pipeline(self.address, self._connect, self._down)
        return self._pipeline

    def stop(self) -> None:
        """Let go of the connection for shards."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def forms(self, asks: Sequence[Ask], record: ShardRecord, key: Key) -> list[Ask]:
        """How these are asked for here, in the same order: of a cache first under the name that caches keep."""
        if not self.parent.cached:
            return list(asks)
        found = []
        for ask in asks:
            if ask.digest is not None:
                found.append(replace(ask, path=f"{_BY_HASH}{key[0]}-{key[1]}/{record.index}/{ask.digest.hex()}"))
            found.append(ask)
        return found

    def may_be_spoilt(self, ask: Ask) -> bool:
        """Whether what came may be a cache's doing: then the same source is asked past it."""
        return self.parent.cached and ask.path.startswith(_BY_HASH)

    def request(
        self,
        ask: Ask,
        record: ShardRecord,
        take: Callable[[memoryview], bool],
        done: Callable[[BaseException | None], None],
    ) -> Request:
        """A request for `pipeline`. A body of signed bytes must have the stamp of the source's key, if it has one."""

        def look(headers: dict[str, str]) -> None:
            if self.stamped_by and ask.digest is not None:
                check_stamp(headers.get(STAMP_HEADER.lower()), self._run, self.stamped_by, record, self.address)

        shown = self._presenter.header(self.parent) if self._presenter is not None else ""
        lines = [
            f"GET {self._path}/{ask.path} HTTP/1.1",
            f"Host: {self._host}",
            "Accept-Encoding: identity",
            "User-Agent: headwater",
            *([f"{PASS_HEADER}: {shown}"] if shown else []),
        ]
        return Request(
            name=f"shard {record.index}",
            head=("\r\n".join(lines) + "\r\n\r\n").encode("ascii"),
            limit=ask.limit,
            length=ask.length,
            digest=ask.digest,
            look=look,
            take=take,
            done=done,
            first_s=ANSWER_DEADLINE_S if ask.by_name else None,
        )

    async def shard(self, key: Key, record: ShardRecord) -> bytes:
        """The wire bytes of one shard.

        Raises:
            SourceError: refused, too slow, cut short, too long, not stamped, or with another hash.
            LieError: the relay's stamp is over other bytes than the origin signed.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[bytes] = loop.create_future()
        held = bytearray()

        def take(body: memoryview) -> bool:
            held.extend(body)
            return True

        def done(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, error)

        def settle(error: BaseException | None) -> None:
            if arrived.done():
                return
            if error is None:
                arrived.set_result(bytes(held))
            else:
                arrived.set_exception(error)

        ask = Ask(
            record.index,
            f"p/{key[0]}-{key[1]}/shard/{record.index}",
            record.wire_bytes,
            record.wire_bytes,
            record.wire_hash,
        )
        request = self.request(ask, record, take, done)
        self.pipeline.ask([request])
        deadline_s = CONNECT_DEADLINE_S + ANSWER_DEADLINE_S + record.wire_bytes / MINIMUM_RATE_BYTES_S
        try:
            async with asyncio.timeout(deadline_s):
                return await arrived
        except TimeoutError as exc:
            raise SourceError(self.address, f"{request.name}: no answer in time", ReasonCode.TOO_SLOW) from exc
        finally:
            request.cancel()

    # --- everything else, over the session -------------------------------------------------------------------------

    async def _frames(self, path: str, wait_ms: int) -> list[bytes]:
        data = await self._small(path, MAX_ANSWER_BYTES, wait_ms)
        try:
            return split_frames(data)
        except DecodeError as exc:
            raise SourceError(self.address, f"{path}: {exc}", exc.code) from exc

    async def _small(self, path: str, limit: int, wait_ms: int) -> bytes:
        """An answer of at most `limit` bytes; empty for 204."""
        async with self._get(path, wait_ms / 1000 + ANSWER_DEADLINE_S) as (response, deadline):
            if response.status == 204:
                return b""
            if (response.content_length or 0) > limit:
                raise SourceError(self.address, f"{path}: {response.content_length} bytes", ReasonCode.OVERSIZE)
            parts = []
            size = 0
            start = asyncio.get_running_loop().time()
            deadline.reschedule(start + ANSWER_DEADLINE_S)
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                size += len(piece)
                deadline.reschedule(start + ANSWER_DEADLINE_S + size / MINIMUM_RATE_BYTES_S)
                if size > limit:
                    raise SourceError(self.address, f"{path}: over {limit} bytes", ReasonCode.OVERSIZE)
                parts.append(piece)
            return b"".join(parts)

    @contextlib.asynccontextmanager
    async def _get(self, path: str, silence_s: float) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """One GET under a deadline, at first for connecting and the header. Who reads the body moves it, as that itself
        comes on: not for interim answers, trailers, or what is written around chunks."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S, sock_read=silence_s)
        deadline = asyncio.timeout(CONNECT_DEADLINE_S + silence_s)
        shown = self._presenter.header(self.parent) if self._presenter is not None else ""
        try:
            async with (
                deadline,
                self._session.get(
                    f"{await self._pinned_base()}/{path}",
                    timeout=timeout,
                    allow_redirects=False,
                    proxy=None,
                    headers={"Host": self._host, **({PASS_HEADER: shown} if shown else {})},
                    ssl=for_aiohttp(self.parent.pin),
                    server_hostname=self._place.host if self._place is not None and self._place.tls else None,
                ) as response,
            ):
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise SourceError(self.address, f"{path}: an encoding nobody asked for", ReasonCode.MALFORMED)
                if response.status not in (200, 204):
                    raise await self._refusal(path, response)
                yield response, deadline
        except TimeoutError as exc:
            self._place = None
            raise SourceError(self.address, f"{path}: no answer in time", ReasonCode.TOO_SLOW) from exc
        except aiohttp.ServerFingerprintMismatch as exc:
            raise SourceError(self.address, f"{path}: {WRONG_PIN}", ReasonCode.BAD_SIGNATURE) from exc
        except aiohttp.ClientPayloadError as exc:
            raise SourceError(self.address, f"{path}: the answer was cut short", ReasonCode.LENGTH_MISMATCH) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            self._place = None  # the name may stand for another address by now
            raise SourceError(self.address, f"{path}: {words_of(exc)}", ReasonCode.UNREACHABLE) from exc

    async def _refusal(self, path: str, response: aiohttp.ClientResponse) -> SourceError:
        """What the source said instead."""
        text = await response.content.read(1024)
        return refusal(self.address, path, response.status, response.headers.get("Retry-After", ""), text)

    async def _pinned_base(self) -> str:
        """Where requests go: the one IP address that the source's name stands for, once it was looked at.

        Raises:
            SourceError: there is no such name, or it leads where nobody may be sent.
        """
        if self._place is None:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                self._place = await asyncio.to_thread(resolve, self.parent.url, allow_private=self._allow_private)
        place = self._place
        host = f"[{place.ip}]" if ":" in place.ip else place.ip
        return f"{'https' if place.tls else 'http'}://{host}:{place.port}{self._path}"

    def _connect(self) -> socket.socket:
        """For `pipeline`: in its thread."""
        try:
            return connect(self.parent, self._place or resolve(self.parent.url, allow_private=self._allow_private))
        except OSError:
            self._place = None
            raise


def connect(parent: Parent, place: Place) -> socket.socket:
    """A connection to a source. Blocking.

    Raises:
        SourceError: another certificate is shown there than it must be.
        OSError: nobody answers there.
    """
    plain = socket.create_connection((place.ip, place.port), timeout=CONNECT_DEADLINE_S)
    if not place.tls:
        return plain
    try:
        wrapped = client_context(parent.pin).wrap_socket(plain, server_hostname=place.host)
    except BaseException:
        plain.close()
        raise
    try:
        check_pin(wrapped.getpeercert(binary_form=True), parent.pin, parent.url)
    except SourceError:
        wrapped.close()
        raise
    return wrapped


async def keep_polite(start: float) -> None:
    """A source that answers a long-poll at once with nothing is not asked again within a second of `start`."""
    await asyncio.sleep(max(0.0, start + 1.0 - time.monotonic()))
