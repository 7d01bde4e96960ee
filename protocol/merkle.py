"""RFC 6962 Merkle trees with BLAKE3: the ledger's log, and the root over a policy's shards.

    leaf = BLAKE3(0x00 || data)     node = BLAKE3(0x01 || left || right)     empty tree = BLAKE3("")

A tree of n leaves splits at the largest power of two below n (RFC 6962, section 2.1). `MerkleLog` keeps only the
roots of the perfect subtrees on its right edge, so appending to a log of millions needs O(log n) memory.

Not covered: storing leaves (`ledger`), and who signed a root (`records.TreeHead`).
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from protocol.errors import LedgerError

_LEAF = b"\x00"
_NODE = b"\x01"
EMPTY_ROOT: bytes = blake3(b"").digest()
"""Root of a tree without leaves."""


def leaf_hash(data: bytes) -> bytes:
    """Hash of one leaf's data, 32 bytes. The prefix keeps a leaf from passing as an inner node."""
    return blake3(_LEAF + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node over its children's hashes, 32 bytes."""
    return blake3(_NODE + left + right).digest()


class MerkleLog:
    """An append-only tree that remembers only its right edge."""

    def __init__(self) -> None:
        self.size = 0
        self._edge: list[bytes] = []
        """Roots of the perfect subtrees, largest first: one for each set bit of `size`."""

    def append(self, leaf: bytes) -> int:
        """Add a leaf hash (see `leaf_hash`) and return its index."""
        index = self.size
        node = leaf
        rest = index
        while rest & 1:
            node = node_hash(self._edge.pop(), node)
            rest >>= 1
        self._edge.append(node)
        self.size += 1
        return index

    def root(self) -> bytes:
        """Root over everything appended so far, 32 bytes."""
        if not self._edge:
            return EMPTY_ROOT
        node = self._edge[-1]
        for left in reversed(self._edge[:-1]):
            node = node_hash(left, node)
        return node

    def copy(self) -> MerkleLog:
        """An independent log of the same content; appending to one leaves the other as it is."""
        twin = MerkleLog()
        twin.size = self.size
        twin._edge = list(self._edge)
        return twin


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Root over a list of leaf hashes, each 32 bytes and used as it is (hash data with `leaf_hash` first)."""
    log = MerkleLog()
    for leaf in leaves:
        log.append(leaf)
    return log.root()


def _split(size: int) -> int:
    """The largest power of two smaller than `size` (size >= 2)."""
    return 1 << ((size - 1).bit_length() - 1)


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The audit path of leaf `index` in the tree over `leaves` (RFC 6962, 2.1.1), leaf's sibling first.

    Raises:
        LedgerError: no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise LedgerError(f"leaf {index} is not in a tree of {len(leaves)}")
    path: list[bytes] = []
    while len(leaves) > 1:
        middle = _split(len(leaves))
        if index < middle:
            path.append(root_of(leaves[middle:]))
            leaves = leaves[:middle]
        else:
            path.append(root_of(leaves[:middle]))
            leaves = leaves[middle:]
            index -= middle
    return path[::-1]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether `proof` shows that `leaf` is leaf `index` of the tree of `size` leaves with this root."""
    if not 0 <= index < size:
        return False
    node, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            return False
        if node & 1 or node == last:
            found = node_hash(sibling, found)
            while not node & 1 and node:
                node >>= 1
                last >>= 1
        else:
            found = node_hash(found, sibling)
        node >>= 1
        last >>= 1
    return last == 0 and found == root


def consistency_proof(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """Proof that the tree over `leaves` extends the tree over its first `old_size` leaves (RFC 6962, 2.1.2).

    Raises:
        LedgerError: `old_size` is not between 1 and the number of leaves.
    """
    if not 1 <= old_size <= len(leaves):
        raise LedgerError(f"a tree of {len(leaves)} has no prefix of {old_size}")

    def subproof(part: Sequence[bytes], old: int, whole: bool) -> list[bytes]:
        if old == len(part):
            return [] if whole else [root_of(part)]
        middle = _split(len(part))
        if old <= middle:
            return [*subproof(part[:middle], old, whole), root_of(part[middle:])]
        return [*subproof(part[middle:], old - middle, False), root_of(part[:middle])]

    return subproof(leaves, old_size, True)


def verify_consistency(old_size: int, new_size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether `proof` shows that the tree (new_size, new_root) extends (old_size, old_root) (RFC 9162, 2.1.4.2)."""
    if not 1 <= old_size <= new_size:
        return False
    if old_size == new_size:
        return not proof and old_root == new_root
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_root)
    if not path:
        return False
    node, last = old_size - 1, new_size - 1
    while node & 1:
        node >>= 1
        last >>= 1
    old_found = new_found = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            old_found = node_hash(sibling, old_found)
            new_found = node_hash(sibling, new_found)
            while not node & 1 and node:
                node >>= 1
                last >>= 1
        else:
            new_found = node_hash(new_found, sibling)
        node >>= 1
        last >>= 1
    return last == 0 and old_found == old_root and new_found == new_root
