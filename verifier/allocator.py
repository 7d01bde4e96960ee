"""Keep freed memory in the process: what one step frees the next one needs again.

glibc gives the top of its heap and every large block back to the kernel at once, so a process that runs a model pays a
page fault for each 4 KiB of activations again and again (2,700 a step of the tiny model's learner, 6 of its 90 ms).

Not covered: other C libraries, where nothing changes.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEEP_BYTES = 256 << 20
"""Free memory at the heap's top that stays. Blocks above 32 MiB, glibc's own limit, are still mapped one by one."""

_LARGEST_IN_HEAP = 32 << 20
_GROW_BYTES = 16 << 20


def keep_freed_memory() -> None:
    """Tell the allocator, before the model is loaded. Costs up to 256 MiB of memory that others could use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in (
        (_M_TRIM_THRESHOLD, _KEEP_BYTES),
        (_M_TOP_PAD, _GROW_BYTES),
        (_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP),
    ):
        mallopt(option, value)
