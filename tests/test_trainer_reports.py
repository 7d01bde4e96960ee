"""Reports of relays: what becomes a ledger entry, what only a suspicion, and what nothing at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.control import Member
from protocol.envelope import Envelope, seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import Identity, load_identity, peer_id_text
from protocol.records import Heartbeat, JoinRequest, RelayReport, RelayStamp
from protocol.run_files import key_file
from protocol.state import fold
from shardcast.passes import open_passes
from shardcast.records import SHARD_KIND, STAMP_KIND, ShardRecord
from tests.scripted_swarm import NOISE, SMALL
from trainer import config, keys
from trainer.coordinator import Coordinator
from trainer.errors import RefusedEntryError
from trainer.init import make_run
from trainer.members import Proof
from trainer.reports import LEFT_OUT_S, MAX_REPORTS, network_of

NODES = [Identity.from_seed(bytes([n]) * 32) for n in range(20, 26)]
FIRST, SECOND = (Identity.from_seed(bytes([n]) * 32) for n in (31, 32))
PUBLICATION = b"p" * 16


class Desk:
    """A coordinator's parts in this process; members' networks and time are the test's to say."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.now = 0.0
        self.where: dict[bytes, str] = {}
        coordinator.reports.monotonic = lambda: self.now
        coordinator.reports.address_of = self.where.get
        self._sequence = 0

    def sealed(self, who: Identity, kind: str, record: object) -> Envelope:
        self._sequence += 1
        run, clock = self.coordinator.run, self.coordinator.book
        return seal(
            who, kind, record, run=run.id, sequence=self._sequence, issued_at=clock.now_ms(),
            audience=run.manifest.coordinator,
        )  # fmt: skip

    async def join(self, who: Identity, role: str, url: str = "") -> None:
        addresses = (url,) if url else ()
        request = JoinRequest(role, role, who.public, os.urandom(16), "", (256,), addresses, "")
        await self.coordinator.members.join(Member(self.sealed(who, "join", request), who.public), request, b"")

    def evidence(
        self, relay: Identity, *, stamped: bytes, signed: bytes, origin: Identity | None = None
    ) -> RelayReport:
        """A report over what the relay stamped and what the origin signed."""
        own = load_identity(self.coordinator.run_dir / "keys" / "origin.pem")
        shard = ShardRecord(PUBLICATION, 0, 9, 9, signed, bytes(32), signed)
        stamp = self.sealed(relay, STAMP_KIND, RelayStamp(PUBLICATION, 0, stamped, 0)).raw
        return RelayReport(relay.public, stamp, self.sealed(origin or own, SHARD_KIND, shard).raw, "wrong")

    async def report(self, who: Identity, report: RelayReport) -> str:
        member = Member(self.sealed(who, "relay.report", report), who.public)
        return (await self.coordinator.reports.report(member, report, b"")).note

    def trust(self, *who: Identity) -> None:
        """As after enough accepted rollouts."""
        for member in who:
            self.coordinator.book.state.nodes[member.public].state = "active"

    def events(self) -> list[str]:
        return [stored.entry().event for stored in self.coordinator.book.ledger.entries()]

    async def parents(self, who: Identity) -> list[bytes]:
        """Keys of those a member is sent to."""
        beat = Heartbeat(0, 0, "", 0)
        reply = await self.coordinator.members.heartbeat(
            Member(self.sealed(who, "heartbeat", beat), who.public), beat, b""
        )
        found = open_passes(self.coordinator.run, who.public, reply.passes)
        assert tuple(parent.url for parent in found) == reply.weights
        return [parent.key for parent in found]


@pytest.fixture
async def desk(tmp_path: Path) -> Iterator[Desk]:  # type: ignore[misc]
    run_dir = tmp_path / "run"
    relays = [FIRST.public, SECOND.public]
    make_run(run_dir, steps=3, thresholds=NOISE, validators=[], overrides=SMALL, relays=relays)
    coordinator = Coordinator(config.load(run_dir))
    coordinator.book.grant("relay", relays)
    desk = Desk(coordinator)
    try:
        for number, relay in enumerate((FIRST, SECOND)):
            await desk.join(relay, "relay", f"http://127.0.0.1:{9000 + number}")
            for proof in coordinator.members.proofs.values():
                proof.proven = True
        for number, node in enumerate(NODES):
            await desk.join(node, "inference")
            desk.where[node.public] = f"{10 + number}.0.0.1"
        yield desk
    finally:
        coordinator.book.close()


