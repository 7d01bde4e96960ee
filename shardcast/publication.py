"""One publication as it is learnt, record by record: pure checks, no input or output.

    empty --publication--> open --shard*--> ... --publication.manifest--> sealed --head--> announced

`take` accepts the origin's envelopes in this order (shards in any order among themselves, the manifest also before
all shards are known) and refuses everything that is not signed by the run's origin or does not hold together.
Frames are the form envelopes travel and are stored in: u32 length, then the envelope, repeated.

Not covered: freshness and the order of heads (`heads`), and the shards' bytes (`download`, `archive`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from blake3 import blake3

from protocol import codec
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.limits import HASH_BYTES, MAX_ENVELOPE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from shardcast.errors import ForkError, PublicationError
from shardcast.layout import root_of_states, shard_length
from shardcast.limits import MAX_STATE_HASHES, WIRE_SLACK_BYTES
from shardcast.records import (
    CODEC_CLASSES,
    CODEC_FULL,
    HEAD_KIND,
    MANIFEST_KIND,
    NO_HASH,
    OPEN_KIND,
    SHARD_KIND,
    WITH_BASE,
    Head,
    PublicationManifest,
    PublicationOpen,
    ShardRecord,
)

Key = tuple[int, int]
"""(epoch, step): the order of publications."""


def pack_frames(envelopes: Iterable[bytes]) -> bytes:
    """Envelopes as they travel: u32 big-endian length, then the bytes, repeated."""
    return b"".join(struct.pack(">I", len(raw)) + raw for raw in envelopes)


def split_frames(data: bytes) -> list[bytes]:
    """The inverse of `pack_frames`. Total: raises only DecodeError."""
    frames = []
    at = 0
    while at < len(data):
        if len(data) - at < 4:
            raise DecodeError("frames end inside a length")
        (size,) = struct.unpack_from(">I", data, at)
        if size > MAX_ENVELOPE_BYTES:
            raise DecodeError(f"a frame of {size} bytes, over the bound of {MAX_ENVELOPE_BYTES}", ReasonCode.OVERSIZE)
        if len(data) - at - 4 < size:
            raise DecodeError("frames end inside an envelope")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return frames


def records_digest(payloads: Iterable[bytes]) -> bytes:
    """`PublicationManifest.records`: BLAKE3 over the shard records' payloads in order of their index."""
    hasher = blake3()
    for payload in payloads:
        hasher.update(payload)
    return hasher.digest()


