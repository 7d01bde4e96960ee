"""The canonical layout of weights: which bytes a root is over.

Tensors are ordered by item size, largest first, then by name: for weights of one dtype that is name order, and with
several dtypes every tensor stays aligned, so that a safetensors file can be mapped without copies. The canonical
data is their concatenation: exactly the data region of a safetensors file written in that order. The layout table
is a record whose BLAKE3 the run's manifest names; it travels as a blob.

A safetensors file written in another order is read through `Canonical`, which maps canonical ranges to file ranges.

Not covered: values. Nothing here knows what a float is beyond its size.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from blake3 import blake3

from protocol import codec
from protocol.codec import Seq, Sub, Text, UInt, record
from protocol.errors import DecodeError, ReasonCode
from protocol.files import open_regular
from protocol.limits import MAX_LAYOUT_BYTES, MAX_TENSORS, SHARD_BYTES
from protocol.merkle import leaf_hash, root_of
from protocol.records import U64, Word
from shardcast.errors import LayoutError, UnfinishedFileError
from shardcast.limits import MAX_STATE_HASHES

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""safetensors' dtype names. A dtype missing here is refused rather than guessed."""


@record(8 * 1024)
@dataclass(frozen=True)
class TensorSpec:
    name: Annotated[str, Text(1024)]
    dtype: Word
    """safetensors' name, e.g. `F32`, `BF16`."""
    shape: Annotated[tuple[int, ...], Seq(UInt(64), 16)]
    offset: U64
    """Of the first byte in the canonical data."""
    nbytes: U64


