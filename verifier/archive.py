"""A run directory read as evidence: files opened for reading only, and the facts its ledger's entries state.

Facts are taken entry by entry, each with its subject's signature checked, and without the rules of trust: a lease to
a suspended node is still a lease that was signed, and the verdict on it can still be checked. What the rules say
about the same entries is `protocol.state`.

Names of records are paths inside the run directory (`submissions/<lease id>.hws`, `ledger/17`), or `verdict/17` for
what the ledger's entry 17 claims.

Not covered: published weights (`shardcast.archive`), and whether a verdict is right (`audit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from protocol import codec
from protocol.envelope import Envelope, open_envelope
from protocol.errors import LedgerError, ProtocolError, ReasonCode, UsageError
from protocol.limits import (
    MAX_ATTACHMENT_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_ROLLOUTS_PER_LEASE,
    MAX_SUBMISSION_BYTES,
)
from protocol.manifest import Run, open_manifest
from protocol.records import (
    Batch,
    BatchClosed,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    RoleGrant,
    RunFinished,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from protocol.segments import Problem, SealedLog, read_segments
from protocol.state import PolicyHead, RunState

R = TypeVar("R")

MANIFEST = "manifest.hw"
_SUBJECTS: dict[str, tuple[str, type]] = {
    "node.joined": ("join", JoinRequest),
    "policy": ("head", PolicyHead),
    "lease": ("lease", Lease),
    "submission": ("intent", UploadIntent),
    "verdict": ("verdict", Verdict),
}
"""Events whose subject is somebody's envelope: the kind it was signed as, and the record in it."""
_BODIES: dict[str, type] = {
    "grant": RoleGrant,
    "lease.closed": LeaseClosed,
    "job": JobDrawn,
    "batch": BatchClosed,
    "run.finished": RunFinished,
}
"""Events the coordinator states itself: the record in the entry's body."""


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


class RunArchive:
    """A run directory. Opens files for reading and nothing else."""

    def __init__(self, root: Path, run: Run, log: SealedLog) -> None:
        self.root = root
        self.run = run
        self.log = log
        self.facts = Facts()
        self.problems: list[Problem] = list(log.problems)
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

    def fold(self) -> RunState:
        """The state after the entries up to the first that is damaged or missing."""
        state = RunState()
        for sealed in self.log.entries:
            if sealed.index != state.size:
                break
            state.apply(sealed.index, sealed.entry)
        return state

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
        elif entry.event in _BODIES:
            body: object = codec.decode(_BODIES[entry.event], entry.body)
            if isinstance(body, JobDrawn):
                self.facts.jobs[body.job_id] = body
            elif isinstance(body, BatchClosed):
                self.facts.batches[index] = body
        elif entry.event in _SUBJECTS:
            kind, cls = _SUBJECTS[entry.event]
            envelope = open_envelope(entry.subject, run=self.run.id, kind=kind, signer=self._signer(entry.event))
            self._note(index, envelope, envelope.record(cls))

    def _signer(self, event: str) -> bytes | None:
        """Whose signature an event's subject must carry, where the manifest says it."""
        manifest = self.run.manifest
        return {"policy": manifest.origin, "lease": manifest.coordinator}.get(event)

    def _note(self, index: int, envelope: Envelope, record: object) -> None:
        facts = self.facts
        if isinstance(record, Lease):
            if record.manifest != self.run.id:
                raise LedgerError("the lease names another manifest", ReasonCode.WRONG_RUN)
            if not 1 <= len(record.tasks) * record.samples <= MAX_ROLLOUTS_PER_LEASE:
                raise LedgerError("the lease asks for no rollouts, or for more than a submission can hold")
            facts.leases[record.lease_id] = (record, envelope.audience)
        elif isinstance(record, PolicyHead):
            facts.policies.setdefault((record.epoch, record.step), (index, record.root))
        elif isinstance(record, UploadIntent):
            lease, owner = facts.leases.get(record.lease_id, (None, b""))
            if lease is None or owner != envelope.signer:
                raise LedgerError("the submission answers no lease of its signer", ReasonCode.NOT_OWNER)
            facts.submissions[index] = SubmissionFact(index, lease, record, owner)
        elif isinstance(record, Verdict):
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
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise LedgerError(f"is over the bound of {limit} bytes", ReasonCode.OVERSIZE)
    return data
