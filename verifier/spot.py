"""Checking validators: is one rollout what its verdict says? For the coordinator's own share and for audits.

    look       the drawn rollouts alone, with the run's `judge` on a lease and a submission cut down to them: cheap
    confirm    what looked wrong, with the same `judge` on the whole upload, as its validator had to judge it

A validator is accused only of what can't be rounding. Whoever verifies computes in float32 on the lease's weights, so
two machines that measure one rollout differ by a verifier's own noise, in either profile; a bound forgives a node's.

    it accepted, and this is rejected      also with every bound wider by that noise (`wider`)
    it rejected, and this is accepted      also with every bound narrower by it (`narrower`)
    both accepted                          and its numbers are not those of an honest verifier (`compare`)

A node that puts its work right on a bound frames nobody. What is exact (tasks, lengths, rewards) stays exact. A reward
counts only where scoring is `pure`: anything else needs two (RULES 10). INCONCLUSIVE decides nothing.

Not covered: which rollouts are drawn, and what an accusation leads to (`protocol.distrust`); a node that knows the
arithmetic of two classes of validators to the last bit (docs/decisions/024).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from environments.base import Environment
from protocol import codec
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.manifest import Run
from protocol.records import ACCEPT, REJECT, Lease, Outcome, Rollout, RolloutDetail, Submission
from verifier import compare
from verifier.judge import Judgement, decompress_submission, judge, judge_upload
from verifier.model import PolicyModel

DOUBLED = 2.0
"""In fp32 verifiers are as noisy as nodes, whose noise the bounds are made of: a rejection has to lie this many bounds
out. Below 2 an honest validator whose machine rounds otherwise could be accused; above, more passes unseen."""

QUARTER = 0.25
"""And an acceptance this far inside: a little above the honest maximum, which is a fifth of a bound."""

_CHUNK_MANTISSA, _ROLLOUT_MANTISSA, _EXPONENTS = 2.0, 0.5, 4
"""In bf16 two verifiers measured the same mantissa error but for one mantissa in 200 chunks, 1/128 of a chunk's mean.
What these allow is that points at the edge of the 128 largest are others, and stand for anything: one or two in a
chunk, and in a rollout not in every chunk."""

_LEFT_OUT = Rollout(0, 0, b"", b"", 255, 0.0, ())
"""Stands for a rollout that nobody asked about: its finish word does not exist, so no model is run for it."""


@dataclass(frozen=True)
class Upload:
    """What somebody answered to a lease, and what it is judged by."""

    run: Run
    """Under the manifest that the lease names."""
    lease: Lease
    blob: bytes
    """Its hash was checked."""
    raw_length: int
    policy: PolicyModel
    environment: Environment

    def judge(self, run: Run) -> Judgement:
        """All of it, under other thresholds than its own. Raises VerifierError: see `verifier.judge`."""
        return judge_upload(run, self.lease, self.blob, self.raw_length, self.policy, self.environment)

    @property
    def pure(self) -> bool:
        return self.environment.spec().scoring == "pure"


@dataclass(frozen=True)
class Found:
    """What one rollout is, as judged here."""

    outcome: Outcome
    detail: RolloutDetail
    clear: bool = False
    """It is that also when bounds move by what verifiers may differ by: a rejection with wider ones, an acceptance with
    narrower ones."""


@dataclass(frozen=True)
class Word:
    """One verdict's word on an upload."""

    verdict: int
    """Ledger index."""
    outcomes: Sequence[Outcome]
    """Of every rollout; reasons matter of a REJECT only."""
    details: Sequence[RolloutDetail]


def look(upload: Upload, positions: Collection[int]) -> dict[int, Found]:
    """Judge some rollouts of an upload and leave the others out. All of it counts as `clear`: whatever looks wrong is
    to be confirmed.

    Raises:
        VerifierError: see `judge`.
    """
    small = _cut(upload, positions)
    if small is None:
        judged, at = upload.judge(upload.run), {i: i for i in positions}
    else:
        lease, submission, at = small
        judged = judge(upload.run, lease, codec.encode(submission), upload.policy, upload.environment)
    return {i: Found(judged.outcomes[at[i]], judged.details[at[i]], clear=True) for i in positions}


