"""From what a verifier measures to who is rejected, how surely, and after how many tokens.

The rules are those of `verifier.checks` with a manifest's thresholds, written once more over whole pools so that each
can be asked alone (`tests/test_benchmarks_detection.py` holds them against `judge`); beside them the published ones.

    published   "TOPLOC" (Ong et al., 2025), a chunk of 128 bf16 points: more than 38 other exponents, mantissas further
                off than 10 on average, or than 8 in the middle
    first study an earlier look at the same model in bf16 (16 rollouts a kind, 68 honest ones), whose bounds were chosen
                to reject none of its own: a chunk with more than 12 exponents or a mean above 3, a rollout's mean above
                2.15; margins above 0.009 on average, or two above 0.3; for a ban: 16, 5, 3.0; two margins above 0.5
    interval    Wilson's, 95%; of a rate over tokens, which hang together within a rollout, from the spread of rollouts
    tokens to detect at 99%    fp32, where one token rejects: log 0.01 / log(1 - rate of such tokens)
    rollouts to tell apart     bf16, where sums over a node's rollouts decide: a one-sided test of the mean, wrong about
                               one honest node in 1,000, that sees 99% of the others; normal approximation

Not covered: evidence per node as it is decided (`verifier.evidence`, `benchmarks.evidence`).

Shape suffixes: R rollouts, N sampled tokens, C proof chunks, G best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.detection_judge import Proofs, Seen
from protocol.manifest import Bf16Thresholds, Thresholds

Bools = npt.NDArray[np.bool_]

PUBLISHED_EXPONENTS, PUBLISHED_MEAN, PUBLISHED_MIDDLE = 38, 10.0, 8.0
STUDY_PROOFS, STUDY_BAN_PROOFS = (12, 3.0, 2.15), (16, 5.0, 3.0)
STUDY_MARGIN_MEAN, STUDY_MARGIN, STUDY_BAN_MARGIN, STUDY_MARGINS = 0.009, 0.3, 0.5, 2
_Z95, _Z999, _Z99 = 1.959964, 3.090232, 2.326348


# --- rules -----------------------------------------------------------------------------------------------------------


def fp32_chunks(proofs: Proofs, limits: Thresholds) -> Bools:
    """Chunks [R, C] that reject."""
    return ~(proofs.median <= limits.proof_median) | (proofs.outliers > limits.proof_outliers)


def fp32_tokens(seen: Seen, limits: Thresholds) -> Bools:
    """Tokens [R, N] that reject."""
    return seen.margins_RN > limits.token_margin


def fp32_logprobs(seen: Seen, limits: Thresholds) -> Bools:
    """Rollouts [R] that their log-probabilities reject."""
    return ~(np.abs(seen.logprobs_RN) <= limits.logprob).all(axis=1)


def bf16_proofs(proofs: Proofs, limits: Bf16Thresholds) -> Bools:
    """Rollouts [R] that their proofs reject."""
    # every chunk is whole: rollouts here have a multiple of 32 tokens
    chunks_RC = (proofs.exponents > limits.chunk_exponents) | ~(proofs.mean <= limits.chunk_mantissa)
    whole = proofs.mean.shape[1] >= limits.rollout_chunks
    return chunks_RC.any(axis=1) | (whole & ~(proofs.mean.mean(axis=1) <= limits.rollout_mantissa))


def bf16_tokens(seen: Seen, limits: Bf16Thresholds) -> Bools:
    """Rollouts [R] that their tokens reject."""
    tokens = seen.margins_RN.shape[1]
    allowed = limits.token_margin + limits.margin_mean * tokens
    return (seen.margins_RN > limits.token_margin).any(axis=1) | (margin_sums(seen) > allowed)


def bf16_logprobs(seen: Seen, limits: Bf16Thresholds) -> Bools:
    """Rollouts [R] that their log-probabilities reject."""
    tokens = seen.logprobs_RN.shape[1]
    added_R = np.abs(seen.logprobs_RN.sum(axis=1, dtype=np.float64))
    one_R = ~(np.abs(seen.logprobs_RN) <= limits.logprob).all(axis=1)
    return one_R | ~(added_R <= limits.logprob + limits.logprob_mean * tokens)


def published_chunks(proofs: Proofs) -> Bools:
    """Chunks [R, C] that the published thresholds reject."""
    return (
        (proofs.exponents > PUBLISHED_EXPONENTS)
        | ~(proofs.mean <= PUBLISHED_MEAN)
        | ~(proofs.middle <= PUBLISHED_MIDDLE)
    )


def study_proofs(proofs: Proofs, bounds: tuple[int, float, float] = STUDY_PROOFS) -> Bools:
    """Rollouts [R] that the first study's bounds on proofs reject."""
    exponents, chunk, rollout = bounds
    chunks_RC: Bools = (proofs.exponents > exponents) | ~(proofs.mean <= chunk)
    return chunks_RC.any(axis=1) | ~(proofs.mean.mean(axis=1) <= rollout)


