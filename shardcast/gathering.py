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
from shardcast.earlier import frames_taken, keep_fork
from shardcast.errors import ForkError, PublicationError, SourceError
from shardcast.heads import SeenHeads
from shardcast.publication import Publication
from shardcast.schedule import SourceHealth
from shardcast.source import Source

_PAUSE_MAX_S = 2.0

_NEXT_AFTER_S = 3.0
_BLOBS_AT_ONCE = 3
"""A source that has not sent a blob for so long is not waited for alone: nothing is fetched before the layout is here,
and one that trickles it would hold everything up. More at once would take a tokenizer's bytes as often."""


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
    """A verified blob from the first source that brings it. Raises SourceError when none has it now."""
    failure = SourceError("(no source)", f"blob {digest.hex()[:16]} is not to be had", ReasonCode.RECORD_MISSING)
    waiting = list(sources)
    asked: set[asyncio.Task[bytes]] = set()
    try:
        while waiting or asked:
            if waiting and len(asked) < _BLOBS_AT_ONCE:
                asked.add(asyncio.create_task(waiting.pop(0).blob(digest, limit)))
            more = waiting and len(asked) < _BLOBS_AT_ONCE
            done, asked = await asyncio.wait(
                asked, timeout=_NEXT_AFTER_S if more else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                try:
                    return task.result()
                except SourceError as exc:
                    failure = exc
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    raise failure


async def _from(source: Source, publication: Publication, run: Run, seen: SeenHeads) -> None:
    taken = 0
    while frames := await source.records(publication.key, taken, 0):
        taken = frames_taken(source, publication, taken, frames)
        try:
            for raw in frames:
                publication.take(raw)
        except ForkError as exc:
            keep_fork(source, run, seen, publication, exc)
            raise
        except (DecodeError, EnvelopeError, PublicationError) as exc:
            raise SourceError(source.address, str(exc), exc.code) from exc
