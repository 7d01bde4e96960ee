"""What a verifier sees of dishonest nodes, and whom it wrongs: SmolLM2-135M and the tiny model, both profiles.

    python -m benchmarks.detection [--part NAMES] [--rollouts 16] [--cache DIR] [--out FILE] [--docs docs/detection.md]
    python -m benchmarks.detection --quick          the tiny model with few rollouts: seconds, for a look and for tests

Parts, made in this order and each kept in the cache, so that what was interrupted goes on and a rerun only reads:

    altered      nodes whose weights, arithmetic or prompt are not the run's
    sampling     nodes that choose tokens otherwise than the seed says
    stale        21 real policy-gradient steps, and nodes that are one step behind
    honest       204 honest rollouts over 12 variants
    tiny         a million honest tokens of the tiny model
    bf16         honest rollouts of nodes that compute in bfloat16, and as many dishonest ones
    tiny-bf16    a million honest tokens of the tiny model in bfloat16
    table        reads what is there

Goals: issue 4's acceptance. Goals of what was not measured are not printed; it is listed in the results file.

Not covered: GPUs (decision 016), evidence added up per node (`benchmarks.evidence`), other engines than ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import detection_judge, detection_table, detection_tiny
from benchmarks.contract import CouldNotRunError, Goal, machine, run
from benchmarks.detection_judge import Seen
from benchmarks.detection_pool import (
    SAMPLING_KINDS,
    STALE_KINDS,
    WEIGHTS_KINDS,
    Maker,
    Pool,
    honest_pools,
    make_weights,
    pool_of,
    save_policy,
)
from benchmarks.detection_table import Found, Limits
from environments.registry import make
from trainer import smollm2
from trainer.smollm2 import cache_directory
from verifier import thresholds
from verifier.model import load_policy

PARTS = ("altered", "sampling", "stale", "honest", "tiny", "bf16", "tiny-bf16", "table")
TINY_TOKENS, HONEST_ROLLOUTS = 1_000_000, 200
BEGIN, END = "<!-- detection: begin -->", "<!-- detection: end -->"
_DATA = Path(thresholds.__file__).resolve().parent / "data"
BF16_KINDS = (
    "int8",
    "fp8-kv",
    "prompt",
    "prompt-longer",
    "fp8",
    "stale-bf16",
    "int4",
    "drop-layer",
    "greedy",
    "t0.7",
    "t0.9",
    "best-of-4",
)
"""Ways to be dishonest that are also sampled in bfloat16."""
_CPU_SECONDS = {"fp32": 2.5, "bf16": 2.8, "judge": 1.0, "weights": 100.0, "tiny": 420.0, "tiny-bf16": 630.0}
"""Of one rollout of 128 tokens, of judging one, of the weights, of a million tokens: for the budget that is printed."""


def measure(args: argparse.Namespace) -> Sequence[Goal]:
    parts = PARTS if args.part == "all" else tuple(args.part.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise CouldNotRunError(f"--part {','.join(unknown)}: there are {', '.join(PARTS)}, or all")
    torch.set_num_threads(1)
    cache = args.cache or cache_directory()
    plan = Plan(quick_maker(cache, _say) if args.quick else Maker(smollm2.export(), cache, _say), args)
    _say(f"budget: about {plan.cpu_seconds(parts) / 60:.0f} minutes of one core for what is not in {plan.maker.folder}")
    for part in parts:
        plan.make(part)
    limits, tiny_limits = limits_of("tiny" if args.quick else "smollm2"), limits_of("tiny")
    found = plan.found(
        {p: plan.tiny(p, tiny_limits, part in parts) for p, part in (("fp32", "tiny"), ("bf16", "tiny-bf16"))}
    )
    rows = detection_table.summary(found, limits)
    goals, missing = detection_table.goals(rows, args.tiny_tokens, plan.honest_goal)
    if args.out:
        command = "python -m benchmarks.detection " + " ".join(sys.argv[1:])
        results = {
            "command": command.strip(),
            "machine": machine(),
            "model": "tiny" if args.quick else "SmolLM2-135M-Instruct",
            "rows": rows,
            "goals": [asdict(goal) for goal in goals],
            "not_run": missing,
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.docs:
        write_table(args.docs, detection_table.markdown(rows))
    for one in missing:
        _say(f"not run: {one}")
    return goals


class Plan:
    """Which pools each part has."""

    def __init__(self, maker: Maker, args: argparse.Namespace) -> None:
        self.maker, self.rollouts, self.tiny_tokens = maker, args.rollouts, args.tiny_tokens
        self.cache, self.quick = maker.folder.parent, args.quick
        self.honest_goal = HONEST_ROLLOUTS
        if args.quick:
            self.rollouts, self.tiny_tokens, self.honest_goal = min(4, args.rollouts), 4_000, 12
        self._honest = {dtype: honest_pools(dtype, args.quick) for dtype in ("fp32", "bf16")}
        self._pools: dict[str, list[Pool]] = {
            "altered": [pool_of(kind, self.rollouts) for kind in WEIGHTS_KINDS],
            "sampling": [pool_of(kind, self.rollouts) for kind in SAMPLING_KINDS],
            "stale": [pool_of(kind, self.rollouts) for kind in STALE_KINDS],
            "honest": self._honest["fp32"],
            "bf16": self._honest["bf16"] + [pool_of(kind, self.rollouts, "bf16") for kind in BF16_KINDS],
        }

    def cpu_seconds(self, parts: Sequence[str]) -> float:
        seconds = 0.0
        for part in parts:
            for pool in self._pools.get(part, []):
                seconds += 0.0 if self.maker.has(pool) else pool.rollouts * _CPU_SECONDS[pool.dtype]
                seconds += 0.0 if detection_judge.has(self.maker, pool) else pool.rollouts * _CPU_SECONDS["judge"]
            if part == "stale" and not self._has_weights():
                seconds += _CPU_SECONDS["weights"]
            if part.startswith("tiny"):
                seconds += _CPU_SECONDS[part] * self.tiny_tokens / 1e6
        return seconds / 100 if self.quick else seconds

    def make(self, part: str) -> None:
        """Sample and judge a part's pools, each batch of judging as soon as its rollouts are there."""
        if part == "stale" and not self._has_weights():
            _say(f"  training 21 steps of AdamW at {1e-6:g}")
            make_weights(self.maker, make("word" if self.quick else "addition"), *((2,) if self.quick else ()))
        if part == "bf16" and not self._has_weights():
            self._pools["bf16"] = [pool for pool in self._pools["bf16"] if pool.kind not in STALE_KINDS]
        pools = self._pools.get(part, [])
        for pool in pools:
            self.maker.made(pool)
        # Pools that answer the same prompts are judged together and share their noise; honest ones share none.
        groups = [[pool] for pool in pools if pool.kind == "honest"]
        groups.append([pool for pool in pools if pool.kind != "honest"])
        for group in groups:
            detection_judge.seen(self.maker, group)
        if part == "sampling":
            self._splice()

    def _has_weights(self) -> bool:
        return (self.maker.folder / "after" / "model.safetensors").exists()

    def _splice(self) -> Seen:
        return detection_judge.spliced(self.maker, self._splice_name(), self._splice_source(), self.rollouts)

    def _splice_name(self) -> str:
        return f"splice-fp32-{self.rollouts}-of-{self._splice_source().name}"

    def _splice_source(self) -> Pool:
        """The largest honest pool of the usual kernel."""
        return max((pool for pool in self._honest["fp32"] if pool.attention == "sdpa"), key=lambda pool: pool.rollouts)

    def tiny(self, profile: str, limits: Limits, make: bool) -> detection_tiny.Honest:
        bounds = limits.fp32, limits.bf16 if profile == "bf16" else None
        return detection_tiny.measure(profile, self.tiny_tokens, bounds, self.cache, _say, make)

    def found(self, tiny: dict[str, detection_tiny.Honest]) -> Found:
        """Everything that was measured so far, in this call or before."""
        honest: dict[str, dict[str, Seen]] = {}
        for dtype, pools in self._honest.items():
            there = [pool for pool in pools if detection_judge.has(self.maker, pool)]
            honest[dtype] = detection_judge.seen(self.maker, there)
        kinds: dict[tuple[str, str], Seen] = {}
        for part in ("altered", "sampling", "stale", "bf16"):
            for pool in self._pools[part]:
                if pool.kind == "honest" or not detection_judge.has(self.maker, pool):
                    continue
                for name, seen in detection_judge.seen(self.maker, [pool]).items():
                    kinds["wrong-seed" if name.startswith("wrong-seed") else pool.kind, pool.dtype] = seen
        if detection_judge.is_there(self.maker, self._splice_name()):
            kinds["splice", "fp32"] = self._splice()
        return Found(honest, kinds, {profile: one for profile, one in tiny.items() if one.tokens})


