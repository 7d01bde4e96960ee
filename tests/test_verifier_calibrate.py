"""Calibration: the rule from noise to thresholds, the checked-in files, and the command against a real engine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from protocol import codec
from protocol.manifest import Bf16Thresholds
from tests.judge_rig import random_policy
from tests.moe_rig import moe_model, save_policy
from verifier.calibrate import summary
from verifier.cli import main
from verifier.errors import CalibrationError
from verifier.thresholds import (
    SAFETY,
    STALE_SEEN,
    Bf16Measurement,
    Measurement,
    bf16_thresholds,
    blind_to,
    read,
    route_thresholds_of,
    thresholds,
    thresholds_of_bf16_run,
    to_json,
)

ROOT = Path(__file__).parent.parent
MEASURED = Measurement(
    "verifier calibrate",
    "m",
    "00",
    "word",
    "e",
    "machine",
    "fp32",
    (1,),
    (1,),
    200,
    1000,
    200,
    3e-7,
    0,
    0.0,
    0,
    5e-6,
    0,
    2,
    9,
)


BF16 = Bf16Measurement(
    command="verifier calibrate", model="m", weights="00", environment="word", engine="e", machine="machine",
    profile="bf16", decode_batches=(1,), prefill_batches=(1,), contexts=(0, 512), attention=("sdpa",), threads=(1,),
    rollouts=300, tokens=1000, chunks=300, shortest=2, longest=200, exponents=7, chunk_mantissa=1.7,
    rollout_mantissa=1.6, token_margin=0.4, margin_mean=0.004, logprob=0.2, logprob_mean=0.005, tokens_not_first=9,
    mantissa_mean=1.2, margin_sum_mean=0.3, short_chunks=250, short_exponents=8, short_mantissa=1.9,
)  # fmt: skip


def test_thresholds_stay_above_five_times_the_noise_and_below_the_ceiling() -> None:
    assert thresholds(MEASURED).proof_median == 3e-6
    assert thresholds(dataclasses.replace(MEASURED, proof_median=1e-6)).proof_median == pytest.approx(5e-6)
    assert thresholds(MEASURED).logprob == 3e-4
    assert thresholds(dataclasses.replace(MEASURED, logprob=5e-5)).logprob == pytest.approx(5e-4)
    for field, value in (
        ("proof_median", 2.1e-6),
        ("proof_median", float("inf")),
        ("proof_median", float("nan")),
        ("proof_outliers", 5),
        ("token_margin", 2.1e-5),
        ("logprob", 1.1e-4),
    ):
        with pytest.raises(CalibrationError, match="too high"):
            thresholds(dataclasses.replace(MEASURED, **{field: value}))


def test_a_bound_that_no_longer_shows_one_step_old_weights_is_said() -> None:
    """All 64 chunks of weights one step old that were measured lie above 4.5e-6; a profile may go up to 1e-5."""
    assert blind_to(MEASURED) == blind_to(BF16) == []
    assert blind_to(dataclasses.replace(MEASURED, proof_median=STALE_SEEN / SAFETY)) == []
    loud = dataclasses.replace(MEASURED, proof_median=1.2e-6)
    (text,) = blind_to(loud)
    assert "bound of 6e-06" in text and "one step old" in text
    assert text in summary(loud, Path("noise.json")) and text not in summary(MEASURED, Path("noise.json"))


@pytest.mark.parametrize(
    ("field", "bound", "quiet", "lowest", "loud", "raised", "too_loud"),
    [
        ("exponents", "chunk_exponents", 8, 16, 12, 24, 17),
        ("chunk_mantissa", "chunk_mantissa", 2.0, 4.0, 4.0, 8.0, 5.1),
        ("short_exponents", "short_exponents", 8, 16, 12, 24, 17),
        ("short_mantissa", "short_mantissa", 2.0, 4.0, 4.0, 8.0, 8.1),
        ("rollout_mantissa", "rollout_mantissa", 1.6, 2.5, 2.0, 3.0, 2.7),
        ("token_margin", "token_margin", 0.5, 1.5, 1.0, 3.0, 1.4),
        ("margin_mean", "margin_mean", 0.006, 0.02, 0.01, 0.03, 0.021),
        ("logprob", "logprob", 0.25, 0.75, 0.4, 1.2, 1.01),
        ("logprob_mean", "logprob_mean", 0.006, 0.02, 0.02, 0.06, 0.034),
    ],
)
def test_bf16_thresholds_rise_with_the_noise_up_to_a_ceiling(
    field: str, bound: str, quiet: float, lowest: float, loud: float, raised: float, too_loud: float
) -> None:
    def of(value: float) -> Bf16Thresholds:
        return bf16_thresholds(dataclasses.replace(BF16, **{field: value}))

    assert getattr(of(quiet), bound) == lowest
    assert getattr(of(loud), bound) == pytest.approx(raised)
    for value in (too_loud, float("inf"), float("nan")):
        with pytest.raises(CalibrationError, match="too high"):
            of(value)
    others = {name for name in Bf16Thresholds.__dataclass_fields__ if not name.startswith("measured") and name != bound}
    assert all(getattr(of(loud), name) == getattr(bf16_thresholds(BF16), name) for name in others)


def test_where_answers_end_was_measured_or_the_ceilings_hold() -> None:
    never = bf16_thresholds(dataclasses.replace(BF16, short_chunks=0, short_exponents=0, short_mantissa=0.0))
    assert (never.short_exponents, never.short_mantissa) == (32, 16.0)
    assert never.chunk_bounds(32) == (16, 4.0) and never.chunk_bounds(31) == (32, 16.0)


def test_a_bf16_measurement_says_how_much_it_can_promise() -> None:
    limits = bf16_thresholds(BF16)
    assert limits.false_rejects == pytest.approx(0.01) and limits.measured_rollouts == 300
    assert bf16_thresholds(dataclasses.replace(BF16, rollouts=2)).false_rejects == 1.0
    with pytest.raises(CalibrationError, match="without rollouts"):
        bf16_thresholds(dataclasses.replace(BF16, rollouts=0))
    assert codec.decode(Bf16Thresholds, codec.encode(limits)) == limits


def test_what_a_bf16_run_writes_where_fp32_bounds_stand_lets_nothing_pass() -> None:
    held = thresholds_of_bf16_run("machine")
    assert (held.proof_median, held.proof_outliers, held.proof_gate, held.token_margin) == (0.0, 0, 0.0, 0.0)
    assert held.logprob == 3e-4, "a verdict's details repeat what was claimed"


@pytest.mark.parametrize("path", sorted((ROOT / "verifier" / "data").glob("noise-*.json")), ids=lambda p: p.stem)
def test_the_shipped_thresholds_follow_from_their_measurement(path: Path) -> None:
    measured = read(path)
    bf16 = path.stem.endswith("-bf16")
    limits = bf16_thresholds(measured) if isinstance(measured, Bf16Measurement) else thresholds(measured)
    assert codec.decode(type(limits), codec.encode(limits)) == limits
    assert measured.profile == ("bf16" if bf16 else "fp32") and measured.machine and "--rollouts" in measured.command
    assert set(measured.decode_batches) >= ({1, 8} if bf16 else {1, 8, 32, 128})
    assert measured.rollouts >= (600 if path.stem.startswith("noise-tiny") else 48)


def test_the_shipped_measurement_is_of_the_shipped_base() -> None:
    """When this fails, the base was made again: run the command in the file's `measurement` again too."""
    weights = (ROOT / "trainer" / "data" / "tiny" / "model.safetensors").read_bytes()
    for name in ("noise-tiny.json", "noise-tiny-bf16.json"):
        assert read(ROOT / "verifier" / "data" / name).weights == blake3(weights).hexdigest()


