"""States on request: one shard of a policy for whoever does not hold what its publication applies to.

    GET p/E-S/state/I            an anchor: the shard after that publication, from nothing
    GET p/E-S/state/I?old=HASH   a patch from the shard that has this state hash, if the frames between are here

A patch over several publications is joined from their frames (`codecs.join`), which takes no state; an anchor is made
from a state that is held here and the frames after it. Neither is signed by anybody: the receiver compares the state
hash. So it does not matter which zstandard made it, and any server that holds a publication can be asked.

A server holds few states whole. The origin keeps its newest checkpoints open (`encoding`), a relay the shards that the
oldest publication it keeps applies to (`StateFolder`): everything newer follows from frames. What was made is kept in
a folder of bounded size, so that many joiners cost one encoding, and is sent from there by sendfile.

Memory: one shard's old and new bytes, and what coding it takes; other requests wait, `MAX_WAITING` at most.
Not covered: who may ask (`server`), fetching (`policy_sink`, `store_sink`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from protocol.errors import ReasonCode
from protocol.limits import MAX_LAYOUT_BYTES, MIB, SHARD_BYTES
from shardcast.codecs import Codec, Segment, decode, encode, frames, needs_old, segments_of
from shardcast.errors import CodecError, StoreError
from shardcast.layout import Layout, decode_layout
from shardcast.limits import WIRE_SLACK_BYTES
from shardcast.publication import Key
from shardcast.records import NO_HASH, ShardRecord
from shardcast.store import Store, read_bounded

MAX_HOPS = 64
"""Publications that one answer may span. With more a request of a hundred bytes costs more than an anchor."""

MADE_AT_ONCE = 1
MAX_WAITING = 64
"""Requests that wait for their turn; beyond it a joiner is sent elsewhere."""

MADE_BYTES = 512 * MIB
"""What is kept of what was made. Less than one policy, and joiners that come together each cost an encoding."""


working = threading.BoundedSemaphore(1)
"""Held while one shard is coded or decoded by a process that serves or pulls: each takes up to four times its length of
memory, and one at a time is faster than any link."""


def is_frame(record: ShardRecord) -> bool:
    """Whether the shard travels as a frame; a full publication's are their raw bytes."""
    return record.wire_hash != record.new_hash


class Segments:
    """The segments of every shard of one layout, made once."""

    def __init__(self, layout: Callable[[], Layout]) -> None:
        self._read = layout
        self._layout: Layout | None = None
        self._known: dict[int, tuple[Segment, ...]] = {}

    def __call__(self, index: int) -> tuple[Segment, ...]:
        """Those of shard `index`. Raises StoreError, ProtocolError when the layout is not here."""
        if index not in self._known:
            if self._layout is None:
                self._layout = self._read()
            self._known[index] = segments_of(self._layout, index)
        return self._known[index]


def segments_of_store(store: Store) -> Segments:
    """By the layout among the store's blobs."""
    return Segments(lambda: decode_layout(read_bounded(store.blob(store.run.manifest.model.layout), MAX_LAYOUT_BYTES)))


class Held(Protocol):
    """Shards that are here whole, by their state hash."""

    def has(self, state: bytes) -> bool: ...

    def read(self, state: bytes) -> bytes | None:
        """Its bytes, hashed again; None when they are not what they should be. Blocking."""


