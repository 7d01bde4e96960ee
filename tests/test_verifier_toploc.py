"""TOPLOC proofs in fp32: the format to the byte, honest noise, every other state, and exact arithmetic below it all."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.back_ends import back_end  # noqa: F401
from verifier import field, toploc
from verifier.errors import ProofError
from verifier.thresholds import PROOF_GATE

GATE = PROOF_GATE
PROTOCOL = Path(__file__).parent.parent / "docs" / "protocol.md"
P = 65497


def states(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)


def noisy(values: np.ndarray, scale: float, seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(values.shape)
    return (values * (1 + scale * noise)).astype(np.float32)


def plain_build(values: np.ndarray) -> list[bytes]:
    """The format again, in plain Python: Lagrange interpolation one point at a time."""
    out = []
    for start in range(0, len(values), 32):
        flat = values[start : start + 32].reshape(-1)
        order = sorted(range(len(flat)), key=lambda i: (-abs(float(flat[i])), i))[:128]
        bits = [int(flat[i : i + 1].view(np.uint32)[0]) for i in order]
        modulus = next(m for m in range(P, 0, -1) if len({i % m for i in order}) == len(order))
        points = [i % modulus for i in order]
        proof = modulus.to_bytes(2, "big")
        for limb in ([b >> 16 for b in bits], [(b & 0xFFFF) >> 1 for b in bits]):
            whole = [1]
            for x in points:
                whole = [(a - x * b) % P for a, b in zip([0, *whole], [*whole, 0], strict=True)]
            total = [0] * len(points)
            for x, y in zip(points, limb, strict=True):
                quotient, carry = [0] * len(points), 0
                for power in range(len(points), 0, -1):
                    carry = (whole[power] + carry * x) % P
                    quotient[power - 1] = carry
                slope = sum(c * pow(x, n, P) for n, c in enumerate(quotient)) % P
                factor = y * pow(slope, -1, P)
                total = [(t + factor * q) % P for t, q in zip(total, quotient, strict=True)]
            proof += b"".join(c.to_bytes(2, "big") for c in total)
        out.append(proof)
    return out


@pytest.mark.parametrize(("rows", "hidden"), [(1, 5), (1, 96), (7, 96), (40, 24), (32, 2100)])
def test_the_bytes_are_those_of_the_plain_definition(rows: int, hidden: int) -> None:
    values = states(rows, hidden)
    values[0, 2] = values[0, 1]
    assert toploc.build_proofs(values) == plain_build(values)


def test_a_known_proof() -> None:
    """The hex vector of the specification: two tokens, three columns, six points."""
    values = np.asarray([[1.0, -2.0, 0.5], [3.0, -0.25, 0.1]], dtype=np.float32)
    (proof,) = toploc.build_proofs(values)
    assert proof.hex() == KNOWN_PROOF and f"`{KNOWN_PROOF}`" in PROTOCOL.read_text(encoding="utf-8")
    (stats,) = toploc.verify_proofs(values, [proof], GATE)
    assert stats.outliers == 0 and stats.median < 2e-7 and stats.points == 6


KNOWN_PROOF = "ffd93f808239abe37d92436291220000adfd55425dd47764273b"


def test_many_rollouts_at_once_give_what_each_gives_alone() -> None:
    many = [states(n, 96, n) for n in (1, 2, 5, 9, 31, 32, 33, 64, 70, 1, 100)]
    together = toploc.build_many(many)
    assert together == [toploc.build_proofs(values) for values in many]
    assert [len(p) for p in together] == [-(-len(v) // 32) for v in many]
    assert {len(c) for p in together for c in p} == {2 + 4 * 96, 514}
    own = [noisy(values, 1e-7) for values in many]
    stats = toploc.verify_many(own, together, GATE)
    assert stats == [toploc.verify_proofs(o, p, GATE) for o, p in zip(own, together, strict=True)]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 70), hidden=st.sampled_from([8, 48, 96]), seed=st.integers(0, 1 << 30))
def test_honest_noise_is_far_below_the_bound_and_other_states_far_above(rows: int, hidden: int, seed: int) -> None:
    values = states(rows, hidden, seed)
    proofs = toploc.build_proofs(values)
    toploc.check_shape(proofs, rows, hidden)
    for chunk in toploc.verify_proofs(noisy(values, 3e-7), proofs, GATE):
        assert chunk.median <= 1e-6 and chunk.outliers <= 4
    for other in (-values, noisy(values, 3e-5), states(rows, hidden, seed + 1)):
        for chunk in toploc.verify_proofs(other, proofs, GATE):
            assert chunk.median > 5e-6 or chunk.outliers > 4


def test_a_part_of_a_chunk_is_not_free() -> None:
    """128 points of 32 rows are about 4 a row: one row may be off, three may not."""
    values = states(32, 96)
    proofs = toploc.build_proofs(values)
    for rows in (3, 8, 15):
        other = noisy(values, 1e-7)
        other[-rows:] = noisy(values[-rows:], 1e-2)
        (chunk,) = toploc.verify_proofs(other, proofs, GATE)
        assert chunk.median < 3e-6 and chunk.outliers > 4


@pytest.mark.parametrize("seed", range(20))
def test_rounding_of_the_smallest_values_is_absolute(seed: int) -> None:
    """One row has fewer than 128 values: those near zero are points too, with rounding as large as everybody's."""
    values = states(1, 96, seed)
    noise = 1e-6 * np.random.default_rng(100 + seed).standard_normal(values.shape)
    (chunk,) = toploc.verify_proofs((values + noise).astype(np.float32), toploc.build_proofs(values), GATE / 5)
    assert chunk.median < 3e-6 and chunk.outliers == 0


