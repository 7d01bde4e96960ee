"""Which publications lead from what a node has to what it wants: one patch a step, skip patches, or an anchor.

A publication with a base turns that base into its root. Beside the patch of every step, skip patches span 8 and 64
steps: weights that changed back and forth are in them once, so one of 64 steps is far shorter than 64 of one. `plan`
chooses the way with the fewest bytes; `skip_bases` says which skip patches an origin owes.

Not covered: fetching (`puller`), applying (`frames`), and which publications there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

STRIDES = (64, 8)
"""Steps that a skip patch spans, longest first. A joiner then needs an anchor and at most 7 + 7 patches, and one for
each 64 steps between. More strides cost the origin's encoding and every relay's disk."""


@dataclass(frozen=True)
class Way:
    """A publication as a way from `base` to `root`.

    base: the root it applies to, None for an anchor, which needs none.
    wire_bytes: what fetching it costs.
    """

    base: bytes | None
    root: bytes
    wire_bytes: int

    def __post_init__(self) -> None:
        if self.wire_bytes < 0:
            raise ValueError(f"a publication of {self.wire_bytes} bytes")


def plan(have: Collection[bytes], want: bytes, available: Iterable[Way]) -> list[Way] | None:
    """The ways to take, in order, with the fewest bytes in all and of these the fewest publications.

    Args:
        have: roots whose weights are here, verified.
        want: the root to reach.
        available: in any order, with several for one root, with ways that lead nowhere, and with circles.

    Returns:
        Empty if it is here; None if nothing leads there. Only the first way may be an anchor or start at a root in
        `have`.
    """
    if want in have:
        return []
    after: dict[bytes | None, list[Way]] = {}
    for way in available:
        after.setdefault(way.base, []).append(way)
    taken: dict[bytes, Way] = {}
    # Dijkstra (1959); the count of entries decides among equals, so that roots are never compared
    queue: list[tuple[int, int, int, bytes | None, Way | None]] = [(0, 0, 0, None, None)]
    queue += [(0, 0, i, root, None) for i, root in enumerate(sorted(have), 1)]
    entries = len(queue)
    heapq.heapify(queue)
    reached: set[bytes | None] = set()
    while queue:
        cost, count, _, root, last = heapq.heappop(queue)
        if root in reached:
            continue
        reached.add(root)
        if last is not None:
            taken[last.root] = last
        if root == want:
            return _traced(want, taken)
        for way in after.get(root, ()):
            if way.root not in reached:
                heapq.heappush(queue, (cost + way.wire_bytes, count + 1, entries, way.root, way))
                entries += 1
    return None


def _traced(want: bytes, taken: dict[bytes, Way]) -> list[Way]:
    ways = []
    root: bytes | None = want
    while root is not None and root in taken:
        ways.append(taken[root])
        root = taken[root].base
    return ways[::-1]


def skip_bases(step: int, first: int = 0) -> list[int]:
    """The steps that patches to `step` start from, the next one before it first.

    Args:
        first: the oldest step of the epoch that there still is; nothing starts before it.
    """
    if not 0 <= first <= step:
        raise ValueError(f"step {step} of an epoch that starts with {first}")
    bases = [step - 1, *(step - stride for stride in reversed(STRIDES) if step % stride == 0)]
    return [base for base in bases if base >= first]
