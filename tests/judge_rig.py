"""A run, a lease and its honest submission, made by the real decoder: what the judge's tests start from."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from environments.base import Environment
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
from protocol.records import (
    ACCEPT,
    FINISH_EOS,
    FINISH_LENGTH,
    Lease,
    Rollout,
    Submission,
)
from protocol.seeds import sampling_seed
from verifier import toploc
from verifier.checks.proof import as_bf16
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel, completion_text, load_policy, prompt_ids
from verifier.thresholds import PROOF_GATE

torch.set_num_threads(1)
TINY = Path(__file__).parent.parent / "trainer" / "data" / "tiny"
NONCE = bytes(range(32))


BF16 = Bf16Thresholds(
    chunk_exponents=24, chunk_mantissa=6.0, rollout_mantissa=3.5, rollout_chunks=4, token_margin=1.0, margin_mean=0.02,
    logprob=0.5, logprob_mean=0.02, measured_rollouts=0, measured_tokens=0, measured_exponents=0,
    measured_chunk_mantissa=0.0, measured_rollout_mantissa=0.0, measured_token_margin=0.0, measured_margin_mean=0.0,
    measured_logprob=0.0, measured_logprob_mean=0.0, false_rejects=1.0, machine="test",
)  # fmt: skip


def open_run(
    environment: Environment,
    temperature: float,
    cap: int,
    stop: tuple[int, ...],
    seed: bytes = b"a",
    bf16: Bf16Thresholds | None = None,
) -> Run:
    """A signed run; in the bf16 profile when thresholds for it are given."""
    root = Identity.from_seed(seed * 32)
    manifest = RunManifest(
        name="test",
        created=1,
        root=root.public,
        coordinator=Identity.from_seed(bytes([7]) * 32).public,
        origin=Identity.from_seed(bytes([7]) * 32).public,
        coordinator_transport=Identity.from_seed(bytes([7]) * 32).public,
        control=(),
        ingress=(),
        profile="fp32" if bf16 is None else "bf16",
        model=ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 256, ()),
        environments=(environment.spec(),),
        sampling=SamplingSpec(temperature, cap, stop),
        thresholds=Thresholds(3e-6, 4, PROOF_GATE, 1e-4, 1e-4, 0, 0, 0.0, 0, 0.0, 0.0, "test"),
        leases=LeasePolicy(8, 16, 4, 2, 4, 32, 60_000, 1000, 0.1),
        steps=1,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody@example.org",
        privacy="none",
        bf16=bf16,
    )
    envelope = seal(root, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1)
    return open_manifest(envelope.raw)


@dataclasses.dataclass
class Rig:
    """A run, a lease and the honest answer to it."""

    run: Run
    lease: Lease
    policy: PolicyModel
    environment: Environment
    honest: Submission
    generator: object = None
    """The model that honest nodes sample from, where it is not the policy's own (bf16)."""
    policy_folder: Path = TINY

    @property
    def limbs(self) -> int:
        return toploc.LIMBS[self.run.manifest.profile]

    def answer(
        self,
        model: object = None,
        *,
        lease: Lease | None = None,
        temperature: float | None = None,
        batch_rows: int = 128,
    ) -> Submission:
        """What an engine that holds `model` (default: the right one) answers."""
        lease = lease or self.lease
        sampling = self.run.manifest.sampling
        tokenizer, stop = self.policy.tokenizer, sampling.stop_tokens
        tasks = [self.environment.task(i) for i in lease.tasks for _ in range(lease.samples)]
        numbers = [(i, sample) for i in lease.tasks for sample in range(lease.samples)]
        requests = [
            DecodeRequest(
                tuple(prompt_ids(tokenizer, task.prompt)),
                sampling_seed(self.run.id, lease.nonce, index, sample),
                lease.max_new_tokens,
            )
            for task, (index, sample) in zip(tasks, numbers, strict=True)
        ]
        outputs = decode(
            model or self.generator or self.policy.model,
            requests,
            temperature=temperature or sampling.temperature,
            stop_tokens=stop,
            batch_rows=batch_rows,
        )
        proofs = toploc.build_many([out.states_NH for out in outputs], self.limbs)
        rollouts = tuple(
            Rollout(
                task=index,
                sample=sample,
                tokens=np.asarray(out.tokens, dtype="<u4").tobytes(),
                logprobs=out.logprobs.astype("<f4").tobytes(),
                finish=out.finish,
                reward=self.environment.score(
                    task, completion_text(tokenizer, out.tokens, stop), out.finish == FINISH_EOS
                ),
                proofs=tuple(proof),
                routes=out.routes,
            )
            for task, (index, sample), out, proof in zip(tasks, numbers, outputs, proofs, strict=True)
        )
        return Submission(lease.lease_id, "test", rollouts)

    def prove(self, rollout: Rollout, tokens: list[int]) -> Rollout:
        """The rollout with other tokens, everything else recomputed from one honest prefill of the right model."""
        prompt = prompt_ids(self.policy.tokenizer, self.environment.task(rollout.task).prompt)
        (pre,) = self.policy.prefill([(prompt, tokens)])
        logprobs = torch.log_softmax(torch.from_numpy(pre.logits_NV), -1)[torch.arange(len(tokens)), tokens]
        stop = self.run.manifest.sampling.stop_tokens
        finished = tokens[-1] in stop
        text = completion_text(self.policy.tokenizer, tokens, stop)
        return dataclasses.replace(
            rollout,
            tokens=np.asarray(tokens, dtype="<u4").tobytes(),
            logprobs=logprobs.numpy().astype("<f4").tobytes(),
            finish=FINISH_EOS if finished else FINISH_LENGTH,
            reward=self.environment.score(self.environment.task(rollout.task), text, finished),
            proofs=tuple(toploc.build_proofs(pre.states_NH if self.limbs == 2 else as_bf16(pre.states_NH), self.limbs)),
        )

    def judge(self, submission: Submission) -> Judgement:
        return judge(self.run, self.lease, codec.encode(submission), self.policy, self.environment)

    def only(self, position: int, rollout: Rollout) -> str:
        """Judge the honest submission with one rollout replaced; its siblings must be untouched."""
        rollouts = list(self.honest.rollouts)
        rollouts[position] = rollout
        judged = self.judge(dataclasses.replace(self.honest, rollouts=tuple(rollouts)))
        for i, outcome in enumerate(judged.outcomes):
            assert i == position or (outcome.outcome, outcome.reason) == (ACCEPT, "holds")
        assert len(judged.details) == len(judged.outcomes) == len(rollouts)
        if judged.outcomes[position].outcome != ACCEPT:
            assert judged.details[position].logprobs == b"" and judged.details[position].reward == 0.0
        return judged.outcomes[position].reason


