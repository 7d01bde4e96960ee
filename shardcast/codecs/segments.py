"""Which bytes of a raw shard are items of which size: what a codec has to know of a layout.

Canonical data is ordered by item size, so a shard is a few segments, most often one. Tensors of the same kind that lie
beside each other are one segment. An item that a shard's edge cuts (a canonical layout has none) is coded as bytes.

Not covered: coding (`frames`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.limits import SHARD_BYTES
from shardcast.layout import ITEM_BYTES, Layout, shard_length

_MANTISSA = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}
"""Bits below the exponent. Dtypes that are missing here have no exponent that a codec looks at."""
_MANTISSAS = {1: (0,), 2: (0, 7, 10), 4: (0, 23), 8: (0, 52)}
"""Of each width."""


@dataclass(frozen=True)
class Segment:
    """`items` items of `width` bytes each (1, 2, 4 or 8), little-endian, the next ones in the shard.

    mantissa: bits below the exponent, 0 where items are whole numbers, or floats of one byte.
    """

    items: int
    width: int
    mantissa: int = 0

    def __post_init__(self) -> None:
        if self.items < 0 or self.mantissa not in _MANTISSAS.get(self.width, ()):
            raise ValueError(f"no segment: {self}")

    @property
    def nbytes(self) -> int:
        return self.items * self.width


def segments_of(layout: Layout, index: int) -> tuple[Segment, ...]:
    """The segments of raw shard `index`, in order; together they are as long as the shard."""
    start = index * SHARD_BYTES
    end = start + shard_length(layout.nbytes, index)
    kinds: list[tuple[int, int, int]] = []  # bytes, width, mantissa
    first = bisect_right(layout.tensors, start, key=lambda spec: spec.offset + spec.nbytes)
    for at in range(first, len(layout.tensors)):
        spec = layout.tensors[at]
        if spec.offset >= end:
            break
        low, high = max(spec.offset, start), min(spec.offset + spec.nbytes, end)
        width = ITEM_BYTES[spec.dtype]
        head = min(-(low - spec.offset) % width, high - low)
        body = (high - low - head) // width * width
        for nbytes, size, mantissa in (
            (head, 1, 0),
            (body, width, _MANTISSA.get(spec.dtype, 0)),
            (high - low - head - body, 1, 0),
        ):
            if nbytes and kinds and kinds[-1][1:] == (size, mantissa):
                kinds[-1] = (kinds[-1][0] + nbytes, size, mantissa)
            elif nbytes:
                kinds.append((nbytes, size, mantissa))
    return tuple(Segment(nbytes // size, size, mantissa) for nbytes, size, mantissa in kinds)


def total_bytes(segments: Sequence[Segment]) -> int:
    """How long a shard of these segments is."""
    return sum(segment.nbytes for segment in segments)
