"""Answers `lease.next` and `lease.failed`, and closes leases whose time is over.

What is decided is in `leases` (pure); here it is signed, written to the ledger, and only then sent.

Not covered: uploads (`ingress`), verdicts (`judging`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.control import Member
from protocol.envelope import Envelope, parse, seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.lease_rules import EXPIRED, FAILED, SUSPENDED
from protocol.records import Ack, Lease, LeaseClosed, LeaseFailed, LeaseReply, LeaseRequest
from protocol.state import LeaseState, NodeState
from trainer import leases
from trainer.book import Book
from trainer.members import Members
from trainer.news import News
from trainer.turns import Turn, Turns

MAX_WAIT_S = 20.0
"""How long a `lease.next` or `job.next` is held open. Longer meets the deadlines of proxies and clients."""

AGAIN_AFTER_S = 3.0
"""An open lease is sent again only after this wait: usually its upload is just about to arrive."""

RETRY_MS = 100
LEAVE_RETRY_MS = 30_000
PHANTOM_OVER = "this phantom's draw period ends: its key is nobody's secret soon"
"""Told to `node plant` alone, which goes on with another key."""

CLOCK_S = 1.0


@dataclass
class Leasing:
    """The lease desk of one run."""

    book: Book
    members: Members
    news: News
    bounds: leases.Bounds
    uploading: Callable[[], frozenset[bytes]]
    """Leases whose upload is arriving now."""

    _turns: Turns = field(default_factory=Turns)
    _census: tuple[int, leases.Census] | None = None
    """Ledger size, and what everybody who asks at it has in common."""

    async def next(self, member: Member, request: LeaseRequest, attachment: bytes) -> LeaseReply:
        """Hold the request until there is a lease for this node, its wait is over, or waiting is pointless. One request
        of a key waits; a newer one ends it."""
        node = self.members.require(member, "inference")
        with self._turns.take(node.key) as turn:
            return await self._next(node, request, turn)

    async def _next(self, node: NodeState, request: LeaseRequest, turn: Turn) -> LeaseReply:
        loop = asyncio.get_running_loop()
        wait_s = min(request.wait_ms / 1000, MAX_WAIT_S)
        end = loop.time() + wait_s
        again = loop.time() + min(wait_s / 2, AGAIN_AFTER_S)
        while not turn.over:
            ticket = self.book.changes.ticket()
            decision = self._decide(node, request)
            if decision.kind == "issue" and decision.lease is not None:
                raw = await self._issue(node, decision.lease)
                return LeaseReply(raw, node.state, "", 0)
            if decision.kind == "again":
                if loop.time() < again:
                    await turn.wait(ticket, again - loop.time())
                    continue
                await self.book.commit()
                sent = self._once_more(node, decision.lease_id)
                if sent is not None:
                    return LeaseReply(sent, node.state, "the open lease once more", 0)
                if decision.lease_id not in self.book.window.open:
                    continue  # its upload arrived during the commit
                decision = leases.Decision("wait", "the time of its open lease is over; it is closed within a second")
            left = end - loop.time()
            if decision.kind == "leave":
                return LeaseReply(None, node.state, decision.reason[:512], LEAVE_RETRY_MS)
            if left <= 0:
                return LeaseReply(None, node.state, decision.reason[:512], RETRY_MS)
            await turn.wait(ticket, left)
        return LeaseReply(None, node.state, "a newer request of this key waits in its place", RETRY_MS)

    async def failed(self, member: Member, report: LeaseFailed, attachment: bytes) -> Ack:
        """Close a lease its owner gives up, so that another node gets the same tasks.

        Raises:
            ProtocolError: unknown, or somebody else's.
        """
        node = self.members.require(member, "inference")
        held = self.book.state.leases.get(report.lease_id)
        if held is None:
            raise ProtocolError("no lease has this id", ReasonCode.UNKNOWN_LEASE)
        if held.owner != node.key:
            raise ProtocolError("this lease belongs to another node", ReasonCode.NOT_OWNER)
        if held.status == "open":
            closed = LeaseClosed(report.lease_id, _reason(FAILED + report.reason))
            self.book.append("lease.closed", closed, member.envelope.raw)
            self.news.say(f"{node.name} gave up a lease: {report.reason[:120]}")
            self._log_closed(held)
        await self.book.commit()
        return Ack(f"lease is {held.status}")

    async def expire_forever(self) -> None:
        """Close leases whose duration is over, once a second."""
        while True:
            await asyncio.sleep(CLOCK_S)
            over = leases.expired(self.book.state, self.book.window, self.book.now_ms(), self.uploading())
            for held in over:
                self.book.append("lease.closed", LeaseClosed(held.lease_id, EXPIRED))
                self.news.say(f"a lease of {self.book.state.nodes[held.owner].name} expired; others may take its tasks")
                self._log_closed(held)
            if over:
                await self.book.commit()

    def _log_closed(self, held: LeaseState) -> None:
        self.book.log.event(
            "lease.closed", node=held.owner, lease=held.lease_id, step=held.lease.step, reason=held.reason
        )

    def close_all_of(self, node: NodeState) -> None:
        """Close every open lease of a node that was suspended; the caller commits."""
        for lease_id in sorted(node.open_leases):
            self.book.append("lease.closed", LeaseClosed(lease_id, _reason(SUSPENDED + node.reason)))

    def _decide(self, node: NodeState, request: LeaseRequest) -> leases.Decision:
        if self.book.plants.is_over(node.key):
            return leases.Decision("leave", PHANTOM_OVER)
        newcomer, census = node.accepted == 0, self._common()
        return leases.decide(
            self.book.state,
            self.book.window,
            node,
            capacity=request.capacity,
            uploading=self.uploading(),
            secret=self.book.secret,
            bounds=self.bounds,
            now_ms=self.book.now_ms(),
            present=self.members.present() if self.book.window.lost else (),
            neighbours=self.members.neighbours(node) if newcomer and not census.crowded else (),
            census=census,
        )

    def _common(self) -> leases.Census:
        """Counted once between two ledger entries, however many wait: nothing else changes it."""
        size = self.book.ledger.size
        if self._census is None or self._census[0] != size:
            self._census = (size, leases.Census.of(self.book.state, self.book.window))
        return self._census[1]

    async def _issue(self, node: NodeState, lease: Lease) -> bytes:
        envelope = self._seal(node, lease)
        self.book.append("lease", subject=envelope.raw)
        await self.book.commit()
        again = self.book.state.leases[lease.lease_id].reissue_of
        self.book.log.event(
            "lease", node=node.key, lease=lease.lease_id, step=lease.step, tasks=len(lease.tasks), again=again
        )
        return envelope.raw

    def _once_more(self, node: NodeState, lease_id: bytes) -> bytes | None:
        """The envelope of an open lease, to be sent again; None once it came back or its time is over.

        While the coordinator is away a lease's time stands still, but its envelope grows old all the same, and its key
        may be replaced: then the same lease is signed anew for what is left of its time. The ledger keeps the first
        envelope; an audit reads nothing else of a lease than its terms, which do not change.
        """
        raw, held = self.book.window.envelopes.get(lease_id), self.book.state.leases[lease_id]
        now, end = self.book.now_ms(), leases.ends_at(self.book.window, held)
        if raw is None or now > end:
            return None
        first = parse(raw)
        if first.expires_at >= now and first.signer == self.book.coordinator.public:
            return raw
        self.book.log.event("lease.resealed", node=node.key, lease=lease_id, step=held.lease.step, left_ms=end - now)
        return self._seal(node, held.lease, end - now).raw

    def _seal(self, node: NodeState, lease: Lease, lifetime_ms: int | None = None) -> Envelope:
        return seal(
            self.book.coordinator,
            "lease",
            lease,
            run=self.book.run.id,
            sequence=self.book.sequences.next("lease"),
            issued_at=self.book.now_ms(),
            lifetime_ms=lease.duration_ms + leases.GRACE_MS if lifetime_ms is None else lifetime_ms,
            audience=node.key,
        )


def _reason(text: str) -> str:
    return text.encode("utf-8", "replace")[:500].decode("utf-8", "ignore")
