"""Generates with weights rounded to 8 (or 4) bits: half the memory and more, and what it believes are honest proofs.

    python examples/cheats/quantised.py --socket PATH --truth LOG [--bits 8]

Every linear layer is rounded per output channel, symmetric, as common int8 engines do; embeddings and the head stay.
Tokens, log-probabilities, states and proofs all come from the rounded model. Caught by the proof: its states are
about 1e-2 off, honest noise is 1e-6.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from _common import DishonestEngine, TruthLog, draw, main

from node.decode import Decoded
from protocol.engine import GenerateRequest, Loaded, LoadRequest


class Quantised(DishonestEngine):
    def __init__(self, truth: TruthLog, bits: int) -> None:
        super().__init__(truth)
        self._bits = bits
        self._model: torch.nn.Module | None = None

    def load(self, request: LoadRequest) -> Loaded:
        loaded = super().load(request)
        assert self.policy is not None
        self._model = copy.deepcopy(self.policy.model)
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
                module.weight.data = rounded(module.weight.data, self._bits)
        return loaded

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        return draw(self._model, request, cancelled)


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """`weight` [out, in] on a symmetric grid of 2^bits - 1 values per output channel."""
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / top
    return (weight / scale).round().clamp(-top, top) * scale


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Quantised(truth, args.bits)


if __name__ == "__main__":
    main(make, __doc__ or "", ("--bits", {"type": int, "choices": (8, 4), "default": 8}))
