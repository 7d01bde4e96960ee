"""A picture as lines of text: the whole screen, cut to a width and a height. Pure, and cheap (a few milliseconds).

    title, time            what happens now      the tree of processes      those who deceive      news
    progress               what is waited for    (who pulls from whom)      and their fate
                           rollouts, reward

What does not fit is shortened or left out in whole words, columns and lines, never in the middle of a reason: each
cell has the same in fewer words, columns go in a fixed order, the curve becomes one line, honest nodes are counted
instead of listed. Colour repeats what the words say; without it nothing is lost.

Not covered: terminals (`trainer.terminal`), where the facts come from (`trainer.roster`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from protocol.commands import printable, several
from trainer.headline import head, reward
from trainer.picture import Picture
from trainer.roster import Row, rows, tree
from trainer.spans import Line, cell, fit, length, size, wrapped

MARKS = {"alive": "●", "loading": "◌", "quiet": "○", "gone": "✗", "left": "✓", "off": "·", "unknown": "?"}
_HEALTH_STYLE = {"alive": "good", "loading": "warn", "quiet": "warn", "gone": "bad", "unknown": "warn"}
_STANDING_STYLE = {"active": "good", "probation": "warn", "paused": "warn", "suspended": "bad"}
_CAUGHT = ("is suspended", "rejected")
"""Words of the events a person waits for; they are shown in red."""

_DROPPED_FIRST = ("sent", "step", "rejected", "accepted", "state")
"""Columns in the order in which a narrow terminal loses them; what a process does stays."""
_DOING_CELLS = 20
_WIDE = 100
_FATE_CELLS = 38
"""Two dishonest nodes share a line only where each has this much: a name and a reason code."""


# --- the tree -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Which columns are shown, and how wide: (attribute of a row, heading, cells) from left to right."""

    name: int
    shown: tuple[tuple[str, str, int], ...]
    doing: int


def columns(listed: Sequence[Row], width: int) -> Columns:
    """What fits: columns go in a fixed order until what a process does has room."""
    longest = max((cell_len(row.branch + row.name) for row in listed), default=0)
    name = max(11, min(longest, 26 if width >= _WIDE else 18, width - 4))
    rejected = ("rejected", 8) if width >= _WIDE else ("reject", 6)
    every = [("state", "state", 9), ("step", "step", 4), ("accepted", "accepted", 8), ("rejected", *rejected)]
    every.append(("sent", "sent", 6))
    for dropped in ("", *_DROPPED_FIRST):
        every = [column for column in every if column[0] != dropped]
        left = width - 2 - name - sum(1 + cells for _, _, cells in every) - 2
        if left >= _DOING_CELLS:
            break
    return Columns(name, tuple(every), max(0, left))


def _heading(layout: Columns) -> Line:
    line = "  " + cell("who", layout.name)
    for attribute, heading, cells in layout.shown:
        line += " " + cell(heading, cells, right=attribute != "state")
    return [(line + "  " + fit(("does, or waits for", "does", ""), layout.doing), "bold")]


def _row(row: Row, layout: Columns) -> Line:
    line: Line = [(MARKS[row.health] + " ", _HEALTH_STYLE.get(row.health, "dim")), (row.branch, "dim")]
    line.append((cell(row.name, layout.name - cell_len(row.branch)), "bad" if row.dishonest else ""))
    for attribute, _, cells in layout.shown:
        if attribute == "state":
            state = row.standing if row.standing and row.health not in ("loading", "quiet", "gone") else row.health
            style = _STANDING_STYLE.get(state) or _HEALTH_STYLE.get(state, "dim")
            line.append((" " + cell(state, cells), style))
            continue
        value = getattr(row, attribute)
        text = size(value) if attribute == "sent" else "" if value is None else str(value)
        line.append((" " + cell(text, cells, right=True), ""))
    line.append(("  " + fit(row.doing, layout.doing), "bad" if row.health == "gone" else ""))
    return line


def _shorter(listed: list[Row], room: int) -> tuple[list[Row], list[Row]]:
    """The rows that fit, and those left out: nodes that are well are counted first, then validators that are."""
    if len(listed) <= room:
        return listed, []
    room = max(0, room - 1)  # a line that counts them
    well = [row for row in listed if row.health in ("alive", "off", "loading") and row.standing != "paused"]
    nodes = [row for row in reversed(well) if row.role == "inference"]
    validators = [row for row in reversed(well) if row.role == "validator"]
    dropped = {row.key for row in (nodes + validators)[: len(listed) - room]}
    kept = [row for row in listed if row.key not in dropped][:room]
    keys = {row.key for row in kept}
    return kept, [row for row in listed if row.key not in keys]


def _tree(listed: list[Row], width: int, room: int) -> list[Line]:
    """Heading and rows, at most `room` lines; where there is no room for both, one line that counts."""
    if not room:
        return []
    kept, left = _shorter(listed, max(1, room - 1))
    layout = columns(kept, width)
    lines = [_heading(layout), *(_row(row, layout) for row in kept)] if kept else []
    if left:
        counts = [(sum(row.health == health for row in left), health) for health in ("alive", "loading")]
        counts.append((sum(row.accepted or 0 for row in left), "rollouts accepted"))
        told = ", ".join(f"{count} {word}" for count, word in counts if count)
        who = f"and {len(left)} more" if kept else several(len(left), "process", "processes")
        lines.append([("  " + fit((f"{who}: {told}", who) if told else (who,), width - 2), "dim")])
    return lines


# --- those who deceive --------------------------------------------------------------------------------------------


