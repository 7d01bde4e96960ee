"""Uploads and verdict details that were decoded lately, by their hash: a submission is opened once, not at every step
from its verdict to its batch.

What is kept was read from bytes of that hash, so it is what the archive must hold; who finds nothing here, after a
restart say, reads the archive. Bounded by the bytes it was decoded from: a large model's leases are too big to keep
many, and none over the bound is kept at all.

Not covered: whether the archive still has the bytes (the audit finds out).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from protocol.limits import KIB, MIB

R = TypeVar("R")

MAX_BYTES = 64 * MIB
"""Bytes of records kept. Fewer make a batch of large leases read them again; more is memory."""

OBJECT_BYTES = 1 * KIB
"""What a rollout's objects take beside its tokens and numbers: small records count as at least this."""


class Decoded:
    """A few records by (class, hash), the one unused for longest dropped first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[type[object], bytes], tuple[object, int]] = OrderedDict()

    def get(self, cls: type[R], digest: bytes) -> R | None:
        """The record of class `cls` whose bytes have this hash, if it is still here."""
        found = self._kept.get((cls, digest))
        if found is None:
            return None
        self._kept.move_to_end((cls, digest))
        record = found[0]
        assert isinstance(record, cls)
        return record

    def keep(self, digest: bytes, record: object, size: int, rollouts: int) -> None:
        """Remember a record of so many bytes and rollouts. The caller hashed the bytes it was decoded from."""
        size += rollouts * OBJECT_BYTES
        key = (type(record), digest)
        if size > self._max_bytes or key in self._kept:
            return
        self._kept[key] = (record, size)
        self.held_bytes += size
        while self.held_bytes > self._max_bytes:
            self.held_bytes -= self._kept.popitem(last=False)[1][1]
