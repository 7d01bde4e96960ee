"""The upper part of the screen: title, time, progress, what happens, what is waited for, the reward. Pure.

Not covered: single processes (`trainer.screen` draws the tree).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from protocol.commands import printable, several
from trainer.picture import Picture
from trainer.roster import Row, loading, over, silent
from trainer.spans import Line, cell, fit, length, size
from trainer.waiting import NAMES

BLOCKS = " ▁▂▃▄▅▆▇█"
MAX_IN_COLUMN = 4
_LABEL_CELLS = 11
_TITLE_CELLS = 24
"""What a run's name gets before the times beside it get anything: a demo's whole title."""


def head(picture: Picture, found: Sequence[Row], width: int) -> list[Line]:
    """Title, progress, what happens now, what it waits for, rollouts."""
    lines = [title(picture, width), progress(picture, width), _fact("now", doing(picture, found), width)]
    waited = waits(picture, found)
    if waited != ("",):
        lines.append(_fact("waits for", waited, width))
    if picture.status:
        lines.append(_fact("rollouts", _counts(picture, found), width))
    plants = picture.status.get("plants") or {}
    if plants.get("sent"):
        lines.append(_fact("plants", _plants(plants), width))
    return lines


def _plants(counts: dict[str, int]) -> tuple[str, ...]:
    """What the operator's phantoms showed of validators, long and short."""
    sent, altered = several(counts["sent"], "submission"), f"{counts.get('altered', 0)} altered on purpose"
    found = f"{several(counts.get('contradicted', 0), 'validator')} found to be wrong"
    judged = several(counts.get("judged", 0), "verdict")
    return f"{sent}, {altered}; {judged}, {found}", f"{sent}, {found}", found


def doing(picture: Picture, found: Sequence[Row] = ()) -> tuple[str, ...]:
    """What the run is busy with, long and short. A newcomer waits most of a minute for the first step."""
    status, phase = picture.status, picture.status.get("phase", "")
    nodes = status.get("nodes", [])
    ago = length(picture.status_age or 0)
    if phase == "finished":
        return "finished: every step is done and the ledger is sealed", "finished"
    if phase == "stopped":
        step = f"at step {picture.step} of {picture.steps}"
        return (
            f"stopped {ago} ago {step}; {picture.onward} goes on",
            f"stopped {step}",
            "stopped",
        )
    if silent(picture):
        return (
            f"the coordinator has written nothing for {ago}: nothing is leased or counted until it is back",
            f"the coordinator has been silent for {ago}",
            "the coordinator is silent",
        )
    if phase == "draining":
        return "all steps are done; the last verdicts come in", "the last verdicts come in"
    if picture.rows:
        return "nodes sample, validators check, the learner learns from what held", "sampling, checking, learning"
    if picture.sft and not picture.sft.get("done"):
        return "stage one: the learner copies right answers before it explores", "stage one, supervised"
    if not status and not picture.processes and not picture.began:
        return f"nothing runs here yet; start it with: {picture.onward}", "nothing runs yet"
    if not nodes and not picture.processes and phase == "waiting for weights":
        return "waiting for weights and for members: nobody has joined yet", "waiting for weights"
    if not nodes:
        return "starting: every role loads its libraries, which takes 15 to 60 seconds", "starting: libraries load"
    if picture.members and len(nodes) < picture.members:
        joined = f"{len(nodes)} of {picture.members}"
        return f"starting: {joined} machines have joined", f"starting: {joined} joined", "starting"
    rollouts = status.get("rollouts", {})
    if rollouts.get("pending", 0) or rollouts.get("accepted", 0):
        return "the first rollouts are being checked", "first rollouts are checked"
    if picture.sft:
        return "the weights go out and nodes sample their first rollouts", "the first weights go out"
    return "all machines have joined; the learner makes the first weights", "the first weights are made"


def waits(picture: Picture, found: Sequence[Row] = ()) -> tuple[str, ...]:
    """What the run as a whole waits for, long and short; ("",) when for nothing, or nobody knows."""
    if over(picture):
        return ("",)
    if silent(picture):
        return f"the coordinator; bring it back with: {picture.onward}", "the coordinator"
    late = loading(found)
    if late and not picture.rows:
        first = ", ".join(late[:NAMES]) + (f" and {len(late) - NAMES} more" if len(late) > NAMES else "")
        return f"{first} to load", f"{several(len(late), 'process', 'processes')} to load"
    parts = printable(str(picture.status.get("waits_for") or "")).split("; ")
    shorter = [parts[0].partition(mark)[0] for mark in (" for batch ", ": ") if mark in parts[0]]
    return (*("; ".join(parts[:count]) for count in range(len(parts), 0, -1)), *shorter)


def title(picture: Picture, width: int) -> Line:
    """The run's name, a rule, and how long it has taken and will take."""
    left, gone = picture.seconds_left, length(picture.seconds)
    if over(picture):
        ends: tuple[str, ...] = (f"took {gone}", gone) if picture.began else ()
    elif left is None:
        ends = (f"{gone} gone", gone) if picture.began else ()
    else:
        still = f"about {length(left)} left"
        ends = (f"{gone} gone, {still}", f"{gone}, {length(left)} left", gone) if picture.began else (still,)
    name = printable(picture.title)
    end = fit((*ends, ""), max(0, width - 4 - min(cell_len(name), _TITLE_CELLS)))
    name = cell(name, min(cell_len(name), max(8, width - cell_len(end) - 4)))
    rule = max(1, width - cell_len(name) - cell_len(end) - 2)
    return [(name, "bold"), (" " + "─" * rule + " " * bool(end), "dim"), (end, "bold")]


