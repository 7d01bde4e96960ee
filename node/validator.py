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
from dataclasses import dataclass

import aiohttp
import torch
from blake3 import blake3

from environments.base import Environment
from node.backoff import Backoff
from node.errors import LeavingError, NodeError
from node.log import EventLog
from node.member import Member
from node.worker import Worker
from protocol import codec
from protocol.control import http_failure_in_words, read_bounded
from protocol.errors import HeadwaterError, ProtocolError, ReasonCode
from protocol.heap import settle_heap
from protocol.limits import MAX_SUBMISSION_BYTES, MINIMUM_RATE_BYTES_S, REQUEST_DEADLINE_S
from protocol.manifest import Run
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
from shardcast.pacing import Pacing
from shardcast.puller import Policy, Puller
from verifier.allocator import keep_freed_memory
from verifier.judge import Judgement, judge_upload
from verifier.model import PolicyModel
from verifier.profiles import load_to_verify

JOB_WAIT_MS = 20_000
TOKEN_HEADER = "Headwater-Token"  # noqa: S105
FETCH_POLICY_S = 120.0
FETCH_TRIES = 3
FINISH_S = 5.0
LAST_MOMENTS_S = 0.7
"""When the owner stops this node a job that is answered within this long is one the run doesn't wait for."""

_FAULTS = (RuntimeError, MemoryError, OSError, ValueError, KeyError, IndexError, TypeError, ArithmeticError)
"""Faults of this machine while judging: answered as inconclusive and logged, never silent."""


@dataclass(frozen=True)
class Assignment:
    """A job with the lease it is about and the rules that lease names."""

    job: Job
    lease: Lease
    run: Run

    @property
    def rollouts(self) -> int:
        return len(self.lease.tasks) * self.lease.samples


class ValidatorNode(Worker[Assignment]):
    """One validator's work for one run."""

    noun = "job"

    def __init__(
        self,
        *,
        member: Member,
        puller: Puller,
        environments: dict[bytes, Environment],
        session: aiohttp.ClientSession,
        threads: int,
        pacing: Pacing,
        log: EventLog,
    ) -> None:
        """`pacing` is told of every job; the puller asks it when to look for the next policy."""
        super().__init__(member, log)
        self._pacing = pacing
        self._puller = puller
        self._environments = environments
        self._session = session
        self._threads = threads
        self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._policy: PolicyModel | None = None
        self._unanswered = False
        self.bytes_received = 0
        """Bytes of submissions fetched by this process."""
        self.bytes_sent = 0
        """Bytes of verdict details sent by this process."""

    async def run(self) -> None:
        """Work until cancelled. Raises LeavingError when the coordinator ends it."""
        keep_freed_memory()
        settle_heap()
        torch.set_num_threads(max(1, self._threads))
        await self.work()

    async def wind_down(self, leaving: LeavingError) -> None:
        """Let the job in work be answered, if it is nearly done."""
        if not await self.finish(FINISH_S):
            self._log.event("job.abandoned", reason=str(leaving))

    async def abandon(self, reason: str) -> None:
        """Answer the job in work if it is a matter of moments; else the coordinator draws it again."""
        if not await self.finish(LAST_MOMENTS_S):
            self._unanswered = True
            self._log.event("job.abandoned", reason=reason)

    def summary(self) -> list[str]:
        """What was done and what is left, for the person, when this node ends."""
        lines = [f"{self._member.done} submissions judged"]
        if self._unanswered:
            lines.append("one job was left unanswered: the coordinator gives it to another validator")
        return lines

    async def ask(self) -> tuple[bytes | None, int]:
        """Ask for a job."""
        if self._puller.current is not None:
            self._member.policy = (self._puller.current.epoch, self._puller.current.step)
        self._member.activity = "waiting for a job"
        reply = await self._member.call(
            "job.next", JobRequest(wait_ms=JOB_WAIT_MS), JobReply, deadline_s=JOB_WAIT_MS / 1000 + 10
        )
        return reply.job, reply.retry_ms

    async def open(self, raw: bytes) -> Assignment:
        """The job inside, if the coordinator signed it for us and this run.

        Raises:
            ProtocolError: it does not hold, or its lease names a manifest that can't be had.
        """
        member = self._member
        job = self._envelope(raw, (member.run.manifest.coordinator,)).record(Job)
        lease = codec.decode(Lease, job.lease)
        if not len(lease.tasks) * lease.samples >= 1 or job.length > MAX_SUBMISSION_BYTES:
            raise ProtocolError("the job's lease asks for nothing, or its submission is over the bound")
        await member.learn(lease.manifest)
        return Assignment(job, lease, member.manifest.at(lease.manifest))

    async def do(self, assignment: Assignment) -> None:
        """Judge one submission and send the verdict."""
        job, lease = assignment.job, assignment.lease
        self._member.activity = f"judging {assignment.rollouts} rollouts"
        started, done = time.monotonic(), False
        self._pacing.leased(started, lease.epoch, lease.step, assignment.rollouts)
        try:
            policy = await self._policy_of(lease)
            self._pacing.loaded(time.monotonic())
            environment = self._environments.get(lease.environment)
            if environment is None:
                raise NodeError("this machine does not have the environment the lease names")
            blob = await self._fetch(job)
            judgement, cpu_ms = await asyncio.get_running_loop().run_in_executor(
                self._judge, self._work, assignment, blob, policy, environment
            )
            done = True
        except LeavingError:
            raise
        except (HeadwaterError, *_FAULTS) as exc:
            code = exc.code.value if isinstance(exc, HeadwaterError) else type(exc).__name__
            self._log.event(
                "job.failed", level="warning", job=job.job_id, lease=lease.lease_id, code=code, reason=str(exc)
            )
            self._log.say(f"a job could not be judged here: {exc}")
            judgement, cpu_ms = _undecided(assignment.rollouts), 0
        finally:
            self._pacing.ended(time.monotonic(), done=done)
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
        self.bytes_sent += len(details)
        reasons = sorted({o.reason for o in judgement.outcomes if o.outcome != ACCEPT})
        self._log.event(
            "verdict",
            job=job.job_id,
            lease=lease.lease_id,
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
                    self.bytes_received += len(blob)
                if reply.status != 200:
                    problem = f"HTTP {reply.status}"
                elif len(blob) != job.length or blake3(blob).digest() != job.digest:
                    problem = "other bytes than the job names"
                else:
                    return blob
            except (aiohttp.ClientError, OSError, ValueError, ProtocolError) as exc:
                problem = http_failure_in_words(exc)
            await backoff.wait()
        raise ProtocolError(f"{url} did not give the submission: {problem}", ReasonCode.UNREACHABLE)

    def _work(
        self, assignment: Assignment, blob: bytes, policy: Policy, environment: Environment
    ) -> tuple[Judgement, int]:
        """In the judge's thread: the right weights, then the decision and its CPU milliseconds."""
        started = time.thread_time()
        if self._policy is None:
            profile = assignment.run.manifest.profile
            self._policy = load_to_verify(policy.directory, profile, root=policy.root)
        elif self._policy.root != policy.root:
            self._policy.load_weights(policy.directory, root=policy.root)
        lease, length = assignment.lease, assignment.job.raw_length
        judgement = judge_upload(assignment.run, lease, blob, length, self._policy, environment)
        return judgement, round(1000 * (time.thread_time() - started))


def _undecided(count: int) -> Judgement:
    outcome = Outcome(INCONCLUSIVE, ReasonCode.VALIDATOR_FAILED.value)
    return Judgement([outcome] * count, [RolloutDetail(b"", 0.0, ())] * count)
