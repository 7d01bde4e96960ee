"""The relay role: pull weights from the run's sources and serve each shard as soon as it is verified.

The serving and pulling are shardcast's; this is membership around it. The address is announced with the join, and
the coordinator hands it out only after the relay answered a challenge with its own key. Only children that show the
coordinator's pass for this relay are served.

Not covered: relays behind NAT, rate limits.
"""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

from node.errors import LeavingError
from node.log import EventLog
from node.member import Member
from protocol.errors import UsageError
from protocol.sequences import Sequences
from shardcast.relay import RelayServer


class RelayNode:
    """One relay's work for one run."""

    def __init__(self, *, member: Member, listen: str, store: Path, sequences: Sequences, log: EventLog) -> None:
        check_listen(listen, allow_private=member.run.manifest.allow_private)
        self._member = member
        self._log = log
        self._server = RelayServer(
            lambda: member.run,
            member.sources,
            listen,
            store,
            member.identity,
            sequences=sequences,
            clock_ms=member.clock.now_ms,
            passes=True,
            report=member.report,
        )
        self._sent_before = self._server.server.counters.bytes_sent

    @property
    def bytes_sent(self) -> int:
        """Bytes of shards sent by this process; the server's own count goes on from earlier ones."""
        return self._server.server.counters.bytes_sent - self._sent_before

    @property
    def bytes_received(self) -> int:
        """Bytes of shards received by this process."""
        return self._server.bytes_received

    async def start(self) -> str:
        """Listen, and return the URL to announce."""
        await self._server.start()
        self._log.event("relay.listening", url=self._server.url)
        return self._server.url

    async def run(self) -> None:
        """Serve until cancelled."""
        self._member.activity = "relaying"
        follow = asyncio.create_task(self._server.run_forever())
        parents: list[str] = []
        try:
            while not follow.done():
                if self._member.weights != parents:
                    parents = list(self._member.weights)
                    self._log.event("relay.parents", urls=parents)
                if self._server.store.keys:
                    self._member.policy = self._server.store.keys[-1]
                self._member.done = self._server.server.counters.shards_sent
                self._member.sent = self._server.server.counters.bytes_sent
                await asyncio.wait([follow], timeout=0.5)
            follow.result()
        finally:
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)

    async def wind_down(self, leaving: LeavingError) -> None:
        """Nothing to finish: pullers have other sources."""

    async def abandon(self, reason: str) -> None:
        """Nothing to hand back."""

    async def close(self) -> None:
        await self._server.close()


def check_listen(listen: str, *, allow_private: bool) -> tuple[str, int]:
    """Host and port of `--listen`.

    Raises:
        UsageError: not HOST:PORT, or an address that this run doesn't let relays announce.
    """
    host, _, port = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as exc:
        raise UsageError(f"--listen {listen}: give an IP address and a port, for example 127.0.0.1:0") from exc
    if not 0 <= number <= 65535:
        raise UsageError(f"--listen {listen}: a port is between 0 and 65535")
    if not allow_private and not address.is_global:
        raise UsageError(
            f"--listen {listen}: this run hands out public addresses only, and {address} is not one; "
            "give this machine's public address"
        )
    return host, number
