"""The records that travel between machines or into the archive. Their fields are the wire format.

    join and control      JoinRequest JoinReply Heartbeat HeartbeatReply ErrorReply Ack
    leases and rollouts   LeaseRequest LeaseReply Lease LeaseFailed UploadIntent Receipt Rollout Submission
    verification          JobRequest JobReply Job Outcome Verdict RolloutDetail VerdictDetails
    roles                 RoleGrant
    ledger                LedgerEntry TreeHead BatchEntry BatchClosed JobDrawn LeaseClosed RunFinished
    draws                 DrawsOpened DrawsRevealed ValidatorsPresent
    evidence              RelayStamp RelayReport DropEvidence NodeEvidence (`evidence` has VerdictEvidence)
    training              TrainingRollout Batch

Token ids travel as little-endian u32, log-probabilities as little-endian float32 (`*_blob` fields).
Records of weights live in `shardcast.records`, the run manifest in `manifest`, an engine's in `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Blob, Fixed, Flag, Maybe, Real, Seq, Sub, Text, UInt, record
from protocol.limits import (
    HASH_BYTES,
    KIB,
    MAX_ADDRESSES,
    MAX_BATCH_ENTRIES,
    MAX_ENVELOPE_BYTES,
    MAX_INTENT_BYTES,
    MAX_NUMBERS,
    MAX_PROOF_CHUNKS,
    MAX_ROLLOUTS_PER_LEASE,
    MAX_ROUTES_BYTES,
    MAX_SUBMISSION_RAW_BYTES,
    MAX_TASKS_PER_LEASE,
    MAX_TEXT,
    MAX_TOKENS_PER_ROLLOUT,
    MIB,
    PROOF_TOPK,
)

NO_HASH = bytes(HASH_BYTES)
Hash = Annotated[bytes, Fixed(HASH_BYTES)]
Key = Annotated[bytes, Fixed(32)]
Id = Annotated[bytes, Fixed(16)]
U8 = Annotated[int, UInt(8)]
U16 = Annotated[int, UInt(16)]
U32 = Annotated[int, UInt(32)]
U64 = Annotated[int, UInt(64)]
Float = Annotated[float, Real()]
Bool = Annotated[bool, Flag()]
Word = Annotated[str, Text(64)]
Line = Annotated[str, Text(512)]
Note = Annotated[str, Text(MAX_TEXT)]
Tokens = Annotated[bytes, Blob(4 * MAX_TOKENS_PER_ROLLOUT, 4)]
Floats = Annotated[bytes, Blob(4 * MAX_TOKENS_PER_ROLLOUT, 4)]
Routes = Annotated[bytes, Blob(MAX_ROUTES_BYTES)]
Envelope = Annotated[bytes, Blob(MAX_ENVELOPE_BYTES)]
Lines = Annotated[tuple[str, ...], Seq(Text(512), MAX_ADDRESSES)]
Passes = Annotated[tuple[bytes, ...], Seq(Blob(1 * KIB), 4)]
"""`weights.pass` envelopes (`shardcast.passes`), one per URL of `weights` in its order: whom to pull from, and the key
that must answer there. Four: more parents cost every heartbeat their bytes and help nobody."""

FINISH_EOS = 0
"""The rollout's last token is a stop token."""
FINISH_LENGTH = 1
"""The rollout ended at the lease's cap, with no stop token in it."""

ACCEPT, REJECT, INCONCLUSIVE = 0, 1, 2


# --- join and control ---------------------------------------------------------------------------------------------


@record(16 * KIB)
@dataclass(frozen=True)
class JoinRequest:
    """A machine asks to take a role. Signed by its identity key, which thereby delegates its transport key."""

    role: Word
    """`inference`, `validator`, `relay` or `trainer`."""
    name: Word
    """What people see; not an identity."""
    transport_key: Key
    nonce: Id
    """Returned in the reply, so that the reply's time is fresh."""
    software: Word
    versions: Annotated[tuple[int, ...], Seq(UInt(16), 8)]
    addresses: Lines
    """URLs a relay serves weights at; empty for other roles."""
    engine: Line
    """Engine name and version, for people and calibration."""


@record(16 * KIB)
@dataclass(frozen=True)
class JoinReply:
    nonce: Id
    time: U64
    """The coordinator's time in milliseconds; RULES 3."""
    state: Word
    """`probation`, `active`, `paused` or `suspended`."""
    weights: Lines
    """URLs to pull weights from, best first."""
    ingress: Line
    """URL to send submissions to and fetch jobs from."""
    heartbeat_ms: U32
    message: Note
    manifest: Hash = NO_HASH
    """BLAKE3 of the newest link of the manifest chain (the run id while there is none)."""
    tree: Annotated[bytes, Blob(2 * KIB)] = b""
    """A `tree` envelope: the coordinator's newest promise about the whole ledger."""
    passes: Passes = ()


