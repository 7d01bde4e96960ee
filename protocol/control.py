"""Signed requests and replies over the control plane: a member's side, the coordinator's side, and the first contact.

    member                                            coordinator
    ControlClient.call --- seal ---> host ... host ---> ControlServer.handle --> handler of the kind
           reply record <-- open --- host ... host <--- sealed `KIND.reply`, or sealed `error`

A request's envelope has the coordinator as audience and the kind of its frame; a reply's has the member as audience.
A call that loses its connection is signed anew and sent again until its deadline. After libp2p has failed, or answered
this call `busy`, for `FALLBACK_AFTER_S` the same envelope goes to `POST {ingress}/v1/{run}/{kind}`; each use is counted
on both sides.

Not covered: who may do what (each handler's business), and the transport (`host`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.admission import address_group
from protocol.chain import Chain, split_updates
from protocol.clock import Clock
from protocol.envelope import Envelope, open_envelope, parse, seal
from protocol.errors import DecodeError, EnvelopeError, ProtocolError, ReasonCode, TransportError
from protocol.frames import ERROR, MAX_FRAME_BYTES, ControlFrame, pack_frame, unpack_frame
from protocol.held import SMALL_BYTES, HeldBytes
from protocol.host import HostProcess
from protocol.identity import Identity, parse_peer_id, peer_id_text
from protocol.limits import (
    FALLBACK_AFTER_S,
    HEADER_DEADLINE_S,
    MAX_ATTACHMENT_BYTES,
    MIB,
    MINIMUM_RATE_BYTES_S,
    REQUEST_DEADLINE_S,
)
from protocol.manifest import MANIFEST_KIND, Run
from protocol.records import ErrorReply, JoinReply, JoinRequest
from protocol.sequences import SequenceGuard, Sequences

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

__all__ = [
    "Clock",
    "ControlClient",
    "ControlFrame",
    "ControlServer",
    "Member",
    "fetch_chain",
    "fetch_manifest",
    "http_failure_in_words",
    "read_bounded",
]

R = TypeVar("R")
JOIN = "join"

MAX_HTTP_HELD_BYTES = 64 * MIB
"""Request bodies held at once behind the HTTP door, all senders together. This bounds the application's memory."""

SMALL_HTTP_RESERVE_BYTES = 16 * MIB
"""Part of the bytes that only small bodies may use, so that a few large ones never keep heartbeats out."""

_RETRIED = frozenset({ReasonCode.UNREACHABLE, ReasonCode.BUSY, ReasonCode.TOO_SLOW})
"""Transport failures after which asking again may help; anything else is the caller's to see."""

logger = logging.getLogger("headwater.control")


async def fetch_chain(host: HostProcess, address: str, deadline_s: float, expect: bytes | None) -> Chain:
    """Ask a peer for its run's manifest chain and check it; the first thing a stranger does.

    Args:
        address: multiaddr of a coordinator, with /p2p/.
        expect: the run id of a share code; None trusts the first manifest seen.

    Raises:
        TransportError: not reachable within the deadline.
        ManifestError: the manifest or a later link does not hold, or is another run's.
    """
    reply = await host.request(address, ControlFrame(MANIFEST_KIND, b""), deadline_s, dial_s=deadline_s)
    return Chain.walk(reply.envelope, split_updates(reply.attachment), expect)


async def fetch_manifest(host: HostProcess, address: str, deadline_s: float, expect: bytes | None) -> Run:
    """The genesis manifest alone; see `fetch_chain`."""
    return (await fetch_chain(host, address, deadline_s, expect)).genesis


