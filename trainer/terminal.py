"""Draws lines of styled text on a terminal without flicker: only lines that changed are written, each in full.

The picture lives on the terminal's alternate screen, at absolute positions, so that a stray key or a message of
another program damages nothing for longer than `REPAIR_S`; leaving gives the old screen back, and so does Ctrl-Z until
the program goes on. Every line is padded to the full width instead of erased, and one update is one write, marked as
such for terminals that understand it.

Not covered: input, mouse, terminals without cursor addressing (`is_terminal` is False for them).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from trainer.spans import Line

REPAIR_S = 5.0
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronized update; terminals that don't know it ignore it."""
_RESET = "\x1b[0m"
_CODES = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31", "accent": "36"}
_WITHOUT_COLOUR = {"bold": "1", "dim": "2", "good": "", "warn": "", "bad": "1", "accent": ""}
_ASCII = str.maketrans("─━│├└●◌○✗✓·…▁▂▃▄▅▆▇█", "-=|+`*.ox+-~__..::##")
"""For terminals that are not UTF-8."""


def is_terminal(out: TextIO) -> bool:
    """Whether `out` is a terminal that can be drawn on."""
    return out.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def wants_colour() -> bool:
    """NO_COLOR (no-color.org) turns colour off; bold and dim stay."""
    return not os.environ.get("NO_COLOR")


def speaks_unicode(out: TextIO) -> bool:
    return (getattr(out, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")


def dressed(line: Line, *, colour: bool, unicode: bool) -> str:
    """One line with escape sequences for its styles."""
    codes = _CODES if colour else _WITHOUT_COLOUR
    out = []
    for text, style in line:
        shown = text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode()
        code = codes.get(style, "")
        out.append(f"\x1b[{code}m{shown}{_RESET}" if code and text else shown)
    return "".join(out)


class Terminal:
    """One drawn screen. Use it as a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn: list[Line | None] = []
        self._size = (0, 0)
        self._repaired = 0.0
        self._stoppable = False
        self._colour, self._unicode = wants_colour(), speaks_unicode(out)

    def __enter__(self) -> Terminal:
        # Only a main thread may set handlers, and one that was asked to ignore Ctrl-Z goes on ignoring it.
        self._stoppable = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        )
        if self._stoppable:
            signal.signal(signal.SIGTSTP, self._stop)
        self._write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stoppable:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._write(_LEAVE)

    def _stop(self, *_: object) -> None:
        """Ctrl-Z: give the screen back, stop as anyone would, and draw everything again when we go on.

        Written past the buffer, which may be in the middle of a write of its own when the signal comes.
        """
        number = self._out.fileno()
        os.write(number, _LEAVE.encode())
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        os.write(number, _ENTER.encode())
        self._size = (0, 0)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now."""
        try:
            found = os.get_terminal_size(self._out.fileno())
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[Line], size: tuple[int, int]) -> None:
        """Show `lines`, each at most `size[0]` cells wide, at most `size[1]` of them."""
        width, height = size
        now = time.monotonic()
        if size != self._size or now - self._repaired > REPAIR_S:
            self._drawn = [None] * height
            self._size, self._repaired = size, now
        wanted = [*lines[:height], *([[]] * (height - len(lines)))]
        out = []
        for number, (line, before) in enumerate(zip(wanted, self._drawn, strict=True), start=1):
            if line != before:
                out.append(f"\x1b[{number};1H{self._padded(line, width)}")
        self._drawn = list(wanted)
        if out:
            self._write(_BEGIN + "".join(out) + _END)

    def _padded(self, line: Line, width: int) -> str:
        cells = sum(cell_len(text) for text, _ in line)
        if cells > width:  # never: the screen was made for this width; a wrapped line would push the others down
            text = set_cell_size("".join(text for text, _ in line), width)
            return dressed([(text, "")], colour=self._colour, unicode=self._unicode)
        return dressed(line, colour=self._colour, unicode=self._unicode) + " " * (width - cells)

    def leave_behind(self, lines: Sequence[Line]) -> None:
        """Print lines on the ordinary screen, where they stay; call it after the terminal was given back."""
        dressed_lines = [dressed(line, colour=self._colour, unicode=self._unicode).rstrip() for line in lines]
        self._write("\n".join(dressed_lines) + "\n")
