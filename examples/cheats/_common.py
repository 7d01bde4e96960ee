"""What the dishonest engines of this folder share.

Each is an ordinary program that speaks the engine socket, so an ordinary `node join --engine-socket PATH` works with
it and doesn't know. Each really computes what it pretends, and beside that the honest result, only to write down
its own truth: one JSON line per rollout, {"request_id": ..., "dishonest": true or false}. Verifiers never see it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from node.decode import Decoded
from node.engine import TransformersEngine, add_arguments, serve
from protocol.engine import Generated, GenerateOutput, GenerateRequest

SAME = 1e-5
"""Relative distance of states under which two computations are the same one: honest noise is about 1e-6."""


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


def differs(sent: Decoded, honest: Decoded) -> bool:
    """Whether a rollout is another one than the request forces: other tokens, or other states behind them."""
    if sent.tokens != honest.tokens:
        return True
    distance = float(np.linalg.norm(sent.states_NH - honest.states_NH))
    return distance > SAME * float(np.linalg.norm(honest.states_NH))


def main(engine: Callable[[TruthLog, argparse.Namespace], DishonestEngine], doc: str, *extra: Sequence[Any]) -> None:
    """Run the program. `extra` holds (flag, keyword arguments) of its own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--truth", type=Path, required=True, metavar="LOG", help="own log of what it did (JSONL)")
    for flag, options in extra:
        parser.add_argument(flag, **options)
    args = parser.parse_args()
    sys.exit(serve(args, lambda: engine(TruthLog(args.truth), args)))
