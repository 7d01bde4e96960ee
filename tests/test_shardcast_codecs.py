"""Frames of `shardcast.codecs`: every shard comes back bit by bit, by numpy and compiled, and the frames are equal."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.limits import MIB, SHARD_BYTES
from shardcast.codecs import Codec, Segment, compiled, decode, encode, kernels, needs_old, segments_of
from shardcast.codecs.segments import total_bytes
from shardcast.layout import make_layout, shard_length
from tests.codec_shards import (
    BACK_ENDS,
    BF16,
    CHANGES,
    F16,
    F32,
    F64,
    KINDS,
    bf16,
    decoded,
    encoded,
    learned,
    shard_of,
    using,
)

CODECS = tuple(Codec)
ROOT = Path(__file__).resolve().parent.parent

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def comes_back(codec: Codec, old: bytes, new: bytes, segments: tuple[Segment, ...]) -> bytes:
    frame = encoded(codec, old, new, segments)
    assert len(frame) <= len(new) + 1
    assert decoded(frame, old if needs_old(frame) else None, len(new), segments) == new
    return frame


@quick
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 700), st.sampled_from(sorted(CHANGES))), max_size=4),
    st.sampled_from(CODECS),
    st.integers(0, 2**32),
)
def test_any_shard_comes_back(parts: list[tuple[tuple[int, int], int, str]], codec: Codec, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sides: tuple[list[tuple[tuple[int, int], bytes]], ...] = ([], [])
    for kind, items, how in parts:
        old_N = np.frombuffer(draw.bytes(items * kind[0]), dtype=f"<u{kind[0]}")
        sides[0].append((kind, old_N.tobytes()))
        sides[1].append((kind, CHANGES[how](draw, old_N).astype(old_N.dtype).tobytes()))
    (old, segments), (new, _) = shard_of(sides[0]), shard_of(sides[1])
    comes_back(codec, old, new, segments)


@quick
@given(st.integers(1, 40_000), st.sampled_from([1e-6, 3e-5, 1e-3, 1e-1]), st.sampled_from(CODECS), st.integers(0, 99))
def test_a_step_of_an_optimiser_comes_back(items: int, rate: float, codec: Codec, seed: int) -> None:
    old, new = learned(items, rate, seed)
    comes_back(codec, old, new, (Segment(items, *BF16),))


SPECIAL = {
    BF16: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80],
    F16: [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00],
    F32: [
        0,
        1 << 31,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        1,
        0x80000001,
        0x007FFFFF,
        0x3F800000,
    ],
    F64: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, 2**64 - 1, 1, (1 << 63) + 1, 0x3FF << 52],
    (1, 0): [0, 0x80, 0x7F, 0xFF, 1, 0x81, 0x7E, 0x7C, 0xFC],
}
"""Zeros, infinities, quiet and signalling NaNs with payloads, denormals, one: as bits."""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", SPECIAL, ids=str)
def test_every_special_value_turns_into_every_other(kind: tuple[int, int], codec: Codec) -> None:
    values = np.array(SPECIAL[kind], dtype=f"<u{kind[0]}")
    old, new = np.repeat(values, len(values)).tobytes(), np.tile(values, len(values)).tobytes()
    comes_back(codec, old, new, (Segment(len(values) ** 2, *kind),))


@pytest.mark.parametrize("codec", CODECS)
def test_dtypes_lie_beside_each_other_at_odd_places(codec: Codec) -> None:
    old, new = learned(3001, 1e-4, 1)
    draw = np.random.default_rng(2)
    f32, fp8 = draw.standard_normal(777).astype(np.float32), draw.bytes(501)
    moved = (f32 + np.float32(1e-5)).tobytes()
    before, segments = shard_of([(F32, f32.tobytes()), (BF16, old), ((1, 0), fp8), (BF16, old), ((1, 0), b"\x07")])
    after, _ = shard_of(
        [(F32, moved), (BF16, new), ((1, 0), bytes(fp8[:250]) + b"\0" + fp8[251:]), (BF16, new), ((1, 0), b"\x08")]
    )
    frame = comes_back(codec, before, after, segments)
    if codec in (Codec.GAPS, Codec.CLASSES):
        assert len(frame) < len(after) / 2
    shifted = memoryview(b"x" + before)[1:], memoryview(b"x" + after)[1:]  # no number lies where numbers do
    for back_end in BACK_ENDS:
        with using(back_end):
            assert encode(codec, *shifted, segments) == frame
            out = bytearray(len(after) + 1)
            decode(memoryview(b"x" + frame)[1:], shifted[0], memoryview(out)[1:], segments)
            assert bytes(out[1:]) == after


@pytest.mark.parametrize("codec", CODECS)
def test_an_empty_shard_and_empty_tensors_come_back(codec: Codec) -> None:
    assert comes_back(codec, b"", b"", ()) == comes_back(codec, b"", b"", (Segment(0, 2, 7), Segment(0, 1)))


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_a_patch_is_a_small_part_of_the_shard_and_classes_shorten_it() -> None:
    old, new = learned(1 << 20, 1e-7, 3)
    sizes = {codec: len(encoded(codec, old, new, (Segment(1 << 20, *BF16),))) / len(new) for codec in CODECS}
    assert sizes[Codec.RAW] > 1
    assert sizes[Codec.ANCHOR] < 0.7
    assert sizes[Codec.GAPS] < 0.005
    assert sizes[Codec.CLASSES] < 0.8 * sizes[Codec.GAPS]


def test_the_shortest_frame_is_sent() -> None:
    segments = (Segment(50_000, *BF16),)
    draw = np.random.default_rng(4)
    weights, others = bf16(draw.standard_normal(50_000)), bf16(draw.standard_normal(50_000))
    assert encoded(Codec.GAPS, weights, weights, segments) == bytes((Codec.GAPS, 0))
    assert encoded(Codec.GAPS, weights, others, segments)[0] == Codec.ANCHOR
    noise = draw.bytes(100_000)
    assert encoded(Codec.GAPS, weights, noise, segments) == bytes((Codec.RAW,)) + noise
    assert encoded(Codec.ANCHOR, None, noise, segments) == bytes((Codec.RAW,)) + noise


def test_float32_weights_that_all_change_cost_less_than_whole() -> None:
    draw = np.random.default_rng(5)
    old = (0.02 * draw.standard_normal(100_000)).astype(np.float32)
    new = old + (1e-6 * draw.standard_normal(100_000)).astype(np.float32)
    segments = (Segment(100_000, *F32),)
    assert len(comes_back(Codec.GAPS, old.tobytes(), new.tobytes(), segments)) < 0.5 * old.nbytes
    assert len(comes_back(Codec.ANCHOR, old.tobytes(), new.tobytes(), segments)) < 0.9 * old.nbytes


def test_shards_are_coded_in_threads() -> None:
    shards = [learned(60_000, 1e-4, seed) for seed in range(12)]
    segments = (Segment(60_000, *BF16),)

    def there_and_back(pair: tuple[bytes, bytes]) -> bytes:
        frame = encode(Codec.CLASSES, *pair, segments)
        out = bytearray(len(pair[1]))
        decode(frame, pair[0], out, segments)
        assert bytes(out) == pair[1]
        return frame

    for back_end in BACK_ENDS:
        with using(back_end), ThreadPoolExecutor(4) as pool:
            assert list(pool.map(there_and_back, shards)) == [there_and_back(pair) for pair in shards]


def test_what_does_not_fit_together_is_the_callers_fault() -> None:
    segments = (Segment(2, *BF16),)
    for old, new in ((b"1234", b"123"), (b"123", b"1234"), (None, b"1234")):
        with pytest.raises(ValueError):
            encode(Codec.GAPS, old, new, segments)
    with pytest.raises(ValueError):
        decode(encode(Codec.GAPS, b"1234", b"1234", segments), b"1234", bytearray(3), segments)
    for items, width, mantissa in ((-1, 2, 7), (1, 3, 0), (1, 2, 23), (1, 1, 7)):
        with pytest.raises(ValueError):
            Segment(items, width, mantissa)


# --- segments --------------------------------------------------------------------------------------------------------


def test_segments_of_a_layout_of_many_dtypes() -> None:
    layout = make_layout(
        {
            "a": ("F64", (3,)), "b": ("F32", (5, 7)), "c": ("BF16", (SHARD_BYTES // 2 + 5,)), "d": ("BF16", (0, 9)),
            "e": ("I16", (3,)), "f": ("F16", (2,)), "g": ("BF16", (1,)), "h": ("U8", (9,)), "i": ("F8_E4M3", (4,)),
        }
    )  # fmt: skip
    first, second = segments_of(layout, 0), segments_of(layout, 1)
    assert first == (Segment(3, 8, 52), Segment(35, 4, 23), Segment(SHARD_BYTES // 2 - 12 - 70, 2, 7))
    assert second == (
        Segment(87, 2, 7), Segment(3, 2), Segment(2, 2, 10), Segment(1, 2, 7), Segment(13, 1),
    )  # fmt: skip
    assert [total_bytes(one) for one in (first, second)] == [shard_length(layout.nbytes, i) for i in range(2)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["F64", "F32", "BF16", "F16", "I16", "U8"]), st.integers(0, 3 * MIB)), max_size=7
    )
)
def test_segments_are_as_long_as_their_shard(tensors: list[tuple[str, int]]) -> None:
    layout = make_layout({"first": ("U8", (1,)), **{f"t{i}": (d, (n,)) for i, (d, n) in enumerate(tensors)}})
    for index in range(layout.shards):
        segments = segments_of(layout, index)
        assert total_bytes(segments) == shard_length(layout.nbytes, index)
        assert all(segment.items for segment in segments)
        assert len(segments) <= 6 + 7  # one for each kind, or tensor


# --- when loops are compiled -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has coded nothing yet."""
    for name, value in (("_off", False), ("_spent_ns", 0.0), ("_ready", {})):
        monkeypatch.setattr(compiled, name, value)
    return monkeypatch