async def test_a_proven_lie_suspends_the_relay_and_nobody_is_sent_to_it_again(desk: Desk) -> None:
    assert await desk.parents(NODES[0]) == [SECOND.public, FIRST.public]
    assert "suspended" in await desk.report(NODES[0], desk.evidence(SECOND, stamped=b"x" * 32, signed=b"y" * 32))
    state = desk.coordinator.book.state
    assert (state.nodes[SECOND.public].state, state.nodes[SECOND.public].reason) == ("suspended", "relay-lied")
    assert state.nodes[FIRST.public].state != "suspended"
    assert await desk.parents(NODES[0]) == [FIRST.public]
    assert await desk.parents(SECOND) == []
    note = await desk.report(NODES[1], desk.evidence(SECOND, stamped=b"x" * 32, signed=b"y" * 32))
    assert "already" in note and desk.events().count("relay.accused") == 1
    again = fold(stored.entry() for stored in desk.coordinator.book.ledger.entries())
    assert again == state and again.problems == [], "whoever reads the ledger comes to the same"


async def test_nothing_is_charged_to_a_key_that_did_not_sign_a_lie(desk: Desk) -> None:
    wrong = {
        "the same bytes": desk.evidence(FIRST, stamped=b"y" * 32, signed=b"y" * 32),
        "another relay's stamp": RelayReport(
            FIRST.public, desk.evidence(SECOND, stamped=b"x" * 32, signed=b"y" * 32).stamp,
            desk.evidence(SECOND, stamped=b"x" * 32, signed=b"y" * 32).shard, "",
        ),
        "no origin's record": desk.evidence(FIRST, stamped=b"x" * 32, signed=b"y" * 32, origin=NODES[0]),
        "no relay": desk.evidence(NODES[1], stamped=b"x" * 32, signed=b"y" * 32),
        "garbage": RelayReport(FIRST.public, b"garbage", b"garbage", ""),
        "nothing": RelayReport(FIRST.public, b"", b"", ""),
    }  # fmt: skip
    for name, report in wrong.items():
        with pytest.raises(ProtocolError):
            await desk.report(NODES[0], report)
        assert "relay.accused" not in desk.events(), name
        assert desk.coordinator.book.state.nodes[FIRST.public].state != "suspended", name
    with pytest.raises(ProtocolError) as caught:
        await desk.report(Identity.generate(), desk.evidence(FIRST, stamped=b"x" * 32, signed=b"y" * 32))
    assert caught.value.code == ReasonCode.NOT_JOINED


def suspicion(desk: Desk, relay: Identity) -> RelayReport:
    """A report without proof: all it shows is the origin's record, which every child has."""
    return RelayReport(
        relay.public, b"", desk.evidence(relay, stamped=b"y" * 32, signed=b"y" * 32).shard, "wrong bytes"
    )


async def test_suspicion_takes_three_networks_and_lasts_an_hour(desk: Desk) -> None:
    desk.trust(*NODES)
    report = suspicion(desk, SECOND)
    desk.where[NODES[1].public] = "10.0.77.9"  # the first one's network
    desk.where[NODES[5].public] = "no address"
    for node in (NODES[0], NODES[1], NODES[0], NODES[2], NODES[5]):
        await desk.report(node, report)
        assert await desk.parents(NODES[0]) == [SECOND.public, FIRST.public], "two networks are not three"
    await desk.report(NODES[3], report)
    assert await desk.parents(NODES[0]) == [FIRST.public]
    assert (
        "relay.accused" not in desk.events() and desk.coordinator.book.state.nodes[SECOND.public].state != "suspended"
    )
    desk.now += LEFT_OUT_S + 1
    assert await desk.parents(NODES[0]) == [SECOND.public, FIRST.public]


async def test_suspicion_of_strangers_in_probation_changes_nothing(desk: Desk) -> None:
    """Keys and joins are free: three of them in three networks must not move a relay."""
    for relay in (FIRST, SECOND):
        for node in NODES:
            assert "probation" in await desk.report(node, suspicion(desk, relay))
    assert await desk.parents(NODES[5]) == [SECOND.public, FIRST.public]
    assert await desk.parents(SECOND) == [FIRST.public, desk.coordinator.run.manifest.origin]


async def test_suspicion_of_those_never_sent_to_a_relay_changes_nothing(desk: Desk) -> None:
    desk.trust(*NODES)
    members = desk.coordinator.members
    members.parents._passes.clear()  # as after a restart, before anybody's first heartbeat
    for node in NODES[:3]:
        assert "not sent" in await desk.report(node, suspicion(desk, SECOND))
    assert await desk.parents(NODES[5]) == [SECOND.public, FIRST.public]
    for node in NODES[:2]:
        await desk.parents(node)
        assert await desk.report(node, suspicion(desk, SECOND)) == "noted"
    assert await desk.parents(NODES[5]) == [SECOND.public, FIRST.public], "two children are not three"


