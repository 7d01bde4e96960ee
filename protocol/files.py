"""Files that are either whole or absent: written aside, fsynced, renamed, and the folder fsynced."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import BinaryIO


def cache_directory() -> Path:
    """What can be made again, kept for this user: `$XDG_CACHE_HOME/headwater`, by default `~/.cache/headwater`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "headwater"


def fsync_dir(path: Path) -> None:
    """Make renames and unlinks inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> BinaryIO:
    """Open a file of an archive that somebody else made, unbuffered.

    Opening a pipe that nobody writes to would wait for ever, and reading a device would never end.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(fd, "rb", buffering=0)


def read_at_most(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file, or all of it. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        size = min(limit, os.fstat(file.fileno()).st_size)
        parts, left = [], size
        while left > 0 and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a reader sees the old file, or all of the new one, even after power loss.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file is then untouched.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
