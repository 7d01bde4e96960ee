"""A real coordinator process and scripted members for its tests: real keys, libp2p, HTTP and ledger, no model.

    Swarm    makes a run directory, starts and kills `trainer serve`, plays the origin (signs heads)
    Actor    one member: joins, heartbeats, takes leases and jobs, uploads, judges as it is told

Several actors share one libp2p host process: each signs with its own identity and names that transport key.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import zstandard
from blake3 import blake3

from protocol import codec
from protocol.control import Clock, ControlClient
from protocol.envelope import open_envelope, seal
from protocol.files import write_atomic
from protocol.host import HostProcess
from protocol.identity import Identity, load_identity
from protocol.manifest import Run, Thresholds
from protocol.records import (
    ACCEPT,
    REJECT,
    Ack,
    Heartbeat,
    HeartbeatReply,
    Job,
    JobReply,
    JobRequest,
    JoinReply,
    JoinRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    Outcome,
    Receipt,
    Rollout,
    RolloutDetail,
    Submission,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from protocol.sequences import Sequences
from shardcast.records import Head
from trainer.init import make_run

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")
SMALL = {
    "leases.samples_per_task": 4,
    "leases.tasks_per_step": 2,
    "leases.tasks_per_lease": 1,
    "leases.probation_first_rollouts": 2,
    "leases.probation_accepted": 4,
    "leases.second_draw": 0.0,
    "coordinator.linger_s": 4.0,
    "coordinator.drain_s": 2.0,
}


@dataclass
class Swarm:
    """One run and its coordinator process."""

    run_dir: Path
    run: Run
    steps: int
    host: HostProcess | None = None
    http: aiohttp.ClientSession | None = None
    process: subprocess.Popen[bytes] | None = None
    actors: list[Actor] = field(default_factory=list)

    @staticmethod
    def make(directory: Path, steps: int = 3, validators: int = 2, relays: int = 0, **overrides: Any) -> Swarm:
        values = SMALL | {key.replace("__", "."): value for key, value in overrides.items()}
        run = make_run(
            directory,
            steps=steps,
            thresholds=NOISE,
            validators=[actor_identity(f"validator-{i}").public for i in range(validators)],
            relays=[actor_identity(f"relay-{i}").public for i in range(relays)],
            overrides=values,
        )
        return Swarm(directory, run, steps)

    @property
    def ingress(self) -> str:
        return f"{self.run.manifest.ingress[0]}/v1/{self.run.id.hex()}"

    def serve(self) -> None:
        """Start the coordinator by the command a person would type."""
        log = (self.run_dir / "logs" / "coordinator.log").open("ab")
        command = [str(Path(sys.executable).with_name("trainer")), "serve", str(self.run_dir / "run.toml")]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        log.close()

    def kill(self) -> None:
        """kill -9; its host process notices on its own."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    async def exit_code(self, deadline_s: float = 30) -> int:
        assert self.process is not None
        async with asyncio.timeout(deadline_s):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return self.process.returncode

    async def __aenter__(self) -> Swarm:
        self.host = HostProcess(
            home=self.run_dir / "actors", key=self.run_dir / "actors" / "transport.pem", listen=None
        )
        self.http = aiohttp.ClientSession()
        self.serve()
        await self.host.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for actor in self.actors:
            await actor.control.close()
        assert self.host is not None and self.http is not None
        await self.http.close()
        await self.host.close()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    async def join(self, name: str, role: str = "inference", addresses: tuple[str, ...] = ()) -> Actor:
        actor = Actor(self, name, role)
        self.actors.append(actor)
        await actor.join(addresses)
        return actor

    def publish(self, step: int, root: bytes | None = None) -> None:
        """Sign a head as the origin does; the coordinator never looks at the weights themselves."""
        root = blake3(b"root %d" % step).digest() if root is None else root
        head = Head(0, step, bytes(16), bytes(32), root, 0)
        origin = load_identity(self.run_dir / "keys" / "origin.pem")
        numbers = Sequences(self.run_dir / "actors" / "origin-sequences.json")
        raw = seal(origin, "head", head, run=self.run.id, sequence=numbers.next("head"), issued_at=1).raw
        write_atomic(self.run_dir / "published" / "HEAD.hw", raw)

    def batch(self, step: int) -> Path:
        return self.run_dir / "batches" / f"step-{step:08d}.hwb"

    async def play_learner(self, until: int | None = None, pause_s: float = 0.0) -> None:
        """Publish the next policy whenever a batch is there, after as long as training is said to take."""
        self.publish(0)
        for step in range(self.steps if until is None else until):
            while not self.batch(step).exists():
                await asyncio.sleep(0.02)
            await asyncio.sleep(pause_s)
            self.publish(step + 1)


