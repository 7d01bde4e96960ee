"""Makes real ledgers and real run archives for tests: real keys, envelopes, models, proofs, publications.

    Chain             identities of a small run and one method per ledger event; writes to any sink
    make_manifest     a complete RunManifest
    build_archive     a whole run directory: tiny random Qwen3, real rollouts, proofs, verdicts, publications, ledger
    invert_verdicts   turn every verdict of a run directory around and sign everything again with the given keys

Nothing in here skips a check that production code makes. Torch is imported by `build_archive` only.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from protocol import codec, decision, draws
from protocol.chain import Chain as ManifestChain
from protocol.chain import Revocation, RunUpdate, delegate, seal_update
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity, load_identity
from protocol.ledger import TREE_KIND, Ledger
from protocol.manifest import (
    MANIFEST_KIND,
    EnvironmentSpec,
    LeasePolicy,
    ModelFile,
    ModelSpec,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import (
    ACCEPT,
    FINISH_EOS,
    FINISH_LENGTH,
    REJECT,
    Batch,
    BatchClosed,
    BatchEntry,
    DrawsOpened,
    DrawsRevealed,
    JobDrawn,
    JoinRequest,
    Lease,
    LeaseClosed,
    LedgerEntry,
    Outcome,
    RoleGrant,
    Rollout,
    RunFinished,
    Submission,
    TrainingRollout,
    TreeHead,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
)
from protocol.seeds import group_id, sampling_seed
from protocol.segments import pack_segment, read_segments, seal_missing, segment_name
from protocol.sequences import Sequences
from protocol.state import PolicyHead, fold

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
        self._period_of: dict[int, int] = {}

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
            duration_ms=60_000,
            max_bytes=1 << 20,
        )
        lease = replace(lease, **more)
        self.leases[lease.lease_id] = lease
        self.owners[lease.lease_id] = who
        self.append("lease", b"", self.sealed(self.coordinator, "lease", lease, audience=identity(who).public))
        return lease.lease_id

    def close_lease(self, lease_id: bytes, reason: str = "expired") -> int:
        return self.append("lease.closed", LeaseClosed(lease_id, reason))

    def submit(self, lease_id: bytes, blob: bytes | None = None, raw_length: int = 100) -> int:
        if not self.periods and self._present is not None:
            self.open_draws()
        data = blob if blob is not None else lease_id * 4
        intent = UploadIntent(lease_id, len(data), raw_length, blake3(data).digest())
        index = self.append("submission", b"", self.sealed(self.owners[lease_id], "intent", intent))
        self._period_of[index] = max(0, self.periods - 1)
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
        period = self._period_of.get(submission, max(0, self.periods - 1))
        job_id = draws.job_id(self.secret(period), submission, round_, attempt)
        self.append("job", JobDrawn(job_id, submission, identity(validator).public, round_, period, attempt))
        return job_id

    def draw(self, state, submission: int, round_: int = 1) -> str:
        """Whom the rule draws for the next job of a round; `state` is the fold so far. Append it with `job`."""
        held = state.submissions[submission]
        before = held.jobs.get(round_)
        chosen = draws.draw_validator(
            self.secret(held.period),
            held.intent.digest,
            submission,
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
            self.secret(held.period), held.intent.digest, submission, rate, held.probation
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


# --- a whole archive ----------------------------------------------------------------------------------------------

PAD, EOS = 0, 1
CHARACTERS = "abcdefghij="


@dataclass
class BuiltArchive:
    """What a test needs to know about an archive made by `build_archive`."""

    root: Path
    chain: Chain
    accepted: int
    submissions: dict[int, bytes]
    """Ledger index -> lease id."""
    verdicts: list[int]
    identities: dict[bytes, Identity]
    """Every key of the run, by public key."""


def build_archive(
    root: Path, steps: int = 2, leases_per_step: int = 2, before_end: Callable[[_Builder], None] = lambda builder: None
) -> BuiltArchive:
    """A run of `steps` batches by two honest nodes and one whose claimed rewards are wrong.

    `before_end` may add to it before the secret is shown and the run is finished: `builder.chain`, `builder.work`.

    Weights are published by the real origin from checkpoints that differ a little each step; rollouts are decoded
    from them under the leases' seeds; verdicts are what `judge_upload` says; the ledger is the real one.
    """
    import torch

    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Builder(root, steps, leases_per_step, before_end).build()


class _Builder:
    def __init__(self, root: Path, steps: int, leases_per_step: int, before_end: Callable[[_Builder], None]) -> None:
        from environments.registry import make

        self.root = root
        self.steps = steps
        self.leases_per_step = leases_per_step
        self.before_end = before_end
        self.environment = make("word", {"transform": "reverse", "low": 2, "high": 4, "letters": "abcdefghij"})
        self.time = START_MS
        self.accepted = 0
        self.submissions: dict[int, bytes] = {}
        self.verdicts: list[int] = []

    def build(self) -> BuiltArchive:
        for name in ("model", "checkpoints", "submissions", "batches", "ledger"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        model = _write_model(self.root / "model")
        self.chain = chain = Chain(self._manifest())
        (self.root / "manifest.hw").write_bytes(chain.run.envelope.raw)
        for step in range(self.steps + 1):
            _write_checkpoint(self.root / "checkpoints" / f"step-{step:08d}", model, step)
        asyncio.run(self._publish())
        ledger = Ledger.open(
            self.root / "state" / "ledger.db",
            run=chain.run_id,
            coordinator=identity("coordinator"),
            sequences=Sequences(self.root / "state" / "sequences.json"),
            clock_ms=self._clock,
            monotonic_ms=lambda: self.time,
        )
        chain.sink = ledger
        chain.open()
        for who, role in (("val", "validator"), ("vic", "validator"), ("rel", "relay")):
            chain.join(who, role)
        for who in ("ann", "bob", "mal"):
            chain.join(who, "inference")
        chain.ready("val", "vic")
        for step in range(self.steps):
            self._step(step)
            asyncio.run(ledger.commit())
            seal_missing(ledger, self.root / "ledger")
        self.before_end(self)
        last = self.root / "published" / f"e0000-s{self.steps:08d}" / "head.hw"
        chain.append("policy", b"", last.read_bytes())
        chain.reveal()
        chain.finish(self.steps)
        asyncio.run(ledger.commit())
        seal_missing(ledger, self.root / "ledger")
        ledger.close()
        names = ["root", "coordinator", "coordinator-2", "origin", "val", "vic", "rel", "ann", "bob", "cat", "mal"]
        keys = {identity(name).public: identity(name) for name in names}
        return BuiltArchive(self.root, chain, self.accepted, self.submissions, self.verdicts, keys)

    def _clock(self) -> int:
        self.time += 10
        return self.time

    def _manifest(self) -> RunManifest:
        from shardcast.layout import layout_hash, layout_of_safetensors

        files = []
        for name in ("config.json", "tokenizer.json"):
            data = (self.root / "model" / name).read_bytes()
            files.append(ModelFile(name, len(data), blake3(data).digest()))
        layout = layout_hash(layout_of_safetensors(self.root / "model" / "model.safetensors"))
        return make_manifest(
            model=ModelSpec("Qwen3ForCausalLM", "float32", layout, 64, tuple(files)),
            environments=(self.environment.spec(),),
            sampling=SamplingSpec(1.0, 6, (EOS,)),
            thresholds=Thresholds(3e-6, 4, 2.0**-14, 1e-4, 1e-4, 200, 2000, 1e-7, 0, 1e-6, 1e-6, "test"),
            leases=LeasePolicy(2, 4, 2, 2, 4, 1000, 60_000, 5_000, 0.1),
            steps=self.steps,
        )

    async def _publish(self) -> None:
        from shardcast.origin import Origin

        origin = Origin(self.root, identity=identity("origin"), clock_ms=lambda: START_MS)
        try:
            await origin.start()
            published = await origin.publish_ready()
            assert published == self.steps + 1
        finally:
            await origin.close()

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        chain = self.chain
        head = self.root / "published" / f"e0000-s{step:08d}" / "head.hw"
        chain.append("policy", b"", head.read_bytes())
        policy = self.policy_of(step)
        entries, rollouts = [], []
        for number in range(self.leases_per_step):
            who = ("ann", "bob")[number % 2]
            tasks = (100 * step + 2 * number, 100 * step + 2 * number + 1)
            made = self.work(who, step, policy, tasks, honest=True)
            entries += made[0]
            rollouts += made[1]
        if step == 0:
            self.work("mal", step, policy, (50, 51), honest=False)
        raw = codec.encode(Batch(chain.run_id, 0, step, tuple(rollouts)))
        chain.batch(step, entries, blake3(raw).digest())
        (self.root / "batches" / f"step-{step:08d}.hwb").write_bytes(raw)

    def policy_of(self, step: int):
        from shardcast.archive import open_published
        from verifier.model import load_policy

        into = self.root / ".build"
        published = open_published(self.root, self.chain.run).materialise(0, step, into)
        policy = load_policy(published.directory, root=published.root)
        shutil.rmtree(into)
        return policy

    def _state(self):
        return fold(stored.entry() for stored in self.chain.sink.entries())

    def _answer(self, lease_id: bytes, job: tuple[int, str, bytes], judgement, details: bytes, digest: bytes) -> int:
        round_, validator, job_id = job
        (self.root / "submissions" / f"{lease_id.hex()}.{round_}.hwv").write_bytes(details)
        hashed = blake3(details).digest()
        index = self.chain.verdict(job_id, digest, validator, judgement.outcomes, round_, hashed)
        self.verdicts.append(index)
        return index

    def work(self, who: str, step: int, policy, tasks, honest: bool, refused: bool | None = None):
        """One lease from its issue to its deciding verdict; returns batch entries and training rollouts.

        Args:
            refused: what the judge must say of it; by default, that dishonest work is refused.
        """
        import zstandard

        from verifier.judge import judge_upload

        chain, files = self.chain, self.root / "submissions"
        refused = not honest if refused is None else refused
        lease_id = chain.lease(who, step=step, root=policy.root, tasks=tasks)
        lease = chain.leases[lease_id]
        submission = decode_lease(chain.run_id, lease, policy, self.environment, honest)
        raw = codec.encode(submission)
        blob = zstandard.ZstdCompressor(level=3).compress(raw)
        (files / f"{lease_id.hex()}.hws").write_bytes(blob)
        index = chain.submit(lease_id, blob, len(raw))
        self.submissions[index] = lease_id
        judgement = judge_upload(chain.links.at(lease.manifest), lease, blob, len(raw), policy, self.environment)
        details = codec.encode(judgement.verdict_details())
        digest = blake3(blob).digest()
        by_rate = chain.wants_second(self._state(), index)
        jobs = []
        for round_ in (1, 2):
            if round_ == 1 or by_rate or refused:
                if round_ == 2 and not by_rate:  # drawn only after the first one's rejection
                    self._answer(lease_id, jobs.pop(), judgement, details, digest)
                validator = chain.draw(self._state(), index, round_)
                jobs.append((round_, validator, chain.job(index, validator, round_)))
        for job in jobs:
            verdict = self._answer(lease_id, job, judgement, details, digest)
        said = {outcome.outcome for outcome in judgement.outcomes}
        assert said == ({REJECT} if refused else {ACCEPT}), judgement
        if refused:
            return [], []
        self.accepted += len(judgement.outcomes)
        entries, rollouts = [], []
        for i, (rollout, detail) in enumerate(zip(submission.rollouts, judgement.details, strict=True)):
            entries.append((index, verdict, i))
            prompt = prompt_of(policy, self.environment, rollout.task)
            rollouts.append(
                TrainingRollout(
                    index,
                    verdict,
                    i,
                    group_id(lease.nonce, rollout.task),
                    0,
                    step,
                    u32(prompt),
                    rollout.tokens,
                    detail.logprobs,
                    detail.reward,
                )
            )
        return entries, rollouts


def u32(ids) -> bytes:
    import numpy as np

    return np.asarray(ids, dtype="<u4").tobytes()


def prompt_of(policy, environment, task: int) -> list[int]:
    from verifier.model import prompt_ids

    return prompt_ids(policy.tokenizer, environment.task(task).prompt)


def decode_lease(run_id: bytes, lease: Lease, policy, environment, honest: bool = True) -> Submission:
    """Sample what a lease forces, prove it, score it. A dishonest one claims the opposite reward."""
    import numpy as np
    import torch

    from verifier.logprobs import token_logprobs
    from verifier.model import completion_text
    from verifier.sampling import choose, gumbel_noise
    from verifier.toploc import build_proofs

    prompts, seeds, tasks = [], [], []
    for task in lease.tasks:
        for sample in range(lease.samples):
            prompts.append(prompt_of(policy, environment, task))
            seeds.append(sampling_seed(run_id, lease.nonce, task, sample))
            tasks.append((task, sample))
    tokens: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    while running:
        filled = policy.prefill([(prompts[i], [*tokens[i], PAD]) for i in running])
        for i, one in zip(list(running), filled, strict=True):
            position = len(prompts[i]) + len(tokens[i])
            noise = gumbel_noise([seeds[i]], [position], policy.vocabulary)
            token = int(choose(torch.from_numpy(one.logits_NV[-1:]), 1.0, noise)[0])
            tokens[i].append(token)
            if token == EOS or len(tokens[i]) == lease.max_new_tokens:
                running.remove(i)
    filled = policy.prefill(list(zip(prompts, tokens, strict=True)))
    rollouts = []
    for (task, sample), ids, one in zip(tasks, tokens, filled, strict=True):
        logprobs = token_logprobs(torch.from_numpy(one.logits_NV), torch.tensor(ids), 1.0).numpy()
        finish = FINISH_EOS if ids[-1] == EOS else FINISH_LENGTH
        text = completion_text(policy.tokenizer, ids, (EOS,))
        reward = environment.score(environment.task(task), text, finish == FINISH_EOS)
        rollouts.append(
            Rollout(
                task,
                sample,
                u32(ids),
                logprobs.astype(np.float32).tobytes(),
                finish,
                reward if honest else 1.0 - reward,
                tuple(build_proofs(one.states_NH)),
            )
        )
    return Submission(lease.lease_id, "test", tuple(rollouts))


def _write_model(out: Path):
    import tokenizers
    import transformers
    from safetensors.torch import save_file
    from tokenizers import decoders, models, pre_tokenizers

    config = transformers.Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(out)
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "tokenizer.json"))
    save_file(_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    return model


def _tensors(model) -> dict:
    tensors = dict(model.named_parameters())
    return {name: tensors[name].detach().clone().contiguous() for name in sorted(tensors)}


def _write_checkpoint(folder: Path, model, step: int) -> None:
    """As the learner does: weights first, `checkpoint.json` last. Each step's weights differ a little."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    if step:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-3)
    path = folder / "model.safetensors"
    save_file(_tensors(model), path, metadata={"format": "pt"})
    data = path.read_bytes()
    entry = {"size": len(data), "blake3": blake3(data).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps({"epoch": 0, "step": step, "files": {path.name: entry}}))


