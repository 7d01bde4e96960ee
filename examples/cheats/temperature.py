"""Samples at a lower temperature than the run's: less exploration, higher rewards, and still random to look at.

    python examples/cheats/temperature.py --socket PATH --truth LOG [--temperature 0.7]

It uses the lease's own seeds, and one honest prefill gives the states and log-probabilities of the run's temperature,
so proof and log-probabilities hold. Caught by the tokens: seed, weights and temperature together force each of them,
and at another temperature some come out differently. Rollouts that come out the same are honest, and are accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _common import DishonestEngine, TruthLog, draw, main, proved

from node.decode import Decoded
from protocol.engine import GenerateRequest


class Temperature(DishonestEngine):
    def __init__(self, truth: TruthLog, temperature: float) -> None:
        super().__init__(truth)
        self._temperature = temperature

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        assert self.policy is not None
        drawn = draw(self.policy.model, request, cancelled, temperature=self._temperature)
        return proved(self.policy, request, [one.tokens for one in drawn])


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Temperature(truth, args.temperature)


if __name__ == "__main__":
    main(make, __doc__ or "", ("--temperature", {"type": float, "default": 0.7, "metavar": "T"}))
