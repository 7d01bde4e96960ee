"""The ledger and all that follows from it, in step: every entry is appended, applied to the state, seen by the window.

State runs ahead of the disk by at most one group commit; nothing is said to anybody before `commit` returned. If the
disk refuses, the coordinator ends: after a restart the state is what the disk says.

Not covered: decisions, and what is in a ledger entry (`protocol.state` says).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from protocol.chain import Chain, Link, RunUpdate
from protocol.envelope import parse
from protocol.errors import LedgerError, UsageError
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.ledger import Appended, Ledger
from protocol.logs import EventFile
from protocol.manifest import Run
from protocol.records import LedgerEntry, RoleGrant
from protocol.segments import Sealer
from protocol.sequences import SequenceGuard, Sequences
from protocol.state import RunState
from trainer.proofs import ProofTree
from trainer.window import Window

SECRET_BYTES = 32
TREE_S = 2.0
"""Members get the newest signed tree head with each heartbeat; this often it is made anew. Seldomer lets a coordinator
that shows two ledgers go unnoticed for longer; oftener costs a signature each time."""

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
    window: Window = field(init=False)
    tree: ProofTree = field(init=False)
    joins: dict[bytes, bytes] = field(default_factory=dict)
    """Key -> the newest `join` envelope in the ledger."""
    guard: SequenceGuard = field(default_factory=SequenceGuard)
    """Highest sequence of each member's envelope kinds: what the ledger holds counts after a restart too."""
    monotonic: Callable[[], float] = time.monotonic
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
    ) -> Book:
        """Open or begin the ledger in `state_dir`, fold it, and enter what the manifest chain has and the ledger lacks.

        A coordinator key that was rotated while nobody served signs once more: that the ledger is served again.

        Args:
            chain: the run directory's.
            keys: finds the coordinator's private key by its public one; raises UsageError.

        Raises:
            LedgerError: another `trainer serve` holds it, or it is damaged.
        """
        state_dir.mkdir(parents=True, exist_ok=True)
        sequences = Sequences(state_dir / "sequences.json")
        path = state_dir / "ledger.db"
        signer = keys(_signer_now(path, chain))
        ledger = Ledger.open(
            path,
            run=chain.genesis.id,
            coordinator=signer,
            sequences=sequences,
            clock_ms=now_ms,
            earlier=chain.keys("coordinator"),
        )
        try:
            secret = _load_secret(state_dir / "draws.secret", fresh=ledger.size == 0)
            book = Book(chain.genesis, ledger, sequences, signer, secret, now_ms, log or EventFile(None))
            if ledger.size == 0:
                ledger.append_many([("run.opened", b"", chain.genesis.envelope.raw)])
            for stored in ledger.entries():
                book._take(Appended(stored.index, stored.leaf, stored.entry()))
            assert book.state.chain is not None
            for link in chain.links[len(book.state.chain.links) :]:
                book.update(link, keys)
        except BaseException:
            ledger.close()
            raise
        return book

    def update(self, link: Link, keys: Callable[[bytes], Identity]) -> None:
        """Enter the next link of the manifest chain; what follows is signed by the coordinator key it names."""
        named = link.run.manifest.coordinator
        if named != self.coordinator.public:
            self.coordinator = keys(named)
            self.ledger.sign_with(self.coordinator)  # a revoked predecessor may not even sign this entry
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
        return tuple(key for key in chain.keys(role) if not chain.revoked(key, self.ledger.size))

    def __post_init__(self) -> None:
        self.window = Window(self.genesis.manifest.leases.max_staleness, self.state)
        self.tree = ProofTree()

    def append(self, event: str, body: object = b"", subject: bytes = b"") -> Appended:
        """Add one entry and follow it. Durable only after `commit`.

        Raises:
            LedgerError: the clock or the disk does not hold, or the entry contradicts the state (a bug of ours).
        """
        appended = self.ledger.append(event, body, subject)
        known = len(self.state.problems)
        self._take(appended)
        self.changes.notify()
        if len(self.state.problems) > known:
            raise LedgerError(
                f"ledger entry {appended.index} contradicts the ones before it ({self.state.problems[-1][1]}); it "
                "changes nothing, but it is a bug of the coordinator: please report it with the run's ledger folder"
            )
        return appended

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
        self.tree.append(appended.leaf)
        self.state.apply(appended.index, appended.entry)
        self.window.observe(appended.index, appended.entry)
        if appended.entry.event in _FROM_MEMBERS:
            envelope = parse(appended.entry.subject)
            seen = (envelope.signer, envelope.kind)
            self.guard.seen[seen] = max(self.guard.seen.get(seen, 0), envelope.sequence)
            if appended.entry.event == "node.joined":
                self.joins[envelope.signer] = appended.entry.subject

    def close(self) -> None:
        self.ledger.close()


def _signer_now(path: Path, chain: Chain) -> bytes:
    """The key that must sign the ledger's next entry: the one that the chain names, as far as the ledger has it.

    Raises:
        LedgerError: the database can't be read.
    """
    if not path.exists():
        return chain.genesis.manifest.coordinator if not chain.links else chain.current.manifest.coordinator
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            row = db.execute("SELECT envelope FROM leaves ORDER BY idx DESC LIMIT 1").fetchone()
    except sqlite3.Error as exc:
        raise LedgerError(f"{path} can't be read ({exc}); the operator must restore it from a backup") from exc
    if row is None:
        return chain.current.manifest.coordinator
    last = parse(row[0])
    entry = last.record(LedgerEntry)
    if entry.event != "run.updated":
        return last.signer
    number = parse(entry.subject).record(RunUpdate).number
    if not 1 <= number <= len(chain.links):
        raise UsageError(
            f"the ledger beside {path} knows update {number} of the manifest, which is not in updates/; the operator "
            "must restore that folder"
        )
    return chain.links[number - 1].run.manifest.coordinator


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
