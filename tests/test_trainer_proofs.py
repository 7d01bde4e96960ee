"""Consistency proofs from kept subtrees: the same as the reference makes from all leaves, for every pair of sizes."""

from __future__ import annotations

import pytest
from blake3 import blake3

from protocol.errors import LedgerError
from protocol.merkle import consistency_proof, root_of, verify_consistency
from trainer.proofs import ProofTree

LEAVES = [blake3(b"leaf %d" % number).digest() for number in range(70)]


def test_every_proof_is_the_references_and_holds() -> None:
    tree = ProofTree()
    for size, leaf in enumerate(LEAVES, 1):
        tree.append(leaf)
        assert tree.root(size) == root_of(LEAVES[:size])
    for second in range(1, len(LEAVES) + 1):
        new = root_of(LEAVES[:second])
        for first in range(1, second + 1):
            proof = tree.consistency(first, second)
            assert proof == consistency_proof(LEAVES[:second], first)
            assert verify_consistency(first, second, root_of(LEAVES[:first]), new, proof)


def test_sizes_that_are_not_there_are_refused() -> None:
    tree = ProofTree()
    tree.append(LEAVES[0])
    for first, second in ((0, 1), (2, 1), (1, 2), (-1, 1)):
        with pytest.raises(LedgerError):
            tree.consistency(first, second)


def test_what_is_kept_is_64_bytes_an_entry() -> None:
    tree = ProofTree()
    for number in range(5000):
        tree.append(LEAVES[number % 70])
    assert sum(len(level) for level in tree._levels) <= 64 * 5000
