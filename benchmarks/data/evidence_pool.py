"""Makes the pool that `benchmarks.evidence` draws from: real numbers of real verdicts on the tiny model.

    python -m benchmarks.data.evidence_pool [--leases 12]
    -> benchmarks/data/evidence-pool.json, verifier/data/evidence-tiny.json

The demo's tiny model answers leases of `word` with the node's own decoder, and the validators' own judge measures them,
under thresholds that let everything through: here it is the numbers that are wanted. Honest leases, at several batch
sizes, and dishonest ones:

    drift       fp32: weights a millionth off, below what one rollout shows
    int8, fp8   bf16: weights rounded to 8 bits, proofs from its own states
    stale       bf16: every weight moved by 3e-4, as many steps do; measured against the older policy too
    steer       bf16: of eight answers the one with the best reward, among those with no margin above 0.3
    warmer      bf16: temperature 0.97, right model

Not covered: SmolLM2, GPUs, any engine but ours; long answers (16 to 40 letters are asked for, 48 tokens at most).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contract import machine
from environments.base import Environment
from environments.word import Word
from node.decode import Decoded, DecodeRequest, decode
from protocol import codec
from protocol.envelope import seal
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
from protocol.records import FINISH_EOS, Lease, Number, Rollout, RolloutDetail, Submission, VerdictDetails
from protocol.seeds import sampling_seed
from verifier import statistics, toploc
from verifier.evidence_rows import Noise
from verifier.judge import judge
from verifier.model import PolicyModel, completion_text, load_policy, prompt_ids
from verifier.profiles import load_to_verify, profile_of

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "trainer" / "data" / "tiny"
POOL = Path(__file__).resolve().parent / "evidence-pool.json"
NOISE = ROOT / "verifier" / "data" / "evidence-tiny.json"
TASKS, SAMPLES = 4, 8
BATCHES = (32, 8, 1)
FREE_MARGIN = 0.3
"""Largest margin of a token that a steering node dares: about where bf16 runs reject one."""
_ANY = 1e12
"""A bound that lets everything through."""

Model = Any


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the pool of benchmarks.evidence on the tiny model.")
    parser.add_argument("--leases", type=int, default=12, help="leases of 32 rollouts for each kind")
    parser.add_argument("--out", type=Path, default=POOL)
    parser.add_argument("--noise", type=Path, default=NOISE, help="honest numbers that a manifest's rows follow from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = {
        f"{profile} {name}": values for profile in ("fp32", "bf16") for name, values in _kinds(profile, args.leases)
    }
    command = f"python -m benchmarks.data.evidence_pool --leases {args.leases}"
    made = {"command": command, "machine": machine()}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(made | {"kinds": kinds}) + "\n")
    about = {"model": "tiny", "environment": Word.name, "profile": "bf16"}
    leases = kinds["bf16 answers honest"]
    honest = {name: dataclasses.asdict(Noise.of([x for one in x_of for x in one])) for name, x_of in leases.items()}
    args.noise.write_text(json.dumps(made | about | {"statistics": honest}, indent=2) + "\n")
    for kind, values in kinds.items():
        means = {name: np.mean([x for lease in leases for x in lease]) for name, leases in values.items()}
        sys.stderr.write(f"{kind:16} " + "  ".join(f"{name} {mean:.4g}" for name, mean in means.items()) + "\n")
    return 0


def _kinds(profile: str, leases: int) -> Iterable[tuple[str, dict[str, list[list[float]]]]]:
    """(kind, statistic -> numbers of each lease)."""
    long, short = Word({"low": 16, "high": 40}), Word({})
    nodes = load_policy(TINY, profile_of(profile).dtype).model
    rig = _Rig(profile, long, 48)
    yield "honest", rig.measure(leases, nodes)
    if profile == "fp32":
        yield "drift", rig.measure(leases, _moved(nodes, lambda w: w * (1 + 6e-6 * torch.randn_like(w))))
        return
    int8, fp8 = _moved(nodes, _int8), _moved(nodes, lambda w: w.to(torch.float8_e4m3fn).to(w.dtype))
    yield "int8", rig.measure(leases, int8)
    yield "fp8", rig.measure(leases, fp8)
    yield "warmer", rig.measure(leases, nodes, temperature=0.97)
    older = _moved(nodes, lambda w: w + 3e-4 * torch.sign(torch.randn_like(w)))
    yield "paired honest", rig.measure(leases, nodes, against=older)
    yield "paired stale", rig.measure(leases, older, against=older)
    answers = _Rig(profile, short, short.max_new_tokens)
    yield "answers honest", answers.measure(4 * leases, nodes)
    near = [_moved(nodes, lambda w: w * (1 + 2**-5 * torch.randn_like(w))) for _ in range(7)]
    yield "answers steer", answers.measure(2 * leases, nodes, steers=near)


def _moved(model: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """Like `model` with every matrix changed before it is rounded to the model's dtype."""
    dtype = model.model.embed_tokens.weight.dtype
    exact, other = load_policy(TINY).model, load_policy(TINY, dtype).model
    for weight, parameter in zip(exact.parameters(), other.parameters(), strict=True):
        if parameter.ndim == 2:
            parameter.data = change(weight.data).to(dtype)
    return other


