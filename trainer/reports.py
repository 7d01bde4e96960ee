"""Reports about relays that sent wrong bytes: proof goes into the ledger, suspicion only into the plan.

    stamp + origin's record, both valid, different bytes   `relay.accused` entry: the fold suspends the relay for good
    no stamp (none came, or the bytes were not its)        counted by network; from three networks the relay is left
                                                           out of the plan for an hour, and nothing is written

A proof is one no matter who brings it, so it needs no second opinion. A report without proof could be a lie about an
honest relay, and the origin's record it shows is public. So it takes members of three networks that earned trust and
were sent to this very relay, it costs only an hour, and a relay without which nobody could be served stays
(`parents`). A child alone needs none of this: it rests the source and takes the shard elsewhere.

Not covered: what a stamp is (`shardcast.stamps`), and what the fold makes of the entry (`protocol.state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.control import Member
from protocol.envelope import open_envelope
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import SHARD_KIND, check_relay_lie
from protocol.records import Ack, RelayReport
from protocol.state import NodeState
from trainer.book import Book
from trainer.members import Members
from trainer.news import News
from trainer.parents import network_of

NETWORKS = 3
"""Networks that must complain before a relay without proof against it is left out. Fewer lets one person do it."""

LEFT_OUT_S = 3600.0
MEMORY_S = 3600.0
"""How long a complaint counts."""

MAX_REPORTS = 32
"""Reports one member may send an hour. Each costs two signature checks and maybe a ledger entry."""

_MAX_SENDERS = 10_000


@dataclass
class Reports:
    """Receives `relay.report`.

    Args:
        address_of: the network address a member was last seen at over HTTP; None when there is none.
    """

    book: Book
    members: Members
    news: News
    address_of: Callable[[bytes], str | None] = field(default=lambda key: None)
    monotonic: Callable[[], float] = time.monotonic
    _complaints: dict[bytes, dict[str, float]] = field(default_factory=dict)
    """Relay -> network -> when."""
    _left_out: dict[bytes, float] = field(default_factory=dict)
    _sent: dict[bytes, list[float]] = field(default_factory=dict)

    def distrusted(self) -> set[bytes]:
        """Relays left out of the plan now, without proof."""
        now = self.monotonic()
        return {key for key, until in self._left_out.items() if until > now}

    async def report(self, member: Member, report: RelayReport, attachment: bytes) -> Ack:
        """Take in one report.

        Raises:
            ProtocolError: from nobody we know, about nobody we know, too many, or its proof does not hold.
        """
        reporter = self.members.require(member)
        self._spend(reporter.key)
        relay = self.book.state.nodes.get(report.relay)
        if relay is None or relay.role != "relay":
            raise ProtocolError("the report is about no relay of this run", ReasonCode.MALFORMED)
        if relay.state == "suspended":
            return Ack("this relay is suspended already")
        origins = self.book.origins()
        if not report.stamp:
            shard = open_envelope(report.shard, run=self.book.run.id, kind=SHARD_KIND)
            if shard.signer not in origins:
                raise ProtocolError("the shard record is not the origin's", ReasonCode.BAD_SIGNATURE)
            return self._complain(reporter, relay.key, relay.name)
        check_relay_lie(report, self.book.run.id, origins)
        self.book.append("relay.accused", subject=member.envelope.raw)
        await self.book.commit()
        self.news.say(
            f"{relay.name} is suspended: {reporter.name or 'a member'} got a shard from it with a signature over other "
            "bytes than the origin's"
        )
        return Ack("the relay is suspended")

    def _spend(self, key: bytes) -> None:
        now = self.monotonic()
        recent = [at for at in self._sent.get(key, []) if now - at < MEMORY_S]
        if len(recent) >= MAX_REPORTS:
            raise ProtocolError(f"{MAX_REPORTS} reports an hour are enough; wait", ReasonCode.QUOTA)
        if len(self._sent) >= _MAX_SENDERS and key not in self._sent:
            self._sent.clear()
        self._sent[key] = [*recent, now]

    def _complain(self, reporter: NodeState, relay: bytes, name: str) -> Ack:
        """Count a report without proof by the network it comes from."""
        if not self._is_trusted(reporter):
            return Ack("noted; it does not count, since this member is in probation")
        if not self.members.parents.sent_to(reporter.key, relay):
            return Ack("noted; it does not count, since this member was not sent to that relay lately")
        network, now = network_of(self.address_of(reporter.key)), self.monotonic()
        if network is None:
            return Ack("noted; it does not count, since this member's network is not known")
        complaints = {where: at for where, at in self._complaints.get(relay, {}).items() if now - at < MEMORY_S}
        complaints[network] = now
        self._complaints[relay] = dict(sorted(complaints.items(), key=lambda item: -item[1])[:64])
        if len(complaints) >= NETWORKS and relay not in self.distrusted():
            self._left_out[relay] = now + LEFT_OUT_S
            self.news.say(
                f"{name} is left out for an hour: members of {len(complaints)} networks got wrong bytes from it. It is "
                "used only while no other relay can be. There is no proof; its operator should check that machine's "
                "disk and memory"
            )
            self.book.changes.notify()
        return Ack("noted")

    def _is_trusted(self, reporter: NodeState) -> bool:
        """Whether it cost something to be believed: work that was accepted, or the operator's own word."""
        if reporter.role in ("validator", "relay"):
            return self.members.granted(reporter.key, reporter.role)
        return reporter.state == "active"
