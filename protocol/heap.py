"""Spare the garbage collector what never becomes garbage.

A process of ours holds half a million objects of its imports for as long as it lives. Python's collector walks young
objects every 700 allocations and all of them now and then, which was 2% of a demo's CPU; reference counting frees
nearly everything without it.

Not covered: real cycles, which are still collected, later.
"""

from __future__ import annotations

import gc

_YOUNG = 20_000
"""Objects made since the last look before the next. A larger number lets cycles (a few kB each) wait longer."""


def settle_heap() -> None:
    """Call it when the imports are done, and again after more of them: what is there now is never looked at again."""
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)
    gc.enable()
