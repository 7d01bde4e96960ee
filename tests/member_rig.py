"""A coordinator in this process for tests of a member: real keys, envelopes, sequences, HTTP door and ledger tree.

    rig = Rig(folder)
    await rig.start()
    member = rig.member()             a real Member with its own home; `folder` may be one that worked before

Only the way between them is short: `Wire` hands a frame to the coordinator's `ControlServer` instead of sending it over
libp2p, and can be cut, delayed or made to lie. Clocks are given, so an hour passes at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from node.heads import HeadKeeper
from node.log import EventLog
from node.manifest import HeldManifest
from node.member import Member
from node.status import StatusFile
from protocol.chain import Chain, Revocation, RunUpdate, delegate, pack_updates, seal_update
from protocol.clock import Clock
from protocol.control import ControlClient, ControlFrame, ControlServer
from protocol.envelope import seal
from protocol.errors import TransportError
from protocol.identity import Identity, load_or_create_identity, parse_peer_id, peer_id_text
from protocol.manifest import open_manifest, run_id_of
from protocol.merkle import MerkleLog, consistency_proof, leaf_hash
from protocol.records import Heartbeat, HeartbeatReply, JoinReply, JoinRequest, TreeHead
from protocol.sequences import SequenceGuard, Sequences
from tests.archive_builder import identity, make_manifest


@dataclass
class Time:
    """This machine's two clocks, seconds; a test moves them."""

    wall_s: float = 1_760_000_000.0
    monotonic_s: float = 100.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


@dataclass
class Wire:
    """Stands where a member's libp2p host process stands."""

    rig: Rig
    transport: bytes = b"t" * 32
    cut: bool = False
    lie: ControlFrame | None = None
    """What somebody in between answers instead of the coordinator."""

    async def request(self, address: str, frame: ControlFrame, deadline_s: float, *, dial_s: float = 0) -> ControlFrame:
        if self.cut or parse_peer_id(address.rpartition("/p2p/")[2]) != self.rig.transport.public:
            raise TransportError("nobody is there")
        if self.lie is not None:
            return self.lie
        return await self.rig.server.handle(self.transport, frame)


