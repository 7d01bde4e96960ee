"""`format`: the parts of one rollout fit together and inside the lease, before anything else is believed.

Shape and bounds of the whole record were checked by its decoder; what fails there fails the whole submission.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from protocol.records import FINISH_EOS, FINISH_LENGTH
from verifier.checks.claim import Claim, Setting, joined, standing


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """One finite log-probability per token, and a known finish word."""
    del setting
    open_claims = standing(claims)
    finite = [True] * len(open_claims)
    if not np.isfinite(joined([claim.claimed_logprobs_N for claim in open_claims])).all():
        finite = [bool(np.isfinite(claim.claimed_logprobs_N).all()) for claim in open_claims]
    for claim, are_finite in zip(open_claims, finite, strict=True):
        if len(claim.claimed_logprobs_N) != len(claim.tokens_N):
            claim.fail(ReasonCode.FORMAT, tokens=len(claim.tokens_N), logprobs=len(claim.claimed_logprobs_N))
        elif not are_finite or claim.rollout.finish not in (FINISH_EOS, FINISH_LENGTH):
            claim.fail(ReasonCode.FORMAT)
