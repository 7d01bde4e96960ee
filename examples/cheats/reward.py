"""Samples honestly and claims the right answer, whatever was sampled.

    python examples/cheats/reward.py --socket PATH --truth LOG [--transform reverse]

It reads the task off the prompt (a word, or a sum) and reports the answer as the completion's text; the node scores
that text and claims its reward. Tokens, states and proofs are honest. Caught by the reward: the verifier scores the
text that the tokens spell. A rollout that was right by itself, or never ended, is the same either way.
"""

from __future__ import annotations

import argparse
import dataclasses
import re

from _common import DishonestEngine, TruthLog, main

from environments.word import TRANSFORMS
from node.decode import Decoded
from node.engine import read_tokens
from protocol.engine import GenerateOutput, GenerateRequest
from protocol.records import FINISH_EOS
from verifier.model import completion_text

_WORD = re.compile(r"(\w+)=$")
_SUM = re.compile(r"(\d+)\+(\d+)=$")


class Reward(DishonestEngine):
    def __init__(self, truth: TruthLog, transform: str) -> None:
        super().__init__(truth)
        self._transform = TRANSFORMS[transform]

    def tell(self, request: GenerateRequest, outputs: tuple[GenerateOutput, ...]) -> tuple[GenerateOutput, ...]:
        assert self.policy is not None
        told = []
        for item, output in zip(request.items, outputs, strict=True):
            prompt = self.policy.tokenizer.decode(list(read_tokens(item.prompt)), skip_special_tokens=False)
            told.append(dataclasses.replace(output, text=self.answer(prompt) or output.text))
        return tuple(told)

    def lies(self, request: GenerateRequest, output: GenerateOutput, honest: Decoded) -> bool:
        assert self.policy is not None
        text = completion_text(self.policy.tokenizer, honest.tokens, request.stop_tokens)
        if output.text.isdigit():
            text = text.strip(" ")  # blanks around a sum cost nothing, around a word everything
        return honest.finish == FINISH_EOS and text != output.text

    def answer(self, prompt: str) -> str:
        """The right answer to the prompt's last line, or nothing if it is no task we know."""
        if match := _SUM.search(prompt):
            return str(int(match[1]) + int(match[2]))
        if match := _WORD.search(prompt):
            return self._transform(match[1])
        return ""


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Reward(truth, args.transform)


if __name__ == "__main__":
    main(make, __doc__ or "", ("--transform", {"choices": tuple(TRANSFORMS), "default": "reverse"}))
