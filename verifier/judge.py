"""Is this submission honest? One function for validators and for the audit, so that both reach the same decision.

    decode -> format -> task -> token range -> termination -> proof shape -> routes' shape
           -> for each block of tokens: [prefill] -> routes -> proof -> seeded tokens -> log-probabilities
           -> reward

Whole-submission failures (`format` on every rollout): bytes that are no Submission, longer than any answer to the
lease can be, or not as many rollouts as the lease asks for. A submission of another lease is `wrong-task` on every
rollout. Everything else is decided rollout by rollout, and a rollout is read no further than the block of its first
failure (`blocks`): what is never read costs nothing. Memory: lengths are checked against the lease before they are
decoded, and again before the model runs; the prefill holds one batch of states and one tile of logits at a time.

Not covered: fetching bytes, signing verdicts, what follows from them (`protocol.state`).

Shape suffixes: N sampled tokens of one rollout, M rows of several, U distinct rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from environments.base import Environment, Task
from protocol import codec
from protocol.errors import DecodeError, ReasonCode
from protocol.lease_rules import answer_bound
from protocol.limits import (
    MAX_ROLLOUTS_PER_LEASE,
    MAX_SUBMISSION_BYTES,
    MAX_SUBMISSION_RAW_BYTES,
    MIB,
)
from protocol.manifest import Run
from protocol.records import REJECT, Lease, Number, Outcome, Rollout, RolloutDetail, Submission, VerdictDetails
from protocol.seeds import sampling_seed
from verifier import checks, replay, sampling
from verifier.blocks import Piece, states_in_blocks
from verifier.checks import Claim, Setting
from verifier.checks.claim import begins_of, standing
from verifier.claims import digest_of
from verifier.errors import VerifierError
from verifier.logprobs import token_logprobs
from verifier.model import PolicyModel, prompt_ids
from verifier.profiles import profile_of

_TILE_LOGITS = (1 << 23) - (1 << 12)
"""Logits held at once while tokens are replayed (just under 32 MiB in float32, above which glibc maps fresh pages for
each: `allocator`). Only memory and speed change with it: a product of few rows reads the whole head for them."""

_SOFTMAX_LOGITS = 1 << 18
"""Of these, as many have their softmax made at once: it stays in a cache."""

_MAX_WINDOW_BYTES = 8 * MIB
"""Largest zstd window a submission may ask this machine to hold."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """One outcome and one detail per rollout of the lease, task-major."""

    outcomes: list[Outcome]
    details: list[RolloutDetail]

    def verdict_details(self) -> VerdictDetails:
        return VerdictDetails(tuple(self.details))


def decompress_submission(blob: bytes, raw_length: int) -> bytes:
    """Open an upload: one zstd frame that declares exactly the length its intent named.

    Args:
        blob: compressed bytes, whose hash the caller has checked.
        raw_length: from the signed intent.

    Raises:
        DecodeError: no such frame, another declared length, trailing bytes, over a bound.
    """
    if raw_length > MAX_SUBMISSION_RAW_BYTES or len(blob) > MAX_SUBMISSION_BYTES:
        raise DecodeError("a submission over the protocol's bound", ReasonCode.OVERSIZE)
    try:
        frame = zstandard.get_frame_parameters(blob)
        if frame.content_size != raw_length:
            raise DecodeError(
                f"the frame declares {frame.content_size} bytes, its intent {raw_length}", ReasonCode.LENGTH_MISMATCH
            )
        if frame.window_size > _MAX_WINDOW_BYTES and frame.window_size > raw_length:
            raise DecodeError(f"the frame asks for a window of {frame.window_size} bytes", ReasonCode.OVERSIZE)
        raw = zstandard.ZstdDecompressor().decompress(blob, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise DecodeError(f"not one zstd frame: {exc}") from exc
    if len(raw) != raw_length:
        raise DecodeError("the frame holds fewer bytes than it declares", ReasonCode.LENGTH_MISMATCH)
    return raw


def judge_upload(
    run: Run, lease: Lease, blob: bytes, raw_length: int, policy: PolicyModel, environment: Environment
) -> Judgement:
    """`judge` for the bytes as uploaded; what does not decompress fails as `format`.

    Raises:
        VerifierError: see `judge`.
    """
    count = _check_setting(run, lease, policy, environment)
    if raw_length > answer_bound(lease, run.manifest):
        return _all(count, ReasonCode.FORMAT)
    try:
        raw = decompress_submission(blob, raw_length)
    except DecodeError:
        return _all(count, ReasonCode.FORMAT)
    return judge(run, lease, raw, policy, environment)


def judge(run: Run, lease: Lease, submission_raw: bytes, policy: PolicyModel, environment: Environment) -> Judgement:
    """Decide every rollout of a submission.

    Args:
        run: thresholds, temperature and stop tokens come from its manifest and nowhere else.
        submission_raw: the decompressed upload, hostile.
        policy: holding the weights of `lease.root`.
        environment: the one whose digest the lease names.

    Raises:
        VerifierError: policy, environment, run and lease do not belong together. Never because of the submission.
    """
    count = _check_setting(run, lease, policy, environment)
    if len(submission_raw) > answer_bound(lease, run.manifest):
        return _all(count, ReasonCode.FORMAT)
    try:
        submission = codec.decode(Submission, submission_raw)
    except DecodeError:
        return _all(count, ReasonCode.FORMAT)
    if submission.lease_id != lease.lease_id:
        return _all(count, ReasonCode.WRONG_TASK)
    if len(submission.rollouts) != count:
        return _all(count, ReasonCode.FORMAT)
    sampling_rules = run.manifest.sampling
    setting = Setting(
        policy=policy,
        environment=environment,
        thresholds=run.manifest.thresholds,
        bf16=run.manifest.bf16 if run.manifest.profile == "bf16" else None,
        routes=run.manifest.routes if policy.experts is not None else None,
        temperature=sampling_rules.temperature,
        stop_tokens=frozenset(sampling_rules.stop_tokens),
        max_new_tokens=lease.max_new_tokens,
    )
    claims = _claims(run, lease, submission.rollouts, setting)
    for check in checks.BEFORE_PREFILL:
        check(claims, setting)
    _measure([claim for claim in claims if claim.stands], setting)
    return Judgement([Outcome(c.outcome, c.reason.value) for c in claims], _details(claims, setting))


def _check_setting(run: Run, lease: Lease, policy: PolicyModel, environment: Environment) -> int:
    """The number of rollouts the lease asks for, or VerifierError."""
    count = len(lease.tasks) * lease.samples
    if not 1 <= count <= MAX_ROLLOUTS_PER_LEASE:
        raise VerifierError(f"the lease asks for {count} rollouts; 1 to {MAX_ROLLOUTS_PER_LEASE} are allowed")
    if lease.environment != environment.digest:
        raise VerifierError("the lease names another environment than the one given; load it from the run's manifest")
    if policy.root and policy.root != lease.root:
        raise VerifierError(
            f"the lease was sampled from policy {lease.root.hex()[:16]}, but {policy.root.hex()[:16]} is loaded"
        )
    profile = profile_of(run.manifest.profile)
    if profile.name == "bf16" and run.manifest.bf16 is None:
        raise VerifierError("the manifest names the bf16 profile and has no bf16 thresholds; its root must add them")
    if policy.weights != profile.dtype:
        raise VerifierError(
            f"a run in {profile.name} is checked on weights in {profile.dtype}, but they were loaded in "
            f"{policy.weights}; load the policy for the run's profile"
        )
    if run.manifest.model.routing != (None if policy.experts is None else policy.experts.routing):
        raise VerifierError("the manifest describes other experts than the policy has; its root must correct it")
    if policy.experts is not None and run.manifest.routes is None:
        raise VerifierError("the manifest has no route margin for this model's experts; its root must add it")
    return count


def _all(count: int, reason: ReasonCode) -> Judgement:
    return Judgement([Outcome(REJECT, reason.value)] * count, [RolloutDetail(b"", 0.0, ())] * count)


def _claims(run: Run, lease: Lease, rollouts: Sequence[Rollout], setting: Setting) -> list[Claim]:
    claims: list[Claim] = []
    tokens_M = np.frombuffer(b"".join([rollout.tokens for rollout in rollouts]), dtype="<u4").astype(np.int64)
    logprobs_M = np.frombuffer(b"".join([rollout.logprobs for rollout in rollouts]), dtype="<f4").astype(np.float32)
    token_at = logprob_at = 0
    for index in lease.tasks:
        task: Task = setting.environment.task(index)
        prompt = tuple(prompt_ids(setting.policy.tokenizer, task.prompt))
        for sample in range(lease.samples):
            rollout = rollouts[len(claims)]
            tokens_end = token_at + len(rollout.tokens) // 4
            logprobs_end = logprob_at + len(rollout.logprobs) // 4
            claims.append(
                Claim(
                    index=len(claims),
                    task=task,
                    sample=sample,
                    prompt=prompt,
                    seed=sampling_seed(run.id, lease.nonce, index, sample),
                    rollout=rollout,
                    tokens_N=tokens_M[token_at:tokens_end],
                    claimed_logprobs_N=logprobs_M[logprob_at:logprobs_end],
                )
            )
            token_at, logprob_at = tokens_end, logprobs_end
    return claims


def _measure(claims: Sequence[Claim], setting: Setting) -> None:
    """Prefill the claims that still stand and run the checks that need it, one block at a time."""
    fits = []
    for claim in claims:
        if len(claim.prompt) + len(claim.tokens_N) > setting.policy.max_context:
            claim.give_up(ReasonCode.VALIDATOR_FAILED)
        else:
            fits.append(claim)
    twins = _twins(fits)
    try:
        for pieces in _pieces(twins, setting):
            reading = []
            for k, at, states in pieces:
                states_NH = states.float().numpy()
                finite = _is_finite(states, states_NH, setting.policy.weights)
                for claim in standing(twins[k]):
                    claim.open_block(at, states_NH)
                    reading.append(claim)
                    if not finite:
                        claim.give_up(ReasonCode.VALIDATOR_FAILED)
            _check_block(reading, setting)
            for claim in reading:
                claim.close_block()
        for check in checks.AFTER_ALL:
            check([claim for claim in fits if claim.whole], setting)
    except (RuntimeError, MemoryError) as exc:
        log.warning("the prefill failed and decides nothing: %s; look at this machine's memory", exc)
        for claim in fits:
            if claim.stands and not claim.whole:
                claim.give_up(ReasonCode.VALIDATOR_FAILED)


def _is_finite(states: torch.Tensor, states_NH: npt.NDArray[np.float32], weights: torch.dtype) -> bool:
    """Also once they are rounded to the weights' dtype. A rollout's states are few, and numpy says it sooner."""
    if weights is torch.float32:
        return bool(np.isfinite(states_NH).all())
    return bool(torch.isfinite(states.to(weights)).all())


def _pieces(twins: list[list[Claim]], setting: Setting) -> Iterator[list[Piece]]:
    """States a block at a time; through the claimed experts where the model has any."""

    def stands(k: int) -> bool:
        return any(claim.stands for claim in twins[k])

    if setting.routes is None:
        sequences = [(same[0].prompt, same[0].tokens_N) for same in twins]
        yield from states_in_blocks(setting.policy, sequences, stands)
        return
    routed = [same[0].routed for same in twins]
    for same, one in zip(twins, routed, strict=True):
        for claim in same:
            claim.routed = one
    yield from replay.states_in_blocks(
        setting.policy, [one for one in routed if one is not None], setting.routes.margin, stands
    )


def _twins(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Claims with the same prompt, tokens and routes side by side: one prefill gives the states of all of them.

    A policy that has learnt short answers gives the same one again and again; every proof, seed and log-probability is
    still checked for itself.
    """
    same: dict[tuple[tuple[int, ...], bytes, bytes], list[Claim]] = {}
    for claim in claims:
        same.setdefault((claim.prompt, claim.rollout.tokens, claim.rollout.routes), []).append(claim)
    return list(same.values())


