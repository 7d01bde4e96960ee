"""The inference role: lease, weights, tokens, submission, receipt, and again.

Weights are swapped between leases (`finish`): a lease names its policy, and the engine holds that one before the
first token. While one submission travels, the next lease is already being worked on, as far as the coordinator
gives one. A lease that can't be finished is handed back with its reason, so that another node gets it at once.

Not covered: swaps inside a lease (`span`), several engines, prompts that are conversations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from environments.base import Environment, Task
from node.backoff import Backoff
from node.engine_link import EngineLink
from node.errors import LeavingError, NodeError, UpgradeRequiredError
from node.log import EventLog
from node.member import Member
from node.upload import Uploader, UploadRefusedError, compress, settle
from node.worker import Worker
from protocol.engine import EngineInfo, GenerateItem, GenerateOutput, GenerateRequest
from protocol.errors import EngineError, HeadwaterError, ProtocolError, ReasonCode
from protocol.limits import MAX_ROLLOUTS_PER_LEASE
from protocol.manifest import Run
from protocol.records import FINISH_EOS, Ack, Lease, LeaseFailed, LeaseReply, LeaseRequest, Rollout, Submission
from protocol.seeds import sampling_seed
from shardcast.pacing import Pacing
from shardcast.puller import Policy, Puller

LEASE_WAIT_MS = 20_000
"""How long the coordinator may hold a lease request open."""

NOTHING_TO_COME_MS = 10_000
"""Who is told to ask again only after this long is not waited with: the run is over, or so is this node's part."""

UPLOADS_AT_ONCE = 2
"""Submissions travelling beside the lease in work. More would only hide a slow uplink."""

WEIGHTS_PATIENCE_S = 30.0
"""After this long without any policy the person is told which sources were tried."""

FETCH_DEADLINE_S = 300.0
DRAIN_S = 5.0

Alter = Callable[["Work", list[GenerateOutput], tokenizers.Tokenizer], list[GenerateOutput]]
"""What `node plant` makes of the honest answers to a lease."""

GIVE_BACK_S = 2.5
"""When the owner stops this node, the coordinator gets this long to take the lease back. Usually a round trip is
enough; one that writes its ledger to a busy disk has been seen to take over 0.7 s."""


@dataclass(frozen=True)
class Work:
    """A lease that is ours until `deadline` (monotonic seconds), under the rules it names."""

    lease: Lease
    run: Run
    """As of the manifest the lease names: its sampling settings hold."""
    environment: Environment
    deadline: float

    @property
    def rollouts(self) -> int:
        return len(self.lease.tasks) * self.lease.samples

    @cached_property
    def tasks(self) -> list[Task]:
        """The lease's tasks, made once for all their samples."""
        return [self.environment.task(index) for index in self.lease.tasks]

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()


