"""The run manifest: what a run is, signed by its root key (RULES 1).

`run id = BLAKE3(genesis RunManifest payload)`. Everything a node, validator or auditor must agree on is in here,
so that a lease only needs to name the manifest's hash.

Not covered: later versions of the manifest (`chain`).
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Annotated

from blake3 import blake3

from protocol import codec
from protocol.codec import Fixed, Maybe, Seq, Sub, Text, UInt, record
from protocol.envelope import Envelope, open_envelope, parse
from protocol.errors import DecodeError, ManifestError, ProtocolError, ReasonCode
from protocol.evidence_rows import OF_BOUND, OF_MEASURED, EvidenceRow, check_rows
from protocol.identity import check_public_key
from protocol.limits import (
    KIB,
    MAX_ADDRESSES,
    MAX_EVIDENCE_ROWS,
    MAX_MODEL_FILE_BYTES,
    MAX_MODEL_FILES,
    MAX_ROUTES_BYTES,
    MAX_TOKENS_PER_ROLLOUT,
    PROOF_CHUNK_TOKENS,
)
from protocol.records import U16, U32, U64, Bool, Float, Hash, Key, Line, Lines, Note, Word

MANIFEST_KIND = "manifest"

PROFILES = ("fp32", "bf16")
"""Compute profiles this software knows. Part of a run's meaning: they differ in proofs, thresholds and numbers."""

_MODEL_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+)*\.(json|txt|jinja|model)")
"""Names a model file may have: one plain path component, of a kind that holds no code, no pickle and no weights.

Nodes and auditors write files under these names, and whoever opens a run chooses them: anything wider lets a stranger
write outside the model's folder or put unverified weights in the verified ones' place.
"""


@record(4 * KIB)
@dataclass(frozen=True)
class ModelFile:
    """A small file beside the weights (configuration, tokenizer), served by its hash."""

    name: Word
    """A plain file name ending in .json, .txt, .jinja or .model; each once."""
    size: U64
    digest: Hash


@record(1 * KIB)
@dataclass(frozen=True)
class Routing:
    """The experts of a mixture-of-experts model, as far as the size of a rollout's routes depends on them."""

    layers: U16
    """Layers that have experts."""
    experts: U32
    """Experts of a layer, without shared ones."""
    per_token: U16
    """Experts that a token goes through in each of these layers."""

    @property
    def bytes_per_position(self) -> int:
        """Of a rollout's routes: one byte an id up to 256 experts, else two."""
        return self.layers * self.per_token * (1 if self.experts <= 256 else 2)


@record(64 * KIB)
@dataclass(frozen=True)
class ModelSpec:
    architecture: Word
    """The Transformers class, from an allow-list (`verifier.model.ARCHITECTURES`)."""
    storage_dtype: Word
    """Dtype of published weights: `float32` or `bfloat16`."""
    layout: Hash
    """Hash of the canonical tensor layout; every publication must have it."""
    max_context: U32
    files: Annotated[tuple[ModelFile, ...], Seq(Sub(ModelFile), MAX_MODEL_FILES)]
    routing: Annotated[Routing | None, Maybe(Sub(Routing))] = None
    """None: the model has no experts, and rollouts bring no routes."""


def routes_bound(model: ModelSpec) -> int:
    """Most bytes that the routes of one rollout can have: those of the model's whole context."""
    if model.routing is None:
        return 0
    return min(MAX_ROUTES_BYTES, model.routing.bytes_per_position * min(model.max_context, MAX_TOKENS_PER_ROLLOUT))


@record(16 * KIB)
@dataclass(frozen=True)
class EnvironmentSpec:
    name: Word
    version: Word
    digest: Hash
    """`env_hash`: BLAKE3 of the canonical {name, version, source hash, configuration, scoring kind}."""
    source: Hash
    configuration: Note
    """Canonical JSON."""
    scoring: Word
    """`pure`, `sandbox` or `judge`."""


@record(4 * KIB)
@dataclass(frozen=True)
class SamplingSpec:
    temperature: Float
    max_new_tokens: U32
    stop_tokens: Annotated[tuple[int, ...], Seq(UInt(32), 16)]


