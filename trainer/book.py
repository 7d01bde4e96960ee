"""The ledger and all that follows from it, in step: every entry is appended, applied to the state, seen by the window.

State runs ahead of the disk by at most one group commit; nothing is said to anybody before `commit` returned. If the
disk refuses, the coordinator ends: after a restart the state is what the disk says.

Not covered: decisions, and what is in a ledger entry (`protocol.state` says).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.chain import Chain, Link
from protocol.envelope import parse
from protocol.errors import LedgerError, ProtocolError, ReasonCode, UsageError
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.ledger import Appended, Ledger
from protocol.logs import EventFile
from protocol.manifest import Run
from protocol.records import LedgerEntry, RoleGrant
from protocol.segments import Sealer
from protocol.sequences import SequenceGuard, Sequences
from protocol.state import RunState
from trainer.errors import KeyLapsedError, RefusedEntryError
from trainer.plants import Plants
from trainer.proofs import ProofTree
from trainer.window import Window

SECRET_BYTES = 32
TREE_S = 2.0
"""Members get the newest signed tree head with each heartbeat; this often it is made anew. Seldomer lets a coordinator
that shows two ledgers go unnoticed for longer; oftener costs a signature each time."""

_OPENS_NOTHING = frozenset({"lease", "job", "draws.opened", "draws.revealed"})
"""Events after which nobody gets a lease who would not have got one before, and no batch closes."""

_FROM_MEMBERS = ("node.joined", "submission", "verdict")
"""Events whose subject is a member's own envelope."""


