"""The dishonest nodes of a demo: which there are, how each is started, and who joins when.

At most `AT_ONCE` are in the run together. The others join one by one as earlier ones are suspended and leave, each an
ordinary stranger who joins a run that is already going on: a dozen engines at once would only fill this machine.

Not covered: what they do (`examples/cheats/*.py`), what became of them (`trainer.summary`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import UsageError

KINDS = (
    "dropper",
    "best-of-n",
    "edit",
    "reward",
    "greedy",
    "easy-tasks",
    "temperature",
    "small-model",
    "stale",
    "quantised",
    "replay",
    "garbage",
)
"""In the order in which they join: the dropper needs the most leases until chance is ruled out; then those that have
less and less to lie about as the policy gets better; then the rest. Easy tasks start early because that node starts
its engine only after it has found the run."""

AT_ONCE = 6
"""Dishonest nodes in the run together. More take memory and processor from the honest; fewer make the run longer."""

KNOW_THE_REWARD = frozenset({"dropper", "best-of-n", "edit", "reward"})
"""Programs that score rollouts themselves, and need to be told which transform of a word is rewarded."""

NO_ENGINE = frozenset({"easy-tasks"})
"""Programs that are a whole node, changed in one place, and use the built-in engine."""

WITHHOLDING = frozenset({"dropper"})
"""Kinds whose dishonesty is what they don't send."""


def kinds_of(text: str) -> list[str]:
    """The kinds that `--cheats` names, in joining order.

    Raises:
        UsageError: no such kind, or this installation has no such programs.
    """
    named = list(KINDS) if text == "all" else [kind for kind in text.split(",") if kind]
    unknown = [kind for kind in named if kind not in KINDS]
    if unknown:
        raise UsageError(f"--cheats {','.join(unknown)}: no such kind; there are {', '.join(sorted(KINDS))}, or all")
    if named and not programs().is_dir():
        raise UsageError(
            "--cheats needs the programs in examples/cheats, which only a clone of the repository has; "
            "clone it and run `make demo` there, or leave --cheats out"
        )
    return [kind for kind in KINDS if kind in named]


def programs() -> Path:
    """The folder of the dishonest programs."""
    return Path(__file__).resolve().parent.parent / "examples" / "cheats"


def home_of(run_dir: Path, kind: str) -> Path:
    return run_dir / "nodes" / kind


def own_log(run_dir: Path, kind: str) -> Path:
    """Where a kind writes down what it really did."""
    return home_of(run_dir, kind) / "own-log.jsonl"


@dataclass
class Arrivals:
    """Who is still to join, who is here. Pure: the caller starts and ends processes."""

    waiting: list[str]
    at_once: int = AT_ONCE
    here: list[str] = field(default_factory=list)

    def next(self) -> list[str]:
        """Those who join now; they count as here from here on."""
        joining = self.waiting[: max(0, self.at_once - len(self.here))]
        self.waiting = self.waiting[len(joining) :]
        self.here += joining
        return joining

    def left(self, kind: str) -> None:
        if kind in self.here:
            self.here.remove(kind)

    def outlook(self) -> str:
        """What comes next, in words."""
        if not self.waiting:
            return "nobody else is to come"
        first, *others = self.waiting
        if len(others) > 2:
            return f"{first} comes next, then {len(others)} other kinds"
        return ", then ".join([f"{first} comes next", *others])


def processes_of(
    kind: str,
    run_dir: Path,
    sockets: Path,
    transform: str,
    join: Callable[[str], Sequence[str]],
) -> list[tuple[str, str, list[str]]]:
    """(name, role, command) of each process that makes one dishonest node.

    Args:
        sockets: folder for engine sockets.
        transform: the transform of a word that the run rewards, or "".
        join: the words `join --role inference ...` of a node of this name.
    """
    program = [sys.executable, str(programs() / f"{kind}.py")]
    log = str(own_log(run_dir, kind))
    if kind in NO_ENGINE:
        return [(kind, "inference", [*program, "--truth", log, *join(kind)])]
    socket = str(sockets / f"{kind}.sock")
    engine = [*program, "--socket", socket, "--truth", log]
    if kind in KNOW_THE_REWARD and transform:
        engine += ["--transform", transform]
    node = Path(sys.executable).with_name("node")
    return [
        (f"{kind}-engine", "engine", engine),
        (kind, "inference", [str(node), *join(kind), "--engine-later", "--engine-socket", socket]),
    ]