def test_a_wide_chunk_finds_a_modulus_that_keeps_its_points_apart() -> None:
    values = states(32, 4096)
    values[:, :] *= 0.01
    values.reshape(-1)[[0, P, 5, 5 + P]] = 100.0
    (proof,) = toploc.build_proofs(values)
    assert int.from_bytes(proof[:2], "big") < P
    (stats,) = toploc.verify_proofs(noisy(values, 1e-7), [proof], GATE)
    assert stats.median < 1e-6 and stats.outliers == 0


def test_zeros_and_ties_are_proved_and_checked() -> None:
    for values in (np.zeros((3, 96), np.float32), np.full((3, 96), -1.5, np.float32)):
        (stats,) = toploc.verify_proofs(values, toploc.build_proofs(values), GATE)
        assert stats.outliers == 0 and stats.median < 2e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_states_that_are_not_finite_are_refused(bad: float) -> None:
    values = states(3, 96)
    proofs = toploc.build_proofs(values)
    values[1, 1] = bad
    with pytest.raises(ProofError, match="finite"):
        toploc.build_proofs(values)
    with pytest.raises(ProofError, match="finite"):
        toploc.verify_proofs(values, proofs, GATE)
    with pytest.raises(ProofError, match="float32"):
        toploc.build_proofs(states(3, 96).astype(np.float64))


def test_no_chunk_is_ever_vacuously_accepted() -> None:
    values = states(40, 96)
    proofs = toploc.build_proofs(values)
    for wrong in ([], proofs[:1], [*proofs, proofs[0]]):
        with pytest.raises(ProofError, match="chunks"):
            toploc.verify_proofs(values, wrong, GATE)
        with pytest.raises(ProofError, match="chunks"):
            toploc.check_shape(wrong, 40, 96)


def test_a_narrow_chunk_has_one_modulus_only() -> None:
    (proof,) = toploc.build_proofs(states(5, 96))
    with pytest.raises(ProofError, match="modulus"):
        toploc.check_shape([(P - 1).to_bytes(2, "big") + proof[2:]], 5, 96)


def test_every_flipped_bit_is_seen() -> None:
    """All 4,112 of them, but for low bits of limb 2's constant: those move all points alike, by less than rounding."""
    values = states(7, 96)
    (proof,) = toploc.build_proofs(values)
    flipped, refused = {}, 0
    for at in range(8 * len(proof)):
        wrong = bytearray(proof)
        wrong[at // 8] ^= 1 << at % 8
        try:
            toploc.parse_proof(bytes(wrong), values.size)
            flipped[at] = [bytes(wrong)]
        except ProofError:
            refused += 1
    assert refused >= 16, "the modulus has one value here"
    stats = toploc.verify_many([values] * len(flipped), list(flipped.values()), GATE)
    unseen = [at for at, (chunk,) in zip(flipped, stats, strict=True) if chunk.median <= 3e-6 and chunk.outliers <= 4]
    assert set(unseen) <= {8 * 259 + bit for bit in range(5)}


def test_a_rollout_costs_less_than_a_millisecond() -> None:
    many = [states(n, 96, n) for n in range(4, 10) for _ in range(6)]
    proofs = toploc.build_many(many)
    toploc.verify_many(many, proofs, GATE)
    start = time.process_time()
    for _ in range(3):
        toploc.verify_many(many, toploc.build_many(many), GATE)
    assert (time.process_time() - start) / 3 / len(many) < 1e-3


def test_the_field_arithmetic_in_floats_is_exact_at_its_bounds() -> None:
    """Remainders of multiples of p and their neighbours up to 2^47, and the largest sums a proof can need."""
    rng = np.random.default_rng(0)
    quotients = np.concatenate([np.arange(70_000), rng.integers(0, (1 << 47) // P - 1, 200_000)])
    for offset in (0, 1, P - 1, P // 2):
        for sign in (1, -1):
            whole = sign * (quotients * P + offset)
            assert np.array_equal(field.rem(whole.astype(np.float64)), (whole % P).astype(np.float64))
    half = P // 2
    for m in (np.full(128, half), np.full(128, half + 1), rng.integers(0, P, 128), np.tile([half, half + 1], 64)):
        for s in (np.full(128, half), np.full(128, P - 1), rng.integers(0, P, 128), np.tile([half + 1, half], 64)):
            exact = [sum(int(m[k + j]) * int(s[j]) for j in range(128 - k)) % P for k in range(128)]
            ours = field.correlate(m.astype(np.float64), s.astype(np.float64))
            assert ours.tolist() == exact
