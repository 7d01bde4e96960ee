"""The live ledger: one writer, an SQLite database on a local disk, a Merkle log over its leaves (RULES 9).

An entry is a `LedgerEntry` sealed by the coordinator (kind `entry`); its leaf is the hash of the envelope's bytes.
`append` decides index, time and signature at once, asks its caller whether the entry holds, and buffers; `commit` makes
everything appended so far durable, many appenders sharing one flush. What was refused is kept nowhere: it could never
be taken out again. Tree heads and receipts cover durable entries only, so no promise outlives a crash that the entry
did not.

Entries appended without an `await` between them become durable together or not at all.

Not covered: what entries mean (`state`), and the archive's files (`segments`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol import codec
from protocol.commands import printable
from protocol.envelope import Envelope, open_envelope, parse, seal
from protocol.errors import LedgerError, ProtocolError, ReasonCode
from protocol.identity import Identity
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import LedgerEntry, TreeHead
from protocol.sequences import Sequences

ENTRY_KIND = "entry"
TREE_KIND = "tree"

CLOCK_JITTER_MS = 1_000
"""A clock this much behind the last entry is read as the last entry's time; further behind is refused."""

CLOCK_LEAP_MS = 60_000
"""A clock that ran this much further than the monotonic one is refused (RULES 3). Lowering it makes slow NTP
corrections stop the run; raising it lets a wrong clock date entries that auditors will believe."""

COMMIT_DEADLINE_S = 60.0
"""How long a flush may take before whoever waits for it is told that the disk hangs."""

_PAGE = 512
"""Entries read from the database at once while iterating."""

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "davfs", "9p"}
)
"""Where SQLite's locks and write-ahead log do not hold: two writers would both believe they are alone."""


@dataclass(frozen=True)
class Appended:
    """Where an entry went. Durable only after `commit` or `append_many` returned."""

    index: int
    leaf: bytes
    entry: LedgerEntry


@dataclass(frozen=True)
class StoredEntry:
    """One leaf: the entry's signed bytes and their leaf hash."""

    index: int
    raw_envelope: bytes
    leaf: bytes

    def entry(self) -> LedgerEntry:
        """Decode without checking the signature: the ledger itself made it. Raises DecodeError."""
        return parse(self.raw_envelope).record(LedgerEntry)


