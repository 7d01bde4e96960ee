"""The codecs' inner loops that numpy can't do in one pass, compiled by numba; imported by `compiled` when they pay.

Each is the same function of whole numbers as its numpy form, so frames are equal to the last byte whichever was used.
They give the interpreter's lock back while they run: shards are coded in as many threads as there are cores. A loop is
compiled for one type of items when it is first asked for. Nothing is kept on disk: a file of compiled code that
somebody else can write would run here.

Not covered: when they are used (`compiled`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

_WORDS = 4
"""Words of 8 bytes that are compared before one looks closer: one wide register."""
_NONE = np.uint32(0xFFFFFFFF)

Loop = Callable[..., Any]


def compiled(name: str, item: np.dtype[Any]) -> Callable[..., Any]:
    """The function of this name, its loop compiled for items of this type.

    Raises:
        RuntimeError: numba can't.
    """
    function, loop, signature = _LOOPS[name]
    types = []
    for word in signature.split():
        kind = item.name if word in ("items", "out") else word.removesuffix("[]").removesuffix("=")
        one = getattr(numba.types, kind)
        array = word in ("items", "out") or word.endswith(("[]", "="))
        read = word != "out" and not word.endswith("=")
        types.append(numba.types.Array(one, 1, "C", readonly=read) if array else one)
    try:
        return functools.partial(function, numba.njit(tuple(types), nogil=True)(loop(item.itemsize)))
    except numba.core.errors.NumbaError as exc:
        raise RuntimeError(str(exc)) from exc


# --- where items differ ----------------------------------------------------------------------------------------------


def changed(
    loop: Loop, old_N: npt.NDArray[Any], new_N: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """`gaps.changed`."""
    place_K = np.empty(len(old_N), dtype=np.uint32)  # pages that are not written to take no memory
    code_K = np.empty(len(old_N), dtype=old_N.dtype)
    lanes = 8 // old_N.itemsize
    words = len(old_N) // (lanes * _WORDS) * _WORDS
    old_W, new_W = (one[: words * lanes].view(np.uint64) for one in (old_N, new_N))
    count = loop(old_W, new_W, old_N, new_N, place_K, code_K)
    return place_K[:count], code_K[:count]


def _changed_of(width: int) -> Callable[..., Any]:
    """The loop for items of so many bytes: with bounds that are known when it is compiled it is a third faster."""
    near = 8 * _WORDS // width
    mask, sign = np.uint64((1 << 8 * width) - 1), np.uint64(8 * width - 1)

    def _changed(old_W: Any, new_W: Any, old_N: Any, new_N: Any, place_K: Any, code_K: Any) -> Any:
        count: Any = 0
        for block in range(len(old_W) // _WORDS):
            any_bit = np.uint64(0)
            for word in range(block * _WORDS, block * _WORDS + _WORDS):
                any_bit |= old_W[word] ^ new_W[word]
            if any_bit == 0:
                continue
            found = count
            for n in range(block * near, block * near + near):
                place_K[count] = np.uint32(n)  # stays if this item differs: no branch that is guessed wrong
                count += np.int64(old_N[n] != new_N[n])
            for k in range(found, count):  # while the items are at hand
                n = place_K[k]
                difference = (np.uint64(new_N[n]) - np.uint64(old_N[n])) & mask
                code_K[k] = ((difference << np.uint64(1)) ^ (np.uint64(0) - (difference >> sign))) & mask
        for n in range(len(old_W) // _WORDS * near, len(old_N)):
            difference = (np.uint64(new_N[n]) - np.uint64(old_N[n])) & mask
            if difference != 0:
                place_K[count] = np.uint32(n)
                code_K[count] = ((difference << np.uint64(1)) ^ (np.uint64(0) - (difference >> sign))) & mask
                count += 1
        return count

    return _changed


# --- gaps and values -------------------------------------------------------------------------------------------------


def pack(
    loop: Loop, place_K: npt.NDArray[np.uint32], shift: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """`gaps._pack`."""
    gaps_G = np.empty(len(place_K) + (int(place_K[-1]) >> shift) // 255 if len(place_K) else 0, dtype=np.uint8)
    rests_R = np.empty(-(-len(place_K) * shift // 8), dtype=np.uint8)
    used = loop(place_K, shift, gaps_G, rests_R)
    return gaps_G[:used], rests_R


def _pack(place_K: Any, shift: Any, gaps_G: Any, rests_R: Any) -> Any:
    gaps, rests, bits = 0, 0, 0
    held: Any = 0
    after: Any = 0
    low = (1 << shift) - 1
    for k in range(len(place_K)):
        gap: Any = np.int64(place_K[k]) - after
        after += gap + 1
        held |= (gap & low) << bits
        bits += shift
        while bits >= 8:
            rests_R[rests] = held & 0xFF
            rests += 1
            held >>= 8
            bits -= 8
        gap >>= shift
        while gap >= 255:
            gaps_G[gaps] = 255
            gaps += 1
            gap -= 255
        gaps_G[gaps] = gap
        gaps += 1
    if bits > 0:
        rests_R[rests] = held
    return gaps


def unpack(
    loop: Loop, gaps_G: npt.NDArray[np.uint8], rests_R: npt.NDArray[np.uint8], shift: int, count: int, items: int
) -> npt.NDArray[np.uint32] | None:
    """`gaps._unpack`: None as soon as a gap leads to `items` and beyond. There are `count` gaps and as many rests."""
    place_K = np.empty(count, dtype=np.uint32)
    return place_K if loop(gaps_G, rests_R, shift, items, place_K) else None


def _unpack(gaps_G: Any, rests_R: Any, shift: Any, items: Any, place_K: Any) -> Any:
    k, rests, bits = 0, 0, 0
    place: Any = 0
    high: Any = 0
    held: Any = 0
    low = (1 << shift) - 1
    for g in range(len(gaps_G)):
        gap = np.int64(gaps_G[g])
        high += gap
        if gap == 255:
            continue
        while bits < shift:
            held |= np.int64(rests_R[rests]) << bits
            rests += 1
            bits += 8
        place += (high << shift) | (held & low)
        held >>= shift
        bits -= shift
        high = 0
        if place >= items:
            return False
        place_K[k] = place
        k += 1
        place += 1
    return True


def values_of(
    loop: Loop, code_K: npt.NDArray[Any], most: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[Any]] | None:
    """`gaps.values_of`: None if there are more than `most` escapes."""
    pairs_P = np.empty(-(-len(code_K) // 2), dtype=np.uint8)
    bytes_B = np.empty(len(code_K), dtype=np.uint8)
    escapes_E = np.empty(min(len(code_K), most), dtype=code_K.dtype)
    used_2 = np.zeros(2, dtype=np.int64)
    if not loop(code_K, pairs_P, bytes_B, escapes_E, used_2):
        return None
    return pairs_P, bytes_B[: used_2[0]], escapes_E[: used_2[1]]


def _values_of(code_K: Any, pairs_P: Any, bytes_B: Any, escapes_E: Any, used_2: Any) -> Any:
    wide, escapes = 0, 0
    for k in range(len(code_K)):
        code = np.uint64(code_K[k])
        nibble = min(code - np.uint64(1), np.uint64(15))
        if k & 1 == 0:
            pairs_P[k >> 1] = nibble << np.uint64(4)
        else:
            pairs_P[k >> 1] |= np.uint8(nibble)
        if nibble < 15:
            continue
        byte = min(code - np.uint64(16), np.uint64(255))
        bytes_B[wide] = byte
        wide += 1
        if byte == 255:
            if escapes == len(escapes_E):
                return False
            escapes_E[escapes] = code
            escapes += 1
    used_2[0] = wide
    used_2[1] = escapes
    return True


def change(
    loop: Loop,
    out_N: npt.NDArray[Any],
    place_K: npt.NDArray[np.uint32],
    nibble_K: npt.NDArray[np.uint8],
    bytes_B: npt.NDArray[np.uint8],
    escapes_E: npt.NDArray[Any],
) -> None:
    """Change the items at `place_K`, all below N. There are as many bytes and escapes as are asked for."""
    loop(out_N, place_K, nibble_K, bytes_B, escapes_E)


def _change(out_N: Any, place_K: Any, nibble_K: Any, bytes_B: Any, escapes_E: Any) -> None:
    wide, escapes = 0, 0
    for k in range(len(place_K)):
        code = np.uint64(nibble_K[k]) + np.uint64(1)
        if code == 16:
            code = np.uint64(bytes_B[wide]) + np.uint64(16)
            wide += 1
            if code == 271:
                code = np.uint64(escapes_E[escapes])
                escapes += 1
        difference = (code >> np.uint64(1)) ^ (np.uint64(0) - (code & np.uint64(1)))
        place = place_K[k]
        out_N[place] = np.uint64(out_N[place]) + difference  # cut to the item's width


# --- classes of exponents --------------------------------------------------------------------------------------------


def class_ranks(
    loop: Loop,
    old_N: npt.NDArray[Any],
    place_K: npt.NDArray[np.uint32],
    class_E: npt.NDArray[np.uint8],
    mantissa: int,
    mask: int,
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """For each changed item, in order of place, how many of its class come before it, and its class."""
    rank_K = np.empty(len(place_K), dtype=np.uint32)
    class_K = np.empty(len(place_K), dtype=np.uint8)
    loop(old_N, place_K, class_E, np.uint64(mantissa), np.uint64(mask), rank_K, class_K)
    return rank_K, class_K


def _class_ranks(old_N: Any, place_K: Any, class_E: Any, mantissa: Any, mask: Any, rank_K: Any, class_K: Any) -> None:
    # Neighbours are often of one class, and adding to what was just written waits for it: four tables take turns.
    count_4C = np.zeros((4, 256), dtype=np.uint32)
    n: Any = 0
    for k in range(len(place_K)):
        place = np.int64(place_K[k])
        while n + 4 <= place:
            for table in range(4):
                count_4C[table, class_E[(np.uint64(old_N[n + table]) >> mantissa) & mask]] += np.uint32(1)
            n += 4
        while n < place:
            count_4C[0, class_E[(np.uint64(old_N[n]) >> mantissa) & mask]] += np.uint32(1)
            n += 1
        found = class_E[(np.uint64(old_N[place]) >> mantissa) & mask]
        rank_K[k] = count_4C[0, found] + count_4C[1, found] + count_4C[2, found] + count_4C[3, found]
        class_K[k] = found


def class_places(
    loop: Loop,
    old_N: npt.NDArray[Any],
    rank_K: npt.NDArray[np.uint32],
    edge_C: npt.NDArray[np.int64],
    class_E: npt.NDArray[np.uint8],
    mantissa: int,
    mask: int,
    place_K: npt.NDArray[np.uint32],
) -> bool:
    """Where items of these ranks are, class by class, into `place_K`; False if a class has no such rank."""
    fits: bool = loop(old_N, rank_K, edge_C, class_E, np.uint64(mantissa), np.uint64(mask), place_K)
    return fits


def _class_places(old_N: Any, rank_K: Any, edge_C: Any, class_E: Any, mantissa: Any, mask: Any, place_K: Any) -> Any:
    classes = len(edge_C) - 1
    next_C: Any = np.zeros(256, dtype=np.int64)  # the next changed item of each class
    left_C = np.full(256, _NONE, dtype=np.uint32)  # how many of its class come before it
    for c in range(classes):
        next_C[c] = edge_C[c]
        if edge_C[c] < edge_C[c + 1]:
            left_C[c] = rank_K[edge_C[c]]
    left = len(rank_K)
    for n in range(len(old_N)):
        c = class_E[(np.uint64(old_N[n]) >> mantissa) & mask]
        before = left_C[c]
        if before != 0:
            left_C[c] = before - np.uint32(1)
            continue
        k = next_C[c]
        place_K[k] = n
        left -= 1
        if left == 0:
            break
        next_C[c] = k + 1
        left_C[c] = rank_K[k + 1] - rank_K[k] - np.uint32(1) if k + 1 < edge_C[c + 1] else _NONE
    return left == 0


# --- planes ----------------------------------------------------------------------------------------------------------


def split(loop: Loop, item_N: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Both planes of items turned left by one, the higher first."""
    high_N, low_N = np.empty(len(item_N), dtype=np.uint8), np.empty(len(item_N), dtype=np.uint8)
    loop(item_N, high_N, low_N)
    return high_N, low_N


