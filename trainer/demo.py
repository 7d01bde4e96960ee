"""`trainer demo`: the whole system on one machine, as separate processes, with strangers and deceivers.

It prepares a run directory, starts every role by the command a person would type, watches until the run has
finished, and sums up. It takes no part in the run: learning, leasing, checking and suspending happen in the
processes it started, and everything it reports comes from the files they leave.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from protocol.errors import HeadwaterError, UsageError
from protocol.files import write_atomic
from protocol.identity import load_or_create_identity

KINDS = ("quantised", "small-model", "reward", "replay")
_STARTUP_S = 180.0
_STALL_S = {"tiny": 120.0, "smollm2": 600.0}
_NEWS_S = 2.0
"""status.json is about a second old: told earlier, a node's end would come before the reason for it."""
_NEED_MIB = {"tiny": (4500, 1024), "smollm2": (12000, 24576)}
"""Memory and disk that a demo needs at least, MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options; kept apart so that `--help` imports nothing heavy."""
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="what to train (default: tiny)")
    parser.add_argument(
        "--environments", default=None, metavar="NAME", help="reverse, sort or rotate (tiny), addition (smollm2)"
    )
    parser.add_argument("--steps", type=int, default=None, help="RL steps (default: 150 tiny, 30 smollm2)")
    parser.add_argument("--nodes", type=int, default=3, help="honest inference nodes (default: 3)")
    parser.add_argument("--cheats", default="", metavar="KIND,..", help=f"dishonest nodes: {', '.join(KINDS)}, or all")
    parser.add_argument("--dir", type=Path, default=None, metavar="DIR", help="where the run's archive goes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the learner and the tasks")
    parser.add_argument("--json", action="store_true", help="print only the summary object")


@dataclass
class Stage:
    """Everything one demo has set up."""

    run_dir: Path
    model: str
    steps: int
    quiet: bool
    sockets: Path
    """A short folder for engine sockets: a Unix socket's path may have 107 bytes, a run directory's more."""
    began: float = field(default_factory=time.time)
    cheats: dict[str, tuple[bytes, Path]] = field(default_factory=dict)
    interrupted: bool = False
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the start, and a sentence for the person who watches."""


def main(args: argparse.Namespace) -> int:
    """Run the demo. Exit codes: 0 finished, 1 did not finish, 2 could not start, 130 interrupted."""
    from trainer.processes import Fleet
    from trainer.view import View, display_path

    stage = _prepare(args)
    stops: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    begun = time.monotonic()
    _say(stage, f"making the run in {display_path(stage.run_dir)}")
    finished = False
    try:
        run_id = _make_run(stage, args)
        fleet = Fleet(run_id, stage.run_dir / "logs", _environment())
        try:
            with View(quiet=stage.quiet) as view:
                _start_everything(stage, fleet, args)
                finished = _watch(stage, fleet, view, args.nodes, begun, stops)
            _say(stage, "stopping every process of the run")
        finally:
            fleet.stop()
    finally:
        shutil.rmtree(stage.sockets, ignore_errors=True)
    stage.interrupted = bool(stops)
    return _conclude(stage, fleet, finished, time.monotonic() - begun)


def _say(stage: Stage, text: str) -> None:
    if not stage.quiet:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


# --- before -------------------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> Stage:
    """Check what can be checked before anything is written or started."""
    from trainer.init import check_environments

    kinds = _kinds(args.cheats)
    if args.nodes < 1 or args.nodes > 64:
        raise UsageError(f"--nodes {args.nodes} is out of range; give 1 to 64")
    steps = args.steps if args.steps is not None else {"tiny": 150, "smollm2": 30}[args.model]
    if steps < 1:
        raise UsageError(f"--steps {steps} is out of range; give at least 1")
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed} is out of range; give 0 or more")
    if args.model == "smollm2" and not args.json:
        sys.stdout.write("preparing SmolLM2-135M (about a minute, the first time only)\n")
        sys.stdout.flush()
    check_environments(args.model, args.environments)
    _check_memory(args.model)
    run_dir = _empty_directory((args.dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute())
    _check_disk(args.model, run_dir)
    stage = Stage(run_dir, args.model, steps, args.json, Path(tempfile.mkdtemp(prefix="headwater-demo-")))
    for kind in kinds:
        home = run_dir / "nodes" / kind
        key = load_or_create_identity(home / "identity.pem").public
        stage.cheats[kind] = (key, home / "own-log.jsonl")
    return stage


def _empty_directory(run_dir: Path) -> Path:
    """Make the run's directory, or take an empty one. Raises UsageError for anything else, OSError if it can't."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"{run_dir} is a file; give another --dir")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        fix = (
            f"or continue that run with: trainer serve {shlex.quote(str(run_dir / 'run.toml'))}"
            if (run_dir / "run.toml").exists()
            else "or empty it"
        )
        raise UsageError(f"{run_dir} is not empty; give another --dir, {fix}")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _kinds(text: str) -> list[str]:
    kinds = list(KINDS) if text == "all" else [kind for kind in text.split(",") if kind]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UsageError(f"--cheats {','.join(unknown)}: no such kind; there are {', '.join(KINDS)}")
    if kinds and not _programs().is_dir():
        raise UsageError(
            "--cheats needs the programs in examples/cheats, which only a clone of the repository has; "
            "clone it and run `make demo` there, or leave --cheats out"
        )
    return list(dict.fromkeys(kinds))


