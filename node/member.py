"""A machine's membership of one run: joining, heartbeats, and calls that outlast an absent coordinator.

    away        the coordinator doesn't answer: calls wait and try again, with jitter, for as long as it takes
    forgotten   it answers `not-joined` (it lost the join), or our time is off: join again, then repeat the call
    changed     a reply names another manifest, or another key signs: fetch the manifest chain, follow it, go on
    leaving     suspended, run finished, upgrade required: raised as `LeavingError` and ends the process

The coordinator's time is learned by a join, whose nonce makes the reply fresh, and by nothing else: a heartbeat's reply
that was held back on its way would otherwise move our clock. A heartbeat that disagrees with our time asks for a join.

Not covered: choosing between several coordinators (a run has one).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from node.backoff import Backoff
from node.errors import (
    HeadsConflictError,
    KeyRevokedError,
    NodeError,
    RunFinishedError,
    SuspendedError,
    UpgradeRequiredError,
)
from node.heads import HeadKeeper
from node.log import EventLog
from node.manifest import HeldManifest
from node.parents import Parents
from node.status import StatusFile
from protocol.commands import os_error_in_words
from protocol.control import Clock, ControlClient
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import DecodeError, EnvelopeError, ManifestError, ProtocolError, ReasonCode, TransportError
from protocol.identity import Identity
from protocol.ledger import TREE_KIND
from protocol.limits import PROTOCOL_VERSION, REQUEST_DEADLINE_S
from protocol.manifest import Run
from protocol.records import NO_HASH, Heartbeat, HeartbeatReply, JoinReply, JoinRequest, TreeHead
from trainer.news import in_words

R = TypeVar("R")

_COME_BACK = frozenset(
    {
        ReasonCode.UNREACHABLE,
        ReasonCode.DEADLINE,
        ReasonCode.BUSY,
        ReasonCode.QUOTA,
        ReasonCode.STALE_SEQUENCE,
        ReasonCode.EXPIRED,
        ReasonCode.INTERNAL,
    }
)
"""Answers of the coordinator that time may change, beside every failure to reach it. The rest is raised to the role."""

LAST_QUESTION_S = 0.6
"""A node that is stopped asks once more whether the run is over; the person waits for it no longer than this."""

HEARTBEAT_DEADLINE_S = 15.0
"""A heartbeat without an answer for this long means that the coordinator is away; long enough to try HTTP too."""

CLOCK_DRIFT_MS = 5_000
"""A heartbeat's time this far from ours makes us learn the time anew. Freshness allows 120 s."""

CLOCK_AGAIN_S = 60.0
"""How often at most: a coordinator whose own clock is stepped must not be met by a storm of joins."""

CLOCK_WARN_MS = 60_000
"""A wall clock further off than this is worth a sentence to the person."""

EVER = 2**64 - 1
"""A ledger index after every entry: whoever is revoked from any index on is revoked here."""

UPGRADE_COMMAND = "git pull && make install"