@record(8 * KIB)
@dataclass(frozen=True)
class Heartbeat:
    epoch: U64
    step: U64
    """The newest policy held, whole and verified."""
    activity: Word
    done: U64
    """Rollouts finished (inference), verdicts given (validator) or shards served (relay) since start."""
    sent: U64 = 0
    """Bytes of weights sent on (relay); 0 for other roles."""


@record(8 * KIB)
@dataclass(frozen=True)
class HeartbeatReply:
    time: U64
    state: Word
    weights: Lines
    step: U64
    """The newest policy the coordinator has in its ledger."""
    finished: Bool
    """The run is over; the node may leave."""
    manifest: Hash = NO_HASH
    """BLAKE3 of the newest link of the manifest chain; a member that holds another fetches the chain."""
    tree: Annotated[bytes, Blob(2 * KIB)] = b""
    """A `tree` envelope: the coordinator's newest promise about the whole ledger."""
    accepted: U64 = 0
    """Rollouts of this member that were accepted so far, as the coordinator sees it."""
    rejected: U64 = 0
    reason: Line = ""
    """Why the state is `paused` or `suspended`, as `ReasonCode` or in words; empty otherwise."""
    waits_for: Line = ""
    """What this member waits for, and for whom, in plain words; empty when it has work."""
    passes: Passes = ()


@record(8 * KIB)
@dataclass(frozen=True)
class ErrorReply:
    code: Word
    message: Note


@record(8 * KIB)
@dataclass(frozen=True)
class Ack:
    note: Line


# --- leases and rollouts ------------------------------------------------------------------------------------------


@record(8 * KIB)
@dataclass(frozen=True)
class LeaseRequest:
    capacity: U32
    """Rollouts the engine takes at once."""
    epoch: U64
    step: U64
    wait_ms: U32
    """How long the coordinator may hold the request open; at most 20,000."""


@record(64 * KIB)
@dataclass(frozen=True)
class Lease:
    """What a node must do; everything that decides the tokens is in here. The envelope's audience owns it."""

    lease_id: Id
    manifest: Hash
    epoch: U64
    step: U64
    root: Hash
    environment: Hash
    nonce: Hash
    tasks: Annotated[tuple[int, ...], Seq(UInt(64), MAX_TASKS_PER_LEASE)]
    samples: U32
    """Rollouts per task; samples are numbered from 0 inside this lease."""
    max_new_tokens: U32
    duration_ms: U64
    max_bytes: U64
    """Bound on the compressed submission."""


@record(128 * KIB)
@dataclass(frozen=True)
class LeaseReply:
    lease: Annotated[bytes | None, Maybe(Blob(96 * KIB))]
    """A `lease` envelope, or nothing yet."""
    state: Word
    reason: Line
    """Why there is none, in words a person understands."""
    retry_ms: U32


@record(8 * KIB)
@dataclass(frozen=True)
class LeaseFailed:
    lease_id: Id
    reason: Note


@record(MAX_INTENT_BYTES)
@dataclass(frozen=True)
class UploadIntent:
    lease_id: Id
    length: U64
    """Compressed bytes that follow."""
    raw_length: U64
    """Bytes after decompression; compared with the zstd frame's own declaration before it is opened."""
    digest: Hash
    """BLAKE3 of the compressed bytes."""


@record(8 * KIB)
@dataclass(frozen=True)
class Receipt:
    """The coordinator's promise, given only after the ledger row is durable."""

    lease_id: Id
    digest: Hash
    index: U64
    """Ledger index of the `submission` entry."""
    leaf: Hash
    tree_size: U64
    tree_root: Hash
    time: U64


@record(96 * MIB)
@dataclass(frozen=True)
class Rollout:
    task: U64
    sample: U32
    tokens: Tokens
    """Sampled ids only, u32 little-endian, stop token included."""
    logprobs: Floats
    """One float32 per sampled token: log_softmax(logits / T) at that token, without noise."""
    finish: U8
    reward: Float
    """The reward the node claims."""
    proofs: Annotated[tuple[bytes, ...], Seq(Blob(2 + 4 * PROOF_TOPK), MAX_PROOF_CHUNKS)]
    """One TOPLOC chunk per 32 sampled tokens, over the states that produced them."""
    routes: Routes = b""
    """The experts that each token went through, where the model has any (`verifier.routes`): the whole prompt's and
    the sampled tokens' but the last."""


@record(MAX_SUBMISSION_RAW_BYTES)
@dataclass(frozen=True)
class Submission:
    """The decompressed upload. It holds no peer id: validators see it."""

    lease_id: Id
    engine: Line
    rollouts: Annotated[tuple[Rollout, ...], Seq(Sub(Rollout), MAX_ROLLOUTS_PER_LEASE)]


