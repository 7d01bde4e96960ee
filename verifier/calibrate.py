"""`verifier calibrate`: how far an honest engine's rollouts are from this verifier's prefill.

Engines decode N rollouts at each of several batch sizes and prompt lengths through their sockets; each rollout is
compared with prefills of several batch sizes, attention kernels and numbers of threads here. The worst of everything
becomes the measurement (`thresholds.Measurement`, in bf16 `Bf16Measurement`), and from it, by rule, the thresholds of a
run. Which profile is measured is what the engines compute in. Engines of other kernels, threads or devices are further
sockets. It judges nothing: a rollout is taken as honest because its engine is the operator's.

Not covered: starting engines, devices other than the machines at hand, whether another machine is of the same kind.

Shape suffixes: N sampled tokens of one rollout, V vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.seeds import sampling_seed
from verifier import replay, sampling, toploc
from verifier.checks.proof import as_bf16
from verifier.errors import CalibrationError, RouteError
from verifier.logprobs import token_logprobs
from verifier.model import PolicyModel, Prefilled, prompt_ids
from verifier.points import chunk_rows
from verifier.profiles import load_to_verify, profile_of
from verifier.replay import Routed
from verifier.route_noise import score_noise
from verifier.statistics import LEAN_SCALE
from verifier.thresholds import (
    BF16_MEAN_TOKENS,
    BF16_ROLLOUT_CHUNKS,
    PROOF_GATE,
    ROUTE_CEILING,
    SAFETY,
    Bf16Measurement,
    Measurement,
    blind_to,
    compared,
    false_rejects,
    to_json,
)

DECODE_BATCHES = (1, 8, 32, 128)
PREFILL_BATCHES = (1, 32, 128)
_SCORED = 8
"""Rollouts of a request whose router scores are computed three ways: column by column is slow."""
_TEMPERATURE = 1.0
_RUN = blake3(b"headwater calibration").digest()
_CONNECT_S, _LOAD_S, _GENERATE_S = 30.0, 120.0, 1800.0


@dataclass(frozen=True)
class Plan:
    """What is measured over, beside batch sizes.

    sockets: running engines of one profile. rollouts: per engine, decoding batch and context. contexts: tokens that
    prompts are filled up to, 0 for the environment's own. tokens: lengths to sample, whatever ends a rollout; 0 samples
    as the environment does. attention: the verifier's kernels. threads: its CPU threads.
    """

    sockets: tuple[str, ...]
    rollouts: int
    contexts: tuple[int, ...] = (0,)
    tokens: tuple[int, ...] = (0,)
    attention: tuple[str, ...] = ("sdpa", "eager")
    threads: tuple[int, ...] = (1, 2)
    decode_batches: tuple[int, ...] = DECODE_BATCHES


@dataclass
class _Seen:
    """Everything seen so far: the largest of most, and what means are made from."""

    rollouts: int = 0
    tokens: int = 0
    chunks: int = 0
    lengths: list[int] = field(default_factory=list)
    tokens_not_first: int = 0
    route_choices: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.largest[name] = max(value, self.largest.get(name, 0.0))

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


@dataclass(frozen=True)
class _Prefill:
    """One way of this verifier to compute."""

    policy: PolicyModel
    batch: int
    threads: int


def run(args: argparse.Namespace) -> int:
    """The command. Exit code 0 when thresholds can be taken, else CalibrationError."""
    torch.set_num_threads(1)
    plan = Plan(
        tuple(args.engine_socket), args.rollouts, args.contexts, args.tokens, args.attention, args.threads, args.batches
    )
    measured = asyncio.run(measure(args.model, plan, make(args.environment), _command(sys.argv[1:])))
    text = to_json(measured)
    write_atomic(args.out, text.encode("utf-8"))
    sys.stdout.write(text if getattr(args, "json", False) else summary(measured, args.out))
    return 0


async def measure(directory: Path, plan: Plan, environment: Environment, command: str) -> Measurement | Bf16Measurement:
    """Measure honest noise.

    Args:
        directory: the policy the engines are told to load and this verifier loads too.
        command: how to repeat it; goes into the file.

    Raises:
        EngineError: an engine refused, failed or was silent.
        CalibrationError: engines of different profiles, or one that answered with something else than it was asked.
        VerifierError: a profile that this software does not know.
    """
    root = blake3((directory / "model.safetensors").read_bytes()).digest()
    clients: list[EngineClient] = []
    try:
        infos = []
        for socket in plan.sockets:
            clients.append(await EngineClient.connect(socket, _CONNECT_S))
            infos.append(await clients[-1].call("info", InfoRequest(), EngineInfo, _CONNECT_S))
        profile = profile_of(infos[0].profile)
        if any(info.profile != profile.name for info in infos):
            raise CalibrationError("these engines compute in different profiles; measure each profile for itself")
        policies = {kind: load_to_verify(directory, profile.name, root=root, attention=kind) for kind in plan.attention}
        policy = policies[plan.attention[0]]
        prefills = [_Prefill(policy, batch, plan.threads[0]) for batch in PREFILL_BATCHES]
        prefills += [_Prefill(other, PREFILL_BATCHES[1], plan.threads[0]) for other in list(policies.values())[1:]]
        prefills += [_Prefill(policy, PREFILL_BATCHES[1], threads) for threads in plan.threads[1:]]
        seen = _Seen()
        index = 0
        for client, info in zip(clients, infos, strict=True):
            await client.call("load", LoadRequest(str(directory.resolve()), 0, 0, root), Loaded, _LOAD_S)
            for context, tokens, size in itertools.product(plan.contexts, plan.tokens, plan.decode_batches):
                stop = () if tokens else _stop_tokens(policy, environment)
                indices = range(index, index + plan.rollouts)
                items = [_item(policy, environment, i, context, tokens) for i in indices]
                index += plan.rollouts
                for start in range(0, len(items), size):
                    await _ask(client, info, policy, stop, items[start : start + size], seen, prefills)
    finally:
        torch.set_num_threads(1)
        for client in clients:
            await client.close()
    return _measurement(directory, plan, environment, command, root, infos, seen)


async def _ask(
    client: EngineClient,
    info: EngineInfo,
    policy: PolicyModel,
    stop: tuple[int, ...],
    items: list[GenerateItem],
    seen: _Seen,
    prefills: Sequence[_Prefill],
) -> None:
    request = GenerateRequest(policy.root, _TEMPERATURE, stop, tuple(items))
    answer = await client.call("generate", request, Generated, _GENERATE_S)
    if [out.request_id for out in answer.outputs] != [item.request_id for item in request.items]:
        raise CalibrationError(f"{info.name} answered other requests than it was asked")
    _compare(seen, info.profile, request.items, answer.outputs, prefills)


def _measurement(
    directory: Path,
    plan: Plan,
    environment: Environment,
    command: str,
    root: bytes,
    infos: Sequence[EngineInfo],
    seen: _Seen,
) -> Measurement | Bf16Measurement:
    largest, sums = seen.largest, seen.sums
    how: dict[str, Any] = {
        "command": command,
        "model": directory.name,
        "weights": root.hex(),
        "environment": environment.name,
        "engine": "; ".join(dict.fromkeys(info.name for info in infos)),
        "machine": _machine(),
        "profile": infos[0].profile,
        "decode_batches": plan.decode_batches,
        "prefill_batches": PREFILL_BATCHES,
        "contexts": plan.contexts,
        "attention": plan.attention,
        "threads": plan.threads,
        "rollouts": seen.rollouts,
        "tokens": seen.tokens,
        "chunks": seen.chunks,
        "shortest": min(seen.lengths),
        "longest": max(seen.lengths),
        "tokens_not_first": seen.tokens_not_first,
        "token_margin": largest["token_margin"],
        "logprob": largest["logprob"],
    }
    if infos[0].profile == "fp32":
        return Measurement(
            **how,
            proof_median=largest["proof_median"],
            proof_outliers=int(largest["proof_outliers"]),
            one_token_rollouts=seen.lengths.count(1),
            route_choices=seen.route_choices,
            route_shortfall=largest.get("route_shortfall", 0.0),
            route_scores=largest.get("route_scores", 0.0),
            route_scores_mean=sums.get("route_scores", 0.0) / max(1.0, sums.get("route_scored", 0.0)),
            route_level=sums.get("route_level", 0.0) / max(1.0, sums.get("route_scored", 0.0)),
            route_not_first=math.ceil(sums.get("route_not_first", 0.0)),
        )
    return Bf16Measurement(
        **how,
        exponents=int(largest.get("exponents", 0)),
        chunk_mantissa=largest.get("chunk_mantissa", 0.0),
        rollout_mantissa=largest.get("rollout_mantissa", 0.0),
        margin_mean=largest["margin_mean"],
        logprob_mean=largest["logprob_mean"],
        mantissa_mean=sums["mantissa"] / sums["compared"],
        margin_sum_mean=sums["margin"] / sums["compared"],
        short_chunks=sum(length % PROOF_CHUNK_TOKENS > 0 for length in seen.lengths),
        short_exponents=int(largest.get("short_exponents", 0)),
        short_mantissa=largest.get("short_mantissa", 0.0),
        mismatch_k3_mean=sums["k3"] / sums["compared"],
        lean_above_mean=1.0 + sums["lean"] / sums["compared"],
        lean_deviation=math.sqrt(max(0.0, sums["lean2"] / sums["compared"] - (sums["lean"] / sums["compared"]) ** 2)),
    )


def _item(policy: PolicyModel, environment: Environment, index: int, context: int, tokens: int) -> GenerateItem:
    """One request. Prompts shorter than `context` get other tasks' in front: text the model takes as examples."""
    prompt = prompt_ids(policy.tokenizer, environment.task(index).prompt)
    before: list[int] = []
    other = 1_000_003 * (index + 1)
    while len(before) + len(prompt) < context:
        before += prompt_ids(policy.tokenizer, environment.task(other).prompt)
        other += 1
    prompt = (before + prompt)[-max(context, len(prompt)) :]
    return GenerateItem(
        request_id=str(index),
        prompt=np.asarray(prompt, dtype="<u4").tobytes(),
        seed=sampling_seed(_RUN, bytes(32), index, 0),
        max_new_tokens=tokens or environment.max_new_tokens,
    )


