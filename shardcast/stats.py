"""What a server of weights did, for people: `stats.json` in its store and `GET /v1/{run}/stats`. Not evidence.

    bytes_sent   body bytes of shards sent            bytes_full  what full checkpoints would have cost instead
    shards_sent  shards sent                          stamps      shards signed for (a relay)
    children     who pulled or waited in the last     refused     requests without a pass that holds
                 minute
    epoch, step  newest policy held                   lag         steps behind the newest one heard of (a relay)

Byte counts go on after a restart; the rest starts again. The file is written at most every `SAVE_S`, when it changed.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from pathlib import Path

from shardcast.errors import StoreError
from shardcast.heads import replace_file
from shardcast.publication import Key

SAVE_S = 5.0
"""How often numbers go to the disk. They are for people: after a kill the last few seconds are missing, and replacing a
file every second costs a small relay more than its requests for news."""

_CHILD_S = 60.0
_MAX_CHILDREN = 4096
_LASTING = ("bytes_sent", "bytes_full")


class Counters:
    """The numbers of one server."""

    def __init__(self, folder: Path) -> None:
        """Go on from what an earlier process counted. Raises StoreError when its file is damaged."""
        self._path = folder / "stats.json"
        self.bytes_sent = 0
        self.bytes_full = 0
        self.shards_sent = 0
        self.stamps = 0
        self.refused = 0
        self.newest: Key | None = None
        self.lag = 0
        self._seen: OrderedDict[str | bytes, float] = OrderedDict()
        if self._path.exists():
            try:
                stored = json.loads(self._path.read_text())
                self.bytes_sent, self.bytes_full = (int(stored[name]) for name in _LASTING)
            except (ValueError, KeyError, TypeError) as exc:
                raise StoreError(f"{self._path} is damaged; delete it, only byte counts are lost") from exc
        self._written = self.table()

    def sent(self, wire_bytes: int, raw_bytes: int) -> None:
        self.bytes_sent += wire_bytes
        self.bytes_full += raw_bytes
        self.shards_sent += 1

    def child(self, who: str | bytes) -> None:
        """Somebody who was let in pulls or waits here: a key, or an address where nobody shows one."""
        self._seen[who] = time.monotonic()
        self._seen.move_to_end(who)
        if len(self._seen) > _MAX_CHILDREN:
            self._seen.popitem(last=False)

    def table(self) -> dict[str, int | None]:
        since = time.monotonic() - _CHILD_S
        while self._seen and next(iter(self._seen.values())) < since:
            self._seen.popitem(last=False)
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_full": self.bytes_full,
            "shards_sent": self.shards_sent,
            "stamps": self.stamps,
            "children": len(self._seen),
            "refused": self.refused,
            "epoch": self.newest[0] if self.newest is not None else None,
            "step": self.newest[1] if self.newest is not None else None,
            "lag": self.lag,
        }

    def save(self) -> None:
        table = self.table()
        if table != self._written:
            replace_file(self._path, json.dumps(table).encode())
            self._written = table
