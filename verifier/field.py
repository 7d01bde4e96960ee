"""Polynomials over GF(65497): through given points, and their values; many of them side by side.

    interpolate(x, y)     the coefficients of the polynomials of degree < K through K points each
    evaluate(c, x)        their values

Field elements are whole numbers in float64, which are exact below 2^53: a sum of K products of two of them stays below
2^39, so matrix products by the float library are exact and one remainder serves a whole sum. Tables of the field are
made once, on first use.

Not covered: which points a proof is about (`verifier.points`), what its values mean (`verifier.toploc`).

Shape suffixes: C polynomials' sets of points, K points of each, L polynomials over one set.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from protocol.limits import PROOF_MODULUS_MAX
from verifier import compiled

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_P = PROOF_MODULUS_MAX
"""The field's prime, 65497."""


def rem(values: F64) -> F64:
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
        powers = np.concatenate([powers, rem(powers * step)])
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


_BLOCK, _BLOCKS = 16, 8
"""Sums go in so many blocks of so many powers: of 128 coefficients, a proof's most. Only speed changes with the two."""


@functools.cache
def _power_tables() -> tuple[F64, F64]:
    """x^0 .. x^15 and x^0, x^16 .. x^112 of each field element, [65497, 16 and 8]: one element's lie side by side."""
    prime = np.uint32(_P)  # (p - 1)^2 < 2^32: products fit, and integer remainders are the cheaper ones here
    x = np.arange(_P, dtype=np.uint32)
    powers = np.ones((_BLOCK + 1, _P), dtype=np.uint32)
    for power in range(_BLOCK):
        powers[power + 1] = powers[power] * x % prime
    steps = np.ones((_BLOCKS, _P), dtype=np.uint32)
    for block in range(1, _BLOCKS):
        steps[block] = steps[block - 1] * powers[_BLOCK] % prime
    return powers[:_BLOCK].T.astype(np.float64, order="C"), steps.T.astype(np.float64, order="C")


def _powers(x_CK: I64) -> tuple[F64, F64]:
    """x^0 .. x^15 as [C, K, 16], and x^0, x^16 .. x^112 as [C, K, 8]."""
    powers, steps = _power_tables()
    return powers.take(x_CK, axis=0), steps.take(x_CK, axis=0)


def interpolate(x_CK: I64, y_CLK: F64) -> F64:
    """Coefficients [C, L, K], ascending, of the polynomials of degree < K through (x, y) for each of L limbs.

    Lagrange's form: with M(z) = product of (z - x_i) and weights w_i = y_i / M'(x_i), the polynomial is the sum of
    w_i M(z) / (z - x_i). As M(z) / (z - x) = sum over k of z^k times the sum over j of m_{k+1+j} x^j, coefficient k is
    the sum over j of m_{k+1+j} s_j with the power sums s_j = sum over i of w_i x_i^j: a Hankel matrix times a vector.
    """
    chunks, limbs, count = y_CLK.shape
    blocks = -(-count // _BLOCK)
    width = blocks * _BLOCK
    powers, steps_CKB = _powers(x_CK)
    m_CK = _with_roots(x_CK)
    slope_C1K = rem(m_CK[:, 1:] * np.arange(1.0, count + 1))[:, None]
    weights_C1K = _inverses()[_sum_powers(slope_C1K, powers, steps_CKB).astype(np.int64)]
    steps_CBK = steps_CKB[:, :, :blocks].transpose(0, 2, 1)
    w = rem(rem(y_CLK * weights_C1K)[:, :, None] * steps_CBK[:, None])
    s = rem(w.reshape(chunks, limbs * blocks, count) @ powers)
    return correlate(m_CK[:, None, 1:], s.reshape(chunks, limbs, width)[:, :, :count])


def correlate(m: F64, s: F64) -> F64:
    """out[.., k] = the sum over j of m[.., k + j] s[.., j] mod p, for k < K; m and s broadcast, their last axis is K.

    By floating-point Fourier transforms of residues between -p/2 and p/2. Their error is below 2^-9 for K = 128 (Brent,
    Percival and Zimmermann, "Error bounds on complex floating-point multiplication", 2007), so rounding is exact.
    """
    count = s.shape[-1]
    size = 2 * (1 << max(0, count - 1).bit_length())
    spectrum = np.fft.rfft(_balanced(m), size) * np.conj(np.fft.rfft(_balanced(s), size))
    return rem(np.rint(np.fft.irfft(spectrum, size)[..., :count]))


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
        low = rem(both)
    m = np.ones((chunks, count + 1))
    m[:, :count] = low[leaves - count :, 0].T
    return m


def evaluate(coefficients_CLK: F64, x_CK: I64) -> F64:
    """The polynomials' values at x: [C, L, K]. The number of points may be another than that of coefficients."""
    loop = compiled.loop("polynomials")
    if loop is not None:
        values_CLK = np.empty((*coefficients_CLK.shape[:2], x_CK.shape[1]))
        loop(np.ascontiguousarray(coefficients_CLK), x_CK.astype(np.float64, order="C"), values_CLK)
        return values_CLK
    return _sum_powers(coefficients_CLK, *_powers(x_CK))


def _sum_powers(coefficients_CLK: F64, powers: F64, steps_CKB: F64) -> F64:
    """`evaluate`, given what `_powers` returned: 16 coefficients at a time, then blocks' sums times x^0, x^16 ..."""
    chunks, limbs, count = coefficients_CLK.shape
    blocks = -(-count // _BLOCK)
    padded = np.zeros((chunks, limbs, blocks * _BLOCK))
    padded[:, :, :count] = coefficients_CLK
    sums = padded.reshape(chunks, limbs * blocks, _BLOCK) @ powers.transpose(0, 2, 1)
    sums = rem(sums).reshape(chunks, limbs, blocks, -1)
    sums *= steps_CKB[:, None, :, :blocks].transpose(0, 1, 3, 2)
    return rem(sums.sum(axis=2))
