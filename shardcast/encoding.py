"""What the origin sends for a checkpoint: which codec a publication takes, and each shard's wire bytes.

    first of its epoch, or the base is lost           anchor: every shard from nothing
    a patch is longer than half an anchor             anchor: then who skipped steps needs nothing but the newest
    else                                              patch to the publication before, shard by shard

Whether a patch pays is told from samples of both checkpoints before the publication is opened, since its open record
names the base. Within a publication `codecs.encode` sends each shard as the shortest of patch, anchor and raw.

The checkpoints published last are kept open, so that the learner may remove them: the next one is encoded against the
newest, and all are states that joiners can be served from. Every shard read from one is hashed again.

Not covered: signing and showing (`origin`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from blake3 import blake3

from protocol.limits import KIB, MIB, SHARD_BYTES
from shardcast.codecs import Codec, Segment, encode, segments_of
from shardcast.errors import LayoutError
from shardcast.layout import Canonical, Layout, shard_length
from shardcast.publication import Key

KEPT_OPEN = 4
"""Checkpoints kept open: as many as the learner keeps on disk, so that they cost no room there."""

_SAMPLES, _SAMPLE_BYTES = 16, 4 * KIB
"""Enough to tell half from twice, in a few milliseconds."""

_FIRST_SAMPLES = slice(0, _SAMPLES, 4)
_CLEAR = (0.35, 0.6)
"""Every fourth sample is looked at first. Where those say that patches take less, or more, of what anchors would, the
others are not asked: they would say the same, and looking takes a fourth of what encoding a small model does."""

HELD_BYTES = SHARD_BYTES + 1 * MIB
"""A file of at most so many bytes is read once, as a whole, while it is published."""

KEEP_STATE_EVERY = 32
"""Patches after which the origin keeps a whole state beside a publication (`states.kept_name`), as anchors that nobody
has to fetch. More, and its archive is decoded for longer to reach a policy; with more than `states.MAX_HOPS` joiners
could not be served by an origin that was restarted."""


class OpenCheckpoint:
    """A safetensors file kept open, seen in canonical order."""

    def __init__(self, key: Key, canonical: Canonical, states: Sequence[bytes] = ()) -> None:
        """
        Args:
            states: state hash of every shard, once known.

        Raises:
            OSError: the file can't be opened.
        """
        self.key = key
        self.canonical = canonical
        self.states: Sequence[bytes] = states
        self.root = b""
        self._held: memoryview | None = None
        self._fd = os.open(canonical.path, os.O_RDONLY | os.O_CLOEXEC)

    def hold(self) -> memoryview | None:
        """Read a small file once: until `let_go`, its bytes and shards come from memory. Blocking.

        Returns:
            The whole file; None where it is too long for that.
        """
        if self.canonical.size <= HELD_BYTES:
            self._held = memoryview(os.pread(self._fd, self.canonical.size + 1, 0))
        return self._held

    def let_go(self) -> None:
        self._held = None

    @property
    def nbytes(self) -> int:
        return self.canonical.layout.nbytes

    def bytes_at(self, start: int, size: int) -> bytes | memoryview:
        """Canonical bytes. Blocking. Raises LayoutError when the file ends before them."""
        if self._held is not None:
            return self.canonical.cut(self._held, start, size)
        return self.canonical.read(self._fd, start, size)

    def shard(self, index: int) -> bytes | memoryview:
        """One raw shard. Blocking. Raises LayoutError."""
        return self.bytes_at(index * SHARD_BYTES, shard_length(self.nbytes, index))

    def published(self, index: int) -> bytes | None:
        """One raw shard if it still is what was published, else None. Blocking."""
        try:
            shard = self.canonical.read(self._fd, index * SHARD_BYTES, shard_length(self.nbytes, index))
        except (LayoutError, OSError):
            return None
        return shard if blake3(shard).digest() == self.states[index] else None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OpenCheckpoints:
    """The checkpoints published last (`states.Held`)."""

    def __init__(self) -> None:
        self._kept: list[OpenCheckpoint] = []
        self._places: dict[bytes, tuple[OpenCheckpoint, int]] = {}

    @property
    def newest(self) -> OpenCheckpoint | None:
        return self._kept[-1] if self._kept else None

    def add(self, checkpoint: OpenCheckpoint) -> None:
        """One was published, with these states."""
        self._kept.append(checkpoint)
        while len(self._kept) > KEPT_OPEN:
            self._kept.pop(0).close()
        self._places = {state: (one, i) for one in self._kept for i, state in enumerate(one.states)}

    def has(self, state: bytes) -> bool:
        return state in self._places

    def read(self, state: bytes) -> bytes | None:
        place = self._places.get(state)
        return place[0].published(place[1]) if place is not None else None

    def close(self) -> None:
        for one in self._kept:
            one.close()
        self._kept, self._places = [], {}


def patch_pays(
    old: OpenCheckpoint,
    new: OpenCheckpoint,
    codec: Codec,
    segments: Callable[[int], Sequence[Segment]] | None = None,
) -> bool:
    """Whether patches of this codec take at most half of what anchors would, by samples. Blocking.

    Args:
        segments: of each shard, where they are known already.

    Raises:
        LayoutError, OSError: a file can't be read.
    """
    layout = new.canonical.layout
    samples = _samples(layout, segments or (lambda index: segments_of(layout, index)))
    patch, anchor = _lengths(old, new, codec, samples[_FIRST_SAMPLES])
    if _CLEAR[0] * anchor <= patch <= _CLEAR[1] * anchor:
        patch, anchor = _lengths(old, new, codec, samples)
    return 2 * patch <= anchor


def _lengths(
    old: OpenCheckpoint, new: OpenCheckpoint, codec: Codec, samples: Sequence[tuple[int, Segment]]
) -> tuple[int, int]:
    """Bytes of these samples as patches, and as anchors."""
    kinds: dict[tuple[int, int], tuple[bytearray, bytearray]] = {}
    for start, segment in samples:
        both = kinds.setdefault((segment.width, segment.mantissa), (bytearray(), bytearray()))
        for one, into in zip((old, new), both, strict=True):
            into += one.bytes_at(start, segment.nbytes)
    patch = anchor = 0
    for (width, mantissa), (before, after) in kinds.items():
        segments = (Segment(len(after) // width, width, mantissa),)
        patch += len(encode(codec, before, after, segments))
        anchor += len(encode(Codec.ANCHOR, None, after, segments))
    return patch, anchor


def _samples(layout: Layout, segments: Callable[[int], Sequence[Segment]]) -> list[tuple[int, Segment]]:
    """Places in the canonical data, each inside one segment."""
    found = []
    for number in range(_SAMPLES):
        place = number * layout.nbytes // _SAMPLES
        index = place // SHARD_BYTES
        low = index * SHARD_BYTES
        for segment in segments(index):
            high = low + segment.nbytes
            if high > place:
                start = max(low, place - (place - low) % segment.width)
                items = min(_SAMPLE_BYTES, high - start, max(8, layout.nbytes // _SAMPLES)) // segment.width
                found.append((start, Segment(items, segment.width, segment.mantissa)))
                break
            low = high
    return found


def wire_bytes(
    codec: Codec, old: bytes | None, new: bytes | memoryview, segments: Sequence[Segment]
) -> bytes | memoryview:
    """What travels for one shard.

    Args:
        old: the shard before; None if there is none, or it is damaged: then a patch's frame is an anchor.
    """
    if codec is Codec.RAW:
        return new
    return encode(Codec.ANCHOR if old is None else codec, old, new, segments)
