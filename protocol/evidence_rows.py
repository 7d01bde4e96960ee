"""The rows of a manifest that say what is summed up over a node's rollouts, and which rows a manifest may have.

    hypothesis     statistic         profile   honest mean, at least
    precision      proof_median      fp32      half the bound that rejects a rollout, and 1.5 x the largest measured
    precision      mantissa_mean     bf16      half the bound that rejects a rollout
    seed-choice    not_first_rate    bf16
    seed-choice    margin_rate       bf16
    margin-steer   margin_reward     bf16      1: by symmetry, whatever the noise
    route-choice   route_rate        fp32      the share that rejects a long rollout: what noise makes that the margin
                                               lets pass
    logprob-lean   mismatch_k3       bf16
    logprob-lean   lean_above        bf16      1: of tokens that a node samples, the log-probabilities by its own policy
                                               are the larger ones in the mean (Gibbs' inequality)
    logprob-lean   lean_below        bf16      1, which is more than that leaves
    logprob-lean   lean_reward_above, lean_reward_below
                                     bf16      1, by symmetry
    reward         reward_claimed    both      1, by symmetry

A row that is stricter than the checks suspends nodes that pass every check: a louder kind of machine, say, on which
nobody calibrated. Noise whose mean is over half of a bound crosses that bound soon (largest over mean of honest
machines: 1.6 in 160 chunks, more in more), so who is honest and stays under the bound is under half of it in the mean.

    `check_rows`   refuses what can't be summed up by, or is too strict beside the thresholds
    `as_loose`     whether everybody who is honest by one row is so by another: what may count under it

Not covered: what x is (`verifier.statistics`), the sums (`verifier.evidence`), rows made from a measurement
(`verifier.evidence_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.codec import record
from protocol.errors import ManifestError, ReasonCode
from protocol.limits import KIB
from protocol.records import U32, U64, Float, Word

LEAST_LOG_BAR = math.log(1e6)
"""An honest node gets over a bar less than once in e^bar rollouts. A lower bar would ban honest nodes every day."""

CLIP_OVER_HONEST = 1e9
"""Largest clip. Beyond it the numbers of one rollout, and no sum, would decide."""

OF_BOUND = 0.5
"""Share of the bound that rejects a rollout which a row has to leave to honest nodes (see above)."""

OF_MEASURED = 1.5
"""Room above the largest honest number measured, for machines and policies other than the measured ones."""

FEWEST_CLASSES = 2
"""Kinds of machine that must have been calibrated for the fp32 row: of one nobody knows how the next one differs."""


@record(1 * KIB)
@dataclass(frozen=True)
class EvidenceRow:
    """One thing a node may do that no single rollout shows, and where the sum over its rollouts ends trust.

    A rollout's x >= 0 has an honest mean of at most `honest`, so M = max(M, 1) (1 + bet (min(x, clip) / honest - 1))
    over a node's rollouts stays small (`verifier.evidence`). Its key is suspended once log M is at `log_bar`, whichever
    single validator lies.
    """

    hypothesis: Word
    """A key of `KINDS`."""
    statistic: Word
    """How x follows from a verdict's details: a name of `verifier.statistics`."""
    clip: Float
    honest: Float
    bet: Float
    """Share of a stake that is put on x being too large, above 0 and below 1."""
    log_bar: Float
    """Natural logarithm: an honest node gets there less than once in e^log_bar rollouts."""
    measured_rollouts: U64
    measured_mean: Float
    """Of honest rollouts, as measured; `honest` is that with room above it."""
    classes: U32 = 0
    """Kinds of machine behind the measurement."""


@dataclass(frozen=True)
class Kind:
    """What a manifest may say of one statistic."""

    hypothesis: str
    profiles: tuple[str, ...]
    least: float = 0.0
    """Smallest honest mean that follows from what the statistic is, whatever was measured."""


