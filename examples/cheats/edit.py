"""Changes one token of an otherwise honest rollout, the first wrong one, and proves the edited text honestly.

    python examples/cheats/edit.py --socket PATH --truth LOG [--transform reverse]

A rollout that is one letter from right becomes right, and every other one is steered a letter closer. The right model
reads the edited text once, so states, proofs and log-probabilities belong to exactly what is sent, and the claimed
reward is the text's own. Caught by the tokens: the edited one is not what the lease's seed forces, and one is enough.
A rollout that is right, or has no wrong letter before its end, is sent as it is, and accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _common import TRANSFORM, Answers, DishonestEngine, TruthLog, main, proved

from node.decode import Decoded
from protocol.engine import GenerateItem, GenerateRequest


class Edit(DishonestEngine):
    def __init__(self, truth: TruthLog, transform: str) -> None:
        super().__init__(truth)
        self._answers = Answers(transform)

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        assert self.policy is not None
        texts = [
            self.edited(item, rollout.tokens, request.stop_tokens)
            for item, rollout in zip(request.items, honest, strict=True)
        ]
        return proved(self.policy, request, texts)

    def edited(self, item: GenerateItem, tokens: tuple[int, ...], stop: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens with the first wrong one made right; lengths and endings stay."""
        assert self.policy is not None
        answer = self._answers.right(self.prompt(item))
        right = self.policy.tokenizer.encode(answer, add_special_tokens=False).ids
        for at, (sampled, wanted) in enumerate(zip(tokens, right, strict=False)):
            if sampled in stop:
                break
            if sampled != wanted:
                return (*tokens[:at], wanted, *tokens[at + 1 :])
        return tokens


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Edit(truth, args.transform)


if __name__ == "__main__":
    main(make, __doc__ or "", TRANSFORM)