def _compare(
    seen: _Seen,
    profile: str,
    items: Sequence[GenerateItem],
    outputs: Sequence[GenerateOutput],
    prefills: Sequence[_Prefill],
) -> None:
    sequences = [
        (np.frombuffer(item.prompt, dtype="<u4").astype(np.int64), np.frombuffer(out.tokens, "<u4").astype(np.int64))
        for item, out in zip(items, outputs, strict=True)
    ]
    proofs = [out.proofs for out in outputs]
    routed = _routed(seen, prefills[0].policy, profile, sequences, outputs)
    seen.rollouts += len(outputs)
    seen.tokens += sum(len(tokens) for _, tokens in sequences)
    seen.chunks += sum(len(chunks) for chunks in proofs)
    seen.lengths += [len(tokens) for _, tokens in sequences]
    for number, prefill in enumerate(prefills):
        torch.set_num_threads(prefill.threads)
        if routed is None:
            prefilled = prefill.policy.prefill(sequences, prefill.batch)
        else:
            prefilled = replay.prefill(prefill.policy, routed, ROUTE_CEILING, prefill.batch)
            seen.note("route_shortfall", max(one.shortfall for one in routed))
            seen.add("route_not_first", sum(one.not_first for one in routed) / len(prefills))
            routed = [Routed(one.prompt, one.tokens, one.routes_PYK) for one in routed]
        torch.set_num_threads(1)
        if profile == "fp32":
            for fp32 in toploc.verify_many([p.states_NH for p in prefilled], proofs, PROOF_GATE / SAFETY):
                seen.note("proof_median", max(chunk.median for chunk in fp32))
                seen.note("proof_outliers", max(chunk.outliers for chunk in fp32))
        else:
            compared_chunks = toploc.verify_many_bf16([as_bf16(p.states_NH) for p in prefilled], proofs)
            for bf16, (_, tokens) in zip(compared_chunks, sequences, strict=True):
                means = [chunk.mantissa_mean for chunk in bf16]
                for chunk, rows in zip(bf16, chunk_rows(len(tokens)), strict=True):
                    whole = rows == PROOF_CHUNK_TOKENS
                    seen.note("exponents" if whole else "short_exponents", chunk.exponents)
                    seen.note("chunk_mantissa" if whole else "short_mantissa", chunk.mantissa_mean)
                if len(means) >= BF16_ROLLOUT_CHUNKS:
                    seen.note("rollout_mantissa", sum(means) / len(means))
                seen.add("mantissa", sum(means) / len(means))
        for (prompt, tokens), item, out, own in zip(sequences, items, outputs, prefilled, strict=True):
            _compare_tokens(seen, prefill.policy, prompt, tokens, item, out, own, first=number == 0)


