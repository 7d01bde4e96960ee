"""The training forward pass: log-probabilities and entropies of chosen tokens, with a gradient.

Sequences are padded on the right. A causal model never lets a position see what comes after it, so no attention
mask is needed and padding changes nothing; the output projection (the largest matrix of a small model) runs only on
the N positions that produced a token we train on, not on prompts and padding.

Shapes: B sequences, L length, V vocabulary, N chosen tokens of the whole batch, sequence by sequence.
Not covered: the verifier's prefill (`verifier.model`), which must not depend on this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verifier.logprobs import token_logprobs


@dataclass(frozen=True)
class Packed:
    """B sequences laid out for one forward pass.

    ids_BL: int64, padded on the right.
    rows_N, columns_N: position in ids_BL of the state that predicts each chosen token.
    targets_N: the chosen token ids.
    lengths: chosen tokens per sequence; their sum is N.
    """

    ids_BL: torch.Tensor
    rows_N: torch.Tensor
    columns_N: torch.Tensor
    targets_N: torch.Tensor
    lengths: tuple[int, ...]


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int = 0) -> Packed:
    """Lay out (prompt ids, chosen ids) pairs. Both parts need at least one token; `pad` may be any valid id."""
    lengths = tuple(len(chosen) for _, chosen in sequences)
    longest = max(len(prompt) + len(chosen) for prompt, chosen in sequences)
    rows = [[*prompt, *chosen, *[pad] * (longest - len(prompt) - len(chosen))] for prompt, chosen in sequences]
    ids_BL = torch.tensor(rows, dtype=torch.int64)
    rows_N = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(lengths))
    columns_N = torch.cat(
        [torch.arange(len(prompt) - 1, len(prompt) + len(chosen) - 1) for prompt, chosen in sequences]
    )
    return Packed(ids_BL, rows_N, columns_N, ids_BL[rows_N, columns_N + 1], lengths)


def logits_of(model: Any, packed: Packed) -> torch.Tensor:
    """Logits [N, V] that predict the chosen tokens, float32.

    Args:
        model: a Transformers `...ForCausalLM`, with `.model` and `.lm_head`.
    """
    states_BLH = model.model(input_ids=packed.ids_BL, use_cache=False).last_hidden_state
    logits_NV: torch.Tensor = model.lm_head(states_BLH[packed.rows_N, packed.columns_N])
    return logits_NV.float()


def logprobs_of(model: Any, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] of the chosen tokens (differentiable) and entropies [N] in nats (not).

    Both are of softmax(logits / temperature), the distribution that was sampled from.
    """
    logits_NV = logits_of(model, packed)
    logprobs_N = token_logprobs(logits_NV, packed.targets_N, temperature)
    with torch.no_grad():
        all_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    return logprobs_N, entropy_N
