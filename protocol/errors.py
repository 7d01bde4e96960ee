"""The error tree of the protocol package.

    HeadwaterError
    ├── UsageError            the person who typed the command must change something
    └── ProtocolError         what arrived does not hold
        ├── DecodeError       bytes that are no record of the expected shape, or over a bound
        ├── EnvelopeError     a signature, run, audience, sequence or time that does not hold
        ├── ManifestError     a run manifest or share code that does not hold
        ├── LedgerError       a ledger that contradicts itself, or a second writer
        ├── TransportError    a peer, host process or deadline that was not met
        └── EngineError       an engine that refused or failed a request

Every error carries `code`, a word from `ReasonCode`, so that programs never parse text.
"""

from __future__ import annotations

from enum import StrEnum


class ReasonCode(StrEnum):
    """The closed list of reasons. Removing or renaming one breaks every stored verdict that names it."""

    # arrival
    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    BAD_SIGNATURE = "bad-signature"
    WRONG_RUN = "wrong-run"
    WRONG_KIND = "wrong-kind"
    WRONG_AUDIENCE = "wrong-audience"
    STALE_SEQUENCE = "stale-sequence"
    EXPIRED = "expired"
    UNSUPPORTED_VERSION = "unsupported-version"
    UPGRADE_REQUIRED = "upgrade-required"
    NOT_JOINED = "not-joined"
    NOT_GRANTED = "not-granted"
    SUSPENDED = "suspended"
    UNKNOWN_LEASE = "unknown-lease"
    NOT_OWNER = "not-owner"
    LEASE_CLOSED = "lease-closed"
    LENGTH_MISMATCH = "length-mismatch"
    HASH_MISMATCH = "hash-mismatch"
    CONFLICTING_SUBMISSION = "conflicting-submission"
    BUSY = "busy"
    TOO_SLOW = "too-slow"
    UNKNOWN_JOB = "unknown-job"
    UNREACHABLE = "unreachable"
    DEADLINE = "deadline"
    QUOTA = "quota"
    KEY_REVOKED = "key-revoked"
    EVIDENCE_UNKNOWN = "evidence-unknown"
    EVIDENCE_BOUNDS = "evidence-bounds"
    EVIDENCE_TOO_STRICT = "evidence-too-strict"
    USAGE = "usage"
    INTERNAL = "internal"
    # verdicts: accept
    HOLDS = "holds"
    # verdicts: reject
    FORMAT = "format"
    WRONG_TASK = "wrong-task"
    TOKEN_RANGE = "token-range"  # noqa: S105
    TERMINATION = "termination"
    PROOF_MALFORMED = "proof-malformed"
    PROOF_MISMATCH = "proof-mismatch"
    TOKEN_NOT_FORCED = "token-not-forced"  # noqa: S105
    LOGPROB_MISMATCH = "logprob-mismatch"
    ROUTES_MALFORMED = "routes-malformed"
    ROUTES_FORGED = "routes-forged"
    REWARD_MISMATCH = "reward-mismatch"
    # evidence about a member
    DROPPED_RESULTS = "dropped-results"
    POOLED_EVIDENCE = "pooled-evidence"
    RELAY_LIED = "relay-lied"
    VALIDATOR_WRONG = "validator-wrong"
    # verdicts: inconclusive
    REWARD_UNDECIDED = "reward-undecided"
    VALIDATOR_FAILED = "validator-failed"
    # ledger and archive
    LEDGER_BROKEN = "ledger-broken"
    LEDGER_LOCKED = "ledger-locked"
    SHARD_MISMATCH = "shard-mismatch"
    RECORD_MISSING = "record-missing"
    VERDICT_WRONG = "verdict-wrong"
    BATCH_WRONG = "batch-wrong"
    DRAW_WRONG = "draw-wrong"
    DRAW_NOT_REVEALED = "draw-not-revealed"
    HEADS_CONFLICT = "heads-conflict"
    PROMISE_BROKEN = "promise-broken"
    MANIFEST_FORKED = "manifest-forked"
    ORIGIN_FORKED = "origin-forked"
    ACCUSATION_FALSE = "accusation-false"
    # engine
    ENGINE_REFUSED = "engine-refused"
    ENGINE_FAILED = "engine-failed"
    WRONG_POLICY = "wrong-policy"


class HeadwaterError(Exception):
    """Root of every error this project raises on purpose."""

    code: ReasonCode = ReasonCode.INTERNAL

    def __init__(self, message: str, code: ReasonCode | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class UsageError(HeadwaterError):
    """A command, path or configuration that the person must change. The message names cause, fix and who."""

    code = ReasonCode.USAGE


class ProtocolError(HeadwaterError):
    """Something received that does not hold."""

    code = ReasonCode.MALFORMED


class DecodeError(ProtocolError):
    """Bytes that are no record of the expected shape, or over one of its bounds."""


class EnvelopeError(ProtocolError):
    """A signature, run, audience, sequence or time that does not hold."""

    code = ReasonCode.BAD_SIGNATURE


class ManifestError(ProtocolError):
    """A run manifest or share code that does not hold."""


class LedgerError(ProtocolError):
    """A ledger that contradicts itself, or a second writer."""

    code = ReasonCode.LEDGER_BROKEN


class TransportError(ProtocolError):
    """A peer, host process or deadline that was not met."""

    code = ReasonCode.UNREACHABLE


class EngineError(ProtocolError):
    """An engine that refused or failed a request."""

    code = ReasonCode.ENGINE_FAILED
