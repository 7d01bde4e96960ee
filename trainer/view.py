"""What a person sees while a run goes on: one live table and a reward curve, or plain lines when piped.

Everything shown is read from the run directory (`status.json`, `metrics.jsonl`); the view decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainer.summary import latest_steps, read_metrics

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATE_STYLE = {"active": "green", "probation": "yellow", "paused": "magenta", "suspended": "bold red"}


@dataclass
class Picture:
    """What is known of a run at one moment."""

    title: str
    seconds: float = 0.0
    steps: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    sft: dict[str, Any] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Node key (hex) -> what this demo told it to be, shown beside its name."""
    notes: list[str] = field(default_factory=list)

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


def _nodes_table(picture: Picture) -> Table:
    table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
    for name, justify in (
        ("node", "left"),
        ("role", "left"),
        ("state", "left"),
        ("policy", "right"),
        ("accepted", "right"),
        ("rejected", "right"),
        ("why", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "why")  # type: ignore[arg-type]
    order = {"inference": 0, "validator": 1, "relay": 2}
    nodes = sorted(picture.status.get("nodes", []), key=lambda n: (order.get(n["role"], 9), n["name"]))
    for node in nodes:
        label = picture.labels.get(node["key"])
        state = node["state"] if node["role"] == "inference" else ""
        table.add_row(
            node["name"] + (f" [dim](told to: {label})[/]" if label else ""),
            node["role"],
            Text(state, style=_STATE_STYLE.get(state, "")),
            str(node.get("step", "")),
            str(node["accepted"]) if node["role"] == "inference" else "",
            str(node["rejected"]) if node["role"] == "inference" else "",
            str(node.get("reason") or ""),
        )
    return table


def render(picture: Picture, width: int) -> Panel:
    """The whole screen as one renderable."""
    rollouts = picture.status.get("rollouts", {})
    head = Text()
    head.append(f"step {picture.step}/{picture.steps}", style="bold")
    head.append(f"   {picture.seconds:.0f} s")
    if 0 < picture.step < picture.steps and picture.rows:
        begun = float(picture.rows[0].get("time", 0.0))
        pace = (float(picture.rows[-1].get("time", begun)) - begun) / max(1, picture.step - 1)
        head.append(f"   about {pace * (picture.steps - picture.step):.0f} s left")
    head.append(
        f"   rollouts: {rollouts.get('accepted', 0)} accepted, {rollouts.get('rejected', 0)} rejected, "
        f"{rollouts.get('pending', 0)} being checked"
    )
    parts: list[Any] = [head]
    if picture.sft and not picture.rows:
        parts.append(Text(f"stage one, SFT: step {picture.sft.get('step')}, loss {picture.sft.get('loss', 0):.3f}"))
    elif not picture.rows:
        parts.append(Text("starting: processes join, the first weights go out", style="dim"))
    values = [float(row.get("reward_mean", 0.0)) for row in picture.rows]
    if values:
        reward = picture.reward or 0.0
        parts.append(Text(f"reward (verified, mean of a batch): {reward:.2f} over the last 10 steps", style="bold"))
        scale = ["1.0 ", "    ", "0.5 ", "    ", "0.0 "]
        for label, line in zip(scale, curve(values, max(20, width - 12), 5), strict=True):
            parts.append(Text(label, style="dim").append(line, style="cyan"))
    parts.append(_nodes_table(picture))
    events = [event["text"] for event in picture.status.get("recent_events", [])][-4:] + picture.notes[-2:]
    parts.extend(Text("· " + text, overflow="ellipsis", no_wrap=True) for text in events)
    return Panel(Group(*parts), title=picture.title, border_style="blue")


class View:
    """Shows pictures: live on a terminal, as lines when piped, not at all when `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._printed_step = -1
        self._printed_sft = False
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
            self._live.update(render(picture, self._console.width))
        else:
            self._lines(picture)

    def _lines(self, picture: Picture) -> None:
        for note in picture.notes[self._printed_notes :]:
            self._say(picture, note)
        self._printed_notes = len(picture.notes)
        for event in picture.status.get("recent_events", []):
            key = f"{event.get('time')}{event['text']}"
            if key not in self._printed_events:
                self._printed_events.add(key)
                self._say(picture, event["text"])
        if picture.sft and picture.sft.get("done") and not self._printed_sft:
            self._printed_sft = True
            self._say(picture, f"SFT done: loss {picture.sft.get('loss', 0):.3f}")
        if picture.step >= self._printed_step + 10:
            self._printed_step = picture.step
            reward = f"{picture.reward:.2f}" if picture.reward is not None else "-"
            rollouts = picture.status.get("rollouts", {})
            self._say(
                picture,
                f"step {picture.step}/{picture.steps}  reward {reward}  accepted "
                f"{rollouts.get('accepted', 0)}  rejected {rollouts.get('rejected', 0)}",
            )

    def _say(self, picture: Picture, text: str) -> None:
        sys.stdout.write(f"[{picture.seconds:6.1f} s] {text}\n")
        sys.stdout.flush()


def print_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """The end of a demo for a person: what happened, each deceiver's fate, and three commands to try next."""
    console = Console()
    console.print()
    console.print(
        f"[bold]{summary['steps']} steps in {summary['seconds']:.0f} s[/]; reward "
        f"{summary['reward_first']:.2f} -> [bold green]{summary['reward_last']:.2f}[/]"
    )
    console.print(
        f"{summary['honest_verified']} rollouts of honest nodes were checked, {summary['honest_rejected']} of "
        f"them rejected; {summary['rollouts_accepted']} rollouts were learned from or ready to be"
    )
    for kind, fate in summary["cheats"].items():
        after = fate["first_caught_after_tokens"]
        console.print(
            f"[bold]{kind}[/]: {fate['submitted']} rollouts, {fate['dishonest']} of them dishonest, "
            f"{fate['caught']} caught (the first after {after} tokens); the node is {fate['node_state']}"
        )
    console.print(
        f"weights sent: {summary['bytes_sent'] / 2**20:.1f} MiB; peak memory {summary['peak_pss_mib']:.0f} MiB"
    )
    console.print("\nNext:")
    console.print(f"  verifier audit {run_dir}            check every claim of this run from its files alone")
    console.print("  verifier explain token-not-forced   what a rejection means")
    console.print(f"  trainer status {run_dir}            every node and what became of it")
