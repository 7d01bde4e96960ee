"""A run that nobody serves: its manifest, a validator's policy, leases, and what nodes send; all in one process.

For benchmarks that want the validators' own `judge` on rollouts that the node's own decoder made. Keys and ids are
fixed, so that the same name, thresholds and environment give the same seeds and the same tokens.

Not covered: coordinator, ledger, network and uploads (`benchmarks.demo`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from environments.base import Environment
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
from protocol.records import FINISH_EOS, Lease, Rollout, Submission
from protocol.seeds import sampling_seed
from verifier import toploc
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel, completion_text, prompt_ids
from verifier.profiles import profile_of

Limits = tuple[Thresholds, Bf16Thresholds | None]
"""A run's thresholds, of both profiles."""

_ANY, _MANY = 1e12, 1 << 20
_COUNTS = (
    "chunk_exponents",
    "short_exponents",
    "rollout_chunks",
    "measured_rollouts",
    "measured_tokens",
    "measured_exponents",
)


def anything(name: str) -> Limits:
    """Thresholds that let everything through: every check runs and none rejects."""
    loose: dict[str, Any] = {field.name: _ANY for field in dataclasses.fields(Bf16Thresholds)}
    bf16 = Bf16Thresholds(**{**loose, **dict.fromkeys(_COUNTS, _MANY), "machine": name})
    return Thresholds(_ANY, 128, _ANY, _ANY, _ANY, 0, 0, 0.0, 0, 0.0, 0.0, name), bf16


class Rig:
    """A run and a validator of it.

    Args:
        name: of the run.
        policy: what the validator loaded, rounded as the profile says (`verifier.profiles.load_to_verify`).
        cap: sampled tokens of an answer. stop: token ids that end one. tasks, samples: of a lease.
    """

    def __init__(
        self,
        name: str,
        profile: str,
        environment: Environment,
        policy: PolicyModel,
        limits: Limits,
        *,
        cap: int,
        stop: tuple[int, ...],
        tasks: int = 4,
        samples: int = 8,
    ) -> None:
        self.name, self.environment, self.policy = name, environment, policy
        self.limbs, self.stop, self.cap = profile_of(profile).limbs, stop, cap
        self.tasks, self.samples = tasks, samples
        self.run = self._open(profile, limits)

    def _open(self, profile: str, limits: Limits) -> Run:
        key = Identity.from_seed(bytes(32))
        manifest = RunManifest(
            name=self.name,
            created=1,
            root=key.public,
            coordinator=key.public,
            origin=key.public,
            coordinator_transport=key.public,
            control=(),
            ingress=(),
            profile=profile,
            model=ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 256, ()),
            environments=(self.environment.spec(),),
            sampling=SamplingSpec(1.0, self.cap, self.stop),
            thresholds=limits[0],
            leases=LeasePolicy(self.samples, self.tasks, self.tasks, 2, 4, 32, 60_000, 1000, 0.1),
            steps=1,
            versions=(0x0100, 0x0100),
            allow_private=True,
            contact="nobody@example.org",
            privacy="none",
            bf16=limits[1] if profile == "bf16" else None,
        )
        raw = seal(key, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw
        return open_manifest(raw)

    def lease(self, number: int) -> Lease:
        """The lease of the tasks that begin at `number` times those of a lease."""
        tasks = tuple(range(self.tasks * number, self.tasks * (number + 1)))
        nonce, root, digest = number.to_bytes(32, "big"), bytes(32), self.environment.digest
        return Lease(bytes(16), self.run.id, 0, 0, root, digest, nonce, tasks, self.samples, self.cap, 60_000, 1 << 26)

    def requests(self, lease: Lease) -> list[DecodeRequest]:
        """What a lease asks for, task by task."""
        return [
            DecodeRequest(
                tuple(prompt_ids(self.policy.tokenizer, self.environment.task(task).prompt)),
                sampling_seed(self.run.id, lease.nonce, task, sample),
                lease.max_new_tokens,
            )
            for task, sample in pairs(lease)
        ]

    def decoded(self, lease: Lease, model: Any, batch: int = 32, temperature: float = 1.0) -> list[Decoded]:
        """What a node with this model samples."""
        return decode(model, self.requests(lease), temperature=temperature, stop_tokens=self.stop, batch_rows=batch)

    def answer(self, lease: Lease, model: Any, batch: int = 32, temperature: float = 1.0) -> Submission:
        """What a node with this model sends."""
        return self.submission(lease, self.decoded(lease, model, batch, temperature))

    def submission(self, lease: Lease, outputs: Sequence[Decoded]) -> Submission:
        """Rollouts with proofs of their own states."""
        proofs = toploc.build_many([out.states_NH for out in outputs], self.limbs)
        rollouts = [
            self._rollout(task, sample, out, proof)
            for (task, sample), out, proof in zip(pairs(lease), outputs, proofs, strict=True)
        ]
        return Submission(lease.lease_id, "benchmark", tuple(rollouts))

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

    def judge(self, lease: Lease, submission: Submission) -> Judgement:
        """The validator's verdict."""
        return judge(self.run, lease, codec.encode(submission), self.policy, self.environment)


def pairs(lease: Lease) -> list[tuple[int, int]]:
    """(task, sample) of each rollout of a lease, in order."""
    return [(task, sample) for task in lease.tasks for sample in range(lease.samples)]
