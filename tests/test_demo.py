"""The whole river on this machine: real processes, real libp2p, real proofs, kills in the middle, then the audit.

One demo with all twelve kinds of deceivers, who come and go, serves most tests of this file. While it runs, the
coordinator is killed with -9 at a seeded moment and restarted by its printed command, and its libp2p host process is
killed too. A second one is interrupted and resumed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protocol.run_files import load_chain
from protocol.segments import read_segments
from trainer import config
from trainer.deceivers import AT_ONCE, KINDS
from trainer.processes import marked
from trainer.summary import read_state

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent
STEPS = 200
"""Enough for the last of twelve strangers to join and be caught, and for the dropper's leases to rule out chance."""


@dataclass
class Finished:
    """What one demo left behind."""

    run_dir: Path
    summary: dict[str, Any]
    exit_code: int
    notes: dict[str, float] = field(default_factory=dict)


def _status(run_dir: Path) -> dict[str, Any]:
    try:
        value = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _await(what: str, condition: Callable[[], bool], seconds: float) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"waited {seconds} s in vain for {what}"
        time.sleep(0.1)
    return time.monotonic() - begun


def _pids_of(run: str, words: tuple[str, ...]) -> list[int]:
    found = []
    for pid in marked(run):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(pid)
    return found


def _restart_line(run_dir: Path, name: str) -> str:
    lines = (run_dir / "logs" / "commands.txt").read_text().splitlines()
    return lines[lines.index(f"# {name}") + 1]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    process = subprocess.Popen(
        [
            str(BIN / "trainer"),
            "demo",
            "--json",
            "--steps",
            str(STEPS),
            "--nodes",
            "2",
            "--cheats",
            "all",
            "--dir",
            str(run_dir),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    restarted = None
    notes: dict[str, float] = {}
    try:
        moment = random.Random(20261129).uniform(8, 16)
        _await("the first steps", lambda: int(_status(run_dir).get("step", 0)) >= moment, 150)
        run = _status(run_dir)["run"]
        (coordinator,) = _pids_of(run, ("serve", "run.toml"))
        os.kill(coordinator, signal.SIGKILL)
        time.sleep(1.0)
        at_kill = int(_status(run_dir).get("step", 0))
        restarted = subprocess.Popen(["sh", "-c", _restart_line(run_dir, "coordinator")], start_new_session=True)
        notes["coordinator back after"] = _await(
            "steps after the restart", lambda: int(_status(run_dir).get("step", 0)) > at_kill + 2, 60
        )
        (host,) = _pids_of(run, ("protocol.hostd", "coordinator-transport.pem"))
        before = int(_status(run_dir)["step"])
        os.kill(host, signal.SIGKILL)
        notes["host back after"] = _await(
            "steps after the host's death", lambda: int(_status(run_dir).get("step", 0)) > before + 3, 30
        )
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        yield Finished(run_dir, json.loads(out), process.returncode, notes)
        assert marked(run) == [], "nothing of the run stays"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
        if restarted is not None:
            restarted.wait(timeout=10)


def test_reward_climbs_and_no_honest_rollout_is_rejected(demo: Finished) -> None:
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["reward_first"] <= 0.2
    assert summary["reward_last"] >= summary["reward_first"] + 0.1
    assert summary["honest_rejected"] == 0
    assert summary["honest_verified"] >= 1000
    assert summary["rollouts_unverified_trained"] == 0
    assert summary["peak_pss_mib"] <= 6144


@pytest.mark.parametrize("kind", KINDS)
def test_every_dishonest_rollout_is_caught_and_its_node_suspended(demo: Finished, kind: str) -> None:
    fate = demo.summary["cheats"][kind]
    assert fate["caught"] == fate["dishonest"] > 0 and fate["identical_rejected"] == 0
    assert fate["node_state"] == "suspended"
    # One that was honest for long enough is trusted with whole leases by then: `dropper`, whose answers are honest, and
    # `stale`, while it held one policy only.
    if fate["identical"] < load_chain(demo.run_dir).current.manifest.leases.probation_accepted:
        assert fate["submitted"] <= 64
    elif kind != "dropper":  # two open leases of 32 rollouts, and one that is being judged
        assert fate["dishonest"] <= 96


def test_every_receipt_has_an_outcome_and_nothing_is_trained_twice(demo: Finished) -> None:
    _, state = read_state(demo.run_dir)
    for submission in state.submissions.values():
        assert {o.status for o in submission.outcomes} <= {
            "accepted",
            "rejected",
            "pending",
            "inconclusive",
            "discarded",
        }
    entries = [(e.submission, e.rollout) for batch in state.batches.values() for e in batch.closed.entries]
    assert len(entries) == len(set(entries))
    assert sorted(state.batches) == list(range(len(state.batches)))


def test_the_ledger_shows_the_kill_and_goes_on(demo: Finished) -> None:
    run, _ = read_state(demo.run_dir)
    log = read_segments(demo.run_dir / "ledger", run)
    assert log.problems == []
    assert max(sealed.entry.incarnation for sealed in log.entries) >= 1
    assert [sealed.index for sealed in log.entries] == list(range(len(log.entries)))
    assert log.entries[-1].entry.event == "run.finished"


def test_the_audit_holds_from_the_files_alone(demo: Finished) -> None:
    done = subprocess.run(
        [str(BIN / "verifier"), "audit", str(demo.run_dir), "--json"], capture_output=True, text=True, timeout=240
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["failures"][:3]
    assert report["accepted_checked"] == demo.summary["rollouts_accepted"]
    assert report["rollouts_held"] == report["rollouts_checked"] >= demo.summary["rollouts_accepted"]


def test_strangers_come_as_others_leave_and_two_relays_form_a_chain(demo: Finished) -> None:
    _, state = read_state(demo.run_dir)
    joined = {node.name: node.joined_index for node in state.nodes.values()}
    gone = sorted(n.suspended_index for n in state.nodes.values() if n.name in KINDS and n.suspended_index is not None)
    for position, kind in enumerate(KINDS[AT_ONCE:]):
        assert joined[kind] > gone[position], f"{kind} waits for its turn"
    sent = demo.summary["bytes_sent_by"]
    assert set(sent) == {"origin", "relay-1", "relay-2"} and min(sent.values()) > 0
    assert demo.summary["bytes_sent"] == sum(sent.values())


def _demo(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / "trainer"), "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_ends_everything_within_five_seconds_and_resume_goes_on(tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 24
    process = _demo("--cheats", "quantised", "--nodes", "2", "--steps", str(steps), "--dir", str(run_dir))
    try:
        _await("a few steps", lambda: int(_status(run_dir).get("step", 0)) >= 4, 150)
        run = _status(run_dir)["run"]
        begun = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert time.monotonic() - begun < 10, "5 s is the promise; the rest is this machine's load"
        assert marked(run) == []
        assert f"trainer demo --resume {run_dir}" in out + err
        at_stop = read_state(run_dir)[1].size

        host, port = config.load(run_dir).ingress.listen.rsplit(":", 1)
        with socket.create_server((host, int(port))):
            process = _demo("--resume", str(run_dir), "--json")
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1, "what could not start ends the demo at once, not at the stall limit"
            assert "coordinator is gone (exit code 2)" in err and f"--resume {run_dir}" in err
        assert marked(run) == []

        process = _demo("--resume", str(run_dir), "--json")
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
    summary = json.loads(out)
    _, state = read_state(run_dir)
    assert summary["steps"] == steps and state.run.hex() == run and state.size > at_stop
    assert sorted(state.batches) == list(range(steps))
    assert summary["cheats"]["quantised"]["node_state"] == "suspended" and summary["honest_rejected"] == 0
    done = subprocess.run([str(BIN / "verifier"), "audit", str(run_dir)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_role_that_dies_while_the_run_starts_is_reported_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = _demo("--nodes", "1", "--steps", "3", "--dir", str(run_dir), "--json")
    try:
        _await("the coordinator", lambda: bool(_status(run_dir).get("run")), 90)
        run = _status(run_dir)["run"]
        (learner,) = _pids_of(run, ("learn", "run.toml"))
        os.kill(learner, signal.SIGKILL)
        assert process.stderr is not None
        told = process.stderr.readline()
        assert "learner is gone (exit code -9)" in told and "commands.txt" in told
        assert process.poll() is None, "the person may bring it back"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 130 and marked(run) == []
