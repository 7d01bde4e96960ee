"""TOPLOC proofs in two limbs: 514 bytes per 32 tokens that bind a rollout to the weights that made it.

After Ong et al., "TOPLOC: A locality sensitive hashing scheme for trustless verifiable inference" (2025), in fp32:

    chunk     32 consecutive sampled tokens; row i of the states is the final-norm state whose logits token i was
              drawn from, so the last prompt position counts and the last sampled token does not
    points    the k = min(128, rows * H) values of largest magnitude (ties: lowest index first); x = flat index
              (row * H + column) mod `modulus`, y = the float's bits
    limb 1    polynomial over GF(65497) of degree < k through (x, top 16 bits)      sign, exponent, 7 bits
    limb 2    the same through (x, next 15 bits)                                    the rest but the last bit
    bytes     u16 modulus | k u16 coefficients of limb 1 | k of limb 2; ascending powers, big-endian

`modulus` is the largest m <= 65497 for which all x differ. A verifier takes the points of its *own* states,
evaluates both polynomials there and compares floats, sign included:

    error     |claimed - own| / max(|own|, median of |own| over the chunk's points)

A chunk has two bounds: one on the median of its errors, which is the finest, and one on how many may lie above a gate,
which leaves no part of a chunk free to come from other weights. The floor under the divisor is for chunks of few
values, where even the smallest are points: rounding is absolute there. Thresholds come from the run's manifest.

The parser is total: it raises `ProofError` and nothing else. All work is vectorised over the chunks of many
rollouts; the inverse table is made once, on first use.

Not covered: the bf16 profile (258-byte chunks), the decision itself (`checks.proof`).

Shape suffixes: N sampled tokens, H hidden, C chunks of equal k, K points of a chunk, L limbs,
F flat values of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.limits import PROOF_CHUNK_TOKENS, PROOF_MODULUS_MAX, PROOF_MODULUS_MIN, PROOF_TOPK
from verifier.errors import ProofError

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

_P = np.uint32(PROOF_MODULUS_MAX)
"""The field's prime. (p-1)^2 + (p-1) < 2^32, so every step fits uint32."""

_LIMB_2_BITS = 15
_SMALLEST = np.float32(2.0**-100)
"""Floor of the divisor of a relative error: an own value of 0 does not divide by 0."""


@dataclass(frozen=True)
class ChunkStats:
    """How far one chunk's claimed values are from the verifier's own.

    median: of the k points' errors (inf where the claim is not finite).
    outliers: points whose error is above the gate, or that are not a value a prover could have written.
    points: k.
    """

    median: float
    outliers: int
    points: int


def chunk_rows(tokens: int) -> list[int]:
    """Rows of each chunk of a rollout of `tokens` sampled tokens."""
    full, rest = divmod(tokens, PROOF_CHUNK_TOKENS)
    return [PROOF_CHUNK_TOKENS] * full + ([rest] if rest else [])


def proof_bytes(rows: int, hidden: int) -> int:
    """Exact length of one chunk's proof: 514 from 128 values on."""
    return 2 + 4 * min(PROOF_TOPK, rows * hidden)


def check_shape(proofs: Sequence[bytes], tokens: int, hidden: int) -> None:
    """Everything that can be said about proofs without the model.

    Raises:
        ProofError: not exactly one chunk per 32 tokens, or a chunk of the wrong length, modulus or coefficients.
    """
    rows = chunk_rows(tokens)
    if len(proofs) != len(rows):
        raise ProofError(f"{len(proofs)} proof chunks for {tokens} tokens, {len(rows)} needed")
    for proof, count in zip(proofs, rows, strict=True):
        parse_proof(proof, count * hidden)