def progress(picture: Picture, width: int) -> Line:
    """The bar of whatever is under way: machines that join, steps of stage one, steps of the run."""
    sft, joined = picture.sft, len(picture.status.get("nodes", []))
    if not picture.rows and sft and not sft.get("done"):
        done, total = int(sft.get("step") or 0), int(sft.get("steps") or 0)
        label, tail = f"stage one {done}/{total}", f"loss {float(sft.get('loss') or 0):.3f}"
    elif not picture.rows and picture.members and joined < picture.members:
        done, total = joined, picture.members
        label, tail = f"joined {done} of {total}", f"{100 * done // total}%"
    else:
        done, total = picture.step, picture.steps
        label, tail = f"step {done}/{total}", f"{100 * done // total if total else 0}%"
    room = width - len(label) - len(tail) - 4
    if room < 8:
        return [(label, "bold"), ("  " + tail, "")]
    full = round(room * min(1.0, done / total)) if total else 0
    return [(label, "bold"), ("  ", ""), ("━" * full, "accent"), ("─" * (room - full), "dim"), (f"  {tail}", "")]


def _fact(label: str, alternatives: Iterable[str], width: int, style: str = "") -> Line:
    return [(f"{label:<{_LABEL_CELLS}}", "dim"), (fit(alternatives, width - _LABEL_CELLS), style)]


def _counts(picture: Picture, found: Sequence[Row]) -> tuple[str, ...]:
    """Rollouts by outcome, bytes both ways."""
    rollouts = picture.status.get("rollouts", {})
    kinds = [("accepted", "accepted"), ("rejected", "rejected"), ("pending", "open"), ("inconclusive", "undecided")]
    told = [f"{rollouts.get(key, 0)} {word}" for key, word in kinds if rollouts.get(key, 0) or key != "inconclusive"]
    down, up = traffic(found)
    sizes = [text for text in (f"weights {size(down)}" * bool(down), f"rollouts {size(up)}" * bool(up)) if text]
    return (
        "; ".join([", ".join(told), *(["sent: " + ", ".join(sizes)] if sizes else [])]),
        "; ".join([", ".join(told[:2]), *(["sent: " + ", ".join(sizes)] if sizes else [])]),
        ", ".join(told),
        ", ".join(told[:2]),
        told[0],
    )


def traffic(found: Sequence[Row]) -> tuple[int, int]:
    """Bytes of weights sent down by the origin and all relays, and of rollouts sent up."""
    down = sum(row.sent or 0 for row in found if row.role in ("origin", "relay"))
    return down, sum(row.sent or 0 for row in found if row.role == "inference")


def reward(picture: Picture, width: int, height: int) -> list[Line]:
    """The reward curve in `height` lines below its title; a single line carries both."""
    values = [float(row.get("reward_mean") or 0.0) for row in picture.rows]
    if not values:
        return []
    number = f"{picture.reward or 0.0:.2f}"
    if height == 1:
        top = max(0.1, *values)
        front, end = f"{'reward':<{_LABEL_CELLS}}", f" highest {top:.2f}"
        room = width - len(front) - 5 - len(end)
        (line,) = curve([value / top for value in values], max(8, room), 1, picture.steps)
        return [[(front, "dim"), (number + " ", "bold"), (line.rstrip(), "accent"), (end * (room >= 8), "dim")]]
    words = (
        f"{number}, mean of the last 10 batches; every reward in it was verified",
        f"{number}, mean of the last 10 batches",
        number,
    )
    lines: list[Line] = [_fact("reward", words, width, "bold")]
    scale = {0: "1.0 ", height - 1: "0.0 "}
    if height % 2:
        scale.setdefault(height // 2, "0.5 ")
    for index, line in enumerate(curve(values, max(8, width - 4), height, picture.steps)):
        lines.append([(scale.get(index, "    "), "dim"), (line.rstrip(), "accent")])
    return lines


def curve(values: list[float], width: int, height: int, total: int = 0) -> list[str]:
    """A curve of `values` in 0..1 as `height` lines of block characters, newest right, averaged to `width`.

    Args:
        total: how many values there will be: the full width stands for all of them, so that the curve grows with the
            progress bar. Ignored where one column would stand for more than `MAX_IN_COLUMN` of them.
    """
    if not values:
        return [" " * width] * height
    count = min(width, len(values))
    if len(values) <= total <= width * MAX_IN_COLUMN:
        count = max(1, width * len(values) // total)
    columns = []
    for column in range(count):
        start, end = column * len(values) // count, (column + 1) * len(values) // count
        piece = values[start : max(end, start + 1)]
        columns.append(min(1.0, max(0.0, sum(piece) / len(piece))))
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [BLOCKS[min(8, max(0, round((value * height - row) * 8)))] for value in columns]
        lines.append("".join(cells).ljust(width))
    return lines