def _int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(weight / scale) * scale


class _Rig:
    """A run of one profile and environment, and a validator of it."""

    def __init__(self, profile: str, environment: Environment, cap: int) -> None:
        self.environment = environment
        self.policy = load_to_verify(TINY, profile)
        self.stop = self.policy.eos
        self.run = _open_run(profile, environment, cap, self.stop)
        self.limbs = profile_of(profile).limbs
        self.cap = cap

    def measure(
        self,
        leases: int,
        model: Model,
        temperature: float = 1.0,
        against: Model | None = None,
        steers: Sequence[Model] = (),
    ) -> dict[str, list[list[float]]]:
        """Statistic -> its numbers, lease by lease."""
        before = None if against is None else _as_verifier(against)
        found: dict[str, list[list[float]]] = {}
        for number in range(leases):
            lease = self._lease(number)
            submission = self._answer(lease, model, temperature, BATCHES[number % 3])
            if steers:
                submission = self._steered(lease, [submission, *(self._answer(lease, one, 1.0, 32) for one in steers)])
            judged = judge(self.run, lease, codec.encode(submission), self.policy, self.environment)
            details = judged.verdict_details()
            if before is not None:
                older = judge(self.run, lease, codec.encode(submission), before, self.environment)
                details = _paired(details, older.verdict_details())
            rollouts = statistics.measured(details, judged.outcomes, SAMPLES)
            for name in statistics.STATISTICS:
                x = statistics.values(name, rollouts)
                if x:
                    found.setdefault(name, []).append([float(f"{value:.6g}") for value in x])
        return found

    def _steered(self, lease: Lease, answers: Sequence[Submission]) -> Submission:
        """The best reward of each rollout among the answers that no single token gives away."""
        raws = [codec.encode(answer) for answer in answers]
        judged = [judge(self.run, lease, raw, self.policy, self.environment).details for raw in raws]
        rollouts = []
        for position, own in enumerate(answers[0].rollouts):
            allowed = [
                answer.rollouts[position]
                for answer, details in zip(answers, judged, strict=True)
                if _number(details[position], "token_margin") <= FREE_MARGIN
            ]
            rollouts.append(max([own, *allowed], key=lambda one: one.reward))
        return dataclasses.replace(answers[0], rollouts=tuple(rollouts))

    def _lease(self, number: int) -> Lease:
        tasks = tuple(range(TASKS * number, TASKS * (number + 1)))
        nonce = number.to_bytes(32, "big")
        env, root = self.environment.digest, bytes(32)
        return Lease(bytes(16), self.run.id, 0, 0, root, env, nonce, tasks, SAMPLES, self.cap, 60_000, 1 << 24)

    def _answer(self, lease: Lease, model: Model, temperature: float, batch: int) -> Submission:
        numbers = [(task, sample) for task in lease.tasks for sample in range(SAMPLES)]
        prompts = [tuple(prompt_ids(self.policy.tokenizer, self.environment.task(task).prompt)) for task, _ in numbers]
        requests = [
            DecodeRequest(prompt, sampling_seed(self.run.id, lease.nonce, task, sample), self.cap)
            for prompt, (task, sample) in zip(prompts, numbers, strict=True)
        ]
        outputs = decode(model, requests, temperature=temperature, stop_tokens=self.stop, batch_rows=batch)
        proofs = toploc.build_many([out.states_NH for out in outputs], self.limbs)
        rollouts = [
            self._rollout(task, sample, out, proof)
            for (task, sample), out, proof in zip(numbers, outputs, proofs, strict=True)
        ]
        return Submission(lease.lease_id, "pool", tuple(rollouts))

    def _rollout(self, task: int, sample: int, out: Decoded, proof: list[bytes]) -> Rollout:
        text = completion_text(self.policy.tokenizer, out.tokens, self.stop)
        return Rollout(
            task=task,
            sample=sample,
            tokens=np.asarray(out.tokens, dtype="<u4").tobytes(),
            logprobs=out.logprobs.astype("<f4").tobytes(),
            finish=out.finish,
            reward=self.environment.score(self.environment.task(task), text, out.finish == FINISH_EOS),
            proofs=tuple(proof),
        )


