"""What a node tells: one format of events for programs, and a terminal that strangers' words can't move."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node.log import EventLog
from protocol.commands import os_error_in_words
from protocol.errors import UsageError


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_carry_run_node_lease_and_step_and_never_a_line_break(tmp_path):
    log = EventLog(file=tmp_path / "log.jsonl")
    log.event("starting", reason="before anything is known")
    log.bind(run=b"\x01" * 32, node=b"\x02" * 32)
    log.event("lease", lease=b"\x03" * 16, step=4, name='evil\n\x1b[2J{"event": "forged"}\u202e')
    log.event("lease.failed", level="warning", lease=b"\x03" * 16, reason="x" * 5000)
    log.close()
    first, second, third = lines(tmp_path / "log.jsonl")
    assert first["level"] == "info" and "run" not in first
    assert (second["run"], second["node"], second["lease"], second["step"]) == ("01" * 32, "02" * 32, "03" * 16, 4)
    assert not any(char in second["name"] for char in "\n\x1b\u202e") and "forged" in second["name"]
    assert third["level"] == "warning" and len(third["reason"]) < 1000


def test_a_long_log_rotates_and_keeps_whole_lines(tmp_path):
    log = EventLog(file=tmp_path / "log.jsonl")
    log._file._rotate_bytes = 2000
    for number in range(100):
        log.event("tick", number=number)
    log.close()
    files = sorted(tmp_path.glob("log.jsonl*"))
    assert len(files) == 3 and all(path.stat().st_size <= 2000 for path in files)
    numbers = [event["number"] for path in reversed(files) for event in lines(path)]
    assert numbers == list(range(numbers[0], 100))


def test_a_log_file_that_cannot_be_written_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give another"):
        EventLog(file=tmp_path / "file" / "log.jsonl")
    assert "full" in os_error_in_words(OSError(28, "No space left", "x"))


SCRIPT = """
from node.log import EventLog
log = EventLog()
log.say("hello \\x1b[2Jworld")
log.status("inference | active | waiting for a lease, and a very long explanation " + "x" * 300)
log.say("news")
log.status("inference | active | working")
log.last_words("the run is finished", "24 rollouts done")
log.close()
"""


def screen(raw: str) -> list[str]:
    """The lines a terminal shows after these characters: CR returns, ESC[K clears to the right."""
    shown, row = [], ""
    at = 0
    while at < len(raw):
        if raw.startswith("\x1b[K", at):
            at += 3  # a row is only ever cleared right after its start
        elif raw[at] == "\r":
            if raw.startswith("\r\n", at):
                shown.append(row)
                row, at = "", at + 2
                continue
            row, at = "", at + 1
        else:
            row += raw[at]
            at += 1
    return [*shown, row]


def test_at_the_end_the_terminal_shows_sentences_and_no_line_about_what_it_is_doing():
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=child, stderr=child, stdin=child,
        env={**os.environ, "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    os.close(child)
    raw, end = b"", time.monotonic() + 30
    while time.monotonic() < end:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        raw += piece
    os.close(parent)
    assert process.wait(10) == 0
    text = raw.decode()
    assert "\x1b[2J" not in text
    assert "working" not in text.partition("the run is finished")[2]  # not even until the cleaning up is over
    assert screen(text) == ["hello \N{REPLACEMENT CHARACTER}[2Jworld", "news", "the run is finished",
                            "24 rollouts done", ""]  # fmt: skip
    assert all(len(part.removeprefix("\x1b[K")) <= 79 for part in text.replace("\r\n", "\r").split("\r"))


@pytest.mark.parametrize("columns", range(40, 121, 8))
def test_the_last_line_of_a_narrow_terminal_is_whole(columns, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    log = EventLog()
    counts = ["inference", "probation", "step 0 of 1", "0 done, 0 accepted"]
    log.status(" | ".join([*counts, "pulling weights: next weights from relay-1, relay-2"]))
    shown = screen(sys.stdout.getvalue())[-1]
    assert len(shown) < columns
    whole = [*counts, "pulling weights", "pulling weights: next weights from relay-1, relay-2"]
    assert "pulling weights" in shown and all(part in whole for part in shown.split(" | ")), shown


def test_without_a_terminal_sentences_are_plain_and_json_has_no_sentences(tmp_path):
    script = SCRIPT.replace("EventLog()", f"EventLog(file=__import__('pathlib').Path({str(tmp_path / 'l')!r}))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["hello \N{REPLACEMENT CHARACTER}[2Jworld", "news", "the run is finished",
                                        "24 rollouts done"]  # fmt: skip
    script = SCRIPT.replace("EventLog()", "EventLog(as_json=True)") + "log.event('left', code='finished')\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["left"]
