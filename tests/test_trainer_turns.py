"""Waiting requests: one of each key, and one count of the crowd however many wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from protocol.control import Member
from protocol.envelope import parse
from protocol.records import JobRequest, LeaseRequest
from tests.coordinator_desk import Desk
from trainer import leases
from trainer.turns import Turns

Ask = Callable[[], Awaitable[object]]


def asks(desk: Desk, name: str, role: str) -> Ask:
    """How a member asks for work and is willing to wait 20 s."""
    if role == "inference":
        lease = LeaseRequest(64, 0, 0, 20_000)
        return lambda: desk.coordinator.leasing.next(
            Member(parse(desk.sealed(name, "lease.next", lease)), b""), lease, b""
        )
    job = JobRequest(20_000)
    return lambda: desk.judging.next(Member(parse(desk.sealed(name, "job.next", job)), b""), job, b"")


@pytest.mark.parametrize(("name", "role"), [("node", "inference"), ("validator-0", "validator")])
async def test_a_newer_request_of_a_key_answers_the_older_one_at_once(tmp_path: Path, name: str, role: str) -> None:
    desk = Desk(tmp_path / "run")
    try:
        desk.join(name, role)
        ask = asks(desk, name, role)
        waiting = [asyncio.create_task(ask())]
        await asyncio.sleep(0.05)
        assert not waiting[0].done(), "nothing is published: it waits"
        begun = time.monotonic()
        for _ in range(20):
            waiting.append(asyncio.create_task(ask()))
            reply = await asyncio.wait_for(waiting[-2], 5)
            assert getattr(reply, "lease", None) is None and getattr(reply, "job", None) is None
        assert time.monotonic() - begun < 5
        assert not waiting[-1].done()
        waiting[-1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        desk.close()


async def test_the_one_that_waits_still_gets_what_it_waits_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    try:
        desk.join("node")
        ask = asks(desk, "node", "inference")
        older, newer = asyncio.create_task(ask()), asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        desk.publish(0)
        desk.book.changes.notify()
        reply = await asyncio.wait_for(newer, 5)
        assert reply.lease and older.done() and older.result().lease is None
    finally:
        desk.close()


async def test_a_validator_that_waits_hears_of_its_job_and_nobody_else_is_woken(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    try:
        desk.publish(0)
        for name, role in (("node", "inference"), ("other", "inference"), ("validator-0", "validator")):
            desk.join(name, role)
        lease = desk.lease("node")
        waits = asyncio.create_task(asks(desk, "validator-0", "validator")())
        await asyncio.sleep(0.05)
        for_work = desk.book.changes.ticket()
        desk.lease("other")
        assert not for_work.is_set(), "one lease more is no reason for the others to ask again"
        desk.upload(lease)
        assert for_work.is_set()
        reply = await asyncio.wait_for(waits, 5)
        assert reply.job
    finally:
        desk.close()


async def test_the_crowd_is_counted_once_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path / "run", leases__tasks_per_step=1)
    counted, count = [], leases.Census.of
    monkeypatch.setattr(leases.Census, "of", lambda *state: counted.append(1) or count(*state))
    try:
        desk.publish(0)
        for number in range(30):
            desk.join(f"node-{number}")
        while desk.decide(f"node-{len(desk.state.leases)}").lease is not None:
            desk.lease(f"node-{len(desk.state.leases)}")
        assert desk.state.leases, "the first ones were given work"
        tasks = [asyncio.create_task(asks(desk, f"node-{n}", "inference")()) for n in range(10, 30)]
        await asyncio.sleep(0.05)
        counted.clear()
        for _ in range(5):
            desk.book.changes.notify()
            await asyncio.sleep(0.05)
        assert len(counted) <= 1 and not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        desk.close()


async def test_turns_of_different_keys_leave_each_other_alone_and_nothing_is_kept() -> None:
    turns = Turns()
    with turns.take(b"a") as first, turns.take(b"b") as other, turns.take(b"a") as second:
        assert (first.over, second.over, other.over) == (True, False, False)
        await asyncio.wait_for(first.wait(asyncio.Event(), 60), 1)
    assert turns._held == {}
