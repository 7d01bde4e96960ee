"""Keeps Node.js working in an environment where headwater is installed.

Both programs are called `node`. Ours answers `--help` and its own subcommands; anything else belongs to the next
`node` on PATH, which replaces this process (same pid, stdin, signals), so scripts, `npm` and shebangs notice nothing.

Not covered: Windows, and a Node.js that is not on PATH.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_LOOP_MARK = "HEADWATER_NODE_HANDOVER"
"""Holds the pid that has handed over: a wrapper that only calls us back keeps the pid, and would loop forever."""

_HEAD_BYTES = 2048
_OUR_IMPORT = b"node.cli"
"""What the console script of any headwater installation has in its first lines."""


def next_node(path: str, own: Sequence[Path]) -> Path | None:
    """The first `node` on PATH that is not one of headwater's.

    Args:
        path: the value of PATH.
        own: directories of our console scripts.
    """
    skip = {p.resolve() for p in own}
    for entry in path.split(os.pathsep):
        folder = Path(entry or ".")
        candidate = folder / "node"
        if folder.resolve() in skip or not os.access(candidate, os.X_OK) or not candidate.is_file():
            continue
        if candidate.resolve().parent in skip or _is_ours(candidate):
            continue
        return candidate
    return None


def _is_ours(candidate: Path) -> bool:
    try:
        with candidate.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(b"#!") and _OUR_IMPORT in head


def hand_over(argv: Sequence[str]) -> NoReturn:
    """Become Node.js with the same arguments, or leave with status 127 when there is none."""
    own = [Path(sys.argv[0]).absolute().parent, Path(sys.executable).parent]
    found = next_node(os.environ.get("PATH", os.defpath), own)
    if os.environ.get(_LOOP_MARK) == str(os.getpid()):
        found = None
    if found is None:
        sys.stderr.write(
            "node: this is headwater's `node` and there is no Node.js further down PATH to hand over to.\n"
            "Install Node.js, or see `node --help` for headwater's own commands.\n"
        )
        sys.exit(127)
    os.environ[_LOOP_MARK] = str(os.getpid())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal survives exec
    os.execv(found, [str(found), *argv])  # noqa: S606
