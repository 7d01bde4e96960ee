"""How much memory and disk each of our commands needs, and the refusal to start where there is too little.

The figures are what the processes were measured to take (proportional set size at the peak, disk after a whole run),
rounded up by about a quarter. `trainer demo` asks for all of its processes together.

Not covered: reading what is free (`protocol.preflight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.preflight import require


@dataclass(frozen=True)
class Need:
    """MiB of memory per process of a preset, and MiB of disk."""

    coordinator: int
    learner: int
    validator: int
    relay: int
    inference: int
    """A node with its engine and its host process."""
    dishonest: int
    """The same for a program of examples/cheats, which computes everything twice."""
    disk: int
    """What every run needs: model, keys, logs, two checkpoints, two policies a member."""
    disk_step: float
    """What each step adds."""


NEEDS = {
    "tiny": Need(250, 500, 450, 200, 450, 450, 400, 2.0),
    "smollm2": Need(300, 4500, 1500, 200, 1500, 2600, 16_000, 300.0),
}


def demo(preset: str, nodes: int, dishonest: int, steps: int, run_dir: Path) -> None:
    """Refuse a demo that could not finish. `steps` are those still to do, as far as known."""
    need = NEEDS[preset]
    memory = (
        need.coordinator + need.learner + 2 * need.validator + 3 * need.relay  # the origin is about a relay
        + nodes * need.inference + dishonest * need.dishonest
    )  # fmt: skip
    require(
        "this demo",
        memory_mib=memory,
        disk_mib=need.disk + round(steps * need.disk_step),
        where=run_dir,
        less="close other programs, or give fewer --nodes and --cheats",
    )


def serve(preset: str, run_dir: Path) -> None:
    """Refuse a coordinator that could not run."""
    need = NEEDS[preset]
    require("the coordinator", memory_mib=need.coordinator, disk_mib=512, where=run_dir)


def learn(preset: str, run_dir: Path) -> None:
    """Refuse a learner that could not run."""
    need = NEEDS[preset]
    require("the learner", memory_mib=need.learner, disk_mib=need.disk // 2, where=run_dir)


def init(preset: str, run_dir: Path) -> None:
    """Refuse a run directory on a disk that could not take its model."""
    require("a new run", disk_mib=NEEDS[preset].disk // 2, where=run_dir)
