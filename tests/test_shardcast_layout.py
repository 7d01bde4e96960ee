"""The canonical layout: same root for the same weights, and a total reader of weights files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from protocol.errors import DecodeError
from protocol.limits import SHARD_BYTES
from shardcast.errors import LayoutError
from shardcast.layout import (
    Layout,
    TensorSpec,
    decode_layout,
    encode_layout,
    layout_hash,
    layout_of_safetensors,
    make_layout,
    open_safetensors,
    root_of_safetensors,
    root_of_states,
    safetensors_header,
    states_of_safetensors,
)
from tests.shardcast_run import WIDE_SHAPES, weights


def write_raw(path: Path, tensors: list[tuple[str, str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file with its tensors in the order given."""
    table, data = {}, b""
    for name, dtype, shape, raw in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_canonical_data_is_the_data_region_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(WIDE_SHAPES, 1), path)
    canonical = open_safetensors(path)
    assert [spec.name for spec in canonical.layout.tensors] == sorted(WIDE_SHAPES)
    raw = path.read_bytes()
    data = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    states = [blake3(data[at : at + SHARD_BYTES]).digest() for at in range(0, len(data), SHARD_BYTES)]
    assert len(states) == canonical.layout.shards == 3
    assert states_of_safetensors(path) == states
    assert root_of_safetensors(path) == root_of_states(states)


def test_root_does_not_depend_on_the_order_in_the_file(tmp_path: Path) -> None:
    a, b = b"\1\2\3\4" * 5, b"\5\6" * 3
    write_raw(tmp_path / "one", [("a", "F32", (5,), a), ("b", "BF16", (3,), b)])
    write_raw(tmp_path / "two", [("b", "BF16", (3,), b), ("a", "F32", (5,), a)])
    assert layout_of_safetensors(tmp_path / "one") == layout_of_safetensors(tmp_path / "two")
    assert root_of_safetensors(tmp_path / "one") == root_of_safetensors(tmp_path / "two")
    assert root_of_safetensors(tmp_path / "one") == root_of_states([blake3(a + b).digest()])


def test_wide_tensors_come_first_so_that_all_stay_aligned(tmp_path: Path) -> None:
    layout = make_layout({"a": ("BF16", (3,)), "b": ("F32", (2,)), "c": ("I64", (1,))})
    assert [(spec.name, spec.offset) for spec in layout.tensors] == [("c", 0), ("b", 8), ("a", 16)]
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_header(layout) + bytes(layout.nbytes - 6) + np.arange(3, dtype=np.uint16).tobytes())
    assert layout_of_safetensors(path) == layout


def test_header_opens_with_safetensors_itself(tmp_path: Path) -> None:
    tensors = weights({"b": (3, 2), "a": (4,), "empty": (0, 7)}, 3)
    save_file(tensors, tmp_path / "from")
    canonical = open_safetensors(tmp_path / "from")
    with (tmp_path / "from").open("rb") as file:
        data = canonical.read(file.fileno(), 0, canonical.layout.nbytes)
    (tmp_path / "to").write_bytes(safetensors_header(canonical.layout) + data)
    loaded = load_file(tmp_path / "to")
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


def test_layout_survives_its_bytes_and_refuses_tables_that_are_not_canonical() -> None:
    layout = make_layout({name: ("F32", shape) for name, shape in WIDE_SHAPES.items()})
    assert decode_layout(encode_layout(layout)) == layout
    assert layout_hash(layout) == blake3(encode_layout(layout)).digest()
    first, *rest = layout.tensors
    wrong = [
        Layout(tuple(reversed(layout.tensors))),
        Layout((first, first, *rest)),
        Layout((TensorSpec(first.name, "F32", first.shape, 4, first.nbytes), *rest)),
        Layout((TensorSpec(first.name, "F32", first.shape, 0, first.nbytes - 4), *rest)),
        Layout((TensorSpec(first.name, "Q4", first.shape, 0, first.nbytes), *rest)),
        Layout(()),
    ]
    for table in wrong:
        with pytest.raises(LayoutError):
            decode_layout(encode_layout(table))


def test_layout_hash_vector() -> None:
    """Guards the format: this value is in the specification."""
    layout = make_layout({"b": ("BF16", (2, 3)), "a": ("F32", (4,))})
    assert encode_layout(layout).hex() == "9192" + "95a161a34633329104" + "0010" + "95a162a442463136920203" + "100c"
    assert layout_hash(layout) == blake3(encode_layout(layout)).digest()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_as_weights_with_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text)
    with pytest.raises((LayoutError, DecodeError)):
        open_safetensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": 7, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]},
        {"shape": [2]},
        [],
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(LayoutError):
        open_safetensors(path)


def test_a_file_like_one_opened_before_is_not_parsed_again_and_any_other_is(tmp_path: Path) -> None:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(8))
        return tmp_path / name

    text = '{"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    first = open_safetensors(written("first", text))
    same = open_safetensors(written("same", text), first)
    assert same.layout is first.layout and same.path == tmp_path / "same"
    other = open_safetensors(written("other", text.replace('"v"', '"w"')), first)
    assert [spec.name for spec in other.layout.tensors] == ["w"]
    short = written("short", text)
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(LayoutError):
        open_safetensors(short, first)


def test_what_is_no_file_and_a_name_that_is_no_text_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="no regular file"):
        open_safetensors(tmp_path / "fifo")
    text = rb'{"\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "half").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(LayoutError):
        open_safetensors(tmp_path / "half")
