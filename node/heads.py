"""The newest signed promise about the whole ledger that this machine saw, and whether the next one keeps it (RULES 9).

    heartbeat, join, receipt --envelope--> see() --at most once a minute--> GET /v1/{run}/consistency --> kept

A head that is larger than the kept one replaces it only after the coordinator showed, with hashes, that its log merely
grew. What else can happen:

    proven      two signed heads of one size with different roots. Nobody but the coordinator's key can make these; both
                envelopes are kept in `conflict/` and the node stops: its receipts are worth nothing in a run that has
                two histories, and going on would feed both.
    unproven    the hashes did not fit, three times in a row. They come unsigned over HTTP, so anybody on the way could
                have made them wrong: both envelopes are kept, it is said loudly, and the node goes on. Stopping here
                would let a stranger in the middle end every node of a run.
    silent      the coordinator does not answer the question. It is asked again, and after a while that is said once.

Not covered: telling other members (gossip), and checking one entry against a head (`node receipts --ledger`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from node.door import ask_door
from node.errors import HeadsConflictError
from node.log import EventLog
from protocol.envelope import Envelope, parse
from protocol.errors import ProtocolError, ReasonCode
from protocol.files import write_atomic
from protocol.ledger import TREE_KIND
from protocol.limits import HASH_BYTES
from protocol.merkle import verify_consistency
from protocol.records import Receipt, TreeHead

ASK_EVERY_S = 60.0
"""A proof costs the coordinator a walk over its log; one a minute from each member is what it plans for."""

MAX_PROOF_HASHES = 2 * 64
"""A consistency proof between sizes below 2^64 is never longer."""

WRONG_PROOFS = 3
"""Proofs in a row that don't fit before it is called a conflict: one may be a broken transfer."""

SILENT_AFTER = 10
"""Unanswered questions before the person hears of it."""


@dataclass(frozen=True)
class SeenHead:
    """A signed promise: the first `size` entries of the ledger have this root."""

    size: int
    root: bytes
    raw: bytes
    """The envelope that says so: of kind `tree`, or a `receipt`."""


def head_of(envelope: Envelope) -> SeenHead | None:
    """The promise inside a `tree` or `receipt` envelope; None for an empty log or another kind. Raises DecodeError."""
    if envelope.kind == TREE_KIND:
        tree = envelope.record(TreeHead)
        found = SeenHead(tree.size, tree.root, envelope.raw)
    elif envelope.kind == "receipt":
        receipt = envelope.record(Receipt)
        found = SeenHead(receipt.tree_size, receipt.tree_root, envelope.raw)
    else:
        return None
    return found if found.size > 0 else None


class HeadKeeper:
    """One run's newest head.

    Args:
        folder: where `head.hw` and `conflict/` live.
        ingress: URL of the coordinator's HTTP door now.
        monotonic: seconds.
    """

    def __init__(
        self,
        run: bytes,
        folder: Path,
        *,
        ingress: Callable[[], str],
        session: aiohttp.ClientSession,
        log: EventLog,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._path = folder / "head.hw"
        self._aside = folder / "conflict"
        self._ingress = ingress
        self._session = session
        self._log = log
        self._monotonic = monotonic
        self._next: SeenHead | None = None
        self._ask_at = 0.0
        self._wrong = 0
        self._silent = 0
        self.kept = self._load()
        self.conflict = self._aside.is_dir()
        """Whether two heads were seen, by this process or an earlier one, that don't fit together."""

    @property
    def size(self) -> int:
        """Entries of the ledger as last promised, 0 before the first promise."""
        return max(self.kept.size if self.kept else 0, self._next.size if self._next else 0)

    @property
    def evidence(self) -> str:
        """Folder of two promises that don't fit, empty when there are none."""
        return str(self._aside) if self.conflict else ""

    def differs(self, size: int, root: bytes) -> bool:
        """Whether a head of this size is known with another root: then its signature is worth checking."""
        return any(known is not None and known.size == size and known.root != root for known in (self.kept, self._next))

    def see(self, envelope: Envelope) -> None:
        """Take note of a head whose signature was checked.

        Raises:
            HeadsConflictError: proven; both envelopes are on disk.
            DecodeError: not a head.
        """
        seen = head_of(envelope)
        if seen is None:
            return
        for known in (self.kept, self._next):
            if known is not None and known.size == seen.size and known.root != seen.root:
                self._keep_aside(known, seen)
                raise HeadsConflictError(
                    f"the coordinator signed two different ledgers of {seen.size} entries; both signatures are in "
                    f"{self._aside}. This node stops: show that folder to the run's operator, who must explain it"
                )
        if self.kept is None:
            self._keep(seen)
        elif seen.size > self.size:
            self._next = seen

    async def check(self) -> None:
        """If a newer head waits and it is time, ask for the proof that the log only grew."""
        kept, newer = self.kept, self._next
        if kept is None or newer is None or self._monotonic() < self._ask_at:
            return
        self._ask_at = self._monotonic() + ASK_EVERY_S
        try:
            proof = await self._fetch(kept.size, newer.size)
        except ProtocolError as exc:
            self._silent += 1
            self._log.event("heads.unanswered", level="warning", code=exc.code.value, reason=str(exc))
            if self._silent == SILENT_AFTER:
                self._log.say(f"the coordinator has not shown for a while that its ledger only grew ({exc})")
            return
        self._silent = 0
        if verify_consistency(kept.size, newer.size, kept.root, newer.root, proof):
            self._wrong = 0
            self._next = None
            self._keep(newer)
            return
        self._wrong += 1
        self._log.event("heads.wrong-proof", level="warning", first=kept.size, second=newer.size, times=self._wrong)
        if self._wrong == WRONG_PROOFS:
            self._keep_aside(kept, newer)
            reason = ReasonCode.HEADS_CONFLICT.value
            self._log.event(reason, level="error", first=kept.size, second=newer.size, folder=str(self._aside))
            self._log.say(
                f"WARNING ({reason}): the coordinator could not show that its ledger of {newer.size} entries still "
                f"holds the {kept.size} it promised before; both signed promises are in {self._aside}. This node goes "
                "on; ask the run's operator, and keep your receipts"
            )

    async def _fetch(self, first: int, second: int) -> list[bytes]:
        """The coordinator's proof.

        Raises:
            TransportError: not to be had now. DecodeError: too long.
        """
        question = f"consistency?first={first}&second={second}"
        raw = await ask_door(self._session, self._ingress(), self._run, question, MAX_PROOF_HASHES * HASH_BYTES)
        # A length that is no multiple of a hash is a wrong proof, not a missing answer: the rest never fits.
        return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]

    def _keep(self, head: SeenHead) -> None:
        self.kept = head
        write_atomic(self._path, head.raw, mode=0o600)

    def _keep_aside(self, first: SeenHead, second: SeenHead) -> None:
        self.conflict = True
        self._aside.mkdir(exist_ok=True)
        for head in (first, second):
            name = f"{head.size:012d}-{head.root.hex()[:16]}.hw"
            write_atomic(self._aside / name, head.raw, mode=0o600)

    def _load(self) -> SeenHead | None:
        """The head an earlier process kept; a damaged file counts as none, and the next head is believed once."""
        try:
            envelope = parse(self._path.read_bytes())
            return head_of(envelope) if envelope.run == self._run else None
        except FileNotFoundError:
            return None
        except ProtocolError as exc:
            self._log.event("heads.damaged", level="warning", path=str(self._path), reason=str(exc))
            return None
