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
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

_P = PROOF_MODULUS_MAX
"""The field's prime, 65497."""

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


def are_well_formed(proofs: Sequence[Sequence[bytes]], tokens: Sequence[int], hidden: int) -> bool:
    """Whether `check_shape` refuses none of many rollouts' proofs. Which one and why it says rollout by rollout."""
    by_points: dict[int, tuple[list[bytes], list[int]]] = {}
    for chunks, count in zip(proofs, tokens, strict=True):
        rows = chunk_rows(count)
        if len(chunks) != len(rows):
            return False
        for chunk, one in zip(chunks, rows, strict=True):
            points = min(PROOF_TOPK, one * hidden)
            if len(chunk) != 2 + 4 * points:
                return False
            of_points = by_points.setdefault(points, ([], []))
            of_points[0].append(chunk)
            of_points[1].append(one * hidden)
    return all(_words(chunks, values) is not None for chunks, values in by_points.values())


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
        moduli = [_injective_modulus(row) for row in index_CK] if max(group.values) > _P else [_P] * len(index_CK)
        x_CK = index_CK % np.asarray(moduli, dtype=np.int64)[:, None]
        bits_CK = value_CK.view(np.uint32)
        limbs = np.stack([bits_CK >> np.uint32(16), (bits_CK & np.uint32(0xFFFF)) >> np.uint32(1)], axis=1)
        coefficients = _interpolate(x_CK, limbs.astype(np.float64)).astype(">u2")
        for (rollout, chunk), modulus, pair in zip(group.where, moduli, coefficients, strict=True):
            proofs[rollout][chunk] = modulus.to_bytes(2, "big") + pair.tobytes()
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
        moduli, coefficients = _parse_group(group, [proofs[rollout][chunk] for rollout, chunk in group.where])
        x_CK = index_CK % moduli[:, None]
        limbs = _evaluate(coefficients, x_CK).astype(np.uint32)
        high_CK, low_CK = limbs[:, 0], limbs[:, 1]
        garbage_CK = low_CK >= np.uint32(1 << _LIMB_2_BITS)
        # the bit that was not sent is set: the middle of the two floats it could have been
        claimed_CK = ((high_CK << np.uint32(16)) | ((low_CK & np.uint32(0x7FFF)) << np.uint32(1)) | np.uint32(1)).view(
            np.float32
        )
        with np.errstate(all="ignore"):
            size_CK = np.abs(own_CK)
            floor_C1 = np.maximum(_medians(size_CK)[:, None], _SMALLEST)
            error_CK = np.abs((claimed_CK - own_CK) / np.maximum(size_CK, floor_C1))
        error_CK[garbage_CK | ~np.isfinite(error_CK)] = np.inf
        median_C = _medians(error_CK)
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
    if not np.isfinite(flat_CF).all():
        raise ProofError("a state is not finite; such a rollout can be neither proved nor checked")
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


def _medians(values_CK: F32) -> F32:
    """The median of each row, float32 [C]: `numpy.median` without its search for NaN, which there is none of here."""
    count = values_CK.shape[1]
    low, high = (count - 1) // 2, count // 2
    part_CK = np.partition(values_CK, (low, high), axis=1)
    middle: F32 = part_CK[:, low : high + 1].mean(axis=1)
    return middle


def _parse_group(group: _Group, proofs: Sequence[bytes]) -> tuple[I64, F64]:
    """`parse_proof` of many chunks with equally many points: moduli [C], coefficients [C, 2, K]. Raises ProofError."""
    length = 2 + 4 * group.points
    words = _words(proofs, group.values) if all(len(proof) == length for proof in proofs) else None
    if words is not None:
        return words[:, 0], words[:, 1:].reshape(len(proofs), 2, -1).astype(np.float64)
    for proof, values in zip(proofs, group.values, strict=True):
        parse_proof(proof, values)  # says which and why
    raise ProofError("proofs that fit one by one do not fit together; please report this")


