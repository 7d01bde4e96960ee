"""A run directory read as evidence: files opened for reading only, and the facts its ledger's entries state.

Facts are taken entry by entry, each with its subject's signature checked, and without the rules of trust: a lease to
a suspended node is still a lease that was signed, and the verdict on it can still be checked. What the rules say
about the same entries is `protocol.state`.

Names of records are paths inside the run directory (`submissions/<lease id>.hws`, `ledger/17`), or `verdict/17` for
what the ledger's entry 17 claims.

Not covered: published weights (`shardcast.archive`), and whether a verdict is right (`audit`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from protocol import codec
from protocol.chain import UPDATE_KIND, Chain, RunUpdate
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import LedgerError, ProtocolError, ReasonCode, UsageError
from protocol.evidence import REPORT_KIND, VerdictEvidence
from protocol.files import read_at_most
from protocol.lease_rules import FAILED_KIND
from protocol.limits import (
    MAX_ATTACHMENT_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_ROLLOUTS_PER_LEASE,
    MAX_SUBMISSION_BYTES,
)
from protocol.manifest import Run, RunManifest, open_manifest
from protocol.records import (
    Batch,
    BatchClosed,
    DrawsOpened,
    DrawsRevealed,
    DropEvidence,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    NodeEvidence,
    RelayReport,
    RoleGrant,
    RunFinished,
    TieLapsed,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
    VerdictDetails,
)
from protocol.segments import Problem, SealedEntry, SealedLog, read_segments
from protocol.state import PolicyHead, RunState, fold

R = TypeVar("R")

MANIFEST = "manifest.hw"
_TRACES = (("submissions", ".hws"), ("batches", ".hwb"))
"""Files that only a run which did something holds."""
NOT_STARTED = "nothing to check yet: the run has not started, or sealed nothing so far"
SUBJECTS: dict[str, tuple[str, type]] = {
    "run.updated": (UPDATE_KIND, RunUpdate),
    "node.joined": ("join", JoinRequest),
    "policy": ("head", PolicyHead),
    "lease": ("lease", Lease),
    "submission": ("intent", UploadIntent),
    "verdict": ("verdict", Verdict),
    "relay.accused": (REPORT_KIND, RelayReport),
}
"""Events whose subject is somebody's envelope: the kind it was signed as, and the record in it."""
BODIES: dict[str, type] = {
    "grant": RoleGrant,
    "lease.closed": LeaseClosed,
    "draws.opened": DrawsOpened,
    "draws.revealed": DrawsRevealed,
    "validators": ValidatorsPresent,
    "job": JobDrawn,
    "tie.lapsed": TieLapsed,
    "evidence.drop": DropEvidence,
    "evidence.node": NodeEvidence,
    "evidence.verdict": VerdictEvidence,
    "batch": BatchClosed,
    "run.finished": RunFinished,
}
"""Events the coordinator states itself: the record in the entry's body."""


def read_entry(entry: LedgerEntry) -> tuple[Envelope | None, object]:
    """The subject's envelope, if there is one, and the event's own record (None for events that have none).

    Signatures are not checked here.

    Raises:
        DecodeError: it holds something else than its event says.
    """
    envelope = parse(entry.subject) if entry.subject else None
    if entry.event in BODIES:
        return envelope, codec.decode(BODIES[entry.event], entry.body)
    if entry.event in SUBJECTS:
        if envelope is None:
            raise LedgerError("it has no subject")
        return envelope, envelope.record(SUBJECTS[entry.event][1])
    return envelope, None


@dataclass(frozen=True)
class SubmissionFact:
    """One upload: ledger index, the lease it answers, the signed intent and who signed it."""

    index: int
    lease: Lease
    intent: UploadIntent
    owner: bytes

    @property
    def file(self) -> str:
        return f"submissions/{self.lease.lease_id.hex()}.hws"

    @property
    def rollouts(self) -> int:
        return len(self.lease.tasks) * self.lease.samples

    def rollout_id(self, position: int) -> str:
        """`<lease id>:<task>:<sample>` of the rollout at `position`."""
        task, sample = divmod(position, self.lease.samples)
        return f"{self.lease.lease_id.hex()}:{self.lease.tasks[task]}:{sample}"


