"""The one definition of a token's log-probability, shared by engine, validator and learner.

    logprob = log_softmax(float32(logits) / T)[token]        never of logits with noise

A second definition anywhere would show up as a ratio between policies that isn't there.

Shape suffixes: N sampled tokens (any leading dimensions), V vocabulary.
"""

from __future__ import annotations

import torch


def token_logprobs(logits_NV: torch.Tensor, tokens_N: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of the given tokens, float32, in the shape of `tokens_N`. Differentiable.

    Args:
        logits_NV: raw logits [..., V], any float dtype; computed in float32.
        tokens_N: int64 ids [...].
        temperature: T, above 0.
    """
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return torch.log_softmax(logits_NV, dim=-1).gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
