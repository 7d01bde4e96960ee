"""How a role ends: between two assignments, after the one in work, or at once, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from node.errors import NodeError, RunFinishedError, UpgradeRequiredError
from node.join import supervise, to_the_end
from node.log import EventLog
from node.worker import Worker
from protocol.clock import Clock
from protocol.envelope import seal
from protocol.errors import DecodeError
from protocol.records import Ack
from tests.member_rig import events
from tests.scripted_swarm import actor_identity

COORDINATOR = actor_identity("coordinator")


class Steps(Worker[bytes]):
    """Assignments that are done when the test says so."""

    noun = "step"

    def __init__(self, log: EventLog, answers: list[bytes | None]) -> None:
        super().__init__(None, log)
        self.answers = answers
        self.begun: list[bytes] = []
        self.done: list[bytes] = []
        self.go_on = asyncio.Event()
        self.abandoned: list[str] = []
        self.patience_s = 5.0

    async def ask(self) -> tuple[bytes | None, int]:
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0), 1

    async def open(self, raw: bytes) -> bytes | None:
        if raw == b"broken":
            raise DecodeError("it does not hold")
        return None if raw == b"known" else raw

    async def do(self, assignment: bytes) -> None:
        self.begun.append(assignment)
        await self.go_on.wait()
        self.done.append(assignment)

    async def wind_down(self, leaving) -> None:
        self.ended_in_time = await self.finish(self.patience_s)

    async def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)


@pytest.fixture
def log(tmp_path):
    log = EventLog(file=tmp_path / "log.jsonl")
    yield log
    log.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def raising(after: asyncio.Event, error: Exception) -> None:
    await after.wait()
    raise error


async def test_one_after_another_and_what_does_not_hold_is_skipped_with_a_reason(log, tmp_path):
    role = Steps(log, [None, b"broken", b"known", b"a", b"b"])
    role.go_on.set()
    task = asyncio.create_task(role.work())
    await until(lambda: role.done == [b"a", b"b"])
    task.cancel()
    assert [event["reason"] for event in events(tmp_path, "step.invalid")] == ["it does not hold"]


async def test_an_upgrade_waits_for_the_assignment_in_work_and_takes_no_other(log):
    role, told = Steps(log, [b"a", b"b"]), asyncio.Event()
    error = UpgradeRequiredError("newer")
    task = asyncio.create_task(supervise(role, lambda: None, role.work(), raising(told, error)))
    await until(lambda: role.begun == [b"a"])
    told.set()
    await asyncio.sleep(0.1)
    assert not task.done() and not role.done
    role.go_on.set()
    with pytest.raises(UpgradeRequiredError):
        await task
    assert role.done == [b"a"] and role.ended_in_time and role.begun == [b"a"] and not role.abandoned


async def test_what_is_not_done_in_time_is_not_waited_for(log):
    role, told = Steps(log, [b"a"]), asyncio.Event()
    role.patience_s = 0.05
    told.set()
    with pytest.raises(RunFinishedError):
        await supervise(role, lambda: None, role.work(), raising(told, RunFinishedError("over")))
    assert not role.done


async def test_the_owners_wish_hands_back_says_goodbye_and_ends_everything(log):
    role, order = Steps(log, [b"a"]), []
    role.abandon = lambda reason: _note(order, "handed back")
    task = asyncio.create_task(supervise(role, lambda: order.append("goodbye"), role.work(), asyncio.Event().wait()))
    await until(lambda: role.begun == [b"a"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["handed back", "goodbye"]


async def test_a_node_that_cannot_go_on_hands_back_what_it_has(log):
    role, told = Steps(log, [b"a"]), asyncio.Event()
    task = asyncio.create_task(supervise(role, lambda: None, role.work(), raising(told, NodeError("disk is full"))))
    await until(lambda: role.begun == [b"a"])
    told.set()
    with pytest.raises(NodeError, match="disk is full"):
        await task
    assert role.abandoned == ["the node could not go on: disk is full"]


async def test_a_part_that_ends_without_a_reason_is_no_success(log):
    role, told = Steps(log, []), asyncio.Event()
    told.set()
    with pytest.raises(NodeError, match="without saying why"):
        await supervise(role, lambda: None, role.work(), told.wait())


class Signed(Steps):
    """Takes what the run's coordinator signed for this node and lately."""

    noun = "lease"

    def __init__(self, member: object, log: EventLog, answers: list[bytes | None]) -> None:
        super().__init__(log, answers)
        self._member = member

    async def open(self, raw: bytes) -> bytes:
        return self._envelope(raw, (COORDINATOR.public,)).payload


@pytest.mark.parametrize(
    ("issued_s", "words"),
    [
        (-400, "its envelope's time was over 280 s ago by the coordinator's own clock"),
        (300, "dated 300 s ahead of the run's time"),
    ],
)
async def test_an_old_assignment_is_called_old_and_no_clock_is_blamed(log, tmp_path, issued_s, words):
    now, node = 1_760_000_000_000, actor_identity("node")
    clock = Clock(wall=lambda: 5.0, monotonic=lambda: 7.0)  # this machine's own clock is off by decades
    clock.adjust(now)
    member = SimpleNamespace(run=SimpleNamespace(id=bytes(32)), identity=node, clock=clock)

    def sealed(issued_at: int) -> bytes:
        return seal(
            COORDINATOR, "lease", Ack("x"), run=bytes(32), sequence=1, issued_at=issued_at, audience=node.public
        ).raw

    role = Signed(member, log, [sealed(now + 1000 * issued_s), sealed(now)])
    role.go_on.set()
    task = asyncio.create_task(role.work())
    await until(lambda: role.done)
    task.cancel()
    (invalid,) = events(tmp_path, "lease.invalid")
    assert invalid["code"] == "expired" and words in invalid["reason"]
    assert "check this machine's clock" not in invalid["reason"]


async def _note(order: list[str], word: str) -> None:
    order.append(word)


@pytest.mark.parametrize("left", ["leaves by itself", "is stopped"])
async def test_a_signal_while_a_node_cleans_up_cuts_nothing_short(left: str) -> None:
    """A demo ends its nodes when the run is finished, which is when they leave anyway: engines' folders stayed."""
    done: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        await go_on.wait()
        done.append("engine")

    async def take_part() -> None:
        async with to_the_end(contextlib.AsyncExitStack()) as stack:
            stack.callback(done.append, "host")
            stack.push_async_callback(slow)
            if left == "leaves by itself":
                raise RunFinishedError("the run is finished")
            await asyncio.Event().wait()

    work = asyncio.create_task(take_part())
    await asyncio.sleep(0)
    if left == "is stopped":
        work.cancel()
    async with asyncio.timeout(10):
        await begun.wait()
        for _ in range(3):
            work.cancel()
            await asyncio.sleep(0)
        assert not work.done()
        go_on.set()
        with pytest.raises(RunFinishedError if left == "leaves by itself" else asyncio.CancelledError):
            await work
    assert done == ["engine", "host"]
