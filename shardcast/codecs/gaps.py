"""Gaps and changes: where items differ from the old ones, and by how much.

    gaps      u8: shift | stream | rests stream
              a gap is how many unchanged items came before a changed one since the last. gap >> shift is a byte; 255
              means 255, and more follow in the next byte. The `shift` lower bits of all gaps are the rests, packed,
              lowest first
    values    nibbles stream, two items a byte, the first one in the upper four bits: code - 1, or 15
              bytes stream: code - 16 of those, or 255
              escapes stream: code of those, as wide as an item, little-endian
              code = zigzag(new - old) modulo 2^(8 width)

An item is its bits as a whole number, whatever it means: neighbouring floats of one sign are neighbouring numbers, so
an optimiser's step is a small difference, and no value (NaN, infinity, negative zero) is special. Most are -1 and 1: as
bytes Huffman's coder can't take them below a bit each, as pairs it can. The lower bits of a long gap are noise, and
bytes of 255 would be most of the stream. There are never more bytes of gaps than items: a changed item takes one, each
255 unchanged ones at most one.

After PULSE (arXiv 2602.03839) and the field's other formats, which send gaps and absolute values.

Not covered: which segments are coded so (`frames`), gaps within classes of exponents (`classes`).
Shapes: N items of a segment, K changed ones, G bytes of gaps, R bytes of rests, P pairs of nibbles, B bytes, E escapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardcast.codecs import compiled
from shardcast.codecs.streams import U8, Reader, Writer
from shardcast.errors import CodecError

Items = npt.NDArray[Any]
"""Items of one segment as whole numbers: uint8, uint16, uint32 or uint64."""
U32 = npt.NDArray[np.uint32]

SKIP = 255
"""The byte of 255 unchanged items and more to follow. Part of the format."""
NIBBLE, BYTE = 15, 255
"""The nibble and the byte that stand for more than they hold. Part of the format."""
KEPT_BITS = 6
"""Bits of the mean gap that are left after the shift: bytes are then seldom 255, and a Huffman table of some 200 bytes
still fits them. No part of the format."""
MOST_ESCAPES = 8
"""One item in so many may need an escape; with more of them differences are coded in planes, which is shorter and
faster. No part of the format."""

_FIND_NS, _CODE_NS = 0.5, 20.0
"""What numpy takes for a byte of items, and for a changed item."""


@dataclass(frozen=True)
class Gaps:
    """gaps_G and rests_R uint8."""

    shift: int
    gaps_G: U8
    rests_R: U8


@dataclass(frozen=True)
class Values:
    """pairs_P and bytes_B uint8, escapes_E of the items' type."""

    pairs_P: U8
    bytes_B: U8
    escapes_E: Items


def changed(old_N: Items, new_N: Items) -> tuple[U32, Items]:
    """The places of the items that differ, ascending, and by how much: their codes."""
    loop = compiled.loop("changed", old_N.dtype, old_N.nbytes * _FIND_NS)
    if loop is not None:
        found: tuple[U32, Items] = loop(old_N, new_N)
        return found
    place_K = _differing(old_N, new_N)
    return place_K, zigzag(old_N[place_K], new_N[place_K])


def _differing(old_N: Items, new_N: Items) -> U32:
    lanes = 8 // old_N.itemsize
    words = len(old_N) // lanes
    old_W, new_W = (one[: words * lanes].view(np.uint64) for one in (old_N, new_N))
    word_J = np.flatnonzero(old_W != new_W)
    if len(word_J) > words // 8:
        return np.flatnonzero(old_N != new_N).astype(np.uint32)
    near_JL = word_J[:, None] * lanes + np.arange(lanes)
    near = near_JL[old_N[near_JL] != new_N[near_JL]]
    tail = np.flatnonzero(old_N[words * lanes :] != new_N[words * lanes :]) + words * lanes
    return np.concatenate([near, tail]).astype(np.uint32)


# --- gaps ------------------------------------------------------------------------------------------------------------


