"""The drop test in the coordinator: who gives up what went badly is suspended, who loses at random is not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import trainer.drops
from protocol import codec
from protocol.records import DropEvidence, Lease
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer import leases
from verifier.drops import drop_evidence


class Lossy:
    """A run in which one node loses some leases and two others do them again; rewards are a lease's own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leases, "BACKOFF_MS", 0)
        self.desk = Desk(tmp_path / "run", leases__tasks_per_step=2000, leases__probation_accepted=2)
        for i in range(2):
            self.desk.join(f"validator-{i}", "validator")
        self.desk.publish(0)
        self.random = random.Random(7)
        self.luck: dict[bytes, float] = {}

    def reward(self, lease: Lease) -> float:
        return self.luck.setdefault(lease.nonce, self.random.choice([0.0, 1.0]))

    async def answer(self, lease: Lease) -> None:
        index = self.desk.upload(lease)
        while self.desk.open_jobs(index):
            await self.desk.judge(index, reward=lambda _: self.reward(lease))

    async def round(self, chooses: bool) -> bool:
        """One lease of `node`, lost if it went badly (or else at random), and what the others do then."""
        decision = self.desk.decide("node")
        if decision.kind == "leave":
            return False
        lease = self.desk.lease("node")
        lost = self.reward(lease) < 0.5 if chooses else self.random.random() < 0.4
        if lost:
            self.desk.lose(lease)
            assert "done again" in self.desk.decide("node").reason
        else:
            await self.answer(lease)
        for other in ("other-0", "other-1"):
            await self.answer(self.desk.lease(other))
        self.desk.tick()
        return True


async def test_who_gives_up_bad_leases_is_suspended_by_evidence_that_follows_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Lossy(tmp_path, monkeypatch)
    for _ in range(2):
        for name in ("node", "other-0", "other-1"):
            await run.answer(run.desk.lease(name))
    rounds = 0
    while await run.round(chooses=True):
        rounds += 1
        assert rounds < 150
    desk = run.desk
    node = desk.state.nodes[actor_identity("node").public]
    assert (node.state, node.reason) == ("suspended", "dropped-results")
    assert "leases it gave up" in desk.news() and "node is suspended" in desk.news()
    entries = [stored.entry() for stored in desk.book.ledger.entries()]
    (said,) = [codec.decode(DropEvidence, entry.body) for entry in entries if entry.event == "evidence.drop"]
    desk.judging.drops._rewards.clear()  # as an auditor: from the files alone
    assert drop_evidence(desk.state, node.key, desk.judging.drops.reward, said.upto) == said
    assert desk.state.problems == [] and not node.open_leases
    desk.close()


async def test_who_loses_leases_at_random_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Lossy(tmp_path, monkeypatch)
    for name in ("node", "other-0", "other-1"):
        await run.answer(run.desk.lease(name))
    for _ in range(60):
        assert await run.round(chooses=False)
    assert run.desk.state.nodes[actor_identity("node").public].state == "active"
    assert run.desk.book.window.losses[actor_identity("node").public] > 10
    run.desk.close()


async def test_nobody_is_suspended_while_a_lease_it_lost_is_on_its_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Lossy(tmp_path, monkeypatch)
    monkeypatch.setattr(trainer.drops, "DROP_LOG_E", 1e9)
    for name in ("node", "other-0", "other-1"):
        await run.answer(run.desk.lease(name))
    for _ in range(60):
        assert await run.round(chooses=True)
    monkeypatch.undo()
    desk = run.desk
    node = desk.state.nodes[actor_identity("node").public]
    lease = desk.lease("node")
    desk.lose(lease)
    desk.judging.drops._due.add(node.key)
    desk.judging.drops.monotonic = lambda: 1e9  # however long it took last
    assert not desk.judging.drops.run() and node.state == "active"
    again = desk.lease("other-0")
    assert again.nonce == lease.nonce
    await run.answer(again)
    desk.tick()
    assert (node.state, node.reason) == ("suspended", "dropped-results")
    desk.close()
