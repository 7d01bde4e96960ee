"""One raw shard as a frame: the codec's number, then what it says about each of the shard's segments.

    frame    u8 codec | body
    0 raw    the shard's bytes
    1 anchor for each segment its byte planes (`planes`): needs nothing else
    2 gaps   for each segment u8 mode | streams, relative to the old shard:
                 0 same           nothing: no item changed
                 1 gaps           gaps, values, escapes (`gaps`)
                 2 differences    byte planes of all differences (`planes`)
    3 class  as 2, and for segments of bfloat16 or float16
                 3 classes        gaps within classes of exponents (`classes`)

The sender may choose any frame for any shard of a publication that has a base: `encode` sends what is shortest. Frames
are a function of their shards, the codec and the zstandard library: another version of that may make other bytes, and
both decode to the shard. What counts is the shard's hash, which the caller compares.

Decoding is total. A frame is refused (CodecError) before anything of a declared size is allocated. Whatever it says,
decoding takes at most twelve times the shard's length, and so much only if numpy does it and everything changed; a
usual patch takes a tenth of the shard. A refused frame leaves `out` in no defined state.

Not covered: hashes, which shards there are, and whom to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import numpy as np

from protocol.errors import ReasonCode
from shardcast.codecs import classes, gaps, planes
from shardcast.codecs.gaps import Items, aligned
from shardcast.codecs.segments import Segment, total_bytes
from shardcast.codecs.streams import U8, Reader, Writer
from shardcast.errors import CodecError

Buffer = bytes | bytearray | memoryview


class Codec(IntEnum):
    """`PublicationOpen.codec`, and the first byte of a frame. A publication of codec 0 has no frames: its wire bytes
    are the shards' own."""

    RAW = 0
    ANCHOR = 1
    GAPS = 2
    CLASSES = 3


SAME, MODE_GAPS, DIFFERENCES, MODE_CLASSES = range(4)

ANCHOR_FROM = 4
"""An anchor is tried once a patch is longer than a fourth of the shard: no anchor of real weights is shorter."""


def encode(codec: Codec, old: Buffer | None, new: Buffer, segments: Sequence[Segment]) -> bytes:
    """The shortest frame among the codec's own, an anchor, and raw.

    Args:
        codec: what is tried first. ANCHOR and RAW need no `old`.
        old, new: the shard before and after, of the same length.
        segments: of the shard.

    Raises:
        ValueError: lengths that do not fit together.
    """
    new_B = _bytes_of(new, segments)
    frame: bytes | None = None
    if codec in (Codec.GAPS, Codec.CLASSES):
        if old is None:
            raise ValueError("a patch needs the shard it changes")
        frame = _patch(codec, _bytes_of(old, segments), new_B, segments)
    if codec is Codec.ANCHOR or (frame is not None and len(frame) * ANCHOR_FROM > len(new_B)):
        anchor = _anchor(new_B, segments)
        frame = anchor if frame is None or len(anchor) < len(frame) else frame
    if frame is None or len(frame) > len(new_B) + 1:
        return bytes((Codec.RAW,)) + new_B.tobytes()
    return frame


def adds(wire: Buffer) -> bool:
    """Whether a frame adds a difference to whatever the old shard is, so that `join` can add it to others. Raises
    CodecError for what is no frame."""
    return _codec(memoryview(wire).cast("B")) is Codec.GAPS


def join(frames: Iterable[Buffer], segments: Sequence[Segment]) -> bytes:
    """One frame that does what these do one after another, made without any of their shards.

    Differences are whole numbers modulo 2^width: their sum is the difference of the whole way. By class they can't be
    joined so: where a class's items lie is known from the old shard alone.

    Args:
        frames: each of which `adds`, oldest first.

    Raises:
        CodecError: one is no such frame of this shard.
    """
    nothing = np.zeros(total_bytes(segments), dtype=np.uint8)
    sum_B, next_B = nothing.copy(), np.empty_like(nothing)
    for frame in frames:
        if not adds(frame):
            raise CodecError("only frames of gaps can be joined", ReasonCode.UNSUPPORTED_VERSION)
        decode(frame, sum_B.data, next_B.data, segments)
        sum_B, next_B = next_B, sum_B
    return _patch(Codec.GAPS, nothing, sum_B, segments)


def needs_old(wire: Buffer) -> bool:
    """Whether a frame is relative to the old shard. Raises CodecError for what is no frame."""
    return _codec(memoryview(wire).cast("B")) in (Codec.GAPS, Codec.CLASSES)


