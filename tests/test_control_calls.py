"""Signed calls between members and a coordinator: over real libp2p hosts, over HTTP, and against forgers."""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import control
from protocol.clock import Clock
from protocol.control import ControlClient, ControlFrame, ControlServer, Member, fetch_manifest
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import EnvelopeError, ManifestError, ProtocolError, ReasonCode, TransportError
from protocol.frames import pack_frame, unpack_frame
from protocol.held import HeldBytes
from protocol.host import HostProcess
from protocol.identity import Identity, load_or_create_identity
from protocol.manifest import (
    LeasePolicy,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from protocol.records import Ack, ErrorReply, Heartbeat, HeartbeatReply, JoinReply, JoinRequest, LeaseFailed
from protocol.sequences import SequenceGuard, Sequences

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ROOT, COORDINATOR, ORIGIN = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))


def make_run(transport: bytes, addresses: list[str], ingress: tuple[str, ...] = ()) -> Run:
    manifest = RunManifest(
        "test",
        0,
        ROOT.public,
        COORDINATOR.public,
        ORIGIN.public,
        transport,
        tuple(addresses),
        ingress,
        "fp32",
        ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 64, ()),
        (),
        SamplingSpec(1.0, 8, ()),
        Thresholds(1e-3, 8, 1e-2, 1e-4, 1e-3, 0, 0, 0.0, 0, 0.0, 0.0, ""),
        LeasePolicy(8, 8, 1, 2, 4, 8, 60000, 1000, 0.1),
        100,
        (256, 511),
        True,
        "",
        "",
    )
    return open_manifest(seal(ROOT, "manifest", manifest, run=run_id_of(manifest), sequence=1, issued_at=0).raw)


