"""Where a demo's steps go: CPU time of each role, and what a batch waits for on its way.

CPU is read from /proc while the demo runs: two readings of every process of the run, between two steps in the middle
of it, so that starting and joining do not count. The way of a batch is read from the finished run's ledger, whose
entries carry the coordinator's time.

    on a core    user + system time of all of a role's processes
    ready        runnable, but another process had the core (/proc/PID/task/*/schedstat)

Not covered: time inside a process (use a profiler), more than one machine.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol import codec
from protocol.envelope import parse
from protocol.manifest import open_manifest
from protocol.records import BatchClosed, Lease, UploadIntent
from protocol.segments import read_segments
from shardcast.records import Head
from trainer.processes import marked

FIRST_STEP = 10
"""Steps before it are the run's start: nodes in probation get small leases, files are cold."""

POLL_S = 0.05
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")

ROLES = {
    "engine": "engines (tokens, proofs)",
    "validator": "validators",
    "learner": "learner",
    "coordinator": "coordinator",
    "inference": "inference nodes",
    "host": "libp2p hosts",
    "origin": "origin",
    "relay": "relays",
    "check": "the trainer's checks of validators",
    "demo": "the demo's own view",
    "other": "other",
}


@dataclass(frozen=True)
class Reading:
    """One look at every process of a run. used, ready: pid -> seconds; idle: core-seconds nobody used, machine-wide."""

    step: int
    time: float
    used: Mapping[int, float]
    ready: Mapping[int, float]
    idle: float


@dataclass(frozen=True)
class RoleCost:
    """One row of the table: CPU and waiting in milliseconds a step, CPU seconds before `FIRST_STEP`."""

    role: str
    processes: int
    cpu_ms: float
    ready_ms: float
    start_s: float


@dataclass
class Watch:
    """Reads a running demo from a thread of its own until `stop`."""

    run_dir: Path
    first: Reading | None = None
    last: Reading | None = None
    roles: dict[int, str] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Watch:
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        offset, step = 0, 0
        path = self.run_dir / "metrics.jsonl"
        while not self._done.wait(POLL_S):
            if not path.exists():
                continue
            with path.open("rb") as rows:
                rows.seek(offset)
                new = rows.read()
            whole = new[: new.rfind(b"\n") + 1]
            offset += len(whole)
            steps = [row for row in map(json.loads, whole.splitlines()) if row["event"] == "step"]
            if not steps:
                continue
            step, when = int(steps[-1]["step"]) + 1, float(steps[-1]["time"])
            if step < FIRST_STEP:
                continue
            if self.first is None:
                self.roles = _roles(self.run_dir)
                self.first = _read(step, when, self.roles)
            else:
                self.last = _read(step, when, self.roles)

    def costs(self) -> list[RoleCost]:
        """The table, largest first. Empty when the run was too short."""
        if self.first is None or self.last is None:
            return []
        steps = self.last.step - self.first.step
        rows = []
        for role in ROLES:
            pids = [pid for pid, name in self.roles.items() if name == role and pid in self.last.used]
            if not pids:
                continue
            used = sum(self.last.used[pid] - self.first.used[pid] for pid in pids)
            ready = sum(self.last.ready[pid] - self.first.ready[pid] for pid in pids)
            start = sum(self.first.used[pid] for pid in pids)
            rows.append(RoleCost(role, len(pids), 1e3 * used / steps, 1e3 * ready / steps, start))
        return sorted(rows, key=lambda row: -row.cpu_ms)

    def wall_ms(self) -> float:
        """Milliseconds a step between the two readings."""
        assert self.first is not None and self.last is not None
        return 1e3 * (self.last.time - self.first.time) / (self.last.step - self.first.step)

    def idle_ms(self) -> float:
        """Core-milliseconds a step in which no process of this machine ran."""
        assert self.first is not None and self.last is not None
        return 1e3 * (self.last.idle - self.first.idle) / (self.last.step - self.first.step)


def _roles(run_dir: Path) -> dict[int, str]:
    run = open_manifest((run_dir / "manifest.hw").read_bytes()).id.hex()
    found = {pid: _role(_words(pid)) for pid in marked(run)}
    me = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and "demo" in (words := _words(int(entry.name))) and str(run_dir) in words:
            found.setdefault(int(entry.name), "demo")
    found.pop(me, None)
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _role(words: list[str]) -> str:
    """What a process is for, from its command line."""
    line = " ".join(words)
    if "node.engine" in line or "-engine" in line or "examples/cheats" in line:
        return "engine"
    if "hostd" in line:
        return "host"
    if "spot_worker" in line:
        return "check"
    if "--role" in words:
        return words[words.index("--role") + 1]
    for word, role in (("serve", "coordinator"), ("learn", "learner"), ("publish", "origin")):
        if word in words:
            return role
    return "other"