def _split(item_N: Any, high_N: Any, low_N: Any) -> None:
    for n in range(len(item_N)):
        item = item_N[n]
        high_N[n] = item >> 7
        low_N[n] = (item << 1) | (item >> 15)


def join(
    loop: Loop, high_N: npt.NDArray[np.uint8], low_N: npt.NDArray[np.uint8], out_N: npt.NDArray[np.uint16]
) -> None:
    """The inverse, into `out_N`."""
    loop(high_N, low_N, out_N)


def _join(high_N: Any, low_N: Any, out_N: Any) -> None:
    for n in range(len(out_N)):
        low = np.uint16(low_N[n])
        out_N[n] = (np.uint16(high_N[n]) << 7) | (low >> 1) | (low << 15)


_LOOPS: dict[str, tuple[Callable[..., Any], Callable[[int], Loop], str]] = {
    "changed": (changed, _changed_of, "uint64[] uint64[] items items uint32= out"),
    "pack": (pack, lambda _width: _pack, "items int64 uint8= uint8="),
    "unpack": (unpack, lambda _width: _unpack, "items uint8[] int64 int64 uint32="),
    "values_of": (values_of, lambda _width: _values_of, "items uint8= uint8= out int64="),
    "change": (change, lambda _width: _change, "out uint32[] uint8[] uint8[] items"),
    "class_ranks": (class_ranks, lambda _width: _class_ranks, "items uint32[] uint8[] uint64 uint64 uint32= uint8="),
    "class_places": (
        class_places,
        lambda _width: _class_places,
        "items uint32[] int64[] uint8[] uint64 uint64 uint32=",
    ),
    "split": (split, lambda _width: _split, "items uint8= uint8="),
    "join": (join, lambda _width: _join, "uint8[] uint8[] out"),
}
"""For each function its loop for items of so many bytes, and the loop's types: `items` are read and `out` is written,
so is `type=`; `type[]` is read."""
