"""Every command block marked `quick` in the documents is typed as it stands, in the order a reader would.

    ```sh quick            each line runs and must end with 0; who only asks how things are may ask again
    ```sh quick terminal   each line runs in a terminal of its own until everything is over

The three quickstarts are one story: a run is made, machines are lent to it, somebody doubts it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STORY = ("quickstart-train.md", "quickstart-lend.md", "quickstart-doubt.md")
_BLOCK = re.compile(r"^```sh quick( terminal)?\n(.*?)^```", re.M | re.S)
_LINE_DEADLINE_S = 240
_ASKS = ("node status", "node receipts", "trainer status")
_ASK_AGAIN_S = 150.0
"""A node that was started a moment ago has nothing to tell yet: a reader looks again."""

_UNTIL_FINISHED = "--watch"
"""A line with this option waits for the run's end: it is typed last of its document, after machines were lent."""


def _lines(text: str) -> list[tuple[bool, str]]:
    """(in a terminal of its own, command line) of every quick block of one document."""
    return [(bool(match[1]), line) for match in _BLOCK.finditer(text) for line in match[2].splitlines() if line.strip()]


def test_every_quick_block_of_the_documents_is_typed_somewhere() -> None:
    marked = {path.name for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if _lines(path.read_text())}
    assert marked == {*STORY}


class Desk:
    """A home, a folder, and the terminals that were opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        self.environment = os.environ | {
            "HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.terminals: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def open_terminal(self, line: str) -> None:
        log = self.folder / f"terminal-{len(self.terminals)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.terminals.append((line, process, log))
        time.sleep(0.5)  # a person needs longer to type the next one

    def type(self, line: str) -> str:
        end = time.monotonic() + (_ASK_AGAIN_S if line.startswith(_ASKS) else 0.0)
        while True:
            done = subprocess.run(
                ["bash", "-c", line], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=_LINE_DEADLINE_S,
            )  # fmt: skip
            if done.returncode == 0 or time.monotonic() > end:
                break
            time.sleep(2.0)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"--- {line}\n{log.read_text(errors='replace')[-600:]}" for line, _, log in self.terminals)

    def close(self) -> list[str]:
        """Ctrl-C in every terminal. Returns the lines that did not end by themselves."""
        for _, process, _ in self.terminals:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        stuck = []
        for line, process, _ in self.terminals:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=15)
                stuck.append(line)
        return stuck


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_three_quickstarts_can_be_typed_as_they_stand(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    train, lend, doubt = (_lines((ROOT / "docs" / name).read_text()) for name in STORY)
    waits = next(i for i, (_, line) in enumerate(train) if _UNTIL_FINISHED in line)
    try:
        for terminal, line in [*train[:waits], *lend, *train[waits:], *doubt]:
            if terminal:
                desk.open_terminal(line)
            else:
                desk.type(line)
        for line, process, log in desk.terminals:
            words = log.read_text(errors="replace")
            assert process.poll() in (0, None), f"{line} ended with {process.returncode}\n{words[-2000:]}"
            assert "Traceback" not in words, f"{line}\n{words[-2000:]}"
    finally:
        stuck = desk.close()
    assert not stuck, f"Ctrl-C did not end: {stuck}"
