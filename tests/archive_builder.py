"""Makes real run archives for tests: real models, proofs, publications, on the ledgers of `ledger_builder`.

    build_archive     a whole run directory: tiny random Qwen3, real rollouts, proofs, verdicts, publications, ledger
    invert_verdicts   turn every verdict of a run directory around and sign everything again with the given keys

Nothing in here skips a check that production code makes. Torch is imported by `build_archive` only.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from protocol import codec
from protocol.envelope import Envelope, open_envelope, seal
from protocol.identity import Identity, load_identity
from protocol.ledger import TREE_KIND, Ledger
from protocol.manifest import (
    Bf16Thresholds,
    LeasePolicy,
    ModelFile,
    ModelSpec,
    RunManifest,
    SamplingSpec,
    Thresholds,
)
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import (
    ACCEPT,
    FINISH_EOS,
    FINISH_LENGTH,
    REJECT,
    Batch,
    Lease,
    LedgerEntry,
    Outcome,
    Rollout,
    Submission,
    TrainingRollout,
    TreeHead,
    Verdict,
)
from protocol.run_files import update_file
from protocol.seeds import group_id, sampling_seed
from protocol.segments import pack_segment, read_segments, seal_missing, segment_name
from protocol.sequences import Sequences
from protocol.state import fold
from tests.ledger_builder import START_MS, Chain, ListSink, identity, make_manifest

__all__ = [
    "START_MS",
    "BuiltArchive",
    "Chain",
    "ListSink",
    "build_archive",
    "decode_lease",
    "identities_in",
    "identity",
    "invert_verdicts",
    "make_manifest",
    "reseal",
    "rewrite",
    "write_updates",
]

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


def copy_archive(built: BuiltArchive, into: Path) -> Path:
    """A copy to damage, without the folders that an auditor never gets or does without."""
    target = into / "run"
    shutil.copytree(built.root, target, ignore=shutil.ignore_patterns("state", "checkpoints", "model", ".lock"))
    return target


def build_archive(
    root: Path,
    steps: int = 2,
    leases_per_step: int = 2,
    before_end: Callable[[_Builder], None] = lambda builder: None,
    bf16: Bf16Thresholds | None = None,
) -> BuiltArchive:
    """A run of `steps` batches by two honest nodes and one whose claimed rewards are wrong.

    `before_end` may add to it before the secret is shown and the run is finished: `builder.chain`, `builder.work`.
    With `bf16` it is a run of that profile, whose nodes compute in bfloat16.

    Weights are published by the real origin from checkpoints that differ a little each step; rollouts are decoded
    from them under the leases' seeds; verdicts are what `judge_upload` says; the ledger is the real one.
    """
    import torch

    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Builder(root, steps, leases_per_step, before_end, bf16).build()


class _Builder:
    def __init__(
        self,
        root: Path,
        steps: int,
        leases_per_step: int,
        before_end: Callable[[_Builder], None],
        bf16: Bf16Thresholds | None,
    ) -> None:
        from environments.registry import make

        self.root = root
        self.steps = steps
        self.leases_per_step = leases_per_step
        self.before_end = before_end
        self.bf16 = bf16
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
        chain.append("policy", b"", self._head(self.steps))
        chain.reveal()
        chain.finish(self.steps)
        asyncio.run(ledger.commit())
        seal_missing(ledger, self.root / "ledger")
        ledger.close()
        write_updates(self.root, chain.links.updates)
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
            profile="fp32" if self.bf16 is None else "bf16",
            bf16=self.bf16,
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
        chain.append("policy", b"", self._head(step))
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

    def _head(self, step: int) -> bytes:
        """As it was published: the last frame."""
        from shardcast.publication import split_frames

        return split_frames((self.root / "published" / f"e0000-s{step:08d}" / "publication.hw").read_bytes())[-1]

    def policy_of(self, step: int, *, to_sample: bool = False):
        from shardcast.archive import open_published
        from verifier.profiles import load_to_sample, load_to_verify

        into = self.root / ".build"
        published = open_published(self.root, self.chain.run).materialise(0, step, into)
        load = load_to_sample if to_sample else load_to_verify
        policy = load(published.directory, self.chain.run.manifest.profile, root=published.root)
        shutil.rmtree(into)
        return policy

    def state(self):
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
        sampler = policy if self.bf16 is None else self.policy_of(step, to_sample=True)
        submission = decode_lease(chain.run_id, lease, sampler, self.environment, honest)
        raw = codec.encode(submission)
        blob = zstandard.ZstdCompressor(level=3).compress(raw)
        (files / f"{lease_id.hex()}.hws").write_bytes(blob)
        index = chain.submit(lease_id, blob, len(raw))
        self.submissions[index] = lease_id
        judgement = judge_upload(chain.links.at(lease.manifest), lease, blob, len(raw), policy, self.environment)
        details = codec.encode(judgement.verdict_details())
        digest = blake3(blob).digest()
        by_rate = chain.wants_second(self.state(), index)
        jobs = []
        for round_ in (1, 2):
            if round_ == 1 or by_rate or refused:
                if round_ == 2 and not by_rate:  # drawn only after the first one's rejection
                    self._answer(lease_id, jobs.pop(), judgement, details, digest)
                validator = chain.draw(self.state(), index, round_)
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
    from verifier.toploc import LIMBS, build_proofs

    limbs = LIMBS["fp32" if policy.weights == torch.float32 else "bf16"]
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
                tuple(build_proofs(one.states_NH, limbs)),
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


def write_updates(root: Path, raws: list[bytes]) -> None:
    """As `trainer key` leaves them: where a coordinator looks for the manifest's updates."""
    for number, raw in enumerate(raws, 1):
        path = update_file(root, number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)


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
