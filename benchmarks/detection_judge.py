"""What a verifier measures of the pools of `benchmarks.detection`, in both profiles, kept in a file for each pool.

The verifier is the project's own: its prefill, its proofs, its noise. Weights stored in bfloat16 are the same for both
profiles and so is the verifier's float32 prefill (`verifier.profiles`), so one pass serves both: fp32 proofs of states
as they are, bf16 proofs of states rounded to bfloat16. Rollouts of one prompt in several pools share their noise, which
costs as much as half a prefill.

    own      proofs of the states that the node itself sampled from (a lazy node)
    again    proofs of one prefill of the right weights over the tokens sent (a node that proves again); that has
             another batch than the verifier's prefill, or it would have no noise at all

Not covered: what follows from the numbers (`detection_rules`).

Shape suffixes: R rollouts, N sampled tokens, C proof chunks, G best tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.detection_pool import STALE_KINDS, Made, Maker, Pool, best_of, save, take
from protocol.limits import PROOF_CHUNK_TOKENS
from verifier import sampling, toploc
from verifier.checks.proof import as_bf16
from verifier.logprobs import token_logprobs
from verifier.model import PolicyModel, load_policy
from verifier.thresholds import PROOF_GATE

FORMAT = 2
"""Part of the file names. A change in what is measured needs another number."""
BEST = 16
"""Best tokens of each position whose distance from the best is kept: what a steering node chooses among."""
_VERIFIER_BATCH, _PROVER_BATCH = 16, 4
_TEMPERATURE = 1.0

F32 = npt.NDArray[np.float32]

OWN_MODEL = ("honest", "greedy", "t0.7", "t0.9", "best-of-4", "wrong-seed")
"""Kinds whose own states are the right model's: proving again changes nothing."""


@dataclass(frozen=True)
class Proofs:
    """Each [R, C]. fp32: median, outliers; bf16: exponents, mean and middle (median) of the mantissas."""

    median: npt.NDArray[np.float64]
    outliers: npt.NDArray[np.int64]
    exponents: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    middle: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """All that a verifier measures of a pool.

    margins_RN: of the tokens sent. logprobs_RN: claimed minus the verifier's own, for a node that claims its own
    numbers. gaps_RNG: scores of the G best tokens, as distance from the best. unchanged_RC: for weights one step old,
    chunks whose states are equal to the bit under both.
    """

    own: Proofs
    again: Proofs
    margins_RN: F32
    logprobs_RN: F32
    gaps_RNG: F32
    unchanged_RC: npt.NDArray[np.bool_]

    @property
    def rollouts(self) -> int:
        return len(self.margins_RN)


def seen(maker: Maker, pools: Sequence[Pool]) -> dict[str, Seen]:
    """What is measured of each pool (and of those made of it), from files or now."""
    found = {}
    for against in ("", *STALE_KINDS):
        group = [pool for pool in pools if (pool.kind if pool.kind in STALE_KINDS else "") == against]
        missing = [pool for pool in group if not all(_path(maker, name).exists() for name in names_of(pool))]
        if missing:
            _measure(maker, missing, against)
        for pool in group:
            for name in names_of(pool):
                found[name] = _load(_path(maker, name))
    return found


def has(maker: Maker, pool: Pool) -> bool:
    """Whether all that is measured of it is there already."""
    return all(_path(maker, name).exists() for name in names_of(pool))


def is_there(maker: Maker, name: str) -> bool:
    """Whether measurements of this name are there already."""
    return _path(maker, name).exists()


def names_of(pool: Pool) -> list[str]:
    """Names under which a pool's measurements are kept: `best-of-4` is two of them."""
    return [f"wrong-seed-{pool.name}", pool.name] if pool.samples > 1 else [pool.name]


def _path(maker: Maker, name: str) -> Path:
    return maker.folder / f"{name}.seen{FORMAT}.npz"


@dataclass(frozen=True)
class Work:
    """Rollouts of one name, and their prompts."""

    name: str
    kind: str
    prompts: list[int]
    made: Made


def _measure(maker: Maker, pools: Sequence[Pool], against: str) -> None:
    works = [work for pool in pools for work in _works(pool, maker.made(pool))]
    maker.say(f"  judging {', '.join(work.name for work in works)}: {sum(len(w.prompts) for w in works)} rollouts")
    for name, one in measure(maker, works, *_policies(maker, against)).items():
        _save(_path(maker, name), one)


