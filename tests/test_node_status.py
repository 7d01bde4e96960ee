"""`node status`: who is waited for, how a node ended, and whether the process that wrote the picture still lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node.status import StatusFile, as_lines, read_status
from protocol.errors import UsageError

NODE = Path(sys.executable).parent / "node"

PICTURE = {
    "run": "ab" * 32, "run_name": "river", "role": "inference", "name": "node-1", "peer_id": "12D3Koo",
    "state": "active", "reason": "", "epoch": 0, "step": 3, "newest_step": 3, "activity": "waiting for a lease",
    "activity_s": 12.0,
    "waits_for": "enough rollouts are under way; waiting for the learner's next weights", "away_s": None, "done": 24,
    "accepted": 20, "rejected": 1, "bytes_up": 3 << 20, "bytes_down": 9 << 20, "engine": "headwater 0.1, running",
    "come_back": "node join --role inference --run r --home h", "ended": "", "conflict": "",
}  # fmt: skip


@pytest.fixture
def home(tmp_path):
    part = tmp_path / "home" / "runs" / ("ab" * 32)
    for folder in ("receipts", "submissions"):
        (part / folder).mkdir(parents=True)
    return tmp_path / "home"


def write(home: Path, **changes: object) -> None:
    StatusFile(home / "runs" / ("ab" * 32) / "status.json").write({**PICTURE, **changes})


def shown(home: Path) -> str:
    return "\n".join(as_lines(read_status(home)))


def test_a_running_node_tells_what_it_does_and_whom_it_waits_for(home):
    (home / "runs" / ("ab" * 32) / "submissions" / ("c" * 32 + ".hws")).write_bytes(b"x")
    write(home)
    text = shown(home)
    assert "waiting for a lease, for 1" in text
    assert "waits for   enough rollouts are under way; waiting for the learner's next weights" in text
    assert "20 accepted and 1 rejected so far" in text and "1 finished leases not sent yet" in text
    assert "3.0 MiB sent, 9.0 MiB received" in text and "headwater 0.1, running" in text
    assert read_status(home)["alive"] and "come back" not in text
    write(home, away_s=300.0, state="paused", reason="proof-mismatch", conflict="/home/x/conflict")
    text = shown(home)
    assert "has not answered for 5 min" in text and "paused: proof-mismatch" in text and "WARNING" in text


def test_numbers_that_cannot_be_are_not_shown(home):
    write(home, step=56, newest_step=53)
    assert "step 56 of 56 published" in shown(home)


def test_a_silent_coordinator_is_told_before_the_call_to_it_is_given_up(home, monkeypatch):
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    write(home, heard_s=0.1, heartbeat_s=5.0)
    assert "coordinator" not in shown(home) and "waits for" in shown(home)
    monkeypatch.setattr("node.status._uptime", lambda: now + 8)
    text = shown(home)
    assert "has not answered for 8 s" in text and "next weights" not in text
    assert read_status(home)["alive"]


def test_an_ended_node_says_how_and_what_brings_it_back(home):
    write(home, ended="the run is finished; thank you")
    picture = read_status(home)
    assert not picture["alive"]  # although this very process still runs
    text = shown(home)
    assert "the run is finished" in text and "waits for" not in text
    assert "come back   node join --role inference" in text


def test_a_killed_node_is_told_from_a_running_one_even_when_its_pid_is_taken_again(home):
    script = (
        "import json,sys,pathlib; from node.status import StatusFile;"
        "StatusFile(pathlib.Path(sys.argv[1])).write(json.loads(sys.argv[2]))"
    )
    path = home / "runs" / ("ab" * 32) / "status.json"
    subprocess.run([sys.executable, "-c", script, str(path), json.dumps(PICTURE)], check=True, timeout=30)
    assert "without a word" in shown(home)
    picture = json.loads(path.read_text())
    picture["pid"] = os.getpid()  # somebody else has that number now
    path.write_text(json.dumps(picture))
    assert not read_status(home)["alive"]
    done = subprocess.run([str(NODE), "status", "--home", str(home)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "killed, or crashed" in done.stdout


def test_the_age_does_not_jump_with_the_wall_clock(home, monkeypatch):
    write(home)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    assert read_status(home)["age_s"] < 60
    monkeypatch.setattr(time, "time", lambda: real() - 7200)
    assert 0 <= read_status(home)["age_s"] < 60


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"null", b"\xff\xfe", b"[" * 99999, b'{"pid": "x"}'])
def test_a_damaged_picture_is_said_in_words(home, raw):
    (home / "runs" / ("ab" * 32) / "status.json").write_bytes(raw)
    with pytest.raises(UsageError, match="next heartbeat"):
        read_status(home)


def test_words_of_strangers_move_no_cursor(home):
    write(home, waits_for="\x1b[2Jnothing\nat all", name="evil\x1b]0;x\x07")
    done = subprocess.run([str(NODE), "status", "--home", str(home)], capture_output=True, text=True, timeout=30)
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout and "nothing" in done.stdout
