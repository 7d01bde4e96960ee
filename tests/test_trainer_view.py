"""What reaches the terminal: no flicker, plain lines when piped, nothing when quiet, and never a stranger's escapes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.manifest import Thresholds
from tests.test_trainer_screen import node, picture, text_of
from trainer.ending import interrupted_lines, summary_lines
from trainer.init import make_run
from trainer.picture import Picture, take_picture
from trainer.screen import screen
from trainer.show import as_object, new_picture
from trainer.spans import plain
from trainer.terminal import REPAIR_S, Terminal, dressed
from trainer.view import View, display_path, print_summary

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")
HOSTILE = "[red]\x1b[2J\u202eevil\n[/]"


# --- piped --------------------------------------------------------------------------------------------------------


def test_what_strangers_call_themselves_never_reaches_the_terminal_raw() -> None:
    shown = picture()
    shown.status = {**shown.status, "nodes": [node(HOSTILE, reason=HOSTILE, activity=HOSTILE, waits_for=HOSTILE)],
                    "waits_for": HOSTILE,
                    "recent_events": [{"time": 1.0, "text": HOSTILE + " joined"}]}  # fmt: skip
    out = io.StringIO()
    with View(quiet=False, out=out) as view:
        view.show(shown)
    for text in (text_of(shown), text_of(shown, 140, 45), out.getvalue()):
        assert "[red]" in text and not set("\x1b\u202e") & set(text)
    assert out.getvalue().count("\n") == 2, "one event, one step line"


def test_piped_output_is_plain_lines_and_quiet_is_silent(tmp_path: Path) -> None:
    shown = picture()
    rows = shown.rows
    (tmp_path / "status.json").write_text(json.dumps(shown.status))
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:1]) + "\n")
    piped, silent = io.StringIO(), io.StringIO()
    with View(quiet=False, out=piped) as view, View(quiet=True, out=silent) as quiet:
        for _ in range(3):
            for one in (view, quiet):
                one.show(take_picture(tmp_path, shown))
        with (tmp_path / "metrics.jsonl").open("a") as more:
            more.write("\n".join(json.dumps(row) for row in rows[1:]) + "\n")
        view.show(take_picture(tmp_path, shown))
    assert silent.getvalue() == ""
    lines = piped.getvalue().splitlines()
    assert [line.split("] ")[1][:8] for line in lines if "step " in line] == ["step 1/1", "step 60/"]
    assert len([line for line in lines if "is suspended" in line]) == 3, "each event once"
    assert piped.getvalue().isascii()


def test_stage_one_is_told_in_quarters_and_a_long_wait_by_what_it_waits_for() -> None:
    seen = Picture("demo", steps=9, members=4, began=1.0)
    out = io.StringIO()
    with View(quiet=False, out=out) as view:
        for step in range(1, 101):
            seen.sft = {"step": step, "steps": 100, "loss": 1 / step, "done": step == 100}
            view.show(seen)
        seen.seconds = 40.0
        seen.status = {"waits_for": "the first weights", "nodes": [node("x")], "time": 0.0}
        view.show(seen)
        seen.seconds = 41.0
        view.show(seen)
    said = [line.split("] ")[1] for line in out.getvalue().splitlines()]
    assert said[:4] == [*(f"stage one, supervised: step {n}/100, loss {1 / n:.3f}" for n in (25, 50, 75)),
                        "stage one, supervised, is done: loss 0.010"]  # fmt: skip
    assert len([line for line in said if line.startswith("waits for")]) <= 1


def test_metrics_are_read_once_and_a_replaced_file_from_its_start(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", Picture("run")
    path.write_text('{"event": "step", "step": 0, "reward_mean": 0.5}\n{"event": "step", "st')
    assert take_picture(tmp_path, shown).step == 1
    path.open("a").write('ep": 1, "reward_mean": 0.7}\nnot json\n{"event": "sft", "step": 3}\n')
    assert take_picture(tmp_path, shown).step == 2 and shown.sft == {"event": "sft", "step": 3}
    path.write_text('{"event": "step", "step": 0, "reward_mean": 0.1}\n')
    assert take_picture(tmp_path, shown).reward == 0.1


# --- drawn --------------------------------------------------------------------------------------------------------


class Glass(io.StringIO):
    """A terminal that understands what `Terminal` sends: absolute positions, and nothing that moves the rest."""

    encoding = "utf-8"
    width, height = 80, 24

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("none")

    def shown(self) -> list[str]:
        lines = [" " * self.width] * self.height
        for number, text in re.findall(r"\x1b\[(\d+);1H((?:(?!\x1b\[\d+;1H|\x1b\[\?).)*)", self.getvalue(), re.DOTALL):
            clean = re.sub(r"\x1b\[[0-9;]*m", "", text)
            assert "\x1b" not in clean and "\n" not in clean
            lines[int(number) - 1] = clean
        return lines


def test_only_changed_lines_are_written_and_each_in_full() -> None:
    glass = Glass()
    shown = picture()
    with Terminal(glass) as terminal:
        terminal.draw(screen(shown, 80, 24), (80, 24))
        first = glass.tell()
        assert [line.rstrip() for line in glass.shown()][:3] == text_of(shown).splitlines()[:3]
        assert {len(line) for line in glass.shown()} == {80}
        terminal.draw(screen(shown, 80, 24), (80, 24))
        assert glass.tell() == first, "the same picture writes nothing"
        shown.seconds += 1
        terminal.draw(screen(shown, 80, 24), (80, 24))
        second = glass.getvalue()[first:]
        assert second.count(";1H") == 1 and "1:29 gone" in second, "one line changed"
        terminal.draw(screen(shown, 60, 20), (60, 20))
        assert glass.getvalue().count(";1H") == 24 + 1 + 20, "another size draws everything"
    text = glass.getvalue()
    assert text.startswith("\x1b[?1049h") and text.endswith("\x1b[?1049l")
    assert not re.search(r"\x1b\[[0-3]?[JK]", text.removeprefix("\x1b[?1049h\x1b[?25l\x1b[2J")), "nothing is erased"


def test_a_damaged_screen_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    glass, lines = Glass(), screen(picture(), 80, 24)
    with Terminal(glass) as terminal:
        terminal.draw(lines, (80, 24))
        later = time.monotonic() + REPAIR_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        terminal.draw(lines, (80, 24))
    assert glass.getvalue().count(";1H") == 48


def test_the_last_picture_stays_and_colour_is_only_an_aid(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = picture()
    texts = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", "xterm")
        glass = Glass()
        with View(quiet=False, out=glass) as view:
            view.show(shown)
        texts[no_color] = glass.getvalue()
        after = texts[no_color].partition("\x1b[?1049l")[2]
        clean = re.sub(r"\x1b\[[0-9;]*m", "", after)
        assert [line.rstrip() for line in clean.splitlines()] == text_of(shown, 80, 23).splitlines()
    assert "\x1b[31m" in texts[""] and "\x1b[32m" in texts[""]
    assert not re.search(r"\x1b\[3\dm", texts["1"])


def test_a_dumb_terminal_gets_lines_and_one_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    glass = Glass()
    with View(quiet=False, out=glass) as view:
        view.show(picture())
    assert "\x1b" not in glass.getvalue() and "step 60/150" in glass.getvalue()
    drawn = [dressed(line, colour=False, unicode=False) for line in screen(picture(), 80, 24)]
    assert all(line.isascii() for line in drawn) and any("relay-1" in line and "`" in line for line in drawn)


@pytest.mark.parametrize(("honest", "cheats"), [(3, 12), (64, 12)])
def test_drawing_costs_milliseconds_of_cpu(honest: int, cheats: int) -> None:
    """The demo's own process shares the cores with the run: 2.5 drawings a second may take 2% of one."""
    shown, glass = picture(honest, steps=149, cheats=cheats), Glass()
    with Terminal(glass) as terminal:
        started = time.process_time()
        for _ in range(20):
            shown.seconds += 1
            terminal.draw(screen(shown, 80, 24), (80, 24))
        spent = (time.process_time() - started) / 20
    assert spent < 0.08, f"{spent * 1000:.1f} ms of CPU each (about 3 on an idle machine)"


