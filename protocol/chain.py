"""The manifest chain: how a run's rules change after it was opened (RULES 1).

    genesis manifest  <-  RunUpdate 1  <-  RunUpdate 2  <- ...        each signed by the run's root key

An update names its predecessor by hash, so nobody can leave one out. `run id` stays the genesis manifest's hash; the
chain's hash (BLAKE3 of the newest update's payload, the run id while there is none) says which rules hold, and every
lease names it. A new online key comes with a `Delegation`, which the root signs by itself, so that it can be shown
without the update. What was rotated out without being revoked still counts for what it signed while it was in use.

`Chain.walk` and `Chain.extend` are total: hostile bytes raise ManifestError and nothing else.

Not covered: when updates are written and picked up (`trainer`), how members fetch them (`node`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from blake3 import blake3

from protocol.codec import Blob, Fixed, Maybe, Seq, Sub, Text, record
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import ManifestError, ProtocolError, ReasonCode
from protocol.identity import Identity, check_public_key
from protocol.limits import KIB, MAX_ENVELOPE_BYTES, MIB
from protocol.manifest import (
    Bf16Thresholds,
    EvidenceRows,
    LeasePolicy,
    RouteThresholds,
    Run,
    RunManifest,
    Thresholds,
    check_evidence,
    check_routes,
    open_manifest,
)
from protocol.records import NO_HASH, U16, U64, Bool, Hash, Key, Line, Lines

UPDATE_KIND = "manifest.update"
DELEGATION_KIND = "delegation"
ONLINE_ROLES = ("coordinator", "origin", "coordinator_transport")
"""Roles that have exactly one key at a time; their words are the manifest's own field names."""

MAX_LINKS = 4096
"""Longest chain. Whoever joins walks all of it, and checks one signature a link."""

MAX_CHAIN_BYTES = 1 * MIB
"""Largest answer to `updates`, held in memory by whoever asks."""

_LENGTH = struct.Struct(">I")


@record(1 * KIB)
@dataclass(frozen=True)
class Delegation:
    """The root lets a key act for the run: kind `delegation`, signed by the root."""

    run: Hash
    key: Key
    roles: Annotated[tuple[str, ...], Seq(Text(64), 8)]
    """Of `coordinator`, `origin`, `coordinator_transport`."""
    not_before: U64
    expires: U64
    """Milliseconds; ledger time decides. After it, the root must delegate again."""
    sequence: U64


@record(1 * KIB)
@dataclass(frozen=True)
class Revocation:
    """What `key` signs from ledger entry `index` on counts for nothing."""

    key: Key
    index: U64
    reason: Line


@record(60 * KIB)
@dataclass(frozen=True)
class RunUpdate:
    """One link of the chain. A field that is nil (or empty, or 0) leaves things as they are."""

    previous: Hash = NO_HASH
    """BLAKE3 of the update before, the run id for the first."""
    number: U64 = 0
    """1 for the first update."""
    coordinator: Annotated[bytes | None, Maybe(Fixed(32))] = None
    origin: Annotated[bytes | None, Maybe(Fixed(32))] = None
    coordinator_transport: Annotated[bytes | None, Maybe(Fixed(32))] = None
    delegations: Annotated[tuple[bytes, ...], Seq(Blob(2 * KIB), 8)] = ()
    """`delegation` envelopes: one for each new key above, or to prolong a key in use."""
    revocations: Annotated[tuple[Revocation, ...], Seq(Sub(Revocation), 64)] = ()
    control: Lines = ()
    ingress: Lines = ()
    thresholds: Annotated[Thresholds | None, Maybe(Sub(Thresholds))] = None
    leases: Annotated[LeasePolicy | None, Maybe(Sub(LeasePolicy))] = None
    lowest_version: U16 = 0
    note: Line = ""
    """Why, for people."""
    evidence: EvidenceRows = ()
    """All rows from here on."""
    routes: Annotated[RouteThresholds | None, Maybe(Sub(RouteThresholds))] = None
    bf16: Annotated[Bf16Thresholds | None, Maybe(Sub(Bf16Thresholds))] = None
    no_evidence: Bool = False
    """No rows from here on: what they condemned nodes for was no misdeed, or nobody measures it any more."""


@dataclass(frozen=True)
class Link:
    """One update that holds, and the manifest from it on."""

    digest: bytes
    update: RunUpdate
    run: Run
    raw: bytes


