"""What garbage costs a validator: CPU of refuting long random rollouts, against judging honest ones of that length.

    python -m benchmarks.garbage --json [--tokens 2048]

A random Llama (hidden 256, 6 layers, 4,096 tokens of vocabulary) decodes 4 rollouts with real seeds and proofs; the
garbage has random tokens, and proofs and log-probabilities of the right shape, so that only the model can tell. CPU
seconds of this process, one thread, the median of several judgements. The honest ones are also judged in one piece, as
a validator without blocks would: blocks may not make honest work slower.

Not covered: quotas, which bound how much of it is taken at all (`trainer.ingress`); SmolLM2.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.contract import CouldNotRunError, Goal, at_least, run
from environments.base import Environment
from environments.registry import make
from node.decode import DecodeRequest, decode
from protocol import codec
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.manifest import (
    MANIFEST_KIND,
    LeasePolicy,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from protocol.records import FINISH_EOS, FINISH_LENGTH, Lease, Rollout, Submission
from protocol.seeds import sampling_seed
from verifier import blocks, toploc
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel, completion_text, load_policy, prompt_ids
from verifier.thresholds import PROOF_GATE

TINY = Path(__file__).resolve().parent.parent / "trainer" / "data" / "tiny"
CHEAPER = 4.0
"""How many times cheaper garbage of 2,048 tokens must be to refute than honest work is to check."""
AS_FAST = 0.9
SAMPLES = 4
TIMES = 3


def measure(args: argparse.Namespace) -> list[Goal]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headwater-garbage-") as scratch:
        policy = _policy(Path(scratch), args.tokens + 64)
    environment = make("word")
    run_, lease = _run(environment, args.tokens)
    honest = _honest(run_, lease, policy, environment)
    garbage = _garbage(honest, policy)

    def of(submission: Submission) -> Callable[[], Judgement]:
        raw = codec.encode(submission)
        return lambda: judge(run_, lease, raw, policy, environment)

    refuted, whole = _cpu(of(garbage)), _cpu(of(honest))
    block, blocks.BLOCK = blocks.BLOCK, 1 << 30
    try:
        at_once = _cpu(of(honest))
    finally:
        blocks.BLOCK = block
    _check(of(honest)(), "holds")
    _check(of(garbage)(), "proof-mismatch")
    medians = [statistics.median(times) for times in (refuted, whole, at_once)]
    words = "garbage {:.2f} s, honest {:.2f} s in blocks and {:.2f} s in one piece (CPU, {} rollouts of {} tokens)\n"
    sys.stderr.write(words.format(*medians, SAMPLES, args.tokens))
    cheaper, as_fast = medians[1] / medians[0], medians[2] / medians[1]
    return [
        at_least("CPU of judging honest rollouts over that of refuting garbage", CHEAPER, cheaper, refuted),
        at_least("CPU of one piece over that of blocks, honest rollouts", AS_FAST, as_fast, whole),
    ]


def _cpu(action: Callable[[], Judgement]) -> list[float]:
    """CPU seconds of several runs, after one that fills caches."""
    action()
    out = []
    for _ in range(TIMES):
        before = time.process_time()
        action()
        out.append(time.process_time() - before)
    return out


def _check(judged: Judgement, reason: str) -> None:
    found = {outcome.reason for outcome in judged.outcomes}
    if found != {reason}:
        raise CouldNotRunError(f"the judge said {sorted(found)} where {reason} was expected: nothing was measured")


def _policy(directory: Path, context: int) -> PolicyModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.config.architectures = ["LlamaForCausalLM"]
    with torch.no_grad():
        model.lm_head.weight[1] -= 1.0  # ends are rare, so that rollouts are long
    (directory / "config.json").write_text(model.config.to_json_string(use_diff=False))
    (directory / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    save_file({k: v.clone() for k, v in model.named_parameters()}, directory / "model.safetensors")
    return load_policy(directory)


def _run(environment: Environment, tokens: int) -> tuple[Run, Lease]:
    root, key = Identity.generate(), Identity.generate().public
    manifest = RunManifest(
        name="benchmark", created=1, root=root.public, coordinator=key, origin=key, coordinator_transport=key,
        control=(), ingress=(), profile="fp32", model=ModelSpec("LlamaForCausalLM", "float32", bytes(32), tokens, ()),
        environments=(environment.spec(),), sampling=SamplingSpec(1.0, tokens, ()),
        thresholds=Thresholds(1e-5, 4, PROOF_GATE, 1e-3, 1e-3, 0, 0, 0.0, 0, 0.0, 0.0, "benchmark"),
        leases=LeasePolicy(SAMPLES, 1, 1, 2, 4, 16, 60_000, 1000, 0.1), steps=1, versions=(0x0100, 0x0100),
        allow_private=True, contact="", privacy="",
    )  # fmt: skip
    run_ = open_manifest(seal(root, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw)
    lease = Lease(
        bytes(16), run_.id, 0, 0, bytes(32), environment.digest, bytes(32), (7,), SAMPLES, tokens, 60_000, 1 << 24
    )
    return run_, lease


def _honest(run_: Run, lease: Lease, policy: PolicyModel, environment: Environment) -> Submission:
    task = environment.task(lease.tasks[0])
    prompt = tuple(prompt_ids(policy.tokenizer, task.prompt))
    requests = [
        DecodeRequest(prompt, sampling_seed(run_.id, lease.nonce, task.index, sample), lease.max_new_tokens)
        for sample in range(lease.samples)
    ]
    rollouts = []
    for sample, out in enumerate(decode(policy.model, requests, temperature=1.0, stop_tokens=())):
        text = completion_text(policy.tokenizer, out.tokens, ())
        reward = environment.score(task, text, out.finish == FINISH_EOS)
        tokens = np.asarray(out.tokens, dtype="<u4").tobytes()
        proofs = tuple(toploc.build_proofs(out.states_NH))
        rollouts.append(
            Rollout(task.index, sample, tokens, out.logprobs.astype("<f4").tobytes(), out.finish, reward, proofs)
        )
    return Submission(lease.lease_id, "benchmark", tuple(rollouts))


def _garbage(honest: Submission, policy: PolicyModel) -> Submission:
    rng = np.random.default_rng(0)
    rollouts = []
    for rollout in honest.rollouts:
        count = len(rollout.tokens) // 4
        states_NH = rng.standard_normal((count, policy.hidden)).astype(np.float32)
        rollouts.append(
            dataclasses.replace(
                rollout,
                tokens=rng.integers(2, policy.vocabulary, count).astype("<u4").tobytes(),
                logprobs=np.full(count, -5, "<f4").tobytes(),
                finish=FINISH_LENGTH,
                proofs=tuple(toploc.build_proofs(states_NH)),
            )
        )
    return dataclasses.replace(honest, rollouts=tuple(rollouts))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="length of each rollout (default: 2048)")


if __name__ == "__main__":
    sys.exit(run(measure, "What garbage costs a validator.", _arguments))
