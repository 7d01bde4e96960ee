"""Generates with a cheaper checkpoint, then proves with one honest prefill of the right one.

    python examples/cheats/small-model.py --socket PATH --truth LOG

The cheap checkpoint is the first policy it was given, without its top layer, kept for good: no more updates, fewer
layers. The proofs, states and log-probabilities are perfectly honest, because the right model reads the finished text
once. Caught by the tokens: the lease's seed forces each of them, and the cheap model chose others.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from _common import DishonestEngine, TruthLog, main

from node.decode import Decoded, DecodeRequest, decode
from node.engine import read_tokens
from protocol.engine import GenerateRequest, Loaded, LoadRequest
from verifier.logprobs import token_logprobs


class SmallModel(DishonestEngine):
    def __init__(self, truth: TruthLog) -> None:
        super().__init__(truth)
        self._small: Any = None

    def load(self, request: LoadRequest) -> Loaded:
        loaded = super().load(request)
        if self._small is None:
            assert self.policy is not None
            self._small = without_top_layer(self.policy.model)
        return loaded

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        assert self.policy is not None
        cheap = decode(
            self._small,
            [DecodeRequest(read_tokens(i.prompt), i.seed, i.max_new_tokens) for i in request.items],
            temperature=request.temperature,
            stop_tokens=request.stop_tokens,
            cancelled=cancelled,
        )
        proved = self.policy.prefill(
            [(read_tokens(i.prompt), c.tokens) for i, c in zip(request.items, cheap, strict=True)]
        )
        sent = []
        for c, p in zip(cheap, proved, strict=True):
            logprobs = token_logprobs(torch.from_numpy(p.logits_NV), torch.tensor(c.tokens), request.temperature)
            sent.append(Decoded(c.tokens, logprobs.numpy(), p.states_NH, c.finish))
        return sent


def without_top_layer(model: Any) -> Any:
    """A copy of `model` whose last transformer layer is gone."""
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:-1]
    small.config.num_hidden_layers -= 1
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = small.config.layer_types[:-1]
    small.model.config = small.config
    return small


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return SmallModel(truth)


if __name__ == "__main__":
    main(make, __doc__ or "")