class ControlClient:
    """A member's calls to the coordinator of one run.

    One call per kind is under way at a time, so that sequences arrive in order; different kinds run side by side.

    Args:
        sequences: of `identity` for this run; persisted before a number is used.
        clock: adjusted by the reply to a `join`.
        seen: the highest sequences seen of the coordinator's replies, if the caller keeps them.
    """

    def __init__(
        self,
        *,
        run: Run,
        identity: Identity,
        sequences: Sequences,
        host: HostProcess,
        clock: Clock,
        seen: SequenceGuard | None = None,
    ) -> None:
        self.run = run
        self.identity = identity
        self.clock = clock
        self.http_fallbacks = 0
        self._sequences = sequences
        self._host = host
        self._guard = seen or SequenceGuard()
        self._locks: dict[str, asyncio.Lock] = {}
        self._addresses = [a for a in run.manifest.control if _is_transport(a, run.manifest.coordinator_transport)]
        self._failing_since: float | None = None
        self._failed_at = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        kind: str,
        record: object,
        reply: type[R],
        *,
        attachment: bytes = b"",
        deadline_s: float = REQUEST_DEADLINE_S,
    ) -> R:
        """Send one signed request and return the reply's record.

        Raises:
            ProtocolError: the coordinator refused; `code` is its reason.
            TransportError: no reply within the deadline, over libp2p nor HTTP.
            DecodeError, EnvelopeError: the reply does not hold.
        """
        until = time.monotonic() + deadline_s
        lock = self._locks.setdefault(kind, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline_s):
                await lock.acquire()
        except TimeoutError as exc:
            raise TransportError(f"an earlier {kind} is still waiting for its reply", ReasonCode.DEADLINE) from exc
        try:
            return await self._call(kind, record, reply, attachment, until)
        finally:
            lock.release()

    def follow(self, run: Run) -> None:
        """Use a later manifest of the same run from the next attempt on: other keys, other addresses."""
        self.run = run
        self._addresses = [a for a in run.manifest.control if _is_transport(a, run.manifest.coordinator_transport)]
        self._failing_since = None

    async def close(self) -> None:
        """Close the HTTP session if the fallback was ever used. The host process stays its owner's."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, kind: str, record: object, reply: type[R], attachment: bytes, until: float) -> R:
        pause = 0.1
        attempt = 0
        busy_since: float | None = None  # of this call alone: smaller ones may get through meanwhile
        while True:
            left = until - time.monotonic()
            started = time.monotonic()
            sent_ms = self.clock.now_ms()
            frame = ControlFrame(kind, self._seal(kind, record), attachment)
            try:
                crowded = busy_since is not None and started - busy_since >= FALLBACK_AFTER_S
                answer = await self._exchange(frame, left, attempt, crowded)
            except TransportError as exc:
                if exc.code not in _RETRIED or until - time.monotonic() < 0.2:
                    raise
                logger.info("%s: %s; asking again", kind, exc)
                if exc.code is not ReasonCode.BUSY:
                    self._note_failure(started)
                    busy_since = None
                elif busy_since is None:
                    busy_since = started
                await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), max(0.0, until - time.monotonic())))
                pause = min(2 * pause, 1.0)
                attempt += 1
                continue
            return self._open(kind, record, reply, answer, self.clock.now_ms() - sent_ms)

    async def _exchange(self, frame: ControlFrame, left: float, attempt: int, crowded: bool) -> ControlFrame:
        """One attempt: over libp2p, or over HTTP once libp2p has failed, or was too crowded, for long enough."""
        failing_for = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
        if (crowded or failing_for >= FALLBACK_AFTER_S) and self.run.manifest.ingress and attempt > 0:
            return await self._post(frame, left, attempt)
        if not self._addresses:
            raise TransportError("the run's manifest names no libp2p address of its coordinator")
        address = self._addresses[attempt % len(self._addresses)]
        answer = await self._host.request(address, frame, left, dial_s=max(0.5, FALLBACK_AFTER_S - failing_for))
        self._failing_since = None
        return answer

    def _note_failure(self, started: float) -> None:
        """Remember since when libp2p fails without a pause in which nobody asked."""
        if self._failing_since is None or started - self._failed_at > FALLBACK_AFTER_S:
            self._failing_since = started
        self._failed_at = time.monotonic()

    def _seal(self, kind: str, record: object) -> bytes:
        envelope = seal(
            self.identity,
            kind,
            record,
            run=self.run.id,
            sequence=self._sequences.next(kind),
            issued_at=self.clock.now_ms(),
            audience=self.run.manifest.coordinator,
        )
        return envelope.raw

    def _open(self, kind: str, record: object, reply: type[R], frame: ControlFrame, round_trip_ms: int) -> R:
        envelope = open_envelope(
            frame.envelope,
            run=self.run.id,
            kind=ERROR if frame.kind == ERROR else f"{kind}.reply",
            signer=self.run.manifest.coordinator,
            audience=self.identity.public,
            now=None if kind == JOIN or frame.kind == ERROR else self.clock.now_ms(),
        )
        if frame.kind == ERROR:
            error = envelope.record(ErrorReply)
            raise ProtocolError(f"the coordinator refused {kind}: {error.message}", _reason(error.code))
        self._guard.accept(envelope.signer, envelope.kind, envelope.sequence)
        answer = envelope.record(reply)
        if isinstance(answer, JoinReply) and isinstance(record, JoinRequest):
            if answer.nonce != record.nonce:
                raise EnvelopeError("the reply answers another join than ours", ReasonCode.STALE_SEQUENCE)
            self.clock.adjust(answer.time, round_trip_ms)
        return answer

    async def _post(self, frame: ControlFrame, left: float, attempt: int) -> ControlFrame:
        import aiohttp

        ingress = self.run.manifest.ingress
        url = f"{ingress[attempt % len(ingress)].rstrip('/')}/v1/{self.run.id.hex()}/{frame.kind}"
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            timeout = aiohttp.ClientTimeout(total=left, connect=HEADER_DEADLINE_S)
            async with self._session.post(
                url, data=pack_frame(frame), timeout=timeout, allow_redirects=False
            ) as response:
                if self.http_fallbacks == 0:
                    logger.warning("libp2p failed or was busy for %.0f s; this goes over HTTP now", FALLBACK_AFTER_S)
                self.http_fallbacks += 1
                if response.status != 200:
                    code = ReasonCode.UNREACHABLE if response.status >= 500 else ReasonCode.MALFORMED
                    raise TransportError(f"{url} answered {response.status}", code)
                return unpack_frame(await read_bounded(response.content, MAX_FRAME_BYTES))
        except TimeoutError as exc:
            raise TransportError(f"{url} did not answer within {left:.1f} s", ReasonCode.DEADLINE) from exc
        except aiohttp.ClientConnectorError as exc:
            # Nobody is there at all, so it is not libp2p that fails: it is tried again for as long as before.
            self._failing_since = None
            raise TransportError(f"{url} could not be reached: {http_failure_in_words(exc)}") from exc
        except (aiohttp.ClientError, ValueError) as exc:  # ValueError: a door's address that is none
            raise TransportError(f"{url} could not be reached: {http_failure_in_words(exc)}") from exc


@dataclass(frozen=True)
class Member:
    """Who sent a request: the envelope it signed, and the transport key it came over (empty over HTTP)."""

    envelope: Envelope
    transport_key: bytes
    address: str = ""
    """The address group it came from (`admission.address_group`)."""

    @property
    def key(self) -> bytes:
        return self.envelope.signer


ServerHandler = Callable[[Member, Any, bytes], Awaitable[object]]


class ControlServer:
    """The coordinator's side: opens envelopes, calls the handler of their kind, seals what it returns.

    Handlers are `async handler(member, record, attachment) -> reply record`; a ProtocolError they raise becomes an
    `error` reply with its code. Nothing that arrives raises out of `handle`.
    """

    def __init__(
        self, *, run: Run, identity: Identity, sequences: Sequences, guard: SequenceGuard, clock: Clock
    ) -> None:
        self.run = run
        self.updates = b""
        """The manifest chain's later links (`chain.pack_updates`), sent along with the manifest: whoever comes with a
        share code of new addresses can't find them in the genesis manifest."""
        self.http_fallbacks = 0
        self.refused: dict[str, int] = {}
        """How many requests were answered with an error, by code."""
        self._identity = identity
        self._sequences = sequences
        self._guard = guard
        self._clock = clock
        self._started_ms = clock.now_ms()
        self._handlers: dict[str, tuple[type[Any], ServerHandler]] = {}
        self.held = HeldBytes(MAX_HTTP_HELD_BYTES, SMALL_HTTP_RESERVE_BYTES)

    def on(self, kind: str, record_cls: type[R], handler: Callable[[Member, R, bytes], Awaitable[object]]) -> None:
        """Serve a kind."""
        self._handlers[kind] = (record_cls, handler)

    async def handle(self, transport_key: bytes, frame: ControlFrame) -> ControlFrame:
        """Answer one frame. `transport_key` is the Noise-proven key of the connection, or empty over HTTP."""
        if frame.kind == MANIFEST_KIND:
            return ControlFrame(f"{MANIFEST_KIND}.reply", self.run.envelope.raw, self.updates)
        member, before = None, 0
        try:
            member, before = self._admit(transport_key, frame)
            record_cls, handler = self._handlers[frame.kind]
            record = member.envelope.record(record_cls)
            self._check_join(member, record)
            answer = await handler(member, record, frame.attachment)
            return ControlFrame(f"{frame.kind}.reply", self._seal(f"{frame.kind}.reply", answer, member.key))
        except ProtocolError as exc:
            if member is not None and not before:
                self._guard.seen.pop((member.key, frame.kind), None)  # strangers' keys are free: keep nothing of them
            return self._refuse(exc.code, str(exc), member, frame)
        except Exception:
            logger.exception("the handler of %s failed", frame.kind)
            return self._refuse(ReasonCode.INTERNAL, "the coordinator failed; its operator must act", member, frame)

    def _admit(self, transport_key: bytes, frame: ControlFrame) -> tuple[Member, int]:
        """Who sent a frame, and the highest sequence of its key and kind before (0: none)."""
        if frame.kind not in self._handlers:
            raise EnvelopeError(f"kind {frame.kind!r} is not served here", ReasonCode.WRONG_KIND)
        if len(frame.attachment) > MAX_ATTACHMENT_BYTES:
            raise DecodeError("attachment over the bound", ReasonCode.OVERSIZE)
        envelope = open_envelope(
            frame.envelope,
            run=self.run.id,
            kind=frame.kind,
            audience=self._identity.public,
            # A machine whose clock is wrong learns the time by joining; the reply is useless to anyone else (nonce).
            now=None if frame.kind == JOIN else self._clock.now_ms(),
        )
        if not envelope.audience:
            raise EnvelopeError("a request must name its coordinator as audience", ReasonCode.WRONG_AUDIENCE)
        self._check_replay(transport_key, envelope)
        before = self._guard.accept(envelope.signer, envelope.kind, envelope.sequence)
        return Member(envelope, transport_key, frame.address), before

    def _check_replay(self, transport_key: bytes, envelope: Envelope) -> None:
        """Refuse over HTTP what may have been said before this process began: it forgot the sequences of kinds that no
        ledger keeps. Over libp2p a copied envelope comes from another transport key than its signer joined with."""
        known = transport_key or envelope.kind == JOIN or (envelope.signer, envelope.kind) in self._guard.seen
        if not known and envelope.issued_at < self._started_ms:
            raise EnvelopeError(
                "this was signed before the coordinator began anew, and may be a copy; sign it again",
                ReasonCode.STALE_SEQUENCE,
            )

    def _check_join(self, member: Member, record: object) -> None:
        if isinstance(record, JoinRequest) and member.transport_key not in (b"", record.transport_key):
            raise EnvelopeError(
                f"the join names transport key {peer_id_text(record.transport_key)} but came over another connection",
                ReasonCode.NOT_OWNER,
            )

    def _refuse(self, code: ReasonCode, message: str, member: Member | None, frame: ControlFrame) -> ControlFrame:
        self.refused[code.value] = self.refused.get(code.value, 0) + 1
        audience = member.key if member is not None else _claimed_signer(frame.envelope)
        # Until its signature has held, what arrived is charged to the connection and never to the key it names.
        forged = member is None and code not in (ReasonCode.EXPIRED, ReasonCode.STALE_SEQUENCE)
        raw = self._seal(ERROR, ErrorReply(code.value, message[:1000]), audience)
        return ControlFrame(ERROR, raw, charge=forged)

    def _seal(self, kind: str, record: object, audience: bytes) -> bytes:
        return seal(
            self._identity,
            kind,
            record,
            run=self.run.id,
            sequence=self._sequences.next(kind),
            issued_at=self._clock.now_ms(),
            audience=audience,
        ).raw

    async def handle_http(self, request: web.Request) -> web.Response:
        """The same envelopes at `POST /v1/{run}/{kind}`; register it with those two names in the path."""
        from aiohttp import web

        if request.match_info.get("run") != self.run.id.hex():
            return web.Response(status=404, text="this coordinator serves another run\n")
        group, body = address_group(request.remote or ""), bytearray()
        try:
            await self._read_body(request.content, body, group)
            frame = unpack_frame(bytes(body))
            return await self._answer_http(request, frame)
        except TimeoutError:
            return web.Response(status=408, text=f"{ReasonCode.TOO_SLOW}\n")
        except DecodeError as exc:
            status = {ReasonCode.OVERSIZE: 413, ReasonCode.BUSY: 503}.get(exc.code, 400)
            return web.Response(status=status, text=f"{exc.code}: {exc}\n")
        finally:
            self.held.give_back(group, len(body))

    async def _read_body(self, content: Any, body: bytearray, group: str) -> None:
        """Read into `body` while there is room, at no less than the minimum rate.

        Raises:
            DecodeError: `oversize`, `busy`.
            TimeoutError: it came too slowly.
        """
        started = time.monotonic()
        while True:
            slowest = started + HEADER_DEADLINE_S + len(body) / MINIMUM_RATE_BYTES_S
            async with asyncio.timeout(min(slowest, started + REQUEST_DEADLINE_S) - time.monotonic()):
                chunk = await content.readany()
            if not chunk:
                return
            if len(body) + len(chunk) > MAX_FRAME_BYTES:
                raise DecodeError(f"a body over the bound of {MAX_FRAME_BYTES} bytes", ReasonCode.OVERSIZE)
            if not self.held.take(group, len(chunk), small=len(body) + len(chunk) <= SMALL_BYTES):
                raise DecodeError("too many requests are being read; try again in a second", ReasonCode.BUSY)
            body += chunk

    async def _answer_http(self, request: web.Request, frame: ControlFrame) -> web.Response:
        from aiohttp import web

        if frame.kind != request.match_info.get("kind"):
            return web.Response(status=400, text=f"{ReasonCode.WRONG_KIND}: the path names another kind\n")
        self.http_fallbacks += 1
        answer = await self.handle(b"", replace(frame, address=address_group(request.remote or "")))
        return web.Response(body=pack_frame(answer), content_type="application/octet-stream")


