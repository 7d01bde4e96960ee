"""Batches: which groups the learner gets next, and the file it reads.

Choosing is pure: whole accepted groups, fresh enough, oldest first. Building reads the submission and the details of
the verdict that accepted it; the file is a function of ledger and archive, so a batch whose file was lost between its
ledger entry and the write is built again, byte for byte, and compared with the digest in the ledger.

Prompts are tokenised with the model's own tokenizer.json through `tokenizers`; nothing here imports torch.

Not covered: advantages and losses (the learner), whether a verdict is right (`verifier`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3

from protocol import codec
from protocol.errors import DecodeError, LedgerError, ProtocolError, ReasonCode, UsageError
from protocol.limits import MAX_REWARD, details_bound
from protocol.manifest import Run
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    Batch,
    BatchClosed,
    BatchEntry,
    Lease,
    Rollout,
    RolloutDetail,
    Submission,
    TrainingRollout,
    Verdict,
    VerdictDetails,
)
from protocol.seeds import group_id
from protocol.state import RunState, SubmissionState
from trainer.decoded import Decoded
from trainer.leases import batch_rollouts
from trainer.trainable import LOGPROB_MAX, LOGPROB_MIN, Trainable, in_range
from trainer.window import Group, Window
from verifier.claims import contradiction, digest_of
from verifier.compare import unfit

PromptIds = Callable[[bytes, int], bytes]
"""(environment digest, task index) -> the prompt's token ids, u32 little-endian."""


@dataclass(frozen=True)
class Files:
    """Where the archive keeps what batches are made from, and what of it was decoded lately."""

    run_dir: Path
    decoded: Decoded = field(default_factory=Decoded, compare=False)

    def submission(self, lease_id: bytes) -> Path:
        return self.run_dir / "submissions" / f"{lease_id.hex()}.hws"

    def details(self, lease_id: bytes, round_number: int) -> Path:
        return self.run_dir / "submissions" / f"{lease_id.hex()}.{round_number}.hwv"

    def batch(self, step: int) -> Path:
        return self.run_dir / "batches" / f"step-{step:08d}.hwb"


def choose(state: RunState, window: Window) -> list[Group]:
    """The groups of the next batch, oldest first; empty while it cannot close.

    Batch b closes when the policy of step b - 1 is published, so the learner is at most one batch behind, and enough
    whole groups are there. A group counts when all its rollouts were accepted, its policy is at most `max_staleness`
    steps older than b, its owner is not suspended, and it was not used.
    """
    manifest = state.manifest
    assert manifest is not None
    step = window.batches
    if step >= manifest.steps or state.newest_policy is None or state.newest_policy.step < step - 1:
        return []
    chosen: list[Group] = []
    wanted = batch_rollouts(manifest)
    for lease_id in sorted(window.live, key=lambda lease: _age(state, lease)):
        if not window.fresh(state.leases[lease_id]) or state.leases[lease_id].lease.step > step:
            continue
        for group in window.groups(lease_id):
            if group.status == "accepted":
                chosen.append(group)
                wanted -= len(group.rollouts)
            if wanted <= 0:
                return chosen
    return []


def _age(state: RunState, lease_id: bytes) -> tuple[int, int]:
    """Oldest policy first, then order of submission: what would go stale next is used next."""
    lease = state.leases[lease_id]
    return lease.lease.step, lease.index


def entries_of(state: RunState, groups: Iterable[Group]) -> tuple[BatchEntry, ...]:
    """The ledger's naming of these groups: submission, the verdict that accepted the rollout, position."""
    out = []
    for group in groups:
        index = state.leases[group.lease_id].submission
        for rollout in group.rollouts:
            verdict = None if index is None else state.submissions[index].outcomes[rollout].verdict
            if index is None or verdict is None:
                raise LedgerError("a rollout without submission or verdict was chosen", ReasonCode.BATCH_WRONG)
            out.append(BatchEntry(index, verdict, rollout))
    return tuple(out)