def _routed(
    seen: _Seen,
    policy: PolicyModel,
    profile: str,
    sequences: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
    outputs: Sequence[GenerateOutput],
) -> list[Routed] | None:
    """The rollouts with their routes, whose scores are compared on the way; None for a dense model."""
    experts = policy.experts
    if experts is None:
        return None
    if profile != "fp32":
        raise CalibrationError("routers of a mixture of experts are calibrated in fp32 only: bf16 has no route margin")
    routed = []
    for (prompt, tokens), out in zip(sequences, outputs, strict=True):
        try:
            routes_PYK = experts.decode(out.routes, len(prompt) + len(tokens) - 1)
        except RouteError as exc:
            raise CalibrationError(f"request {out.request_id}: its routes do not hold: {exc}") from exc
        routed.append(Routed(tuple(prompt.tolist()), tokens, routes_PYK))
        seen.route_choices += routes_PYK.shape[0] * routes_PYK.shape[1]
    noise = score_noise(policy, routed[:_SCORED])
    seen.note("route_scores", noise.largest)
    seen.add("route_scores", noise.choices * noise.mean)
    seen.add("route_scored", noise.choices)
    seen.add("route_level", noise.level)
    return routed


def _compare_tokens(
    seen: _Seen,
    policy: PolicyModel,
    prompt: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    item: GenerateItem,
    out: GenerateOutput,
    own: Prefilled,
    *,
    first: bool,
) -> None:
    logits_NV, tokens_N = torch.from_numpy(own.logits_NV), torch.from_numpy(tokens)
    positions = len(prompt) + np.arange(len(tokens))
    noise_NV = sampling.gumbel_noise([item.seed] * len(tokens), positions, policy.vocabulary)
    margins_N = sampling.margins(logits_NV, _TEMPERATURE, noise_NV, tokens_N).numpy()
    own_N = token_logprobs(logits_NV, tokens_N, _TEMPERATURE).numpy()
    claimed_N = np.frombuffer(out.logprobs, "<f4")
    if claimed_N.shape != own_N.shape or not np.isfinite([*margins_N, *own_N, *claimed_N]).all():
        raise CalibrationError(
            f"request {item.request_id}: numbers are missing or not finite; the engine or this verifier does not "
            "compute the model"
        )
    difference_N = (claimed_N - own_N).astype(np.float64)
    count = max(len(tokens), BF16_MEAN_TOKENS)
    seen.note("token_margin", float(margins_N.max()))
    seen.note("margin_mean", float(margins_N.sum(dtype=np.float64) - margins_N.max()) / count)
    seen.note("logprob", float(np.abs(difference_N).max()))
    largest = difference_N[np.abs(difference_N).argmax()]
    seen.note("logprob_mean", abs(float(difference_N.sum() - largest)) / count)
    lean = min(1.0, max(-1.0, float(difference_N.mean()) / LEAN_SCALE))
    seen.add("lean", lean)
    seen.add("lean2", lean**2)
    seen.add("k3", float(np.mean(np.expm1(-difference_N) + difference_N)))
    seen.add("margin", float(margins_N.sum(dtype=np.float64)))
    seen.add("compared", 1)
    seen.tokens_not_first += int((margins_N > 0).sum()) if first else 0