class Ledger:
    """The one writer of a run's log. All methods belong to one thread (the event loop's); flushes use another, and
    `head`, `head_at`, `sign_head` and `entries` may be called from any."""

    @staticmethod
    def open(
        path: Path,
        *,
        run: bytes,
        coordinator: Identity,
        sequences: Sequences,
        clock_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        earlier: Collection[bytes] = (),
        announce: bool = True,
    ) -> Ledger:
        """Open or create the database file `path` (`state_dir/ledger.db`) and become its only writer.

        A ledger that holds entries gets an `incarnation` entry at once, durable when this returns.

        Args:
            clock_ms: wall clock in milliseconds; every entry's time comes from it.
            earlier: public keys the coordinator had before (`Chain.keys`): the last entry may still be theirs.
            announce: False leaves the `incarnation` entry to the caller, who may have to say first that another key
                signs it.

        Raises:
            LedgerError: held by another process (`ledger-locked`), on a network file system, another run's,
                damaged, or the clock is before the last entry.
        """
        return Ledger(path, run, coordinator, sequences, clock_ms, monotonic_ms, earlier, announce)

    def __init__(
        self,
        path: Path,
        run: bytes,
        coordinator: Identity,
        sequences: Sequences,
        clock_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        earlier: Collection[bytes] = (),
        announce: bool = True,
    ) -> None:
        self.path = path
        self.run = run
        self.incarnation = 0
        self._coordinator = coordinator
        self._sequences = sequences
        self._clock_ms = clock_ms
        self._monotonic_ms = monotonic_ms
        self._pending: list[StoredEntry] = []
        self._size = 0
        self._durable = MerkleLog()
        self._last_time = 0
        self._last_monotonic: int | None = None
        self._failure: LedgerError | None = None
        self._flush_lock = threading.Lock()
        self._flusher: asyncio.Future[None] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_network_file_system(path.parent)
        self._lock_fd = _take_lock(path.with_suffix(".lock"))
        try:
            self._db = _open_database(path, run)
            self._load({coordinator.public, *earlier})
            if self._size and announce:
                self.append_many([("incarnation", b"", b"")])
        except BaseException:
            self.close()
            raise

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Entries so far, those not yet durable included."""
        return self._size

    @property
    def durable_size(self) -> int:
        """Entries that survive a power loss now."""
        return self._durable.size

    def head(self) -> TreeHead:
        """The tree over all durable entries (unsigned; receipts and segments carry it under a signature)."""
        durable = self._durable  # replaced whole by a flush: size and root are of one moment in any thread
        return TreeHead(durable.size, durable.root(), self._last_time)

    def head_at(self, size: int) -> TreeHead:
        """The tree over the first `size` durable entries. O(size) unless it is the newest."""
        if size == self._durable.size:
            return self.head()
        log = MerkleLog()
        with self._flush_lock:
            for (leaf,) in self._db.execute("SELECT leaf FROM leaves WHERE idx < ? ORDER BY idx", (size,)):
                log.append(leaf)
        if log.size != size:
            raise LedgerError(f"no tree of {size} entries: only {self._durable.size} are durable")
        return TreeHead(size, log.root(), self._last_time)

    def sign_head(self, head: TreeHead) -> Envelope:
        """The coordinator's promise about a head made by `head` or `head_at`."""
        number = self._sequences.next(TREE_KIND)
        return seal(self._coordinator, TREE_KIND, head, run=self.run, sequence=number, issued_at=head.time)

    def entries(self, start: int = 0) -> Iterator[StoredEntry]:
        """Every entry from index `start` on, in order, those not yet durable included."""
        at = start
        while True:
            with self._flush_lock:
                rows = self._db.execute(
                    "SELECT idx, envelope, leaf FROM leaves WHERE idx >= ? ORDER BY idx LIMIT ?", (at, _PAGE)
                ).fetchall()
                rest = [] if rows else [stored for stored in self._pending if stored.index >= at]
            if not rows:
                yield from rest
                return
            yield from (StoredEntry(*row) for row in rows)
            at = rows[-1][0] + 1

    # --- writing ------------------------------------------------------------------------------------------------

    def append(
        self, event: str, body: object = b"", subject: bytes = b"", check: Callable[[LedgerEntry], None] | None = None
    ) -> Appended:
        """Sign the next entry and buffer it. Nothing may be promised to anybody before `commit` returned.

        Args:
            body: the event's own record, or its bytes.
            subject: the envelope of whoever caused the event, exactly as it arrived.
            check: called last, when nothing else can fail; what it raises is raised, and the entry is kept nowhere.
                Its signature was never shown to anybody.

        Raises:
            LedgerError: the clock does not hold, or an earlier flush failed.
            DecodeError: the entry is over its bounds.
        """
        if self._failure is not None:
            raise self._failure
        payload = body if isinstance(body, bytes) else codec.encode(body)
        now, monotonic = self._time()
        entry = LedgerEntry(self._size, self.incarnation, now, event, payload, subject)
        number = self._sequences.next(ENTRY_KIND)
        raw = seal(self._coordinator, ENTRY_KIND, entry, run=self.run, sequence=number, issued_at=now).raw
        leaf = leaf_hash(raw)
        if check is not None:
            check(entry)
        self._pending.append(StoredEntry(self._size, raw, leaf))
        self._size += 1
        self._last_time, self._last_monotonic = now, monotonic
        return Appended(entry.index, leaf, entry)

    def append_many(self, items: Sequence[tuple[str, object, bytes]]) -> list[Appended]:
        """Append (event, body, subject) triples in one transaction, durable on return (blocks for one flush)."""
        appended = [self.append(*item) for item in items]
        self.flush()
        return appended

    def sign_with(self, coordinator: Identity) -> None:
        """Sign everything from the next entry on with another key: call it directly before appending the
        `run.updated` entries of which the last names this key. A crash before them leaves nothing behind."""
        self._coordinator = coordinator

    def flush(self) -> None:
        """Make everything appended so far durable, blocking: for who has no event loop yet."""
        self._flush(list(self._pending))

    async def commit(self) -> None:
        """Return when everything appended so far is durable. Appenders that wait together share a flush.

        Raises:
            LedgerError: the disk hangs, or refused; then no more entries are taken until the coordinator is restarted.
        """
        target = self._size
        while self._durable.size < target:
            if self._flusher is None or self._flusher.done():
                # Whoever waited for this entry appends what follows from it now (a lease after its policy, a batch
                # after the last verdict) and shares the flush.
                await asyncio.sleep(0)
            flusher = self._join_flush()
            try:
                async with asyncio.timeout(COMMIT_DEADLINE_S):
                    await asyncio.shield(flusher)
            except TimeoutError as exc:
                raise LedgerError(
                    f"the disk under {self.path} did not finish a flush within {COMMIT_DEADLINE_S:.0f} s; the "
                    "coordinator's operator must check it",
                    ReasonCode.DEADLINE,
                ) from exc

    def close(self) -> None:
        """Flush what is buffered and let the next writer in. Safe to call twice."""
        try:
            if getattr(self, "_db", None) is not None:
                if self._pending and self._failure is None:
                    self._flush(list(self._pending))
                with self._flush_lock:
                    self._db.close()
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            if self._failure is None:
                self._failure = LedgerError("the ledger is closed")

    # --- inside -------------------------------------------------------------------------------------------------

    def _join_flush(self) -> asyncio.Future[None]:
        """The flush under way, or one of all that is buffered. Raises LedgerError: an earlier one failed."""
        if self._failure is not None:
            raise self._failure
        if self._flusher is None or self._flusher.done():
            loop = asyncio.get_running_loop()
            self._flusher = loop.run_in_executor(None, self._flush, list(self._pending))
        return self._flusher

    def _flush(self, batch: list[StoredEntry]) -> None:
        """Write `batch` (a prefix of what was pending on the event loop's thread) in one transaction."""
        with self._flush_lock:
            fresh = [stored for stored in batch if stored.index >= self._durable.size]
            if not fresh:
                return
            try:
                with self._db:
                    self._db.executemany(
                        "INSERT INTO leaves (idx, envelope, leaf) VALUES (?, ?, ?)",
                        [(stored.index, stored.raw_envelope, stored.leaf) for stored in fresh],
                    )
            except sqlite3.Error as exc:
                self._failure = LedgerError(
                    f"the ledger at {self.path} could not be written ({exc}); free or repair the disk, then restart "
                    "`trainer serve`: nothing that was promised is lost"
                )
                raise self._failure from exc
            log = self._durable.copy()
            for stored in fresh:
                log.append(stored.leaf)
            self._durable = log
            done = log.size
            while self._pending and self._pending[0].index < done:
                self._pending.pop(0)

    def _time(self) -> tuple[int, int]:
        now, monotonic = self._clock_ms(), self._monotonic_ms()
        if now < self._last_time - CLOCK_JITTER_MS:
            raise LedgerError(
                f"this machine's clock is {(self._last_time - now) / 1000:.0f} s before the ledger's last entry; the "
                "coordinator's operator must set the clock right (NTP), then restart `trainer serve`"
            )
        if self._last_monotonic is not None:
            leap = (now - self._last_time) - (monotonic - self._last_monotonic)
            if leap > CLOCK_LEAP_MS:
                raise LedgerError(
                    f"this machine's clock leapt {leap / 1000:.0f} s ahead; the coordinator's operator must check it "
                    "(NTP), then restart `trainer serve`, which accepts the clock as it is then"
                )
        return max(now, self._last_time), monotonic

    def _load(self, signers: Collection[bytes]) -> None:
        last: StoredEntry | None = None
        for index, raw, leaf in self._db.execute("SELECT idx, envelope, leaf FROM leaves ORDER BY idx"):
            if index != self._durable.size or leaf != leaf_hash(raw):
                raise LedgerError(
                    f"entry {self._durable.size} of {self.path} is missing or damaged; the coordinator's operator must "
                    "restore the database from a backup or from the sealed segments"
                )
            self._durable.append(leaf)
            last = StoredEntry(index, raw, leaf)
        if last is None:
            return
        try:
            envelope = open_envelope(last.raw_envelope, run=self.run, kind=ENTRY_KIND)
            if envelope.signer not in signers:
                raise LedgerError("signed by a key that never was this coordinator's", ReasonCode.BAD_SIGNATURE)
            entry = envelope.record(LedgerEntry)
        except ProtocolError as exc:
            raise LedgerError(f"the last entry of {self.path} does not hold: {exc}", exc.code) from exc
        self._size = self._durable.size
        self._last_time = entry.time
        self.incarnation = entry.incarnation + 1


