"""What checking costs against making: CPU of `judge` on honest rollouts of 512 tokens, over that of `generate()`.

    python -m benchmarks.verification --json                   SmolLM2-135M in fp32 (6 minutes on a free core)
    python -m benchmarks.verification --profiles bf16 --json   in bf16
    python -m benchmarks.verification --batches 1              batch 1 alone, which takes less than two minutes
    python -m benchmarks.verification --quick                  the tiny model and few tokens, to see that it works

For each profile and batch, in one process with one thread:

    verifying      the whole of `judge` on a submission: prefill, proofs, seeded tokens, log-probabilities, reward
    generate()     Transformers' own, sampling at T=1 from the same weights in the profile's dtype, same prompts
    our engine     `node.decode` and the proofs it builds, which is what made the submission

All are CPU seconds (user and system) for one rollout, so at batch 16 a sixteenth of the whole. The rollouts are honest
and each is accepted, or nothing was measured. Freed memory stays in the process and inner loops are compiled before
anything is measured, as in validators, engines and audits that have worked for a while.

Not covered: memory, GPUs, dishonest rollouts (`benchmarks.garbage`), the environment's own cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contract import CouldNotRunError, Goal, at_most, run
from benchmarks.rig import Rig, anything, pairs
from environments.registry import make
from protocol.records import Lease, Submission
from trainer import smollm2
from verifier import compiled
from verifier.allocator import keep_freed_memory
from verifier.profiles import load_to_sample, load_to_verify

TARGETS = {("fp32", 1): 1 / 12, ("fp32", 16): 1 / 2.5, ("bf16", 1): 1 / 20, ("bf16", 16): 1 / 4}
"""Of issue 4: (profile, batch) -> verifying over generate()."""

TINY = Path(__file__).resolve().parent.parent / "trainer" / "data" / "tiny"
TIMES = 3
"""Verifications at batch 1; their median counts. What takes minutes is measured once."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one rollout."""

    profile: str
    batch: int
    verifying: tuple[float, ...]
    generating: float
    engine: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.verifying) / self.generating


def measure(args: argparse.Namespace) -> list[Goal]:
    torch.set_num_threads(1)
    keep_freed_memory()
    if not compiled.load():
        raise CouldNotRunError("inner loops can't be compiled here; the log says why (HEADWATER_COMPILED, numba)")
    directory, tokens, batch = smollm2.export() if not args.quick else TINY, args.tokens, 16
    if args.quick:
        tokens, batch = min(tokens, 40), 2
    costs = []
    for profile in args.profiles.split(","):
        verifier = load_to_verify(directory, profile)
        sampler = verifier if profile == "fp32" else load_to_sample(directory, profile)
        environment, samples = make("word"), min(4, batch)
        rig = Rig(
            "benchmarks.verification", profile, environment, verifier, anything("benchmark"),
            cap=tokens, stop=(), tasks=batch // samples, samples=samples,
        )  # fmt: skip
        for cost_of in [{"16": _together, "1": _alone}[size] for size in args.batches.split(",")]:
            cost = cost_of(rig, profile, sampler.model)
            costs.append(cost)
            _say(cost, tokens)
    model = "the tiny model" if args.quick else "SmolLM2-135M"
    return [
        at_most(
            f"{cost.profile}, batch {cost.batch}: CPU of verifying {tokens} tokens of {model} over that of generate() "
            f"in the same dtype (samples, CPU s a rollout: verifying, {len(cost.verifying)} times; generate(); our "
            "engine with proofs)",
            TARGETS[(cost.profile, 1 if cost.batch == 1 else 16)],
            cost.ratio,
            [*cost.verifying, cost.generating, cost.engine],
        )
        for cost in costs
    ]


def _together(rig: Rig, profile: str, model: Any) -> Cost:
    """Of a whole batch."""
    lease = rig.lease(2)
    rollouts = len(pairs(lease))
    engine, submission = _cpu(lambda: rig.answer(lease, model, rollouts))
    verifying = _verify(rig, lease, submission, 1)
    return Cost(
        profile, rollouts, verifying, _cpu(lambda: _generate(rig, lease, model))[0] / rollouts, engine / rollouts
    )


def _alone(rig: Rig, profile: str, model: Any) -> Cost:
    """Of one rollout."""
    lease = rig.lease(2)
    lease = replace(lease, tasks=lease.tasks[:1], samples=1)
    engine, submission = _cpu(lambda: rig.answer(lease, model, 1))
    verifying = _verify(rig, lease, submission, TIMES)
    return Cost(profile, 1, verifying, _cpu(lambda: _generate(rig, lease, model))[0], engine)


def _verify(rig: Rig, lease: Lease, submission: Submission, times: int) -> tuple[float, ...]:
    """CPU seconds a rollout of judging a submission, after one more that fills caches where it is short."""
    seconds = []
    for _ in range(times if times == 1 else times + 1):
        spent, judged = _cpu(lambda: rig.judge(lease, submission))
        found = {outcome.reason for outcome in judged.outcomes}
        if found != {"holds"}:
            raise CouldNotRunError(f"honest rollouts were judged {sorted(found)}: nothing was measured")
        seconds.append(spent / len(submission.rollouts))
    return tuple(seconds[-times:])


def _cpu(action: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    out = action()
    return time.process_time() - before, out


def _say(cost: Cost, tokens: int) -> None:
    sys.stderr.write(
        f"{cost.profile}, batch {cost.batch}, {tokens} tokens, CPU s a rollout: verifying "
        f"{statistics.median(cost.verifying):.2f}, generate() {cost.generating:.2f}, our engine {cost.engine:.2f}; "
        f"verifying is 1/{1 / cost.ratio:.1f} of generate()\n"
    )


def _generate(rig: Rig, lease: Lease, model: Any) -> None:
    prompts = [request.prompt for request in rig.requests(lease)]
    width = max(map(len, prompts))
    ids_BL = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None  # as many tokens as the rollouts have
    with torch.inference_mode():
        out_BL = model.generate(
            ids_BL, attention_mask=real_BL, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=lease.max_new_tokens,
        )  # fmt: skip
    if out_BL.shape[1] - width != lease.max_new_tokens:
        raise CouldNotRunError(f"generate() made {out_BL.shape[1] - width} tokens, not {lease.max_new_tokens}")


def _profiles(text: str) -> str:
    if not set(text.split(",")) <= {"fp32", "bf16"}:
        raise argparse.ArgumentTypeError(f"{text!r}: the profiles are fp32 and bf16")
    return text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", type=_profiles, default="fp32", help="fp32, bf16 or both (default: fp32)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each rollout (default: 512)")
    parser.add_argument("--batches", choices=("16,1", "16", "1"), default="16,1", help="both, or one alone")
    parser.add_argument("--quick", action="store_true", help="the tiny model, 40 tokens, batches of 2 and 1")


def main() -> int:
    return run(measure, "CPU of verifying honest rollouts over that of generating as many tokens.", arguments)


if __name__ == "__main__":
    sys.exit(main())
