"""`logprob-mismatch`: claimed log-probabilities are those of the right policy, without noise.

They are not trained on in the fp32 profile (the verifier's own are); a wrong one still shows a node that does not
compute what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, begins_of, joined, standing


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """No token's claimed log-probability off by more than the calibrated bound."""
    open_claims = standing(claims)
    own = [claim.logprobs_N for claim in open_claims if claim.logprobs_N is not None]
    if not own:
        return
    claimed = [c.claimed_logprobs_N[c.at : c.at + len(own_N)] for c, own_N in zip(open_claims, own, strict=True)]
    begins = begins_of(own)
    with np.errstate(over="ignore"):
        error_M = np.abs(joined(claimed) - joined(own))
    largest_C = np.maximum.reduceat(error_M, begins)
    holds_C = np.logical_and.reduceat(error_M <= setting.thresholds.logprob, begins)
    for claim, begin, own_N, largest, holds in zip(
        open_claims, begins, own, largest_C.tolist(), holds_C.tolist(), strict=True
    ):
        claim.note("logprob_error", min(largest, 1e300))
        if not holds:
            error_N = error_M[begin : begin + len(own_N)]
            wrong = np.flatnonzero(~(error_N <= setting.thresholds.logprob))
            claim.fail(ReasonCode.LOGPROB_MISMATCH, token_at=float(claim.at + wrong[0]))
