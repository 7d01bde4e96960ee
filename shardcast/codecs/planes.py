"""Byte planes: the first bytes of all items, then all second ones, and so on, each a stream of its own.

Anchors: an item's bits are turned left by one, so that the sign goes to the lowest place and a float's exponent (of
bfloat16 and float32: all of it) is the highest byte. Exponents of weights are few and unequal: Huffman's coder takes
them to about a third. Signs and mantissas are noise, and are stored. After ZipNN (arXiv 2411.05239).

Differences: zigzag(new - old) of every item. For float32, in which every item changes, it is the highest planes that
hold nothing.

Not covered: which segments are coded so (`frames`).
Shapes: N items of a segment, W bytes of each; planes go from the highest byte to the lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardcast.codecs import compiled
from shardcast.codecs.gaps import Items, unzigzag, zigzag
from shardcast.codecs.streams import U8, Reader, Writer

_SPLIT_NS = 1.0
"""What numpy takes for a byte of items."""

_PIECE = 64 * 1024
"""Items that numpy takes on at a time."""


def turn(item_N: Items) -> Items:
    """Every item's bits turned left by one."""
    return (item_N << 1) | (item_N >> (8 * item_N.itemsize - 1))


def turn_back(item_N: Items) -> Items:
    """The inverse."""
    return (item_N >> 1) | (item_N << (8 * item_N.itemsize - 1))


def write_anchor(writer: Writer, new_N: Items, floats: bool) -> None:
    """Items without an old side. floats: they have an exponent below a sign."""
    if floats and new_N.itemsize == 2:
        loop = compiled.loop("split", new_N.dtype, new_N.nbytes * _SPLIT_NS)
        if loop is not None:
            for plane_N in loop(new_N):
                _put(writer, plane_N)
            return
    _write(writer, new_N, turn if floats else None)


def read_anchor(reader: Reader, out_N: Items, floats: bool) -> None:
    """Decode items into `out_N`. Raises CodecError."""
    planes_WN = [reader.exactly(len(out_N)) for _ in range(out_N.itemsize)]
    if floats and out_N.itemsize == 2:
        loop = compiled.loop("join", out_N.dtype)
        if loop is not None:
            loop(planes_WN[0], planes_WN[1], out_N)
            return
    _join(planes_WN, out_N)
    if floats:
        for piece in _pieces(len(out_N)):
            out_N[piece] = turn_back(out_N[piece])


def write_differences(writer: Writer, old_N: Items, new_N: Items) -> None:
    _write(writer, zigzag(old_N, new_N), None)


def read_differences(reader: Reader, old_N: Items, out_N: Items) -> None:
    """Decode items into `out_N`. Raises CodecError."""
    _join([reader.exactly(len(out_N)) for _ in range(out_N.itemsize)], out_N)
    out_N[:] = unzigzag(old_N, out_N)


def _write(writer: Writer, item_N: Items, change: Callable[[Items], Items] | None) -> None:
    """Every plane of the items. change: made of each item first."""
    planes_WN = [np.empty(len(item_N), dtype=np.uint8) for _ in range(item_N.itemsize)]
    for piece in _pieces(len(item_N)):
        changed_N = np.ascontiguousarray(item_N[piece] if change is None else change(item_N[piece]))
        bytes_NW = changed_N.view(np.uint8).reshape(-1, item_N.itemsize)
        for plane_N, place in zip(planes_WN, range(item_N.itemsize - 1, -1, -1), strict=True):
            plane_N[piece] = bytes_NW[:, place]
    for plane_N in planes_WN:
        _put(writer, plane_N)


def _pieces(items: int) -> Iterator[slice]:
    """So that what numpy sets aside stays in the processor's cache, and is no second and third shard in memory."""
    return (slice(at, at + _PIECE) for at in range(0, items, _PIECE))


def _put(writer: Writer, plane_N: U8) -> None:
    if writer.shrinks(plane_N):
        writer.stream(plane_N)
    else:
        writer.stored(plane_N)


def _join(planes_WN: list[U8], out_N: Items) -> None:
    bytes_NW = out_N.view(np.uint8).reshape(len(out_N), out_N.itemsize)
    for plane_N, place in zip(planes_WN, range(out_N.itemsize - 1, -1, -1), strict=True):
        bytes_NW[:, place] = plane_N