def _fates(listed: Sequence[Row], staged: bool, width: int, across: int) -> list[Line]:
    """Each dishonest or suspended node and what became of it, `across` of them in a line.

    Where `across` is 0, those who are out are only named, and those who are not come first.
    """
    if not listed:
        return []
    caught = [row for row in listed if row.standing == "suspended"]
    words = f"{len(caught)} of {len(listed)} dishonest nodes caught" if staged else f"{len(caught)} suspended"
    lines: list[Line] = [[("  " + fit((words,), width - 2), "bold")]]
    if across == 0:
        at_large = [row for row in listed if row.standing != "suspended"]
        lines += _fates(at_large, staged, width, 1)[1:]
        named = wrapped(", ".join(row.name for row in caught), width - 2) if caught else []
        return lines + [[("✗ " if name is named[0] else "  ", "bad"), (name, "bad")] for name in named]
    room = (width - 2 * (across - 1)) // across
    name = min(max(cell_len(row.name) for row in listed), max(6, room // 2 - 2))
    for start in range(0, len(listed), across):
        line: Line = []
        for row in listed[start : start + across]:
            out = row.standing == "suspended"
            mark, style = ("✗", "bad") if out else (MARKS[row.health], _HEALTH_STYLE.get(row.health, "dim"))
            known = row.health not in ("loading", "gone", "quiet")
            text = fit(row.fate if out or known else row.doing, room - name - 4)
            line += [("  " * bool(line), ""), (mark + " ", style), (cell(row.name, name) + "  ", "bad")]
            line.append((cell(text, room - name - 4), "bad" if out else ""))
        lines.append(line)
    return lines


# --- news ---------------------------------------------------------------------------------------------------------


def _news(picture: Picture, width: int, room: int) -> list[Line]:
    """The newest events that fit into `room` lines, each whole and once, wrapped between words."""
    happened = [
        (float(event.get("time") or 0.0), str(event["text"])) for event in picture.status.get("recent_events", [])
    ]
    happened += [(picture.began + seconds, text) for seconds, text in picture.notes]
    times = Counter(words for _, words in happened)
    said: set[str] = set()
    out: list[Line] = []
    for moment, words in sorted(happened, key=lambda one: one[0], reverse=True):
        if words in said:
            continue
        said.add(words)
        if picture.began:
            stamp = f"{length(moment - picture.began):>6}  "
        else:
            stamp = time.strftime("%H:%M:%S  ", time.localtime(moment))
        style = "bad" if any(word in words for word in _CAUGHT) else ""
        again = f" ({times[words]} times)" if times[words] > 1 else ""
        lines = wrapped(printable(words) + again, max(8, width - len(stamp)))
        if len(lines) > room - len(out):
            break
        block: list[Line] = [[(" " * len(stamp), ""), (line, style)] for line in lines]
        block[0][0] = (stamp, "dim")
        out = block + out
    return out


# --- the whole ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How richly the parts are shown."""

    curve: int
    """Lines of the reward curve."""
    across: int
    """Dishonest nodes in one line."""
    news: int
    """Lines of news that must remain."""
    gaps: bool
    """Empty lines between the parts."""


PLANS = (
    Plan(8, 1, 8, True),
    Plan(5, 1, 5, True),
    Plan(5, 1, 4, False),
    Plan(3, 1, 3, False),
    Plan(1, 1, 3, False),
    Plan(1, 2, 3, False),
    Plan(1, 2, 2, False),
)
"""Tried from rich to poor; after the last one the tree is shortened."""

_LEAST_TREE = 7
"""Lines of the tree that are worth more than the reasons of those who are out already."""

UNBOUNDED = Plan(5, 1, 8, True)
"""For output that scrolls."""


def screen(picture: Picture, width: int, height: int | None = None) -> list[Line]:
    """The whole picture in lines of at most `width` cells; at most `height` of them, None for as many as it takes."""
    width = max(20, width)
    found = rows(picture)
    apart = {row.key for row in found if row.dishonest or row.standing == "suspended"}
    listed = tree(row for row in found if row.key not in apart)
    fates = sorted((row for row in found if row.key in apart), key=lambda row: row.name)
    staged = bool(picture.dishonest or picture.kinds)
    top = head(picture, found, width)

    whole_tree = _tree(listed, width, len(listed) + 2)
    told = {across: _fates(fates, staged, width, min(across, max(1, width // _FATE_CELLS))) for across in (0, 1, 2)}

    def assembled(plan: Plan, tree_lines: list[Line], news_room: int) -> list[Line]:
        lines: list[Line] = []
        news = _news(picture, width, news_room) if news_room else []
        for part in (top, reward(picture, width, plan.curve), tree_lines, told[plan.across], news):
            lines += [*([[]] if plan.gaps and lines and part else []), *part]
        return lines

    if height is None:
        return assembled(UNBOUNDED, whole_tree, UNBOUNDED.news)
    for plan in PLANS:
        curve = 0 if not picture.rows else 1 if plan.curve == 1 else plan.curve + 1
        parts = [len(part) for part in (top, whole_tree, told[plan.across]) if part] + [curve] * bool(curve)
        room = height - sum(parts) - plan.gaps * len(parts)
        if room >= plan.news:
            return assembled(plan, whole_tree, room)
    plan = PLANS[-1]
    news = len(_news(picture, width, plan.news))
    room = height - len(assembled(plan, [], 0)) - news
    if room < _LEAST_TREE:
        plan = replace(plan, across=0)
        room = height - len(assembled(plan, [], 0)) - news
    return assembled(plan, _tree(listed, width, max(2, room)), news)[:height]
