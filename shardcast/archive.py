"""The published archive, checked from its files alone, opened for reading only.

Every record, shard and blob under `RUN/published` is re-verified against the run's origin key, and every frame decoded
to the state it was signed for; what does not hold is a `Problem` that names the record, e.g.
`published/e0000-s00000012/shard-000000.bin`. Damage is never an exception; only a file that cannot be read at all
raises OSError. What rests on something damaged is not named again.

Not covered: whether these are the policies that the ledger announced (`verifier.audit`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from protocol.envelope import open_envelope, parse
from protocol.errors import EnvelopeError, ProtocolError, ReasonCode
from protocol.limits import MAX_ENVELOPE_BYTES, MAX_LAYOUT_BYTES, MAX_MODEL_FILE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from shardcast.download import hash_region, preallocate, write_region
from shardcast.errors import PublicationError, StoreError
from shardcast.heads import parse_publication_name, publication_name
from shardcast.layout import Layout, decode_layout, safetensors_header, shard_length
from shardcast.policy_sink import WEIGHTS_NAME, Base
from shardcast.publication import Key, Publication
from shardcast.puller import Policy
from shardcast.records import HEAD_KIND, NO_HASH, Head, ShardRecord
from shardcast.states import Hop, Segments, apply, find_way, kept_name
from shardcast.store import PUBLICATION_NAME, hash_file, read_bounded, read_frames, shard_name


@dataclass(frozen=True)
class Problem:
    """Something in the archive that does not hold."""

    record: str
    reason: ReasonCode
    message: str


@dataclass(frozen=True)
class Published:
    """One finished publication whose records hold; its shards are checked by `problems` or `materialise`."""

    epoch: int
    step: int
    root: bytes
    publication: Publication
    folder: Path

    @property
    def key(self) -> Key:
        return (self.epoch, self.step)

    @property
    def head(self) -> bytes:
        """The head's envelope as it was published."""
        envelope = self.publication.head_envelope
        return envelope.raw if envelope is not None else b""


