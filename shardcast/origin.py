"""The origin: turns the learner's checkpoints into publications, in order, exactly once, and serves them.

For each whole checkpoint (`checkpoint.json` is there): read the weights in canonical order, encode them against the
checkpoint before (`encoding`), store and show shard after shard as each is ready, and, only when the whole file has the
hash that `checkpoint.json` names and everything is flushed to the disk, sign the manifest and the head. A crash before
that leaves a folder that does not count; the restarted origin opens a new publication id for the step. `published/` is
the archive: nothing in it is ever removed.

Not covered: the plan of who pulls from whom (the coordinator's passes carry it here).
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
from protocol.errors import ProtocolError, UsageError
from protocol.identity import Identity
from protocol.limits import MAX_MODEL_FILE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from protocol.run_files import load_chain
from protocol.sequences import Sequences
from shardcast.codecs import Codec
from shardcast.encoding import KEEP_STATE_EVERY, OpenCheckpoint, OpenCheckpoints, patch_pays, wire_bytes
from shardcast.errors import LayoutError, PublishError, StoreError
from shardcast.heads import publication_name
from shardcast.layout import (
    Canonical,
    encode_layout,
    layout_hash,
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
from shardcast.states import StateMaker, kept_name
from shardcast.store import Feed, Store, hash_file, read_bounded, read_publication, write_file
from shardcast.terms import OPEN_TERMS, Terms
from shardcast.watch import FolderWatch

log = logging.getLogger("shardcast.origin")

WEIGHTS_NAME = "model.safetensors"
_STEP_DIR = re.compile(r"step-([0-9]{1,12})")
_HEAD_CHECK_S = 1.0
_ENCODED_AT_ONCE = min(4, os.cpu_count() or 1)
"""Shards read, encoded and flushed at once: each takes up to three times its length of memory."""

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
        codec: Codec = Codec.GAPS,
    ) -> None:
        """Open the archive for writing.

        Args:
            open_to_all: serve whoever asks; otherwise only those whom the coordinator's passes send here.
            run: of which to publish; by default the one of the directory's manifest.
            terms: limits of what is served, and how.
            codec: how patches are coded; RAW sends every checkpoint as it is, ANCHOR every one coded by itself.

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
        self._codec = codec
        self._above = 0
        """How many patches the newest publication lies above one that needs none of those before it."""
        self._open = OpenCheckpoints()
        self.server.states = self._states = StateMaker(self.store, self._open)
        self._checkpoints = str(run_dir / "checkpoints")
        self._looked_at: dict[str, tuple[int, int]] = {}
        """Checkpoint folder -> inode and mtime of the checkpoint.json that was last settled."""
        self._watch: FolderWatch | None = None
        self._like: Canonical | None = None
        """The checkpoint file read last, whose layout is the run's."""
        self._has_layout = False
        self._head_due = 0.0

    async def run_forever(self) -> None:
        """Serve, and publish each checkpoint as it becomes whole.

        Raises:
            PublishError: a checkpoint that must not be published; nothing else is published until a person acted.
        """
        if not self.server.url:
            await self.start()
        watch = self._watch = FolderWatch()
        try:
            while True:
                watch.add(self._checkpoints, looks_after=True)
                await self.publish_ready()
                self.refresh_head()
                self.server.counters.newest = self.store.keys[-1] if self.store.keys else None
                await watch.wait(CHECKPOINT_LOOK_S)
        finally:
            self._watch = None
            watch.close()

    async def start(self) -> None:
        """Store the model files and start serving. Raises UsageError."""
        self._add_model_files()
        self._reopen()
        if self.store.head is not None:
            self.store.set_head(self.store.head)  # a kill may have come between the publication and this file
        self.refresh_head()
        await self.server.start()

    async def close(self) -> None:
        await self.server.close()
        self._states.close()
        self._open.close()
        self.store.close()

    def _reopen(self) -> None:
        """The newest published checkpoint, if the learner still has it: then the next one can be a patch."""
        if not self.store.keys:
            return
        key = self.store.keys[-1]
        folder = Path(self._checkpoints) / f"step-{key[1]:08d}"
        try:
            checkpoint = read_checkpoint(folder)
            if checkpoint is None or checkpoint.key != key:
                return
            canonical = open_safetensors(checkpoint.weights)
            publication = read_publication(self.store.folder(key), self.run)
            if publication.manifest is None or layout_hash(canonical.layout) != publication.open.layout:
                return
            found = OpenCheckpoint(key, canonical, publication.states())
        except (ProtocolError, OSError) as exc:
            log.warning("%s can't be read (%s); the next publication needs no base", folder, exc)
            return
        found.root = publication.manifest.root
        self._open.add(found)
        self._above = self._patches()

    def _patches(self) -> int:
        """`_above`, from the archive."""
        for count, key in enumerate(reversed(self.store.keys[-KEEP_STATE_EVERY:])):
            feed = self.store.feed(key)
            first = feed.shards[0] if feed is not None else None
            if first is None or first.old_hash == NO_HASH:
                return count
            if self.store.shard_path(key, 0).with_name(kept_name(0)).exists():
                return count
        return KEEP_STATE_EVERY

    async def publish_ready(self) -> int:
        """Publish all whole checkpoints that are not published yet, in order; returns how many."""
        count = 0
        for checkpoint in self._ready():
            count += await self._settle(checkpoint)
        return count

    def _ready(self) -> list[Checkpoint]:
        """Whole checkpoints that were not looked at since their checkpoint.json was written, in order."""
        found = []
        try:
            names = [entry.name for entry in os.scandir(self._checkpoints) if _STEP_DIR.fullmatch(entry.name)]
        except FileNotFoundError:
            return []
        self._looked_at = {name: self._looked_at[name] for name in names if name in self._looked_at}
        for name in names:
            folder = f"{self._checkpoints}/{name}"
            if self._watch is not None:
                self._watch.add(folder, looks_after=True)
            try:
                stat = Path(f"{folder}/checkpoint.json").stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if self._looked_at.get(name) == (stat.st_ino, stat.st_mtime_ns):
                continue
            checkpoint = read_checkpoint(Path(folder))
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
            canonical = open_safetensors(checkpoint.weights, self._like)
            if self._like is None or canonical.layout is not self._like.layout:
                require_layout(canonical.layout, self.run.manifest.model.layout, str(checkpoint.weights))
                self._like = canonical
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
        fresh = OpenCheckpoint(key, canonical)
        publish = self._publish_at_once if layout.shards == 1 else self._publish_shard_by_shard
        try:
            publication = await publish(checkpoint, fresh)
        except BaseException:
            fresh.close()
            raise
        finally:
            fresh.let_go()
        log.info("published %s, root %s", publication_name(key), _root(publication).hex()[:16])
        fresh.states, fresh.root = publication.states(), _root(publication)
        self._open.add(fresh)
        self._above = 0 if self._above + 1 >= KEEP_STATE_EVERY or publication.open.base == NO_HASH else self._above + 1
        return publication

    async def _publish_at_once(self, checkpoint: Checkpoint, fresh: OpenCheckpoint) -> Publication:
        """A model of one shard: nothing can be shown before all is there, so one thread does all of it in one go. For
        a model of 1 MB each hand-over between threads costs as much as a signature."""
        work = asyncio.create_task(asyncio.to_thread(self._make_at_once, checkpoint, fresh))
        try:
            await asyncio.wait({work})
            publication, record = work.result()
        except BaseException:
            # A thread can't be stopped, and writes into the folder that is removed next.
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait({work})
            self.store.abandon(checkpoint.key)
            raise
        feed = self.store.open_feed(publication)
        self.store.show_shard(feed, record, publication.shard_envelope(record.index), wake=False)
        self.store.show_finished(publication)
        return publication

    def _make_at_once(self, checkpoint: Checkpoint, fresh: OpenCheckpoint) -> tuple[Publication, ShardRecord]:
        """Everything but showing it. Blocking."""
        file = fresh.hold()
        if file is None:
            _check_weights(checkpoint)
        elif len(file) != checkpoint.size or blake3(file).digest() != checkpoint.digest:
            raise _changed(checkpoint)
        codec, base = self._choose(fresh)
        publication = self._opened(checkpoint, fresh, codec, base)
        self.store.make_folder(publication)
        record = self._store_shard(publication, fresh, base, 0)
        if base is not None and self._above + 1 >= KEEP_STATE_EVERY:
            self._keep_state(publication.key, fresh, 0)
        publication.take_own(self._seal(SHARD_KIND, record))
        self._finish(checkpoint, publication)
        return publication, record

    def _opened(
        self, checkpoint: Checkpoint, fresh: OpenCheckpoint, codec: Codec, base: OpenCheckpoint | None
    ) -> Publication:
        """A publication with its signed open record."""
        opening = PublicationOpen(
            epoch=checkpoint.epoch,
            step=checkpoint.step,
            publication=uuid.uuid4().bytes,
            base=base.root if base is not None else NO_HASH,
            layout=self.run.manifest.model.layout,
            codec=int(codec),
            raw_bytes=fresh.nbytes,
            shards=fresh.canonical.layout.shards,
            max_wire_bytes=fresh.nbytes + (fresh.canonical.layout.shards if codec is not Codec.RAW else 0),
        )
        publication = Publication(self.run)
        publication.take_own(self._seal(OPEN_KIND, opening))
        return publication

    def _finish(self, checkpoint: Checkpoint, publication: Publication) -> None:
        """Once every shard is stored and the file is the one that was named: manifest, head, and the file of records,
        flushed. Blocking."""
        records = [publication.expect(index) for index in range(publication.shards)]
        manifest = manifest_for(publication.open, [record for record in records if record is not None])
        if checkpoint.root is not None and manifest.root != checkpoint.root:
            raise PublishError(f"{checkpoint.weights} does not have the root that its checkpoint.json names")
        publication.take_own(self._seal(MANIFEST_KIND, manifest))
        publication.take_own(self._sign_head(publication))
        self.store.finish_files(publication)

    async def _publish_shard_by_shard(self, checkpoint: Checkpoint, fresh: OpenCheckpoint) -> Publication:
        codec, base = await asyncio.to_thread(self._choose, fresh)
        publication = self._opened(checkpoint, fresh, codec, base)
        feed, _ = self.store.begin(publication)
        # The whole file is checked beside the shards: children may fetch early, the manifest waits for the result.
        whole = asyncio.create_task(asyncio.to_thread(_check_weights, checkpoint))
        try:
            last = await self._publish_shards(publication, feed, fresh, base)
            await whole
            await asyncio.to_thread(self._finish, checkpoint, publication)
        except BaseException:
            whole.cancel()
            whole.add_done_callback(lambda task: task.cancelled() or task.exception())  # one failure is told
            self.store.abandon(checkpoint.key)
            raise
        # The last shard, the manifest and the head become visible together: one answer instead of three.
        self.store.show_shard(feed, last, publication.shard_envelope(last.index))
        self.store.show_finished(publication)
        return publication

    def _choose(self, fresh: OpenCheckpoint) -> tuple[Codec, OpenCheckpoint | None]:
        """The publication's codec, and what it applies to: the newest one, if that is open and of the same epoch.
        Blocking."""
        if self._codec in (Codec.RAW, Codec.ANCHOR):
            return self._codec, None
        base, newest = self._open.newest, self.store.keys[-1] if self.store.keys else None
        if base is None or base.key != newest or base.key[0] != fresh.key[0]:
            return Codec.ANCHOR, None
        try:
            pays = patch_pays(base, fresh, self._codec, self._states.segments)
        except (LayoutError, OSError) as exc:
            log.warning("the checkpoint before can't be read (%s); this publication needs no base", exc)
            pays = False
        return (self._codec, base) if pays else (Codec.ANCHOR, None)

    async def _publish_shards(
        self, publication: Publication, feed: Feed, fresh: OpenCheckpoint, base: OpenCheckpoint | None
    ) -> ShardRecord:
        """Store, sign and show every shard; the one that is ready last is returned, and not shown yet."""
        ready: list[ShardRecord] = []
        keep = base is not None and self._above + 1 >= KEEP_STATE_EVERY

        async def one(index: int) -> None:
            record = await asyncio.to_thread(self._store_shard, publication, fresh, base, index)
            if keep:
                await asyncio.to_thread(self._keep_state, publication.key, fresh, index)
            publication.take_own(self._seal(SHARD_KIND, record))
            ready.append(record)
            if len(ready) < publication.shards:
                self.store.show_shard(feed, record, publication.shard_envelope(index))

        pending: set[asyncio.Task[None]] = set()
        try:
            for index in range(publication.shards):
                pending.add(asyncio.create_task(one(index)))
                while len(pending) >= (_ENCODED_AT_ONCE if index + 1 < publication.shards else 1):
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:
            # Threads can't be stopped, and write into a folder that is removed next: each has one shard to do.
            await asyncio.gather(*pending, return_exceptions=True)
        return ready[-1]

    def _store_shard(
        self, publication: Publication, fresh: OpenCheckpoint, base: OpenCheckpoint | None, index: int
    ) -> ShardRecord:
        """Encode one shard into the archive, flushed; returns what is to be signed."""
        opening = publication.open
        codec = Codec(opening.codec)
        if codec is Codec.RAW:
            state, length = self._copy_shard(publication.key, fresh, index)
            return ShardRecord(opening.publication, index, length, length, state, NO_HASH, state)
        new = fresh.shard(index)
        if len(new) != shard_length(fresh.nbytes, index):
            raise LayoutError(f"{fresh.canonical.path} ends before its last tensor; write it again")
        state = blake3(new).digest()
        wire = wire_bytes(codec, base.published(index) if base is not None else None, new, self._states.segments(index))
        write_file(self.store.shard_path(publication.key, index), wire, durable=True)
        old_hash = base.states[index] if base is not None else NO_HASH
        return ShardRecord(opening.publication, index, len(wire), len(new), blake3(wire).digest(), old_hash, state)

    def _copy_shard(self, key: Key, fresh: OpenCheckpoint, index: int) -> tuple[bytes, int]:
        """Copy one raw shard into the archive, flushed, in pieces that stay in cache; returns hash and length."""
        length = shard_length(fresh.nbytes, index)
        hasher = blake3()
        with self.store.shard_path(key, index).open("wb", buffering=0) as out:
            for at in range(0, length, PIECE_BYTES):
                piece = fresh.bytes_at(index * SHARD_BYTES + at, min(PIECE_BYTES, length - at))
                if len(piece) != min(PIECE_BYTES, length - at):
                    raise LayoutError(f"{fresh.canonical.path} ends before its last tensor; write it again")
                hasher.update(piece)
                if out.write(piece) != len(piece):
                    raise StoreError(f"the disk under {self.store.root} took less than asked; free some space")
            os.fsync(out.fileno())
        return hasher.digest(), length

    def _keep_state(self, key: Key, fresh: OpenCheckpoint, index: int) -> None:
        """Keep one shard's state beside the publication, flushed."""
        frame = wire_bytes(Codec.ANCHOR, None, fresh.shard(index), self._states.segments(index))
        write_file(self.store.shard_path(key, index).with_name(kept_name(index)), frame, durable=True)

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
            manifest.epoch,
            manifest.step,
            manifest.publication,
            envelope.digest,
            manifest.root,
            anchor=manifest.step if manifest.base == NO_HASH else self._newest_anchor(manifest.step),
        )
        return self._seal(HEAD_KIND, head, HEAD_LIFETIME_MS)

    def _newest_anchor(self, step: int) -> int:
        """Of the publications before: the newest one that needs no base, as the newest head says."""
        return parse(self.store.head).record(Head).anchor if self.store.head is not None else step

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


def _root(publication: Publication) -> bytes:
    return publication.manifest.root if publication.manifest is not None else NO_HASH


def _check_weights(checkpoint: Checkpoint) -> None:
    size = checkpoint.weights.stat().st_size
    if size != checkpoint.size or hash_file(checkpoint.weights) != checkpoint.digest:
        raise _changed(checkpoint)


def _changed(checkpoint: Checkpoint) -> PublishError:
    return PublishError(
        f"{checkpoint.weights} is not the file that its checkpoint.json names; it was changed or damaged after the "
        "learner wrote it: remove that checkpoint and let the learner write it again"
    )
