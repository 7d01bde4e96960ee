"""What a demo was asked for, kept in its run directory so that `--resume` goes on with the very same processes.

    RUN/demo.json    model, environments, steps, nodes, seed, dishonest kinds; seconds and memory of earlier sittings

Not covered: starting and watching (`trainer.demo`), the run itself (`run.toml` and the signed manifest).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from protocol.errors import HeadwaterError, ProtocolError, UsageError
from protocol.files import write_atomic
from protocol.identity import load_or_create_identity
from trainer.deceivers import KINDS, own_log

VALIDATORS = ("validator-1", "validator-2")
RELAYS = ("relay-1", "relay-2")
"""A chain: the second pulls from the first."""


@dataclass
class Plan:
    """One demo, as it was asked for. Everything that `demo.json` holds."""

    model: str
    environments: str | None
    steps: int
    nodes: int
    seed: int
    kinds: list[str] = field(default_factory=list)
    """Dishonest nodes, in joining order."""
    seconds: float = 0.0
    """Of the sittings before this one."""
    peak_pss_mib: float = 0.0

    @property
    def transform(self) -> str:
        """Which transform of a word earns the reward, as far as the options say; "" when they don't."""
        first = (self.environments or "").partition(",")[0].rpartition("/")[2]
        return first if first in ("reverse", "sort", "rotate") else ""

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / "demo.json", json.dumps(asdict(self), indent=2).encode() + b"\n")


def node_key(run_dir: Path, name: str) -> bytes:
    """The public key of one of the demo's own nodes, made on first use."""
    return load_or_create_identity(run_dir / "nodes" / name / "identity.pem").public


def witnesses(run_dir: Path, kinds: list[str]) -> dict[str, tuple[bytes, Path]]:
    """Kind -> its key and its own log: what the summary compares the ledger with."""
    return {kind: (node_key(run_dir, kind), own_log(run_dir, kind)) for kind in kinds}


def empty_directory(run_dir: Path) -> Path:
    """Make the run's directory, or take an empty one. Raises UsageError for anything else, OSError if it can't."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"{run_dir} is a file; give another --dir")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise UsageError(f"{run_dir} is not empty; give another --dir, {_instead(run_dir)}")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _instead(run_dir: Path) -> str:
    place = shlex.quote(str(run_dir))
    if (run_dir / "demo.json").exists() and (run_dir / "run.toml").exists():
        return f"or go on with the demo in it: trainer demo --resume {place}"
    if (run_dir / "run.toml").exists():
        return f"or continue that run with: trainer serve {place}/run.toml"
    return "or empty it"


def reopen(run_dir: Path) -> Plan:
    """The plan of a demo that was interrupted.

    Raises:
        UsageError: there is none, it is over, or its processes are still there.
    """
    from trainer.processes import marked

    place = shlex.quote(str(run_dir))
    if not (run_dir / "run.toml").is_file():
        raise UsageError(f"{run_dir} holds no run; start one with: trainer demo --dir {place}")
    plan = _read(run_dir / "demo.json")
    status = _status(run_dir)
    if status.get("phase") == "finished":
        raise UsageError(f"the run in {run_dir} is finished; look at it with: trainer status {place}")
    run = str(status.get("run") or _run_id(run_dir))
    alive = marked(run)
    if alive:
        pids = " ".join(map(str, alive[:40]))
        raise UsageError(f"processes of this run are still at work ({pids}); stop them with: kill {pids}")
    return plan


def _read(path: Path) -> Plan:
    fix = f"it was not started by `trainer demo`; go on with: trainer serve {shlex.quote(str(path.parent))}/run.toml"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Plan)}
        plan = Plan(**{key: value for key, value in held.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise UsageError(f"{path} does not tell what this demo was ({exc}); {fix}") from exc
    numbers = (plan.steps, plan.nodes, plan.seed)
    if (
        plan.model not in ("tiny", "smollm2")
        or not all(isinstance(n, int) and n >= 0 for n in numbers)
        or not isinstance(plan.kinds, list)
        or not set(plan.kinds) <= set(KINDS)
        or not isinstance(plan.environments, str | None)
    ):
        raise UsageError(f"{path} does not tell what this demo was; {fix}")
    return plan


def _status(run_dir: Path) -> dict[str, object]:
    try:
        value = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _run_id(run_dir: Path) -> str:
    from protocol.manifest import open_manifest

    try:
        return open_manifest((run_dir / "manifest.hw").read_bytes()).id.hex()
    except (OSError, ProtocolError) as exc:
        raise UsageError(f"{run_dir}/manifest.hw does not hold ({exc}); restore it from a copy") from exc


def suspended(run_dir: Path, kinds: list[str]) -> set[str]:
    """Those of `kinds` that the sealed ledger says are suspended: nobody starts them again.

    A ledger that cannot be read says nothing: a suspended node that joins again is told so and leaves.
    """
    from trainer.summary import read_state

    try:
        _, state = read_state(run_dir)
    except (HeadwaterError, OSError):
        return set()
    states = {kind: state.nodes.get(node_key(run_dir, kind)) for kind in kinds}
    return {kind for kind, node in states.items() if node is not None and node.state == "suspended"}