class Archive:
    """What `open_published` found."""

    def __init__(
        self, root: Path, run: Run, announced: Mapping[Key, bytes] | None = None, only: Collection[Key] | None = None
    ) -> None:
        self.root = root
        self.run = run
        self._announced = announced or {}
        self.publications: dict[Key, Published] = {}
        """Finished publications whose records hold, by (epoch, step)."""
        self._problems: list[Problem] = []
        self._layout: Layout | None = None
        self._segments = Segments(self._known_layout)
        self._others: dict[Key, Publication | None] = {}
        """Records of publications that were not asked for, but that others change."""
        self._all: list[Key] | None = None
        self._last: Base | None = None
        self._blobs()
        for entry in self._folders(only):
            key = parse_publication_name(entry.name)
            # Without its records it was never announced: a crash left it, nobody could use it.
            if key is not None and (entry / PUBLICATION_NAME).exists():
                self._read(key, entry)
        self._newest_head()

    def _known_layout(self) -> Layout:
        if self._layout is None:
            raise StoreError("the layout is missing from the archive, or damaged")
        return self._layout

    def _folders(self, only: Collection[Key] | None) -> list[Path]:
        """Where publications lie; of a long run's thousands nobody lists all to read one."""
        if only is not None:
            return [self.root / publication_name(key) for key in sorted(only)]
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def problems(self) -> Iterator[Problem]:
        """Everything that does not hold. Reads every shard; three shards' bytes are in memory at a time."""
        yield from self._problems
        roots = {one.root for one in self.publications.values()}
        for published in self.publications.values():
            base = published.publication.open.base
            if base != NO_HASH and base not in roots and not self._problems:
                yield Problem(
                    f"published/{published.folder.name}/{PUBLICATION_NAME}",
                    ReasonCode.RECORD_MISSING,
                    "changes a policy that is not in the archive",
                )
        for index in range(max((one.publication.shards for one in self.publications.values()), default=0)):
            yield from self._problems_of_shard(index)

    def _problems_of_shard(self, index: int) -> Iterator[Problem]:
        """What does not hold of one shard, of all publications in order: each is decoded from the one before."""
        shard: bytes | memoryview = b""
        state = NO_HASH
        for key in sorted(self.publications):
            hop = self._hop(key, index)
            if hop is None:
                continue
            name = f"published/{hop.path.parent.name}/{hop.path.name}"
            yield from self._problems_of_kept(hop)
            try:
                wire = hop.wire()
            except (ProtocolError, FileNotFoundError):
                text = "the bytes are not those the origin signed"
                yield Problem(name, ReasonCode.SHARD_MISMATCH, text)
                continue
            if self._layout is None:
                continue  # that is a problem already, and nothing can be decoded
            if not hop.alone and state != hop.record.old_hash:
                found = self._made(hop.record.old_hash, key, index)
                if found is None:
                    continue  # what it changes is damaged or missing, and named
                shard = found
            try:
                shard, state = apply(hop, wire, shard, self._segments(index)), hop.record.new_hash
            except StoreError as exc:
                text = "the origin signed bytes that are not the state it signed them for"
                yield Problem(name, exc.code, f"{text}: {str(exc).removeprefix(str(hop.path)).strip()}")

    def _problems_of_kept(self, hop: Hop) -> Iterator[Problem]:
        """Of a state that the origin keeps beside a shard. Nobody signed it; without it the archive still holds."""
        kept = Hop(hop.path.with_name(kept_name(hop.record.index)), hop.record, signed=False)
        if self._layout is None or not kept.path.exists():
            return
        try:
            apply(kept, kept.wire(), b"", self._segments(hop.record.index))
        except (StoreError, OSError) as exc:
            code = exc.code if isinstance(exc, StoreError) else ReasonCode.RECORD_MISSING
            text = "a kept state that is not the one signed beside it; remove the file, it follows from the frames"
            yield Problem(f"published/{kept.path.parent.name}/{kept.path.name}", code, text)

    def _made(self, state: bytes, key: Key, index: int) -> bytes | memoryview | None:
        way = find_way(state, lambda _: False, self._records(key, index))
        try:
            return way.make(_NOTHING, self._segments(index)) if way is not None else None
        except (StoreError, OSError):
            return None

    def materialise(self, epoch: int, step: int, into: Path) -> Policy:
        """Write one published policy as a model directory, verified on the way.

        What was written last is kept open, and what comes after it is decoded from there.

        Args:
            into: a folder outside the archive; the policy becomes `into`/e0000-s00000012.

        Raises:
            PublicationError: it was not published, or does not hold; the message names the record.
            OSError: a file cannot be read or written.
        """
        key = (epoch, step)
        published = self.publications.get(key)
        name = f"published/{publication_name(key)}"
        if published is None or self._layout is None:
            raise PublicationError(f"{name} is missing from the archive, or damaged", ReasonCode.RECORD_MISSING)
        for index in range(published.publication.shards):
            # Before room is made for what the layout promises: a few kilobytes of archive may promise 240 GB.
            hop = self._hop(key, index)
            if hop is None or not hop.path.is_file() or hop.path.stat().st_size != hop.record.wire_bytes:
                raise PublicationError(f"{name}/{shard_name(index)} is missing or cut short", ReasonCode.SHARD_MISMATCH)
        directory = into / publication_name(key)
        directory.mkdir(parents=True, exist_ok=True)
        header = safetensors_header(self._layout)
        aside = directory / f".{WEIGHTS_NAME}.part"
        states = published.publication.states()
        fd = preallocate(aside, len(header) + self._layout.nbytes)
        try:
            for index, state in enumerate(states):
                start = len(header) + index * SHARD_BYTES
                shard = self._shard(key, index, state)
                write_region(fd, start, shard)
                # Hashed from where it was written: what is loaded is what was verified.
                if hash_region(fd, start, len(shard)) != state:
                    raise PublicationError(
                        f"{name}/{shard_name(index)} does not have the hash the origin signed",
                        ReasonCode.SHARD_MISMATCH,
                    )
            write_region(fd, 0, header)
        finally:
            os.close(fd)
        self.write_model_files(directory)
        aside.rename(directory / WEIGHTS_NAME)
        self._keep_open(Base(key, directory / WEIGHTS_NAME, len(header), states))
        return Policy(epoch, step, published.root, directory)

    def _shard(self, key: Key, index: int, state: bytes) -> bytes | memoryview:
        """One raw shard, verified. Raises PublicationError, which names what does not hold."""
        last = self._last
        known = last.state(index) if last is not None and last.key <= key else NO_HASH
        way = find_way(state, lambda one: one == known != NO_HASH, self._records(key, index))
        name = f"published/{publication_name(key)}/{shard_name(index)}"
        if way is None:
            raise PublicationError(f"{name} changes a shard that is not in the archive", ReasonCode.RECORD_MISSING)
        try:
            length = shard_length(self._layout.nbytes, index) if self._layout is not None else 0
            return way.make(_Last(last, index, length), self._segments(index))
        except (StoreError, FileNotFoundError) as exc:
            where = str(exc).replace(f"{self.root}/", "published/")
            raise PublicationError(f"{name} can't be had: {where}", ReasonCode.SHARD_MISMATCH) from exc

    def _keep_open(self, base: Base) -> None:
        if self._last is not None:
            self._last.close()
        base.open()
        self._last = base

    def _hop(self, key: Key, index: int) -> Hop | None:
        publication = self._publication(key)
        record = publication.expect(index) if publication is not None else None
        return None if record is None else Hop(self.root / publication_name(key) / shard_name(index), record)

    def _records(self, key: Key, index: int) -> Iterator[tuple[Path, ShardRecord]]:
        """One shard's files and records, from a publication down; also of those that were not asked for."""
        for at in self._keys_down(key):
            hop = self._hop(at, index)
            if hop is not None:
                yield hop.path, hop.record

    def _keys_down(self, key: Key) -> Iterator[Key]:
        yield key
        if self._all is None:
            names = (parse_publication_name(entry.name) for entry in self._folders(None))
            self._all = sorted((at for at in names if at is not None), reverse=True)
        yield from (at for at in self._all if at < key)

    def _publication(self, key: Key) -> Publication | None:
        """The records of a publication; of one that others change, whoever signed it: its bytes' hash counts."""
        if key in self.publications:
            return self.publications[key].publication
        if key not in self._others:
            try:
                self._others[key] = read_frames(self.root / publication_name(key) / PUBLICATION_NAME, self.run)
            except (ProtocolError, OSError):
                self._others[key] = None
        return self._others[key]

    def write_model_files(self, directory: Path) -> None:
        """Write the manifest's model files (configuration, tokenizer), verified on the way.

        Raises:
            PublicationError: one does not hold.
            OSError: a file cannot be read or written.
        """
        for file in self.run.manifest.model.files:
            data = read_bounded(self.root / "blobs" / file.digest.hex(), MAX_MODEL_FILE_BYTES)
            if blake3(data).digest() != file.digest:
                raise PublicationError(f"published/blobs/{file.digest.hex()} is damaged", ReasonCode.HASH_MISMATCH)
            (directory / file.name).write_bytes(data)

    def _note(self, record: str, error: ProtocolError) -> None:
        self._problems.append(Problem(f"published/{record}", error.code, str(error)))

    def _read(self, key: Key, folder: Path) -> None:
        name = f"{folder.name}/{PUBLICATION_NAME}"
        try:
            publication = read_frames(folder / PUBLICATION_NAME, self.run)
        except ProtocolError as exc:
            self._note(name, exc)
            return
        if publication.key != key or publication.manifest is None:
            self._note(name, PublicationError("the publication of another step"))
            return
        if self._layout is not None and publication.open.raw_bytes != self._layout.nbytes:
            error = PublicationError("it has another size than the run's layout", ReasonCode.LENGTH_MISMATCH)
            self._note(name, error)
            return
        signers = {parse(raw).signer for raw in publication.frames()}
        if signers & set(self.run.revoked_origins) and self._announced.get(key) != publication.manifest.root:
            return  # nobody follows it, whoever signed it: the ledger vouches for nothing that was revoked before
        self.publications[key] = Published(*key, publication.manifest.root, publication, folder)

    def _blobs(self) -> None:
        limits = {self.run.manifest.model.layout: MAX_LAYOUT_BYTES}
        limits.update({file.digest: MAX_MODEL_FILE_BYTES for file in self.run.manifest.model.files})
        for digest, limit in limits.items():
            path = self.root / "blobs" / digest.hex()
            try:
                if hash_file(path) != digest:
                    raise StoreError("the bytes do not have the hash in their name", ReasonCode.HASH_MISMATCH)
                if digest == self.run.manifest.model.layout:
                    self._layout = decode_layout(read_bounded(path, limit))
            except FileNotFoundError:
                self._note(f"blobs/{digest.hex()}", StoreError("missing"))
            except ProtocolError as exc:
                self._note(f"blobs/{digest.hex()}", exc)

    def _newest_head(self) -> None:
        try:
            raw = read_bounded(self.root / "HEAD.hw", MAX_ENVELOPE_BYTES)
            envelope = open_envelope(raw, run=self.run.id, kind=HEAD_KIND)
            if envelope.signer in self.run.revoked_origins:
                return  # left by an origin that was not started since: everybody refuses it
            if envelope.signer not in self.run.origins:
                raise EnvelopeError("signed by another key than the run's origin's")
            head = envelope.record(Head)
            published = self.publications.get((head.epoch, head.step))
            if published is not None and published.root != head.root:
                raise PublicationError(
                    "the newest head names another root than the publication", ReasonCode.HASH_MISMATCH
                )
        except FileNotFoundError:
            if self.publications:
                self._note("HEAD.hw", StoreError("missing"))
        except ProtocolError as exc:
            self._note("HEAD.hw", exc)


def open_published(
    run_dir: Path, run: Run, announced: Mapping[Key, bytes] | None = None, only: Collection[Key] | None = None
) -> Archive:
    """Read the records of `run_dir`/published. Shards are read by `Archive.problems` and `materialise`.

    Args:
        announced: (epoch, step) -> root of the policies in the ledger. What a revoked key signed is left out unless
            its root is one of these.
        only: read these publications and no others.

    Raises:
        OSError: a file that is there cannot be read.
    """
    return Archive(run_dir / "published", run, announced, only)


class _Last:
    """The policy that was written last, as states at hand (`states.Held`)."""

    def __init__(self, base: Base | None, index: int, length: int) -> None:
        self._base, self._index, self._length = base, index, length

    def has(self, state: bytes) -> bool:
        return self._base is not None and self._base.state(self._index) == state

    def read(self, state: bytes) -> bytes | None:
        return self._base.read(self._index, self._length) if self._base is not None and self.has(state) else None


_NOTHING = _Last(None, 0, 0)
