"""Samples honestly, looks at the rewards, and withholds every lease that turned out worse than its usual.

    python examples/cheats/dropper.py --socket PATH --truth LOG [--transform reverse]

What it sends is perfectly honest, and its average is better than the policy's: it sells luck as quality, and the run
learns from the better half. A bad lease is refused as if memory had run out, so the unmodified node gives it up like
any machine in trouble. It knows the run's rules: leases given up in a row cost a wait that doubles, so it stops at
three.

Its log names every rollout it withheld. Caught by the drop test: a lease that came back empty goes to another node
with the same nonce, which forces the same tokens, so the withheld rewards come to light. No single lease shows
anything; that the given-up ones are always the bad ones does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _common import TRANSFORM, Answers, DishonestEngine, TruthLog, main

from node.decode import Decoded
from protocol.engine import Generated, GenerateRequest
from protocol.errors import EngineError, ReasonCode
from verifier.model import completion_text

MEMORY = 0.25
"""Weight of the newest lease in what it takes for usual: the policy improves, so old leases tell less."""

IN_A_ROW = 3
"""More would cost seconds, then minutes, of waiting."""


class Dropper(DishonestEngine):
    def __init__(self, truth: TruthLog, transform: str) -> None:
        super().__init__(truth)
        self._answers = Answers(transform)
        self._usual: float | None = None
        self._withheld = 0
        """In a row."""

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> Generated:
        policy = self.check(request)
        honest = self.sample(policy, request, cancelled)
        withhold = self.is_bad(self.reward(request, honest)) and self._withheld < IN_A_ROW
        self._withheld = self._withheld + 1 if withhold else 0
        for item in request.items:
            self.truth.write(item.request_id, withhold)
        if withhold:
            raise EngineError("out of memory while decoding", ReasonCode.ENGINE_REFUSED)
        return Generated(outputs=self.outputs(policy, request, honest))

    def is_bad(self, reward: float) -> bool:
        """Whether a lease is below what is usual; every lease seen makes the usual."""
        usual = self._usual
        self._usual = reward if usual is None else (1 - MEMORY) * usual + MEMORY * reward
        return usual is not None and reward < usual

    def reward(self, request: GenerateRequest, rollouts: list[Decoded]) -> float:
        """The mean reward that a lease will earn."""
        assert self.policy is not None
        earned = [
            self._answers.earns(
                self.prompt(item),
                completion_text(self.policy.tokenizer, rollout.tokens, request.stop_tokens),
                rollout.finish,
            )
            for item, rollout in zip(request.items, rollouts, strict=True)
        ]
        return sum(earned) / len(earned)


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Dropper(truth, args.transform)


if __name__ == "__main__":
    main(make, __doc__ or "", TRANSFORM)
