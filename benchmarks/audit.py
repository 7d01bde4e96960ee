"""What an audit costs: `verifier audit` on the archive of a demo, as anybody runs it.

    python -m benchmarks.audit --json                        makes an archive of 12 steps (about 1,700 rollouts) first
    python -m benchmarks.audit --run runs/demo --json        an archive that is there
    python -m benchmarks.audit --run runs/demo --share 0.05  derives a share of its rollouts, checks all the rest

The goal is wall-clock time of the whole command for 1,000 rollouts, imports and reading included, with one process a
core and with one process only. On a machine that others use, the CPU seconds beside it say more.

Not covered: large models; there the prefill decides (`benchmarks.verification`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contract import CouldNotRunError, Goal, at_least, at_most, run

SECONDS = 120.0
"""For 1,000 rollouts on two cores: the goal of issue 4."""

DEMO_DEADLINE_S = 600.0
AUDIT_DEADLINE_S = 1200.0


@dataclass(frozen=True)
class Audited:
    """One audit: its report, and what it took."""

    report: dict[str, Any]
    wall_s: float
    cpu_s: float

    def of_a_thousand(self, seconds: float) -> float:
        return 1000.0 * seconds / max(1, self.report["rollouts_checked"])


def measure(args: argparse.Namespace) -> list[Goal]:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-audit-") as scratch:
        run_dir = args.run if args.run is not None else _demo(Path(scratch) / "run", args.steps)
        cores = len(os.sched_getaffinity(0))
        every, one = (_audit(run_dir, args.share, jobs, Path(scratch)) for jobs in (cores, 1))
    counted = every.report["rollouts_checked"]
    if counted < 1000 and not args.quick:
        raise CouldNotRunError(f"the archive gave {counted} rollouts to derive, fewer than the 1,000 of the goal")
    different = sum(every.report[name] != one.report[name] for name in every.report if name != "seconds")
    return [
        at_most(
            f"seconds of verifier audit for 1,000 rollouts ({counted} derived, {cores} processes)",
            SECONDS,
            every.of_a_thousand(every.wall_s),
            [every.wall_s],
        ),
        at_most("the same with one process", 2 * SECONDS, one.of_a_thousand(one.wall_s), [one.wall_s]),
        at_most(
            f"CPU seconds of it for 1,000 rollouts ({cores} processes; samples: all of it, and with one process)",
            2 * SECONDS,
            every.of_a_thousand(every.cpu_s),
            [every.cpu_s, one.cpu_s],
        ),
        at_least(
            "share of derived rollouts that held", 1.0, every.report["rollouts_held"] / max(1, counted), [counted]
        ),
        at_most("fields of the report that differ between one process and several", 0, different),
    ]


def _demo(run_dir: Path, steps: int) -> Path:
    command = ["trainer", "demo", "--steps", str(steps), "--dir", str(run_dir), "--json"]
    code, _ = _command(command, DEMO_DEADLINE_S)
    if code != 0:
        raise CouldNotRunError(f"`{' '.join(command)}` ended with exit code {code}; try it by hand")
    return run_dir


def _audit(run_dir: Path, share: float, jobs: int, scratch: Path) -> Audited:
    words = ["verifier", "audit", str(run_dir), "--jobs", str(jobs), "--state", str(scratch / "state"), "--json"]
    if share < 1:
        words += ["--fraction", str(share), "--seed", "00"]
    before, started = _children_s(), time.monotonic()
    _, report = _command(words, AUDIT_DEADLINE_S)
    return Audited(report, time.monotonic() - started, _children_s() - before)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(words: list[str], deadline_s: float) -> tuple[int, dict[str, Any]]:
    path = Path(sys.executable).with_name(words[0])
    try:
        done = subprocess.run([str(path), *words[1:]], capture_output=True, text=True, timeout=deadline_s, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise CouldNotRunError(f"{' '.join(words)}: {exc}") from exc
    except ValueError as exc:
        raise CouldNotRunError(f"{' '.join(words)} printed no JSON object: {done.stderr[-2000:]}") from exc
    return done.returncode, report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="a finished run; none makes a demo first")
    parser.add_argument("--steps", type=int, default=12, help="of the demo that is made (default: 12)")
    parser.add_argument("--share", type=float, default=1.0, help="of its submissions to derive (default: all)")
    parser.add_argument("--quick", action="store_true", help="take fewer than 1,000 rollouts as well")


def main() -> int:
    return run(measure, "Time and CPU of verifier audit for 1,000 rollouts of a demo.", arguments)


if __name__ == "__main__":
    sys.exit(main())