@record(4 * KIB)
@dataclass(frozen=True)
class Thresholds:
    """Where honest noise ends (fp32 profile), and the measurement that says so.

    A rollout is rejected when a chunk's median relative error is above `proof_median`, when more than
    `proof_outliers` of its values are off by more than `proof_gate`, when one token's margin is above
    `token_margin`, or when a claimed log-probability is off by more than `logprob`.

    In a bf16 run `Bf16Thresholds` decide; of these only `logprob` counts, as the most a verdict's details may be off.
    """

    proof_median: Float
    proof_outliers: U32
    proof_gate: Float
    token_margin: Float
    logprob: Float
    measured_rollouts: U64
    measured_tokens: U64
    measured_proof_median: Float
    measured_proof_outliers: U32
    measured_token_margin: Float
    measured_logprob: Float
    machine: Line


@record(4 * KIB)
@dataclass(frozen=True)
class Bf16Thresholds:
    """Where honest noise ends in the bf16 profile, and the measurement that says so.

    A rollout is rejected when

        a chunk has more than `chunk_exponents` points of another exponent or sign, or a mantissa mean above
            `chunk_mantissa`; one of fewer than 32 rows, which is louder, `short_exponents` and `short_mantissa`
        it has `rollout_chunks` chunks or more and the mean of their mantissa means is above `rollout_mantissa`
        one token's margin is above `token_margin`
        its margins add up to more than token_margin + margin_mean x tokens
        one claimed log-probability is off by more than `logprob`
        the differences of its log-probabilities add up to more than logprob + logprob_mean x tokens, either way

    No bound forgives what lies under it: mantissa means and margins are added up per node (RULES 4). Measured values
    are honest maxima; `measured_margin_mean` and `measured_logprob_mean` are sums over a rollout's tokens but
    the one that is furthest off, divided by their number, or by 32 for fewer.
    """

    chunk_exponents: U32
    chunk_mantissa: Float
    rollout_mantissa: Float
    rollout_chunks: U32
    token_margin: Float
    margin_mean: Float
    logprob: Float
    logprob_mean: Float
    measured_rollouts: U64
    measured_tokens: U64
    measured_exponents: U32
    measured_chunk_mantissa: Float
    measured_rollout_mantissa: Float
    """Over rollouts of `rollout_chunks` chunks or more; 0 when there was none."""
    measured_token_margin: Float
    measured_margin_mean: Float
    measured_logprob: Float
    measured_logprob_mean: Float
    false_rejects: Float
    """No measured rollout is rejected, so at 95% at most this share of honest ones is: 3 / measured_rollouts."""
    machine: Line
    short_exponents: U32 = 0
    """0: as a whole chunk's."""
    short_mantissa: Float = 0.0

    def chunk_bounds(self, rows: int) -> tuple[int, float]:
        """The exponents and the mantissa mean that a chunk of so many rows may have."""
        whole = rows >= PROOF_CHUNK_TOKENS
        exponents = self.chunk_exponents if whole else self.short_exponents or self.chunk_exponents
        return exponents, self.chunk_mantissa if whole else self.short_mantissa or self.chunk_mantissa


@record(1 * KIB)
@dataclass(frozen=True)
class RouteThresholds:
    """By how much an expert left out may beat one that a rollout's route took, how many choices may be others than the
    verifier's own, and the measurement behind both.

    A rollout with more than not_first + not_first_rate x positions x layers such choices is rejected.
    """

    margin: Float
    """In what the router ranks experts by (`verifier.routes`)."""
    measured_rollouts: U64
    measured_choices: U64
    """Tokens times layers."""
    measured_shortfall: Float
    """Largest of an honest choice."""
    measured_scores: Float
    """Largest difference of one score between two honest ways to compute it."""
    machine: Line
    not_first: U64 = 0
    not_first_rate: Float = 1.0
    """A share of all choices; 1 sets no bound, as in manifests of before it."""
    measured_not_first: U64 = 0
    """In all honest rollouts together."""
    measured_not_first_rate: Float = 0.0
    """Share of honest choices that are not the verifier's own, as measured or as their noise gives (`route_noise`)."""