def gaps_to(place_K: U32, kept: int = KEPT_BITS) -> Gaps:
    """The streams that lead to these places, ascending. kept: bits of the mean gap that are no rest."""
    shift = max(0, ((int(place_K[-1]) + 1) // len(place_K)).bit_length() - kept) if len(place_K) else 0
    loop = compiled.loop("pack", place_K.dtype, len(place_K) * _CODE_NS)
    return Gaps(shift, *(loop or _pack)(place_K, shift))


def check_count(count: int, shift: int, items: int) -> None:
    """Raise CodecError unless as many gaps with so many lower bits can lie among these items: it bounds what rests
    take."""
    if count << shift > items:
        raise CodecError(f"{count} gaps of {shift} lower bits among {items} items")


def rests_bytes(count: int, shift: int) -> int:
    """How long the rests of so many gaps are."""
    return -(-count * shift // 8)


def places(coded: Gaps, count: int, items: int) -> U32:
    """Where gaps lead, ascending, all below `items`. There are `count` gaps, none cut, and as many rests.

    Raises:
        CodecError: one leads beyond.
    """
    if not count:
        return np.empty(0, dtype=np.uint32)
    unpack = compiled.loop("unpack", coded.gaps_G.dtype) or _unpack
    place_K: U32 | None = unpack(coded.gaps_G, coded.rests_R, coded.shift, count, items)
    if place_K is None:
        raise CodecError("a gap leads beyond the items")
    return place_K


def _pack(place_K: U32, shift: int) -> tuple[U8, U8]:
    gap_K = np.diff(place_K, prepend=np.uint32(0))
    gap_K[1:] -= 1
    high_K = gap_K >> shift
    skips_K = high_K // SKIP
    end_K = np.cumsum(skips_K + 1, dtype=np.int64) - 1
    gaps_G = np.full(int(end_K[-1]) + 1 if len(end_K) else 0, SKIP, dtype=np.uint8)
    gaps_G[end_K] = high_K - skips_K * SKIP
    bits_KS = (gap_K[:, None] >> np.arange(shift, dtype=np.uint32)).astype(np.uint8) & 1
    return gaps_G, np.packbits(bits_KS.ravel(), bitorder="little")


def _unpack(gaps_G: U8, rests_R: U8, shift: int, count: int, items: int) -> U32 | None:
    sum_G = np.cumsum(gaps_G, dtype=np.uint32)  # at most 255 * 2^23
    if int(sum_G[-1]) << shift >= items:
        return None
    place_K = sum_G[gaps_G != SKIP] << shift
    if shift:
        bits_KS = np.unpackbits(rests_R, count=count * shift, bitorder="little").reshape(count, shift)
        rest_K = bits_KS @ (1 << np.arange(shift, dtype=np.uint32))
        place_K += np.cumsum(rest_K, dtype=np.uint32)  # at most count << shift
    place_K += np.arange(count, dtype=np.uint32)
    return place_K if int(place_K[-1]) < items else None


# --- values ----------------------------------------------------------------------------------------------------------


def zigzag(old_N: Items, new_N: Items) -> Items:
    """new - old with the sign as the lowest bit: small differences of either sign are small."""
    difference = new_N - old_N
    sign = difference >> (8 * difference.itemsize - 1)
    code: Items = (difference << 1) ^ (np.zeros_like(sign) - sign)
    return code


def unzigzag(old_N: Items, code_N: Items) -> Items:
    """The inverse: new."""
    low = code_N & 1
    new_N: Items = old_N + ((code_N >> 1) ^ (np.zeros_like(low) - low))
    return new_N


def values_of(code_K: Items, most: int) -> Values | None:
    """The streams of codes that are not 0; None if more than `most` need an escape."""
    loop = compiled.loop("values_of", code_K.dtype, len(code_K) * _CODE_NS)
    if loop is not None:
        found = loop(code_K, most)
        return None if found is None else Values(*found)
    wide = code_K[code_K > NIBBLE]
    bytes_B = np.minimum(wide - (NIBBLE + 1), BYTE).astype(np.uint8)
    escapes_E = wide[bytes_B == BYTE]
    if len(escapes_E) > most:
        return None
    nibble_K = np.minimum(code_K - 1, NIBBLE).astype(np.uint8)
    nibble_K = np.append(nibble_K, np.zeros(len(nibble_K) % 2, dtype=np.uint8))
    return Values(nibble_K[0::2] << 4 | nibble_K[1::2], bytes_B, escapes_E)


def nibbles_of(pairs_P: U8, count: int) -> U8:
    """One nibble for each changed item."""
    nibble_K = np.empty(2 * len(pairs_P), dtype=np.uint8)
    nibble_K[0::2] = pairs_P >> 4
    nibble_K[1::2] = pairs_P & NIBBLE
    return nibble_K[:count]


def read_escapes(reader: Reader, bytes_B: U8, dtype: np.dtype[Any]) -> Items:
    """As many as the bytes ask for. Raises CodecError."""
    found: Items = aligned(reader.exactly(int(np.count_nonzero(bytes_B == BYTE)) * dtype.itemsize)).view(dtype)
    return found


def change(out_N: Items, place_K: U32, nibble_K: U8, bytes_B: U8, escapes_E: Items) -> None:
    """Change the items at these places. There are as many bytes and escapes as are asked for."""
    loop = compiled.loop("change", out_N.dtype)
    if loop is not None:
        loop(out_N, place_K, nibble_K, bytes_B, escapes_E)
        return
    wide = bytes_B.astype(out_N.dtype) + (NIBBLE + 1)
    wide[bytes_B == BYTE] = escapes_E
    code_K = nibble_K.astype(out_N.dtype) + 1
    code_K[nibble_K == NIBBLE] = wide
    out_N[place_K] = unzigzag(out_N[place_K], code_K)


# --- a segment -------------------------------------------------------------------------------------------------------


def write(writer: Writer, place_K: U32, values: Values) -> None:
    coded = gaps_to(place_K)
    writer.put(coded.shift)
    writer.stream(coded.gaps_G)
    writer.stored(coded.rests_R)
    writer.stream(values.pairs_P)
    writer.stream(values.bytes_B)
    writer.stream(values.escapes_E.view(np.uint8))


def read(reader: Reader, old_N: Items, out_N: Items) -> None:
    """Decode a segment into `out_N`.

    Raises:
        CodecError: streams that do not fit together, or places beyond the segment.
    """
    items = len(old_N)
    shift = reader.byte()
    gaps_G = reader.stream(items)
    if len(gaps_G) and gaps_G[-1] == SKIP:
        raise CodecError("gaps end inside one")
    count = len(gaps_G) - int(np.count_nonzero(gaps_G == SKIP))
    check_count(count, shift, items)
    place_K = places(Gaps(shift, gaps_G, reader.exactly(rests_bytes(count, shift))), count, items)
    nibble_K = nibbles_of(reader.exactly(-(-count // 2)), count)
    bytes_B = reader.exactly(int(np.count_nonzero(nibble_K == NIBBLE)))
    escapes_E = read_escapes(reader, bytes_B, out_N.dtype)
    out_N[:] = old_N
    change(out_N, place_K, nibble_K, bytes_B, escapes_E)


def aligned(data: U8) -> U8:
    """The same bytes where numbers of any width may lie."""
    return data if data.ctypes.data % 8 == 0 else data.copy()