class Publication:
    """What is known of one publication of `run`. Everything it holds is signed by the key that opened it, one that the
    run's origin has or had; the head maybe by a later one. Which heads may be followed is the follower's business."""

    def __init__(self, run: Run, *, revoked: bool = False) -> None:
        """
        Args:
            revoked: take records of keys that were revoked too; the caller knows from elsewhere what they must say.
        """
        self._run = run
        self._signers = frozenset((*run.origins, *(run.revoked_origins if revoked else ())))
        self._known: set[bytes] = set()
        self._envelopes: dict[int, Envelope] = {}
        self._wire_bytes = 0
        """Of the shards whose records are known."""
        self.opening: PublicationOpen | None = None
        self.opening_envelope: Envelope | None = None
        self.manifest: PublicationManifest | None = None
        self.manifest_envelope: Envelope | None = None
        self.head: Head | None = None
        self.head_envelope: Envelope | None = None

    @property
    def key(self) -> Key:
        return (self.open.epoch, self.open.step)

    @property
    def open(self) -> PublicationOpen:
        """The open record. Raises PublicationError while there is none."""
        if self.opening is None:
            raise PublicationError("a publication starts with its open record; this one has none")
        return self.opening

    @property
    def opener(self) -> bytes:
        """The key that signed the open record; empty while there is none."""
        return self.opening_envelope.signer if self.opening_envelope is not None else b""

    @property
    def attempt(self) -> int:
        """Rises with each publication the origin opens: its open record's sequence."""
        return self.opening_envelope.sequence if self.opening_envelope is not None else 0

    @property
    def shards(self) -> int:
        return self.open.shards

    def take(self, raw: bytes) -> str:
        """Check one envelope and add it; returns its kind. The same bytes again are accepted without a check.

        Raises:
            DecodeError, EnvelopeError: no envelope of this run's origin; the sender is to blame.
            PublicationError: signed, but it does not fit the records before it.
            ForkError: signed, and contradicts another signed record; `evidence` holds both.
        """
        if raw in self._known:
            return parse(raw).kind
        return self._add(open_envelope(raw, run=self._run.id))

    def take_own(self, envelope: Envelope) -> str:
        """Add an envelope that this process signed, or checked before: all of `take` but the signature."""
        return self._add(envelope)

    def _add(self, envelope: Envelope) -> str:
        if envelope.signer not in self._signers:
            raise EnvelopeError("signed by another key than the run's origin's")
        if envelope.kind in (SHARD_KIND, MANIFEST_KIND) and self.opener not in (b"", envelope.signer):
            raise EnvelopeError("signed by another of the origin's keys than the publication's open record")
        if envelope.kind == OPEN_KIND:
            self._take_open(envelope)
        elif envelope.kind == SHARD_KIND:
            self._take_shard(envelope)
        elif envelope.kind == MANIFEST_KIND:
            self._take_manifest(envelope)
        elif envelope.kind == HEAD_KIND:
            self._take_head(envelope)
        else:
            raise PublicationError(f"no record of a publication: {envelope.kind}", ReasonCode.WRONG_KIND)
        self._known.add(envelope.raw)
        return envelope.kind

    def expect(self, index: int) -> ShardRecord | None:
        """The record of shard `index`; None while neither it nor the manifest is known. From the manifest alone it has
        no `wire_hash` (`NO_HASH`) unless the publication is a full one."""
        envelope = self._envelopes.get(index)
        if envelope is not None:
            return envelope.record(ShardRecord)
        if self.manifest is None or not 0 <= index < self.shards:
            return None
        state = self.manifest.states[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        length = shard_length(self.open.raw_bytes, index)
        if self.manifest.codec != CODEC_FULL:
            # Only its own record says what a frame is; the state can be asked for, and proven, without.
            return ShardRecord(self.open.publication, index, 0, length, NO_HASH, NO_HASH, state)
        return ShardRecord(self.open.publication, index, length, length, state, NO_HASH, state)

    def states(self) -> list[bytes]:
        """State hashes of all shards; only after the manifest."""
        if self.manifest is None:
            raise PublicationError("the publication has no manifest yet")
        states = self.manifest.states
        return [states[at : at + HASH_BYTES] for at in range(0, len(states), HASH_BYTES)]

    def shard_envelope(self, index: int) -> bytes | None:
        """The signed record of one shard, if known."""
        envelope = self._envelopes.get(index)
        return envelope.raw if envelope is not None else None

    def shard_envelopes(self) -> list[bytes]:
        """The shard records known, by index."""
        return [self._envelopes[index].raw for index in sorted(self._envelopes)]

    def frames(self) -> list[bytes]:
        """Everything known, in the order of the protocol."""
        ends = (self.manifest_envelope, self.head_envelope)
        start = [self.opening_envelope.raw] if self.opening_envelope is not None else []
        return start + self.shard_envelopes() + [e.raw for e in ends if e is not None]

    def _take_open(self, envelope: Envelope) -> None:
        record = envelope.record(PublicationOpen)
        if self.opening_envelope is not None:
            if self.opening_envelope.payload == envelope.payload:
                return
            if record.publication == self.open.publication:
                raise ForkError(
                    "the origin opened one publication id twice with different contents",
                    (self.opening_envelope.raw, envelope.raw),
                )
            raise PublicationError("the open record of another publication")
        if record.codec > CODEC_CLASSES:
            raise PublicationError(
                f"codec {record.codec} is unknown here; upgrade headwater", ReasonCode.UNSUPPORTED_VERSION
            )
        if record.layout != self._run.manifest.model.layout:
            raise PublicationError(
                "the publication has another layout than the run's manifest", ReasonCode.HASH_MISMATCH
            )
        if not 0 < record.shards <= MAX_STATE_HASHES or record.shards != -(-record.raw_bytes // SHARD_BYTES):
            raise PublicationError(f"{record.shards} shards do not fit {record.raw_bytes} bytes")
        if (record.base != NO_HASH) != (record.codec in WITH_BASE):
            raise PublicationError("only a publication of patches has a base, and each of them has one")
        if record.max_wire_bytes > record.raw_bytes + record.shards * WIRE_SLACK_BYTES:
            raise PublicationError("the publication announces more wire bytes than allowed", ReasonCode.OVERSIZE)
        self.opening, self.opening_envelope = record, envelope

    def _take_shard(self, envelope: Envelope) -> None:
        record = envelope.record(ShardRecord)
        if record.publication != self.open.publication:
            raise PublicationError("the record of another publication's shard")
        known = self._envelopes.get(record.index)
        if known is not None and known.payload != envelope.payload:
            raise ForkError(
                f"the origin signed two different records for shard {record.index}", (known.raw, envelope.raw)
            )
        if not record.index < self.shards:
            raise PublicationError(f"shard {record.index} of {self.shards}")
        self._check_shard(record)
        if self.manifest is not None:
            self._check_against_manifest(record, envelope)
        self._envelopes[record.index] = envelope
        if known is None:
            self._wire_bytes += record.wire_bytes
        if self.manifest is not None:
            self._check_digest(self.manifest)

    def _check_shard(self, record: ShardRecord) -> None:
        """Lengths and hashes of one record. Raises PublicationError."""
        opening = self.open
        most = record.raw_bytes if opening.codec == CODEC_FULL else record.raw_bytes + WIRE_SLACK_BYTES
        least = record.raw_bytes if opening.codec == CODEC_FULL else 1
        if record.raw_bytes != shard_length(opening.raw_bytes, record.index):
            raise PublicationError(f"shard {record.index} has wrong lengths", ReasonCode.LENGTH_MISMATCH)
        if not least <= record.wire_bytes <= most:
            raise PublicationError(f"shard {record.index} has wrong lengths", ReasonCode.LENGTH_MISMATCH)
        known = record.index in self._envelopes
        if not known and self._wire_bytes + record.wire_bytes > opening.max_wire_bytes:
            raise PublicationError("the shards are longer than announced", ReasonCode.OVERSIZE)
        if (record.old_hash != NO_HASH) != (opening.codec in WITH_BASE):
            raise PublicationError(f"shard {record.index}: only a patch has a base, and each has one")
        if record.wire_hash == NO_HASH or (opening.codec == CODEC_FULL and record.wire_hash != record.new_hash):
            raise PublicationError(f"shard {record.index} of a full publication has two hashes")

    def _take_manifest(self, envelope: Envelope) -> None:
        record = envelope.record(PublicationManifest)
        opening = self.open
        if self.manifest_envelope is not None:
            if self.manifest_envelope.payload == envelope.payload:
                return
            raise ForkError(
                "the origin signed two different manifests for one publication",
                (self.manifest_envelope.raw, envelope.raw),
            )
        same = (record.epoch, record.step, record.publication, record.base, record.layout, record.codec)
        if same != (opening.epoch, opening.step, opening.publication, opening.base, opening.layout, opening.codec):
            raise PublicationError("the manifest belongs to another publication")
        full = opening.codec == CODEC_FULL
        if (
            record.raw_bytes != opening.raw_bytes
            or record.wire_bytes > opening.max_wire_bytes
            or (full and record.wire_bytes != opening.raw_bytes)
        ):
            raise PublicationError("the manifest's sizes are not the ones announced", ReasonCode.LENGTH_MISMATCH)
        if len(record.states) != HASH_BYTES * opening.shards:
            raise PublicationError("the manifest does not hold one state hash per shard", ReasonCode.LENGTH_MISMATCH)
        states = [record.states[at : at + HASH_BYTES] for at in range(0, len(record.states), HASH_BYTES)]
        if root_of_states(states) != record.root:
            raise PublicationError("the manifest's root is not the root of its state hashes", ReasonCode.HASH_MISMATCH)
        self.manifest, self.manifest_envelope = record, envelope
        try:
            for known in self._envelopes.values():
                self._check_against_manifest(known.record(ShardRecord), known)
            self._check_digest(record)
        except (ForkError, PublicationError):
            self.manifest, self.manifest_envelope = None, None
            raise

    def _check_against_manifest(self, record: ShardRecord, envelope: Envelope) -> None:
        if self.manifest is None or self.manifest_envelope is None:
            return
        at = record.index * HASH_BYTES
        if self.manifest.states[at : at + HASH_BYTES] != record.new_hash:
            raise ForkError(
                f"the manifest contradicts the signed record of shard {record.index}",
                (envelope.raw, self.manifest_envelope.raw),
            )

    def _check_digest(self, manifest: PublicationManifest) -> None:
        if len(self._envelopes) != self.shards or self.manifest_envelope is None:
            return
        payloads = [self._envelopes[index].payload for index in range(self.shards)]
        if records_digest(payloads) != manifest.records:
            raise ForkError(
                "the manifest does not equal the signed shard records",
                (self.manifest_envelope.raw, *self.shard_envelopes()),
            )
        records = [self._envelopes[index].record(ShardRecord) for index in range(self.shards)]
        if self._wire_bytes != manifest.wire_bytes:
            raise PublicationError("the manifest counts other wire bytes than the records", ReasonCode.LENGTH_MISMATCH)
        if manifest.base != NO_HASH and root_of_states([record.old_hash for record in records]) != manifest.base:
            raise PublicationError("the shards apply to another root than the base", ReasonCode.HASH_MISMATCH)

    def _take_head(self, envelope: Envelope) -> None:
        record = envelope.record(Head)
        if self.manifest is None or self.manifest_envelope is None:
            raise PublicationError("a head came before its manifest")
        if (record.epoch, record.step) != self.key:
            raise PublicationError("the head of another publication")
        if record.publication == self.open.publication and record.manifest != self.manifest_envelope.digest:
            raise ForkError(
                "the head names another manifest for this publication", (self.manifest_envelope.raw, envelope.raw)
            )
        if record.publication != self.open.publication:
            raise PublicationError("the head names another publication of this step")
        if record.root != self.manifest.root:
            raise ForkError("head and manifest name different roots", (self.manifest_envelope.raw, envelope.raw))
        if self.head_envelope is None or envelope.issued_at > self.head_envelope.issued_at:
            self.head, self.head_envelope = record, envelope


def publication_from(run: Run, frames: Iterable[bytes], *, revoked: bool = False, checked: bool = False) -> Publication:
    """A publication from all its frames. Raises as `Publication.take`.

    Args:
        checked: these very bytes were taken before, so their signatures hold.
    """
    publication = Publication(run, revoked=revoked)
    for raw in frames:
        if checked:
            publication.take_own(parse(raw))
        else:
            publication.take(raw)
    return publication


def manifest_for(opening: PublicationOpen, records: list[ShardRecord]) -> PublicationManifest:
    """The manifest that equals `records`, one per shard in order."""
    states = [record.new_hash for record in records]
    return PublicationManifest(
        epoch=opening.epoch,
        step=opening.step,
        publication=opening.publication,
        base=opening.base,
        layout=opening.layout,
        codec=opening.codec,
        raw_bytes=opening.raw_bytes,
        wire_bytes=sum(record.wire_bytes for record in records),
        root=root_of_states(states),
        records=records_digest(codec.encode(record) for record in records),
        states=b"".join(states),
    )
