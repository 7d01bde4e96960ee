"""The drop test in the coordinator: who gives up what went badly is suspended, who loses at random is not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import trainer.drops
from protocol import codec
from protocol.evidence import VerdictEvidence
from protocol.records import REJECT, DropEvidence, Lease
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer import batches, leases
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
        index = self.desk.upload(lease, lambda _: self.reward(lease))
        while self.desk.open_jobs(index):
            await self.desk.judge(index)

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
    desk.judging.drops._details.clear()  # as an auditor: from the files alone
    assert drop_evidence(desk.state, node.key, desk.judging.drops.seen, said.upto) == said
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


async def beyond_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lossy:
    """A run whose `node` dropped enough bad leases, and was not tested yet."""
    run = Lossy(tmp_path, monkeypatch)
    monkeypatch.setattr(trainer.drops, "DROP_LOG_E", 1e9)
    for name in ("node", "other-0", "other-1"):
        await run.answer(run.desk.lease(name))
    for _ in range(60):
        assert await run.round(chooses=True)
    monkeypatch.undo()
    node = run.desk.state.nodes[actor_identity("node").public]
    run.desk.judging.drops._due.setdefault(node.key, run.desk.book.window.batches)
    return run


async def test_nobody_is_suspended_while_a_lease_it_lost_is_on_its_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await beyond_chance(tmp_path, monkeypatch)
    desk = run.desk
    node = desk.state.nodes[actor_identity("node").public]
    lease = desk.lease("node")
    desk.lose(lease)
    assert not desk.judging.drops.run() and node.state == "active"
    again = desk.lease("other-0")
    assert again.nonce == lease.nonce
    await run.answer(again)
    desk.tick()
    assert (node.state, node.reason) == ("suspended", "dropped-results")
    desk.close()


async def test_who_sits_on_what_was_lost_holds_the_test_up_for_a_few_batches_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await beyond_chance(tmp_path, monkeypatch)
    desk = run.desk
    drops, node = desk.judging.drops, desk.state.nodes[actor_identity("node").public]
    desk.lose(desk.lease("node"))
    held = desk.lease("other-0")  # an accomplice, who never returns it
    assert desk.state.leases[held.lease_id].reissue_of is not None
    assert not drops.run()
    desk.book.window.batches += trainer.drops.PATIENCE * desk.book.window.max_staleness
    assert not drops.run()
    desk.book.window.batches += 1
    assert drops.run() and (node.state, node.reason) == ("suspended", "dropped-results")
    desk.close()


async def test_who_returns_bad_leases_only_when_no_batch_can_take_them_is_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ever given up: each bad lease is held until it is too old, then sent, perfectly honest."""
    monkeypatch.setattr(leases, "BACKOFF_MS", 0)
    desk = Desk(
        tmp_path / "run",
        steps=120,
        leases__tasks_per_step=8,
        leases__tasks_per_lease=1,
        leases__probation_accepted=2,
    )
    for i in range(2):
        desk.join(f"validator-{i}", "validator")
    desk.publish(0)
    luck, chance = {}, random.Random(3)
    held: list[Lease] = []

    async def answer(lease: Lease) -> None:
        index = desk.upload(lease, lambda _: worth(lease))
        while desk.open_jobs(index):
            await desk.judge(index)

    def worth(lease: Lease) -> float:
        return luck.setdefault((lease.nonce, lease.tasks), chance.random())

    def take(name: str) -> Lease | None:
        return desk.lease(name) if desk.decide(name).kind == "issue" else None

    names = ("evil", "slow", "bob", "cat", "dan")
    for name in names:
        for _ in range(2):
            await answer(desk.lease(name))
    evil, slow = (desk.state.nodes[actor_identity(name).public] for name in ("evil", "slow"))
    while evil.state != "suspended":
        window = desk.book.window
        for lease in [one for one in held if one.step < window.batches - window.max_staleness]:
            held.remove(lease)
            await answer(lease)
        for name in names:
            lease = take(name)
            if lease is None:
                continue
            if worth(lease) < 0.5 if name == "evil" else name == "slow" and chance.random() < 0.5:
                held.append(lease)  # slow is late too, whatever the reward
            else:
                await answer(lease)
        desk.tick()
        groups = batches.choose(desk.state, window)
        if groups and evil.state != "suspended":
            step = window.batches
            assert step < 110
            desk.book.append("batch", batches.closed(step, 0, batches.entries_of(desk.state, groups), b"x"))
            desk.publish(step + 1)
    assert evil.reason == "dropped-results" and slow.state == "active"
    assert desk.book.window.losses[slow.key] == 0 and desk.judging.drops._late[slow.key] > 5
    assert desk.state.problems == []
    counted = desk.judging.drops._late
    await desk.book.commit()
    desk.close()
    desk.open()
    assert desk.judging.drops._late == counted  # a restart knows them too
    desk.close()


