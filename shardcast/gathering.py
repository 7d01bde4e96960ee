"""The signed records of a publication's shards, from whoever has them.

A source may send a publication and keep records back, by mistake or on purpose: then others are asked. Relays need
every record to pass them on, and a proof of a relay's lie needs one.

Not covered: learning of publications (`follower`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.manifest import Run
from shardcast.earlier import blame_thief, frames_taken
from shardcast.errors import ForkError, PublicationError, SourceError
from shardcast.heads import SeenHeads
from shardcast.publication import Publication, pack_frames
from shardcast.schedule import SourceHealth
from shardcast.source import Source

_PAUSE_MAX_S = 2.0


async def gather_records(
    publication: Publication,
    sources: Callable[[], Sequence[tuple[Source, SourceHealth]]],
    charge: Callable[[SourceHealth, SourceError], None],
    run: Run,
    seen: SeenHeads,
    *,
    head: bool = False,
) -> None:
    """Ask the sources until the signed record of every shard is known. The caller cancels it, or has a deadline.

    Args:
        sources: those to ask now, best first.
        charge: told of what one sends wrong.
        head: until a head is known, too.

    Raises:
        ForkError: two records of the origin contradict each other; the evidence is kept.
    """

    def lacks() -> bool:
        return len(publication.shard_envelopes()) < publication.shards or (head and publication.head is None)

    pause = 0.2
    while lacks():
        for source, health in sources():
            try:
                await _from(source, publication, run, seen)
            except SourceError as exc:
                charge(health, exc)
            if not lacks():
                return
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _PAUSE_MAX_S)


async def first_blob(sources: Sequence[Source], digest: bytes, limit: int) -> bytes:
    """A verified blob from the first source that has it. Raises SourceError when none has it now."""
    failure = SourceError("(no source)", f"blob {digest.hex()[:16]} is not to be had", ReasonCode.RECORD_MISSING)
    for source in sources:
        try:
            return await source.blob(digest, limit)
        except SourceError as exc:
            failure = exc
    raise failure


async def _from(source: Source, publication: Publication, run: Run, seen: SeenHeads) -> None:
    taken = 0
    while frames := await source.records(publication.key, taken, 0):
        taken = frames_taken(source, publication, taken, frames)
        try:
            for raw in frames:
                publication.take(raw)
        except ForkError as exc:
            blame_thief(source, run, exc)
            seen.record_fork(pack_frames((*publication.frames(), *exc.evidence)))
            raise
        except (DecodeError, EnvelopeError, PublicationError) as exc:
            raise SourceError(source.address, str(exc), exc.code) from exc
