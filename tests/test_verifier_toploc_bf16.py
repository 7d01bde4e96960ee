"""bf16 proofs: the `toploc` package's bytes, choice among equals and statistics, and what ours say of a chunk."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import toploc_states
from tests.back_ends import back_end  # noqa: F401
from verifier import points, toploc
from verifier.errors import ProofError
from verifier.thresholds import PROOF_GATE
from verifier.toploc import Bf16Stats

P = toploc_states.P
PROTOCOL = Path(__file__).parent.parent / "docs" / "protocol.md"
DATA = json.loads((Path(__file__).parent / "data" / "toploc-0.1.6.json").read_text(encoding="utf-8"))
VECTORS = [pytest.param(v, id=f"{v['kind']}-{v['rows']}x{v['hidden']}") for v in DATA["vectors"]]


def states(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    return toploc_states.floats(toploc_states.bits("sums", rows, hidden, seed))


@pytest.mark.parametrize("vector", VECTORS)
def test_our_bytes_are_the_package_s(vector: dict[str, Any]) -> None:
    """Its answers are checked in; `python -m benchmarks.toploc` compares thousands with the package itself."""
    bits_NH = toploc_states.bits(vector["kind"], vector["rows"], vector["hidden"], vector["seed"])
    theirs = [bytes.fromhex(proof) for proof in vector["proofs"]]
    assert toploc.build_proofs(toploc_states.floats(bits_NH), limbs=1) == theirs
    toploc.check_shape(theirs, vector["rows"], vector["hidden"], limbs=1)
    assert toploc.are_well_formed([theirs], [vector["rows"]], vector["hidden"], limbs=1)
    moduli = [int.from_bytes(proof[:2], "big") for proof in theirs]
    assert all(m == P for m in moduli) != (vector["kind"] == "apart")


@pytest.mark.parametrize("vector", VECTORS)
def test_our_statistics_are_the_package_s(vector: dict[str, Any]) -> None:
    """Where it chooses among equals as we do. Ours takes those that agree best, so no more of them are off."""
    bits_NH = toploc_states.bits(vector["kind"], vector["rows"], vector["hidden"], vector["seed"])
    moved_NH = toploc_states.floats(toploc_states.moved(bits_NH, vector["seed"]))
    proofs = [bytes.fromhex(proof) for proof in vector["proofs"]]
    (stats,) = toploc.verify_many_bf16([moved_NH], [proofs])
    for i, (ours, (exponents, mean)) in enumerate(zip(stats, vector["moved"], strict=True)):
        own_NH = moved_NH[32 * i : 32 * i + 32]
        its = plain_stats(own_NH, proofs[i], by_torch(own_NH), [])
        assert its.exponents == exponents and min(its.mantissa_mean, 2.0**64) == pytest.approx(mean)
        assert ours.exponents <= exponents
        if not by_rule(own_NH)[1]:
            assert ours == its


def test_the_vectors_hold_what_they_are_for() -> None:
    """Partial chunks, all of a chunk's values, smaller moduli, points that moved to another binade."""
    assert DATA["made_by"].startswith("toploc 0.1.6 built from its sdist")
    assert {len(proof) // 2 for v in DATA["vectors"] for proof in v["proofs"]} >= {12, 194, 258}
    assert any(0 < exponents < 128 for v in DATA["vectors"] for exponents, _ in v["moved"])


def test_a_known_proof() -> None:
    """The hex vector of the specification: the fp32 vector's states, cut to what bfloat16 holds. Its first limb."""
    values = np.asarray([[1.0, -2.0, 0.5], [3.0, -0.25, 0.099609375]], dtype=np.float32)
    (proof,) = toploc.build_proofs(values, limbs=1)
    assert proof.hex() == KNOWN_PROOF and f"`{KNOWN_PROOF}`" in PROTOCOL.read_text(encoding="utf-8")
    assert toploc.verify_many_bf16([values], [[proof]]) == [[Bf16Stats(0, 0.0, 0.0, 6)]]


KNOWN_PROOF = "ffd93f808239abe37d9243629122"


def by_torch(values_NH: np.ndarray) -> set[int]:
    flat = torch.from_numpy(values_NH).to(torch.bfloat16).reshape(-1)
    return set(flat.abs().topk(min(128, len(flat))).indices.tolist())


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 32),
    hidden=st.sampled_from([3, 64, 255, 256, 257, 300, 576, 2100, 4096]),
    levels=st.sampled_from([1, 2, 40, 3000, 20000]),
    order=st.sampled_from(["drawn", "rising", "falling", "rows rise"]),
    seed=st.integers(0, 1 << 30),
)
def test_the_choice_among_equals_is_torch_s(rows: int, hidden: int, levels: int, order: str, seed: int) -> None:
    """Few levels make many equals. Torch's answer depends on order and number of the values, and so must ours."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0x3000, 0x3000 + levels, rows * hidden)
    if order != "drawn":
        bits = np.sort(bits) if order != "falling" else np.sort(bits)[::-1]
    bits_NH = bits.astype(np.uint16).reshape(rows, hidden)
    if order == "rows rise":
        bits_NH = rng.permuted(bits_NH, axis=1)
    values_NH = toploc_states.floats(bits_NH | (rng.integers(0, 2, bits_NH.shape).astype(np.uint16) << 15))
    (group,) = points.largest([values_NH], 1)
    assert set(group.index_CK[0].tolist()) == by_torch(values_NH)


def test_chunks_of_many_rollouts_are_chosen_as_each_alone() -> None:
    many = [states(n, 288, n) for n in (1, 5, 28, 29, 31, 32, 33, 64, 70, 1, 100)]
    together = toploc.build_many(many, limbs=1)
    assert together == [toploc.build_proofs(values, limbs=1) for values in many]
    assert [len(p) for p in together] == [-(-len(v) // 32) for v in many]
    found = toploc.verify_many_bf16(many, together)
    assert found == [[Bf16Stats(0, 0.0, 0.0, 128)] * len(p) for p in together]


def by_rule(own_NH: np.ndarray) -> tuple[set[int], list[int]]:
    """Indices of the points in any case, and of those that share the K-th magnitude: none when too many do."""
    sizes = np.abs(own_NH.reshape(-1))
    count = min(128, len(sizes))
    least = np.sort(sizes)[-count]
    if (sizes >= least).sum() > 2 * count:
        return by_torch(own_NH), []
    return set(np.flatnonzero(sizes > least).tolist()), np.flatnonzero(sizes == least).tolist()


def plain_stats(own_NH: np.ndarray, proof: bytes, above: set[int], equal: list[int]) -> Bf16Stats:
    """The statistics again, in plain Python, one point at a time."""
    flat = own_NH.reshape(-1)
    modulus, coefficients = toploc.parse_proof(proof, len(flat), limbs=1)
    count = min(128, len(flat))

    def distance(i: int) -> float:
        own = int(flat[i : i + 1].view(np.uint32)[0]) >> 16
        claimed = sum(int(c) * pow(i % modulus, power, P) for power, c in enumerate(coefficients[0])) % P
        apart = own >> 7 != claimed >> 7 and (own | claimed) & 0x7FFF
        return np.inf if apart else abs((own & 127) - (claimed & 127))

    found = [distance(i) for i in above] + sorted(distance(i) for i in equal)[: count - len(above)]
    near = [one for one in found if one < np.inf]
    if not near:
        return Bf16Stats(count, np.inf, np.inf, count)
    return Bf16Stats(count - len(near), sum(near) / len(near), float(statistics.median(near)), count)


def test_which_equals_a_prover_took_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of torch, or a GPU, takes others of the values that share the 128th magnitude."""

    def others(bits: list[np.ndarray], count: int) -> np.ndarray:
        return np.stack([np.argsort(-((b >> 16) & 0x7FFF).astype(int), kind="stable")[:count] for b in bits])

    values = states(128, 576, 5)
    usual = toploc.build_proofs(values, limbs=1)
    monkeypatch.setattr(points, "torch_choice", others)
    proofs = toploc.build_proofs(values, limbs=1)
    assert proofs != usual and all(len(by_rule(values[i : i + 32])[1]) > 1 for i in (0, 32, 64, 96))
    for of_one in (usual, proofs):
        assert toploc.verify_many_bf16([values], [of_one]) == [[Bf16Stats(0, 0.0, 0.0, 128)] * 4]


