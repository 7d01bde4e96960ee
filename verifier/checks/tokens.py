"""`token-range` before the prefill, `token-not-forced` after it: every token is the one the lease's seed forces.

Not covered: pooled evidence over many rollouts of a node (bf16 profile).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, standing


def check_range(claims: Sequence[Claim], setting: Setting) -> None:
    """Token ids below the model's vocabulary."""
    for claim in standing(claims):
        wrong = np.flatnonzero(claim.tokens_N >= setting.policy.vocabulary)
        if len(wrong):
            claim.fail(ReasonCode.TOKEN_RANGE, token_at=float(wrong[0]), token=float(claim.tokens_N[wrong[0]]))


def check_forced(claims: Sequence[Claim], setting: Setting) -> None:
    """No token with a margin above the calibrated bound; smaller ones are honest rounding and only counted."""
    for claim in standing(claims):
        assert claim.margins_N is not None
        claim.note("token_margin", float(claim.margins_N.max()))
        before = claim.numbers.get("tokens_not_first", 0.0)
        claim.numbers["tokens_not_first"] = before + float((claim.margins_N > 0).sum())
        wrong = np.flatnonzero(claim.margins_N > setting.thresholds.token_margin)
        if len(wrong):
            claim.fail(ReasonCode.TOKEN_NOT_FORCED, token_at=float(claim.at + wrong[0]), tokens_wrong=float(len(wrong)))