async def test_suspicion_never_takes_the_last_usable_relay(desk: Desk) -> None:
    desk.trust(*NODES)
    for node in NODES[:3]:
        await desk.report(node, suspicion(desk, SECOND))
    assert await desk.parents(NODES[5]) == [FIRST.public]
    for node in NODES[:3]:
        await desk.report(node, suspicion(desk, FIRST))
    assert set(await desk.parents(NODES[5])) == {FIRST.public, SECOND.public}, "no other is there: both serve"
    origin = desk.coordinator.run.manifest.origin
    assert await desk.parents(SECOND) == [FIRST.public, origin], "and the origin stays the second's spare"
    desk.coordinator.members.sessions[FIRST.public].heard = -1e9
    assert await desk.parents(NODES[5]) == [SECOND.public]
    assert desk.coordinator.book.state.nodes[SECOND.public].state != "suspended"


async def test_one_member_cannot_flood_the_desk(desk: Desk) -> None:
    report = desk.evidence(FIRST, stamped=b"y" * 32, signed=b"y" * 32)
    for _ in range(MAX_REPORTS):
        with contextlib.suppress(ProtocolError):
            await desk.report(NODES[0], report)
    with pytest.raises(ProtocolError) as caught:
        await desk.report(NODES[0], report)
    assert caught.value.code == ReasonCode.QUOTA
    await desk.report(NODES[1], desk.evidence(FIRST, stamped=b"x" * 32, signed=b"y" * 32))


async def test_passes_are_made_once_and_name_only_who_is_there(desk: Desk) -> None:
    members = desk.coordinator.members
    node = desk.coordinator.book.state.nodes[NODES[0].public]
    assert members.sources(node) == members.sources(node), "the same envelopes, not new ones at every heartbeat"
    members.proofs = {pair: Proof(since=-1e9) for pair in members.proofs}
    assert await desk.parents(NODES[0]) == []
    assert await desk.parents(FIRST) == [desk.coordinator.run.manifest.origin]


async def test_a_relay_that_was_there_and_is_gone_is_not_waited_for(desk: Desk) -> None:
    members, origin = desk.coordinator.members, desk.coordinator.run.manifest.origin
    assert await desk.parents(SECOND) == [FIRST.public, desk.coordinator.run.manifest.origin]
    members.sessions[FIRST.public].heard = -1e9
    assert await desk.parents(SECOND) == [], "it never answered a challenge: it may still come"
    for (key, _), proof in members.proofs.items():
        if key == FIRST.public:
            proof.address = "127.0.0.1"
    assert await desk.parents(SECOND) == [origin]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("10.0.0.1", "10.0.255.1", True), ("10.0.0.1", "10.1.0.1", False), ("2001:db8:1::1", "2001:db8:2::1", True)],
)
def test_networks_are_what_one_person_rarely_has_three_of(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same
    assert network_of(None) is network_of("x") is None


async def test_whoever_stole_the_origins_key_frames_no_relay_once_it_is_revoked(desk: Desk) -> None:
    """The relay stamped what it got, the thief signs another record of the same shard beside it."""
    run_dir, state = desk.coordinator.run_dir, desk.coordinator.book.state
    stolen = load_identity(run_dir / "keys" / "origin.pem")
    settings = config.load(run_dir)
    keys.rotate(settings, "origin", None)
    keys.revoke(settings, peer_id_text(stolen.public), "stolen", None)
    await desk.coordinator.book.commit()
    assert desk.coordinator._take_updates() == 2
    size = desk.coordinator.book.ledger.size
    framed = desk.evidence(FIRST, stamped=b"x" * 32, signed=b"y" * 32, origin=stolen)
    for report in (framed, replace(framed, stamp=b"")):
        with pytest.raises(ProtocolError) as caught:
            await desk.report(NODES[0], report)
        assert caught.value.code is ReasonCode.BAD_SIGNATURE
    with pytest.raises(RefusedEntryError):
        desk.coordinator.book.append("relay.accused", subject=desk.sealed(NODES[0], "relay.report", framed).raw)
    assert desk.coordinator.book.ledger.size == size and state.nodes[FIRST.public].state != "suspended"
    own = load_identity(key_file(run_dir, "origin", desk.coordinator.run.manifest.origin))
    lie = desk.evidence(FIRST, stamped=b"x" * 32, signed=b"y" * 32, origin=own)
    assert "suspended" in await desk.report(NODES[0], lie)