# --- verification -------------------------------------------------------------------------------------------------


@record(8 * KIB)
@dataclass(frozen=True)
class JobRequest:
    wait_ms: U32


@record(96 * KIB)
@dataclass(frozen=True)
class Job:
    """One submission to check. Says nothing about whose it is."""

    job_id: Id
    round: U8
    """1 for the first draw, 2 for the second, independent one."""
    lease: Annotated[bytes, Blob(64 * KIB)]
    """The lease's payload bytes (a `Lease` record), without its envelope."""
    digest: Hash
    length: U64
    raw_length: U64
    token: Id
    """Capability to fetch the bytes at `ingress`/v1/{run}/jobs/{job id}."""


@record(128 * KIB)
@dataclass(frozen=True)
class JobReply:
    job: Annotated[bytes | None, Maybe(Blob(100 * KIB))]
    """A `job` envelope signed by the coordinator, or nothing yet."""
    retry_ms: U32


@record(1 * KIB)
@dataclass(frozen=True)
class Number:
    name: Word
    value: Float


@record(4 * KIB)
@dataclass(frozen=True)
class Outcome:
    outcome: U8
    """ACCEPT, REJECT or INCONCLUSIVE."""
    reason: Word
    """A `ReasonCode`."""


@record(256 * KIB)
@dataclass(frozen=True)
class Verdict:
    """Signed by a validator. Small: what it measured is in the details, bound by hash."""

    job_id: Id
    digest: Hash
    """Of the submission judged."""
    round: U8
    outcomes: Annotated[tuple[Outcome, ...], Seq(Sub(Outcome), MAX_ROLLOUTS_PER_LEASE)]
    """One per rollout of the lease, task-major, in the order the lease names them."""
    details: Hash
    cpu_ms: U64


@record(2 * MIB)
@dataclass(frozen=True)
class RolloutDetail:
    logprobs: Floats
    """The validator's own log-probabilities; empty unless accepted."""
    reward: Float
    """The validator's own reward; 0 unless accepted."""
    numbers: Annotated[tuple[Number, ...], Seq(Sub(Number), MAX_NUMBERS)]
    digest: Annotated[bytes, Blob(16, 16)] = b""
    """Of prompt and tokens (`verifier.claims.digest_of`), so that equal rollouts count once; empty unless accepted."""


@record(8 * MIB)
@dataclass(frozen=True)
class VerdictDetails:
    rollouts: Annotated[tuple[RolloutDetail, ...], Seq(Sub(RolloutDetail), MAX_ROLLOUTS_PER_LEASE)]


# --- roles --------------------------------------------------------------------------------------------------------


@record(1 * KIB)
@dataclass(frozen=True)
class RoleGrant:
    """The root or the coordinator admits a key to `validator`, `relay` (with children) or `trainer`."""

    key: Key
    role: Word


# --- ledger -------------------------------------------------------------------------------------------------------


@record(MAX_ENVELOPE_BYTES)
@dataclass(frozen=True)
class LedgerEntry:
    """One leaf's payload; the coordinator signs the envelope (kind `entry`) around it."""

    index: U64
    incarnation: U64
    time: U64
    event: Word
    """`run.opened`, `run.updated`, `incarnation`, `grant`, `node.joined`, `policy`, `lease`, `lease.closed`,
    `submission`, `draws.opened`, `draws.revealed`, `validators`, `job`, `verdict`, `tie.lapsed`, `evidence.drop`,
    `evidence.node`, `evidence.verdict`, `relay.accused`, `batch` or `run.finished`."""
    body: Annotated[bytes, Blob(900 * KIB)]
    """The event's own record (BatchClosed, JobDrawn, LeaseClosed, ...), or empty."""
    subject: Annotated[bytes, Blob(900 * KIB)]
    """The envelope of whoever caused the event, exactly as it arrived, or empty."""


@record(1 * KIB)
@dataclass(frozen=True)
class TreeHead:
    """A promise about the whole log: signed by the coordinator as kind `tree`."""

    size: U64
    root: Hash
    time: U64


@record(1 * KIB)
@dataclass(frozen=True)
class JobDrawn:
    job_id: Id
    submission: U64
    """Ledger index of the submission."""
    validator: Key
    round: U8
    period: U64
    """The draw period whose secret made this draw: the one that was open when the submission was entered."""
    attempt: U32
    """Jobs drawn before for this submission and round: 0 for the first."""


@record(1 * KIB)
@dataclass(frozen=True)
class TieLapsed:
    submission: U64
    """Ledger index of the submission that two validators contradict each other about, and no third one settled."""