@record(4 * KIB)
@dataclass(frozen=True)
class LeasePolicy:
    samples_per_task: U32
    tasks_per_step: U32
    tasks_per_lease: U32
    max_staleness: U32
    probation_first_rollouts: U32
    """Cap of a node's first lease."""
    probation_accepted: U32
    """Accepted rollouts after which a node is active."""
    lease_ms: U64
    heartbeat_ms: U32
    second_draw: Float
    """Share of an active node's submissions that a second validator checks anyway; in probation 4 times that."""


EvidenceRows = Annotated[tuple[EvidenceRow, ...], Seq(Sub(EvidenceRow), MAX_EVIDENCE_ROWS)]


@record(256 * KIB)
@dataclass(frozen=True)
class RunManifest:
    name: Word
    created: U64
    root: Key
    coordinator: Key
    origin: Key
    coordinator_transport: Key
    """The libp2p host's transport key, delegated here by the root's signature."""
    control: Lines
    """libp2p multiaddrs of the coordinator, with /p2p/ and its transport peer id."""
    ingress: Lines
    """HTTP URLs of the coordinator."""
    profile: Word
    """What nodes compute in: `fp32` or `bf16`. Verifiers compute in float32 either way."""
    model: Annotated[ModelSpec, Sub(ModelSpec)]
    environments: Annotated[tuple[EnvironmentSpec, ...], Seq(Sub(EnvironmentSpec), 16)]
    sampling: Annotated[SamplingSpec, Sub(SamplingSpec)]
    thresholds: Annotated[Thresholds, Sub(Thresholds)]
    leases: Annotated[LeasePolicy, Sub(LeasePolicy)]
    steps: U64
    versions: Annotated[tuple[int, ...], Seq(UInt(16), 2)]
    """Lowest and highest protocol version accepted."""
    allow_private: Bool
    """Loopback and private addresses may be announced (demo, clusters)."""
    contact: Line
    privacy: Note
    """Who may read prompts and rollouts, and for how long."""
    evidence: EvidenceRows = ()
    """What is summed up over a node's rollouts; each statistic once."""
    bf16: Annotated[Bf16Thresholds | None, Maybe(Sub(Bf16Thresholds))] = None
    """Of a run whose profile is `bf16`, which must have it."""
    routes: Annotated[RouteThresholds | None, Maybe(Sub(RouteThresholds))] = None
    """Of a run whose model has experts, which must have it."""


@dataclass(frozen=True)
class Run:
    """A manifest with its id and the envelope that proves it."""

    id: bytes
    manifest: RunManifest
    envelope: Envelope
    earlier_origins: tuple[bytes, ...] = ()
    """Keys the origin had before and nobody revoked, the newest first: what they signed in their time holds."""
    revoked_origins: tuple[bytes, ...] = ()
    """Those that were revoked. What they signed counts only where something else vouches for it: the ledger's entry of
    its root, or this machine's own disk."""

    @property
    def origins(self) -> tuple[bytes, ...]:
        """Keys whose signatures count as the origin's, the present one first."""
        return (self.manifest.origin, *self.earlier_origins)


def run_id_of(manifest: RunManifest) -> bytes:
    return blake3(codec.encode(manifest)).digest()


def check_files(model: ModelSpec) -> None:
    names = [file.name for file in model.files]
    for file in model.files:
        if not _MODEL_FILE.fullmatch(file.name):
            raise ManifestError(
                f"the manifest names the model file {file.name!r}, which is no plain name of a configuration or "
                "tokenizer file; whoever opened this run is not to be trusted",
                ReasonCode.MALFORMED,
            )
        if file.size > MAX_MODEL_FILE_BYTES:
            raise ManifestError(f"the model file {file.name!r} is over its bound", ReasonCode.OVERSIZE)
    if len({name.casefold() for name in names}) != len(names):
        raise ManifestError("the manifest names one model file twice", ReasonCode.MALFORMED)


def check_routes(model: ModelSpec, routes: RouteThresholds | None) -> None:
    """Raise ManifestError unless a model with experts, and only one, has a margin, and both can be checked by."""
    routing = model.routing
    if (routing is None) != (routes is None):
        raise ManifestError("experts and the margin of their routes come together or not at all", ReasonCode.MALFORMED)
    if routing is not None and not (routing.layers and 1 <= routing.per_token <= routing.experts <= 1 << 16):
        raise ManifestError("the manifest names experts that no token can go through", ReasonCode.MALFORMED)
    if routes is not None and routes.margin < 0:
        raise ManifestError("a route margin below 0 refuses what routers choose", ReasonCode.MALFORMED)
    if routes is not None and not 0 <= routes.not_first_rate <= 1:
        raise ManifestError("the share of choices that may be others is no share", ReasonCode.MALFORMED)


