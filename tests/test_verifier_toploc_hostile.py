"""Proofs and claims that somebody made up: refused with `ProofError`, in bounded memory, by both profiles."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.limits import MAX_PROOF_CHUNKS
from tests import toploc_states
from tests.back_ends import back_end  # noqa: F401
from verifier import toploc
from verifier.errors import ProofError
from verifier.thresholds import PROOF_GATE, PROOF_MEDIAN_FLOOR, PROOF_OUTLIERS

P = 65497
BOTH = pytest.mark.parametrize("limbs", [1, 2], ids=["bf16", "fp32"])
MIB = 1 << 20


@functools.cache
def states(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    return toploc_states.floats(toploc_states.bits("sums", rows, hidden, seed))


@functools.cache
def honest(rows: int, hidden: int, limbs: int) -> tuple[bytes, ...]:
    return tuple(toploc.build_proofs(states(rows, hidden), limbs))


def verify(values: np.ndarray, proofs: Sequence[bytes], limbs: int) -> list[bool]:
    """Per chunk whether it stands."""
    if limbs == 1:
        (bf16,) = toploc.verify_many_bf16([values], [proofs])
        return [stats.exponents == 0 and stats.mantissa_mean == 0 for stats in bf16]
    (fp32,) = toploc.verify_many([values], [proofs], PROOF_GATE)
    return [stats.median <= PROOF_MEDIAN_FLOOR and stats.outliers <= PROOF_OUTLIERS for stats in fp32]


def well_formed(proofs: Sequence[bytes], tokens: int, hidden: int, limbs: int) -> bool:
    """What `check_shape` says; `are_well_formed` must say the same."""
    try:
        toploc.check_shape(proofs, tokens, hidden, limbs)
        alone = True
    except ProofError:
        alone = False
    assert toploc.are_well_formed([proofs], [tokens], hidden, limbs) == alone
    return alone


SOME = 20
"""Proofs an example makes: 10,000 of them in all, without a hypothesis example for each."""

SIZES = st.sampled_from([0, 1, 2, 10, 257, 258, 259, 514, 600])
RAW = SIZES.flatmap(lambda size: st.binary(min_size=size, max_size=size))


@settings(max_examples=200, deadline=None, database=None)
@given(
    proofs=st.lists(RAW, min_size=SOME, max_size=SOME),
    rows=st.integers(1, 32),
    hidden=st.sampled_from([1, 2, 4, 96, 4096]),
    limbs=st.sampled_from([1, 2]),
)
def test_any_bytes_are_a_proof_or_refused(proofs: list[bytes], rows: int, hidden: int, limbs: int) -> None:
    for proof in proofs:
        try:
            modulus, coefficients = toploc.parse_proof(proof, rows * hidden, limbs)
        except ProofError:
            assert not well_formed([proof], rows, hidden, limbs)
            continue
        assert well_formed([proof], rows, hidden, limbs)
        assert 32769 <= modulus <= P and coefficients.max() < P
        assert coefficients.shape == (limbs, min(128, rows * hidden))
        assert len(proof) == toploc.proof_bytes(rows, hidden, limbs)


WORD = st.tuples(st.integers(0, 256), st.sampled_from([0, 1, 32768, 32769, P - 1, P, 65535]) | st.integers(0, 65535))
CHANGE = st.sampled_from(["word"] * 8 + ["cut", "longer", "missing", "extra", "swapped", "empty"])


@settings(max_examples=300, deadline=None, database=None)
@given(
    shape=st.sampled_from([(1, 1), (3, 96), (40, 96), (33, 4096)]),
    limbs=st.sampled_from([1, 2]),
    changes=st.lists(st.tuples(CHANGE, WORD), min_size=SOME, max_size=SOME),
)
def test_a_changed_proof_is_refused_exactly_when_it_is_out_of_bounds(
    shape: tuple[int, int], limbs: int, changes: list[tuple[str, tuple[int, int]]]
) -> None:
    rows, hidden = shape
    for change, (word, value) in changes:
        proofs = list(honest(rows, hidden, limbs))
        at = value % len(proofs)
        word %= len(proofs[at]) // 2
        if change == "word":
            proofs[at] = proofs[at][: 2 * word] + value.to_bytes(2, "big") + proofs[at][2 * word + 2 :]
            lowest = P if min(32, rows - 32 * at) * hidden <= P else 32769
            fine = value < P if word else lowest <= value <= P
        elif change == "swapped":
            proofs.reverse()
            fine = len({len(p) for p in proofs}) == 1 and all(int.from_bytes(p[:2], "big") == P for p in proofs)
        else:
            fine = False
            proofs[at : at + 1] = {
                "cut": [proofs[at][: 2 * word]],
                "longer": [proofs[at] + b"\0\0"],
                "missing": [],
                "extra": [proofs[at], proofs[at]],
                "empty": [b""],
            }[change]
        assert well_formed(proofs, rows, hidden, limbs) == fine


@BOTH
def test_a_well_formed_proof_of_nothing_is_judged_not_refused(limbs: int) -> None:
    """All coefficients zero, or the largest: bytes of the right form, which no chunk stands by."""
    values = states(40, 96)
    for word in (b"\0\0", (P - 1).to_bytes(2, "big")):
        proofs = [P.to_bytes(2, "big") + word * (128 * limbs)] * 2
        assert well_formed(proofs, 40, 96, limbs)
        assert verify(values, proofs, limbs) == [False, False]


@BOTH
def test_a_zero_modulus_is_refused_before_anything_is_divided(limbs: int) -> None:
    for hidden in (96, 4096):
        (proof,) = honest(32, hidden, limbs)
        for modulus in (0, 1, 32768, 65498, 65535):
            wrong = [modulus.to_bytes(2, "big") + proof[2:]]
            with pytest.raises(ProofError, match="modulus"):
                toploc.check_shape(wrong, 32, hidden, limbs)
            with pytest.raises(ProofError, match="modulus"):
                verify(states(32, hidden), wrong, limbs)


@BOTH
def test_transplanted_chunks_do_not_stand(limbs: int) -> None:
    """Of another rollout, of the same rollout's other chunk, and of the right states under another modulus."""
    values = states(64, 4096)
    proofs = toploc.build_proofs(values, limbs)
    assert verify(values, proofs, limbs) == [True, True]
    assert verify(values, proofs[::-1], limbs) == [False, False]
    assert verify(values, toploc.build_proofs(states(64, 4096, 1), limbs), limbs) == [False, False]
    other = [(int.from_bytes(proof[:2], "big") - 1).to_bytes(2, "big") + proof[2:] for proof in proofs]
    assert verify(values, other, limbs) == [False, False]


