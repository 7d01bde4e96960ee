"""From honest noise, as measured, to the rows of a manifest that say what is summed up over a node's rollouts.

    hypothesis     statistic         honest mean at most                                  clip        bet
    precision      proof_median      max(1e-6, 1.5 x largest, half the rollout's bound)   the bound   0.5    fp32
    precision      mantissa_mean     max(1.5 x clipped mean + 3 errors, half the bound)   5 x mean    0.9    bf16
    seed-choice    not_first_rate    2 x clipped mean + 3 errors                          5 x mean    0.15   bf16
    seed-choice    margin_rate       2.25 x clipped mean + 3 errors                       5 x mean    0.15   bf16
    margin-steer   margin_reward     max(1.05, mean + 3 errors)                           2           0.5    bf16
    logprob-lean   mismatch_k3       2.25 x clipped mean + 3 errors                       5 x mean    0.3    bf16
    logprob-lean   lean_above        max(1.1, 1.1 x mean + 3 errors)                      2           0.5    bf16
    logprob-lean   lean_below        max(1.05, mean + 3 errors)                           2           0.5    bf16
    logprob-lean   lean_reward_above, lean_reward_below
                                     max(1.1, mean + 3 errors)                            2           0.5    bf16
    reward         reward_claimed    1.05                                                 2           0.5    not pure
    route-choice   route_rate        the share that rejects a long rollout                1,000 x     0.1    fp32, MoE

`RULES` holds those that follow from honest numbers: another row is one line there, one in
`protocol.evidence_rows.KINDS` and one in `verifier.statistics.STATISTICS`. A row is made only where honest numbers of
its statistic were measured, or where its rule says what they are (`by_symmetry`), and only of statistics that some
check feeds.

An error is the standard error of the clipped mean: of short answers one in fifty has a token that is not first. Room
above the measured mean is for prompts, policies and machines other than the measured ones: the tiny model's mantissa
errors are 0.67 in the mean on long answers and 0.84 on short ones, and twice as many tokens of long ones are not first.
A machine that is louder by 1.5 in its states has as many more level tokens, each 1.5 times as far apart: 2.25 in sums
of margins, so that no row is stricter than the others; divergences grow with the square of noise as well. So measure on
the run's own environment. A larger bet finds gross faults sooner and slight ones, or ones mixed with honest rollouts,
later; numbers that come in jumps want a small one, and a clip that keeps the few largest from being most of the mean.

fp32: `proof_median` allows for the largest number anybody measured and for whatever the rollout's own bound lets honest
machines have (`protocol.evidence_rows`), and it needs two kinds of machine measured. It leaves nothing to the other
hypotheses: old weights are rejected by one chunk's proof, and below the token margin's bound of 1e-4 fewer than one
token in 10,000 has a second choice.

Not covered: measuring (`calibrate`; `benchmarks.data.evidence_pool` for the tiny model), which rows a manifest may have
(`protocol.evidence_rows`), the sums (`evidence`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.evidence_rows import FEWEST_CLASSES, KINDS, EvidenceRow
from protocol.manifest import Bf16Thresholds, RouteThresholds, Thresholds, least_honest
from verifier import thresholds as noise_files
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

ROUTE_CLIP, ROUTE_BET = 1000.0, 0.1
"""Other experts come rarely: in most tasks in none of a thousand choices, and then one is many times the honest mean. A
larger bet gives up more at each task without one, a smaller clip hides how many there were."""

JUDGED = "judged"
"""What a run may have that a row needs: an environment whose scoring is not pure."""


@dataclass(frozen=True)
class RowRule:
    """How one bf16 row follows from honest numbers: honest = max(floor, room x clipped mean + 3 errors)."""

    statistic: str
    bet: float
    room: float = 1.0
    floor: float = 0.0
    clip: float | None = None
    """`CLIP` times the mean by default."""
    by_symmetry: float | None = None
    """The honest mean of a statistic that needs no measurement; then `floor` and `clip` are the row's."""
    needs: str = ""
    """`JUDGED`: only runs with that have the row."""
    profiles: tuple[str, ...] = ("bf16",)

    def row(self, noise: Noise | None) -> EvidenceRow | None:
        """The row, its bar still to be set; None when nothing was measured, or nothing but zeros."""
        if noise is None and self.by_symmetry is not None:
            noise = Noise(0, self.by_symmetry, self.by_symmetry, 0.0)
        if noise is None or noise.mean <= 0:
            return None
        honest = max(self.floor, self.room * noise.clipped + 3.0 * noise.error)
        clip = CLIP * noise.mean if self.clip is None else self.clip
        hypothesis = KINDS[self.statistic].hypothesis
        return EvidenceRow(
            hypothesis, self.statistic, clip, honest, self.bet, 0.0, noise.numbers, noise.mean, noise.classes
        )


