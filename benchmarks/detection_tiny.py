"""Honest tokens of the tiny model by the million, through the validators' own `judge`.

Leases of `word` are answered by the node's decoder over batch sizes and attention kernels, and judged under the
thresholds that runs of this model have. In fp32 a quarter of them ask for the demo's short words, the others for words
of 16 to 40 letters, which the tiny model was not trained on: longer answers, 48 tokens at most. In bf16 all are the
demo's, 9 tokens at most: no run may have longer ones, since of those rounding alone moves single tokens too far
(docs/decisions/027-calibration-by-length.md).

Slices of leases are kept in the cache directory, so an interrupted measurement goes on where it stopped.

Not covered: SmolLM2 (`detection_pool`), dishonest nodes (`benchmarks.data.evidence_pool`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.rig import Limits, Rig
from environments.base import Environment
from environments.word import Word
from protocol.files import write_atomic
from protocol.manifest import Bf16Thresholds, Thresholds
from protocol.records import ACCEPT
from verifier.profiles import load_to_sample, load_to_verify

FORMAT = 1
"""Part of the cache folder's name. A change in what a slice holds needs another number."""
TINY = Path(__file__).resolve().parent.parent / "trainer" / "data" / "tiny"
LEASES = 20
"""Of a slice, 32 rollouts each: about 4,200 tokens of short words, 19,000 with long ones."""
CAP = 48
VARIANTS = (
    (1, "sdpa", False), (32, "sdpa", True), (8, "sdpa", True), (32, "eager", True),
    (8, "sdpa", False), (32, "sdpa", True), (8, "eager", True), (32, "sdpa", True),
    (32, "eager", False), (8, "sdpa", True), (32, "eager", True), (32, "sdpa", True),
)  # fmt: skip
"""Decode batch, attention kernel, long words (fp32): a slice each, in turn. One row at a time is slow, and rare."""

_LARGEST = ("proof_median", "proof_outliers", "exponents", "mantissa_mean", "token_margin", "logprob_error")
_ADDED = ("tokens_not_first", "margin_sum")


@dataclass
class Honest:
    """Sums over slices. largest: of each number that a verdict carries; added: sums."""

    rollouts: int = 0
    tokens: int = 0
    rejected: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    added: dict[str, float] = field(default_factory=dict)

    def add(self, other: Honest) -> None:
        self.rollouts += other.rollouts
        self.tokens += other.tokens
        self.rejected += other.rejected
        for name, value in other.largest.items():
            self.largest[name] = max(value, self.largest.get(name, value))
        for name, value in other.added.items():
            self.added[name] = self.added.get(name, 0.0) + value


def measure(
    profile: str,
    tokens: int,
    limits: Limits,
    cache: Path,
    say: Callable[[str], None],
    make: bool = True,
) -> Honest:
    """Honest tokens until there are so many, or, without `make`, those of the slices that are there."""
    weights = blake3().update_mmap(TINY / "model.safetensors").hexdigest()[:8]
    bounds = blake3(repr([_bounds(one) for one in limits]).encode()).hexdigest()[:8]
    folder = cache / f"detection-tiny-{FORMAT}-{profile}-{weights}-{bounds}"
    folder.mkdir(parents=True, exist_ok=True)
    total, number = Honest(), 0
    while total.tokens < tokens:
        path = folder / f"{number:04d}.json"
        if not path.exists():
            if not make:
                break
            one = _slice(profile, number, limits)
            write_atomic(path, json.dumps(one.__dict__).encode())
            say(f"  {profile}, slice {number}: {one.tokens} tokens, {one.rejected} rejected")
        total.add(Honest(**json.loads(path.read_text())))
        number += 1
    return total


def _bounds(limits: Thresholds | Bf16Thresholds | None) -> list[tuple[str, float]]:
    """What decides, without the measurement it was taken from."""
    every = [] if limits is None else sorted(asdict(limits).items())
    return [(name, value) for name, value in every if not name.startswith(("measured", "machine", "false"))]


def _slice(profile: str, number: int, limits: Limits) -> Honest:
    batch, attention, long = VARIANTS[number % len(VARIANTS)]
    short = profile == "bf16" or not long
    environment = Word({} if short else {"low": 16, "high": 40})
    node = load_to_sample(TINY, profile, attention=attention)
    rig = rig_of(profile, environment, limits, cap=environment.max_new_tokens if profile == "bf16" else CAP)
    total = Honest()
    for lease in range(number * LEASES, (number + 1) * LEASES):
        total.add(honest(rig, lease, node.model, batch))
    return total


def rig_of(
    profile: str, environment: Environment, limits: Limits, stop: tuple[int, ...] | None = None, cap: int = CAP
) -> Rig:
    """A run of the tiny model and a validator of it."""
    policy = load_to_verify(TINY, profile)
    stop = policy.eos if stop is None else stop
    return Rig("benchmarks.detection", profile, environment, policy, limits, cap=cap, stop=stop)


def honest(rig: Rig, number: int, model: Any, batch: int) -> Honest:
    """One lease, answered and judged."""
    lease = rig.lease(number)
    submission = rig.answer(lease, model, batch)
    judged = rig.judge(lease, submission)
    total = Honest()
    for rollout, outcome, detail in zip(submission.rollouts, judged.outcomes, judged.details, strict=True):
        numbers = {one.name: one.value for one in detail.numbers}
        one = Honest(1, len(rollout.tokens) // 4, int(outcome.outcome != ACCEPT))
        one.largest = {name: numbers[name] for name in _LARGEST if name in numbers}
        one.added = {name: numbers[name] for name in _ADDED if name in numbers}
        total.add(one)
    return total
