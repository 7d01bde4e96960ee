"""Takes the most likely token each time, where the run asks for a random draw: higher rewards from the same model.

    python examples/cheats/greedy.py --socket PATH --truth LOG

The right weights generate and prove, and the log-probabilities are those of the run's temperature, so proof and
log-probabilities hold. Caught by the tokens: the lease's seed forces a draw, and the likeliest token is often another
one. A rollout whose forced tokens all happen to be the likeliest is honest, and is accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _common import DishonestEngine, TruthLog, draw, main, proved

from node.decode import Decoded
from protocol.engine import GenerateRequest

COLD = 1e-6
"""A temperature at which the sampling noise weighs less than float32 tells apart: decoding takes the maximum."""


class Greedy(DishonestEngine):
    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        assert self.policy is not None
        likeliest = draw(self.policy.model, request, cancelled, temperature=COLD)
        return proved(self.policy, request, [one.tokens for one in likeliest])


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Greedy(truth)


if __name__ == "__main__":
    main(make, __doc__ or "")