async def read_bounded(content: Any, limit: int) -> bytes:
    """Read an aiohttp body of at most `limit` bytes. Raises DecodeError(`oversize`) before keeping more."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise DecodeError(f"a body over the bound of {limit} bytes", ReasonCode.OVERSIZE)
    return bytes(body)


def http_failure_in_words(exc: BaseException) -> str:
    """The cause of a failed HTTP request as one clause; aiohttp's own texts repeat the address and nest errors."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    inner = getattr(exc, "os_error", exc)
    if isinstance(inner, ConnectionRefusedError):
        return "nothing accepts connections there"
    if isinstance(inner, OSError):
        return str(inner.strerror or inner) or type(inner).__name__
    return str(exc) or type(exc).__name__


def _is_transport(address: str, key: bytes) -> bool:
    """Whether a multiaddr ends in the peer id of `key`: the root signed that key, so no other is ever dialed."""
    try:
        return parse_peer_id(address.rpartition("/p2p/")[2]) == key
    except ProtocolError:
        return False


def _claimed_signer(raw: bytes) -> bytes:
    try:
        return parse(raw).signer
    except DecodeError:
        return b""


def _reason(code: str) -> ReasonCode:
    try:
        return ReasonCode(code)
    except ValueError:
        return ReasonCode.MALFORMED