@record(1 * KIB)
@dataclass(frozen=True)
class DrawsOpened:
    """A draw period begins: whoever will judge what is submitted from here on is already decided (RULES 6)."""

    period: U64
    commitment: Hash
    """BLAKE3 of the period's secret."""
    second_draw: Float
    """Share of an active node's submissions that a second validator checks anyway."""
    probation_factor: Float
    """Times that share for a node in probation."""


@record(1 * KIB)
@dataclass(frozen=True)
class DrawsRevealed:
    """The period's secret, once nothing that was submitted in it waits for a verdict."""

    period: U64
    secret: Key


@record(64 * KIB)
@dataclass(frozen=True)
class ValidatorsPresent:
    """Whom the coordinator draws from, from here on: sorted, each once."""

    keys: Annotated[tuple[bytes, ...], Seq(Fixed(32), 1024)]


@record(1 * KIB)
@dataclass(frozen=True)
class RelayStamp:
    """Which bytes a relay says it sends; signed by its identity key (kind `relay.stamp`) with every shard."""

    publication: Id
    index: U32
    wire_hash: Hash
    """BLAKE3 of the bytes that follow in this very response."""
    time: U64


@record(16 * KIB)
@dataclass(frozen=True)
class RelayReport:
    """A member shows what a relay signed and what the origin signed; both together are proof for anyone."""

    relay: Key
    stamp: Annotated[bytes, Blob(2 * KIB)]
    """The `relay.stamp` envelope; empty when the relay sent wrong bytes under a right one (which proves nothing)."""
    shard: Annotated[bytes, Blob(4 * KIB)]
    """The origin's `shard` envelope for the same publication and index."""
    detail: Line


@record(8 * KIB)
@dataclass(frozen=True)
class DropEvidence:
    """Leases that a key gave up or sent too late hold worse rewards than those it returned, far beyond chance.

    The rewards of given-up leases are known as far as they were done again under the same nonce. Everybody with the
    archive can compute these numbers again from what the ledger held up to `upto`.
    """

    key: Key
    upto: U64
    """Entries counted: those below this index."""
    lost: U32
    returned: U32
    log_e: Float
    """Natural logarithm of the e-value against "at equal length, giving up is independent of the reward"."""
    lost_mean: Float
    """Mean reward of the given-up leases that are known, less what others had brought at about their policy step."""
    returned_mean: Float


@record(8 * KIB)
@dataclass(frozen=True)
class NodeEvidence:
    """Numbers of a key's rollouts are larger, summed up, than an honest node's ever get.

    Everybody with the archive can compute these values again from what the ledger held up to `upto`.
    """

    key: Key
    hypothesis: Word
    statistic: Word
    """Both name the row of the manifest in force."""
    upto: U64
    """Entries counted: those below this index."""
    rollouts: U32
    """Numbers summed up."""
    validators: U32
    """Whose numbers they are."""
    log_e: Float
    """Natural logarithm of the e-value that counts, whichever single validator lies (`verifier.evidence`)."""
    log_all: Float
    """The same with everybody's numbers."""
    mean: Float
    """Mean of the newest numbers, for people."""


@record(8 * KIB)
@dataclass(frozen=True)
class LeaseClosed:
    lease_id: Id
    reason: Line
    """`expired`, `failed: ...`"""


@record(1 * KIB)
@dataclass(frozen=True)
class BatchEntry:
    """One rollout of a batch: names the receipt (submission index) and the verdict it rests on."""

    submission: U64
    verdict: U64
    rollout: U32
    """Position in the submission."""


@record(900 * KIB)
@dataclass(frozen=True)
class BatchClosed:
    step: U64
    """The batch trains the policy of this step into step + 1."""
    epoch: U64
    entries: Annotated[tuple[BatchEntry, ...], Seq(Sub(BatchEntry), MAX_BATCH_ENTRIES)]
    digest: Hash
    """BLAKE3 of the batch file."""


@record(1 * KIB)
@dataclass(frozen=True)
class RunFinished:
    steps: U64
    reason: Line


# --- training -----------------------------------------------------------------------------------------------------


@record(4 * MIB)
@dataclass(frozen=True)
class TrainingRollout:
    submission: U64
    verdict: U64
    rollout: U32
    group: Id
    """Same for all rollouts of one task of one lease: advantages are computed inside a group."""
    epoch: U64
    step: U64
    """The policy that sampled it."""
    prompt: Tokens
    tokens: Tokens
    logprobs: Floats
    """The behaviour policy's log-probabilities (fp32 runs: the validator's)."""
    reward: Float
    """As recomputed by the validator, never as claimed."""


@record(1024 * MIB)
@dataclass(frozen=True)
class Batch:
    run: Hash
    epoch: U64
    step: U64
    rollouts: Annotated[tuple[TrainingRollout, ...], Seq(Sub(TrainingRollout), MAX_BATCH_ENTRIES)]