def _check_block(claims: list[Claim], setting: Setting) -> None:
    for check in checks.AFTER_STATES:
        check(claims, setting)
    _replay(standing(claims), setting)
    for check in checks.AFTER_LOGITS:
        check(claims, setting)


def _replay(claims: Sequence[Claim], setting: Setting) -> None:
    """Margins and log-probabilities of the block's sampled tokens, in tiles of rows across rollouts."""
    if not claims:
        return
    distinct = {id(claim.states_NH): claim for claim in claims}
    states_MH = torch.from_numpy(np.concatenate([claim.states_NH for claim in distinct.values()]))
    begins = dict(zip(distinct, begins_of([claim.block_tokens_N for claim in distinct.values()]), strict=True))
    block = [claim.block_tokens_N for claim in claims]
    counts, claim_begins = [len(tokens_N) for tokens_N in block], begins_of(block)
    within_M = np.arange(sum(counts)) - np.repeat(claim_begins, counts)
    rows_M = np.repeat([begins[id(claim.states_NH)] for claim in claims], counts) + within_M
    positions_M = np.repeat([len(claim.prompt) + claim.at for claim in claims], counts) + within_M
    tokens_M = torch.from_numpy(np.concatenate(block))
    seeds = [claim.seed for claim, count in zip(claims, counts, strict=True) for _ in range(count)]
    vocabulary = setting.policy.vocabulary
    margins, logprobs = [], []
    tiles = -(-len(seeds) // max(1, _TILE_LOGITS // vocabulary))
    step = -(-len(seeds) // tiles)  # equal ones: a product of a single row is nearly as dear as one of fifty
    for start in range(0, len(seeds), step):
        at = slice(start, start + step)
        rows_U, first_U, which_M = np.unique(rows_M[at], return_index=True, return_inverse=True)
        logits_UV = setting.policy.logits(states_MH[rows_U])
        logprobs_U = _logprobs(logits_UV, tokens_M[at][first_U], setting.temperature)
        logits_MV = logits_UV if np.array_equal(which_M, np.arange(len(rows_U))) else logits_UV[which_M]
        found = sampling.replayed_margins(logits_MV, setting.temperature, seeds[at], positions_M[at], tokens_M[at])
        margins.append(found.numpy())
        logprobs.append(logprobs_U[which_M])
    margins_M, logprobs_M = np.concatenate(margins), np.concatenate(logprobs)
    finite = np.isfinite(margins_M) & np.isfinite(logprobs_M)
    every = bool(finite.all())
    for claim, begin, count in zip(claims, claim_begins, counts, strict=True):
        claim.margins_N, claim.logprobs_N = margins_M[begin : begin + count], logprobs_M[begin : begin + count]
        if not every and not finite[begin : begin + count].all():
            claim.give_up(ReasonCode.VALIDATOR_FAILED)


def _logprobs(logits_UV: torch.Tensor, tokens_U: torch.Tensor, temperature: float) -> npt.NDArray[np.float32]:
    """`token_logprobs`, some rows at a time."""
    step = max(1, _SOFTMAX_LOGITS // logits_UV.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(tokens_U), step)]
    return np.concatenate([token_logprobs(logits_UV[at], tokens_U[at], temperature).numpy() for at in parts])


def _details(claims: Sequence[Claim], setting: Setting) -> list[RolloutDetail]:
    """Numbers, and of an accepted rollout the behaviour log-probabilities: in fp32 the verifier's own, in bf16 the
    node's, whose rounding chose the tokens and which were just found to agree."""
    digests: dict[tuple[tuple[int, ...], bytes], bytes] = {}
    own = setting.bf16 is None
    details = []
    for claim in claims:
        if not claim.whole:
            if not claim.stands and 0 < claim.read < len(claim.tokens_N):
                claim.numbers["tokens_read"] = float(claim.read)
            details.append(RolloutDetail(b"", 0.0, _listed(claim)))
            continue
        alike = claim.prompt, claim.rollout.tokens
        digest = digests.get(alike)
        if digest is None:
            digest = digests[alike] = digest_of(np.asarray(claim.prompt, dtype="<u4").tobytes(), claim.rollout.tokens)
        behaviour_N = claim.own_logprobs_N if own else claim.claimed_logprobs_N
        logprobs = behaviour_N.astype("<f4", copy=False).tobytes()
        details.append(RolloutDetail(logprobs, claim.reward, _listed(claim), digest))
    return details


def _listed(claim: Claim) -> tuple[Number, ...]:
    return tuple([Number(name, float(value)) for name, value in sorted(claim.numbers.items())])
