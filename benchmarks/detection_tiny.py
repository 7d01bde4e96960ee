"""Honest tokens of the tiny model by the million, through the validators' own `judge`.

Leases of `word` are answered by the node's decoder over batch sizes and attention kernels, and judged under the
thresholds that runs of this model have. A quarter of them ask for the demo's short words, the others for words of 16 to
40 letters, which the tiny model was not trained on: longer answers, 48 tokens at most.

Slices of leases are kept in the cache directory, so an interrupted measurement goes on where it stopped.

Not covered: SmolLM2 (`detection_pool`), dishonest nodes (`benchmarks.data.evidence_pool`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from environments.base import Environment
from environments.word import Word
from node.decode import Decoded, DecodeRequest, decode
from protocol import codec
from protocol.envelope import seal
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.manifest import (
    MANIFEST_KIND,
    Bf16Thresholds,
    LeasePolicy,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from protocol.records import ACCEPT, FINISH_EOS, Lease, Rollout, Submission
from protocol.seeds import sampling_seed
from verifier import toploc
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel, completion_text, prompt_ids
from verifier.profiles import load_to_sample, load_to_verify, profile_of

FORMAT = 1
"""Part of the cache folder's name. A change in what a slice holds needs another number."""
TINY = Path(__file__).resolve().parent.parent / "trainer" / "data" / "tiny"
LEASES = 20
"""Of a slice: about 15,000 tokens."""
_TASKS, _SAMPLES, _CAP = 4, 8, 48
VARIANTS = (
    (1, "sdpa", False), (32, "sdpa", True), (8, "sdpa", True), (32, "eager", True),
    (8, "sdpa", False), (32, "sdpa", True), (8, "eager", True), (32, "sdpa", True),
    (32, "eager", False), (8, "sdpa", True), (32, "eager", True), (32, "sdpa", True),
)  # fmt: skip
"""Decode batch, attention kernel, long words or not: a slice each, in turn. One row at a time is slow, and rare."""

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
    limits: tuple[Thresholds, Bf16Thresholds | None],
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


def _slice(profile: str, number: int, limits: tuple[Thresholds, Bf16Thresholds | None]) -> Honest:
    batch, attention, long = VARIANTS[number % len(VARIANTS)]
    environment = Word({"low": 16, "high": 40} if long else {})
    node = load_to_sample(TINY, profile, attention=attention)
    rig = Rig(profile, environment, limits)
    total = Honest()
    for lease in range(number * LEASES, (number + 1) * LEASES):
        total.add(rig.honest(lease, node.model, batch))
    return total


class Rig:
    """A run of the tiny model and a validator of it."""

    def __init__(
        self,
        profile: str,
        environment: Environment,
        limits: tuple[Thresholds, Bf16Thresholds | None],
        stop: tuple[int, ...] | None = None,
    ) -> None:
        self.environment = environment
        self.policy: PolicyModel = load_to_verify(TINY, profile)
        self.limbs = profile_of(profile).limbs
        self.run = _open_run(profile, environment, self.policy.eos if stop is None else stop, limits)

    def honest(self, number: int, model: Any, batch: int) -> Honest:
        """One lease, answered and judged."""
        lease = self.lease(number)
        submission = self.answer(lease, model, batch)
        judged = self.judge(lease, submission)
        total = Honest()
        for rollout, outcome, detail in zip(submission.rollouts, judged.outcomes, judged.details, strict=True):
            numbers = {one.name: one.value for one in detail.numbers}
            one = Honest(1, len(rollout.tokens) // 4, int(outcome.outcome != ACCEPT))
            one.largest = {name: numbers[name] for name in _LARGEST if name in numbers}
            one.added = {name: numbers[name] for name in _ADDED if name in numbers}
            total.add(one)
        return total

    def judge(self, lease: Lease, submission: Submission) -> Judgement:
        return judge(self.run, lease, codec.encode(submission), self.policy, self.environment)

    def lease(self, number: int) -> Lease:
        tasks = tuple(range(_TASKS * number, _TASKS * (number + 1)))
        nonce, root, digest = number.to_bytes(32, "big"), bytes(32), self.environment.digest
        return Lease(bytes(16), self.run.id, 0, 0, root, digest, nonce, tasks, _SAMPLES, _CAP, 60_000, 1 << 24)

    def answer(self, lease: Lease, model: Any, batch: int = 32, temperature: float = 1.0) -> Submission:
        """What a node with this model sends."""
        return self.submission(lease, self.decoded(lease, model, batch, temperature))

    def requests(self, lease: Lease) -> list[DecodeRequest]:
        """What a lease asks for, task by task."""
        return [
            DecodeRequest(
                tuple(prompt_ids(self.policy.tokenizer, self.environment.task(task).prompt)),
                sampling_seed(self.run.id, lease.nonce, task, sample),
                lease.max_new_tokens,
            )
            for task in lease.tasks
            for sample in range(lease.samples)
        ]

    def decoded(self, lease: Lease, model: Any, batch: int = 32, temperature: float = 1.0) -> list[Decoded]:
        stop = self.run.manifest.sampling.stop_tokens
        return decode(model, self.requests(lease), temperature=temperature, stop_tokens=stop, batch_rows=batch)

    def submission(self, lease: Lease, outputs: Sequence[Decoded]) -> Submission:
        """Rollouts with proofs of their own states."""
        numbers = [(task, sample) for task in lease.tasks for sample in range(lease.samples)]
        proofs = toploc.build_many([out.states_NH for out in outputs], self.limbs)
        return Submission(
            lease.lease_id,
            "detection",
            tuple(
                self._rollout(task, sample, out, proof)
                for (task, sample), out, proof in zip(numbers, outputs, proofs, strict=True)
            ),
        )

    def _rollout(self, task: int, sample: int, out: Decoded, proof: list[bytes]) -> Rollout:
        text = completion_text(self.policy.tokenizer, out.tokens, self.run.manifest.sampling.stop_tokens)
        return Rollout(
            task=task,
            sample=sample,
            tokens=np.asarray(out.tokens, dtype="<u4").tobytes(),
            logprobs=out.logprobs.astype("<f4").tobytes(),
            finish=out.finish,
            reward=self.environment.score(self.environment.task(task), text, out.finish == FINISH_EOS),
            proofs=tuple(proof),
        )


def _open_run(
    profile: str, environment: Environment, stop: tuple[int, ...], limits: tuple[Thresholds, Bf16Thresholds | None]
) -> Run:
    key = Identity.from_seed(bytes(32))
    thresholds, bf16 = limits
    manifest = RunManifest(
        name="benchmarks.detection",
        created=1,
        root=key.public,
        coordinator=key.public,
        origin=key.public,
        coordinator_transport=key.public,
        control=(),
        ingress=(),
        profile=profile,
        model=ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 256, ()),
        environments=(environment.spec(),),
        sampling=SamplingSpec(1.0, _CAP, stop),
        thresholds=thresholds,
        leases=LeasePolicy(_SAMPLES, _TASKS, _TASKS, 2, 4, 32, 60_000, 1000, 0.1),
        steps=1,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody@example.org",
        privacy="none",
        bf16=bf16 if profile == "bf16" else None,
    )
    raw = seal(key, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw
    return open_manifest(raw)
