"""Spare the garbage collector what never becomes garbage, and give large blocks of memory back.

A process of ours holds half a million objects of its imports for as long as it lives. Python's collector walks young
objects every 700 allocations and all of them now and then, which was 2% of a demo's CPU; reference counting frees
nearly everything without it.

Not covered: real cycles, which are still collected, later.
"""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TOP = 8 << 20
"""Free bytes at the end of an arena that stay. glibc gives them back from 128 KiB on; each step of a small model would
then fault its megabytes in again. More is memory that nobody uses."""

_LARGE = 2 << 20
"""Bytes from which a block is given back to the system once it is freed. Shards are four times that; smaller ones stay,
since mapping costs more than it saves."""

_YOUNG = 20_000
"""Objects made since the last look before the next. A larger number lets cycles (a few kB each) wait longer."""


def settle_heap() -> None:
    """Call it when the imports are done, and again after more of them: what is there now is never looked at again."""
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)
    gc.enable()


def return_large_blocks() -> None:
    """Give memory of shards back when it is freed. glibc keeps blocks of a size that was freed once, in an arena for
    each thread: a relay of SmolLM2 held 160 MiB that way, and 70 without. Call it before weights are moved."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _TOP)