# --- a real terminal ----------------------------------------------------------------------------------------------


def test_status_watch_on_a_real_terminal_ends_with_ctrl_c_and_gives_it_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, thresholds=NOISE)
    (run / "status.json").write_text(json.dumps({**picture().status, "time": time.time()}))
    parent, child = pty.openpty()
    script = str(Path(sys.executable).with_name("trainer"))
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    watching = subprocess.Popen(
        [script, "status", str(run), "--watch"], stdin=child, stdout=child, stderr=subprocess.PIPE,
        env=environment, start_new_session=True, preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(child)
    seen = b""
    try:
        deadline = time.monotonic() + 60
        while b"relay-2" not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(parent, 65536)
        os.write(parent, b"\x03")
        while True:
            try:
                more = os.read(parent, 65536)
            except OSError:  # the other side is closed
                break
            seen += more
        assert watching.wait(timeout=20) == 130
        assert seen.index(b"\x1b[?1049h") < seen.index(b"relay-2") < seen.index(b"\x1b[?1049l")
        assert seen.count(b"\x1b[?25h") == 1 and watching.stderr is not None and watching.stderr.read() == b""
    finally:
        if watching.poll() is None:
            watching.kill()
        watching.wait()
        os.close(parent)


def test_ctrl_z_gives_the_terminal_back_and_fg_draws_it_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, thresholds=NOISE)
    (run / "status.json").write_text(json.dumps({**picture().status, "time": time.time()}))
    parent, child = pty.openpty()
    script = str(Path(sys.executable).with_name("trainer"))
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", "PS1": "ready> "}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=child, stdout=child, stderr=child,
        env=environment, start_new_session=True, preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(child)

    def read_until(mark: bytes) -> bytes:
        seen, deadline = b"", time.monotonic() + 60
        while mark not in seen:
            assert time.monotonic() < deadline, (mark, seen)
            seen += os.read(parent, 65536)
        return seen

    try:
        os.write(parent, f"{script} status {run} --watch\n".encode())
        read_until(b"relay-2")
        os.write(parent, b"\x1a")
        stopped = read_until(b"Stopped")
        assert b"\x1b[?25h\x1b[?1049l" in stopped, "the shell would write on the alternate screen"
        os.write(parent, b"fg\n")
        assert b"\x1b[?1049h" in read_until(b"relay-2")
        os.write(parent, b"\x03")
        read_until(b"\x1b[?1049l")
        os.write(parent, b"exit\n")
        shell.wait(timeout=20)
    finally:
        if shell.poll() is None:
            shell.kill()
        shell.wait()
        os.close(parent)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is started deaf to Ctrl-C


