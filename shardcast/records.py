"""The records of a publication (RULES 8), all signed by the run's origin key.

    order   record               envelope kind           says
    1       PublicationOpen      publication             what follows: layout, codec, sizes
    2..     ShardRecord          shard                   one shard is ready: its lengths and hashes
    last    PublicationManifest  publication.manifest    all state hashes and their Merkle root; equals the records
    then    Head                 head                    this is the newest policy

Run, signer, issue and expiry times are the envelope's. `Challenge` (kind `challenge`) is signed by whoever serves,
with its own key, to prove that an address is its own. `WeightsPass` and `PassShown` say who may pull from whom
(`passes`); a relay's stamp is `protocol.records.RelayStamp`.

`root = merkle root over BLAKE3(raw shard) leaves`, raw shards of 8 MiB of the canonical data (`layout`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Blob, record
from protocol.limits import HASH_BYTES, KIB, MAX_ENVELOPE_BYTES
from protocol.records import U8, U32, U64, Hash, Id, Key, Line
from shardcast.limits import MAX_STATES_BYTES

OPEN_KIND = "publication"
SHARD_KIND = "shard"
MANIFEST_KIND = "publication.manifest"
HEAD_KIND = "head"
CHALLENGE_KIND = "challenge"
PASS_KIND = "weights.pass"  # noqa: S105
SHOWN_KIND = "weights.shown"
STAMP_KIND = "relay.stamp"

CODEC_FULL, CODEC_ANCHOR, CODEC_GAPS, CODEC_CLASSES = range(4)
"""`PublicationOpen.codec`. Full: the wire bytes of a shard are its raw bytes. The others' are frames (`codecs`): an
anchor's need nothing else, those of the last two may change the shard of `base`."""

WITH_BASE = (CODEC_GAPS, CODEC_CLASSES)
"""Codecs of publications that apply to a base root."""

NO_HASH = bytes(HASH_BYTES)
"""Stands where a shard has no base, and where no wire bytes are signed."""


@record(1 * KIB)
@dataclass(frozen=True)
class PublicationOpen:
    epoch: U64
    step: U64
    publication: Id
    """Random; a crashed origin opens a new one for the same step."""
    base: Hash
    """Root the shards apply to; `NO_HASH` for full shards and anchors."""
    layout: Hash
    codec: U8
    raw_bytes: U64
    """Size of the canonical data."""
    shards: U32
    max_wire_bytes: U64
    """Upper bound of all shards' wire bytes together."""


@record(1 * KIB)
@dataclass(frozen=True)
class ShardRecord:
    publication: Id
    index: U32
    wire_bytes: U32
    raw_bytes: U32
    wire_hash: Hash
    old_hash: Hash
    """BLAKE3 of the raw shard before applying; `NO_HASH` for full shards and anchors."""
    new_hash: Hash
    """BLAKE3 of the raw shard after applying: the state hash."""


@record(MAX_ENVELOPE_BYTES - KIB)
@dataclass(frozen=True)
class PublicationManifest:
    epoch: U64
    step: U64
    publication: Id
    base: Hash
    layout: Hash
    codec: U8
    raw_bytes: U64
    wire_bytes: U64
    root: Hash
    records: Hash
    """BLAKE3 over the payloads of all shard records in order of their index."""
    states: Annotated[bytes, Blob(MAX_STATES_BYTES, HASH_BYTES)]
    """State hash of every shard in order."""


@record(1 * KIB)
@dataclass(frozen=True)
class Head:
    epoch: U64
    step: U64
    publication: Id
    manifest: Hash
    """BLAKE3 of the manifest's envelope bytes."""
    root: Hash
    anchor: U64
    """Step of the newest full publication of this epoch, from which a joiner starts."""


@record(1 * KIB)
@dataclass(frozen=True)
class Challenge:
    nonce: Id


@record(1 * KIB)
@dataclass(frozen=True)
class WeightsPass:
    """The coordinator lets the envelope's audience pull from one parent, until the envelope expires."""

    parent: Key
    """Who serves there: the origin, or the relay whose stamp the child must find on every shard."""
    url: Line


@record(1 * KIB)
@dataclass(frozen=True)
class PassShown:
    """The pass's audience shows it to the parent (the audience of this envelope), now."""

    admission: Hash
    """BLAKE3 of the pass's envelope bytes."""
