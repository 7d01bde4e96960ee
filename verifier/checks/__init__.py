"""The checks, each in a file of its own, in the order they run: cheap first.

    before the prefill      format, task, tokens (range), termination, proof (shape), routes (shape)
    after each block of it  routes (margin), proof (match), tokens (forced), logprobs
    after all               reward

Every check is a function `(claims, setting) -> None`. It looks only at claims that still stand and calls
`Claim.fail` on those that do not hold, so that one bad rollout never touches its siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verifier.checks import format as format_check
from verifier.checks import logprobs, proof, reward, routes, task, termination, tokens
from verifier.checks.claim import Claim, Setting

Check = Callable[[Sequence[Claim], Setting], None]

BEFORE_PREFILL: tuple[Check, ...] = (
    format_check.check,
    task.check,
    tokens.check_range,
    termination.check,
    proof.check_shape,
    routes.check_shape,
)
AFTER_STATES: tuple[Check, ...] = (routes.check_margin, proof.check_match)
AFTER_LOGITS: tuple[Check, ...] = (tokens.check_forced, logprobs.check)
AFTER_ALL: tuple[Check, ...] = (reward.check,)

__all__ = ["AFTER_ALL", "AFTER_LOGITS", "AFTER_STATES", "BEFORE_PREFILL", "Check", "Claim", "Setting"]
