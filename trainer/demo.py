"""`trainer demo`: the whole system on one machine, as separate processes, with strangers and deceivers.

It prepares a run directory, starts every role by the command a person would type, watches until the run has
finished, and sums up. It takes no part in the run: learning, leasing, checking and suspending happen in the
processes it started, and everything it reports comes from the files they leave. `--resume` starts the same processes
again on a run that was interrupted.

Not covered: who the dishonest nodes are and when they join (`trainer.deceivers`), the run directory (`trainer.init`).
"""

from __future__ import annotations

import argparse
import json
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
from trainer.deceivers import AT_ONCE, KINDS, Arrivals, kinds_of, processes_of

_STARTUP_S = 180.0
_STALL_S = {"tiny": 120.0, "smollm2": 600.0}
_MEMORY_S = 5.0
"""Between two looks at the memory: the kernel walks every page of 20 processes for it, 50 ms of CPU."""

_NEWS_S = 2.0
"""status.json is about a second old: told earlier, a node's end would come before the reason for it."""
_STEPS = {"tiny": 150, "smollm2": 30}
_STEPS_ALL = {"tiny": 300, "smollm2": 60}
"""With more dishonest kinds than may be in the run together: the last of them need time to join and to be caught."""
_ESSENTIAL = ("coordinator", "learner", "origin")
_COULD_NOT_START = 2
"""Exit code of a command that no repetition helps."""
_FAILED = 1


ENVIRONMENTS_HELP = "tasks: reverse, sort, rotate (tiny), addition (smollm2)"
"""Written out, not read from `trainer.presets`: `--help` imports nothing heavy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options; kept apart so that `--help` imports nothing heavy."""
    parser.add_argument("--model", choices=("tiny", "smollm2"), default=None, help="what to train (default: tiny)")
    parser.add_argument("--environments", default=None, metavar="A,B", help=ENVIRONMENTS_HELP)
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"RL steps (default: {_STEPS['tiny']} tiny, {_STEPS['smollm2']} smollm2; twice that with many --cheats)",
    )
    parser.add_argument("--nodes", type=int, default=None, help="honest inference nodes (default: 3)")
    parser.add_argument(
        "--cheats", default=None, metavar="KIND,..", help=f"dishonest nodes: {', '.join(sorted(KINDS))}, or all"
    )
    parser.add_argument("--dir", type=Path, default=None, metavar="DIR", help="where the run's archive goes")
    parser.add_argument("--seed", type=int, default=None, help="seed of the learner and the tasks (default: 0)")
    parser.add_argument("--resume", type=Path, default=None, metavar="DIR", help="go on with an interrupted demo")
    parser.add_argument("--json", action="store_true", help="print only the summary object")