def check_evidence(manifest: RunManifest) -> None:
    """Raise ManifestError unless the manifest's rows can be summed up by and suspend nobody who passes its checks."""
    bf16 = manifest.bf16 if manifest.profile == "bf16" else None
    least = least_honest(manifest.thresholds if bf16 is None else bf16)
    least["route_rate"] = 1.0 if manifest.routes is None else manifest.routes.not_first_rate
    check_rows(manifest.evidence, manifest.profile, least)


def least_honest(bounds: Thresholds | Bf16Thresholds) -> dict[str, float]:
    """Statistic -> the smallest honest mean that a row beside these thresholds may name (`evidence_rows`)."""
    if isinstance(bounds, Bf16Thresholds):
        return {"mantissa_mean": OF_BOUND * bounds.rollout_mantissa}
    return {"proof_median": max(OF_BOUND * bounds.proof_median, OF_MEASURED * bounds.measured_proof_median)}


def open_manifest(raw: bytes, expect: bytes | None = None) -> Run:
    """Check a genesis manifest envelope and return the run it opens.

    Args:
        expect: the run id the caller came with (share code, file); None trusts the first manifest seen.

    Raises:
        ManifestError: not signed by its own root, another run's, or it names files that may not be written.
    """
    try:
        envelope = parse(raw)
        run = blake3(envelope.payload).digest()
        if expect is not None and run != expect:
            raise ManifestError("this manifest belongs to another run than the one asked for", ReasonCode.WRONG_RUN)
        manifest = envelope.record(RunManifest)
        open_envelope(raw, run=run, kind=MANIFEST_KIND, signer=manifest.root)
        for key in (manifest.coordinator, manifest.origin, manifest.coordinator_transport):
            check_public_key(key)
        check_files(manifest.model)
        if manifest.profile == "bf16" and manifest.bf16 is None:
            raise ManifestError("a bf16 run without bf16 thresholds: nothing in it could be judged")
        check_evidence(manifest)
        check_routes(manifest.model, manifest.routes)
    except ManifestError:
        raise
    except ProtocolError as exc:
        raise ManifestError(f"the run manifest does not hold: {exc}", exc.code) from exc
    return Run(run, manifest, envelope)


@record(8 * KIB)
@dataclass(frozen=True)
class ShareCode:
    """What a stranger needs to join: which run, whom to call, where."""

    run: Hash
    transport: Annotated[bytes, Fixed(32)]
    addresses: Annotated[tuple[str, ...], Seq(Text(512), MAX_ADDRESSES)]


_CODE_PREFIX = "hw1"
_CHECK_BYTES = 4


def format_share_code(code: ShareCode) -> str:
    """Base32 with a checksum, lower case, prefix `hw1`."""
    raw = codec.encode(code)
    raw += blake3(raw).digest()[:_CHECK_BYTES]
    return _CODE_PREFIX + base64.b32encode(raw).decode("ascii").rstrip("=").lower()


def parse_share_code(text: str) -> ShareCode:
    """The inverse of `format_share_code`. Raises ManifestError with what is wrong."""
    word = "".join(text.split()).lower()
    if not word.startswith(_CODE_PREFIX) or len(word) > 16 * KIB:
        raise ManifestError(f"a share code starts with {_CODE_PREFIX}")
    body = word[len(_CODE_PREFIX) :].upper()
    try:
        raw = base64.b32decode(body + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError) as exc:
        raise ManifestError("the share code has a character that does not belong; copy it again") from exc
    data, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if blake3(data).digest()[:_CHECK_BYTES] != check:
        raise ManifestError("the share code's checksum does not match; it was cut or mistyped")
    try:
        return codec.decode(ShareCode, data)
    except DecodeError as exc:
        raise ManifestError(f"the share code does not hold: {exc}") from exc
