"""Which unfinished publication to download: a pure decision, and what is remembered of each one meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shardcast.download import Download
from shardcast.errors import PublicationError
from shardcast.publication import Key, Publication

_IDLE_TRACKS = 2


@dataclass
class Track:
    """One publication being learnt and fetched."""

    publication: Publication
    download: Download
    pins: int = 0
    """How many callers asked for it by name: it is then never dropped, and needs no head."""
    announced: bool = False
    """Its head was accepted: fresh and no rollback."""
    task: asyncio.Task[None] | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Manifest and head are here, so that it may become visible once its shards are."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    refused: PublicationError | None = None
    """Why the origin must publish it anew."""

    def settle(self) -> None:
        if self.publication.manifest is not None and (self.announced or self.pins):
            self.ready.set()


@dataclass(frozen=True)
class Candidate:
    """What `choose_focus` needs to know of a track."""

    key: Key
    announced: bool


def choose_focus(current: Candidate | None, others: Iterable[Candidate], dropped: bool) -> Key | None:
    """Which unfinished publication to download.

    The newest wins, but an announced download gives way only to another announced one (an origin that died half-way
    must not starve us), and only once between two finished ones (else a slow link would never finish any).

    Args:
        current: the publication being downloaded, if any.
        others: the other unfinished ones.
        dropped: whether a download was already given up since the last finished one.
    """
    newest = max(others, key=lambda c: c.key, default=None)
    if current is None or newest is None:
        chosen = current or newest
        return chosen.key if chosen is not None else None
    if newest.key < current.key:
        return current.key
    if current.announced and (dropped or not newest.announced):
        return current.key
    return newest.key


def idle_tracks(tracks: Mapping[Key, Track], wanted: Collection[Key | None]) -> list[Key]:
    """Which tracks to drop: of those that nobody fetches, the newest few are enough. Each has its room on the disk, and
    a source may announce old publications for as long as nothing is whole here.

    Args:
        wanted: places of those that are kept.
    """
    idle = (key for key, track in tracks.items() if not (track.done.is_set() or track.pins or track.task))
    return sorted(key for key in idle if key not in wanted)[:-_IDLE_TRACKS]
