"""What the inference and the validator role have in common: one assignment after another, and an end between two.

    ask -> open (signed for us, for this run) -> do -> ask ...        until told that this one is the last

Not covered: what an assignment is and how it is done (`inference`, `validator`), membership (`member`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from node.backoff import Backoff
from node.log import EventLog
from node.member import Member
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode

A = TypeVar("A")

LONGEST_RETRY_S = 20.0
"""The coordinator says when to ask again; more than this is not waited for."""


class Worker(ABC, Generic[A]):
    """A role that works on one assignment at a time."""

    noun = "assignment"
    """What an assignment is called in events: `lease`, `job`."""

    def __init__(self, member: Member, log: EventLog) -> None:
        self._member = member
        self._log = log
        self._last = False
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    async def ask(self) -> tuple[bytes | None, int]:
        """Ask once: the assignment's envelope, or None and the milliseconds after which to ask again."""

    @abstractmethod
    async def open(self, raw: bytes) -> A | None:
        """The assignment inside, None when there is nothing to do about it. Raises ProtocolError: it does not hold."""

    @abstractmethod
    async def do(self, assignment: A) -> None:
        """Do it and tell the coordinator what came of it. Raises LeavingError."""

    async def work(self) -> None:
        """Work until cancelled; after the last assignment wait for that. Raises LeavingError."""
        while not self._last:
            assignment = await self._next()
            self._idle.clear()
            try:
                await self.do(assignment)
            finally:
                self._idle.set()
        await asyncio.Event().wait()

    async def finish(self, limit_s: float) -> bool:
        """Take nothing new and let what is in work be done; False when it was not within `limit_s`."""
        self._last = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def busy(self) -> bool:
        """Whether an assignment is in work."""
        return not self._idle.is_set()

    async def _next(self) -> A:
        backoff = Backoff()
        while True:
            raw, retry_ms = await self.ask()
            if raw is None:
                await asyncio.sleep(min(max(retry_ms / 1000, 0.02), LONGEST_RETRY_S))
                continue
            try:
                assignment = await self.open(raw)
            except ProtocolError as exc:
                self._log.event(f"{self.noun}.invalid", level="warning", code=exc.code.value, reason=str(exc))
                await backoff.wait()
                continue
            if assignment is not None:
                return assignment

    def _envelope(self, raw: bytes, signers: tuple[bytes, ...]) -> Envelope:
        """The assignment's envelope, if one of `signers` signed it for us and this run, lately.

        Raises:
            DecodeError, EnvelopeError: it is somebody else's, or the coordinator or something between is broken.
        """
        member = self._member
        now = member.clock.now_ms()
        try:
            envelope = open_envelope(raw, run=member.run.id, kind=self.noun, audience=member.identity.public, now=now)
        except EnvelopeError as exc:
            if exc.code is ReasonCode.EXPIRED:
                raise EnvelopeError(_not_fresh(self.noun, parse(raw), now), exc.code) from exc
            raise
        if envelope.signer not in signers or envelope.audience != member.identity.public:
            raise EnvelopeError(f"the {self.noun} was not signed by the run's coordinator for this node")
        return envelope


def _not_fresh(noun: str, envelope: Envelope, now: int) -> str:
    """Why an assignment is refused for its dates, which are compared with the run's time: this machine's clock plays no
    part in it, so nobody is sent to set it."""
    if envelope.issued_at > now:
        ahead_s = (envelope.issued_at - now) / 1000
        return (
            f"the {noun} is dated {ahead_s:.0f} s ahead of the run's time as the coordinator told it to this node; "
            "the next heartbeat compares the two, and this node asks again"
        )
    return (
        f"the {noun} is an old one: its envelope's time was over {(now - envelope.expires_at) / 1000:.0f} s ago by the "
        "coordinator's own clock, so this machine's clock is not the reason; the coordinator must sign it anew, and "
        "this node asks again"
    )
