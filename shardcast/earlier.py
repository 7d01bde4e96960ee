"""Publications opened by a key the origin had before: when they are believed, and who is blamed when they are not.

After a rotation the newest publication is still the earlier key's, and its head is signed anew by the present one. The
head names the manifest's hash, and the manifest everything else: so it vouches for all of it, whoever signed the rest.
Without that head it could be a thief's, and must not replace anything.

Not covered: which keys the origin has (`protocol.chain`), following (`follower`).
"""

from __future__ import annotations

from protocol.envelope import parse
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.manifest import Run
from shardcast.errors import ForkError, PublicationError, SourceError
from shardcast.heads import SeenHeads, publication_name
from shardcast.publication import Publication, pack_frames
from shardcast.source import Source

ENDS = 3
"""Frames of a publication beside its shards' records: the open record, the manifest and the head."""


def frames_taken(source: Source, publication: Publication, taken: int, frames: list[bytes]) -> int:
    """How many frames a source has sent now. Raises SourceError when it repeats itself and would never end."""
    if taken + len(frames) > publication.shards + ENDS:
        raise SourceError(
            source.address, f"sent more frames of {publication_name(publication.key)} than it has", ReasonCode.OVERSIZE
        )
    return taken + len(frames)


async def vouched_frames(source: Source, publication: Publication, frames: list[bytes], origin: bytes) -> list[bytes]:
    """All frames of a publication, once its head by the present origin is among them.

    Args:
        frames: the first ones, from `source`; the rest is asked for, and must be there.
        origin: the present origin key.

    Raises:
        SourceError: a record does not hold, or that head is not to be had.
    """
    taken = 0
    while frames:
        taken = frames_taken(source, publication, taken, frames)
        try:
            for raw in frames:
                publication.take(raw)
        except (DecodeError, EnvelopeError, PublicationError, ForkError) as exc:
            raise SourceError(source.address, str(exc), exc.code) from exc
        head = publication.head_envelope
        if head is not None and head.signer == origin:
            return publication.frames()
        frames = await source.records(publication.key, taken, 0)
    raise SourceError(
        source.address,
        f"{publication_name(publication.key)} was opened by a key the origin had before; its present one must sign "
        "the head",
        ReasonCode.BAD_SIGNATURE,
    )


def keep_fork(source: Source, run: Run, seen: SeenHeads, publication: Publication, fork: ForkError) -> None:
    """Keep the evidence of a fork, which its caller raises.

    Raises:
        SourceError: it rests on a revoked key's signature: whoever stole that must not stop anybody.
    """
    if any(parse(raw).signer in run.revoked_origins for raw in fork.evidence):
        raise SourceError(source.address, f"{fork}, by a revoked key", ReasonCode.BAD_SIGNATURE) from fork
    seen.record_fork(pack_frames((*publication.frames(), *fork.evidence)))
