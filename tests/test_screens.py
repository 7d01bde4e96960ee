"""The screens in the documents are what the programs draw today, and the documents show all of them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from trainer.ending import interrupted_lines, summary_lines
from trainer.spans import plain

SCREENS = Path(__file__).resolve().parent.parent / "docs" / "screens"
CAPTURE = runpy.run_path(str(SCREENS / "capture.py"))
DRAWN = [shot.name for shot in CAPTURE["SHOTS"]]
AGAIN = "the words or the layout have changed: python docs/screens/capture.py --redraw (or without --redraw: new demos)"
CLOCK = re.compile(r"^\d\d:\d\d:\d\d(?=  )")


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCREENS / f"{name}.json").read_text())
    return found


def shown(name: str) -> list[str]:
    return (SCREENS / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", DRAWN)
def test_a_screen_is_what_its_picture_draws(name: str) -> None:
    picture = stored(name)
    assert shown(name) == CAPTURE["drawn"](picture), AGAIN
    assert max(map(len, shown(name))) <= picture["width"] and len(shown(name)) <= picture["height"]
    coloured = re.sub(r"\x1b\[[0-9;]*m|\x0f|\x1b\(B", "", (SCREENS / f"{name}.ansi").read_text())
    assert [line.rstrip() for line in coloured.splitlines()] == shown(name), "the coloured copy says the same"


@pytest.mark.parametrize("name", DRAWN)
def test_a_real_picture_loses_no_end_of_a_line_at_any_width(name: str) -> None:
    for width in range(40, 121):
        cut = [line for line in CAPTURE["drawn"](stored(name) | {"width": width, "height": 60}) if "…" in line]
        assert cut == [], f"{width} columns"


def test_status_of_a_finished_run_is_what_its_picture_draws() -> None:
    drawn = [CLOCK.sub("", line) for line in CAPTURE["drawn"](stored("status"))]
    on_screen = [CLOCK.sub("", line) for line in shown("status")]
    assert on_screen[-1] == "$"
    start = on_screen.index(drawn[0])
    assert [line for line in on_screen[start:-1] if line] == [line for line in drawn if line], AGAIN


def test_the_end_holds_the_summary_of_today() -> None:
    kept = stored("end")
    lines = [plain(line) for line in summary_lines(kept["summary"], kept["run_dir"])]
    assert "\n".join(lines).strip() in "\n".join(shown("end")), AGAIN
    fates = kept["summary"]["cheats"]
    assert fates and all(fate["caught"] == fate["dishonest"] > 0 for fate in fates.values())
    assert kept["summary"]["honest_rejected"] == 0


def test_the_interrupted_screen_says_how_to_go_on() -> None:
    picture = stored("interrupted")
    lines = [plain(line) for line in interrupted_lines(picture["run_dir"], len(picture["rows"]), picture["steps"])]
    on_screen = "\n".join(shown("interrupted"))
    for line in lines:
        assert re.sub(r"step \d+", "step N", line) in re.sub(r"step \d+", "step N", on_screen), AGAIN


def test_each_screen_shows_what_the_page_says_of_it() -> None:
    promised = {
        "start": ("machines have joined", "loading", "waits for", "to load"),
        "caught": ("dishonest nodes caught", "✗", "caught: reward-mismatch"),
        "middle": ("reward", "rollouts for batch", "left", "accepted", "relay-2"),
        "wide": ("the lease's seed forces other tokens (token-not-forced)",),
        "narrow": ("step", "and ", "more"),
        "end": ("Try next:", "verifier audit", "trainer status"),
        "status": ("who ", "finished"),
        "interrupted": ("trainer demo --resume",),
    }
    for name, words in promised.items():
        text = "\n".join(shown(name))
        for word in words:
            assert word in text, f"{name}: {word}"


def test_the_page_shows_every_screen() -> None:
    page = (SCREENS.parent / "terminal.md").read_text()
    for name in (*DRAWN, "end", "status", "interrupted"):
        block = "\n".join(shown(name))
        assert block in page, f"docs/terminal.md does not show {name}.txt as it is: docs/screens/capture.py --page"