class StateFolder:
    """Raw shards in files named by their state hash: a shard that did not change is there once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._names = {entry.name for entry in os.scandir(folder)}

    def __len__(self) -> int:
        return len(self._names)

    def has(self, state: bytes) -> bool:
        return state.hex() in self._names

    def read(self, state: bytes) -> bytes | None:
        try:
            data = read_bounded(self._folder / state.hex(), SHARD_BYTES)
        except FileNotFoundError:
            data = b""
        if blake3(data).digest() == state:
            return data
        self._remove(state.hex())
        return None

    def put(self, state: bytes, shard: bytes | memoryview) -> None:
        """Keep a shard whose hash was compared. Blocking; not flushed, so it is hashed whenever it is read."""
        if self.has(state):
            return
        aside = self._folder / f".{state.hex()}.part"
        aside.write_bytes(shard)
        aside.replace(self._folder / state.hex())
        self._names.add(state.hex())

    def keep(self, states: Iterable[bytes]) -> None:
        """Remove all others. Blocking."""
        for name in self._names - {state.hex() for state in states}:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._names.discard(name)
        (self._folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Hop:
    """One shard's file on the way to a state."""

    path: Path
    record: ShardRecord
    signed: bool = True
    """It holds the publication's wire shard, not a state that its origin kept beside it."""

    def wire(self) -> bytes:
        """Its bytes, hashed again where their hash is signed. Raises StoreError, OSError."""
        data = read_bounded(self.path, SHARD_BYTES + WIRE_SLACK_BYTES)
        if self.signed and blake3(data).digest() != self.record.wire_hash:
            raise StoreError(f"{self.path} does not hold the bytes that the origin signed", ReasonCode.SHARD_MISMATCH)
        return data

    @property
    def alone(self) -> bool:
        """Whether it needs no other shard."""
        if not self.signed or self.record.old_hash == NO_HASH:
            return True
        with self.path.open("rb", buffering=0) as file:
            return file.read(1) in (bytes((Codec.RAW,)), bytes((Codec.ANCHOR,)))


@dataclass(frozen=True)
class Way:
    """How a state is made: from `start` (held here; NO_HASH if the first hop needs nothing), hop by hop."""

    state: bytes
    start: bytes
    hops: Sequence[Hop]

    def make(self, held: Held, segments: Sequence[Segment]) -> bytes | memoryview:
        """The shard, its hash and those on the way compared. Blocking.

        Raises:
            StoreError: something here is damaged; it names the file.
            OSError: a file can't be read.
        """
        shard: bytes | memoryview = b""
        if self.start != NO_HASH:
            found = held.read(self.start)
            if found is None:
                raise StoreError(f"the state {self.start.hex()[:16]} is damaged here; it is fetched again")
            shard = found
        for hop in self.hops:
            shard = apply(hop, hop.wire(), shard, segments)
        return shard


def apply(hop: Hop, wire: bytes, old: bytes | memoryview, segments: Sequence[Segment]) -> bytes | memoryview:
    """The shard after a hop, its hash compared. Blocking. Raises StoreError, which names the file."""
    if hop.signed and not is_frame(hop.record):
        return wire
    out = memoryview(bytearray(hop.record.raw_bytes))
    try:
        decode(wire, old if needs_old(wire) else None, out, segments)
    except (CodecError, ValueError) as exc:
        code = exc.code if isinstance(exc, CodecError) else ReasonCode.LENGTH_MISMATCH
        raise StoreError(f"{hop.path} does not decode: {exc}", code) from exc
    if blake3(out).digest() != hop.record.new_hash:
        raise StoreError(f"{hop.path} decodes to other bytes than its state hash says", ReasonCode.SHARD_MISMATCH)
    return out


def find_way(state: bytes, known: Callable[[bytes], bool], records: Iterable[tuple[Path, ShardRecord]]) -> Way | None:
    """How to make the shard with this state hash; None where what is here does not lead there.

    Args:
        known: whether a shard is at hand whole.
        records: one shard's files and records, those of the newest publication first.
    """
    hops: list[Hop] = []
    if known(state):
        return Way(state, state, hops)
    want = state
    for path, record in records:
        if record.new_hash != want or record.old_hash == want:
            continue
        kept = path.with_name(kept_name(record.index))
        hop = Hop(kept, record, signed=False) if kept.exists() else Hop(path, record)
        hops.append(hop)
        try:
            want = NO_HASH if hop.alone else record.old_hash
        except OSError:
            return None
        if want == NO_HASH or known(want):
            return Way(state, want, hops[::-1])
    return None


def kept_name(index: int) -> str:
    """File name of a state that an origin keeps beside a publication's wire shards, as an anchor's frame."""
    return f"state-{index:06d}.bin"


def shard_records(store: Store, key: Key, index: int) -> Iterator[tuple[Path, ShardRecord]]:
    """One shard's files and records in a store, from publication `key` down."""
    for at in store.keys_down(key, MAX_HOPS):
        try:
            feed = store.feed(at)
        except StoreError:
            continue
        record = feed.shards.get(index) if feed is not None else None
        if record is not None:
            yield store.shard_path(at, index), record