# --- rewriting history --------------------------------------------------------------------------------------------


def rewrite(root: Path, run, identities: dict[bytes, Identity], change: Callable[[LedgerEntry], LedgerEntry]) -> None:
    """Replace entries of a run directory's ledger in place and sign entries and tree heads again.

    Args:
        identities: private keys by public key; the coordinator's must be among them.
    """
    log = read_segments(root / "ledger", run)
    assert log.problems == []
    firsts = sorted(int(path.stem.split("-")[1]) for path in (root / "ledger").glob("segment-*.hwl"))
    tree = MerkleLog()
    for number, first in enumerate(firsts):
        last = firsts[number + 1] if number + 1 < len(firsts) else log.size
        raws = []
        for sealed in log.entries[first:last]:
            entry = change(sealed.entry)
            coordinator = identities[sealed.envelope.signer]
            raws.append(reseal(coordinator, sealed.envelope, entry).raw)
            tree.append(leaf_hash(raws[-1]))
        head = TreeHead(tree.size, tree.root(), log.entries[last - 1].entry.time)
        signed = seal(coordinator, TREE_KIND, head, run=run.id, sequence=number + 1, issued_at=head.time)
        (root / "ledger" / segment_name(first)).write_bytes(pack_segment(run.id, first, raws, signed.raw))
    assert read_segments(root / "ledger", run).problems == []