def test_nothing_is_compiled_before_it_pays(fresh: pytest.MonkeyPatch) -> None:
    old, new = learned(300_000, 1e-5, 6)
    for _ in range(100):  # what the demo's model sends in a hundred steps
        frame = encode(Codec.GAPS, old, new, (Segment(300_000, *BF16),))
    assert not compiled._ready
    fresh.setattr(compiled, "_spent_ns", compiled.PAYS_FROM_NS)
    assert encode(Codec.GAPS, old, new, (Segment(300_000, *BF16),)) == frame
    assert set(compiled._ready) == {("changed", "uint16"), ("values_of", "uint16"), ("pack", "uint32")}


def test_who_only_receives_patches_and_anchors_compiles_nothing(fresh: pytest.MonkeyPatch) -> None:
    old, new = learned(300_000, 1e-4, 6)
    segments = (Segment(300_000, *BF16),)
    with using("numpy"):
        patch, anchor, by_class = (encode(c, old, new, segments) for c in (Codec.GAPS, Codec.ANCHOR, Codec.CLASSES))
    out = bytearray(len(new))
    fresh.setattr(compiled, "PAYS_FROM_NS", 1.0)
    for frame in (patch, anchor):
        decode(frame, old, out, segments)
    assert not compiled._ready
    decode(by_class, old, out, segments)
    assert ("class_places", "uint16") in compiled._ready


