"""Sequence numbers that only rise, on both sides of an envelope (RULES 2).

`Sequences` hands out numbers for sending; it persists a block ahead before the first number of the block is
used, so a crash skips numbers but never repeats one. `SequenceGuard` remembers the highest seen per
(signer, kind) and refuses the rest.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from protocol.errors import EnvelopeError, ReasonCode, UsageError
from protocol.files import write_atomic

_BLOCK = 1024
"""Numbers reserved per fsync. Smaller costs a disk flush more often; larger only skips more after a crash."""


class Sequences:
    """Rising numbers per kind for one key and run, kept in one small file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        if path.exists():
            try:
                stored = json.loads(path.read_text())
                self._reserved = {str(k): int(v) for k, v in stored.items()}
            except (ValueError, AttributeError, TypeError) as exc:
                raise UsageError(f"sequence file {path} is damaged; restore it, or start a new identity") from exc
            self._next = dict(self._reserved)

    def next(self, kind: str) -> int:
        """The next number for `kind`; durable before it is returned."""
        with self._lock:
            number = self._next.get(kind, 1)
            if number >= self._reserved.get(kind, 1):
                self._reserved[kind] = number + _BLOCK
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, json.dumps(self._reserved).encode(), mode=0o600)
            self._next[kind] = number + 1
            return number


class SequenceGuard:
    """The receiver's side: the highest number seen per (signer, kind)."""

    def __init__(self, seen: dict[tuple[bytes, str], int] | None = None) -> None:
        self.seen = dict(seen or {})

    def accept(self, signer: bytes, kind: str, sequence: int) -> int:
        """Record the number and return the highest before it (0: none).

        Raises:
            EnvelopeError(`stale-sequence`): it is not higher than all before.
        """
        before = self.seen.get((signer, kind), 0)
        if sequence <= before:
            raise EnvelopeError(f"sequence {sequence} of {kind} was already seen", ReasonCode.STALE_SEQUENCE)
        self.seen[(signer, kind)] = sequence
        return before
