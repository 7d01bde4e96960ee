"""Frames nobody's encoder makes: each is refused with a reason, by numpy and compiled alike, and memory stays
bounded."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import ReasonCode
from protocol.limits import MIB, SHARD_BYTES
from shardcast.codecs import Codec, Segment, needs_old
from shardcast.errors import CodecError
from tests.codec_shards import BF16, F32, decoded, encoded, learned, shard_of

MALFORMED, OVERSIZE, LENGTH = ReasonCode.MALFORMED, ReasonCode.OVERSIZE, ReasonCode.LENGTH_MISMATCH
ITEMS = 100
SEGMENTS = (Segment(ITEMS, *BF16),)
OLD = bytes(2 * ITEMS)
CODED = 1 << 31


def stored(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def zstd(data: bytes, **kwargs: int) -> bytes:
    frame = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(1, **kwargs)
    ).compress(data)
    return coded(frame)


def coded(frame: bytes) -> bytes:
    return struct.pack(">I", len(frame) | CODED) + frame


def gaps_frame(
    gaps: bytes, pairs: bytes, *, shift: int = 0, rests: bytes = b"", wide: bytes = b"", escapes: bytes = b""
) -> bytes:
    """A frame of one segment in mode `gaps`, of streams as they are given."""
    streams = stored(gaps), stored(rests), stored(pairs), stored(wide), stored(escapes)
    return bytes((Codec.GAPS, 1, shift)) + b"".join(streams)


def classes_frame(
    cuts: list[int], counts: list[int], gaps: list[bytes], *, ends: int | None = None, pairs: Sequence[bytes] = (b"",),
    wide: Sequence[bytes] = (b"",),
) -> bytes:  # fmt: skip
    """A frame of one segment in mode `classes`, without lower bits; each list is the groups' streams."""
    heads = b"".join(b"\0" + struct.pack(">I", count) for count in counts)
    last = 1 << len(cuts)
    grouped = [
        struct.pack(">I", last if ends is None else ends) + b"".join(map(stored, gaps)),
        stored(b""),
        *(struct.pack(">I", last) + b"".join(map(stored, one)) for one in (pairs, wide)),
        stored(b""),
    ]
    return bytes((Codec.CLASSES, 3, len(cuts), *cuts)) + heads + b"".join(grouped)


def refused(frame: bytes, segments: tuple[Segment, ...] = SEGMENTS, old: bytes | None = OLD) -> ReasonCode:
    found = decoded(frame, old, sum(one.nbytes for one in segments), segments)
    assert isinstance(found, ReasonCode)
    return found


