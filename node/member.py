"""A machine's membership of one run: joining, heartbeats, and calls that outlast an absent coordinator.

    away        the coordinator doesn't answer: calls wait and try again, with jitter, for as long as it takes
    forgotten   it answers `not-joined` (it lost the join): join again, then repeat the call
    leaving     suspended, run finished, upgrade required: raised as `LeavingError` and ends the process

Not covered: choosing between several coordinators (a run has one).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from importlib.metadata import version
from typing import TypeVar

from node.backoff import Backoff
from node.errors import NodeError, RunFinishedError, SuspendedError, UpgradeRequiredError
from node.home import RunHome
from node.log import EventLog
from protocol.control import Clock, ControlClient
from protocol.errors import ProtocolError, ReasonCode
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.limits import PROTOCOL_VERSION, REQUEST_DEADLINE_S
from protocol.manifest import Run
from protocol.records import Heartbeat, HeartbeatReply, JoinReply, JoinRequest, LeaseReply, LeaseRequest

R = TypeVar("R")

_COME_BACK = frozenset(
    {
        ReasonCode.UNREACHABLE,
        ReasonCode.DEADLINE,
        ReasonCode.BUSY,
        ReasonCode.STALE_SEQUENCE,
        ReasonCode.EXPIRED,
        ReasonCode.INTERNAL,
    }
)
"""Answers that time may change. Everything else is raised to the role."""

UPGRADE_COMMAND = "git pull && make install"


class Member:
    """One machine in one role.

    Attributes:
        state: `probation`, `active`, `paused` or `suspended`, as the coordinator last said.
        weights: URLs to pull weights from, best first; replaced as the coordinator plans.
        ingress: URL for submissions and jobs.
        policy: (epoch, step) of the newest policy held; the role sets it.
        activity, done: what heartbeats report; the role sets them.
    """

    def __init__(
        self,
        *,
        run: Run,
        identity: Identity,
        transport: bytes,
        control: ControlClient,
        clock: Clock,
        home: RunHome,
        log: EventLog,
        role: str,
        name: str,
    ) -> None:
        self.run = run
        self.identity = identity
        self.control = control
        self.clock = clock
        self.home = home
        self.log = log
        self.role = role
        self.name = name
        self.state = "joining"
        self.weights: list[str] = []
        self.ingress = run.manifest.ingress[0] if run.manifest.ingress else ""
        self.policy = (0, 0)
        self.newest_step = 0
        self.activity = "starting"
        self.done = 0
        self._transport = transport
        self._addresses: tuple[str, ...] = ()
        self._engine = ""
        self._heartbeat_s = run.manifest.leases.heartbeat_ms / 1000
        self._joining = asyncio.Lock()
        self._joins = 0
        self._away: set[str] = set()

    def sources(self) -> list[str]:
        """Where to pull weights from now."""
        return list(self.weights)

    async def join(self, *, addresses: tuple[str, ...] = (), engine: str = "") -> None:
        """Become a member; returns once the coordinator answered.

        Args:
            addresses: URLs a relay serves at.
            engine: name and version, for inference nodes.
        """
        self._addresses, self._engine = addresses, engine
        backoff = Backoff()
        while True:
            try:
                await self._join_once()
                return
            except ProtocolError as exc:
                self._leave_if_final(exc)
                if exc.code not in _COME_BACK:
                    raise NodeError(self._refused(exc), exc.code) from exc
                self._note_away("join", exc)
                await backoff.wait()

    async def _join_once(self) -> None:
        async with self._joining:
            request = JoinRequest(
                role=self.role,
                name=self.name,
                transport_key=self._transport,
                nonce=os.urandom(16),
                software=f"headwater {version('headwater')}",
                versions=(PROTOCOL_VERSION,),
                addresses=self._addresses,
                engine=self._engine[:500],
            )
            reply = await self.control.call("join", request, JoinReply, deadline_s=REQUEST_DEADLINE_S)
            self._joins += 1
        local = time.time_ns() // 1_000_000
        if abs(local - reply.time) > 60_000:
            seconds = (local - reply.time) / 1000
            self.log.event("clock.wrong", seconds=seconds)
            self.log.say(f"this machine's clock is {seconds:+.0f} s off the run's; it works, but please set it")
        self._note_back("join")
        self.weights = list(reply.weights)
        self.ingress = reply.ingress or self.ingress
        self._heartbeat_s = max(0.1, reply.heartbeat_ms / 1000)
        self.log.event("joined", role=self.role, state=reply.state, weights=list(reply.weights), message=reply.message)
        self.enter(reply.state, reply.message)

    def enter(self, state: str, reason: str) -> None:
        """Take note of what the coordinator says we are.

        Raises:
            SuspendedError: it takes nothing more from us.
        """
        if state != self.state:
            self.log.event("state", state=state, reason=reason if state in ("paused", "suspended") else "")
            if state == "paused":
                self.log.say(f"the coordinator gives no new leases for now: {reason or 'rollouts are being checked'}")
            elif state == "active" and self.state in ("probation", "paused"):
                self.log.say("this node is now active")
            self.state = state
        if state == "suspended":
            reason = reason.removeprefix("this node is suspended: ")
            raise SuspendedError(f"the coordinator suspended this node: {reason or 'no reason was given'}")

    async def call(
        self, kind: str, record: object, reply: type[R], *, attachment: bytes = b"", deadline_s: float = 30.0
    ) -> R:
        """Ask the coordinator until it answers.

        Raises:
            LeavingError: its answer ends our work.
            ProtocolError: it refused for a reason that asking again can't change.
        """
        backoff = Backoff()
        while True:
            joins = self._joins
            try:
                answer = await self.control.call(kind, record, reply, attachment=attachment, deadline_s=deadline_s)
            except ProtocolError as exc:
                self._leave_if_final(exc)
                if exc.code is ReasonCode.NOT_JOINED:
                    if joins == self._joins:
                        await self.join(addresses=self._addresses, engine=self._engine)
                    await backoff.wait()
                    continue
                if exc.code not in _COME_BACK:
                    raise
                self._note_away(kind, exc)
                await backoff.wait()
                continue
            self._note_back(kind)
            return answer

    async def heartbeats(self) -> None:
        """Report until the run ends. Raises LeavingError."""
        while True:
            started = time.monotonic()
            beat = Heartbeat(epoch=self.policy[0], step=self.policy[1], activity=self.activity[:60], done=self.done)
            reply = await self.call("heartbeat", beat, HeartbeatReply, deadline_s=15.0)
            self.clock.adjust(reply.time)
            if reply.weights:
                self.weights = list(reply.weights)
            self.newest_step = reply.step
            self._show()
            if reply.state == "suspended":
                self.enter(reply.state, await self._why_suspended())
            self.enter(reply.state, "")
            if reply.finished:
                raise RunFinishedError("the run is finished; thank you")
            await asyncio.sleep(max(0.05, self._heartbeat_s - (time.monotonic() - started)))

    async def _why_suspended(self) -> str:
        """The reason, which a heartbeat's answer has no room for; empty if it can't be had now."""
        if self.role != "inference":
            return ""
        request = LeaseRequest(capacity=1, epoch=self.policy[0], step=self.policy[1], wait_ms=0)
        try:
            return (await self.control.call("lease.next", request, LeaseReply, deadline_s=5.0)).reason
        except ProtocolError as exc:
            return str(exc)

    def _show(self) -> None:
        picture = {
            "run": self.run.id.hex(),
            "run_name": self.run.manifest.name,
            "role": self.role,
            "name": self.name,
            "peer_id": self.identity.peer_id,
            "pid": os.getpid(),
            "state": self.state,
            "epoch": self.policy[0],
            "step": self.policy[1],
            "newest_step": self.newest_step,
            "activity": self.activity,
            "done": self.done,
            "http_fallbacks": self.control.http_fallbacks,
            "time": time.time(),
        }
        write_atomic(self.home.status, json.dumps(picture, indent=1).encode() + b"\n")
        self.log.status(
            f"{self.role} | {self.state} | policy {self.policy[1]} of {self.newest_step} | "
            f"{self.done} done | {self.activity}"
        )

    def _leave_if_final(self, exc: ProtocolError) -> None:
        if exc.code is ReasonCode.SUSPENDED:
            self.state = "suspended"
            raise SuspendedError(f"the coordinator suspended this node: {exc}") from exc
        if exc.code in (ReasonCode.UPGRADE_REQUIRED, ReasonCode.UNSUPPORTED_VERSION):
            raise UpgradeRequiredError(f"the run needs a newer headwater: {exc}; run: {UPGRADE_COMMAND}") from exc

    def _refused(self, exc: ProtocolError) -> str:
        if exc.code is ReasonCode.NOT_GRANTED:
            return (
                f"the coordinator has not admitted this node as {self.role}: {exc}. Its operator must grant the role "
                f"to {self.identity.peer_id}"
            )
        return f"the coordinator refused the join ({exc.code.value}): {exc}"

    def _note_away(self, kind: str, exc: ProtocolError) -> None:
        if not self._away:
            self.log.say(f"the coordinator does not answer ({exc}); trying again until it does")
        if kind not in self._away:
            self.log.event("coordinator.away", kind=kind, code=exc.code.value, reason=str(exc))
            self._away.add(kind)

    def _note_back(self, kind: str) -> None:
        if kind in self._away:
            self._away.discard(kind)
            self.log.event("coordinator.back", kind=kind)
            if not self._away:
                self.log.say("the coordinator answers again")
