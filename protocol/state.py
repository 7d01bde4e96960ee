"""What a run's ledger means: a pure fold, so the same entries give the same state everywhere (invariant 6).

No clock, no disk, no network. `apply` never raises on entries of valid types: what contradicts the rules below is
left out of the state and recorded in `problems`. Signatures are the caller's business (the coordinator checked them
on arrival, the audit checks them again); the fold reads who signed an envelope, not whether the signature holds.

    probation --accepted rollouts--> active
    probation, active --a REJECT waits for its second verdict--> paused --not repeated--> back
    paused --the second validator repeats one--> suspended (for good; what is undecided is discarded)

A submission is decided by its round 1 verdict alone, unless that holds a REJECT or a round 2 job was drawn for it;
then by both: ACCEPT twice accepts, REJECT twice rejects, anything else is inconclusive.

Not covered: whom to lease to, whom to draw, what to batch (`trainer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from blake3 import blake3

from protocol import codec
from protocol.envelope import Envelope, parse
from protocol.errors import LedgerError, ProtocolError
from protocol.limits import KIB, MAX_ROLLOUTS_PER_LEASE, submission_raw_bound
from protocol.manifest import MANIFEST_KIND, RunManifest
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    U64,
    BatchClosed,
    Hash,
    Id,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    Outcome,
    RoleGrant,
    RunFinished,
    UploadIntent,
    Verdict,
)

R = TypeVar("R")

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
    rejected: int = 0
    inconclusive: int = 0
    suspended_index: int | None = None
    """Index of the verdict that ended trust."""
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
    """Its submissions that hold a REJECT and wait for the other verdict."""


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


@dataclass
class SubmissionState:
    """One upload. `outcomes` has one item per rollout of the lease, task-major."""

    index: int
    lease_id: bytes
    owner: bytes
    intent: UploadIntent
    time: int
    outcomes: tuple[RolloutOutcome, ...]
    jobs: dict[int, JobDrawn] = field(default_factory=dict)
    verdicts: dict[int, VerdictState] = field(default_factory=dict)
    verdict_index: int | None = None
    """Ledger index of the verdict that decided it: the one a batch entry names."""


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


class RunState:
    """The fold's accumulator. Read it freely; only `apply` changes it."""

    def __init__(self) -> None:
        self.size = 0
        """Index of the next entry expected."""
        self.time = 0
        self.incarnation = 0
        self.run: bytes = b""
        self.manifest: RunManifest | None = None
        self.grants: dict[bytes, set[str]] = {}
        self.nodes: dict[bytes, NodeState] = {}
        self.leases: dict[bytes, LeaseState] = {}
        self.submissions: dict[int, SubmissionState] = {}
        self.policies: dict[tuple[int, int], PolicyState] = {}
        self.newest_policy: PolicyState | None = None
        self.batches: dict[int, BatchState] = {}
        self.trained: set[tuple[int, int]] = set()
        """(submission index, rollout position) of everything in a batch."""
        self.finished: RunFinished | None = None
        self.problems: list[tuple[int, str]] = []
        """(entry index, what the entry contradicts); such entries change nothing else."""
        self._next_batch = 0
        """The step after the highest any batch named, refused ones included: one wrong batch is one problem."""
        self._nonces: dict[bytes, bytes] = {}
        self._jobs: dict[bytes, tuple[int, int]] = {}
        self._samples: set[tuple[bytes, int, int]] = set()
        """(nonce, task, sample) of everything trained: the same tokens, whoever sampled them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunState) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def apply(self, index: int, entry: LedgerEntry) -> None:
        """Take in the next entry. Never raises on entries of valid types."""
        try:
            if index != self.size or entry.index != index:
                raise LedgerError(f"entry {entry.index} came where {self.size} was expected")
            self._dispatch(index, entry)
        except ProtocolError as exc:
            self.problems.append((index, f"{entry.event}: {exc}"))
        self.size = max(self.size, index + 1)
        self.time = max(self.time, entry.time)

    def may_lease(self, key: bytes) -> str:
        """Why node `key` may not get a lease now; empty when it may."""
        node = self.nodes.get(key)
        if node is None or node.role != "inference":
            return "it has not joined as an inference node"
        if node.state in ("paused", "suspended"):
            return f"the node is {node.state}: {node.reason}"
        if node.state == "probation" and (node.open_leases or node.undecided):
            return "a node in probation has one lease at a time"
        return ""

    # --- one method per event -----------------------------------------------------------------------------------

    def _dispatch(self, index: int, entry: LedgerEntry) -> None:
        if entry.event == "run.opened":
            self._run_opened(entry)
            return
        if self.manifest is None:
            raise LedgerError("came before run.opened")
        if entry.event == "incarnation":
            self.incarnation = entry.incarnation
            return
        handlers = {
            "grant": self._grant,
            "node.joined": self._node_joined,
            "policy": self._policy,
            "lease": self._lease,
            "lease.closed": self._lease_closed,
            "submission": self._submission,
            "job": self._job,
            "verdict": self._verdict,
            "batch": self._batch,
            "run.finished": self._run_finished,
        }
        handler = handlers.get(entry.event)
        if handler is None:
            raise LedgerError("no such event in this version")
        handler(index, entry)

    def _run_opened(self, entry: LedgerEntry) -> None:
        if self.manifest is not None:
            raise LedgerError("the run is already open")
        envelope = parse(entry.subject)
        manifest = envelope.record(RunManifest)
        run = blake3(envelope.payload).digest()
        if envelope.kind != MANIFEST_KIND or envelope.run != run or envelope.signer != manifest.root:
            raise LedgerError("its subject is no manifest signed by its own root")
        self.run, self.manifest = run, manifest

    def _grant(self, index: int, entry: LedgerEntry) -> None:
        grant = codec.decode(RoleGrant, entry.body)
        if grant.role not in ROLES:
            raise LedgerError(f"unknown role {grant.role}")
        self.grants.setdefault(grant.key, set()).add(grant.role)

    def _node_joined(self, index: int, entry: LedgerEntry) -> None:
        envelope, join = self._subject(entry, JoinRequest)
        if join.role not in ROLES:
            raise LedgerError(f"unknown role {join.role}")
        node = self.nodes.get(envelope.signer)
        if node is None:
            self.nodes[envelope.signer] = NodeState(envelope.signer, join.role, join.name, join.transport_key, index)
        elif node.role != join.role:
            raise LedgerError(f"the key already is a {node.role}; a key has one role for the whole run")
        else:
            node.name, node.transport_key = join.name, join.transport_key

    def _policy(self, index: int, entry: LedgerEntry) -> None:
        envelope, head = self._subject(entry, PolicyHead)
        assert self.manifest is not None
        if envelope.signer != self.manifest.origin:
            raise LedgerError("the head is not signed by the run's origin")
        order = (head.epoch, head.step)
        known = self.policies.get(order)
        if known is not None:
            if known.root != head.root:
                raise LedgerError(f"a second root for epoch {head.epoch} step {head.step}")
            return
        if self.newest_policy is not None and order < (self.newest_policy.epoch, self.newest_policy.step):
            raise LedgerError("older than the newest policy")
        policy = PolicyState(head.epoch, head.step, head.root, index, entry.subject)
        self.policies[order] = self.newest_policy = policy

    def _lease(self, index: int, entry: LedgerEntry) -> None:
        envelope, lease = self._subject(entry, Lease)
        assert self.manifest is not None
        if envelope.signer != self.manifest.coordinator:
            raise LedgerError("the lease is not signed by the coordinator")
        refusal = self.may_lease(envelope.audience)
        if refusal:
            raise LedgerError(refusal)
        if self.finished is not None:
            raise LedgerError("the run is finished")
        self._check_terms(lease, self.manifest)
        if not self.nodes[envelope.audience].accepted and len(lease.tasks) * lease.samples > max(
            1, self.manifest.leases.probation_first_rollouts
        ):
            raise LedgerError("a first lease larger than the run's manifest allows")
        if lease.lease_id in self.leases:
            raise LedgerError("a second lease with this id")
        policy = self.policies.get((lease.epoch, lease.step))
        if policy is None or policy.root != lease.root:
            raise LedgerError("it names a policy that was never announced")
        if not lease.tasks or len(set(lease.tasks)) != len(lease.tasks) or not lease.samples:
            raise LedgerError("it asks for no rollouts, or for a task twice")
        if len(lease.tasks) * lease.samples > MAX_ROLLOUTS_PER_LEASE:
            raise LedgerError("it asks for more rollouts than a submission can hold")
        first = self._nonces.setdefault(lease.nonce, lease.lease_id)
        state = LeaseState(lease.lease_id, lease, envelope.audience, index, entry.time)
        if first != lease.lease_id:
            state.reissue_of = first
            before = self.leases[first].lease
            if (before.tasks, before.samples, before.environment) != (lease.tasks, lease.samples, lease.environment):
                raise LedgerError("its nonce was used for other tasks")
        self.leases[lease.lease_id] = state
        self.nodes[envelope.audience].open_leases.add(lease.lease_id)

    def _check_terms(self, lease: Lease, manifest: RunManifest) -> None:
        """What every lease of a run has in common: whoever issues it may not change what is sampled or checked."""
        if lease.manifest != self.run:
            raise LedgerError("it names another manifest")
        if lease.environment not in {spec.digest for spec in manifest.environments}:
            raise LedgerError("its environment is none of the run's")
        if lease.max_new_tokens != manifest.sampling.max_new_tokens:
            raise LedgerError(f"it allows {lease.max_new_tokens} tokens, not the run's number")

    def _lease_closed(self, index: int, entry: LedgerEntry) -> None:
        closed = codec.decode(LeaseClosed, entry.body)
        lease = self.leases.get(closed.lease_id)
        if lease is None or lease.status != "open":
            raise LedgerError("no open lease has this id")
        lease.status, lease.reason = "closed", closed.reason
        owner = self.nodes[lease.owner]
        owner.open_leases.discard(lease.lease_id)
        owner.unreturned, owner.lost_time = owner.unreturned + 1, entry.time

    def _submission(self, index: int, entry: LedgerEntry) -> None:
        envelope, intent = self._subject(entry, UploadIntent)
        lease = self.leases.get(intent.lease_id)
        if lease is None or lease.status != "open":
            raise LedgerError("no open lease has this id")
        if envelope.signer != lease.owner:
            raise LedgerError("the intent is not signed by the lease's owner")
        if intent.length > lease.lease.max_bytes or intent.raw_length > submission_raw_bound(
            lease.rollouts, lease.lease.max_new_tokens
        ):
            raise LedgerError("it is larger than its lease allows")
        node = self.nodes[lease.owner]
        lost = node.state == "suspended"
        outcome = RolloutOutcome(DISCARDED, node.reason) if lost else RolloutOutcome()
        self.submissions[index] = SubmissionState(
            index, lease.lease_id, lease.owner, intent, entry.time, (outcome,) * lease.rollouts
        )
        lease.status, lease.submission = "submitted", index
        node.open_leases.discard(lease.lease_id)
        node.unreturned = 0
        if not lost:
            node.undecided.add(index)

    def _job(self, index: int, entry: LedgerEntry) -> None:
        job = codec.decode(JobDrawn, entry.body)
        submission = self.submissions.get(job.submission)
        if submission is None:
            raise LedgerError("no submission has this index")
        if job.round not in (1, 2):
            raise LedgerError(f"there is no round {job.round}")
        if job.job_id in self._jobs or job.round in submission.verdicts:
            raise LedgerError("the job id is used, or the round already has its verdict")
        if submission.verdict_index is not None:
            raise LedgerError("the submission is already decided")
        node = self.nodes.get(job.validator)
        if node is None or node.role != "validator" or "validator" not in self.grants.get(job.validator, ()):
            raise LedgerError("the validator was not admitted")
        other = submission.jobs.get(3 - job.round)
        if other is not None and other.validator == job.validator:
            raise LedgerError("the second validator must be another one than the first")
        submission.jobs[job.round] = job
        self._jobs[job.job_id] = (job.submission, job.round)

    def _verdict(self, index: int, entry: LedgerEntry) -> None:
        envelope, verdict = self._subject(entry, Verdict)
        number, drawn_round = self._jobs.get(verdict.job_id, (-1, 0))
        submission = self.submissions.get(number)
        job = submission.jobs.get(drawn_round) if submission is not None else None
        if submission is None or job is None or job.job_id != verdict.job_id or job.round != verdict.round:
            raise LedgerError("no such job is open")
        if envelope.signer != job.validator:
            raise LedgerError("not signed by the validator that was drawn")
        if verdict.round in submission.verdicts:
            raise LedgerError("the job already has its verdict")
        if verdict.digest != submission.intent.digest or len(verdict.outcomes) != len(submission.outcomes):
            raise LedgerError("it is about other bytes, or another number of rollouts")
        if any(outcome.outcome not in (ACCEPT, REJECT, INCONCLUSIVE) for outcome in verdict.outcomes):
            raise LedgerError("an outcome that does not exist")
        submission.verdicts[verdict.round] = VerdictState(index, verdict, envelope.signer)
        self._weigh(submission, self.nodes[submission.owner], index)

    def _batch(self, index: int, entry: LedgerEntry) -> None:
        closed = codec.decode(BatchClosed, entry.body)
        if closed.step in self.batches:
            raise LedgerError(f"a second batch for step {closed.step}")
        expected, self._next_batch = self._next_batch, max(self._next_batch, closed.step + 1)
        if closed.step > expected or not closed.entries or self.finished is not None:
            raise LedgerError(f"batch {closed.step} is empty, out of order, or comes after the run's end")
        assert self.manifest is not None
        if closed.step >= self.manifest.steps:
            raise LedgerError(f"batch {closed.step} of a run of {self.manifest.steps} steps")
        if self.newest_policy is None or closed.epoch != self.newest_policy.epoch:
            raise LedgerError(f"batch {closed.step} is of another epoch than the newest policy")
        keys: list[tuple[int, int]] = []
        samples: list[tuple[bytes, int, int]] = []
        groups: Counter[tuple[int, int]] = Counter()
        for item in closed.entries:
            submission = self.submissions.get(item.submission)
            if submission is None or item.rollout >= len(submission.outcomes):
                raise LedgerError(f"it names rollout {item.rollout} of submission {item.submission}: there is none")
            if submission.outcomes[item.rollout].status != ACCEPTED or submission.verdict_index != item.verdict:
                raise LedgerError(
                    f"rollout {item.rollout} of submission {item.submission} was not accepted by verdict {item.verdict}"
                )
            if self.nodes[submission.owner].state == "suspended":
                raise LedgerError(f"submission {item.submission} is from a suspended node")
            lease = self.leases[submission.lease_id].lease
            if not 0 <= closed.step - lease.step <= self.manifest.leases.max_staleness:
                raise LedgerError(
                    f"submission {item.submission} was sampled by policy {lease.step}: too old, or too new"
                )
            task, sample = divmod(item.rollout, lease.samples)
            groups[(item.submission, task)] += 1
            keys.append((item.submission, item.rollout))
            samples.append((lease.nonce, lease.tasks[task], sample))
        if len(set(samples)) != len(samples) or not self._samples.isdisjoint(samples):
            raise LedgerError("a rollout is trained twice")
        for (number, _), count in groups.items():
            if count != self.leases[self.submissions[number].lease_id].lease.samples:
                raise LedgerError(f"a part of a group of submission {number}: groups are trained whole or not at all")
        self.batches[closed.step] = BatchState(index, closed)
        self.trained.update(keys)
        self._samples.update(samples)

    def _run_finished(self, index: int, entry: LedgerEntry) -> None:
        if self.finished is not None:
            raise LedgerError("the run is already finished")
        finished = codec.decode(RunFinished, entry.body)
        assert self.manifest is not None
        if finished.steps != self.manifest.steps:
            raise LedgerError(f"the run ends after {finished.steps} of {self.manifest.steps} steps")
        self.finished = finished

    # --- decisions ----------------------------------------------------------------------------------------------

    def _weigh(self, submission: SubmissionState, node: NodeState, index: int) -> None:
        """A verdict arrived: decide the submission if it can be decided, and what it means for its owner."""
        if submission.index not in node.undecided:
            return  # discarded with its owner's suspension; the verdict is kept for the audit
        first, second = submission.verdicts.get(1), submission.verdicts.get(2)
        rejects = [
            outcome.reason
            for state in submission.verdicts.values()
            for outcome in state.verdict.outcomes
            if outcome.outcome == REJECT
        ]
        if first is None or (second is None and (rejects or 2 in submission.jobs)):
            if rejects:
                node.contested.add(submission.index)
                node.reason = rejects[0]
                self._settle(node)
            return
        submission.outcomes = tuple(
            _decide(one, two)
            for one, two in zip(
                first.verdict.outcomes,
                second.verdict.outcomes if second is not None else first.verdict.outcomes,
                strict=True,
            )
        )
        submission.verdict_index = index
        node.undecided.discard(submission.index)
        node.contested.discard(submission.index)
        counts = [outcome.status for outcome in submission.outcomes]
        node.accepted += counts.count(ACCEPTED)
        node.rejected += counts.count(REJECTED)
        node.inconclusive += counts.count(UNDECIDED)
        if REJECTED in counts:
            self._suspend(node, index, submission.outcomes[counts.index(REJECTED)].reason)
        else:
            self._settle(node)

    def _settle(self, node: NodeState) -> None:
        """Paused, active or probation, from the node's counts alone. Suspension is final."""
        assert self.manifest is not None
        if node.state == "suspended":
            return
        if node.contested:
            node.state = "paused"
            return
        node.reason = ""
        node.state = "active" if node.accepted >= self.manifest.leases.probation_accepted else "probation"

    def _suspend(self, node: NodeState, index: int, reason: str) -> None:
        node.state, node.suspended_index, node.reason = "suspended", index, reason
        for number in node.undecided:
            other = self.submissions[number]
            other.outcomes = (RolloutOutcome(DISCARDED, reason),) * len(other.outcomes)
        node.undecided.clear()
        node.contested.clear()

    def _subject(self, entry: LedgerEntry, cls: type[R]) -> tuple[Envelope, R]:
        envelope = parse(entry.subject)
        if envelope.run != self.run:
            raise LedgerError("its subject belongs to another run")
        return envelope, envelope.record(cls)


def _decide(one: Outcome, two: Outcome) -> RolloutOutcome:
    if one.outcome == two.outcome == ACCEPT:
        return RolloutOutcome(ACCEPTED, two.reason)
    if one.outcome == two.outcome == REJECT:
        return RolloutOutcome(REJECTED, two.reason)
    return RolloutOutcome(UNDECIDED, one.reason if one.outcome != ACCEPT else two.reason)


def fold(entries: Iterable[LedgerEntry]) -> RunState:
    """The state after these entries, from the first on."""
    state = RunState()
    for index, entry in enumerate(entries):
        state.apply(index, entry)
    return state