# --- trainer status -----------------------------------------------------------------------------------------------


def test_status_of_a_run_that_never_ran_says_how_to_start_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    script = str(Path(sys.executable).with_name("trainer"))
    done = subprocess.run([script, "status", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    for command in ("trainer serve run/run.toml", "trainer learn run/run.toml", "shardcast publish run"):
        assert command in done.stdout
    assert "\x1b" not in done.stdout


def test_status_of_a_run_that_never_ran_knows_its_steps_and_of_a_demo_how_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, steps=12, thresholds=NOISE)
    assert "step 0/12" in "\n".join(plain(line) for line in screen(take_picture(run, new_picture(run)), 120))
    (run / "demo.json").write_text('{"kinds": []}')
    (run / "status.json").write_text(json.dumps(picture().status | {"phase": "stopped"}))
    text = "\n".join(plain(line) for line in screen(take_picture(run, new_picture(run)), 300))  # tmp_path may be long
    assert f"trainer demo --resume {run} goes on" in text
    assert not any(command in text for command in ("trainer serve", "trainer learn", "shardcast publish"))


def test_status_as_json_tells_who_waits_for_what() -> None:
    shown = picture()
    shown.status["nodes"][2] |= {"activity": "waiting for a lease", "waits_for": "next weights"}
    whole = json.loads(json.dumps(as_object(shown)))
    assert whole["waiting_for"].startswith("96 of 128 rollouts for batch 60")
    assert whole["now"].startswith("nodes sample") and whole["phase"] == "running"
    (waiting,) = [one for one in whole["processes"] if one["name"] == "node-0"]
    assert waiting["doing"] == "waits for next weights" and waiting["health"] == "alive"
    assert [one["name"] for one in whole["processes"]][:5] == ["coordinator", "learner", "origin", "relay-1", "relay-2"]


# --- the end ------------------------------------------------------------------------------------------------------

SUMMARY: dict[str, Any] = {
    "steps": 150, "reward_first": 0.12, "reward_last": 0.88, "seconds": 107.0, "honest_verified": 21220,
    "honest_rejected": 0, "rollouts_accepted": 21224, "bytes_sent": 1 << 30, "peak_pss_mib": 3586.0,
    "bytes_full": 1 << 31, "rollouts_pending": 2, "rollouts_inconclusive": 0,
    "cheats": {
        "small-model": {"submitted": 4, "dishonest": 4, "caught": 4, "first_caught_after_tokens": 5,
                        "node_state": "suspended"},
        "replay": {"submitted": 0, "dishonest": 0, "caught": 0, "first_caught_after_tokens": None,
                   "node_state": "never joined"},
    },
}  # fmt: skip


def test_the_summary_can_be_read_and_its_commands_copied(tmp_path: Path) -> None:
    run_dir = tmp_path / ("a long name with spaces " * 4).strip() / "[bold]run"
    out = io.StringIO()
    print_summary(SUMMARY, run_dir, out)
    lines = out.getvalue().splitlines()
    assert f"  verifier audit '{run_dir}'" in lines
    assert all(len(line) <= 80 for line in lines if str(run_dir) not in line)
    assert "reward       0.12 -> 0.88 in 150 steps, 1:47" in lines
    assert "honest nodes 21,220 rollouts checked, none rejected" in lines
    assert "dishonest    1 of 2 caught and suspended" in lines
    assert any("small-model  4 of 4 dishonest rollouts caught, after 5 tokens" in line for line in lines)
    assert any("replay       sent nothing; the node is never joined" in line for line in lines)
    assert any("1.1 GB of weights sent (0.50 of full)" in line for line in lines)
    assert any("2 rollouts open" in line for line in lines)
    assert sum(line.startswith("  ") and not line.startswith("   ") for line in lines) == 5, "2 fates, 3 commands"
    assert "\x1b" not in out.getvalue()


def test_a_rejected_honest_rollout_is_called_a_bug() -> None:
    text = "\n".join(map(plain, summary_lines({**SUMMARY, "honest_rejected": 3, "cheats": {}}, "runs/x")))
    assert "3 REJECTED: that is a bug, please report it" in text and "dishonest" not in text


def test_a_false_rejection_of_what_a_dishonest_node_did_honestly_is_called_a_bug_too() -> None:
    fates = {"edit": {**SUMMARY["cheats"]["small-model"], "identical_rejected": 2}}
    text = "\n".join(map(plain, summary_lines({**SUMMARY, "cheats": fates}, "runs/x")))
    assert "2 rejected that equal what the lease forces: a bug, please report it" in text


def test_an_interrupted_demo_says_how_it_goes_on() -> None:
    text = "\n".join(map(plain, interrupted_lines("runs/x", 41, 150)))
    for words in ("at step 41 of 150", "trainer demo --resume runs/x", "verifier audit runs/x"):
        assert words in text, words


def test_paths_are_shown_as_one_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "runs" / "one") == "runs/one"
    assert display_path(Path("/somewhere/else")) == "/somewhere/else"
    assert display_path(tmp_path / "a b") == "'a b'"
