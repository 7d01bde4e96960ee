"""The bar of long work: drawn on a terminal, a line now and then elsewhere, silent for programs."""

from __future__ import annotations

import io
import time

import pytest

from verifier import progress
from verifier.progress import bar


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_piped_work_tells_a_line_now_and_then_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = clock(monkeypatch), io.StringIO()
    with bar("checking", "rollouts", out=out) as tell:
        for done in range(0, 4001, 100):
            now[0] = 100 + done / 100
            tell(done, 4000, "loss 0.5" if done == 4000 else "")
    assert out.getvalue().splitlines() == [
        "checking: 1,500 of 4,000 rollouts  0:25 left", "checking: 3,000 of 4,000 rollouts  0:10 left",
        "checking: 4,000 of 4,000 rollouts  loss 0.5",
    ]  # fmt: skip


def test_what_came_before_the_first_word_does_not_count_into_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve seconds of loading and 2,000 rollouts that an earlier process did say nothing about the time left."""
    now, out = clock(monkeypatch), io.StringIO()
    with bar("checking", "rollouts", out=out) as tell:
        now[0] = 120
        tell(2000, 4000)
        now[0] = 140
        tell(2200, 4000)
    assert out.getvalue().splitlines() == [
        "checking: 2,000 of 4,000 rollouts", "checking: 2,200 of 4,000 rollouts  3:00 left",
    ]  # fmt: skip


def test_short_piped_work_and_quiet_work_say_nothing() -> None:
    for quiet in (False, True):
        out = io.StringIO()
        with bar("checking", quiet=quiet, out=out) as tell:
            tell(1, 2)
            tell(2, 2)
        assert out.getvalue() == ""
    screen = Screen()
    with bar("checking", quiet=True, out=screen) as tell:
        tell(1, 2)
    assert screen.getvalue() == ""


def test_a_terminal_gets_a_bar_with_numbers_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen()
    with bar("checking", "rollouts", out=screen) as tell:
        tell(5312, 10604, "loss 0.25")
        time.sleep(0.3)  # the bar draws itself ten times a second
    assert "checking" in screen.getvalue() and "5,312 of 10,604 rollouts" in screen.getvalue()
    assert "loss 0.25" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the line is cleared at the end"


def test_a_share_has_no_rate() -> None:
    assert progress.amount(1, 4, "") == "25%" and progress.rate(1, 9, "") == ""
    assert progress.rate(900, 3, "rollouts") == "  300/s" and progress.rate(3, 9, "rollouts") == "  0.3/s"
    assert progress.left(0, 9, 5) == progress.left(9, 9, 5) == progress.left(1, 9, 0.5) == ""
