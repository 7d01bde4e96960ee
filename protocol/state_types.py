"""What the fold keeps: one class for each thing a ledger speaks of.

    NodeState (Cleared) LeaseState SubmissionState (RolloutOutcome VerdictState TakenBack) PolicyState BatchState
    PeriodState

Not covered: how they change (`state`), how a submission is decided (`decision`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol import codec
from protocol.evidence_rows import EvidenceRow
from protocol.limits import KIB
from protocol.records import U64, BatchClosed, DrawsOpened, Hash, Id, JobDrawn, Lease, UploadIntent, Verdict

ROLES = ("inference", "validator", "relay", "trainer")
PENDING, ACCEPTED, REJECTED, UNDECIDED, DISCARDED = "pending", "accepted", "rejected", "inconclusive", "discarded"


@codec.record(16 * KIB)
@dataclass(frozen=True)
class PolicyHead:
    """The leading fields of `shardcast.records.Head`: what the fold needs to know of a published policy."""

    epoch: U64
    step: U64
    publication: Id
    manifest: Hash
    root: Hash


@dataclass(frozen=True)
class Cleared:
    """A suspension that counts no more: what it rested on was found to be wrong (`standing`)."""

    suspended: int
    """Ledger index of the entry that ended trust."""
    index: int
    """Of the one that took it back."""
    reason: str


@dataclass
class NodeState:
    """One member, by its identity key."""

    key: bytes
    role: str
    name: str
    transport_key: bytes
    joined_index: int
    state: str = "probation"
    accepted: int = 0
    """Rollouts whose acceptance rests on verdicts that count."""
    rejected: int = 0
    inconclusive: int = 0
    suspended_index: int | None = None
    """Index of the entry that ended trust: a verdict, evidence, or a revocation."""
    reason: str = ""
    """Why it is paused or suspended: a reason code."""
    unreturned: int = 0
    """Leases in a row that it gave up or let expire."""
    lost_time: int = 0
    """Ledger time of the last of them."""
    open_leases: set[bytes] = field(default_factory=set)
    undecided: set[int] = field(default_factory=set)
    """Its submissions that wait for a verdict."""
    contested: set[int] = field(default_factory=set)
    """Its submissions that hold a REJECT and wait for another verdict."""
    outvoted: int = 0
    """A validator's: rollouts of which two others found the opposite of what it had said."""
    case: int | None = None
    """The submission whose rejections suspended it."""
    row: EvidenceRow | None = None
    """The row of the manifest whose sum suspended it."""
    cleared: list[Cleared] = field(default_factory=list)
    """Suspensions that were taken back, in the ledger's order."""


@dataclass
class LeaseState:
    lease_id: bytes
    lease: Lease
    owner: bytes
    index: int
    time: int
    status: str = "open"
    """`open`, `submitted` or `closed`."""
    submission: int | None = None
    reason: str = ""
    """Why it was closed."""
    closed_index: int | None = None
    reissue_of: bytes | None = None
    """The earliest lease with the same nonce."""

    @property
    def rollouts(self) -> int:
        return len(self.lease.tasks) * self.lease.samples


@dataclass(frozen=True)
class VerdictState:
    index: int
    verdict: Verdict
    validator: bytes


@dataclass(frozen=True)
class RolloutOutcome:
    status: str = PENDING
    reason: str = ""
    """The reason code of the verdict that decided it."""
    verdict: int | None = None
    """Accepted ones: ledger index of the newest verdict that accepts it, the one a batch entry names."""


@dataclass(frozen=True)
class TakenBack:
    """A decision that counts no more: a validator it rested on was found to be wrong."""

    index: int
    """Ledger index of the entry that took it back."""
    decided: int
    """`SubmissionState.verdict_index` until then."""
    outcomes: tuple[RolloutOutcome, ...]


@dataclass
class SubmissionState:
    """One upload. `outcomes` has one item per rollout of the lease, task-major."""

    index: int
    lease_id: bytes
    owner: bytes
    intent: UploadIntent
    time: int
    outcomes: tuple[RolloutOutcome, ...]
    period: int | None = None
    """The draw period it was entered in; None while none was open."""
    number: int = 0
    """Submissions of that period before it: what its draws are keyed with."""
    probation: bool = False
    """Whether its owner was in probation when it was entered: that multiplies the rate of second draws."""
    jobs: dict[int, JobDrawn] = field(default_factory=dict)
    """Round -> the newest job drawn for it."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Round -> jobs drawn for it so far."""
    verdicts: dict[int, VerdictState] = field(default_factory=dict)
    verdict_index: int | None = None
    """Ledger index of the verdict, or the lapse of a tie, that decided it."""
    tie_time: int | None = None
    """Ledger time since which it waits for a third validator to settle a tie (`decision`)."""
    tie_over: bool = False
    """Whether a tie stays one: nobody else was there, or did not answer in time."""
    void: set[int] = field(default_factory=set)
    """Rounds whose verdict counts no more: its validator was found to be wrong (`distrust`)."""
    kept: dict[int, RolloutOutcome] = field(default_factory=dict)
    """Position -> what was decided of it before, and stays so whatever the verdicts of a submission that was taken back
    say."""
    spent: set[int] = field(default_factory=set)
    """Positions that were sampled again by others before it was opened once more: they are accepted no more."""
    taken_back: list[TakenBack] = field(default_factory=list)
    """Earlier decisions, in the ledger's order."""

    @property
    def open_rounds(self) -> list[int]:
        """Rounds whose job waits for its verdict."""
        return [number for number in self.jobs if number not in self.verdicts]

    def decided_below(self, upto: int) -> tuple[int | None, tuple[RolloutOutcome, ...]]:
        """`verdict_index` and `outcomes` as they were before entry `upto`, from whichever later state."""
        for earlier in self.taken_back:
            if earlier.index >= upto:
                return earlier.decided, earlier.outcomes
        return self.verdict_index, self.outcomes

    def accepting(self, rollout: int) -> int | None:
        """Ledger index of a verdict that decided a rollout's acceptance, now or before it was taken back. All that
        accept a rollout name the reward it claims and as many tokens."""
        for outcomes in (self.outcomes, *(earlier.outcomes for earlier in self.taken_back)):
            if outcomes[rollout].verdict is not None:
                return outcomes[rollout].verdict
        return None


@dataclass(frozen=True)
class PolicyState:
    epoch: int
    step: int
    root: bytes
    index: int
    head: bytes
    """The origin's `head` envelope."""


@dataclass(frozen=True)
class BatchState:
    index: int
    closed: BatchClosed


@dataclass
class PeriodState:
    """One draw period: its number is its place in `RunState.periods`."""

    index: int
    opened: DrawsOpened
    secret: bytes | None = None
    """Once it is revealed."""
    revealed_index: int | None = None
    submissions: int = 0
    open_jobs: set[tuple[int, int]] = field(default_factory=set)
    """(submission, round) of jobs of this period that wait for a verdict."""
