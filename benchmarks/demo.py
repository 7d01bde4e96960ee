"""The acceptance lines of the whole demo that take minutes, measured as a person would run them.

    python -m benchmarks.demo --json                      the tiny model, four dishonest nodes, then the audit
    python -m benchmarks.demo --part cheats --json        all twelve kinds, seeds 0, 1 and 2, each audited (20 minutes)
    python -m benchmarks.demo --part smollm2 --json       SmolLM2-135M (about 10 minutes)

Not covered: kills in the middle and byte flips; those are tests (`tests/test_demo.py`, `tests/test_verifier_audit.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import CouldNotRunError, Goal, at_least, at_most, run

KINDS = ("quantised", "small-model", "reward", "replay")
SEEDS = (0, 1, 2)


def _command(*words: str, deadline_s: float) -> tuple[int, dict[str, Any]]:
    """Run one of our commands with --json; returns its exit code and the object it printed."""
    path = Path(sys.executable).with_name(words[0])
    try:
        done = subprocess.run(
            [str(path), *words[1:], "--json"], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise CouldNotRunError(f"{' '.join(words)}: {exc}") from exc
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError as exc:
        raise CouldNotRunError(f"{' '.join(words)} printed no JSON object: {done.stderr[-2000:]}") from exc


def tiny(directory: Path) -> list[Goal]:
    """The demo with four dishonest nodes, then the audit of its archive."""
    run_dir = directory / "tiny"
    code, summary = _command("trainer", "demo", "--cheats", ",".join(KINDS), "--dir", str(run_dir), deadline_s=900)
    goals = [
        at_most("exit code of trainer demo", 0, code),
        at_least("RL steps", 100, summary["steps"], [summary["steps"]]),
        at_most("reward_first", 0.2, summary["reward_first"]),
        at_least("reward_last", 0.6, summary["reward_last"], [summary["reward_last"]]),
        at_most("honest rollouts rejected", 0, summary["honest_rejected"]),
        at_least("honest rollouts verified", 1000, summary["honest_verified"], [summary["honest_verified"]]),
        at_most("calls that fell back to HTTP", 0, summary["http_fallbacks"]),
        at_most("peak memory of all processes, MiB (PSS)", 6144, summary["peak_pss_mib"]),
        at_most("seconds of the run itself", 240, summary["seconds"]),
    ]
    for kind, fate in summary["cheats"].items():
        caught = fate["caught"] / fate["dishonest"] if fate["dishonest"] else 0.0
        goals.append(at_least(f"{kind}: share of dishonest rollouts caught", 1.0, caught, [fate["dishonest"]]))
        spent = fate["submitted"] if fate["node_state"] == "suspended" else 1e9
        goals.append(at_most(f"{kind}: rollouts until suspended", 64, spent))
        goals.append(at_most(f"{kind}: rejected although as the lease forces them", 0, fate["identical_rejected"]))
    code, report = _command("verifier", "audit", str(run_dir), deadline_s=1800)
    missed = summary["rollouts_accepted"] - report["accepted_checked"]
    goals += [
        at_most("exit code of verifier audit", 0, code),
        at_most("accepted rollouts the audit left out", 0, missed),
        at_most("verdicts the audit calls wrong", 0, report["rollouts_checked"] - report["rollouts_held"]),
    ]
    return goals


def smollm2(directory: Path) -> list[Goal]:
    """The same network around SmolLM2-135M-Instruct."""
    code, summary = _command("trainer", "demo", "--model", "smollm2", "--dir", str(directory / "smollm2"),
                             deadline_s=2400)  # fmt: skip
    gain = summary["reward_last"] - summary["reward_first"]
    return [
        at_most("smollm2: exit code of trainer demo", 0, code),
        at_least("smollm2: gain in mean verified reward", 0.3, gain, [summary["reward_first"], summary["reward_last"]]),
        at_most("smollm2: minutes", 25, summary["seconds"] / 60),
        at_most("smollm2: honest rollouts rejected", 0, summary["honest_rejected"]),
    ]


def cheats(directory: Path) -> list[Goal]:
    """Every kind of dishonest node, over three seeds."""
    return [goal for seed in SEEDS for goal in all_kinds(directory, seed)]


def all_kinds(directory: Path, seed: int) -> list[Goal]:
    """One demo with all twelve kinds, then the audit of its archive."""
    run_dir = directory / f"seed-{seed}"
    code, summary = _command(
        "trainer", "demo", "--cheats", "all", "--seed", str(seed), "--dir", str(run_dir), deadline_s=1500
    )
    goals = [
        at_most(f"seed {seed}: exit code of trainer demo", 0, code),
        at_least(f"seed {seed}: kinds of dishonest nodes", 12, len(summary["cheats"]), [len(summary["cheats"])]),
        at_most(f"seed {seed}: honest rollouts rejected", 0, summary["honest_rejected"]),
        at_least(
            f"seed {seed}: honest rollouts verified", 1000, summary["honest_verified"], [summary["honest_verified"]]
        ),
        at_most(f"seed {seed}: rollouts trained unverified", 0, summary["rollouts_unverified_trained"]),
        at_most(f"seed {seed}: peak memory of all processes, MiB (PSS)", 6144, summary["peak_pss_mib"]),
        at_most(f"seed {seed}: minutes", 6, summary["seconds"] / 60),
    ]
    for kind, fate in summary["cheats"].items():
        caught = fate["caught"] / fate["dishonest"] if fate["dishonest"] else 0.0
        name = f"seed {seed}: {kind}"
        goals.append(at_least(f"{name}: share of dishonest rollouts caught", 1.0, caught, [fate["dishonest"]]))
        goals.append(at_most(f"{name}: rejected although as the lease forces them", 0, fate["identical_rejected"]))
        goals.append(at_least(f"{name}: suspended", 1, float(fate["node_state"] == "suspended"), [fate["submitted"]]))
    code, _ = _command("verifier", "audit", str(run_dir), deadline_s=1800)
    goals.append(at_most(f"seed {seed}: exit code of verifier audit", 0, code))
    return goals


PARTS = {"tiny": tiny, "cheats": cheats, "smollm2": smollm2}


def measure(args: argparse.Namespace) -> Sequence[Goal]:
    """Run the chosen parts in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        return [goal for part in args.part.split(",") for goal in PARTS[part](Path(directory))]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=(*PARTS, "tiny,smollm2"), default="tiny")


if __name__ == "__main__":
    sys.exit(run(measure, "The demo's acceptance lines.", _arguments))