class InferenceNode(Worker[Work]):
    """One engine's work for one run."""

    noun = "lease"

    def __init__(
        self,
        *,
        member: Member,
        engine: EngineLink,
        puller: Puller,
        uploader: Uploader,
        environments: dict[bytes, Environment],
        pacing: Pacing,
        log: EventLog,
        alter: Alter | None = None,
    ) -> None:
        """
        Args:
            pacing: told of every lease; the puller asks it when to look for the next policy.
            alter: None for a node that answers as it should.
        """
        super().__init__(member, log)
        self._pacing = pacing
        self._engine = engine
        self._alter = alter
        self._puller = puller
        self._uploader = uploader
        self._environments = environments
        self._info: EngineInfo | None = None
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._uploads: set[asyncio.Task[None]] = set()
        self._sending: set[bytes] = set()
        self._open: Lease | None = None
        self._received = 0.0
        self._told = ""
        self._left_lease = ""

    async def run(self, info: EngineInfo) -> None:
        """Work until cancelled. Raises LeavingError when the coordinator ends it."""
        self._info = info
        self._send_what_was_left()
        await self._first_policy()
        await self.work()

    async def wind_down(self, leaving: LeavingError) -> None:
        """Finish what is worth finishing: an upgrade waits for the lease in work, uploads get five seconds."""
        limit = self._member.run.manifest.leases.lease_ms / 1000 if isinstance(leaving, UpgradeRequiredError) else 0.0
        if limit and self.busy:
            self._log.say("finishing the lease in work first")
        if not await self.finish(limit) and limit:
            self._log.event("lease.abandoned", reason=f"not finished within {limit:.0f} s of the upgrade notice")
        await settle(self._uploads, DRAIN_S)

    async def abandon(self, reason: str) -> None:
        """Hand the open lease back, if there is one and the coordinator can be reached at once."""
        self._last = True
        lease, self._open = self._open, None
        if lease is not None:
            self._left_lease = (
                "the lease in work could not be handed back; the coordinator gives it away when it expires"
            )
            report = LeaseFailed(lease_id=lease.lease_id, reason=reason)
            await self._member.control.call("lease.failed", report, Ack, deadline_s=GIVE_BACK_S)
            self._left_lease = "the lease in work was handed back: another node does it again"
            self._log.event("lease.given-back", lease=lease.lease_id, step=lease.step, reason=reason)

    async def close(self) -> None:
        """End the uploads; what has no receipt stays on disk for the next start."""
        uploads = list(self._uploads)
        for task in uploads:
            task.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)

    def summary(self) -> list[str]:
        """What was done and what is left, for the person, when this node ends."""
        member, waiting = self._member, len(self._uploader.outbox.waiting())
        done = f"{member.done} rollouts done; in this run {member.accepted} accepted, {member.rejected} rejected so far"
        lines = [done]
        if self._left_lease:
            lines.append(self._left_lease)
        if waiting:
            lines.append(f"{waiting} finished leases wait on disk and are sent when this node comes back")
        return lines

    # --- getting work ---------------------------------------------------------------------------------------------

    def _send_what_was_left(self) -> None:
        """Submissions of a former process whose receipts never arrived."""
        for lease_id in self._uploader.outbox.waiting():
            self._log.event("upload.resend", lease=lease_id)
            self._start_upload(lease_id)

    async def _first_policy(self) -> None:
        self._member.activity = "pulling weights"
        while True:
            try:
                policy = await self._puller.wait_newer(None, WEIGHTS_PATIENCE_S)
            except ProtocolError as exc:
                sources = self._member.weights
                self._member.waits_for = f"weights from {', '.join(sources) or 'relays: none is announced yet'}"
                self._log.event("weights.waiting", sources=sources, reason=str(exc))
                self._log.say(f"no weights yet from the run's relays ({', '.join(sources) or 'none announced yet'})")
                continue
            break
        self._hold(policy)
        await self._warm_up(policy)

    async def _warm_up(self, policy: Policy) -> None:
        """Load before the first lease is asked for, so that none runs while weights are read for the first time."""
        try:
            await self._engine.load(policy.directory, policy.epoch, policy.step, policy.root)
        except EngineError as exc:
            self._log.event("engine.away", level="warning", code=exc.code.value, reason=str(exc))
            await self._bring_engine_back()

    def _hold(self, policy: Policy) -> None:
        self._member.policy = (policy.epoch, policy.step)

    async def ask(self) -> tuple[bytes | None, int]:
        """Ask for a lease."""
        assert self._info is not None
        member = self._member
        if self._puller.current is not None:
            self._hold(self._puller.current)
        member.activity = "waiting for a lease"
        epoch, step = member.policy
        request = LeaseRequest(capacity=self._info.capacity, epoch=epoch, step=step, wait_ms=LEASE_WAIT_MS)
        reply = await member.call("lease.next", request, LeaseReply, deadline_s=LEASE_WAIT_MS / 1000 + 10)
        self._received = time.monotonic()
        member.enter(reply.state, reply.reason)
        if reply.lease is not None:
            self._told = ""
        else:
            member.waits_for = reply.reason
            if reply.retry_ms >= NOTHING_TO_COME_MS:
                member.ask_soon()
            if reply.reason != self._told:  # once between two leases
                self._told = reply.reason
                self._log.event("lease.none", reason=reply.reason, state=reply.state)
        return reply.lease, reply.retry_ms

    async def open(self, raw: bytes) -> Work | None:
        """The lease inside, if the coordinator signed it for us and this run, and it can be done here.

        Raises:
            ProtocolError: it does not hold, or names a manifest that can't be had.
        """
        member = self._member
        coordinators = member.manifest.chain.unrevoked("coordinator")  # a lease sent again may keep its first signature
        envelope = self._envelope(raw, coordinators)
        lease = envelope.record(Lease)
        await member.learn(lease.manifest)
        if not 1 <= len(lease.tasks) * lease.samples <= MAX_ROLLOUTS_PER_LEASE:
            raise ProtocolError("the lease asks for no rollouts, or for too many", ReasonCode.OVERSIZE)
        if lease.lease_id in self._sending:
            # Its submission is finished here and on its way: the coordinator has not heard of it yet.
            await asyncio.wait(self._uploads, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
            return None
        self._open = lease
        environment = self._environments.get(lease.environment)
        if environment is None:
            await self._give_back(lease, "this machine does not have the environment the lease names")
            return None
        work = Work(lease, member.manifest.at(lease.manifest), environment, self._received + lease.duration_ms / 1000)
        self._log.event(
            "lease",
            lease=lease.lease_id,
            step=lease.step,
            tasks=len(lease.tasks),
            samples=lease.samples,
            duration_ms=lease.duration_ms,
        )
        return work

    # --- doing it -------------------------------------------------------------------------------------------------

    async def do(self, assignment: Work) -> None:
        """One lease from weights to upload. Whatever fails, the coordinator hears of it."""
        lease, started, done = assignment.lease, time.monotonic(), False
        self._pacing.leased(started, lease.epoch, lease.step, assignment.rollouts)
        try:
            policy = await self._policy_of(assignment)
            self._pacing.loaded(time.monotonic())
            self._member.activity = f"generating {assignment.rollouts} rollouts"
            outputs = await self._generate(assignment, policy)
            if self._alter is not None:
                outputs = self._alter(assignment, outputs, self._tokenizer_of(policy))
            submission = self._score(assignment, outputs)
            blob = compress(submission)
            if len(blob) > lease.max_bytes:
                raise NodeError(f"the submission has {len(blob)} bytes, the lease allows {lease.max_bytes}")
            done = True
        except HeadwaterError as exc:
            if isinstance(exc, LeavingError):
                raise
            await self._failed(lease, exc)
            return
        finally:
            self._pacing.ended(time.monotonic(), done=done)
        self._uploader.outbox.put(lease.lease_id, blob)
        self._open = None
        self._member.done += len(outputs)
        self._log.event(
            "lease.done",
            lease=lease.lease_id,
            step=lease.step,
            rollouts=len(outputs),
            tokens=sum(len(o.tokens) // 4 for o in outputs),
            reward=sum(r.reward for r in submission.rollouts) / len(outputs),
            seconds=round(time.monotonic() - started, 3),
        )
        while len(self._uploads) >= UPLOADS_AT_ONCE:
            self._member.activity = "waiting for uploads"
            await asyncio.wait(self._uploads, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        self._start_upload(lease.lease_id)

    async def _policy_of(self, work: Work) -> Policy:
        """The policy the lease names, pulled if need be and loaded into the engine."""
        lease = work.lease
        self._member.activity = f"getting policy {lease.step}"
        patience_s = min(FETCH_DEADLINE_S, max(1.0, work.remaining_s))
        policy = await self._puller.fetch(lease.epoch, lease.step, lease.root, patience_s)
        if (policy.epoch, policy.step) > self._member.policy:
            self._hold(policy)
        await self._engine.load(policy.directory, policy.epoch, policy.step, policy.root)
        return policy

    async def _generate(self, work: Work, policy: Policy) -> list[GenerateOutput]:
        """One output per rollout, task-major, asked for in portions the engine takes."""
        assert self._info is not None
        lease, sampling = work.lease, work.run.manifest.sampling
        tokenizer = self._tokenizer_of(policy)
        items = []
        for task, asked in zip(lease.tasks, work.tasks, strict=True):
            ids = tokenizer.encode(asked.prompt, add_special_tokens=False).ids
            prompt = b"".join(i.to_bytes(4, "little") for i in ids)
            for sample in range(lease.samples):
                seed = sampling_seed(work.run.id, lease.nonce, task, sample)
                request_id = f"{lease.lease_id.hex()}:{task}:{sample}"
                items.append(GenerateItem(request_id, prompt, seed, lease.max_new_tokens))
        outputs: list[GenerateOutput] = []
        portion = max(1, min(self._info.capacity, len(items)))
        for start in range(0, len(items), portion):
            part = tuple(items[start : start + portion])
            request = GenerateRequest(lease.root, sampling.temperature, sampling.stop_tokens, part)
            generated = await self._engine.generate(request, max(1.0, work.remaining_s))
            if [o.request_id for o in generated.outputs] != [i.request_id for i in part]:
                raise EngineError("the engine answered other requests than it was asked", ReasonCode.ENGINE_FAILED)
            outputs.extend(generated.outputs)
        return outputs

    def _tokenizer_of(self, policy: Policy) -> tokenizers.Tokenizer:
        if self._tokenizer is None:  # the same files for every policy of a run: the manifest names their hashes
            self._tokenizer = read_tokenizer(policy.directory)
        return self._tokenizer

    def _score(self, work: Work, outputs: list[GenerateOutput]) -> Submission:
        """The submission, each rollout with the reward its text earns here."""
        assert self._info is not None
        lease = work.lease
        rollouts = []
        for position, output in enumerate(outputs):
            number, sample = divmod(position, lease.samples)
            reward = work.environment.score(work.tasks[number], output.text, output.finish == FINISH_EOS)
            rollouts.append(
                Rollout(
                    task=lease.tasks[number],
                    sample=sample,
                    tokens=output.tokens,
                    logprobs=output.logprobs,
                    finish=output.finish,
                    reward=reward,
                    proofs=output.proofs,
                    routes=output.routes,
                )
            )
        return Submission(lease_id=lease.lease_id, engine=self._info.name, rollouts=tuple(rollouts))

    # --- when it fails --------------------------------------------------------------------------------------------

    async def _failed(self, lease: Lease, exc: HeadwaterError) -> None:
        """Tell the coordinator, then make the engine usable again."""
        self._log.event(
            "lease.failed", level="warning", lease=lease.lease_id, step=lease.step, code=exc.code.value, reason=str(exc)
        )
        self._log.say(f"a lease could not be finished: {exc}")
        await self._give_back(lease, f"{exc.code.value}: {exc}")
        if isinstance(exc, EngineError) and exc.code is not ReasonCode.ENGINE_REFUSED:
            await self._bring_engine_back()

    async def _bring_engine_back(self) -> None:
        self._member.activity = "restarting the engine"
        backoff = Backoff()
        while True:
            await self._engine.recover()
            try:
                self._info = await self._engine.start()
                return
            except EngineError as exc:
                self._member.waits_for = f"the engine, which does not come back: {exc}"
                self._log.event("engine.away", level="warning", code=exc.code.value, reason=str(exc))
                self._log.say(f"the engine does not come back: {exc}")
                await backoff.wait()

    async def _give_back(self, lease: Lease, reason: str) -> None:
        """A lease that is already closed over there needs no giving back."""
        self._open = None
        try:
            await self._member.call("lease.failed", LeaseFailed(lease_id=lease.lease_id, reason=reason[:1000]), Ack)
        except LeavingError:
            raise
        except ProtocolError as exc:
            self._log.event("lease.failed.refused", lease=lease.lease_id, code=exc.code.value, reason=str(exc))

    # --- sending it off -------------------------------------------------------------------------------------------

    def _start_upload(self, lease_id: bytes) -> None:
        self._sending.add(lease_id)
        task = asyncio.create_task(self._upload(lease_id))
        self._uploads.add(task)
        task.add_done_callback(self._uploads.discard)

    async def _upload(self, lease_id: bytes) -> None:
        try:
            await self._uploader.send(lease_id)
        except UploadRefusedError as exc:
            self._log.say(f"a finished lease was turned down ({exc.code.value}): {exc}")
        except OSError as exc:
            self._log.event("upload.disk", level="error", lease=lease_id, reason=str(exc))
            self._log.say(f"a finished lease can't be read or its receipt not be written: {exc}; look at the disk")
        finally:
            self._sending.discard(lease_id)


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a policy directory, without truncation or padding."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
