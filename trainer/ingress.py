"""The coordinator's HTTP door (RULES 7): submissions in, jobs out, and the control messages of who has no libp2p.

    PUT  /v1/{run}/submissions/{lease}   header Headwater-Intent: base64 of the `intent` envelope; answers a `receipt`
    GET  /v1/{run}/jobs/{job}            header Headwater-Token: hex; answers the compressed submission
    POST /v1/{run}/{kind}                the same envelopes as over libp2p
    GET  /v1/{run}/manifest              the genesis manifest's envelope
    GET  /v1/{run}/updates               what changed it since: u32 length + envelope, repeated
    GET  /v1/{run}/consistency?first=&second=   proof that the ledger only grew

Before the first body byte: signature, owner, length, quotas. Then bytes to a spool file at no less than 16 KiB/s, hash,
fsync, ledger, receipt, in this order. Refusals are JSON {code, message} with Retry-After where another try makes sense.

Not covered: TLS (a reverse proxy's, or a later version's), what is in a submission (never opened here).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from blake3 import blake3

from protocol import draws
from protocol.admission import address_group
from protocol.chain import pack_updates
from protocol.control import ControlServer
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import EnvelopeError, HeadwaterError, ProtocolError, ReasonCode
from protocol.files import fsync_dir, write_atomic
from protocol.lease_rules import answer_bound
from protocol.limits import (
    KIB,
    MAX_ATTACHMENT_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_INTENT_BYTES,
    MIB,
    MINIMUM_RATE_BYTES_S,
)
from protocol.records import Receipt, UploadIntent
from protocol.state import LeaseState
from shardcast.sending import TimedFile
from trainer import batches, leases
from trainer.book import Book
from trainer.config import IngressSection
from trainer.door import header_arrived
from trainer.errors import UploadError
from trainer.judging import Judging
from trainer.members import Members
from trainer.quotas import Spool, SpoolLimits

INTENT_KIND = "intent"
RECEIPT_KIND = "receipt"
INTENT_HEADER = "Headwater-Intent"
TOKEN_HEADER = "Headwater-Token"  # noqa: S105  (a header's name)

RATE_GRACE_S = 10.0
"""Seconds an upload may take whatever its size, before the minimum rate counts."""

DISK_RESERVE_BYTES = 256 * MIB
"""Free space uploads may not touch: the ledger needs it to say what happened."""

MAX_CONFLICTS_KEPT = 4
"""Intents kept as evidence when one lease is answered with other bytes."""

_STATUS = {
    ReasonCode.UNKNOWN_LEASE: 404,
    ReasonCode.UNKNOWN_JOB: 404,
    ReasonCode.NOT_OWNER: 403,
    ReasonCode.SUSPENDED: 403,
    ReasonCode.BAD_SIGNATURE: 401,
    ReasonCode.EXPIRED: 401,
    ReasonCode.WRONG_RUN: 404,
    ReasonCode.OVERSIZE: 413,
    ReasonCode.LEASE_CLOSED: 410,
    ReasonCode.CONFLICTING_SUBMISSION: 409,
    ReasonCode.LEDGER_BROKEN: 500,
    ReasonCode.INTERNAL: 500,
    ReasonCode.KEY_REVOKED: 403,
}
_BYTES = "application/octet-stream"
_UNKNOWN = ReasonCode.RECORD_MISSING


@dataclass
class Ingress:
    """Handlers of the HTTP door, and what is arriving through it."""

    book: Book
    judging: Judging
    control: ControlServer
    files: batches.Files
    settings: IngressSection
    members: Members
    spool: Spool = field(init=False)
    _conflicts: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Lease -> digests of the other answers kept as evidence."""

    def __post_init__(self) -> None:
        limits = self.settings
        self.spool = Spool(
            SpoolLimits(
                limits.spool_bytes,
                min(limits.spool_bytes, limits.spool_bytes_per_key),
                min(limits.spool_bytes, limits.spool_bytes_per_address),
                limits.uploads_per_address,
            )
        )

    @property
    def uploading(self) -> set[bytes]:
        """Leases whose body is arriving."""
        return self.spool.uploading

    def application(self) -> web.Application:
        """The aiohttp application; bodies are streamed by the handlers, bounded by them."""
        app = web.Application(middlewares=[self._refusals], client_max_size=MAX_ENVELOPE_BYTES + MAX_ATTACHMENT_BYTES)
        prefix = f"/v1/{self.book.run.id.hex()}"
        app.router.add_put(prefix + "/submissions/{lease:[0-9a-f]{32}}", self._put)
        app.router.add_get(prefix + "/jobs/{job:[0-9a-f]{32}}", self._job)
        app.router.add_get(prefix + "/manifest", self._manifest)
        app.router.add_get(prefix + "/updates", self._updates)
        app.router.add_get(prefix + "/consistency", self._consistency)
        app.router.add_post("/v1/{run:[0-9a-f]{64}}/{kind:[a-z.]{1,32}}", self.control.handle_http)
        return app

    def leases_uploading(self) -> frozenset[bytes]:
        return frozenset(self.uploading)

    # --- submissions ----------------------------------------------------------------------------------------------

    async def _put(self, request: web.Request) -> web.StreamResponse:
        """Take one upload. Idempotent: the same lease and hash again is answered with the same entry's receipt."""
        envelope, intent = self._read_intent(request)
        held = self._owned_lease(envelope, intent, request)
        if held.submission is not None:
            await self._settle_repeat(held, envelope, intent)
            return await self._receipt(held, envelope.signer)
        self._check_open(held, intent, request)
        if self.book.now_ms() > leases.ends_at(self.book.window, held):
            # An upload on its way keeps its lease open; begun again and again it would keep it open for ever.
            raise ProtocolError("this lease's time is over", ReasonCode.LEASE_CLOSED)
        address = address_group(request.remote or "")
        with self._place(held, intent.length, address):
            part = await self._spool(request, held.lease_id, intent)
            try:
                self._check_open(held, intent, request)
                await asyncio.to_thread(_keep, part, self.files.submission(held.lease_id))
            finally:
                part.unlink(missing_ok=True)
            try:
                self._check_open(held, intent, request)
            except HeadwaterError:  # closed while the file was being made durable, or the run ended
                self.files.submission(held.lease_id).unlink(missing_ok=True)
                raise
            index = self.judging.enter(envelope.raw)
        self.book.log.event(
            "submission", node=held.owner, lease=held.lease_id, step=held.lease.step, index=index,
            bytes=intent.length,
        )  # fmt: skip
        return await self._receipt(held, envelope.signer)

    def _read_intent(self, request: web.Request) -> tuple[Envelope, UploadIntent]:
        text = request.headers.get(INTENT_HEADER, "")
        if not text or len(text) > 4 * (MAX_INTENT_BYTES // 3 + 1):
            raise UploadError(400, f"{INTENT_HEADER} is missing or over {MAX_INTENT_BYTES} bytes", ReasonCode.MALFORMED)
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise UploadError(400, f"{INTENT_HEADER} is not base64", ReasonCode.MALFORMED) from exc
        envelope = open_envelope(
            raw,
            run=self.book.run.id,
            kind=INTENT_KIND,
            now=self.book.now_ms(),
        )
        if envelope.audience not in (b"", *self.book.coordinators()):  # signed before our key changed is fine
            raise EnvelopeError("addressed to somebody else", ReasonCode.WRONG_AUDIENCE)
        self.members.check_key(envelope.signer)
        return envelope, envelope.record(UploadIntent)

    def _owned_lease(self, envelope: Envelope, intent: UploadIntent, request: web.Request) -> LeaseState:
        held = self.book.state.leases.get(intent.lease_id)
        if held is None or request.match_info["lease"] != intent.lease_id.hex():
            raise ProtocolError("no lease has this id, or the path names another one", ReasonCode.UNKNOWN_LEASE)
        if held.owner != envelope.signer:
            raise ProtocolError("this lease belongs to another node", ReasonCode.NOT_OWNER)
        return held

    async def _settle_repeat(self, held: LeaseState, envelope: Envelope, intent: UploadIntent) -> None:
        """An upload for a lease that has one: the same bytes are fine, others are refused and kept as evidence."""
        assert held.submission is not None
        if self.book.state.submissions[held.submission].intent.digest == intent.digest:
            return
        kept = self._conflicts.setdefault(held.lease_id, set())
        if intent.digest not in kept and len(kept) < MAX_CONFLICTS_KEPT:
            kept.add(intent.digest)  # before the first await: many at once may not each find room
            stem = f"{held.lease_id.hex()}.conflict-{intent.digest.hex()[:16]}"
            await asyncio.to_thread(write_atomic, self.files.submission(held.lease_id).with_name(stem), envelope.raw)
        raise ProtocolError("this lease was already answered with other bytes", ReasonCode.CONFLICTING_SUBMISSION)

    def _check_open(self, held: LeaseState, intent: UploadIntent, request: web.Request) -> None:
        if self.book.state.finished is not None:
            raise ProtocolError("the run is finished; nothing more is taken", ReasonCode.LEASE_CLOSED)
        if self.book.state.nodes[held.owner].state == "suspended":
            raise ProtocolError("this node is suspended; its rollouts are not taken", ReasonCode.SUSPENDED)
        if held.status != "open":
            raise ProtocolError(f"this lease is closed: {held.reason}", ReasonCode.LEASE_CLOSED)
        assert self.book.state.manifest is not None
        most = answer_bound(held.lease, self.book.state.manifest)
        if intent.length > held.lease.max_bytes or intent.raw_length > most:
            raise ProtocolError(f"more than the {held.lease.max_bytes} bytes this lease allows", ReasonCode.OVERSIZE)
        if intent.length == 0 or request.content_length != intent.length:
            raise UploadError(400, "Content-Length is not the length the intent names", ReasonCode.LENGTH_MISMATCH)

    @contextmanager
    def _place(self, held: LeaseState, length: int, address: str) -> Iterator[None]:
        """Hold a place in the spool while one upload arrives.

        Raises:
            UploadError: 429 or 507, when there is none.
        """
        with self.spool.hold(held.lease_id, held.owner, address, length, self._waiting()):
            if shutil.disk_usage(self.files.run_dir).free < length + DISK_RESERVE_BYTES:
                text = "the coordinator's disk is full; its operator must free space"
                raise UploadError(507, text, ReasonCode.BUSY, 60)
            yield

    def _waiting(self) -> Iterator[tuple[bytes, str, int]]:
        """(owner, address group it spoke from last, bytes) of every submission without a decision."""
        for index in self.book.window.undecided:
            submission = self.book.state.submissions[index]
            session = self.members.sessions.get(submission.owner)
            yield submission.owner, "" if session is None else session.address, submission.intent.length

    async def _spool(self, request: web.Request, lease_id: bytes, intent: UploadIntent) -> Path:
        """Write the body to a hidden file while hashing it.

        Raises:
            UploadError: too slow, cut off, too long, or of another hash; nothing is left behind.
        """
        part = self.files.submission(lease_id).with_name(f".{lease_id.hex()}.part")
        loop = asyncio.get_running_loop()
        begun, received, digest = loop.time(), 0, blake3()
        try:
            with part.open("wb") as out:
                while True:
                    left = begun + RATE_GRACE_S + received / MINIMUM_RATE_BYTES_S - loop.time()
                    async with asyncio.timeout(max(0.0, left)):
                        chunk = await request.content.readany()
                    if not chunk:
                        break
                    received += len(chunk)
                    if received > intent.length:
                        raise UploadError(413, "the body is longer than its intent", ReasonCode.LENGTH_MISMATCH)
                    digest.update(chunk)
                    out.write(chunk)
            if received != intent.length:
                raise UploadError(400, "the body is shorter than its intent", ReasonCode.LENGTH_MISMATCH)
            if digest.digest() != intent.digest:
                raise UploadError(400, "the body has another hash than its intent", ReasonCode.HASH_MISMATCH)
        except TimeoutError as exc:
            part.unlink(missing_ok=True)
            raise UploadError(
                408, f"slower than {MINIMUM_RATE_BYTES_S // KIB} KiB/s; upload again", ReasonCode.TOO_SLOW, 5
            ) from exc
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part

    async def _receipt(self, held: LeaseState, owner: bytes) -> web.Response:
        """The promise, given only now that the entry is durable. The tree head is the newest, the entry the same."""
        await self.book.commit()
        assert held.submission is not None
        submission = self.book.state.submissions[held.submission]
        head = self.book.ledger.head()
        receipt = Receipt(
            lease_id=held.lease_id,
            digest=submission.intent.digest,
            index=submission.index,
            leaf=self.book.tree.leaf(submission.index),
            tree_size=head.size,
            tree_root=head.root,
            time=submission.time,
        )
        envelope = seal(
            self.book.coordinator,
            RECEIPT_KIND,
            receipt,
            run=self.book.run.id,
            sequence=self.book.sequences.next(RECEIPT_KIND),
            issued_at=self.book.now_ms(),
            audience=owner,
        )
        return web.Response(body=envelope.raw, content_type=_BYTES)

    # --- jobs and the rest ----------------------------------------------------------------------------------------

    async def _job(self, request: web.Request) -> web.StreamResponse:
        """The bytes of an open job, for whoever holds its token."""
        wanted = bytes.fromhex(request.match_info["job"])
        token = draws.job_token(self.book.secret, wanted).hex()
        given = request.headers.get(TOKEN_HEADER, "").lower().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(token.encode(), given):
            raise ProtocolError("no open job has this id and token", ReasonCode.UNKNOWN_JOB)
        for submission, job in self.judging.open_jobs():
            if job.job_id == wanted:
                return TimedFile(self.files.submission(submission.lease_id), submission.intent.length)
        raise ProtocolError("this job is no longer open", ReasonCode.UNKNOWN_JOB)

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=self.book.genesis.envelope.raw, content_type=_BYTES)

    async def _updates(self, request: web.Request) -> web.Response:
        """The manifest chain's updates that are in the ledger, in order."""
        chain = self.book.state.chain
        return web.Response(body=pack_updates([] if chain is None else chain.updates), content_type=_BYTES)

    async def _consistency(self, request: web.Request) -> web.Response:
        """Proof that the tree of `second` entries extends the one of `first`: 32-byte hashes, one after the other."""
        try:
            first, second = (int(request.query.get(name, "")) for name in ("first", "second"))
        except ValueError as exc:
            raise UploadError(400, "first and second are two numbers of entries", ReasonCode.MALFORMED) from exc
        if not 1 <= first <= second <= self.book.ledger.durable_size:
            raise UploadError(404, "there are no two such trees; second may be at most what was signed", _UNKNOWN)
        return web.Response(body=b"".join(self.book.tree.consistency(first, second)), content_type=_BYTES)

    @web.middleware
    async def _refusals(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turn refusals into JSON. The connection closes after one: an unread body must not be read as a request."""
        header_arrived(request)
        try:
            return await handler(request)
        except UploadError as exc:
            return _refuse(exc.status, exc, exc.retry_after_s)
        except HeadwaterError as exc:
            return _refuse(_STATUS.get(exc.code, 400), exc, None)


def _refuse(status: int, exc: HeadwaterError, retry_after_s: int | None) -> web.Response:
    reply = web.json_response({"code": exc.code.value, "message": str(exc)}, status=status)
    if retry_after_s is not None:
        reply.headers["Retry-After"] = str(retry_after_s)
    reply.force_close()
    return reply


def _keep(part: Path, final: Path) -> None:
    """Make a spooled upload durable under its name."""
    fd = os.open(part, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    part.replace(final)
    fsync_dir(final.parent)


def sweep_spool(files: batches.Files, known: set[bytes]) -> int:
    """Remove what an interrupted upload left: parts, and files of leases without a ledger entry. Returns how many."""
    folder = files.run_dir / "submissions"
    folder.mkdir(parents=True, exist_ok=True)
    swept = 0
    for path in [*folder.glob(".*.part"), *folder.glob("*.hws")]:
        if path.suffix == ".part" or path.stem not in {lease_id.hex() for lease_id in known}:
            path.unlink(missing_ok=True)
            swept += 1
    return swept
