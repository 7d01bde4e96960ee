"""Who takes part: joins, heartbeats, and the proven addresses weights are handed out from.

A join is a ledger entry; when a member was last heard from is not. A relay's address is handed out only after it
answered a challenge with the relay's own key, and it is asked again every ten minutes (RULES 8).

Not covered: leases and jobs (`leasing`, `judging`), gossip, addresses of anyone but relays.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import aiohttp

from protocol.addresses import parse_http
from protocol.admission import Blocked, is_loopback
from protocol.control import Member
from protocol.envelope import open_envelope, parse
from protocol.errors import DecodeError, ProtocolError, ReasonCode, TransportError
from protocol.limits import KIB, PROTOCOL_VERSION
from protocol.records import Heartbeat, HeartbeatReply, JoinReply, JoinRequest
from protocol.state import ROLES, NodeState
from shardcast.records import CHALLENGE_KIND, Challenge
from trainer import waiting
from trainer.book import Book, Changes
from trainer.config import RunConfig
from trainer.news import News
from trainer.parents import Parents, Seen
from trainer.quotas import JoinBudget

REPROVE_S = 600.0
RETRY_S = 2.0
PROBE_S = 5.0
UPLINK_S = 600.0
"""What a relay sent at its fastest counts for this long, and then for as long again."""
MAX_CHALLENGE_BYTES = 4 * KIB
RESOLVERS = 4
"""Threads that ask for names. They are its own: a name whose server stays silent holds one for half a minute, and on
the threads everything shares it would hold the ledger's flush."""


@dataclass
class Session:
    """What is remembered of a member while the coordinator runs."""

    heard: float
    """Monotonic seconds."""
    address: str = ""
    """The address group it spoke from last; empty until it spoke."""
    step: int = 0
    activity: str = ""
    done: int = 0
    sent: int = 0
    """Bytes of weights a relay says it sent on."""
    verdict_s: float | None = None
    """Seconds a validator takes from a job's delivery to its verdict: a running mean of about the last eight."""
    lag: int = 0
    """Steps it was behind the newest policy when it last said what it holds."""
    uplinks: tuple[float, float] = (0.0, 0.0)
    """Most bytes of weights a second that a relay says it sent between two heartbeats: in this `UPLINK_S`, and in the
    one before."""
    uplinks_since: float = 0.0


@dataclass
class Proof:
    """One relay address: when it last answered with the relay's key, and when to ask again."""

    next_probe: float = 0.0
    since: float = 0.0
    """When the relay announced it."""
    proven: bool = False
    failure: str = ""
    address: str = ""
    """What its name resolved to when it answered last."""


