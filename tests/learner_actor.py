"""A whole run in one process for the learner's tests: real runs, real decoding, real rewards, real batch files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from environments.registry import load
from node.decode import DecodeRequest, decode
from protocol import codec
from protocol.files import write_atomic
from protocol.manifest import Run, Thresholds
from protocol.records import Batch, TrainingRollout
from protocol.seeds import group_id, sampling_seed
from trainer.incoming import batch_path
from trainer.init import make_run
from verifier.model import PolicyModel, completion_text, load_policy, prompt_ids

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")


def small_run(directory: Path, steps: int, **overrides: Any) -> Run:
    """A run directory of the tiny model; keys of `overrides` use `__` for the dot."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return make_run(directory, steps=steps, thresholds=NOISE, overrides=values)


def sample_batch(
    run: Run,
    policy: PolicyModel,
    step: int,
    made_by: int,
    change: Callable[[dict[str, Any], int], None] = lambda _fields, _position: None,
) -> bytes:
    """The bytes of batch `step`, sampled by `policy`, which the batch calls the policy of step `made_by`."""
    manifest = run.manifest
    leases, sampling = manifest.leases, manifest.sampling
    environment = load(manifest.environments[0])
    nonce = blake3(b"lease of step %d" % step).digest()
    wanted = [
        (environment.task(step * leases.tasks_per_step + i), sample)
        for i in range(leases.tasks_per_step)
        for sample in range(leases.samples_per_task)
    ]
    prompts = [tuple(prompt_ids(policy.tokenizer, task.prompt)) for task, _ in wanted]
    requests = [
        DecodeRequest(prompt, sampling_seed(run.id, nonce, task.index, sample), sampling.max_new_tokens)
        for prompt, (task, sample) in zip(prompts, wanted, strict=True)
    ]
    decoded = decode(policy.model, requests, temperature=sampling.temperature, stop_tokens=sampling.stop_tokens)
    rollouts = []
    for position, (prompt, (task, _), out) in enumerate(zip(prompts, wanted, decoded, strict=True)):
        text = completion_text(policy.tokenizer, out.tokens, sampling.stop_tokens)
        fields: dict[str, Any] = {
            "submission": step,
            "verdict": step,
            "rollout": position,
            "group": group_id(nonce, task.index),
            "epoch": 0,
            "step": made_by,
            "prompt": np.array(prompt, "<u4").tobytes(),
            "tokens": np.array(out.tokens, "<u4").tobytes(),
            "logprobs": np.asarray(out.logprobs, "<f4").tobytes(),
            "reward": environment.score(task, text, out.tokens[-1] in sampling.stop_tokens),
        }
        change(fields, position)
        rollouts.append(TrainingRollout(**fields))
    return codec.encode(Batch(run.id, 0, step, tuple(rollouts)))


def write_batches(run: Run, directory: Path, steps: int) -> None:
    """Batches 0..steps-1, all sampled by the run's base model."""
    policy = load_policy(directory / "model")
    for step in range(steps):
        write_atomic(batch_path(directory, step), sample_batch(run, policy, step, max(0, step - 1)))