RULES: tuple[RowRule, ...] = (
    RowRule("mantissa_mean", bet=0.9, room=1.5),
    RowRule("not_first_rate", bet=0.15, room=2.0),
    RowRule("margin_rate", bet=0.15, room=2.25),
    RowRule("margin_reward", bet=0.5, floor=1.05, clip=2.0),
    RowRule("mismatch_k3", bet=0.3, room=2.25),
    RowRule("lean_above", bet=0.5, room=1.1, floor=1.1, clip=2.0),
    RowRule("lean_below", bet=0.5, floor=1.05, clip=2.0),
    RowRule("lean_reward_above", bet=0.5, floor=1.1, clip=2.0),
    RowRule("lean_reward_below", bet=0.5, floor=1.1, clip=2.0),
    RowRule("reward_claimed", bet=0.5, floor=1.05, clip=2.0, by_symmetry=1.0, needs=JUDGED, profiles=("fp32", "bf16")),
)
"""In the order in which a manifest lists them."""


@dataclass(frozen=True)
class Noise:
    """Honest numbers of one statistic."""

    numbers: int
    mean: float
    clipped: float
    """Mean with every number above `CLIP` x mean counted as that."""
    error: float
    """Standard error of it."""
    classes: int = 1
    """Kinds of machine that were measured."""

    @staticmethod
    def of(x: Sequence[float]) -> Noise:
        """Of numbers as they were measured; not empty."""
        mean = math.fsum(x) / len(x)
        counted = [min(one, CLIP * mean) for one in x]
        clipped = math.fsum(counted) / len(x)
        variance = math.fsum((one - clipped) ** 2 for one in counted) / max(1, len(x) - 1)
        return Noise(len(x), mean, clipped, math.sqrt(variance / len(x)))

    def at_least(self, mean: float, classes: int = 0) -> Noise:
        """The same where another measurement, of so many other kinds of machine, has that mean."""
        up = max(1.0, mean / self.mean) if self.mean > 0 else 1.0
        return Noise(self.numbers, self.mean * up, self.clipped * up, self.error * up, self.classes + classes)


@dataclass(frozen=True)
class DeviceClass:
    """What another kind of machine showed, measured apart from the preset's noise files."""

    machine: str
    source: str
    rollouts: int
    statistics: dict[str, float]
    """Of `proof_median` the largest, of others the mean."""


def log_bar(rows: int) -> float:
    """Where `rows` sums have to get so that they ban fewer honest nodes than `FALSE_BANS_A_DAY` together."""
    return math.log(max(1, rows) * ROLLOUTS_A_DAY / FALSE_BANS_A_DAY)


def fp32_rows(
    thresholds: Thresholds,
    classes: Sequence[DeviceClass] = (),
    has: Collection[str] = (),
    routes: RouteThresholds | None = None,
) -> tuple[EvidenceRow, ...]:
    """The rows of an fp32 run.

    Args:
        classes: kinds of machine that were measured beside the one behind the thresholds.
        has: `JUDGED`, if the run is.
        routes: of a model with experts.
    """
    apart = [one for one in classes if one.machine != thresholds.machine]
    others = [one.statistics["proof_median"] for one in apart if "proof_median" in one.statistics]
    largest = max(thresholds.measured_proof_median, *others) if others else thresholds.measured_proof_median
    honest = max(PROOF_MEDIAN_FLOOR, 1.5 * largest, least_honest(thresholds)["proof_median"])
    rows = []
    if honest < thresholds.proof_median and 1 + len(others) >= FEWEST_CLASSES:
        count, bound = thresholds.measured_rollouts, thresholds.proof_median
        rows.append(EvidenceRow("precision", "proof_median", bound, honest, 0.5, 0.0, count, largest, 1 + len(others)))
    return _with_bars([*rows, *_route_rows(routes), *_by_rule({}, "fp32", has)])


def _route_rows(routes: RouteThresholds | None) -> list[EvidenceRow]:
    """Noise that the margin admits makes `not_first_rate` of choices in the mean, so no honest node is above it."""
    if routes is None or not 0 < routes.not_first_rate < 1 / ROUTE_CLIP:
        return []
    honest, hypothesis = routes.not_first_rate, KINDS["route_rate"].hypothesis
    measured = routes.measured_rollouts, routes.measured_not_first_rate
    return [EvidenceRow(hypothesis, "route_rate", ROUTE_CLIP * honest, honest, ROUTE_BET, 0.0, *measured, 1)]