def _read(step: int, when: float, pids: Iterable[int]) -> Reading:
    used, ready = {}, {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
            waited = sum(int(task.read_text().split()[1]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
            ready[pid] = waited * 1e-9
        except OSError:  # it ended meanwhile
            used.pop(pid, None)
    idle = int(Path("/proc/stat").read_text().split(maxsplit=5)[4]) * _TICK_S
    return Reading(step, when, used, ready, idle)


# --- the way of a batch, from the ledger -----------------------------------------------------------------------------

STAGES = (
    ("lease", "weights published -> lease of that policy issued"),
    ("sample", "lease issued -> its submission in the ledger (weights, tokens, proofs, upload)"),
    ("judge", "submission -> verdict (job, prefill, checks)"),
    ("wait", "verdict -> batch closed (waits for its turn and for enough others)"),
    ("learn", "batch closed -> its weights published (learner, origin)"),
)


def way_of_a_batch(run_dir: Path, first_step: int = FIRST_STEP) -> dict[str, float]:
    """Mean milliseconds of each stage, over the rollouts of batches from `first_step` on.

    Raises:
        ProtocolError: the archive holds no readable ledger.
    """
    run = open_manifest((run_dir / "manifest.hw").read_bytes())
    policies: dict[int, int] = {}
    leases: dict[bytes, tuple[int, int]] = {}
    submissions: dict[int, tuple[bytes, int]] = {}
    verdicts: dict[int, int] = {}
    batches: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for index, sealed in enumerate(read_segments(run_dir / "ledger", run).entries):
        entry = sealed.entry
        if entry.event == "policy":
            policies[parse(entry.subject).record(Head).step] = entry.time
        elif entry.event == "lease":
            lease = parse(entry.subject).record(Lease)
            leases[lease.lease_id] = (lease.step, entry.time)
        elif entry.event == "submission":
            submissions[index] = (parse(entry.subject).record(UploadIntent).lease_id, entry.time)
        elif entry.event == "verdict":
            verdicts[index] = entry.time
        elif entry.event == "batch":
            closed = codec.decode(BatchClosed, entry.body)
            batches[closed.step] = (entry.time, [(e.submission, e.verdict) for e in closed.entries])
    sums: dict[str, float] = defaultdict(float)
    count = 0
    for step, (closed_at, members) in batches.items():
        if step < first_step or step + 1 not in policies:
            continue
        for submission, verdict in members:
            lease_id, submitted = submissions[submission]
            policy, issued = leases[lease_id]
            sums["lease"] += issued - policies[policy]
            sums["sample"] += submitted - issued
            sums["judge"] += verdicts[verdict] - submitted
            sums["wait"] += closed_at - verdicts[verdict]
            sums["learn"] += policies[step + 1] - closed_at
            count += 1
    return {stage: sums[stage] / max(1, count) for stage, _ in STAGES}


# --- as text ---------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- timeline: begin -->", "<!-- timeline: end -->"


def as_markdown(watch: Watch, way: Mapping[str, float], bare: Mapping[str, float], head: str) -> str:
    """The tables, as they stand in docs/benchmarks.md.

    Args:
        bare: milliseconds a step of the bare loop's parts.
        head: lines above the tables: figures, machine, date, command.
    """
    costs, wall = watch.costs(), watch.wall_ms()
    lines = [head, "", "| role | processes | on a core, ms a step | ready but no core free, ms a step | CPU s before |"]
    lines.append("|---|--:|--:|--:|--:|")
    for row in costs:
        lines.append(
            f"| {ROLES[row.role]} | {row.processes} | {row.cpu_ms:.0f} | {row.ready_ms:.0f} | {row.start_s:.1f} |"
        )
    total, ready = sum(row.cpu_ms for row in costs), sum(row.ready_ms for row in costs)
    lines.append(f"| **all** | {sum(row.processes for row in costs)} | **{total:.0f}** | {ready:.0f} | "
                 f"{sum(row.start_s for row in costs):.0f} |")  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    lines += [
        "",
        f"One step took {wall:.0f} ms, so {cores} cores offered {cores * wall:.0f} ms: {total:.0f} went to the run, "
        f"{watch.idle_ms():.0f} to nobody, the rest to other programs of this machine. "
        f"The bare loop's step: {', '.join(f'{name} {ms:.0f} ms' for name, ms in bare.items())}.",
        "",
        "| the way of a rollout | ms |",
        "|---|--:|",
        *(f"| {words} | {way[stage]:.0f} |" for stage, words in STAGES),
        f"| **all**, that is {sum(way.values()) / wall:.1f} steps | **{sum(way.values()):.0f}** |",
    ]
    return "\n".join(lines)


def replace_between_marks(path: Path, text: str) -> None:
    """Put `text` between the two marks of a document, or make a document of it.

    Raises:
        OSError: not writable.
    """
    block = f"{BEGIN}\n{text}\n{END}"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, mark, rest = old.partition(BEGIN)
    after = rest.partition(END)[2] if mark else ""
    path.write_text(f"{before}{block}{after}" if mark else f"{old}{block}\n", encoding="utf-8")
