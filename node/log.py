"""What a node tells: events for programs, and a few plain words for the person who started it.

An event is one JSON object a line in the format every process of a run shares (`protocol.logs`). Events go to the log
file if there is one, else to stderr when no person watches it. `--json` puts them on stdout instead. A person at a
terminal sees sentences, and one line that is rewritten as things change and gone when the node ends; without a
terminal the sentences are plain lines.

Not covered: metrics, and what other processes log.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.commands import printable
from protocol.logs import EventFile, event_line
from trainer.spans import fit


class EventLog:
    """Where events and sentences go.

    Args:
        as_json: events on stdout, and no sentences.
        file: a log file; it rotates (`protocol.logs`).

    Raises:
        UsageError: the file can't be written.
    """

    def __init__(self, *, as_json: bool = False, file: Path | None = None) -> None:
        self._json = as_json
        self._on_line = False
        self._status = ""
        self._common: dict[str, Any] = {}
        self._file = EventFile(file) if file is not None else None
        self._stderr = file is None and not as_json and not sys.stderr.isatty()
        # Sentences would only clutter a service's log that has the events already.
        self._human = not as_json and (sys.stdout.isatty() or not self._stderr)
        self.terminal = self._human and sys.stdout.isatty()
        """Whether a person watches, so that a line may be rewritten in place."""

    def bind(self, **fields: Any) -> None:
        """Fields that every later event carries: `run` and `node`, once they are known."""
        self._common.update(fields)

    def event(self, name: str, /, level: str = "info", **fields: Any) -> None:
        """Record one event. Bytes are shown in hex, texts made printable and cut."""
        line = event_line(name, self._with_common(fields), level=level)
        if self._json:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        if self._stderr:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        if self._file is not None:
            self._file.write(line)

    def _with_common(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._common, **fields}

    def say(self, sentence: str) -> None:
        """A sentence for the person, on a line of its own; a stranger's words in it can't move the cursor."""
        if not self._human:
            return
        if self._on_line:
            sys.stdout.write("\r\x1b[K")
            self._on_line = False
        sys.stdout.write(printable(sentence) + "\n")
        if self.terminal and self._status:
            self._rewrite()
        sys.stdout.flush()

    def status(self, line: str) -> None:
        """What is going on now: the last line of a terminal, nothing elsewhere."""
        line = printable(line)
        if not self.terminal or line == self._status:
            return
        self._status = line
        self._rewrite()

    def last_words(self, *sentences: str) -> None:
        """What remains on the screen when the node ends: sentences, and no line about what it is doing."""
        self._status = ""
        for sentence in sentences:
            self.say(sentence)

    def _rewrite(self) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that wraps can't be taken back
        sys.stdout.write("\r\x1b[K" + fit(_shorter(self._status), width))
        sys.stdout.flush()
        self._on_line = True

    def close(self) -> None:
        """Leave the cursor at the start of an empty line and close the file. Safe to call twice."""
        self._status = ""
        if self._on_line:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
            self._on_line = False
        if self._file is not None:
            self._file.close()


def _shorter(line: str) -> Iterator[str]:
    """The same in fewer and fewer parts, for a terminal that is not wide enough: what it does now stays longest."""
    parts = line.split(" | ")
    for first in range(len(parts)):
        yield " | ".join(parts[first:])
    doing, detail, _ = parts[-1].partition(": ")
    for first in range(len(parts) * bool(detail)):
        yield " | ".join([*parts[first:-1], doing])