@dataclass
class Members:
    """Joins, liveness and addresses. Handlers are registered with the control server by the coordinator."""

    book: Book
    config: RunConfig
    news: News
    monotonic: Callable[[], float] = time.monotonic
    sessions: dict[bytes, Session] = field(default_factory=dict)
    proofs: dict[tuple[bytes, str], Proof] = field(default_factory=dict)
    distrusted: Callable[[], set[bytes]] = field(default=set)
    """Relays left out of the plan without proof; `trainer.reports` knows."""
    _announced: Changes = field(default_factory=Changes)
    """A relay address came, or one that was proven counts for nothing any more."""
    _resolvers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolver")
    )
    parents: Parents = field(init=False)
    started: float = field(init=False)
    budget: JoinBudget = field(init=False)
    blocked: Blocked = field(default_factory=Blocked)
    """Addresses the operator stopped all traffic with."""

    def __post_init__(self) -> None:
        self.started = self.monotonic()
        self.parents = Parents(
            self.book,
            self.config,
            self._seen,
            lambda: self.distrusted(),
            lambda: self.monotonic() - self.started,
        )
        self.budget = JoinBudget(self.config.coordinator.joins_per_address, self.monotonic)
        for key in self.book.state.present or ():
            self.sessions[key] = Session(self.started)  # whoever was here gets the time to be heard again

    # --- asking ---------------------------------------------------------------------------------------------------

    def require(self, member: Member, role: str | None = None) -> NodeState:
        """The joined node that sent this message; it counts as heard from now.

        Raises:
            ProtocolError: `not-joined`, revoked, or of another role.
        """
        self.check_key(member.envelope.signer)
        node = self.book.state.nodes.get(member.envelope.signer)
        if node is None:
            raise ProtocolError("this key has not joined the run; join first", ReasonCode.NOT_JOINED)
        if member.transport_key and member.transport_key != node.transport_key:
            raise ProtocolError("this key joined over another transport key; join again", ReasonCode.NOT_JOINED)
        if role is not None and node.role != role:
            raise ProtocolError(f"only {role} nodes may ask this; this key is a {node.role}", ReasonCode.NOT_GRANTED)
        self._hear(node.key, member.address)
        return node

    def check_key(self, key: bytes) -> None:
        """Raises ProtocolError(`key-revoked`) for a key the run's root took back."""
        chain = self.book.state.chain
        if chain is not None and chain.revocations and chain.revoked(key, self.book.ledger.size):
            reason = next(item.reason for item in reversed(chain.revocations) if item.key == key)
            raise ProtocolError(
                f"this key was revoked by the run's root ({reason}); ask its operator, or take part with a new key",
                ReasonCode.KEY_REVOKED,
            )

    def _hear(self, key: bytes, address: str) -> None:
        session = self.sessions.get(key)
        if session is None:
            session = self.sessions[key] = Session(0.0)
        session.heard, session.address = self.monotonic(), address or session.address

    def address_of(self, key: bytes) -> str | None:
        """The network address a member spoke from last, an IPv6 one without its last 64 bits; None when unknown."""
        session = self.sessions.get(key)
        return None if session is None or not session.address else session.address.split("/")[0]

    def neighbours(self, node: NodeState) -> set[bytes]:
        """Keys that speak from this node's address, its own included. Nobody's are counted together on loopback of a
        run that allows private addresses: there a whole demo is one address."""
        own = self.sessions.get(node.key)
        if own is None or not own.address or (is_loopback(own.address) and self.book.run.manifest.allow_private):
            return {node.key}
        return {key for key, session in self.sessions.items() if session.address == own.address}

    def present(self) -> set[bytes]:
        """Inference nodes heard from lately."""
        nodes = self.book.state.nodes
        return {key for key in self.sessions if self.live(key) and key in nodes and nodes[key].role == "inference"}

    def granted(self, key: bytes, role: str) -> bool:
        return role in self.book.state.grants.get(key, set())

    def live(self, key: bytes) -> bool:
        """Heard from within `member_timeout_s`."""
        session = self.sessions.get(key)
        return session is not None and self.monotonic() - session.heard < self.config.coordinator.member_timeout_s

    def validators(self) -> list[bytes]:
        """Joined validators that the operator admitted, nobody revoked, and that were heard from lately."""
        nodes = self.book.state.nodes
        admitted = (key for key, roles in self.book.state.grants.items() if "validator" in roles and key in nodes)
        return [
            key
            for key in admitted
            if nodes[key].role == "validator" and nodes[key].state != "suspended" and self.live(key)
        ]

    def sources(self, node: NodeState) -> tuple[tuple[str, ...], tuple[bytes, ...]]:
        """URLs `node` pulls weights from, best first, and its passes for those."""
        places = self.parents.places(node)
        return tuple(place.url for place in places), self.parents.passes(node, places)

    def _seen(self, relay: bytes) -> Seen:
        """What the plan needs to know of one relay."""
        proofs = [(url, proof) for (key, url), proof in self.proofs.items() if key == relay]
        session = self.sessions.get(relay)
        if not proofs or session is None:
            return Seen()
        age = self.monotonic() - max(proof.since for _, proof in proofs)
        if any(proof.address for _, proof in proofs):
            age = math.inf  # it was there: now that it is gone nobody waits for it
        proven = next((url for url, proof in proofs if proof.proven), "") if self.live(relay) else ""
        address = next((proof.address for url, proof in proofs if url == proven), "")
        return Seen(proven, age, session.lag, max(session.uplinks), address)

    # --- answering ------------------------------------------------------------------------------------------------

    async def join(self, member: Member, request: JoinRequest, attachment: bytes) -> JoinReply:
        """Admit a key to a role. Joining again is harmless; only what changed becomes a ledger entry.

        Raises:
            ProtocolError: a role this key may not take, a transport key it does not hold, an old version.
        """
        key = member.envelope.signer
        self.check_key(key)
        self._check_join(member, request)
        known = self.book.joins.get(key)
        if known is None or not _same_join(parse(known).record(JoinRequest), request):
            self.budget.spend(member.address)
            self.book.append("node.joined", subject=member.envelope.raw)
            await self.book.commit()
            self.news.say(f"{request.name or 'a node'} joined as {request.role}")
            self.book.log.event("node.joined", node=key, role=request.role, name=request.name)
        node = self.book.state.nodes[key]
        self._hear(key, member.address)
        if request.role == "relay":
            self._register_addresses(key, request.addresses)
            self._announced.notify()
        self.book.changes.notify()
        weights, passes = self.sources(node)
        return JoinReply(
            nonce=request.nonce,
            time=self.book.now_ms(),
            state=node.state,
            weights=weights,
            ingress=self.book.run.manifest.ingress[0],
            heartbeat_ms=self.book.run.manifest.leases.heartbeat_ms,
            message=self._welcome(node),
            manifest=self.book.manifest_hash,
            tree=self.book.tree_head(),
            passes=passes,
        )

    async def heartbeat(self, member: Member, beat: Heartbeat, attachment: bytes) -> HeartbeatReply:
        before = self.sessions[member.envelope.signer].heard if member.envelope.signer in self.sessions else 0.0
        node = self.require(member)
        if node.role == "relay" and not any(key == node.key for key, _ in self.proofs):
            self._register_addresses(node.key, self._joined(node.key).addresses)
        session = self.sessions[node.key]
        session.step, session.activity, session.done = beat.step, beat.activity[:64], beat.done
        self._measure(session, before, beat.sent)
        session.sent = beat.sent
        newest = self.book.state.newest_policy
        session.lag = 0 if newest is None else max(0, newest.step - beat.step)
        weights, passes = self.sources(node)
        return HeartbeatReply(
            time=self.book.now_ms(),
            state=node.state,
            weights=weights,
            step=0 if newest is None else newest.step,
            finished=self.book.state.finished is not None,
            accepted=node.accepted,
            rejected=node.rejected,
            reason=node.reason if node.state in ("paused", "suspended") else "",
            waits_for=waiting.member(self.book.state, self.book.window, node, len(self.validators()))[:512],
            manifest=self.book.manifest_hash,
            tree=self.book.tree_head(),
            passes=passes,
        )

    def _measure(self, session: Session, before: float, sent: int) -> None:
        """Take in how much a relay sent since it was last heard from, at `before`."""
        if session.heard - session.uplinks_since >= UPLINK_S:
            session.uplinks, session.uplinks_since = (0.0, session.uplinks[0]), session.heard
        if session.sent and session.heard > before:
            rate = max(0, sent - session.sent) / (session.heard - before)
            session.uplinks = (max(session.uplinks[0], rate), session.uplinks[1])

    def _check_join(self, member: Member, request: JoinRequest) -> None:
        key = member.envelope.signer
        if not all(text.isprintable() for text in (request.name, request.software, request.engine, *request.addresses)):
            # These are shown to people: a name may not move an operator's cursor or add lines to a log.
            raise DecodeError("name, software, engine and addresses are one line of printable characters each")
        for url in request.addresses:
            parse_http(url)  # before it is in the ledger: what stands there comes back after every restart
        if request.role not in ROLES:
            raise ProtocolError(f"there is no role {request.role!r}; choose from {', '.join(ROLES)}", ReasonCode.USAGE)
        if PROTOCOL_VERSION >> 8 not in {version >> 8 for version in request.versions}:
            raise ProtocolError(
                f"this run speaks protocol {PROTOCOL_VERSION >> 8}; upgrade with: pip install -U headwater",
                ReasonCode.UPGRADE_REQUIRED,
            )
        if request.role in ("validator", "trainer") and not self.granted(key, request.role):
            raise ProtocolError(
                f"this key is not admitted as {request.role}; the run's operator must add its peer id to [grants] in "
                "run.toml and restart the coordinator",
                ReasonCode.NOT_GRANTED,
            )
        node = self.book.state.nodes.get(key)
        if node is not None and node.role != request.role:
            raise ProtocolError(
                f"this key already is a {node.role}; a key has one role for the whole run, use another --home",
                ReasonCode.NOT_GRANTED,
            )

    def _welcome(self, node: NodeState) -> str:
        manifest = self.book.run.manifest
        if node.role == "relay" and not self.granted(node.key, "relay"):
            return "not admitted as a relay yet: the address is not handed out until the operator adds this peer id"
        return f"Contact: {manifest.contact}. {manifest.privacy}"

    def block(self, addresses: list[str]) -> None:
        """Stop handing out and probing relay addresses in these networks."""
        self.blocked = Blocked(addresses)
        for proof in self.proofs.values():
            if proof.proven and self.blocked.covers(proof.address):
                proof.proven, proof.failure = False, "the operator blocked its address"
            proof.next_probe = 0.0
        self._announced.notify()
        self.book.changes.notify()

    # --- relay addresses ------------------------------------------------------------------------------------------

    def _joined(self, key: bytes) -> JoinRequest:
        return parse(self.book.joins[key]).record(JoinRequest)

    def _register_addresses(self, key: bytes, addresses: tuple[str, ...]) -> None:
        if not self.granted(key, "relay"):
            return
        for known in [pair for pair in self.proofs if pair[0] == key and pair[1] not in addresses]:
            del self.proofs[known]
        for url in addresses:
            try:
                parse_http(url)
            except DecodeError as exc:  # a ledger of before joins were checked for it
                self.news.say_once(f"{self.book.state.nodes[key].name} announced no address that can be asked: {exc}")
                continue
            self.proofs.setdefault((key, url), Proof(since=self.monotonic())).next_probe = 0.0

    async def prove_forever(self) -> None:
        """Ask each relay address for a signed challenge, again and again. Runs as long as the coordinator, whatever is
        announced and whatever answers: its end would be the coordinator's."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                ticket = self._announced.ticket()
                now = self.monotonic()
                due = [(pair, proof) for pair, proof in self.proofs.items() if proof.next_probe <= now]
                await asyncio.gather(*(self._prove(session, key, url, proof) for (key, url), proof in due))
                await self._announced.wait(ticket, 1.0)

    async def _prove(self, session: aiohttp.ClientSession, key: bytes, url: str, proof: Proof) -> None:
        was, failure = proof.proven, ""
        try:
            async with asyncio.timeout(PROBE_S):
                proof.address = await self._challenge(session, key, url)
        except (ProtocolError, aiohttp.ClientError, OSError, ValueError) as exc:  # TimeoutError is an OSError
            failure = str(exc) or type(exc).__name__
        proof.proven, proof.next_probe = not failure, self.monotonic() + (RETRY_S if failure else REPROVE_S)
        if proof.proven != was or failure != proof.failure:
            name = self.book.state.nodes[key].name
            self.news.say(f"{name} serves weights at {url}" if not failure else f"{name}'s address {url}: {failure}")
            self.book.changes.notify()
        proof.failure = failure

    async def _challenge(self, session: aiohttp.ClientSession, key: bytes, url: str) -> str:
        """Ask one address for the relay's signature; returns the network address that answered."""
        place = parse_http(url)
        address = await self._resolve(place.host, place.port)
        host = f"[{address}]" if ":" in address else address
        nonce = os.urandom(16)
        target = f"http://{host}:{place.port}/v1/{self.book.run.id.hex()}/challenge?nonce={nonce.hex()}"
        async with session.get(target, allow_redirects=False, headers={"Host": place.authority}) as reply:
            if reply.status != 200:
                raise TransportError(f"answered the challenge with HTTP {reply.status}")
            raw = b""
            while len(raw) <= MAX_CHALLENGE_BYTES and (chunk := await reply.content.readany()):
                raw += chunk
        envelope = open_envelope(raw, run=self.book.run.id, kind=CHALLENGE_KIND, signer=key)
        if envelope.record(Challenge).nonce != nonce:
            raise TransportError("answered the challenge with another nonce")
        return address

    async def _resolve(self, host: str, port: int) -> str:
        """One address of `host` that may be used: global unicast, or anything where the run allows private ones."""
        for found in await self._addresses(host, port):
            address = ipaddress.ip_address(found)
            if self.blocked.covers(found):
                raise TransportError(f"{host} is {found}, which the operator blocked")
            if self.book.run.manifest.allow_private or (address.is_global and not address.is_multicast):
                return str(address)
        raise TransportError(f"{host} is no public address; the relay must announce one that is")

    async def _addresses(self, host: str, port: int) -> list[str]:
        """What a host resolves to. An IP address is itself: it never waits behind somebody else's silent name."""
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._resolvers, ask)
            return [str(where[0]) for *_, where in found]


def _same_join(known: JoinRequest, new: JoinRequest) -> bool:
    return (known.name, known.transport_key, known.addresses) == (new.name, new.transport_key, new.addresses)