def actor_identity(name: str) -> Identity:
    return Identity.from_seed(blake3(b"actor " + name.encode()).digest())


def honest(_lease: Lease) -> list[int]:
    return [ACCEPT] * (len(_lease.tasks) * _lease.samples)


def rejecting(_lease: Lease) -> list[int]:
    return [REJECT] * (len(_lease.tasks) * _lease.samples)


@dataclass
class Upload:
    status: int
    body: bytes
    headers: Any


class Actor:
    """One scripted member."""

    def __init__(self, swarm: Swarm, name: str, role: str) -> None:
        self.swarm, self.name, self.role = swarm, name, role
        self.identity = actor_identity(name)
        self.clock = Clock()
        self.sequences = Sequences(swarm.run_dir / "actors" / f"{name}.json")
        self.reconnect()
        self.receipts: dict[bytes, Receipt] = {}

    def reconnect(self) -> None:
        """Call the coordinator as the swarm's run describes it now."""
        swarm = self.swarm
        assert swarm.host is not None
        self.control = ControlClient(
            run=swarm.run, identity=self.identity, sequences=self.sequences, host=swarm.host, clock=self.clock
        )

    def join_request(self, addresses: tuple[str, ...] = (), **changes: Any) -> JoinRequest:
        assert self.swarm.host is not None
        values = {
            "role": self.role,
            "name": self.name,
            "transport_key": self.swarm.host.transport,
            "nonce": os.urandom(16),
            "software": "test",
            "versions": (0x0100,),
            "addresses": addresses,
            "engine": "",
        }
        return JoinRequest(**(values | changes))

    async def join(self, addresses: tuple[str, ...] = (), **changes: Any) -> JoinReply:
        return await self.control.call("join", self.join_request(addresses, **changes), JoinReply, deadline_s=40)

    @staticmethod
    def beat() -> Heartbeat:
        return Heartbeat(0, 0, "testing", 0)

    async def heartbeat(self) -> HeartbeatReply:
        return await self.control.call("heartbeat", self.beat(), HeartbeatReply)

    @staticmethod
    def submission(lease: Lease) -> bytes:
        return submission_of(lease)

    async def ask(self, wait_ms: int = 5000, capacity: int = 64) -> LeaseReply:
        return await self.control.call("lease.next", LeaseRequest(capacity, 0, 0, wait_ms), LeaseReply, deadline_s=40)

    async def lease(self, wait_ms: int = 5000) -> Lease:
        reply = await self.ask(wait_ms)
        assert reply.lease is not None, reply.reason
        return self.open_lease(reply.lease)

    def open_lease(self, raw: bytes) -> Lease:
        run = self.swarm.run
        return open_envelope(
            raw, run=run.id, kind="lease", signer=run.manifest.coordinator, audience=self.identity.public
        ).record(Lease)

    def intent(self, lease_id: bytes, blob: bytes, **changes: Any) -> bytes:
        try:
            raw_length = zstandard.frame_content_size(blob)
        except zstandard.ZstdError:
            raw_length = 1
        values = {"lease_id": lease_id, "length": len(blob), "raw_length": raw_length, "digest": blake3(blob).digest()}
        return seal(
            self.identity,
            "intent",
            UploadIntent(**(values | changes)),
            run=self.swarm.run.id,
            sequence=self.sequences.next("intent"),
            issued_at=self.clock.now_ms(),
            audience=self.swarm.run.manifest.coordinator,
        ).raw

    async def put(self, lease_id: bytes, blob: Any, intent: bytes, headers: dict[str, str] | None = None) -> Upload:
        assert self.swarm.http is not None
        sent = {"Headwater-Intent": base64.b64encode(intent).decode(), **(headers or {})}
        url = f"{self.swarm.ingress}/submissions/{lease_id.hex()}"
        async with self.swarm.http.put(url, data=blob, headers=sent, timeout=aiohttp.ClientTimeout(total=40)) as reply:
            return Upload(reply.status, await reply.read(), reply.headers)

    async def upload(self, lease: Lease, blob: bytes | None = None) -> Upload:
        blob = submission_of(lease) if blob is None else blob
        done = await self.put(lease.lease_id, blob, self.intent(lease.lease_id, blob))
        if done.status == 200:
            run = self.swarm.run
            envelope = open_envelope(
                done.body, run=run.id, kind="receipt", signer=run.manifest.coordinator, audience=self.identity.public
            )
            self.receipts[lease.lease_id] = envelope.record(Receipt)
        return done

    async def job(self, wait_ms: int = 5000) -> Job | None:
        reply = await self.control.call("job.next", JobRequest(wait_ms), JobReply, deadline_s=40)
        if reply.job is None:
            return None
        run = self.swarm.run
        return open_envelope(
            reply.job, run=run.id, kind="job", signer=run.manifest.coordinator, audience=self.identity.public
        ).record(Job)

    async def fetch(self, job: Job, token: bytes | None = None) -> Upload:
        assert self.swarm.http is not None
        headers = {"Headwater-Token": (job.token if token is None else token).hex()}
        async with self.swarm.http.get(f"{self.swarm.ingress}/jobs/{job.job_id.hex()}", headers=headers) as reply:
            return Upload(reply.status, await reply.read(), reply.headers)

    def verdict_of(self, job: Job, rollouts: tuple[Rollout, ...], outcomes: list[int]) -> tuple[Verdict, bytes]:
        details = []
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            count = len(rollout.tokens) // 4 if outcome == ACCEPT else 0
            details.append(RolloutDetail(np.full(count, -1.0, "<f4").tobytes(), rollout.reward if count else 0.0, ()))
        raw = codec.encode(VerdictDetails(tuple(details)))
        reasons = {ACCEPT: "holds", REJECT: "proof-mismatch"}
        stated = tuple(Outcome(outcome, reasons.get(outcome, "reward-undecided")) for outcome in outcomes)
        return Verdict(job.job_id, job.digest, job.round, stated, blake3(raw).digest(), 1), raw

    async def judge(self, job: Job, outcomes: Callable[[Lease], list[int]] = honest) -> Ack:
        fetched = await self.fetch(job)
        assert fetched.status == 200, fetched.body
        opened = zstandard.ZstdDecompressor().decompress(fetched.body, max_output_size=job.raw_length)
        lease = codec.decode(Lease, job.lease)
        verdict, raw = self.verdict_of(job, codec.decode(Submission, opened).rollouts, outcomes(lease))
        self.last = (verdict, raw)
        return await self.judge_again(job)

    async def judge_again(self, job: Job) -> Ack:
        """Send the last verdict (once more)."""
        verdict, raw = self.last
        assert verdict.job_id == job.job_id
        return await self.control.call("verdict", verdict, Ack, attachment=raw)

    async def judge_forever(self, outcomes: Callable[[Lease], list[int]] = honest) -> None:
        while True:
            job = await self.job()
            if job is not None:
                await self.judge(job, outcomes)

    async def work_forever(self) -> None:
        while True:
            reply = await self.ask()
            if reply.lease is not None:
                done = await self.upload(self.open_lease(reply.lease))
                assert done.status == 200, done.body


def submission_of(lease: Lease, salt: int = 0, reward: Callable[[int], float] | None = None) -> bytes:
    """A submission of the right shape whose tokens mean nothing. `reward` gives a rollout's, by its position."""
    rollouts = []
    for task in lease.tasks:
        for sample in range(lease.samples):
            tokens = np.asarray([2 + (task + sample + salt) % 60, 1], "<u4").tobytes()
            logprobs = np.asarray([-1.0, -1.0], "<f4").tobytes()
            worth = float(sample % 2) if reward is None else reward(len(rollouts))
            rollouts.append(Rollout(task, sample, tokens, logprobs, 0, worth, (bytes(514),)))
    raw = codec.encode(Submission(lease.lease_id, "scripted", tuple(rollouts)))
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(raw)
