"""A whole small run for the node's tests: real coordinator, origin, relay, validators and nodes, each its process.

The learner is played by `advance`, which writes the next checkpoint: the same weights, slightly moved.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protocol.identity import load_or_create_identity
from protocol.manifest import Thresholds
from trainer.checkpoints import write_checkpoint
from trainer.init import make_run

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STRICT = Thresholds(3e-6, 4, 2.0**-14, 1e-4, 1e-4, 1, 1, 0.0, 0, 0.0, 0.0, "tests")
SMALL = {
    "leases.samples_per_task": 4,
    "leases.tasks_per_step": 4,
    "leases.tasks_per_lease": 2,
    "leases.probation_first_rollouts": 4,
    "leases.probation_accepted": 8,
    "leases.heartbeat_ms": 500,
    "coordinator.linger_s": 6.0,
    "coordinator.drain_s": 2.0,
}


class Member:
    """One `node join` process and what it told."""

    def __init__(self, run_dir: Path, name: str, role: str, *more: str, program: tuple[str, ...] = ()) -> None:
        self.home = run_dir / "nodes" / name
        self.log = run_dir / "logs" / f"{name}.jsonl"
        self.errors = run_dir / "logs" / f"{name}.stderr"
        self.said = run_dir / "logs" / f"{name}.stdout"
        command = [*(program or (str(BIN / "node"),)), "join", "--role", role, "--run", str(run_dir / "join.hw"),
                   "--home", str(self.home), "--name", name, "--log", str(self.log), *more]  # fmt: skip
        with self.errors.open("ab") as errors, self.said.open("ab") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=errors)

    def events(self, name: str) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        found = []
        for line in self.log.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that is just being written
                continue
        return [event for event in found if event["event"] == name]

    def stop(self, deadline_s: float = 10.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def children(self) -> list[tuple[int, str]]:
        """(pid, command line) of its direct children."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    found.append((int(path.name), (path / "cmdline").read_text().replace("\0", " ")))
            except OSError:
                continue
        return found


class NodeRun:
    """A run with validators and a relay admitted, and the processes started for it."""

    def __init__(
        self, run_dir: Path, steps: int = 50, relays: tuple[str, ...] = ("relay-1",), **overrides: Any
    ) -> None:
        self.dir = run_dir
        self.steps = steps
        self.processes: list[subprocess.Popen[bytes]] = []
        self.members: dict[str, Member] = {}

        def key(name: str) -> bytes:
            return load_or_create_identity(run_dir / "nodes" / name / "identity.pem").public

        self.run = make_run(
            run_dir,
            steps=steps,
            environment="word/reverse",
            validators=[key("validator-1"), key("validator-2")],
            relays=[key(name) for name in relays],
            overrides={**SMALL, **overrides},
            thresholds=STRICT,
        )
        self.step = -1

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.dir / "logs" / f"{command[0]}-{command[1]}.log").open("ab") as log:
            process = subprocess.Popen([str(BIN / command[0]), *command[1:]], stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def serve(self) -> subprocess.Popen[bytes]:
        return self.start("trainer", "serve", str(self.dir / "run.toml"))

    def publish(self) -> subprocess.Popen[bytes]:
        return self.start("shardcast", "publish", str(self.dir))

    def program(self, *command: str) -> subprocess.Popen[bytes]:
        """A program by file path, such as a dishonest engine."""
        process = subprocess.Popen([sys.executable, *command])
        self.processes.append(process)
        return process

    def join(self, name: str, role: str, *more: str, program: tuple[str, ...] = ()) -> Member:
        self.members[name] = member = Member(self.dir, name, role, *more, program=program)
        return member

    def advance(self) -> None:
        """Write the next step's checkpoint."""
        self.step += 1
        weights = load_file(self.dir / "model" / "model.safetensors")
        generator = torch.Generator().manual_seed(self.step)
        moved = {
            name: tensor + 1e-3 * self.step * torch.randn(tensor.shape, generator=generator)
            for name, tensor in weights.items()
        }
        write_checkpoint(self.dir / "checkpoints", epoch=0, step=self.step, weights=moved)

    def advance_until(self, what: str, condition: Callable[[], bool], policies: int = 12) -> None:
        """Write checkpoints until something holds that a draw decides: a policy's work may be drawn for others only."""
        for _ in range(policies):
            self.advance()
            end = time.monotonic() + 10.0
            while time.monotonic() < end:
                if condition():
                    return
                time.sleep(0.1)
        raise AssertionError(f"{policies} policies brought no: {what}\n{self.logs()}")

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def node(self, name: str) -> dict[str, Any]:
        """What the coordinator says of a node by name."""
        return next((node for node in self.status().get("nodes", []) if node["name"] == name), {})

    def wait(self, what: str, condition: Callable[[], bool], deadline_s: float = 120.0) -> None:
        """Wait until something holds; the failure names what was awaited and shows every log's end."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {deadline_s:.0f} s for: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        parts = []
        for path in sorted((self.dir / "logs").iterdir()):
            parts.append(f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
        return "\n".join(parts)

    def close(self) -> None:
        for process in [*(m.process for m in self.members.values()), *self.processes]:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + 8
        for process in [*(m.process for m in self.members.values()), *self.processes]:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def kill_hard(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