def test_a_noise_file_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    path.write_text(to_json(MEASURED))
    assert read(path) == MEASURED
    whole = json.loads(path.read_text())
    for change in (
        {"proof_median": 1e-5},
        {"token_margin": 1.0},
        {"extra": 1},
        {"measurement": None},
        {"measurement": whole["measurement"] | {"logprob": -1.0}},
        {"measurement": whole["measurement"] | {"unknown": 1}},
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(CalibrationError, match=r"noise\.json"):
            read(path)
    for text in ("", "[]", "{}", "[" * 9999):
        path.write_text(text)
        with pytest.raises(CalibrationError, match=r"noise\.json"):
            read(path)
    with pytest.raises(CalibrationError, match="missing"):
        read(tmp_path / "missing.json")


MODEL = str(ROOT / "trainer" / "data" / "tiny")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Real engines by what they compute in and with; their sockets."""
    folder = tmp_path_factory.mktemp("engines")
    options = {"fp32": [], "bf16": ["--profile", "bf16"], "eager": ["--profile", "bf16", "--attention", "eager"]}
    sockets = {name: str(folder / name) for name in options}
    running = [
        subprocess.Popen([sys.executable, "-m", "node.engine", "--socket", sockets[name], *extra], cwd=ROOT)
        for name, extra in options.items()
    ]
    try:
        yield sockets
    finally:
        for engine in running:
            os.kill(engine.pid, signal.SIGTERM)
        for engine in running:
            engine.wait(20)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines import torch at the same time here."""
    monkeypatch.setattr("verifier.calibrate._CONNECT_S", 240.0)


@pytest.mark.usefixtures("patience")
def test_the_command_measures_a_real_engine(
    engines: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "noise.json"
    assert main(["calibrate", MODEL, "--engine-socket", engines["fp32"], "--rollouts", "8", "--out", str(out)]) == 0
    measured = read(out)
    assert isinstance(measured, Measurement)
    assert measured.rollouts == 32 and measured.tokens > 24 and "transformers" in measured.engine
    assert measured.proof_median < 1e-6 and measured.proof_outliers == 0 and measured.token_margin < 2e-5
    assert measured.attention == ("sdpa", "eager") and measured.threads == (1, 2) and measured.contexts == (0,)
    said = capsys.readouterr().out
    assert "threshold" in said and "at most 9.38% are" in said


@pytest.mark.usefixtures("patience")
def test_bf16_engines_of_two_kernels_are_measured_behind_two_lengths_of_prompt(
    engines: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "noise.json"
    options = ["--rollouts", "2", "--batches", "1,2", "--threads", "1", "--attention", "sdpa", "--out", str(out)]
    sockets = {name: f"--engine-socket={socket}" for name, socket in engines.items()}
    assert main(["calibrate", MODEL, sockets["fp32"], sockets["bf16"], *options]) == 2
    assert "different profiles" in capsys.readouterr().err and not out.exists()
    both = ["calibrate", MODEL, sockets["bf16"], sockets["eager"], *options]
    words = [*both, "--contexts", "0,20", "--tokens", "2,9"]
    monkeypatch.setattr(sys, "argv", ["verifier", *words])
    assert main(words) == 0
    measured = read(out)
    assert isinstance(measured, Bf16Measurement)
    assert measured.rollouts == 2 * 2 * 2 * 2 * 2 and (measured.shortest, measured.longest) == (2, 9)
    assert measured.chunks == measured.short_chunks == 32
    assert "eager attention" in measured.engine and measured.contexts == (0, 20)
    assert 0.5 < measured.mantissa_mean < measured.short_mantissa < 5, "answers of 2 tokens are the loud ones"
    assert (measured.exponents, measured.chunk_mantissa, measured.rollout_mantissa) == (0, 0.0, 0.0), (
        "no chunk is whole"
    )
    assert 0 < measured.mismatch_k3_mean < measured.logprob**2 and 0.3 < measured.lean_above_mean < 1.7
    assert 0 < measured.lean_deviation <= 1
    limits = bf16_thresholds(measured)
    assert limits.short_mantissa == max(4.0, 2 * measured.short_mantissa) and limits.false_rejects == 3 / 32
    assert measured.command.startswith("verifier calibrate tiny --engine-socket=bf16 "), "the file is published"
    assert measured.command.endswith("--out noise.json --contexts 0,20 --tokens 2,9")


@pytest.mark.usefixtures("patience")
def test_whole_chunks_and_those_in_which_an_answer_ends_are_told_apart(engines: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "noise.json"
    options = ["--rollouts", "2", "--batches", "2", "--threads", "1", "--attention", "sdpa", "--out", str(out)]
    random_policy(tmp_path / "model", 1)
    model = str(tmp_path / "model")
    assert main(["calibrate", model, f"--engine-socket={engines['bf16']}", *options, "--tokens", "40"]) == 0
    measured = read(out)
    assert isinstance(measured, Bf16Measurement)
    assert measured.chunks == 4 and measured.short_chunks == 2
    assert 0 < measured.chunk_mantissa != measured.short_mantissa > 0, "the second has 8 rows"


@pytest.mark.usefixtures("patience")
def test_an_engine_of_a_mixture_of_experts_is_measured_with_its_routes(
    engines: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = save_policy(moe_model("glm4", 3, num_hidden_layers=2), tmp_path / "glm4"), tmp_path / "noise.json"
    options = ["--rollouts", "4", "--batches", "4", "--threads", "1", "--tokens", "12", "--out", str(out)]
    assert main(["calibrate", str(model), f"--engine-socket={engines['fp32']}", *options]) == 0
    measured = read(out)
    assert isinstance(measured, Measurement)
    assert measured.route_choices > 4 * 12 and 0 < measured.route_scores < 1e-5
    found = route_thresholds_of(measured)
    assert found is not None and found.margin >= 2e-5 and found.measured_choices == measured.route_choices
    assert 0 < measured.route_scores_mean < measured.route_scores and 0 < measured.route_level < 0.1
    assert found.not_first == 8 and 0 < found.not_first_rate < 1e-3
    said = capsys.readouterr().out
    assert "shortfall of a choice of experts" in said and "share of choices turned, beyond 8" in said
    assert json.loads(out.read_text())["routes"] == dataclasses.asdict(found)
    edited = json.loads(out.read_text())
    edited["routes"]["margin"] *= 10
    out.write_text(json.dumps(edited))
    with pytest.raises(CalibrationError, match="do not follow"):
        read(out)
    assert main(["calibrate", str(model), f"--engine-socket={engines['bf16']}", *options]) == 2
    assert "calibrated in fp32 only" in capsys.readouterr().err


@pytest.mark.usefixtures("patience")
def test_a_model_too_loud_for_bf16_is_refused(
    engines: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """140 tokens behind a prompt it never saw the like of: rounding alone lifts one of its tokens by more than 2."""
    out = tmp_path / "noise.json"
    options = ["--rollouts", "8", "--batches", "8", "--threads", "1", "--attention", "sdpa", "--out", str(out)]
    long = ["--contexts", "100", "--tokens", "140"]
    assert main(["calibrate", MODEL, f"--engine-socket={engines['bf16']}", *options, *long]) == 2
    assert "too high for the bf16 profile" in capsys.readouterr().err and not out.exists()


def test_no_engine_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verifier.calibrate._CONNECT_S", 0.2)
    model = str(ROOT / "trainer" / "data" / "tiny")
    out = tmp_path / "noise.json"
    code = main(["calibrate", model, "--engine-socket", str(tmp_path / "none"), "--rollouts", "1", "--out", str(out)])
    assert code != 0 and not out.exists()
    said = capsys.readouterr().err
    assert "start one that listens there" in said and "drop --engine-socket" not in said, "here it is required"
