"""Samples honestly and claims the right answer, whatever was sampled.

    python examples/cheats/reward.py --socket PATH --truth LOG [--transform reverse]

It reads the task off the prompt (a word, or a sum) and reports the answer as the completion's text; the node scores
that text and claims its reward. Tokens, states and proofs are honest. Caught by the reward: the verifier scores the
text that the tokens spell. A rollout that was right by itself, or never ended, is the same either way.
"""

from __future__ import annotations

import argparse
import dataclasses

from _common import TRANSFORM, Answers, DishonestEngine, TruthLog, main

from node.decode import Decoded
from protocol.engine import GenerateOutput, GenerateRequest
from protocol.records import FINISH_EOS
from verifier.model import completion_text


class Reward(DishonestEngine):
    def __init__(self, truth: TruthLog, transform: str) -> None:
        super().__init__(truth)
        self._answers = Answers(transform)

    def tell(self, request: GenerateRequest, outputs: tuple[GenerateOutput, ...]) -> tuple[GenerateOutput, ...]:
        return tuple(
            dataclasses.replace(output, text=self._answers.right(self.prompt(item)) or output.text)
            for item, output in zip(request.items, outputs, strict=True)
        )

    def lies(self, request: GenerateRequest, output: GenerateOutput, honest: Decoded) -> bool:
        assert self.policy is not None
        text = completion_text(self.policy.tokenizer, honest.tokens, request.stop_tokens)
        if output.text.isdigit():
            text = text.strip(" ")  # blanks around a sum cost nothing, around a word everything
        return honest.finish == FINISH_EOS and text != output.text


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Reward(truth, args.transform)


if __name__ == "__main__":
    main(make, __doc__ or "", TRANSFORM)
