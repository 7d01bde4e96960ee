"""Two-sided clipped policy gradient (the default loss).

Source: INTELLECT-2 technical report (arXiv:2505.07291), section 3.4 "Two-sided GRPO clipping", on the token-level
GRPO objective (DeepSeekMath, arXiv:2402.03300, equation 3, with no KL term):

    ratio_t = exp(logp_t - behaviour_t)
    J_t     = min( min(ratio_t, delta) * A,  clip(ratio_t, 1 - low, 1 + high) * A )
    loss    = - sum_t J_t / sum_t 1                    (mean over all sampled tokens of the batch)

Plain GRPO leaves one side open: with A < 0 and a large ratio the term is `ratio * A`, unbounded. `delta` bounds it
(delta > 1 + high), so one stale token cannot blow up a step.

Shapes: B sequences, L sampled positions (padded). All float32.
Not covered: advantages (`trainer.advantages`), which sequences enter (`trainer.learner`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before `exp`. Beyond it float32 ratios and their squares overflow into inf - inf."""


@dataclass(frozen=True)
class LossStats:
    """What happened to the tokens of one update; plain floats for the metrics file.

    masked_share: share of tokens whose term has no gradient (clipped or capped on the side that binds).
    ratio_max: largest importance ratio.
    mismatch_kl: mean of ratio - 1 - log ratio, the non-negative low-variance estimate of KL(behaviour || policy).
    effective_sample_size: (sum w)^2 / (n sum w^2) over token ratios; 1 when on-policy.
    """

    masked_share: float
    ratio_max: float
    mismatch_kl: float
    effective_sample_size: float


def two_sided(
    logprobs_BL: torch.Tensor,
    behaviour_BL: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BL: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 4.0,
    tokens: float | None = None,
) -> tuple[torch.Tensor, LossStats]:
    """The loss of one (micro-)batch and what happened in it.

    Args:
        logprobs_BL: log-probabilities of the sampled tokens under the policy being trained; carries the gradient.
        behaviour_BL: the same under the policy that sampled them; no gradient.
        advantages_B: one advantage per sequence.
        mask_BL: 1 at sampled tokens, 0 at padding.
        clip_low, clip_high: trust region [1 - clip_low, 1 + clip_high].
        ratio_cap: delta, the bound of the open side; must exceed 1 + clip_high.
        tokens: divisor; the mask's sum if None. A micro-batch passes the whole batch's count so that the sum of
            its parts' losses is the batch's loss.

    Raises:
        ValueError: constants that make no trust region.
    """
    if not (0 < clip_low < 1 and clip_high > 0 and ratio_cap > 1 + clip_high):
        raise ValueError("the trust region needs 0 < clip_low < 1, clip_high > 0 and ratio_cap > 1 + clip_high")
    mask_BL = mask_BL.to(logprobs_BL.dtype)
    log_ratio_BL = ((logprobs_BL - behaviour_BL) * mask_BL).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BL = log_ratio_BL.exp()
    advantage_BL = advantages_B[:, None]
    open_BL = ratio_BL.clamp(max=ratio_cap) * advantage_BL
    clipped_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high) * advantage_BL
    objective_BL = torch.minimum(open_BL, clipped_BL)
    total = float(mask_BL.sum()) if tokens is None else tokens
    loss = -(objective_BL * mask_BL).sum() / max(total, 1.0)
    with torch.no_grad():
        stats = _stats(ratio_BL, log_ratio_BL, advantage_BL, mask_BL, clip_low, clip_high, ratio_cap)
    return loss, stats


def _stats(
    ratio_BL: torch.Tensor,
    log_ratio_BL: torch.Tensor,
    advantage_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> LossStats:
    up_BL = (advantage_BL > 0) & (ratio_BL > 1 + clip_high)
    down_BL = (advantage_BL < 0) & ((ratio_BL < 1 - clip_low) | (ratio_BL > ratio_cap))
    count = mask_BL.sum().clamp(min=1.0)
    weights_BL = ratio_BL * mask_BL
    # In float64: 20 is allowed in the exponent, and its square does not fit float32 sums comfortably.
    w = weights_BL.double()
    return LossStats(
        masked_share=float(((up_BL | down_BL) * mask_BL).sum() / count),
        ratio_max=float(weights_BL.max()) if weights_BL.numel() else 0.0,
        mismatch_kl=float(((ratio_BL - 1 - log_ratio_BL) * mask_BL).sum() / count),
        effective_sample_size=float(w.sum() ** 2 / (count * (w**2).sum()).clamp(min=1e-12)),
    )