def reseal(signer: Identity, envelope: Envelope, record: object) -> Envelope:
    """The same envelope around another record, signed by the same key again."""
    assert signer.public == envelope.signer
    return seal(
        signer,
        envelope.kind,
        record,
        run=envelope.run,
        sequence=envelope.sequence,
        issued_at=envelope.issued_at,
        lifetime_ms=envelope.expires_at - envelope.issued_at,
        audience=envelope.audience,
    )


def identities_in(*folders: Path) -> dict[bytes, Identity]:
    """Every key file below these folders, by public key: what a demo's run and node homes hold."""
    found = [load_identity(path) for folder in folders for path in sorted(folder.rglob("*.pem"))]
    return {one.public: one for one in found}


def invert_verdicts(root: Path, run, identities: dict[bytes, Identity]) -> int:
    """Turn ACCEPT and REJECT of every verdict around, signed by its validator; returns how many verdicts."""
    count = 0

    def change(entry: LedgerEntry) -> LedgerEntry:
        nonlocal count
        if entry.event != "verdict":
            return entry
        count += 1
        envelope = open_envelope(entry.subject, run=run.id, kind="verdict")
        verdict = envelope.record(Verdict)
        turned = {ACCEPT: Outcome(REJECT, "proof-mismatch"), REJECT: Outcome(ACCEPT, "holds")}
        outcomes = tuple(turned.get(outcome.outcome, outcome) for outcome in verdict.outcomes)
        lied = reseal(identities[envelope.signer], envelope, replace(verdict, outcomes=outcomes))
        return replace(entry, subject=lied.raw)

    rewrite(root, run, identities, change)
    return count