def limits_of(model: str) -> Limits:
    """The checked-in thresholds of a model: those that a run of it would have."""
    fp32, path = _DATA / f"noise-{model}.json", _DATA / f"noise-{model}-bf16.json"
    return Limits(
        thresholds.thresholds(thresholds.read(fp32)), thresholds.bf16_thresholds(thresholds.read(path)), path.name
    )


def quick_maker(cache: Path, say: Callable[[str], None]) -> Maker:
    """The tiny model with weights that are bfloat16 values, as a published SmolLM2 has, and words for prompts."""
    place = cache / "detection-tiny-rounded"
    if not (place / "model.safetensors").exists():
        save_policy(detection_tiny.TINY, load_policy(detection_tiny.TINY, weights=torch.bfloat16).model, place)
    return Maker(place, cache, say, tokens=64, wording=_word)


def _word(index: int, system: str) -> str:
    letters = "".join("abcdefghij"[(index * 7 + i * (3 + index % 5)) % 10] for i in range(8))
    return f"{letters}=" if system.endswith("length.") else f"{letters[::-1]}="


def write_table(path: Path, table: str) -> None:
    """Put the tables between the markers of a document.

    Raises:
        CouldNotRunError: it has no markers.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN not in text or END not in text:
        raise CouldNotRunError(f"{path} has no lines {BEGIN} and {END} to write the tables between")
    head, _, rest = text.partition(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default="all", help=f"of {', '.join(PARTS)}: some of them, with commas between")
    parser.add_argument("--rollouts", type=int, default=16, help="of each way to be dishonest")
    parser.add_argument("--tiny-tokens", type=int, default=TINY_TOKENS, help="honest tokens of the tiny model")
    parser.add_argument("--cache", type=Path, help="where rollouts and weights are kept; the user's cache by default")
    parser.add_argument("--out", type=Path, help="write the results there")
    parser.add_argument("--docs", type=Path, help="write the tables into this document")
    parser.add_argument("--quick", action="store_true", help="the tiny model and few rollouts")


if __name__ == "__main__":
    sys.exit(run(measure, "What a verifier sees of dishonest nodes, and whom it wrongs.", arguments))
