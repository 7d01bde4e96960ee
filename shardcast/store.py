"""Publications on disk, and what of them may be served: used by the origin, relays and the archive.

    <root>/blobs/<hash hex>              model files and the layout, by BLAKE3
    <root>/e0000-s00000012/              open.hw records.hw manifest.hw head.hw shard-000000.bin ...
    <root>/HEAD.hw                       the newest head's envelope, signed again from time to time
    <root>/server.json  stats.json       where it is served and what was sent; not evidence

`head.hw` is written last: a folder without it is unfinished and never counts as a publication. A `Feed` is the
ordered list of frames that children may see; a shard is in it only after its bytes were verified here.
Folder and file names are built from integers and hashes, never from text that came over the wire.

Not covered: HTTP (`server`) and fetching (`follower`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from protocol.errors import ProtocolError, ReasonCode, UsageError
from protocol.files import fsync_dir
from protocol.limits import MAX_ENVELOPE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from shardcast.errors import StoreError
from shardcast.heads import parse_publication_name, publication_name, replace_file
from shardcast.limits import MAX_STATE_HASHES, PIECE_BYTES, WIRE_SLACK_BYTES
from shardcast.publication import Key, Publication, pack_frames, split_frames
from shardcast.records import Head, ShardRecord

_FEEDS_IN_MEMORY = 16
"""Publications whose frames are kept parsed; older ones are read again when somebody asks."""

MAX_RECORDS_BYTES = MAX_STATE_HASHES * 512


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.bin"


def hash_file(path: Path) -> bytes:
    """BLAKE3 of a file, read in pieces of 1 MiB."""
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.digest()


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's bytes. Raises StoreError(`oversize`) over the limit."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise StoreError(f"{path} is over its bound of {limit} bytes; it was replaced or damaged", ReasonCode.OVERSIZE)
    return data


def write_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Write a file in place, flushed to the disk when `durable`. Only for folders that do not count yet."""
    with path.open("wb") as out:
        out.write(data)
        if durable:
            out.flush()
            os.fsync(out.fileno())


def read_publication(folder: Path, run: Run) -> Publication:
    """A finished publication's records, each checked.

    Raises:
        StoreError: a file is missing or over its bound.
        ProtocolError: a record does not hold; the message names the file.
    """
    publication = Publication(run)
    for name, limit in (
        ("open.hw", MAX_ENVELOPE_BYTES),
        ("records.hw", MAX_RECORDS_BYTES),
        ("manifest.hw", MAX_ENVELOPE_BYTES),
        ("head.hw", MAX_ENVELOPE_BYTES),
    ):
        path = folder / name
        try:
            data = read_bounded(path, limit)
            for raw in split_frames(data) if name == "records.hw" else [data]:
                publication.take(raw)
        except FileNotFoundError as exc:
            raise StoreError(f"{path} is missing; the publication cannot be served or checked") from exc
        except StoreError:
            raise
        except ProtocolError as exc:
            raise StoreError(f"{path} does not hold: {exc}", exc.code) from exc
    if len(publication.shard_envelopes()) != publication.shards:
        raise StoreError(f"{folder / 'records.hw'} does not hold one record per shard", ReasonCode.RECORD_MISSING)
    if publication_name(publication.key) != folder.name:
        raise StoreError(f"{folder} holds the publication of another step", ReasonCode.RECORD_MISSING)
    return publication


class Feed:
    """What children may see of one publication: frames in the order they became available."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.frames: list[bytes] = []
        self.shards: dict[int, ShardRecord] = {}
        """The records of the shards verified here."""
        self.stamps: dict[int, str] = {}
        """A relay's stamps, made when a shard is first asked for."""
        self.complete = False
        self.gone = False


