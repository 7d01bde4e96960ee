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

from _common import DishonestEngine, TruthLog, draw, main, proved

from node.decode import Decoded
from protocol.engine import GenerateRequest, Loaded, LoadRequest


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
        return proved(self.policy, request, [cheap.tokens for cheap in draw(self._small, request, cancelled)])


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
