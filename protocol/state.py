"""What a run's ledger means: a pure fold, so the same entries give the same state everywhere (invariant 6).

No clock, no disk, no network. `take` raises on what contradicts the rules below and then has changed nothing, so the
coordinator asks it before it keeps an entry. `apply`, for ledgers that are there already, never raises on entries of
valid types: what contradicts the rules is left out of the state and recorded in `problems`. Signatures of subjects are
the caller's business (the coordinator checked them on arrival, the audit checks them again); the fold reads who signed
an envelope, not whether the signature holds. Two exceptions, because they are rare and end trust: links of the manifest
chain and a relay's own stamp.

    probation --accepted rollouts--> active
    probation, active --a REJECT waits for another verdict--> paused --not repeated--> back
    paused --a second validator repeats one--> suspended (what is undecided is discarded)
    any --evidence of dropped results, pooled evidence, a relay's lie, a wrong verdict, or a revocation--> suspended
    suspended --the verdicts, or the row of the manifest, that it rests on count no more--> what it would be without

Not covered: how verdicts decide a submission (`decision`), whose count no more (`distrust`), what that makes of a node
(`standing`), the rules of batches (`batch_rules`), draws (`draw_rules`), leases (`lease_rules`), the manifest
(`chain`); whom to lease to, whom to draw, what to batch (`trainer`); whether a draw is the right one (the audit: it
needs the secret that is revealed later).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TypeVar

from blake3 import blake3

from protocol import codec, decision, distrust, draw_rules, lease_rules, standing
from protocol.batch_rules import check_batch
from protocol.chain import Chain
from protocol.envelope import Envelope, parse
from protocol.errors import LedgerError, ProtocolError, ReasonCode
from protocol.evidence import VerdictEvidence, check_drop_bar, check_node_bar, check_relay_lie
from protocol.evidence_rows import EvidenceRow
from protocol.manifest import MANIFEST_KIND, Run, RunManifest
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    BatchClosed,
    DrawsOpened,
    DrawsRevealed,
    DropEvidence,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LeaseFailed,
    LedgerEntry,
    NodeEvidence,
    RelayReport,
    RoleGrant,
    RunFinished,
    TieLapsed,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
)
from protocol.state_types import (
    ACCEPTED,
    DISCARDED,
    PENDING,
    REJECTED,
    ROLES,
    UNDECIDED,
    BatchState,
    LeaseState,
    NodeState,
    PeriodState,
    PolicyHead,
    PolicyState,
    RolloutOutcome,
    SubmissionState,
    VerdictState,
)

__all__ = [
    "ACCEPTED",
    "DISCARDED",
    "PENDING",
    "REJECTED",
    "ROLES",
    "UNDECIDED",
    "BatchState",
    "LeaseState",
    "NodeState",
    "PeriodState",
    "PolicyHead",
    "PolicyState",
    "RolloutOutcome",
    "RunState",
    "SubmissionState",
    "VerdictState",
    "fold",
]

R = TypeVar("R")


class RunState:
    """The fold's accumulator. Read it freely; only `take` and `apply` change it."""

    def __init__(self) -> None:
        self.size = 0
        """Index of the next entry expected."""
        self.time = 0
        self.incarnation = 0
        self.restarts: list[int] = []
        """Indices of the first entries of later incarnations: the coordinator was away just before each."""
        self.outages: list[tuple[int, int]] = []
        """(index, milliseconds since the entry before) of each of them."""
        self.run: bytes = b""
        self.manifest: RunManifest | None = None
        """As it is now: the newest link of `chain`."""
        self.chain: Chain | None = None
        self.grants: dict[bytes, set[str]] = {}
        self.nodes: dict[bytes, NodeState] = {}
        self.leases: dict[bytes, LeaseState] = {}
        self.submissions: dict[int, SubmissionState] = {}
        self.policies: dict[tuple[int, int], PolicyState] = {}
        self.newest_policy: PolicyState | None = None
        self.periods: list[PeriodState] = []
        """Draw periods, by number."""
        self.present: tuple[bytes, ...] = ()
        """Whom validators are drawn from."""
        self.batches: dict[int, BatchState] = {}
        self.trained: set[tuple[int, int]] = set()
        """(submission index, rollout position) of everything in a batch."""
        self.finished: RunFinished | None = None
        self.cleared: list[bytes] = []
        """Keys whose suspension was taken back, in order."""
        self.problems: list[tuple[int, str]] = []
        """(entry index, what the entry contradicts); such entries change nothing else."""
        self._next_batch = 0
        """The step after the highest any batch named, refused ones included: one wrong batch is one problem."""
        self._max_bytes = (-1, 0)
        """Restarts before the newest lease, and its bound on the upload."""
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
            self.take(index, entry)
        except ProtocolError as exc:
            self.problems.append((index, f"{entry.event}: {exc}"))
            if entry.event == "batch":
                self._pass_over(entry)
            self.size = max(self.size, index + 1)
            self.time = max(self.time, entry.time)

    def take(self, index: int, entry: LedgerEntry) -> None:
        """Take in the next entry, or raise ProtocolError and change nothing at all.

        Each handler checks everything before it changes anything, so that trying an entry costs no copy of the state.
        """
        if index != self.size or entry.index != index:
            raise LedgerError(f"entry {entry.index} came where {self.size} was expected")
        self._dispatch(index, entry)
        self.size = index + 1
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
            self._restarted(index, entry)
            return
        handlers = {
            "run.updated": self._run_updated,
            "grant": self._grant,
            "node.joined": self._node_joined,
            "policy": self._policy,
            "lease": self._lease,
            "lease.closed": self._lease_closed,
            "submission": self._submission,
            "draws.opened": self._draws_opened,
            "draws.revealed": self._draws_revealed,
            "validators": self._validators,
            "job": self._job,
            "verdict": self._verdict,
            "tie.lapsed": self._tie_lapsed,
            "evidence.drop": self._evidence_drop,
            "evidence.node": self._evidence_node,
            "evidence.verdict": self._evidence_verdict,
            "relay.accused": self._relay_accused,
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
        self.chain = Chain(Run(run, manifest, envelope))

    def _run_updated(self, index: int, entry: LedgerEntry) -> None:
        assert self.chain is not None
        longer = self.chain.extend(entry.subject)
        if longer.untimely(len(self.chain.delegations), entry.time) is not None:
            raise LedgerError("it comes outside the time its delegation gives", ReasonCode.EXPIRED)
        if entry.incarnation > self.incarnation:
            self._restarted(index, entry)
        known = len(self.chain.revocations)
        self.chain, self.manifest = longer, longer.current.manifest
        unheard = False
        for gone in longer.revocations[known:]:
            node = self.nodes.get(gone.key)
            if node is not None and node.state != "suspended":
                standing.suspend(node, self.submissions, index, ReasonCode.KEY_REVOKED.value)
                unheard = unheard or node.role == "validator"
            self.present = tuple(key for key in self.present if key != gone.key)
        for node in self.nodes.values():
            if standing.overruled(node, self.manifest.evidence, unheard):
                self._release(node, entry)
            self._settle(node)  # the accepted rollouts that end probation may be others now

    def _restarted(self, index: int, entry: LedgerEntry) -> None:
        """The first entry of another start of the coordinator: `incarnation`, or the update with which its new key
        begins."""
        self.incarnation = entry.incarnation
        self.restarts.append(index)
        self.outages.append((index, max(0, entry.time - self.time)))

    def outage_ms(self, since: int) -> int:
        """Milliseconds the coordinator was away after ledger index `since`; lease durations stop meanwhile."""
        return sum(length for index, length in self.outages if index > since)

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
        assert self.chain is not None
        if envelope.signer not in self.chain.keys("origin"):
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
        assert self.chain is not None
        bound = self._max_bytes[1] if self._max_bytes[0] == len(self.restarts) else None
        lease_rules.check_terms(lease, self.manifest, self.chain.hash, bound)
        if not self.nodes[envelope.audience].accepted and len(lease.tasks) * lease.samples > max(
            1, self.manifest.leases.probation_first_rollouts
        ):
            raise LedgerError("a first lease larger than the run's manifest allows")
        if lease.lease_id in self.leases:
            raise LedgerError("a second lease with this id")
        policy = self.policies.get((lease.epoch, lease.step))
        if policy is None or policy.root != lease.root:
            raise LedgerError("it names a policy that was never announced")
        first = self._nonces.get(lease.nonce, lease.lease_id)
        state = LeaseState(lease.lease_id, lease, envelope.audience, index, entry.time)
        if first != lease.lease_id:
            state.reissue_of = first
            lease_rules.check_reissue(lease, self.leases[first].lease)
        self._max_bytes = len(self.restarts), lease.max_bytes
        self._nonces[lease.nonce] = first
        self.leases[lease.lease_id] = state
        self.nodes[envelope.audience].open_leases.add(lease.lease_id)

    def _lease_closed(self, index: int, entry: LedgerEntry) -> None:
        closed = codec.decode(LeaseClosed, entry.body)
        lease = self.leases.get(closed.lease_id)
        if lease is None or lease.status != "open":
            raise LedgerError("no open lease has this id")
        owner = self.nodes[lease.owner]
        if closed.reason.startswith(lease_rules.FAILED):
            lease_rules.check_given_up(*self._subject(entry, LeaseFailed), lease)
        else:
            lease_rules.check_closed(closed, lease, owner, entry.time, self.outage_ms(lease.index))
        lease.status, lease.reason, lease.closed_index = "closed", closed.reason, index
        owner.open_leases.discard(lease.lease_id)
        owner.unreturned, owner.lost_time = owner.unreturned + 1, entry.time

    def _submission(self, index: int, entry: LedgerEntry) -> None:
        envelope, intent = self._subject(entry, UploadIntent)
        lease = self.leases.get(intent.lease_id)
        if lease is None or lease.status != "open":
            raise LedgerError("no open lease has this id")
        if envelope.signer != lease.owner:
            raise LedgerError("the intent is not signed by the lease's owner")
        assert self.manifest is not None
        most = lease_rules.answer_bound(lease.lease, self.manifest)
        if intent.length > lease.lease.max_bytes or intent.raw_length > most:
            raise LedgerError("it is larger than its lease allows")
        node = self.nodes[lease.owner]
        lost = node.state == "suspended"
        outcome = RolloutOutcome(DISCARDED, node.reason) if lost else RolloutOutcome()
        period = len(self.periods) - 1 if self.periods and self.periods[-1].secret is None else None
        number = 0 if period is None else self.periods[period].submissions
        self.submissions[index] = SubmissionState(
            index,
            lease.lease_id,
            lease.owner,
            intent,
            entry.time,
            (outcome,) * lease.rollouts,
            period=period,
            number=number,
            probation=node.state == "probation",
        )
        if period is not None:
            self.periods[period].submissions += 1
        lease.status, lease.submission = "submitted", index
        node.open_leases.discard(lease.lease_id)
        node.unreturned = 0
        if not lost:
            node.undecided.add(index)

    def _draws_opened(self, index: int, entry: LedgerEntry) -> None:
        opened = codec.decode(DrawsOpened, entry.body)
        assert self.manifest is not None
        draw_rules.check_opened(opened, self.periods, self.manifest)
        self.periods.append(PeriodState(index, opened))

    def _draws_revealed(self, index: int, entry: LedgerEntry) -> None:
        revealed = codec.decode(DrawsRevealed, entry.body)
        assert self.manifest is not None
        period = draw_rules.check_revealed(revealed, self.periods, len(self.batches) >= self.manifest.steps)
        period.secret, period.revealed_index = revealed.secret, index

    def _validators(self, index: int, entry: LedgerEntry) -> None:
        present = codec.decode(ValidatorsPresent, entry.body)
        if list(present.keys) != sorted(set(present.keys)):
            raise LedgerError("its keys are not sorted, or one is there twice")
        if present.keys == self.present:
            raise LedgerError("the set is the one that is there already")
        for key in present.keys:
            self._check_validator(key)
        self.present = present.keys

    def _check_validator(self, key: bytes) -> None:
        node = self.nodes.get(key)
        if node is None or node.role != "validator" or "validator" not in self.grants.get(key, ()):
            raise LedgerError("the validator was not admitted")
        if node.state == "suspended":
            raise LedgerError("the validator's key was revoked", ReasonCode.KEY_REVOKED)

    def _job(self, index: int, entry: LedgerEntry) -> None:
        job = codec.decode(JobDrawn, entry.body)
        found = self.submissions.get(job.submission)
        undecided = found is not None and found.index in self.nodes[found.owner].undecided
        submission = draw_rules.check_round(job, found, job.job_id in self._jobs, undecided)
        self._check_validator(job.validator)
        period = draw_rules.check_draw(job, submission, self.periods, self.present)
        period.open_jobs.add((submission.index, job.round))
        submission.jobs[job.round] = job
        submission.attempts[job.round] = job.attempt + 1
        if job.round == decision.last_round(submission) and not job.attempt and submission.tie_time is not None:
            submission.tie_time = entry.time  # whoever is asked late gets the whole wait
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
        if self.nodes[job.validator].reason == ReasonCode.VALIDATOR_WRONG:
            raise LedgerError("its validator was found to be wrong before", ReasonCode.SUSPENDED)
        if verdict.round in submission.verdicts:
            raise LedgerError("the job already has its verdict")
        if verdict.digest != submission.intent.digest or len(verdict.outcomes) != len(submission.outcomes):
            raise LedgerError("it is about other bytes, or another number of rollouts")
        if any(outcome.outcome not in (ACCEPT, REJECT, INCONCLUSIVE) for outcome in verdict.outcomes):
            raise LedgerError("an outcome that does not exist")
        submission.verdicts[verdict.round] = VerdictState(index, verdict, envelope.signer)
        assert submission.period is not None  # a job of it was drawn
        self.periods[submission.period].open_jobs.discard((submission.index, verdict.round))
        decision.note_tie(submission, self.present, entry.time)
        self._weigh(submission, self.nodes[submission.owner], index)

    def _tie_lapsed(self, index: int, entry: LedgerEntry) -> None:
        assert self.manifest is not None
        submission = self.submissions.get(codec.decode(TieLapsed, entry.body).submission)
        decision.end_tie(submission, self.present, entry.time, self.manifest.leases.lease_ms)
        assert submission is not None and submission.period is not None  # it holds verdicts
        self._weigh(submission, self.nodes[submission.owner], index)
        if submission.verdict_index is not None:
            self.periods[submission.period].open_jobs.discard((submission.index, decision.last_round(submission)))

    def _evidence_drop(self, index: int, entry: LedgerEntry) -> None:
        evidence = codec.decode(DropEvidence, entry.body)
        check_drop_bar(evidence)
        self._end_trust(self._accused(evidence, index), index, ReasonCode.DROPPED_RESULTS)

    def _evidence_node(self, index: int, entry: LedgerEntry) -> None:
        evidence = codec.decode(NodeEvidence, entry.body)
        node = self._accused(evidence, index)
        assert self.manifest is not None
        row = check_node_bar(evidence, self.manifest.evidence)
        self._end_trust(node, index, ReasonCode.POOLED_EVIDENCE, row)

    def _evidence_verdict(self, index: int, entry: LedgerEntry) -> None:
        assert self.manifest is not None
        key = distrust.accused(codec.decode(VerdictEvidence, entry.body), self.submissions.values())
        self._end_trust(self.nodes[key], index, ReasonCode.VALIDATOR_WRONG)
        self.present = tuple(other for other in self.present if other != key)
        since = distrust.first_verdict(self.submissions.values(), key)
        touched = list(distrust.void(self.submissions.values(), key, self.nodes))
        for node in [one for one in self.nodes.values() if standing.rests_on(one, since, self.submissions)]:
            self._release(node, entry)
        for submission in touched:
            owner, lease = self.nodes[submission.owner], self.leases[submission.lease_id].lease
            if submission.verdict_index is not None:
                fresh = distrust.may_train(lease.step, len(self.batches), self.manifest)
                if not fresh or not distrust.take_back(submission, self.nodes, self.trained, index):
                    self._settle(owner)
                    continue
            self._weigh_again(submission, owner, entry)

    def _weigh_again(self, submission: SubmissionState, owner: NodeState, entry: LedgerEntry) -> None:
        if submission.index not in owner.undecided:
            return  # discarded
        decision.note_tie(submission, self.present, entry.time)
        self._weigh(submission, owner, entry.index)
        if distrust.ends_here(submission, self.periods):
            outcomes = decision.settled(decision.weigh(submission), submission.spent)
            self._decide(submission, owner, entry.index, outcomes)

    def _release(self, node: NodeState, entry: LedgerEntry) -> None:
        """What a suspension rested on counts no more."""
        case = standing.release(node, self.submissions, self.nodes, entry.index, self.chain)
        if case is not None:
            self._weigh_again(case, node, entry)
        if node.cleared and node.cleared[-1].index == entry.index:
            self.cleared.append(node.key)
        self._settle(node)

    def _accused(self, evidence: DropEvidence | NodeEvidence, index: int) -> NodeState:
        node = self.nodes.get(evidence.key)
        if node is None or node.role != "inference" or evidence.upto > index:
            raise LedgerError("it is about no inference node, or counts entries that are not there yet")
        return node

    def _relay_accused(self, index: int, entry: LedgerEntry) -> None:
        _, report = self._subject(entry, RelayReport)
        node = self.nodes.get(report.relay)
        if node is None or node.role != "relay":
            raise LedgerError("the key it accuses is no relay of this run")
        assert self.chain is not None
        check_relay_lie(report, self.run, self.chain.keys_at("origin", index))
        self._end_trust(node, index, ReasonCode.RELAY_LIED)

    def _end_trust(self, node: NodeState, index: int, reason: ReasonCode, row: EvidenceRow | None = None) -> None:
        if node.state == "suspended":
            raise LedgerError(f"the key is already suspended: {node.reason}")
        standing.suspend(node, self.submissions, index, reason.value, row=row)

    def _batch(self, index: int, entry: LedgerEntry) -> None:
        closed = codec.decode(BatchClosed, entry.body)
        if closed.step in self.batches:
            raise LedgerError(f"a second batch for step {closed.step}")
        if closed.step > self._next_batch or not closed.entries or self.finished is not None:
            raise LedgerError(f"batch {closed.step} is empty, out of order, or comes after the run's end")
        assert self.manifest is not None
        samples = check_batch(
            closed, self.manifest, self.newest_policy, self.nodes, self.leases, self.submissions, self._samples
        )
        self._next_batch = max(self._next_batch, closed.step + 1)
        self.batches[closed.step] = BatchState(index, closed)
        self.trained.update((item.submission, item.rollout) for item in closed.entries)
        self._samples.update(samples)

    def _pass_over(self, entry: LedgerEntry) -> None:
        """A refused batch is in the ledger all the same: the batches after it are not out of order for that."""
        with contextlib.suppress(ProtocolError):
            self._next_batch = max(self._next_batch, codec.decode(BatchClosed, entry.body).step + 1)

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
        outcomes = decision.decide(submission)
        if outcomes is None:
            reason = decision.contested(submission)
            if reason:
                node.contested.add(submission.index)
                node.reason = reason
            else:
                node.contested.discard(submission.index)
            self._settle(node)
            return
        self._decide(submission, node, index, outcomes)

    def _decide(
        self, submission: SubmissionState, node: NodeState, index: int, outcomes: tuple[RolloutOutcome, ...]
    ) -> None:
        submission.outcomes = outcomes
        submission.verdict_index = index
        node.undecided.discard(submission.index)
        node.contested.discard(submission.index)
        standing.count(submission, self.nodes)
        rejected = next((outcome for outcome in outcomes if outcome.status == REJECTED), None)
        if rejected is not None:
            standing.suspend(node, self.submissions, index, rejected.reason, case=submission.index)
        else:
            self._settle(node)

    def _settle(self, node: NodeState) -> None:
        standing.settle(node, self.manifest)

    def _subject(self, entry: LedgerEntry, cls: type[R]) -> tuple[Envelope, R]:
        envelope = parse(entry.subject)
        if envelope.run != self.run:
            raise LedgerError("its subject belongs to another run")
        if self.chain is not None and self.chain.revoked(envelope.signer, entry.index):
            raise LedgerError("its signer's key was revoked", ReasonCode.KEY_REVOKED)
        return envelope, envelope.record(cls)


def fold(entries: Iterable[LedgerEntry]) -> RunState:
    """The state after these entries, from the first on."""
    state = RunState()
    for index, entry in enumerate(entries):
        state.apply(index, entry)
    return state