def test_a_machine_without_numba_says_so_once_and_leaves_it_to_numpy(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = learned(3000, 1e-4, 7)
    segments = (Segment(3000, *BF16),)
    frame = encoded(Codec.CLASSES, old, new, segments)
    fresh.setattr(compiled, "_ready", {})
    fresh.setattr(compiled, "_spent_ns", compiled.PAYS_FROM_NS)
    fresh.setitem(sys.modules, "shardcast.codecs.kernels", None)
    fresh.delattr("shardcast.codecs.kernels")
    assert encode(Codec.CLASSES, old, new, segments) == frame
    assert [record.name for record in caplog.records] == ["shardcast.compiled"]


def test_a_loop_that_cannot_be_compiled_ends_no_encoding(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = learned(3000, 1e-4, 7)
    segments = (Segment(3000, *BF16),)
    frame = encoded(Codec.CLASSES, old, new, segments)
    fresh.setattr(compiled, "_ready", {})
    fresh.setattr(compiled, "_spent_ns", compiled.PAYS_FROM_NS)
    fresh.setitem(
        kernels._LOOPS, "pack", (kernels.pack, lambda _width: lambda a, b, c, d: a.no, kernels._LOOPS["pack"][2])
    )
    assert encode(Codec.CLASSES, old, new, segments) == frame
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["pack is not compiled here"]


# --- the specification -----------------------------------------------------------------------------------------------


def test_the_vectors_of_the_specification() -> None:
    part = (ROOT / "docs" / "protocol.md").read_text().split("## Codecs")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| (raw|anchor|gaps|classes) \| ([^|]*) \| `([0-9a-f]*)` \| `([0-9a-f]*)` \| `([0-9a-f]+)` \|", part, re.M
    )
    assert {name for name, *_ in rows} == {"raw", "anchor", "gaps", "classes"}
    for _, kinds, old, new, frame in rows:
        segments = tuple(Segment(*(int(n) for n in kind.split("/"))) for kind in kinds.split())
        assert decoded(bytes.fromhex(frame), bytes.fromhex(old), len(new) // 2, segments) == bytes.fromhex(new)
