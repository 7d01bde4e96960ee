"""Gaps within classes: items are sorted by the exponent of their *old* value, which the receiver has, too.

Whether a step changes a bfloat16 depends on its size: the chance halves with each exponent. A gap that counts only
items of the class it lies in costs less than one that counts all, by 1.4 to 2 times on real steps, for more work on
each side.

    classes   u8: how many cuts | each cut u8, ascending: an item's class is the number of cuts its exponent reaches
              for each class: u8 shift | u32 count of changed items
              gaps of all classes, grouped | rests stream of all, each class from a byte of its own
              nibbles of all, grouped | bytes of all, grouped | escapes stream of all      (`gaps`)
    grouped   u32: bit c is set if a group ends with class c | a stream for each group, its classes' one after the other

Items of a class are counted in the order of the segment. The sender chooses cuts and groups: a Huffman table takes 20
to 100 bytes, which is too much for some hundred items; and after the shift all classes' gaps look alike.

Not covered: which segments are coded so (`frames`).
Shapes: N items of a segment, C classes, K changed items by class and then by place, B bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from protocol.errors import ReasonCode
from shardcast.codecs import compiled, gaps
from shardcast.codecs.gaps import U32, Items
from shardcast.codecs.segments import Segment
from shardcast.codecs.streams import U8, Reader, Writer
from shardcast.errors import CodecError

MAX_CLASSES = 32
"""Bounds a decoder's work before it sees an item. Part of the format."""
LEAST_CHANGES = 64
"""A class of fewer changed items takes more for its head than it saves. No part of the format."""
KEPT_BITS = 4
"""As `gaps.KEPT_BITS`: fewer, since a stream has fewer gaps to pay for its table. No part of the format."""
SAMPLE = 16384
"""Of more changed items only about so many are looked at to choose the cuts. No part of the format."""
TABLE_BYTES, SYMBOLS_PER_BYTE = 16, 3
"""What a stream takes beside its symbols' entropy: a head, and a part of a byte for each symbol's place in the table.
No part of the format."""

_SORT_NS = 8.0
"""What numpy takes for a byte of items."""


def has_classes(segment: Segment) -> bool:
    """Whether its items have an exponent that this codec knows: bfloat16 and float16."""
    return segment.width == 2 and segment.mantissa > 0