class Rig:
    """A run, its coordinator, and what its replies say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time_s = 1_760_000_000.0
        """The coordinator's own clock."""
        self.coordinator: Identity = identity("coordinator")
        self.transport: Identity = identity("transport")
        self.leaves: list[bytes] = [leaf_hash(bytes([n])) for n in range(200)]
        self.size = 0
        self.proof_broken = False
        self.state, self.reason, self.finished = "active", "", False
        self.joins = 0
        self.late_ms = 0
        """Heartbeat replies say a time this long ago."""
        self._numbers = iter(range(1, 1_000_000))
        self._runner: web.AppRunner | None = None
        self.wire = Wire(self)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/{run}/updates", self._updates)
        app.router.add_get("/v1/{run}/consistency", self._consistency)
        app.router.add_post("/v1/{run}/{kind}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.door = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        manifest = make_manifest(
            coordinator_transport=self.transport.public,
            control=(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_text(self.transport.public)}",),
            ingress=(self.door,),
            versions=(0x0100, 0x01FF),
        )
        raw = seal(identity("root"), "manifest", manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw
        self.genesis = open_manifest(raw)
        self.chain = Chain(self.genesis)
        self.served = self.chain
        self.session = aiohttp.ClientSession()
        self.serve()

    async def stop(self) -> None:
        await self.session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def serve(self) -> None:
        """(Re)start the coordinator with the keys and manifest it has now."""
        sequences = Sequences(self.folder / f"coordinator-{self.coordinator.peer_id}.json")
        clock = Clock(wall=lambda: self.time_s, monotonic=lambda: self.time_s)
        self.server = ControlServer(
            run=self.chain.current, identity=self.coordinator, sequences=sequences, guard=SequenceGuard(), clock=clock
        )
        self.server.on("join", JoinRequest, self._join)
        self.server.on("heartbeat", Heartbeat, self._heartbeat)

    # --- the coordinator's side -----------------------------------------------------------------------------------

    def update(self, *, rotate: dict[str, Identity] | None = None, revoke: bytes | None = None, **changes: Any) -> None:
        """The root signs the next link and the coordinator takes it up."""
        self.chain = self.extended(self.chain, rotate=rotate, revoke=revoke, **changes)
        self.served = self.chain
        self.coordinator = (rotate or {}).get("coordinator", self.coordinator)
        self.transport = (rotate or {}).get("coordinator_transport", self.transport)
        self.serve()

    def extended(
        self, chain: Chain, *, rotate: dict[str, Identity] | None = None, revoke: bytes | None = None, **changes: Any
    ) -> Chain:
        root, run = identity("root"), self.genesis.id
        papers = []
        for role, key in (rotate or {}).items():
            papers.append(
                delegate(root, run, key.public, (role,), not_before=0, expires=2**62, sequence=next(self._numbers))
            )
            changes[role] = key.public
        gone = () if revoke is None else (Revocation(revoke, 0, "it was lost on a train"),)
        link = RunUpdate(delegations=tuple(papers), revocations=gone, **changes)
        return chain.extend(seal_update(root, chain, link, sequence=next(self._numbers), issued_at=1))

    def tree(self, size: int, leaves: list[bytes] | None = None) -> bytes:
        """A signed head over the first `size` leaves."""
        log = MerkleLog()
        for leaf in (leaves or self.leaves)[:size]:
            log.append(leaf)
        head = TreeHead(size, log.root(), 1)
        return seal(self.coordinator, "tree", head, run=self.genesis.id, sequence=next(self._numbers), issued_at=1).raw

    async def _join(self, member: Any, request: JoinRequest, attachment: bytes) -> JoinReply:
        self.joins += 1
        door = self.chain.current.manifest.ingress[0]
        return JoinReply(
            request.nonce, int(1000 * self.time_s), self.state, ("http://127.0.0.1:9",), door, 100, "welcome",
            self.chain.hash, self.tree(self.size) if self.size else b"",
        )  # fmt: skip

    async def _heartbeat(self, member: Any, beat: Heartbeat, attachment: bytes) -> HeartbeatReply:
        return HeartbeatReply(
            time=int(1000 * self.time_s) - self.late_ms, state=self.state, weights=(), step=7, finished=self.finished,
            manifest=self.chain.hash, tree=self.tree(self.size) if self.size else b"", accepted=12, rejected=1,
            reason=self.reason, waits_for="the learner and the origin: the weights of step 8",
        )  # fmt: skip

    async def _control(self, request: web.Request) -> web.Response:
        return web.Response(status=503) if self.wire.cut else await self.server.handle_http(request)

    async def _updates(self, request: web.Request) -> web.Response:
        return web.Response(body=pack_updates(self.served.updates))

    async def _consistency(self, request: web.Request) -> web.Response:
        first, second = int(request.query["first"]), int(request.query["second"])
        proof = consistency_proof(self.leaves[:second], first)
        if self.proof_broken:
            proof = [bytes(32) for _ in proof]
        return web.Response(body=b"".join(proof))

    # --- the member's side ----------------------------------------------------------------------------------------

    def member(self, home: Path, time: Time | None = None, role: str = "inference") -> Member:
        """A member with what its home remembers."""
        clocks = time or Time()
        home.mkdir(parents=True, exist_ok=True)
        log = EventLog(file=home / "log.jsonl")
        held = HeldManifest(self.genesis, home, session=self.session, log=log, monotonic=clocks.monotonic)
        own = load_or_create_identity(home / "identity.pem")
        clock = Clock(wall=clocks.wall, monotonic=clocks.monotonic)
        control = ControlClient(
            run=held.run, identity=own, sequences=Sequences(home / "sequences.json"), host=self.wire, clock=clock
        )
        heads = HeadKeeper(
            self.genesis.id, home, ingress=lambda: member.ingress, session=self.session, log=log,
            monotonic=clocks.monotonic,
        )  # fmt: skip
        member = Member(
            manifest=held, heads=heads, identity=own, transport=self.wire.transport, control=control, clock=clock,
            status=StatusFile(home / "status.json"), log=log, role=role, name="n", come_back="node join ...",
            wall=clocks.wall, monotonic=clocks.monotonic,
        )  # fmt: skip
        return member


def events(home: Path, name: str) -> list[dict[str, Any]]:
    """The events of one name in a member's log."""
    lines = (home / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