class StateMaker:
    """Makes what is asked for, from one store. Used in one event loop; the work is done in threads."""

    def __init__(self, store: Store, held: Held) -> None:
        self.store = store
        self.held = held
        self.segments = segments_of_store(store)
        self._folder = store.root / "made"
        shutil.rmtree(self._folder, ignore_errors=True)  # made by another process, maybe half
        self._made: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(MADE_AT_ONCE)

    def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def busy(self) -> bool:
        return len(self._under_way) >= MAX_WAITING

    async def frame(self, key: Key, index: int, old: bytes = NO_HASH) -> tuple[Path, int] | None:
        """A frame of shard `index` after publication `key`, as a file and its length; None where it can't be made here.

        Args:
            old: state hash of a shard that the receiver has; the frame may then need it.

        Raises:
            StoreError: something here is damaged.
        """
        feed = self.store.feed(key)
        record = feed.shards.get(index) if feed is not None else None
        if record is None:
            return None
        name = f"{record.new_hash.hex()}-{old.hex()[:32]}"
        between = None
        if old != NO_HASH and name not in self._made:
            between = find_way(record.new_hash, lambda state: state == old, shard_records(self.store, key, index))
            if between is None or between.start != old:
                # The answer is the one that needs nothing: made once, however many hashes strangers invent.
                old, between = NO_HASH, None
                name = f"{record.new_hash.hex()}-{old.hex()[:32]}"
        if name not in self._made:
            if name not in self._under_way:
                work = self._work(key, index, record, old, between)
                if work is None:
                    return None
                task = self._under_way[name] = asyncio.create_task(self._run(name, work))
                task.add_done_callback(lambda _: self._under_way.pop(name, None))
            await asyncio.shield(self._under_way[name])
        if name not in self._made:
            return None
        self._made.move_to_end(name)
        return self._folder / name, self._made[name]

    def _work(
        self, key: Key, index: int, record: ShardRecord, old: bytes, between: Way | None
    ) -> Callable[[], bytes] | None:
        """What makes the frame, decided from what is here now. Blocking when called; None where nothing leads there.

        Args:
            between: how the shard is made from the one with the hash `old`; None for an anchor.
        """
        segments = self.segments(index)
        real = find_way(record.new_hash, self.held.has, shard_records(self.store, key, index))

        def anchor() -> bytes:
            return encode(Codec.ANCHOR, None, real.make(self.held, segments), segments) if real is not None else b""

        if between is None:
            return None if real is None else anchor
        hops = between.hops
        before = find_way(old, self.held.has, shard_records(self.store, key, index))

        def work() -> bytes:
            wires = [hop.wire() for hop in hops]
            if all(frames.adds(wire) for wire in wires):
                joined = frames.join(wires, segments)
                if real is None or 2 * len(joined) <= record.raw_bytes:
                    return joined
                return min(joined, anchor(), key=len)
            if real is None:
                raise StoreError("these patches can't be joined without a state, and none is here")
            if before is None:
                return anchor()
            return encode(Codec.GAPS, before.make(self.held, segments), real.make(self.held, segments), segments)

        return work

    async def _run(self, name: str, work: Callable[[], bytes]) -> None:
        async with self._turn:
            size = await asyncio.to_thread(self._write, name, work)
        self._made[name] = size
        self._bytes += size
        while self._bytes > MADE_BYTES and len(self._made) > 1:
            gone, freed = self._made.popitem(last=False)
            self._bytes -= freed
            (self._folder / gone).unlink(missing_ok=True)

    def _write(self, name: str, work: Callable[[], bytes]) -> int:
        try:
            with working:
                frame = work()
        except CodecError as exc:
            raise StoreError(f"a frame that was verified does not decode: {exc}", exc.code) from exc
        self._folder.mkdir(exist_ok=True)
        (self._folder / name).write_bytes(frame)
        return len(frame)


def kept_states(store: Store) -> Iterator[bytes]:
    """State hashes that anything in the store names."""
    for key in store.keys_down(None, len(store.keys) + MAX_HOPS):
        feed = store.feed(key)
        for record in feed.shards.values() if feed is not None else ():
            yield record.old_hash
            yield record.new_hash