@dataclass
class Coordinator:
    """A real coordinator's control plane that keeps what it was asked."""

    run: Run
    server: ControlServer
    host: HostProcess | None = None
    asked: list[tuple[Member, object, bytes]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    async def on_join(self, member: Member, record: JoinRequest, attachment: bytes) -> JoinReply:
        self.asked.append((member, record, attachment))
        return JoinReply(record.nonce, self.clock.now_ms(), "probation", (), "", 1000, "")

    async def on_heartbeat(self, member: Member, record: Heartbeat, attachment: bytes) -> HeartbeatReply:
        self.asked.append((member, record, attachment))
        if record.activity == "wait":
            await asyncio.sleep(record.done / 1000)
        if record.activity == "crash":
            raise RuntimeError("a bug")
        return HeartbeatReply(self.clock.now_ms(), "active", (), record.step, False)

    async def on_failed(self, member: Member, record: LeaseFailed, attachment: bytes) -> Ack:
        raise ProtocolError("no such lease here", ReasonCode.UNKNOWN_LEASE)


def make_coordinator(tmp_path: Path, run: Run) -> Coordinator:
    sequences = Sequences(tmp_path / "coordinator-sequences.json")
    server = ControlServer(run=run, identity=COORDINATOR, sequences=sequences, guard=SequenceGuard(), clock=Clock())
    coordinator = Coordinator(run, server)
    server.on("join", JoinRequest, coordinator.on_join)
    server.on("heartbeat", Heartbeat, coordinator.on_heartbeat)
    server.on("lease.failed", LeaseFailed, coordinator.on_failed)
    return coordinator


@dataclass
class World:
    """A coordinator and as many members as a test asks for."""

    tmp_path: Path
    coordinator: Coordinator
    ingress: web.AppRunner
    members: list[tuple[HostProcess, ControlClient]] = field(default_factory=list)

    async def member(self, clock: Clock | None = None, run: Run | None = None) -> ControlClient:
        home = self.tmp_path / f"member{len(self.members)}"
        host = HostProcess(home=home, key=home / "transport.pem", listen=None)
        client = ControlClient(
            run=run or self.coordinator.run,
            identity=load_or_create_identity(home / "identity.pem"),
            sequences=Sequences(home / "sequences.json"),
            host=host,
            clock=clock or Clock(),
        )
        self.members.append((host, client))
        await host.start()
        return client

    def host_of(self, client: ControlClient) -> HostProcess:
        return next(h for h, c in self.members if c is client)


@pytest.fixture
async def world(tmp_path):
    home = tmp_path / "coordinator"
    calls: list[Coordinator] = []

    async def handle(key: bytes, frame: ControlFrame) -> ControlFrame:
        return await calls[0].server.handle(key, frame)

    host = HostProcess(home=home, key=home / "transport.pem", listen=LOOPBACK, handler=handle, max_connections=200)
    await host.start()
    app = web.Application()
    runner = web.AppRunner(app)

    async def post(request: web.Request) -> web.Response:
        return await calls[0].server.handle_http(request)

    app.router.add_post("/v1/{run}/{kind}", post)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    run = make_run(host.transport, host.addresses, (f"http://127.0.0.1:{port}",))
    calls.append(make_coordinator(tmp_path, run))
    calls[0].host = host
    world = World(tmp_path, calls[0], runner)
    yield world
    for member_host, client in world.members:
        await client.close()
        await member_host.close()
    await host.close()
    await runner.cleanup()


def a_join(transport: bytes) -> JoinRequest:
    return JoinRequest("inference", "n", transport, os.urandom(16), "test", (256, 256), (), "")


def a_heartbeat(activity: str = "", done: int = 0) -> Heartbeat:
    return Heartbeat(0, 7, activity, done)


async def test_a_member_finds_the_run_joins_and_calls(world):
    address = world.coordinator.run.manifest.control[0]
    client = await world.member()
    host = world.host_of(client)
    run = await fetch_manifest(host, address, 20, world.coordinator.run.id)
    assert run.id == world.coordinator.run.id
    with pytest.raises(ManifestError):
        await fetch_manifest(host, address, 20, bytes(32))
    joined = await client.call("join", a_join(host.transport), JoinReply)
    assert joined.state == "probation"
    reply = await client.call("heartbeat", a_heartbeat(), HeartbeatReply, attachment=b"beside")
    assert reply.step == 7
    member, _, attachment = world.coordinator.asked[-1]
    assert (member.key, member.transport_key, attachment) == (client.identity.public, host.transport, b"beside")
    with pytest.raises(ProtocolError) as caught:
        await client.call("lease.failed", LeaseFailed(bytes(16), ""), Ack)
    assert caught.value.code is ReasonCode.UNKNOWN_LEASE
    with pytest.raises(ProtocolError) as caught:
        await client.call("heartbeat", a_heartbeat("crash"), HeartbeatReply)
    assert caught.value.code is ReasonCode.INTERNAL
    assert (client.http_fallbacks, world.coordinator.server.http_fallbacks) == (0, 0)


async def test_three_hundred_strangers_join_one_after_another(world):
    """Half of them stay, so that more come over the host's life than it has slots."""
    run, host = world.coordinator.run, world.coordinator.host
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "peers" / "strangers.py"),
        *("joins", run.manifest.control[0], "300", run.id.hex(), COORDINATOR.public.hex()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 170)
    assert process.returncode == 0, err.decode()[-2000:]
    assert json.loads(out) == {"joined": 300, "refused": []}
    assert len({m.key for m, _, _ in world.coordinator.asked}) == 300
    assert (await host.stats())["refused"] == 0
    assert host.restarts == 0


async def test_a_join_must_come_over_the_transport_key_it_names(world):
    client = await world.member()
    with pytest.raises(ProtocolError) as caught:
        await client.call("join", a_join(Identity.generate().public), JoinReply)
    assert caught.value.code is ReasonCode.NOT_OWNER
    assert world.coordinator.asked == []


async def test_a_machine_an_hour_off_joins_and_works(world):
    wrong = Clock(wall=lambda: time.time() - 3600)
    client = await world.member(clock=wrong)
    with pytest.raises(ProtocolError) as caught:
        await client.call("heartbeat", a_heartbeat(), HeartbeatReply)
    assert caught.value.code is ReasonCode.EXPIRED
    await client.call("join", a_join(world.host_of(client).transport), JoinReply)
    assert 3_500_000 < wrong.skew_ms < 3_700_000, "and can be warned"
    assert (await client.call("heartbeat", a_heartbeat(), HeartbeatReply)).state == "active"


async def test_calls_of_one_kind_keep_their_order_and_kinds_run_side_by_side(world):
    client = await world.member()
    slow = asyncio.create_task(client.call("heartbeat", a_heartbeat("wait", 1500), HeartbeatReply))
    await asyncio.sleep(0.2)
    after = [asyncio.create_task(client.call("heartbeat", a_heartbeat("", n), HeartbeatReply)) for n in range(3)]
    await client.call("join", a_join(world.host_of(client).transport), JoinReply)
    assert not slow.done()
    await asyncio.gather(slow, *after)
    done = [r.done for _, r, _ in world.coordinator.asked if isinstance(r, Heartbeat)]
    assert done == [1500, 0, 1, 2]


