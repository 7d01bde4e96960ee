"""What a demo asks for grows with what was asked of it, and its refusal says what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

import protocol.preflight
from protocol.errors import UsageError
from protocol.manifest import Thresholds
from protocol.preflight import Room
from trainer import preflight
from trainer.cli import main
from trainer.init import make_run

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")


def leave(monkeypatch: pytest.MonkeyPatch, memory_mib: int, disk_mib: int) -> None:
    """Make this machine one with so much room."""
    monkeypatch.setattr(protocol.preflight, "memory", lambda root: Room(memory_mib, "this machine has"))
    monkeypatch.setattr(protocol.preflight, "disk", lambda path: Room(disk_mib, f"the disk of {path} has"))


def needed(monkeypatch: pytest.MonkeyPatch, *args: int, preset: str = "tiny") -> tuple[int, int]:
    """The least memory and disk with which such a demo starts."""
    found = []
    for rooms in (lambda mib: (mib, 1 << 40), lambda mib: (1 << 40, mib)):
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high) // 2
            leave(monkeypatch, *rooms(middle))
            try:
                preflight.demo(preset, *args, Path("/tmp"))
                high = middle
            except UsageError:
                low = middle + 1
        found.append(low)
    return found[0], found[1]


def test_more_nodes_and_steps_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = needed(monkeypatch, 3, 0, 4, 150)
    assert 2500 < memory < 4500 and 500 < disk < 2000, "about what such a demo was measured to take"
    assert needed(monkeypatch, 6, 0, 4, 150)[0] > memory
    assert needed(monkeypatch, 3, 0, 4, 300)[1] > disk
    many = needed(monkeypatch, 3, 12, 4, 300)
    assert many[0] == needed(monkeypatch, 3, 4, 4, 300)[0], "only so many are there at once"
    assert many[0] < 6144
    assert needed(monkeypatch, 3, 0, 4, 30, preset="smollm2")[0] > memory


def test_a_demo_that_would_not_fit_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(monkeypatch, 1000, 1 << 40)
    assert main(["demo", "--dir", str(tmp_path / "run"), "--nodes", "2"]) == 2
    assert "this demo needs" in (told := capsys.readouterr().err) and "this machine has 1000 free; close" in told
    leave(monkeypatch, 1 << 40, 10)
    assert main(["demo", "--dir", str(tmp_path / "run")]) == 2
    assert "10 free; make room there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_serve_learn_and_init_ask_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    config = str(tmp_path / "run" / "run.toml")
    leave(monkeypatch, 20, 1 << 40)
    assert main(["serve", config]) == 2 and "the coordinator needs" in capsys.readouterr().err
    assert main(["learn", config]) == 2 and "the learner needs" in capsys.readouterr().err
    leave(monkeypatch, 1 << 40, 3)
    assert main(["init", str(tmp_path / "new")]) == 2 and "a new run needs" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
