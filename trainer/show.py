"""`trainer status RUN`: the same picture as a demo's, from the files of any run, live or stopped.

Once, or with `--watch` until the run is over or Ctrl-C. Exit codes: 0 shown, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from trainer.ending import display_path
from trainer.headline import doing, traffic, waits
from trainer.picture import Picture, take_picture
from trainer.roster import over, rows, tree
from trainer.screen import screen
from trainer.terminal import dressed, is_terminal, speaks_unicode, wants_colour
from trainer.view import View

LOOK_S = 0.5
PIPED_WIDTH = 120


def show(run_dir: Path, *, watch: bool, as_json: bool, out: TextIO | None = None) -> int:
    """The command, for the directory of a run."""
    out = out if out is not None else sys.stdout
    picture = new_picture(run_dir)
    if watch and not as_json:
        return _watch(run_dir, picture, out)
    take_picture(run_dir, picture)
    if as_json:
        out.write(json.dumps(as_object(picture)) + "\n")
        return 0
    live = is_terminal(out)
    width = _width(out) if live else PIPED_WIDTH
    for line in screen(picture, width):
        shown = line if live else [(text, "") for text, _ in line]
        out.write(dressed(shown, colour=wants_colour(), unicode=speaks_unicode(out)).rstrip() + "\n")
    return 0


def new_picture(run_dir: Path) -> Picture:
    """A picture of the run in this directory, still empty."""
    return Picture(f"run {run_dir.absolute().name}", run_dir=display_path(run_dir))


def as_object(picture: Picture) -> dict[str, Any]:
    """status.json with what the picture adds: `now`, `waiting_for`, and `processes`, a row each."""
    found = rows(picture)
    keep = (
        "key",
        "name",
        "role",
        "health",
        "standing",
        "step",
        "accepted",
        "rejected",
        "outvoted",
        "sent",
        "quiet_s",
        "parent",
    )
    return {
        **picture.status,
        "now": doing(picture, found)[0],
        "waiting_for": waits(picture, found)[0],
        "learned": picture.step,
        "reward": picture.reward,
        "seconds_left": picture.seconds_left,
        "bytes_down": traffic(found)[0],
        "bytes_up": traffic(found)[1],
        "processes": [
            {**{name: value for name, value in asdict(row).items() if name in keep}, "doing": row.doing[0]}
            for row in tree(found)
        ],
    }


def _watch(run_dir: Path, picture: Picture, out: TextIO) -> int:
    """Show it until the run is over. Ctrl-C and SIGTERM end it, with the terminal as it was."""

    def on_signal(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)
    with View(quiet=False, out=out) as view:
        started = time.monotonic()
        while True:
            take_picture(run_dir, picture)
            picture.seconds = time.monotonic() - started
            view.show(picture)
            if over(picture):
                return 0
            time.sleep(LOOK_S)


def _width(out: TextIO) -> int:
    from trainer.terminal import Terminal

    return Terminal(out).size[0]
