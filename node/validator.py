"""The validator role: fetch a submission, judge it with the lease's own policy, say so under our signature.

The judge runs in a thread of its own, so heartbeats go on during a long prefill. A job that can't be judged here
(weights missing, bytes unavailable, a fault of this machine) is answered INCONCLUSIVE `validator-failed`: silence
would cost the run a deadline, a guess would cost somebody a reputation.

Not covered: several jobs at once, plants with a known answer, judging on a GPU.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import torch
from blake3 import blake3

from environments.base import Environment
from node.backoff import Backoff
from node.errors import LeavingError, NodeError
from node.log import EventLog
from node.member import Member
from protocol import codec
from protocol.control import read_bounded
from protocol.envelope import open_envelope
from protocol.errors import HeadwaterError, ProtocolError, ReasonCode
from protocol.limits import MAX_SUBMISSION_BYTES, MINIMUM_RATE_BYTES_S, REQUEST_DEADLINE_S
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    Ack,
    Job,
    JobReply,
    JobRequest,
    Lease,
    Outcome,
    RolloutDetail,
    Verdict,
)
from shardcast.puller import Policy, Puller
from verifier.judge import Judgement, judge_upload
from verifier.model import PolicyModel, load_policy

JOB_WAIT_MS = 20_000
TOKEN_HEADER = "Headwater-Token"  # noqa: S105
FETCH_POLICY_S = 120.0
FETCH_TRIES = 3
_FAULTS = (RuntimeError, MemoryError, OSError, ValueError, KeyError, IndexError, TypeError, ArithmeticError)
"""Faults of this machine while judging: answered as inconclusive and logged, never silent."""


class ValidatorNode:
    """One validator's work for one run."""

    def __init__(
        self,
        *,
        member: Member,
        puller: Puller,
        environments: dict[bytes, Environment],
        session: aiohttp.ClientSession,
        threads: int,
        log: EventLog,
    ) -> None:
        self._member = member
        self._puller = puller
        self._environments = environments
        self._session = session
        self._threads = threads
        self._log = log
        self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._policy: PolicyModel | None = None
        self._last_job = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Work until cancelled. Raises LeavingError when the coordinator ends it."""
        torch.set_num_threads(max(1, self._threads))
        while not self._last_job:
            job, lease = await self._next_job()
            self._idle.clear()
            try:
                await self._answer(job, lease)
            finally:
                self._idle.set()
        await asyncio.Event().wait()  # the supervisor ends us

    async def wind_down(self, leaving: LeavingError) -> None:
        """Let the job in work be answered, if it is nearly done."""
        self._last_job = True
        try:
            async with asyncio.timeout(5.0):
                await self._idle.wait()
        except TimeoutError:
            self._log.event("job.abandoned", reason=str(leaving))

    async def abandon(self, reason: str) -> None:
        """Nothing to hand back: an unanswered job is drawn again by the coordinator."""

    async def _next_job(self) -> tuple[Job, Lease]:
        backoff = Backoff()
        while True:
            if self._puller.current is not None:
                self._member.policy = (self._puller.current.epoch, self._puller.current.step)
            self._member.activity = "waiting for a job"
            reply = await self._member.call(
                "job.next", JobRequest(wait_ms=JOB_WAIT_MS), JobReply, deadline_s=JOB_WAIT_MS / 1000 + 10
            )
            if reply.job is None:
                await asyncio.sleep(min(max(reply.retry_ms, 20), 20_000) / 1000)
                continue
            try:
                return self._open_job(reply.job)
            except ProtocolError as exc:
                self._log.event("job.invalid", code=exc.code.value, reason=str(exc))
                await backoff.wait()

    def _open_job(self, raw: bytes) -> tuple[Job, Lease]:
        member, run = self._member, self._member.run
        envelope = open_envelope(
            raw,
            run=run.id,
            kind="job",
            signer=run.manifest.coordinator,
            audience=member.identity.public,
            now=member.clock.now_ms(),
        )
        job = envelope.record(Job)
        lease = codec.decode(Lease, job.lease)
        if not len(lease.tasks) * lease.samples >= 1 or job.length > MAX_SUBMISSION_BYTES:
            raise ProtocolError("the job's lease asks for nothing, or its submission is over the bound")
        return job, lease

    async def _answer(self, job: Job, lease: Lease) -> None:
        """Judge one submission and send the verdict."""
        self._member.activity = f"judging {len(lease.tasks) * lease.samples} rollouts"
        started = time.monotonic()
        try:
            policy = await self._policy_of(lease)
            environment = self._environments.get(lease.environment)
            if environment is None:
                raise NodeError("this machine does not have the environment the lease names")
            blob = await self._fetch(job)
            judgement, cpu_ms = await asyncio.get_running_loop().run_in_executor(
                self._judge, self._work, lease, blob, job.raw_length, policy, environment
            )
        except LeavingError:
            raise
        except (HeadwaterError, *_FAULTS) as exc:
            code = exc.code.value if isinstance(exc, HeadwaterError) else type(exc).__name__
            self._log.event("job.failed", job=job.job_id, code=code, reason=str(exc))
            self._log.say(f"a job could not be judged here: {exc}")
            judgement, cpu_ms = _undecided(len(lease.tasks) * lease.samples), 0
        details = codec.encode(judgement.verdict_details())
        verdict = Verdict(
            job_id=job.job_id,
            digest=job.digest,
            round=job.round,
            outcomes=tuple(judgement.outcomes),
            details=blake3(details).digest(),
            cpu_ms=cpu_ms,
        )
        try:
            await self._member.call("verdict", verdict, Ack, attachment=details, deadline_s=60.0)
        except LeavingError:
            raise
        except ProtocolError as exc:  # drawn again elsewhere meanwhile, or already answered before a restart
            self._log.event("verdict.refused", job=job.job_id, code=exc.code.value, reason=str(exc))
            return
        self._member.done += 1
        reasons = sorted({o.reason for o in judgement.outcomes if o.outcome != ACCEPT})
        self._log.event(
            "verdict",
            job=job.job_id,
            round=job.round,
            step=lease.step,
            accepted=sum(o.outcome == ACCEPT for o in judgement.outcomes),
            of=len(judgement.outcomes),
            reasons=reasons,
            cpu_ms=cpu_ms,
            seconds=round(time.monotonic() - started, 3),
        )

    async def _policy_of(self, lease: Lease) -> Policy:
        return await self._puller.fetch(lease.epoch, lease.step, lease.root, FETCH_POLICY_S)

    async def _fetch(self, job: Job) -> bytes:
        """The submission's bytes, exactly those the job names.

        Raises:
            ProtocolError: not to be had, or other bytes.
        """
        url = f"{self._member.ingress}/v1/{self._member.run.id.hex()}/jobs/{job.job_id.hex()}"
        deadline = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S + job.length / MINIMUM_RATE_BYTES_S)
        backoff = Backoff()
        problem = ""
        for _ in range(FETCH_TRIES):
            try:
                async with self._session.get(
                    url, headers={TOKEN_HEADER: job.token.hex()}, timeout=deadline, allow_redirects=False
                ) as reply:
                    blob = await read_bounded(reply.content, job.length)
                if reply.status != 200:
                    problem = f"HTTP {reply.status}"
                elif len(blob) != job.length or blake3(blob).digest() != job.digest:
                    problem = "other bytes than the job names"
                else:
                    return blob
            except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as exc:
                problem = f"{type(exc).__name__}: {exc}"
            await backoff.wait()
        raise ProtocolError(f"{url} did not give the submission: {problem}", ReasonCode.UNREACHABLE)

    def _work(
        self, lease: Lease, blob: bytes, raw_length: int, policy: Policy, environment: Environment
    ) -> tuple[Judgement, int]:
        """In the judge's thread: the right weights, then the decision and its CPU milliseconds."""
        started = time.thread_time()
        if self._policy is None:
            self._policy = load_policy(policy.directory, root=policy.root)
        elif self._policy.root != policy.root:
            self._policy.load_weights(policy.directory, root=policy.root)
        judgement = judge_upload(self._member.run, lease, blob, raw_length, self._policy, environment)
        return judgement, round(1000 * (time.thread_time() - started))


def _undecided(count: int) -> Judgement:
    outcome = Outcome(INCONCLUSIVE, ReasonCode.VALIDATOR_FAILED.value)
    return Judgement([outcome] * count, [RolloutDetail(b"", 0.0, ())] * count)
