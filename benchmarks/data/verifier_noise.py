"""By how much two verifiers differ in the numbers of one rollout: what the tolerances of `verifier.compare` rest on.

    python -m benchmarks.data.verifier_noise [--models tiny,random,smollm2] [--out docs/results/...json]

Each model answers one lease in each profile, honestly, and again with weights that are a little off (1e-5 in fp32, 1e-2
in bf16, which most bounds would reject; here they let everything through). Every answer is judged six times, with sdpa
and eager kernels, on one thread and two, all rollouts in a batch and each alone; all 15 pairs are compared. Per number:

    value      mean over the rollouts
    largest    difference of one rollout, and the mean of all
    other      share of the rollouts and pairs in which it is not equal to the bit
    used       the largest share of what `compare` allows that any task's sum of differences took, over all pairs

Not covered: other machines (`tests/test_verifier_compare.py` has one as loud as an H200), routes of experts.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contract import machine
from environments.registry import make
from protocol import codec
from protocol.records import ACCEPT, RolloutDetail, Submission
from tests.judge_rig import BF16, TINY, Rig, make_rig, random_policy
from trainer.smollm2 import export
from verifier import blocks, compare, model
from verifier.judge import judge
from verifier.model import PolicyModel
from verifier.numbers import NUMBERS
from verifier.profiles import load_to_sample, load_to_verify

LEASES = {"tiny": (64, 8, 9), "random": (4, 8, 180), "smollm2": (2, 8, 64)}
"""Tasks, samples, most tokens."""
OFF = {"fp32": 1e-5, "bf16": 1e-2}
WAYS = [
    (kernel, threads, alone) for kernel in ("sdpa", "eager") for threads, alone in ((1, False), (1, True), (2, True))
]
_ANY = 1e12

Details = list[RolloutDetail]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how far verifiers are from each other.")
    parser.add_argument("--models", default="tiny,random,smollm2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            for profile in OFF:
                found += list(_measure(name, profile, Path(scratch)))
    made = {"command": "python -m benchmarks.data.verifier_noise", "machine": machine(), "pairs": 15, "measured": found}
    if args.out is not None:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _measure(name: str, profile: str, scratch: Path) -> Iterator[dict[str, Any]]:
    folder = {"tiny": TINY, "random": scratch / "random"}.get(name) or export()
    if name == "random" and not folder.exists():
        random_policy(folder, 1)
    tasks, samples, cap = LEASES[name]
    nodes = load_to_sample(folder, profile).model
    verifiers = {kernel: load_to_verify(folder, profile, attention=kernel) for kernel in ("sdpa", "eager")}
    environment = make("addition" if name == "smollm2" else "word")
    stop = () if name == "smollm2" else (1,)
    bf16 = BF16 if profile == "bf16" else None
    rig = make_rig(verifiers["sdpa"], environment, tasks, samples, cap, stop, bf16=bf16, generator=nodes)
    answers = {"honest": rig.honest}
    if name != "smollm2":
        answers["off"] = rig.answer(_moved(nodes, OFF[profile]))
    for kind, answer in answers.items():
        judged = [_judged(_wide(rig), answer, verifiers[kernel], threads, alone) for kernel, threads, alone in WAYS]
        tokens = sum(len(one.tokens) // 4 for one in answer.rollouts)
        row = {"model": name, "profile": profile, "node": kind, "rollouts": len(answer.rollouts), "tokens": tokens}
        numbers = _compared(rig, judged)
        sys.stderr.write(f"{row}\n" + "".join(f"  {number:18} {one}\n" for number, one in numbers.items()))
        yield row | {"numbers": numbers}


def _compared(rig: Rig, judged: list[Details]) -> dict[str, dict[str, float]]:
    rules = compare.Rules.of(rig.run.manifest, rig.lease)
    values = [[{one.name: one.value for one in detail.numbers} for detail in details] for details in judged]
    groups = compare.by_task(range(len(values[0])), rig.lease.samples)
    texts = [detail.digest for detail in judged[0]]
    found = {}
    for name in sorted(values[0][0].keys() & NUMBERS.keys()):
        off: list[float] = []
        used = 0.0
        for said, ours in itertools.combinations(values, 2):
            apart = [abs(a[name] - b[name]) for a, b in zip(said, ours, strict=True)]
            off += apart
            for group in groups:
                worst: dict[bytes, int] = {}
                for i in group:
                    worst[texts[i]] = max(i, worst.get(texts[i], i), key=lambda i: apart[i])
                count = {i: len(judged[0][i].logprobs) // 4 for i in worst.values()}
                may = [rules.tolerances(ours[i], count[i])[name] for i in worst.values()]
                most = max(one.jump for one in may) + math.fsum(one.noise for one in may)
                used = max(used, math.fsum(apart[i] for i in worst.values()) / most if most else 0.0)
        found[name] = {
            "value": _short(math.fsum(one[name] for one in values[0]) / len(values[0])),
            "largest": _short(max(off)),
            "mean": _short(math.fsum(off) / len(off)),
            "other": _short(sum(one > 0 for one in off) / len(off)),
            "used": _short(used),
        }
    return found


def _judged(rig: Rig, answer: Submission, policy: PolicyModel, threads: int, alone: int) -> Details:
    rows = model._PREFILL_TOKENS, blocks._CACHED_TOKENS
    torch.set_num_threads(threads)
    if alone:
        model._PREFILL_TOKENS = blocks._CACHED_TOKENS = 1
    try:
        found = judge(rig.run, rig.lease, codec.encode(answer), policy, rig.environment)
    finally:
        torch.set_num_threads(1)
        model._PREFILL_TOKENS, blocks._CACHED_TOKENS = rows
    assert {outcome.outcome for outcome in found.outcomes} == {ACCEPT}
    return found.details


def _wide(rig: Rig) -> Rig:
    """The same run with bounds that let everything through."""
    manifest = rig.run.manifest
    own, bf16 = manifest.thresholds, manifest.bf16
    own = replace(own, proof_median=_ANY, proof_outliers=128, token_margin=_ANY, logprob=_ANY)
    if bf16 is not None:
        bf16 = replace(
            bf16,
            chunk_exponents=128,
            chunk_mantissa=_ANY,
            rollout_mantissa=_ANY,
            token_margin=_ANY,
            margin_mean=_ANY,
            logprob=_ANY,
            logprob_mean=_ANY,
        )
    return replace(rig, run=replace(rig.run, manifest=replace(manifest, thresholds=own, bf16=bf16)))


def _moved(nodes: Any, by: float) -> Any:
    """A model of which every matrix is a little off."""
    other, chance = copy.deepcopy(nodes), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim == 2:
                weight.mul_(1 + by * torch.randn(weight.shape, generator=chance).to(weight.dtype))
    return other


def _short(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