def confirm(upload: Upload, positions: Collection[int], words: Sequence[Word]) -> dict[int, Found]:
    """Judge a whole upload as its validator had to, and once more under wider and narrower bounds where a verdict says
    the opposite.

    Args:
        words: the verdicts that are held against it.

    Returns:
        All rollouts of the tasks that `positions` are of: numbers are compared task by task.

    Raises:
        VerifierError: see `judge`.
    """
    judged = upload.judge(upload.run)
    tasks = {i // upload.lease.samples for i in positions}
    asked = [i for i in range(len(judged.outcomes)) if i // upload.lease.samples in tasks]
    found = {i: Found(judged.outcomes[i], judged.details[i]) for i in asked}
    for ours, theirs, run in ((REJECT, ACCEPT, wider(upload.run)), (ACCEPT, REJECT, narrower(upload.run))):
        apart = [
            i
            for i, one in found.items()
            if one.outcome.outcome == ours and any(word.outcomes[i].outcome == theirs for word in words)
        ]
        again = upload.judge(run) if apart else judged
        for i in apart:
            scored = found[i].outcome.reason != ReasonCode.REWARD_MISMATCH or upload.pure
            found[i] = replace(found[i], clear=scored and again.outcomes[i].outcome == ours)
    return found


def contradictions(word: Word, found: dict[int, Found], upload: Upload, *, share: float = 1.0) -> list[VerdictEvidence]:
    """What the ledger would say of a validator that gave this verdict; nothing when it may be right.

    Args:
        found: by `look` or `confirm`.
        share: of what numbers may be off by; less shows what another machine may have found.
    """
    wrong: dict[int, VerdictEvidence] = {}
    agreed = []
    for i, one in found.items():
        said, is_found = word.outcomes[i], one.outcome
        if said.outcome == ACCEPT == is_found.outcome:
            agreed.append(i)
        elif said.outcome == ACCEPT and is_found.outcome == REJECT and one.clear:
            wrong[i] = VerdictEvidence(word.verdict, i, REJECT, is_found.reason, 0.0, 0.0)
        elif said.outcome == REJECT and is_found.outcome == ACCEPT and one.clear:
            if said.reason == ReasonCode.REWARD_MISMATCH and not upload.pure:
                continue
            wrong[i] = VerdictEvidence(word.verdict, i, ACCEPT, ReasonCode.HOLDS.value, one.detail.reward, 0.0)
    rules = replace(compare.Rules.of(upload.run.manifest, upload.lease), share=share)
    for task in compare.by_task(agreed, upload.lease.samples):
        details = {i: word.details[i] if i < len(word.details) else None for i in task}
        for off in compare.differences(details, {i: found[i].detail for i in task}, rules):
            wrong[off.position] = VerdictEvidence(
                word.verdict,
                off.position,
                ACCEPT,
                ReasonCode.VERDICT_WRONG.value,
                found[off.position].detail.reward,
                off.off,
                off.number,
            )
    return [wrong[i] for i in sorted(wrong)]


def wider(run: Run) -> Run:
    """The run with every bound on noise wider by what two verifiers may differ by. Its id, and with it every seed,
    stays."""
    return _moved(run, DOUBLED, 1)


def narrower(run: Run) -> Run:
    """The same with every bound narrower."""
    return _moved(run, QUARTER, -1)


def _moved(run: Run, times: float, sign: int) -> Run:
    manifest = run.manifest
    own, bf16, routes = manifest.thresholds, manifest.bf16, manifest.routes
    if manifest.profile == "bf16" and bf16 is not None:
        # Both computed in float32: log-probabilities, and what is made of them, agree as those of two fp32 verifiers.
        rounding = sign * own.logprob
        bf16 = replace(
            bf16,
            chunk_exponents=max(0, bf16.chunk_exponents + sign * _EXPONENTS),
            chunk_mantissa=bf16.chunk_mantissa + sign * _CHUNK_MANTISSA,
            rollout_mantissa=bf16.rollout_mantissa + sign * _ROLLOUT_MANTISSA,
            token_margin=bf16.token_margin + rounding,
            margin_mean=bf16.margin_mean + rounding,
            logprob=bf16.logprob + rounding,
            logprob_mean=bf16.logprob_mean + rounding,
            short_exponents=max(0, bf16.short_exponents + sign * _EXPONENTS) if bf16.short_exponents else 0,
            short_mantissa=bf16.short_mantissa + sign * _CHUNK_MANTISSA if bf16.short_mantissa else 0.0,
        )
    thresholds = replace(
        own,
        proof_median=times * own.proof_median,
        proof_outliers=int(times * own.proof_outliers),
        proof_gate=times * own.proof_gate,
        token_margin=times * own.token_margin,
        logprob=times * own.logprob,
    )
    if routes is not None:
        # A choice counts as another one at any shortfall, so as many more may as are level here and not there.
        not_first, rate = int(times * routes.not_first), min(1.0, times * routes.not_first_rate)
        routes = replace(routes, margin=times * routes.margin, not_first=not_first, not_first_rate=rate)
    return replace(run, manifest=replace(manifest, thresholds=thresholds, bf16=bf16, routes=routes))


def _cut(upload: Upload, positions: Collection[int]) -> tuple[Lease, Submission, dict[int, int]] | None:
    """Lease and submission without the tasks nobody asked about, and where each position is in them; None when the
    upload does not hold as a whole."""
    lease = upload.lease
    try:
        whole = codec.decode(Submission, decompress_submission(upload.blob, upload.raw_length))
    except ProtocolError:
        return None
    count = len(lease.tasks) * lease.samples
    if len(whole.rollouts) != count or whole.lease_id != lease.lease_id:
        return None
    tasks = sorted({i // lease.samples for i in positions})
    rollouts: list[Rollout] = []
    at: dict[int, int] = {}
    for task in tasks:
        for i in range(task * lease.samples, (task + 1) * lease.samples):
            if i in positions:
                at[i] = len(rollouts)
            rollouts.append(whole.rollouts[i] if i in positions else _LEFT_OUT)
    small = replace(lease, tasks=tuple(lease.tasks[task] for task in tasks))
    return small, replace(whole, rollouts=tuple(rollouts)), at
