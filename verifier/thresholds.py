"""Where honest noise ends: from a measurement to the numbers a run's manifest carries.

    proof_median   max(3e-6, 5 x honest maximum), never above 1e-5. Above 4.5e-6 weights that are one step old may pass
                   a chunk, which `blind_to` says (docs/detection.md)
    proof_gate     2^-14; no honest chunk may have more than 4 points above a fifth of it
    token_margin   1e-4, which must be above 5 x honest maximum
    logprob        max(3e-4, 10 x honest maximum), never above 1e-3: it grows with the logits as a policy sharpens, and
                   is not trained on, so that room costs nothing

of a mixture of experts (`route_noise` says why)

    route margin   max(2e-5, 5 x honest), never above 1e-3; honest is the larger of the largest shortfall of an honest
                   choice and twice the largest difference of one score
    choices not the verifier's own first, of a rollout: 8 + a share of all: as many as machines make whose noise the
                   margin admits, and 5 x the share seen of honest ones (a random model's is one in 10^5 to 10^6)

and in the bf16 profile, where the honest maximum is that of a float32 verifier:

    chunk_exponents   max(16, 2 x honest maximum of whole chunks), at most 32 of 128 points
    chunk_mantissa    max(4, 2 x), at most 10, the bound that the method was published with (unrelated states: 32)
    short_exponents, short_mantissa
                      the same of chunks of fewer than 32 rows, where answers end: they take their points from fewer
                      values, smaller ones among them, and are up to three times as loud; mantissas at most 16,
                      half of what unrelated states have. Never measured: the ceilings
    rollout_mantissa  max(2.5, 1.5 x), at most 4: over 4 chunks or more; of shorter rollouts only the chunks count
    token_margin      max(1.5, 3 x), at most 4: no rounding lifts a token that far, another seed does in a few tokens
    margin_mean       max(0.02, 3 x) a token, at most 0.06: greedy tokens, another temperature, a smaller model
    logprob           max(0.75, 3 x), at most 3: single honest tokens are off by 0.8, and a ratio above 4 (1.4) the
                      learner cuts off anyway
    logprob_mean      max(0.02, 3 x) a token, at most 0.1

These reject a rollout alone, so they lie beyond anything that was ever measured of an honest one. What they do not see
in one rollout (int8 weights, weights a few steps old, choosing among tokens that are nearly level) is added up per node
(`evidence`).

A measurement above a ceiling does not join its profile; there is no way to widen it by hand. The checked-in
`verifier/data/noise-*.json` hold a manifest's `Thresholds` or `Bf16Thresholds` and under `measurement` what they were
taken from. Needs no torch.

Not covered: measuring (`calibrate`), deciding (`checks`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.manifest import Bf16Thresholds, RouteThresholds, Thresholds
from verifier.errors import CalibrationError

SAFETY = 5.0
"""Threshold over honest maximum. Lower risks honest nodes, higher lets stale weights through."""
PROOF_MEDIAN_FLOOR, PROOF_MEDIAN_CEILING = 3e-6, 1e-5
STALE_SEEN = 4.5e-6
"""Up to this bound each chunk shows weights that are one step old at lr 1e-6, published in bf16: the closest of 64 such
chunks of SmolLM2 is off by 4.6e-6 (docs/detection.md). Above it `blind_to` says what the bound no longer shows."""
PROOF_OUTLIERS = 4
"""Points of a chunk that may be off: a value at the edge of the k largest may fall out on the other machine."""
PROOF_GATE = 2.0**-14
"""Error above which a point is off: 13 times the largest of any honest point (4.5e-6, 3,360 chunks of the tiny model),
a hundredth of what int8 weights do. With 2^-6, int8 weights in the last 40% of a chunk's rows passed: a median says
nothing about the other half."""
TOKEN_MARGIN = 1e-4
LOGPROB_SAFETY, LOGPROB_FLOOR, LOGPROB_CEILING = 10.0, 3e-4, 1e-3

ROUTE_FLOOR, ROUTE_CEILING = 2e-5, 1e-3
"""Of the route margin: choices within it are the node's. With some 4 (logits) to 18 (sigmoids) level pairs of experts
per unit of score those are one in 250 to 55 at the ceiling, one in 12,000 to 2,800 at the floor."""

ROUTES_NOT_FIRST = 8
"""Choices that are not the verifier's first which any rollout may have. Where 1 is expected, more than 16 come once in
10^15 honest rollouts, and where 0.1 is, more than 8; two such verdicts would suspend a node."""

BF16_ROLLOUT_CHUNKS = 4
"""A mean over fewer chunks is nearly as noisy as one chunk, which has a bound of its own."""
BF16_MEAN_TOKENS = 32
"""Sums over fewer tokens are divided by this many: of one token the mean is the token, which has a bound of its own."""


@dataclass(frozen=True)
class Measurement:
    """One calibration: honest maxima over all rollouts and batch sizes, and everything needed to repeat it."""

    command: str
    model: str
    weights: str
    """BLAKE3 of the `model.safetensors` measured, in hex: other weights want their own measurement."""
    environment: str
    engine: str
    machine: str
    profile: str
    decode_batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    rollouts: int
    tokens: int
    chunks: int
    proof_median: float
    proof_outliers: int
    """Points of a chunk above `PROOF_GATE / SAFETY`."""
    token_margin: float
    tokens_not_first: int
    """Tokens that another one beat by any margin at all in the verifier's prefill."""
    logprob: float
    one_token_rollouts: int
    shortest: int
    longest: int
    contexts: tuple[int, ...] = (0,)
    """Prompt tokens that other tasks were put in front for; 0 is the environment's own prompt."""
    attention: tuple[str, ...] = ("sdpa",)
    """The verifier's kernels; an engine says its own in its name."""
    threads: tuple[int, ...] = (1,)
    """The verifier's CPU threads."""
    route_choices: int = 0
    """Of experts: tokens times layers. 0: a dense model."""
    route_shortfall: float = 0.0
    route_scores: float = 0.0
    """Largest difference of one score between the verifier's own ways to compute it."""
    route_scores_mean: float = 0.0
    """Mean of them."""
    route_level: float = 0.0
    """Share of choices that beat the next best one by less than `ROUTE_CEILING`."""
    route_not_first: int = 0
    """Choices that are not the verifier's own first."""