@dataclass(frozen=True)
class VerdictFact:
    """One signed verdict on a submission."""

    index: int
    submission: SubmissionFact
    verdict: Verdict
    validator: bytes

    @property
    def record(self) -> str:
        return f"verdict/{self.index}"

    @property
    def file(self) -> str:
        """Where its details lie."""
        return f"submissions/{self.submission.lease.lease_id.hex()}.{self.verdict.round}.hwv"


@dataclass
class Facts:
    """What the ledger's entries state, signatures checked."""

    leases: dict[bytes, tuple[Lease, bytes]] = field(default_factory=dict)
    """Lease id -> the lease and its owner."""
    submissions: dict[int, SubmissionFact] = field(default_factory=dict)
    verdicts: dict[int, VerdictFact] = field(default_factory=dict)
    batches: dict[int, BatchClosed] = field(default_factory=dict)
    """Ledger index -> batch."""
    policies: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)
    """(epoch, step) -> ledger index and root."""
    jobs: dict[bytes, JobDrawn] = field(default_factory=dict)
    accusations: dict[int, RelayReport] = field(default_factory=dict)
    """Ledger index -> what shows that a relay lied."""
    drops: dict[int, DropEvidence] = field(default_factory=dict)
    """Ledger index -> evidence that a key kept results back."""
    pooled: dict[int, NodeEvidence] = field(default_factory=dict)
    """Ledger index -> evidence that a node's numbers add up to too much."""
    contradicted: dict[int, VerdictEvidence] = field(default_factory=dict)
    """Ledger index -> a verdict that the coordinator's own check contradicts."""


