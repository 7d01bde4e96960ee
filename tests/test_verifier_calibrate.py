"""Calibration: the rule from noise to thresholds, the checked-in files, and the command against a real engine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from protocol import codec
from protocol.manifest import Thresholds
from verifier.cli import main
from verifier.errors import CalibrationError
from verifier.thresholds import Measurement, read, thresholds, to_json

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


@pytest.mark.parametrize("path", sorted((ROOT / "verifier" / "data").glob("noise-*.json")), ids=lambda p: p.stem)
def test_the_shipped_thresholds_follow_from_their_measurement(path: Path) -> None:
    measured = read(path)
    limits = thresholds(measured)
    assert codec.decode(Thresholds, codec.encode(limits)) == limits
    assert measured.profile == "fp32" and measured.machine and "--rollouts" in measured.command
    assert measured.decode_batches == (1, 8, 32, 128)
    assert measured.rollouts >= (600 if path.stem == "noise-tiny" else 48)


def test_the_shipped_measurement_is_of_the_shipped_base() -> None:
    """When this fails, the base was made again: run the command in the file's `measurement` again too."""
    weights = (ROOT / "trainer" / "data" / "tiny" / "model.safetensors").read_bytes()
    assert read(ROOT / "verifier" / "data" / "noise-tiny.json").weights == blake3(weights).hexdigest()


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


def test_the_command_measures_a_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    socket, out = tmp_path / "engine.sock", tmp_path / "noise.json"
    engine = subprocess.Popen([sys.executable, "-m", "node.engine", "--socket", str(socket)], cwd=ROOT)
    try:
        model = str(ROOT / "trainer" / "data" / "tiny")
        code = main(["calibrate", model, "--engine-socket", str(socket), "--rollouts", "8", "--out", str(out)])
        assert code == 0
        measured = read(out)
        assert measured.rollouts == 32 and measured.tokens > 24 and "transformers" in measured.engine
        assert measured.proof_median < 1e-6 and measured.proof_outliers == 0 and measured.token_margin < 2e-5
        assert "threshold" in capsys.readouterr().out
    finally:
        os.kill(engine.pid, signal.SIGTERM)
        engine.wait(20)


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
