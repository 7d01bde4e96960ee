"""One moment of a run, read from the files in its directory: what the live view and `trainer status` show.

    RUN/status.json                   the coordinator's word, once a second
    RUN/metrics.jsonl                 the learner's, a line a step
    RUN/published/server.json, stats.json    the origin's: its process, bytes it sent
    RUN/checkpoints/.learner.lock     the learner's process
    RUN/nodes/*/runs/*/relay/stats.json      relays that live in the run directory (a demo's)
    RUN/demo.json                     that a demo made this run, and which nodes were told to misbehave
    RUN/run.toml                      how many steps it is to have, until the coordinator says so

Reading is incremental: a long run costs no more a look than a short one. A file that is missing or half-written means
that the run has not got that far; nothing here raises for it.

Not covered: how it looks (`trainer.screen`), what the files mean for each process (`trainer.roster`).
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAFFIC_S = 2.0
"""How often byte counts are read: a dozen small files that nobody watches by the second."""


@dataclass(frozen=True)
class Process:
    """A process that whoever shows the picture started: only a demo knows these."""

    role: str
    """`coordinator`, `learner`, `origin`, `relay`, `validator`, `inference` or `engine`."""
    since: float
    """Unix time of its start."""
    exit_code: int | None = None
    """None while it runs."""


@dataclass
class Metrics:
    """The rows of a growing metrics.jsonl, each read once."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step -> its newest row: a learner that was killed repeats the steps it had not saved."""
    sft: dict[str, Any] | None = None
    _offset: int = 0
    _inode: int = 0

    def read(self, path: Path) -> None:
        """Take in what was appended since the last call; begin again when the file was replaced."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self.steps, self.sft, self._offset, self._inode = {}, None, 0, found.st_ino
                if found.st_size == self._offset:
                    return
                file.seek(self._offset)
                whole = file.read()
        except OSError:
            return
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            row = _object(line)
            if row.get("event") == "sft":
                self.sft = row
            elif row.get("event") == "step" and isinstance(row.get("step"), int):
                self.steps[row["step"]] = row

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.steps[step] for step in sorted(self.steps)]


@dataclass
class Picture:
    """What is known of a run at one moment."""

    title: str
    seconds: float = 0.0
    """Since the start."""
    steps: int = 0
    members: int = 0
    """Machines that are to join; 0 when unknown."""
    began: float = 0.0
    """Unix time at which `seconds` was 0; 0 when unknown: events then show the time of day."""
    status: Mapping[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """metrics.jsonl, one row a step, in order."""
    sft: dict[str, Any] | None = None
    """The newest row of stage one."""
    dishonest: frozenset[str] = frozenset()
    """Keys (hex) of nodes that were told to misbehave."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What the person who staged the run saw: seconds and a sentence."""
    processes: Mapping[str, Process] = field(default_factory=dict)
    """Name -> the process, where the shower started them. Names are those members join under."""
    kinds: frozenset[str] = frozenset()
    """Names of nodes that were told to misbehave: known before they have joined."""
    now: float = 0.0
    """Unix time of this picture."""
    learner_alive: bool | None = None
    """Whether the process in the learner's lock file runs here; None when there is none."""
    origin_alive: bool | None = None
    sent: dict[str, int] = field(default_factory=dict)
    """Name of the origin or of a relay -> bytes of weights it sent."""
    run_dir: str = ""
    """As a person types it, for the commands that go on with a run."""
    staged: bool = False
    """A demo made this run: one command starts all of it."""
    metrics: Metrics = field(default_factory=Metrics, repr=False)
    traffic_read: float = 0.0
    """Unix time at which byte counts and lock files were last read; 0 before the first look."""

    @property
    def step(self) -> int:
        """Steps the learner has done."""
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    @property
    def onward(self) -> str:
        """The command that brings the coordinator back: of a demo that nobody watches any more, all of it."""
        if self.staged and not self.processes and not self.learner_alive and not self.origin_alive:
            return f"trainer demo --resume {self.run_dir}"
        return f"trainer serve {self.run_dir}/run.toml"

    @property
    def reward(self) -> float | None:
        tail = [float(row["reward_mean"]) for row in self.rows[-10:] if row.get("reward_mean") is not None]
        return sum(tail) / len(tail) if tail else None

    @property
    def status_age(self) -> float | None:
        """Seconds since the coordinator last wrote; None when it never did."""
        written = self.status.get("time")
        return None if not written else max(0.0, self.now - float(written))

    @property
    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before there is one."""
        tail = self.rows[-21:]
        if len(tail) < 3 or not 0 < self.step < self.steps:
            return None
        first, last = (float(row.get("time") or 0.0) for row in (tail[0], tail[-1]))
        pace = (last - first) / (len(tail) - 1)
        return max(0.0, pace * (self.steps - self.step) - max(0.0, self.now - last - pace)) if pace > 0 else None


def take_picture(run_dir: Path, picture: Picture) -> Picture:
    """Refresh a picture from the run directory."""
    picture.now = time.time()
    picture.status = _read(run_dir / "status.json") or picture.status
    picture.metrics.read(run_dir / "metrics.jsonl")
    picture.rows, picture.sft = picture.metrics.rows, picture.metrics.sft
    picture.steps = picture.steps or int(picture.status.get("steps") or 0) or _steps(run_dir / "run.toml")
    if not picture.traffic_read:
        picture.staged = (run_dir / "demo.json").is_file()
    if not picture.kinds and not picture.traffic_read:
        kinds = _read(run_dir / "demo.json").get("kinds")
        picture.kinds = frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset()
    if picture.now - picture.traffic_read > TRAFFIC_S:
        picture.traffic_read = picture.now
        picture.sent = _traffic(run_dir)
        picture.learner_alive = _runs(_first_word(run_dir / "checkpoints" / ".learner.lock"), ("learn", "sft"))
        picture.origin_alive = _runs(str(_read(run_dir / "published" / "server.json").get("pid", "")), ("publish",))
    return picture


def _steps(path: Path) -> int:
    """How long a run is to be that nobody has served yet."""
    try:
        return int(tomllib.loads(path.read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _traffic(run_dir: Path) -> dict[str, int]:
    """Bytes sent by the origin and by relays whose home lies in the run directory."""
    found = {"origin": run_dir / "published" / "stats.json"}
    found |= {path.parents[3].name: path for path in run_dir.glob("nodes/*/runs/*/relay/stats.json")}
    return {name: int(_read(path).get("bytes_sent") or 0) for name, path in found.items()}


def _runs(pid: str, commands: tuple[str, ...]) -> bool | None:
    """Whether a process of this machine runs one of `commands`; None when no number was written down.

    The command line is looked at because a file may outlive its process and the number be another's by now.
    """
    if not pid.isdigit():
        return None
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(command.encode() in words for command in commands)


def _first_word(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return ""
    return words[0] if words else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(path.read_bytes())
    except OSError:
        return {}


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
