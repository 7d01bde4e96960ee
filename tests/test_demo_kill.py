"""A demo in which everything is killed once, with -9, at seeded steps, and brought back by its printed command.

Coordinator, learner, origin, both relays, a validator, an inference node, an engine, a libp2p host. One demo serves a
test per role, so that a failure says whose it is. Invariants 2, 3 and 9 of DESIGN 7, and the audit.

Not covered: dishonest nodes and `--resume` (`test_demo.py`), every role stopped at once (`test_demo_continued.py`), a
minute without validators (`test_demo_frozen.py`), power loss, of which a kill shows nothing because the kernel keeps
its pages (`test_trainer_door.py`).
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protocol.envelope import parse
from protocol.identity import load_identity
from protocol.manifest import Run
from protocol.records import Receipt
from protocol.segments import read_segments
from protocol.state import RunState
from tests.demo_run import BIN, Demo, Loadable, kill
from trainer.processes import marked
from trainer.summary import read_state

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

SEED = int(os.environ.get("HEADWATER_KILL_SEED", "20261129"))
STEPS = 110
FIRST_KILL, LAST_KILL = 5, 60
"""Steps between which everything is killed; the rest is for whoever takes longest to come back."""
NODES = 3
MAIN = ("coordinator", "learner", "origin", "relay-1", "relay-2", "validator-1", "node-1")
"""Killed, and started again by their line in `logs/commands.txt`."""
CHILDREN = {"engine": ("node-2", "node.engine"), "host": ("node-3", "protocol.hostd")}
"""Killed, and started again by the node they belong to."""
ROLES = (*MAIN, *CHILDREN)


@dataclass
class Kill:
    """What one kill did."""

    step: int
    time_ms: int
    is_back: Callable[[], bool]
    back_ms: int = 0
    back_step: int = 0
    loadable: list[str] = field(default_factory=list)
    """What `Loadable` found wrong right after it."""


@dataclass
class Past:
    """What the demo of the kills left behind."""

    demo: Demo
    kills: dict[str, Kill]
    summary: dict[str, Any]
    state: RunState
    run: Run
    loadable: Loadable


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    """Kills by the run's own clock, its steps: nobody waits until the last one killed is back."""
    demo = Demo(
        tmp_path_factory.mktemp("kills") / "run", "--steps", str(STEPS), "--nodes", str(NODES), "--seed", str(SEED)
    )
    rng = random.Random(SEED)
    order = rng.sample(ROLES, len(ROLES))
    moments = sorted(rng.uniform(FIRST_KILL, LAST_KILL) for _ in order)
    print(f"seed {SEED}: " + ", ".join(f"{role} at {at:.1f}" for role, at in zip(order, moments, strict=True)))
    kills: dict[str, Kill] = {}
    try:
        demo.await_("the first steps", lambda: demo.step() >= FIRST_KILL, 300)
        with Loadable(demo.dir) as loadable:
            for role, at in zip(order, moments, strict=True):
                demo.await_(f"step {at:.0f}, to kill {role}", lambda at=at: _look(demo, kills, at), 240)
                time.sleep(at % 1 / 2)
                kills[role] = _kill(demo, role)
                loadable.look()
                kills[role].loadable = list(loadable.problems)
            demo.await_("the end", lambda: _look(demo, kills, STEPS) and demo.finished(), 300)
            summary = demo.end(100)
            loadable.look()
        run, state = read_state(demo.dir)
        yield Past(demo, kills, summary, state, run, loadable)
        assert marked(run.id.hex()) == [], "nothing of the run stays"
    finally:
        demo.close()


def _look(demo: Demo, kills: dict[str, Kill], step: float) -> bool:
    """Note who is back; whether the run has come to `step`."""
    now = demo.step()
    for killed in kills.values():
        if not killed.back_ms and killed.is_back() and not demo.finished():
            killed.back_ms, killed.back_step = time.time_ns() // 1_000_000, now
    return now >= int(step)


