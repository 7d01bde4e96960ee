"""What checking costs against making: CPU of `judge` on honest rollouts of 512 tokens, over that of `generate()`.

    python -m benchmarks.verification --json                   SmolLM2-135M in fp32 (6 minutes on a free core)
    python -m benchmarks.verification --profiles bf16 --json   in bf16
    python -m benchmarks.verification --quick                  the tiny model and few tokens, to see that it works

For each profile and batch, in one process with one thread:

    verifying      the whole of `judge` on a submission: prefill, proofs, seeded tokens, log-probabilities, reward
    generate()     Transformers' own, sampling at T=1 from the same weights in the profile's dtype, same prompts
    our engine     `node.decode` and the proofs it builds, which is what made the submission (at batch 1: over the
                   first 64 tokens, times what is left)

All are CPU seconds (user and system) for one rollout, so at batch 16 a sixteenth of the whole. The rollouts are honest
and each is accepted, or nothing was measured.

Not covered: memory, GPUs, dishonest rollouts (`benchmarks.garbage`), the environment's own cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contract import CouldNotRunError, Goal, at_most, run
from environments.base import Environment
from environments.registry import make
from node.decode import DecodeRequest, decode
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
from protocol.records import Lease, Rollout, Submission
from protocol.seeds import sampling_seed
from trainer import smollm2
from verifier import toploc
from verifier.judge import judge
from verifier.model import PolicyModel, completion_text, prompt_ids
from verifier.profiles import load_to_sample, load_to_verify, profile_of
from verifier.thresholds import PROOF_GATE

TARGETS = {("fp32", 1): 1 / 12, ("fp32", 16): 1 / 2.5, ("bf16", 1): 1 / 20, ("bf16", 16): 1 / 4}
"""Of issue 4: (profile, batch) -> verifying over generate()."""

TINY = Path(__file__).resolve().parent.parent / "trainer" / "data" / "tiny"
TIMES = 3
"""Verifications at batch 1; their median counts. What takes minutes is measured once."""

_ENGINE_TOKENS = 64

_WIDE = Bf16Thresholds(
    chunk_exponents=100, chunk_mantissa=60.0, rollout_mantissa=60.0, rollout_chunks=4, token_margin=4.0,
    margin_mean=1.0, logprob=4.0, logprob_mean=1.0, measured_rollouts=0, measured_tokens=0, measured_exponents=0,
    measured_chunk_mantissa=0.0, measured_rollout_mantissa=0.0, measured_token_margin=0.0, measured_margin_mean=0.0,
    measured_logprob=0.0, measured_logprob_mean=0.0, false_rejects=1.0, machine="benchmark",
)  # fmt: skip
"""Every check runs and none rejects: what it costs does not depend on where the bounds are."""


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


@dataclass(frozen=True)
class Scene:
    """One profile's models, a run, and what its nodes are asked for."""

    run: Run
    lease: Lease
    environment: Environment
    verifier: PolicyModel
    sampler: PolicyModel

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(task, sample) for task in self.lease.tasks for sample in range(self.lease.samples)]

    def prompt(self, task: int) -> tuple[int, ...]:
        return tuple(prompt_ids(self.sampler.tokenizer, self.environment.task(task).prompt))


def measure(args: argparse.Namespace) -> list[Goal]:
    torch.set_num_threads(1)
    directory, tokens, batch = smollm2.export() if not args.quick else TINY, args.tokens, 16
    if args.quick:
        tokens, batch = min(tokens, 40), 2
    costs = []
    for profile in args.profiles.split(","):
        verifier = load_to_verify(directory, profile)
        sampler = verifier if profile == "fp32" else load_to_sample(directory, profile)
        for cost in _costs(_scene(profile, batch, tokens, verifier, sampler)):
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


def _costs(scene: Scene) -> Iterator[Cost]:
    """Of a whole batch, then of its first rollout alone."""
    profile, rollouts = scene.run.manifest.profile, len(scene.pairs)
    engine, submission = _cpu(lambda: _submission(scene))
    one = replace(scene, lease=replace(scene.lease, tasks=scene.lease.tasks[:1], samples=1))
    alone = _verify(one, replace(submission, rollouts=submission.rollouts[:1]), TIMES)
    together = _verify(scene, submission, 1)
    yield Cost(profile, rollouts, together, _cpu(lambda: _generate(scene))[0] / rollouts, engine / rollouts)
    few = min(_ENGINE_TOKENS, one.lease.max_new_tokens)
    short = replace(one, lease=replace(one.lease, max_new_tokens=few))
    engine = _cpu(lambda: _submission(short))[0] * one.lease.max_new_tokens / few
    yield Cost(profile, 1, alone, _cpu(lambda: _generate(one))[0], engine)


