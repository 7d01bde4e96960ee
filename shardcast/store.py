"""Publications on disk, and what of them may be served: used by the origin, relays and the archive.

    <root>/blobs/<hash hex>              model files and the layout, by BLAKE3
    <root>/e0000-s00000012/              shard-000000.bin ... publication.hw
    <root>/HEAD.hw                       the newest head's envelope, signed again from time to time
    <root>/server.json  stats.json       where it is served and what was sent; not evidence

`publication.hw` holds all records as frames: open, shard records, manifest, head. It appears last, by one rename: a
folder without it is unfinished and never counts as a publication. A relay that fetches several shards keeps `open.hw`
beside them until then, which says whose shards they are if it has to start again. A `Feed` is the ordered list of
frames that children may see; a shard is in it only after its bytes were verified here.
Folder and file names are built from integers and hashes, never from text that came over the wire.

Not covered: HTTP (`server`) and fetching (`follower`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from protocol.errors import ProtocolError, ReasonCode, UsageError
from protocol.files import fsync_dir, open_regular, read_at_most
from protocol.limits import MAX_ENVELOPE_BYTES, SHARD_BYTES
from protocol.manifest import Run
from shardcast.errors import StoreError
from shardcast.heads import parse_publication_name, publication_name, replace_file
from shardcast.limits import MAX_STATE_HASHES, PIECE_BYTES, WIRE_SLACK_BYTES
from shardcast.publication import Key, Publication, pack_frames, publication_from, split_frames
from shardcast.records import Head, ShardRecord

_FEEDS_IN_MEMORY = 32
"""Publications whose frames are kept parsed; older ones are read again when somebody asks. More than a relay ever
holds (twice its `keep`): with fewer, each removal read and checked all the others again, half of a relay's CPU."""

_CHECKED_FILES = 65_536
"""Publications that need no second check of their signatures: 10 MB at most."""

PUBLICATION_NAME = "publication.hw"
MAX_PUBLICATION_BYTES = MAX_STATE_HASHES * 512 + 3 * MAX_ENVELOPE_BYTES
"""All frames of one publication: a signed shard record has less than 400 bytes. Bounds what a reader takes in."""

_OPEN_NAME = "open.hw"


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.bin"


def hash_file(path: Path) -> bytes:
    """BLAKE3 of a file, read in pieces of 1 MiB."""
    hasher = blake3()
    with open_regular(path) as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.digest()


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's bytes. Raises StoreError(`oversize`) over the limit."""
    data = read_at_most(path, limit + 1)
    if len(data) > limit:
        raise StoreError(f"{path} is over its bound of {limit} bytes; it was replaced or damaged", ReasonCode.OVERSIZE)
    return data


def write_file(path: Path, data: bytes | memoryview, *, durable: bool) -> None:
    """Write a file in place, flushed to the disk when `durable`. Only for folders that do not count yet."""
    with path.open("wb", buffering=0) as out:
        view = memoryview(data)
        while view:
            view = view[out.write(view) :]
        if durable:
            os.fsync(out.fileno())


def remove_folder(folder: Path) -> None:
    """Remove a folder of files, as far as it is there and ours to remove."""
    try:
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


