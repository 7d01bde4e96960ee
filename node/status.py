"""`node status`: what the node of a home is doing and whom it waits for, from the file its process keeps.

The running process replaces `status.json` at every heartbeat, and once more when it ends (`ended` then says how). A
process that was killed leaves its last picture behind; it is recognised because pid and start time no longer match.

Not covered: the run as a whole (`trainer status RUN`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from protocol.commands import printable
from protocol.errors import UsageError
from shardcast.heads import replace_file

MAX_STATUS_BYTES = 1 << 20

LATE_S = 2.5
"""A heartbeat's answer that is overdue by this much is worth a word; less calls every busy moment an absence."""


class StatusFile:
    """Writes the picture. Readers see the old or the new one, never a half."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = _start_ticks(os.getpid())

    def write(self, picture: dict[str, Any]) -> None:
        """Replace it. Raises OSError: the disk refuses."""
        whole = {**picture, "pid": os.getpid(), "start_ticks": self._started, "time": time.time(), "uptime": _uptime()}
        replace_file(self._path, json.dumps(whole, indent=1).encode() + b"\n")


def read_status(home: Path) -> dict[str, Any]:
    """The most recently written picture in this home, with `alive`, `age_s`, `receipts` and `unsent` added.

    Raises:
        UsageError: no node has run here yet, or its file is damaged.
    """
    files = sorted(home.expanduser().glob("runs/*/status.json"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise UsageError(
            f"no node has worked in {home} yet; start one with: node join --home {home} --role ... --run ..."
        )
    try:
        with files[-1].open("rb") as file:
            picture: dict[str, Any] = json.loads(file.read(MAX_STATUS_BYTES))
        pid, ticks = int(picture["pid"]), int(picture["start_ticks"])
        written, uptime = float(picture["time"]), float(picture["uptime"])
        for name in ("run", "run_name", "role", "name", "state", "activity"):
            str(picture[name])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise UsageError(
            f"{files[-1]} can't be read ({exc}); the next heartbeat of a running node replaces it"
        ) from exc
    picture["alive"] = not picture.get("ended") and _start_ticks(pid) == ticks
    # Uptime does not jump with the wall clock; after a restart of the machine only the wall clock is left.
    since_boot = _uptime() - uptime
    picture["age_s"] = round(since_boot if since_boot >= 0 else max(0.0, time.time() - written), 1)
    picture["receipts"] = sum(1 for _ in files[-1].parent.glob("receipts/*.hw"))
    picture["unsent"] = sum(1 for _ in files[-1].parent.glob("submissions/*.hws"))
    return picture


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names one process for ever. 0: no such."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _uptime() -> float:
    """Seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def show_status(home: Path, *, as_json: bool) -> int:
    """Print it. Exit code 0 while the node runs, 1 when it doesn't."""
    picture = read_status(home)
    if as_json:
        sys.stdout.write(json.dumps(picture) + "\n")
    else:
        sys.stdout.write("\n".join(printable(line) for line in as_lines(picture)) + "\n")
    return 0 if picture["alive"] else 1


def as_lines(picture: dict[str, Any]) -> list[str]:
    """The picture for a person."""
    lines = [f"{picture['name']}: {picture['role']} in run {picture['run_name']} ({picture['run'][:16]})"]
    rows: list[tuple[str, str]] = []
    if picture["alive"]:
        told = f" (told {picture['age_s']:.0f} s ago)" if picture["age_s"] > 30 else ""
        doing = f"{picture['activity']}, for {_duration(picture.get('activity_s', 0.0) + picture['age_s'])}{told}"
        rows.append(("doing", doing))
        silent_s = _silent_s(picture)
        if silent_s is not None:
            # What it last said of the run may have been over for as long.
            rows.append(("coordinator", f"has not answered for {_duration(silent_s)}; this node asks until it does"))
        elif picture.get("waits_for"):
            rows.append(("waits for", str(picture["waits_for"])))
    elif picture.get("ended"):
        rows.append(("ended", f"{picture['ended']} ({_duration(picture['age_s'])} ago)"))
    else:
        rows.append(("ended", f"without a word, {_duration(picture['age_s'])} ago or later: killed, or crashed"))
    reason = f": {picture['reason']}" if picture.get("reason") else ""
    rows.append(("state", f"{picture['state']}{reason}"))
    rows.append(("weights", f"step {picture['step']} of {max(picture['step'], picture['newest_step'])} published"))
    rows.append(("work", _work(picture)))
    rows.append(("traffic", f"{_mib(picture.get('bytes_up', 0))} sent, {_mib(picture.get('bytes_down', 0))} received"))
    if picture.get("engine"):
        rows.append(("engine", str(picture["engine"])))
    if picture.get("conflict"):
        rows.append(("WARNING", f"the coordinator promised two ledgers that do not fit: see {picture['conflict']}"))
    rows.append(("process", f"{picture['pid']}, {'running' if picture['alive'] else 'not running'}"))
    if not picture["alive"] and picture.get("come_back"):
        rows.append(("come back", str(picture["come_back"])))
    return lines + [f"  {name:<12}{text}" for name, text in rows]


def _silent_s(picture: dict[str, Any]) -> float | None:
    """Seconds since the coordinator's last answer, once it is plainly late; None while it answers.

    A call that is not answered is given up after 15 s only; a person who asks meanwhile is told what is known.
    """
    age_s, every_s = float(picture["age_s"]), float(picture.get("heartbeat_s") or 0.0)
    heard_s = float(picture.get("heard_s") or 0.0) + age_s
    if picture.get("away_s") is not None:
        return max(float(picture["away_s"]) + age_s, heard_s)
    return heard_s if every_s and heard_s > every_s + LATE_S else None


def _work(picture: dict[str, Any]) -> str:
    done, unsent = picture["done"], picture["unsent"]
    if picture["role"] == "validator":
        return f"{done} submissions judged since it started"
    if picture["role"] == "relay":
        return f"{done} shards sent since it started"
    waiting = f", {unsent} finished leases not sent yet" if unsent else ""
    return (
        f"{done} rollouts since it started; in this run {picture.get('accepted', 0)} accepted and "
        f"{picture.get('rejected', 0)} rejected so far; {picture['receipts']} receipts{waiting}"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
