"""The processes of a demo on one machine: started, watched, measured and ended together.

Every child carries `HEADWATER_RUN=<run id>` in its environment; grandchildren inherit it. That mark, not a list of
pids, says what belongs to a run: a process that somebody restarts by hand with the printed command is ended with
the rest, and `leftovers` shows that nothing stays.

Not covered: restarting children. A demo shows what happens when one dies and prints the command that brings it back.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.files import write_atomic

RUN_MARK = "HEADWATER_RUN"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_GREW = 1.01
"""A peak missed by this factor is no news; a demo's memory is flat after its first steps."""


@dataclass
class Child:
    """One started process: what it is for, how it was started, and the process itself."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path
    role: str = ""
    """For whoever shows it: `coordinator`, `relay`, `engine`, ..."""
    since: float = field(default_factory=time.time)
    """Unix time of its start."""
    reported: bool = False

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()


def _die_with_parent() -> None:
    """Between fork and exec: the kernel ends the child when the supervisor is killed without warning."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Fleet:
    """The children of one run.

    Args:
        run: run id in hex; the value of `HEADWATER_RUN`.
        logs: directory for one log file a child and for `commands.txt`.
        environment: extra environment variables for every child.
    """

    def __init__(self, run: str, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.run = run
        self.logs = logs
        self.children: list[Child] = []
        self.peak_pss_mib = 0.0
        self._resident = 0
        self._marks = {RUN_MARK: run, **(environment or {})}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], role: str = "") -> Child:
        """Start one child in a session of its own, its output appended to `logs/<name>.log`."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self._marks},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, command, process, log, role)
        self.children.append(child)
        self._write_commands()
        return child

    def restart_command(self, child: Child) -> str:
        """One shell line that starts this child again exactly as it was."""
        marks = " ".join(f"{key}={shlex.quote(value)}" for key, value in self._marks.items())
        words = " ".join(shlex.quote(word) for word in child.command)
        return f"cd {shlex.quote(str(Path.cwd()))} && env {marks} {words} >> {shlex.quote(str(child.log))} 2>&1"

    def _write_commands(self) -> None:
        lines = [f"# {child.name}\n{self.restart_command(child)}\n" for child in self.children]
        write_atomic(self.logs / "commands.txt", "\n".join(lines).encode())

    def newly_ended(self) -> list[Child]:
        """Children that ended since the last call."""
        ended = [child for child in self.children if not child.reported and child.exit_code is not None]
        for child in ended:
            child.reported = True
        return ended

    def dismiss(self, name: str) -> None:
        """Ask a child to end because nobody needs it any more; its end is no news."""
        for child in self.children:
            if child.name == name:
                child.reported = True
                if child.exit_code is None:
                    _signal(child.process.pid, signal.SIGTERM)

    def sample_memory(self) -> float:
        """The peak of the proportional set size of all processes of the run together, MiB.

        The kernel walks every page of a process to tell it, 40 ms for a demo, so it is asked only when the resident
        sizes, which cost nothing, grew since it was asked last.
        """
        pids = marked(self.run)
        resident = sum(_resident_pages(pid) for pid in pids)
        if resident > _GREW * self._resident:
            self._resident = resident
            self.peak_pss_mib = max(self.peak_pss_mib, sum(_pss_kib(pid) for pid in pids) / 1024)
        return self.peak_pss_mib

    def stop(self, grace_s: float = 2.5) -> None:
        """End every process of the run: SIGTERM, then SIGKILL after `grace_s`. At most `grace_s` + 1 s."""
        for pid in marked(self.run):
            _signal(pid, signal.SIGTERM)
        self._await_end(grace_s)
        for pid in marked(self.run):
            _signal(pid, signal.SIGKILL)
        self._await_end(1.0)

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for child in self.children:
                child.process.poll()
            if not marked(self.run):
                return
            time.sleep(0.02)

    def leftovers(self) -> list[int]:
        """Pids that still carry this run's mark."""
        return marked(self.run)


def marked(run: str) -> list[int]:
    """Pids whose environment carries `HEADWATER_RUN=<run>`, zombies and this process left out."""
    needle = f"{RUN_MARK}={run}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and needle in _environment(pid)]


def _pids() -> Iterable[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or belongs to another user: not one of ours
        return []


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # it ended between the scan and the read
        return 0


def _pss_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended between the scan and the read
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