@dataclass(frozen=True)
class Bf16Measurement:
    """One calibration of the bf16 profile, in the same words."""

    command: str
    model: str
    weights: str
    environment: str
    engine: str
    machine: str
    profile: str
    decode_batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    attention: tuple[str, ...]
    threads: tuple[int, ...]
    rollouts: int
    tokens: int
    chunks: int
    shortest: int
    longest: int
    exponents: int
    """Of whole chunks, as `chunk_mantissa`; 0 when there was none."""
    chunk_mantissa: float
    rollout_mantissa: float
    """Over rollouts of `BF16_ROLLOUT_CHUNKS` chunks or more; 0 when there was none."""
    token_margin: float
    margin_mean: float
    """Largest sum of a rollout's margins without its largest one, for which the bound on the sum has room anyway;
    divided by its tokens or by `BF16_MEAN_TOKENS`."""
    logprob: float
    logprob_mean: float
    """The same of the differences of its log-probabilities, without their sign."""
    tokens_not_first: int
    mantissa_mean: float
    """Mean over all rollouts, which evidence per node starts from."""
    margin_sum_mean: float
    """Mean of the sum of margins over all rollouts."""
    short_chunks: int = 0
    """Chunks of fewer than 32 rows, and their honest maxima."""
    short_exponents: int = 0
    short_mantissa: float = 0.0
    mismatch_k3_mean: float = 0.0
    """Mean over all rollouts of that statistic (`verifier.statistics`), as the next one; 0: never measured."""
    lean_above_mean: float = 0.0
    lean_deviation: float = 0.0
    """Of one rollout's `lean_above`."""


