"""A demo's plan: who joins when, what is written down for `--resume`, and every way in which it cannot go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.cli import main
from trainer.deceivers import KINDS, KNOW_THE_REWARD, NO_ENGINE, Arrivals, kinds_of, processes_of, programs
from trainer.demo import is_hopeless
from trainer.processes import RUN_MARK, Fleet
from trainer.staging import Plan, empty_directory, reopen

RUN = "ab" * 32


def test_every_kind_has_its_program_and_says_what_catches_it() -> None:
    assert len(KINDS) == len(set(KINDS)) == 12
    for kind in KINDS:
        text = (programs() / f"{kind}.py").read_text().split('"""')[1]
        assert "Caught by the " in text, kind


def test_kinds_join_in_one_order_however_they_are_typed() -> None:
    assert kinds_of("all") == list(KINDS)
    assert kinds_of("") == []
    assert kinds_of("garbage,dropper,garbage") == ["dropper", "garbage"]
    with pytest.raises(UsageError, match=r"no such kind; there are .*quantised"):
        kinds_of("quantized")


@given(st.lists(st.integers(0, 11), max_size=40), st.integers(1, 5))
def test_arrivals_never_exceed_their_number_and_everybody_joins_once(leaving: list[int], at_once: int) -> None:
    arrivals = Arrivals(list(KINDS), at_once)
    joined = arrivals.next()
    for position in [*leaving, *range(12)]:
        assert len(arrivals.here) == min(at_once, 12 - len(joined) + len(arrivals.here))
        arrivals.left(KINDS[position])
        new = arrivals.next()
        joined += new
        assert len(arrivals.here) <= at_once
    for kind in KINDS:
        arrivals.left(kind)
        joined += arrivals.next()
    assert joined == list(KINDS)


def test_the_outlook_says_who_comes_next() -> None:
    assert Arrivals(["a"]).outlook() == "a comes next"
    assert Arrivals(["a", "b", "c"]).outlook() == "a comes next, then b, then c"
    assert Arrivals(list("abcdef")).outlook() == "a comes next, then 5 other kinds"
    assert Arrivals([]).outlook() == "nobody else is to come"


@pytest.mark.parametrize("kind", KINDS)
def test_a_dishonest_node_is_started_like_any_other(kind: str, tmp_path: Path) -> None:
    made = processes_of(kind, tmp_path, tmp_path, "sort", lambda name: ["join", "--role", "inference", "--name", name])
    name, role, command = made[-1]
    assert (name, role) == (kind, "inference") and command[-2:] != ["--name"] and "join" in command
    assert str(tmp_path / "nodes" / kind / "own-log.jsonl") in made[0][2]
    if kind in NO_ENGINE:
        assert len(made) == 1
    else:
        assert command[0].endswith("/node"), "an unmodified node"
        assert command[-2:] == ["--engine-socket", made[0][2][made[0][2].index("--socket") + 1]]
        assert ("--transform" in made[0][2]) == (kind in KNOW_THE_REWARD)


def interrupted(path: Path, **changes: object) -> Path:
    """A run directory as an interrupted demo leaves it, as far as `reopen` looks."""
    path.mkdir()
    (path / "run.toml").write_text("")
    (path / "status.json").write_text(json.dumps({"run": RUN, "phase": "stopped", **changes}))
    return path


def test_a_plan_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    run_dir = interrupted(tmp_path / "run")
    plan = Plan("tiny", "word/sort", 300, 3, 1, ["dropper", "stale"], seconds=12.5, peak_pss_mib=3000.0)
    plan.save(run_dir)
    assert reopen(run_dir) == plan
    assert plan.transform == "sort"
    assert Plan("tiny", None, 1, 1, 0).transform == Plan("smollm2", "addition", 1, 1, 0).transform == ""


def test_what_can_not_be_resumed_says_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run; start one with: trainer demo --dir"):
        reopen(tmp_path)
    run_dir = interrupted(tmp_path / "served")
    with pytest.raises(UsageError, match=r"not started by `trainer demo`; go on with: trainer serve .*run.toml"):
        reopen(run_dir)
    whole = {"model": "tiny", "environments": None, "steps": 1, "nodes": 1, "seed": 0}
    wrong: list[object] = [[], {"model": "tiny"}, {**whole, "model": "huge"}, {**whole, "steps": "1"}]
    wrong += [{**whole, "kinds": ["nobody"]}, {**whole, "kinds": None}, {**whole, "environments": 3}]
    for text in ["{", *map(json.dumps, wrong)]:
        (run_dir / "demo.json").write_text(text)
        with pytest.raises(UsageError, match="does not tell what this demo was"):
            reopen(run_dir)
    over = interrupted(tmp_path / "over", phase="finished")
    Plan("tiny", None, 1, 1, 0).save(over)
    with pytest.raises(UsageError, match="is finished; look at it with: trainer status"):
        reopen(over)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_demo_whose_processes_still_work_is_not_started_twice(tmp_path: Path) -> None:
    run_dir = interrupted(tmp_path / "run")
    Plan("tiny", None, 1, 1, 0).save(run_dir)
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARK: RUN})
    try:
        environment = Path(f"/proc/{process.pid}/environ")
        until(lambda: RUN.encode() in environment.read_bytes())  # the kernel shows it a moment after exec returned
        with pytest.raises(UsageError, match=f"stop them with: kill {process.pid}"):
            reopen(run_dir)
    finally:
        process.kill()
        process.wait()
    assert reopen(run_dir).model == "tiny"


def test_a_directory_that_is_in_use_is_refused_with_the_way_on(tmp_path: Path) -> None:
    run_dir = interrupted(tmp_path / "a run")
    with pytest.raises(UsageError, match=r"or continue that run with: trainer serve '.*/a run'/run.toml"):
        empty_directory(run_dir)
    Plan("tiny", None, 1, 1, 0).save(run_dir)
    with pytest.raises(UsageError, match=r"or go on with the demo in it: trainer demo --resume '.*/a run'"):
        empty_directory(run_dir)
    assert empty_directory(tmp_path / "new").is_dir()


def test_resume_takes_a_demo_as_it_was_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--resume", str(tmp_path), "--steps", "5", "--cheats", "all"]) == 2
    assert "leave out --steps, --cheats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "moving", "over"),
    [
        ("coordinator", 2, True, True),  # could not start: a port, a lock
        ("learner", 1, False, True),
        ("learner", 1, True, False),  # failed on the way: the person has the command
        ("origin", -9, False, False),  # killed
        ("coordinator", 143, False, False),  # told to stop
        ("node-1", 2, False, False),  # the run goes on without it
    ],
)
def test_a_demo_ends_with_a_role_that_no_repetition_would_help(name: str, code: int, moving: bool, over: bool) -> None:
    assert is_hopeless(name, code, moving) is over


def test_a_dismissed_child_ends_and_is_no_news(tmp_path: Path) -> None:
    fleet = Fleet("cd" * 32, tmp_path)
    try:
        child = fleet.start("engine", [sys.executable, "-c", "import time; time.sleep(60)"], "engine")
        other = fleet.start("other", [sys.executable, "-c", "raise SystemExit(3)"])
        fleet.dismiss("engine")
        assert child.process.wait(10) != 0
        other.process.wait(10)
        assert [(c.name, c.exit_code) for c in fleet.newly_ended()] == [("other", 3)]
        assert (child.role, other.role) == ("engine", "")
    finally:
        fleet.stop()
