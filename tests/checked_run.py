"""A run whose validators are checked: the real coordinator, judge, decoder, origin and audit; nothing listens.

    run = await CheckedRun.make(tmp_path, liars={"validator-1"})
    await run.step(honest=["ann"], false=["mal"])     leases, work, verdicts, checks, one batch, the next policy

Weights are the tiny model's, another little change every step. Who is false claims another reward than its task gives,
or proves other tokens than it sends. A liar accepts everything and hands over what was claimed, the most that the
coordinator lets it do. Who is in `bends` judges honestly and hands over other details, who is in `refusing` rejects
everything.

Not covered: libp2p, HTTP, the checking process (`tests/test_trainer_spot_process.py`).
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from blake3 import blake3
from safetensors.torch import load_file, save_file

from environments.registry import load
from protocol import codec
from protocol.control import Member
from protocol.envelope import parse
from protocol.evidence import VerdictEvidence
from protocol.files import write_atomic
from protocol.identity import load_identity
from protocol.records import (
    ACCEPT,
    REJECT,
    Lease,
    Outcome,
    Rollout,
    RolloutDetail,
    Submission,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from shardcast.archive import open_published
from shardcast.origin import Origin
from tests.coordinator_desk import Desk
from tests.judge_rig import Rig
from trainer import batches
from trainer.spot_request import Answer, Request
from trainer.spot_worker import Checker
from verifier.judge import judge_upload
from verifier.model import PolicyModel, load_policy


class InProcess:
    """Answers as `spot_process.CheckProcess` does, in this process; `fresh` forgets all it had loaded."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.asked: list[Request] = []
        self.answers: list[Answer] = []
        self._begin()

    def _begin(self) -> None:
        scratch = self.run_dir / "state" / "checks"
        scratch.mkdir(parents=True, exist_ok=True)
        self._checker = Checker(self.run_dir, scratch)

    async def start(self) -> None: ...

    async def ask(self, request: Request) -> Answer:
        self.asked.append(request)
        self.answers.append(self._checker.answer(Request.from_json(request.to_json())))
        return Answer.from_json(self.answers[-1].to_json())

    async def fresh(self) -> None:
        self._begin()

    async def close(self) -> None: ...


