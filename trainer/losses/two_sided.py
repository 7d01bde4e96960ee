"""Two-sided clipped policy gradient (the default loss).

Source: INTELLECT-2 (arXiv:2505.07291), section "Two-Sided GRPO Clipping", on the token-level GRPO objective
(DeepSeekMath, arXiv:2402.03300, equation 3) without its KL term:

    ratio = exp(logprob - behaviour)
    J     = min( min(ratio, delta) * A,  clip(ratio, 1 - low, 1 + high) * A )
    loss  = - sum(J) / number of tokens

Plain GRPO leaves one side open: with A < 0 and a large ratio the term is `ratio * A`, without bound. `delta` bounds
it, so that one stale token cannot blow up a step.

Shapes: N sampled tokens of the whole batch, float32, no padding.
Not covered: advantages (`trainer.advantages`); which sequences enter, and the divisor (`trainer.update`).
"""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before `exp`. Far beyond it float32 overflows and a gradient becomes inf * 0."""


def two_sided(
    logprobs_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    tokens: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 4.0,
) -> torch.Tensor:
    """The loss, a scalar.

    Args:
        logprobs_N: log-probabilities of the sampled tokens under the policy being trained; carries the gradient.
        behaviour_N: the same under the policy that sampled them; no gradient.
        advantages_N: the advantage of each token's sequence.
        tokens: the divisor. A micro-batch passes the whole batch's count: its parts' losses then sum to the batch's.
        clip_low, clip_high: trust region [1 - clip_low, 1 + clip_high].
        ratio_cap: delta; must be above 1 + clip_high.

    Raises:
        ValueError: constants that make no trust region.
    """
    check_region(clip_low, clip_high, ratio_cap)
    ratio_N = _ratio(logprobs_N, behaviour_N)
    capped_N = ratio_N.clamp(max=ratio_cap) * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return -torch.minimum(capped_N, clipped_N).sum() / tokens


def two_sided_masked(
    logprobs_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 4.0,
) -> torch.Tensor:
    """True [N] where a token's term has no gradient, because the side that binds is clipped or capped."""
    ratio_N = _ratio(logprobs_N.detach(), behaviour_N)
    rising_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    falling_N = (advantages_N < 0) & ((ratio_N < 1 - clip_low) | (ratio_N > ratio_cap))
    return rising_N | falling_N


def check_region(clip_low: float, clip_high: float, ratio_cap: float) -> None:
    """Raise ValueError unless the three constants make a trust region."""
    if not (0 < clip_low < 1 and clip_high > 0 and ratio_cap > 1 + clip_high):
        raise ValueError("a trust region needs 0 < clip_low < 1, clip_high > 0 and ratio_cap > 1 + clip_high")


def _ratio(logprobs_N: torch.Tensor, behaviour_N: torch.Tensor) -> torch.Tensor:
    return (logprobs_N - behaviour_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