def cuts_for(old_N: Items, place_K: U32, segment: Segment) -> list[int]:
    """Where to cut, from how many items of each exponent change. Empty: one class, so no use."""
    stride = max(1, len(place_K) // SAMPLE)
    count_E = (np.bincount(_exponents(old_N[place_K[::stride]], segment), minlength=256) * stride).tolist()
    cuts: list[int] = []
    above, below = 0, sum(count_E)
    for exponent in range(255, 0, -1):
        above += count_E[exponent]
        below -= count_E[exponent]
        if above >= LEAST_CHANGES and below >= LEAST_CHANGES and len(cuts) < MAX_CLASSES - 1:
            cuts.append(exponent)
            above = 0
    return cuts[::-1]


def write(writer: Writer, old_N: Items, place_K: U32, code_K: Items, segment: Segment, cuts: list[int]) -> None:
    """All classes of a segment. place_K and code_K: the changed items in order of place, at least one."""
    class_E = _class_of_exponent(cuts)
    loop = compiled.loop("class_ranks", old_N.dtype, old_N.nbytes * _SORT_NS)
    if loop is not None:
        rank_K, class_K = loop(old_N, place_K, class_E, segment.mantissa, _mask(segment))
        sorted_K = np.argsort(class_K, kind="stable")
        rank_K, class_K, code_K = rank_K[sorted_K], class_K[sorted_K], code_K[sorted_K]
    else:
        order_N, start_C = _sorted(old_N, class_E, segment, len(cuts) + 1)
        code_N = np.zeros_like(old_N)
        code_N[place_K] = code_K
        code_N = code_N[order_N]
        found_K = np.flatnonzero(code_N)
        class_K = class_E[_exponents(old_N[order_N[found_K]], segment)]
        rank_K, code_K = (found_K - start_C[class_K]).astype(np.uint32), code_N[found_K]
    edge_C = np.searchsorted(class_K, np.arange(len(cuts) + 2)).tolist()
    coded, values = [], []
    writer.put(len(cuts), *cuts)
    for low, high in pairwise(edge_C):
        one = gaps.values_of(code_K[low:high], high - low)
        assert one is not None  # as many escapes as items may be
        values.append(one)
        coded.append(gaps.gaps_to(rank_K[low:high], KEPT_BITS))
        writer.put(coded[-1].shift, *(high - low).to_bytes(4, "big"))
    _write_grouped(writer, [one.gaps_G for one in coded])
    writer.stored(np.concatenate([one.rests_R for one in coded]))
    _write_grouped(writer, [one.pairs_P for one in values])
    _write_grouped(writer, [one.bytes_B for one in values])
    writer.stream(np.concatenate([one.escapes_E for one in values]).view(np.uint8))


def read(reader: Reader, old_N: Items, out_N: Items, segment: Segment) -> None:
    """Decode a segment into `out_N`.

    Raises:
        CodecError: streams that do not fit together, or ranks beyond a class.
    """
    cuts = list(reader.take(reader.byte()))
    if len(cuts) >= MAX_CLASSES or any(a >= b for a, b in pairwise([0, *cuts])):
        raise CodecError("classes that are not in order, or too many")
    items = len(old_N)
    shift_C, count_C = [], []
    for _ in range(len(cuts) + 1):
        shift_C.append(reader.byte())
        count_C.append(int.from_bytes(reader.take(4), "big"))
        gaps.check_count(count_C[-1], shift_C[-1], items)
    if sum(count_C) > items:
        raise CodecError(f"{sum(count_C)} changes of {items} items", ReasonCode.OVERSIZE)
    gaps_C = _read_gaps(reader, count_C, items)
    rests_C = _read_pieces(reader, [gaps.rests_bytes(n, shift) for n, shift in zip(count_C, shift_C, strict=True)])
    pairs_C = _read_grouped(reader, [-(-n // 2) for n in count_C])
    nibble_C = [gaps.nibbles_of(pairs_P, n) for pairs_P, n in zip(pairs_C, count_C, strict=True)]
    bytes_C = _read_grouped(reader, [int(np.count_nonzero(nibble_K == gaps.NIBBLE)) for nibble_K in nibble_C])
    bytes_B = np.concatenate(bytes_C)
    escapes_E = gaps.read_escapes(reader, bytes_B, out_N.dtype)
    ranks = [
        gaps.places(gaps.Gaps(shift, gaps_G, rests_R), n, items)
        for shift, gaps_G, rests_R, n in zip(shift_C, gaps_C, rests_C, count_C, strict=True)
    ]
    place_K = _places(old_N, ranks, _class_of_exponent(cuts), segment)
    out_N[:] = old_N
    gaps.change(out_N, place_K, np.concatenate(nibble_C), bytes_B, escapes_E)


# --- streams of several classes --------------------------------------------------------------------------------------


def _write_grouped(writer: Writer, bodies: list[U8]) -> None:
    """Neighbours share a stream if that is shorter by what their entropies say. One with nothing joins any."""
    count_F256 = np.stack([np.bincount(body, minlength=256) for body in bodies])
    first_F = np.flatnonzero(count_F256.any(-1))  # of each group
    count_F256 = count_F256[first_F]
    while True:
        cost_F = _cost(count_F256)
        gain = np.full(len(cost_F) + 1, -1.0)
        gain[1:-1] = cost_F[:-1] + cost_F[1:] - _cost(count_F256[:-1] + count_F256[1:])
        # pairs that gain at least as much as those beside them, so that no two overlap
        joins_F = (gain[:-1] >= 0) & (gain[:-1] > gain[1:]) & (gain[:-1] >= np.roll(gain, 1)[:-1])
        if not joins_F.any():
            break
        count_F256 = np.add.reduceat(count_F256, np.flatnonzero(~joins_F))
        first_F = first_F[~joins_F]
    apart = first_F[1:].tolist()
    writer.put(*(sum(1 << (c - 1) for c in apart) | 1 << (len(bodies) - 1)).to_bytes(4, "big"))
    for low, high in pairwise([0, *apart, len(bodies)]):
        writer.stream(np.concatenate(bodies[low:high]))


def _cost(count_F256: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes that streams take in which symbols occur so often, about."""
    total_F = count_F256.sum(-1)
    scale = int(total_F.max(initial=0)) // len(_x_log_x()) + 1
    bits_F = (_x_log_x()[total_F // scale] - _x_log_x()[count_F256 // scale].sum(-1)) * scale
    cost_F: npt.NDArray[np.float64] = bits_F / 8 + TABLE_BYTES + np.count_nonzero(count_F256, -1) / SYMBOLS_PER_BYTE
    return cost_F


@cache
def _x_log_x() -> npt.NDArray[np.float64]:
    """x log2(x) of small whole numbers."""
    x = np.arange(1 << 14, dtype=np.float64)
    return x * np.log2(np.maximum(1.0, x))


def _groups(reader: Reader, classes: int) -> Iterator[range]:
    ends = int.from_bytes(reader.take(4), "big")
    if ends >> (classes - 1) != 1:
        raise CodecError("groups that do not end with the last class")
    first = 0
    for c in range(classes):
        if ends >> c & 1:
            yield range(first, c + 1)
            first = c + 1


def _read_grouped(reader: Reader, size_C: list[int]) -> list[U8]:
    """Streams of these sizes. Raises CodecError."""
    found: list[U8] = []
    for group in _groups(reader, len(size_C)):
        found += _read_pieces(reader, [size_C[c] for c in group])
    return found


def _read_pieces(reader: Reader, sizes: list[int]) -> list[U8]:
    edge = [0, *accumulate(sizes)]
    whole = reader.exactly(edge[-1])
    return [whole[low:high] for low, high in pairwise(edge)]


def _read_gaps(reader: Reader, count_C: list[int], items: int) -> list[U8]:
    """The bytes of these many gaps for each class, no more than there are items. Raises CodecError."""
    found: list[U8] = []
    for group in _groups(reader, len(count_C)):
        whole = reader.stream(items)
        items -= len(whole)
        end_J = np.flatnonzero(whole != gaps.SKIP) + 1
        wanted = [0, *accumulate(count_C[c] for c in group)]
        if len(end_J) != wanted[-1] or (len(whole) and end_J[-1:].tolist() != [len(whole)]):
            raise CodecError(f"{len(end_J)} gaps instead of {wanted[-1]}, or one is cut", ReasonCode.LENGTH_MISMATCH)
        edge = [int(end_J[n - 1]) if n else 0 for n in wanted]
        found += [whole[low:high] for low, high in pairwise(edge)]
    return found


# --- which item is where ---------------------------------------------------------------------------------------------


def _places(old_N: Items, ranks: list[U32], class_E: U8, segment: Segment) -> U32:
    """Where the items of these ranks within their classes are.

    Raises:
        CodecError: a class has no such rank.
    """
    edge_C = np.cumsum([0, *(len(rank_K) for rank_K in ranks)])
    rank_K = np.concatenate(ranks)
    loop = compiled.loop("class_places", old_N.dtype, old_N.nbytes * _SORT_NS)
    if loop is not None:
        place_K = np.empty(len(rank_K), dtype=np.uint32)
        if loop(old_N, rank_K, edge_C, class_E, segment.mantissa, _mask(segment), place_K):
            return place_K
    else:
        order_N, start_C = _sorted(old_N, class_E, segment, len(ranks))
        size_C = np.diff(start_C, append=len(old_N))
        if all(not len(one) or int(one[-1]) < size for one, size in zip(ranks, size_C.tolist(), strict=True)):
            return order_N[rank_K + np.repeat(start_C, np.diff(edge_C))].astype(np.uint32)
    raise CodecError("a gap leads beyond its class")


def _sorted(
    old_N: Items, class_E: U8, segment: Segment, classes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The items' places by class and then by place, and where each class begins among them."""
    class_N = class_E[_exponents(old_N, segment)]
    size_C = np.bincount(class_N, minlength=classes)
    return np.argsort(class_N, kind="stable"), np.cumsum(size_C) - size_C


def _exponents(item_N: Items, segment: Segment) -> npt.NDArray[np.integer]:
    return (item_N >> segment.mantissa) & _mask(segment)


def _mask(segment: Segment) -> int:
    return (1 << (8 * segment.width - 1 - segment.mantissa)) - 1


def _class_of_exponent(cuts: list[int]) -> U8:
    return np.searchsorted(np.array(cuts, dtype=np.int64), np.arange(256), side="right").astype(np.uint8)
