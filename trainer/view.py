"""What a person sees while a run goes on: one live table and a reward curve, or plain lines when piped.

Everything shown is read from the run directory (`status.json`, `metrics.jsonl`); the view decides nothing. The screen
is cut to the terminal: what does not fit is left out in whole lines, never in the middle of a reason.

Not covered: the summary's numbers (`trainer.summary`).
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from protocol.commands import printable
from trainer.status import by_role, why
from trainer.summary import latest_steps, read_metrics

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATE_STYLE = {"active": "green", "probation": "yellow", "paused": "magenta", "suspended": "bold red"}
_CAUGHT = ("is suspended", "rejected")
"""Words of the events a person waits for; they are shown in red."""


@dataclass
class Picture:
    """What is known of a run at one moment."""

    title: str
    seconds: float = 0.0
    steps: int = 0
    members: int = 0
    """Machines that are to join; 0 when unknown."""
    began: float = 0.0
    """Unix time at which `seconds` was 0."""
    status: Mapping[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    sft: dict[str, Any] | None = None
    dishonest: frozenset[str] = frozenset()
    """Keys (hex) of nodes that were told to misbehave."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What the person who staged the run saw: seconds and a sentence."""

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    @property
    def reward(self) -> float | None:
        tail = [float(row["reward_mean"]) for row in self.rows[-10:] if "reward_mean" in row]
        return sum(tail) / len(tail) if tail else None


def take_picture(run_dir: Path, picture: Picture) -> Picture:
    """Refresh a picture from the run directory. Missing files mean the run has not got that far."""
    try:
        picture.status = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        picture.status = picture.status or {}
    rows = read_metrics(run_dir / "metrics.jsonl")
    picture.rows = latest_steps(rows)
    sft = [row for row in rows if row.get("event") == "sft"]
    picture.sft = sft[-1] if sft else None
    return picture


def doing(picture: Picture) -> str:
    """What the run is busy with, in one sentence. A newcomer waits most of a minute for the first step."""
    status, rollouts = picture.status, picture.status.get("rollouts", {})
    phase = status.get("phase", "")
    if phase == "finished":
        return "finished: every step is done and the ledger is sealed"
    if phase == "draining":
        return "all steps are done; the last verdicts come in"
    if picture.rows:
        return "nodes sample, validators check, the learner learns from what held"
    if picture.sft and not picture.sft.get("done"):
        return f"stage one, supervised: step {picture.sft.get('step')}, loss {picture.sft.get('loss', 0):.3f}"
    joined = len(status.get("nodes", []))
    if not joined:
        return "starting: every role loads its libraries, which takes 15 to 60 seconds"
    if picture.members and joined < picture.members:
        return f"starting: {joined} of {picture.members} machines have joined"
    if rollouts.get("pending", 0) or rollouts.get("accepted", 0):
        return "the first rollouts are being checked"
    if picture.sft:
        return "the weights go out and nodes sample their first rollouts"
    return "all machines have joined; the first weights go out"


def curve(values: list[float], width: int, height: int) -> list[str]:
    """A curve of `values` in 0..1 as `height` lines of block characters, newest right, averaged to `width`."""
    if not values:
        return [" " * width] * height
    columns = []
    count = min(width, len(values))
    for column in range(count):
        start, end = column * len(values) // count, (column + 1) * len(values) // count
        piece = values[start : max(end, start + 1)]
        columns.append(min(1.0, max(0.0, sum(piece) / len(piece))))
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [_BLOCKS[min(8, max(0, round((value * height - row) * 8)))] for value in columns]
        lines.append("".join(cells).ljust(width))
    return lines


def _choose_nodes(picture: Picture, room: int) -> tuple[list[Mapping[str, Any]], int]:
    """The nodes to show, and how many are left out: those that need a look stay longest."""
    nodes = sorted(picture.status.get("nodes", []), key=by_role)
    if len(nodes) <= room:
        return nodes, 0
    plain = [n for n in nodes if n["key"] not in picture.dishonest and n["state"] not in ("paused", "suspended")]
    dropped = {n["key"] for n in plain[max(0, room - 1 - (len(nodes) - len(plain))) :]}
    kept = [n for n in nodes if n["key"] not in dropped][: max(0, room - 1)]
    return kept, len(nodes) - len(kept)


