"""`termination`: a rollout ends at its first stop token or at exactly the lease's cap, and says which.

There is no rule about the probability of the end: a stop token is a sampled token like any other (`tokens`), and
such a rule rejects 20 to 30% of honest endings at T = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.errors import ReasonCode
from protocol.records import FINISH_EOS, FINISH_LENGTH
from verifier.checks.claim import Claim, Setting, begins_of, joined, standing


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """At least one token, at most the cap; a stop token only at the end; the finish word says what happened."""
    stop = np.asarray(sorted(setting.stop_tokens), dtype=np.int64)
    open_claims = standing(claims)
    is_stop_M = (joined([claim.tokens_N for claim in open_claims])[:, None] == stop).any(axis=1)
    for claim, begin in zip(open_claims, begins_of([claim.tokens_N for claim in open_claims]), strict=True):
        count = len(claim.tokens_N)
        stops = np.flatnonzero(is_stop_M[begin : begin + count])
        ended = FINISH_EOS if len(stops) else FINISH_LENGTH
        whole = len(stops) == 1 and stops[0] == count - 1 if len(stops) else count == setting.max_new_tokens
        if not 1 <= count <= setting.max_new_tokens or not whole or claim.rollout.finish != ended:
            claim.fail(ReasonCode.TERMINATION, tokens=count, stop_at=float(stops[0]) if len(stops) else -1.0)
