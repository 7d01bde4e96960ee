"""Supervised fine-tuning: stage one of a run, and the loop that makes the tiny base.

Cross-entropy on answers only (prompts are conditioned on), mean over the batch's answer tokens, AdamW, linear
warm-up, then linear decay. Examples are drawn from a seed: one thread on one machine gives the same weights again.

Not covered: reinforcement learning (`trainer.learner`), data from files.
Shapes: see `trainer.forward`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from environments import registry
from protocol.manifest import RunManifest
from trainer import forward, mixture
from trainer.config import RunConfig, SftSection
from verifier.model import PolicyModel, prompt_ids

Draw = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and its answer."""

_OWN_TASKS = 1 << 48
"""Stage one takes tasks from here up: the coordinator counts from 0 and never gets there."""


@dataclass(frozen=True)
class Schedule:
    """What one stage does.

    steps: optimiser steps.
    batch_size: examples a step.
    learning_rate: peak.
    cpu_seconds: the stage ends early after this much CPU time of this process; 0 means no limit.
    warmup: steps of linear warm-up.
    total: the linear decay reaches zero after this many steps; 0 means `steps`. The tiny base stops before its
        schedule's end; the live stage of a run is the rest.
    """

    steps: int
    batch_size: int
    learning_rate: float
    cpu_seconds: float = 0.0
    warmup: int = 20
    total: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        left = 1 - step / max(self.total, self.steps)
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup)) * max(0.02, left)


@dataclass(frozen=True)
class Progress:
    """After a step: how many are done, the loss of the last batch (nats a token), CPU time so far."""

    step: int
    loss: float
    cpu_seconds: float


def supervise(
    model: Any,
    encode: Callable[[str], list[int]],
    end: int,
    draw: Draw,
    schedule: Schedule,
    seed: int,
    report: Callable[[Progress], None] = lambda _progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Fine-tune `model` in place; returns the last step's progress.

    Args:
        encode: text to token ids, without special tokens.
        end: the token that ends an answer.
        report: called after every step.
        stop: asked before every step; True ends the stage.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    started = time.process_time()
    progress = Progress(0, float("nan"), 0.0)
    for step in range(schedule.steps):
        spent = time.process_time() - started
        if stop() or (schedule.cpu_seconds and spent > schedule.cpu_seconds):
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        examples = [draw(rng) for _ in range(schedule.batch_size)]
        packed = forward.pack([(encode(prompt), [*encode(answer), end]) for prompt, answer in examples])
        loss = torch.nn.functional.cross_entropy(forward.logits_of(model, packed), packed.targets_N)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress = Progress(step + 1, float(loss.detach()), time.process_time() - started)
        report(progress)
    optimizer.zero_grad()
    return progress


def stage_one(
    policy: PolicyModel,
    settings: SftSection,
    manifest: RunManifest,
    *,
    seed: int,
    record: Callable[[int, dict[str, Any]], None],
    stop: Callable[[], bool],
) -> Progress:
    """The live stage of a run. Every step is recorded; the last one says `done`.

    Raises:
        EnvironmentSpecError: `mixture = false` and the run's environment is not installed here.
    """
    schedule = Schedule(settings.steps, settings.batch_size, settings.learning_rate, settings.cpu_seconds)
    draw = mixture_draw if settings.mixture else environment_draw(manifest)

    def row(progress: Progress, done: bool) -> dict[str, Any]:
        fields = {"steps": settings.steps, "loss": progress.loss, "cpu_seconds": progress.cpu_seconds}
        return {**fields, "done": done}

    def report(progress: Progress) -> None:
        if progress.step < settings.steps:
            record(progress.step, row(progress, False))

    last = supervise(
        policy.model,
        lambda text: prompt_ids(policy.tokenizer, text),
        manifest.sampling.stop_tokens[0],
        draw,
        schedule,
        seed,
        report,
        stop,
    )
    if not stop():
        # A stage that its CPU limit cut short ends one row later, so that its last row too says that it is done.
        record(settings.steps if last.step == settings.steps else last.step + 1, row(last, True))
    return last


def mixture_draw(rng: random.Random) -> tuple[str, str]:
    """A prompt and answer of the mixture of transforms."""
    example = mixture.draw(rng)
    return example.prompt, example.answer


def environment_draw(manifest: RunManifest) -> Draw:
    """Prompts and right answers of the run's own environments, from task indices that no lease ever names."""
    environments = [registry.load(spec) for spec in manifest.environments]

    def draw(rng: random.Random) -> tuple[str, str]:
        task = rng.choice(environments).task(rng.randrange(_OWN_TASKS, 2 * _OWN_TASKS))
        return task.prompt, task.answer

    return draw


def main(config: RunConfig, *, as_json: bool = False) -> int:
    """`trainer sft RUN.TOML`: stage one alone; leaves the checkpoint of step 0, from which `trainer learn` goes on."""
    from trainer import learner

    return learner.main(config, as_json=as_json, only_sft=True)
