"""What the dishonest programs of this folder share.

Most are engines: ordinary programs that speak the engine socket, so an ordinary `node join --engine-socket PATH` works
with them and doesn't know. Each really computes what it pretends, and beside that the honest result, only to write
down its own truth: one JSON line per rollout, {"request_id": ..., "dishonest": true or false}. Verifiers never see it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environments.word import TRANSFORMS
from node.decode import Decoded, DecodeRequest, decode
from node.engine import TransformersEngine, add_arguments, read_tokens, serve
from protocol.engine import Generated, GenerateItem, GenerateOutput, GenerateRequest
from protocol.records import FINISH_EOS, FINISH_LENGTH
from verifier.logprobs import token_logprobs
from verifier.model import PolicyModel

SAME = 1e-5
"""Relative distance of states under which two computations are the same one: honest noise is about 1e-6."""

TRANSFORM = ("--transform", {"choices": tuple(TRANSFORMS), "default": "reverse", "help": "what the run rewards"})
"""A word's prompt doesn't say which transform earns the reward."""

_WORD = re.compile(r"(\w+)=$")
_SUM = re.compile(r"(\d+)\+(\d+)=$")


class TruthLog:
    """The program's own record of what it did."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, request_id: str, dishonest: bool) -> None:
        self._file.write(json.dumps({"request_id": request_id, "dishonest": dishonest}) + "\n")


class DishonestEngine(TransformersEngine):
    """Samples honestly first, then sends what a subclass makes of it."""

    def __init__(self, truth: TruthLog) -> None:
        super().__init__()
        self.truth = truth

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> Generated:
        policy = self.check(request)
        honest = self.sample(policy, request, cancelled)
        sent = self.pretend(request, honest, cancelled)
        outputs = self.tell(request, self.outputs(policy, request, sent))
        for item, output, a, b in zip(request.items, outputs, sent, honest, strict=True):
            self.truth.write(item.request_id, differs(a, b) or self.lies(request, output, b))
        return Generated(outputs=outputs)

    def pretend(self, request: GenerateRequest, honest: list[Decoded], cancelled: Callable[[], bool]) -> list[Decoded]:
        """What is sent in place of the honest rollouts."""
        return honest

    def tell(self, request: GenerateRequest, outputs: tuple[GenerateOutput, ...]) -> tuple[GenerateOutput, ...]:
        """The outputs as sent."""
        return outputs

    def lies(self, request: GenerateRequest, output: GenerateOutput, honest: Decoded) -> bool:
        """Whether an output with honest tokens and states is dishonest all the same."""
        return False

    def prompt(self, item: GenerateItem) -> str:
        """What the item's model sees, as text."""
        assert self.policy is not None
        text: str = self.policy.tokenizer.decode(list(read_tokens(item.prompt)), skip_special_tokens=False)
        return text


def draw(
    model: Any, request: GenerateRequest, cancelled: Callable[[], bool], temperature: float | None = None
) -> list[Decoded]:
    """Decode the request's items with any model, at any temperature."""
    return decode(
        model,
        [DecodeRequest(read_tokens(i.prompt), i.seed, i.max_new_tokens) for i in request.items],
        temperature=request.temperature if temperature is None else temperature,
        stop_tokens=request.stop_tokens,
        cancelled=cancelled,
    )


def proved(policy: PolicyModel, request: GenerateRequest, texts: Sequence[tuple[int, ...]]) -> list[Decoded]:
    """`texts`, however they were made, with the states and log-probabilities of one honest prefill of the right model.

    Whoever sends these holds the right weights and lies about the tokens alone: proof and log-probabilities hold.
    """
    pairs = [(read_tokens(item.prompt), tokens) for item, tokens in zip(request.items, texts, strict=True)]
    sent = []
    for tokens, prefilled in zip(texts, policy.prefill(pairs), strict=True):
        logits_NV = torch.from_numpy(prefilled.logits_NV)
        logprobs_N = token_logprobs(logits_NV, torch.tensor(tokens), request.temperature).numpy()
        finish = FINISH_EOS if tokens[-1] in request.stop_tokens else FINISH_LENGTH
        sent.append(Decoded(tokens, logprobs_N, prefilled.states_NH, finish))
    return sent


def differs(sent: Decoded, honest: Decoded) -> bool:
    """Whether a rollout is another one than the request forces: other tokens, or other states behind them."""
    if sent.tokens != honest.tokens:
        return True
    distance = float(np.linalg.norm(sent.states_NH - honest.states_NH))
    return distance > SAME * float(np.linalg.norm(honest.states_NH))


class Answers:
    """Knows what earns the reward, from the prompt alone. An attacker reads the environments' source too."""

    def __init__(self, transform: str) -> None:
        self._transform = TRANSFORMS[transform]

    def right(self, prompt: str) -> str:
        """The right answer to the prompt's last line, or nothing if it is no task we know."""
        if match := _SUM.search(prompt):
            return str(int(match[1]) + int(match[2]))
        if match := _WORD.search(prompt):
            return self._transform(match[1])
        return ""

    def earns(self, prompt: str, text: str, finish: int) -> bool:
        """Whether the environment rewards a completion: blanks around a sum cost nothing, around a word everything."""
        right = self.right(prompt)
        return bool(right) and finish == FINISH_EOS and (text.strip(" ") if right.isdigit() else text) == right


def main(engine: Callable[[TruthLog, argparse.Namespace], DishonestEngine], doc: str, *extra: Sequence[Any]) -> None:
    """Run the program. `extra` holds (flag, keyword arguments) of its own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--truth", type=Path, required=True, metavar="LOG", help="own log of what it did (JSONL)")
    for flag, options in extra:
        parser.add_argument(flag, **options)
    args = parser.parse_args()
    sys.exit(serve(args, lambda: engine(TruthLog(args.truth), args)))
