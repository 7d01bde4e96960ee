"""Whom this machine pulls weights from, as the coordinator last said, and its reports about those who sent wrong bytes.

Not covered: pulling (`shardcast`), the plan itself (`trainer.tree`).
"""

from __future__ import annotations

import asyncio

from node.log import EventLog
from protocol.control import ControlClient
from protocol.errors import ProtocolError
from protocol.manifest import Run
from protocol.records import Ack, RelayReport
from shardcast.passes import Parent, open_passes, parents_of

MAX_REPORTS = 4
"""Reports about relays on their way at once; a relay that lies about every shard needs no more to be named."""


class Parents:
    """The sources of weights, best first.

    Attributes:
        urls: for people; what is pulled from is `sources`.
    """

    def __init__(self, own: bytes, control: ControlClient, log: EventLog) -> None:
        self.urls: list[str] = []
        self._own = own
        self._control = control
        self._log = log
        self._passes: tuple[bytes, ...] = ()
        self._parents: list[Parent] = []
        self._reports: set[asyncio.Task[None]] = set()

    def sources(self) -> list[Parent]:
        """Whom to pull weights from now, each with the pass that lets us."""
        return list(self._parents)

    def take(self, run: Run, urls: tuple[str, ...], passes: tuple[bytes, ...]) -> None:
        """Note whom to pull from. Passes are opened once, not at every heartbeat that repeats them."""
        if (list(urls), passes) == (self.urls, self._passes):
            return
        self.urls, self._passes = list(urls), passes
        try:
            self._parents = open_passes(run, self._own, passes) if passes else parents_of(urls)
        except ProtocolError as exc:  # those we had may still hold
            self._log.event("weights.invalid", level="warning", code=exc.code.value, reason=str(exc))

    def report(self, report: RelayReport) -> None:
        """Tell the coordinator of a relay that sent wrong bytes, beside everything else; returns at once."""
        proof = bool(report.stamp)
        self._log.event("relay.wrong", level="warning", relay=report.relay, proof=proof, reason=report.detail)
        if len(self._reports) < MAX_REPORTS:
            task = asyncio.create_task(self._send(report))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _send(self, report: RelayReport) -> None:
        try:
            await self._control.call("relay.report", report, Ack)
        except ProtocolError as exc:
            self._log.event("relay.report.refused", level="warning", code=exc.code.value, reason=str(exc))