def study_tokens(seen: Seen) -> Bools:
    """Rollouts [R] that the first study's bounds on margins reject.

    It clipped each margin before it took the mean and does not say where; here none is, which rejects no less.
    """
    mean_R: Bools = margin_sums(seen) > STUDY_MARGIN_MEAN * seen.margins_RN.shape[1]
    return mean_R | _two_above(seen, STUDY_MARGIN)


def study_bans(seen: Seen, own: bool) -> Bools:
    """Rollouts [R] for which the first study would ban. own: with proofs of the node's own states."""
    tokens_R = _two_above(seen, STUDY_BAN_MARGIN)
    return tokens_R | study_proofs(seen.own, STUDY_BAN_PROOFS) if own else tokens_R


def _two_above(seen: Seen, margin: float) -> Bools:
    two_R: Bools = (seen.margins_RN > margin).sum(axis=1) >= STUDY_MARGINS
    return two_R


def margin_sums(seen: Seen) -> npt.NDArray[np.float64]:
    """[R]."""
    sums: npt.NDArray[np.float64] = seen.margins_RN.sum(axis=1, dtype=np.float64)
    return sums


# --- rates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """`hits` of `of`, with Wilson's 95% interval."""

    hits: int
    of: int

    @property
    def share(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        n, p, z2 = self.of, self.share, _Z95**2
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_json(self) -> dict[str, Any]:
        return {"hits": self.hits, "of": self.of, "interval": [round(end, 4) for end in self.interval]}


def rate(flags: Bools) -> Rate:
    return Rate(int(flags.sum()), int(flags.size))


def tokens_to_detect(flags_RN: Bools) -> dict[str, float]:
    """Where one token rejects: how many it takes until one does, at 99%.

    Returns `rate` of such tokens, `tokens`, and `tokens_at_most`, which takes the low end of the rate's 95% interval
    over rollouts. Infinite where no token does.
    """
    per_rollout_R = flags_RN.mean(axis=1)
    mean = float(per_rollout_R.mean())
    error = float(per_rollout_R.std(ddof=1)) / math.sqrt(len(per_rollout_R)) if len(per_rollout_R) > 1 else mean
    return {"rate": mean, "tokens": _until(mean), "tokens_at_most": _until(mean - _Z95 * error)}


def _until(share: float) -> float:
    if share <= 0:
        return math.inf
    return 1.0 if share >= 1 else float(math.ceil(math.log(0.01) / math.log1p(-share)))


def rollouts_to_tell(honest: Sequence[float], other: Sequence[float]) -> float:
    """Rollouts until the mean of a statistic tells the other from honest ones.

    Infinite where it is not larger, or where there are not two of each to take a spread from.
    """
    if min(len(honest), len(other)) < 2:
        return math.inf
    shift = float(np.mean(other)) - float(np.mean(honest))
    if shift <= 0:
        return math.inf
    spread = _Z999 * float(np.std(honest, ddof=1)) + _Z99 * float(np.std(other, ddof=1))
    return float(max(1, math.ceil((spread / shift) ** 2)))


# --- choosing among what passes --------------------------------------------------------------------------------------


def free_bits_below(gaps_RNG: npt.NDArray[np.float32], bound: float) -> float:
    """Bits a token that a node chooses freely where every token within `bound` of the best passes."""
    return float(np.log2((gaps_RNG <= bound).sum(axis=-1)).mean())


def free_bits_of_sum(gaps_RNG: npt.NDArray[np.float32], token_bound: float, budget: float) -> float:
    """Bits a rollout that a node chooses freely where its margins may add up to `budget`.

    An upper bound: the number of choices of total margin m <= budget is at most e^(b budget) x the product over tokens
    of the sum over their choices of e^(-b m), for every b (Chernoff); the smallest over b is taken. Positions are those
    of honest texts: what a choice changes later is another text of the same kind.
    """
    rollouts, tokens, _ = gaps_RNG.shape
    gaps = np.where(gaps_RNG <= token_bound, gaps_RNG, np.inf).astype(np.float64)
    best = math.inf
    for b in np.geomspace(1e-3, 500.0, 80):
        of_token = float(np.log(np.exp(-b * gaps).sum(axis=-1)).mean())
        best = min(best, b * budget + tokens * of_token)
    return best / math.log(2) if rollouts else 0.0