def test_bits_of_bfloat16s_are_taken_as_their_values_are() -> None:
    bits_NH = toploc_states.bits("sums", 70, 576, 3)
    proofs = toploc.build_proofs(bits_NH, limbs=1)
    assert proofs == toploc.build_proofs(toploc_states.floats(bits_NH), limbs=1)
    moved_NH = toploc_states.moved(bits_NH, 3)
    assert toploc.verify_many_bf16([moved_NH], [proofs]) == toploc.verify_many_bf16(
        [toploc_states.floats(moved_NH)], [proofs]
    )
    bits_NH[5, 7] = 0x7F80
    for refused in (
        lambda: toploc.build_proofs(bits_NH, limbs=1),
        lambda: toploc.verify_many_bf16([bits_NH], [proofs]),
    ):
        with pytest.raises(ProofError, match="not finite"):
            refused()
    with pytest.raises(ProofError, match="float32"):
        toploc.build_proofs(bits_NH, limbs=2)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 3), (1, 96), (9, 96), (32, 576), (32, 2048)])
@pytest.mark.parametrize("kind", ["sums", "bits", "zeros"])
def test_statistics_are_those_of_the_plain_definition(rows: int, hidden: int, kind: str) -> None:
    bits_NH = toploc_states.bits(kind, rows, hidden, 1)
    (proof,) = toploc.build_proofs(toploc_states.floats(bits_NH), limbs=1)
    moved_NH = toploc_states.moved(bits_NH, 2)
    moved_NH[::2] ^= 0x8000
    for own_NH in (toploc_states.floats(moved_NH), states(rows, hidden, 7)):
        ((stats,),) = toploc.verify_many_bf16([own_NH], [[proof]])
        assert stats == plain_stats(own_NH, proof, *by_rule(own_NH))