@record(MAX_LAYOUT_BYTES)
@dataclass(frozen=True)
class Layout:
    tensors: Annotated[tuple[TensorSpec, ...], Seq(Sub(TensorSpec), MAX_TENSORS)]

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical data."""
        return self.tensors[-1].offset + self.tensors[-1].nbytes if self.tensors else 0

    @property
    def shards(self) -> int:
        """Number of shards of at most 8 MiB."""
        return -(-self.nbytes // SHARD_BYTES)


def shard_length(total: int, index: int) -> int:
    """Raw bytes of shard `index` of data of `total` bytes."""
    return min(SHARD_BYTES, total - index * SHARD_BYTES)


def _order(name: str, dtype: str) -> tuple[int, str]:
    return (-ITEM_BYTES[dtype], name)


def make_layout(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """Lay out tensors given as name -> (dtype, shape).

    Raises:
        LayoutError: an unknown dtype, no tensors, or more bytes than a publication can hold.
    """
    specs = []
    offset = 0
    for name, (dtype, _) in tensors.items():
        if dtype not in ITEM_BYTES:
            raise LayoutError(
                f"tensor {name!r} has dtype {dtype!r}, which cannot be published; store it as F32 or BF16"
            )
    for name in sorted(tensors, key=lambda n: _order(n, tensors[n][0])):
        dtype, shape = tensors[name]
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        offset += nbytes
    layout = Layout(tuple(specs))
    check_layout(layout)
    return layout


def check_layout(layout: Layout) -> None:
    """Raise LayoutError unless the table is canonical: ordered, gapless, sizes right, within bounds."""
    offset = 0
    last: tuple[int, str] | None = None
    for spec in layout.tensors:
        if spec.dtype not in ITEM_BYTES:
            raise LayoutError(f"layout names the unknown dtype {spec.dtype!r}")
        order = _order(spec.name, spec.dtype)
        if last is not None and order <= last:
            raise LayoutError("the layout's tensors are not in canonical order")
        last = order
        if spec.offset != offset or spec.nbytes != math.prod(spec.shape) * ITEM_BYTES[spec.dtype]:
            raise LayoutError(f"tensor {spec.name!r} of the layout has a wrong offset or size")
        offset += spec.nbytes
    if not 0 < offset <= MAX_STATE_HASHES * SHARD_BYTES:
        raise LayoutError(f"a layout of {offset} bytes; between 1 byte and {MAX_STATE_HASHES} shards can be published")


def encode_layout(layout: Layout) -> bytes:
    """The bytes that travel; their BLAKE3 is `layout_hash`."""
    return codec.encode(layout)


def decode_layout(raw: bytes) -> Layout:
    """Parse and check layout bytes.

    Raises:
        DecodeError: no layout record.
        LayoutError: a table that is not canonical.
    """
    layout = codec.decode(Layout, raw)
    check_layout(layout)
    return layout


def layout_hash(layout: Layout) -> bytes:
    """BLAKE3 of the layout's bytes, 32 bytes; `ModelSpec.layout` of the run's manifest."""
    return blake3(encode_layout(layout)).digest()


def safetensors_header(layout: Layout) -> bytes:
    """The header of a safetensors file whose data region is the canonical data. Padded to a multiple of 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec in layout.tensors:
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, spec.offset + spec.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Canonical:
    """A safetensors file seen in canonical order."""

    path: Path
    layout: Layout
    segments: tuple[tuple[int, int, int], ...]
    """(canonical offset, file offset, bytes), coalesced; one segment when the file is in canonical order."""
    size: int
    """Of the file."""
    header: bytes
    """The file's, without its length."""

    def read(self, fd: int, start: int, size: int) -> bytes:
        """`size` canonical bytes from `start`.

        Raises:
            LayoutError: the file is shorter than its header says.
        """
        parts = []
        for canonical, at, length in self.segments:
            low, high = max(start, canonical), min(start + size, canonical + length)
            while low < high:
                piece = os.pread(fd, high - low, at + low - canonical)
                if not piece:
                    raise LayoutError(f"{self.path} ends before its last tensor; write it again")
                parts.append(piece)
                low += len(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cut(self, file: memoryview, start: int, size: int) -> bytes | memoryview:
        """As `read`, from the whole file in memory; no copy where the bytes lie in one piece."""
        parts = []
        for canonical, at, length in self.segments:
            low, high = max(start, canonical), min(start + size, canonical + length)
            if low < high:
                parts.append(file[at + low - canonical : at + high - canonical])
                if len(parts[-1]) < high - low:
                    raise LayoutError(f"{self.path} ends before its last tensor; write it again")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def open_safetensors(path: Path, like: Canonical | None = None) -> Canonical:
    """Read the header of a safetensors file.

    Args:
        like: a file opened before. One of the same size with the same header has the same layout, the same object; a
            run's checkpoints are all so, and parsing a header takes longer than reading a small file.

    Raises:
        UnfinishedFileError: not a safetensors file, or the beginning of one.
        LayoutError: one that cannot be published, whatever else is written to it.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_LAYOUT_BYTES, size - 8):
            raise UnfinishedFileError(f"{path} is no safetensors file (its header length does not fit)")
        text = file.read(length)
    if like is not None and (size, text) == (like.size, like.header):
        return replace(like, path=path)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UnfinishedFileError(f"{path} is no safetensors file (its header is no JSON)") from exc
    if type(table) is not dict or len(table) > MAX_TENSORS:
        raise LayoutError(f"{path}: the header is no table of tensors")
    table.pop("__metadata__", None)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, entry in table.items():
        try:
            name.encode()  # JSON can write half a character, which is no text
            shape = tuple(UInt(48).read(n, name) for n in entry["shape"])
            low, high = (UInt(63).read(n, name) for n in entry["data_offsets"])
            tensors[name] = (Text(64).read(entry["dtype"], name), shape)
        except (KeyError, TypeError, ValueError, DecodeError) as exc:
            raise LayoutError(f"{path}: the header's entry for {name!r} is malformed") from exc
        places[name] = (low, high)
    layout = make_layout(tensors)
    segments: list[tuple[int, int, int]] = []
    for spec in layout.tensors:
        low, high = places[spec.name]
        if high - low != spec.nbytes or 8 + length + high > size:
            raise UnfinishedFileError(
                f"{path}: tensor {spec.name!r} does not lie inside the file; it was cut or is malformed"
            )
        at = 8 + length + low
        if segments and sum(segments[-1][1:]) == at:
            segments[-1] = (segments[-1][0], segments[-1][1], segments[-1][2] + spec.nbytes)
        elif spec.nbytes:
            segments.append((spec.offset, at, spec.nbytes))
    return Canonical(path, layout, tuple(segments), size, text)


def layout_of_safetensors(path: Path) -> Layout:
    """The canonical layout of a safetensors file. Raises as `open_safetensors`."""
    return open_safetensors(path).layout


def root_of_states(states: list[bytes]) -> bytes:
    """The root over state hashes (BLAKE3 of each raw shard), 32 bytes."""
    return root_of([leaf_hash(state) for state in states])


def states_of_safetensors(path: Path) -> list[bytes]:
    """BLAKE3 of every raw shard of a weights file, in order. Raises as `open_safetensors`."""
    canonical = open_safetensors(path)
    total = canonical.layout.nbytes
    fd = os.open(path, os.O_RDONLY)
    try:
        return [
            blake3(canonical.read(fd, index * SHARD_BYTES, shard_length(total, index))).digest()
            for index in range(canonical.layout.shards)
        ]
    finally:
        os.close(fd)


def root_of_safetensors(path: Path) -> bytes:
    """The root a weights file will be published under, 32 bytes. Raises as `open_safetensors`."""
    return root_of_states(states_of_safetensors(path))


def require_layout(layout: Layout, expected: bytes, what: str) -> None:
    """Raise LayoutError(`hash-mismatch`) unless `layout` is the one the run's manifest names."""
    if layout_hash(layout) != expected:
        raise LayoutError(
            f"{what} has other tensors, shapes or dtypes than the run's manifest names; "
            "the trainer must store the model the run was opened with",
            ReasonCode.HASH_MISMATCH,
        )
