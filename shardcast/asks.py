"""What is asked of a source for one shard, and what becomes of the answer: the line between what is fetched and how.

A shard travels as one wire shard: its raw bytes (codec 0), or one frame of `codecs`. Whoever holds the state that a
publication applies to fetches the publication's own frame; whoever holds an older one, or none, asks for the state
itself (`states`), which any server can make and only the shard's hash can prove.

    shard/I              the publication's own wire shard: its length and hash are signed
    state/I              the state after it, as an anchor: checked by its state hash alone
    state/I?old=HASH     the same as a patch to the shard that has this hash, where that is shorter

Not covered: which source is asked (`schedule`, `download`), and where bytes go (`puller`, `relay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardcast.records import NO_HASH, ShardRecord


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that brings one shard."""

    index: int
    """Of the shard."""
    path: str
    """Below /v1/{run}/."""
    limit: int
    """Most bytes the answer may have; checked before memory is taken."""
    length: int | None
    """Exactly as many, where a signed record says so (`wire_bytes`)."""
    digest: bytes | None
    """BLAKE3 the bytes must have, where a signed record says so (`wire_hash`)."""
    by_name: bool = False
    """Any server that holds the publication's shard can make it; no origin signed its bytes, so no stamp speaks of
    them."""
    old: bytes = NO_HASH
    """State hash of the shard that the answer may change; for the sink alone."""


class Sink(Protocol):
    """Where one publication's shards go. `present` and `take` may block and are called in threads, `take` for several
    shards at once but never twice at once for one; the others are called in the event loop."""

    def asks(self, record: ShardRecord) -> Sequence[Ask]:
        """In order of preference: the next is tried where a source refuses one. Asked anew before each request. Empty
        when nothing can be asked yet: the shard's signed record is still to come."""

    def may_be_present(self, record: ShardRecord) -> bool:
        """Whether `present` has to be asked at all. At once: most shards of most downloads are new, and asking costs
        another thread's turn."""

    def present(self, record: ShardRecord) -> bool:
        """Whether this shard needs no request: an earlier process left it (re-hashed, not believed), or it did not
        change."""

    def take(self, record: ShardRecord, ask: Ask, body: memoryview) -> bool:
        """Decode and store what was received. `body` has the ask's length and digest already, where those are known.

        Returns:
            Whether the shard is done. If not, `asks` now names what is still missing of it.

        Raises:
            WrongBodyError: the bytes are not the shard, and nobody signed them: the source is to blame.
            PublicationError: the origin signed these bytes, and they are not the shard: nobody else is to blame.
            StoreError, OSError: this machine cannot store it.
        """

    def verified(self, record: ShardRecord) -> None:
        """The shard is done (`take` or `present` said so): others may see it."""

    def abandon(self) -> None:
        """Remove what was written; the download is given up."""