async def test_a_reward_of_any_size_leaves_the_coordinator_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Lossy(tmp_path, monkeypatch)
    for name in ("node", "other-0", "other-1"):
        await run.answer(run.desk.lease(name))
    for _ in range(6):
        assert await run.round(chooses=True)
    desk = run.desk
    for verdict, (rewards, _) in desk.judging.drops._details.items():  # as an older release may have taken them in
        for position in range(len(rewards)):
            rewards[position] = 1.7e308 * (-1) ** (verdict % 2)
    desk.judging.drops._due.setdefault(actor_identity("node").public, 0)
    desk.tick()
    assert actor_identity("node").public not in desk.judging.drops._due
    desk.close()


async def test_one_turn_tests_one_node_when_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Lossy(tmp_path, monkeypatch)
    for name in ("node", "other-0", "other-1"):
        await run.answer(run.desk.lease(name))
    drops, seconds, tested = run.desk.judging.drops, 0.0, []
    keys = [actor_identity(name).public for name in ("node", "other-0", "other-1")]

    def slow(node: object) -> bool:
        nonlocal seconds
        seconds += 0.2
        tested.append(node)
        return False

    monkeypatch.setattr(drops, "_test", slow)
    drops.monotonic = lambda: seconds
    drops._due = {key: 3 - n for n, key in enumerate(keys)}
    drops._late.update(dict.fromkeys(keys, 4))
    for turn in range(1, 4):
        drops.run()
        drops.run()  # too early for the next one
        assert len(tested) == turn
        seconds += trainer.drops.LATE_IDLE_SHARE * 0.2 + 1
    assert [node.key for node in tested] == keys[::-1]  # who waits longest comes first
    run.desk.close()


async def test_who_was_suspended_is_heard_again_when_a_validator_lied_and_tested_again_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await beyond_chance(tmp_path, monkeypatch)
    desk = run.desk
    node = desk.state.nodes[actor_identity("node").public]
    for _ in range(2):
        await run.answer(desk.lease("other-0"))
        desk.tick()
    assert node.reason == "dropped-results"
    first = node.suspended_index
    liar = actor_identity("validator-0").public
    said = next(v for s in desk.state.submissions.values() for v in s.verdicts.values() if v.validator == liar)
    desk.book.append("evidence.verdict", VerdictEvidence(said.index, 0, REJECT, "proof-mismatch", 0.0, 0.0))
    assert node.state != "suspended", "half of what was known is unknown now"
    while waiting := [index for index in desk.book.window.unjudged if desk.open_jobs(index)]:
        for index in waiting:  # the other validator looks at what the liar alone had accepted
            await desk.judge(index)
    for _ in range(3):
        desk.tick()
        while waiting := [index for index in desk.book.window.unjudged if desk.open_jobs(index)]:
            for index in waiting:
                await desk.judge(index)
    assert (node.state, node.reason) == ("suspended", "dropped-results") and node.suspended_index != first
    entries = [stored.entry() for stored in desk.book.ledger.entries()]
    both = [codec.decode(DropEvidence, entry.body) for entry in entries if entry.event == "evidence.drop"]
    assert len(both) == 2
    for said_then in both:  # as an auditor of the whole archive computes each of them
        assert drop_evidence(desk.state, node.key, desk.judging.drops.seen, said_then.upto) == said_then
    desk.close()
