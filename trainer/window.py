"""The part of a run that is not settled yet: open leases, undecided submissions, groups that may still be learned from.

`protocol.state` keeps everything that ever happened. Deciding over all of it at every request would cost more with
every step, so this keeps what can still matter, by looking at each ledger entry once, in order. The same entries give
the same window, whether seen live or after a restart.

Not covered: decisions (`leases`, `draws`, `batches`), which read the state and a window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.envelope import parse
from protocol.records import Lease, LedgerEntry
from protocol.state import LeaseState, RunState, SubmissionState


@dataclass(frozen=True)
class Group:
    """The rollouts of one task of one lease: they enter a batch together or not at all."""

    lease_id: bytes
    task: int
    step: int
    """Policy step that samples them."""
    rollouts: tuple[int, ...]
    """Positions in the submission."""
    status: str
    """`open` (not submitted), `undecided`, `accepted`, `dead` (a rollout of it can't be learned from) or `trained`."""


@dataclass
class Window:
    """What is not settled. `observe` must be called once for each entry, after `RunState.apply`."""

    max_staleness: int
    state: RunState
    open: dict[bytes, None] = field(default_factory=dict)
    """Leases handed out and not yet submitted or closed, oldest first."""
    live: dict[bytes, None] = field(default_factory=dict)
    """Leases with a group that may still enter a batch, oldest first."""
    closed: dict[bytes, None] = field(default_factory=dict)
    """Closed leases waiting to be issued again, oldest first."""
    envelopes: dict[bytes, bytes] = field(default_factory=dict)
    """The signed bytes of open leases, to answer the same request again."""
    undecided: dict[int, None] = field(default_factory=dict)
    """Ledger indices of submissions with a pending rollout."""
    unjudged: dict[int, None] = field(default_factory=dict)
    """Submissions that still wait for a verdict, those discarded with their owner after a job was drawn included: what
    a validator found in them is evidence all the same."""
    owners: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Nonce -> keys that were ever given it, while it may be issued again."""
    next_task: int = 0
    leases: int = 0
    """Leases ever issued."""
    batches: int = 0
    """Batches closed, which is the step of the next one."""
    settled: Counter[str] = field(default_factory=Counter)
    """Final outcomes of rollouts by status."""
    outages: list[tuple[int, int]] = field(default_factory=list)
    """(ledger index, milliseconds) of each time the coordinator was away."""
    last_time: int = 0

    def observe(self, index: int, entry: LedgerEntry) -> None:
        """Follow one entry that the state has already applied."""
        if entry.event == "incarnation":
            self.outages.append((index, max(0, entry.time - self.last_time)))
        self.last_time = entry.time
        if entry.event == "lease":
            self._lease(index, entry)
        elif entry.event == "lease.closed":
            self._closed()
        elif entry.event == "submission":
            self._submission(index)
        elif entry.event in ("verdict", "batch", "policy"):
            self.batches = len(self.state.batches)
            self._settle()

    def _lease(self, index: int, entry: LedgerEntry) -> None:
        lease = self.state.leases.get(parse(entry.subject).record(Lease).lease_id)
        if lease is None or lease.index != index:
            return  # the state refused it
        self.leases += 1
        self.next_task = max(self.next_task, max(lease.lease.tasks, default=-1) + 1)
        self.open[lease.lease_id] = None
        self.live[lease.lease_id] = None
        self.envelopes[lease.lease_id] = entry.subject
        self.owners.setdefault(lease.lease.nonce, set()).add(lease.owner)
        for other in [i for i in self.closed if self.state.leases[i].lease.nonce == lease.lease.nonce]:
            del self.closed[other]

    def _closed(self) -> None:
        for lease_id in [i for i in self.open if self.state.leases[i].status == "closed"]:
            del self.open[lease_id]
            del self.envelopes[lease_id]
            self.live.pop(lease_id, None)
            self.closed[lease_id] = None

    def _submission(self, index: int) -> None:
        submission = self.state.submissions.get(index)
        if submission is None:
            return  # the state refused it
        self.open.pop(submission.lease_id, None)
        self.envelopes.pop(submission.lease_id, None)
        self.undecided[index] = None
        self.unjudged[index] = None
        self._settle()

    def _settle(self) -> None:
        """Drop what can no longer change anything."""
        for index in list(self.undecided):
            outcomes = self.state.submissions[index].outcomes
            if all(outcome.status != "pending" for outcome in outcomes):
                del self.undecided[index]
                self.settled.update(outcome.status for outcome in outcomes)
        for index in [i for i in self.unjudged if i not in self.undecided]:
            submission = self.state.submissions[index]
            if submission.verdict_index is not None or submission.jobs.keys() <= submission.verdicts.keys():
                del self.unjudged[index]
        for lease_id in list(self.live):
            if not self.fresh(self.state.leases[lease_id]) or all(
                group.status in ("dead", "trained") for group in self.groups(lease_id)
            ):
                del self.live[lease_id]
        for lease_id in list(self.closed):
            if not self.fresh(self.state.leases[lease_id]):
                del self.closed[lease_id]
        if len(self.owners) > 4 * (len(self.open) + len(self.live) + len(self.closed)) + 64:
            known = {self.state.leases[i].lease.nonce for i in [*self.open, *self.live, *self.closed]}
            self.owners = {nonce: keys for nonce, keys in self.owners.items() if nonce in known}

    def fresh(self, lease: LeaseState) -> bool:
        """Whether the next batch could still take this lease's rollouts."""
        return lease.lease.step >= self.batches - self.max_staleness

    def groups(self, lease_id: bytes) -> Iterator[Group]:
        """The groups of one lease, task by task."""
        held = self.state.leases[lease_id]
        lease = held.lease
        submission = None if held.submission is None else self.state.submissions[held.submission]
        for position, task in enumerate(lease.tasks):
            rollouts = tuple(range(position * lease.samples, (position + 1) * lease.samples))
            yield Group(lease_id, task, lease.step, rollouts, self._status(held, submission, rollouts))

    def _status(self, held: LeaseState, submission: SubmissionState | None, rollouts: tuple[int, ...]) -> str:
        if held.status == "closed" or self.state.nodes[held.owner].state == "suspended":
            return "dead"
        if submission is None:
            return "open"
        outcomes = [submission.outcomes[i].status for i in rollouts]
        if any(status not in ("pending", "accepted") for status in outcomes):
            return "dead"
        if "pending" in outcomes:
            return "undecided"
        trained = (submission.index, rollouts[0]) in self.state.trained
        return "trained" if trained else "accepted"

    def outage_ms(self, since: int) -> int:
        """Milliseconds the coordinator was away after ledger index `since`; lease durations stop meanwhile."""
        return sum(length for index, length in self.outages if index > since)
