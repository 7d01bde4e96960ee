"""The `trainer` command: help without weight, exit codes, and one clear message for what cannot start."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.manifest import Thresholds
from trainer.init import make_run
from trainer.presets import PRESETS

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")
COMMANDS = ["init", "serve", "learn", "sft", "demo", "status", "key", "block"]


def trainer(*arguments: str, deadline_s: float = 60) -> subprocess.CompletedProcess[str]:
    script = str(Path(sys.executable).with_name("trainer"))
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=deadline_s, check=False)


def test_help_of_every_command_shows_an_example_and_imports_nothing_heavy() -> None:
    program = """
import contextlib, io, sys
from trainer import cli
for command in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([command, "--help"] if command != "-" else ["--help"])
    assert "example: trainer " in out.getvalue(), command
    assert command == "-" or "--json" in out.getvalue(), command
print([name for name in ("torch", "transformers", "libp2p", "trio", "aiohttp", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program, "-", *COMMANDS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_init_makes_a_run_and_refuses_to_make_it_twice(tmp_path: Path) -> None:
    done = trainer("init", str(tmp_path / "run"), "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["run"]) == 64
    again = trainer("init", str(tmp_path / "run"), "--json")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert json.loads(again.stdout)["error"]["code"] == "usage"


def test_init_says_what_to_type_next_and_how_validators_are_admitted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = trainer("init", str(run))
    for words in (f"trainer serve {run}/run.toml", f"trainer learn {run}/run.toml", f"shardcast publish {run}",
                  (run / "join.hw").read_text().strip(), "node id", "[grants] validators"):  # fmt: skip
        assert words in done.stdout, words
    peer = "12D3KooWS5ix63CMERhUwaJbsdvfoWJ6xBYwucYupsmbtdRCtjp9"
    admitted = trainer("init", str(tmp_path / "other"), "--validator", peer)
    assert admitted.returncode == 0 and "no validator" not in admitted.stdout
    assert peer in (tmp_path / "other" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cheats", "laziness"], "no such kind; there are best-of-n, dropper, easy-tasks"),
        (["--nodes", "0"], "--nodes 0 is out of range"),
        (["--steps", "0"], "--steps 0 is out of range"),
        (["--seed", "-1"], "--seed -1 is out of range"),
        (["--environments", "chess"], "no environment 'chess' for tiny; choose from reverse, sort, rotate\n"),
        (["--environments", "word/zzz"], "no environment 'word/zzz' for tiny; choose from reverse, sort, rotate\n"),
        (["--environments", "addition"], "no environment 'addition' for tiny; choose from reverse, sort, rotate\n"),
        (["--environments", "sort,"], "environments 'sort,': empty name; choose from reverse, sort, rotate\n"),
        (["--model", "smollm2", "--environments", "addition/0"], "'addition/0' for smollm2; choose from addition\n"),
        (["--model", "smollm2", "--environments", "sort"], "no environment 'sort' for smollm2; choose from addition\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_demo_that_cannot_start_leaves_nothing_behind(tmp_path: Path, more: list[str], message: str) -> None:
    done = trainer("demo", "--dir", str(tmp_path / "run"), *more)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["demo", "init"])
def test_help_names_every_environment_that_is_taken_and_init_refuses_the_others(tmp_path: Path, command: str) -> None:
    text = " ".join(trainer(command, "--help").stdout.split())
    assert "; ".join(f"{', '.join(p.environments)} ({p.name})" for p in PRESETS.values()).replace(";", ",") in text
    if command == "init":
        done = trainer("init", str(tmp_path / "run"), "--environments", "nosuch")
        assert done.returncode == 2 and "'nosuch' for tiny; choose from reverse, sort, rotate\n" in done.stderr


def test_a_demo_never_starts_in_a_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    done = trainer("demo", "--dir", str(tmp_path))
    assert done.returncode == 2 and "is not empty; give another --dir, or empty it" in done.stderr
    onto = trainer("demo", "--dir", str(tmp_path / "note"))
    assert onto.returncode == 2 and "is a file" in onto.stderr
    make_run(tmp_path / "run", thresholds=NOISE)
    over = trainer("demo", "--dir", str(tmp_path / "run"), "--json")
    assert (
        over.returncode == 2 and f"trainer serve {tmp_path}/run/run.toml" in json.loads(over.stdout)["error"]["message"]
    )
    assert (tmp_path / "note").read_text() == "mine"


@pytest.mark.parametrize("command", ["serve", "learn", "sft", "status"])
def test_a_command_without_a_run_says_how_to_make_one(tmp_path: Path, command: str) -> None:
    for named in (tmp_path, tmp_path / "new", tmp_path / "new" / "run.toml"):
        done = trainer(command, str(named))
        assert done.returncode == 2
        folder = named.parent if named.name == "run.toml" else named
        assert f"{folder}/run.toml does not exist; make a run first: trainer init {folder}\n" in done.stderr


def test_a_folder_that_holds_other_things_is_not_called_a_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "fstab").write_text("not ours")
    done = trainer("status", str(tmp_path))
    assert done.returncode == 2 and f"trainer init {tmp_path}" not in done.stderr
    assert "make one in a folder of its own: trainer init runs/first\n" in done.stderr


def test_every_command_says_its_version() -> None:
    for command in ("trainer", "shardcast", "verifier"):
        script = Path(sys.executable).with_name(command)
        done = subprocess.run([str(script), "--version"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and re.fullmatch(rf"{command} \d+\.\d+\.\d+, protocol 1\.0\n", done.stdout)


def test_unknown_keys_stop_serve_before_anything_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, thresholds=NOISE)
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text + "\n[coordinator2]\n")
    done = trainer("serve", str(run / "run.toml"))
    assert done.returncode == 2 and "coordinator2: unknown key" in done.stderr
    assert not (run / "state").exists()


@pytest.mark.parametrize("section", ["ingress", "control"])
def test_a_port_in_use_stops_serve_with_one_message(tmp_path: Path, section: str) -> None:
    run = tmp_path / "run"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        make_run(run, thresholds=NOISE, **{f"{section}_port": port})
        done = trainer("serve", str(run))
    assert done.returncode == 2, done.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and f"[{section}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert trainer("verify-nothing", str(run)).returncode == 2


def test_a_second_serve_exits_2_and_names_the_holder_and_a_stop_seals_the_ledger(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = make_run(run, thresholds=NOISE)
    script = str(Path(sys.executable).with_name("trainer"))
    first = subprocess.Popen([script, "serve", str(run), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (run / "status.json").exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        second = trainer("serve", str(run))
        assert second.returncode == 2
        assert f"is held by process {first.pid} on {socket.gethostname()} since 20" in second.stderr
        assert "Traceback" not in second.stderr and "{" not in second.stderr
        assert "there is one writer a run" in second.stderr
        shown = trainer("status", str(run))
        assert shown.returncode == 0 and "waiting for weights" in shown.stdout
    finally:
        first.terminate()
        out, err = first.communicate(timeout=20)
    assert first.returncode == 143, err
    assert json.loads(out)["run"] == made.id.hex() and json.loads(out)["finished"] is False
    assert list((run / "ledger").glob("segment-*.hwl"))
    assert _marked(made.id.hex()) == []


def _marked(run: str) -> list[str]:
    """Processes that still carry the run's mark."""
    mark = f"HEADWATER_RUN={run}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
