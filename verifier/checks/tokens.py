"""`token-range` before the prefill, `token-not-forced` after it: every token is the one the lease's seed forces.

Not covered: pooled evidence over many rollouts of a node (bf16 profile).
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
    """No token with a margin above the calibrated bound; smaller ones are honest rounding and only counted."""
    open_claims = standing(claims)
    margins = [claim.margins_N for claim in open_claims if claim.margins_N is not None]
    if not margins:
        return
    margins_M, begins = joined(margins), begins_of(margins)
    largest_C = np.maximum.reduceat(margins_M, begins)
    later_C = np.add.reduceat(margins_M > 0, begins, dtype=np.int64)
    holds_C = ~(largest_C > setting.thresholds.token_margin)
    for claim, margins_N, largest, later, holds in zip(
        open_claims, margins, largest_C.tolist(), later_C.tolist(), holds_C.tolist(), strict=True
    ):
        claim.note("token_margin", largest)
        claim.numbers["tokens_not_first"] = claim.numbers.get("tokens_not_first", 0.0) + float(later)
        if not holds:
            wrong = np.flatnonzero(margins_N > setting.thresholds.token_margin)
            claim.fail(ReasonCode.TOKEN_NOT_FORCED, token_at=float(claim.at + wrong[0]), tokens_wrong=float(len(wrong)))
