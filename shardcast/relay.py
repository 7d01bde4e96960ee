"""A relay: follows the newest publication and serves each shard as soon as it is verified (cut-through).

Its store has the archive's layout. Nothing in it is flushed to the disk, so everything found after a restart is
hashed again before it is served. Old publications beyond `keep` are removed. Every shard goes out with this relay's
stamp (`stamps`), and its own parents' stamps are checked the same way.

Not covered: planning of the tree (`trainer.tree`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import ProtocolError, UsageError
from protocol.identity import Identity
from protocol.limits import MAX_LAYOUT_BYTES
from protocol.manifest import Run
from protocol.records import RelayReport
from protocol.sequences import Sequences
from shardcast.asks import Sink
from shardcast.errors import SourceError
from shardcast.follower import Follower
from shardcast.heads import SeenHeads
from shardcast.limits import MISSING_WAIT_S, NEXT_WAIT_S
from shardcast.passes import Parent, PassCheck, Presenter, parents_of
from shardcast.publication import Key, Publication
from shardcast.rates import Bucket
from shardcast.server import Clock, WeightsServer, wall_clock_ms
from shardcast.store import Store, hash_file, read_publication, verify_shards
from shardcast.store_sink import RelayStates, StoreSink
from shardcast.terms import OPEN_TERMS, Terms

log = logging.getLogger("shardcast.relay")


_MOST_KEPT = 2
"""Times `keep`, at most, are kept while children still download what is old."""


class RelayServer:
    """Pulls from `sources` and serves what it verified."""

    serving: type[WeightsServer] = WeightsServer

    def __init__(
        self,
        run: Run | Callable[[], Run],
        sources: Sequence[str | Parent] | Callable[[], Sequence[str | Parent]],
        listen: str,
        store: Path,
        identity: Identity,
        *,
        sequences: Sequences | None = None,
        keep: int = 8,
        clock_ms: Clock = wall_clock_ms,
        passes: bool = False,
        report: Callable[[RelayReport], None] | None = None,
        presenter: Presenter | None = None,
        terms: Terms = OPEN_TERMS,
        down: Bucket | None = None,
    ) -> None:
        """Open the store.

        Args:
            run: with the newest manifest known; a callable when that may change.
            sources: parents or their URLs, best first; a callable is read again every second.
            passes: serve only children that show a pass of the run's coordinator.
            report: told of a parent that sent wrong bytes; must not block.
            keep: finished publications kept; older ones are removed.
            presenter: shows our passes to parents; by default as `identity`.
            terms: limits of what is served, and how.
            down: limits the bytes of shards received.
            sequences: those of `identity`, when its owner signs other things too.

        Raises:
            UsageError: another process serves this store.
            ForkError: an earlier run found that the origin forked.
        """
        if keep < 1:
            raise UsageError("a relay keeps at least one publication")
        self._run = run
        self.keep = keep
        self._given = sources
        self._seen = SeenHeads(store)
        self.store = Store(store, run, durable=False)
        sequences = sequences or Sequences(store / "relay-sequences.json")
        self.server = self.serving(
            self.store,
            identity=identity,
            sequences=sequences,
            listen=listen,
            clock_ms=clock_ms,
            passes=PassCheck(run, identity.public, clock_ms) if passes else None,
            stamped=True,
            missing=self._coming_s,
            terms=terms,
        )
        self.states = RelayStates(self.store)
        self.server.states = self.states
        self._follower = Follower(
            run,
            sources=self._sources,
            seen=self._seen,
            clock_ms=clock_ms,
            make_sink=self._make_sink,
            on_whole=self._on_whole,
            on_head=self.store.set_head,
            presenter=presenter or Presenter(self.run.id, identity, sequences, clock_ms),
            report=report,
            down=down,
        )
        self._has_blobs = False

    @property
    def run(self) -> Run:
        return self._run() if callable(self._run) else self._run

    @property
    def url(self) -> str:
        """`http://HOST:PORT` once started."""
        return self.server.url

    @property
    def bytes_received(self) -> int:
        return self._follower.bytes_received

    @property
    def problems(self) -> dict[str, SourceError]:
        """The last failure of each source, by address."""
        return self._follower.problems

    async def start(self) -> None:
        """Verify what is on disk, then serve it. Raises UsageError when the address cannot be bound."""
        for key in list(self.store.keys):
            try:
                publication = read_publication(self.store.folder(key), self.run)
                wrong = await asyncio.to_thread(verify_shards, self.store.folder(key), publication)
            except ProtocolError as exc:
                log.warning("%s", exc)
                wrong = [-1]
            if wrong:
                log.warning("%s is damaged and is fetched again", self.store.folder(key))
                self.store.remove(key)
            else:
                self._follower.newest = publication
        await self.server.start()

    async def run_forever(self) -> None:
        """Follow and serve until cancelled; starts the server if that was not done.

        Raises:
            ForkError: the origin forked; a person must decide.
            StoreError, OSError: this disk cannot hold the weights.
        """
        if not self.server.url:
            await self.start()
        await self._follower.run_forever()

    async def close(self) -> None:
        await self._follower.close()
        await self.server.close()
        self.states.close()
        self.store.close()

    def _coming_s(self, key: Key) -> float:
        """For how long a child that asks for what is not here may wait for it; 0 when it is not to come.

        A relay that fell behind, or whose origin published several steps at once, goes on with the newest; but leases
        may name what it skipped: that is fetched, unless it would not be kept. A lease may also be here before its
        policy: the next few are on their way, and nothing is asked for them."""
        kept = self.store.keys[-self.keep :]
        if not kept or key[0] != kept[-1][0] or abs(key[1] - kept[-1][1]) >= self.keep:
            return 0.0
        if key > kept[-1]:
            return NEXT_WAIT_S
        if len(kept) == self.keep and key < kept[0]:
            return 0.0
        self._follower.want(key)
        return MISSING_WAIT_S

    def _sources(self) -> list[Parent]:
        given = parents_of(self._given() if callable(self._given) else self._given)
        self._count()  # what was heard of: once a second is often enough
        return [parent for parent in given if parent.url != self.server.url]

    def _count(self) -> None:
        held, heard = self.store.keys[-1:], self._seen.highest
        counters = self.server.counters
        counters.newest = held[0] if held else None
        if heard is not None and (not held or heard > held[0]):
            counters.lag = heard[1] - held[0][1] if held and heard[0] == held[0][0] else heard[1] + 1
        else:
            counters.lag = 0

    async def _make_sink(self, publication: Publication) -> tuple[Sink, bool]:
        await self._fetch_blobs()
        feed, resume = self.store.begin(publication)
        return StoreSink(self.states, publication, feed, resumed=resume), resume

    async def _on_whole(self, publication: Publication, sink: Sink) -> None:
        # Every record is needed on disk, also those that the source of the shards held back.
        await self._follower.all_records(publication, head=True)
        self.store.finish_files(publication)
        self.store.show_finished(publication)
        self._count()
        if isinstance(sink, StoreSink):
            sink.finish()
        for key in self.store.keys[: -self.keep]:
            # What somebody is downloading stays until it is done, within bounds.
            if len(self.store.keys) > _MOST_KEPT * self.keep or not self.server.in_use(key):
                await self.remove(key)

    async def remove(self, key: Key) -> None:
        """Remove a finished publication, after keeping what newer ones need of it."""
        await self.states.retire(key)
        self._follower.forget(key)

    async def _fetch_blobs(self) -> None:
        """Layout and model files, so that children need nobody else. Raises SourceError when no source has one."""
        if self._has_blobs:
            return
        wanted = {self.run.manifest.model.layout: MAX_LAYOUT_BYTES}
        wanted.update({file.digest: file.size for file in self.run.manifest.model.files})
        for digest, limit in wanted.items():
            path = self.store.blob(digest)
            if path.exists() and hash_file(path) == digest:
                continue
            self.store.add_blob(await self._follower.blob(digest, limit))
        self._has_blobs = True