@dataclass(frozen=True)
class Chain:
    """A genesis manifest and the updates that follow it, all checked. Immutable: `extend` returns a longer one."""

    genesis: Run
    links: tuple[Link, ...] = ()
    delegations: tuple[Delegation, ...] = ()
    """In order; a later one for the same key replaces the earlier."""
    revocations: tuple[Revocation, ...] = ()
    _sequence: int = field(default=0, repr=False)

    @staticmethod
    def walk(genesis_raw: bytes, updates_raws: Iterable[bytes] = (), expect: bytes | None = None) -> Chain:
        """Check a whole chain.

        Args:
            genesis_raw: the `manifest` envelope.
            updates_raws: `manifest.update` envelopes from the first on.
            expect: the run id the caller came with; None trusts the first manifest seen.

        Raises:
            ManifestError: the manifest or a link does not hold, or they are too many.
        """
        chain = Chain(open_manifest(genesis_raw, expect))
        for raw in updates_raws:
            chain = chain.extend(raw)
        return chain

    @property
    def hash(self) -> bytes:
        """Names the rules that hold now; what a lease's `manifest` field must be."""
        return self.links[-1].digest if self.links else self.genesis.id

    @property
    def current(self) -> Run:
        """The run with its manifest as it is now; same id, same genesis envelope."""
        return self.links[-1].run if self.links else self.genesis

    @property
    def updates(self) -> list[bytes]:
        """The updates' envelopes, from the first on."""
        return [link.raw for link in self.links]

    def at(self, digest: bytes) -> Run:
        """The run as it was under a chain hash.

        Raises:
            ManifestError: no link of this chain has that hash.
        """
        for link in reversed(self.links):
            if link.digest == digest:
                return link.run
        if digest == self.genesis.id:
            return self.genesis
        raise ManifestError(
            f"no version {digest.hex()[:16]} of the manifest is in this chain of {len(self.links)} updates; fetch the "
            "newer ones first",
            ReasonCode.WRONG_RUN,
        )

    def holds(self, digest: bytes) -> bool:
        """Whether `at` knows this hash."""
        return digest == self.genesis.id or any(link.digest == digest for link in self.links)

    def keys(self, role: str) -> tuple[bytes, ...]:
        """Every key that ever had one of `ONLINE_ROLES`, the newest first, each once."""
        runs = [self.genesis, *(link.run for link in self.links)]
        return tuple(dict.fromkeys(getattr(run.manifest, role) for run in reversed(runs)))

    def revoked(self, key: bytes, index: int) -> bool:
        """Whether what `key` signs at ledger entry `index` counts for nothing."""
        return any(item.key == key and index >= item.index for item in self.revocations)

    def keys_at(self, role: str, index: int) -> tuple[bytes, ...]:
        """The same without those that were revoked at ledger entry `index`: whose signatures count there."""
        return tuple(key for key in self.keys(role) if not self.revoked(key, index))

    def unrevoked(self, role: str) -> tuple[bytes, ...]:
        """The same without all that were revoked: for who has no ledger index to hold a signature against."""
        gone = {item.key for item in self.revocations}
        return tuple(key for key in self.keys(role) if key not in gone)

    def delegation(self, key: bytes) -> Delegation | None:
        """The newest delegation of a key; None for the genesis manifest's keys, which the manifest itself binds."""
        return next((item for item in reversed(self.delegations) if item.key == key), None)

    def lapsed(self, key: bytes, now: int) -> bool:
        """Whether a key's delegation has not begun or is over at `now` (ledger or corrected time, ms)."""
        found = self.delegation(key)
        return found is not None and not found.not_before <= now <= found.expires

    def untimely(self, since: int, now: int) -> Delegation | None:
        """The first delegation behind the first `since` ones that has not begun or is over at `now` (ms)."""
        found = (one for one in self.delegations[since:] if not one.not_before <= now <= one.expires)
        return next(found, None)

    def extend(self, raw: bytes) -> Chain:
        """The chain with one more link.

        Raises:
            ManifestError: it does not continue this chain, is not the root's, or would leave the run without a key.
        """
        try:
            envelope = open_envelope(raw, run=self.genesis.id, kind=UPDATE_KIND, signer=self.genesis.manifest.root)
            return self._extend(envelope, envelope.record(RunUpdate))
        except ManifestError:
            raise
        except ProtocolError as exc:
            raise ManifestError(f"the manifest's update {len(self.links) + 1} does not hold: {exc}", exc.code) from exc

    def _extend(self, envelope: Envelope, update: RunUpdate) -> Chain:
        number = len(self.links) + 1
        if number > MAX_LINKS:
            raise ManifestError(f"a chain of more than {MAX_LINKS} updates", ReasonCode.OVERSIZE)
        if update.number != number or update.previous != self.hash:
            raise ManifestError(f"update {update.number} does not follow update {number - 1} of this chain")
        if envelope.sequence <= self._sequence:
            raise ManifestError(
                f"update {number} has no higher sequence than the one before", ReasonCode.STALE_SEQUENCE
            )
        delegated = [self._delegation(one) for one in update.delegations]
        before = self.current.manifest
        changed = {role: getattr(update, role) for role in ONLINE_ROLES if getattr(update, role) is not None}
        for role, key in changed.items():
            check_public_key(key)
            if not any(one.key == key and role in one.roles for one in delegated):
                raise ManifestError(f"update {number} names a new {role} key without the root's delegation for it")
        more = {name: value for name, value in _rules(update, before).items() if value}
        manifest = replace(before, **changed, **more)
        if update.no_evidence:
            manifest = replace(manifest, evidence=())
        check_evidence(manifest)
        revocations = (*self.revocations, *update.revocations)
        gone = {item.key for item in revocations}
        for role in ONLINE_ROLES:
            if getattr(manifest, role) in gone:
                raise ManifestError(f"update {number} leaves the run with a revoked {role} key; name a new one in it")
        if manifest.root in gone:
            raise ManifestError("the root key can't be revoked: a run whose root is lost is over; open a new one")
        had = [*self.current.origins, *self.current.revoked_origins]
        earlier = tuple(key for key in had if key != manifest.origin and key not in gone)
        revoked = tuple(key for key in had if key in gone)
        run = Run(self.genesis.id, manifest, self.genesis.envelope, earlier, revoked)
        link = Link(blake3(envelope.payload).digest(), update, run, envelope.raw)
        return Chain(self.genesis, (*self.links, link), (*self.delegations, *delegated), revocations, envelope.sequence)

    def _delegation(self, raw: bytes) -> Delegation:
        envelope = open_envelope(raw, run=self.genesis.id, kind=DELEGATION_KIND, signer=self.genesis.manifest.root)
        found = envelope.record(Delegation)
        if found.run != self.genesis.id or found.sequence != envelope.sequence:
            raise ManifestError("a delegation that belongs to another run, or was renumbered", ReasonCode.WRONG_RUN)
        if not found.roles or not set(found.roles) <= set(ONLINE_ROLES) or found.not_before >= found.expires:
            raise ManifestError("a delegation for no role, for a role that can't be delegated, or for no time")
        check_public_key(found.key)
        return found