@BOTH
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("rows", "hidden"), [(3, 96), (70, 96), (32, 576), (2, 8192)])
def test_states_that_are_not_finite_are_refused_wherever_they_are(
    rows: int, hidden: int, bad: float, limbs: int
) -> None:
    proofs = honest(rows, hidden, limbs)
    for at in (0, rows * hidden // 2, rows * hidden - 1):
        values = states(rows, hidden).copy()
        values.reshape(-1)[at] = bad
        with pytest.raises(ProofError, match="finite"):
            toploc.build_proofs(values, limbs)
        with pytest.raises(ProofError, match="finite"):
            verify(values, proofs, limbs)


@BOTH
@pytest.mark.parametrize("hidden", [64, 257, 1000, 2047, 2048, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 32, 33])
def test_hidden_sizes_and_one_token_outputs(rows: int, hidden: int, limbs: int) -> None:
    values = states(rows, hidden)
    proofs = honest(rows, hidden, limbs)
    assert well_formed(proofs, rows, hidden, limbs)
    assert [len(p) for p in proofs] == [
        toploc.proof_bytes(min(32, rows - i), hidden, limbs) for i in range(0, rows, 32)
    ]
    assert all(verify(values, proofs, limbs)) and len(proofs) == -(-rows // 32)
    assert not any(verify(-values, proofs, limbs))


@BOTH
def test_no_tokens_need_no_proof_and_take_none(limbs: int) -> None:
    empty = np.zeros((0, 96), dtype=np.float32)
    assert toploc.build_proofs(empty, limbs) == [] and verify(empty, [], limbs) == []
    assert well_formed([], 0, 96, limbs) and not well_formed(honest(1, 96, limbs), 0, 96, limbs)
    with pytest.raises(ProofError, match="chunks"):
        verify(empty, honest(1, 96, limbs), limbs)


@BOTH
def test_a_claim_of_a_million_tokens_is_refused_without_room_for_it(limbs: int) -> None:
    proofs = honest(32, 576, limbs)
    tracemalloc.start()
    for tokens in (10**6, 10**12):
        with pytest.raises(ProofError, match=f"1 proof chunks for {tokens} tokens"):
            toploc.check_shape(proofs, tokens, 576, limbs)
        assert not toploc.are_well_formed([proofs], [tokens], 576, limbs)
    with pytest.raises(ProofError, match="chunks"):
        verify(states(32, 576), proofs * 31250, limbs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB


@BOTH
def test_the_longest_rollouts_are_parsed_in_bounded_memory(limbs: int) -> None:
    """Eight of 131,072 tokens: 8 or 16 MiB of proofs, of which the last coefficient of all is out of range."""
    (proof,) = honest(32, 576, limbs)
    rollouts = [[proof] * MAX_PROOF_CHUNKS for _ in range(8)]
    tokens = [32 * MAX_PROOF_CHUNKS] * 8
    tracemalloc.start()
    assert toploc.are_well_formed(rollouts, tokens, 576, limbs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * MIB
    rollouts[-1][-1] = proof[:-2] + b"\xff\xff"
    assert not toploc.are_well_formed(rollouts, tokens, 576, limbs)


@BOTH
def test_wide_states_are_searched_in_bounded_memory(limbs: int) -> None:
    """96 chunks of 2 MiB: what is needed beside them does not grow with them."""
    values = states(32, 16384)
    rollouts = [values] * 96
    tracemalloc.start()
    proofs = toploc.build_many(rollouts, limbs)
    found = (
        toploc.verify_many_bf16(rollouts, proofs) if limbs == 1 else toploc.verify_many(rollouts, proofs, PROOF_GATE)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 96 and peak < 16 * MIB


@BOTH
@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 96)), np.zeros((3, 96), np.float16), np.zeros(96, np.float32), np.zeros((3, 0), np.float32)]
)
def test_what_is_no_matrix_of_float32_is_refused(wrong: np.ndarray, limbs: int) -> None:
    with pytest.raises(ProofError, match="float32"):
        toploc.build_proofs(wrong, limbs)
    with pytest.raises(ProofError, match="float32"):
        verify(wrong, honest(3, 96, limbs), limbs)
