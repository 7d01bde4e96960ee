"""Sealed segments: the ledger as files of the archive, readable without the database (RULES 9).

File `segment-<first index, 12 digits>.hwl`, big-endian:

    "headwater-segment/1\\0" | run 32 | u64 first index | u32 count
    | count x (u32 length + entry envelope) | u32 length + tree head envelope | BLAKE3 of all before, 32

The tree head (kind `tree`, a `TreeHead`) covers the whole log up to the segment's last entry, so each segment also
confirms every one before it. Entries and heads must carry the key that the manifest chain gives the coordinator at that
place; the chain itself is read from the `run.updated` entries on the way. Reading is total: damage is named, never an
exception, except a file the operating system can't read.

Not covered: signatures of subjects inside entries, and what entries mean (`state`, `verifier.audit`).
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from protocol.chain import Chain
from protocol.envelope import Envelope, open_envelope
from protocol.errors import LedgerError, ProtocolError, ReasonCode
from protocol.files import read_at_most, write_atomic
from protocol.ledger import ENTRY_KIND, TREE_KIND, Ledger, StoredEntry
from protocol.limits import MAX_ENVELOPE_BYTES, MIB
from protocol.manifest import Run
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import LedgerEntry, TreeHead

MAGIC = b"headwater-segment/1\0"
"""First bytes of a segment. Changing it makes every sealed archive unreadable."""

_NOT_THE_KEY = "signed by another key than the coordinator's at this place"

_HEADER = struct.Struct(">32sQI")
_LENGTH = struct.Struct(">I")
_HASH = 32

SEGMENT_ENTRIES = 16_384
SEGMENT_BYTES = 64 * MIB
"""A segment closes at whichever comes first. Larger ones cost an auditor memory: a segment is read whole."""

MAX_SEGMENT_BYTES = SEGMENT_BYTES + 2 * MAX_ENVELOPE_BYTES + 8 * SEGMENT_ENTRIES
"""Largest file a reader opens: the entry that crosses the bound, the head, and every entry's length come on top."""


@dataclass(frozen=True)
class Problem:
    """One thing in an archive that does not hold."""

    record: str
    """What it is about, for example `ledger/17` or `ledger/segment-000000000000.hwl`."""
    reason: ReasonCode
    message: str


@dataclass(frozen=True)
class SealedEntry:
    """One entry whose signature and index hold."""

    index: int
    envelope: Envelope
    entry: LedgerEntry


