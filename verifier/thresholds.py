"""Where honest noise ends: from a measurement to the numbers a run's manifest carries.

    proof_median   max(3e-6, 5 x honest maximum), never above 1e-5: weights one step stale at lr 1e-6 start at 1.7e-5
    proof_gate     2^-14; no honest chunk may have more than 4 points above a fifth of it
    token_margin   1e-4, which must be above 5 x honest maximum
    logprob        max(3e-4, 10 x honest maximum), never above 1e-3: it grows with the logits as a policy sharpens, and
                   is not trained on, so that room costs nothing

A measurement above a ceiling does not join the fp32 profile; there is no way to widen it by hand. The checked-in
`verifier/data/noise-*.json` hold a manifest's `Thresholds` and under `measurement` what they were taken from. Needs
no torch.

Not covered: measuring (`calibrate`), deciding (`checks`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from protocol.manifest import Thresholds
from verifier.errors import CalibrationError

SAFETY = 5.0
"""Threshold over honest maximum. Lower risks honest nodes, higher lets stale weights through."""
PROOF_MEDIAN_FLOOR, PROOF_MEDIAN_CEILING = 3e-6, 1e-5
PROOF_OUTLIERS = 4
"""Points of a chunk that may be off: a value at the edge of the k largest may fall out on the other machine."""
PROOF_GATE = 2.0**-14
"""Error above which a point is off: 13 times the largest of any honest point (4.5e-6, 3,360 chunks of the tiny model),
a hundredth of what int8 weights do. With 2^-6, int8 weights in the last 40% of a chunk's rows passed: a median says
nothing about the other half."""
TOKEN_MARGIN = 1e-4
LOGPROB_SAFETY, LOGPROB_FLOOR, LOGPROB_CEILING = 10.0, 3e-4, 1e-3


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


def _at_least(floor: float, value: float) -> float:
    return value if not value < floor else floor  # a NaN stays one, and is refused


def to_json(measured: Measurement) -> str:
    """The text of a noise file: thresholds first, then the measurement.

    Raises:
        CalibrationError: see `thresholds`.
    """
    fields = dataclasses.asdict(thresholds(measured)) | {"measurement": dataclasses.asdict(measured)}
    return json.dumps(fields, indent=2) + "\n"


def read(path: Path) -> Measurement:
    """Read a noise file's measurement.

    Raises:
        CalibrationError: missing, not JSON, unknown or missing fields, numbers that are not finite, or thresholds
            that do not follow from the measurement.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        fields = raw.pop("measurement")
        for key in ("decode_batches", "prefill_batches"):
            fields[key] = tuple(fields[key])
        measured = Measurement(**fields)
        numbers = [v for v in fields.values() if isinstance(v, float)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CalibrationError(f"{path} is no noise measurement ({exc!r}); make one with `verifier calibrate`") from exc
    if not all(math.isfinite(v) and v >= 0 for v in numbers):
        raise CalibrationError(f"{path} holds a number that is negative or not finite; measure again")
    if raw != dataclasses.asdict(thresholds(measured)):
        raise CalibrationError(f"the thresholds in {path} do not follow from its measurement; measure again")
    return measured