def _works(pool: Pool, made: Made) -> list[Work]:
    if pool.samples == 1:
        return [Work(pool.name, pool.kind, pool.prompts, made)]
    wrong, best = names_of(pool)
    prompts = pool.prompts[:: pool.samples]
    firsts = list(range(0, len(pool.prompts), pool.samples))
    return [
        Work(wrong, "wrong-seed", prompts, take(made, firsts)),
        Work(best, pool.kind, prompts, take(made, best_of(made, pool.samples))),
    ]


def _policies(maker: Maker, against: str) -> tuple[PolicyModel, PolicyModel | None]:
    """The verifier's policy, and for weights one step old the one before."""
    if not against:
        return load_policy(maker.directory), None
    weights = torch.bfloat16 if against == "stale-bf16" else torch.float32
    after, before = (load_policy(maker.folder / name, weights=weights) for name in ("after", "before"))
    return after, before


def measure(
    maker: Maker, works: Sequence[Any], policy: PolicyModel, before: PolicyModel | None = None
) -> dict[str, Seen]:
    """Measure rollouts of several pools; those of one prompt together."""
    sequences = [
        (maker.prompt(index), tokens_N)
        for work in works
        for index, tokens_N in zip(work.prompts, work.made.tokens_RN, strict=True)
    ]
    states = _states(policy, sequences, _VERIFIER_BATCH)
    older = None if before is None else _states(before, sequences, _VERIFIER_BATCH)
    again = _prefilled_again(policy, works, sequences)
    first, found = 0, {}
    replayed = _replay(maker, works, policy, states)
    for work in works:
        rows = slice(first, first + len(work.prompts))
        first = rows.stop
        own = [np.ascontiguousarray(states_NH) for states_NH in work.made.states_RNH]
        margins_RN, logprobs_RN, gaps_RNG = (np.stack(part[rows]) for part in replayed)
        proofs = _compare(states[rows], own)
        found[work.name] = Seen(
            proofs,
            proofs if work.kind in OWN_MODEL else _compare(states[rows], again[rows]),
            margins_RN,
            work.made.logprobs_RN - logprobs_RN,
            gaps_RNG,
            _unchanged(states[rows], None if older is None else older[rows]),
        )
    return found


def _states(policy: PolicyModel, sequences: Sequence[Any], batch: int) -> list[F32]:
    out: dict[int, F32] = {}
    for group in policy.states(sequences, batch):
        out |= {i: states_NH.numpy().copy() for i, states_NH in group}
    return [out[i] for i in range(len(sequences))]


def _prefilled_again(policy: PolicyModel, works: Sequence[Any], sequences: Sequence[Any]) -> list[F32]:
    """The states of a node that proves again; nothing for kinds that need not."""
    needed = [work.kind not in OWN_MODEL for work in works for _ in work.prompts]
    rows = [i for i, is_needed in enumerate(needed) if is_needed]
    states = _states(policy, [sequences[i] for i in rows], _PROVER_BATCH) if rows else []
    found = dict(zip(rows, states, strict=True))
    return [found.get(i, np.empty((0, 0), dtype=np.float32)) for i in range(len(sequences))]


def _replay(
    maker: Maker, works: Sequence[Any], policy: PolicyModel, states: Sequence[F32]
) -> tuple[list[F32], list[F32], list[F32]]:
    """Margins, own log-probabilities and gaps of every rollout; the noise of a prompt's seed is made once."""
    rows = [
        (index, tokens_N) for work in works for index, tokens_N in zip(work.prompts, work.made.tokens_RN, strict=True)
    ]
    margins: list[Any] = [None] * len(rows)
    logprobs, gaps = list(margins), list(margins)
    by_prompt: dict[int, list[int]] = {}
    for row, (index, _) in enumerate(rows):
        by_prompt.setdefault(index, []).append(row)
    for index, members in by_prompt.items():
        count = len(rows[members[0]][1])
        positions_N = len(maker.prompt(index)) + np.arange(count)
        noise_NV = torch.from_numpy(sampling.gumbel_noise([maker.seed(index)] * count, positions_N, policy.vocabulary))
        for row in members:
            tokens_N = torch.from_numpy(rows[row][1])
            logits_NV = policy.logits(torch.from_numpy(states[row]))
            margins[row] = sampling.margins(logits_NV, _TEMPERATURE, noise_NV, tokens_N).numpy()
            logprobs[row] = token_logprobs(logits_NV, tokens_N, _TEMPERATURE).numpy()
            best_NG = (logits_NV / _TEMPERATURE + noise_NV).topk(min(BEST, policy.vocabulary)).values
            gaps[row] = (best_NG[:, :1] - best_NG).numpy()
    return margins, logprobs, gaps


