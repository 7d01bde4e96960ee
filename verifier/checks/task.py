"""`wrong-task`: the rollout stands where its lease's task and sample stand, in task-major order.

A rollout in another's place, twice in a submission, or of another lease is rejected here.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ReasonCode
from verifier.checks.claim import Claim, Setting, standing


def check(claims: Sequence[Claim], setting: Setting) -> None:
    """Task and sample are the ones the lease names in this position."""
    del setting
    for claim in standing(claims):
        if (claim.rollout.task, claim.rollout.sample) != (claim.task.index, claim.sample):
            claim.fail(ReasonCode.WRONG_TASK)
