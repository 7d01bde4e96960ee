"""Consistency proofs for a growing log: that the ledger members saw before is the beginning of the one they see now.

Keeps the hash of every complete subtree, level by level: 64 bytes an entry, against some kilobytes of folded state. A
proof costs O(log n) look-ups and hashes, so strangers may ask for one at any time.

Not covered: who signs a tree head (`protocol.ledger`), checking a proof (`protocol.merkle.verify_consistency`).
"""

from __future__ import annotations

from protocol.errors import LedgerError
from protocol.limits import HASH_BYTES
from protocol.merkle import EMPTY_ROOT, node_hash


class ProofTree:
    """The leaves of an RFC 6962 tree and the roots of its complete subtrees."""

    def __init__(self) -> None:
        self._levels: list[bytearray] = [bytearray()]
        """Level k holds the roots of the complete subtrees of 2^k leaves, side by side."""

    @property
    def size(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def append(self, leaf: bytes) -> None:
        """Add a leaf hash of 32 bytes."""
        self._levels[0] += leaf
        level = 0
        while len(self._levels[level]) % (2 * HASH_BYTES) == 0:
            pair = self._levels[level][-2 * HASH_BYTES :]
            if level + 1 == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level + 1] += node_hash(bytes(pair[:HASH_BYTES]), bytes(pair[HASH_BYTES:]))
            level += 1

    def leaf(self, index: int) -> bytes:
        """The leaf hash appended as number `index`."""
        self._check(index + 1)
        return bytes(self._levels[0][index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def root(self, size: int) -> bytes:
        """Root over the first `size` leaves."""
        self._check(size)
        return self._range(0, size) if size else EMPTY_ROOT

    def consistency(self, first: int, second: int) -> list[bytes]:
        """Proof that the tree of `second` leaves extends the one of `first` (RFC 6962, 2.1.2).

        Raises:
            LedgerError: not 1 <= first <= second <= size.
        """
        self._check(second)
        if not 1 <= first <= second:
            raise LedgerError(f"a tree of {second} entries has no beginning of {first}")
        proof: list[bytes] = []
        start, end, whole = 0, second, True
        while first < end - start or not whole:  # the subtree [start, end) still holds leaves of both sides
            if first == end - start:
                proof.append(self._range(start, end))
                break
            middle = start + _split(end - start)
            if first <= middle - start:
                proof.append(self._range(middle, end))
                end = middle
            else:
                proof.append(self._range(start, middle))
                first -= middle - start
                start, whole = middle, False
        return proof[::-1]

    def _range(self, start: int, end: int) -> bytes:
        """Root over the leaves start..end of a subtree that RFC 6962 makes: looked up when it is complete."""
        size = end - start
        if size & (size - 1) == 0:
            at = (start >> (size.bit_length() - 1)) * HASH_BYTES
            return bytes(self._levels[size.bit_length() - 1][at : at + HASH_BYTES])
        middle = start + _split(size)
        return node_hash(self._range(start, middle), self._range(middle, end))

    def _check(self, size: int) -> None:
        if not 0 <= size <= self.size:
            raise LedgerError(f"there is no tree of {size} entries yet: the ledger has {self.size}")


def _split(size: int) -> int:
    """The largest power of two below `size` (size >= 2)."""
    return 1 << ((size - 1).bit_length() - 1)
