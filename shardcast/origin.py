"""The origin: turns the learner's checkpoints into publications, in order, exactly once, and serves them.

For each whole checkpoint (`checkpoint.json` is there): read the weights in canonical order, store and show shard
after shard, and, only when the whole file has the hash that `checkpoint.json` names and everything is flushed to
the disk, sign the manifest and the head. A crash before that leaves a folder that does not count; the restarted
origin opens a new publication id for the step. `published/` is the archive: nothing in it is ever removed.

Not covered: deltas, and the plan of who pulls from whom (the coordinator's passes carry it here).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from protocol.envelope import Envelope, parse, seal
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.limits import MAX_MODEL_FILE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from protocol.run_files import load_chain
from protocol.sequences import Sequences
from shardcast.errors import LayoutError, PublishError, StoreError
from shardcast.heads import publication_name
from shardcast.layout import (
    Canonical,
    encode_layout,
    layout_of_safetensors,
    open_safetensors,
    require_layout,
    root_of_safetensors,
    shard_length,
)
from shardcast.limits import CHECKPOINT_LOOK_S, HEAD_LIFETIME_MS, MAX_CHECKPOINT_JSON_BYTES, PIECE_BYTES
from shardcast.passes import PassCheck
from shardcast.publication import Key, Publication, manifest_for
from shardcast.records import (
    CODEC_FULL,
    HEAD_KIND,
    MANIFEST_KIND,
    NO_HASH,
    OPEN_KIND,
    SHARD_KIND,
    Head,
    PublicationOpen,
    ShardRecord,
)
from shardcast.server import Clock, WeightsServer, wall_clock_ms
from shardcast.store import Store, hash_file, read_bounded, read_publication
from shardcast.terms import OPEN_TERMS, Terms
from shardcast.watch import FolderWatch

log = logging.getLogger("shardcast.origin")

WEIGHTS_NAME = "model.safetensors"
_STEP_DIR = re.compile(r"step-([0-9]{1,12})")
_HEAD_CHECK_S = 1.0
_PUBLICATION_LIFETIME_MS = 365 * 24 * 3_600_000
"""Records of a publication are never stale by themselves; only heads are."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint of the learner, as its `checkpoint.json` describes it."""

    epoch: int
    step: int
    weights: Path
    size: int
    digest: bytes
    root: bytes | None

    @property
    def key(self) -> Key:
        return (self.epoch, self.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`; None while it is not whole.

    Raises:
        PublishError: `checkpoint.json` is malformed.
    """
    path = folder / "checkpoint.json"
    try:
        text = read_bounded(path, MAX_CHECKPOINT_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        table = json.loads(text)
        entry = table["files"][WEIGHTS_NAME]
        root = table.get("root")
        return Checkpoint(
            epoch=int(table["epoch"]),
            step=int(table["step"]),
            weights=folder / WEIGHTS_NAME,
            size=int(entry["size"]),
            digest=bytes.fromhex(entry["blake3"]),
            root=None if root is None else bytes.fromhex(root),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise PublishError(f"{path} is malformed ({exc}); the learner must write the checkpoint again") from exc


def load_run(run_dir: Path) -> Run:
    """The run of a run directory with its newest manifest. Raises UsageError."""
    if not (run_dir / "manifest.hw").exists():
        raise UsageError(f"{run_dir / 'manifest.hw'} does not exist; make the run with: trainer init {run_dir}")
    return load_chain(run_dir).current


class Origin:
    """Publishes one run directory."""

    def __init__(
        self,
        run_dir: Path,
        *,
        identity: Identity,
        listen: str = "127.0.0.1:0",
        clock_ms: Clock = wall_clock_ms,
        open_to_all: bool = True,
        run: Run | None = None,
        terms: Terms = OPEN_TERMS,
    ) -> None:
        """Open the archive for writing.

        Args:
            open_to_all: serve whoever asks; otherwise only those whom the coordinator's passes send here.
            run: of which to publish; by default the one of the directory's manifest.
            terms: limits of what is served, and how.

        Raises:
            UsageError: another process publishes this run, or the key is not the run's origin key.
        """
        self.run_dir = run_dir
        self.run = load_run(run_dir) if run is None else run
        if identity.public != self.run.manifest.origin:
            raise UsageError(
                "the origin key is not the one that the run's newest manifest names; leave --key out, and the right "
                "file in RUN/keys is found"
            )
        self._identity = identity
        self._clock_ms = clock_ms
        self.store = Store(run_dir / "published", self.run, durable=True)
        self._sequences = Sequences(run_dir / "published" / "origin-sequences.json")
        self.server = WeightsServer(
            self.store,
            identity=identity,
            sequences=self._sequences,
            listen=listen,
            clock_ms=clock_ms,
            passes=None if open_to_all else PassCheck(self.run, identity.public, clock_ms),
            terms=terms,
        )
        self._checkpoints = str(run_dir / "checkpoints")
        self._looked_at: dict[str, tuple[int, int]] = {}
        """Checkpoint folder -> inode and mtime of the checkpoint.json that was last settled."""
        self._folders: list[str] = []
        """Checkpoint folders seen last."""
        self._has_layout = False
        self._head_due = 0.0

    async def run_forever(self) -> None:
        """Serve, and publish each checkpoint as it becomes whole.

        Raises:
            PublishError: a checkpoint that must not be published; nothing else is published until a person acted.
        """
        if not self.server.url:
            await self.start()
        watch = FolderWatch()
        try:
            while True:
                watch.add(self._checkpoints)
                await self.publish_ready()
                for name in self._folders:
                    watch.add(f"{self._checkpoints}/{name}")
                self.refresh_head()
                self.server.counters.newest = self.store.keys[-1] if self.store.keys else None
                await watch.wait(CHECKPOINT_LOOK_S)
        finally:
            watch.close()

    async def start(self) -> None:
        """Store the model files and start serving. Raises UsageError."""
        self._add_model_files()
        if self.store.head is not None:
            self.store.set_head(self.store.head)  # a kill may have come between the publication and this file
        self.refresh_head()
        await self.server.start()

    async def close(self) -> None:
        await self.server.close()
        self.store.close()

    async def publish_ready(self) -> int:
        """Publish all whole checkpoints that are not published yet, in order; returns how many."""
        count = 0
        for checkpoint in self._ready():
            count += await self._settle(checkpoint)
        return count

    def _ready(self) -> list[Checkpoint]:
        """Whole checkpoints that were not looked at since their checkpoint.json was written, in order."""
        found = []
        folder = Path(self._checkpoints)
        try:
            names = [entry.name for entry in os.scandir(self._checkpoints) if _STEP_DIR.fullmatch(entry.name)]
        except FileNotFoundError:
            return []
        self._folders = names
        for name in names:
            try:
                stat = (folder / name / "checkpoint.json").stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if self._looked_at.get(name) == (stat.st_ino, stat.st_mtime_ns):
                continue
            checkpoint = read_checkpoint(folder / name)
            if checkpoint is None:
                continue
            if int(name[len("step-") :]) != checkpoint.step:
                raise PublishError(f"checkpoints/{name} holds step {checkpoint.step}; the learner must write it again")
            found.append((checkpoint, name, (stat.st_ino, stat.st_mtime_ns)))
        found.sort(key=lambda row: row[0].key)
        for _, name, mark in found:
            self._looked_at[name] = mark
        return [checkpoint for checkpoint, _, _ in found]

    async def _settle(self, checkpoint: Checkpoint) -> int:
        """Publish, skip or refuse one checkpoint; 1 if it was published."""
        newest = self.store.keys[-1] if self.store.keys else None
        name = publication_name(checkpoint.key)
        if checkpoint.key in self.store.keys:
            published = read_publication(self.store.folder(checkpoint.key), self.run).manifest
            try:
                root = await asyncio.to_thread(root_of_safetensors, checkpoint.weights)
            except FileNotFoundError:
                log.info("%s was removed by the learner; %s is already published", checkpoint.weights, name)
                return 0
            if published is None or published.root != root:
                raise PublishError(
                    f"{checkpoint.weights} has root {root.hex()[:16]}, but {name} was published with another one; "
                    "the learner must open a new epoch to publish this step again"
                )
            log.info("%s is already published with the same root", name)
        elif newest is not None and checkpoint.key < newest:
            log.warning("%s is older than the newest published %s and is left out", name, publication_name(newest))
        else:
            await self.publish(checkpoint)
            return 1
        return 0

    async def publish(self, checkpoint: Checkpoint) -> Publication:
        """Publish one checkpoint; returns when its head is signed, durable and visible.

        Raises:
            PublishError: the weights file is not the one `checkpoint.json` names.
            LayoutError: its tensors are not the run's.
        """
        try:
            canonical = open_safetensors(checkpoint.weights)
            require_layout(canonical.layout, self.run.manifest.model.layout, str(checkpoint.weights))
            return await self._publish(checkpoint, canonical)
        except FileNotFoundError as exc:
            raise PublishError(
                f"{exc.filename} vanished while it was being published; the learner must keep more checkpoints"
            ) from exc

    async def _publish(self, checkpoint: Checkpoint, canonical: Canonical) -> Publication:
        layout, key = canonical.layout, checkpoint.key
        if not self._has_layout:
            self.store.add_blob(encode_layout(layout))
            self._has_layout = True
        opening = PublicationOpen(
            epoch=checkpoint.epoch,
            step=checkpoint.step,
            publication=uuid.uuid4().bytes,
            base=NO_HASH,
            layout=self.run.manifest.model.layout,
            codec=CODEC_FULL,
            raw_bytes=layout.nbytes,
            shards=layout.shards,
            max_wire_bytes=layout.nbytes,
        )
        publication = Publication(self.run)
        open_envelope = self._seal(OPEN_KIND, opening)
        publication.take(open_envelope.raw)
        feed, _ = self.store.begin(publication)
        # The whole file is checked beside the shards: children may fetch early, the manifest waits for the result.
        whole = asyncio.create_task(asyncio.to_thread(_check_weights, checkpoint))
        try:
            records = []
            for index in range(layout.shards):
                state, length = await asyncio.to_thread(self._store_shard, key, canonical, index)
                record = ShardRecord(opening.publication, index, length, length, state, NO_HASH, state)
                raw = self._seal(SHARD_KIND, record).raw
                publication.take(raw)
                records.append(record)
                if index + 1 < layout.shards:
                    self.store.show_shard(feed, record, raw)
            await whole
            manifest = manifest_for(opening, records)
            if checkpoint.root is not None and manifest.root != checkpoint.root:
                raise PublishError(f"{checkpoint.weights} does not have the root that its checkpoint.json names")
            publication.take(self._seal(MANIFEST_KIND, manifest).raw)
            publication.take(self._sign_head(publication).raw)
            await asyncio.to_thread(self.store.finish_files, publication)
        except BaseException:
            whole.cancel()
            whole.add_done_callback(lambda task: task.cancelled() or task.exception())  # one failure is told
            self.store.abandon(key)
            raise
        last = layout.shards - 1
        # The last shard, the manifest and the head become visible together: one answer instead of three.
        self.store.show_shard(feed, records[last], publication.shard_envelopes()[last])
        self.store.show_finished(publication)
        log.info("published %s, root %s", publication_name(key), manifest.root.hex()[:16])
        return publication

    def _store_shard(self, key: Key, canonical: Canonical, index: int) -> tuple[bytes, int]:
        """Copy one raw shard into the archive, flushed; returns its hash and length."""
        total = canonical.layout.nbytes
        length = shard_length(total, index)
        hasher = blake3()
        fd = os.open(canonical.path, os.O_RDONLY)
        try:
            with self.store.shard_path(key, index).open("wb", buffering=0) as out:
                for at in range(0, length, PIECE_BYTES):
                    piece = canonical.read(fd, index * SHARD_BYTES + at, min(PIECE_BYTES, length - at))
                    if len(piece) != min(PIECE_BYTES, length - at):
                        raise LayoutError(f"{canonical.path} ends before its last tensor; write it again")
                    hasher.update(piece)
                    if out.write(piece) != len(piece):
                        raise StoreError(f"the disk under {self.store.root} took less than asked; free some space")
                os.fsync(out.fileno())
        finally:
            os.close(fd)
        return hasher.digest(), length

    def _seal(self, kind: str, record: object, lifetime_ms: int = _PUBLICATION_LIFETIME_MS) -> Envelope:
        return seal(
            self._identity,
            kind,
            record,
            run=self.run.id,
            sequence=self._sequences.next(kind),
            issued_at=self._clock_ms(),
            lifetime_ms=lifetime_ms,
        )

    def _sign_head(self, publication: Publication) -> Envelope:
        manifest, envelope = publication.manifest, publication.manifest_envelope
        if manifest is None or envelope is None:
            raise StoreError("a head cannot be signed before its manifest")
        head = Head(
            manifest.epoch, manifest.step, manifest.publication, envelope.digest, manifest.root, anchor=manifest.step
        )
        return self._seal(HEAD_KIND, head, HEAD_LIFETIME_MS)

    def refresh_head(self) -> None:
        """Sign the newest head again once a third of its life is over, or with a key that came after it."""
        if self.store.head is None or time.monotonic() < self._head_due:
            return
        self._head_due = time.monotonic() + _HEAD_CHECK_S
        envelope = parse(self.store.head)
        old_key = envelope.signer != self._identity.public
        if old_key or self._clock_ms() - envelope.issued_at >= HEAD_LIFETIME_MS // 3:
            self.store.set_head(self._seal(HEAD_KIND, envelope.record(Head), HEAD_LIFETIME_MS).raw)

    def _add_model_files(self) -> None:
        for file in self.run.manifest.model.files:
            path = self.run_dir / "model" / file.name
            try:
                data = read_bounded(path, MAX_MODEL_FILE_BYTES)
            except FileNotFoundError as exc:
                raise UsageError(f"{path} is missing, but the run's manifest names it; restore it") from exc
            if blake3(data).digest() != file.digest or len(data) != file.size:
                raise UsageError(f"{path} is not the file that the run's manifest names; restore it")
            self.store.add_blob(data)
        base = self.run_dir / "model" / WEIGHTS_NAME
        if base.exists():
            layout = layout_of_safetensors(base)
            require_layout(layout, self.run.manifest.model.layout, str(base))
            self.store.add_blob(encode_layout(layout))
            self._has_layout = True


def _check_weights(checkpoint: Checkpoint) -> None:
    size = checkpoint.weights.stat().st_size
    if size != checkpoint.size or hash_file(checkpoint.weights) != checkpoint.digest:
        raise PublishError(
            f"{checkpoint.weights} is not the file that its checkpoint.json names; it was changed or damaged after the "
            "learner wrote it: remove that checkpoint and let the learner write it again"
        )
