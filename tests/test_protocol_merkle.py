"""The Merkle tree against the recursive definition of RFC 6962 and against forged proofs."""

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LedgerError
from protocol.merkle import (
    MerkleLog,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    root_of,
    verify_consistency,
    verify_inclusion,
)


def recursive_root(leaves):
    """RFC 6962, section 2.1, word for word."""
    if not leaves:
        return blake3(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    middle = 1
    while middle * 2 < len(leaves):
        middle *= 2
    return blake3(b"\x01" + recursive_root(leaves[:middle]) + recursive_root(leaves[middle:])).digest()


def leaves_of(count):
    return [leaf_hash(str(i).encode()) for i in range(count)]


def test_the_root_follows_the_recursive_definition():
    log = MerkleLog()
    for size in range(70):
        leaves = leaves_of(size)
        assert log.root() == root_of(leaves) == recursive_root(leaves)
        log.append(leaf_hash(str(size).encode()))


def test_known_vectors():
    assert root_of([]).hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert leaf_hash(b"").hex() == blake3(b"\x00").hexdigest()
    assert node_hash(leaf_hash(b"a"), leaf_hash(b"b")) == root_of([leaf_hash(b"a"), leaf_hash(b"b")])


def test_a_leaf_can_not_pass_as_a_node():
    left, right = leaves_of(2)
    assert leaf_hash(left + right) != node_hash(left, right)


def test_a_copy_is_independent():
    log = MerkleLog()
    for leaf in leaves_of(5):
        log.append(leaf)
    twin = log.copy()
    twin.append(leaf_hash(b"more"))
    assert (log.size, twin.size) == (5, 6)
    assert log.root() == root_of(leaves_of(5)) != twin.root()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 80))
def test_inclusion_proofs_hold_and_forged_ones_do_not(data, size):
    leaves = leaves_of(size)
    index = data.draw(st.integers(0, size - 1))
    proof, root = inclusion_proof(leaves, index), root_of(leaves)
    assert verify_inclusion(leaves[index], index, size, proof, root)
    assert not verify_inclusion(leaf_hash(b"other"), index, size, proof, root)
    assert not verify_inclusion(leaves[index], index, size, proof, leaf_hash(b"root"))
    assert not verify_inclusion(leaves[index], index, size, [*proof, leaves[0]], root)
    assert not verify_inclusion(leaves[index], size, size, proof, root)
    if proof:
        assert not verify_inclusion(leaves[index], index, size, proof[:-1], root)
        wrong = data.draw(st.integers(0, size - 1).filter(lambda i: i != index))
        assert not verify_inclusion(leaves[index], wrong, size, proof, root)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 80))
def test_consistency_proofs_hold_and_forged_ones_do_not(data, size):
    leaves = leaves_of(size)
    old = data.draw(st.integers(1, size))
    proof = consistency_proof(leaves, old)
    old_root, new_root = root_of(leaves[:old]), root_of(leaves)
    assert verify_consistency(old, size, old_root, new_root, proof)
    forked = root_of([*leaves[: old - 1], leaf_hash(b"another past")])
    assert not verify_consistency(old, size, forked, new_root, proof)
    assert not verify_consistency(old, size, old_root, leaf_hash(b"root"), proof)
    assert not verify_consistency(old, size, old_root, new_root, [*proof, old_root])
    if proof:
        assert not verify_consistency(old, size, old_root, new_root, proof[:-1])


def test_asking_for_what_is_not_there_is_an_error():
    with pytest.raises(LedgerError):
        inclusion_proof(leaves_of(3), 3)
    with pytest.raises(LedgerError):
        consistency_proof(leaves_of(3), 4)


def test_the_specifications_vectors():
    a, b, c = leaf_hash(b"a"), leaf_hash(b"b"), leaf_hash(b"c")
    assert leaf_hash(b"").hex() == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"
    assert a.hex() == "1ff621ee3430890e869728995a6cee4f2b0b61271bfc19b0092b06d778750ae8"
    assert node_hash(a, b).hex() == "6564e87d8619ea09c801c567c641d47fe817ae3b2cf80685cde2eb6557247eca"
    assert root_of([a, b, c]).hex() == "6c62dd52a0971b7d00a7cead004e0c3f3c0766e3f5359a0f8297768d2b02d03c"
