"""Is there room for what is about to start? Asked before it starts: a process that the kernel ends explains nothing.

    memory()    what the kernel calls available, and no more than any control group above this process still allows
    disk(path)  free bytes for an ordinary user on the file system of `path`, which need not exist yet
    require()   both against a need; raises a `UsageError` that says what limits and what to do

Control groups are read in both versions, at every level up to the mount: a container's limit, a service's and a batch
system's all count. Cache that the kernel would give up is not counted as used.

Not covered: quotas of a file system, memory that others take afterwards, GPUs. Where the kernel tells nothing (another
system than Linux), memory is unknown and nothing is refused for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UsageError

UNLIMITED = 1 << 60
"""Control groups of version 1 say "no limit" with a number near 2^63; nobody has an exbibyte of memory."""


@dataclass(frozen=True)
class Room:
    """What is left, in MiB, and in words what sets the bound."""

    mib: int
    bound: str


@dataclass(frozen=True)
class _Version:
    """File names of one version of the memory controller."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def memory(root: Path = Path("/")) -> Room | None:
    """Memory that may still be taken; None where it cannot be known.

    Args:
        root: where `proc` and the mounts of control groups are found; tests give a folder.
    """
    rooms = []
    available = _meminfo(root / "proc" / "meminfo")
    if available is not None:
        rooms.append(Room(available >> 20, "this machine has"))
    for version, folder in _groups(root):
        left = _left(version, folder)
        if left is not None:
            rooms.append(Room(left >> 20, f"the memory limit in {folder} leaves"))
    return min(rooms, key=lambda room: room.mib, default=None)


def disk(path: Path) -> Room:
    """Free disk where `path` is or would be made.

    Raises:
        OSError: not even its file system can be asked.
    """
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return Room(shutil.disk_usage(place).free >> 20, f"the disk of {place} has")


def require(
    what: str,
    *,
    memory_mib: int = 0,
    disk_mib: int = 0,
    where: Path | None = None,
    less: str = "close other programs",
    root: Path = Path("/"),
) -> None:
    """Refuse to start what has no room to finish.

    Args:
        what: the subject of the sentence, for example "this demo".
        memory_mib, disk_mib: the need; 0 asks for nothing.
        where: the directory that will grow; needed with `disk_mib`.
        less: what the person can do to get by with less memory.

    Raises:
        UsageError: too little of either.
        OSError: the disk cannot be asked.
    """
    room = memory(root) if memory_mib else None
    if room is not None and room.mib < memory_mib:
        raise UsageError(f"{what} needs {memory_mib} MiB of memory, and {room.bound} {max(0, room.mib)} free; {less}")
    if disk_mib and where is not None:
        room = disk(where)
        if room.mib < disk_mib:
            raise UsageError(
                f"{what} needs {disk_mib} MiB of disk, and {room.bound} {room.mib} free; "
                "make room there, or give a directory on a larger disk"
            )


def _meminfo(path: Path) -> int | None:
    """Bytes the kernel calls available."""
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Every control group that bounds this process: its own and those above it."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        mount, _, about = line.partition(" - ")
        fields, kinds = mount.split(" "), about.split(" ")
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in paths:
            continue
        if kinds[0] == "cgroup" and "memory" not in kinds[2].split(","):
            continue
        top = root / fields[4].lstrip("/")
        inside = paths.pop(kinds[0])
        inside = inside.removeprefix(fields[3]) if fields[3] != "/" else inside
        folder = top / inside.lstrip("/")
        version = _V2 if kinds[0] == "cgroup2" else _V1
        if ".." in Path(inside).parts or not folder.is_dir():
            folder = top  # a namespace hides where the group really lies; its mount is the group itself
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent


def _left(version: _Version, folder: Path) -> int | None:
    """Bytes this group may still take; None without a limit."""
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None and limit < UNLIMITED]
    used = _number(folder / version.used)
    if not limits or used is None:
        return None
    reclaimable = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == version.reclaimable:
            reclaimable = int(value)
    return min(limits) - used + min(reclaimable, used)


def _number(path: Path) -> int | None:
    """The number in a file of one line; None for `max`, or a file that isn't there."""
    text = "".join(_lines(path)[:1])
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """Lines of a kernel file; none where this kernel, or this container, has no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