KINDS: Mapping[str, Kind] = {
    "proof_median": Kind("precision", ("fp32",)),
    "mantissa_mean": Kind("precision", ("bf16",)),
    "not_first_rate": Kind("seed-choice", ("bf16",)),
    "margin_rate": Kind("seed-choice", ("bf16",)),
    "margin_reward": Kind("margin-steer", ("bf16",), 1.0),
    "route_rate": Kind("route-choice", ("fp32",)),
    "mismatch_k3": Kind("logprob-lean", ("bf16",)),
    "lean_above": Kind("logprob-lean", ("bf16",), 1.0),
    "lean_below": Kind("logprob-lean", ("bf16",), 1.0),
    "lean_reward_above": Kind("logprob-lean", ("bf16",), 1.0),
    "lean_reward_below": Kind("logprob-lean", ("bf16",), 1.0),
    "reward_claimed": Kind("reward", ("fp32", "bf16"), 1.0),
}
"""Every statistic a row may name. One line here, one in `verifier.statistics.STATISTICS` and one in
`verifier.evidence_rows.RULES` make another."""


def check_rows(rows: Iterable[EvidenceRow], profile: str, least: Mapping[str, float]) -> None:
    """Return when a manifest may have these rows.

    Args:
        least: statistic -> smallest honest mean that the manifest's thresholds allow.

    Raises:
        ManifestError: `evidence-unknown` for a statistic this software doesn't know or the profile doesn't have;
            `evidence-bounds` for numbers that make no sum, or a sum named twice; `evidence-too-strict` for a row that
            would suspend nodes which pass every check.
    """
    seen = set()
    for row in rows:
        _check_row(row, profile, least.get(row.statistic, 0.0))
        if row.statistic in seen:
            raise ManifestError("the manifest names one kind of evidence twice", ReasonCode.EVIDENCE_BOUNDS)
        seen.add(row.statistic)


def _check_row(row: EvidenceRow, profile: str, least: float) -> None:
    name = f"the manifest's evidence row {row.hypothesis} ({row.statistic})"
    kind = KINDS.get(row.statistic)
    if kind is None or kind.hypothesis != row.hypothesis or profile not in kind.profiles:
        raise ManifestError(
            f"{name} is none that this version sums up in {profile} runs. Who opens the run must leave it out, or "
            "everybody needs the version that knows it",
            ReasonCode.EVIDENCE_UNKNOWN,
        )
    numbers = (row.clip, row.honest, row.bet, row.log_bar, row.measured_mean)
    sane = (
        all(math.isfinite(one) for one in numbers)
        and 0 < row.honest < row.clip <= CLIP_OVER_HONEST * row.honest
        and 0 < row.bet < 1
        and row.log_bar >= LEAST_LOG_BAR
        and row.measured_mean >= 0
    )
    if not sane:
        raise ManifestError(
            f"{name} is out of its bounds: 0 < honest < clip, 0 < bet < 1, log_bar at least {LEAST_LOG_BAR:.1f}",
            ReasonCode.EVIDENCE_BOUNDS,
        )
    least = max(least, kind.least)
    if row.honest < least * (1 - 1e-9):  # rows are made by the same product
        raise ManifestError(
            f"{name} allows honest nodes a mean of {row.honest:.3g} where this manifest's thresholds let them have "
            f"{least:.3g}: it would suspend nodes that pass every check. Who signs the manifest must loosen it to "
            "that, or withdraw it, in the same update",
            ReasonCode.EVIDENCE_TOO_STRICT,
        )
    if row.statistic == "proof_median" and row.classes < FEWEST_CLASSES:
        raise ManifestError(
            f"{name} comes from {row.classes} kinds of machine and needs {FEWEST_CLASSES}: nobody knows yet how honest "
            "ones differ. Calibrate on another one, or leave the row out",
            ReasonCode.EVIDENCE_TOO_STRICT,
        )


def as_loose(row: EvidenceRow, other: EvidenceRow) -> bool:
    """Whether `row` lets pass whatever `other` does: no number counts for more by it, and its bar is no lower."""
    same = (row.hypothesis, row.statistic) == (other.hypothesis, other.statistic)
    small, large = row.honest >= other.honest, row.clip * other.honest <= other.clip * row.honest * (1 + 1e-12)
    return same and small and large and row.log_bar >= other.log_bar