@dataclass(frozen=True)
class _Rule:
    """max(floor, safety x honest maximum), refused above the ceiling."""

    name: str
    safety: float
    floor: float
    ceiling: float

    def bound(self, honest: float) -> float:
        return _at_least(self.floor, self.safety * honest)


_BF16_RULES = {
    "chunk_exponents": _Rule("points of a chunk with another exponent", 2.0, 16.0, 32.0),
    "chunk_mantissa": _Rule("mantissa mean of a chunk", 2.0, 4.0, 10.0),
    "short_exponents": _Rule("points of a short chunk with another exponent", 2.0, 16.0, 32.0),
    "short_mantissa": _Rule("mantissa mean of a short chunk", 2.0, 4.0, 16.0),
    "rollout_mantissa": _Rule("mantissa mean of a rollout", 1.5, 2.5, 4.0),
    "token_margin": _Rule("margin of a token", 3.0, 1.5, 4.0),
    "margin_mean": _Rule("mean margin of a rollout", 3.0, 0.02, 0.06),
    "logprob": _Rule("log-probability", 3.0, 0.75, 3.0),
    "logprob_mean": _Rule("mean difference of log-probabilities", 3.0, 0.02, 0.1),
}
_BF16_HONEST = {"chunk_exponents": "exponents"}
"""Rules whose honest maximum has another name in a measurement."""


def bf16_thresholds(measured: Bf16Measurement) -> Bf16Thresholds:
    """A bf16 run's thresholds.

    Raises:
        CalibrationError: honest noise too close to a bound that may not move.
    """
    bounds = {
        field: rule.bound(float(getattr(measured, _BF16_HONEST.get(field, field))))
        for field, rule in _BF16_RULES.items()
    }
    over = [
        f"{rule.name}, with its safety factor, is {bounds[field]:.3g} and may be at most {rule.ceiling:.3g}"
        for field, rule in _BF16_RULES.items()
        if not bounds[field] <= rule.ceiling
    ]
    if over:
        raise CalibrationError(
            f"honest noise of {measured.model} is too high for the bf16 profile: {'; '.join(over)}. Use the fp32 "
            "profile, or leave this engine, device or model out of the run"
        )
    if measured.rollouts < 1:
        raise CalibrationError("a measurement without rollouts says nothing")
    if not measured.short_chunks:
        bounds |= {field: _BF16_RULES[field].ceiling for field in ("short_exponents", "short_mantissa")}
    return Bf16Thresholds(
        chunk_exponents=int(bounds["chunk_exponents"]),
        chunk_mantissa=bounds["chunk_mantissa"],
        rollout_mantissa=bounds["rollout_mantissa"],
        rollout_chunks=BF16_ROLLOUT_CHUNKS,
        token_margin=bounds["token_margin"],
        margin_mean=bounds["margin_mean"],
        logprob=bounds["logprob"],
        logprob_mean=bounds["logprob_mean"],
        measured_rollouts=measured.rollouts,
        measured_tokens=measured.tokens,
        measured_exponents=measured.exponents,
        measured_chunk_mantissa=measured.chunk_mantissa,
        measured_rollout_mantissa=measured.rollout_mantissa,
        measured_token_margin=measured.token_margin,
        measured_margin_mean=measured.margin_mean,
        measured_logprob=measured.logprob,
        measured_logprob_mean=measured.logprob_mean,
        false_rejects=false_rejects(measured.rollouts),
        machine=measured.machine,
        short_exponents=int(bounds["short_exponents"]),
        short_mantissa=bounds["short_mantissa"],
    )


def compared(measured: Measurement | Bf16Measurement) -> list[tuple[str, float, float]]:
    """For people: what was measured, its honest maximum, its threshold.

    Raises:
        CalibrationError: see `thresholds` and `bf16_thresholds`.
    """
    if isinstance(measured, Measurement):
        limits, routes = thresholds(measured), route_thresholds_of(measured)
        routes_honest = max(measured.route_shortfall, 2 * measured.route_scores)
        return [
            ("median error of a chunk", measured.proof_median, limits.proof_median),
            ("points of a chunk that are off", measured.proof_outliers, limits.proof_outliers),
            ("margin of a token", measured.token_margin, limits.token_margin),
            ("log-probability", measured.logprob, limits.logprob),
            *_compared_routes(routes_honest, routes),
        ]
    bounds = dataclasses.asdict(bf16_thresholds(measured))
    return [
        (rule.name, float(getattr(measured, _BF16_HONEST.get(field, field))), float(bounds[field]))
        for field, rule in _BF16_RULES.items()
    ]


