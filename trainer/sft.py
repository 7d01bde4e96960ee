"""Supervised fine-tuning: stage one of a run, and the loop that makes the tiny base.

Cross-entropy on answers only (prompts are conditioned on), mean over the batch's answer tokens, AdamW, linear
warm-up then linear decay. The data is the mixture of transforms (`trainer.mixture`), drawn from a seed, so the same
seed on the same machine with one thread gives the same weights.

Not covered: reinforcement learning (`trainer.learner`), data files from outside.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer import forward, mixture


@dataclass(frozen=True)
class Schedule:
    """What one SFT stage does.

    steps: optimizer steps of this stage.
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
    warmup: int = 50
    total: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ... of this stage."""
        left = 1 - step / max(self.total, self.steps)
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup)) * max(0.02, left)


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float
    cpu_seconds: float


def supervise(
    model: Any,
    encode: Callable[[str], list[int]],
    eos: int,
    schedule: Schedule,
    seed: int,
    report: Callable[[Progress], None] = lambda _progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Fine-tune `model` in place and return the last step's progress.

    Args:
        encode: text to token ids, no special tokens added.
        report: called after every step.
        stop: asked before every step; True ends the stage early (the caller decides what that means).
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    started = time.process_time()
    progress = Progress(0, float("nan"), 0.0)
    for step in range(schedule.steps):
        spent = time.process_time() - started
        if stop() or (schedule.cpu_seconds and spent > schedule.cpu_seconds):
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        examples = [mixture.draw(rng) for _ in range(schedule.batch_size)]
        packed = forward.pack([(encode(e.prompt), [*encode(e.answer), eos]) for e in examples])
        loss = torch.nn.functional.cross_entropy(forward.logits_of(model, packed), packed.targets_N)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress = Progress(step + 1, float(loss.detach()), time.process_time() - started)
        report(progress)
    optimizer.zero_grad()
    return progress
