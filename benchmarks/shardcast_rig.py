"""A run of random weights, the processes that carry them, and what those cost: for `benchmarks.shardcast`.

Each process is `benchmarks.data.shardcast_role` or a peer; it prints one JSON object a line, with times of this
machine's monotonic clock, and is ended by us. CPU is user and system time of a process, its children and those it
waited for, in ticks of 10 ms.

Not covered: what is measured (`benchmarks.shardcast`), peers (`benchmarks.shardcast_peers`), links
(`benchmarks.shardcast_links`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from benchmarks.contract import CouldNotRunError
from protocol.envelope import seal
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.limits import MIB
from protocol.manifest import (
    EnvironmentSpec,
    LeasePolicy,
    ModelFile,
    ModelSpec,
    RunManifest,
    SamplingSpec,
    Thresholds,
    run_id_of,
)
from shardcast.layout import layout_hash, make_layout, safetensors_header

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "model.safetensors"
START_S = 60.0
"""Longest a process may take until it is ready: imports on a busy machine."""

_COLUMNS = 1024


@dataclass(frozen=True)
class Weights:
    """One checkpoint of random values, in canonical order.

    Attributes:
        file: safetensors.
        digest: BLAKE3 of the file.
    """

    file: Path
    mib: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return self.mib * MIB


def make_weights(folder: Path, mib: int) -> Weights:
    """Write `mib` MiB of random values; the same ones each time."""
    folder.mkdir(parents=True, exist_ok=True)
    path, hasher, rng = folder / WEIGHTS, blake3(), np.random.default_rng(mib)
    with path.open("wb") as out:
        for piece in [safetensors_header(_layout(mib)), *(rng.bytes(MIB) for _ in range(mib))]:
            out.write(piece)
            hasher.update(piece)
    return Weights(path, mib, hasher.digest())


def _layout(mib: int) -> Any:
    return make_layout({"embed.weight": ("F32", (mib * MIB // 4 // _COLUMNS, _COLUMNS))})


def make_run(folder: Path, weights: Weights) -> Path:
    """A run directory whose learner made nothing yet; returns it."""
    root, origin, coordinator = Identity.generate(), Identity.generate(), Identity.generate()
    for name in ("model", "checkpoints", "keys"):
        (folder / name).mkdir(parents=True)
    config = b'{"model_type": "qwen3"}'
    (folder / "model" / "config.json").write_bytes(config)
    pem = origin.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomic(folder / "keys" / "origin.pem", pem, mode=0o600)
    manifest = RunManifest(
        name="benchmark",
        created=time.time_ns() // 1_000_000,
        root=root.public,
        coordinator=coordinator.public,
        origin=origin.public,
        coordinator_transport=Identity.generate().public,
        control=(),
        ingress=(),
        profile="fp32",
        model=ModelSpec(
            "Qwen3ForCausalLM",
            "float32",
            layout_hash(_layout(weights.mib)),
            64,
            (ModelFile("config.json", len(config), blake3(config).digest()),),
        ),
        environments=(EnvironmentSpec("word", "1", bytes(32), bytes(32), "{}", "pure"),),
        sampling=SamplingSpec(1.0, 8, (0,)),
        thresholds=Thresholds(1e-5, 1, 1e-4, 1e-4, 1e-4, 1, 1, 0.0, 0, 0.0, 0.0, "benchmark"),
        leases=LeasePolicy(4, 4, 1, 2, 4, 32, 60_000, 5_000, 0.1),
        steps=100,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody",
        privacy="none",
    )
    envelope = seal(
        root, "manifest", manifest, run=run_id_of(manifest), sequence=1, issued_at=manifest.created, lifetime_ms=10**12
    )
    (folder / "manifest.hw").write_bytes(envelope.raw)
    return folder


def publish_checkpoint(run: Path, weights: Weights) -> float:
    """Hand the weights over as step 0, as a learner does; returns when, in monotonic seconds."""
    folder = run / "checkpoints" / "step-00000000"
    folder.mkdir()
    os.link(weights.file, folder / WEIGHTS)
    entry = {"size": weights.file.stat().st_size, "blake3": weights.digest.hex()}
    table = {"epoch": 0, "step": 0, "files": {WEIGHTS: entry}}
    aside = folder / ".checkpoint.part"
    aside.write_text(json.dumps(table))
    now = time.monotonic()
    aside.replace(folder / "checkpoint.json")
    return now


class Process:
    """A process that tells what happens in lines of JSON."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        env: dict[str, str] | None = None,
        log: Path | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.name = name
        self.events: dict[str, dict[str, Any]] = {}
        """The last line of each kind."""
        self._log = (log or Path(os.devnull)).open("wb")
        self._log_path = log
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.popen = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env={**_environment(), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._cpu_s = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for raw in self.popen.stdout:
            try:
                table = json.loads(raw)
            except ValueError:
                continue
            if isinstance(table, dict) and "event" in table:
                self._lines.put(table)
        self._lines.put(None)

    def poll(self) -> None:
        """Take in what it said so far."""
        while not self._lines.empty():
            self._take(self._lines.get_nowait())

    def _take(self, table: dict[str, Any] | None) -> None:
        if table is None:
            raise CouldNotRunError(f"{self.name} ended{self._last_words()}")
        self.events[str(table["event"])] = table

    def wait(self, event: str, deadline_s: float) -> dict[str, Any]:
        """The named event, once it came.

        Raises:
            CouldNotRunError: it didn't, or the process ended.
        """
        end = time.monotonic() + deadline_s
        while event not in self.events:
            try:
                self._take(self._lines.get(timeout=max(0.01, end - time.monotonic())))
            except queue.Empty as exc:
                if time.monotonic() >= end:
                    raise CouldNotRunError(
                        f"{self.name}: no {event!r} within {deadline_s:g} s{self._last_words()}"
                    ) from exc
        return self.events[event]

    def say(self, line: str = "") -> None:
        """A line on its standard input."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def _last_words(self) -> str:
        self._log.flush()
        text = self._log_path.read_text(errors="replace").strip()[-600:] if self._log_path else ""
        return f": {text}" if text else ""

    def cpu_s(self) -> float:
        """CPU seconds so far: its own, its children's, and those of children it waited for. What was seen last, once
        it is gone."""
        self._cpu_s = max(self._cpu_s, sum(_cpu_s(pid) for pid in family(self.popen.pid)))
        return self._cpu_s

    def anonymous_bytes(self) -> int:
        """Anonymous memory now (`smaps_rollup`): not files that it maps."""
        try:
            text = Path(f"/proc/{self.popen.pid}/smaps_rollup").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:")), 0)

    def end(self) -> None:
        """Kill it and what it started; parents first, who might start a child anew."""
        for pid in family(self.popen.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait(10)
        self._reader.join(10)
        for stream in (self.popen.stdin, self._log, None if self._reader.is_alive() else self.popen.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


def _environment() -> dict[str, str]:
    """Ours without proxies: everything measured is on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def family(pid: int) -> list[int]:
    """A process and its descendants that live now."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


class Cast:
    """The processes of one measurement, ended together."""

    def __init__(self, folder: Path, prefix: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        """
        Args:
            folder: for their logs.
            prefix: put before the command of a process, by its name: where it runs.
        """
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self._prefix = prefix
        self._before: dict[str, float] = {}

    def start(self, name: str, command: Sequence[str | Path], **options: Any) -> Process:
        process = Process(name, [*self._prefix(name), *command], log=self.folder / f"{name}.log", **options)
        self.processes[name] = process
        return process

    def role(self, name: str, *args: str | Path) -> Process:
        """One of `benchmarks.data.shardcast_role`'s."""
        return self.start(name, [sys.executable, "-m", "benchmarks.data.shardcast_role", *args])

    def mark(self) -> None:
        """CPU counts from here on."""
        self._before = {name: process.cpu_s() for name, process in self.processes.items()}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each since `mark`, or since its start."""
        return {name: each.cpu_s() - self._before.get(name, 0.0) for name, each in self.processes.items()}

    def end(self) -> None:
        for process in self.processes.values():
            process.end()


@contextmanager
def cast(folder: Path, prefix: Callable[[str], Sequence[str]] = lambda name: ()) -> Iterator[Cast]:
    """Processes that do not outlive the block."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Cast(folder, prefix)
    try:
        yield made
    finally:
        made.end()
