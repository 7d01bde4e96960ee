"""When the codecs' inner loops are compiled: once numpy has spent as long on shards as compiling takes.

Importing numba takes 1 s of CPU and each loop 0.3 to 1 s more. A process that sends a small model never gets there; one
that sends a large one is past it within some gigabytes, and has lost at most as much again. Receiving a usual patch is
fast by numpy, too: who only receives never compiles, and stays as small as a relay has to be, unless the patches are by
class. A loop that can't be compiled, where numba has no wheel or memory must not become executable, is numpy's alone:
the same bytes, slower.

Not covered: the loops (`kernels`) and their numpy forms (`gaps`, `classes`, `planes`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("shardcast.compiled")

PAYS_FROM_NS = 4e9
"""What numpy may spend before, estimated from the work it was given: compiling takes about as long (decision 031)."""

SWITCH = "HEADWATER_COMPILED"
"""Set to 0 in the environment, nothing is compiled. The verifier's loops have the same switch."""

_lock = threading.Lock()
_spent_ns = 0.0
_ready: dict[tuple[str, str], Callable[..., Any] | None] = {}
"""Loops asked for so far, by name and type of items; None stands for one that can't be compiled."""
_off = os.environ.get(SWITCH) == "0"


def loop(name: str, item: np.dtype[Any], work_ns: float = 0.0) -> Callable[..., Any] | None:
    """The function of this name in `kernels` for items of this type; None while numpy is to do this piece of work.

    Args:
        work_ns: what numpy takes for this piece. It counts.
    """
    global _spent_ns
    if _off:
        return None
    key = (name, item.name)
    if key in _ready:
        return _ready[key]
    with _lock:
        _spent_ns += work_ns
        return _compile(key, item) if _spent_ns >= PAYS_FROM_NS else None


def _compile(key: tuple[str, str], item: np.dtype[Any]) -> Callable[..., Any] | None:
    global _off
    if key not in _ready and not _off:
        try:
            from shardcast.codecs import kernels
        except (ImportError, OSError, RuntimeError, AttributeError) as exc:
            _off = True
            log.warning("nothing is compiled here (%s: %s); numpy does the same, slower", type(exc).__name__, exc)
            return None
        try:
            _ready[key] = kernels.compiled(key[0], item)
        except RuntimeError as exc:
            _ready[key] = None
            log.warning("%s is not compiled here (%s); numpy does the same, slower", key[0], exc)
    return _ready.get(key)