def build(
    run: Run,
    state: RunState,
    files: Files,
    step: int,
    epoch: int,
    entries: Iterable[BatchEntry],
    prompt_ids: PromptIds,
) -> bytes:
    """The bytes of one batch file.

    Raises:
        LedgerError: a submission or verdict that the ledger names is missing or differs in the archive.
    """
    read: dict[tuple[int, int], Judged] = {}
    named: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    rollouts = []
    for entry in entries:
        judged = read.get((entry.submission, entry.verdict))
        if judged is None:
            judged = read_judged(state, files, entry.submission, entry.verdict)
            read[(entry.submission, entry.verdict)] = judged
        position = entry.rollout // judged.lease.samples
        names = named.get((entry.submission, position))
        if names is None:  # once a group: it shares task, prompt and name
            task = judged.lease.tasks[position]
            names = (group_id(judged.lease.nonce, task), prompt_ids(judged.lease.environment, task))
            named[(entry.submission, position)] = names
        rollouts.append(judged.training(entry, *names))
    return codec.encode(Batch(run.id, epoch, step, tuple(rollouts)))


def closed(step: int, epoch: int, entries: tuple[BatchEntry, ...], raw: bytes) -> BatchClosed:
    """The ledger's record of a built batch."""
    return BatchClosed(step, epoch, entries, blake3(raw).digest())


@dataclass(frozen=True)
class Judged:
    """A submission with the details of one verdict on it."""

    index: int
    lease: Lease
    rollouts: tuple[Rollout, ...]
    details: tuple[RolloutDetail, ...]

    def training(self, entry: BatchEntry, group: bytes, prompt: bytes) -> TrainingRollout:
        rollout, detail = self.rollouts[entry.rollout], self.details[entry.rollout]
        return TrainingRollout(
            submission=entry.submission,
            verdict=entry.verdict,
            rollout=entry.rollout,
            group=group,
            epoch=self.lease.epoch,
            step=self.lease.step,
            prompt=prompt,
            tokens=rollout.tokens,
            logprobs=detail.logprobs,
            reward=detail.reward,
        )


def read_judged(state: RunState, files: Files, index: int, verdict: int) -> Judged:
    """A decided submission and the details of one of its verdicts: from the archive, checking both hashes, unless they
    were decoded lately.

    Raises:
        LedgerError: missing, or not what the ledger names.
    """
    submission = state.submissions[index]
    lease = state.leases[submission.lease_id].lease
    opened, details = read_submission(files, submission), read_details(state, files, index, verdict)
    return Judged(index, lease, opened.rollouts, details.rollouts)


def read_submission(files: Files, submission: SubmissionState) -> Submission:
    """An upload the ledger names, decoded.

    Raises:
        LedgerError: the archive lost or changed it, or it does not open.
    """
    digest, record = submission.intent.digest, f"submission/{submission.index}"
    known = files.decoded.get(Submission, digest)
    if known is not None:
        return known
    upload = _read(files.submission(submission.lease_id), digest, record)
    try:
        opened = open_submission(upload, submission)
    except ProtocolError as exc:
        raise LedgerError(f"{record} does not open: {exc}", exc.code) from exc
    files.decoded.keep(digest, opened, submission.intent.raw_length, len(opened.rollouts))
    return opened


def read_details(state: RunState, files: Files, index: int, verdict: int) -> VerdictDetails:
    """The details of the verdict at ledger index `verdict` on submission `index`, checked against its hash.

    Raises:
        LedgerError: missing, or not what the ledger names.
    """
    submission = state.submissions[index]
    number = next((number for number, held in submission.verdicts.items() if held.index == verdict), None)
    if number is None:
        raise LedgerError(f"submission {index} has no verdict {verdict}", ReasonCode.BATCH_WRONG)
    stated = submission.verdicts[number].verdict.details
    known = files.decoded.get(VerdictDetails, stated)
    if known is not None:
        return known
    raw = _read(files.details(submission.lease_id, number), stated, f"verdict/{verdict}")
    try:
        return codec.decode(VerdictDetails, raw)
    except ProtocolError as exc:
        raise LedgerError(f"verdict/{verdict} does not open again: {exc}", exc.code) from exc


