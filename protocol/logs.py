"""Logs for programs: one JSON object a line, the same fields in every process, in files that cannot grow for ever.

    {"time": 1764438000123, "level": "info", "event": "lease", "run": "3f..", "node": "9a..", "lease": "07.."}

`time` is milliseconds since the epoch on this machine's clock, `level` one of `LEVELS`, `event` a short name. `run`,
`node`, `lease` and `step` mean the same everywhere, so that one search finds a rollout in the logs of all processes
that touched it; further fields are the event's own. A file that reached its size is renamed to `NAME.1`, that one to
`NAME.2`; the oldest goes.

Not covered: sentences for people (`node.log`, `trainer.news`), metrics, and the ledger, which alone is evidence.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from protocol.commands import printable
from protocol.errors import UsageError
from protocol.limits import MIB

LEVELS = ("debug", "info", "warning", "error")

ROTATE_BYTES = 16 * MIB
FILES_KEPT = 3
"""Files of one log, the one being written included: at most 48 MiB a process, some hundred thousand events."""

MAX_FIELD = 512
"""Characters of one text field, and items of one list. Strangers choose some of them; a longer one is cut, marked by an
ellipsis."""

MAX_FIELDS = 32


def event_line(event: str, fields: Mapping[str, Any], *, level: str = "info", time_ms: int | None = None) -> str:
    """One event as a line of JSON without its line break: bytes in hex, text printable and cut, no NaN.

    Args:
        event: a short name of ours, never a stranger's words.
        fields: at most `MAX_FIELDS` are kept; None values are left out.
        time_ms: milliseconds since the epoch; now by default.
    """
    shown: dict[str, Any] = {
        "time": time.time_ns() // 1_000_000 if time_ms is None else time_ms,
        "level": level if level in LEVELS else "error",
        "event": event,
    }
    for name, value in list(fields.items())[:MAX_FIELDS]:
        if value is not None and name not in shown:
            shown[printable(name[:64])] = _plain(value)
    return json.dumps(shown, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """What JSON can hold, bounded."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else _cut(str(value.bit_length()) + " bits")
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _cut(bytes(value[: MAX_FIELD // 2 + 1]).hex())
    if isinstance(value, list | tuple | set | frozenset):
        return [_cut(printable(str(item)[: MAX_FIELD + 1])) for item in list(value)[:MAX_FIELD]]
    return _cut(printable(str(value)[: MAX_FIELD + 1]))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_FIELD else text[: MAX_FIELD - 1] + "\N{HORIZONTAL ELLIPSIS}"


class EventFile:
    """An append-only event log that rotates. One writer per file; every line is handed to the system as a whole.

    Args:
        path: the file, or None for a log that goes nowhere (tests, a command without one).
        common: fields of every event, for example `run` and `node`.
        rotate_bytes, kept: size at which the file is renamed, and how many files there are at most.
        clock_ms: milliseconds since the epoch.

    Raises:
        UsageError: the file can't be opened.
    """

    def __init__(
        self,
        path: Path | None,
        common: Mapping[str, Any] | None = None,
        *,
        rotate_bytes: int = ROTATE_BYTES,
        kept: int = FILES_KEPT,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.path = path
        self.common = dict(common or {})
        self.lost = 0
        """Events that could not be written: a full disk costs log lines, never the process."""
        self._rotate_bytes = rotate_bytes
        self._kept = max(1, kept)
        self._clock_ms = clock_ms
        self._out: TextIO | None = None
        self._size = 0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open(path)
            except OSError as exc:
                raise UsageError(f"the log file {path} can't be written ({exc.strerror}); give another one") from exc

    def event(self, event: str, /, level: str = "info", **fields: Any) -> str:
        """Write one event and return its line. A disk that refuses is said once on stderr, counted, and told later."""
        line = event_line(event, {**self.common, **fields}, level=level, time_ms=self._clock_ms())
        self.write(line)
        return line

    def write(self, line: str) -> None:
        """Write one finished line of `event_line`."""
        if self.path is None:
            return
        raw = line + "\n"
        try:
            if self._out is None:
                self._open(self.path)
            if self._size and self._size + len(raw) > self._rotate_bytes:
                self._rotate(self.path)
            self._put(raw)
            if self.lost:
                self._put(event_line("log.lost", {**self.common, "events": self.lost}, level="warning") + "\n")
                self.lost = 0
        except OSError as exc:
            if not self.lost:
                sys.stderr.write(f"{self.path} takes no more events ({exc.strerror}); going on without\n")
            self.lost += 1

    def close(self) -> None:
        """Close the file. Safe to call twice; a later event opens it again."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def _put(self, raw: str) -> None:
        assert self._out is not None
        self._out.write(raw)
        self._out.flush()
        self._size += len(raw.encode("utf-8", "replace"))

    def _open(self, path: Path) -> None:
        self._out = path.open("a", encoding="utf-8", errors="replace")
        self._size = path.stat().st_size
        if self._size and not _ends_a_line(path):
            self._put("\n")  # whoever wrote here before was killed in the middle of a line

    def _rotate(self, path: Path) -> None:
        self.close()
        for number in range(self._kept - 1, 0, -1):
            older = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        if self._kept == 1:
            path.unlink(missing_ok=True)
        self._open(path)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as read:
        read.seek(-1, 2)
        return read.read(1) == b"\n"
