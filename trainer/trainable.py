"""What a rollout must be to enter a batch, as numbers alone: no model is run for it, no policy is looked up.

The coordinator asks before a verdict counts, the learner again before it trains. Both ask here: a rollout that the
coordinator took and the learner refuses would be in a batch that is in the ledger, and the run could never go on.

Not covered: whether it is honest (`verifier`), how old its policy is (the fold), what a batch gets (`batches`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.errors import ReasonCode, UsageError
from protocol.limits import MAX_REWARD

LOGPROB_MIN = -80.0
"""The noise lifts no token over one more than 26 more likely (nats): an honest sampled token stays above -26 - log(V).
Lower values make importance ratios that overflow float32."""

LOGPROB_MAX = 1e-3
"""Zero, and the rounding of a float32 log-softmax."""


@dataclass(frozen=True)
class Trainable:
    """Token ids below `vocabulary`, at most `max_context` + 1 tokens with the prompt (the last one needs no place)."""

    vocabulary: int
    max_context: int

    def misfit(self, prompt: bytes, tokens: bytes, logprobs: bytes) -> tuple[str, ReasonCode] | None:
        """What is wrong with a rollout's shape, as the end of "rollout 3 ..." and a code; None when it fits.

        Args:
            prompt, tokens: ids, u32 little-endian.
            logprobs: float32 little-endian, one per sampled token.
        """
        prompts, count, numbers = len(prompt) // 4, len(tokens) // 4, len(logprobs) // 4
        if not prompts or not count or count != numbers or (len(prompt) | len(tokens) | len(logprobs)) % 4:
            return (
                f"has {prompts} prompt tokens, {count} sampled tokens and {numbers} log-probabilities",
                ReasonCode.BATCH_WRONG,
            )
        if prompts + count > self.max_context + 1:
            return f"has {prompts + count} tokens, the context is {self.max_context}", ReasonCode.BATCH_WRONG
        if int(max(np.frombuffer(prompt, "<u4").max(), np.frombuffer(tokens, "<u4").max())) >= self.vocabulary:
            return "has a token outside the vocabulary", ReasonCode.TOKEN_RANGE
        return None

    def all_fit(self, prompts: Sequence[bytes], tokens: Sequence[bytes], logprobs: Sequence[bytes]) -> bool:
        """Whether no rollout of many is a `misfit`. Their ids are compared at once: one by one that costs most of what
        reading a batch does.

        Args:
            prompts, tokens, logprobs: of each rollout, as `misfit` takes them.
        """
        for prompt, sampled, numbers in zip(prompts, tokens, logprobs, strict=True):
            size = len(sampled)
            if not prompt or not size or size != len(numbers) or (len(prompt) | size) % 4:
                return False
            if (len(prompt) + size) // 4 > self.max_context + 1:
                return False
        ids = np.frombuffer(b"".join({*prompts, *tokens}), "<u4")
        return int(ids.max(initial=0)) < self.vocabulary


def in_range(logprobs: bytes, reward: float) -> bool:
    """Whether a rollout's numbers are where log-probabilities and rewards are; never for what is no number."""
    values = np.frombuffer(logprobs, "<f4")
    within = bool(((values >= LOGPROB_MIN) & (values <= LOGPROB_MAX)).all())
    return within and abs(reward) <= MAX_REWARD


def vocabulary_of(model: Path) -> int:
    """Ids that a model directory's model has.

    Raises:
        UsageError: its config.json does not say.
    """
    path = model / "config.json"
    try:
        found = int(json.loads(path.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"{path} names no vocab_size ({exc!r}); the operator must restore the run directory") from exc
    if found < 1:
        raise UsageError(f"{path} names a vocabulary of {found} tokens; the operator must restore the run directory")
    return found
