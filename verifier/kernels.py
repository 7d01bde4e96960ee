"""Inner loops that numpy can't do in one pass, compiled by numba; `compiled.loop` asks for them when they pay.

Each gives what its numpy form gives (`philox`, `sampling`, `field`, `tied` with `toploc`), to the last bit and on every
machine: only whole numbers are compiled, and comparisons whose error is allowed for. Nothing is kept on disk: a file of
compiled code that somebody else can write would run here. Nothing is compiled when this file is imported.

Not covered: when they are used (`compiled`).

Shape suffixes: N rows, V vocabulary, M what is found, C chunks, F flat values of a chunk, K coefficients, L limbs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from protocol.limits import PROOF_CHUNK_TOKENS, PROOF_MODULUS_MAX, PROOF_MODULUS_MIN, PROOF_TOPK

# Contraction changes nothing: what is multiplied and added here are whole numbers that stay exact, or bounds with room.
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}
_PART: dict[str, Any] = {**_OPTIONS, "inline": "always"}
"""Of what loops are made of. Compiled for themselves first, these would take a third longer and be a quarter slower."""

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

_TILE = 512
"""Words made at once: they stay in the processor's first cache."""

_PER_BIT = np.float32(2**23 / np.log(2))
"""One nat in units of a float32's last exponent bits: its bits, as a whole number, are 2^23 (127 + log2) or less."""


