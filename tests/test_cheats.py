"""The dishonest programs of examples/cheats, one by one, before the judge: each really does what it says, its own log
says when, and exactly the rollouts it calls dishonest are rejected, for the reason its docstring names.

The programs run in this process; the demo (`tests/test_demo.py`) runs them as strangers of a live run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from environments.word import Word
from node.engine import TransformersEngine, write_tokens
from node.inference import InferenceNode
from protocol import codec
from protocol.engine import GenerateItem, GenerateRequest, LoadRequest
from protocol.errors import EngineError
from protocol.records import ACCEPT, FINISH_EOS, REJECT, Rollout, Submission
from protocol.seeds import sampling_seed
from tests.judge_rig import TINY, Rig, make_rig
from verifier.judge import judge
from verifier.model import load_policy, prompt_ids

PROGRAMS = Path(__file__).parent.parent / "examples" / "cheats"
ROOT = bytes(32)


@pytest.fixture(scope="module")
def rig() -> Rig:
    torch.set_num_threads(1)
    return make_rig(load_policy(TINY), Word({}), tasks=4, samples=8, cap=9, stop=(1,))


@pytest.fixture(scope="module")
def program() -> Iterator[Callable[[str], ModuleType]]:
    """Loads a program by its name."""
    sys.path.insert(0, str(PROGRAMS))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"program_{name.replace('-', '_')}", PROGRAMS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(PROGRAMS))


@dataclass
class Answered:
    """What a program sent for one lease, and what it wrote into its own log."""

    submission: Submission
    truth: list[bool]


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(transform="reverse", bits=8, lag=1, n=8, temperature=0.7, **more)


def engine_of(module: ModuleType, log: Path) -> TransformersEngine:
    common = sys.modules["_common"]
    engine: TransformersEngine = module.make(common.TruthLog(log), options())
    return engine


def request_of(rig: Rig, nonce: bytes, tasks: tuple[int, ...] | None = None) -> GenerateRequest:
    items = []
    for task in tasks or rig.lease.tasks:
        prompt = tuple(prompt_ids(rig.policy.tokenizer, rig.environment.task(task).prompt))
        for sample in range(rig.lease.samples):
            seed = sampling_seed(rig.run.id, nonce, task, sample)
            items.append(GenerateItem(f"{nonce.hex()}:{task}:{sample}", write_tokens(prompt), seed, 9))
    return GenerateRequest(ROOT, 1.0, (1,), tuple(items))


def truth_of(log: Path, request: GenerateRequest) -> list[bool]:
    rows = {row["request_id"]: row["dishonest"] for row in map(json.loads, log.read_text().splitlines())}
    return [rows[item.request_id] for item in request.items]


def answer(rig: Rig, engine: TransformersEngine, log: Path, nonce: bytes) -> Answered:
    """One lease as an ordinary node would have it answered."""
    request = request_of(rig, nonce)
    rollouts = []
    outputs = engine.generate(request, lambda: False).outputs
    numbers = [(task, sample) for task in rig.lease.tasks for sample in range(rig.lease.samples)]
    for (task, sample), output in zip(numbers, outputs, strict=True):
        reward = rig.environment.score(rig.environment.task(task), output.text, output.finish == FINISH_EOS)
        rollouts.append(Rollout(task, sample, output.tokens, output.logprobs, output.finish, reward, output.proofs))
    return Answered(Submission(rig.lease.lease_id, "test", tuple(rollouts)), truth_of(log, request))


def load(engine: TransformersEngine, directory: Path, root: bytes = ROOT) -> None:
    engine.load(LoadRequest(str(directory), 0, 0, root))


@pytest.mark.parametrize(
    ("name", "reason", "identical"),
    [
        ("quantised", "proof-mismatch", False),
        ("small-model", "token-not-forced", True),
        ("reward", "reward-mismatch", True),
        ("replay", "proof-mismatch", False),
        ("stale", "proof-mismatch", False),
        ("greedy", "token-not-forced", True),
        ("temperature", "token-not-forced", True),
        ("best-of-n", "token-not-forced", True),
        ("edit", "token-not-forced", True),
        ("garbage", "proof-mismatch", False),
    ],
)
def test_exactly_the_dishonest_rollouts_are_rejected_and_for_the_reason_named(
    rig: Rig, program: Callable[[str], ModuleType], tmp_path: Path, name: str, reason: str, identical: bool
) -> None:
    module, log = program(name), tmp_path / "own-log.jsonl"
    engine = engine_of(module, log)
    older = tmp_path / "older"
    older.mkdir()
    for path in TINY.glob("*.json"):
        (older / path.name).write_bytes(path.read_bytes())
    weights = load_file(TINY / "model.safetensors")
    torch.manual_seed(0)
    nudged = {key: value + 1e-4 * torch.randn_like(value) for key, value in weights.items()}
    save_file(nudged, older / "model.safetensors")
    load(engine, older, b"\1" * 32)
    load(engine, TINY)
    if name == "replay":
        before = request_of(rig, b"\7" * 32, (1, 2, 3, 4))  # a lease before, to have something to send again
        engine.generate(before, lambda: False)
        assert truth_of(log, before) == [False] * 32
    answered = answer(rig, engine, log, rig.lease.nonce)
    judged = judge(rig.run, rig.lease, codec.encode(answered.submission), rig.policy, rig.environment)
    for dishonest, outcome in zip(answered.truth, judged.outcomes, strict=True):
        assert (outcome.outcome, outcome.reason) == ((REJECT, reason) if dishonest else (ACCEPT, "holds"))
    assert any(answered.truth)
    assert all(answered.truth) != identical, "some rollouts come out as the lease forces them, or none does"


def test_an_edited_rollout_differs_in_one_token_and_is_a_step_closer_to_right(
    rig: Rig, program: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    log = tmp_path / "own-log.jsonl"
    engine = engine_of(program("edit"), log)
    load(engine, TINY)
    answered = answer(rig, engine, log, rig.lease.nonce)
    for dishonest, sent, honest in zip(answered.truth, answered.submission.rollouts, rig.honest.rollouts, strict=True):
        differences = sum(sent.tokens[i : i + 4] != honest.tokens[i : i + 4] for i in range(0, len(honest.tokens), 4))
        assert len(sent.tokens) == len(honest.tokens)
        assert differences == (1 if dishonest else 0)
        assert sent.reward >= honest.reward


def test_the_best_of_n_earns_more_than_honest_sampling(
    rig: Rig, program: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    log = tmp_path / "own-log.jsonl"
    engine = engine_of(program("best-of-n"), log)
    load(engine, TINY)
    answered = answer(rig, engine, log, rig.lease.nonce)
    assert sum(r.reward for r in answered.submission.rollouts) > sum(r.reward for r in rig.honest.rollouts)


def test_the_dropper_withholds_what_is_below_its_usual_and_sends_the_rest_honestly(
    rig: Rig, program: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    log = tmp_path / "own-log.jsonl"
    engine: Any = engine_of(program("dropper"), log)
    load(engine, TINY)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    in_a_row = 0
    for number in range(24):
        nonce = bytes([number + 1]) * 32
        request = request_of(rig, nonce)
        earned = engine.reward(request, engine.sample(engine.policy, request, lambda: False))
        try:
            answered = answer(rig, engine, log, nonce)
        except EngineError:
            assert set(truth_of(log, request)) == {True}
            rewards[True].append(earned)
            in_a_row += 1
            assert in_a_row <= 3
            continue
        in_a_row = 0
        rewards[False].append(earned)
        assert set(answered.truth) == {False}
        assert sum(r.reward for r in answered.submission.rollouts) / 32 == pytest.approx(earned)
    assert len(rewards[True]) >= 4
    assert max(rewards[True]) < max(rewards[False])
    assert sum(rewards[True]) / len(rewards[True]) < sum(rewards[False]) / len(rewards[False])


def test_easier_tasks_than_leased_are_seen_without_the_model(rig: Rig, program: Callable[[str], ModuleType]) -> None:
    module = program("easy-tasks")
    changed = [name for name, value in vars(module.EasyTasks).items() if callable(value)]
    assert changed == ["do"] and hasattr(InferenceNode, "do"), "it is the ordinary node, changed in one method"
    easy = module.easiest(rig.environment, 4, rig.lease.tasks)
    assert not set(easy) & set(rig.lease.tasks)
    lengths = [len(rig.environment.task(index).answer) for index in (*easy, *rig.lease.tasks)]
    assert set(lengths[:4]) == {4} and sum(lengths[:4]) < sum(lengths[4:])
    sent = rig.answer(lease=replace(rig.lease, tasks=easy))
    judged = judge(rig.run, rig.lease, codec.encode(sent), rig.policy, rig.environment)
    assert {(o.outcome, o.reason) for o in judged.outcomes} == {(REJECT, "wrong-task")}
