"""Streams of bytes inside a frame: stored, or one zstd frame, whichever is shorter.

    stream   u32: length of the body, the highest bit set if it is coded | body

A coded body is one zstd frame (RFC 8878) that declares its content's size, without dictionary or checksum: what it
decodes to is hashed anyway. python-zstandard believes a frame's declared size whatever `max_output_size` says, so the
declared size is compared with what the place allows before anything is decoded.

Not covered: what a stream means (`gaps`, `classes`, `planes`).
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import zstandard

from protocol.errors import ReasonCode
from protocol.limits import MIB
from shardcast.errors import CodecError

U8 = npt.NDArray[np.uint8]

MAX_WINDOW_BYTES = 8 * MIB
"""What a decoder may have to remember (RULES 8). No stream is longer."""

_CODED = 1 << 31
_MAGIC = struct.pack("<I", 0xFD2FB528)
_LEAST_CODED = 16
"""Shorter streams are stored: a zstd frame alone takes 9 bytes and more."""

_BARE = {"write_content_size": 1, "write_checksum": 0, "write_dict_id": 0}
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7, **_BARE)
"""Finds few repetitions: little but zstd's Huffman coder. What is coded here has no repetitions that are worth a
search; levels 1 to 9 find some, which makes it longer and slower."""


class Writer:
    """A frame in the making."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)

    def put(self, *values: int) -> None:
        """Single bytes."""
        self._parts.append(bytes(values))

    def stream(self, body: U8) -> None:
        """A stream, coded if that is shorter."""
        if len(body) >= _LEAST_CODED:
            coded = self._huffman.compress(body.data)
            if len(coded) < len(body):
                self._parts.append(struct.pack(">I", len(coded) | _CODED))
                self._parts.append(coded)
                return
        self.stored(body)

    def stored(self, body: U8) -> None:
        """A stream as it is."""
        self._parts.append(struct.pack(">I", len(body)))
        self._parts.append(np.ascontiguousarray(body).data)

    def shrinks(self, body: U8) -> bool:
        """Whether coding is worth a try: samples of an incompressible plane say so at a hundredth of its cost."""
        piece, pieces = 4096, 8
        if len(body) <= piece * pieces:
            return True
        step = len(body) // pieces
        sample = np.concatenate([body[at * step : at * step + piece] for at in range(pieces)])
        return len(self._huffman.compress(sample.data)) < 0.98 * len(sample)

    def frame(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


class Reader:
    """A frame being read. Total: raises only CodecError."""

    def __init__(self, wire: memoryview) -> None:
        self._wire = wire
        self._at = 0
        self._decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)

    def take(self, count: int = 1) -> memoryview:
        """The next `count` bytes."""
        if len(self._wire) - self._at < count:
            raise CodecError("the frame ends inside a field")
        piece = self._wire[self._at : self._at + count]
        self._at += count
        return piece

    def byte(self) -> int:
        return self.take()[0]

    def stream(self, most: int) -> U8:
        """A stream of at most `most` bytes once decoded."""
        (head,) = struct.unpack(">I", self.take(4))
        body = self.take(head & ~_CODED)
        if not head & _CODED:
            if len(body) > most:
                raise CodecError(f"a stream of {len(body)} bytes where {most} fit", ReasonCode.OVERSIZE)
            return np.frombuffer(body, dtype=np.uint8)
        return np.frombuffer(self._decode(body, most), dtype=np.uint8)

    def exactly(self, count: int) -> U8:
        """A stream of `count` bytes once decoded."""
        found = self.stream(count)
        if len(found) != count:
            raise CodecError(f"a stream of {len(found)} bytes instead of {count}", ReasonCode.LENGTH_MISMATCH)
        return found

    def end(self) -> None:
        """Raise CodecError unless everything was read."""
        if self._at != len(self._wire):
            raise CodecError(f"{len(self._wire) - self._at} bytes follow the frame")

    def _decode(self, body: memoryview, most: int) -> bytes:
        if body[:4] != _MAGIC:  # a skippable frame passes for one with content
            raise CodecError("a coded stream is no zstd frame")
        try:
            declared = zstandard.get_frame_parameters(body)
        except zstandard.ZstdError as exc:
            raise CodecError(f"a coded stream is no zstd frame ({exc})") from exc
        if declared.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            raise CodecError("a zstd frame does not declare its size")
        if declared.content_size > most or declared.window_size > MAX_WINDOW_BYTES:
            raise CodecError(
                f"a zstd frame of {declared.content_size} bytes, window {declared.window_size}, where {most} fit",
                ReasonCode.OVERSIZE,
            )
        if declared.dict_id or declared.has_checksum:
            raise CodecError("a zstd frame with a dictionary or a checksum")
        try:
            found: bytes = self._decoder.decompress(body, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as exc:
            raise CodecError(f"a zstd frame does not decode ({exc})") from exc
        if len(found) != declared.content_size:
            raise CodecError("a zstd frame is not as long as it declares", ReasonCode.LENGTH_MISMATCH)
        return found
