"""From honest noise, as measured, to the rows of a manifest that say what is summed up over a node's rollouts.

    hypothesis     statistic         honest mean at most                clip        bet
    precision      proof_median      max(1e-6, 1.5 x largest)           the bound   0.5     fp32
    precision      mantissa_mean     1.5 x clipped mean + 3 errors      5 x mean    0.9     bf16
    seed-choice    not_first_rate    2 x clipped mean + 3 errors        5 x mean    0.15    bf16
    seed-choice    margin_rate       2 x clipped mean + 3 errors        5 x mean    0.15    bf16
    margin-steer   margin_reward     max(1.05, mean + 3 errors)         2           0.5     bf16
    stale          previous_nearer   0.55                               1           0.4     bf16
    reward         reward_claimed    1.05                               2           0.5     no pure environment

An error is the standard error of the clipped mean: of short answers one in fifty has a token that is not first. Room
above the measured mean is for prompts and policies other than the measured ones: the tiny model's mantissa errors are
0.67 in the mean on long answers and 0.84 on short ones, and twice as many tokens of long ones are not first. So measure
on the run's own environment. The fp32 row allows for the largest number anybody measured, so that no honest mixture of
answers lies above it. A larger bet finds gross faults sooner and slight ones, or ones mixed with honest rollouts,
later; numbers that come in jumps want a small one, and a clip that keeps the few largest from being most of the mean.

fp32 leaves nothing to the other hypotheses: old weights are rejected by one chunk's proof, and below the token margin's
bound of 1e-4 fewer than one token in 10,000 has a second choice.

Not covered: measuring (`benchmarks.data.evidence_pool` for the tiny model), the sums (`evidence`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.manifest import EvidenceRow, Thresholds
from verifier.errors import CalibrationError

ROLLOUTS_A_DAY = 1e6
"""Most rollouts a node makes in a day that the bars are meant for: a node that makes more is looked at more often."""

FALSE_BANS_A_DAY = 1e-7
"""Honest nodes banned per node and day by all rows together: the design figure of DESIGN 4."""

DATA = Path(__file__).resolve().parent / "data"

PROOF_MEDIAN_FLOOR = 1e-6
"""A third of the least bound that any fp32 run has: below it machines differ for no reason worth a ban."""


CLIP = 5.0
"""Clip over honest mean, of bf16 numbers. Half as much hides what is gross, twice as much lets rare large margins of
honest rollouts be most of the mean."""


@dataclass(frozen=True)
class Noise:
    """Honest numbers of one statistic."""

    numbers: int
    mean: float
    clipped: float
    """Mean with every number above `CLIP` x mean counted as that."""
    error: float
    """Standard error of it."""

    @staticmethod
    def of(x: Sequence[float]) -> Noise:
        """Of numbers as they were measured; not empty."""
        mean = math.fsum(x) / len(x)
        counted = [min(one, CLIP * mean) for one in x]
        clipped = math.fsum(counted) / len(x)
        variance = math.fsum((one - clipped) ** 2 for one in counted) / max(1, len(x) - 1)
        return Noise(len(x), mean, clipped, math.sqrt(variance / len(x)))


def log_bar(rows: int) -> float:
    """Where `rows` sums have to get so that they ban fewer honest nodes than `FALSE_BANS_A_DAY` together."""
    return math.log(max(1, rows) * ROLLOUTS_A_DAY / FALSE_BANS_A_DAY)


def fp32_rows(thresholds: Thresholds, pure: bool = True) -> tuple[EvidenceRow, ...]:
    """The rows of an fp32 run; they follow from the thresholds' own measurement.

    Args:
        pure: every environment of the run is, so that a wrong reward is rejected at once.
    """
    largest = thresholds.measured_proof_median
    honest = max(PROOF_MEDIAN_FLOOR, 1.5 * largest)
    rows = []
    if honest < thresholds.proof_median:
        count = thresholds.measured_rollouts
        rows.append(EvidenceRow("precision", "proof_median", thresholds.proof_median, honest, 0.5, 0.0, count, largest))
    return _with_bars([*rows, *_reward(pure)])


def bf16_rows(noise: Mapping[str, Noise], pure: bool = True) -> tuple[EvidenceRow, ...]:
    """The rows of a bf16 run, of those statistics that were measured and were not all 0."""
    rows = []
    for hypothesis, statistic, room, bet in (
        ("precision", "mantissa_mean", 1.5, 0.9),
        ("seed-choice", "not_first_rate", 2.0, 0.15),
        ("seed-choice", "margin_rate", 2.0, 0.15),
    ):
        known = noise.get(statistic)
        if known is not None and known.mean > 0:
            clip, honest = CLIP * known.mean, room * known.clipped + 3.0 * known.error
            rows.append(EvidenceRow(hypothesis, statistic, clip, honest, bet, 0.0, known.numbers, known.mean))
    tied = noise.get("margin_reward")
    if tied is not None:
        honest = max(1.05, tied.clipped + 3.0 * tied.error)
        rows.append(EvidenceRow("margin-steer", "margin_reward", 2.0, honest, 0.5, 0.0, tied.numbers, tied.mean))
    rows.append(EvidenceRow("stale", "previous_nearer", 1.0, 0.55, 0.4, 0.0, 0, 0.5))
    return _with_bars([*rows, *_reward(pure)])


def _reward(pure: bool) -> list[EvidenceRow]:
    return [] if pure else [EvidenceRow("reward", "reward_claimed", 2.0, 1.05, 0.5, 0.0, 0, 1.0)]


def _with_bars(rows: list[EvidenceRow]) -> tuple[EvidenceRow, ...]:
    return tuple(replace(row, log_bar=log_bar(len(rows))) for row in rows)


def rows_of_run(profile: str, thresholds: Thresholds, preset: str, pure: bool = True) -> tuple[EvidenceRow, ...]:
    """What a new run of a preset sums up. In bf16 nothing where no honest numbers of the preset were ever measured.

    Raises:
        CalibrationError: see `read`.
    """
    if profile == "fp32":
        return fp32_rows(thresholds, pure)
    path = DATA / f"evidence-{preset}.json"
    return bf16_rows(read(path), pure) if path.exists() else ()


def read(path: Path) -> dict[str, Noise]:
    """A file of honest numbers: `{"statistics": {NAME: {"numbers", "mean", "clipped", "error"}}}`, and how it was made.

    Raises:
        CalibrationError: missing, or it holds something else.
    """
    try:
        found = {name: Noise(**fields) for name, fields in json.loads(path.read_text())["statistics"].items()}
        sane = all(
            one.numbers > 0 and 0 <= one.clipped <= one.mean < math.inf and 0 <= one.error < math.inf
            for one in found.values()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CalibrationError(f"{path} holds no honest numbers ({exc!r}); make it again as it says itself") from exc
    if not sane:
        raise CalibrationError(f"{path} holds numbers that no honest node has; make it again as it says itself")
    return found