@dataclass
class SealedLog:
    """What a folder of segments holds: every entry that could be read, and what is wrong with the rest."""

    entries: list[SealedEntry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    size: int = 0
    """Leaves seen, damaged ones included."""
    chain: Chain | None = None
    """The manifest chain as the entries tell it."""
    head: TreeHead | None = None
    """The newest signed head that matches the leaves."""


def segment_name(first: int) -> str:
    return f"segment-{first:012d}.hwl"


def pack_segment(run: bytes, first: int, entries: Sequence[bytes], head: bytes) -> bytes:
    """The bytes of a segment: entry envelopes from index `first` on, and the tree head's envelope."""
    parts = [MAGIC, _HEADER.pack(run, first, len(entries))]
    for raw in [*entries, head]:
        parts += [_LENGTH.pack(len(raw)), raw]
    data = b"".join(parts)
    return data + blake3(data).digest()


def _chunks(entries: Iterator[StoredEntry]) -> Iterator[list[StoredEntry]]:
    chunk: list[StoredEntry] = []
    size = 0
    for stored in entries:
        if len(chunk) >= SEGMENT_ENTRIES or (chunk and size + len(stored.raw_envelope) > SEGMENT_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(stored)
        size += len(stored.raw_envelope)
    if chunk:
        yield chunk


class Sealer:
    """Writes a ledger's segments into one folder.

    The first call looks at what is there and checks that it continues this ledger; from then on only this writer adds
    to the folder (the ledger has one, by its lock), so where the last segment ended is remembered and a call costs the
    same however long the run is. `seal` may be called from any thread, while the ledger goes on.
    """

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self.directory = directory
        self._ledger = ledger
        self._end: int | None = None
        """Entries that segments hold; None before the folder was looked at."""
        self._lock = threading.Lock()

    def seal(self) -> list[Path]:
        """Write every durable entry that no segment holds yet; returns the new files (none when all is sealed).

        Safe at any moment and after any crash: a segment is whole or absent, and the next call, in this process or
        the next, continues behind the last one.

        Raises:
            LedgerError: a segment in the folder is damaged or belongs to another ledger.
            OSError: the disk refuses; the same entries are tried again by the next call.
        """
        with self._lock:
            if self._end is None:
                self._end = self._sealed()
            head = self._ledger.head()  # what becomes durable meanwhile is the next call's
            entries = self._ledger.entries(self._end) if self._end < head.size else iter(())
            durable = itertools.takewhile(lambda stored: stored.index < head.size, entries)
            return [self._write(chunk, head) for chunk in _chunks(durable)]

    def _sealed(self) -> int:
        """How many entries the folder's segments hold."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for part in self.directory.glob(".segment-*.part"):
            part.unlink(missing_ok=True)  # left by a writer that was killed
        end = 0
        for path in sorted(self.directory.glob("segment-*.hwl")):
            with path.open("rb") as file:
                header = file.read(len(MAGIC) + _HEADER.size)
            found = _HEADER.unpack(header[len(MAGIC) :]) if len(header) == len(MAGIC) + _HEADER.size else (b"", 0, 0)
            run, first, count = found
            known = header.startswith(MAGIC) and run == self._ledger.run
            if not known or first != end or end + count > self._ledger.durable_size:
                raise LedgerError(
                    f"{path} does not continue this ledger at entry {end}; the coordinator's operator must move it "
                    "away, it will be written again"
                )
            end += count
        return end

    def _write(self, entries: list[StoredEntry], newest: TreeHead) -> Path:
        """One whole file, or none."""
        first, end = entries[0].index, entries[-1].index + 1
        head = newest if end == newest.size else self._ledger.head_at(end)
        signed = self._ledger.sign_head(head).raw
        path = self.directory / segment_name(first)
        write_atomic(path, pack_segment(self._ledger.run, first, [stored.raw_envelope for stored in entries], signed))
        self._end = end
        return path


def seal_missing(ledger: Ledger, directory: Path) -> list[Path]:
    """The same once, for whoever seals once: see `Sealer.seal`."""
    return Sealer(ledger, directory).seal()


def read_segments(directory: Path, run: Run) -> SealedLog:
    """Read and check a folder of sealed segments against the run's coordinator key.

    Checked: file hashes, every entry's signature, run and index, rising time and incarnation, and every signed tree
    head against the recomputed root.

    Raises:
        OSError: a file or the folder can't be read.
    """
    reader = _Reader(run)
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(".hwl"))
    for name in names:
        data = read_at_most(directory / name, MAX_SEGMENT_BYTES + 1)
        if len(data) > MAX_SEGMENT_BYTES:
            reader.oversize(name)
        else:
            reader.segment(name, data)
    reader.finish()
    if not names:
        reader.problem("ledger", ReasonCode.RECORD_MISSING, f"{directory} holds no sealed segment")
    return reader.log


class _Reader:
    """Carries the log's right edge from one segment to the next."""

    def __init__(self, run: Run) -> None:
        self.log = SealedLog()
        self._run = run
        self._chain = self.log.chain = Chain(run)
        self._late_heads: list[tuple[str, Envelope, bytes | None]] = []
        """Heads by a key that no entry has named yet: segments can be sealed after the coordinator's key changed."""
        self._ahead: list[tuple[int, bytes]] = []
        """(index, signer) of updates whose signer no link has named yet."""
        self._tree = MerkleLog()
        self._broken = False
        """A leaf is missing or unreadable, so no later root can be recomputed; reported once, where it broke."""
        self._time = 0
        self._incarnation = 0

    def problem(self, record: str, reason: ReasonCode, message: str) -> None:
        self.log.problems.append(Problem(record, reason, message))

    def oversize(self, name: str) -> None:
        self._lost(f"ledger/{name}", f"is over the bound of {MAX_SEGMENT_BYTES} bytes and was not read")

    def segment(self, name: str, data: bytes) -> None:
        record = f"ledger/{name}"
        body, check = data[:-_HASH], data[-_HASH:]
        at = len(MAGIC) + _HEADER.size
        if len(body) < at or not body.startswith(MAGIC):
            self._lost(record, "is cut short or is no segment")
            return
        if blake3(body).digest() != check:
            self.problem(record, ReasonCode.HASH_MISMATCH, "the file's bytes differ from the hash at its end")
        run, first, count = _HEADER.unpack(body[len(MAGIC) : at])
        if run != self._run.id or name != segment_name(first):
            self._lost(record, "names another run or another first entry than its file name")
            return
        if first != self.log.size:
            self._lost(record, f"starts at entry {first}, but entry {self.log.size} comes next", missing=True)
            self.log.size = first
        pieces = _pieces(body[at:])
        for index in range(first, first + count):
            raw = next(pieces, None)
            if raw is None:
                self._lost(f"ledger/{index}", f"can't be found in {name}: a length before it is damaged")
                return
            self._entry(index, raw)
        raw_head = next(pieces, None)
        if raw_head is None or next(pieces, None) is not None:
            self._lost(record, "does not end with exactly one tree head")
            return
        self._head(record, raw_head)

    def _lost(self, record: str, message: str, missing: bool = False) -> None:
        self._broken = True
        self.problem(record, ReasonCode.RECORD_MISSING if missing else ReasonCode.LEDGER_BROKEN, message)

    def _entry(self, index: int, raw: bytes) -> None:
        self.log.size = index + 1
        self._tree.append(leaf_hash(raw))
        record = f"ledger/{index}"
        try:
            envelope = open_envelope(raw, run=self._run.id, kind=ENTRY_KIND)
            entry = envelope.record(LedgerEntry)
            self._check_signer(index, envelope.signer, entry)
        except ProtocolError as exc:
            self._broken = True
            self.problem(record, exc.code, f"the entry does not hold: {exc}")
            return
        if entry.index != index:
            self._lost(record, f"the entry says it is entry {entry.index}")
            return
        step = entry.incarnation - self._incarnation
        # A start is announced by `incarnation`, or by the update with which a new coordinator key begins.
        follows = step == 1 if entry.event == "incarnation" else step in (0, int(entry.event == "run.updated"))
        if entry.time < self._time or not follows:
            self.problem(record, ReasonCode.LEDGER_BROKEN, "its time or incarnation does not follow the entry before")
        self._time = max(self._time, entry.time)
        self._incarnation = entry.incarnation
        self.log.entries.append(SealedEntry(index, envelope, entry))

    def _check_signer(self, index: int, signer: bytes, entry: LedgerEntry) -> None:
        """Entries are the coordinator's. Updates may be signed by the key before them, or by one that this update or
        one of those directly behind it names: the key that begins with them. Entry 0 says no more than the run id
        does, so it is the genesis key's even when that was revoked from the start."""
        before = self._chain
        if entry.event == "run.updated":
            try:
                self._chain = self.log.chain = before.extend(entry.subject)
            except ProtocolError as exc:
                self.problem(f"ledger/{index}", exc.code, f"its link of the manifest chain does not hold: {exc}")
        allowed = {before.current.manifest.coordinator, self._chain.current.manifest.coordinator}
        if self._ahead and (entry.event != "run.updated" or signer != self._ahead[-1][1]):
            self._name_ahead()
        if signer in allowed:
            self._ahead.clear()
        elif entry.event == "run.updated":
            self._ahead.append((index, signer))
        else:
            raise LedgerError(_NOT_THE_KEY, ReasonCode.BAD_SIGNATURE)
        if self._chain.revoked(signer, index) and not _is_opening(index, entry):
            raise LedgerError(_NOT_THE_KEY, ReasonCode.BAD_SIGNATURE)
        if self._chain.lapsed(signer, entry.time):
            raise LedgerError("signed outside the time the root delegated to this key", ReasonCode.EXPIRED)

    def _name_ahead(self) -> None:
        """Updates signed by a key that none of them named after all."""
        for index, _ in self._ahead:
            self.problem(f"ledger/{index}", ReasonCode.BAD_SIGNATURE, f"the entry does not hold: {_NOT_THE_KEY}")
        self._ahead.clear()

    def finish(self) -> None:
        """What can only be judged once the whole chain is known."""
        self._name_ahead()
        for record, envelope, root in self._late_heads:
            if envelope.signer not in self._chain.keys("coordinator"):
                message = "its tree head does not hold: signed by another key than the coordinator's"
                self.problem(record, ReasonCode.BAD_SIGNATURE, message)
            else:
                self._take_head(record, envelope, root)
        for sealed in self.log.entries:
            if self._chain.revoked(sealed.envelope.signer, sealed.index) and not _is_opening(
                sealed.index, sealed.entry
            ):
                message = "signed by a coordinator key that was revoked from an entry before it on"
                self.problem(f"ledger/{sealed.index}", ReasonCode.KEY_REVOKED, message)

    def _head(self, record: str, raw: bytes) -> None:
        try:
            envelope = open_envelope(raw, run=self._run.id, kind=TREE_KIND)
            head = envelope.record(TreeHead)
        except ProtocolError as exc:
            self.problem(record, exc.code, f"its tree head does not hold: {exc}")
            return
        if head.size != self.log.size:
            self.problem(record, ReasonCode.LEDGER_BROKEN, f"its tree head covers {head.size} entries, not its own end")
            return
        root = None if self._broken else self._tree.root()
        if envelope.signer not in self._chain.keys("coordinator"):
            self._late_heads.append((record, envelope, root))
        else:
            self._take_head(record, envelope, root)

    def _take_head(self, record: str, envelope: Envelope, root: bytes | None) -> None:
        """Compare a head with the root recomputed at its size (None: a leaf before it is missing)."""
        head = envelope.record(TreeHead)
        if root is None:
            return
        if self._chain.revoked(envelope.signer, head.size - 1):
            self.problem(record, ReasonCode.KEY_REVOKED, "its tree head is signed by a revoked key")
        elif head.root != root:
            self._lost(record, "its signed tree head does not match the entries: the log was rewritten")
        elif self.log.head is None or head.size > self.log.head.size:
            self.log.head = head


def _is_opening(index: int, entry: LedgerEntry) -> bool:
    """The entry whose content the run id fixes: revoking its signer takes nothing back."""
    return index == 0 and entry.event == "run.opened"


def _pieces(data: bytes) -> Iterator[bytes]:
    """Length-prefixed pieces of `data`; stops where a length points outside."""
    at = 0
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if size > MAX_ENVELOPE_BYTES or at + size > len(data):
            return
        yield data[at : at + size]
        at += size
