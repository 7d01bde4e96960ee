"""One `trainer demo` as its own process, for the tests that kill, freeze and interrupt it.

    Demo      starts it, finds its processes, restarts them by the printed commands
    freeze    stops both validators for a while, and looks at what goes on meanwhile
    Loadable  looks, again and again, whether anything that a loader would take is not whole

Not covered: what must hold afterwards (the tests say).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.status import read_status
from protocol.errors import HeadwaterError
from protocol.manifest import Run, open_manifest
from protocol.state import RunState
from shardcast.heads import parse_publication_name
from shardcast.layout import root_of_safetensors
from shardcast.store import read_publication, verify_shards
from trainer.checkpoints import Checkpoint, CheckpointError, _open, load_state, load_tensors
from trainer.processes import marked

BIN = Path(sys.executable).parent


class Demo:
    """A demo that runs beside the test. Deadlines are generous: how long something takes is the machine's business."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.dir = run_dir
        self.restarted: list[subprocess.Popen[bytes]] = []
        self._run: Run | None = None
        self.process = subprocess.Popen(
            [str(BIN / "trainer"), "demo", "--json", "--dir", str(run_dir), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        if self._run is None:
            self._run = open_manifest((self.dir / "manifest.hw").read_bytes())
        return self._run

    def status(self) -> dict[str, Any]:
        try:
            value = json.loads((self.dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def step(self) -> int:
        return int(self.status().get("step", 0))

    def finished(self) -> bool:
        return self.status().get("phase") == "finished"

    def node(self, name: str) -> dict[str, Any]:
        """What a node says of itself; empty when it says nothing yet."""
        try:
            return read_status(self.dir / "nodes" / name)
        except (HeadwaterError, OSError):
            return {}

    def pids(self, *words: str) -> list[int]:
        """Processes of the run whose command line has all these words."""
        found = []
        for pid in marked(self.run.id.hex()):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:  # it has just ended
                continue
            if all(word in line for word in words):
                found.append(pid)
        return found

    def main_pid(self, name: str, otherwise: int | None = None) -> int:
        """The process that `logs/commands.txt` starts as `name`; `otherwise`, or a failure, when there is not one."""
        own = {"coordinator": ("serve", "run.toml"), "learner": ("learn", "run.toml"), "origin": ("publish",)}
        found = self.pids(*own.get(name, ("join", f"{self.dir}/nodes/{name} ")))
        if len(found) != 1 and otherwise is not None:
            return otherwise
        assert len(found) == 1, f"{name} is {found}"
        return found[0]

    def child_pid(self, of: str, word: str, otherwise: int | None = None) -> int:
        """A process that a node started: its engine or its libp2p host; `otherwise` as above."""
        parent = self.main_pid(of, otherwise)
        for pid in self.pids(word):
            try:
                if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    return pid
            except OSError:  # it has just ended
                continue
        assert otherwise is not None, f"{of} has no {word}"
        return otherwise

    def log(self, name: str) -> str:
        return (self.dir / "logs" / f"{name}.log").read_text(errors="replace")[-3000:]

    def await_(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:.0f} s in vain for {what}, at step {self.step()}"
            time.sleep(0.1)

    # --- acting -----------------------------------------------------------------------------------------------------

    def commands(self) -> dict[str, str]:
        """Name -> the line of `logs/commands.txt` that starts it again."""
        lines = (self.dir / "logs" / "commands.txt").read_text().splitlines()
        return {line[2:]: lines[i + 1] for i, line in enumerate(lines) if line.startswith("# ")}

    def start_again(self, name: str) -> subprocess.Popen[bytes]:
        """What a person does: copy the line into a shell."""
        process = subprocess.Popen(
            ["sh", "-c", self.commands()[name]], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.restarted.append(process)
        return process

    def end(self, seconds: float) -> dict[str, Any]:
        """Wait until it ends by itself; its summary."""
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {err}"
        summary = json.loads(out)
        assert isinstance(summary, dict)
        return summary

    def close(self) -> None:
        """End everything that may still be there."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if (self.dir / "manifest.hw").exists():
            for pid in marked(self.run.id.hex()):
                for number in (signal.SIGCONT, signal.SIGKILL):
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        break
        for process in self.restarted:
            process.wait(10)


def kill(pid: int) -> None:
    """kill -9, and wait until it is gone or its parent's to bury."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return
        except OSError:
            return
        time.sleep(0.01)


@dataclass
class Frozen:
    """What was seen while both validators were stopped."""

    seconds: float
    begin_ms: int
    end_ms: int
    steps: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    """Of all processes of the run together."""
    states: set[str] = field(default_factory=set)
    """Every state that an inference node was seen in."""

    def problems(self, state: RunState) -> list[str]:
        """What should not have been, told from the samples and from the run's ledger afterwards."""
        assert state.manifest is not None
        wrong, half = [], len(self.batches) // 2
        bound = state.manifest.leases.max_staleness + 1
        if self.batches[-1] - self.batches[0] > bound:
            wrong.append(f"{self.batches[-1] - self.batches[0]} batches closed without validators, {bound} at most")
        if self.batches[-1] != self.batches[half] or self.steps[-1] != self.steps[half]:
            wrong.append(f"learning did not pause: batches {self.batches}, steps {self.steps}")
        middle_ms = (self.begin_ms + self.end_ms) // 2
        late = [lease for lease in state.leases.values() if middle_ms < lease.time < self.end_ms]
        if late:
            wrong.append(f"{len(late)} leases were given out although nothing could be checked")
        if self.memory_mib[-1] - self.memory_mib[half] > 48:
            wrong.append(f"memory grew: {self.memory_mib[half]:.0f} MiB to {self.memory_mib[-1]:.0f} MiB")
        if not self.states <= {"active", "probation"}:
            wrong.append(f"honest nodes were {sorted(self.states)}")
        return wrong


def freeze(demo: Demo, seconds: float) -> Frozen:
    """SIGSTOP both validators, look on, and let them go on."""
    pids = [demo.main_pid(name) for name in ("validator-1", "validator-2")]
    frozen = Frozen(seconds, time.time_ns() // 1_000_000, 0)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = demo.status()
            if status:
                frozen.steps.append(int(status["step"]))
                frozen.batches.append(int(status["batches"]))
                frozen.memory_mib.append(_memory_mib(demo.run.id.hex()))
                frozen.states |= {node["state"] for node in status["nodes"] if node["role"] == "inference"}
            time.sleep(0.5)
    finally:
        frozen.end_ms = time.time_ns() // 1_000_000
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    return frozen


def _memory_mib(run: str) -> float:
    pages = 0
    for pid in marked(run):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:  # it has just ended
            continue
    return pages * resource.getpagesize() / 2**20


class Loadable:
    """Looks at whatever a loader would take, while it is being written, and verifies it in full.

    checkpoints/   what the learner's `find_checkpoints` accepts: every file against its record
    published/     what has a `publication.hw`: every shard against the signed record
    policies/      a folder under its own name, in every node's home: the file's root against the published one
    """

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        self.problems: list[str] = []
        self.looked = 0
        self.held = 0
        self._known: set[tuple[str, int, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._forever, name="loadable")

    def __enter__(self) -> Loadable:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _forever(self) -> None:
        while not self._stop.wait(0.5):
            self.look()

    def look(self) -> None:
        """One look at everything that is new since the last."""
        self.looked += 1
        for found in sorted((self.dir / "checkpoints").glob("step-*")):
            self._one(found, found / "checkpoint.json", self._checkpoint)
        for found in sorted((self.dir / "published").glob("e*")):
            self._one(found, found / "publication.hw", self._publication)
        for found in sorted((self.dir / "nodes").glob("*/runs/*/weights/policies/e*")):
            self._one(found, found / "model.safetensors", self._policy)

    def _one(self, folder: Path, sign: Path, check: Callable[[Path], str]) -> None:
        try:
            seen = sign.stat()
        except OSError:  # not yet, or no more
            return
        mark = (str(folder), seen.st_mtime_ns, seen.st_ino)
        if mark in self._known:
            return
        try:
            problem = check(folder)
        except (HeadwaterError, OSError, ValueError) as exc:
            # Pruned while it was read: then it is gone now, or its sign is. Anything else is half a file.
            time.sleep(0.2)
            if not sign.exists():
                return
            problem = f"{type(exc).__name__}: {exc}"
        self._known.add(mark)
        self.held += 1
        if problem and sign.exists():
            self.problems.append(f"{folder.relative_to(self.dir)}: {problem}")

    def _checkpoint(self, folder: Path) -> str:
        try:
            checkpoint: Checkpoint = _open(folder)  # `find_checkpoints` would remove what a kill left
        except CheckpointError:
            return ""  # not accepted: nobody would load it
        for name in checkpoint.files:
            if name.endswith(".safetensors"):
                load_tensors(checkpoint, name)
            else:
                load_state(checkpoint)
        return ""

    def _publication(self, folder: Path) -> str:
        publication = read_publication(folder, open_manifest((self.dir / "manifest.hw").read_bytes()))
        return f"shards {wrong} do not hold" if (wrong := list(verify_shards(folder, publication))) else ""

    def _policy(self, folder: Path) -> str:
        key = parse_publication_name(folder.name)
        assert key is not None
        published = read_publication(
            self.dir / "published" / folder.name, open_manifest((self.dir / "manifest.hw").read_bytes())
        )
        assert published.manifest is not None
        root = root_of_safetensors(folder / "model.safetensors")
        return "" if root == published.manifest.root else "not the published weights"
