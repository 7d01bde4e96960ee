"""The part of a run that is not settled yet: open leases, undecided submissions, groups that may still be learned from.

`protocol.state` keeps everything that ever happened. Deciding over all of it at every request would cost more with
every step, so this keeps what can still matter, by looking at each ledger entry once, in order. The same entries give
the same window, whether seen live or after a restart.

Not covered: decisions (`leases`, `drawing`, `batches`), which read the state and a window.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.envelope import parse
from protocol.records import Lease, LedgerEntry
from protocol.state import ACCEPTED, DISCARDED, PENDING, REJECTED, UNDECIDED, LeaseState, RunState, SubmissionState

RETURNS, FEWEST_RETURNS = 63, 3
"""Leases whose time to return is remembered, and how many make a median. More would let two keys sit on the first whole
leases of a run before there is one; a shorter memory lets one node's stall move it, a longer one lags behind a run that
changes its machines."""

_NO_GROUPS = frozenset({"policy", "lease", "job", "validators", "draws.opened", "draws.revealed", "grant"})
"""Events that change the status of no group there is."""

_SETTLES = frozenset(
    {"verdict", "tie.lapsed", "batch", "policy", "run.updated"} | {"evidence.drop", "evidence.node", "evidence.verdict"}
)
"""Events after which submissions may be decided, or lost with their owner."""

_UNUSABLE = frozenset({UNDECIDED, REJECTED, DISCARDED})
"""Outcomes of which nothing can be learned: neither a policy, nor what the lease would have brought."""


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
class Again:
    """Tasks of one lease that brought nothing and wait to be leased again under the same nonce."""

    lease_id: bytes
    """The lease they were last in: its policy, environment and number of samples are kept."""
    tasks: list[int]


@dataclass
class Lost:
    """A lease its node gave up or let expire, until all its tasks came back from somebody else."""

    owner: bytes
    missing: set[int]
    """Tasks no other node has submitted yet."""
    time: int
    """Ledger time of the loss."""


@dataclass
class Window:
    """What is not settled. `observe` must be called once for each entry, after `RunState.apply`."""

    max_staleness: int
    state: RunState
    is_plant: Callable[[LeaseState], bool] = field(default=lambda held: False, repr=False, compare=False)
    """Whether the answer to a lease is false on purpose (`plants`): nothing of it is learned from."""
    open: dict[bytes, None] = field(default_factory=dict)
    """Leases handed out and not yet submitted or closed, oldest first."""
    live: dict[bytes, None] = field(default_factory=dict)
    """Leases with a group that may still enter a batch, oldest first."""
    again: dict[bytes, Again] = field(default_factory=dict)
    """Nonce -> tasks waiting to be leased again, oldest first."""
    lost: dict[bytes, Lost] = field(default_factory=dict)
    """Lease id -> what is missing of it. A node with one of these gets nothing new (`leases.decide`)."""
    losses: Counter[bytes] = field(default_factory=Counter)
    """Key -> leases it ever gave up or let expire, those lost with the coordinator or its standing left out."""
    envelopes: dict[bytes, bytes] = field(default_factory=dict)
    """The signed bytes of open leases, to answer the same request again."""
    undecided: dict[int, None] = field(default_factory=dict)
    """Ledger indices of submissions with a pending rollout."""
    unjudged: dict[int, None] = field(default_factory=dict)
    """Submissions that still wait for a verdict, those discarded with their owner after a job was drawn included: what
    a validator found in them is evidence all the same."""
    owners: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Nonce -> keys that were ever given it, while it may be issued again."""
    returns: deque[int] = field(default_factory=lambda: deque(maxlen=RETURNS))
    """Milliseconds from lease to submission of the last leases that came back, first ones of strangers left out."""
    usual_ms: int = 0
    """Their median; 0 while too few came back."""
    next_task: int = 0
    leases: int = 0
    """Leases ever issued."""
    batches: int = 0
    """Batches closed, which is the step of the next one."""
    settled: Counter[str] = field(default_factory=Counter)
    """Final outcomes of rollouts by status."""
    _groups: dict[bytes, list[Group]] = field(default_factory=dict, repr=False, compare=False)
    """Lease -> its groups, since the last entry that can change one: each request of each node asks for them."""

    def observe(self, index: int, entry: LedgerEntry) -> None:
        """Follow one entry that the state has already applied."""
        if entry.event not in _NO_GROUPS:
            self._groups.clear()
        if entry.event == "lease":
            self._lease(index, entry)
        elif entry.event == "lease.closed":
            self._closed(entry.time)
        elif entry.event == "submission":
            self._submission(index)
        elif entry.event in _SETTLES:
            if entry.event == "evidence.verdict":
                self._taken_back(index)
            if self.state.manifest is not None:
                self.max_staleness = self.state.manifest.leases.max_staleness
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
        waiting = self.again.get(lease.lease.nonce)
        if waiting is not None:
            waiting.tasks = [task for task in waiting.tasks if task not in lease.lease.tasks]
            if not waiting.tasks:
                del self.again[lease.lease.nonce]

    def _closed(self, time: int) -> None:
        for lease_id in [i for i in self.open if self.state.leases[i].status == "closed"]:
            held = self.state.leases[lease_id]
            del self.open[lease_id]
            del self.envelopes[lease_id]
            self.live.pop(lease_id, None)
            self._wait_again(held, held.lease.tasks)
            if self.state.nodes[held.owner].state != "suspended" and not self.outage_ms(held.index):
                self.lost[lease_id] = Lost(held.owner, set(held.lease.tasks), time)
                self.losses[held.owner] += 1

    def _wait_again(self, held: LeaseState, tasks: tuple[int, ...]) -> None:
        waiting = self.again.get(held.lease.nonce)
        if waiting is None:
            self.again[held.lease.nonce] = Again(held.lease_id, list(tasks))
        else:
            waiting.tasks = sorted({*waiting.tasks, *tasks})

    def _submission(self, index: int) -> None:
        submission = self.state.submissions.get(index)
        if submission is None:
            return  # the state refused it
        self.open.pop(submission.lease_id, None)
        self.envelopes.pop(submission.lease_id, None)
        self.undecided[index] = None
        self.unjudged[index] = None
        held = self.state.leases[submission.lease_id]
        if self.state.nodes[held.owner].accepted:
            self.returns.append(submission.time - held.time - self.outage_ms(held.index))
            if len(self.returns) >= FEWEST_RETURNS:
                self.usual_ms = sorted(self.returns)[len(self.returns) // 2]
        for lease_id in [i for i in self.lost if self.state.leases[i].lease.nonce == held.lease.nonce]:
            lost = self.lost[lease_id]
            if lost.owner != held.owner:
                lost.missing.difference_update(held.lease.tasks)
                if not lost.missing:
                    del self.lost[lease_id]
        self._settle()

    def _taken_back(self, index: int) -> None:
        """A validator was found to be wrong: what was decided on its word alone waits for another one."""
        for submission in self.state.submissions.values():
            if submission.taken_back and submission.taken_back[-1].index == index:
                self.settled.subtract(outcome.status for outcome in submission.taken_back[-1].outcomes)
                self.undecided[submission.index] = self.unjudged[submission.index] = None

    def _settle(self) -> None:
        """Drop what can no longer change anything."""
        for index in list(self.undecided):
            submission = self.state.submissions[index]
            if all(outcome.status != PENDING for outcome in submission.outcomes):
                del self.undecided[index]
                self.settled.update(outcome.status for outcome in submission.outcomes)
                self._repeat_unusable(submission)
        for index in [i for i in self.unjudged if i not in self.undecided]:
            submission = self.state.submissions[index]
            if submission.verdict_index is not None or submission.jobs.keys() <= submission.verdicts.keys():
                del self.unjudged[index]
        for lease_id in list(self.live):
            if not self.fresh(self.state.leases[lease_id]) or all(
                group.status in ("dead", "trained") for group in self.groups(lease_id)
            ):
                del self.live[lease_id]
        for nonce, waiting in list(self.again.items()):
            if not self.fresh(self.state.leases[waiting.lease_id]):
                del self.again[nonce]
        for lease_id, lost in list(self.lost.items()):
            if not self.fresh(self.state.leases[lease_id]) or self.state.nodes[lost.owner].state == "suspended":
                del self.lost[lease_id]
        if len(self.owners) > 4 * (len(self.open) + len(self.live) + len(self.again)) + 64:
            known = {self.state.leases[i].lease.nonce for i in [*self.open, *self.live]} | self.again.keys()
            self.owners = {nonce: keys for nonce, keys in self.owners.items() if nonce in known}

    def _repeat_unusable(self, submission: SubmissionState) -> None:
        """Groups that no validator could decide, or that did not hold, are sampled again by somebody else: else an
        accomplice could take over what a node dropped and answer with garbage, and its rewards would never be known.
        """
        held = self.state.leases[submission.lease_id]
        missing, again = [], submission.kept.keys() | submission.spent
        for group in self.groups(submission.lease_id):
            if group.status == "trained" or any(position in again for position in group.rollouts):
                continue  # learned from, or sampled again since it was first decided
            if any(submission.outcomes[position].status in _UNUSABLE for position in group.rollouts):
                missing.append(group.task)
        if missing and self.fresh(held):
            self._wait_again(held, tuple(missing))

    def fresh(self, lease: LeaseState) -> bool:
        """Whether the next batch could still take this lease's rollouts."""
        return lease.lease.step >= self.batches - self.max_staleness

    def groups(self, lease_id: bytes) -> list[Group]:
        """The groups of one lease, task by task."""
        known = self._groups.get(lease_id)
        if known is None:
            known = self._groups[lease_id] = self._make_groups(self.state.leases[lease_id])
        return known

    def _make_groups(self, held: LeaseState) -> list[Group]:
        lease, count = held.lease, held.lease.samples
        submission = None if held.submission is None else self.state.submissions[held.submission]
        if held.status == "closed" or self.state.nodes[held.owner].state == "suspended":
            whole = "dead"
        else:
            whole = "open" if submission is None else ""
        out = []
        plant = submission is not None and self.is_plant(held)
        for position, task in enumerate(lease.tasks):
            rollouts = tuple(range(position * count, (position + 1) * count))
            status = whole if submission is None else whole or self._status(submission, rollouts)
            if plant and status == "accepted":  # not sooner: pacing would tell what it is before its verdict
                status = "dead"
            out.append(Group(held.lease_id, task, lease.step, rollouts, status))
        return out

    def _status(self, submission: SubmissionState, rollouts: tuple[int, ...]) -> str:
        if (submission.index, rollouts[0]) in self.state.trained:
            return "trained"
        found = {outcome.status for outcome in submission.outcomes[rollouts[0] : rollouts[-1] + 1]}
        if not found <= {PENDING, ACCEPTED}:
            return "dead"
        return "undecided" if PENDING in found else "accepted"

    def outage_ms(self, since: int) -> int:
        """Milliseconds the coordinator was away after ledger index `since`; lease durations stop meanwhile."""
        return self.state.outage_ms(since)