def _programs() -> Path:
    return Path(__file__).resolve().parent.parent / "examples" / "cheats"


def _check_disk(model: str, run_dir: Path) -> None:
    """Refuse to start what could not finish: too little disk. A directory made for it is taken away again."""
    disk = _NEED_MIB[model][1]
    free_disk = shutil.disk_usage(run_dir).free >> 20
    if free_disk < disk:
        run_dir.rmdir()
        raise UsageError(f"{run_dir} has {free_disk} MiB free, this demo needs {disk}; give --dir on a larger disk")


def _check_memory(model: str) -> None:
    """Refuse to start what could not finish: too little memory."""
    memory = _NEED_MIB[model][0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) >> 10 < memory:
            raise UsageError(
                f"{int(line.split()[1]) >> 10} MiB of memory are available, this demo needs {memory}; "
                "close other programs, or give fewer --nodes"
            )


def _make_run(stage: Stage, args: argparse.Namespace) -> str:
    from trainer.init import make_run

    def home_key(name: str) -> bytes:
        return load_or_create_identity(stage.run_dir / "nodes" / name / "identity.pem").public

    run = make_run(
        stage.run_dir,
        preset=stage.model,
        steps=stage.steps,
        environment=args.environments,
        seed=args.seed,
        validators=[home_key("validator-1"), home_key("validator-2")],
        relays=[home_key("relay-1")],
    )
    return run.id.hex()


def _environment() -> dict[str, str]:
    """One thread a process: many processes share few cores here."""
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


# --- during -------------------------------------------------------------------------------------------------------


def _start_everything(stage: Stage, fleet: Any, args: argparse.Namespace) -> None:
    """Each role by the command a person would type."""
    run_dir, join_file = stage.run_dir, str(stage.run_dir / "join.hw")
    config = str(run_dir / "run.toml")

    def home(name: str) -> str:
        return str(run_dir / "nodes" / name)

    def join(name: str, role: str, *more: str) -> None:
        fleet.start(
            name,
            [_script("node"), "join", "--role", role, "--run", join_file, "--home", home(name), "--name", name, *more],
        )

    fleet.start("coordinator", [_script("trainer"), "serve", config])
    fleet.start("learner", [_script("trainer"), "learn", config])
    fleet.start("origin", [_script("shardcast"), "publish", str(run_dir)])
    join("relay-1", "relay")
    for number in (1, 2):
        join(f"validator-{number}", "validator")
    for number in range(1, args.nodes + 1):
        join(f"node-{number}", "inference")
    for kind, (_, log) in stage.cheats.items():
        socket = str(stage.sockets / f"{kind}.sock")
        program = [sys.executable, str(_programs() / f"{kind}.py"), "--socket", socket, "--truth", str(log)]
        if kind == "reward" and args.environments in ("sort", "rotate"):
            program += ["--transform", args.environments]  # the prompt does not say which one is rewarded
        fleet.start(f"{kind}-engine", program)
        join(kind, "inference", "--engine-socket", socket)


