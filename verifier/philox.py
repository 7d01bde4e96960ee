"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

Every value is a function of (key, counter), so a verifier can jump to any token. Integers are equal on every
machine. Tested against the known-answer vectors of the Random123 distribution.

Not covered: floats made of these integers (`sampling`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
"""The constants and the number of rounds are the paper's. Changing any changes every token of every run."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[U32, U32, U32, U32]:
    """Ten rounds of Philox4x32 on arrays.

    Args:
        counter: four words c0..c3, each broadcastable to the result's shape, values below 2^32.
        key: two words k0, k1, likewise.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for i in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        round_0 = (k0 + np.uint64(i * _WEYL_0 & 0xFFFFFFFF)) & _LOW
        round_1 = (k1 + np.uint64(i * _WEYL_1 & 0xFFFFFFFF)) & _LOW
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ round_0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ round_1,
            product_0 & _LOW,
        )
    w0, w1, w2, w3 = (word.astype(np.uint32) for word in (c0, c1, c2, c3))
    return w0, w1, w2, w3
