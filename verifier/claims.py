"""Does a verdict's word fit the upload it accepts? Told from the two records alone: no model is run for it.

A validator accepts a rollout only when its own reward equals the claimed one, and each of its own log-probabilities is
within the run's bound of the claimed one (`checks.reward`, `checks.logprobs`). So details that contradict the upload
contradict the ACCEPT: whoever handed them in would choose what is trained on, and what the drop test counts.

The coordinator asks before a verdict counts, the audit (`verifier.details`) again of every verdict in the ledger.

Not covered: numbers that are off by less; those the audit derives again.
"""

from __future__ import annotations

import numpy as np

from protocol.records import Rollout, RolloutDetail


def contradiction(rollout: Rollout, detail: RolloutDetail, bound: float) -> str:
    """What in an accepted rollout's details is not as claimed, as the end of "rollout 3 was accepted "; else empty.

    Args:
        bound: the manifest's `thresholds.logprob`; compared in float32, as the check compares.
    """
    if detail.reward != rollout.reward:
        return f"with reward {detail.reward:g}, but it claims {rollout.reward:g}"
    if len(detail.logprobs) != len(rollout.logprobs):
        return "with another number of log-probabilities than it claims"
    error_N = np.abs(np.frombuffer(detail.logprobs, "<f4") - np.frombuffer(rollout.logprobs, "<f4"))
    if not bool((error_N <= bound).all()):  # what is no number is not within it
        return f"with log-probabilities further than {bound:g} from the claimed ones"
    return ""
