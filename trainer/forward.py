"""The training forward pass: log-probabilities and entropies of chosen tokens, with a gradient.

Sequences are padded on the right. A causal model never lets a position see what comes after it, so no attention
mask is needed and padding changes nothing; the output projection (the largest matrix of a small model) runs only on
the N positions that produced a token we train on, not on prompts and padding.

Shapes: B sequences, L length, H hidden, V vocabulary, N chosen tokens of the whole batch, sequence-major.
Not covered: the verifier's prefill (`verifier.model`), which must not depend on this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Packed:
    """B sequences ready for one forward pass.

    ids_BL: int64, right-padded.
    rows_N, columns_N: where each chosen token's predecessor lies in ids_BL, i.e. the state that predicts it.
    targets_N: the chosen token ids.
    lengths_B: chosen tokens per sequence; N = lengths_B.sum().
    """

    ids_BL: torch.Tensor
    rows_N: torch.Tensor
    columns_N: torch.Tensor
    targets_N: torch.Tensor
    lengths_B: torch.Tensor

    def unpack(self, values_N: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[N] values back to [B, longest completion], padded with `fill`."""
        return torch.nn.utils.rnn.pad_sequence(
            list(values_N.split(self.lengths_B.tolist())), batch_first=True, padding_value=fill
        )

    def mask_BL(self) -> torch.Tensor:
        """1.0 at chosen tokens of `unpack`'s layout, 0.0 at its padding."""
        longest = int(self.lengths_B.max()) if len(self.lengths_B) else 0
        return (torch.arange(longest)[None] < self.lengths_B[:, None]).float()


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int = 0) -> Packed:
    """Lay out (prompt ids, completion ids) pairs. Both parts need at least one token."""
    lengths = torch.tensor([len(done) for _, done in sequences])
    longest = max(len(prompt) + len(done) for prompt, done in sequences)
    ids_BL = torch.full((len(sequences), longest), pad, dtype=torch.int64)
    columns: list[torch.Tensor] = []
    for row, (prompt, done) in enumerate(sequences):
        ids_BL[row, : len(prompt) + len(done)] = torch.tensor([*prompt, *done])
        columns.append(torch.arange(len(prompt) - 1, len(prompt) + len(done) - 1))
    columns_N = torch.cat(columns)
    rows_N = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    return Packed(ids_BL, rows_N, columns_N, ids_BL[rows_N, columns_N + 1], lengths)


def logits_of(model: Any, packed: Packed) -> torch.Tensor:
    """[N, V] float32 logits that predict the chosen tokens. `model` is a Transformers causal LM (`.model`, `.lm_head`)."""
    states_BLH = model.model(input_ids=packed.ids_BL, use_cache=False).last_hidden_state
    logits_NV: torch.Tensor = model.lm_head(states_BLH[packed.rows_N, packed.columns_N])
    return logits_NV.float()


def logprobs_of(model: Any, packed: Packed, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] log-probabilities of the chosen tokens, [N] entropies in nats), both of softmax(logits / temperature)."""
    all_NV = torch.log_softmax(logits_of(model, packed) / temperature, dim=-1)
    chosen_N = all_NV.gather(1, packed.targets_N[:, None])[:, 0]
    entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    return chosen_N, entropy_N
