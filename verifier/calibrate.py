"""`verifier calibrate`: how far an honest engine's rollouts are from this verifier's prefill.

An engine decodes N rollouts at each of several batch sizes through its socket; each is compared with prefills of
several batch sizes here. The worst of everything becomes the measurement (`thresholds.Measurement`), and from it, by
rule, the thresholds of a run. It judges nothing: a rollout is taken as honest because its engine is the operator's.

Not covered: context lengths beyond the environment's, devices other than the two machines at hand.

Shape suffixes: N sampled tokens of one rollout, V vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from environments.base import Environment
from environments.registry import make
from protocol.engine import (
    EngineClient,
    EngineInfo,
    Generated,
    GenerateItem,
    GenerateOutput,
    GenerateRequest,
    InfoRequest,
    Loaded,
    LoadRequest,
)
from protocol.files import write_atomic
from protocol.seeds import sampling_seed
from verifier import sampling, toploc
from verifier.errors import CalibrationError
from verifier.logprobs import token_logprobs
from verifier.model import PolicyModel, load_policy, prompt_ids
from verifier.thresholds import PROOF_GATE, SAFETY, Measurement, thresholds, to_json

DECODE_BATCHES = (1, 8, 32, 128)
PREFILL_BATCHES = (1, 32, 128)
_TEMPERATURE = 1.0
_RUN = blake3(b"headwater calibration").digest()
_CONNECT_S, _LOAD_S, _GENERATE_S = 30.0, 120.0, 300.0


@dataclass
class _Worst:
    """The largest of everything seen so far."""

    rollouts: int = 0
    tokens: int = 0
    chunks: int = 0
    proof_median: float = 0.0
    proof_outliers: int = 0
    token_margin: float = 0.0
    tokens_not_first: int = 0
    logprob: float = 0.0
    lengths: list[int] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """The command. Exit code 0 when thresholds can be taken, else CalibrationError."""
    torch.set_num_threads(1)
    measured = asyncio.run(
        measure(args.model, args.engine_socket, make(args.environment), args.rollouts, shlex.join(_command()))
    )
    thresholds(measured)
    text = to_json(measured)
    write_atomic(args.out, text.encode("utf-8"))
    sys.stdout.write(text if getattr(args, "json", False) else _summary(measured, args.out))
    return 0


async def measure(directory: Path, socket: str, environment: Environment, rollouts: int, command: str) -> Measurement:
    """Measure honest noise.

    Args:
        directory: the policy the engine is told to load and this verifier loads too.
        socket: a running engine's Unix socket.
        rollouts: per decoding batch size.
        command: how to repeat it; goes into the file.

    Raises:
        EngineError: the engine refused, failed or was silent.
        CalibrationError: the engine does not compute in fp32 or answered with something else than was asked for.
    """
    root = blake3((directory / "model.safetensors").read_bytes()).digest()
    policy = load_policy(directory, root=root)
    stop = _stop_tokens(policy, environment)
    client = await EngineClient.connect(socket, _CONNECT_S)
    try:
        info = await client.call("info", InfoRequest(), EngineInfo, _CONNECT_S)
        if info.profile != "fp32":
            raise CalibrationError(f"{info.name} computes in {info.profile}; only the fp32 profile is calibrated here")
        await client.call("load", LoadRequest(str(directory.resolve()), 0, 0, root), Loaded, _LOAD_S)
        worst = _Worst()
        for number, size in enumerate(DECODE_BATCHES):
            items = [_item(policy, environment, rollouts * number + i) for i in range(rollouts)]
            for start in range(0, rollouts, size):
                request = GenerateRequest(root, _TEMPERATURE, stop, tuple(items[start : start + size]))
                answer = await client.call("generate", request, Generated, _GENERATE_S)
                if [out.request_id for out in answer.outputs] != [item.request_id for item in request.items]:
                    raise CalibrationError(f"{info.name} answered other requests than it was asked")
                _compare(worst, policy, request.items, answer.outputs)
    finally:
        await client.close()
    return Measurement(
        command=command,
        model=directory.name,
        weights=root.hex(),
        environment=environment.name,
        engine=info.name,
        machine=_machine(),
        profile=info.profile,
        decode_batches=DECODE_BATCHES,
        prefill_batches=PREFILL_BATCHES,
        rollouts=worst.rollouts,
        tokens=worst.tokens,
        chunks=worst.chunks,
        proof_median=worst.proof_median,
        proof_outliers=worst.proof_outliers,
        token_margin=worst.token_margin,
        tokens_not_first=worst.tokens_not_first,
        logprob=worst.logprob,
        one_token_rollouts=worst.lengths.count(1),
        shortest=min(worst.lengths),
        longest=max(worst.lengths),
    )


def _item(policy: PolicyModel, environment: Environment, index: int) -> GenerateItem:
    prompt = prompt_ids(policy.tokenizer, environment.task(index).prompt)
    return GenerateItem(
        request_id=str(index),
        prompt=np.asarray(prompt, dtype="<u4").tobytes(),
        seed=sampling_seed(_RUN, bytes(32), index, 0),
        max_new_tokens=environment.max_new_tokens,
    )


def _compare(
    worst: _Worst, policy: PolicyModel, items: Sequence[GenerateItem], outputs: Sequence[GenerateOutput]
) -> None:
    sequences = [
        (np.frombuffer(item.prompt, dtype="<u4").astype(np.int64), np.frombuffer(out.tokens, "<u4").astype(np.int64))
        for item, out in zip(items, outputs, strict=True)
    ]
    worst.rollouts += len(outputs)
    worst.tokens += sum(len(tokens) for _, tokens in sequences)
    worst.chunks += sum(len(out.proofs) for out in outputs)
    worst.lengths += [len(tokens) for _, tokens in sequences]
    for batch in PREFILL_BATCHES:
        prefilled = policy.prefill(sequences, batch)
        proofs = [out.proofs for out in outputs]
        for chunks in toploc.verify_many([p.states_NH for p in prefilled], proofs, PROOF_GATE / SAFETY):
            worst.proof_median = max([worst.proof_median, *(chunk.median for chunk in chunks)])
            worst.proof_outliers = max([worst.proof_outliers, *(chunk.outliers for chunk in chunks)])
        for (prompt, tokens), item, out, own in zip(sequences, items, outputs, prefilled, strict=True):
            logits_NV, tokens_N = torch.from_numpy(own.logits_NV), torch.from_numpy(tokens)
            positions = len(prompt) + np.arange(len(tokens))
            noise_NV = sampling.gumbel_noise([item.seed] * len(tokens), positions, policy.vocabulary)
            margins_N = sampling.margins(logits_NV, _TEMPERATURE, noise_NV, tokens_N)
            own_N = token_logprobs(logits_NV, tokens_N, _TEMPERATURE).numpy()
            claimed_N = np.frombuffer(out.logprobs, "<f4")
            if claimed_N.shape != own_N.shape or not np.isfinite([*margins_N, *own_N, *claimed_N]).all():
                raise CalibrationError(
                    f"request {item.request_id}: numbers are missing or not finite; the engine or "
                    "this verifier does not compute the model"
                )
            worst.token_margin = max(worst.token_margin, float(margins_N.max()))
            worst.tokens_not_first += int((margins_N > 0).sum())
            worst.logprob = max(worst.logprob, float(np.abs(own_N - claimed_N).max()))


def _stop_tokens(policy: PolicyModel, environment: Environment) -> tuple[int, ...]:
    if environment.stop is None:
        return policy.eos
    ids = prompt_ids(policy.tokenizer, environment.stop)
    if len(ids) != 1:
        raise CalibrationError(f"{environment.stop!r}, which ends {environment.name}, is {len(ids)} tokens, not one")
    return tuple(ids)


def _command() -> list[str]:
    return ["verifier", *sys.argv[1:]]


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} threads" if names else model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, 1 thread"


def _summary(measured: Measurement, out: Path) -> str:
    limits = thresholds(measured)
    return (
        f"{measured.rollouts} honest rollouts, {measured.tokens} tokens, {measured.chunks} proof chunks\n"
        f"  proof median      {measured.proof_median:.2e}   threshold {limits.proof_median:.2e}\n"
        f"  proof outliers    {measured.proof_outliers}          threshold {limits.proof_outliers}\n"
        f"  token margin      {measured.token_margin:.2e}   threshold {limits.token_margin:.2e}"
        f"   ({measured.tokens_not_first} tokens not first)\n"
        f"  log-probability   {measured.logprob:.2e}   threshold {limits.logprob:.2e}\n"
        f"written to {out}\n"
    )
