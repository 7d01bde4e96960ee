"""A coordinator without its doors: the real services over a real ledger, called directly, by members with real keys.

    desk = Desk(tmp_path / "run")          makes the run, or opens it again
    lease = desk.lease("node")             joins whoever is not there yet
    index = desk.upload(lease)
    await desk.judge(index, ACCEPT)        the validator that was drawn answers

Not covered: libp2p, HTTP, processes (`scripted_swarm`).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zstandard
from blake3 import blake3

from protocol import codec
from protocol.clock import Clock
from protocol.control import Member
from protocol.envelope import parse, seal
from protocol.evidence_rows import EvidenceRow
from protocol.identity import Identity, load_identity
from protocol.records import (
    ACCEPT,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LeaseFailed,
    LeaseRequest,
    Outcome,
    RolloutDetail,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from protocol.state import RunState
from shardcast.records import Head
from tests.scripted_swarm import NOISE, SMALL, actor_identity, submission_of
from tests.settled_chance import make_run
from trainer import batches, config
from trainer.coordinator import Coordinator
from trainer.members import Session
from verifier.archive import RunArchive
from verifier.draws import Draws
from verifier.report import Report

Rewards = Callable[[int], float]
"""Rollout -> the reward its node claims."""
Spoil = Callable[[RolloutDetail], RolloutDetail]


class Desk:
    """One coordinator object; nothing listens, nothing runs beside the test."""

    def __init__(
        self,
        run_dir: Path,
        steps: int = 9,
        validators: int = 2,
        evidence: Sequence[EvidenceRow] = (),
        **overrides: object,
    ) -> None:
        self.run_dir = run_dir
        if not (run_dir / "run.toml").exists():
            values = SMALL | {key.replace("__", "."): value for key, value in overrides.items()}
            admitted = [self.identity_of(f"validator-{i}").public for i in range(validators)]
            make_run(run_dir, steps=steps, thresholds=NOISE, validators=admitted, overrides=values, evidence=evidence)
        self.seconds = 1000.0
        """The monotonic clock of everything here. It moves when a test moves it: a slow machine changes nothing."""
        self.clock_ahead_ms = 0
        """Ahead of the machine's clock, from the next `open` on."""
        self.open()

    def open(self) -> None:
        """Begin as `trainer serve` does, up to opening its doors."""
        with contextlib.redirect_stderr(io.StringIO()):
            self.coordinator = Coordinator(config.load(self.run_dir), self._clock())
        self.book = self.coordinator.book
        self.judging = self.coordinator.judging
        self._stop_the_clocks()
        for role in ("validator", "relay"):
            self.book.grant(role, self.coordinator.config.grants.keys(role))
        self.judging.drawing.keep_in_step()

    def _clock(self) -> Clock:
        ahead = self.clock_ahead_ms / 1000
        return Clock(wall=lambda: time.time() + ahead, monotonic=self.monotonic)

    def monotonic(self) -> float:
        return self.seconds

    def _stop_the_clocks(self) -> None:
        coordinator, judging = self.coordinator, self.judging
        for part in (self.book, coordinator.members, judging, judging.drops, judging.evidence, coordinator.reports):
            assert callable(part.monotonic)
            part.monotonic = self.monotonic

    async def audit_draws(self) -> list[str]:
        await self.book.commit()
        self.book.seal(self.run_dir / "ledger")
        return wrong_draws(self.run_dir)

    def close(self) -> None:
        self.book.close()

    @property
    def state(self) -> RunState:
        return self.book.state

    def identity_of(self, name: str) -> Identity:
        return actor_identity(name)

    def sealed(self, name: str, kind: str, record: object) -> bytes:
        number = self._next = getattr(self, "_next", self.book.ledger.size * 100) + 1
        return seal(
            self.identity_of(name), kind, record, run=self.book.run.id, sequence=number, issued_at=self.book.now_ms()
        ).raw

    def join(self, name: str, role: str = "inference") -> bytes:
        key = self.identity_of(name).public
        if key not in self.state.nodes:
            request = JoinRequest(role, name, self.identity_of(name + " t").public, bytes(16), "", (0x0100,), (), "")
            self.book.append("node.joined", subject=self.sealed(name, "join", request))
        self.here(name)
        return key

    def here(self, name: str, present: bool = True) -> None:
        """Heard from just now, or not for a long time."""
        members = self.coordinator.members
        members.sessions[self.identity_of(name).public] = Session(members.monotonic() if present else -1e9)

    def publish(self, step: int) -> None:
        origin = load_identity(self.run_dir / "keys" / "origin.pem")
        head = Head(0, step, bytes(16), bytes(32), blake3(b"root %d" % step).digest(), 0)
        raw = seal(origin, "head", head, run=self.book.run.id, sequence=step + 1, issued_at=1).raw
        self.book.append("policy", subject=raw)

    def decide(self, name: str):
        node = self.state.nodes[self.join(name)]
        return self.coordinator.leasing._decide(node, LeaseRequest(64, 0, 0, 0))

    def lease(self, name: str) -> Lease:
        decision = self.decide(name)
        assert decision.lease is not None, decision.reason
        node = self.state.nodes[self.identity_of(name).public]
        self.book.append("lease", subject=self.coordinator.leasing._seal(node, decision.lease).raw)
        return decision.lease

    def lose(self, lease: Lease) -> None:
        owner = self.state.nodes[self.state.leases[lease.lease_id].owner].name
        word = self.sealed(owner, "lease.failed", LeaseFailed(lease.lease_id, "no reason"))
        self.book.append("lease.closed", LeaseClosed(lease.lease_id, "failed: no reason"), word)

    def upload(self, lease: Lease, reward: Rewards | None = None) -> int:
        """Put the bytes on the disk and enter them; returns the submission's ledger index."""
        owner = self.state.nodes[self.state.leases[lease.lease_id].owner].name
        blob = submission_of(lease, reward=reward)
        path = self.coordinator.files.submission(lease.lease_id)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(blob)
        size = zstandard.frame_content_size(blob)
        intent = UploadIntent(lease.lease_id, len(blob), size, blake3(blob).digest())
        return self.judging.enter(self.sealed(owner, "intent", intent))

    def open_jobs(self, index: int) -> list[JobDrawn]:
        submission = self.state.submissions[index]
        return [submission.jobs[number] for number in submission.open_rounds]

    async def judge(self, index: int, outcome: int = ACCEPT, spoil: Spoil = lambda detail: detail) -> JobDrawn:
        """The validator of the submission's oldest open job answers. Returns the job.

        Args:
            spoil: makes a detail of an accepted rollout another one than the upload claims.
        """
        job = self.open_jobs(index)[0]
        submission = self.state.submissions[index]
        count = len(submission.outcomes)
        details = [RolloutDetail(b"", 0.0, ())] * count
        if outcome == ACCEPT:
            claimed = batches.read_submission(self.coordinator.files, submission).rollouts
            details = [spoil(RolloutDetail(one.logprobs, one.reward, ())) for one in claimed]
        raw = codec.encode(VerdictDetails(tuple(details)))
        reason = ("holds", "proof-mismatch", "reward-undecided")[outcome]
        stated = (Outcome(outcome, reason),) * count
        verdict = Verdict(job.job_id, submission.intent.digest, job.round, stated, blake3(raw).digest(), 1)
        name = self.state.nodes[job.validator].name
        envelope = parse(self.sealed(name, "verdict", verdict))
        await self.judging.verdict(Member(envelope, b""), verdict, raw)
        return job

    def tick(self) -> None:
        """What the coordinator does once a second."""
        self.judging.tick()

    def events(self) -> list[str]:
        return [stored.entry().event for stored in self.book.ledger.entries()]

    def news(self) -> str:
        return "\n".join(str(event["text"]) for event in self.coordinator.news.events)


def wrong_draws(run_dir: Path) -> list[str]:
    """What an auditor finds wrong with the draws of a sealed ledger."""
    draws, report = Draws(), Report()
    draws.fold(RunArchive.open(run_dir))
    draws.check(report)
    return [str(failure) for failure in report.failures]
