"""Batch files: built from ledger and archive, the same bytes again, and verdicts that could not make one refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from environments import registry
from protocol import codec
from protocol.errors import DecodeError, LedgerError, ReasonCode, UsageError
from protocol.records import (
    ACCEPT,
    Batch,
    Lease,
    Outcome,
    Rollout,
    RolloutDetail,
    Submission,
    TrainingRollout,
    Verdict,
    VerdictDetails,
)
from protocol.state import RunState
from tests.test_trainer_leases import Bench
from trainer import batches, incoming, init
from trainer.decoded import Decoded
from trainer.trainable import Trainable, vocabulary_of
from trainer.window import Window
from verifier.claims import digest_of

RULES = Trainable(64, 256)
TOKENS = np.asarray([5, 6, 1], "<u4").tobytes()
BOUND = 2.0**-10
CLAIMED, MEASURED = (np.full(3, value, "<f4").tobytes() for value in (-0.5, -0.5 + BOUND))


def upload_of(lease: Lease, tokens: bytes = TOKENS) -> bytes:
    named = [(task, sample) for task in lease.tasks for sample in range(lease.samples)]
    rollouts = tuple(
        Rollout(task, sample, tokens, CLAIMED[:4] * (len(tokens) // 4), 0, float(i % 2), ())
        for i, (task, sample) in enumerate(named)
    )
    raw = codec.encode(Submission(lease.lease_id, "test", rollouts))
    return zstandard.ZstdCompressor().compress(raw)


def details_of(lease: Lease, logprobs: bytes = MEASURED, reward: float | None = None) -> bytes:
    count = len(lease.tasks) * lease.samples
    rewards = [float(i % 2) if reward is None else reward for i in range(count)]
    return codec.encode(VerdictDetails(tuple(RolloutDetail(logprobs, found, ()) for found in rewards)))


class Archive(Bench):
    """A bench whose submissions and verdict details are on disk."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.files = batches.Files(directory)
        for name in ("submissions", "batches"):
            (directory / name).mkdir()
        self.chain.policy(0)

    def one(self, who: str) -> Lease:
        lease = self.take(who)
        blob, details = upload_of(lease), details_of(lease)
        index = self.chain.submit(lease.lease_id, blob, zstandard.frame_content_size(blob))
        self.files.submission(lease.lease_id).write_bytes(blob)
        self.files.details(lease.lease_id, 1).write_bytes(details)
        outcomes = [Outcome(ACCEPT, "holds")] * self.state.leases[lease.lease_id].rollouts
        job = self.chain.job(index, "v0")
        self.chain.verdict(job, blake3(blob).digest(), "v0", outcomes, 1, blake3(details).digest())
        return lease

    def build(self) -> tuple[tuple[batches.BatchEntry, ...], bytes]:
        entries = batches.entries_of(self.state, batches.choose(self.state, self.window))
        raw = batches.build(
            self.chain.run, self.state, self.files, 0, 0, entries, lambda _env, task: bytes([task, 0, 0, 0])
        )
        return entries, raw


def filled(directory: Path) -> Archive:
    archive = Archive(directory)
    archive.one("node-0")
    archive.one("node-1")
    assert batches.choose(archive.state, archive.window), "two strangers' first leases make a batch of 8"
    return archive


