"""`logprob-mismatch`: claimed log-probabilities are those of the right policy, without noise.

They are not trained on in the fp32 profile (the verifier's own are); a wrong one still shows a node that does not
compute what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, standing


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """No token's claimed log-probability off by more than the calibrated bound."""
    for claim in standing(claims):
        assert claim.logprobs_N is not None
        claimed_N = claim.claimed_logprobs_N[claim.at : claim.at + len(claim.logprobs_N)]
        with np.errstate(over="ignore"):
            error_N = np.abs(claimed_N - claim.logprobs_N)
        claim.note("logprob_error", min(float(error_N.max()), 1e300))
        wrong = np.flatnonzero(~(error_N <= setting.thresholds.logprob))
        if len(wrong):
            claim.fail(ReasonCode.LOGPROB_MISMATCH, token_at=float(claim.at + wrong[0]))
