"""The learner as a process: killed anywhere it comes back with the same bits; stopped, it stops at once."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import UsageError
from protocol.manifest import Run
from tests.learner_actor import sample_batch, small_run, write_batches
from trainer import checkpoints, config, learner
from trainer.incoming import BatchError, batch_path
from verifier.model import load_policy

STEPS = 12
START_S = 120.0
SMALL = {
    "leases__tasks_per_step": 4,
    "leases__samples_per_task": 8,
    "sft__steps": 6,
    "sft__batch_size": 16,
    "learner__checkpoint_every": 5,
    "learner__keep_checkpoints": 3,
}


def _learn(directory: Path, said: list[str] | None = None, **options: Any) -> dict[str, Any]:
    say = (lambda _text: None) if said is None else said.append
    return learner.learn(config.load(directory), threading.Event(), say, **options)


def _start(directory: Path) -> subprocess.Popen[bytes]:
    log = (directory / "logs" / "learner.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", "learn", str(directory / "run.toml")], stdout=log, stderr=log
    )


def _until(process: subprocess.Popen[bytes], ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        assert process.poll() is None, f"the learner ended before {what}"
        assert time.monotonic() < deadline, f"no {what} within {START_S:.0f} s"
        time.sleep(0.002)


def _rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _what_was_learned(directory: Path) -> list[dict[str, Any]]:
    """Rows without what a clock put in."""
    clocks = {"time", "seconds", "idle_seconds", "idle_share", "cpu_seconds"}
    return [{k: v for k, v in row.items() if k not in clocks} for row in _rows(directory) if row["event"] != "resume"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted: the reference. Its batches are all there from the start."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run = small_run(directory, STEPS, **SMALL)
    torch.set_num_threads(1)
    write_batches(run, directory, STEPS)
    summary = _learn(directory)
    assert summary == {"steps": STEPS, "resumed_from": None, "checkpoints_adopted": 0}
    return directory


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """The same run directory before its learner started."""
    directory = tmp_path / "run"
    shutil.copytree(finished, directory, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    yield directory


def _same_in_the_end(finished: Path, directory: Path) -> None:
    for name in (checkpoints.WEIGHTS, checkpoints.OPTIMIZER):
        place = f"checkpoints/step-{STEPS:08d}/{name}"
        assert (directory / place).read_bytes() == (finished / place).read_bytes(), name
    assert _what_was_learned(directory) == _what_was_learned(finished)


def test_a_run_leaves_checkpoints_and_one_row_a_step(finished: Path) -> None:
    rows = _rows(finished)
    sft = [row for row in rows if row["event"] == "sft"]
    assert [row["step"] for row in sft] == [1, 2, 3, 4, 5, 6]
    assert [row["done"] for row in sft] == [False] * 5 + [True]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == list(range(STEPS))
    wanted = {"reward_mean", "loss", "entropy", "masked_share", "ratio_max", "mismatch_kl", "effective_sample_size"}
    wanted |= {"staleness", "staleness_mean", "idle_share", "grad_norm", "dropped_non_finite", "learning_rate"}
    assert all(wanted <= set(row) for row in steps)
    assert any(row["loss"] is not None and row["entropy"] > 0 for row in steps)
    kept = sorted(path.name for path in (finished / "checkpoints").glob("step-*"))
    assert kept == ["step-00000010", "step-00000011", "step-00000012"]
    record = json.loads((finished / "checkpoints" / kept[-1] / "checkpoint.json").read_text())
    assert (record["epoch"], record["step"]) == (0, STEPS)
    weights = finished / "checkpoints" / kept[-1] / "model.safetensors"
    assert weights.stat().st_size == (finished / "model" / "model.safetensors").stat().st_size


def _kill_at(directory: Path, ready: Callable[[], bool], what: str, delay_s: float) -> None:
    process = _start(directory)
    try:
        _until(process, ready, what)
        time.sleep(delay_s)
    finally:
        process.kill()
        process.wait(timeout=30)


def test_killed_in_the_middle_it_ends_with_the_same_bits(finished: Path, again: Path) -> None:
    delay = random.Random(11).uniform(0, 0.2)
    _kill_at(again, (again / "checkpoints" / "step-00000003").exists, "the checkpoint of step 3", delay)
    said: list[str] = []
    summary = _learn(again, said)
    assert summary["steps"] == STEPS
    assert summary["resumed_from"] in (0, 5, 10)
    assert summary["checkpoints_adopted"] == 0
    assert any("resuming from" in line for line in said)
    _same_in_the_end(finished, again)


@pytest.mark.heavy
def test_killed_at_many_moments_it_ends_with_the_same_bits(finished: Path, again: Path) -> None:
    rng = random.Random(5)
    root = again / "checkpoints"
    moments: list[tuple[Callable[[], bool], str]] = [
        (lambda: (again / "metrics.jsonl").exists(), "the first SFT row"),
        (lambda: (root / "step-00000000" / "checkpoint.json").exists(), "the checkpoint of step 0"),
        (lambda: any(root.glob(".*.part")), "a checkpoint being written"),
        (lambda: (root / "step-00000005").exists(), "the checkpoint of step 5"),
        (lambda: (root / "step-00000008").exists(), "the checkpoint of step 8"),
    ]
    for ready, what in moments:
        _kill_at(again, ready, what, rng.uniform(0, 0.05))
    process = _start(again)
    assert process.wait(timeout=START_S) == 0
    _same_in_the_end(finished, again)


def test_what_is_already_published_is_not_written_again(finished: Path, again: Path) -> None:
    shutil.copytree(finished / "checkpoints", again / "checkpoints")
    shutil.copyfile(finished / "metrics.jsonl", again / "metrics.jsonl")
    # As if killed after step 12 was written without optimiser state: the last one to go on from is step 10.
    shutil.rmtree(again / "checkpoints" / "step-00000012")
    published = again / "checkpoints" / "step-00000011" / "checkpoint.json"
    before = published.stat()
    summary = _learn(again)
    assert summary["resumed_from"] == 10
    assert (published.stat().st_mtime_ns, published.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    _same_in_the_end(finished, again)


def test_published_weights_win_over_a_replay_that_differs(finished: Path, again: Path) -> None:
    shutil.copytree(finished / "checkpoints", again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / "step-00000012")
    there = checkpoints.find_checkpoints(again / "checkpoints", lambda _: None)[-1]
    weights = checkpoints.load_tensors(there, checkpoints.WEIGHTS)
    weights["model.norm.weight"] += 1e-3
    shutil.rmtree(there.directory)
    checkpoints.write_checkpoint(again / "checkpoints", epoch=0, step=11, weights=weights)
    said: list[str] = []
    summary = _learn(again, said)
    assert summary["checkpoints_adopted"] == 1
    assert sum("taking the published weights over" in line for line in said) == 1


def test_sigterm_stops_it_and_nothing_is_lost(finished: Path, again: Path) -> None:
    last = batch_path(again, STEPS - 1)
    kept = last.read_bytes()
    last.unlink()  # so that it waits for a batch when it is stopped
    process = _start(again)
    try:
        _until(process, (again / "checkpoints" / f"step-{STEPS - 1:08d}").exists, "the last but one step")
        process.send_signal(signal.SIGTERM)
        # 0: stopped at the step's end. 143: the machine was too busy for that, so it left at once instead.
        assert process.wait(timeout=60) in (0, 143)
    finally:
        process.kill()
    last.write_bytes(kept)
    assert _learn(again)["steps"] == STEPS
    _same_in_the_end(finished, again)


def test_stage_one_alone_leaves_step_0_and_learning_goes_on_from_it(finished: Path, again: Path) -> None:
    assert _learn(again, only_sft=True)["steps"] == 0
    assert [p.name for p in (again / "checkpoints").glob("step-*")] == ["step-00000000"]
    assert _learn(again)["resumed_from"] == 0
    _same_in_the_end(finished, again)


def test_a_learner_of_a_finished_run_says_that_it_is_finished(finished: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    (directory / "status.json").write_text('{"phase": "finished"}')
    process = _start(directory)
    assert process.wait(START_S) == 0
    said = (directory / "logs" / "learner.log").read_text()
    assert f"step {STEPS} of {STEPS} is done, and there is nothing left to learn" in said
    assert f"{directory}/checkpoints/step-{STEPS:08d}/model.safetensors" in said
    assert f"verifier audit {directory}" in said
    _same_in_the_end(finished, directory)


def test_a_second_learner_is_refused_and_told_who_works(again: Path) -> None:
    with learner.sole_learner(again), pytest.raises(UsageError, match=r"process [0-9]+") as caught:
        _learn(again)
    assert "another learner" in str(caught.value)


def test_a_wrong_batch_stops_the_learner_and_leaves_its_checkpoints_whole(finished: Path, again: Path) -> None:
    path = batch_path(again, 4)
    kept = path.read_bytes()
    path.write_bytes(kept[:-7])
    with pytest.raises(BatchError, match="step-00000004"):
        _learn(again)
    found = checkpoints.find_checkpoints(again / "checkpoints", lambda _: None)
    assert found[-1].step == 4
    path.write_bytes(kept)
    _learn(again)
    _same_in_the_end(finished, again)


def test_waiting_says_what_for_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "TELL_EVERY_S", 0.05)
    said: list[str] = []
    with pytest.raises(Exception, match="within 0 s") as caught:
        learner.await_batch(batch_path(tmp_path, 7), threading.Event(), said.append, deadline_s=0.2)
    assert getattr(caught.value, "code", None) == "deadline"
    assert said
    assert "batches/step-00000007.hwb" in said[0]


def test_a_directory_that_is_no_run_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UsageError, match="trainer init"):
        _learn(tmp_path)


@pytest.mark.soak
def test_the_reward_climbs_at_staleness_two(tmp_path: Path) -> None:
    """The curve the demo shows: tiny base, live SFT, 110 steps of 16 x 8 with policies two steps old."""
    steps = 110
    run: Run = small_run(tmp_path / "run", steps)
    done: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: done.append(_learn(tmp_path / "run")))
    thread.start()
    policy = load_policy(tmp_path / "run" / "model")
    for step in range(steps):
        made_by = max(0, step - 2)
        weights = tmp_path / "run" / "checkpoints" / f"step-{made_by:08d}"
        deadline = time.monotonic() + START_S
        while not (weights / "checkpoint.json").exists():
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        policy.load_weights(weights)
        path = batch_path(tmp_path / "run", step)
        aside = path.with_suffix(".part")
        aside.write_bytes(sample_batch(run, policy, step, made_by))
        aside.rename(path)
    thread.join(timeout=START_S)
    assert done[0]["steps"] == steps
    rewards = [row["reward_mean"] for row in _rows(tmp_path / "run") if row["event"] == "step"]
    assert sum(rewards[:10]) / 10 <= 0.2
    assert sum(rewards[-10:]) / 10 >= 0.6
    assert {row["staleness_max"] for row in _rows(tmp_path / "run") if row["event"] == "step"} == {0, 1, 2}