def _script(name: str) -> str:
    """Our console script beside this interpreter."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise UsageError(f"{path} is missing; install headwater into this environment with `make install`")
    return str(path)


def _watch(stage: Stage, fleet: Any, view: Any, honest: int, begun: float, stops: list[int]) -> bool:
    """Look on until the run has finished, somebody interrupts, or nothing moves any more."""
    from trainer.view import Picture, take_picture

    picture = Picture(
        f"headwater demo: {stage.model}",
        steps=stage.steps,
        dishonest=frozenset(key.hex() for key, _ in stage.cheats.values()),
        notes=stage.notes,
        members=3 + honest + len(stage.cheats),  # a relay and two validators
        began=stage.began,
    )
    moved, last, measured = begun, (-1, -1), 0.0
    gone: list[tuple[float, Any]] = []
    while not stops:
        now = time.monotonic()
        picture.seconds = now - begun
        view.show(take_picture(stage.run_dir, picture))
        if now - measured > 2.0:
            measured = now
            fleet.sample_memory()
        for child in fleet.newly_ended():
            if child.name == "coordinator" and child.exit_code == 0:
                view.show(take_picture(stage.run_dir, picture))
                return True
            gone.append((now, child))
        while gone and now - gone[0][0] > _NEWS_S:
            stage.notes.append((picture.seconds, _how_it_ended(gone.pop(0)[1], picture)))
        if _coordinator_finished(stage.run_dir):
            view.show(take_picture(stage.run_dir, picture))
            return True
        position = (picture.step, sum(picture.status.get("rollouts", {}).values()) if picture.status else -1)
        if picture.sft:
            position = (*position, picture.sft.get("step"))  # type: ignore[assignment]
        if position != last:
            moved, last = now, position
        limit = _STARTUP_S if picture.step == 0 else _STALL_S[stage.model]
        if now - moved > limit:
            stage.notes.append((picture.seconds, f"nothing moved for {limit:.0f} s; look into {stage.run_dir}/logs"))
            view.show(picture)
            return False
        time.sleep(0.25)
    return False


def _how_it_ended(child: Any, picture: Any) -> str:
    """A sentence on a process that is no longer there: gone home, or lost and to be brought back."""
    from trainer.view import display_path

    state = next((n["state"] for n in picture.status.get("nodes", []) if n["name"] == child.name), "")
    if child.exit_code == 0:
        return f"{child.name} has left the run" + (", because it is suspended" if state == "suspended" else "")
    return (
        f"{child.name} is gone (exit code {child.exit_code}): its log is {display_path(child.log)}, the command that "
        f"brings it back is in {display_path(child.log.with_name('commands.txt'))}"
    )


def _coordinator_finished(run_dir: Path) -> bool:
    """The coordinator says in status.json that the run is finished and sealed."""
    try:
        return bool(json.loads((run_dir / "status.json").read_text()).get("phase") == "finished")
    except (OSError, ValueError):
        return False


# --- after --------------------------------------------------------------------------------------------------------


def _conclude(stage: Stage, fleet: Any, finished: bool, seconds: float) -> int:
    from trainer.summary import Witness, summarise
    from trainer.view import print_summary

    try:
        summary = summarise(stage.run_dir, Witness(stage.cheats, fleet.peak_pss_mib, seconds))
    except (HeadwaterError, OSError) as exc:
        sys.stderr.write(f"the run left no readable ledger: {exc}\nlook into {stage.run_dir}/logs\n")
        return 130 if stage.interrupted else 1
    write_atomic(stage.run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    if stage.quiet:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        print_summary(summary, stage.run_dir)
    left = fleet.leftovers()
    if left:
        sys.stderr.write(f"processes that did not end: {left}; end them with: kill -9 {' '.join(map(str, left))}\n")
    if stage.interrupted:
        sys.stderr.write(f"interrupted; the archive so far is whole: verifier audit {stage.run_dir}\n")
        return 130
    if not finished:
        sys.stderr.write("\n".join([*(note for _, note in stage.notes[-5:]), "the run did not finish"]) + "\n")
        return 1
    return 0
