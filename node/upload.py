"""Finished leases on their way to the coordinator (RULES 7).

A submission is written to disk before the first byte is sent and stays there until its receipt is on disk, so a
crash on either side loses nothing: the same lease and the same bytes bring the same receipt, whenever they arrive.

    PUT {ingress}/v1/{run}/submissions/{lease id}     header Headwater-Intent: base64 of an `intent` envelope

Not covered: TLS with a pinned key, resuming half an upload (it starts again; a lease bounds its size).
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import zstandard
from blake3 import blake3

from node.backoff import Backoff
from node.log import EventLog
from node.receipts import ReceiptStore, check_receipt
from protocol import codec
from protocol.control import Clock, http_failure_in_words, read_bounded
from protocol.envelope import Envelope, parse, seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.files import fsync_dir, write_atomic
from protocol.identity import Identity
from protocol.limits import MAX_ENVELOPE_BYTES, MINIMUM_RATE_BYTES_S, REQUEST_DEADLINE_S
from protocol.manifest import Run
from protocol.records import Receipt, Submission, UploadIntent
from protocol.sequences import Sequences

INTENT_HEADER = "Headwater-Intent"
INTENT_KIND = "intent"
COMPRESSION_LEVEL = 3
"""zstd level of submissions: proofs and log-probabilities are close to random, higher levels gain nothing."""

_compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
"""Made once: its tables cost more than a small submission. Used by the event loop's thread only."""

_FINAL = frozenset(
    {
        ReasonCode.LEASE_CLOSED,
        ReasonCode.UNKNOWN_LEASE,
        ReasonCode.NOT_OWNER,
        ReasonCode.CONFLICTING_SUBMISSION,
        ReasonCode.OVERSIZE,
        ReasonCode.SUSPENDED,
        ReasonCode.KEY_REVOKED,
    }
)
"""Refusals that sending again can't change."""

_DAMAGED = frozenset({ReasonCode.HASH_MISMATCH, ReasonCode.LENGTH_MISMATCH, ReasonCode.MALFORMED})
"""Refusals that a damaged transfer explains: tried three times."""

_DAMAGED_TRIES = 3

_OTHER_KEY = frozenset({ReasonCode.WRONG_AUDIENCE, ReasonCode.BAD_SIGNATURE})
"""Refusals that a changed coordinator key explains."""

TELL_FROM_S = 5.0
"""The person hears of a wait from this length on; the coordinator's usual "busy" is over in two."""


class UploadRefusedError(ProtocolError):
    """The coordinator will not take this submission; the node keeps the bytes in `submissions/refused`."""


def compress(submission: Submission) -> bytes:
    """The upload's bytes: one zstd frame that declares its content size."""
    return _compressor.compress(codec.encode(submission))


class Outbox:
    """Submissions without a receipt, one file a lease."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, lease_id: bytes) -> Path:
        return self._directory / f"{lease_id.hex()}.hws"

    def put(self, lease_id: bytes, blob: bytes) -> None:
        """Durable when this returns."""
        write_atomic(self._path(lease_id), blob, mode=0o600)

    def read(self, lease_id: bytes) -> bytes:
        return self._path(lease_id).read_bytes()

    def remove(self, lease_id: bytes) -> None:
        self._path(lease_id).unlink(missing_ok=True)

    def set_aside(self, lease_id: bytes) -> None:
        """Keep a refused submission where it isn't sent again."""
        path = self._path(lease_id)
        path.replace(self._directory / "refused" / path.name)
        fsync_dir(self._directory)

    def waiting(self) -> list[bytes]:
        """Lease ids of what a former process left, oldest first."""
        paths = sorted(self._directory.glob("*.hws"), key=lambda p: p.stat().st_mtime)
        return [bytes.fromhex(p.stem) for p in paths if len(p.stem) == 32]


