"""The published archive, checked from its files alone, opened for reading only.

Every record, shard and blob under `RUN/published` is re-verified against the run's origin key; what does not hold
is a `Problem` that names the record, e.g. `published/e0000-s00000012/shard-000000.bin`. Damage is never an
exception; only a file that cannot be read at all raises OSError.

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
from protocol.files import open_regular
from protocol.limits import MAX_ENVELOPE_BYTES, MAX_LAYOUT_BYTES, MAX_MODEL_FILE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from shardcast.download import hash_region, preallocate, write_region
from shardcast.errors import PublicationError, StoreError
from shardcast.heads import parse_publication_name, publication_name
from shardcast.layout import Layout, decode_layout, safetensors_header, shard_length
from shardcast.limits import PIECE_BYTES
from shardcast.publication import Key, Publication
from shardcast.puller import WEIGHTS_NAME, Policy
from shardcast.records import HEAD_KIND, Head
from shardcast.store import PUBLICATION_NAME, hash_file, read_bounded, read_frames, shard_name, verify_shards


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
        self._blobs()
        for entry in self._folders(only):
            key = parse_publication_name(entry.name)
            # Without its records it was never announced: a crash left it, nobody could use it.
            if key is not None and (entry / PUBLICATION_NAME).exists():
                self._read(key, entry)
        self._newest_head()

    def _folders(self, only: Collection[Key] | None) -> list[Path]:
        """Where publications lie; of a long run's thousands nobody lists all to read one."""
        if only is not None:
            return [self.root / publication_name(key) for key in sorted(only)]
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def problems(self) -> Iterator[Problem]:
        """Everything that does not hold, hashing every shard. One file's bytes are in memory 1 MiB at a time."""
        yield from self._problems
        for published in self.publications.values():
            for index in verify_shards(published.folder, published.publication):
                yield Problem(
                    f"published/{published.folder.name}/{shard_name(index)}",
                    ReasonCode.SHARD_MISMATCH,
                    "the bytes are not those the origin signed",
                )

    def materialise(self, epoch: int, step: int, into: Path) -> Policy:
        """Write one published policy as a model directory, verified on the way.

        Args:
            into: a folder outside the archive; the policy becomes `into`/e0000-s00000012.

        Raises:
            PublicationError: it was not published, or does not hold; the message names the record.
            OSError: a file cannot be read or written.
        """
        published = self.publications.get((epoch, step))
        name = f"published/{publication_name((epoch, step))}"
        if published is None or self._layout is None:
            raise PublicationError(f"{name} is missing from the archive, or damaged", ReasonCode.RECORD_MISSING)
        for index in range(published.publication.shards):
            # Before room is made for what the layout promises: a few kilobytes of archive may promise 240 GB.
            path = published.folder / shard_name(index)
            if not path.is_file() or path.stat().st_size != shard_length(self._layout.nbytes, index):
                raise PublicationError(f"{name}/{shard_name(index)} is missing or cut short", ReasonCode.SHARD_MISMATCH)
        directory = into / publication_name((epoch, step))
        directory.mkdir(parents=True, exist_ok=True)
        header = safetensors_header(self._layout)
        aside = directory / f".{WEIGHTS_NAME}.part"
        fd = preallocate(aside, len(header) + self._layout.nbytes)
        try:
            for index, state in enumerate(published.publication.states()):
                start = len(header) + index * SHARD_BYTES
                length = _copy(published.folder / shard_name(index), fd, start, SHARD_BYTES)
                # Hashed from where it was written: what is loaded is what was verified.
                if hash_region(fd, start, length) != state:
                    raise PublicationError(
                        f"{name}/{shard_name(index)} does not have the hash the origin signed",
                        ReasonCode.SHARD_MISMATCH,
                    )
            write_region(fd, 0, header)
        finally:
            os.close(fd)
        self.write_model_files(directory)
        aside.rename(directory / WEIGHTS_NAME)
        return Policy(epoch, step, published.root, directory)

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


def _copy(source: Path, fd: int, start: int, limit: int) -> int:
    """Copy a file of at most `limit` bytes into an open one at `start`; returns its length (0 when missing)."""
    at = 0
    try:
        file = open_regular(source)
    except FileNotFoundError:
        return 0
    with file:
        while at < limit and (piece := file.read(min(PIECE_BYTES, limit - at))):
            write_region(fd, start + at, piece)
            at += len(piece)
    return at