def bf16_rows(
    noise: Mapping[str, Noise], bf16: Bf16Thresholds | None = None, has: Collection[str] = ()
) -> tuple[EvidenceRow, ...]:
    """The rows of a bf16 run, of those statistics that were measured and were not all 0."""
    least = {} if bf16 is None else least_honest(bf16)
    rows = [replace(row, honest=max(row.honest, least.get(row.statistic, 0.0))) for row in _by_rule(noise, "bf16", has)]
    return _with_bars([row for row in rows if row.honest < row.clip])


def _by_rule(noise: Mapping[str, Noise], profile: str, has: Collection[str]) -> list[EvidenceRow]:
    rules = (rule for rule in RULES if profile in rule.profiles and (not rule.needs or rule.needs in has))
    return [row for rule in rules if (row := rule.row(noise.get(rule.statistic))) is not None]


def _with_bars(rows: list[EvidenceRow]) -> tuple[EvidenceRow, ...]:
    return tuple(replace(row, log_bar=log_bar(len(rows))) for row in rows)


def rows_of_run(
    profile: str,
    thresholds: Thresholds,
    preset: str,
    pure: bool = True,
    bf16: Bf16Thresholds | None = None,
    routes: RouteThresholds | None = None,
) -> tuple[EvidenceRow, ...]:
    """What a new run of a preset sums up. In bf16 nothing where no honest numbers of the preset were ever measured.

    Args:
        pure: every environment of the run is, so that a wrong reward is rejected at once.
        routes: of a model with experts.

    Raises:
        CalibrationError: see `read`, `read_classes` and `thresholds.read`.
    """
    has = [] if pure else [JUDGED]
    classes = read_classes(DATA / f"classes-{preset}.json")
    if profile == "fp32":
        return fp32_rows(thresholds, classes, has, routes)
    return bf16_rows(noise_of_preset(preset, classes), bf16, has)


def noise_of_preset(preset: str, classes: Iterable[DeviceClass] = ()) -> dict[str, Noise]:
    """Honest bf16 numbers of a preset: its own file of them, or else what its calibration gives; no lower than any
    other measurement of it. Empty when there is none.

    Raises:
        CalibrationError: a file is there and does not hold.
    """
    own, calibrated = DATA / f"evidence-{preset}.json", DATA / f"noise-{preset}-bf16.json"
    found = read(own) if own.exists() else {}
    measured = noise_files.read(calibrated) if calibrated.exists() else None
    if isinstance(measured, noise_files.Bf16Measurement):
        for name, one in noise_of_calibration(measured).items():
            found[name] = found[name].at_least(one.mean) if name in found else one
    for other in classes:
        for name, mean in other.statistics.items():
            if name in found:
                found[name] = found[name].at_least(mean, 1)
    return found


def noise_of_calibration(measured: noise_files.Bf16Measurement) -> dict[str, Noise]:
    """What a bf16 calibration says of the mean numbers of honest rollouts.

    It keeps sums and maxima, so nothing is clipped and errors are estimates: the largest mantissa mean lies two
    deviations or more above the mean, jumps (tokens that are not first) come like a Poisson process, their sizes about
    like exponential ones, and divergences deviate by twice their mean. How they lean is there since it is measured.
    """
    rollouts, tokens, jumps = measured.rollouts, max(1, measured.tokens), max(1, measured.tokens_not_first)
    largest = max(measured.chunk_mantissa, measured.short_mantissa)
    deviation = max(0.0, largest / measured.mantissa_mean - 1) / 2 if measured.mantissa_mean else 0.0
    means = {
        "mantissa_mean": (measured.mantissa_mean, deviation**2 / rollouts),
        "not_first_rate": (measured.tokens_not_first / tokens, 1.0 / jumps),
        "margin_rate": (measured.margin_sum_mean * rollouts / tokens, 2.0 / jumps),
    }
    if measured.mismatch_k3_mean > 0:
        means["mismatch_k3"] = (measured.mismatch_k3_mean, 4.0 / rollouts)
        for name, mean in (
            ("lean_above", measured.lean_above_mean),
            ("lean_below", 2.0 - measured.lean_above_mean),
        ):
            means[name] = (mean, (measured.lean_deviation / mean) ** 2 / rollouts)
    return {name: Noise(rollouts, mean, mean, mean * math.sqrt(spread)) for name, (mean, spread) in means.items()}


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


def read_classes(path: Path) -> list[DeviceClass]:
    """A file of device classes; none when it is not there.

    Raises:
        CalibrationError: it holds something else.
    """
    if not path.exists():
        return []
    try:
        found = [DeviceClass(**fields) for fields in json.loads(path.read_text())["classes"]]
        sane = all(
            one.rollouts > 0 and all(0 <= x < math.inf for x in one.statistics.values()) and one.machine
            for one in found
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CalibrationError(f"{path} holds no device classes ({exc!r})") from exc
    if not sane:
        raise CalibrationError(f"{path} holds numbers that no honest machine has")
    return found