def _rules(update: RunUpdate, before: RunManifest) -> dict[str, Any]:
    """What an update changes besides keys; empty values change nothing."""
    versions: tuple[int, ...] = ()
    if update.lowest_version:
        lowest, highest = before.versions
        if not lowest <= update.lowest_version <= highest:
            raise ManifestError(f"protocol version {update.lowest_version:#06x} is not between the run's own bounds")
        versions = (update.lowest_version, highest)
    if update.leases is not None and not (
        update.leases.samples_per_task and update.leases.tasks_per_step and update.leases.tasks_per_lease
    ):
        raise ManifestError("a lease policy that leases nothing")
    if update.bf16 is not None and before.profile != "bf16":
        raise ManifestError("bf16 thresholds for a run of another profile, which would decide nothing")
    if update.no_evidence and update.evidence:
        raise ManifestError("an update that withdraws all rows of evidence and brings some", ReasonCode.EVIDENCE_BOUNDS)
    if update.routes is not None:
        check_routes(before.model, update.routes)
    return {
        "control": update.control,
        "ingress": update.ingress,
        "thresholds": update.thresholds,
        "leases": update.leases,
        "versions": versions,
        "evidence": update.evidence,
        "routes": update.routes,
        "bf16": update.bf16,
    }


# --- making ---------------------------------------------------------------------------------------------------------


def delegate(
    root: Identity, run: bytes, key: bytes, roles: tuple[str, ...], *, not_before: int, expires: int, sequence: int
) -> bytes:
    """A `delegation` envelope. Times in milliseconds; `sequence` rises per root key and kind."""
    record_ = Delegation(run, key, roles, not_before, expires, sequence)
    return seal(
        root, DELEGATION_KIND, record_, run=run, sequence=sequence, issued_at=not_before,
        lifetime_ms=max(0, expires - not_before),
    ).raw  # fmt: skip


def seal_update(root: Identity, chain: Chain, update: RunUpdate, *, sequence: int, issued_at: int) -> bytes:
    """Sign the next link; `previous` and `number` are filled in here.

    Raises:
        ManifestError: the link would not hold, so nobody would take it.
    """
    whole = replace(update, previous=chain.hash, number=len(chain.links) + 1)
    raw = seal(root, UPDATE_KIND, whole, run=chain.genesis.id, sequence=sequence, issued_at=issued_at).raw
    chain.extend(raw)
    return raw


# --- travelling -----------------------------------------------------------------------------------------------------


def pack_updates(raws: Iterable[bytes]) -> bytes:
    """The answer to `GET /v1/{run}/updates`: u32 length, envelope, repeated."""
    return b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws)


def split_updates(data: bytes) -> list[bytes]:
    """The inverse of `pack_updates`.

    Raises:
        ManifestError: over the bound, cut short, or too many.
    """
    if len(data) > MAX_CHAIN_BYTES:
        raise ManifestError(f"{len(data)} bytes of updates, over the bound", ReasonCode.OVERSIZE)
    out: list[bytes] = []
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data) or len(out) >= MAX_LINKS:
            raise ManifestError("the updates are cut short, or more than a chain may have")
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if size > MAX_ENVELOPE_BYTES or at + size > len(data):
            raise ManifestError("an update's length points behind the end", ReasonCode.LENGTH_MISMATCH)
        out.append(data[at : at + size])
        at += size
    return out
