"""A relay's download, and what a relay keeps of old states.

Wire shards are kept as they came, each renamed to its place and shown once verified. So that a relay can make any state
it announces (`states`), each shard's chain of frames must begin with something whole: an anchor, or a raw shard in
`states/`. Two things keep it so:

    a publication comes whose base is not here       the state after it is fetched, too, and kept
    the oldest publication is removed                what the next one's frames change is made and kept first

Shards that no publication names any more are removed, those that did not change are there once.

Not covered: which publications are kept (`relay`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import ProtocolError
from shardcast.asks import Ask
from shardcast.codecs import needs_old
from shardcast.errors import CodecError, PublicationError, StoreError, WrongBodyError
from shardcast.policy_sink import decoded, shard_ask, state_asks
from shardcast.publication import Key, Publication
from shardcast.records import NO_HASH, ShardRecord
from shardcast.states import StateFolder, StateMaker, Way, find_way, kept_states, shard_records, working
from shardcast.store import Feed, Store, hash_file, write_file


class RelayStates(StateMaker):
    """The states of a relay's store."""

    held: StateFolder

    def __init__(self, store: Store) -> None:
        super().__init__(store, StateFolder(store.root / "states"))
        self._reached: set[bytes] = set()
        """States that can be made: of those nobody has to look for a way again."""
        self.coming: set[StoreSink] = set()

    def way(self, key: Key, index: int, state: bytes) -> Way | None:
        """How a shard with this hash is made, of publication `key` or one before. In any thread."""
        return find_way(state, self.held.has, shard_records(self.store, key, index))

    def reaches(self, key: Key, index: int, state: bytes) -> bool:
        """Whether there is a way."""
        if state in self._reached:
            return True
        if self.way(key, index, state) is None:
            return False
        self._reached.add(state)
        return True

    def lost(self, state: bytes) -> None:
        """A way turned out to be damaged."""
        self._reached.discard(state)

    async def retire(self, key: Key) -> None:
        """Remove a finished publication, after keeping what newer ones need of it."""
        feed = self.store.feed(key)
        newer = [self.store.feed(at) for at in self.store.keys if at > key]
        if feed is not None:
            for index, record in list(feed.shards.items()):
                needed = any(
                    one is not None and index in one.shards and one.shards[index].old_hash == record.new_hash
                    for one in newer
                )
                if needed and not self.held.has(record.new_hash):
                    way = self.way(key, index, record.new_hash)
                    if way is not None:
                        await asyncio.to_thread(self._keep, way, index)
        self.store.remove(key)
        if len(self.held) or self._reached:
            kept = {*kept_states(self.store)}
            for sink in self.coming:
                kept |= sink.states
            self._reached &= kept
            await asyncio.to_thread(self.held.keep, kept)

    def _keep(self, way: Way, index: int) -> None:
        try:
            with working:
                self.held.put(way.state, way.make(self.held, self.segments(index)))
        except ProtocolError:  # damaged: then it is asked for when the next publication finds it missing
            self.lost(way.state)


class StoreSink:
    """`asks.Sink` of one publication under way into a relay's store."""

    def __init__(self, states: RelayStates, publication: Publication, feed: Feed, *, resumed: bool = True) -> None:
        """
        Args:
            resumed: shards may be there that an earlier process left.
        """
        self.publication = publication
        self.states: set[bytes] = set()
        """State hashes of what this download put among the states."""
        self._states = states
        self._store = states.store
        self._feed = feed
        self._resumed = resumed
        self._placed: set[int] = set()
        """Shards whose frames are here, their hash compared."""
        self._places: dict[int, Path] = {}
        states.coming.add(self)

    def asks(self, record: ShardRecord) -> Sequence[Ask]:
        if record.wire_hash == NO_HASH:
            return ()  # a relay passes frames on: its record must come first
        if record.index not in self._placed:
            return [shard_ask(self._feed.key, record)]
        own = self._own(record.index)
        return state_asks(self._feed.key, record, own.state if own is not None else NO_HASH)

    def may_be_present(self, record: ShardRecord) -> bool:
        return self._resumed

    def present(self, record: ShardRecord) -> bool:
        place = self._place(record)
        if not place.exists():
            return False
        if place.stat().st_size == record.wire_bytes and hash_file(place) == record.wire_hash:
            self._placed.add(record.index)
            return self._whole(record)
        place.unlink()
        return False

    def take(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        if self._feed.gone:
            raise StoreError("this download was given up")
        if ask.digest is not None:
            place = self._place(record)
            aside = Path(f"{place}.part")
            write_file(aside, body, durable=False)
            aside.replace(place)
            self._placed.add(record.index)
            return self._whole(record)
        with working:
            return self._take_state(record, ask, body)

    def _take_state(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        old = self._own(record.index, ask.old) if ask.old != NO_HASH else None
        segments = self._states.segments(record.index)
        try:
            shard = old.make(self._states.held, segments) if old is not None and _is_patch(body) else None
        except StoreError:
            self._states.lost(ask.old)
            return False
        self.states.add(record.new_hash)
        self._states.held.put(record.new_hash, decoded(record, ask, body, shard, segments))
        return True

    def verified(self, record: ShardRecord) -> None:
        envelope = self.publication.shard_envelope(record.index)
        last = len(self._feed.shards) == self.publication.shards - 1 and self.publication.head is not None
        # The last shard, the manifest and the head become visible together: one answer instead of three.
        self._store.show_shard(self._feed, record, envelope, wake=not last)

    def finish(self) -> None:
        """The publication is finished: its states are kept by its records from now on."""
        self._states.coming.discard(self)

    def abandon(self) -> None:
        self._states.coming.discard(self)
        self._store.abandon(self._feed.key)

    def _place(self, record: ShardRecord) -> Path:
        place = self._places.get(record.index)
        if place is None:
            place = self._places[record.index] = self._store.shard_path(self._feed.key, record.index)
        return place

    def _whole(self, record: ShardRecord) -> bool:
        """Whether the state after this shard can be made here, now that its frame is."""
        try:
            alone = record.old_hash == NO_HASH or not needs_old(_first(self._place(record)))
        except CodecError as exc:
            raise PublicationError(f"the frame of shard {record.index}: {exc}", exc.code) from exc
        if alone:
            return True
        return any(self._states.reaches(self._feed.key, record.index, state) for state in _ends(record))

    def _own(self, index: int, state: bytes = NO_HASH) -> Way | None:
        """How the newest state before this publication is made here, or the one with this hash."""
        for key in self._store.keys_down(self._feed.key, 8):
            feed = self._store.feed(key) if key != self._feed.key else None
            record = feed.shards.get(index) if feed is not None else None
            if record is None or (state != NO_HASH and record.new_hash != state):
                continue
            way = self._states.way(key, index, record.new_hash)
            if way is not None:
                return way
        return None


def _ends(record: ShardRecord) -> tuple[bytes, bytes]:
    return record.old_hash, record.new_hash


def _first(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        return file.read(1)


def _is_patch(body: memoryview) -> bool:
    try:
        return needs_old(body)
    except CodecError as exc:
        raise WrongBodyError(str(exc), exc.code) from exc
