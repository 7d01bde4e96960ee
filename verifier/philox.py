"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

Every value is a function of (key, counter), so a verifier can jump to any token. Integers are equal on every
machine. Tested against the known-answer vectors of the Random123 distribution.

Not covered: floats made of these integers (`sampling`), the compiled form of `word_rows` (`kernels`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from verifier import compiled

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
"""The constants and the number of rounds are the paper's. Changing any changes every token of every run."""

_SMALL = 2
"""Rounds in which most words are still equal along some axis; after them all differ, and are worked on in place."""

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
    for i in range(_SMALL):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        round_0, round_1 = _round_keys(k0, k1, i)
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ round_0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ round_1,
            product_0 & _LOW,
        )
    shape = np.broadcast_shapes(*(word.shape for word in (c0, c1, c2, c3)))
    c0, c1, c2, c3 = (np.array(np.broadcast_to(word, shape)) for word in (c0, c1, c2, c3))
    other_0, other_1 = np.empty(shape, dtype=np.uint64), np.empty(shape, dtype=np.uint64)
    for i in range(_SMALL, _ROUNDS):
        round_0, round_1 = _round_keys(k0, k1, i)
        product_0, product_1 = np.multiply(c0, _MULTIPLIER_0, out=c0), np.multiply(c2, _MULTIPLIER_1, out=c2)
        for out, product, word, key_word in ((other_0, product_1, c1, round_0), (other_1, product_0, c3, round_1)):
            np.right_shift(product, _SHIFT, out=out)
            out ^= word
            out ^= key_word
        np.bitwise_and(product_1, _LOW, out=c1)
        np.bitwise_and(product_0, _LOW, out=c3)
        c0, c2, other_0, other_1 = other_0, other_1, product_0, product_1
    w0, w1, w2, w3 = (word.astype(np.uint32) for word in (c0, c1, c2, c3))
    return w0, w1, w2, w3


def _round_keys(k0: U64, k1: U64, i: int) -> tuple[U64, U64]:
    return (k0 + np.uint64(i * _WEYL_0 & 0xFFFFFFFF)) & _LOW, (k1 + np.uint64(i * _WEYL_1 & 0xFFFFFFFF)) & _LOW


_TILE_BLOCKS = 1 << 15
"""Blocks made at once by numpy: keeps every intermediate in the processor's second cache and bounds memory. Smaller
ones pay more for numpy's 150 calls a tile: 20 ns a value at 1 << 13, 13 at 1 << 15 (vocabulary 49,152)."""


def word_rows(key_N2: U64, position_N: U64, blocks: int) -> U32:
    """The words of N rows of blocks: uint32 [N, 4 * blocks], word w of block b at 4 b + w.

    Args:
        key_N2: the rows' keys, values below 2^32.
        position_N: counter words 0 and 1, as one number each; word 2 is the block, word 3 is 0.
    """
    count = len(key_N2)
    words = np.empty((count, 4 * blocks), dtype=np.uint32)
    loop = compiled.loop("philox_rows", words.size)
    if loop is not None:
        loop(np.ascontiguousarray(key_N2), np.ascontiguousarray(position_N), words)
        return words
    rows, width = max(1, _TILE_BLOCKS // blocks), min(blocks, _TILE_BLOCKS)
    low_N, high_N = position_N & _LOW, position_N >> _SHIFT
    for row in range(0, count, rows):
        at = slice(row, min(row + rows, count))
        for block in range(0, blocks, width):
            index = np.arange(block, min(block + width, blocks), dtype=np.uint64)[None, :]
            made = philox4x32(
                (low_N[at, None], high_N[at, None], index, np.uint64(0)), (key_N2[at, :1], key_N2[at, 1:])
            )
            for word, values in enumerate(made):
                words[at, 4 * block + word : 4 * (block + index.shape[1]) : 4] = values
    return words