class CheckedFiles:
    """Which files of records hold: whoever asks for old publications in turn makes each be checked once, not each time.

    Checking signatures takes 0.2 ms a shard, on the loop that serves everybody.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """Remember the BLAKE3 of a file whose signatures were checked."""
        self._digests[digest] = None
        while len(self._digests) > _CHECKED_FILES:
            self._digests.popitem(last=False)


def read_frames(path: Path, run: Run, files: CheckedFiles | None = None) -> Publication:
    """The publication in a `publication.hw`: all its records, each checked. What a key signed that was revoked since is
    read too: it was checked when it was written here.

    Args:
        files: what was checked before, whose signatures need no second look.

    Raises:
        FileNotFoundError: there is none.
        StoreError: over its bound, or incomplete.
        ProtocolError: a record does not hold.
    """
    data = read_bounded(path, MAX_PUBLICATION_BYTES)
    digest = blake3(data).digest()
    known = files is not None and digest in files
    publication = publication_from(run, split_frames(data), revoked=True, checked=known)
    if len(publication.shard_envelopes()) != publication.shards or publication.head is None:
        raise StoreError(f"{path} does not hold one record per shard, manifest and head", ReasonCode.RECORD_MISSING)
    if files is not None:
        files.add(digest)
    return publication


def read_publication(folder: Path, run: Run, files: CheckedFiles | None = None) -> Publication:
    """A finished publication's records, each checked; see `read_frames`.

    Raises:
        StoreError: the file is missing, over its bound, or a record in it does not hold; the message names it.
    """
    path = folder / PUBLICATION_NAME
    try:
        publication = read_frames(path, run, files)
    except FileNotFoundError as exc:
        raise StoreError(f"{path} is missing; the publication cannot be served or checked") from exc
    except StoreError:
        raise
    except ProtocolError as exc:
        raise StoreError(f"{path} does not hold: {exc}", exc.code) from exc
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
        self._place = str(root)
        self._run = run
        self.durable = durable
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        names = (parse_publication_name(entry.name) for entry in os.scandir(root))
        keys = [key for key in names if key is not None]
        self.keys: list[Key] = sorted(key for key in keys if (self.folder(key) / PUBLICATION_NAME).exists())
        """Finished publications, in order."""
        self._feeds: OrderedDict[Key, Feed] = OrderedDict()
        self._checked = CheckedFiles()
        self._reading = threading.RLock()
        """Held while feeds are looked up: states are made in threads."""
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
        return Path(f"{self._place}/{publication_name(key)}")

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

    def begin(self, publication: Publication) -> tuple[Feed, bool]:
        """Make room for an opened publication; returns its feed, and whether shards of it may be there already."""
        resume = self.make_folder(publication)
        return self.open_feed(publication), resume

    def make_folder(self, publication: Publication) -> bool:
        """The folder of an opened publication; whether shards of it may be there already. Blocking.

        A folder left unfinished by a crash is removed. Not so a relay's with several shards of the same publication id:
        they are hashed, and kept.
        """
        key, opening = publication.key, publication.opening_envelope
        folder = self.folder(key)
        if opening is None:
            raise StoreError("a publication without its open record")
        if key in self.keys:
            raise StoreError(f"{folder} is already a finished publication")
        resumable = not self.durable and publication.shards > 1
        resume = False
        try:
            folder.mkdir()
        except FileExistsError:
            resume = resumable and _opened_as(folder, opening.raw)
            if not resume:
                shutil.rmtree(folder)
                folder.mkdir()
        if resumable and not resume:
            write_file(folder / _OPEN_NAME, opening.raw, durable=False)
        return resume

    def open_feed(self, publication: Publication) -> Feed:
        """What children may see of a publication whose folder is there: until now that it was opened."""
        if publication.opening_envelope is None:
            raise StoreError("a publication without its open record")
        feed = Feed(publication.key)
        feed.frames.append(publication.opening_envelope.raw)
        with self._reading:
            self._feeds[feed.key] = feed
        return feed

    def shard_path(self, key: Key, index: int) -> Path:
        return Path(f"{self._place}/{publication_name(key)}/{shard_name(index)}")

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
        """Write all records. Blocking; the publication counts from the rename on."""
        folder = self.folder(publication.key)
        if publication.manifest_envelope is None or publication.head_envelope is None:
            raise StoreError("a publication cannot be finished without manifest and head")
        aside = folder / f".{PUBLICATION_NAME}.part"
        data = pack_frames(publication.frames())
        write_file(aside, data, durable=self.durable)
        aside.replace(folder / PUBLICATION_NAME)
        self._checked.add(blake3(data).digest())
        if self.durable:
            fsync_dir(folder)
            fsync_dir(self.root)
        elif publication.shards > 1:
            (folder / _OPEN_NAME).unlink(missing_ok=True)

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
        with self._reading:
            feed = self._feeds.pop(key, None)
        if feed is not None:
            feed.gone = True
        if key not in self.keys:
            remove_folder(self.folder(key))
        self.notify()

    def remove(self, key: Key) -> None:
        """Forget a finished publication (a relay's retention; the archive never calls this)."""
        newest = self.keys[-1:] == [key]
        self.keys = [k for k in self.keys if k != key]
        (self.folder(key) / PUBLICATION_NAME).unlink(missing_ok=True)
        self.abandon(key)
        if newest:
            self.head = self._newest_head()

    # --- reading ---------------------------------------------------------------------------------------------------

    def feed(self, key: Key) -> Feed | None:
        """What may be served of `key`; None when unknown.

        Raises:
            StoreError: the stored records are damaged.
        """
        with self._reading:
            feed = self._feeds.get(key)
            if feed is not None:
                self._feeds.move_to_end(key)
                return feed
            if key not in self.keys:
                return None
            publication = read_publication(self.folder(key), self.run, self._checked)
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

    def keys_down(self, key: Key | None, most: int) -> list[Key]:
        """At most `most` publications, finished or under way, from `key` (None: the newest) down, newest first."""
        with self._reading:
            running = [at for at, feed in self._feeds.items() if not feed.complete]
        found = sorted({*self.keys[-(most + len(running)) :], *running}, reverse=True)
        if key is not None and self.keys and key < self.keys[-1]:
            found = sorted({*self.keys, *running}, reverse=True)
        return [at for at in found if key is None or at <= key][:most]

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
        with self._reading:
            complete = [key for key, feed in self._feeds.items() if feed.complete]
            for key in complete[:-_FEEDS_IN_MEMORY]:
                del self._feeds[key]


def _opened_as(folder: Path, opening: bytes) -> bool:
    try:
        return read_bounded(folder / _OPEN_NAME, MAX_ENVELOPE_BYTES) == opening
    except (FileNotFoundError, StoreError):
        return False


def published_heads(root: Path, run: Run, after: Key | None = None) -> list[tuple[bytes, Head]]:
    """Heads of finished publications after `after`, in order, as (envelope bytes, record). Checks every record of
    each publication it returns; reads no shard.

    Raises:
        StoreError: a publication does not hold.
    """
    found = []
    for entry in os.scandir(root):
        key = parse_publication_name(entry.name)
        if key is None or (after is not None and key <= after) or not Path(entry.path, PUBLICATION_NAME).exists():
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