def parse_proof(proof: bytes, values: int) -> tuple[int, U32]:
    """Split one chunk's proof into its modulus and coefficients, uint32 [2, K].

    Args:
        values: rows * H of the chunk. Up to 65497 of them need no other modulus than 65497, and none is taken: a
            proof has one form.

    Raises:
        ProofError: wrong length, a modulus outside [32769, 65497] or not the one form, a coefficient not in the field.
    """
    points = min(PROOF_TOPK, values)
    if len(proof) != 2 + 4 * points:
        raise ProofError(f"a proof of {len(proof)} bytes, {2 + 4 * points} needed for {points} values")
    modulus = int.from_bytes(proof[:2], "big")
    lowest = PROOF_MODULUS_MAX if values <= PROOF_MODULUS_MAX else PROOF_MODULUS_MIN
    if not lowest <= modulus <= PROOF_MODULUS_MAX:
        raise ProofError(f"modulus {modulus} is outside [{lowest}, {PROOF_MODULUS_MAX}]")
    coefficients = np.frombuffer(proof, dtype=">u2", offset=2).astype(np.uint32)
    if int(coefficients.max()) >= PROOF_MODULUS_MAX:
        raise ProofError(f"coefficient {int(coefficients.max())} is outside the field of {PROOF_MODULUS_MAX}")
    return modulus, coefficients.reshape(2, points)


def build_proofs(states_NH: F32) -> list[bytes]:
    """The proofs of one rollout: ceil(N / 32) chunks.

    Args:
        states_NH: float32, row i is the final-norm state that produced sampled token i.

    Raises:
        ProofError: not float32 [N, H], or not finite.
    """
    return build_many([states_NH])[0]


def build_many(states: Sequence[F32]) -> list[list[bytes]]:
    """The proofs of many rollouts at once; much cheaper than one by one."""
    proofs: list[list[bytes]] = [[b""] * len(chunk_rows(_check_states(s))) for s in states]
    for group in _groups(states):
        index_CK, value_CK = _top(group)
        moduli = [_injective_modulus(row) for row in index_CK] if max(group.values) > _P else [int(_P)] * len(index_CK)
        x_CK = (index_CK % np.asarray(moduli, dtype=np.int64)[:, None]).astype(np.uint32)
        bits_CK = value_CK.view(np.uint32)
        limbs = np.stack([bits_CK >> np.uint32(16), (bits_CK & np.uint32(0xFFFF)) >> np.uint32(1)], axis=1)
        coefficients = _interpolate(x_CK, limbs)
        for (rollout, chunk), modulus, pair in zip(group.where, moduli, coefficients, strict=True):
            proofs[rollout][chunk] = modulus.to_bytes(2, "big") + pair.astype(">u2").tobytes()
    return proofs


def verify_proofs(states_NH: F32, proofs: Sequence[bytes], gate: float) -> list[ChunkStats]:
    """Compare one rollout's proofs with the verifier's own states. See `verify_many`."""
    return verify_many([states_NH], [proofs], gate)[0]


def verify_many(states: Sequence[F32], proofs: Sequence[Sequence[bytes]], gate: float) -> list[list[ChunkStats]]:
    """Compare the proofs of many rollouts with the verifier's own states.

    Args:
        states: per rollout float32 [N, H] of the verifier's prefill.
        proofs: per rollout its chunks.
        gate: error above which a value is an outlier (`Thresholds.proof_gate`).

    Raises:
        ProofError: states that are not finite float32 [N, H], or proofs that `check_shape` refuses.
    """
    if len(states) != len(proofs):
        raise ProofError(f"{len(proofs)} lists of proofs for {len(states)} rollouts")
    stats: list[list[ChunkStats]] = []
    for s, p in zip(states, proofs, strict=True):
        if len(p) != len(chunk_rows(_check_states(s))):
            raise ProofError(f"{len(p)} proof chunks for {len(s)} tokens, {len(chunk_rows(len(s)))} needed")
        stats.append([ChunkStats(np.inf, 0, 0)] * len(p))
    for group in _groups(states):
        index_CK, own_CK = _top(group)
        points = index_CK.shape[1]
        parsed = [
            parse_proof(proofs[rollout][chunk], values)
            for (rollout, chunk), values in zip(group.where, group.values, strict=True)
        ]
        moduli = np.asarray([modulus for modulus, _ in parsed], dtype=np.int64)
        limbs = _evaluate(np.stack([c for _, c in parsed]), (index_CK % moduli[:, None]).astype(np.uint32))
        high_CK, low_CK = limbs[:, 0], limbs[:, 1]
        garbage_CK = low_CK >= np.uint32(1 << _LIMB_2_BITS)
        # the bit that was not sent is set: the middle of the two floats it could have been
        claimed_CK = ((high_CK << np.uint32(16)) | ((low_CK & np.uint32(0x7FFF)) << np.uint32(1)) | np.uint32(1)).view(
            np.float32
        )
        with np.errstate(all="ignore"):
            size_CK = np.abs(own_CK)
            floor_C1 = np.maximum(np.median(size_CK, axis=1, keepdims=True), _SMALLEST)
            error_CK = np.abs((claimed_CK - own_CK) / np.maximum(size_CK, floor_C1))
        error_CK[garbage_CK | ~np.isfinite(error_CK)] = np.inf
        median_C = np.median(error_CK, axis=1)
        outliers_C = (error_CK > gate).sum(axis=1)
        for i, (rollout, chunk) in enumerate(group.where):
            stats[rollout][chunk] = ChunkStats(float(median_C[i]), int(outliers_C[i]), points)
    return stats


