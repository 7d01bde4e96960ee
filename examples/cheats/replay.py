"""Works once, then sends the same rollouts again for every new lease.

    python examples/cheats/replay.py --socket PATH --truth LOG

The first request is answered honestly and kept: tokens, log-probabilities, proofs. Later leases get the kept
rollouts in turn, which costs nothing. Caught by the proof: states and seed belong to another prompt and lease.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _common import DishonestEngine, TruthLog, main

from node.decode import Decoded
from protocol.engine import GenerateRequest


class Replay(DishonestEngine):
    def __init__(self, truth: TruthLog) -> None:
        super().__init__(truth)
        self._kept: list[Decoded] = []

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        if not self._kept:
            self._kept = honest
            return honest
        return [self._kept[i % len(self._kept)] for i in range(len(honest))]


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Replay(truth)


if __name__ == "__main__":
    main(make, __doc__ or "")
