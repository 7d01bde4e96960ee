"""What a node may choose by choosing among experts that are nearly level, in bits a token, before and after each bound.

    python -m benchmarks.data.free_routes [--rollouts 400] [--json]

Small mixture-of-experts models with random weights (`tests.moe_rig`: 16 experts, 4 a token, hidden 48) answer fresh
random prompts of 2 to 39 tokens with 128 tokens each. Their own thresholds are calibrated on the same rollouts
(`verifier.route_noise`), and the same is asked of a run whose margin is the largest that any manifest may have, with
noise as loud as that margin admits. A choice whose lead is below the margin may be turned: with n of them in a rollout

    margin alone     n bits
    a rollout's      log2 of the ways to turn at most b of n,  b = not_first + not_first_rate x choices
    pooled           n H(p), p = not_first_rate x choices / n: the most that turns no more than that in the mean
    tasks to see     log_bar over the mean of log e a task of 8 rollouts, for a node that turns all it may

Bits are of the choice: how many different texts they make is less, since most turns change no token.

Not covered: how a node would find turns that raise its reward, which costs it a whole decoding for each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.contract import machine
from node.decode import DecodeRequest, decode
from protocol.manifest import RouteThresholds, Thresholds
from tests.moe_rig import moe_policy
from verifier import evidence, replay, route_noise
from verifier.evidence_rows import fp32_rows
from verifier.model import PolicyModel
from verifier.replay import Routed
from verifier.thresholds import PROOF_GATE, ROUTE_CEILING, route_thresholds

TOKENS, BATCH, CALIBRATED, SAMPLES = 128, 32, 32, 8
LARGE = 48_000
"""Choices of 1,000 tokens in 48 layers."""
FAMILIES = {"qwen3": "Qwen3-MoE", "glm4": "GLM4-MoE"}
_FP32 = Thresholds(3e-6, 4, PROOF_GATE, 1e-4, 3e-4, 0, 0, 0.0, 0, 0.0, 0.0, "benchmarks.data.free_routes")


@dataclass(frozen=True)
class Bits:
    """One model under one margin. Bits are a token's, means over the rollouts."""

    model: str
    margin: float
    choices: int
    level: int
    """Choices that may be turned, of all."""
    not_first: int
    """Choices of the honest rollouts that are not the verifier's own."""
    rate: float
    most: float
    """`not_first + not_first_rate x choices` of the mean rollout."""
    margin_alone: float
    of_a_rollout: float
    pooled: float
    tasks: float
    """Until a node that turns all is over the bar."""
    large: tuple[float, float, float]
    """The three, in bits a rollout, for one of `LARGE` choices with as many level ones."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the free choices of experts.")
    parser.add_argument("--rollouts", type=int, default=400, help="for each model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [one for family in FAMILIES for one in measure(family, args.rollouts)]
    if args.json:
        command = f"python -m benchmarks.data.free_routes --rollouts {args.rollouts}"
        rows = [vars(one) for one in found]
        sys.stdout.write(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=2) + "\n")
        return 0
    for one in found:
        sys.stdout.write(f"{vars(one)}\n")
    return 0


def measure(family: str, count: int) -> list[Bits]:
    """Under the margin that calibration gives, and under the largest one."""
    with tempfile.TemporaryDirectory() as folder:
        policy = moe_policy(Path(folder), family, 11, num_hidden_layers=2)
    rollouts = [one for batch in range(0, count, BATCH) for one in _answers(policy, batch, min(BATCH, count - batch))]
    calibrated = route_noise.measure(policy, rollouts[:CALIBRATED], model=family, machine="here")
    noise = route_noise.score_noise(policy, rollouts[:CALIBRATED])
    loudest = route_thresholds(
        model=family, machine="none", rollouts=CALIBRATED, choices=noise.choices, shortfall=0.0,
        scores=ROUTE_CEILING / 10, mean=noise.mean / noise.largest * ROUTE_CEILING / 10,
        level=noise.level / noise.choices, not_first=0,
    )  # fmt: skip
    for _ in replay.states_in_blocks(policy, rollouts[CALIBRATED:], ROUTE_CEILING, lambda _: True):
        pass
    leads = [lead_PY.numpy() for lead_PY in route_noise.leads(policy, rollouts)]
    return [_bits(FAMILIES[family], limits, rollouts, leads) for limits in (calibrated, loudest)]


def _answers(policy: PolicyModel, number: int, count: int) -> list[Routed]:
    rng = np.random.default_rng(number)
    requests = [
        DecodeRequest(tuple(rng.integers(2, 64, rng.integers(2, 40)).tolist()), rng.bytes(32), TOKENS)
        for _ in range(count)
    ]
    outputs = decode(policy.model, requests, temperature=1.0, stop_tokens=(), batch_rows=BATCH)
    assert policy.experts is not None
    return [
        Routed(r.prompt, np.asarray(o.tokens), policy.experts.decode(o.routes, len(r.prompt) + TOKENS - 1))
        for r, o in zip(requests, outputs, strict=True)
    ]


def _bits(name: str, limits: RouteThresholds, rollouts: Sequence[Routed], leads: Sequence[np.ndarray]) -> Bits:
    level = [int((np.abs(lead_PY) <= limits.margin).sum()) for lead_PY in leads]
    allowed = [limits.not_first + limits.not_first_rate * one.choices for one in rollouts]
    expected = [limits.not_first_rate * one.choices for one in rollouts]
    tokens = TOKENS * len(rollouts)
    (row,) = fp32_rows(_FP32, routes=replace(limits, measured_rollouts=len(rollouts)))
    turned = [min(n, math.floor(most)) for n, most in zip(level, allowed, strict=True)]
    tasks = [slice(at, at + SAMPLES) for at in range(0, len(rollouts), SAMPLES)]
    x = [sum(turned[task]) / sum(one.choices for one in rollouts[task]) for task in tasks]
    gain = float(evidence.log_factors(row, x).mean())
    return Bits(
        model=name,
        margin=limits.margin,
        choices=sum(one.choices for one in rollouts),
        level=sum(level),
        not_first=sum(one.not_first for one in rollouts),
        rate=limits.not_first_rate,
        most=sum(allowed) / len(allowed),
        margin_alone=sum(level) / tokens,
        of_a_rollout=sum(_ways(n, math.floor(most)) for n, most in zip(level, allowed, strict=True)) / tokens,
        pooled=sum(_entropy(n, mean) for n, mean in zip(level, expected, strict=True)) / tokens,
        tasks=row.log_bar / gain if gain > 0 else math.inf,
        large=_large(limits, round(sum(level) / sum(one.choices for one in rollouts) * LARGE)),
    )


def _large(limits: RouteThresholds, level: int) -> tuple[float, float, float]:
    most = math.floor(limits.not_first + limits.not_first_rate * LARGE)
    return float(level), round(_ways(level, most), 1), round(_entropy(level, limits.not_first_rate * LARGE), 1)


def _ways(n: int, most: int) -> float:
    """log2 of the ways to choose at most `most` of n."""
    return math.log2(sum(math.comb(n, k) for k in range(min(n, most) + 1)))


def _entropy(n: int, mean: float) -> float:
    """Most bits in n choices of which `mean` are turned on average."""
    p = min(0.5, mean / n) if n else 0.0
    return 0.0 if p <= 0 else -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p))


if __name__ == "__main__":
    sys.exit(main())
