"""States for TOPLOC's tests and benchmark: the same bfloat16 values on every machine and under every version of numpy.

They come from BLAKE3's output stream, so that checked-in proofs of the `toploc` package stay comparable: no generator
of torch or numpy takes part. `tests/peers/toploc_peer.py` is handed the bits.

    sums    sums of four bytes: close to normally distributed, with many equal magnitudes
    bits    any sign and mantissa, exponents over 16 binades: the points are all of one binade, with fewer ties
    apart   as sums, with two largest values 65497 indices apart: only a smaller modulus keeps them apart
    equal   one magnitude, signs mixed: every point is a tie
    zeros   a few values among zeros of both signs
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

KINDS = ("sums", "bits", "apart", "equal", "zeros")

P = 65497


def bits(kind: str, rows: int, hidden: int, seed: int) -> npt.NDArray[np.uint16]:
    """bfloat16 bits [rows, hidden]."""
    values = rows * hidden
    stream = blake3(f"{kind if kind != 'apart' else 'sums'} {rows} {hidden} {seed}".encode()).digest(4 * values)
    bytes_V4 = np.frombuffer(stream, dtype=np.uint8).reshape(values, 4)
    if kind == "bits":
        sign, mantissa = bytes_V4[:, 0].astype(np.uint16) >> 7 << 15, bytes_V4[:, 1].astype(np.uint16) & 0x7F
        made = sign | (120 + (bytes_V4[:, 2].astype(np.uint16) & 15)) << 7 | mantissa
    elif kind == "equal":
        made = (bytes_V4[:, 0].astype(np.uint16) & 1) << 15 | np.uint16(0x3FC0)
    elif kind == "zeros":
        made = (bytes_V4[:, 0].astype(np.uint16) & 1) << 15
        made[:: max(1, values // 40)] |= 0x3F80
    else:
        sums = bytes_V4.sum(axis=1, dtype=np.int32) - 510
        made = (sums.astype(np.float32) / np.float32(64)).view(np.uint32) >> 16
    if kind == "apart":
        made[[3, 3 + P]] = 0x4140, 0xC141
    return made.astype(np.uint16).reshape(rows, hidden)


def floats(bits_NH: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The same values in float32."""
    return (bits_NH.astype(np.uint32) << 16).view(np.float32)


def moved(bits_NH: npt.NDArray[np.uint16], seed: int) -> npt.NDArray[np.uint16]:
    """The values with up to 3 units added to their mantissas, as noise would: some cross into the next binade."""
    stream = np.frombuffer(blake3(f"moved {seed}".encode()).digest(bits_NH.size), dtype=np.uint8)
    return bits_NH + (stream & 3).astype(np.uint16).reshape(bits_NH.shape)
