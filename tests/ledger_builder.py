"""Makes ledgers for tests, entry by entry: real keys, envelopes, draws and links of the manifest chain.

    Chain             identities of a small run and one method per ledger event; writes to any sink
    make_manifest     a complete RunManifest

Nothing in here skips a check that production code makes, and nothing imports torch. Whole archives: `archive_builder`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blake3 import blake3

from protocol import codec, decision, draws
from protocol.chain import Chain as ManifestChain
from protocol.chain import Revocation, RunUpdate, delegate, seal_update
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.manifest import (
    MANIFEST_KIND,
    EnvironmentSpec,
    LeasePolicy,
    ModelSpec,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from protocol.records import (
    ACCEPT,
    BatchClosed,
    BatchEntry,
    DrawsOpened,
    DrawsRevealed,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LeaseFailed,
    LedgerEntry,
    Outcome,
    RoleGrant,
    RunFinished,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
)
from protocol.state import PolicyHead

START_MS = 1_760_000_000_000


def identity(name: str) -> Identity:
    """The same key for the same name, in every test."""
    return Identity.from_seed(blake3(b"test identity " + name.encode()).digest())


def make_manifest(**changes) -> RunManifest:
    manifest = RunManifest(
        name="test",
        created=START_MS,
        root=identity("root").public,
        coordinator=identity("coordinator").public,
        origin=identity("origin").public,
        coordinator_transport=identity("coordinator-transport").public,
        control=("/ip4/127.0.0.1/tcp/1",),
        ingress=("http://127.0.0.1:1",),
        profile="fp32",
        model=ModelSpec("Qwen3ForCausalLM", "float32", bytes(32), 128, ()),
        environments=(EnvironmentSpec("word", "1", bytes(32), bytes(32), "{}", "pure"),),
        sampling=SamplingSpec(1.0, 8, (1,)),
        thresholds=Thresholds(1e-4, 8, 1e-3, 1e-3, 1e-3, 200, 2000, 1e-6, 0, 1e-5, 1e-5, "test"),
        leases=LeasePolicy(4, 2, 2, 2, 4, 16, 60_000, 5_000, 0.1),
        steps=100,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody@example.org",
        privacy="test data only",
    )
    return replace(manifest, **changes)


@dataclass
class ListSink:
    """A ledger in memory, for tests of the fold alone: no signatures around entries."""

    entries: list[LedgerEntry] = field(default_factory=list)
    time: int = START_MS

    def append(self, event: str, body: object = b"", subject: bytes = b"") -> int:
        raw = body if isinstance(body, bytes) else codec.encode(body)
        self.time += 10
        self.entries.append(LedgerEntry(len(self.entries), 0, self.time, event, raw, subject))
        return len(self.entries) - 1


class Chain:
    """A run's keys and its events. Methods return the ledger index of what they appended.

    Until a test says who is present (`ready`, `validators`), a draw period is opened with the first submission and
    whoever gets a job is present.
    """

    def __init__(self, manifest: RunManifest | None = None, sink=None) -> None:
        self.manifest = manifest or make_manifest()
        self.run_id = run_id_of(self.manifest)
        raw = seal(identity("root"), MANIFEST_KIND, self.manifest, run=self.run_id, sequence=1, issued_at=START_MS).raw
        self.run = open_manifest(raw)
        self.links = ManifestChain(self.run)
        self.coordinator = "coordinator"
        self.sink = sink if sink is not None else ListSink()
        self._sequence = 1
        self._counter = 0
        self.leases: dict[bytes, Lease] = {}
        self.owners: dict[bytes, str] = {}
        self.periods = 0
        self._present: tuple[str, ...] | None = ()
        self._attempts: dict[tuple[int, int], int] = {}
        self._place_of: dict[int, tuple[int, int]] = {}
        """Submission -> its period, and how many of that were before it."""

    def sealed(self, who: str, kind: str, record: object, audience: bytes = b"") -> bytes:
        self._sequence += 1
        return seal(
            identity(who),
            kind,
            record,
            run=self.run_id,
            sequence=self._sequence,
            issued_at=START_MS,
            audience=audience,
        ).raw

    def append(self, event: str, body: object = b"", subject: bytes = b"") -> int:
        appended = self.sink.append(event, body, subject)
        return appended if isinstance(appended, int) else appended.index

    def fresh(self, size: int = 16) -> bytes:
        self._counter += 1
        return blake3(b"fresh" + self._counter.to_bytes(8, "big")).digest()[:size]

    # --- events -------------------------------------------------------------------------------------------------

    def open(self) -> int:
        return self.append("run.opened", b"", self.run.envelope.raw)

    def update(self, *, rotate: dict[str, str] | None = None, revoke: dict[str, int] | None = None, **changes) -> int:
        """The next link of the manifest chain.

        Args:
            rotate: role -> name of its new key. A new coordinator signs from this entry on.
            revoke: name -> ledger index from which it counts.
        """
        root, papers = identity("root"), []
        for role, name in (rotate or {}).items():
            self._sequence += 1
            papers.append(
                delegate(
                    root, self.run_id, identity(name).public, (role,), not_before=START_MS, expires=2 * START_MS,
                    sequence=self._sequence,
                )
            )  # fmt: skip
            changes[role] = identity(name).public
        gone = tuple(Revocation(identity(name).public, index, "a test") for name, index in (revoke or {}).items())
        self._sequence += 1
        update = RunUpdate(delegations=tuple(papers), revocations=gone, **changes)
        raw = seal_update(root, self.links, update, sequence=self._sequence, issued_at=START_MS)
        self.links = self.links.extend(raw)
        if "coordinator" in (rotate or {}):
            self.coordinator = rotate["coordinator"]
            if hasattr(self.sink, "sign_with"):
                self.sink.sign_with(identity(self.coordinator))
        return self.append("run.updated", b"", raw)

    def join(self, who: str, role: str) -> int:
        if role == "validator":
            self.append("grant", RoleGrant(identity(who).public, role))
        transport = identity(who + " transport").public
        request = JoinRequest(role, who, transport, self.fresh(), "headwater/0.1.0", (0x0100,), (), "test")
        return self.append("node.joined", b"", self.sealed(who, "join", request))

    def policy(self, step: int, root: bytes = bytes(32), epoch: int = 0) -> int:
        head = PolicyHead(epoch, step, self.fresh(), bytes(32), root)
        return self.append("policy", b"", self.sealed("origin", "head", head))

    def lease(self, who: str, step: int = 0, root: bytes = bytes(32), tasks=(0, 1), samples: int = 2, **more) -> bytes:
        lease = Lease(
            lease_id=self.fresh(),
            manifest=self.links.hash,
            epoch=0,
            step=step,
            root=root,
            environment=self.manifest.environments[0].digest,
            nonce=self.fresh(32),
            tasks=tuple(tasks),
            samples=samples,
            max_new_tokens=self.manifest.sampling.max_new_tokens,
            duration_ms=self.links.current.manifest.leases.lease_ms,
            max_bytes=1 << 20,
        )
        lease = replace(lease, **more)
        self.leases[lease.lease_id] = lease
        self.owners[lease.lease_id] = who
        self.append("lease", b"", self.sealed(self.coordinator, "lease", lease, audience=identity(who).public))
        return lease.lease_id

    def close_lease(self, lease_id: bytes, reason: str = "failed: nothing") -> int:
        """By its node's word, or `expired`: then its time passes first (not on a real `Ledger`, whose clock is its
        own)."""
        subject = b""
        if reason.startswith("failed: "):
            subject = self.sealed(self.owners[lease_id], "lease.failed", LeaseFailed(lease_id, reason[8:]))
        elif reason == "expired":
            self.sink.time += self.leases[lease_id].duration_ms
        return self.append("lease.closed", LeaseClosed(lease_id, reason), subject)

    def submit(self, lease_id: bytes, blob: bytes | None = None, raw_length: int = 100) -> int:
        if not self.periods and self._present is not None:
            self.open_draws()
        data = blob if blob is not None else lease_id * 4
        intent = UploadIntent(lease_id, len(data), raw_length, blake3(data).digest())
        index = self.append("submission", b"", self.sealed(self.owners[lease_id], "intent", intent))
        period = max(0, self.periods - 1)
        self._place_of[index] = (period, sum(place[0] == period for place in self._place_of.values()))
        return index

    def ready(self, *validators: str, rate: float = 0.1) -> None:
        """The first draw period, with these validators present."""
        self.validators(*validators)
        self.open_draws(rate)

    def validators(self, *names: str) -> int:
        self._present = None
        return self._say_present(names)

    def _say_present(self, names: tuple[str, ...]) -> int:
        return self.append("validators", ValidatorsPresent(tuple(sorted(identity(name).public for name in names))))

    @staticmethod
    def secret(period: int) -> bytes:
        return draws.keyed(blake3(b"test master").digest(), "period", period)

    def open_draws(self, rate: float = 0.1, factor: float = draws.SECOND_DRAW_IN_PROBATION) -> int:
        self.periods += 1
        number = self.periods - 1
        return self.append("draws.opened", DrawsOpened(number, blake3(self.secret(number)).digest(), rate, factor))

    def reveal(self, period: int | None = None) -> int:
        number = self.periods - 1 if period is None else period
        return self.append("draws.revealed", DrawsRevealed(number, self.secret(number)))

    def job(self, submission: int, validator: str, round_: int = 1) -> bytes:
        """A job for a validator of the test's choice, under the id and attempt a true draw has."""
        if self._present is not None and validator not in self._present:
            self._present = (*self._present, validator)
            self._say_present(self._present)
        attempt = self._attempts.get((submission, round_), 0)
        self._attempts[(submission, round_)] = attempt + 1
        period, number = self._place_of.get(submission, (max(0, self.periods - 1), 0))
        job_id = draws.job_id(self.secret(period), number, round_, attempt)
        self.append("job", JobDrawn(job_id, submission, identity(validator).public, round_, period, attempt))
        return job_id

    def draw(self, state, submission: int, round_: int = 1) -> str:
        """Whom the rule draws for the next job of a round; `state` is the fold so far. Append it with `job`."""
        held = state.submissions[submission]
        before = held.jobs.get(round_)
        chosen = draws.draw_validator(
            self.secret(held.period),
            held.intent.digest,
            held.number,
            round_,
            held.attempts.get(round_, 0),
            draws.candidates(
                state.present, decision.others(held, round_), before.validator if before is not None else None
            ),
        )
        return state.nodes[chosen].name

    def wants_second(self, state, submission: int, rate: float = 0.1) -> bool:
        held = state.submissions[submission]
        return len(state.present) > 1 and draws.wants_second(
            self.secret(held.period), held.intent.digest, held.number, rate, held.probation
        )

    def verdict(
        self, job_id: bytes, digest: bytes, validator: str, outcomes, round_: int = 1, details: bytes = bytes(32)
    ) -> int:
        records = tuple(
            o if isinstance(o, Outcome) else Outcome(o, "holds" if o == ACCEPT else "format") for o in outcomes
        )
        verdict = Verdict(job_id, digest, round_, records, details, 5)
        return self.append("verdict", b"", self.sealed(validator, "verdict", verdict))

    def batch(self, step: int, entries, digest: bytes = bytes(32)) -> int:
        return self.append("batch", BatchClosed(step, 0, tuple(BatchEntry(*item) for item in entries), digest))

    def finish(self, steps: int) -> int:
        return self.append("run.finished", RunFinished(steps, "all steps done"))

    def digest_of(self, lease_id: bytes) -> bytes:
        """Digest of the default blob `submit` sends for a lease."""
        return blake3(lease_id * 4).digest()