def _verify(scene: Scene, submission: Submission, times: int) -> tuple[float, ...]:
    """CPU seconds a rollout of judging a submission, after one more that fills caches where it is short."""
    raw, seconds = codec.encode(submission), []
    for _ in range(times if times == 1 else times + 1):
        spent, judged = _cpu(lambda: judge(scene.run, scene.lease, raw, scene.verifier, scene.environment))
        found = {outcome.reason for outcome in judged.outcomes}
        if found != {"holds"}:
            raise CouldNotRunError(f"honest rollouts were judged {sorted(found)}: nothing was measured")
        seconds.append(spent / len(scene.pairs))
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


# --- the two sides --------------------------------------------------------------------------------------------------


def _submission(scene: Scene) -> Submission:
    """What an honest node sends: sampled and proved by our own engine's parts."""
    requests = [
        DecodeRequest(
            scene.prompt(task), sampling_seed(scene.run.id, scene.lease.nonce, task, sample), scene.lease.max_new_tokens
        )
        for task, sample in scene.pairs
    ]
    done = decode(scene.sampler.model, requests, temperature=1.0, stop_tokens=())
    limbs = profile_of(scene.run.manifest.profile).limbs
    proofs = toploc.build_many([one.states_NH for one in done], limbs)
    return Submission(scene.lease.lease_id, "benchmark", tuple(_rollouts(scene, done, proofs)))


def _rollouts(scene: Scene, done: list[Any], proofs: list[list[bytes]]) -> Iterator[Rollout]:
    for (task, sample), one, proof in zip(scene.pairs, done, proofs, strict=True):
        text = completion_text(scene.sampler.tokenizer, one.tokens, ())
        reward = scene.environment.score(scene.environment.task(task), text, False)
        tokens = np.asarray(one.tokens, dtype="<u4").tobytes()
        yield Rollout(task, sample, tokens, one.logprobs.astype("<f4").tobytes(), one.finish, reward, tuple(proof))


def _generate(scene: Scene) -> None:
    prompts = [scene.prompt(task) for task, _ in scene.pairs]
    width, model = max(map(len, prompts)), scene.sampler.model
    ids_BL = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None  # as many tokens as the rollouts have
    with torch.inference_mode():
        out_BL = model.generate(
            ids_BL, attention_mask=real_BL, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=scene.lease.max_new_tokens,
        )  # fmt: skip
    if out_BL.shape[1] - width != scene.lease.max_new_tokens:
        raise CouldNotRunError(f"generate() made {out_BL.shape[1] - width} tokens, not {scene.lease.max_new_tokens}")


def _scene(profile: str, batch: int, tokens: int, verifier: PolicyModel, sampler: PolicyModel) -> Scene:
    environment, root, key = make("word"), Identity.generate(), Identity.generate().public
    samples = min(4, batch)
    tasks = tuple(range(7, 7 + batch // samples))
    thresholds = Thresholds(1e-3, 4, PROOF_GATE, 1e-2, 1e-2, 0, 0, 0.0, 0, 0.0, 0.0, "benchmark")
    manifest = RunManifest(
        name="benchmark", created=1, root=root.public, coordinator=key, origin=key, coordinator_transport=key,
        control=(), ingress=(), profile=profile, model=ModelSpec("LlamaForCausalLM", "bfloat16", bytes(32), 4096, ()),
        environments=(environment.spec(),), sampling=SamplingSpec(1.0, tokens, ()), thresholds=thresholds,
        leases=LeasePolicy(samples, 1, 1, 2, 4, 16, 60_000, 1000, 0.1), steps=1, versions=(0x0100, 0x0100),
        allow_private=True, contact="", privacy="", bf16=_WIDE if profile == "bf16" else None,
    )  # fmt: skip
    run_ = open_manifest(seal(root, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw)
    lease = Lease(
        bytes(16), run_.id, 0, 0, bytes(32), environment.digest, bytes(32), tasks, samples, tokens, 60_000, 1 << 26
    )
    return Scene(run_, lease, environment, verifier, sampler)


def _profiles(text: str) -> str:
    if not set(text.split(",")) <= {"fp32", "bf16"}:
        raise argparse.ArgumentTypeError(f"{text!r}: the profiles are fp32 and bf16")
    return text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", type=_profiles, default="fp32", help="fp32, bf16 or both (default: fp32)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each rollout (default: 512)")
    parser.add_argument("--quick", action="store_true", help="the tiny model, 40 tokens, batches of 2 and 1")


def main() -> int:
    return run(measure, "CPU of verifying honest rollouts over that of generating as many tokens.", arguments)


if __name__ == "__main__":
    sys.exit(main())
