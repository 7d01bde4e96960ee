"""Takes new weights as they come, but samples with older ones: it never stops to swap them.

    python examples/cheats/stale.py --socket PATH --truth LOG [--lag 1]

Swapping weights between leases costs throughput; whoever skips it earns more per hour, and the run trains on text that
is older than it believes. It is `--lag` policies behind, one by default, which is the hardest to see. Tokens,
log-probabilities and proofs are those of the old weights: a prefill of the new ones would need the swap it avoids.
Caught by the proof: even one step moves the states far more than two honest machines differ. (One who did swap for an
honest prefill would have to send what the new weights force, and would then have done the work.)
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

from _common import DishonestEngine, TruthLog, draw, main

from node.decode import Decoded
from protocol.engine import GenerateRequest, Loaded, LoadRequest


class Stale(DishonestEngine):
    def __init__(self, truth: TruthLog, lag: int) -> None:
        super().__init__(truth)
        self._older: deque[Any] = deque(maxlen=lag)

    def load(self, request: LoadRequest) -> Loaded:
        if self.policy is not None and request.root != self.root:
            self._older.append(copy.deepcopy(self.policy.model))
        return super().load(request)

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        return draw(self._older[0], request, cancelled) if self._older else honest


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Stale(truth, args.lag)


if __name__ == "__main__":
    main(make, __doc__ or "", ("--lag", {"type": int, "choices": range(1, 9), "default": 1, "metavar": "POLICIES"}))