def test_the_builders_build_what_is_accepted() -> None:
    new = decoded(classes_frame([9], [2, 0], [b"\x01\x02"], pairs=[b"\x01"]), OLD, 2 * ITEMS, SEGMENTS)
    assert isinstance(new, bytes)
    assert np.flatnonzero(np.frombuffer(new, dtype="<u2")).tolist() == [1, 4]
    new = decoded(gaps_frame(b"\x02\x00", b"\x0f", wide=b"\xff", escapes=b"\x10\x00"), OLD, 2 * ITEMS, SEGMENTS)
    assert isinstance(new, bytes)
    assert np.flatnonzero(np.frombuffer(new, dtype="<u2")).tolist() == [2, 3]
    assert np.frombuffer(new, dtype="<i2")[2:4].tolist() == [-1, 8]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", MALFORMED),
        (bytes((4,)), ReasonCode.UNSUPPORTED_VERSION),
        (bytes((255,)) + OLD, ReasonCode.UNSUPPORTED_VERSION),
        (bytes((Codec.RAW,)) + OLD[1:], LENGTH),
        (bytes((Codec.RAW,)) + OLD + b"\0", LENGTH),
        (bytes((Codec.GAPS,)), MALFORMED),
        (bytes((Codec.GAPS, 4)), MALFORMED),
        (bytes((Codec.GAPS, 3, 0)), MALFORMED),  # classes in a frame of gaps
        (bytes((Codec.GAPS, 0, 0)), MALFORMED),  # something follows
        (gaps_frame(b"\x00", b"\x00") + b"\0", MALFORMED),
        (gaps_frame(b"\x00" * 101, b"\x00" * 51), OVERSIZE),  # more gaps than items
        (gaps_frame(b"\x64", b"\x00"), MALFORMED),  # item 100 of 100
        (gaps_frame(b"\x60\x03", b"\x00"), MALFORMED),
        (gaps_frame(b"\x00\xff", b"\x00"), MALFORMED),  # ends inside a gap
        (gaps_frame(b"\xff\x00", b"\x00"), MALFORMED),
        (gaps_frame(b"\x00\x00\x00", b"\x00"), LENGTH),  # three changes, two nibbles
        (gaps_frame(b"\x00", b"\x00\x00"), OVERSIZE),
        (gaps_frame(b"\x00", b"\xf0"), LENGTH),  # a byte is missing
        (gaps_frame(b"\x00", b"\x00", wide=b"\x00"), OVERSIZE),
        (gaps_frame(b"\x00", b"\xf0", wide=b"\xff"), LENGTH),  # an escape is missing
        (gaps_frame(b"\x00", b"\xf0", wide=b"\xff", escapes=b"\x00"), LENGTH),
        (gaps_frame(b"\x00", b"\xf0", wide=b"\xff", escapes=b"\x00" * 4), OVERSIZE),
        (gaps_frame(b"\x00", b"\x00", shift=7, rests=b"\x00"), MALFORMED),  # more lower bits than items
        (gaps_frame(b"\x00", b"\x00", shift=255, rests=b"\x00" * 32), MALFORMED),
        (gaps_frame(b"\x00", b"\x00", shift=6), LENGTH),  # rests are missing
        (gaps_frame(b"\x00", b"\x00", shift=6, rests=b"\x3f\x00"), OVERSIZE),
        (gaps_frame(b"\x01", b"\x00", shift=6, rests=b"\x3f"), MALFORMED),  # 64 + 63
        (bytes((Codec.GAPS, 2)) + stored(bytes(99)) * 2, LENGTH),  # planes too short
        (bytes((Codec.GAPS, 2)) + stored(bytes(101)) * 2, OVERSIZE),
        (bytes((Codec.ANCHOR,)) + stored(bytes(100)), MALFORMED),  # a plane is missing
        (bytes((Codec.ANCHOR,)) + stored(bytes(100)) * 3, MALFORMED),
        (bytes((Codec.CLASSES, 3, 32)) + bytes(range(1, 33)), MALFORMED),  # too many classes
        (bytes((Codec.CLASSES, 3, 2, 9, 9)), MALFORMED),  # not in order
        (bytes((Codec.CLASSES, 3, 1, 0)), MALFORMED),
        (bytes((Codec.CLASSES, 3, 200, 1)), MALFORMED),
        (classes_frame([9], [1, 1], [b"\0\0"], pairs=[b"\0\0"]), MALFORMED),  # all items are zeros: class 1 has none
        (classes_frame([9], [1, 0], [b"\x64"], pairs=[b"\0"]), MALFORMED),
        (classes_frame([9], [60, 41], [bytes(101)], pairs=[bytes(51)]), OVERSIZE),  # more changes than items
        (classes_frame([9], [101, 0], [bytes(101)], pairs=[bytes(51)]), MALFORMED),
        (classes_frame([9], [1, 1], [b"\0"], pairs=[b"\0\0"]), LENGTH),  # a gap is missing
        (classes_frame([9], [1, 0], [b"\0\xff"], pairs=[b"\0"]), LENGTH),  # the last one is cut
        (classes_frame([9], [0, 0], [b"\xff"]), LENGTH),
        (classes_frame([9], [0, 0], [b"", b"", b""], ends=7), MALFORMED),  # three groups of two classes
        (classes_frame([9], [0, 0], [b""], ends=0), MALFORMED),
        (classes_frame([9], [0, 0], [b""], ends=1 << 31), MALFORMED),
        (classes_frame([9], [2, 0], [b"\0\0"], pairs=[b""]), LENGTH),
        (classes_frame([9], [2, 0], [b"\0\0"], pairs=[b"\xff"], wide=[b"\0"]), LENGTH),
    ],
)  # fmt: skip
def test_a_frame_that_does_not_hold_together_is_refused(frame: bytes, reason: ReasonCode) -> None:
    assert refused(frame) is reason


ZEROS = bytes(100)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (zstd(bytes(101)), OVERSIZE),
        (zstd(bytes(64 * MIB)), OVERSIZE),
        (zstd(bytes(99)), LENGTH),
        (zstd(ZEROS, write_content_size=0), MALFORMED),
        (zstd(ZEROS, write_checksum=1), MALFORMED),
        (coded(zstd(ZEROS)[4:] + b"\0"), MALFORMED),
        (coded(zstd(ZEROS)[4:] * 2), MALFORMED),
        (coded(zstd(ZEROS)[4:-1]), MALFORMED),
        (coded(b""), MALFORMED),
        (coded(struct.pack("<II", 0x184D2A50, 100) + ZEROS), MALFORMED),  # skippable, of a hundred bytes
        (coded(struct.pack("<II", 0x184D2A50, 0) + zstd(ZEROS)[4:]), MALFORMED),
        (coded(zstd(ZEROS)[4:8]), MALFORMED),
        (coded(zstd(ZEROS)[4:8] + b"\x21\x07\x64"), MALFORMED),  # names dictionary 7
        (coded(zstd(ZEROS)[4:8] + b"\x20\x64" + struct.pack("<I", (1 << 23 | 1))[:3] + b"\0"), MALFORMED),
        # declares 100 bytes, then one block that repeats a byte 99 times
        (coded(zstd(ZEROS)[4:8] + b"\x20\x64" + struct.pack("<I", 99 << 3 | 2 | 1)[:3] + b"\0"), MALFORMED),
        # a window of 16 MiB
        (coded(zstd(ZEROS)[4:8] + b"\x40" + bytes(((24 - 10) << 3,)) + b"\x00\x00" + bytes(3)), OVERSIZE),
        (struct.pack(">I", 0x7FFFFFFF), MALFORMED),
        (struct.pack(">I", 0xFFFFFFFF), MALFORMED),
    ],
)  # fmt: skip
def test_a_zstd_frame_that_is_not_one_whole_stream_of_the_right_size_is_refused(
    stream: bytes, reason: ReasonCode
) -> None:
    assert isinstance(decoded(bytes((Codec.ANCHOR,)) + zstd(ZEROS) + stored(ZEROS), None, 200, SEGMENTS), bytes)
    assert refused(bytes((Codec.ANCHOR,)) + stream + stored(ZEROS)) is reason