@dataclass
class Stage:
    """One sitting of one demo."""

    run_dir: Path
    plan: Any
    """`trainer.staging.Plan`."""
    quiet: bool
    sockets: Path
    """A short folder for engine sockets: a Unix socket's path may have 107 bytes, a run directory's more."""
    arrivals: Arrivals
    began: float = field(default_factory=time.time)
    stops: list[int] = field(default_factory=list)
    """Signals that asked it to end."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the start, and a sentence for the person who watches."""

    def note(self, text: str, alarm: bool = False) -> None:
        """Tell whoever watches; an alarm also reaches whoever reads only stderr."""
        self.notes.append((time.time() - self.began, text))
        if alarm and self.quiet:
            sys.stderr.write(f"demo: {text}\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        if not self.quiet:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def main(args: argparse.Namespace) -> int:
    """Run the demo. Exit codes: 0 finished, 1 did not finish, 2 could not start, 130 interrupted."""
    from trainer.processes import Fleet
    from trainer.view import View, display_path

    stage = _reopen(args) if args.resume is not None else _prepare(args)

    def on_signal(number: int, _: FrameType | None) -> None:
        stage.stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    begun = time.monotonic()
    finished = False
    try:
        if args.resume is None:
            stage.say(f"making the run in {display_path(stage.run_dir)}")
            run_id = _make_run(stage)
        else:
            stage.say(f"going on with the run in {display_path(stage.run_dir)}")
            run_id = _run_id(stage.run_dir)
        fleet = Fleet(run_id, stage.run_dir / "logs", _environment())
        try:
            with View(quiet=stage.quiet) as view:
                if not stage.stops:
                    _start_everything(stage, fleet)
                    finished = _watch(stage, fleet, view)
            stage.say("stopping every process of the run")
        finally:
            fleet.stop()
    finally:
        shutil.rmtree(stage.sockets, ignore_errors=True)
    return _conclude(stage, fleet, finished, time.monotonic() - begun)


# --- before -------------------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> Stage:
    """Check what can be checked before anything is written or started."""
    from trainer import preflight
    from trainer.init import check_environments
    from trainer.presets import environment_names, preset
    from trainer.staging import Plan, empty_directory

    model = args.model or "tiny"
    kinds = kinds_of(args.cheats or "")
    nodes = 3 if args.nodes is None else args.nodes
    if nodes < 1 or nodes > 64:
        raise UsageError(f"--nodes {nodes} is out of range; give 1 to 64")
    usual = _STEPS_ALL if len(kinds) > AT_ONCE else _STEPS
    steps = usual[model] if args.steps is None else args.steps
    if steps < 1:
        raise UsageError(f"--steps {steps} is out of range; give at least 1")
    seed = args.seed or 0
    if seed < 0:
        raise UsageError(f"--seed {seed} is out of range; give 0 or more")
    environment_names(args.environments, preset(model))  # before a minute's work
    if model == "smollm2" and not args.json:
        sys.stdout.write("preparing SmolLM2-135M (about a minute, the first time only)\n")
        sys.stdout.flush()
    check_environments(model, args.environments)
    place = (args.dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    preflight.demo(model, nodes, len(kinds), AT_ONCE, steps, place)
    run_dir = empty_directory(place)
    plan = Plan(model, args.environments, steps, nodes, seed, kinds)
    return Stage(run_dir, plan, args.json, Path(tempfile.mkdtemp(prefix="headwater-demo-")), Arrivals(list(kinds)))


def _reopen(args: argparse.Namespace) -> Stage:
    """The stage of an interrupted demo: everything about it is in its directory."""
    from trainer import preflight
    from trainer.staging import reopen, suspended

    fixed = ("model", "environments", "steps", "nodes", "cheats", "dir", "seed")
    given = [name for name in fixed if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--resume takes a demo as it was started; leave out --{', --'.join(given)}")
    run_dir = args.resume.absolute()
    plan = reopen(run_dir)
    over = suspended(run_dir, plan.kinds)
    waiting = [kind for kind in plan.kinds if kind not in over]
    preflight.demo(plan.model, plan.nodes, len(waiting), AT_ONCE, 0, run_dir)
    return Stage(run_dir, plan, args.json, Path(tempfile.mkdtemp(prefix="headwater-demo-")), Arrivals(waiting))


def _make_run(stage: Stage) -> str:
    from trainer.init import make_run
    from trainer.staging import RELAYS, VALIDATORS, node_key

    plan, run_dir = stage.plan, stage.run_dir
    # The evidence against a dropper is counted in leases, and a large lease is seldom given to any one node.
    overrides = {"leases.tasks_per_lease": 4} if plan.model == "tiny" and "dropper" in plan.kinds else {}
    run = make_run(
        run_dir,
        preset=plan.model,
        steps=plan.steps,
        environment=plan.environments,
        seed=plan.seed,
        validators=[node_key(run_dir, name) for name in VALIDATORS],
        relays=[node_key(run_dir, name) for name in RELAYS],
        overrides=overrides,
    )
    plan.save(run_dir)
    return run.id.hex()


def _run_id(run_dir: Path) -> str:
    from protocol.manifest import open_manifest

    return open_manifest((run_dir / "manifest.hw").read_bytes()).id.hex()


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


def _start_everything(stage: Stage, fleet: Any) -> None:
    """Each role by the command a person would type."""
    from trainer.staging import RELAYS, VALIDATORS

    config = str(stage.run_dir / "run.toml")
    fleet.start("coordinator", [_script("trainer"), "serve", config], "coordinator")
    fleet.start("learner", [_script("trainer"), "learn", config], "learner")
    fleet.start("origin", [_script("shardcast"), "publish", str(stage.run_dir)], "origin")
    for role, names in (
        ("relay", RELAYS),
        ("validator", VALIDATORS),
        ("inference", [f"node-{number}" for number in range(1, stage.plan.nodes + 1)]),
    ):
        for name in names:
            fleet.start(name, [_script("node"), *_join(stage, name, role)], role)
    _let_in(stage, fleet)


def _join(stage: Stage, name: str, role: str = "inference") -> list[str]:
    home = str(stage.run_dir / "nodes" / name)
    return ["join", "--role", role, "--run", str(stage.run_dir / "join.hw"), "--home", home, "--name", name]


def _let_in(stage: Stage, fleet: Any) -> None:
    """Start the dishonest nodes whose turn it is."""
    joining = stage.arrivals.next()
    for kind in joining:
        for name, role, command in processes_of(
            kind, stage.run_dir, stage.sockets, stage.plan.transform, lambda name: _join(stage, name)
        ):
            fleet.start(name, command, role)
    if joining:
        verb = "joins" if len(joining) == 1 else "join"
        who = " and ".join(filter(None, [", ".join(joining[:-1]), joining[-1]]))
        stage.note(f"{who} {verb}, told to misbehave; {stage.arrivals.outlook()}")


def _script(name: str) -> str:
    """Our console script beside this interpreter."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise UsageError(f"{path} is missing; install headwater into this environment with `make install`")
    return str(path)


def _watch(stage: Stage, fleet: Any, view: Any) -> bool:
    """Look on until the run has finished, somebody interrupts, or nothing moves any more."""
    from trainer.view import take_picture

    picture = _picture(stage)
    moved = time.monotonic()
    begun, last, measured = moved, None, 0.0
    first_step: int | None = None
    gone: list[tuple[float, Any]] = []
    while not stage.stops:
        now = time.monotonic()
        picture.seconds = now - begun
        picture.processes = _processes(fleet)
        view.show(take_picture(stage.run_dir, picture))
        if now - measured > _MEMORY_S:
            measured = now
            fleet.sample_memory()
        for child in fleet.newly_ended():
            if child.name == "coordinator" and child.exit_code == 0:
                view.show(take_picture(stage.run_dir, picture))
                return True
            gone.append((now, child))
        while gone and now - gone[0][0] > _NEWS_S:
            child = gone.pop(0)[1]
            stage.note(_how_it_ended(child, picture), alarm=child.exit_code != 0)
            if is_hopeless(child.name, child.exit_code, moving=first_step is not None and picture.step > first_step):
                view.show(picture)
                return False
            _see_off(stage, fleet, child)
        if _coordinator_finished(stage.run_dir):
            view.show(take_picture(stage.run_dir, picture))
            return True
        position = _position(picture)
        if position != last:
            moved, last = now, position
        first_step = picture.step if first_step is None else first_step
        limit = _STARTUP_S if picture.step == first_step else _STALL_S[stage.plan.model]
        if now - moved > limit:
            stage.note(f"nothing moved for {limit:.0f} s; look into {stage.run_dir}/logs", alarm=True)
            view.show(picture)
            return False
        time.sleep(0.25)
    return False


def _picture(stage: Stage) -> Any:
    from trainer.staging import RELAYS, VALIDATORS, witnesses
    from trainer.view import Picture, display_path

    plan = stage.plan
    return Picture(
        f"headwater demo: {plan.model}",
        steps=plan.steps,
        dishonest=frozenset(key.hex() for key, _ in witnesses(stage.run_dir, plan.kinds).values()),
        kinds=frozenset(plan.kinds),
        notes=stage.notes,
        members=len(RELAYS) + len(VALIDATORS) + plan.nodes + len(stage.arrivals.here),
        began=stage.began,
        run_dir=display_path(stage.run_dir),
    )


def _processes(fleet: Any) -> dict[str, Any]:
    from trainer.view import Process

    return {child.name: Process(child.role, child.since, child.exit_code) for child in fleet.children}


def _position(picture: Any) -> tuple[Any, ...]:
    """What changes as long as anything goes on."""
    decided = sum(picture.status.get("rollouts", {}).values()) if picture.status else -1
    return picture.step, decided, picture.sft.get("step") if picture.sft else None


def _see_off(stage: Stage, fleet: Any, child: Any) -> None:
    """A dishonest node is gone: its engine leaves with it, and somebody else may come."""
    if child.name not in stage.arrivals.here:
        return
    if child.exit_code == 0:
        fleet.dismiss(f"{child.name}-engine")
    stage.arrivals.left(child.name)
    _let_in(stage, fleet)


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


def is_hopeless(name: str, exit_code: int, moving: bool) -> bool:
    """Whether a run is over because this process ended: one it can't do without said that it could not start, or failed
    before anything moved. The same command would say the same again. Who was killed can be brought back."""
    return name in _ESSENTIAL and (exit_code == _COULD_NOT_START or (exit_code == _FAILED and not moving))


def _coordinator_finished(run_dir: Path) -> bool:
    """The coordinator says in status.json that the run is finished and sealed."""
    try:
        return bool(json.loads((run_dir / "status.json").read_text()).get("phase") == "finished")
    except (OSError, ValueError):
        return False


# --- after --------------------------------------------------------------------------------------------------------


def _conclude(stage: Stage, fleet: Any, finished: bool, seconds: float) -> int:
    from trainer.staging import witnesses
    from trainer.summary import Witness, summarise
    from trainer.view import display_path, print_interrupted, print_summary

    plan, run_dir, interrupted = stage.plan, stage.run_dir, bool(stage.stops)
    plan.seconds += seconds
    plan.peak_pss_mib = max(plan.peak_pss_mib, fleet.peak_pss_mib)
    plan.save(run_dir)
    resume = f"trainer demo --resume {display_path(run_dir)}"
    left = fleet.leftovers()
    if left:
        sys.stderr.write(f"processes that did not end: {left}; end them with: kill -9 {' '.join(map(str, left))}\n")
    try:
        summary = summarise(run_dir, Witness(witnesses(run_dir, plan.kinds), plan.peak_pss_mib, plan.seconds))
    except (HeadwaterError, OSError) as exc:
        sys.stderr.write(f"the run left no readable ledger: {exc}\nlook into {run_dir}/logs\ngo on with: {resume}\n")
        return 130 if interrupted else 1
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
    if stage.quiet:
        sys.stdout.write(json.dumps(summary) + "\n")
    elif interrupted:
        print_interrupted(run_dir, summary["steps"], plan.steps)
    else:
        print_summary(summary, run_dir)
    if interrupted:
        if stage.quiet:
            sys.stderr.write(f"interrupted; go on with: {resume}\n")
        return 130
    if not finished:
        told = [] if stage.quiet else [note for _, note in stage.notes[-5:]]
        sys.stderr.write("\n".join([*told, "the run did not finish", f"go on with: {resume}"]) + "\n")
        return 1
    absent = [kind for kind, fate in summary["cheats"].items() if fate["node_state"] == "never joined"]
    if absent:
        sys.stderr.write(f"{', '.join(absent)} never joined: the run was over before their turn; give more --steps\n")
    return 0