def _stop_tokens(policy: PolicyModel, environment: Environment) -> tuple[int, ...]:
    if environment.stop is None:
        return policy.eos
    ids = prompt_ids(policy.tokenizer, environment.stop)
    if len(ids) != 1:
        raise CalibrationError(f"{environment.stop!r}, which ends {environment.name}, is {len(ids)} tokens, not one")
    return tuple(ids)


def _command(arguments: Sequence[str]) -> str:
    """The command as others would type it: of absolute paths only the last part, since the file is published."""
    words = []
    for word in arguments:
        option, equals, value = word.rpartition("=")
        words.append(option + equals + (Path(value).name if value.startswith("/") else value))
    return shlex.join(["verifier", *words])


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} threads" if names else model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def summary(measured: Measurement | Bf16Measurement, out: Path) -> str:
    """For people: what was measured, what follows, and what that no longer shows."""
    lines = [
        f"{measured.rollouts} honest rollouts, {measured.tokens} tokens, {measured.chunks} proof chunks",
        f"  0 of {measured.rollouts} are rejected, so at 95% at most {false_rejects(measured.rollouts):.2%} are",
    ]
    for name, value, bound in compared(measured):
        lines.append(f"  {name:<44} {value:<9.3g} threshold {bound:.3g}")
    lines.append(f"  {measured.tokens_not_first} tokens are not the verifier's first choice")
    lines += [f"  but {text}" for text in blind_to(measured)]
    return "\n".join([*lines, f"written to {out}", ""])
