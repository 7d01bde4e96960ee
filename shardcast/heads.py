"""The highest head ever seen, on disk, so that no restart can be rolled back (RULES 8).

A head is believed when it is fresh and not below the highest one seen. Two heads of one (epoch, step) with
different roots are a fork of the origin: both are kept as evidence and no further weights are swapped in until a
person decided.

Not covered: signatures (`publication`).
"""

from __future__ import annotations

from pathlib import Path

from protocol.envelope import Envelope
from protocol.errors import ReasonCode
from protocol.limits import FRESHNESS_MS
from shardcast.errors import ForkError, HeadError, StoreError
from shardcast.limits import REMEMBERED_ROOTS
from shardcast.publication import Key
from shardcast.records import Head

EVIDENCE_NAME = "fork-evidence.hw"
_MAX_SEEN_BYTES = 16 * REMEMBERED_ROOTS * 4096


def publication_name(key: Key) -> str:
    """Folder name of a publication or policy: `e0000-s00000012`."""
    return f"e{key[0]:04d}-s{key[1]:08d}"


def parse_publication_name(name: str) -> Key | None:
    """The inverse of `publication_name`; None for any other name."""
    epoch, _, step = name.partition("-")
    if not (epoch[:1] == "e" and step[:1] == "s" and epoch[1:].isdecimal() and step[1:].isdecimal()):
        return None
    if not (name.isascii() and len(name) <= 48):
        return None
    key = (int(epoch[1:]), int(step[1:]))
    return key if publication_name(key) == name else None


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that readers see the old or the new file, also after kill -9.

    It is not flushed to the disk: after power loss the file may be old or empty, so callers verify what they read.
    """
    aside = Path(f"{path.parent}/.{path.name}.part")
    with aside.open("wb", buffering=0) as out:
        view = memoryview(data)
        while view:
            view = view[out.write(view) :]
    aside.replace(path)


class SeenHeads:
    """The highest (epoch, step) seen with its root, and the roots of the last steps, in `seen.log`.

    One line `epoch step root envelope` per head, appended in a single write; a line cut short by a crash is ignored.
    The envelopes are kept so that a fork can be proven to others.
    """

    def __init__(self, folder: Path) -> None:
        """Load what an earlier process saw.

        Raises:
            ForkError: an earlier process found a fork here; a person must decide.
            StoreError: the file is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "seen.log"
        self._evidence = folder / EVIDENCE_NAME
        self._roots: dict[Key, bytes] = {}
        self._heads: dict[Key, bytes] = {}
        self._lines = 0
        if self._evidence.exists():
            raise ForkError(
                f"an earlier run of this node found that the origin forked ({self._evidence}); show that file to the "
                "run's operator, and delete it only when they have explained it"
            )
        if self._path.exists():
            if self._path.stat().st_size > _MAX_SEEN_BYTES:
                raise StoreError(f"{self._path} is too long to be ours; delete it, and the newest head is trusted once")
            for line in self._path.read_text("ascii", "replace").split("\n")[:-1]:
                self._load(line)
            self._write_all()

    def _load(self, line: str) -> None:
        try:
            epoch, step, root, head = line.split()
            key = (int(epoch), int(step))
            self._roots[key], self._heads[key] = bytes.fromhex(root), bytes.fromhex(head)
        except ValueError as exc:
            raise StoreError(f"{self._path} is damaged; delete it, and the newest head is trusted once") from exc

    def _write_all(self) -> None:
        for old in sorted(self._roots)[:-REMEMBERED_ROOTS]:
            del self._roots[old], self._heads[old]
        replace_file(self._path, "".join(map(self._line, sorted(self._roots))).encode())
        self._lines = len(self._roots)

    @property
    def highest(self) -> Key | None:
        return max(self._roots, default=None)

    def accept(self, head: Head, envelope: Envelope, now_ms: int) -> None:
        """Remember a head, durably against kill -9, before anything acts on it.

        Raises:
            HeadError: `expired`, or `stale-sequence` when it lies below the highest seen.
            ForkError: its root differs from the one seen for the same (epoch, step).
        """
        key = (head.epoch, head.step)
        self.check_root(key, head.root, envelope.raw)
        if envelope.issued_at > now_ms + FRESHNESS_MS or envelope.expires_at + FRESHNESS_MS < now_ms:
            raise HeadError(f"the head of {publication_name(key)} is not fresh; the source is stale or a clock is off")
        highest = self.highest
        if highest is not None and key < highest:
            raise HeadError(
                f"a head of {publication_name(key)}, but {publication_name(highest)} was already seen: a rollback",
                ReasonCode.STALE_SEQUENCE,
            )
        if key in self._roots:
            return
        self._roots[key], self._heads[key] = head.root, envelope.raw
        if self._lines >= 8 * REMEMBERED_ROOTS:
            self._write_all()
        else:
            with self._path.open("ab", buffering=0) as log:
                log.write(self._line(key).encode())
            self._lines += 1

    def check_root(self, key: Key, root: bytes, evidence: bytes) -> None:
        """Raise ForkError if another root was seen at `key`."""
        known = self._roots.get(key)
        if known is not None and known != root:
            raise ForkError(f"two roots were signed for {publication_name(key)}", (self._heads[key], evidence))

    def record_refused(self, key: Key, frames: bytes) -> None:
        """Keep what the origin signed of a publication that nobody can use."""
        replace_file(self._evidence.with_name(f"refused-{publication_name(key)}.hw"), frames)

    def record_fork(self, frames: bytes) -> None:
        """Keep the evidence; from now on this folder refuses to be used."""
        replace_file(self._evidence, frames)

    def _line(self, key: Key) -> str:
        return f"{key[0]} {key[1]} {self._roots[key].hex()} {self._heads[key].hex()}\n"
