"""What every benchmark prints, and its exit code.

    python -m benchmarks.NAME --json
    {"goals": [{"goal", "target", "measured", "holds", "samples", "machine"}, ...]}
    exit 0 all hold, 1 some do not, 2 could not run

A benchmark measures and says what came out; it never retries until a goal holds. Peers that it measures against live in
environments of their own (`make bench-peers`): their import names clash with ours.

    python -m benchmarks.contract        prints the machine it would name
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.errors import HeadwaterError


class CouldNotRunError(HeadwaterError):
    """The benchmark could not measure. The message names the cause and what to do; exit code 2."""


@dataclass(frozen=True)
class Goal:
    """One goal and what was measured.

    goal: what is measured, with its unit and direction, in words.
    target: the number to reach.
    samples: the single measurements `measured` was made of, so that a reader sees the spread.
    machine: where.
    """

    goal: str
    target: float
    measured: float
    holds: bool
    samples: tuple[float, ...]
    machine: str


def at_least(goal: str, target: float, measured: float, samples: Sequence[float]) -> Goal:
    """A goal that holds when `measured` is at least `target`."""
    rounded = tuple(round(sample, 4) for sample in samples)
    return Goal(goal, target, round(measured, 4), measured >= target, rounded, machine())


def at_most(goal: str, target: float, measured: float, samples: Sequence[float] = ()) -> Goal:
    """A goal that holds when `measured` is at most `target`."""
    rounded = tuple(round(sample, 4) for sample in samples or (measured,))
    return Goal(goal, target, round(measured, 4), measured <= target, rounded, machine())


def machine() -> str:
    """Processor, cores we may use, memory, system, Python; and the load when asked, since others may share it."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _text("/proc/cpuinfo").splitlines()
            if line.startswith(("model name", "Model"))
        ),
        platform.processor() or platform.machine(),
    )
    kib = next((int(line.split()[1]) for line in _text("/proc/meminfo").splitlines() if line.startswith("MemTotal")), 0)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{model}, {cores} cores, {kib / 2**20:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end"
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run(
    measure: Callable[[argparse.Namespace], Sequence[Goal]],
    about: str,
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
) -> int:
    """A benchmark's main: parse, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=about)
    arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    args = parser.parse_args()
    try:
        goals = list(measure(args))
    except HeadwaterError as exc:
        sys.stderr.write(f"could not run: {exc}\n")
        return 2
    if args.json:
        print(json.dumps({"goals": [asdict(goal) for goal in goals]}))
    else:
        for goal in goals:
            state = "holds" if goal.holds else "does not hold"
            print(f"{goal.goal}: {goal.measured:g} (target {goal.target:g}, {state})\n  on {goal.machine}")
    return 0 if all(goal.holds for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(run(lambda _args: [], f"The contract of every benchmark. This machine: {machine()}"))