class RunArchive:
    """A run directory. Opens files for reading and nothing else."""

    def __init__(self, root: Path, run: Run, log: SealedLog) -> None:
        self.root = root
        self.run = run
        self.log = log
        self.chain = log.chain if log.chain is not None else Chain(run)
        """The manifest chain as the ledger tells it."""
        self.facts = Facts()
        self._links: list[tuple[int, bytes]] = [(0, run.id)]
        """(ledger index, chain hash from there on)."""
        self.problems: list[Problem] = list(log.problems)
        self._noted: set[int] = set()
        """Entries with a subject that holds."""
        for sealed in log.entries:
            try:
                self._take(sealed.index, sealed.entry)
            except ProtocolError as exc:
                self.problems.append(Problem(f"ledger/{sealed.index}", exc.code, f"{sealed.entry.event}: {exc}"))

    @staticmethod
    def open(root: Path) -> RunArchive:
        """Read manifest and ledger.

        Raises:
            UsageError: not a run directory.
            ManifestError: the manifest does not hold; nothing else can be believed.
            OSError: a file can't be read.
        """
        try:
            raw = read_bounded(root / MANIFEST, MAX_ENVELOPE_BYTES)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise UsageError(f"{root} is no run directory: it holds no {MANIFEST}; name the folder of a run") from exc
        run = open_manifest(raw)
        try:
            log = read_segments(root / "ledger", run)
        except FileNotFoundError:
            missing = Problem("ledger", ReasonCode.RECORD_MISSING, "the run directory holds no sealed ledger")
            log = SealedLog(problems=[missing])
        return RunArchive(root, run, log)

    @property
    def started(self) -> bool:
        """False for a run of which nothing is sealed, submitted or batched yet."""
        if self.log.size or any((self.root / "ledger").glob("*.hwl")):
            return True
        return any(any((self.root / name).glob(f"*{end}")) for name, end in _TRACES)

    def signed_by_revoked(self) -> Iterator[tuple[int, bytes]]:
        """(index, signer) of entries whose subject's signer was revoked from an earlier entry on."""
        if not self.chain.revocations:
            return
        for sealed in self.log.entries:
            envelope = parse(sealed.entry.subject) if sealed.index in self._noted else None
            if envelope is not None and self.chain.revoked(envelope.signer, sealed.index):
                yield sealed.index, envelope.signer

    def signed_from(self, key: bytes, index: int) -> Iterator[int]:
        """Entries from `index` on that a key signed, or whose subject it signed. Entry 0 says what the run id says."""
        for sealed in self.log.entries:
            if sealed.index < max(index, 1):
                continue
            subject = parse(sealed.entry.subject).signer if sealed.index in self._noted else b""
            if key in (sealed.envelope.signer, subject):
                yield sealed.index

    def announced(self) -> dict[tuple[int, int], bytes]:
        """(epoch, step) -> root of each policy that a key announced which counted at that entry."""
        gone = {index for index, _ in self.signed_by_revoked()}
        return {key: root for key, (index, root) in self.facts.policies.items() if index not in gone}

    def unbroken(self) -> Iterator[SealedEntry]:
        """The entries up to the first that is damaged or missing: what the fold may rest on."""
        for expected, sealed in enumerate(self.log.entries):
            if sealed.index != expected:
                return
            yield sealed

    def fold(self) -> RunState:
        """The state after the entries up to the first that is damaged or missing."""
        return fold(sealed.entry for sealed in self.unbroken())

    def rules(self, lease: Lease) -> Run:
        """The run as it was under the manifest that a lease names."""
        return self.chain.at(lease.manifest)

    def manifest_at(self, index: int) -> RunManifest:
        """The manifest that held when entry `index` was written."""
        return self.chain.at([digest for at, digest in self._links if at <= index][-1]).manifest

    def chain_at(self, index: int) -> Chain:
        """The chain as it was when entry `index` was written: without what was revoked later."""
        known = {digest for at, digest in self._links if at <= index}
        chain = Chain(self.run)
        for link in itertools.takewhile(lambda link: link.digest in known, self.chain.links):
            chain = chain.extend(link.raw)
        return chain

    def submission(self, fact: SubmissionFact) -> bytes:
        """The compressed upload, its hash checked. Raises LedgerError, OSError."""
        blob = self._hashed(fact.file, MAX_SUBMISSION_BYTES, fact.intent.digest)
        if len(blob) != fact.intent.length:
            raise LedgerError("has another length than its signed intent", ReasonCode.LENGTH_MISMATCH)
        return blob

    def details(self, fact: VerdictFact) -> VerdictDetails:
        """What the validator measured, bound to its signature by hash. Raises LedgerError, DecodeError, OSError."""
        raw = self._hashed(fact.file, MAX_ATTACHMENT_BYTES, fact.verdict.details)
        return codec.decode(VerdictDetails, raw)

    def batch(self, closed: BatchClosed) -> Batch:
        """A batch file, its hash checked. Raises LedgerError, DecodeError, OSError."""
        limit: int = Batch.MAX_BYTES  # type: ignore[attr-defined]
        return codec.decode(Batch, self._hashed(batch_file(closed), limit, closed.digest))

    def _hashed(self, name: str, limit: int, digest: bytes) -> bytes:
        try:
            data = read_bounded(self.root / name, limit)
        except FileNotFoundError as exc:
            raise LedgerError("is named by the ledger but is not there", ReasonCode.RECORD_MISSING) from exc
        if blake3(data).digest() != digest:
            raise LedgerError("is not the file whose hash the ledger holds", ReasonCode.HASH_MISMATCH)
        return data

    # --- entries ------------------------------------------------------------------------------------------------

    def _take(self, index: int, entry: LedgerEntry) -> None:
        """Check one entry's subject and note what it states. Raises ProtocolError."""
        if entry.event == "run.opened":
            if open_manifest(entry.subject).envelope.payload != self.run.envelope.payload:
                raise LedgerError("opens another run than the manifest file", ReasonCode.WRONG_RUN)
            return
        envelope, record = read_entry(entry)
        if entry.event in SUBJECTS:
            open_envelope(entry.subject, run=self.run.id, kind=SUBJECTS[entry.event][0])
            self._noted.add(index)
        elif entry.event == "lease.closed" and envelope is not None:
            open_envelope(entry.subject, run=self.run.id, kind=FAILED_KIND)  # a node's word that it gives a lease up
            self._noted.add(index)
        self._note(index, envelope, record)

    def _check_signer(self, envelope: Envelope | None, role: str) -> Envelope:
        """Events of the run's own keys: any key the role ever had; whether it was its turn is the fold's business."""
        if envelope is None or envelope.signer not in self.chain.keys(role):
            raise LedgerError(f"not signed by a key of the run's {role}", ReasonCode.BAD_SIGNATURE)
        return envelope

    def _note(self, index: int, envelope: Envelope | None, record: object) -> None:
        facts = self.facts
        if isinstance(record, RunUpdate) and envelope is not None:
            if not self.chain.holds(blake3(envelope.payload).digest()):
                raise LedgerError("it is no link of this run's manifest chain")
            self._links.append((index, blake3(envelope.payload).digest()))
        elif isinstance(record, Lease):
            envelope = self._check_signer(envelope, "coordinator")
            if not self.chain.holds(record.manifest):
                raise LedgerError("the lease names another manifest", ReasonCode.WRONG_RUN)
            if not 1 <= len(record.tasks) * record.samples <= MAX_ROLLOUTS_PER_LEASE:
                raise LedgerError("the lease asks for no rollouts, or for more than a submission can hold")
            facts.leases[record.lease_id] = (record, envelope.audience)
        elif isinstance(record, PolicyHead):
            signer = self._check_signer(envelope, "origin").signer
            at, root = facts.policies.setdefault((record.epoch, record.step), (index, record.root))
            if root != record.root and not self.chain.revoked(signer, index):
                text = (
                    f"another root of epoch {record.epoch} step {record.step} than ledger/{at}; the origin signed both"
                )
                raise LedgerError(text, ReasonCode.ORIGIN_FORKED)
        elif isinstance(record, UploadIntent) and envelope is not None:
            lease, owner = facts.leases.get(record.lease_id, (None, b""))
            if lease is None or owner != envelope.signer:
                raise LedgerError("the submission answers no lease of its signer", ReasonCode.NOT_OWNER)
            facts.submissions[index] = SubmissionFact(index, lease, record, owner)
        elif isinstance(record, Verdict) and envelope is not None:
            self._note_verdict(index, envelope, record)
        elif isinstance(record, JobDrawn):
            facts.jobs[record.job_id] = record
        elif isinstance(record, BatchClosed):
            facts.batches[index] = record
        elif isinstance(record, RelayReport):
            facts.accusations[index] = record
        elif isinstance(record, DropEvidence):
            facts.drops[index] = record
        elif isinstance(record, NodeEvidence):
            facts.pooled[index] = record
        elif isinstance(record, VerdictEvidence):
            facts.contradicted[index] = record

    def _note_verdict(self, index: int, envelope: Envelope, record: Verdict) -> None:
        facts = self.facts
        job = facts.jobs.get(record.job_id)
        submission = facts.submissions.get(job.submission) if job is not None else None
        if job is None or submission is None or job.validator != envelope.signer or job.round != record.round:
            raise LedgerError("the verdict answers no job of its signer", ReasonCode.UNKNOWN_JOB)
        if record.digest != submission.intent.digest or len(record.outcomes) != submission.rollouts:
            raise LedgerError("the verdict is about other bytes or another number of rollouts")
        facts.verdicts[index] = VerdictFact(index, submission, record, envelope.signer)


def batch_file(closed: BatchClosed) -> str:
    return f"batches/step-{closed.step:08d}.hwb"


def read_bounded(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes.

    Raises:
        LedgerError: longer than that.
        OSError: it can't be read.
    """
    data = read_at_most(path, limit + 1)
    if len(data) > limit:
        raise LedgerError(f"is over the bound of {limit} bytes", ReasonCode.OVERSIZE)
    return data