def test_the_sign_is_compared_and_zero_has_none() -> None:
    """The package never looks at signs: all activations negated pass it without an error."""
    values = states(32, 576)
    proofs = toploc.build_proofs(values, limbs=1)
    assert toploc.verify_many_bf16([-values], [proofs]) == [[Bf16Stats(128, np.inf, np.inf, 128)]]
    zeros = np.zeros((2, 96), dtype=np.float32)
    assert toploc.verify_many_bf16([-zeros], [toploc.build_proofs(zeros, limbs=1)]) == [[Bf16Stats(0, 0.0, 0.0, 128)]]


def test_unrelated_and_transplanted_proofs_stand_out() -> None:
    """A proof of another rollout, and one's own in another order."""
    values, other = states(96, 576, 1), states(96, 576, 2)
    proofs = toploc.build_proofs(values, limbs=1)
    for wrong in (toploc.build_proofs(other, limbs=1), [proofs[1], proofs[2], proofs[0]]):
        (found,) = toploc.verify_many_bf16([values], [wrong])
        assert all(stats.exponents > 80 for stats in found)


def test_honest_noise_is_far_from_other_states() -> None:
    """Relative noise of 1e-2 and 1e-1: what rounding does in bfloat16, and what four-bit weights do."""
    rng = np.random.default_rng(3)
    values = torch.randn(320, 576, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).float()
    proofs = toploc.build_proofs(values.numpy(), limbs=1)
    found = {}
    for scale in (1e-2, 1e-1):
        noise = torch.from_numpy(rng.standard_normal(values.shape).astype(np.float32))
        other = (values + scale * noise * values.abs().mean()).to(torch.bfloat16).float().numpy()
        (found[scale],) = toploc.verify_many_bf16([other], [proofs])
    assert all(stats.mantissa_mean < 2 and stats.exponents < 12 for stats in found[1e-2])
    assert all(stats.mantissa_mean > 3 for stats in found[1e-1])


def test_the_profiles_do_not_take_each_other_s_proofs() -> None:
    values = states(40, 96)
    for limbs, other in ((1, 2), (2, 1)):
        with pytest.raises(ProofError, match="bytes"):
            toploc.check_shape(toploc.build_proofs(values, limbs), 40, 96, other)
    with pytest.raises(ProofError, match="bytes"):
        toploc.verify_many_bf16([values], [toploc.build_proofs(values)])
    with pytest.raises(ProofError, match="bytes"):
        toploc.verify_many([values], [toploc.build_proofs(values, limbs=1)], PROOF_GATE)


def test_states_that_no_bfloat16_holds_are_refused() -> None:
    """An engine that computes in float32 and calls itself bf16 is told so, at one value of a rollout already."""
    values = states(40, 96)
    proofs = toploc.build_proofs(values, limbs=1)
    values[39, 95] = np.float32(0.1)
    with pytest.raises(ProofError, match="bfloat16"):
        toploc.build_proofs(values, limbs=1)
    with pytest.raises(ProofError, match="bfloat16"):
        toploc.verify_many_bf16([values], [proofs])
