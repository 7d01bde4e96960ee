"""One source of weights, asked over HTTP. Everything it sends is bounded and nothing is believed here but a hash.

Every failure is a `SourceError` that names the address and a reason code: unreachable, too slow, oversize,
truncated, wrong hash, a refusal. `SourceHealth` remembers how a source behaved; `choose` picks between two.
A source whose key the run's plan names (`passes.Parent`) is shown our pass, and must stamp its shards (`stamps`).

Not covered: the origin's signatures (`publication`) and which source to ask for what (`download`, `follower`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import aiohttp
from blake3 import blake3

from protocol.errors import DecodeError, ReasonCode
from protocol.limits import KIB, MAX_ENVELOPE_BYTES, MINIMUM_RATE_BYTES_S
from shardcast.errors import LieError, SourceError, StoreError
from shardcast.limits import (
    ANSWER_DEADLINE_S,
    CONNECT_DEADLINE_S,
    MAX_ANSWER_BYTES,
    PIECE_BYTES,
    STALL_S,
)
from shardcast.passes import PASS_HEADER, Parent, Presenter
from shardcast.publication import Key, split_frames
from shardcast.records import ShardRecord
from shardcast.stamps import STAMP_HEADER, check_stamp

_MAX_PENALTY_S = 30.0
_MAX_ABSENCE_S = 5.0
_FIRST_PENALTY_S = 0.25


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


@dataclass
class SourceHealth:
    """How one source behaved, by its address."""

    address: str
    rate: float = 4.0 * 1024 * 1024
    """Bytes per second, moving average."""
    failures: int = 0
    """In a row."""
    in_flight: int = 0
    resting_until: float = 0.0
    """Monotonic time before which it is not asked again."""
    last_error: SourceError | None = None
    lied: bool = False
    """It validly signed a wrong hash: it is never asked again."""

    def worked(self, bytes_received: int, seconds: float) -> None:
        self.failures = 0
        if bytes_received:
            self.rate += 0.3 * (bytes_received / max(seconds, 1e-4) - self.rate)

    def failed(self, error: SourceError) -> None:
        """Rest for a time that doubles with each failure in a row: up to 5 s when it could not answer, up to 30 s
        when what it sent was wrong. Not having something is no failure."""
        self.last_error = error
        self.lied = self.lied or isinstance(error, LieError)
        if self.lied:
            penalty = math.inf
        elif error.code == ReasonCode.RECORD_MISSING:
            penalty = _FIRST_PENALTY_S
        else:
            self.failures += 1
            slow = error.code in (ReasonCode.UNREACHABLE, ReasonCode.TOO_SLOW)
            limit = _MAX_ABSENCE_S if slow else _MAX_PENALTY_S
            penalty = min(limit, _FIRST_PENALTY_S * 2.0 ** min(self.failures - 1, 10))
        self.resting_until = time.monotonic() + penalty * random.uniform(0.7, 1.3)

    @property
    def load(self) -> float:
        """Lower is better: requests in flight over what the source delivers."""
        return (self.in_flight + 1) / (self.rate * 0.5 ** min(self.failures, 20))


def choose(candidates: Sequence[SourceHealth]) -> SourceHealth:
    """Power of two choices: the better of two random candidates (at least one is given)."""
    if len(candidates) == 1:
        return candidates[0]
    first, second = random.sample(candidates, 2)
    return first if first.load <= second.load else second


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
    ) -> None:
        self.parent = Parent(parent) if isinstance(parent, str) else parent
        self.address = self.parent.url
        self.stamped_by = stamped_by
        self._run = run
        self._session = session
        self._presenter = presenter
        self._base = f"{self.address.rstrip('/')}/v1/{run.hex()}"

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

    async def shard(self, key: Key, record: ShardRecord, write: Callable[[int, bytes], None]) -> int:
        """Stream one shard into `write(offset, piece)`, hashing on the way; returns the bytes received.

        The bytes given to `write` are verified only once this returns.

        Raises:
            SourceError: refused, too slow, cut short, too long, not stamped, or with another hash.
            LieError: the relay's stamp is over other bytes than the origin signed.
        """
        path = f"p/{key[0]}-{key[1]}/shard/{record.index}"
        seconds = ANSWER_DEADLINE_S + record.wire_bytes / MINIMUM_RATE_BYTES_S
        hasher = blake3()
        got = 0
        now = asyncio.get_running_loop().time
        async with self._get(path, silence_s=STALL_S, total_s=seconds) as response:
            self._check_shard_header(response, record)
            _watch_silence_ourselves(response)
            armed = now()
            async with asyncio.timeout_at(armed + STALL_S) as stall:
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    if got + len(piece) > record.wire_bytes:
                        raise SourceError(self.address, f"shard {record.index} is too long", ReasonCode.OVERSIZE)
                    hasher.update(piece)
                    try:
                        write(got, piece)
                    except OSError as exc:
                        raise StoreError(f"cannot store a shard: {exc}; free some space or repair the disk") from exc
                    got += len(piece)
                    if (arrived := now()) - armed > STALL_S / 4:
                        armed = arrived
                        stall.reschedule(arrived + 1.25 * STALL_S)
        if got != record.wire_bytes:
            raise SourceError(
                self.address, f"shard {record.index} was cut after {got} bytes", ReasonCode.LENGTH_MISMATCH
            )
        if hasher.digest() != record.wire_hash:
            raise SourceError(
                self.address, f"shard {record.index} has another hash than the origin signed", ReasonCode.SHARD_MISMATCH
            )
        return got

    def _check_shard_header(self, response: aiohttp.ClientResponse, record: ShardRecord) -> None:
        """What is said of a shard before its bytes: the relay's stamp, and its length."""
        if self.stamped_by:
            check_stamp(response.headers.get(STAMP_HEADER), self._run, self.stamped_by, record, self.address)
        length = response.content_length
        if length != record.wire_bytes:
            code = ReasonCode.OVERSIZE if length is None or length > record.wire_bytes else ReasonCode.LENGTH_MISMATCH
            raise SourceError(self.address, f"shard {record.index} of {length} bytes, not {record.wire_bytes}", code)

    async def _frames(self, path: str, wait_ms: int) -> list[bytes]:
        data = await self._small(path, MAX_ANSWER_BYTES, wait_ms)
        try:
            return split_frames(data)
        except DecodeError as exc:
            raise SourceError(self.address, f"{path}: {exc}", exc.code) from exc

    async def _small(self, path: str, limit: int, wait_ms: int) -> bytes:
        """An answer of at most `limit` bytes; empty for 204."""
        silence_s = wait_ms / 1000 + ANSWER_DEADLINE_S
        total_s = silence_s + limit / MINIMUM_RATE_BYTES_S
        async with self._get(path, silence_s=silence_s, total_s=total_s) as response:
            if response.status == 204:
                return b""
            if (response.content_length or 0) > limit:
                raise SourceError(self.address, f"{path}: {response.content_length} bytes", ReasonCode.OVERSIZE)
            parts = []
            size = 0
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                size += len(piece)
                if size > limit:
                    raise SourceError(self.address, f"{path}: over {limit} bytes", ReasonCode.OVERSIZE)
                parts.append(piece)
            return b"".join(parts)

    @contextlib.asynccontextmanager
    async def _get(self, path: str, *, silence_s: float, total_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """One GET with deadlines: to connect, while nothing arrives, and in all."""
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_DEADLINE_S, sock_read=silence_s)
        shown = self._presenter.header(self.parent) if self._presenter is not None else ""
        try:
            async with self._session.get(
                f"{self._base}/{path}",
                timeout=timeout,
                allow_redirects=False,
                proxy=None,
                headers={PASS_HEADER: shown} if shown else None,
            ) as response:
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise SourceError(self.address, f"{path}: an encoding nobody asked for", ReasonCode.MALFORMED)
                if response.status not in (200, 204):
                    raise await self._refusal(path, response)
                yield response
        except TimeoutError as exc:
            raise SourceError(self.address, f"{path}: no answer in time", ReasonCode.TOO_SLOW) from exc
        except aiohttp.ClientPayloadError as exc:
            raise SourceError(self.address, f"{path}: the answer was cut short", ReasonCode.LENGTH_MISMATCH) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise SourceError(self.address, f"{path}: {type(exc).__name__}: {exc}", ReasonCode.UNREACHABLE) from exc

    async def _refusal(self, path: str, response: aiohttp.ClientResponse) -> SourceError:
        """What the source said instead; its words are quoted, bounded, never acted on."""
        text = await response.content.read(1024)
        try:
            table = json.loads(text)
            message = str(table["message"])[:500] if isinstance(table, dict) else ""
        except (ValueError, KeyError, RecursionError):
            message = ""
        code = {404: ReasonCode.RECORD_MISSING, 403: ReasonCode.NOT_GRANTED}.get(
            response.status, ReasonCode.UNREACHABLE
        )
        return SourceError(self.address, f"{path}: answered {response.status} {message!r}", code)


def _watch_silence_ourselves(response: aiohttp.ClientResponse) -> None:
    """From here on aiohttp sets no timer anew at every arrival, which costs as much as storing what arrived."""
    connection = response.connection  # None once all of a short body is here
    if connection is not None and connection.protocol is not None:
        connection.protocol.read_timeout = None


async def keep_polite(start: float) -> None:
    """A source that answers a long-poll at once with nothing is not asked again within a second of `start`."""
    await asyncio.sleep(max(0.0, start + 1.0 - time.monotonic()))