class CheckedRun(Desk):
    """One coordinator, its members, and the weights they compute with."""

    def __init__(self, run_dir: Path, steps: int, validators: int, liars: set[str], **overrides: object) -> None:
        self.liars = liars
        self.bends: dict[str, Callable[[RolloutDetail], RolloutDetail]] = {}
        """Validator -> what it makes of the details of a rollout that it accepts."""
        self.refusing: set[str] = set()
        self.waving: set[str] = set()
        """Validators that compute all they should, hand over true numbers, and reject nothing."""
        self.false: Counter[bytes] = Counter()
        """Owner -> false rollouts sent."""
        self._policies: dict[bytes, PolicyModel] = {}
        super().__init__(run_dir, steps, validators, **overrides)

    @classmethod
    async def make(
        cls, folder: Path, *, steps: int = 40, validators: int = 2, liars: set[str] = frozenset(), **overrides: object
    ) -> CheckedRun:
        torch.set_num_threads(1)
        values = {"leases__tasks_per_step": 4, "leases__probation_accepted": 2, **overrides}
        run = cls(folder / "run", steps, validators, set(liars), **values)
        for i in range(validators):
            run.join(f"validator-{i}", "validator")
        await run.publish_next()
        return run

    def open(self) -> None:
        super().open()
        self.process = InProcess(self.run_dir)
        self.judging.checks.process = self.process

    # --- weights ------------------------------------------------------------------------------------------------

    async def publish_next(self) -> None:
        """The policy after the newest: as the learner writes it, the origin publishes it, the coordinator takes it."""
        newest = self.state.newest_policy
        step = 0 if newest is None else newest.step + 1
        folder = self.run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        weights = load_file(self.run_dir / "model" / "model.safetensors")
        chance = torch.Generator().manual_seed(step)
        for name, tensor in weights.items():
            weights[name] = tensor + 1e-3 * torch.randn(tensor.shape, generator=chance) if step else tensor
        path = folder / "model.safetensors"
        save_file(weights, path, metadata={"format": "pt"})
        entry = {"size": path.stat().st_size, "blake3": blake3(path.read_bytes()).hexdigest()}
        (folder / "checkpoint.json").write_text(json.dumps({"epoch": 0, "step": step, "files": {path.name: entry}}))
        origin = Origin(self.run_dir, identity=load_identity(self.run_dir / "keys" / "origin.pem"))
        try:
            await origin.start()
            await origin.publish_ready()
        finally:
            await origin.close()
        await self.coordinator._take_head(self.run_dir / "published" / "HEAD.hw")

    def policy(self, lease: Lease) -> PolicyModel:
        if lease.root not in self._policies:
            archive = open_published(self.run_dir, self.book.run, only={(lease.epoch, lease.step)})
            found = archive.materialise(lease.epoch, lease.step, self.run_dir.parent / "policies")
            self._policies[lease.root] = load_policy(found.directory, root=lease.root)
        return self._policies[lease.root]

    # --- work ---------------------------------------------------------------------------------------------------

    def work(self, name: str, how: str | Callable[[Rollout], Rollout] = "honest") -> int:
        """One lease of a node, done, spoilt and sent; returns the submission's ledger index."""
        lease = self.lease(name)
        environment = load(next(s for s in self.book.run.manifest.environments if s.digest == lease.environment))
        rig = Rig(self.book.run, lease, self.policy(lease), environment, Submission(bytes(16), "", ()))
        made = rig.answer(lease=lease)
        if how != "honest":
            spoil = {"reward": _other_reward, "tokens": _other_token}[how] if isinstance(how, str) else how
            made = dataclasses.replace(made, rollouts=tuple(spoil(one) for one in made.rollouts))
            self.false[self.state.leases[lease.lease_id].owner] += len(made.rollouts)
        return self.send(lease, made)

    def send(self, lease: Lease, made: Submission) -> int:
        raw = codec.encode(made)
        blob = zstandard.ZstdCompressor(level=3).compress(raw)
        path = self.coordinator.files.submission(lease.lease_id)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(blob)
        owner = self.state.nodes[self.state.leases[lease.lease_id].owner].name
        intent = UploadIntent(lease.lease_id, len(blob), len(raw), blake3(blob).digest())
        return self.judging.enter(self.sealed(owner, "intent", intent))

    async def judge_all(self, index: int) -> None:
        """Every open job of a submission is answered by whom it was drawn for."""
        while self.open_jobs(index):
            job = self.open_jobs(index)[0]
            name = self.state.nodes[job.validator].name
            if name in self.refusing:
                await self.judge(index, REJECT)
            elif name in self.liars:
                await self.judge(index)
            else:
                await self.judge_honestly(index)

    async def judge_honestly(self, index: int) -> None:
        job, submission = self.open_jobs(index)[0], self.state.submissions[index]
        lease = self.state.leases[submission.lease_id].lease
        environment = load(next(s for s in self.book.run.manifest.environments if s.digest == lease.environment))
        blob = self.coordinator.files.submission(lease.lease_id).read_bytes()
        length = submission.intent.raw_length
        judged = judge_upload(self.book.run, lease, blob, length, self.policy(lease), environment)
        if self.state.nodes[job.validator].name in self.waving:
            claimed = batches.read_submission(self.coordinator.files, submission).rollouts
            for i, (outcome, rollout) in enumerate(zip(judged.outcomes, claimed, strict=True)):
                if outcome.outcome != ACCEPT:
                    judged.outcomes[i] = Outcome(ACCEPT, "holds")
                    judged.details[i] = RolloutDetail(rollout.logprobs, rollout.reward, ())
        bend = self.bends.get(self.state.nodes[job.validator].name, lambda detail: detail)
        details = [
            bend(detail) if outcome.outcome == ACCEPT else detail
            for outcome, detail in zip(judged.outcomes, judged.details, strict=True)
        ]
        raw = codec.encode(VerdictDetails(tuple(details)))
        digest = submission.intent.digest
        verdict = Verdict(job.job_id, digest, job.round, tuple(judged.outcomes), blake3(raw).digest(), 1)
        envelope = parse(self.sealed(self.state.nodes[job.validator].name, "verdict", verdict))
        await self.judging.verdict(Member(envelope, b""), verdict, raw)

    async def check(self) -> None:
        """Make every check that waits."""
        while await self.judging.checks.turn():
            pass

    async def close_batch(self) -> bool:
        """Close the next batch if it can be, as the coordinator does."""
        book, files = self.book, self.coordinator.files
        groups = batches.choose(book.state, book.window)
        if not groups:
            return False
        step, epoch = book.window.batches, book.state.newest_policy.epoch
        entries = batches.entries_of(book.state, groups)
        raw = batches.build(book.run, book.state, files, step, epoch, entries, self.coordinator.prompt_ids)
        book.append("batch", batches.closed(step, epoch, entries, raw))
        files.batch(step).parent.mkdir(exist_ok=True)
        write_atomic(files.batch(step), raw)
        await self.publish_next()
        return True

    async def step(self, honest: list[str], false: list[str] = (), how: str = "reward", checked: bool = True) -> None:
        """Leases until one more batch is closed."""
        for _ in range(50):
            for name in [*honest, *false]:
                if self.decide(name).kind == "issue":
                    index = self.work(name, "honest" if name in honest else how)
                    await self.judge_all(index)
            if checked:
                await self.check()
            self.tick()
            for index in list(self.book.window.unjudged):
                await self.judge_all(index)
            if await self.close_batch():
                return
        raise AssertionError("no batch could be closed")

    def accusations(self) -> list[VerdictEvidence]:
        entries = [stored.entry() for stored in self.book.ledger.entries()]
        return [codec.decode(VerdictEvidence, entry.body) for entry in entries if entry.event == "evidence.verdict"]

    def trained_of(self, name: str) -> int:
        """Rollouts of a node that batches hold."""
        key = next(node.key for node in self.state.nodes.values() if node.name == name)
        return sum(self.state.submissions[index].owner == key for index, _ in self.state.trained)

    async def seal(self) -> None:
        """As at the run's end: secrets shown, everything in the archive."""
        self.judging.drawing.reveal_all()
        await self.book.commit()
        self.book.seal(self.run_dir / "ledger")


def _other_reward(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, reward=1.0 - rollout.reward)


def _other_token(rollout: Rollout) -> Rollout:
    """The first token is another one; proof and log-probabilities stay those of the true ones."""
    tokens = np.frombuffer(rollout.tokens, "<u4").copy()
    tokens[0] = 3 if tokens[0] != 3 else 4
    return dataclasses.replace(rollout, tokens=struct.pack(f"<{len(tokens)}I", *tokens))
