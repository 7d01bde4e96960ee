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
    parts = [claim.tokens_N for claim in open_claims]
    stops_at = np.flatnonzero((joined(parts)[:, None] == stop).any(axis=1))
    begins = begins_of(parts)
    ends = [begin + len(part) for begin, part in zip(begins, parts, strict=True)]
    firsts, lasts = np.searchsorted(stops_at, begins).tolist(), np.searchsorted(stops_at, ends).tolist()
    for claim, begin, end, first, last in zip(open_claims, begins, ends, firsts, lasts, strict=True):
        count, stops = end - begin, last - first
        ended = FINISH_EOS if stops else FINISH_LENGTH
        whole = stops == 1 and stops_at[first] == end - 1 if stops else count == setting.max_new_tokens
        if not 1 <= count <= setting.max_new_tokens or not whole or claim.rollout.finish != ended:
            stop_at = float(stops_at[first] - begin) if stops else -1.0
            claim.fail(ReasonCode.TERMINATION, tokens=count, stop_at=stop_at)
