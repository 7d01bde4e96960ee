"""Follows the newest policy over several sources: what a relay and a puller have in common.

The first source that answers is asked for news by long-poll; two more are looked at every two seconds, the last of them
by turns (`turns`), so that a few can't withhold news for long. What is learnt goes into a `Track`, one per publication;
`focus` decides which is downloaded. One whose shards, manifest and head are all verified is whole: `on_whole` shows it.

    news -> Publication.take (signatures) -> SeenHeads (rollback, fork) -> Download -> on_whole

A source that sends something wrong is charged and asked less often; the others never notice. A relay that signed what
it shouldn't have is never asked again, and reported. A fork of the origin stops everything: evidence is kept and
`run_forever` raises.

Not covered: where bytes go (`download.Sink`) and what a whole publication becomes (`puller`, `relay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from protocol.envelope import parse
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.limits import SHARD_BYTES
from protocol.manifest import Run
from protocol.records import RelayReport
from shardcast.download import Download, Place, Sink
from shardcast.earlier import ENDS, frames_taken, keep_fork, vouched_frames
from shardcast.errors import ForkError, HeadError, PublicationError, SourceError
from shardcast.focus import Candidate, Track, choose_focus, idle_tracks
from shardcast.gathering import first_blob, gather_records
from shardcast.heads import SeenHeads, publication_name
from shardcast.limits import DEFAULT_WAIT_MS, HEAD_LIFETIME_MS, SPARE_LOOK_S
from shardcast.named import ByName, Wanted
from shardcast.passes import Parent, Presenter, parents_of
from shardcast.publication import Key, Publication, pack_frames
from shardcast.rates import Bucket
from shardcast.records import HEAD_KIND, MANIFEST_KIND, OPEN_KIND, SHARD_KIND, Head, ShardRecord
from shardcast.reports import Reports
from shardcast.schedule import SourceHealth
from shardcast.server import Clock
from shardcast.source import Source, keep_polite, new_session
from shardcast.turns import Turns

log = logging.getLogger("shardcast.follower")

_RECONCILE_S = 1.0
_REMOVED_S = 90.0
"""Longer than a download takes to stop, whatever its disk does."""
_KEPT_TRACKS = 8
HOLD_MAX_S = HEAD_LIFETIME_MS / 3000
"""News are looked at this often though nobody has use for them: heads are signed again as often, and a fork that is
never looked at is never found."""

_HOLD_LOOK_S = 1.0
"""Work may end before its time; then news are of use at once."""


class Follower:
    """Keeps up with the origin through `sources`."""

    def __init__(
        self,
        run: Run | Callable[[], Run],
        *,
        sources: Callable[[], Sequence[str | Parent]],
        seen: SeenHeads,
        clock_ms: Clock,
        make_sink: Callable[[Publication], Awaitable[tuple[Sink, bool]]],
        on_whole: Callable[[Publication, Sink], Awaitable[None]],
        on_head: Callable[[bytes], None],
        session: aiohttp.ClientSession | None = None,
        presenter: Presenter | None = None,
        report: Callable[[RelayReport], None] | None = None,
        hold: Callable[[], float] = lambda: 0.0,
        down: Bucket | None = None,
    ) -> None:
        """
        Args:
            run: with the newest manifest known; a callable when that may change.
            sources: the places to ask now, best first; read again every second.
            make_sink: prepares a place for a publication; says whether shards may already be there.
            on_whole: makes a whole, verified publication visible.
            on_head: the newest head was signed again.
            presenter: shows our passes to sources that have one.
            report: told of a relay that sent wrong bytes, with proof where there is any; must not block.
            down: limits the bytes of shards received.
            hold: for how many seconds the owner has no use for news (`pacing`); asked again and again.
        """
        self._run = run
        self._addresses = sources
        self._seen = seen
        self._clock_ms = clock_ms
        self._make_sink = make_sink
        self._on_whole = on_whole
        self._on_head = on_head
        self._session = session
        self._own_session = session is None
        self._presenter = presenter
        self._hold = hold
        self._down = down
        self._reports = Reports(report, self.all_records, self._spawn)
        self._first = ""
        """The address asked by long-poll."""
        self._turned = asyncio.Event()
        self._turns = Turns()
        self._known: dict[str, tuple[Source, SourceHealth]] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._tracks: dict[Key, Track] = {}
        self._refused: dict[Key, bytes] = {}
        """Publication ids that the origin must publish anew."""
        self._removing: dict[asyncio.Task[None], Key] = {}
        """Publications given up whose remains are still being removed."""
        self._opening = asyncio.Lock()
        self._focus: Key | None = None
        self._dropped = False
        self.newest: Publication | None = None
        """The newest publication that is whole here; the owner sets it when it starts with one from disk."""
        self._wanted = Wanted(self, self._spawn)
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self.bytes_received = 0
        self.problems: dict[str, SourceError] = {}
        """The last failure of each source."""

    @property
    def run(self) -> Run:
        return self._run() if callable(self._run) else self._run

    # --- life ------------------------------------------------------------------------------------------------------

    async def run_forever(self) -> None:
        """Follow until cancelled.

        Raises:
            ForkError: the origin forked; a person must decide.
            StoreError, OSError: this machine cannot store weights.
        """
        try:
            while self._failure is None:
                self._reconcile()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECONCILE_S):
                        await self._failed.wait()
            raise self._failure
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop watching and downloading; unfinished downloads stay on disk to be resumed."""
        downloads = [t.task for t in self._tracks.values() if t.task is not None]
        tasks = [*self._watchers.values(), *downloads, *self._reports.tasks, *self._wanted.tasks]
        self._watchers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._removing, return_exceptions=True)
        for source, _ in self._known.values():
            source.stop()
        if self._own_session and self._session is not None:
            await self._session.close()
            self._session = None

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._failed.set()

    def check(self) -> None:
        """Raise what stopped this follower, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure stops this follower instead of passing unseen."""
        task = asyncio.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(error)

        task.add_done_callback(ended)
        return task

    @property
    def _whole(self) -> Key | None:
        return self.newest.key if self.newest is not None else None

    def source(self, place: str | Parent) -> tuple[Source, SourceHealth]:
        """The source at an address, with what is remembered of it as long as the same key answers there."""
        parent = parents_of([place])[0]
        known = self._known.get(parent.url)
        if known is not None and (isinstance(place, str) or known[0].parent.key == parent.key):
            if not isinstance(place, str):
                known[0].parent = parent
            return known
        if self._session is None:
            self._session = new_session()
        # The origin's own records say what its shards are: it stamps nothing.
        stamped_by = b"" if parent.key in self.run.origins else parent.key
        source = Source(
            self._session,
            parent,
            self.run.id,
            stamped_by=stamped_by,
            presenter=self._presenter,
            allow_private=isinstance(place, str) or self.run.manifest.allow_private,
            down=self._down,
        )
        if known is not None:
            known[0].stop()
        self._known[parent.url] = (source, SourceHealth(parent.url))
        if parent.url in self._watchers:
            self._watchers.pop(parent.url).cancel()
        return self._known[parent.url]

    def sources(self) -> list[tuple[Source, SourceHealth]]:
        """All sources to ask now: those that are not resting first, otherwise in the order given."""
        named = {parent.url: parent for parent in reversed(parents_of(self._addresses()))}
        found = [pair for pair in map(self.source, reversed(named.values())) if not pair[1].lied]
        now = time.monotonic()
        return sorted(found, key=lambda pair: pair[1].resting_until > now and pair[1].failures >= 3)

    def _choose_first(self) -> None:
        """The source asked by long-poll: the first that isn't resting."""
        now = time.monotonic()
        found = [health for _, health in self.sources()]
        ready = [health.address for health in found if health.resting_until <= now]
        first = next(iter(ready or [health.address for health in found]), "")
        if first != self._first:
            self._first = first
            self._turned.set()
            self._turned = asyncio.Event()

    def _reconcile(self) -> None:
        """One watcher for each of the first sources; none for those that are no longer named."""
        self._choose_first()
        named = [source.address for source, _ in self.sources()]
        for address in [one for one, (_, health) in self._known.items() if one not in named and not health.lied]:
            self._known.pop(address)[0].stop()  # a relay that starts again at another address leaves nothing behind
        wanted = self._turns.watched(named, time.monotonic())
        for address in [one for one in self._watchers if one not in wanted]:
            self._watchers.pop(address).cancel()
        for address in wanted:
            if address not in self._watchers:
                self._watchers[address] = self._spawn(self._watch(address))

    # --- learning --------------------------------------------------------------------------------------------------

    async def _watch(self, address: str) -> None:
        source, health = self.source(address)
        after = self._whole
        await self._pause(address, health)  # a spare is not asked while the planned parent may answer
        while True:
            overdue = await self._while_held()
            try:
                start = time.monotonic()
                wait_ms = DEFAULT_WAIT_MS if address == self._first else 0
                after = max(filter(None, (after, self._whole)), default=None)
                frames = await source.news(after, wait_ms)
                if frames and not overdue and self._hold() > 0:
                    pass  # work began while we waited: what is newest afterwards counts
                elif frames:
                    with self._turns.heard(address):
                        after = await self._learn(source, health, frames, after)
                else:
                    await self._refresh_head(source)
                    if wait_ms:
                        await keep_polite(start)
                health.worked(0, 0.0)
            except SourceError as exc:
                self.charge(health, exc)
            await self._pause(address, health)

    async def _while_held(self) -> bool:
        """Wait until the owner has use for news; True when it had none for as long as heads may go unseen."""
        end = time.monotonic() + HOLD_MAX_S
        while (hold_s := self._hold()) > 0:
            left = end - time.monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(hold_s, left, _HOLD_LOOK_S))
        return False

    async def _pause(self, address: str, health: SourceHealth) -> None:
        """Until a source is to be asked again: at once when it is the first, rested, one; else after a while."""
        looked = time.monotonic() + SPARE_LOOK_S * random.uniform(0.8, 1.2)
        while True:
            turned = self._turned
            until = health.resting_until if address == self._first else max(health.resting_until, looked)
            left = until - time.monotonic()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left if math.isfinite(left) else None):
                    await turned.wait()
            except TimeoutError:
                return

    def charge(self, health: SourceHealth, error: SourceError) -> None:
        health.failed(error, time.monotonic(), random.random())
        self._choose_first()
        if self.problems.get(health.address) is None or str(self.problems[health.address]) != str(error):
            log.warning("%s", error)
        self.problems[health.address] = error

    def _blame(self, publication: Publication, source: Source, record: ShardRecord, error: SourceError) -> None:
        self._choose_first()
        self._reports.blame(publication, source, record, error)

    async def _learn(self, source: Source, health: SourceHealth, frames: list[bytes], after: Key | None) -> Key:
        """Take one publication's frames from one source until its head came; returns its key."""
        publication = self.opened(source, frames[0], revoked=True)
        key = publication.key
        if after is not None and key <= after:
            raise SourceError(
                source.address, f"{publication_name(key)} is not newer than asked for", ReasonCode.STALE_SEQUENCE
            )
        if self._whole is not None and key <= self._whole:
            return key
        if self._refused.get(key) == publication.open.publication:
            return key
        if publication.opener != self.run.manifest.origin:
            frames = await vouched_frames(source, publication, frames, self.run.manifest.origin)
        track = await self.track(source, publication)
        taken = 0
        while True:
            for raw in frames:
                self.take(source, health, track, raw)
            taken = frames_taken(source, track.publication, taken, frames)
            self.advance()
            if track.announced or track.done.is_set():
                return key
            if self._tracks.get(key) is not track:
                raise SourceError(source.address, "the publication was given up", ReasonCode.RECORD_MISSING)
            start = time.monotonic()
            frames = await source.records(key, taken, DEFAULT_WAIT_MS)
            if not frames:
                await keep_polite(start)

    async def all_records(self, publication: Publication, *, head: bool = False) -> None:
        """Return once the signed record of every shard is known, and a head if it is asked for."""
        await gather_records(publication, self.sources, self.charge, self.run, self._seen, head=head)

    def opened(self, source: Source, raw: bytes, *, revoked: bool) -> Publication:
        """The publication that an open record starts, by a revoked key only when asked for. Raises SourceError."""
        try:
            theirs = parse(raw).signer in self.run.revoked_origins
            publication = Publication(self.run, revoked=revoked and theirs)
            if publication.take(raw) != OPEN_KIND:
                raise PublicationError("a publication starts with its open record", ReasonCode.WRONG_KIND)
        except (DecodeError, EnvelopeError, PublicationError) as exc:
            raise SourceError(source.address, f"the open record does not hold: {exc}", exc.code) from exc
        return publication

    async def track(self, source: Source, publication: Publication) -> Track:
        """The track of a publication: the one there is, or a new one with a sink."""
        key, opening = publication.key, publication.open
        async with self._opening:
            track = self._tracks.get(key)
            if track is not None:
                known = track.publication
                if known.open.publication == opening.publication or track.done.is_set():
                    return track
                own = self.run.manifest.origin
                if known.opener != publication.opener and publication.opener != own:
                    raise SourceError(
                        source.address,
                        f"{publication_name(key)} was opened by a key the origin had before",
                        ReasonCode.BAD_SIGNATURE,
                    )
                # Sequences rise with each key; those of two keys say nothing about each other.
                if known.opener == publication.opener and publication.attempt < known.attempt:
                    raise SourceError(
                        source.address,
                        f"an older attempt to publish {publication_name(key)}",
                        ReasonCode.STALE_SEQUENCE,
                    )
                # The origin crashed and opened the step again: what was fetched of the old attempt is worthless.
                self._drop(key)
            if self._refused.get(key) == opening.publication:
                raise PublicationError(f"{publication_name(key)} was refused before; it must be published anew")
            await self._removed(key)
            sink, _ = await self._make_sink(publication)
            track = Track(publication, self._download(publication, sink))
            self._tracks[key] = track
            for other in idle_tracks(self._tracks, {key, self._focus}):
                self._drop(other)
            return track

    def _download(self, publication: Publication, sink: Sink) -> Download:
        key = publication.key

        async def scout(source: Source, health: SourceHealth) -> None:
            track = self._tracks.get(key)
            if track is not None and track.publication is publication:
                await self._hear(source, health, track)

        return Download(publication, sink, places=self.places, scout=scout, gather=self.all_records, blame=self._blame)

    def places(self) -> list[Place]:
        """The sources that may be asked now, and which of them only if the others bring nothing."""
        origins = self.run.origins
        found = self.sources()
        relays = any(source.parent.key and source.parent.key not in origins for source, _ in found)
        return [(source, health, relays and source.parent.key in origins) for source, health in found]

    async def _hear(self, source: Source, health: SourceHealth, track: Track) -> None:
        """What one more source holds of a publication, until it has all of it. Raises SourceError."""
        taken = 0
        while True:
            start = time.monotonic()
            frames = await source.records(track.publication.key, taken, DEFAULT_WAIT_MS if taken else 0)
            if not frames:
                await keep_polite(start)
            elif not taken and self.opened(source, frames[0], revoked=True).open != track.publication.open:
                return  # another attempt to publish this step: not what is being fetched
            for raw in frames:
                self.take(source, health, track, raw, follow=False)
            taken = frames_taken(source, track.publication, taken, frames)
            if taken >= track.publication.shards + ENDS - 1 or track.done.is_set():
                return

    def take(self, source: Source, health: SourceHealth, track: Track, raw: bytes, *, follow: bool = True) -> None:
        """One frame: check, remember, offer the shard it announces.

        Args:
            follow: a head must be fresh and no rollback; not so for a publication asked for by name.
        """
        publication = track.publication
        try:
            kind = publication.take(raw)
            if kind == MANIFEST_KIND and publication.manifest is not None:
                self._seen.check_root(publication.key, publication.manifest.root, raw)
            elif kind == HEAD_KIND and follow:
                self._accept(raw)
                track.announced = True
        except ForkError as exc:
            keep_fork(source, self.run, self._seen, publication, exc)
            raise
        except (DecodeError, EnvelopeError, PublicationError, HeadError) as exc:
            raise SourceError(source.address, str(exc), exc.code) from exc
        if kind == SHARD_KIND:
            track.download.offer(source, health, parse(raw).record(ShardRecord).index)
        elif kind == MANIFEST_KIND:
            track.download.offer(source, health, None)
        track.settle()

    def _accept(self, raw: bytes) -> None:
        """A head whose signature held: is it to be followed?

        Raises:
            HeadError, ForkError: stale, a rollback, contradicted, or by a key that the origin no longer has.
        """
        envelope = parse(raw)
        if envelope.signer != self.run.manifest.origin:
            raise HeadError("the head is signed by a key the origin had before; it must sign with its present one")
        self._seen.accept(envelope.record(Head), envelope, self._clock_ms())

    async def _refresh_head(self, source: Source) -> None:
        """Nothing new for a while: take the newest head's newer signature, so that children find it fresh, and signed
        by the origin's present key."""
        newest = self.newest
        if newest is None or newest.head_envelope is None:
            return
        old_key = newest.head_envelope.signer != self.run.manifest.origin
        if not old_key and self._clock_ms() - newest.head_envelope.issued_at < HEAD_LIFETIME_MS // 3:
            return
        raw = await source.head()
        if raw is None:
            return
        try:
            newest.take(raw)
            self._accept(raw)
        except ForkError as exc:
            keep_fork(source, self.run, self._seen, newest, exc)
            raise
        except (DecodeError, EnvelopeError, PublicationError, HeadError) as exc:
            raise SourceError(source.address, str(exc), exc.code) from exc
        self._on_head(raw)

    async def blob(self, digest: bytes, limit: int) -> bytes:
        """A verified blob from the first source that has it. Raises SourceError when none has it now."""
        return await first_blob([source for source, _ in self.sources()], digest, limit)

    # --- fetching --------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> tuple[int, int] | None:
        """(bytes that are here and verified, bytes in all) of the download in focus; None when there is none."""
        track = self._tracks.get(self._focus) if self._focus is not None else None
        if track is None or track.done.is_set():
            return None
        whole = track.publication.open.raw_bytes
        return max(0, whole - len(track.download.missing) * SHARD_BYTES), whole

    def advance(self) -> None:
        """Decide what to download, start it, and stop what it replaces."""
        whole = self._whole
        open_tracks = {k: t for k, t in self._tracks.items() if not t.done.is_set()}
        for key in [k for k, t in open_tracks.items() if not t.pins and whole is not None and k < whole]:
            self._drop(key)
            del open_tracks[key]
        candidates = {k: Candidate(k, t.announced) for k, t in open_tracks.items() if not t.pins}
        current = candidates.pop(self._focus, None) if self._focus is not None else None
        focus = choose_focus(current, candidates.values(), self._dropped)
        if current is not None and focus != current.key:
            log.info("%s is superseded by %s", publication_name(current.key), publication_name(focus or current.key))
            self._dropped = self._dropped or current.announced
            self._drop(current.key)
        self._focus = focus
        for key, track in open_tracks.items():
            if (track.pins or key == focus) and track.task is None and not track.done.is_set():
                track.task = self._spawn(self._fetch(key, track))
        for key in [k for k, t in self._tracks.items() if t.done.is_set()][:-_KEPT_TRACKS]:
            del self._tracks[key]

    async def _fetch(self, key: Key, track: Track) -> None:
        try:
            await track.download.run()
        except PublicationError as exc:
            self._refuse(key, track, exc)
            return
        finally:
            self.bytes_received += track.download.bytes_received
        # If the origin died before its manifest this waits until a newer publication drops the track.
        await track.ready.wait()
        await self._on_whole(track.publication, track.download.sink)
        self._dropped = False
        if self._whole is None or key > self._whole:
            self.newest = track.publication
        track.done.set()
        self.advance()

    def _refuse(self, key: Key, track: Track, error: PublicationError) -> None:
        """The origin signed what nobody can use: never fetched again under this publication id."""
        log.error("%s is refused: %s; the run's operator must publish it anew", publication_name(key), error)
        track.refused = error
        self._refused[key] = track.publication.open.publication
        self._seen.record_refused(key, pack_frames(track.publication.frames()))
        track.done.set()
        if self._tracks.get(key) is track:
            self._drop(key)
        self.advance()

    def _drop(self, key: Key) -> None:
        track = self._tracks.pop(key)
        if track.task is not None:
            track.task.cancel()
        if self._focus == key:
            self._focus = None
        task = self._spawn(self._remove(track))
        self._removing[task] = key
        task.add_done_callback(lambda done: self._removing.pop(done, None))

    async def _remove(self, track: Track) -> None:
        """What was fetched goes once no thread is storing any more of it."""
        if track.task is not None and track.task is not asyncio.current_task():
            await asyncio.gather(track.task, return_exceptions=True)
        await track.download.give_up()

    async def _removed(self, key: Key) -> None:
        """Wait until what was given up of a publication is gone."""
        waiting = [task for task, of in self._removing.items() if of == key]
        if waiting:
            await asyncio.wait(waiting, timeout=_REMOVED_S)

    def forget(self, key: Key) -> None:
        """What was fetched is here no more: who asks for it by name is to fetch it again."""
        track = self._tracks.get(key)
        if track is not None and track.done.is_set():
            del self._tracks[key]

    def follows(self, track: Track) -> bool:
        """Whether this is still the track of its publication."""
        return self._tracks.get(track.publication.key) is track

    def want(self, key: Key) -> None:
        """Fetch one publication by name in the background; asking again changes nothing."""
        if self._failure is None:
            self._wanted.want(key)

    async def fetch(self, key: Key, root: bytes | None = None) -> None:
        """Fetch one publication by name, maybe an old one; the caller puts a deadline around it.

        Args:
            root: 32 bytes; None takes whatever the origin signed.

        Raises:
            PublicationError: the origin published another root at this place, or one that nobody can use.
        """
        await ByName(self, key, root).fetch()
