"""Shards for tests of `shardcast.codecs`, and both back ends of its inner loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from protocol.errors import ReasonCode
from shardcast.codecs import Codec, Segment, compiled, decode, encode
from shardcast.errors import CodecError

BACK_ENDS = ("numpy", "compiled")
BF16, F16, F32, F64 = (2, 7), (2, 10), (4, 23), (8, 52)
WHOLE = ((1, 0), (2, 0), (4, 0), (8, 0))
KINDS = (BF16, F16, F32, F64, *WHOLE)
"""Width and mantissa of every kind of segment there is."""


@contextmanager
def using(back_end: str) -> Iterator[None]:
    """Let numpy, or only compiled loops, do the work."""
    before = compiled._off, compiled._spent_ns
    compiled._off, compiled._spent_ns = back_end == "numpy", compiled.PAYS_FROM_NS
    try:
        yield
        assert None not in compiled._ready.values(), "the test environment has numba"
    finally:
        compiled._off, compiled._spent_ns = before


def encoded(codec: Codec, old: bytes | None, new: bytes, segments: Sequence[Segment]) -> bytes:
    """The frame, which both back ends make alike."""
    frames = set()
    for back_end in BACK_ENDS:
        with using(back_end):
            frames.add(encode(codec, old, new, segments))
    (frame,) = frames
    return frame


def decoded(frame: bytes, old: bytes | None, nbytes: int, segments: Sequence[Segment]) -> bytes | ReasonCode:
    """The shard, or why the frame is refused: both back ends say the same."""
    found: set[bytes | ReasonCode] = set()
    for back_end in BACK_ENDS:
        with using(back_end):
            out = bytearray(nbytes)
            try:
                decode(frame, old, out, segments)
            except CodecError as exc:
                found.add(exc.code)
            else:
                found.add(bytes(out))
    (one,) = found
    return one


def learned(items: int, rate: float, seed: int) -> tuple[bytes, bytes]:
    """bfloat16 weights as a model has them, before and after a step of this size: most stay as they are."""
    draw = np.random.default_rng(seed)
    master = (draw.standard_normal(items) * np.exp(draw.standard_normal(items)) * 0.02).astype(np.float32)
    after = master + (draw.standard_normal(items) * rate).astype(np.float32)
    return bf16(master), bf16(after)


def bf16(values: Any) -> bytes:
    """Floats rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def shard_of(parts: Sequence[tuple[tuple[int, int], bytes]]) -> tuple[bytes, tuple[Segment, ...]]:
    """A shard of these kinds of bytes, and its segments."""
    segments = tuple(Segment(len(data) // kind[0], *kind) for kind, data in parts)
    return b"".join(data for _, data in parts), segments


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda draw, one: one,
    "first": lambda draw, one: _where(one, np.arange(len(one)) == 0, one + 1),
    "last": lambda draw, one: _where(one, np.arange(len(one)) == len(one) - 1, one - 1),
    "few by one": lambda draw, one: _where(one, draw.random(len(one)) < 0.02, one + 1 - 2 * (draw.random() < 0.5)),
    "few by much": lambda draw, one: _where(one, draw.random(len(one)) < 0.05, _noise(draw, one)),
    "half a little": lambda draw, one: _where(one, draw.random(len(one)) < 0.5, one + draw.integers(1, 99, len(one))),
    "all by one": lambda draw, one: one + 1,
    "all by much": lambda draw, one: _noise(draw, one),
}
"""How items may change, whatever their width."""


def _where(one: Any, chosen: Any, other: Any) -> Any:
    return np.where(chosen, other.astype(one.dtype), one)


def _noise(draw: Any, one: Any) -> Any:
    return np.frombuffer(draw.bytes(one.nbytes), dtype=one.dtype)
