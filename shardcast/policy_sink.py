"""A puller's download: shards decoded as they arrive, into the weights file of a hidden directory.

A policy that is on disk is what a publication's frames change; with an older one, or none, the state itself is asked
for (`asks`). Each shard is decoded into memory of its own and hashed before it is written. The file has no header until
all of them are there, so nothing can load it before.

Memory: the old and the new bytes of one shard (`states.working`), beside what arrived.
Not covered: which policies there are (`puller`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from protocol.errors import ReasonCode
from protocol.limits import SHARD_BYTES
from shardcast.asks import Ask
from shardcast.codecs import Segment, decode, needs_old
from shardcast.download import hash_region, preallocate, write_region
from shardcast.errors import CodecError, PublicationError, StoreError, WrongBodyError
from shardcast.limits import WIRE_SLACK_BYTES
from shardcast.publication import Key, Publication
from shardcast.records import NO_HASH, ShardRecord
from shardcast.states import Segments, is_frame, working
from shardcast.store import remove_folder

WEIGHTS_NAME = "model.safetensors"


def shard_ask(key: Key, record: ShardRecord) -> Ask:
    """The publication's own wire shard."""
    path = f"p/{key[0]}-{key[1]}/shard/{record.index}"
    return Ask(record.index, path, record.wire_bytes, record.wire_bytes, record.wire_hash)


def state_asks(key: Key, record: ShardRecord, old: bytes) -> list[Ask]:
    """The state after the publication: as a patch to the shard of this hash if there is one (`NO_HASH`: none), else
    alone."""
    path, limit = f"p/{key[0]}-{key[1]}/state/{record.index}", record.raw_bytes + WIRE_SLACK_BYTES
    alone = Ask(record.index, path, limit, None, None, by_name=True)
    if old == NO_HASH:
        return [alone]
    return [Ask(record.index, f"{path}?old={old.hex()}", limit, None, None, by_name=True, old=old), alone]


def decoded(
    record: ShardRecord, ask: Ask, body: memoryview, old: bytes | memoryview | None, segments: Sequence[Segment]
) -> memoryview:
    """The shard that a frame stands for, its hash compared. Blocking.

    Raises:
        WrongBodyError, PublicationError: it is not that shard; the first when nobody signed the frame.
    """
    error: type[WrongBodyError] | type[PublicationError] = WrongBodyError if ask.digest is None else PublicationError
    out = memoryview(bytearray(record.raw_bytes))
    try:
        decode(body, old, out, segments)
    except CodecError as exc:
        raise error(f"shard {record.index} does not decode: {exc}", exc.code) from exc
    if blake3(out).digest() != record.new_hash:
        raise error(
            f"shard {record.index} decodes to other bytes than the origin's state hash says", ReasonCode.SHARD_MISMATCH
        )
    return out


class Base:
    """A whole policy on disk. Once opened it may be removed: the open file stays."""

    def __init__(self, key: Key, path: Path, header_bytes: int, states: Sequence[bytes]) -> None:
        """
        Args:
            states: state hash of every shard.
        """
        self.key = key
        self._path, self._header_bytes, self._states = path, header_bytes, states
        self._fd = -1
        self._lock = threading.Lock()
        self._damaged: set[int] = set()

    def state(self, index: int) -> bytes:
        """The hash of a shard; `NO_HASH` when its bytes turned out to be others."""
        return NO_HASH if index in self._damaged else self._states[index]

    def open(self) -> None:
        """From now on the file may be removed. Raises OSError."""
        with self._lock:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, index: int, length: int) -> bytes | None:
        """A shard's bytes, hashed again; None when they are not what they were. Blocking."""
        try:
            self.open()
            data = os.pread(self._fd, length, self._header_bytes + index * SHARD_BYTES)
        except OSError:
            data = b""
        if blake3(data).digest() == self._states[index]:
            return data
        self._damaged.add(index)
        return None

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class PolicySink:
    """`asks.Sink` of one policy under way."""

    def __init__(
        self,
        directory: Path,
        publication: Publication,
        header: bytes,
        segments: Segments,
        bases: Sequence[Base] = (),
    ) -> None:
        """Open or create the directory.

        Args:
            header: of the weights file.
            bases: policies on disk, the best one to patch first; closed with this sink.

        Raises:
            OSError: the disk has no room.
        """
        self.directory = directory
        self.publication = publication
        self._header = header
        self._segments = segments
        self._bases = bases
        directory.mkdir(parents=True, exist_ok=True)
        self.resumed = (directory / WEIGHTS_NAME).exists()
        """An earlier process may have left shards."""
        self._fd = preallocate(directory / WEIGHTS_NAME, len(header) + publication.open.raw_bytes)

    def asks(self, record: ShardRecord) -> Sequence[Ask]:
        key = self.publication.key
        signed = record.wire_hash != NO_HASH
        if signed and (record.old_hash == NO_HASH or self._base(record.index, record.old_hash) is not None):
            own = [shard_ask(key, record)]
            return own if record.old_hash == NO_HASH else [*own, *state_asks(key, record, NO_HASH)]
        older = (base.state(record.index) for base in self._bases if base.key < key)
        return state_asks(key, record, next((state for state in older if state != NO_HASH), NO_HASH))

    def may_be_present(self, record: ShardRecord) -> bool:
        return self.resumed or self._base(record.index, record.new_hash) is not None

    def present(self, record: ShardRecord) -> bool:
        start = len(self._header) + record.index * SHARD_BYTES
        if self.resumed and hash_region(self._descriptor(), start, record.raw_bytes) == record.new_hash:
            return True
        base = self._base(record.index, record.new_hash)
        shard = base.read(record.index, record.raw_bytes) if base is not None else None
        if shard is None:
            return False
        write_region(self._descriptor(), start, shard)
        return True

    def take(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        start = len(self._header) + record.index * SHARD_BYTES
        if ask.digest is not None and not is_frame(record):
            write_region(self._descriptor(), start, body)
            return True
        with working:
            old: bytes | None = None
            state = ask.old if ask.digest is None else record.old_hash
            if state != NO_HASH and _is_patch(body):
                base = self._base(record.index, state)
                old = base.read(record.index, record.raw_bytes) if base is not None else None
                if old is None:
                    return False  # our own disk: `asks` knows by now, and names another way
            write_region(self._descriptor(), start, decoded(record, ask, body, old, self._segments(record.index)))
        return True

    def verified(self, record: ShardRecord) -> None:
        return

    def finish(self) -> None:
        """All shards are verified: write the header, which makes the file loadable, and close it."""
        write_region(self._descriptor(), 0, self._header)
        self.close()

    def abandon(self) -> None:
        self.close()
        remove_folder(self.directory)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        for base in self._bases:
            base.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _base(self, index: int, state: bytes) -> Base | None:
        return next((base for base in self._bases if base.state(index) == state), None) if state != NO_HASH else None

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise StoreError("this download was given up")
        return self._fd


def _is_patch(body: memoryview) -> bool:
    try:
        return needs_old(body)
    except CodecError:
        return False  # decoding it says what it is
