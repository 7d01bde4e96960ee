"""What a node tells: events for programs, and a few plain words for the person who started it.

An event is one JSON object a line with `time` (milliseconds since the epoch, this machine's clock), `event` and the
event's own fields. Events go to the log file if there is one, else to stderr when no person watches it. `--json`
puts them on stdout instead. A person at a terminal sees sentences, and one line that is rewritten as things change.

Not covered: metrics, rotation of the log file (append-only; an operator's logrotate may move it).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from protocol.errors import UsageError


class EventLog:
    """Where events and sentences go."""

    def __init__(self, *, as_json: bool = False, file: Path | None = None) -> None:
        self._json = as_json
        self._on_line = False
        self._status = ""
        self._sink: TextIO | None = None
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._sink = file.open("a", buffering=1, encoding="utf-8")
            except OSError as exc:
                raise UsageError(f"the log file {file} can't be written ({exc}); give another --log") from exc
        elif not as_json and not sys.stderr.isatty():
            self._sink = sys.stderr
        # Sentences would only clutter a service's log that has the events already.
        self._human = not as_json and (sys.stdout.isatty() or self._sink is not sys.stderr)
        self._terminal = self._human and sys.stdout.isatty()

    def event(self, name: str, /, **fields: Any) -> None:
        """Record one event. Bytes are shown in hex."""
        shown = {key: value.hex() if isinstance(value, bytes) else value for key, value in fields.items()}
        line = json.dumps({"time": time.time_ns() // 1_000_000, "event": name, **shown}, ensure_ascii=False)
        if self._json:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        if self._sink is not None:
            self._sink.write(line + "\n")
            self._sink.flush()

    def say(self, sentence: str) -> None:
        """A sentence for the person, on a line of its own."""
        if not self._human:
            return
        if self._on_line:
            sys.stdout.write("\r\x1b[K")
            self._on_line = False
        sys.stdout.write(sentence + "\n")
        if self._terminal and self._status:
            self._rewrite()
        sys.stdout.flush()

    def status(self, line: str) -> None:
        """What is going on now: the last line of a terminal, nothing elsewhere."""
        if not self._terminal or line == self._status:
            return
        self._status = line
        self._rewrite()

    def _rewrite(self) -> None:
        sys.stdout.write("\r\x1b[K" + self._status)
        sys.stdout.flush()
        self._on_line = True

    def close(self) -> None:
        if self._on_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if self._sink is not None and self._sink is not sys.stderr:
            self._sink.close()