class Store:
    """One process's publications. Single writer; served from the same process."""

    def __init__(self, root: Path, run: Run | Callable[[], Run], *, durable: bool) -> None:
        """Open a store, taking its lock.

        Args:
            run: with the newest manifest known; a callable when that may change.
            durable: flush everything to the disk before it counts (origin, archive). A relay need not.

        Raises:
            UsageError: another process holds it.
        """
        self.root = root
        self._run = run
        self.durable = durable
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        names = (parse_publication_name(entry.name) for entry in os.scandir(root))
        keys = [key for key in names if key is not None]
        self.keys: list[Key] = sorted(key for key in keys if (self.folder(key) / "head.hw").exists())
        """Finished publications, in order."""
        self._feeds: OrderedDict[Key, Feed] = OrderedDict()
        self._changed = asyncio.Event()
        self.head: bytes | None = self._newest_head()

    @property
    def run(self) -> Run:
        return self._run() if callable(self._run) else self._run

    def _take_lock(self) -> BinaryIO:
        lock = (self.root / ".lock").open("a+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.seek(0)
            holder = lock.read(200).decode("utf-8", "replace").strip() or "another process"
            lock.close()
            raise UsageError(f"{self.root} is already served by {holder}; stop that process first") from exc
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}".encode())
        lock.flush()
        return lock

    def close(self) -> None:
        self._lock.close()
        (self.root / "server.json").unlink(missing_ok=True)

    def _newest_head(self) -> bytes | None:
        """HEAD.hw if it belongs to the newest publication, else that publication's own head."""
        if not self.keys:
            return None
        try:
            publication = read_publication(self.folder(self.keys[-1]), self.run)
        except ProtocolError:
            if self.durable:
                raise
            return None  # a relay verifies and removes damaged publications when it starts
        own = publication.head_envelope
        path = self.root / "HEAD.hw"
        if path.exists():
            try:
                publication.take(read_bounded(path, MAX_ENVELOPE_BYTES))
            except ProtocolError:
                # HEAD.hw is not flushed; after power loss it may be older than the publication. Its own head counts.
                return own.raw if own is not None else None
        return publication.head_envelope.raw if publication.head_envelope is not None else None

    def folder(self, key: Key) -> Path:
        return self.root / publication_name(key)

    def blob(self, digest: bytes) -> Path:
        return self.root / "blobs" / digest.hex()

    def add_blob(self, data: bytes) -> bytes:
        """Store a blob under its BLAKE3 and return that. A damaged file of that name is replaced."""
        digest = blake3(data).digest()
        path = self.blob(digest)
        if not path.exists() or path.stat().st_size != len(data) or hash_file(path) != digest:
            aside = path.with_name(f".{path.name}.part")
            write_file(aside, data, durable=self.durable)
            aside.replace(path)
            if self.durable:
                fsync_dir(path.parent)
        return digest

    # --- writing: a publication becomes visible step by step -------------------------------------------------------

    def begin(self, key: Key, open_raw: bytes) -> Feed:
        """Make room for a publication; a folder left unfinished by a crash is removed, shards of the same
        publication id are kept (a relay resumes them)."""
        folder = self.folder(key)
        if key in self.keys:
            raise StoreError(f"{folder} is already a finished publication")
        if folder.exists() and not self._same_opening(folder, open_raw):
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        write_file(folder / "open.hw", open_raw, durable=self.durable)
        feed = Feed(key)
        feed.frames.append(open_raw)
        self._feeds[key] = feed
        return feed

    def _same_opening(self, folder: Path, open_raw: bytes) -> bool:
        path = folder / "open.hw"
        return not self.durable and path.exists() and read_bounded(path, MAX_ENVELOPE_BYTES) == open_raw

    def shard_path(self, key: Key, index: int) -> Path:
        return self.folder(key) / shard_name(index)

    def show_shard(self, feed: Feed, record: ShardRecord, record_raw: bytes | None, *, wake: bool = True) -> None:
        """A shard's bytes are verified and in place: children may have them.

        Args:
            wake: tell those who wait now; otherwise with what becomes visible next.
        """
        if feed.gone:
            return
        feed.shards[record.index] = record
        if record_raw is not None:
            feed.frames.append(record_raw)
        if wake:
            self.notify()

    def finish_files(self, publication: Publication) -> None:
        """Write records, manifest and head. Blocking; the publication counts from the last rename on."""
        folder = self.folder(publication.key)
        manifest, head = publication.manifest_envelope, publication.head_envelope
        if manifest is None or head is None:
            raise StoreError("a publication cannot be finished without manifest and head")
        write_file(folder / "records.hw", pack_frames(publication.shard_envelopes()), durable=self.durable)
        write_file(folder / "manifest.hw", manifest.raw, durable=self.durable)
        write_file(folder / ".head.part", head.raw, durable=self.durable)
        (folder / ".head.part").replace(folder / "head.hw")
        if self.durable:
            fsync_dir(folder)
            fsync_dir(self.root)

    def show_finished(self, publication: Publication) -> None:
        """After `finish_files`: manifest and head become visible, and the head the newest if it is."""
        key = publication.key
        feed = self._feeds[key]
        if publication.manifest_envelope is None or publication.head_envelope is None:
            raise StoreError("a publication cannot be finished without manifest and head")
        self.keys = sorted({*self.keys, key})
        feed.frames.append(publication.manifest_envelope.raw)
        feed.frames.append(publication.head_envelope.raw)
        feed.complete = True
        if key == self.keys[-1]:
            self.head = publication.head_envelope.raw
            if self.durable:
                self.set_head(self.head)
        self._trim()
        self.notify()

    def set_head(self, raw: bytes) -> None:
        """The newest head, also when it was only signed again."""
        self.head = raw
        replace_file(self.root / "HEAD.hw", raw)

    def abandon(self, key: Key) -> None:
        """Drop an unfinished publication; children are told it is gone."""
        feed = self._feeds.pop(key, None)
        if feed is not None:
            feed.gone = True
        if key not in self.keys:
            shutil.rmtree(self.folder(key), ignore_errors=True)
        self.notify()

    def remove(self, key: Key) -> None:
        """Forget a finished publication (a relay's retention; the archive never calls this)."""
        newest = self.keys[-1:] == [key]
        self.keys = [k for k in self.keys if k != key]
        (self.folder(key) / "head.hw").unlink(missing_ok=True)
        self.abandon(key)
        if newest:
            self.head = self._newest_head()

    # --- reading ---------------------------------------------------------------------------------------------------

    def feed(self, key: Key) -> Feed | None:
        """What may be served of `key`; None when unknown.

        Raises:
            StoreError: the stored records are damaged.
        """
        feed = self._feeds.get(key)
        if feed is not None:
            self._feeds.move_to_end(key)
            return feed
        if key not in self.keys:
            return None
        publication = read_publication(self.folder(key), self.run)
        feed = Feed(key)
        feed.frames = publication.frames()
        for index in range(publication.shards):
            record = publication.expect(index)
            if record is not None:
                feed.shards[index] = record
        feed.complete = True
        self._feeds[key] = feed
        self._trim()
        return feed

    def frames_of(self, feed: Feed) -> list[bytes]:
        """The feed's frames; the newest publication carries the newest signature of its head."""
        if feed.complete and self.head is not None and self.keys and feed.key == self.keys[-1]:
            return [*feed.frames[:-1], self.head]
        return feed.frames

    def newest(self, after: Key | None) -> Feed | None:
        """The newest finished publication after `after`, else the newest one being published after it."""
        if self.keys and (after is None or self.keys[-1] > after):
            return self.feed(self.keys[-1])
        running = [key for key, feed in self._feeds.items() if not feed.complete and len(feed.frames) > 1]
        ahead = [key for key in running if after is None or key > after]
        return self._feeds[max(ahead)] if ahead else None

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for anything to become visible; False after `timeout_s`."""
        event = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    def _trim(self) -> None:
        complete = [key for key, feed in self._feeds.items() if feed.complete]
        for key in complete[:-_FEEDS_IN_MEMORY]:
            del self._feeds[key]


def published_heads(root: Path, run: Run, after: Key | None = None) -> list[tuple[bytes, Head]]:
    """Heads of finished publications after `after`, in order, as (envelope bytes, record). Checks every record of
    each publication it returns; reads no shard.

    Raises:
        StoreError: a publication does not hold.
    """
    found = []
    for entry in os.scandir(root):
        key = parse_publication_name(entry.name)
        if key is None or (after is not None and key <= after) or not Path(entry.path, "head.hw").exists():
            continue
        publication = read_publication(Path(entry.path), run)
        if publication.head is not None and publication.head_envelope is not None:
            found.append((key, publication.head_envelope.raw, publication.head))
    return [(raw, head) for _, raw, head in sorted(found, key=lambda row: row[0])]


def verify_shards(folder: Path, publication: Publication) -> list[int]:
    """Indices of shards whose bytes are not the ones recorded (missing, wrong length or hash)."""
    wrong = []
    for index in range(publication.shards):
        record = publication.expect(index)
        path = folder / shard_name(index)
        try:
            good = (
                record is not None
                and path.stat().st_size == record.wire_bytes <= SHARD_BYTES + WIRE_SLACK_BYTES
                and hash_file(path) == record.wire_hash
            )
        except FileNotFoundError:
            good = False
        if not good:
            wrong.append(index)
    return wrong
