"""The ledger and all that follows from it, in step: every entry is appended, applied to the state, seen by the window.

State runs ahead of the disk by at most one group commit; nothing is said to anybody before `commit` returned. If the
disk refuses, the coordinator ends: after a restart the state is what the disk says.

Not covered: decisions, and what is in a ledger entry (`protocol.state` says).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.envelope import parse
from protocol.errors import LedgerError, UsageError
from protocol.files import write_atomic
from protocol.identity import Identity
from protocol.ledger import Appended, Ledger
from protocol.manifest import Run
from protocol.records import RoleGrant
from protocol.segments import seal_missing
from protocol.sequences import SequenceGuard, Sequences
from protocol.state import RunState
from trainer.window import Window

SECRET_BYTES = 32
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

    run: Run
    ledger: Ledger
    sequences: Sequences
    coordinator: Identity
    secret: bytes = field(repr=False)
    now_ms: Callable[[], int]
    state: RunState = field(default_factory=RunState)
    changes: Changes = field(default_factory=Changes)
    window: Window = field(init=False)
    joins: dict[bytes, bytes] = field(default_factory=dict)
    """Key -> the newest `join` envelope in the ledger."""
    guard: SequenceGuard = field(default_factory=SequenceGuard)
    """Highest sequence of each member's envelope kinds: what the ledger holds counts after a restart too."""

    @staticmethod
    def open(run: Run, coordinator: Identity, state_dir: Path, now_ms: Callable[[], int]) -> Book:
        """Open or begin the ledger in `state_dir` and fold it.

        Raises:
            LedgerError: another `trainer serve` holds it, or it is damaged.
        """
        state_dir.mkdir(parents=True, exist_ok=True)
        sequences = Sequences(state_dir / "sequences.json")
        ledger = Ledger.open(
            state_dir / "ledger.db", run=run.id, coordinator=coordinator, sequences=sequences, clock_ms=now_ms
        )
        try:
            secret = _load_secret(state_dir / "draws.secret", fresh=ledger.size == 0)
            book = Book(run, ledger, sequences, coordinator, secret, now_ms)
            if ledger.size == 0:
                ledger.append_many([("run.opened", b"", run.envelope.raw)])
            for stored in ledger.entries():
                book._take(Appended(stored.index, stored.leaf, stored.entry()))
        except BaseException:
            ledger.close()
            raise
        return book

    def __post_init__(self) -> None:
        self.window = Window(self.run.manifest.leases.max_staleness, self.state)

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
        """Write what is durable and not yet sealed into the archive's `ledger/`."""
        return seal_missing(self.ledger, directory)

    def grant(self, role: str, keys: list[bytes]) -> None:
        """Write the operator's grants that the ledger does not have yet."""
        for key in keys:
            if role not in self.state.grants.get(key, set()):
                self.append("grant", RoleGrant(key, role))

    def _take(self, appended: Appended) -> None:
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