class Uploader:
    """Sends what is in the outbox and keeps the receipts."""

    def __init__(
        self,
        *,
        run: Callable[[], Run],
        identity: Identity,
        sequences: Sequences,
        clock: Clock,
        ingress: Callable[[], str],
        outbox: Outbox,
        receipts: ReceiptStore,
        session: aiohttp.ClientSession,
        log: EventLog,
        on_receipt: Callable[[Envelope], None] = lambda envelope: None,
        on_refused: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            run: the run with its newest manifest; asked anew for every attempt.
            on_receipt: told of each receipt's envelope once it is on disk; it holds a promise about the whole ledger.
            on_refused: asked to look for a newer manifest, when an answer suggests that the coordinator's key changed.
        """
        self._run = run
        self._identity = identity
        self._sequences = sequences
        self._clock = clock
        self._ingress = ingress
        self.outbox = outbox
        self.receipts = receipts
        self._session = session
        self._log = log
        self._on_receipt = on_receipt
        self._on_refused = on_refused
        self._told_quota = False
        self.bytes_sent = 0
        """Bytes of submissions sent by this process, repeated attempts included."""
        self.waits_for = ""
        """Why a finished submission is not accepted yet, in words; empty when none waits."""

    async def send(self, lease_id: bytes) -> Receipt:
        """Send one submission until its receipt is on disk, however long the coordinator is away.

        Raises:
            UploadRefusedError: it will never be taken; the bytes were set aside.
        """
        blob = self.outbox.read(lease_id)
        digest = blake3(blob).digest()
        raw_length = zstandard.get_frame_parameters(blob).content_size
        intent = UploadIntent(lease_id=lease_id, length=len(blob), raw_length=raw_length, digest=digest)
        backoff, damaged = Backoff(), 0
        while True:
            wait_s = 0.0
            try:
                raw = await self._put(intent, blob)
                receipt = check_receipt(
                    raw, run=self._run(), owner=self._identity.public, lease_id=lease_id, digest=digest
                )
            except _LaterError as later:
                reason, wait_s = str(later), later.wait_s
                self._tell_later(later)
            except UploadRefusedError as exc:
                damaged += exc.code in _DAMAGED
                if exc.code in _FINAL or damaged >= _DAMAGED_TRIES:
                    self.outbox.set_aside(lease_id)
                    self._log.event(
                        "upload.refused", level="warning", lease=lease_id, code=exc.code.value, reason=str(exc)
                    )
                    raise
                reason = f"{exc.code.value}: {exc}"
                if exc.code in _OTHER_KEY and self._on_refused is not None:
                    await self._on_refused()
            except ProtocolError as exc:
                reason = f"the receipt does not hold: {exc}"
                if self._on_refused is not None:
                    await self._on_refused()
            else:
                self.receipts.keep(lease_id, raw)
                self.outbox.remove(lease_id)
                self.waits_for, self._told_quota = "", False
                self._log.event("upload.receipt", lease=lease_id, index=receipt.index, bytes=len(blob))
                self._on_receipt(parse(raw))
                return receipt
            self._log.event("upload.retry", lease=lease_id, reason=reason, wait_s=wait_s)
            await backoff.wait(wait_s)

    def _tell_later(self, later: _LaterError) -> None:
        """A quota or a full spool is the coordinator's decision, so the person hears of it, once."""
        if later.code is None:
            return
        wait = f"; asked again in {later.wait_s:.0f} s" if later.wait_s else ""
        self.waits_for = f"room for a finished submission ({later})"
        if not self._told_quota and later.code in (ReasonCode.QUOTA, ReasonCode.BUSY) and later.wait_s >= TELL_FROM_S:
            self._told_quota = True
            self._log.say(f"the coordinator takes no upload for now ({later}){wait}. Nothing is lost: it waits on disk")

    async def _put(self, intent: UploadIntent, blob: bytes) -> bytes:
        """One attempt: the receipt's bytes.

        Raises:
            UploadRefusedError: refused with a reason. _LaterError: not reached, or asked to come back later.
        """
        run = self._run()
        envelope = seal(
            self._identity,
            INTENT_KIND,
            intent,
            run=run.id,
            sequence=self._sequences.next(INTENT_KIND),
            issued_at=self._clock.now_ms(),
            audience=run.manifest.coordinator,
        )
        url = f"{self._ingress()}/v1/{run.id.hex()}/submissions/{intent.lease_id.hex()}"
        headers = {
            INTENT_HEADER: base64.b64encode(envelope.raw).decode("ascii"),
            "Content-Type": "application/octet-stream",
        }
        deadline = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S + len(blob) / MINIMUM_RATE_BYTES_S)
        try:
            async with self._session.put(
                url, data=blob, headers=headers, timeout=deadline, allow_redirects=False
            ) as reply:
                self.bytes_sent += len(blob)
                body = await read_bounded(reply.content, MAX_ENVELOPE_BYTES)
                status, retry_after = reply.status, reply.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise _LaterError(f"{url} was not reached: {http_failure_in_words(exc)}") from exc
        if status == 200:
            return body
        code, message = read_refusal(body, status)
        if retry_after:
            seconds = int(retry_after) if retry_after.isdecimal() and len(retry_after) <= 6 else 1
            raise _LaterError(f"{code.value}: {message}", float(seconds), code)
        raise UploadRefusedError(f"{message} (HTTP {status})", code)


def read_refusal(body: bytes, status: int) -> tuple[ReasonCode, str]:
    """Code and message of a refusal, JSON `{"code", "message"}`. Total: anything else reads as `internal`."""
    try:
        fields = json.loads(body)
        return ReasonCode(fields["code"]), str(fields["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ReasonCode.INTERNAL, f"HTTP {status} without a reason"


class _LaterError(Exception):
    """Not now; try again after `wait_s` seconds or more."""

    def __init__(self, message: str, wait_s: float = 0.0, code: ReasonCode | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.code = code
        """The coordinator's reason; None when it was not reached."""


async def settle(tasks: set[asyncio.Task[None]], deadline_s: float) -> None:
    """Give running uploads a last chance; what remains stays on disk for the next start."""
    if tasks:
        await asyncio.wait(tasks, timeout=deadline_s)
    for task in tasks:
        task.cancel()
