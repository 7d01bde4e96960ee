"""The live screen and the plain lines: they fit the terminal, say what happens, and strangers can't write on them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer.status import as_text
from trainer.view import Picture, View, curve, display_path, doing, print_summary, render, take_picture

WHY = {"quantised": "proof-mismatch", "small-model": "token-not-forced", "reward": "reward-mismatch"}


def node(name: str, role: str = "inference", state: str = "active", reason: str = "") -> dict[str, Any]:
    return {"key": name.encode().hex(), "name": name, "role": role, "state": state, "accepted": 1234, "rejected": 4,
            "reason": reason, "step": 17, "last_seen_s": 0.5}  # fmt: skip


def picture(honest: int = 3, steps: int = 60) -> Picture:
    nodes = [node(f"node-{i}") for i in range(honest)] + [node(n, state="suspended", reason=r) for n, r in WHY.items()]
    nodes += [node("validator-1", "validator", "probation"), node("relay-1", "relay", "probation")]
    events = [{"time": 1000.0 + i, "text": f"{n} is suspended: a second validator, drawn independently, also found "
               f"that the run's model did not compute them ({r})"} for i, (n, r) in enumerate(WHY.items())]  # fmt: skip
    status = {"nodes": nodes, "rollouts": {"accepted": 3, "rejected": 8, "pending": 1}, "recent_events": events,
              "phase": "running", "run": "ab" * 32, "time": 1000.0, "step": 3, "steps": 150}  # fmt: skip
    rows = [{"event": "step", "step": i, "reward_mean": i / 60, "time": 1000.0 + i} for i in range(steps)]
    dishonest = frozenset(name.encode().hex() for name in WHY)
    return Picture("demo", 88.0, 150, 8, 990.0, status, rows, None, dishonest, [])


def screen(shown: Picture, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(
        render(shown, width, height)
    )
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 40), (100, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize("honest", [3, 64])
def test_the_screen_fits_the_terminal_and_cuts_no_column(width: int, height: int, honest: int) -> None:
    lines = screen(picture(honest), width, height)
    assert len(lines) < height
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "…" not in text
    for name, reason in WHY.items():
        (line,) = [line for line in lines if line.startswith(f"│ {name}") and "dishonest" in line]
        assert "suspended" in line and reason in line
    if honest == 64:
        assert "more" in text


def test_a_reason_is_given_in_words_where_there_is_room() -> None:
    assert "token-not-forced: the lease's seed forces other tokens" in "\n".join(screen(picture(), 120, 40))
    assert "the lease's seed forces" not in "\n".join(
        line for line in screen(picture(), 80, 40) if "suspended " in line
    )


def test_the_newest_event_is_shown_whole_with_its_moment() -> None:
    lines = screen(picture(), 80, 24)
    assert any(line.startswith("│   12 s  reward is suspended") for line in lines)
    assert any("(reward-mismatch)" in line for line in lines[-4:])


def test_the_curve_runs_from_left_to_right_and_bottom_to_top() -> None:
    assert curve([], 4, 2) == ["    ", "    "]
    assert curve([0.0, 0.5, 1.0], 5, 2) == ["  █  ", " ██  "]
    lines = curve([i / 299 for i in range(300)], 60, 5)
    assert all(len(line) == 60 for line in lines)
    heights = [sum(line[column] != " " for line in lines) for column in range(60)]
    assert heights == sorted(heights) and heights[0] <= 1 and heights[-1] == 5


def test_it_says_what_happens_before_the_first_step() -> None:
    seen = Picture("demo", members=3)
    told = [doing(seen)]
    seen.status = {"nodes": [node("relay-1", "relay")], "phase": "waiting for weights"}
    told.append(doing(seen))
    seen.sft = {"step": 45, "loss": 0.38, "done": False}
    told.append(doing(seen))
    seen.sft = {"step": 100, "loss": 0.33, "done": True}
    seen.status = {"nodes": [node(str(i)) for i in range(3)], "phase": "running"}
    told.append(doing(seen))
    seen.status = {**seen.status, "rollouts": {"pending": 4}}
    told.append(doing(seen))
    seen.rows = [{"step": 0}]
    told.append(doing(seen))
    seen.status = {**seen.status, "phase": "finished"}
    told.append(doing(seen))
    for words, sentence in zip(
        ("loads its libraries", "1 of 3 machines", "step 45, loss 0.380", "weights go out", "being checked",
         "the learner learns", "finished"), told, strict=True,
    ):  # fmt: skip
        assert words in sentence


HOSTILE = "[red]\x1b[2J\u202eevil\n[/]"


def test_what_strangers_call_themselves_never_reaches_the_terminal_raw() -> None:
    shown = picture()
    shown.status = {**shown.status, "nodes": [node(HOSTILE, reason=HOSTILE)],
                    "recent_events": [{"time": 1.0, "text": HOSTILE + " joined"}]}  # fmt: skip
    out = io.StringIO()
    with View(quiet=False, out=out) as view:
        view.show(shown)
    texts = ["\n".join(screen(shown, 80, 24)), out.getvalue(), as_text({**shown.status})]
    for text in texts:
        assert "[red]" in text and not set("\x1b\u202e") & set(text)
    assert out.getvalue().count("\n") == 2, "one event, one step line"


def test_piped_output_is_plain_lines_and_quiet_is_silent(tmp_path: Path) -> None:
    shown = picture(steps=60)
    rows = shown.rows
    (tmp_path / "status.json").write_text(json.dumps(shown.status))
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:1]))
    piped, silent = io.StringIO(), io.StringIO()
    with View(quiet=False, out=piped) as view, View(quiet=True, out=silent) as quiet:
        for _ in range(3):
            for one in (view, quiet):
                one.show(take_picture(tmp_path, shown))
        (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        view.show(take_picture(tmp_path, shown))
    assert silent.getvalue() == ""
    lines = piped.getvalue().splitlines()
    assert [line.split("] ")[1][:8] for line in lines[-2:]] == ["step 1/1", "step 60/"]
    assert len(lines) == 5, "each event once"
    assert piped.getvalue().isascii()


SUMMARY = {
    "steps": 150, "reward_first": 0.12, "reward_last": 0.88, "seconds": 107.0, "honest_verified": 21220,
    "honest_rejected": 0, "rollouts_accepted": 21224, "bytes_sent": 1 << 30, "peak_pss_mib": 3586.0,
    "rollouts_pending": 2, "rollouts_inconclusive": 0,
    "cheats": {
        "small-model": {"submitted": 4, "dishonest": 4, "caught": 4, "first_caught_after_tokens": 5,
                        "node_state": "suspended"},
        "replay": {"submitted": 0, "dishonest": 0, "caught": 0, "first_caught_after_tokens": None,
                   "node_state": "never joined"},
    },
}  # fmt: skip


def test_the_summary_can_be_read_and_its_commands_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run_dir = tmp_path / ("a long name with spaces " * 4).strip() / "[bold]run"
    out = io.StringIO()
    print_summary(SUMMARY, run_dir, out)
    lines = out.getvalue().splitlines()
    assert f"  verifier audit '{run_dir}'" in lines
    assert all(len(line) <= 80 for line in lines if not line.startswith("  ") or "commands" in line)
    assert any(
        line.startswith("small-model 4 of 4 dishonest rollouts caught, one after 5 tokens; suspended") for line in lines
    )
    assert any("sent nothing; the node is never joined" in line for line in lines)
    assert any("2 rollouts open" in line for line in lines)


def test_paths_are_shown_as_one_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "runs" / "one") == "runs/one"
    assert display_path(Path("/somewhere/else")) == "/somewhere/else"
    assert display_path(tmp_path / "a b") == "'a b'"