@pytest.mark.parametrize("side", ["coordinator", "member"])
async def test_a_call_survives_a_killed_host_process(world, side):
    client = await world.member()
    await client.call("heartbeat", a_heartbeat(), HeartbeatReply)
    under_way = asyncio.create_task(client.call("heartbeat", a_heartbeat("wait", 1500), HeartbeatReply, deadline_s=30))
    await asyncio.sleep(0.5)
    os.kill((world.coordinator.host if side == "coordinator" else world.host_of(client)).pid, signal.SIGKILL)
    assert (await under_way).state == "active"
    sequences = [m.envelope.sequence for m, _, _ in world.coordinator.asked]
    assert sequences == sorted(set(sequences)), "it was signed anew, not sent twice"
    assert client.http_fallbacks == 0


async def test_http_is_tried_only_after_libp2p_failed_for_a_while(world, monkeypatch):
    monkeypatch.setattr(control, "FALLBACK_AFTER_S", 1.5)
    client = await world.member()
    await client.call("heartbeat", a_heartbeat(), HeartbeatReply)
    await world.coordinator.host.close()
    with pytest.raises(TransportError):
        await client.call("heartbeat", a_heartbeat(), HeartbeatReply, deadline_s=1)
    assert client.http_fallbacks == 0
    reply = await client.call("heartbeat", a_heartbeat(), HeartbeatReply, deadline_s=20)
    assert reply.state == "active"
    assert client.http_fallbacks == world.coordinator.server.http_fallbacks == 1
    assert world.coordinator.asked[-1][0].transport_key == b""


async def test_a_call_that_stays_busy_goes_over_http_though_others_get_through(world, monkeypatch):
    """Strangers may keep the room for large frames full while heartbeats pass."""
    monkeypatch.setattr(control, "FALLBACK_AFTER_S", 1.0)
    client = await world.member()
    host = world.host_of(client)
    through = host.request

    async def crowded(address, frame, *rest, **options):
        if frame.attachment:
            raise TransportError("too many requests are in flight", ReasonCode.BUSY)
        return await through(address, frame, *rest, **options)

    monkeypatch.setattr(host, "request", crowded)
    large = asyncio.create_task(client.call("heartbeat", a_heartbeat(), HeartbeatReply, attachment=b"x"))
    join = await client.call("join", a_join(host.transport), JoinReply)
    assert (await large).state == "active"
    assert client.http_fallbacks == 1
    assert join.state == "probation"
    assert [bool(m.transport_key) for m, _, _ in world.coordinator.asked] == [True, False], "the join came over libp2p"


async def test_while_nobody_answers_at_all_libp2p_is_asked_again(world, monkeypatch):
    """A coordinator that starts slowly is away, over HTTP too: that is no reason to leave libp2p."""
    monkeypatch.setattr(control, "FALLBACK_AFTER_S", 3.0)
    client = await world.member()
    away = world.coordinator.host
    await away.close()
    await world.ingress.cleanup()
    under_way = asyncio.create_task(client.call("heartbeat", a_heartbeat(), HeartbeatReply, deadline_s=60))
    await asyncio.sleep(5)  # HTTP was tried meanwhile
    back = HostProcess(
        home=world.tmp_path / "back",
        key=world.tmp_path / "coordinator" / "transport.pem",
        listen=away.addresses[0].partition("/p2p/")[0],
        handler=world.coordinator.server.handle,
    )
    await back.start()
    try:
        assert (await under_way).state == "active"
        assert client.http_fallbacks == 0
    finally:
        await back.close()


# --- the coordinator's side alone ---------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path):
    return make_coordinator(tmp_path, make_run(Identity.generate().public, []))


def sealed(coordinator: Coordinator, signer: Identity, record: object, kind: str = "heartbeat", **changes) -> Envelope:
    settings = {
        "run": coordinator.run.id,
        "sequence": 1,
        "issued_at": coordinator.clock.now_ms(),
        "audience": COORDINATOR.public,
        **changes,
    }
    return seal(signer, kind, record, **settings)


async def refused(coordinator: Coordinator, envelope: bytes, kind: str = "heartbeat", key: bytes = b"") -> str:
    reply = await coordinator.server.handle(key, ControlFrame(kind, envelope))
    assert reply.kind == "error", reply
    opened = open_envelope(reply.envelope, run=coordinator.run.id, kind="error", signer=COORDINATOR.public)
    return opened.record(ErrorReply).code + ("!" if reply.charge else "")