# --- chunks of many rollouts, side by side -------------------------------------------------------------------------


@dataclass
class _Group:
    """Chunks with equally many points. flat_CF is padded with -1 below each chunk's own values."""

    where: list[tuple[int, int]]
    flat_CF: F32
    magnitude_CF: F32
    values: list[int]
    """Per chunk rows * H: one more than its largest index."""
    points: int


def _check_states(states_NH: F32) -> int:
    if states_NH.dtype != np.float32 or states_NH.ndim != 2 or states_NH.shape[1] == 0:
        raise ProofError(f"states are float32 [tokens, hidden], not {states_NH.dtype} {list(states_NH.shape)}")
    if not np.isfinite(states_NH).all():
        raise ProofError("a state is not finite; such a rollout can be neither proved nor checked")
    return len(states_NH)


def _groups(states: Sequence[F32]) -> Iterable[_Group]:
    by_shape: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rollout, states_NH in enumerate(states):
        hidden = states_NH.shape[1]
        for chunk, rows in enumerate(chunk_rows(len(states_NH))):
            points = min(PROOF_TOPK, rows * hidden)
            by_shape.setdefault((hidden, points), []).append((rollout, chunk, rows))
    for (hidden, points), members in by_shape.items():
        for start in range(0, len(members), _GROUP_CHUNKS):
            yield _group(states, members[start : start + _GROUP_CHUNKS], hidden, points)


_GROUP_CHUNKS = 64
"""Chunks worked on side by side: enough to pay numpy's call overhead, few enough for the cache."""


def _group(states: Sequence[F32], members: list[tuple[int, int, int]], hidden: int, points: int) -> _Group:
    widest = max(rows for _, _, rows in members) * hidden
    flat_CF = np.zeros((len(members), widest), dtype=np.float32)
    magnitude_CF = np.full((len(members), widest), -1.0, dtype=np.float32)
    for i, (rollout, chunk, rows) in enumerate(members):
        start = chunk * PROOF_CHUNK_TOKENS
        flat_CF[i, : rows * hidden] = states[rollout][start : start + rows].reshape(-1)
        np.abs(flat_CF[i, : rows * hidden], out=magnitude_CF[i, : rows * hidden])
    where = [(rollout, chunk) for rollout, chunk, _ in members]
    return _Group(where, flat_CF, magnitude_CF, [rows * hidden for _, _, rows in members], points)


def _top(group: _Group) -> tuple[I64, F32]:
    """Indices and values of the k largest magnitudes of each chunk; among equals the lowest index."""
    points, width = group.points, group.magnitude_CF.shape[1]
    threshold_C1 = -np.partition(-group.magnitude_CF, points - 1, axis=1)[:, points - 1 : points]
    above_CF = group.magnitude_CF > threshold_C1
    room_C1 = points - above_CF.sum(axis=1, keepdims=True)
    equal_CF = group.magnitude_CF == threshold_C1
    chosen_CF = above_CF | (equal_CF & (np.cumsum(equal_CF, axis=1) <= room_C1))
    index_CK = np.flatnonzero(chosen_CF).reshape(-1, points) % width
    return index_CK, np.take_along_axis(group.flat_CF, index_CK, axis=1)