def _open_database(path: Path, run: bytes) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, check_same_thread=False, timeout=10)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        with db:
            db.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL)")
            db.execute(
                "CREATE TABLE IF NOT EXISTS leaves "
                "(idx INTEGER PRIMARY KEY, envelope BLOB NOT NULL, leaf BLOB NOT NULL)"
            )
            db.execute("INSERT OR IGNORE INTO meta (name, value) VALUES ('run', ?)", (run,))
        (stored,) = db.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()
    except sqlite3.Error as exc:
        raise LedgerError(
            f"{path} can't be opened as a ledger ({exc}); the coordinator's operator must restore it from a backup"
        ) from exc
    if stored != run:
        db.close()
        raise LedgerError(
            f"{path} belongs to run {bytes(stored).hex()[:16]}, not {run.hex()[:16]}; give each run a state_dir of "
            "its own",
            ReasonCode.WRONG_RUN,
        )
    return db


def _take_lock(path: Path) -> int:
    """Lock `path` for this process's life and write who holds it there."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        with contextlib.closing(os.fdopen(fd, "r")) as held:
            holder = _holder(held.read(4096))
        raise LedgerError(
            f"the ledger beside {path} is held by {holder}; stop that `trainer serve` first, there is one writer a run",
            ReasonCode.LEDGER_LOCKED,
        ) from exc
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode(), 0)
    return fd


def _holder(text: str) -> str:
    """Who wrote itself into a lock file, in words."""
    try:
        found = json.loads(text)
        host, started = printable(str(found["host"])), printable(str(found["started"]))
        return f"process {int(found['pid'])} on {host} since {started}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"


def is_served(path: Path) -> bool:
    """Whether some process is the writer of the ledger at `path` now."""
    try:
        fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the file system `path` lies on, from the text of `/proc/self/mountinfo`; empty when unknown."""
    best, kind = "", ""
    target = str(path)
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields = left.split(" ")
        if not found or len(fields) < 5 or not right:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split(" ")[0]
    return kind


def refuse_network_file_system(directory: Path) -> None:
    """Raise LedgerError when `directory` lies on a file system whose locks SQLite can't rely on."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except FileNotFoundError:
        return  # not Linux: no way to tell, and the flock above still keeps honest writers apart
    kind = file_system_of(directory.resolve(), mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerError(
            f"{directory} is on a network file system ({kind}), where SQLite can lose entries; set state_dir to a "
            "local disk in run.toml"
        )
