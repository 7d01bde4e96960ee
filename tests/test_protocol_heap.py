"""Settling the heap: what is there is left alone by the collector, and cycles made later are still collected."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from protocol.heap import settle_heap
kept = [[] for _ in range(1000)]
settle_heap()
assert gc.isenabled() and gc.get_freeze_count() > 1000 and gc.get_threshold()[0] >= 10_000
class Node: pass
node = Node(); node.itself = node
gone = weakref.ref(node)
del node
waste = [[] for _ in range(3 * gc.get_threshold()[0])]
assert gone() is None, "a cycle made later was not collected"
"""


def test_the_heap_is_settled_and_later_cycles_are_collected() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
