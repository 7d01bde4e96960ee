"""When compiled inner loops are used: once numpy has spent as long on the same work as compiling takes, or on request.

Importing numba and compiling take 3 to 8 s of CPU. A process that checks small models never gets there; one that
checks large ones is past it within a few rollouts, and has lost at most as much again (the ski rental problem). Each
loop is compiled when it is first asked for. On a machine that numba has no wheel for, or that forbids memory to be made
executable, numpy does it all; a loop that can't be compiled is numpy's alone, whatever was under way when that showed.

Not covered: the loops (`kernels`) and their numpy forms.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

log = logging.getLogger("verifier.compiled")

PAYS_FROM = 1 << 27
"""Values of noise after which compiling has paid: 20 ns each by numpy and 1 ns compiled, against 3 s."""

MEMORY_MIB = 320
"""What numba, LLVM and all loops take of a process's memory: 264 MiB of addresses, 176 MiB resident (x86-64, numba
0.68). Processes whose memory is counted or bounded count it: LLVM ends a process that it gets no memory in."""

SWITCH = "HEADWATER_COMPILED"
"""Set to 0 in the environment, nothing is compiled."""

_lock = threading.Lock()
_made = 0
_ready: dict[str, Any] = {}
"""Loops asked for so far; None stands for one that can't be compiled."""
_off = os.environ.get(SWITCH) == "0"


def loop(name: str, values: int = 0) -> Any | None:
    """The loop of this name in `kernels.LOOPS`, compiled; None while numpy is to do this piece of work.

    Args:
        values: of noise that this piece has; they count.
    """
    global _made
    if _off:
        return None
    if name in _ready:
        return _ready[name]
    _made += values
    return _compile(name) if _made >= PAYS_FROM else None


def load() -> bool:
    """Compile every loop now, as a process does that has judged some rollouts of a real model; whether all could be."""
    global _made
    _made = max(_made, PAYS_FROM)
    found = [loop(name) for name in ("philox_rows", "decisive", "polynomials", "bf16_chunks")]
    return None not in found


def _compile(name: str) -> Any | None:
    global _off
    with _lock:
        if name in _ready or _off:
            return _ready.get(name)
        try:
            from verifier import kernels
        except (ImportError, OSError, RuntimeError, AttributeError) as exc:
            _off = True
            log.warning("nothing is compiled here (%s: %s); numpy does the same, slower", type(exc).__name__, exc)
            return None
        try:
            _ready[name] = kernels.compiled(name)
        except RuntimeError as exc:
            _ready[name] = None
            log.warning("%s isn't compiled here: %s; numpy does the same, slower", name, exc)
        return _ready[name]