def _read(path: Path, digest: bytes, record: str) -> bytes:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as exc:
        raise LedgerError(
            f"{record} is in the ledger but {path} is missing; the operator must restore the run directory",
            ReasonCode.RECORD_MISSING,
        ) from exc
    if blake3(raw).digest() != digest:
        raise LedgerError(
            f"{path} is not what the ledger names as {record}; the operator must restore the run directory",
            ReasonCode.HASH_MISMATCH,
        )
    return raw


def open_submission(raw: bytes, submission: SubmissionState) -> Submission:
    """Decompress and decode an upload whose hash was checked.

    Raises:
        DecodeError: the frame declares another size than the intent, or holds no submission.
    """
    declared = submission.intent.raw_length
    try:
        if zstandard.frame_content_size(raw) != declared:
            raise DecodeError("the zstd frame declares another size than the intent", ReasonCode.LENGTH_MISMATCH)
        opened = zstandard.ZstdDecompressor(max_window_size=1 << 23).decompress(raw, max_output_size=declared)
    except zstandard.ZstdError as exc:
        raise DecodeError(f"the submission does not decompress: {exc}") from exc
    if len(opened) != declared:
        raise DecodeError("the submission has another size than its intent", ReasonCode.LENGTH_MISMATCH)
    return codec.decode(Submission, opened)


