"""Progress of long work on stderr: a bar on a terminal, now and then a line elsewhere, nothing when quiet.

    deriving verdicts again ━━━━━━━━━━━━━━━━━━━━╸────────────────────  5,312 of 10,604 rollouts  184/s  0:28 left

Work whose size is not known yet shows that something moves, and for how long it has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, Task


class Tell(Protocol):
    """Call it with how much is done, how much there is, and a word on how it goes."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


LINE_EVERY_S = 15.0
"""Between two plain lines: logs stay short, and nobody doubts that it moves."""


@contextlib.contextmanager
def bar(title: str, unit: str = "", *, quiet: bool = False, out: TextIO | None = None) -> Iterator[Tell]:
    """Yields the function to call.

    Args:
        title: what is being done, for example `deriving verdicts again`.
        unit: of the numbers, in the plural; empty for a share of the whole.
        quiet: show nothing (`--json`).
    """
    out = out if out is not None else sys.stderr
    if quiet:
        yield lambda done, total, note="": None
    elif out.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with _drawn(title, unit, out) as tell:
            yield tell
    else:
        yield _lines(title, unit, out)


def _lines(title: str, unit: str, out: TextIO) -> Tell:
    said = started = time.monotonic()
    first: tuple[float, int] | None = None

    def tell(done: int, total: int, note: str = "") -> None:
        nonlocal said, first
        now = time.monotonic()
        if first is None:  # the pace counts from here: what came before was loading, or done by an earlier process
            first = now, done
        if now - said >= LINE_EVERY_S or (done >= total and said > started):
            said = now
            end = f"  {note}" if note else ""
            pace = left(done - first[1], total - first[1], now - first[0])
            out.write(f"{title}: {amount(done, total, unit)}{pace}{end}\n")
            out.flush()

    return tell


@contextlib.contextmanager
def _drawn(title: str, unit: str, out: TextIO) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text

    class Numbers(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            elapsed = task.elapsed or 0.0
            if task.total is None:
                return Text(f"{elapsed:.0f} s")
            done, total = int(task.completed), int(task.total)
            note, first = str(task.fields["note"]), int(task.fields["first"])
            pace = rate(done - first, elapsed, unit) + left(done - first, total - first, elapsed)
            text = amount(done, total, unit) + pace
            return Text(f"{text}  {note}" if note else text)

    console = Console(file=out, highlight=False)
    shown: Progress
    with Progress(TextColumn("{task.description}"), BarColumn(), Numbers(), console=console, transient=True) as shown:
        task = shown.add_task(title, total=None, note="", first=0)
        known = False

        def tell(done: int, total: int, note: str = "") -> None:
            nonlocal known
            if not known:  # the pace counts from here, as in `_lines`
                known = True
                shown.reset(task, total=total, first=done)
            shown.update(task, completed=done, total=total, note=note)

        yield tell


def amount(done: int, total: int, unit: str) -> str:
    """`5,312 of 10,604 rollouts`, or `50%` without a unit."""
    return f"{done:,} of {total:,} {unit}" if unit else f"{100 * done // max(1, total)}%"


def rate(done: int, elapsed: float, unit: str) -> str:
    if not unit or elapsed < 1 or not done:
        return ""
    speed = done / elapsed
    return f"  {speed:.0f}/s" if speed >= 10 else f"  {speed:.1f}/s"


def left(done: int, total: int, elapsed: float) -> str:
    """How long the rest takes at this pace; empty before a pace is known."""
    if not 0 < done < total or elapsed < 1:
        return ""
    seconds = int(elapsed * (total - done) / done)
    return f"  {seconds // 60}:{seconds % 60:02d} left"