class Member:
    """One machine in one role.

    Args:
        come_back: the command that starts this node again, for people.
        wall: this machine's clock, seconds since the epoch; only compared with the run's, to warn.
        monotonic: seconds.

    Attributes:
        state: `probation`, `active`, `paused` or `suspended`, as the coordinator last said.
        parents: whom to pull weights from.
        ingress: URL for submissions and jobs.
        policy: (epoch, step) of the newest policy held; the role sets it.
        done: what heartbeats report; the role sets it.
        waits_for: why there is nothing to do, in the words of whoever knows; the role sets it.
        gauges: what else `node status` shows (bytes, engine); the role sets it.
    """

    def __init__(
        self,
        *,
        manifest: HeldManifest,
        heads: HeadKeeper,
        identity: Identity,
        transport: bytes,
        control: ControlClient,
        clock: Clock,
        status: StatusFile,
        log: EventLog,
        role: str,
        name: str,
        come_back: str = "",
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest = manifest
        self.heads = heads
        self.identity = identity
        self.control = control
        self.clock = clock
        self.log = log
        self.role = role
        self.name = name
        self.come_back = come_back
        self.state = "joining"
        self.reason = ""
        self.parents = Parents(identity.public, control, log)
        self.sources, self.report = self.parents.sources, self.parents.report
        self.ingress = self.run.manifest.ingress[0] if self.run.manifest.ingress else ""
        self.policy = (0, 0)
        self.newest_step = 0
        self.done = 0
        self.sent = 0
        self.accepted = 0
        self.rejected = 0
        self.waits_for = ""
        self.gauges: Callable[[], dict[str, Any]] = dict
        self._activity = "starting"
        self._told_waits_for = ""
        self._wall = wall
        self._monotonic = monotonic
        self._since = monotonic()
        self._status = status
        self._status_fails = False
        self._transport = transport
        self._addresses: tuple[str, ...] = ()
        self._engine = ""
        self._heartbeat_s = self.run.manifest.leases.heartbeat_ms / 1000
        self._joining = asyncio.Lock()
        self._joins = 0
        self._joined_at = 0.0
        self._warned_clock = False
        self._away: set[str] = set()
        self._away_since = 0.0
        self._heard = monotonic()
        self._finished = False
        self._ask_now = asyncio.Event()
        self._conflict: HeadsConflictError | None = None

    @property
    def run(self) -> Run:
        """The run with the newest manifest this machine holds."""
        return self.manifest.run

    @property
    def activity(self) -> str:
        """What this node does now, in a few words; the role sets it."""
        return self._activity

    @activity.setter
    def activity(self, words: str) -> None:
        if words != self._activity:
            self._activity, self._since, self.waits_for = words, self._monotonic(), ""

    @property
    def weights(self) -> list[str]:
        """URLs to pull weights from, best first; replaced as the coordinator plans."""
        return self.parents.urls

    # --- joining --------------------------------------------------------------------------------------------------

    async def join(self, *, addresses: tuple[str, ...] = (), engine: str = "") -> None:
        """Become a member; returns once the coordinator answered.

        Args:
            addresses: URLs a relay serves at.
            engine: name and version, for inference nodes.

        Raises:
            LeavingError, KeyRevokedError: there is no place for this node.
            NodeError: the coordinator refused; the message says who must act.
        """
        self._addresses, self._engine = addresses, engine
        self._follow_manifest(None)
        await self._join_until_answered()

    async def _join_until_answered(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._join_once()
                return
            except ProtocolError as exc:
                self._leave_if_final(exc)
                if not await self._may_change("join", exc):
                    raise NodeError(self._refused(exc), exc.code) from exc
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
            again = self._joins > 0
            self._joins += 1
            self._joined_at = self._monotonic()
        self._heard = self._monotonic()
        self._warn_about_clock(reply.time)
        self._note_back("join")
        self.parents.take(self.run, reply.weights, reply.passes)
        self.ingress = reply.ingress or self.ingress
        self._heartbeat_s = max(0.1, reply.heartbeat_ms / 1000)
        self.log.event(
            "joined", role=self.role, state=reply.state, weights=list(reply.weights), message=reply.message, again=again
        )
        await self._take_news(reply.manifest, reply.tree)
        self.enter(reply.state, await self._reason(reply.state))

    async def _reason(self, state: str) -> str:
        """Why we are paused or suspended, which a join's reply has no room for; empty if it can't be had now."""
        if state not in ("paused", "suspended"):
            return ""
        try:
            return (await self.control.call("heartbeat", self._beat(), HeartbeatReply, deadline_s=5.0)).reason
        except ProtocolError as exc:
            self.log.event("state.unexplained", state=state, code=exc.code.value, reason=str(exc))
            return ""

    def _warn_about_clock(self, coordinator_ms: int) -> None:
        """Once a process: a person can mend a clock, and nothing else depends on it."""
        off_ms = int(1000 * self._wall()) - coordinator_ms
        if abs(off_ms) > CLOCK_WARN_MS and not self._warned_clock:
            self._warned_clock = True
            self.log.event("clock.wrong", level="warning", seconds=off_ms / 1000)
            self.log.say(
                f"this machine's clock is {_about(abs(off_ms) / 1000)} {'ahead of' if off_ms > 0 else 'behind'} the "
                "run's. This node works all the same, in the run's time; please set the clock"
            )

    def enter(self, state: str, reason: str) -> None:
        """Take note of what the coordinator says we are.

        Raises:
            SuspendedError: it takes nothing more from us.
        """
        reason = _explained(reason.removeprefix("this node is suspended: "))
        if self.role != "inference" and state == "probation":
            state = "active"  # probation ends with accepted rollouts: who has the operator's grant instead is at work
        self.reason = reason if state in ("paused", "suspended") else ""
        if state != self.state:
            self.log.event("state", state=state, reason=self.reason)
            if state == "paused":
                self.log.say(f"the coordinator gives no new leases for now: {reason or 'rollouts are being checked'}")
            elif state == "active" and self.state in ("probation", "paused"):
                self.log.say("this node is now active")
            self.state = state
        if state == "suspended":
            raise SuspendedError(f"the coordinator suspended this node: {reason or 'no reason was given'}")

    # --- asking ---------------------------------------------------------------------------------------------------

    async def call(
        self, kind: str, record: object, reply: type[R], *, attachment: bytes = b"", deadline_s: float = 30.0
    ) -> R:
        """Ask the coordinator until it answers.

        Raises:
            LeavingError, KeyRevokedError: its answer ends our work.
            ProtocolError: it refused for a reason that asking again can't change.
        """
        backoff = Backoff()
        while True:
            joins = self._joins
            try:
                answer = await self.control.call(kind, record, reply, attachment=attachment, deadline_s=deadline_s)
            except ProtocolError as exc:
                self._leave_if_final(exc)
                if exc.code in (ReasonCode.NOT_JOINED, ReasonCode.EXPIRED):
                    if joins == self._joins:  # `expired`: this machine slept, or its time is otherwise wrong
                        self.log.event("join.again", code=exc.code.value, reason=str(exc))
                        await self._join_until_answered()
                elif not await self._may_change(kind, exc):
                    raise
                await backoff.wait()
                continue
            self._note_back(kind)
            return answer

    def _leave_if_final(self, exc: ProtocolError) -> None:
        """Raise what ends this node. Only what the coordinator signed can: anybody may send an unsigned refusal."""
        if type(exc) is not ProtocolError:
            return
        if exc.code is ReasonCode.SUSPENDED:
            self.state = "suspended"
            raise SuspendedError(f"the coordinator suspended this node: {exc}") from exc
        if exc.code is ReasonCode.KEY_REVOKED:
            raise KeyRevokedError(_revoked(str(exc))) from exc
        if exc.code in (ReasonCode.UPGRADE_REQUIRED, ReasonCode.UNSUPPORTED_VERSION):
            raise UpgradeRequiredError(f"the run needs a newer headwater: {exc}; run: {UPGRADE_COMMAND}") from exc

    async def _may_change(self, kind: str, exc: ProtocolError) -> bool:
        """Whether asking again may help; tells the person, and looks whether the run's keys or addresses moved."""
        # What is too large is our own request: the reply's size was bounded before anybody looked into it.
        passing = isinstance(exc, TransportError | DecodeError | EnvelopeError) and exc.code is not ReasonCode.OVERSIZE
        if not passing and exc.code not in _COME_BACK and exc.code is not ReasonCode.WRONG_AUDIENCE:
            return False
        broken = isinstance(exc, DecodeError | EnvelopeError)
        if broken or exc.code in (ReasonCode.UNREACHABLE, ReasonCode.DEADLINE, ReasonCode.WRONG_AUDIENCE):
            await self.look_for_updates()
        self._note_away(kind, exc)
        return True

    def _refused(self, exc: ProtocolError) -> str:
        if exc.code is ReasonCode.NOT_GRANTED:
            return (
                f"the coordinator has not admitted this node as {self.role}: {exc}. Its operator must grant the role "
                f"to {self.identity.peer_id}"
            )
        return f"the coordinator refused the join ({exc.code.value}): {exc}"

    def _note_away(self, kind: str, exc: ProtocolError) -> None:
        if kind in self._away:
            return
        first = not self._away
        self._away.add(kind)
        self.log.event("coordinator.away", level="warning", kind=kind, code=exc.code.value, reason=str(exc))
        if first:
            self._away_since = self._monotonic()
            self.log.say(f"the coordinator does not answer ({exc}); trying again until it does")
            self.show()

    def _note_back(self, kind: str) -> None:
        if kind in self._away:
            self._away.discard(kind)
            self.log.event("coordinator.back", kind=kind)
            if not self._away:
                self.log.say("the coordinator answers again")
                self.show()

    # --- the manifest chain ---------------------------------------------------------------------------------------

    def doors(self) -> list[str]:
        """URLs of the coordinator's HTTP door, best first."""
        return [self.ingress, *self.run.manifest.ingress]

    async def learn(self, link: bytes) -> None:
        """Fetch the manifest chain unless `link` is part of the one held.

        Raises:
            ProtocolError: it could not be had, or does not hold `link`.
            LeavingError, KeyRevokedError: what it says ends our work.
        """
        if not self.manifest.knows(link):
            before = self.run
            if await self.manifest.learn(self.doors()):
                self._follow_manifest(before)
            self.manifest.at(link)

    async def look_for_updates(self) -> None:
        """Fetch the chain if it has grown; whoever can't be reached for it is asked again later."""
        before = self.run
        try:
            grown = await self.manifest.learn(self.doors())
        except ProtocolError as exc:
            if exc.code is not ReasonCode.BUSY:
                self.log.event("manifest.unreachable", level="debug", code=exc.code.value, reason=str(exc))
            return
        if grown:
            self._follow_manifest(before)

    def _follow_manifest(self, before: Run | None) -> None:
        """Act on the manifest as it is now.

        Raises:
            KeyRevokedError: our own key is revoked. UpgradeRequiredError: a newer protocol is asked for.
        """
        now = self.run.manifest
        revoked = next((r for r in self.manifest.chain.revocations if r.key == self.identity.public), None)
        if revoked is not None:
            raise KeyRevokedError(_revoked(revoked.reason))
        self.control.follow(self.run)
        if before is not None and before.manifest != now:
            old = before.manifest
            changed = [name for name in ("coordinator", "origin", "control", "ingress", "thresholds", "leases", "bf16")
                       if getattr(old, name) != getattr(now, name)]  # fmt: skip
            if old.ingress != now.ingress and now.ingress:
                self.ingress = now.ingress[0]
            notes = [link.update.note for link in self.manifest.chain.links[-1:] if link.update.note]
            why = f": {notes[0]}" if notes else ""
            self.log.say(f"the run's operator changed its {', '.join(changed) or 'manifest'}{why}; this node follows")
        if min(now.versions) > PROTOCOL_VERSION:
            raise UpgradeRequiredError(f"the run needs a newer headwater; run: {UPGRADE_COMMAND}")

    # --- heartbeats -----------------------------------------------------------------------------------------------

    async def heartbeats(self) -> None:
        """Report until the run ends. Raises LeavingError."""
        while True:
            started = self._monotonic()
            self._ask_now.clear()
            reply = await self.call("heartbeat", self._beat(), HeartbeatReply, deadline_s=HEARTBEAT_DEADLINE_S)
            await self._take(reply)
            self.show()
            if self._conflict is not None:
                raise self._conflict
            if reply.finished:
                raise RunFinishedError("the run is finished; thank you")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, self._heartbeat_s - (self._monotonic() - started))):
                    await self._ask_now.wait()

    def ask_soon(self) -> None:
        """Send the next heartbeat now: an answer said that there is nothing more to come, and its reply says why."""
        self._ask_now.set()

    async def hear_the_end(self) -> None:
        """Ask whether the run is over, for the last words of a node that is stopped; it may stay without an answer."""
        if self._away or not self._joins:
            return
        with contextlib.suppress(ProtocolError, TimeoutError):
            async with asyncio.timeout(LAST_QUESTION_S):
                reply = await self.control.call("heartbeat", self._beat(), HeartbeatReply, deadline_s=LAST_QUESTION_S)
            self._finished, self.newest_step = reply.finished, max(self.newest_step, reply.step)

    @property
    def stopped_words(self) -> str:
        """How a node that its owner stopped has ended: with the run, or before."""
        steps = self.run.manifest.steps
        if self._finished:
            return "the run is finished; stopped by its owner"
        if max(self.newest_step, self.policy[1]) >= steps:
            return f"the run has done all its {steps} steps; stopped by its owner"
        return "stopped by its owner"

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            epoch=self.policy[0], step=self.policy[1], activity=self.activity[:60], done=self.done, sent=self.sent
        )

    async def _take(self, reply: HeartbeatReply) -> None:
        self._heard = self._monotonic()
        if reply.weights:
            self.parents.take(self.run, reply.weights, reply.passes)
        self.newest_step = reply.step
        self.accepted, self.rejected = reply.accepted, reply.rejected
        self._told_waits_for = reply.waits_for
        drift_ms = abs(reply.time - self.clock.now_ms())
        if drift_ms > CLOCK_DRIFT_MS and self._monotonic() - self._joined_at > CLOCK_AGAIN_S:
            self.log.event("clock.drifted", level="warning", milliseconds=drift_ms)
            await self._join_until_answered()
        await self._take_news(reply.manifest, reply.tree)
        self.enter(reply.state, reply.reason)

    async def _take_news(self, link: bytes, tree: bytes) -> None:
        """What every reply may carry: the newest link of the manifest chain, and the newest promise about the ledger.

        Raises:
            LeavingError, KeyRevokedError, HeadsConflictError.
        """
        if link != NO_HASH and not self.manifest.knows(link):
            try:
                await self.learn(link)
            except ManifestError as exc:
                self.log.event("manifest.unknown", level="warning", manifest=link, reason=str(exc))
            except ProtocolError as exc:
                if exc.code is not ReasonCode.BUSY:  # asked a moment ago
                    self.log.event("manifest.unreachable", level="debug", code=exc.code.value, reason=str(exc))
        if not tree:
            return
        try:
            promised = parse(tree).record(TreeHead)
            if promised.size > self.heads.size or self.heads.differs(promised.size, promised.root):
                signer = self.run.manifest.coordinator
                self.heads.see(open_envelope(tree, run=self.run.id, kind=TREE_KIND, signer=signer))
        except ProtocolError as exc:
            self.log.event("heads.invalid", level="warning", code=exc.code.value, reason=str(exc))
        await self.heads.check()

    def take_receipt(self, envelope: Envelope) -> None:
        """Compare the promise in a receipt, whose signature was checked; a conflict ends us at the next heartbeat."""
        try:
            self.heads.see(envelope)
        except HeadsConflictError as exc:
            self._conflict = exc

    # --- showing --------------------------------------------------------------------------------------------------

    def picture(self) -> dict[str, Any]:
        """What `node status` shows, apart from the process's own marks."""
        now = self._monotonic()
        return {
            "run": self.run.id.hex(),
            "run_name": self.run.manifest.name,
            "role": self.role,
            "name": self.name,
            "peer_id": self.identity.peer_id,
            "state": self.state,
            "reason": self.reason,
            "epoch": self.policy[0],
            "step": self.policy[1],
            "newest_step": max(self.newest_step, self.policy[1]),  # weights may come before word of them
            "activity": self.activity,
            "activity_s": round(now - self._since, 1),
            "waits_for": self.waits_for or self._told_waits_for,
            "away_s": round(now - self._away_since, 1) if self._away else None,
            "heard_s": round(now - self._heard, 1),
            "heartbeat_s": self._heartbeat_s,
            "done": self.done,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "manifest": self.manifest.hash.hex(),
            "ledger_promised": self.heads.size,
            "conflict": self.heads.evidence,
            "http_fallbacks": self.control.http_fallbacks,
            "clock_off_s": round(self.clock.skew_ms / 1000, 1),
            "come_back": self.come_back,
            **self.gauges(),
        }

    def show(self, ended: str = "") -> None:
        """Write status.json and the terminal's last line; with `ended`, how this node ended."""
        try:
            self._status.write({**self.picture(), "ended": ended})
            self._status_fails = False
        except OSError as exc:
            if not self._status_fails:
                self._status_fails = True
                self.log.say(f"status.json is not up to date: {os_error_in_words(exc)}")
        if ended:
            return
        waits = self.waits_for or self._told_waits_for
        counted = f", {self.accepted} accepted" if self.role == "inference" else ""
        self.log.status(
            f"{self.role} | {self.state} | step {self.policy[1]} of "
            f"{max(self.newest_step, self.policy[1])} | {self.done} done{counted} | "
            f"{self.activity}{f': {waits}' if waits else ''}"
        )


def _revoked(reason: str) -> str:
    return (
        f"the run's operator revoked this node's key ({reason or 'no reason was given'}). Nothing it signs counts any "
        "more; ask the operator, or join with another --home, which is a new node in probation"
    )


def _explained(reason: str) -> str:
    """A reason code with its plain words; anything else as it is."""
    words = in_words(reason)
    return reason if words == reason else f"{words} ({reason})"


def _about(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