class Changes:
    """Wakes whoever waits for the state to move. Never missed: take `ticket` before looking, wait after."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    @staticmethod
    async def wait(ticket: asyncio.Event, deadline_s: float) -> None:
        """Return when something changed after the ticket was taken, or after `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                await ticket.wait()
        except TimeoutError:
            return


@dataclass
class Book:
    """One run's ledger with its derived state. All methods belong to the event loop's thread."""

    genesis: Run
    ledger: Ledger
    sequences: Sequences
    coordinator: Identity
    secret: bytes = field(repr=False)
    now_ms: Callable[[], int]
    log: EventFile = field(default_factory=lambda: EventFile(None))
    state: RunState = field(default_factory=RunState)
    changes: Changes = field(default_factory=Changes)
    """Something was entered, or seen, that may make room for a lease or a batch."""
    jobs: Changes = field(default_factory=Changes)
    """A job was drawn."""
    window: Window = field(init=False)
    plants: Plants = field(init=False)
    tree: ProofTree = field(init=False)
    joins: dict[bytes, bytes] = field(default_factory=dict)
    """Key -> the newest `join` envelope in the ledger."""
    guard: SequenceGuard = field(default_factory=SequenceGuard)
    """Highest sequence of each member's envelope kinds: what the ledger holds counts after a restart too."""
    monotonic: Callable[[], float] = time.monotonic
    over: bool = False
    """The run had ended before this start, its members have been told, and nothing is left to enter."""
    _ended_ms: int | None = None
    """When `run.finished` was entered."""
    _sealer: Sealer | None = None
    _signed: tuple[float, int, bytes] | None = None
    """When the newest tree head was signed, over how many entries, and its envelope."""

    @property
    def run(self) -> Run:
        """The run as its manifest is now: the ledger's newest update counts from its entry on."""
        return self.genesis if self.state.chain is None else self.state.chain.current

    @property
    def manifest_hash(self) -> bytes:
        """The newest link of the manifest chain: what leases and replies name."""
        return self.genesis.id if self.state.chain is None else self.state.chain.hash

    @staticmethod
    def open(
        chain: Chain,
        keys: Callable[[bytes], Identity],
        state_dir: Path,
        now_ms: Callable[[], int],
        log: EventFile | None = None,
        linger_s: float = 0.0,
    ) -> Book:
        """Open or begin the ledger in `state_dir`, fold it, and enter what the manifest chain has and the ledger lacks.

        Entry 0 is signed by the genesis manifest's key, as everybody can check without a chain. The first entries of a
        later start are the chain's new links, if there are any: so a coordinator key that was rotated or prolonged
        while nobody served begins with them, and the one before it, maybe revoked by now, signs nothing more.

        A run that is over gets no entry: see `over`.

        Args:
            chain: the run directory's.
            keys: finds the coordinator's private key by its public one; raises UsageError.
            linger_s: how long a run that has ended is served all the same, for members who don't know it yet.

        Raises:
            LedgerError: another `trainer serve` holds it, it is damaged, or no key may sign now.
        """
        state_dir.mkdir(parents=True, exist_ok=True)
        sequences = Sequences(state_dir / "sequences.json")
        signer = keys(chain.current.manifest.coordinator)
        ledger = Ledger.open(
            state_dir / "ledger.db",
            run=chain.genesis.id,
            coordinator=signer,
            sequences=sequences,
            clock_ms=now_ms,
            earlier=chain.keys("coordinator"),
            announce=False,
        )
        try:
            fresh = ledger.size == 0
            secret = _load_secret(state_dir / "draws.secret", fresh)
            book = Book(chain.genesis, ledger, sequences, signer, secret, now_ms, log or EventFile(None))
            for stored in ledger.entries():
                book._take(Appended(stored.index, stored.leaf, stored.entry()))
            if fresh:
                book._sign_with(keys(chain.genesis.manifest.coordinator))
                book.append("run.opened", subject=chain.genesis.envelope.raw)
            book._begin(chain, keys, fresh, linger_s)
        except BaseException:
            ledger.close()
            raise
        return book

    def _begin(self, chain: Chain, keys: Callable[[bytes], Identity], fresh: bool, linger_s: float) -> None:
        """The first entries of a start: the links the ledger lacks, or that it is served again."""
        known = self.state.chain
        assert known is not None
        if len(known.links) > len(chain.links) or known.links != chain.links[: len(known.links)]:
            raise UsageError(
                f"the ledger beside {self.ledger.path} knows {len(known.links)} updates of the manifest that are not "
                "all in updates/; the operator must restore that folder"
            )
        links = self.timely(chain)
        self._sign_with(keys((links[-1].run if links else known.current).manifest.coordinator))
        self.over = not links and self._ended_ms is not None and self.now_ms() - self._ended_ms >= 1000 * linger_s
        if not links and not fresh and not self.over:
            self.append("incarnation")
        for link in links:
            self.append("run.updated", subject=link.raw)
        self.ledger.flush()

    def timely(self, chain: Chain) -> list[Link]:
        """The links `chain` has and the ledger lacks, up to one whose delegations have not begun yet, or are over."""
        known = self.state.chain
        assert known is not None
        out: list[Link] = []
        for link in chain.links[len(known.links) :]:
            longer = known.extend(link.raw)
            if longer.untimely(len(known.delegations), self.now_ms()) is not None:
                break
            out.append(link)
            known = longer
        return out

    def _sign_with(self, coordinator: Identity) -> None:
        self.coordinator = coordinator
        self.ledger.sign_with(coordinator)

    def update(self, link: Link) -> None:
        """Enter the next link of the manifest chain. One that names another coordinator key is for the next start."""
        self.append("run.updated", subject=link.raw)

    def origins(self) -> tuple[bytes, ...]:
        """Keys the origin has or had, those that were revoked left out."""
        return self._keys("origin")

    def coordinators(self) -> tuple[bytes, ...]:
        """The same of the coordinator."""
        return self._keys("coordinator")

    def _keys(self, role: str) -> tuple[bytes, ...]:
        chain = self.state.chain
        assert chain is not None
        return chain.keys_at(role, self.ledger.size)

    def __post_init__(self) -> None:
        self.plants = Plants(self.state, self.secret)
        self.window = Window(self.genesis.manifest.leases.max_staleness, self.state, self.plants.is_plant)
        self.tree = ProofTree()

    def append(self, event: str, body: object = b"", subject: bytes = b"") -> Appended:
        """Add one entry and follow it. Durable only after `commit`.

        The fold takes the entry before the ledger keeps it: what contradicts the state never gets into the log, where
        it would fail every audit for ever.

        Raises:
            RefusedEntryError: the entry contradicts the state; nothing was kept, and nothing changed.
            LedgerError: the clock or the disk does not hold, or the coordinator's key is over.
        """
        appended = self.ledger.append(event, body, subject, self._check)
        self._follow(appended)
        if event not in _OPENS_NOTHING:
            self.changes.notify()
        elif event == "job":
            self.jobs.notify()
        return appended

    def _check(self, entry: LedgerEntry) -> None:
        """Take an entry into the state, unless the key that signs it counts for nothing now or the fold refuses it."""
        chain = self.state.chain
        try:
            if chain is not None and entry.event == "run.updated":
                chain = chain.extend(entry.subject)
            if chain is not None:
                _refuse_lapsed(chain, self.coordinator.public, entry.index, entry.time)
            self.state.take(entry.index, entry)
        except KeyLapsedError:
            raise
        except LedgerError as exc:
            code = ReasonCode.MALFORMED if exc.code is ReasonCode.LEDGER_BROKEN else exc.code
            raise RefusedEntryError(f"{entry.event} is refused: {exc}", code) from exc
        except ProtocolError as exc:
            raise RefusedEntryError(f"{entry.event} is refused: {exc}", exc.code) from exc

    def check_key(self) -> None:
        """Raises KeyLapsedError when this coordinator's key may sign nothing now: then no request can be served."""
        if self.state.chain is not None:
            _refuse_lapsed(self.state.chain, self.coordinator.public, self.ledger.size, self.now_ms())

    async def commit(self) -> None:
        """Return when everything appended so far survives a power loss."""
        await self.ledger.commit()

    def seal(self, directory: Path) -> list[Path]:
        """Write what is durable and not yet sealed into the archive's `ledger/`. May run in a thread of its own."""
        if self._sealer is None or self._sealer.directory != directory:
            self._sealer = Sealer(self.ledger, directory)
        return self._sealer.seal()

    def grant(self, role: str, keys: list[bytes]) -> None:
        """Write the operator's grants that the ledger does not have yet."""
        for key in keys:
            if role not in self.state.grants.get(key, set()):
                self.append("grant", RoleGrant(key, role))

    def tree_head(self) -> bytes:
        """A signed promise about all durable entries: signed anew when they grew, at most every `TREE_S`; at once when
        a policy is among them, so that whoever hears of a checkpoint gets a head that covers it (RULES 9)."""
        head = self.ledger.head()
        newest = self.state.newest_policy
        at, size, raw = self._signed or (-TREE_S, -1, b"")
        announced = newest is not None and size <= newest.index < head.size
        if size != head.size and (size < 0 or announced or self.monotonic() - at >= TREE_S):
            raw = self.ledger.sign_head(head).raw
            self._signed = (self.monotonic(), head.size, raw)
        return raw

    def _take(self, appended: Appended) -> None:
        self.state.apply(appended.index, appended.entry)
        self._follow(appended)

    def _follow(self, appended: Appended) -> None:
        """All that follows from an entry besides the state."""
        self.tree.append(appended.leaf)
        self.window.observe(appended.index, appended.entry)
        self.plants.observe(appended.index, appended.entry)
        if appended.entry.event == "run.finished":
            self._ended_ms = appended.entry.time
        if appended.entry.event in _FROM_MEMBERS:
            envelope = parse(appended.entry.subject)
            seen = (envelope.signer, envelope.kind)
            self.guard.seen[seen] = max(self.guard.seen.get(seen, 0), envelope.sequence)
            if appended.entry.event == "node.joined":
                self.joins[envelope.signer] = appended.entry.subject

    def close(self) -> None:
        self.ledger.close()


def _refuse_lapsed(chain: Chain, key: bytes, index: int, now: int) -> None:
    """Raise KeyLapsedError when an auditor would not believe what `key` signs at ledger entry `index`."""
    if chain.revoked(key, index):
        raise KeyLapsedError(
            "the coordinator's key was revoked by the run's root; its holder must name another one: trainer key rotate "
            "coordinator RUN",
            ReasonCode.KEY_REVOKED,
        )
    if chain.lapsed(key, now):
        found = chain.delegation(key)
        assert found is not None
        raise KeyLapsedError(
            f"the root lets this coordinator's key act from {day(found.not_before)} to {day(found.expires)} only, and "
            "no auditor believes an entry from outside that time; the root key's holder must prolong it: trainer key "
            "rotate coordinator RUN (or the operator must set this machine's clock right)",
            ReasonCode.EXPIRED,
        )


def day(ms: int) -> str:
    """A date, UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(min(ms, 253_402_300_799_000) / 1000))


def _load_secret(path: Path, fresh: bool) -> bytes:
    """The key of all draws and nonces: made once with the ledger, mode 0600, never printed."""
    if fresh and not path.exists():
        write_atomic(path, os.urandom(SECRET_BYTES), mode=0o600)
    try:
        secret = path.read_bytes()
    except FileNotFoundError as exc:
        raise UsageError(f"{path} is missing beside its ledger; the operator must restore the state folder") from exc
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"{path} is damaged; the operator must restore the state folder from a backup")
    return secret
