"""An open lease sent once more: its node must be able to take it, however long the coordinator was away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.control import Member
from protocol.envelope import open_envelope, parse
from protocol.records import Lease, LeaseReply, LeaseRequest
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer import leases


async def ask(desk: Desk, name: str, wait_ms: int = 0) -> LeaseReply:
    request = LeaseRequest(64, 0, 0, wait_ms)
    return await desk.coordinator.leasing.next(
        Member(parse(desk.sealed(name, "lease.next", request)), b""), request, b""
    )


def taken(desk: Desk, name: str, raw: bytes) -> Lease:
    """What the node does with an answer: the envelope must hold at its own corrected time."""
    envelope = open_envelope(
        raw,
        run=desk.book.run.id,
        kind="lease",
        signer=desk.book.coordinator.public,
        audience=actor_identity(name).public,
        now=desk.book.now_ms(),
    )
    return envelope.record(Lease)


@pytest.mark.parametrize(("lease_ms", "away_s"), [(60_000, 300), (60_000, 100_000), (600_000, 800)])
async def test_a_lease_that_outlived_the_coordinators_absence_is_taken_up_at_once(
    tmp_path: Path, lease_ms: int, away_s: int
) -> None:
    desk = Desk(tmp_path / "run", leases__lease_ms=lease_ms)
    desk.publish(0)
    for name in ("validator-0", "validator-1"):
        desk.join(name, "validator")
    lease = desk.lease("node")
    first = await ask(desk, "node")
    await desk.book.commit()
    desk.close()

    desk.clock_ahead_ms = 1000 * away_s
    desk.open()
    try:
        for name in ("node", "validator-0", "validator-1"):
            desk.here(name)
        desk.tick()
        size = desk.book.ledger.size
        again = await asyncio.wait_for(ask(desk, "node"), 5)
        assert again.lease is not None and again.lease != first.lease
        assert taken(desk, "node", again.lease) == lease, "the same tasks, nonce, policy and bounds"
        held = desk.state.leases[lease.lease_id]
        until = leases.ends_at(desk.book.window, held)
        assert abs(parse(again.lease).expires_at - until) < 1000, "signed for what is left of it"
        assert desk.book.ledger.size == size, "the ledger holds one lease"
        index = desk.upload(lease)
        await desk.judge(index)
        assert desk.state.problems == [] and not desk.book.window.losses
        assert desk.state.nodes[actor_identity("node").public].accepted == 2
        assert await desk.audit_draws() == []
    finally:
        desk.close()


async def test_without_an_absence_the_same_bytes_are_sent_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    try:
        desk.publish(0)
        desk.lease("node")
        first, second = await ask(desk, "node"), await ask(desk, "node")
        assert first.lease is not None and first.lease == second.lease
    finally:
        desk.close()


async def test_a_lease_whose_time_is_over_is_not_sent_again_and_its_closing_is_no_loss(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", leases__lease_ms=100)
    desk.publish(0)
    lease = desk.lease("node")
    await desk.book.commit()
    desk.close()
    desk.clock_ahead_ms = 300_000
    desk.open()
    try:
        desk.seconds += (leases.GRACE_MS + 200) / 1000
        desk.here("node")
        reply = await ask(desk, "node")
        assert reply.lease is None and "time of its open lease is over" in reply.reason
        clock = asyncio.create_task(desk.coordinator.leasing.expire_forever())
        for _ in range(50):
            await asyncio.sleep(0.1)
            if desk.state.leases[lease.lease_id].status == "closed":
                break
        clock.cancel()
        assert desk.state.leases[lease.lease_id].reason == "expired"
        assert not desk.book.window.losses, "an absence excuses it in the drop test"
    finally:
        desk.close()
