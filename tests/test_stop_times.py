"""Every command ends on SIGINT and SIGTERM: within its time, with its exit code, and nothing of it stays.

What stays is looked for by a mark in the environment (processes), in the temporary folder that the command was given,
and by name in the run directory: sockets, and files that are only there while something is being written.

Not covered: kill -9 (`test_demo_kill.py`), `trainer demo` (`test_demo.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.archive_builder import build_archive
from tests.node_run import BIN, ROOT, NodeRun
from tests.scripted_swarm import NOISE
from tests.shardcast_run import SMALL_SHAPES, write_checkpoint
from tests.test_shardcast_processes import keyed
from trainer.init import make_run

MARK = "HEADWATER_STOP_TEST"
SLACK = 10.0
"""Seconds beyond the promise that only this machine's load explains."""

INT, TERM = signal.SIGINT, signal.SIGTERM
heavy = pytest.mark.heavy


class Command:
    """One command in a session and a temporary folder of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="hws-", dir="/tmp"))  # a socket's path is short
        self.errors = directory / f"{self.mark}.stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def wait_until(self, what: str, ready: Callable[[], bool], deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while not ready():
            assert self.process.poll() is None, f"it ended before {what}: {self.said()}"
            assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}: {self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        return self.errors.read_text(errors="replace")[-3000:]

    def marked(self) -> list[int]:
        """Every process that inherited the mark."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in os.scandir("/proc"):
            try:
                if entry.name.isdigit() and needle in Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended, or is not ours
                continue
        return found

    def files(self) -> list[str]:
        """What is in its temporary folder. The folder of torch's compiler is a cache of torch's own."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def close(self) -> None:
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        shutil.rmtree(self.temporary, ignore_errors=True)


def leftovers(folder: Path) -> list[str]:
    """Sockets, and files with a name that only something unfinished has."""
    found = []
    for path in folder.rglob("*"):
        try:
            is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        except FileNotFoundError:  # another process of the run has just finished a file
            continue
        if is_socket or path.name.endswith((".part", ".tmp", ".sock")) or path.name == "server.json":
            found.append(str(path.relative_to(folder)))
    return found


@dataclass
class Started:
    """A command that is being watched."""

    command: Command
    ready: Callable[[], bool]
    """It is at work."""
    codes: dict[int, tuple[int, ...]]
    within_s: float
    """What its documentation promises; 5 s where it promises nothing."""
    folders: tuple[Path, ...] = ()
    """Where nothing unfinished may stay."""
    clean: Callable[[int], bool] = lambda code: True
    """Whether it ended by itself, told from its exit code; else its last resort ended it on this busy machine."""


def stops(start: Callable[[], Started], number: signal.Signals) -> None:
    """Start the command, signal it, look. Up to three times: once it must have ended without its last resort."""
    for _ in range(3):
        if _stop(start(), number):
            return
    pytest.fail("it never ended by itself, but by its last resort")


def _stop(started: Started, number: signal.Signals) -> bool:
    command = started.command
    try:
        command.wait_until("it was at work", started.ready)
        command.process.send_signal(number)
        code = command.process.wait(started.within_s + SLACK)
        clean = started.clean(code)
        assert code in started.codes[number], command.said()
        end = time.monotonic() + SLACK
        while command.marked() and time.monotonic() < end:
            time.sleep(0.05)
        assert command.marked() == [], "processes stay"
        assert "Traceback" not in command.said()
        if clean:
            assert command.files() == [], "temporary files stay"
            assert [left for folder in started.folders for left in leftovers(folder)] == []
        return clean
    finally:
        command.close()


NODE = {INT: (0,), TERM: (0,)}
WEIGHTS = {INT: (130,), TERM: (130,)}
BY_NUMBER = {INT: (130,), TERM: (143,)}

# --- nodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def river(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeRun]:
    """A coordinator and an origin, which nodes can join."""
    river = NodeRun(tmp_path_factory.mktemp("stops") / "run")
    try:
        river.serve()
        river.publish()
        river.advance()
        yield river
    finally:
        river.close()


def joining(directory: Path, run: Path, role: str, home: Path, ready: Callable[[str, Command], bool]) -> Started:
    """`node join`; `ready` is given its log so far."""
    log = directory / "log.jsonl"
    log.unlink(missing_ok=True)
    command = Command(
        directory, str(BIN / "node"), "join", "--role", role, "--run", str(run / "join.hw"),
        "--home", str(home), "--name", f"{role}-1", "--log", str(log),
    )  # fmt: skip

    def said() -> str:
        return log.read_text() if log.exists() else ""

    return Started(command, lambda: ready(said(), command), NODE, 5.0, (home,), lambda _: '"stopped"' in said())


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    "role", ["relay", pytest.param("inference", marks=heavy), pytest.param("validator", marks=heavy)]
)
def test_a_node_of_each_role(river: NodeRun, tmp_path: Path, role: str, number: signal.Signals) -> None:
    home = river.dir / "nodes" / f"{role}-1"
    stops(lambda: joining(tmp_path, river.dir, role, home, lambda said, _: '"joined"' in said), number)


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_node_that_finds_nobody(tmp_path: Path, number: signal.Signals) -> None:
    """Its coordinator is not there; it looks for it, and ends as fast."""
    run, home = tmp_path / "run", tmp_path / "home"
    make_run(run, steps=1, thresholds=NOISE)
    stops(lambda: joining(tmp_path, run, "inference", home, lambda _, command: len(command.marked()) > 1), number)


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("program", ["node.engine", "examples/cheats/quantised.py"])
@pytest.mark.heavy
def test_an_engine(tmp_path: Path, program: str, number: signal.Signals) -> None:
    words = (
        ["-m", program] if program.startswith("node.") else [str(ROOT / program), "--truth", str(tmp_path / "truth")]
    )
    folder = Path(tempfile.mkdtemp(prefix="hws-", dir="/tmp"))
    socket = folder / "engine.sock"

    def start() -> Started:
        command = Command(tmp_path, sys.executable, *words, "--socket", str(socket))
        return Started(command, socket.exists, NODE, 2.0, (folder,))

    try:
        stops(start, number)
    finally:
        shutil.rmtree(folder)


@pytest.mark.heavy
def test_an_engine_whose_node_died_while_it_started(tmp_path: Path) -> None:
    """Killed within its first second, a node can't tell its engine; the engine must not stay for ever."""
    folder = Path(tempfile.mkdtemp(prefix="hws-", dir="/tmp"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    command = Command(
        tmp_path,
        sys.executable,
        "-m",
        "node.engine",
        "--socket",
        str(folder / "engine.sock"),
        "--parent",
        str(gone.pid),
    )
    try:
        assert command.process.wait(60) == 0, command.said()
        assert leftovers(folder) == []
    finally:
        command.close()
        shutil.rmtree(folder)


# --- the operator's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [INT, TERM])
def test_trainer_serve(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    make_run(run, steps=1, thresholds=NOISE)

    def start() -> Started:
        command = Command(tmp_path, str(BIN / "trainer"), "serve", str(run / "run.toml"))
        return Started(command, (run / "status.json").exists, BY_NUMBER, 5.0, (run,))

    stops(start, number)
    assert list((run / "ledger").glob("segment-*.hwl")), "what it leaves is sealed"


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("what", ["sft", "learn"])
@pytest.mark.heavy
def test_the_learner(tmp_path: Path, what: str, number: signal.Signals) -> None:
    """In the middle of stage one, and while it waits for a batch."""
    run = tmp_path / "run"
    make_run(run, steps=1, thresholds=NOISE, overrides={"sft.steps": 5000 if what == "sft" else 1})
    metrics, first = run / "metrics.jsonl", run / "checkpoints" / "step-00000000" / "checkpoint.json"

    def start() -> Started:
        command = Command(tmp_path, str(BIN / "trainer"), what, str(run / "run.toml"))
        ready = metrics.exists if what == "sft" else first.exists
        # 0: it stopped after the step in hand. Otherwise the step took too long, and it left 1.5 s after the signal.
        codes = {number: (0, 128 + number)}
        return Started(command, ready, codes, 2.0, (run,), lambda code: code == 0)

    stops(start, number)


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("what", ["publish", "relay", "pull"])
def test_shardcast(tmp_path: Path, what: str, number: signal.Signals) -> None:
    made = keyed(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    server = made.directory / "published" / "server.json"
    publish = [str(BIN / "shardcast"), "publish", str(made.directory), "--open"]
    if what == "publish":
        stops(
            lambda: Started(Command(tmp_path, *publish), server.exists, WEIGHTS, 5.0, (made.directory,)),
            number,
        )
        return
    origin, store = Command(tmp_path, *publish), tmp_path / "store"
    name = "server.json" if what == "relay" else "model.safetensors"

    def start() -> Started:
        command = Command(
            tmp_path, str(BIN / "shardcast"), what, "--manifest", str(made.directory / "manifest.hw"),
            "--source", json.loads(server.read_text())["url"], "--store", str(store),
        )  # fmt: skip
        return Started(command, lambda: bool(list(store.rglob(name))), WEIGHTS, 5.0, (store,))

    try:
        origin.wait_until("it was serving", server.exists)
        stops(start, number)
    finally:
        origin.close()


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.heavy
def test_verifier_audit(tmp_path: Path, number: signal.Signals) -> None:
    """It materialises weights in a temporary folder: none of that may stay."""
    run = build_archive(tmp_path / "run").root
    before = sorted(str(path) for path in run.rglob("*"))

    def start() -> Started:
        command = Command(tmp_path, str(BIN / "verifier"), "audit", str(run), "--jobs", "2")
        return Started(command, lambda: bool(command.files()), BY_NUMBER, 2.0)

    stops(start, number)
    assert sorted(str(path) for path in run.rglob("*")) == before
