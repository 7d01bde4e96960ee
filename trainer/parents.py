"""Tells each member whom to pull weights from, and gives it the passes to be served there.

The plan is `tree.plan`; here is what it looks at (admitted relays, proven addresses, who was heard from, who lied) and
what it becomes: `weights` URLs and `weights.pass` envelopes of a join's or heartbeat's reply, signed once and handed
out again until two thirds of their life are left.

Not covered: the plan, what a pass is (`shardcast.passes`), proving addresses (`members`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.envelope import Envelope
from protocol.state import NodeState
from shardcast.passes import PASS_RENEW_MS, issue
from trainer.book import Book
from trainer.config import RunConfig
from trainer.tree import Place, RelayView, plan

AWAITED_AT_START_S = 60.0
"""How long after the coordinator's start an admitted relay that never came keeps its place."""

AWAITED_PROOF_S = 30.0
"""How long a relay that joined keeps its place while its address isn't proven."""

_KEPT_PASSES = 8192


@dataclass(frozen=True)
class Seen:
    """What the members' side knows of one admitted relay."""

    url: str = ""
    """Its proven address, if it was heard from lately."""
    age_s: float | None = None
    """Seconds since its address was registered, infinite once it was proven; None if it has not joined since the
    coordinator's start."""
    lag: int = 0
    """Steps it was behind the newest policy when it was last heard from."""


@dataclass
class Parents:
    """Plans and passes of one run.

    Args:
        seen: looks at one relay's key.
        distrusted: relays that members of several networks complained about, without proof.
        uptime_s: since the coordinator's start.
    """

    book: Book
    config: RunConfig
    seen: Callable[[bytes], Seen]
    distrusted: Callable[[], set[bytes]]
    uptime_s: Callable[[], float]
    _passes: dict[tuple[bytes, Place], Envelope] = field(default_factory=dict)

    def places(self, node: NodeState) -> tuple[Place, ...]:
        """Where `node` pulls from, best first."""
        if node.state == "suspended":
            return ()
        granted = self.config.grants.keys("relay")
        origin = Place(self.book.run.manifest.origin, f"http://{self.config.origin.listen}")
        return plan(node.key, node.role, self.relays(granted), origin, self.book.secret, planned=bool(granted))

    def relays(self, granted: list[bytes]) -> list[RelayView]:
        """The admitted relays that may be used, in the order of the grants. Those distrusted without proof are among
        them only while nobody could be served otherwise: suspicion must not cost a run its last relay."""
        views = []
        for key in granted:
            node = self.book.state.nodes.get(key)
            if node is not None and node.state == "suspended":
                continue
            seen = self.seen(key)
            never = seen.age_s is None
            awaited = self.uptime_s() < AWAITED_AT_START_S if never else (seen.age_s or 0.0) < AWAITED_PROOF_S
            views.append(RelayView(key, seen.url, awaited and not seen.url, seen.lag))
        distrusted = self.distrusted()
        others = [view for view in views if view.key not in distrusted]
        return others if any(view.usable for view in others) else views

    def sent_to(self, child: bytes, relay: bytes) -> bool:
        """Whether `child` holds a pass for `relay` that still counts."""
        now = self.book.now_ms()
        return any(
            holder == child and place.key == relay and envelope.expires_at > now
            for (holder, place), envelope in self._passes.items()
        )

    def passes(self, node: NodeState, places: tuple[Place, ...]) -> tuple[bytes, ...]:
        """One pass per place; those still fresh are handed out again."""
        return tuple(self._pass(node.key, place).raw for place in places)

    def _pass(self, child: bytes, place: Place) -> Envelope:
        known, now = self._passes.get((child, place)), self.book.now_ms()
        if known is not None and known.expires_at - now > PASS_RENEW_MS:
            return known
        if len(self._passes) >= _KEPT_PASSES:
            self._passes.clear()
        made = issue(self.book.coordinator, self.book.sequences, self.book.run.id, now, child, place.key, place.url)
        self._passes[child, place] = made
        return made
