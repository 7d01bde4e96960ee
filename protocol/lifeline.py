"""A child that ends with its parent.

Linux only: `PR_SET_PDEATHSIG` delivers a signal when the parent's starting thread ends, also after kill -9.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when our parent ends; leave at once if it already has.

    Args:
        parent: its pid. Without it a parent that ended before this call can't be told from the one that inherited us.
    """
    if parent is None:
        parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(0)