# --- noise ----------------------------------------------------------------------------------------------------------


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _philox(key_0: Any, key_1: Any, position: Any, block: Any, words: Any) -> None:
    """The words of as many blocks as there is room for, from `block` on."""
    low, high = position & _LOW, position >> _SHIFT
    for i in range(len(words) // 4):
        c0, c1, c2, c3 = low, high, np.uint64(block + i), np.uint64(0)
        k0, k1 = key_0, key_1
        for _ in range(10):
            product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
            c0, c1 = (product_1 >> _SHIFT) ^ c1 ^ k0, product_1 & _LOW
            c2, c3 = (product_0 >> _SHIFT) ^ c3 ^ k1, product_0 & _LOW
            k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
        words[4 * i] = np.uint32(c0)
        words[4 * i + 1] = np.uint32(c1)
        words[4 * i + 2] = np.uint32(c2)
        words[4 * i + 3] = np.uint32(c3)


def _philox_rows(key_N2: Any, position_N: Any, words_NV: Any) -> None:
    """`philox.word_rows` into `words_NV`, [N, 4 * blocks]."""
    for n in range(len(key_N2)):
        _philox(key_N2[n, 0], key_N2[n, 1], position_N[n], 0, words_NV[n])


def _decisive(
    scaled_NV: Any,
    key_N2: Any,
    position_N: Any,
    least_N: Any,
    large: Any,
    begin: Any,
    row_M: Any,
    token_M: Any,
    word_M: Any,
    odd_N: Any,
) -> Any:
    """The values whose noise may lift them above a score, with their words, from row `begin` on, while there is room
    for a whole row.

    Noise of word x is at most 32 ln 2 - ln x. So a value's score is above s only if log2(x) <= 32 + (logit - s) / ln 2,
    and a float32's bits, read as a whole number, say log2(x) or up to 0.09 less: one multiplication decides.

    Args:
        scaled_NV: logits / T, float32. key_N2, position_N: of Philox.
        least_N: float32, 2^23 (32 + 127 - s / ln 2).
        row_M, token_M, word_M: where they go.
        odd_N: set to whether a logit is `large` or no number: nothing is decided for such a row.

    Returns:
        The row to go on from, and how many were found.
    """
    vocabulary = scaled_NV.shape[1]
    words = np.empty(_TILE, dtype=np.uint32)
    sizes = np.empty(_TILE, dtype=np.float32)
    bits = sizes.view(np.int32)
    found = 0
    row = begin
    while row < len(scaled_NV) and len(row_M) - found >= vocabulary:
        least = least_N[row]
        odd = False
        for start in range(0, vocabulary, _TILE):
            count = min(_TILE, vocabulary - start)
            _philox(key_N2[row, 0], key_N2[row, 1], position_N[row], start // 4, words)
            for i in range(_TILE):
                sizes[i] = np.float32(words[i])
            logits = scaled_NV[row, start : start + count]
            some = False
            for i in range(count):
                odd |= not (logits[i] < large)
                some |= np.float32(bits[i]) <= logits[i] * _PER_BIT + least
            if some:
                for i in range(count):
                    if np.float32(bits[i]) <= logits[i] * _PER_BIT + least:
                        row_M[found] = row
                        token_M[found] = start + i
                        word_M[found] = words[i]
                        found += 1
        odd_N[row] = odd
        row += 1
    return row, found


# --- proofs ---------------------------------------------------------------------------------------------------------

_STRIP, _WIDE_STRIP, _WIDE = 16, 32, 1 << 15
"""Values of which only the largest is compared first, and that of chunks of more values. Only speed changes."""

_PRIME = float(PROOF_MODULUS_MAX)
_STEP = 8
"""Coefficients evaluated between two remainders: sums stay below 2^36, so `field.rem` holds."""

HOLDS, NOT_FINITE, MALFORMED, TOO_MANY_EQUAL = 0, 1, 2, 3
"""What `bf16_chunks` says of a chunk."""


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _rem(value: Any) -> Any:
    """`field.rem`."""
    return value - _PRIME * np.floor((value + 0.5) * (1.0 / _PRIME))


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _evaluate(coefficients: Any, powers: Any, count: Any, values: Any) -> None:
    """A polynomial at the `count` places of powers[1]; rows 2 to 8 of `powers` are written. Ascending coefficients,
    as many as a multiple of 8."""
    for power in range(2, _STEP + 1):
        for m in range(count):
            powers[power, m] = _rem(powers[power - 1, m] * powers[1, m])
    for m in range(count):
        values[m] = 0.0
    for k in range(len(coefficients) - _STEP, -1, -_STEP):
        c0, c1, c2, c3 = coefficients[k], coefficients[k + 1], coefficients[k + 2], coefficients[k + 3]
        c4, c5, c6, c7 = coefficients[k + 4], coefficients[k + 5], coefficients[k + 6], coefficients[k + 7]
        for m in range(count):
            low = c0 + c1 * powers[1, m] + c2 * powers[2, m] + c3 * powers[3, m]
            high = c4 * powers[4, m] + c5 * powers[5, m] + c6 * powers[6, m] + c7 * powers[7, m]
            values[m] = _rem(values[m] * powers[8, m] + (low + high))


def _polynomials(coefficients_CLK: Any, x_CM: Any, values_CLM: Any) -> None:
    """`field.evaluate` into `values_CLM`."""
    chunks, limbs, given = coefficients_CLK.shape
    count = x_CM.shape[1]
    coefficients = np.empty(-(-given // _STEP) * _STEP)
    powers = np.empty((_STEP + 1, count))
    for c in range(chunks):
        for m in range(count):
            powers[1, m] = x_CM[c, m]
        for limb in range(limbs):
            for k in range(len(coefficients)):
                coefficients[k] = coefficients_CLK[c, limb, k] if k < given else 0.0
            _evaluate(coefficients, powers, count, values_CLM[c, limb])


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _reaching(values: Any, bound: Any) -> Any:
    """How many are at least `bound`, modulo 2^16: they are counted in what is compared, so many side by side."""
    least = np.uint16(bound)
    reaching = np.uint16(0)
    for i in range(len(values)):
        reaching = np.uint16(reaching + np.uint16(values[i] >= least))
    return np.int64(reaching)


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _kth(values: Any, count: Any, rank: Any) -> Any:
    """The rank-th largest of the first `count`, each below 2^15: the largest bound that so many reach. Less where more
    than 2^16 reach it, so of maxima too many are looked at, and of values too many are equal: numpy decides."""
    low, high = 0, 1 << 15
    while high - low > 1:
        middle = (low + high) >> 1
        if _reaching(values[:count], middle) >= rank:
            low = middle
        else:
            high = middle
    return low


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _strips(width: Any) -> Any:
    return max(1, width // (_STRIP if width <= _WIDE else _WIDE_STRIP))


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _search(bits_F: Any, points: Any, maxima: Any, index: Any, magnitude: Any) -> Any:
    """Index and magnitude of all values of a chunk that reach its K-th magnitude or a little less; how many, and the
    K-th magnitude. -1 where a value is not finite."""
    width, strips = len(bits_F), len(maxima)
    magnitudes = np.uint16(0x7FFF)
    for strip in range(strips):
        maxima[strip] = 0
    for start in range(0, width, strips):  # value start + i belongs to strip i
        row = bits_F[start : min(start + strips, width)]
        for i in range(len(row)):
            value = row[i] & magnitudes
            if value > maxima[i]:
                maxima[i] = value
    top = np.uint16(0)
    for strip in range(strips):
        top = max(top, maxima[strip])
    if top >= 0x7F80:
        return -1, 0
    # at least K values reach the K-th largest of the maxima
    bound = np.uint16(_kth(maxima, strips, points) if strips >= points else 0)
    count = 0
    for strip in range(strips):
        if maxima[strip] >= bound:
            for i in range(strip, width, strips):
                value = bits_F[i] & magnitudes
                index[count] = i
                magnitude[count] = value
                count += value >= bound
    return count, _kth(magnitude, count, points)


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _word(proof: Any, at: Any) -> Any:
    return (np.uint16(proof[2 * at]) << np.uint16(8)) | np.uint16(proof[2 * at + 1])


@numba.njit(**_PART)  # type: ignore[untyped-decorator]
def _chunk(bits_F: Any, proof: Any, points: Any, room: Any, stats: Any) -> Any:
    """One chunk of `bf16_chunks`; `stats` takes its three numbers."""
    maxima, index, magnitude, coefficients, powers, values, near, near_equal = room
    width = len(bits_F)
    modulus = np.float64(_word(proof, 0))
    lowest = PROOF_MODULUS_MAX if width <= PROOF_MODULUS_MAX else PROOF_MODULUS_MIN
    if modulus < lowest or modulus > PROOF_MODULUS_MAX:
        return MALFORMED
    for k in range(len(coefficients)):
        coefficient = np.float64(_word(proof, k + 1)) if k < points else 0.0
        if coefficient >= _PRIME:
            return MALFORMED
        coefficients[k] = coefficient
    found, least = _search(bits_F, points, maxima, index, magnitude)
    if found < 0:
        return NOT_FINITE
    count = 0
    for i in range(found):
        index[count] = index[i]
        magnitude[count] = magnitude[i]
        count += magnitude[i] >= least
    if count > 2 * points:
        return TOO_MANY_EQUAL
    for m in range(count):
        place = np.float64(index[m])
        powers[1, m] = place - modulus * np.floor((place + 0.5) / modulus)
    _evaluate(coefficients, powers, count, values)
    for apart in range(128):
        near[apart] = near_equal[apart] = 0
    above = 0
    for m in range(count):
        own, claimed = bits_F[index[m]], np.uint16(values[m])
        agrees = (own ^ claimed) & 0xFF80 == 0 or (own | claimed) & 0x7FFF == 0
        away = abs(np.int64(own & 127) - np.int64(claimed & 127))
        if magnitude[m] > least:
            above += 1
            near[away] += agrees
        else:
            near_equal[away] += agrees
    left = points - above
    agreeing, total = 0, 0
    for apart in range(128):
        taken = min(left, near_equal[apart])
        left -= taken
        near[apart] += taken
        agreeing += near[apart]
        total += near[apart] * apart
    stats[0] = points - agreeing
    stats[1] = stats[2] = np.inf
    if agreeing == 0:
        return HOLDS
    stats[1] = total / agreeing
    middle, passed, away = 0.0, 0, np.int64(0)
    for rank in ((agreeing - 1) // 2, agreeing // 2):
        while passed + near[away] <= rank:
            passed += near[away]
            away += 1
        middle += away
    stats[2] = middle / 2
    return HOLDS


def _bf16_chunks(bits_NH: Any, proofs: Any, said_C: Any, stats_C3: Any) -> None:
    """The statistics of one rollout's bf16 proofs, chunk by chunk (`toploc.Bf16Stats`).

    Args:
        bits_NH: the verifier's own states, bfloat16s' bits.
        proofs: the bytes of all chunks, each of exactly its length.
        said_C: HOLDS, or why there are no numbers. TOO_MANY_EQUAL: more values share the K-th magnitude than are asked.
        stats_C3: exponents, mean and median.
    """
    hidden = bits_NH.shape[1]
    flat = bits_NH.reshape(-1)
    widest = min(PROOF_CHUNK_TOKENS, len(bits_NH)) * hidden
    most = min(PROOF_TOPK, widest)
    room = (
        np.empty(max(_strips(widest), _WIDE // _STRIP), dtype=np.uint16),
        np.empty(widest + 1, dtype=np.int64),
        np.empty(widest + 1, dtype=np.uint16),
        np.empty(-(-most // _STEP) * _STEP),
        np.empty((_STEP + 1, 2 * most)),
        np.empty(2 * most),
        np.empty(128, dtype=np.int64),
        np.empty(128, dtype=np.int64),
    )
    at = 0
    for c in range(len(said_C)):
        begin = c * PROOF_CHUNK_TOKENS * hidden
        bits_F = flat[begin : min(begin + PROOF_CHUNK_TOKENS * hidden, len(flat))]
        points = min(PROOF_TOPK, len(bits_F))
        length = 2 + 2 * points
        maxima = room[0][: _strips(len(bits_F))]
        coefficients = room[3][: -(-points // _STEP) * _STEP]
        of_chunk = (maxima, room[1], room[2], coefficients, room[4], room[5], room[6], room[7])
        said_C[c] = _chunk(bits_F, proofs[at : at + length], points, of_chunk, stats_C3[c])
        at += length


# --- compiling ------------------------------------------------------------------------------------------------------

_READ_U8 = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_READ_U16 = numba.types.Array(numba.uint16, 2, "C", readonly=True)

LOOPS: dict[str, tuple[Any, Any]] = {
    "philox_rows": (_philox_rows, "void(uint64[:,::1], uint64[::1], uint32[:,::1])"),
    "decisive": (
        _decisive,
        "UniTuple(int64, 2)(float32[:,::1], uint64[:,::1], uint64[::1], float32[::1], float32, int64, "
        "int64[::1], int64[::1], uint32[::1], boolean[::1])",
    ),
    "polynomials": (_polynomials, "void(float64[:,:,::1], float64[:,::1], float64[:,:,::1])"),
    "bf16_chunks": (_bf16_chunks, numba.void(_READ_U16, _READ_U8, numba.int8[::1], numba.float64[:, ::1])),
}
"""What can be compiled, and the arguments it is compiled for: the first use compiles nothing more."""


def compiled(name: str) -> Any:
    """The loop, compiled.

    Raises:
        RuntimeError: numba can't.
    """
    if numba.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    loop, signature = LOOPS[name]
    try:
        return numba.njit(signature, **_OPTIONS)(loop)
    except Exception as exc:  # a compiler's failures are of no one kind
        raise RuntimeError(f"numba can't compile {name}: {exc}") from exc
