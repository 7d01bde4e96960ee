"""A demo ended by Ctrl-C at a seeded step, then every printed command by hand; later both validators stand still.

Longer than CI has time for: `test_demo.py` shows Ctrl-C and `--resume` there, `test_demo_kill.py` the printed commands.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from protocol.state import RunState
from tests.demo_run import BIN, Demo, Frozen, freeze
from tests.test_demo_kill import SEED, audit, check_batches, check_receipts
from trainer.processes import marked
from trainer.summary import read_state

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

FROZEN_S = 12.0


@dataclass
class Continued:
    demo: Demo
    interrupted_at: int
    exit_code: int
    left_by_demo: list[int]
    second_serve: subprocess.CompletedProcess[str]
    codes: dict[str, int]
    frozen: Frozen
    state: RunState


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Continued]:
    demo = Demo(tmp_path_factory.mktemp("continued") / "run", "--steps", "36", "--nodes", "2", "--seed", str(SEED))
    rng = random.Random(SEED + 1)
    stop, ice = rng.randrange(4, 10), rng.randrange(14, 20)
    print(f"seed {SEED}: Ctrl-C at step {stop}, validators frozen at step {ice}")
    try:
        demo.await_(f"step {stop}", lambda: demo.step() >= stop, 300)
        os.kill(demo.process.pid, signal.SIGINT)
        demo.process.communicate(timeout=60)
        run_id, at, pid = demo.run.id.hex(), demo.step(), demo.status()["pid"]
        left = marked(run_id)
        processes = {name: demo.start_again(name) for name in demo.commands()}
        demo.await_("the coordinator", lambda: demo.status().get("pid") != pid, 200)
        second = subprocess.run(
            [str(BIN / "trainer"), "serve", str(demo.dir / "run.toml")], capture_output=True, text=True, timeout=120
        )
        demo.await_(f"step {ice}", lambda: demo.step() >= ice, 300)
        frozen = freeze(demo, FROZEN_S)
        demo.await_("steps after the thaw", lambda: demo.finished() or demo.step() >= frozen.steps[-1] + 3, 120)
        demo.await_("the end", demo.finished, 240)
        codes = {}
        for name, process in processes.items():
            if name == "origin":  # serves the archive until somebody stops it
                os.kill(demo.main_pid("origin"), signal.SIGTERM)
            codes[name] = process.wait(90)
        yield Continued(demo, at, demo.process.returncode, left, second, codes, frozen, read_state(demo.dir)[1])
        assert marked(run_id) == [], "nothing of the run stays"
    finally:
        demo.close()


def test_ctrl_c_ends_every_process_of_a_demo(continued: Continued) -> None:
    assert continued.exit_code == 130
    assert continued.left_by_demo == []


def test_a_second_serve_is_refused_by_name(continued: Continued) -> None:
    assert continued.second_serve.returncode == 2
    assert '"pid": ' in continued.second_serve.stderr and "Traceback" not in continued.second_serve.stderr


def test_the_printed_commands_alone_continue_a_run_to_its_end(continued: Continued) -> None:
    assert continued.state.finished is not None and continued.state.problems == []
    assert {name: code for name, code in continued.codes.items() if name != "origin"} == {
        name: 0 for name in continued.codes if name != "origin"
    }
    assert continued.interrupted_at < 36
    assert check_receipts(continued.demo, continued.state) >= 20
    check_batches(continued.state)


def test_learning_waits_for_frozen_validators_and_goes_on_by_itself(continued: Continued) -> None:
    assert continued.frozen.problems(continued.state) == []
    nodes = [node for node in continued.state.nodes.values() if node.role == "inference"]
    assert {node.state for node in nodes} <= {"active", "probation"} and not any(node.rejected for node in nodes)


def test_the_audit_of_a_continued_run_holds(continued: Continued) -> None:
    audit(continued.demo.dir)