def _compare(states: Sequence[F32], own: Sequence[F32]) -> Proofs:
    """The proofs of `own` in both profiles against the verifier's states."""
    fp32 = toploc.verify_many(states, toploc.build_many(own, 2), PROOF_GATE)
    bf16 = toploc.verify_many_bf16(
        [as_bf16(one) for one in states], toploc.build_many([as_bf16(one) for one in own], 1)
    )
    return Proofs(
        np.asarray([[chunk.median for chunk in rollout] for rollout in fp32]),
        np.asarray([[chunk.outliers for chunk in rollout] for rollout in fp32]),
        np.asarray([[chunk.exponents for chunk in rollout] for rollout in bf16]),
        np.asarray([[chunk.mantissa_mean for chunk in rollout] for rollout in bf16]),
        np.asarray([[chunk.mantissa_median for chunk in rollout] for rollout in bf16]),
    )


def _unchanged(states: Sequence[F32], older: Sequence[F32] | None) -> npt.NDArray[np.bool_]:
    """Which chunks [R, C] have the same states under both weights."""
    chunks = -(-len(states[0]) // PROOF_CHUNK_TOKENS)
    if older is None:
        return np.zeros((len(states), chunks), dtype=np.bool_)
    size = PROOF_CHUNK_TOKENS
    return np.asarray(
        [
            [np.array_equal(new[c * size : (c + 1) * size], old[c * size : (c + 1) * size]) for c in range(chunks)]
            for new, old in zip(states, older, strict=True)
        ]
    )


# --- one token exchanged ---------------------------------------------------------------------------------------------


def spliced(maker: Maker, name: str, pool: Pool, rollouts: int, seed: int = 0) -> Seen:
    """Honest rollouts with one token exchanged for the likeliest other one, from a file or made and judged now.

    `own` holds the original proofs. The token's place is drawn; a token that the verifier's own seed would force there
    is no edit, and in fp32 there is exactly one such.
    """
    path = _path(maker, name)
    if not path.exists():
        policy = load_policy(maker.directory)
        made = take(maker.made(pool), range(min(rollouts, pool.rollouts)))
        places = np.random.default_rng(seed).integers(0, made.tokens_RN.shape[1], len(made.tokens_RN))
        tokens_RN = made.tokens_RN.copy()
        for row, place in enumerate(places):
            logits_V = policy.logits(torch.from_numpy(made.states_RNH[row, place : place + 1]))[0].clone()
            logits_V[tokens_RN[row, place]] = -torch.inf
            tokens_RN[row, place] = int(logits_V.argmax())
        edited = Made(tokens_RN, made.logprobs_RN, made.states_RNH)
        work = Work(name, "splice", pool.prompts[: len(tokens_RN)], edited)
        _save(path, measure(maker, [work], policy)[name])
    return _load(path)


# --- files -----------------------------------------------------------------------------------------------------------

_PROOFS = ("median", "outliers", "exponents", "mean", "middle")


def _save(path: Path, one: Seen) -> None:
    proofs = {f"{part}_{field}": getattr(getattr(one, part), field) for part in ("own", "again") for field in _PROOFS}
    save(
        path,
        margins=one.margins_RN,
        logprobs=one.logprobs_RN,
        gaps=one.gaps_RNG,
        unchanged=one.unchanged_RC,
        **proofs,
    )


def _load(path: Path) -> Seen:
    with np.load(path) as held:
        own, again = (Proofs(*(held[f"{part}_{field}"] for field in _PROOFS)) for part in ("own", "again"))
        return Seen(own, again, held["margins"], held["logprobs"], held["gaps"], held["unchanged"])
