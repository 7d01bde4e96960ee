"""Makes the pool that `benchmarks.evidence` draws from: real numbers of real verdicts on the tiny model.

    python -m benchmarks.data.evidence_pool [--leases 12]
    -> benchmarks/data/evidence-pool.json, verifier/data/evidence-tiny.json
    python -m benchmarks.data.evidence_pool --model smollm2 [--leases 6]
    -> verifier/data/evidence-smollm2.json: honest bf16 answers to `addition` alone

The demo's tiny model answers leases of `word` with the node's own decoder, and the validators' own judge measures them,
under thresholds that let everything through: here it is the numbers that are wanted. Honest leases, at several batch
sizes, and dishonest ones:

    drift       fp32: weights a millionth off, below what one rollout shows
    int8, fp8   bf16: weights rounded to 8 bits, proofs from its own states
    lean        bf16: claims each log-probability 0.02 too low; lean up: too high, but none above 0
    lean tied   bf16: 0.02 too low for answers that earn a reward, too high for others
    zigzag      bf16: 0.3 too low and 0.3 too high in turns
    steer       bf16: of eight answers the one with the best reward, among those with no margin above 0.3
    warmer      bf16: temperature 0.97, right model

Not covered: dishonest nodes on SmolLM2, GPUs, any engine but ours; long answers (16 to 40 letters are asked for, 48
tokens at most).
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
import numpy.typing as npt
import torch

from benchmarks.contract import machine
from benchmarks.rig import Rig, anything
from environments.addition import Addition
from environments.base import Environment
from environments.word import Word
from protocol.records import Lease, Rollout, RolloutDetail, Submission
from trainer.smollm2 import export
from verifier import statistics
from verifier.evidence_rows import Noise
from verifier.model import load_policy, prompt_ids
from verifier.profiles import load_to_verify, profile_of

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "trainer" / "data" / "tiny"
POOL = Path(__file__).resolve().parent / "evidence-pool.json"
NOISE = ROOT / "verifier" / "data"
BATCHES = (32, 8, 1)
FREE_MARGIN = 0.3
"""Largest margin of a token that a steering node dares: about where bf16 runs reject one."""

Model = Any
F32 = npt.NDArray[np.float32]
Lie = Callable[[F32, float], F32]
"""(honest log-probabilities [N], reward) -> what is added to them."""

LIES: dict[str, Lie] = {
    "lean": lambda own_N, _: np.full_like(own_N, -0.02),
    "lean up": lambda own_N, _: np.full_like(own_N, 0.02),
    "lean tied": lambda own_N, reward: np.full_like(own_N, -0.02 if reward > 0 else 0.02),
    "zigzag": lambda own_N, _: np.where(np.arange(len(own_N)) % 2, 0.3, -0.3).astype(np.float32),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the pool of benchmarks.evidence on the tiny model.")
    parser.add_argument("--leases", type=int, default=12, help="leases of 32 rollouts for each kind")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--out", type=Path, default=POOL)
    parser.add_argument("--noise", type=Path, help="honest numbers that a manifest's rows follow from")
    args = parser.parse_args()
    noise = args.noise or NOISE / f"evidence-{args.model}.json"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.model == "smollm2":
        command = f"python -m benchmarks.data.evidence_pool --model smollm2 --leases {args.leases}"
        _write_noise(noise, command, "smollm2", Addition.name, _smollm2(args.leases))
        return 0
    kinds = {
        f"{profile} {name}": values for profile in ("fp32", "bf16") for name, values in _kinds(profile, args.leases)
    }
    command = f"python -m benchmarks.data.evidence_pool --leases {args.leases}"
    made = {"command": command, "machine": machine()}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(made | {"kinds": kinds}) + "\n")
    _write_noise(noise, command, "tiny", Word.name, kinds["bf16 answers honest"])
    for kind, values in kinds.items():
        means = {name: np.mean([x for lease in leases for x in lease]) for name, leases in values.items()}
        sys.stderr.write(f"{kind:16} " + "  ".join(f"{name} {mean:.4g}" for name, mean in means.items()) + "\n")
    return 0


def _write_noise(path: Path, command: str, model: str, environment: str, leases: dict[str, list[list[float]]]) -> None:
    about = {"command": command, "machine": machine(), "model": model, "environment": environment, "profile": "bf16"}
    honest = {name: dataclasses.asdict(Noise.of([x for one in x_of for x in one])) for name, x_of in leases.items()}
    path.write_text(json.dumps(about | {"statistics": honest}, indent=2) + "\n")


def _smollm2(leases: int) -> dict[str, list[list[float]]]:
    folder, environment = export(), Addition({})
    pool = _Pool("bf16", environment, environment.max_new_tokens, folder)
    return pool.measure(leases, load_policy(folder, torch.bfloat16).model)


def _kinds(profile: str, leases: int) -> Iterable[tuple[str, dict[str, list[list[float]]]]]:
    """(kind, statistic -> numbers of each lease)."""
    long, short = Word({"low": 16, "high": 40}), Word({})
    nodes = load_policy(TINY, profile_of(profile).dtype).model
    rig = _Pool(profile, long, 48)
    yield "honest", rig.measure(leases, nodes)
    if profile == "fp32":
        yield "drift", rig.measure(leases, _moved(nodes, lambda w: w * (1 + 6e-6 * torch.randn_like(w))))
        return
    int8, fp8 = _moved(nodes, _int8), _moved(nodes, lambda w: w.to(torch.float8_e4m3fn).to(w.dtype))
    yield "int8", rig.measure(leases, int8)
    yield "fp8", rig.measure(leases, fp8)
    yield "warmer", rig.measure(leases, nodes, temperature=0.97)
    answers = _Pool(profile, short, short.max_new_tokens)
    yield "answers honest", answers.measure(4 * leases, nodes)
    for name, lie in LIES.items():
        yield f"answers {name}", answers.measure(2 * leases, nodes, lie=lie)
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


class _Pool:
    """A run of one profile and environment, and a validator of it."""

    def __init__(self, profile: str, environment: Environment, cap: int, model: Path = TINY) -> None:
        policy, name, ends = load_to_verify(model, profile), "benchmarks.data.evidence_pool", environment.stop
        stop = policy.eos if ends is None else tuple(prompt_ids(policy.tokenizer, ends))
        self.rig = Rig(name, profile, environment, policy, anything(name), cap=cap, stop=stop)

    def measure(
        self,
        leases: int,
        model: Model,
        temperature: float = 1.0,
        steers: Sequence[Model] = (),
        lie: Lie | None = None,
    ) -> dict[str, list[list[float]]]:
        """Statistic -> its numbers, lease by lease."""
        found: dict[str, list[list[float]]] = {}
        for number in range(leases):
            lease = self.rig.lease(number)
            submission = self.rig.answer(lease, model, BATCHES[number % 3], temperature)
            if steers:
                submission = self._steered(lease, [submission, *(self.rig.answer(lease, one) for one in steers)])
            if lie is not None:
                submission = _claiming(submission, lie)
            judged = self.rig.judge(lease, submission)
            rollouts = statistics.measured(judged.verdict_details(), judged.outcomes, self.rig.samples)
            for name in statistics.STATISTICS:
                x = statistics.values(name, rollouts)
                if x:
                    found.setdefault(name, []).append([float(f"{value:.6g}") for value in x])
        return found

    def _steered(self, lease: Lease, answers: Sequence[Submission]) -> Submission:
        """The best reward of each rollout among the answers that no single token gives away."""
        judged = [self.rig.judge(lease, answer).details for answer in answers]
        rollouts = []
        for position, own in enumerate(answers[0].rollouts):
            allowed = [
                answer.rollouts[position]
                for answer, details in zip(answers, judged, strict=True)
                if _number(details[position], "token_margin") <= FREE_MARGIN
            ]
            rollouts.append(max([own, *allowed], key=lambda one: one.reward))
        return dataclasses.replace(answers[0], rollouts=tuple(rollouts))


def _claiming(submission: Submission, lie: Lie) -> Submission:
    """The same with other log-probabilities, none of them above 0."""

    def one(rollout: Rollout) -> Rollout:
        own_N = np.frombuffer(rollout.logprobs, "<f4")
        return dataclasses.replace(rollout, logprobs=np.minimum(own_N + lie(own_N, rollout.reward), 0).tobytes())

    return dataclasses.replace(submission, rollouts=tuple(map(one, submission.rollouts)))


def _number(detail: RolloutDetail, name: str) -> float:
    return next(number.value for number in detail.numbers if number.name == name)


if __name__ == "__main__":
    sys.exit(main())