def make_rig(
    policy: PolicyModel,
    environment: Environment,
    tasks: int,
    samples: int,
    cap: int,
    stop: tuple[int, ...],
    *,
    bf16: Bf16Thresholds | None = None,
    generator: object = None,
) -> Rig:
    run = open_run(environment, 1.0, cap, stop, bf16=bf16)
    lease = Lease(
        bytes(16),
        run.id,
        0,
        0,
        bytes(32),
        environment.digest,
        NONCE,
        tuple(range(100, 100 + tasks)),
        samples,
        cap,
        60_000,
        1 << 20,
    )
    rig = Rig(run, lease, policy, environment, Submission(bytes(16), "test", ()), generator)
    rig.honest = rig.answer()
    return rig


def random_policy(directory: Path, seed: int, architecture: str = "llama") -> PolicyModel:
    """A two-layer model with random weights wide enough apart that its states are not all alike."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if architecture == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=12, tie_word_embeddings=True))
    directory.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(model.config.to_json_string(use_diff=False))
    (directory / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    weights = {k: v.clone() for k, v in model.named_parameters()}
    if architecture == "llama":
        weights["lm_head.weight"][1] = 0.0  # the end of text is rarer than the average token
    save_file(weights, directory / "model.safetensors")
    return load_policy(directory)


def tokens_of(rollout: Rollout) -> list[int]:
    return [int(t) for t in np.frombuffer(rollout.tokens, dtype="<u4")]


def words(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def reasons(judged: Judgement) -> list[str]:
    return [outcome.reason for outcome in judged.outcomes]