def check_details(
    verdict: Verdict,
    raw: bytes,
    submission: SubmissionState,
    lease: Lease,
    upload: Callable[[], Submission],
    rules: Trainable,
    prompt_ids: PromptIds,
    bound: float,
    required: frozenset[str] = frozenset(),
    pure: bool = True,
) -> VerdictDetails:
    """The details of a verdict, unless they could not make a batch that the learner takes, or contradict the upload.

    Args:
        raw: the attachment, codec bytes of `VerdictDetails`.
        upload: opens the submission; called only when something was accepted.
        bound: how far a log-probability may be from the claimed one (`thresholds.logprob` of the lease's manifest).
        required: numbers that an accepted rollout must have, since that manifest's rows sum them up.
        pure: the scoring of the lease's environment is, so that an accepted reward is the claimed one.

    Raises:
        LedgerError: the submission does not open.
        DecodeError: details of another hash or shape, or an accepted rollout that is no rollout of this lease, or that
            the model could not have sampled, or with numbers that can't be trained on, or that are not the upload's.
    """
    if blake3(raw).digest() != verdict.details:
        raise DecodeError("the details are not the ones the verdict names", ReasonCode.HASH_MISMATCH)
    expected = len(lease.tasks) * lease.samples
    if len(raw) > details_bound(expected, lease.max_new_tokens):
        raise DecodeError(f"{len(raw)} bytes of details for {expected} rollouts", ReasonCode.OVERSIZE)
    details = codec.decode(VerdictDetails, raw)
    if any(outcome.outcome not in (ACCEPT, REJECT, INCONCLUSIVE) for outcome in verdict.outcomes):
        raise DecodeError("the verdict holds an outcome that does not exist")
    if len(details.rollouts) != expected or len(verdict.outcomes) != expected:
        raise DecodeError(f"the lease has {expected} rollouts, the verdict speaks of {len(verdict.outcomes)}")
    accepted = [i for i, outcome in enumerate(verdict.outcomes) if outcome.outcome == ACCEPT]
    if not accepted:
        return details
    lacking = [(i, name) for i in accepted if (name := unfit(details.rollouts[i], required))] if required else []
    if lacking:
        raise DecodeError(
            f"rollout {lacking[0][0]} was accepted without naming {lacking[0][1]} once, with a finite value: the run "
            "sums it up, so the validator must run this release",
            ReasonCode.VERDICT_WRONG,
        )
    rollouts = upload().rollouts
    limits = bound, pure
    if accepted[-1] < len(rollouts) and _hold_together(accepted, rollouts, details, lease, rules, prompt_ids, limits):
        return details
    for position in accepted:  # one by one, to name what is wrong
        if position >= len(rollouts):
            raise DecodeError(f"rollout {position} was accepted but never submitted")
        rollout, detail = rollouts[position], details.rollouts[position]
        task = lease.tasks[position // lease.samples]
        if (rollout.task, rollout.sample) != (task, position % lease.samples):
            raise DecodeError(f"rollout {position} was accepted but is another task or sample")
        if len(rollout.tokens) // 4 > lease.max_new_tokens:
            raise DecodeError(
                f"rollout {position} was accepted with {len(rollout.tokens) // 4} tokens, the lease allows "
                f"{lease.max_new_tokens}"
            )
        prompt = prompt_ids(lease.environment, task)
        wrong = rules.misfit(prompt, rollout.tokens, detail.logprobs)
        if wrong is not None:
            raise DecodeError(f"rollout {position} was accepted but {wrong[0]}", wrong[1])
        if not in_range(detail.logprobs, detail.reward):
            raise DecodeError(f"rollout {position} was accepted with numbers that can't be trained on")
        false = contradiction(rollout, detail, bound, prompt=prompt, pure=pure)
        if false:
            raise DecodeError(f"rollout {position} was accepted {false}", ReasonCode.VERDICT_WRONG)
    return details


def _hold_together(
    accepted: list[int],
    rollouts: Sequence[Rollout],
    details: VerdictDetails,
    lease: Lease,
    rules: Trainable,
    prompt_ids: PromptIds,
    limits: tuple[float, bool],
) -> bool:
    """Whether all accepted rollouts surely pass what `check_details` asks of each; False where that has to be asked.

    Numbers of all of them are compared at once: one by one they cost the coordinator as much as the rest of a verdict.
    """
    bound, pure = limits
    samples, most = lease.samples, rules.max_context + 1
    prompts = {place: prompt_ids(lease.environment, lease.tasks[place]) for place in {i // samples for i in accepted}}
    pairs = [(rollouts[position], details.rollouts[position]) for position in accepted]
    digests: dict[tuple[int, bytes], bytes] = {}
    for position, (rollout, detail) in zip(accepted, pairs, strict=True):
        place, sample = divmod(position, samples)
        prompt, size = prompts[place], len(rollout.tokens)
        if (
            (rollout.task, rollout.sample) != (lease.tasks[place], sample)
            or (pure and detail.reward != rollout.reward)
            or not abs(detail.reward) <= MAX_REWARD
            or not 0 < size // 4 <= min(lease.max_new_tokens, most - len(prompt) // 4)
            or not prompt
            or (len(prompt) | size) % 4
            or not size == len(detail.logprobs) == len(rollout.logprobs)
        ):
            return False
        if detail.digest:
            alike = place, rollout.tokens
            if alike not in digests:
                digests[alike] = digest_of(prompt, rollout.tokens)
            if detail.digest != digests[alike]:
                return False
    ids = np.frombuffer(b"".join({*prompts.values(), *(rollout.tokens for rollout, _ in pairs)}), "<u4")
    own = np.frombuffer(b"".join(detail.logprobs for _, detail in pairs), "<f4")
    claimed = np.frombuffer(b"".join(rollout.logprobs for rollout, _ in pairs), "<f4")
    within = (own >= LOGPROB_MIN) & (own <= LOGPROB_MAX) & (np.abs(own - claimed) <= bound)
    return int(ids.max()) < rules.vocabulary and bool(within.all())


def tokenizer_prompts(model_dir: Path, prompts: Callable[[bytes, int], str]) -> PromptIds:
    """Prompt ids through the model's tokenizer.json, remembered for the last 4096 tasks.

    Args:
        prompts: (environment digest, task index) -> the prompt's text.

    Raises:
        UsageError: no usable tokenizer.json.
    """
    from functools import lru_cache

    from tokenizers import Tokenizer

    path = model_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:
        raise UsageError(f"{path} is no tokenizer ({exc}); the operator must restore the run directory") from exc

    @lru_cache(maxsize=4096)
    def ids(environment: bytes, task: int) -> bytes:
        encoded = tokenizer.encode(prompts(environment, task), add_special_tokens=False)
        return np.asarray(encoded.ids, dtype="<u4").tobytes()

    return ids
