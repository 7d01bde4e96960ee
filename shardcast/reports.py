"""Reports of relays that sent other bytes than the origin signed: what both signed, put together for the coordinator.

A stamp over wrong bytes beside the origin's record is proof. Wrong bytes under a right stamp, and no stamp of the relay
for that shard, prove nothing, but many such reports count (`trainer.reports`): a relay that signs nothing would else
never be told of. One relay is reported at most once a minute.

Not covered: what a source is charged for it here (`source.SourceHealth`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.errors import ReasonCode
from protocol.records import RelayReport
from shardcast.errors import LieError, SourceError
from shardcast.publication import Publication
from shardcast.records import ShardRecord
from shardcast.source import Source

log = logging.getLogger("shardcast.reports")

_AGAIN_S = 60.0
_SUSPICIOUS = frozenset({ReasonCode.SHARD_MISMATCH, ReasonCode.BAD_SIGNATURE})
"""Of a shard: other bytes than stamped, or no valid stamp of the relay. Slow, cut short or gone is no ground."""

_EVIDENCE_DEADLINE_S = 60.0


class Reports:
    """What one follower tells of its sources."""

    def __init__(
        self,
        report: Callable[[RelayReport], None] | None,
        all_records: Callable[[Publication], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """
        Args:
            report: told of each relay; must not block. None tells nobody.
            all_records: fetches the origin's records of a publication that has only its manifest.
            spawn: starts a task whose failure somebody sees.
        """
        self._report = report
        self._all_records = all_records
        self._spawn = spawn
        self._reported: dict[tuple[bytes, bool], float] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """Reports whose evidence is still being put together."""

    def blame(self, publication: Publication, source: Source, record: ShardRecord, error: SourceError) -> None:
        """Report a relay that stamped or sent other bytes than the origin signed, or stamped nothing; without a key
        there is nobody to."""
        proven = isinstance(error, LieError)
        if self._report is None or not source.stamped_by or not (proven or error.code in _SUSPICIOUS):
            return
        mark, now = (source.stamped_by, proven), time.monotonic()
        if now - self._reported.get(mark, -math.inf) < _AGAIN_S:
            return
        self._reported[mark] = now
        task = self._spawn(self._tell(self._report, publication, source, record, error))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _tell(
        self,
        report: Callable[[RelayReport], None],
        publication: Publication,
        source: Source,
        record: ShardRecord,
        error: SourceError,
    ) -> None:
        """Put what both sides signed together; the origin's record may have to be fetched first."""
        try:
            async with asyncio.timeout(_EVIDENCE_DEADLINE_S):
                while publication.shard_envelope(record.index) is None:
                    await self._all_records(publication)
        except TimeoutError:
            log.warning("%s is not reported: the origin's record of the shard can't be had", source.address)
            return
        shard = publication.shard_envelope(record.index) or b""
        stamp = error.stamp if isinstance(error, LieError) else b""
        report(RelayReport(source.stamped_by, stamp, shard, str(error)[:500]))