def _words(proofs: Sequence[bytes], values: Sequence[int]) -> I64 | None:
    """Modulus and coefficients [C, 1 + 2K] of chunks of one length; None when one is outside its bounds."""
    words = np.frombuffer(b"".join(proofs), dtype=">u2").astype(np.int64).reshape(len(proofs), -1)
    lowest = np.where(np.asarray(values) <= PROOF_MODULUS_MAX, PROOF_MODULUS_MAX, PROOF_MODULUS_MIN)
    fits = bool(((words[:, 0] >= lowest) & (words[:, 0] <= PROOF_MODULUS_MAX)).all())
    return words if fits and words[:, 1:].max() < PROOF_MODULUS_MAX else None


def _injective_modulus(index_K: I64) -> int:
    for modulus in range(PROOF_MODULUS_MAX, PROOF_MODULUS_MIN - 1, -1):
        if len(np.unique(index_K % modulus)) == len(index_K):
            return modulus
    raise ProofError(f"no modulus in [{PROOF_MODULUS_MIN}, {PROOF_MODULUS_MAX}] keeps {len(index_K)} indices apart")


# --- polynomials over GF(65497) ------------------------------------------------------------------------------------
#
# Field elements are whole numbers in float64, which are exact below 2^53: a sum of K products of two of them stays
# below 2^39, so matrix products by the float library are exact and one remainder serves a whole sum.


def _rem(values: F64) -> F64:
    """values mod p, for whole numbers of magnitude below 2^47.

    (v + 1/2) / p is at least 2^-17 away from every whole number, and its rounding error below 2^-20, so the floor
    never errs.
    """
    quotient = values + 0.5
    quotient *= 1.0 / _P
    np.floor(quotient, out=quotient)
    quotient *= -float(_P)
    quotient += values
    return quotient


@functools.cache
def _inverses() -> F64:
    """The inverse of each field element (0 for 0): powers of a generator, whose inverses are the powers reversed."""
    order = PROOF_MODULUS_MAX - 1
    powers = np.ones(1)
    generator = _generator(order)
    step = generator
    while len(powers) < order:
        powers = np.concatenate([powers, _rem(powers * step)])
        step = step * step % PROOF_MODULUS_MAX
    powers = powers[:order]
    inverses = np.zeros(PROOF_MODULUS_MAX)
    inverses[powers.astype(np.int64)] = powers[(order - np.arange(order)) % order]
    return inverses