async def test_forged_and_foreign_envelopes_get_a_reason_and_are_charged_to_the_connection(coordinator):
    member = Identity.generate()
    good = sealed(coordinator, member, a_heartbeat())
    flipped = bytearray(good.raw)
    flipped[-1] ^= 1
    for raw, expected in {
        b"": "malformed!",
        os.urandom(300): "malformed!",
        bytes(flipped): "bad-signature!",
        sealed(coordinator, member, a_heartbeat(), run=bytes(32)).raw: "wrong-run!",
        sealed(coordinator, member, a_heartbeat(), audience=ORIGIN.public).raw: "wrong-audience!",
        sealed(coordinator, member, a_heartbeat(), audience=b"").raw: "wrong-audience!",
        sealed(coordinator, member, a_heartbeat(), kind="join").raw: "wrong-kind!",
        sealed(coordinator, member, a_heartbeat(), issued_at=1).raw: "expired",
    }.items():
        assert await refused(coordinator, raw) == expected
    assert await refused(coordinator, good.raw, kind="unknown") == "wrong-kind!"
    assert coordinator.asked == []
    reply = await coordinator.server.handle(b"", ControlFrame("heartbeat", good.raw))
    assert reply.kind == "heartbeat.reply", "the key they named was not charged"


async def test_a_replayed_envelope_is_stale_and_a_badly_shaped_record_malformed(coordinator):
    member = Identity.generate()
    good = sealed(coordinator, member, a_heartbeat())
    assert (await coordinator.server.handle(b"", ControlFrame("heartbeat", good.raw))).kind == "heartbeat.reply"
    assert await refused(coordinator, good.raw) == "stale-sequence"
    shaped = sealed(coordinator, member, LeaseFailed(bytes(16), "x"), sequence=2)
    assert await refused(coordinator, shaped.raw) == "malformed"
    assert len(coordinator.asked) == 1


async def test_what_was_said_before_a_restart_does_not_count_again_over_http(coordinator, tmp_path):
    """A new process forgot the sequences of heartbeats and requests for leases; copies are fresh for four minutes."""
    member, key = Identity.generate(), Identity.generate().public
    early = coordinator.clock.now_ms() - 60_000
    copied = sealed(coordinator, member, a_heartbeat(), sequence=5, issued_at=early).raw
    assert await refused(coordinator, copied) == "stale-sequence"
    assert coordinator.asked == []
    assert (await coordinator.server.handle(key, ControlFrame("heartbeat", copied))).kind == "heartbeat.reply", (
        "over libp2p the transport key tells a copy from its signer"
    )
    anew = sealed(coordinator, Identity.generate(), a_heartbeat(), sequence=6).raw
    assert (await coordinator.server.handle(b"", ControlFrame("heartbeat", anew))).kind == "heartbeat.reply"
    slow = sealed(coordinator, member, a_heartbeat(), sequence=6, issued_at=early).raw
    assert (await coordinator.server.handle(b"", ControlFrame("heartbeat", slow))).kind == "heartbeat.reply", (
        "a member whose sequence is known needs no exact clock"
    )
    joins = sealed(coordinator, Identity.generate(), a_join(bytes(32)), "join", issued_at=0)
    assert (await coordinator.server.handle(b"", ControlFrame("join", joins.raw))).kind == "join.reply"


async def test_strangers_whose_requests_are_refused_leave_nothing_behind(coordinator):
    """Keys are free: what is remembered of one that was refused would be remembered of millions."""
    for kind, record, expected in [
        ("heartbeat", LeaseFailed(bytes(16), "x"), "malformed"),
        ("lease.failed", LeaseFailed(bytes(16), "x"), "unknown-lease"),
        ("join", a_join(bytes(32)), "not-owner"),
    ]:
        raw = sealed(coordinator, Identity.generate(), record, kind).raw
        assert await refused(coordinator, raw, kind, key=bytes([1]) * 32) == expected
    assert coordinator.server._guard.seen == {}
    member = Identity.generate()
    good = sealed(coordinator, member, a_heartbeat(), sequence=7)
    await coordinator.server.handle(b"", ControlFrame("heartbeat", good.raw))
    bad = sealed(coordinator, member, LeaseFailed(bytes(16), "x"), sequence=9)
    assert await refused(coordinator, bad.raw) == "malformed"
    assert await refused(coordinator, sealed(coordinator, member, a_heartbeat(), sequence=8).raw) == "stale-sequence"