def _injective_modulus(index_K: I64) -> int:
    for modulus in range(PROOF_MODULUS_MAX, PROOF_MODULUS_MIN - 1, -1):
        if len(np.unique(index_K % modulus)) == len(index_K):
            return modulus
    raise ProofError(f"no modulus in [{PROOF_MODULUS_MIN}, {PROOF_MODULUS_MAX}] keeps {len(index_K)} indices apart")


# --- polynomials over GF(65497) ------------------------------------------------------------------------------------


def _rem(values: U32) -> U32:
    """values mod p; the division by a scalar is what numpy vectorises."""
    return values - (values // _P) * _P


@functools.cache
def _inverses() -> U32:
    """The inverse of each field element (0 for 0): powers of a generator, whose inverses are the powers reversed."""
    order = PROOF_MODULUS_MAX - 1
    powers = np.ones(1, dtype=np.uint32)
    generator = _generator(order)
    step = generator
    while len(powers) < order:
        powers = np.concatenate([powers, _rem(powers * np.uint32(step))])
        step = step * step % PROOF_MODULUS_MAX
    powers = powers[:order]
    inverses = np.zeros(PROOF_MODULUS_MAX, dtype=np.uint32)
    inverses[powers] = powers[(order - np.arange(order)) % order]
    return inverses


def _generator(order: int) -> int:
    factors = [n for n in range(2, order) if order % n == 0 and all(n % d for d in range(2, int(n**0.5) + 1))]
    return next(
        g for g in range(2, PROOF_MODULUS_MAX) if all(pow(g, order // f, PROOF_MODULUS_MAX) != 1 for f in factors)
    )


def _interpolate(x_CK: U32, y_CLK: U32) -> U32:
    """Coefficients [C, L, K], ascending, of the polynomials of degree < K through (x, y) for each of L limbs.

    Newton's divided differences, then Horner's scheme on the Newton form; both limbs share every denominator.
    Chunks lie last in memory, so that each step runs over long contiguous rows.
    """
    count = x_CK.shape[1]
    inverses = _inverses()
    x_K1C = np.ascontiguousarray(x_CK.T)[:, None, :]
    d_KLC = _rem(np.ascontiguousarray(y_CLK.transpose(2, 1, 0)))
    for k in range(1, count):
        inverse = inverses[_rem(x_K1C[k:] + (_P - x_K1C[:-k]))]
        d_KLC[k:] = _rem(_rem(d_KLC[k:] + (_P - d_KLC[k - 1 : -1])) * inverse)
    out_KLC = np.zeros_like(d_KLC)
    out_KLC[0] = d_KLC[count - 1]
    minus_K1C = _rem(_P - x_K1C)
    for i in range(count - 2, -1, -1):
        degree = count - 1 - i
        new = out_KLC[: degree + 1] * minus_K1C[i]
        new[1:] += out_KLC[:degree]
        new[0] += d_KLC[i]
        out_KLC[: degree + 1] = _rem(new)
    return np.ascontiguousarray(out_KLC.transpose(2, 1, 0))


def _evaluate(coefficients_CLK: U32, x_CK: U32) -> U32:
    """The polynomials' values at x: [C, L, K]."""
    c_KLC = np.ascontiguousarray(coefficients_CLK.transpose(2, 1, 0))
    x_K1C = np.ascontiguousarray(x_CK.T)[:, None, :]
    value_KLC = np.repeat(c_KLC[-1][None], x_K1C.shape[0], axis=0)
    for i in range(len(c_KLC) - 2, -1, -1):
        value_KLC = _rem(value_KLC * x_K1C + c_KLC[i])
    return np.ascontiguousarray(value_KLC.transpose(2, 1, 0))
