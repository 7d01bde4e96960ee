"""Answers every request at once with random tokens, to waste the validators' time and leave no room for others.

    python examples/cheats/garbage.py --socket PATH --truth LOG

Nothing is computed, so it is hundreds of times faster than an honest engine. All that can be checked without the model
holds: lengths, token ids, endings, finite log-probabilities, well-formed proofs. Every rollout is as long as the lease
allows, so that a validator has the most to read. Caught by the proof: random states are nobody's. The first block of
the prefill shows it, and the first two verdicts end the node.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from _common import DishonestEngine, TruthLog, main

from node.engine import write_tokens
from protocol.engine import Generated, GenerateOutput, GenerateRequest
from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.records import FINISH_LENGTH
from verifier.model import completion_text
from verifier.toploc import build_many

_POOL = 64
"""Proofs of random states, made once and sent again and again: nobody compares them."""


class Garbage(DishonestEngine):
    def __init__(self, truth: TruthLog) -> None:
        super().__init__(truth)
        self._random = np.random.default_rng()
        self._proofs: dict[int, list[bytes]] = {}

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> Generated:
        policy = self.check(request)
        stops = frozenset(request.stop_tokens)
        words = np.array([token for token in range(policy.vocabulary) if token not in stops])
        outputs = []
        for item in request.items:
            count = item.max_new_tokens
            tokens = tuple(self._random.choice(words, count).tolist())
            outputs.append(
                GenerateOutput(
                    request_id=item.request_id,
                    tokens=write_tokens(tokens),
                    logprobs=(-self._random.exponential(1.0, count)).astype("<f4").tobytes(),
                    finish=FINISH_LENGTH,
                    text=completion_text(policy.tokenizer, tokens, request.stop_tokens),
                    proofs=self._chunks(count, policy.hidden),
                )
            )
            self.truth.write(item.request_id, True)
        return Generated(outputs=tuple(outputs))

    def _chunks(self, tokens: int, hidden: int) -> tuple[bytes, ...]:
        """A well-formed proof for so many tokens, of states that nothing has."""
        full, rest = divmod(tokens, PROOF_CHUNK_TOKENS)
        return tuple(self._chunk(rows, hidden) for rows in [PROOF_CHUNK_TOKENS] * full + [rest] * bool(rest))

    def _chunk(self, rows: int, hidden: int) -> bytes:
        if rows not in self._proofs:
            states = self._random.standard_normal((_POOL, rows, hidden)).astype(np.float32)
            self._proofs[rows] = [chunk for (chunk,) in build_many(list(states))]
        pool = self._proofs[rows]
        return pool[int(self._random.integers(len(pool)))]


def make(truth: TruthLog, args: argparse.Namespace) -> DishonestEngine:
    return Garbage(truth)


if __name__ == "__main__":
    main(make, __doc__ or "")
