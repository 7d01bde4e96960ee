"""`node status`: what the node of a home is doing, from the file its process writes at every heartbeat."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from protocol.errors import UsageError


def read_status(home: Path) -> dict[str, Any]:
    """The most recently written picture in this home, with `alive` and `age_s` added.

    Raises:
        UsageError: no node has run here yet, or its file is damaged.
    """
    files = sorted(home.expanduser().glob("runs/*/status.json"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise UsageError(
            f"no node has worked in {home} yet; start one with: node join --home {home} --role ... --run ..."
        )
    try:
        picture: dict[str, Any] = json.loads(files[-1].read_text())
        pid, written = int(picture["pid"]), float(picture["time"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{files[-1]} can't be read ({exc}); the next heartbeat of a running node replaces it"
        ) from exc
    picture["alive"] = _is_running(pid)
    picture["age_s"] = round(max(0.0, time.time() - written), 1)
    picture["receipts"] = sum(1 for _ in files[-1].parent.glob("receipts/*.hw"))
    picture["unsent"] = sum(1 for _ in files[-1].parent.glob("submissions/*.hws"))
    return picture


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def show_status(home: Path, *, as_json: bool) -> int:
    """Print it. Exit code 0 while the node runs, 1 when it doesn't."""
    picture = read_status(home)
    if as_json:
        sys.stdout.write(json.dumps(picture) + "\n")
    else:
        running = f"running (process {picture['pid']})" if picture["alive"] else "not running"
        sys.stdout.write(
            f"{picture['name']}: {picture['role']} in run {picture['run_name']} ({picture['run'][:16]}), {running}\n"
            f"  state      {picture['state']}\n"
            f"  policy     {picture['step']} of {picture['newest_step']}\n"
            f"  doing      {picture['activity']} ({picture['age_s']} s ago)\n"
            f"  done       {picture['done']} since it started; {picture['receipts']} receipts, "
            f"{picture['unsent']} submissions unsent\n"
        )
    return 0 if picture["alive"] else 1