def _compared_routes(honest: float, routes: RouteThresholds | None) -> list[tuple[str, float, float]]:
    if routes is None:
        return []
    share = routes.measured_not_first_rate
    return [
        ("shortfall of a choice of experts", honest, routes.margin),
        (f"share of choices turned, beyond {routes.not_first}", share, routes.not_first_rate),
    ]


def blind_to(measured: Measurement | Bf16Measurement) -> list[str]:
    """For people: what thresholds from this measurement no longer show, though they may be used.

    Raises:
        CalibrationError: see `thresholds` and `bf16_thresholds`.
    """
    found = []
    if isinstance(measured, Measurement):
        median = thresholds(measured).proof_median
        if median > STALE_SEEN:
            found.append(
                f"with a bound of {median:.3g} a chunk of weights one step old (lr 1e-6, published in bf16) may pass; "
                f"up to {STALE_SEEN:.3g} none of 64 did. Look for what makes this engine or device louder than "
                f"{STALE_SEEN / SAFETY:.1g}, or publish weights in float32, where one step begins at 1.4e-5"
            )
    return found


def false_rejects(rollouts: int) -> float:
    """Upper bound of the share of honest rollouts that are rejected, at 95%, when 0 of `rollouts` were: 3 / n."""
    return min(1.0, 3.0 / rollouts)


def thresholds_of_bf16_run(machine: str) -> Thresholds:
    """The `Thresholds` of a bf16 run: nothing passes these but how far details may lie from what was claimed."""
    return Thresholds(0.0, 0, 0.0, 0.0, LOGPROB_FLOOR, 0, 0, 0.0, 0, 0.0, 0.0, machine)


def thresholds(measured: Measurement) -> Thresholds:
    """The manifest's thresholds.

    Raises:
        CalibrationError: honest noise too close to a bound that may not move; the model or device needs another
            profile.
    """
    median = _at_least(PROOF_MEDIAN_FLOOR, SAFETY * measured.proof_median)
    logprob = _at_least(LOGPROB_FLOOR, LOGPROB_SAFETY * measured.logprob)
    checks = (
        ("relative error of the proof's median", median, PROOF_MEDIAN_CEILING),
        ("outliers of a chunk", measured.proof_outliers, PROOF_OUTLIERS),
        ("token margin", SAFETY * measured.token_margin, TOKEN_MARGIN),
        ("log-probability", logprob, LOGPROB_CEILING),
    )
    for name, value, ceiling in checks:
        if not value <= ceiling:
            raise CalibrationError(
                f"honest noise of {measured.model} is too high for the fp32 profile: {name}, with its safety factor, "
                f"is {value:.3g} and may be at most {ceiling:.3g}. Compute in float32 with TF32 off, or leave this "
                "engine, device or model out of the run"
            )
    return Thresholds(
        proof_median=median,
        proof_outliers=PROOF_OUTLIERS,
        proof_gate=PROOF_GATE,
        token_margin=TOKEN_MARGIN,
        logprob=logprob,
        measured_rollouts=measured.rollouts,
        measured_tokens=measured.tokens,
        measured_proof_median=measured.proof_median,
        measured_proof_outliers=measured.proof_outliers,
        measured_token_margin=measured.token_margin,
        measured_logprob=measured.logprob,
        machine=measured.machine,
    )


