"""How much memory and disk each of our commands needs, and the refusal to start where there is too little.

The figures are what the processes were measured to take (proportional set size at the peak, disk after a whole run),
plus about a quarter. `trainer demo` asks for all of its processes together.

Not covered: reading what is free (`protocol.preflight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.preflight import require


@dataclass(frozen=True)
class Need:
    """MiB that the processes of a preset take."""

    coordinator: int
    """Memory, its libp2p host included, as for all members."""
    learner: int
    validator: int
    relay: int
    """The origin takes about the same."""
    inference: int
    """A node with its engine."""
    dishonest: int
    """The same for a program of examples/cheats; some hold a second model."""
    disk: int
    """Model, keys, ledger and checkpoints."""
    disk_member: int
    """A home: the newest policies, and what is on its way."""
    disk_step: float
    """What each step adds: a publication is kept whole, its rollouts compressed."""


NEEDS = {
    "tiny": Need(210, 450, 425, 95, 440, 440, 100, 65, 1.8),
    "smollm2": Need(250, 4500, 1500, 200, 1500, 2600, 6_000, 1_200, 300.0),
}


def demo(preset: str, nodes: int, kinds: int, at_once: int, steps: int, run_dir: Path) -> None:
    """Refuse a demo that could not finish.

    Args:
        nodes: honest inference nodes.
        kinds: dishonest ones, of which `at_once` are in the run together.
        steps: those still to do.
    """
    need = NEEDS[preset]
    memory = need.coordinator + need.learner + 2 * need.validator + 3 * need.relay
    memory += nodes * need.inference + min(kinds, at_once) * need.dishonest
    disk = need.disk + (4 + nodes + kinds) * need.disk_member + round(steps * need.disk_step)
    less = "close other programs, or give fewer --nodes or --cheats"
    require("this demo", memory_mib=memory, disk_mib=disk, where=run_dir, less=less)


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
    require("a new run", disk_mib=NEEDS[preset].disk, where=run_dir)
