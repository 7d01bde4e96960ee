"""Quotas: what one key, one address, and all together may hold of the coordinator's disk and of its patience.

    joins        a budget per address and one for all, refilled with time: keys are free, ledger entries are not
    spool bytes  on their way or waiting for a verdict, per key, per address and in all

What a quota refuses is refused with `quota` and a time after which another try makes sense. What one key may hold of
the validators' time is decided before the work is done, where leases are given out (`leases`).

Not covered: connections (`door`, `protocol.admission`), and telling machines behind one address apart.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ProtocolError, ReasonCode
from trainer.errors import UploadError

MAX_NEW_JOINS = 600
"""Joins that change the ledger, all addresses together, in one burst. Keys are free: without a cap a stranger fills the
disk."""
JOINS_PER_S = 5.0

ADDRESS_JOINS_PER_S = 0.2
"""What one address gets back of its own budget: twelve new members a minute. A classroom behind one address waits some
minutes; one machine that makes keys fills no ledger."""

MAX_ADDRESSES = 4096
"""Addresses remembered; the one unused for longest is forgotten, and begins with a full budget."""


@dataclass
class Bucket:
    """A budget that refills with time."""

    size: float
    per_s: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        self.left = min(self.size, self.left + (now - self.at) * self.per_s)
        self.at = now


@dataclass
class JoinBudget:
    """Who may still join.

    Args:
        per_address: joins one address may make in one burst.
        clock: monotonic seconds.
    """

    per_address: int
    clock: Callable[[], float]
    _all: Bucket = field(init=False)
    _addresses: OrderedDict[str, Bucket] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._all = Bucket(MAX_NEW_JOINS, JOINS_PER_S, MAX_NEW_JOINS, self.clock())

    def spend(self, address: str) -> None:
        """Take one join of an address group.

        Raises:
            ProtocolError: `quota` when the address used up its own, `busy` when all together did.
        """
        now = self.clock()
        own = self._addresses.get(address)
        if own is None:
            own = Bucket(self.per_address, ADDRESS_JOINS_PER_S, self.per_address, now)
        own.refill(now)
        self._all.refill(now)
        if own.left < 1:
            wait_s = math.ceil((1 - own.left) / own.per_s)
            raise ProtocolError(
                f"too many new members from this address; the next one may join in {wait_s} s", ReasonCode.QUOTA
            )
        if self._all.left < 1:
            raise ProtocolError("too many new members at once; try again in a minute", ReasonCode.BUSY)
        own.left -= 1
        self._all.left -= 1
        self._addresses[address] = own
        self._addresses.move_to_end(address)
        while len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)


@dataclass(frozen=True)
class SpoolLimits:
    """Bytes of submissions that are arriving or wait for a verdict."""

    total: int
    per_key: int
    per_address: int
    uploads_per_address: int


@dataclass
class Spool:
    """What is arriving now; what waits is given by the caller, who knows the ledger."""

    limits: SpoolLimits
    uploading: set[bytes] = field(default_factory=set)
    """Leases whose body is arriving."""
    _by_key: Counter[bytes] = field(default_factory=Counter)
    _by_address: Counter[str] = field(default_factory=Counter)
    _uploads: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def hold(
        self, lease: bytes, key: bytes, address: str, length: int, waiting: Iterable[tuple[bytes, str, int]]
    ) -> Iterator[None]:
        """Hold a place while one upload arrives.

        Args:
            waiting: (key, address group, bytes) of every submission without a decision.

        Raises:
            UploadError: 429 for what this key or address holds, 507 for what all hold together.
        """
        if lease in self.uploading:
            raise UploadError(429, "this lease's upload is already arriving", ReasonCode.BUSY, 2)
        if self._uploads[address] >= self.limits.uploads_per_address:
            raise UploadError(429, "too many uploads from this address at once", ReasonCode.QUOTA, 2)
        total, own, near = sum(self._by_key.values()), self._by_key[key], self._by_address[address]
        for other, where, size in waiting:
            total += size
            own += size if other == key else 0
            near += size if where == address else 0
        if total + length > self.limits.total:
            raise UploadError(507, "the spool is full until validators catch up", *_QUOTA)
        if own + length > self.limits.per_key:
            raise UploadError(429, "this node's uploads wait for validators; send the next one later", *_QUOTA)
        if near + length > self.limits.per_address:
            raise UploadError(429, "this address's uploads wait for validators; send the next one later", *_QUOTA)
        self.uploading.add(lease)
        self._by_key[key] += length
        self._by_address[address] += length
        self._uploads[address] += 1
        try:
            yield
        finally:
            self.uploading.discard(lease)
            _give_back(self._by_key, key, length)
            _give_back(self._by_address, address, length)
            _give_back(self._uploads, address, 1)


_QUOTA = (ReasonCode.QUOTA, 10)


def _give_back(counts: Counter[Any], key: bytes | str, amount: int) -> None:
    counts[key] -= amount
    if counts[key] <= 0:
        del counts[key]