async def test_bodies_held_for_strangers_over_http_are_bounded(world, monkeypatch):
    """Hundreds of connections with nine megabytes each would be the coordinator's memory; heartbeats still pass."""
    server = world.coordinator.server
    monkeypatch.setattr(server, "held", HeldBytes(1 << 20, 1 << 18))
    host, port = world.ingress.addresses[0][:2]
    path = f"/v1/{world.coordinator.run.id.hex()}/heartbeat"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {9 << 20}\r\n\r\n".encode()
    held = []
    try:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head + bytes(400_000))
            held.append((reader, writer))
        async with asyncio.timeout(20):
            done, _ = await asyncio.wait(
                [asyncio.create_task(reader.readline()) for reader, _ in held], return_when=asyncio.FIRST_COMPLETED
            )
        assert b" 503 " in done.pop().result()
        assert server.held.total <= 1 << 20
        beat = pack_frame(ControlFrame("heartbeat", sealed(world.coordinator, ROOT, a_heartbeat()).raw))
        small = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(beat)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(host, port)
        held.append((reader, writer))
        writer.write(small + beat)
        async with asyncio.timeout(20):
            assert b" 200 " in await reader.readline()
    finally:
        for _, writer in held:
            writer.close()
    async with asyncio.timeout(20):
        while server.held.total:
            await asyncio.sleep(0.02)


async def test_a_body_that_does_not_come_is_given_up_at_the_slowest_rate(world, monkeypatch):
    monkeypatch.setattr(control, "HEADER_DEADLINE_S", 1.0)
    host, port = world.ingress.addresses[0][:2]
    path = f"/v1/{world.coordinator.run.id.hex()}/heartbeat"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {9 << 20}\r\n\r\n".encode() + bytes(1000))
    try:
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
    finally:
        writer.close()
    assert world.coordinator.server.held.total == 0


async def test_a_forger_s_reply_is_not_believed(world):
    """A host that answers with another key than the coordinator's."""
    home = world.tmp_path / "forger"
    forger = Identity.generate()

    async def forge(key: bytes, frame: ControlFrame) -> ControlFrame:
        asked = open_envelope(frame.envelope, run=world.coordinator.run.id)
        answer = HeartbeatReply(0, "active", (), 0, True)
        reply = seal(
            forger,
            "heartbeat.reply",
            answer,
            run=world.coordinator.run.id,
            sequence=1,
            issued_at=Clock().now_ms(),
            audience=asked.signer,
        )
        return ControlFrame("heartbeat.reply", reply.raw)

    host = HostProcess(home=home, key=home / "transport.pem", listen=LOOPBACK, handler=forge)
    await host.start()
    try:
        real = world.coordinator.run
        manifest = replace(real.manifest, coordinator_transport=host.transport, control=tuple(host.addresses))
        client = await world.member(run=Run(real.id, manifest, real.envelope))
        with pytest.raises(EnvelopeError):
            await client.call("heartbeat", a_heartbeat(), HeartbeatReply)
    finally:
        await host.close()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["heartbeat", "join", "manifest", "error", "x", ""]),
    st.binary(max_size=600),
    st.binary(max_size=64),
)
def test_whatever_arrives_gets_an_answer(tmp_path_factory, kind, envelope, key):
    coordinator = make_coordinator(tmp_path_factory.mktemp("fuzz"), make_run(Identity.generate().public, []))
    reply = asyncio.run(coordinator.server.handle(key, ControlFrame(kind, envelope)))
    assert reply.kind in ("error", "manifest.reply")
    assert unpack_frame(pack_frame(reply)).envelope == reply.envelope


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_a_frame_either_reads_back_or_is_refused(raw):
    try:
        frame = unpack_frame(raw)
    except ProtocolError:
        return
    assert pack_frame(frame) == raw


def test_a_clock_steps_only_with_the_coordinator():
    wall, monotonic = [1000.0], [50.0]
    clock = Clock(wall=lambda: wall[0], monotonic=lambda: monotonic[0])
    assert clock.now_ms() == 1_000_000
    wall[0] -= 500
    monotonic[0] += 2
    assert clock.now_ms() == 1_002_000, "the wall clock is read once"
    clock.adjust(4_602_000, round_trip_ms=200)
    assert clock.now_ms() == 4_602_100
    assert clock.skew_ms == 3_600_100


def test_the_frame_of_the_specification():
    frame = ControlFrame("heartbeat", b"\1\2\3", b"\xff")
    assert pack_frame(frame).hex() == "09" + b"heartbeat".hex() + "00000003" + "010203" + "ff"
    assert unpack_frame(pack_frame(frame)) == frame
