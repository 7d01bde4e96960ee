"""Samples every rollout several times and sends the one with the best reward.

    python examples/cheats/best-of-n.py --socket PATH --truth LOG [--n 8] [--transform reverse]

The first sample is the forced one; the others come from the right model under seeds of its own. A better one replaces
it, which makes the node look skilled and the policy look better than it is. Each sample is a true sample of the right
weights with its own true states and log-probabilities. Caught by the tokens: only one of the samples is the one that
the lease's seed forces. Where the forced one is as good as any, it is sent, and accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from _common import TRANSFORM, Answers, DishonestEngine, TruthLog, draw, main
from blake3 import blake3

from node.decode import Decoded
from protocol.engine import GenerateRequest
from verifier.model import completion_text


class BestOfN(DishonestEngine):
    def __init__(self, truth: TruthLog, n: int, transform: str) -> None:
        super().__init__(truth)
        self._n = n
        self._answers = Answers(transform)

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        assert self.policy is not None
        own = tuple(
            dataclasses.replace(item, seed=blake3(item.seed + bytes([number])).digest())
            for item in request.items
            for number in range(1, self._n)
        )
        drawn = draw(self.policy.model, dataclasses.replace(request, items=own), cancelled)
        sent = []
        for position, (item, forced) in enumerate(zip(request.items, honest, strict=True)):
            samples = [forced, *drawn[position * (self._n - 1) : (position + 1) * (self._n - 1)]]
            prompt = self.prompt(item)
            sent.append(max(samples, key=lambda one: self.earns(prompt, one, request)))  # the first of the best
        return sent

    def earns(self, prompt: str, sample: Decoded, request: GenerateRequest) -> bool:
        assert self.policy is not None
        text = completion_text(self.policy.tokenizer, sample.tokens, request.stop_tokens)
        return self._answers.earns(prompt, text, sample.finish)


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return BestOfN(truth, args.n, args.transform)


if __name__ == "__main__":
    main(make, __doc__ or "", ("--n", {"type": int, "choices": range(2, 65), "default": 8, "metavar": "N"}), TRANSFORM)
