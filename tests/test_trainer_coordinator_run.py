"""A real coordinator process over real libp2p and HTTP, with scripted members: no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol import codec
from protocol.errors import ProtocolError, ReasonCode
from protocol.records import Batch
from protocol.segments import read_segments
from protocol.state import RunState, fold
from tests.coordinator_desk import wrong_draws
from tests.scripted_swarm import Actor, Swarm, rejecting


@contextlib.asynccontextmanager
async def background(*coroutines) -> AsyncIterator[list[asyncio.Task]]:
    """Run these beside the test; whatever fails in them fails the test."""
    tasks = [asyncio.create_task(work) for work in coroutines]
    try:
        yield tasks
    finally:
        while not all(task.done() for task in tasks):
            for task in tasks:  # more than once: Python 3.11's wait_for can swallow a cancellation
                task.cancel()
            await asyncio.wait(tasks, timeout=0.5)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        # A member notices the coordinator's end as a transport error or a cancelled wait; anything else is a defect.
        if isinstance(result, Exception) and not (isinstance(result, ProtocolError) and _is_the_end(result)):
            raise result


def _is_the_end(error: ProtocolError) -> bool:
    return error.code in (ReasonCode.UNREACHABLE, ReasonCode.DEADLINE)


def sealed_state(swarm: Swarm) -> RunState:
    log = read_segments(swarm.run_dir / "ledger", swarm.run)
    assert log.problems == []
    state = fold([sealed.entry for sealed in log.entries])
    assert state.problems == []
    return state


def check_archive(swarm: Swarm, steps: int) -> RunState:
    """Every batch is there, names accepted rollouts only, nothing is in two of them, and every draw holds."""
    state = sealed_state(swarm)
    assert wrong_draws(swarm.run_dir) == [] and all(period.secret is not None for period in state.periods)
    seen: set[tuple[int, int]] = set()
    for step in range(steps):
        batch = codec.decode(Batch, swarm.batch(step).read_bytes())
        named = [(e.submission, e.rollout) for e in state.batches[step].closed.entries]
        assert [(r.submission, r.rollout) for r in batch.rollouts] == named
        assert not seen.intersection(named)
        seen.update(named)
        for rollout in batch.rollouts:
            submission = state.submissions[rollout.submission]
            assert submission.outcomes[rollout.rollout].status == "accepted"
            assert submission.outcomes[rollout.rollout].verdict == rollout.verdict
            assert step - state.leases[submission.lease_id].lease.step <= swarm.run.manifest.leases.max_staleness
    return state


async def test_a_run_goes_round_and_ends(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=4)
    async with swarm:
        node, *validators = [
            await swarm.join("node"),
            await swarm.join("validator-0", "validator"),
            await swarm.join("validator-1", "validator"),
        ]
        work = [node.work_forever(), *(validator.judge_forever() for validator in validators)]
        async with background(*work), asyncio.timeout(90):
            await swarm.play_learner()
            while not (await node.heartbeat()).finished:
                await asyncio.sleep(0.05)
        assert await swarm.exit_code() == 0
    state = check_archive(swarm, 4)
    assert state.finished is not None
    held = state.nodes[node.identity.public]
    assert held.state == "active" and held.rejected == 0
    first = min(state.leases.values(), key=lambda lease: lease.index)
    assert first.rollouts == 2, "a stranger's first lease is small"
    tasks = [task for lease in state.leases.values() if lease.reissue_of is None for task in lease.lease.tasks]
    assert len(tasks) == len(set(tasks)), "no task is leased twice"
    for lease_id, receipt in node.receipts.items():
        assert state.leases[lease_id].submission == receipt.index
    status = json.loads((swarm.run_dir / "status.json").read_text())
    assert status["phase"] == "finished" and status["http_fallbacks"] == 0 and status["ledger_problems"] == 0
    assert status["rollouts"]["accepted"] == held.accepted


async def test_a_finished_run_that_is_served_again_says_so_and_gets_no_entry(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=1, coordinator__linger_s=1.0)
    async with swarm:
        node = await swarm.join("node")
        validators = [await swarm.join(f"validator-{i}", "validator") for i in range(2)]
        work = [node.work_forever(), *(validator.judge_forever() for validator in validators)]
        async with background(*work), asyncio.timeout(90):
            await swarm.play_learner()
            assert await swarm.exit_code() == 0
        sealed = {path.name: path.read_bytes() for path in (swarm.run_dir / "ledger").iterdir()}
        status = (swarm.run_dir / "status.json").read_bytes()
        weights = swarm.run_dir / "checkpoints" / "step-00000001" / "model.safetensors"
        weights.parent.mkdir()
        weights.touch()
        weights.with_name("checkpoint.json").touch()
        assert await _said_again(swarm) == 0
        assert {path.name: path.read_bytes() for path in (swarm.run_dir / "ledger").iterdir()} == sealed
        assert (swarm.run_dir / "status.json").read_bytes() == status, "what its last minute was like stays"
        # Killed between the last entry and its seal: the next start completes the archive, and adds nothing to it.
        last = max((swarm.run_dir / "ledger").glob("segment-*.hwl"))
        last.unlink()
        (swarm.run_dir / "status.json").write_text(json.dumps(json.loads(status) | {"phase": "draining"}))
        assert await _said_again(swarm) == 0
    log = read_segments(swarm.run_dir / "ledger", swarm.run)
    assert log.problems == [] and log.entries[-1].entry.event == "run.finished"
    check_archive(swarm, 1)
    assert json.loads((swarm.run_dir / "status.json").read_text())["phase"] == "finished"
    said = (swarm.run_dir / "logs" / "coordinator.log").read_text()
    assert said.count("step 1 of 1 is done, and there is nothing left to serve") == 2
    assert (
        said.count(f"its weights: {weights}") == 2
        and said.count("check it: verifier audit ") == 2
        and "again" not in said
    )


async def _said_again(swarm: Swarm) -> int:
    swarm.serve()
    return await swarm.exit_code()


async def test_whoever_reaches_the_http_door_could_have_come_over_libp2p(tmp_path: Path) -> None:
    """The other order made members of a coordinator that starts slowly fall back to HTTP for no other reason."""
    swarm = Swarm.make(tmp_path / "run")
    control = int(swarm.run.manifest.control[0].split("/tcp/")[1].split("/")[0])
    ingress = int(swarm.run.manifest.ingress[0].rpartition(":")[2])
    async with swarm, asyncio.timeout(90):
        while not await _answers(ingress):
            await asyncio.sleep(0.001)
        assert await _answers(control)


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.heavy
async def test_a_coordinator_killed_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=7, leases__probation_accepted=2)
    async with swarm:
        node = await swarm.join("node")
        validators = [await swarm.join(f"validator-{i}", "validator") for i in range(2)]
        members = [_stubborn(actor) for actor in [node, *validators]]
        async with background(*members, swarm.play_learner(pause_s=0.5)), asyncio.timeout(240):
            for round_number in range(3):
                while not swarm.batch(2 * round_number).exists():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.17 * round_number)
                swarm.kill()
                if round_number == 1:
                    swarm.batch(0).unlink()
                swarm.serve()
            assert await swarm.exit_code(120) == 0
    state = check_archive(swarm, 7)
    assert state.incarnation == 3
    for lease_id, receipt in node.receipts.items():
        submission = state.submissions[receipt.index]
        assert submission.lease_id == lease_id and submission.intent.digest == receipt.digest


async def _stubborn(actor: Actor) -> None:
    """Go on through every outage, as members do: the upload is repeated until its receipt is there."""
    while True:
        try:
            if actor.role == "validator":
                job = await actor.job()
                if job is not None:
                    await actor.judge(job)
                continue
            reply = await actor.ask()
            if reply.lease is None:
                continue
            lease = actor.open_lease(reply.lease)
            while (await actor.upload(lease)).status != 200:
                await asyncio.sleep(0.1)
        except (ProtocolError, OSError, AssertionError):
            await asyncio.sleep(0.1)
        except Exception as exc:
            if type(exc).__module__.split(".")[0] != "aiohttp":
                raise
            await asyncio.sleep(0.1)


async def test_a_second_validator_must_repeat_a_rejection_before_a_node_is_suspended(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", coordinator__drain_s=0.0)
    async with swarm:
        bad = await swarm.join("bad")
        validators = [await swarm.join(f"validator-{i}", "validator") for i in range(2)]
        swarm.publish(0)
        async with asyncio.timeout(90):
            lease = await bad.lease()
            assert (await bad.upload(lease)).status == 200
            first, job = await _next_of(validators)
            assert job.round == 1
            await first.judge(job, rejecting)
            assert (await bad.heartbeat()).state == "paused"
            assert (await bad.ask(wait_ms=0)).lease is None
            second, again = await _next_of(validators)
            assert again.round == 2 and second is not first
            assert (await second.judge(again, rejecting)).note == "counted"
            assert (await second.judge_again(again)).note == "already counted"
            reply = await bad.ask()
            assert reply.lease is None and reply.state == "suspended" and "suspended" in reply.reason
    state = sealed_state(swarm)
    assert state.nodes[bad.identity.public].rejected == 2
    events = json.loads((swarm.run_dir / "status.json").read_text())["recent_events"]
    assert any("bad is suspended" in event["text"] for event in events)


async def test_a_rejection_that_is_not_repeated_holds_nothing_against_the_node(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run")
    async with swarm:
        node = await swarm.join("node")
        validators = [await swarm.join(f"validator-{i}", "validator") for i in range(2)]
        swarm.publish(0)
        async with asyncio.timeout(90):
            await node.upload(await node.lease())
            first, job = await _next_of(validators)
            await first.judge(job, rejecting)
            second, again = await _next_of(validators)
            await second.judge(again)
            assert (await node.heartbeat()).state == "probation"
            assert (await node.ask()).lease is not None
    held = sealed_state(swarm).nodes[node.identity.public]
    assert (held.accepted, held.rejected, held.inconclusive) == (0, 0, 2)


async def _next_of(validators: list[Actor]):
    """The validator that was drawn, and its job."""
    tasks = {asyncio.create_task(validator.job()): validator for validator in validators}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                validator = tasks.pop(task)
                if task.result() is not None:
                    return validator, task.result()
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
    pytest.fail("no validator was drawn")