def route_thresholds_of(measured: Measurement) -> RouteThresholds | None:
    """The same of its model's experts; None for a dense model. Raises CalibrationError as `route_thresholds` does."""
    if not measured.route_choices:
        return None
    return route_thresholds(
        model=measured.model,
        machine=measured.machine,
        rollouts=measured.rollouts,
        choices=measured.route_choices,
        shortfall=measured.route_shortfall,
        scores=measured.route_scores,
        mean=measured.route_scores_mean,
        level=measured.route_level,
        not_first=measured.route_not_first,
    )


def route_thresholds(
    *,
    model: str,
    machine: str,
    rollouts: int,
    choices: int,
    shortfall: float,
    scores: float,
    mean: float,
    level: float,
    not_first: int,
) -> RouteThresholds:
    """Of a mixture of experts.

    Args:
        choices: tokens times layers behind the others. shortfall: largest of an honest choice. scores, mean: largest
            and mean difference of one score between two honest ways to compute it. level: share of choices that beat
            the next best one by less than `ROUTE_CEILING`. not_first: choices that are not the verifier's own.

    Raises:
        CalibrationError: nothing was measured, or honest noise is too close to a bound that may not move.
    """
    margin = _at_least(ROUTE_FLOOR, SAFETY * max(shortfall, 2 * scores))
    if rollouts < 1 or choices < 1:
        raise CalibrationError("a measurement without rollouts says nothing")
    if not margin <= ROUTE_CEILING:
        raise CalibrationError(
            f"honest noise of {model}'s routers is too high: with its safety factor it is {margin:.3g} and may be at "
            f"most {ROUTE_CEILING:.3g}. Compute in float32 with TF32 off, or leave this engine, device or model out"
        )
    honest = max(level / ROUTE_CEILING * mean, not_first / choices)
    admitted = level / ROUTE_CEILING * mean * (margin / (2 * scores) if scores > 0 else 1.0)
    rate = max(admitted, SAFETY * not_first / choices)
    if not 0 <= rate < math.inf:
        raise CalibrationError(f"the routers of {model} gave scores that are no numbers")
    return RouteThresholds(
        margin=margin,
        measured_rollouts=rollouts,
        measured_choices=choices,
        measured_shortfall=shortfall,
        measured_scores=scores,
        machine=machine,
        not_first=ROUTES_NOT_FIRST,
        not_first_rate=min(1.0, rate),
        measured_not_first=not_first,
        measured_not_first_rate=honest,
    )


def _at_least(floor: float, value: float) -> float:
    return value if not value < floor else floor  # a NaN stays one, and is refused


def to_json(measured: Measurement | Bf16Measurement) -> str:
    """The text of a noise file: thresholds first, then the measurement.

    Raises:
        CalibrationError: see `thresholds` and `bf16_thresholds`.
    """
    fields = _thresholds_of(measured) | {"measurement": dataclasses.asdict(measured)}
    return json.dumps(fields, indent=2) + "\n"


def _thresholds_of(measured: Measurement | Bf16Measurement) -> dict[str, Any]:
    if not isinstance(measured, Measurement):
        return dataclasses.asdict(bf16_thresholds(measured))
    routes = route_thresholds_of(measured)
    made = dataclasses.asdict(thresholds(measured))
    return made if routes is None else made | {"routes": dataclasses.asdict(routes)}


def read(path: Path) -> Measurement | Bf16Measurement:
    """Read a noise file's measurement, of the profile it names.

    Raises:
        CalibrationError: missing, not JSON, unknown or missing fields, numbers that are not finite, or thresholds
            that do not follow from the measurement.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        fields = raw.pop("measurement")
        kind: Any = Bf16Measurement if fields["profile"] == "bf16" else Measurement
        measured: Measurement | Bf16Measurement = kind(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        )
        numbers = [v for v in fields.values() if isinstance(v, int | float)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CalibrationError(f"{path} is no noise measurement ({exc!r}); make one with `verifier calibrate`") from exc
    if not all(math.isfinite(v) and v >= 0 for v in numbers):
        raise CalibrationError(f"{path} holds a number that is negative or not finite; measure again")
    if raw != _thresholds_of(measured):
        raise CalibrationError(f"the thresholds in {path} do not follow from its measurement; measure again")
    return measured
