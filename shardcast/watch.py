"""Waking up when a folder changes, instead of looking fifty times a second.

Uses Linux's inotify through the C library. Where there is none, or the kernel has no watches left, `wait` sleeps for
`POLL_S` at most and says so once. A wake-up means "look again" and nothing more: whoever waits looks at the folder
itself, so a missed or a needless event costs time and never a file. Names that begin with a dot wake nobody: files and
folders are written under such names, and get their own when they are whole.

Not covered: network file systems, whose changes by other machines inotify doesn't see; `wait` has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import struct
from pathlib import Path

log = logging.getLogger("shardcast.watch")

POLL_S = 0.02
"""How long `wait` sleeps where nothing wakes it."""

_MASK = 0x100 | 0x80 | 0x8  # IN_CREATE | IN_MOVED_TO | IN_CLOSE_WRITE
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_ENDED = 0x8000  # IN_IGNORED: a watched folder was removed
_EVENT = struct.Struct("=iIII")
"""The kernel's `struct inotify_event`: watch, mask, cookie, bytes of the name that follows, padded with zeros."""


class FolderWatch:
    """Watches folders for files that are created, renamed into them, or written. One event loop, one waiter."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._seen = asyncio.Event()
        self._newest = 0
        """The last watch made. The kernel numbers them rising, and answers an old number for a folder it knows."""
        self._reading = False
        with contextlib.suppress(AttributeError):
            self._fd = self._libc.inotify_init1(_FLAGS)
        if self._fd < 0:
            log.warning("this system has no inotify; folders are looked at every %d ms instead", 1000 * POLL_S)

    @property
    def works(self) -> bool:
        return self._fd >= 0

    def add(self, folder: Path | str, *, looks_after: bool = False) -> None:
        """Watch a folder from now on. Call it before each `wait`: a folder made again needs a watch again.

        Args:
            looks_after: the caller looks into the folder after this call, and so misses nothing that came before it;
                otherwise a new watch wakes it.
        """
        if self._fd < 0:
            return
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _MASK)
        if number > self._newest:
            self._newest = number
            if not looks_after:
                self._seen.set()  # for whatever came before the watch
        if number >= 0:
            return
        number = ctypes.get_errno()
        if number not in (2, 20):  # not there, or no folder
            why = os.strerror(number)
            log.warning("%s can't be watched (%s); folders are looked at every 20 ms instead", folder, why)
            self.close()

    async def wait(self, deadline_s: float) -> bool:
        """Return when something changed since the last call, or after `deadline_s`; whether something did, as far as
        can be known."""
        if self._fd < 0:
            await asyncio.sleep(min(POLL_S, deadline_s))
            return True
        if not self._reading:
            asyncio.get_running_loop().add_reader(self._fd, self._drain)
            self._reading = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._seen.wait()
        seen = self._seen.is_set()
        self._seen.clear()
        return seen

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # What is left in the kernel's queue wakes the loop again.
            if _matter(os.read(self._fd, 65536)):
                self._seen.set()

    def close(self) -> None:
        if self._fd >= 0:
            if self._reading:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _matter(events: bytes) -> bool:
    """Whether any of the kernel's events is about a name that somebody may look for."""
    at = 0
    while at < len(events):
        _, mask, _, size = _EVENT.unpack_from(events, at)
        at += _EVENT.size
        if not mask & _ENDED and not (size and events[at] == ord(".")):
            return True
        at += size
    return False