def test_a_patch_without_the_shard_it_changes_is_refused() -> None:
    frame = encoded(Codec.GAPS, OLD, b"\x01" + OLD[1:], SEGMENTS)
    assert needs_old(frame)
    assert refused(frame, old=None) is ReasonCode.RECORD_MISSING
    with pytest.raises(CodecError):
        needs_old(b"")


@pytest.fixture(scope="module")
def frames() -> list[tuple[bytes, bytes, tuple[Segment, ...]]]:
    """Frames of every codec and mode, small enough to be broken at every byte."""
    old, new = learned(4000, 2e-5, 1)
    draw = np.random.default_rng(2)
    f32 = draw.standard_normal(60).astype(np.float32)
    before, segments = shard_of([(F32, f32.tobytes()), (BF16, old), ((1, 0), bytes(300))])
    after, _ = shard_of([(F32, (f32 * np.float32(1.001)).tobytes()), (BF16, new), ((1, 0), bytes(299) + b"\x01")])
    return [(encoded(codec, before, after, segments), before, segments) for codec in Codec if codec is not Codec.RAW]


def test_a_frame_cut_anywhere_is_refused(frames: list[tuple[bytes, bytes, tuple[Segment, ...]]]) -> None:
    for frame, old, segments in frames:
        for end in [*range(0, 200), *range(200, len(frame), 53), len(frame) - 1]:
            assert isinstance(decoded(frame[:end], old, len(old), segments), ReasonCode)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4),
    st.booleans(),
)
def test_changed_bytes_are_refused_or_are_another_shard_to_both_back_ends(
    frames: list[tuple[bytes, bytes, tuple[Segment, ...]]], which: int, flips: list[tuple[float, int]], near: bool
) -> None:
    frame, old, segments = frames[which]
    changed = bytearray(frame)
    for place, bits in flips:
        changed[int(place * (64 if near else len(frame)))] ^= bits
    decoded(bytes(changed), old, len(old), segments)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Codec)), st.binary(max_size=400))
def test_any_bytes_are_refused_or_are_a_shard(codec: Codec, body: bytes) -> None:
    decoded(bytes((codec,)) + body, OLD, len(OLD), SEGMENTS)
    decoded(bytes((codec, 1)) + body, OLD, len(OLD), (Segment(40, 1), Segment(20, *F32), Segment(40, 2)))


def peak(frame: bytes, old: bytes, segments: tuple[Segment, ...]) -> int:
    tracemalloc.start()
    try:
        decoded(frame, old, len(old), segments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_shard_whatever_a_frame_says() -> None:
    items = SHARD_BYTES // 2
    segments, old = (Segment(items, *BF16),), bytes(SHARD_BYTES)
    everything = (
        bytes((Codec.GAPS, 1, 0)) + zstd(bytes(items)) + stored(b"") + zstd(b"\xff" * (items // 2))
        + zstd(b"\xff" * items) + zstd(b"\x01" * SHARD_BYTES)
    )  # fmt: skip
    assert isinstance(decoded(everything, old, len(old), segments), bytes)
    bomb = bytes((Codec.ANCHOR,)) + zstd(bytes(1024 * MIB))
    assert peak(everything, old, segments) < 12 * SHARD_BYTES
    assert peak(bomb, old, segments) < 3 * SHARD_BYTES


def test_a_switch_in_the_environment_keeps_numba_out(tmp_path: os.PathLike[str]) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from shardcast.codecs import *; from shardcast.codecs import compiled\n"
        "import numpy; assert compiled.loop('changed', numpy.dtype('u2'), 1e30) is None\n"
        "assert 'numba' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "HEADWATER_COMPILED": "0"}, check=True)
