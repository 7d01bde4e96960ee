"""`node doctor`: can this machine take part? Checks that need no network and import nothing heavy."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol import preflight

_DISK_MIB = 1024
"""Two policies of a small model and what waits to be sent."""

_MEMORY_MIB = 1024
"""A node, its engine with torch, and the libp2p host process."""


@dataclass(frozen=True)
class Finding:
    """One check: whether it holds, what was seen, and what to do if it doesn't."""

    check: str
    holds: bool
    seen: str
    fix: str = ""


def examine(home: Path, *, as_json: bool) -> int:
    """Run all checks and print them. Exit code 0 when all hold, 1 otherwise."""
    home = home.expanduser().absolute()
    checks: list[Callable[[Path], Finding]] = [_python, _packages, _home, _keys, _disk, _memory, _sockets]
    findings = [check(home) for check in checks]
    if as_json:
        sys.stdout.write(json.dumps({"findings": [asdict(f) for f in findings]}) + "\n")
    else:
        for finding in findings:
            mark = "ok  " if finding.holds else "FIX "
            sys.stdout.write(f"{mark}{finding.check}: {finding.seen}\n")
            if not finding.holds:
                sys.stdout.write(f"    {finding.fix}\n")
    return 0 if all(f.holds for f in findings) else 1


def _python(home: Path) -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", (3, 11) <= sys.version_info[:2] <= (3, 13), seen, "install Python 3.11, 3.12 or 3.13")


def _packages(home: Path) -> Finding:
    needed = (
        "aiohttp",
        "blake3",
        "cryptography",
        "libp2p",
        "msgpack",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return Finding(
        "packages", not missing, "all there" if not missing else "missing: " + ", ".join(missing), "run: make install"
    )


def _home(home: Path) -> Finding:
    place = home
    while not place.exists():
        place = place.parent
    return Finding("home", os.access(place, os.W_OK), str(home), f"give a --home you may write to, or fix {place}")


def _keys(home: Path) -> Finding:
    loose = [
        str(path)
        for path in (home / "identity.pem", home / "transport.pem")
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    seen = "private" if not loose else "readable by others: " + ", ".join(loose)
    return Finding("keys", not loose, seen, "run: chmod 600 " + " ".join(loose))


def _disk(home: Path) -> Finding:
    room = preflight.disk(home)
    seen = f"{room.bound} {room.mib} MiB free"
    return Finding("disk", room.mib >= _DISK_MIB, seen, f"free {_DISK_MIB} MiB or give another --home")


def _memory(home: Path) -> Finding:
    room = preflight.memory()
    if room is None:
        return Finding("memory", True, "unknown: this system does not tell; a node of a small run needs about 1 GiB")
    seen = f"{room.bound} {max(0, room.mib)} MiB free"
    return Finding("memory", room.mib >= _MEMORY_MIB, seen, "close other programs, or raise the memory limit")


def _sockets(home: Path) -> Finding:
    place = tempfile.gettempdir()
    fits = len(place) < 60 and os.access(place, os.W_OK)
    return Finding(
        "temporary folder", fits, place, "set TMPDIR to a short path you may write to (an engine listens there)"
    )
