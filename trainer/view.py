"""Shows pictures of a run while it goes on: a live screen on a terminal, plain lines when piped, nothing when quiet.

The view decides nothing and knows nothing of its own: pictures come from `trainer.picture`, their looks from
`trainer.screen`, the sentences at the end of a demo from `trainer.ending`.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from protocol.commands import printable
from trainer.ending import display_path, print_interrupted, print_summary
from trainer.headline import doing, waits
from trainer.picture import Picture, Process, take_picture
from trainer.roster import rows
from trainer.screen import screen
from trainer.terminal import Terminal, is_terminal

__all__ = ["Picture", "Process", "View", "display_path", "print_interrupted", "print_summary", "take_picture"]

REDRAW_S = 0.4
"""The screen is drawn at most this often: the time on it moves by whole seconds, and drawing costs milliseconds."""

SAY_AGAIN_S = 15.0
"""Piped output that has said nothing for so long says what is waited for."""


class View:
    """Where pictures go. `show` may be called as often as one likes."""

    def __init__(self, quiet: bool, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._quiet = quiet
        self._terminal: Terminal | None = None
        self._shown: Picture | None = None
        self._drawn = 0.0
        self._lines = Lines(self._out)

    def __enter__(self) -> View:
        if not self._quiet and is_terminal(self._out):
            self._terminal = Terminal(self._out).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is None:
            return
        self._terminal.__exit__()
        if self._shown is not None:  # the last picture stays, above whatever comes next
            width, height = self._terminal.size
            self._terminal.leave_behind(screen(self._shown, width, height - 1))

    def show(self, picture: Picture) -> None:
        """Show this picture from now on."""
        self._shown = picture
        if self._quiet:
            return
        if self._terminal is None:
            self._lines.show(picture)
        elif time.monotonic() - self._drawn >= REDRAW_S:
            self._drawn = time.monotonic()
            width, height = size = self._terminal.size
            self._terminal.draw(screen(picture, width, height), size)


class Lines:
    """Plain progress for files and pipes: each event once, every tenth step, each change of what happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._events: set[str] = set()
        self._notes = 0
        self._step = -9
        self._doing = ""
        self._sft_part = 0
        self._said = 0.0

    def show(self, picture: Picture) -> None:
        for event in picture.status.get("recent_events", []):
            key = f"{event.get('time')}{event['text']}"
            if key not in self._events:
                self._events.add(key)
                self._say(picture, str(event["text"]))
        for _, note in picture.notes[self._notes :]:
            self._say(picture, note)
        self._notes = len(picture.notes)
        self._stage_one(picture)
        words = doing(picture)[0]
        if not picture.rows and words != self._doing and not (picture.sft and not picture.sft.get("done")):
            self._doing = words
            self._say(picture, words)
        self._step_line(picture)
        if picture.seconds - self._said > SAY_AGAIN_S:
            waited = waits(picture, rows(picture))[0]
            self._say(picture, f"waits for {waited}" if waited else words)

    def _stage_one(self, picture: Picture) -> None:
        """A line each quarter, and one at the end."""
        sft = picture.sft
        if not sft or self._sft_part > 4:
            return
        loss = float(sft.get("loss") or 0)
        if sft.get("done"):
            self._sft_part = 5
            self._say(picture, f"stage one, supervised, is done: loss {loss:.3f}")
            return
        part = 4 * int(sft.get("step") or 0) // max(1, int(sft.get("steps") or 1))
        if part > self._sft_part:
            self._sft_part = part
            self._say(picture, f"stage one, supervised: step {sft.get('step')}/{sft.get('steps')}, loss {loss:.3f}")

    def _step_line(self, picture: Picture) -> None:
        last = picture.step == picture.steps
        if not picture.rows or picture.step == self._step or not (picture.step >= self._step + 10 or last):
            return
        self._step = picture.step
        reward = "-" if picture.reward is None else f"{picture.reward:.2f}"
        rollouts = picture.status.get("rollouts", {})
        accepted, rejected = rollouts.get("accepted", 0), rollouts.get("rejected", 0)
        self._say(
            picture,
            f"step {picture.step}/{picture.steps}  reward {reward}  accepted {accepted}  rejected {rejected}",
        )

    def _say(self, picture: Picture, text: str) -> None:
        self._said = picture.seconds
        self._out.write(f"[{picture.seconds:6.1f} s] {printable(text)}\n")
        self._out.flush()