def _generator(order: int) -> int:
    factors = [n for n in range(2, order) if order % n == 0 and all(n % d for d in range(2, int(n**0.5) + 1))]
    return next(
        g for g in range(2, PROOF_MODULUS_MAX) if all(pow(g, order // f, PROOF_MODULUS_MAX) != 1 for f in factors)
    )


_BLOCK = 16
"""Powers made one by one; longer sums go in blocks of this many. Only speed changes with it."""


@functools.cache
def _power_tables() -> tuple[F64, F64]:
    """x^0 .. x^15 and x^16 of each field element: [16, 65497], [65497]."""
    prime = np.uint32(_P)  # (p - 1)^2 < 2^32: products fit, and integer remainders are the cheaper ones here
    x = np.arange(_P, dtype=np.uint32)
    powers = np.ones((_BLOCK + 1, _P), dtype=np.uint32)
    for power in range(_BLOCK):
        powers[power + 1] = powers[power] * x % prime
    return powers[:_BLOCK].astype(np.float64), powers[_BLOCK].astype(np.float64)


def _powers(x_CK: I64) -> tuple[F64, F64]:
    """x^0 .. x^15 as [C, 16, K], and x^16 [C, K]."""
    powers, step = _power_tables()
    return powers.take(x_CK, axis=1).transpose(1, 0, 2), step.take(x_CK)


def _interpolate(x_CK: I64, y_CLK: F64) -> F64:
    """Coefficients [C, L, K], ascending, of the polynomials of degree < K through (x, y) for each of L limbs.

    Lagrange's form: with M(z) = product of (z - x_i) and weights w_i = y_i / M'(x_i), the polynomial is the sum of
    w_i M(z) / (z - x_i). As M(z) / (z - x) = sum over k of z^k times the sum over j of m_{k+1+j} x^j, coefficient k is
    the sum over j of m_{k+1+j} s_j with the power sums s_j = sum over i of w_i x_i^j: a Hankel matrix times a vector.
    """
    chunks, limbs, count = y_CLK.shape
    blocks = -(-count // _BLOCK)
    width = blocks * _BLOCK
    powers, step_CK = _powers(x_CK)
    m_CK = _with_roots(x_CK)
    slope_C1K = _rem(m_CK[:, 1:] * np.arange(1.0, count + 1))[:, None]
    weights_C1K = _inverses()[_sum_powers(slope_C1K, powers, step_CK).astype(np.int64)]
    w = np.empty((chunks, limbs, blocks, count))
    w[:, :, 0] = _rem(y_CLK * weights_C1K)
    for block in range(1, blocks):
        w[:, :, block] = _rem(w[:, :, block - 1] * step_CK[:, None])
    s = _rem(w.reshape(chunks, limbs * blocks, count) @ powers.transpose(0, 2, 1))
    return _correlate(m_CK[:, None, 1:], s.reshape(chunks, limbs, width)[:, :, :count])


def _correlate(m: F64, s: F64) -> F64:
    """out[.., k] = the sum over j of m[.., k + j] s[.., j] mod p, for k < K; m and s broadcast, their last axis is K.

    By floating-point Fourier transforms of residues between -p/2 and p/2. Their error is below 2^-9 for K = 128 (Brent,
    Percival and Zimmermann, "Error bounds on complex floating-point multiplication", 2007), so rounding is exact.
    """
    count = s.shape[-1]
    size = 2 * (1 << max(0, count - 1).bit_length())
    spectrum = np.fft.rfft(_balanced(m), size) * np.conj(np.fft.rfft(_balanced(s), size))
    return _rem(np.rint(np.fft.irfft(spectrum, size)[..., :count]))


def _balanced(values: F64) -> F64:
    return np.where(values > _P // 2, values - _P, values)


def _with_roots(x_CK: I64) -> F64:
    """Coefficients [C, K + 1], ascending, of the product of (z - x_i): products of pairs, then of pairs of those."""
    chunks, count = x_CK.shape
    leaves = 1 << max(0, count - 1).bit_length()
    # low[i, j, c]: coefficient i of the monic factor j; the leading 1 is left out. Missing roots are 0: factors z.
    low = np.zeros((1, leaves, chunks))
    low[0, :count] = -x_CK.T % _P
    while low.shape[1] > 1:
        degree = low.shape[0]
        left, right = low[:, 0::2], low[:, 1::2]
        both = np.zeros((2 * degree, low.shape[1] // 2, chunks))
        both[degree:] = left + right
        for i in range(degree):
            both[i : i + degree] += left[i] * right
        low = _rem(both)
    m = np.ones((chunks, count + 1))
    m[:, :count] = low[leaves - count :, 0].T
    return m


def _evaluate(coefficients_CLK: F64, x_CK: I64) -> F64:
    """The polynomials' values at x: [C, L, K]."""
    return _sum_powers(coefficients_CLK, *_powers(x_CK))


def _sum_powers(coefficients_CLK: F64, powers: F64, step_CK: F64) -> F64:
    """`_evaluate`, given what `_powers` returned: 16 coefficients at a time, then Horner's scheme over the blocks."""
    chunks, limbs, count = coefficients_CLK.shape
    blocks = -(-count // _BLOCK)
    padded = np.zeros((chunks, limbs, blocks * _BLOCK))
    padded[:, :, :count] = coefficients_CLK
    sums = padded.reshape(chunks, limbs * blocks, _BLOCK) @ powers
    sums = sums.reshape(chunks, limbs, blocks, -1)
    value = _rem(sums[:, :, -1])
    for block in range(blocks - 2, -1, -1):
        value = _rem(value * step_CK[:, None] + sums[:, :, block])
    return value