def _kill(demo: Demo, role: str) -> Kill:
    """Kill one role, and do what a person would: start it by its line in `logs/commands.txt`."""
    step = demo.step()
    if role in CHILDREN:
        owner, word = CHILDREN[role]
        old = demo.child_pid(owner, word)
        done = Kill(step, time.time_ns() // 1_000_000, lambda: demo.child_pid(owner, word, 0) not in (0, old))
        kill(old)
        return done
    old = demo.main_pid(role)
    done = Kill(step, time.time_ns() // 1_000_000, lambda: _is_back(demo, role, old))
    kill(old)
    demo.start_again(role)
    return done


def _is_back(demo: Demo, role: str, old: int) -> bool:
    status = demo.status()
    if role == "coordinator":
        return status.get("pid") not in (None, old) and status.get("phase") == "running"
    if role in ("learner", "origin"):
        return demo.main_pid(role, 0) not in (0, old)
    node = demo.node(role)
    return bool(node.get("alive")) and node.get("pid") != old and node.get("state") != "joining"


# --- one test a role -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_it_comes_back_and_the_run_goes_on(past: Past, role: str) -> None:
    killed = past.kills[role]
    assert killed.back_ms, f"seed {SEED}: killed at step {killed.step}, it was not back before the end"
    assert killed.back_step < STEPS
    assert killed.loadable == [], f"seed {SEED}: after the kill at step {killed.step}"


@pytest.mark.parametrize("role", ["node-1", "node-2", "node-3"])
def test_a_node_whose_part_was_killed_works_again(past: Past, role: str) -> None:
    """Its process, its engine, its libp2p host: afterwards it has returned leases as before."""
    killed = past.kills[{"node-1": "node-1", "node-2": "engine", "node-3": "host"}[role]]
    key = _key(past, role)
    later = [s for s in past.state.submissions.values() if s.owner == key and s.time > killed.back_ms]
    assert later, f"{role} was back at step {killed.step} and returned nothing"


def test_a_validator_that_was_killed_judges_again(past: Past) -> None:
    killed, key = past.kills["validator-1"], _key(past, "validator-1")
    after = [
        state.index
        for submission in past.state.submissions.values()
        for state in submission.verdicts.values()
        if state.validator == key and submission.time > killed.back_ms
    ]
    assert after


# --- the invariants ------------------------------------------------------------------------------------------------


def test_the_run_is_finished_and_nobody_honest_was_held_to_account(past: Past) -> None:
    assert past.summary["steps"] == STEPS
    assert past.state.finished is not None and past.state.problems == []
    assert past.summary["honest_rejected"] == 0
    assert {node.state for node in past.state.nodes.values()} <= {"active", "probation"}
    log = read_segments(past.demo.dir / "ledger", past.run)
    assert log.problems == []
    assert max(sealed.entry.incarnation for sealed in log.entries) == 1, "the coordinator was killed once"


def test_invariant_2_no_rollout_is_lost_after_its_receipt_and_none_is_trained_twice(past: Past) -> None:
    assert check_receipts(past.demo, past.state) >= 50
    check_batches(past.state)


def test_invariant_3_a_vanished_peer_costs_only_its_own_unfinished_leases(past: Past) -> None:
    """Closed without a submission: only leases of the node, or the engine, that was killed, open at that moment."""
    lost = [lease for lease in past.state.leases.values() if lease.status == "closed"]
    own = {_key(past, "node-1"): past.kills["node-1"], _key(past, "node-2"): past.kills["engine"]}
    for lease in lost:
        killed = own.get(lease.owner)
        who = past.state.nodes[lease.owner].name
        assert killed is not None, f"a lease of {who} was lost ({lease.reason}), which nobody killed; seed {SEED}"
        assert lease.time <= killed.back_ms, f"{who} lost a lease issued when it was back ({lease.reason})"
    counted = Counter(lease.owner for lease in lost)
    assert all(number <= 2 for number in counted.values()), "more than a node may hold open"


def test_invariant_9_nothing_that_a_loader_takes_was_ever_half_there(past: Past) -> None:
    assert past.loadable.looked >= 20 and past.loadable.held >= STEPS
    assert past.loadable.problems == []


def test_the_audit_holds(past: Past) -> None:
    audit(past.demo.dir)


# --- what must hold ------------------------------------------------------------------------------------------------


def check_receipts(demo: Demo, state: RunState) -> int:
    """Every receipt in every home is in the ledger, with an outcome. Returns how many there are."""
    count = 0
    for home in sorted((demo.dir / "nodes").iterdir()):
        key = load_identity(home / "identity.pem").public
        for path in home.glob("runs/*/receipts/*.hw"):
            receipt = parse(path.read_bytes()).record(Receipt)
            submission = state.submissions.get(receipt.index)
            assert submission is not None, (
                f"{home.name} has a receipt for entry {receipt.index}, which is no submission"
            )
            assert (submission.lease_id, submission.intent.digest) == (receipt.lease_id, receipt.digest)
            assert submission.owner == key
            statuses = {outcome.status for outcome in submission.outcomes}
            assert statuses <= {"accepted", "rejected", "inconclusive", "discarded"}, f"{home.name}: {statuses}"
            count += 1
        if not list(home.glob("runs/*/receipts/*.hw")):
            continue
        done = subprocess.run(
            [str(BIN / "node"), "receipts", "--home", str(home), "--ledger", str(demo.dir), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{home.name}: {done.stdout[-1000:]} {done.stderr}"
    return count


def check_batches(state: RunState) -> None:
    """Batches 0, 1, 2, ...; no sample in two of them, none from a policy that is too old."""
    assert state.manifest is not None
    assert sorted(state.batches) == list(range(len(state.batches)))
    seen: Counter[tuple[bytes, int, int]] = Counter()
    for batch in state.batches.values():
        for entry in batch.closed.entries:
            lease = state.leases[state.submissions[entry.submission].lease_id].lease
            task, sample = divmod(entry.rollout, lease.samples)
            seen[(lease.nonce, lease.tasks[task], sample)] += 1
            assert 0 <= batch.closed.step - lease.step <= state.manifest.leases.max_staleness
    assert max(seen.values()) == 1


def audit(run_dir: Path) -> None:
    done = subprocess.run(
        [str(BIN / "verifier"), "audit", str(run_dir), "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stdout[-2000:]}{done.stderr}"


def _key(past: Past, name: str) -> bytes:
    return load_identity(past.demo.dir / "nodes" / name / "identity.pem").public