def decode(wire: Buffer, old: Buffer | None, out: Buffer, segments: Sequence[Segment]) -> None:
    """Write the shard that a frame stands for into `out`.

    Args:
        wire: what was received, its hash and length already compared with the record's.
        old: the shard before, which only frames that `needs_old` look at. Not the same memory as `out`.
        out: as long as the shard, writable.
        segments: of the shard.

    Raises:
        CodecError: no frame of this shard, `malformed`, `oversize`, `length-mismatch` or `unsupported-version`;
            `record-missing` if it needs an old shard and there is none.
        ValueError: `old` or `out` is not as long as the segments.
    """
    view = memoryview(wire).cast("B")
    codec = _codec(view)
    out_B = _bytes_of(out, segments)
    if codec is Codec.RAW:
        if len(view) - 1 != len(out_B):
            raise CodecError(
                f"a raw frame of {len(view) - 1} bytes for a shard of {len(out_B)}", ReasonCode.LENGTH_MISMATCH
            )
        out_B[:] = np.frombuffer(view[1:], dtype=np.uint8)
        return
    reader = Reader(view[1:])
    if codec is not Codec.ANCHOR and old is None:
        raise CodecError("the frame changes a shard that is not here", ReasonCode.RECORD_MISSING)
    old_B = None if codec is Codec.ANCHOR or old is None else _bytes_of(old, segments)
    for segment, span in _spans(segments):
        out_N = _items(out_B[span], segment)
        if old_B is None:
            planes.read_anchor(reader, out_N, segment.mantissa > 0)
        else:
            _read(reader, codec, _items(old_B[span], segment), out_N, segment)
        if not np.may_share_memory(out_N, out_B):
            out_B[span] = out_N.view(np.uint8)
    reader.end()


def _codec(view: memoryview) -> Codec:
    if not len(view):
        raise CodecError("an empty frame")
    try:
        return Codec(view[0])
    except ValueError as exc:
        raise CodecError(f"codec {view[0]} is not known here", ReasonCode.UNSUPPORTED_VERSION) from exc


def _bytes_of(shard: Buffer, segments: Sequence[Segment]) -> U8:
    shard_B = np.frombuffer(shard, dtype=np.uint8)
    if len(shard_B) != total_bytes(segments):
        raise ValueError(f"a shard of {len(shard_B)} bytes, and segments of {total_bytes(segments)}")
    return shard_B


def _spans(segments: Sequence[Segment]) -> Iterator[tuple[Segment, slice]]:
    """Each segment with its place in the shard; empty ones say nothing."""
    at = 0
    for segment in segments:
        if segment.items:
            yield segment, slice(at, at + segment.nbytes)
        at += segment.nbytes


def _items(span_B: U8, segment: Segment) -> Items:
    """A segment's items; a copy where they do not lie as numbers of 8 bytes do."""
    return aligned(span_B).view(f"u{segment.width}")


def _anchor(new_B: U8, segments: Sequence[Segment]) -> bytes:
    writer = Writer()
    writer.put(Codec.ANCHOR)
    for segment, span in _spans(segments):
        planes.write_anchor(writer, _items(new_B[span], segment), segment.mantissa > 0)
    return writer.frame()


def _patch(codec: Codec, old_B: U8, new_B: U8, segments: Sequence[Segment]) -> bytes:
    writer = Writer()
    writer.put(codec)
    for segment, span in _spans(segments):
        old_N, new_N = _items(old_B[span], segment), _items(new_B[span], segment)
        place_K, code_K = gaps.changed(old_N, new_N)
        if not len(place_K):
            writer.put(SAME)
            continue
        cuts = (
            classes.cuts_for(old_N, place_K, segment) if codec is Codec.CLASSES and classes.has_classes(segment) else []
        )
        if cuts:
            writer.put(MODE_CLASSES)
            classes.write(writer, old_N, place_K, code_K, segment, cuts)
            continue
        values = gaps.values_of(code_K, segment.items // gaps.MOST_ESCAPES)
        if values is None:
            writer.put(DIFFERENCES)
            planes.write_differences(writer, old_N, new_N)
        else:
            writer.put(MODE_GAPS)
            gaps.write(writer, place_K, values)
    return writer.frame()


def _read(reader: Reader, codec: Codec, old_N: Items, out_N: Items, segment: Segment) -> None:
    mode = reader.byte()
    if mode == SAME:
        out_N[:] = old_N
    elif mode == MODE_GAPS:
        gaps.read(reader, old_N, out_N)
    elif mode == DIFFERENCES:
        planes.read_differences(reader, old_N, out_N)
    elif mode == MODE_CLASSES and codec is Codec.CLASSES and classes.has_classes(segment):
        classes.read(reader, old_N, out_N, segment)
    else:
        raise CodecError(f"mode {mode} is not known for this segment")
