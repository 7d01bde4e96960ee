"""Every benchmark prints the same object and means the same by its exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import contract

ROOT = Path(__file__).resolve().parent.parent


def _run(monkeypatch: pytest.MonkeyPatch, goals: Sequence[contract.Goal] | Exception) -> int:
    def measure(_args: argparse.Namespace) -> Sequence[contract.Goal]:
        if isinstance(goals, Exception):
            raise goals
        return goals

    monkeypatch.setattr(sys, "argv", ["benchmark", "--json"])
    return contract.run(measure, "a benchmark")


def test_exit_codes_say_held_failed_and_could_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = contract.at_least("share", 0.6, 0.7, [0.7])
    bad = contract.at_least("share", 0.6, 0.5, [0.4, 0.6])
    assert _run(monkeypatch, [good]) == 0
    assert _run(monkeypatch, [good, bad]) == 1
    assert _run(monkeypatch, contract.CouldNotRunError("no demo; start it by hand")) == 2
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert set(first["goals"][0]) == {"goal", "target", "measured", "holds", "samples", "machine"}
    assert [goal["holds"] for goal in second["goals"]] == [True, False]
    assert second["goals"][1]["samples"] == [0.4, 0.6]
    assert "could not run: no demo" in err


_PROGRAMS = [p for p in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in p.read_text()]


@pytest.mark.parametrize("path", _PROGRAMS, ids=lambda path: path.stem)
def test_every_benchmark_runs_as_a_module_and_explains_itself(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{path.stem}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
