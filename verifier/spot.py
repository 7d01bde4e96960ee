"""Checking validators: is one accepted rollout what its verdict says? For the coordinator's own share and for audits.

    look       the drawn rollouts alone, with the run's `judge` on a lease and a submission cut down to them: cheap
    confirm    what looked wrong, with the same `judge` on the whole upload, as its validator had to judge it

A validator is accused only of what can't be honest noise. The run's bounds lie where an honest node's noise ends, and
two honest machines that measure one rollout differ by no more than that; so what one of them finds within a bound the
other finds within twice the bound. A rejection counts when the rollout is rejected with every bound doubled, too: a
node that puts its work right on a bound frames nobody. Bounds on counts and sums are doubled like the others; what is
exact (tasks, lengths, rewards) stays exact. A wrong reward counts only where scoring is `pure`: anything else needs two
(RULES 10). INCONCLUSIVE decides nothing.

The numbers that an accepting verdict hands to the learner are held against the ones computed here, within
`thresholds.logprob`: both are a verifier's own, none of them a node's.

Not covered: which rollouts are drawn, and what an accusation leads to (`protocol.distrust`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from environments.base import Environment
from protocol import codec
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.manifest import Run
from protocol.records import ACCEPT, REJECT, Lease, Outcome, Rollout, RolloutDetail, Submission
from verifier.derive import differs
from verifier.judge import decompress_submission, judge, judge_upload
from verifier.model import PolicyModel

DOUBLED = 2.0
"""How far beyond a bound a rejection has to lie before it contradicts a validator. Below 2 an honest validator whose
machine rounds otherwise could be accused; above, more of what is only a little wrong passes unseen."""

_LEFT_OUT = Rollout(0, 0, b"", b"", 255, 0.0, ())
"""Stands for a rollout that nobody asked about: its finish word does not exist, so no model is run for it."""


@dataclass(frozen=True)
class Found:
    """What one rollout is, as judged here."""

    outcome: Outcome
    detail: RolloutDetail
    clear: bool = False
    """A rejection that stands with every bound doubled."""


def look(
    run: Run,
    lease: Lease,
    blob: bytes,
    raw_length: int,
    policy: PolicyModel,
    environment: Environment,
    positions: Collection[int],
) -> dict[int, Found]:
    """Judge some rollouts of an upload and leave the others out. None of it is `clear`.

    Raises:
        VerifierError: see `judge`.
    """
    small = _cut(lease, blob, raw_length, positions)
    if small is None:
        judged, at = judge_upload(run, lease, blob, raw_length, policy, environment), {i: i for i in positions}
    else:
        judged, at = judge(run, small[0], codec.encode(small[1]), policy, environment), small[2]
    return {i: Found(judged.outcomes[at[i]], judged.details[at[i]]) for i in positions}


def confirm(
    run: Run,
    lease: Lease,
    blob: bytes,
    raw_length: int,
    policy: PolicyModel,
    environment: Environment,
    positions: Collection[int],
) -> dict[int, Found]:
    """Judge a whole upload as its validator had to, and what is rejected once more with every bound doubled.

    Raises:
        VerifierError: see `judge`.
    """
    judged = judge_upload(run, lease, blob, raw_length, policy, environment)
    found = {i: Found(judged.outcomes[i], judged.details[i]) for i in positions}
    rejected = [i for i in positions if found[i].outcome.outcome == REJECT]
    if not rejected:
        return found
    lenient = judge_upload(doubled(run), lease, blob, raw_length, policy, environment)
    for i in rejected:
        scored = found[i].outcome.reason != ReasonCode.REWARD_MISMATCH or environment.spec().scoring == "pure"
        found[i] = replace(found[i], clear=scored and lenient.outcomes[i].outcome == REJECT)
    return found


def contradiction(
    verdict: int, position: int, said: Outcome, detail: RolloutDetail | None, found: Found, bound: float
) -> VerdictEvidence | None:
    """What the ledger says about a validator that accepted this, or None.

    Args:
        verdict: its ledger index.
        said: the outcome it gave, `detail` what it handed over with it.
        bound: `thresholds.logprob` of the manifest that the lease names.
    """
    if said.outcome != ACCEPT:
        return None
    if found.outcome.outcome == REJECT and found.clear:
        return VerdictEvidence(verdict, position, REJECT, found.outcome.reason, 0.0, 0.0)
    if found.outcome.outcome == ACCEPT and differs(detail, found.detail, bound):
        off = _furthest(detail, found.detail)
        return VerdictEvidence(verdict, position, ACCEPT, ReasonCode.VERDICT_WRONG.value, found.detail.reward, off)
    return None


def suspicious(said: Outcome, detail: RolloutDetail | None, found: Found, bound: float) -> bool:
    """Whether what `look` found calls for `confirm`."""
    return contradiction(0, 0, said, detail, replace(found, clear=True), bound) is not None


def doubled(run: Run) -> Run:
    """The run with every bound on honest noise doubled. Its id, and with it every seed, stays."""
    manifest = run.manifest
    own = manifest.thresholds
    thresholds = replace(
        own,
        proof_median=DOUBLED * own.proof_median,
        proof_outliers=int(DOUBLED * own.proof_outliers),
        proof_gate=DOUBLED * own.proof_gate,
        token_margin=DOUBLED * own.token_margin,
        logprob=DOUBLED * own.logprob,
    )
    bf16 = manifest.bf16
    if bf16 is not None:
        bf16 = replace(
            bf16,
            chunk_exponents=int(DOUBLED * bf16.chunk_exponents),
            chunk_mantissa=DOUBLED * bf16.chunk_mantissa,
            rollout_mantissa=DOUBLED * bf16.rollout_mantissa,
            token_margin=DOUBLED * bf16.token_margin,
            margin_mean=DOUBLED * bf16.margin_mean,
            logprob=DOUBLED * bf16.logprob,
            logprob_mean=DOUBLED * bf16.logprob_mean,
        )
    routes = manifest.routes
    if routes is not None:
        routes = replace(routes, margin=DOUBLED * routes.margin)
    return replace(run, manifest=replace(manifest, thresholds=thresholds, bf16=bf16, routes=routes))


def _cut(
    lease: Lease, blob: bytes, raw_length: int, positions: Collection[int]
) -> tuple[Lease, Submission, dict[int, int]] | None:
    """Lease and submission without the tasks nobody asked about, and where each position is in them; None when the
    upload does not hold as a whole."""
    try:
        whole = codec.decode(Submission, decompress_submission(blob, raw_length))
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


def _furthest(said: RolloutDetail | None, ours: RolloutDetail) -> float:
    """The largest difference of a log-probability; 0 where they can't be compared one by one."""
    if said is None or len(said.logprobs) != len(ours.logprobs) or not ours.logprobs:
        return 0.0
    off = float(np.abs(np.frombuffer(said.logprobs, "<f4") - np.frombuffer(ours.logprobs, "<f4")).max())
    return off if np.isfinite(off) else 0.0