def _as_verifier(model: Model) -> PolicyModel:
    """The verifier of another policy: the same weights in float32."""
    policy = load_to_verify(TINY, "bf16")
    with torch.no_grad():
        for own, other in zip(policy.model.parameters(), model.parameters(), strict=True):
            own.copy_(other.float())
    return policy


def _paired(details: VerdictDetails, older: VerdictDetails) -> VerdictDetails:
    """The details with which of the two policies fits each rollout's proofs better."""

    def one(current: RolloutDetail, before: RolloutDetail) -> RolloutDetail:
        errors = [_number(it, "mantissa_mean") for it in (current, before)]
        nearer = Number("previous_nearer", statistics.previous_nearer(*errors))
        return dataclasses.replace(current, numbers=(nearer,))

    return VerdictDetails(tuple(map(one, details.rollouts, older.rollouts)))


def _number(detail: RolloutDetail, name: str) -> float:
    return next(number.value for number in detail.numbers if number.name == name)


def _open_run(profile: str, environment: Environment, cap: int, stop: tuple[int, ...]) -> Run:
    key = Identity.from_seed(bytes(32))
    loose = {field.name: _ANY for field in dataclasses.fields(Bf16Thresholds)}
    whole = ("chunk_exponents", "rollout_chunks", "measured_rollouts", "measured_tokens", "measured_exponents")
    bf16 = Bf16Thresholds(**{**loose, **dict.fromkeys(whole, 1 << 20), "machine": "benchmarks.data.evidence_pool"})  # type: ignore[arg-type]
    manifest = RunManifest(
        name="benchmarks.data.evidence_pool",
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
        sampling=SamplingSpec(1.0, cap, stop),
        thresholds=Thresholds(_ANY, 128, _ANY, _ANY, _ANY, 0, 0, 0.0, 0, 0.0, 0.0, "benchmarks.data.evidence_pool"),
        leases=LeasePolicy(SAMPLES, TASKS, TASKS, 2, 4, 32, 60_000, 1000, 0.1),
        steps=1,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody@example.org",
        privacy="none",
        bf16=bf16 if profile == "bf16" else None,
    )
    raw = seal(key, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw
    return open_manifest(raw)


if __name__ == "__main__":
    sys.exit(main())
