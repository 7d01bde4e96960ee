"""`token-range` before the prefill, `token-not-forced` after it: every token is the one the lease's seed forces.

In bf16 about two in a hundred honest tokens are not: rounding decides between scores that are nearly equal. There a
rollout is rejected only for what rounding never does, one token or all together; what lies below is never forgiven but
written down, and added up per node.

Not covered: that sum (`evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, begins_of, joined, standing


def check_range(claims: Sequence[Claim], setting: Setting) -> None:
    """Token ids below the model's vocabulary."""
    open_claims = standing(claims)
    if not (joined([claim.tokens_N for claim in open_claims]) >= setting.policy.vocabulary).any():
        return
    for claim in open_claims:
        wrong = np.flatnonzero(claim.tokens_N >= setting.policy.vocabulary)
        if len(wrong):
            claim.fail(ReasonCode.TOKEN_RANGE, token_at=float(wrong[0]), token=float(claim.tokens_N[wrong[0]]))


def check_forced(claims: Sequence[Claim], setting: Setting) -> None:
    """No token, and in bf16 no sum of tokens, with a margin above the calibrated bound."""
    open_claims = standing(claims)
    margins = [claim.margins_N for claim in open_claims if claim.margins_N is not None]
    if not margins:
        return
    bound = setting.thresholds.token_margin if setting.bf16 is None else setting.bf16.token_margin
    margins_M, begins = joined(margins), begins_of(margins)
    largest_C = np.maximum.reduceat(margins_M, begins)
    later_C = np.add.reduceat(margins_M > 0, begins, dtype=np.int64)
    sum_C = np.add.reduceat(margins_M, begins, dtype=np.float64)
    holds_C = ~(largest_C > bound)
    for claim, margins_N, largest, later, added, holds in zip(
        open_claims, margins, largest_C.tolist(), later_C.tolist(), sum_C.tolist(), holds_C.tolist(), strict=True
    ):
        claim.note("token_margin", largest)
        claim.add("tokens_not_first", float(later))
        total = claim.add("margin_sum", added)
        if not holds:
            wrong = np.flatnonzero(margins_N > bound)
            claim.fail(ReasonCode.TOKEN_NOT_FORCED, token_at=float(claim.at + wrong[0]), tokens_wrong=float(len(wrong)))
        elif setting.bf16 is not None and total > bound + setting.bf16.margin_mean * len(claim.tokens_N):
            claim.fail(ReasonCode.TOKEN_NOT_FORCED)