_COLUMNS = {"node": 13, "role": 10, "state": 9, "policy": 6, "accepted": 8, "rejected": 8}
"""Widths that leave 16 characters for the reason on a terminal of 80: the longest reason code."""


def _nodes_table(picture: Picture, room: int, width: int) -> Table:
    """The members; what `width` leaves goes to the reason, in words where they fit, else as its code."""
    table = Table(expand=True, box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name, size in _COLUMNS.items():
        right = name in ("policy", "accepted", "rejected")
        table.add_column(name, no_wrap=True, justify="right" if right else "left", width=size)
    table.add_column("why", no_wrap=True, ratio=1)
    left = width - sum(size + 1 for size in _COLUMNS.values())
    nodes, left_out = _choose_nodes(picture, room)
    for node in nodes:
        dishonest = node["key"] in picture.dishonest
        samples = node["role"] == "inference"
        state = node["state"] if samples else ""
        reason = str(node.get("reason") or "")
        table.add_row(
            Text(printable(node["name"]), style="red" if dishonest else ""),
            Text("dishonest" if dishonest else node["role"], style="red" if dishonest else ""),
            Text(state, style=_STATE_STYLE.get(state, "")),
            str(node.get("step", "")) if state != "suspended" else "",
            str(node["accepted"]) if samples else "",
            str(node["rejected"]) if samples else "",
            Text(printable(why(reason) if len(why(reason)) <= left else reason)),
        )
    if left_out:
        table.add_row(Text(f"and {left_out} more", style="dim"))
    return table


def _events(picture: Picture, room: int, width: int) -> list[Text]:
    """The newest events that fit into `room` lines, each whole."""
    happened = [
        (max(0.0, float(event.get("time") or 0.0) - picture.began), str(event["text"]))
        for event in picture.status.get("recent_events", [])
    ]
    shown: list[Text] = []
    for moment, words in sorted([*happened, *picture.notes], key=lambda one: one[0], reverse=True):
        stamp = f"{moment:4.0f} s  "
        text = Text(stamp + printable(words), style="red" if any(word in words for word in _CAUGHT) else "")
        text.stylize("dim", 0, len(stamp))
        needs = math.ceil(len(text) / max(1, width)) + (1 if len(text) > width else 0)  # words wrap, not characters
        if needs > room:
            break
        room -= needs
        shown.append(text)
    return shown[::-1]


def render(picture: Picture, width: int, height: int = 40) -> Panel:
    """The whole screen as one renderable of at most `height` - 1 lines."""
    rollouts = picture.status.get("rollouts", {})
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"step {picture.step}/{picture.steps}", style="bold")
    head.append(f"  {picture.seconds:.0f} s")
    if 0 < picture.step < picture.steps and picture.rows:
        begun = float(picture.rows[0].get("time", 0.0))
        pace = (float(picture.rows[-1].get("time", begun)) - begun) / max(1, picture.step - 1)
        head.append(f", ~{pace * (picture.steps - picture.step):.0f} s left")
    head.append(
        f"  rollouts: {rollouts.get('accepted', 0)} accepted, {rollouts.get('rejected', 0)} rejected, "
        f"{rollouts.get('pending', 0)} open"
    )
    inner = width - 4
    parts: list[Any] = [head, Text(doing(picture), style="dim", no_wrap=True, overflow="ellipsis")]
    values = [float(row.get("reward_mean", 0.0)) for row in picture.rows]
    rows = 5 if height >= 24 else 3
    if values:
        reward = picture.reward or 0.0
        title = Text(f"verified reward, mean of a batch: {reward:.2f} over the last 10 steps", style="bold")
        title.no_wrap, title.overflow = True, "ellipsis"
        parts.append(title)
        scale = {0: "1.0 ", rows // 2: "0.5 ", rows - 1: "0.0 "}
        for number, line in enumerate(curve(values, max(20, inner - 4), rows)):
            parts.append(Text(scale.get(number, "    "), style="dim").append(line, style="cyan"))
    room = height - 1 - 2 - len(parts)
    known = len(picture.status.get("nodes", []))
    if known:
        table_room = min(known, max(1, room - 4))
        parts.append(_nodes_table(picture, table_room, inner))
        room -= table_room + 1
    parts.extend(_events(picture, room, inner))
    return Panel(Group(*parts), title=picture.title, border_style="blue")


class View:
    """Shows pictures: live on a terminal, as lines when piped, not at all when `quiet`."""

    def __init__(self, quiet: bool, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._console = Console(file=self._out)
        self._quiet = quiet
        self._live: Live | None = None
        self._printed_step = -9
        self._printed_sft = False
        self._printed_doing = ""
        self._printed_events: set[str] = set()
        self._printed_notes = 0

    def __enter__(self) -> View:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, picture: Picture) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(render(picture, self._console.width, self._console.height))
        else:
            self._lines(picture)

    def _lines(self, picture: Picture) -> None:
        for event in picture.status.get("recent_events", []):
            key = f"{event.get('time')}{event['text']}"
            if key not in self._printed_events:
                self._printed_events.add(key)
                self._say(picture, event["text"])
        for _, note in picture.notes[self._printed_notes :]:
            self._say(picture, note)
        self._printed_notes = len(picture.notes)
        if picture.sft and picture.sft.get("done") and not self._printed_sft:
            self._printed_sft = True
            self._say(picture, f"stage one, supervised, is done: loss {picture.sft.get('loss', 0):.3f}")
        now = doing(picture)
        if not picture.rows and now != self._printed_doing and not (picture.sft and not picture.sft.get("done")):
            self._printed_doing = now
            self._say(picture, now)
        if picture.rows and (picture.step >= self._printed_step + 10 or picture.step == picture.steps):
            if picture.step == self._printed_step:
                return
            self._printed_step = picture.step
            reward = f"{picture.reward:.2f}" if picture.reward is not None else "-"
            rollouts = picture.status.get("rollouts", {})
            self._say(
                picture,
                f"step {picture.step}/{picture.steps}  reward {reward}  accepted "
                f"{rollouts.get('accepted', 0)}  rejected {rollouts.get('rejected', 0)}",
            )

    def _say(self, picture: Picture, text: str) -> None:
        self._out.write(f"[{picture.seconds:6.1f} s] {printable(text)}\n")
        self._out.flush()


def print_summary(summary: Mapping[str, Any], run_dir: Path, out: TextIO | None = None) -> None:
    """The end of a demo for a person: what happened, each deceiver's fate, and three commands to try next."""
    console = Console(file=out if out is not None else sys.stdout, highlight=False, emoji=False, markup=False)

    def line(text: str | Text = "") -> None:
        console.print(text, soft_wrap=True)  # a command that is broken in two can't be copied

    line()
    reward = Text("reward      ", style="bold").append(f"{summary['reward_first']:.2f} -> ")
    reward.append(f"{summary['reward_last']:.2f}", style="bold green")
    line(reward.append(f"  in {summary['steps']} steps and {summary['seconds']:.0f} s"))
    line(f"honest      {summary['honest_verified']} rollouts checked, {summary['honest_rejected']} rejected")
    for kind, fate in summary["cheats"].items():
        line(Text(f"{kind:<12}", style="bold red").append(_fate(fate), style="not bold default"))
    line(
        f"weights     {summary['bytes_sent'] / 2**20:.0f} MiB sent; memory at the peak "
        f"{summary['peak_pss_mib']:.0f} MiB, all processes together"
    )
    open_ones = {"open": summary["rollouts_pending"], "undecided": summary["rollouts_inconclusive"]}
    if any(open_ones.values()):
        line("left        " + ", ".join(f"{count} rollouts {word}" for word, count in open_ones.items() if count))
    shown = display_path(run_dir)
    line()
    line("Next:")
    for command, about in (
        (f"verifier audit {shown}", "check every claim of this run from its files alone"),
        ("verifier explain token-not-forced", "what a rejection means"),
        (f"trainer status {shown}", "every node and what became of it"),
    ):
        line(Text(f"  {command}", style="bold"))
        line(f"      {about}")


def _fate(fate: Mapping[str, Any]) -> str:
    """What became of one dishonest node, in one line of at most 68 characters."""
    if not fate["submitted"]:
        return f"sent nothing; the node is {fate['node_state']}"
    caught = f"{fate['caught']} of {fate['dishonest']} dishonest rollouts caught"
    if fate["first_caught_after_tokens"] is not None:
        caught += f", one after {fate['first_caught_after_tokens']} tokens"
    return f"{caught}; {fate['node_state']}"


def display_path(path: Path) -> str:
    """A path as a person would type it from here: relative if it lies below, quoted if it needs to be."""
    try:
        path = path.relative_to(Path.cwd())
    except ValueError:
        pass
    return shlex.quote(str(path))
