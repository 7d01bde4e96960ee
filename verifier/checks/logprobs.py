"""`logprob-mismatch`: claimed log-probabilities are those of the right policy, without noise.

In the fp32 profile they are not trained on (the verifier's own are); a wrong one still shows a node that does not
compute what it says. In bf16 they are the behaviour policy's, since its rounding is part of it: no token may be off by
more than the calibrated bound, and no rollout as a whole, which would move its importance ratio. What lies below is
written down, with its sign (`mismatch_kl`) and without (`mismatch_k3`), and added up per node.

Not covered: that sum (`evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, begins_of, joined, standing

_LARGEST = 1e-3
"""A log-probability is at most 0, and the rounding of a float32 log-softmax: the learner takes no larger one."""


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """No claimed log-probability, and in bf16 no sum of them, off by more than the calibrated bound."""
    open_claims = standing(claims)
    own = [claim.logprobs_N for claim in open_claims if claim.logprobs_N is not None]
    if not own:
        return
    bound = setting.thresholds.logprob if setting.bf16 is None else setting.bf16.logprob
    claimed = [c.claimed_logprobs_N[c.at : c.at + len(own_N)] for c, own_N in zip(open_claims, own, strict=True)]
    begins = begins_of(own)
    claimed_M = joined(claimed)
    with np.errstate(over="ignore"):
        difference_M = claimed_M - joined(own)
        error_M = np.abs(difference_M)
    fits_M = error_M <= bound
    if setting.bf16 is not None:
        fits_M &= claimed_M <= _LARGEST
    largest_C = np.maximum.reduceat(error_M, begins)
    sum_C = np.add.reduceat(difference_M, begins, dtype=np.float64)
    holds_C = np.logical_and.reduceat(fits_M, begins)
    clipped_M = np.clip(difference_M, -bound, bound).astype(np.float64)
    k3_C = np.add.reduceat(np.expm1(-clipped_M) + clipped_M, begins)
    for claim, begin, own_N, largest, added, k3, holds in zip(
        open_claims, begins, own, largest_C.tolist(), sum_C.tolist(), k3_C.tolist(), holds_C.tolist(), strict=True
    ):
        claim.note("logprob_error", min(largest, 1e300))
        if not holds:
            wrong = np.flatnonzero(~fits_M[begin : begin + len(own_N)])
            claim.fail(ReasonCode.LOGPROB_MISMATCH, token_at=float(claim.at + wrong[0]))
        elif setting.bf16 is not None:
            total = claim.sums["logprob"] = claim.sums.get("logprob", 0.0) + added
            claim.numbers["mismatch_kl"] = total / (claim.at + len(own_N))
            claim.sums["k3"] = claim.sums.get("k3", 0.0) + k3
            claim.numbers["mismatch_k3"] = claim.sums["k3"] / (claim.at + len(own_N))
            allowed = bound + setting.bf16.logprob_mean * len(claim.tokens_N)
            if claim.at_end and abs(total) > allowed:
                claim.fail(ReasonCode.LOGPROB_MISMATCH)