def test_a_batch_carries_the_validators_numbers_and_is_the_same_bytes_again(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    entries, raw = archive.build()
    batch = codec.decode(Batch, raw)
    assert [(r.submission, r.verdict, r.rollout) for r in batch.rollouts] == [
        (e.submission, e.verdict, e.rollout) for e in entries
    ]
    assert {r.logprobs for r in batch.rollouts} == {MEASURED}
    assert [r.reward for r in batch.rollouts[:4]] == [0.0, 1.0, 0.0, 1.0]
    assert {r.prompt[0] for r in batch.rollouts} == {0, 1}
    assert len({r.group for r in batch.rollouts}) == 2
    assert archive.build()[1] == raw
    assert batches.closed(0, 0, entries, raw).digest == blake3(raw).digest()


@pytest.mark.parametrize("which", ["submission", "details"])
def test_an_archive_that_lost_or_changed_a_record_makes_no_batch(tmp_path: Path, which: str) -> None:
    archive = filled(tmp_path)
    lease_id = next(iter(archive.state.leases))
    path = archive.files.submission(lease_id) if which == "submission" else archive.files.details(lease_id, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(LedgerError, match="is not what the ledger names") as changed:
        archive.build()
    assert changed.value.code is ReasonCode.HASH_MISMATCH
    path.unlink()
    with pytest.raises(LedgerError, match="restore the run directory") as lost:
        archive.build()
    assert lost.value.code is ReasonCode.RECORD_MISSING


def test_what_was_decoded_lately_is_not_read_again_and_gives_the_same_batch(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    fresh = archive.build()[1]
    for index, submission in archive.state.submissions.items():
        batches.read_submission(archive.files, submission)
        details = batches.read_details(archive.state, archive.files, index, submission.verdicts[1].index)
        stated = submission.verdicts[1].verdict.details
        archive.files.decoded.keep(stated, details, 1000, len(details.rollouts))
    for path in (tmp_path / "submissions").iterdir():
        path.unlink()
    assert archive.build()[1] == fresh
    archive.files = batches.Files(tmp_path)
    with pytest.raises(LedgerError, match="restore the run directory"):
        archive.build()


def test_what_is_kept_decoded_is_bounded_by_bytes_and_the_oldest_goes_first() -> None:
    kept = Decoded(max_bytes=10_000)
    records = {bytes([number]) * 32: VerdictDetails((RolloutDetail(bytes(number), 0.0, ()),)) for number in range(20)}
    for digest, record in records.items():
        kept.keep(digest, record, 2000, 1)
        kept.get(VerdictDetails, bytes(32))
        assert kept.held_bytes <= 10_000
    held = [digest[0] for digest in records if kept.get(VerdictDetails, digest) is not None]
    assert held == [0, 18, 19], "three fit; the one asked for again and again stays"
    assert kept.get(Submission, bytes([19]) * 32) is None, "another class of record has other bytes"
    kept.keep(bytes([99]) * 32, records[bytes(32)], 10_001, 0)
    assert kept.get(VerdictDetails, bytes([99]) * 32) is None and kept.held_bytes <= 10_000


class Refusals:
    """One submission on the desk, and verdicts on it."""

    def __init__(self, directory: Path, tokens: bytes = TOKENS, prompt: int = 3) -> None:
        self.archive = Archive(directory)
        self.lease = self.archive.take("node-0")
        self.blob = upload_of(self.lease, tokens)
        index = self.archive.chain.submit(self.lease.lease_id, self.blob, zstandard.frame_content_size(self.blob))
        self.submission = self.archive.state.submissions[index]
        self.prompt = np.full(prompt, 5, "<u4").tobytes()

    def check(
        self,
        details: bytes,
        outcomes: int = 4,
        upload: bytes | None = None,
        digest: bytes | None = None,
        pure: bool = True,
    ) -> None:
        stated = (Outcome(ACCEPT, "holds"),) * outcomes
        bound = blake3(details).digest() if digest is None else digest
        verdict = Verdict(bytes(16), self.submission.intent.digest, 1, stated, bound, 1)
        opens = lambda: batches.open_submission(self.blob if upload is None else upload, self.submission)  # noqa: E731
        prompts = lambda _env, _task: self.prompt  # noqa: E731
        batches.check_details(verdict, details, self.submission, self.lease, opens, RULES, prompts, BOUND, pure=pure)


def test_verdicts_whose_details_could_not_make_a_batch_are_refused(tmp_path: Path) -> None:
    desk = Refusals(tmp_path)
    check, lease = desk.check, desk.lease
    check(details_of(lease))
    with pytest.raises(DecodeError, match="not the ones the verdict names"):
        check(details_of(lease), digest=bytes(32))
    with pytest.raises(DecodeError, match="speaks of 3"):
        check(details_of(lease), outcomes=3)
    with pytest.raises(DecodeError, match="2 log-probabilities"):
        check(details_of(lease, MEASURED[:8]))
    with pytest.raises(DecodeError):
        check(b"no record")
    with pytest.raises(DecodeError):
        check(details_of(lease), upload=b"no frame")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 22))
    with pytest.raises(DecodeError, match="another size than the intent"):
        check(details_of(lease), upload=bomb)


def test_details_that_name_other_tokens_than_were_sent_are_refused(tmp_path: Path) -> None:
    """Which rollouts are equal, and count once, is told by this hash: neither node nor validator may choose it."""
    desk = Refusals(tmp_path)
    details = codec.decode(VerdictDetails, details_of(desk.lease)).rollouts

    def named(digest: bytes) -> bytes:
        return codec.encode(VerdictDetails((*details[:-1], replace(details[-1], digest=digest))))

    desk.check(named(digest_of(desk.prompt, TOKENS)))
    desk.check(named(b""))  # a validator of an older release
    for other in (bytes(16), digest_of(desk.prompt, TOKENS[4:]), digest_of(b"", TOKENS)):
        with pytest.raises(DecodeError, match="rollout 3 was accepted with the hash of other tokens") as refused:
            desk.check(named(other))
        assert refused.value.code is ReasonCode.VERDICT_WRONG


def test_where_scoring_is_not_pure_an_accepted_reward_may_be_another_than_the_claimed_one(tmp_path: Path) -> None:
    desk = Refusals(tmp_path)
    judged = details_of(desk.lease, reward=0.5)
    with pytest.raises(DecodeError, match=r"with reward 0\.5, but it claims 0"):
        desk.check(judged)
    desk.check(judged, pure=False)
    with pytest.raises(DecodeError, match="can't be trained on"):
        desk.check(details_of(desk.lease, reward=1e30), pure=False)


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


UNTRAINABLE: dict[str, dict[str, Any]] = {
    "an id the model has not": {"tokens": np.asarray([5, RULES.vocabulary, 1], "<u4").tobytes()},
    "no token": {"tokens": b"", "logprobs": b""},
    "one log-probability too few": {"logprobs": floats(-1, -1)},
    "one too many": {"logprobs": floats(-1, -1, -1, -1)},
    "more than the context": {"prompt": RULES.max_context},
    "no number": {"logprobs": floats(-1, np.nan, -1)},
    "minus infinity": {"logprobs": floats(-1, -np.inf, -1)},
}


@pytest.mark.parametrize("name", sorted(UNTRAINABLE))
def test_whatever_the_learner_would_refuse_no_verdict_can_bring_into_a_batch(tmp_path: Path, name: str) -> None:
    """One ACCEPT decides and the batch is in the ledger: what the learner can't train on would end the run."""
    spoiled = {"tokens": TOKENS, "prompt": 3, "logprobs": MEASURED, "reward": 0.0} | UNTRAINABLE[name]
    desk = Refusals(tmp_path, spoiled["tokens"], spoiled["prompt"])
    with pytest.raises(DecodeError, match="rollout 0 was accepted"):
        desk.check(details_of(desk.lease, spoiled["logprobs"], spoiled["reward"]))
    numbers = (spoiled["tokens"], spoiled["logprobs"], spoiled["reward"])
    taken = TrainingRollout(0, 0, 0, bytes(16), 0, 0, desk.prompt, *numbers)
    path, run = tmp_path / "step-00000000.hwb", desk.archive.chain.run.id
    path.write_bytes(codec.encode(Batch(run, 0, 0, (taken,))))
    door = incoming.Door(run, 0, RULES.vocabulary, RULES.max_context, 2)
    if name in ("no number", "minus infinity"):  # left out of the step, alone
        assert not incoming.read_batch(path, 0, door).sequences[0].finite
        return
    with pytest.raises(incoming.BatchError):
        incoming.read_batch(path, 0, door)


@pytest.mark.parametrize(
    "spoiled", [{"logprobs": floats(-1, 1, -1)}, {"logprobs": floats(-1, -99, -1)}, {"reward": 1e7}]
)
def test_numbers_no_honest_validator_finds_are_refused(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    desk = Refusals(tmp_path)
    with pytest.raises(DecodeError, match="can't be trained on"):
        desk.check(details_of(desk.lease, **spoiled))


def test_more_tokens_than_the_lease_allows_are_refused(tmp_path: Path) -> None:
    longest = Refusals(tmp_path).lease.max_new_tokens
    for folder, count in (("longest", longest), ("longer", longest + 1)):
        (tmp_path / folder).mkdir()
        desk = Refusals(tmp_path / folder, np.full(count, 5, "<u4").tobytes())
        with pytest.raises(DecodeError, match="the lease allows") if count > longest else contextlib.nullcontext():
            desk.check(details_of(desk.lease, CLAIMED[:4] * count))


@pytest.mark.parametrize(
    ("name", "spoiled", "words"),
    [
        ("flipped", {"reward": 1.0}, "with reward 1, but it claims 0"),
        ("huge", {"reward": 1e5}, "with reward 100000"),
        ("nearly", {"reward": 1e-12}, "with reward 1e-12"),
        (
            "off by more than the bound",
            {"logprobs": floats(-0.5, -0.5, -0.5 - 1.01 * BOUND), "reward": None},
            "further",
        ),
        ("likelier", {"logprobs": floats(-0.25, -0.25, -0.25), "reward": None}, "further than"),
    ],
)
def test_details_that_contradict_the_upload_they_accept_are_refused(
    tmp_path: Path, name: str, spoiled: dict[str, Any], words: str
) -> None:
    """An honest ACCEPT means that these numbers are equal, so whoever sends others would choose what is trained on."""
    desk = Refusals(tmp_path)
    with pytest.raises(DecodeError, match=words) as caught:
        desk.check(details_of(desk.lease, **spoiled))
    assert caught.value.code is ReasonCode.VERDICT_WRONG


def test_a_model_says_how_many_ids_it_has(tmp_path: Path) -> None:
    assert vocabulary_of(Path(init.__file__).parent / "data" / "tiny") == RULES.vocabulary
    for text in ("", "{}", "[]", '{"vocab_size": 0}', '{"vocab_size": "many"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match="vocab"):
            vocabulary_of(tmp_path)


def test_prompts_are_tokenised_as_the_verifier_does_it() -> None:
    """No special tokens, the model's own tokenizer.json; the coordinator does it without torch."""
    transformers = pytest.importorskip("transformers")
    model = Path(init.__file__).parent / "data" / "tiny"
    environment = registry.make("word", {"transform": "reverse"})
    ids = batches.tokenizer_prompts(model, lambda _digest, task: environment.task(task).prompt)
    other = transformers.AutoTokenizer.from_pretrained(model)
    for task in range(50):
        expected = other(environment.task(task).prompt, add_special_tokens=False)["input_ids"]
        assert np.frombuffer(ids(environment.digest, task), "<u4").tolist() == expected


def test_no_batch_closes_without_weights() -> None:
    state = RunState()
    bench = Bench()
    state.manifest = bench.chain.manifest
    assert batches.choose(state, Window(2, state)) == []
