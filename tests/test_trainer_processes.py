"""The demo's supervisor: its mark, its memory figure, and that nothing stays behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainer.processes import Fleet, marked

_SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
_STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)",
]


def _await(condition: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_stop_ends_children_grandchildren_and_the_stubborn(tmp_path: Path) -> None:
    fleet = Fleet("ab" * 32, tmp_path / "logs")
    fleet.start("one", _SLEEP)
    stubborn = fleet.start("stubborn", _STUBBORN)
    _await(lambda: stubborn.log.read_bytes() == b"up\n" and len(marked(fleet.run)) == 3)
    fleet.stop(grace_s=0.5)
    assert fleet.leftovers() == []


def test_printed_command_starts_the_same_child_again_inside_the_run(tmp_path: Path) -> None:
    import subprocess

    fleet = Fleet("cd" * 32, tmp_path / "logs")
    program = [sys.executable, "-c", "import os; print(os.environ['HEADWATER_RUN'], 'with space', flush=True)"]
    child = fleet.start("role", program)
    child.process.wait(timeout=30)
    text = (tmp_path / "logs" / "commands.txt").read_text()
    assert text.startswith("# role\n")
    subprocess.run(["sh", "-c", text.splitlines()[1]], check=True, timeout=30)
    assert child.log.read_text() == f"{'cd' * 32} with space\n" * 2
    assert [c.name for c in fleet.newly_ended()] == ["role"]
    assert fleet.newly_ended() == []


def test_memory_is_the_sum_over_the_run_s_processes(tmp_path: Path) -> None:
    fleet = Fleet("ef" * 32, tmp_path / "logs")
    fleet.start(
        "big",
        [
            sys.executable,
            "-c",
            "b = bytearray(64 << 20); b[::4096] = b'x' * len(b[::4096]);"
            "print('up', flush=True); import time; time.sleep(60)",
        ],
    )
    try:
        _await(lambda: (tmp_path / "logs" / "big.log").read_bytes() == b"up\n")
        assert 64 <= fleet.sample_memory() <= 160
        assert fleet.peak_pss_mib >= 64
    finally:
        fleet.stop(grace_s=0.5)
