"""A publication asked for by name: its records from whichever source has them, then its shards like any other's.

    planned sources, one after another, a second apart, or at once when one refuses;
    spare ones, too, once nobody brought its manifest for `SPARE_AFTER_S`  ->  records  ->  Track  ->  Download

A relay may hold the question while it fetches what it skipped, and a dead one doesn't answer: so the next is asked
meanwhile, and the first whole set of records counts.

Not covered: which publications to follow (`follower`), and the shards (`download`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from protocol.errors import ReasonCode
from shardcast.earlier import frames_taken
from shardcast.errors import PublicationError, SourceError
from shardcast.focus import Track
from shardcast.heads import publication_name
from shardcast.limits import DEFAULT_WAIT_MS
from shardcast.publication import Key
from shardcast.schedule import SPARE_AFTER_S, SourceHealth
from shardcast.source import Source

if TYPE_CHECKING:
    from shardcast.follower import Follower

log = logging.getLogger("shardcast.named")

_NEXT_AFTER_S = 1.0
"""How long one source may take before the next is asked as well."""

_PAUSE_S = 0.2
_GONE_STEPS = 8
"""A policy this much older than the newest one here is not on its way any more: relays keep so many."""
_GONE_AFTER_S = 3.0
"""A relay that has just started may fetch what it is asked for; this long nobody is believed that it is gone."""

MAX_WANTED = 32
"""Publications that children's questions have fetched at once. Each asks the parents again and again, also for what
there never was: without a bound a child could make a relay ask for millions."""

_WANTED_S = 60.0
"""As long as a lease lasts: whoever asked for it has no use for it later."""


class ByName:
    """One question of one caller, who puts a deadline around it."""

    def __init__(self, follower: Follower, key: Key, root: bytes | None) -> None:
        """
        Args:
            root: 32 bytes; None takes whatever the origin signed.
        """
        self._follower = follower
        self._key = key
        self._root = root
        self._began = time.monotonic()
        self._without: set[str] = set()
        """Addresses of sources that said they don't have it."""

    async def fetch(self) -> None:
        """Return once it is whole here.

        Raises:
            PublicationError: the origin published another root at this place, or one that nobody can use.
            SourceError(`record-missing`): it is so old that all sources have removed it.
        """
        while True:
            self._follower.check()
            track = await self._learn()
            if track is None:
                self._give_up_what_is_gone()
                await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))
                continue
            try:
                if await self._finished(track):
                    return
            finally:
                track.pins -= 1

    async def _learn(self) -> Track | None:
        """A track, pinned, whose manifest is known; None when nobody has it now."""
        waiting = self._places()
        asked: dict[asyncio.Task[Track], SourceHealth] = {}
        newest = -_NEXT_AFTER_S
        try:
            while waiting or asked:
                now = time.monotonic()
                if waiting and (not asked or now - newest >= _NEXT_AFTER_S):
                    source, health = waiting.pop(0)
                    asked[asyncio.create_task(self._from(source, health))] = health
                    newest = now
                done, _ = await asyncio.wait(asked, timeout=_NEXT_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                found = self._found(done, asked)
                if found is not None:
                    return found
                if not waiting and asked:
                    waiting = [one for one in self._places() if one[1] not in asked.values()]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    def _give_up_what_is_gone(self) -> None:
        """Raises SourceError once nobody has it and nobody will: a lease may be older than what relays keep."""
        newest = self._follower.newest
        if newest is None or newest.key < (self._key[0], self._key[1] + _GONE_STEPS):
            return
        named = [source.address for source, _, _ in self._follower.places()]
        if time.monotonic() - self._began >= _GONE_AFTER_S and named and self._without.issuperset(named):
            text = (
                f"{publication_name(self._key)} is held nowhere any more; the newest is {publication_name(newest.key)}"
            )
            raise SourceError(", ".join(named), text, ReasonCode.RECORD_MISSING)

    def _places(self) -> list[tuple[Source, SourceHealth]]:
        """Whom to ask, in this order; spare ones only once planned ones had their time."""
        now = time.monotonic()
        places = [place for place in self._follower.places() if place[1].resting_until <= now]
        late = now - self._began >= SPARE_AFTER_S
        return [(source, health) for source, health, spare in places if late or not spare]

    def _found(self, done: set[asyncio.Task[Track]], asked: dict[asyncio.Task[Track], SourceHealth]) -> Track | None:
        """The first good answer of these; what is wrong with the others is charged to their sources."""
        found: Track | None = None
        failure: BaseException | None = None
        for task in done:
            health = asked.pop(task)
            try:
                track = task.result()
            except SourceError as exc:
                if exc.code == ReasonCode.RECORD_MISSING:
                    self._without.add(health.address)
                else:
                    self._without.discard(health.address)
                self._follower.charge(health, exc)
            except Exception as exc:  # noqa: BLE001 - raised below, once every answer was looked at
                failure = exc
            else:
                if found is not None:
                    track.pins -= 1
                found = found or track
        if failure is not None:
            if found is not None:
                found.pins -= 1
            raise failure
        return found

    async def _from(self, source: Source, health: SourceHealth) -> Track:
        """One source's records, until the manifest is known; the track is pinned on return."""
        follower, key = self._follower, self._key
        frames = await source.records(key, 0, 0)
        # A known root says what it must be, whoever signed it; without one it must be a key that counts.
        publication = follower.opened(source, frames[0], revoked=self._root is not None) if frames else None
        if publication is None or publication.key != key:
            raise SourceError(source.address, "sent another publication than asked for", ReasonCode.WRONG_KIND)
        track = await follower.track(source, publication)
        track.pins += 1
        with contextlib.ExitStack() as stack:
            stack.callback(_unpin, track)
            taken = 0
            while True:
                for raw in frames:
                    follower.take(source, health, track, raw, follow=False)
                taken = frames_taken(source, track.publication, taken, frames)
                if track.publication.manifest is not None:
                    break
                follower.advance()
                frames = await source.records(key, taken, DEFAULT_WAIT_MS)
                if not frames:
                    raise SourceError(
                        source.address, f"{publication_name(key)} has no manifest there", ReasonCode.TOO_SLOW
                    )
            self._check_root(source, track)
            stack.pop_all()
        return track

    def _check_root(self, source: Source, track: Track) -> None:
        publication = track.publication
        if self._root is None or publication.manifest is None or publication.manifest.root == self._root:
            return
        if publication.opener in self._follower.run.revoked_origins:
            raise SourceError(source.address, "another root, signed by a revoked key", ReasonCode.HASH_MISMATCH)
        raise PublicationError(
            f"{publication_name(self._key)} was published with root {publication.manifest.root.hex()[:16]}, "
            f"not {self._root.hex()[:16]} as asked for",
            ReasonCode.HASH_MISMATCH,
        )

    async def _finished(self, track: Track) -> bool:
        """Wait for a pinned track; False if another attempt to publish took its place."""
        track.settle()
        self._follower.advance()
        while not track.done.is_set():
            self._follower.check()
            if not self._follower.follows(track):
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEXT_AFTER_S):
                    await track.done.wait()
        if track.refused is not None:
            raise track.refused
        return True


class Wanted:
    """Publications that somebody else asked this follower for: fetched in the background."""

    def __init__(self, follower: Follower, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """
        Args:
            spawn: starts a task whose failure somebody sees.
        """
        self._follower, self._spawn = follower, spawn
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    def want(self, key: Key) -> None:
        """For `_WANTED_S` at most, and not beside `MAX_WANTED` others."""
        if key not in self._tasks and len(self._tasks) < MAX_WANTED:
            task = self._tasks[key] = self._spawn(self._fetch(key))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _fetch(self, key: Key) -> None:
        try:
            async with asyncio.timeout(_WANTED_S):
                await ByName(self._follower, key, None).fetch()
        except TimeoutError:
            log.warning("%s was asked for here, but no source has it", publication_name(key))
        except PublicationError as exc:
            log.warning("%s", exc)


def _unpin(track: Track) -> None:
    track.pins -= 1
