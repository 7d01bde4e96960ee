"""The text of sampled tokens. Apart from `model`, so that who only reads text imports no torch.

Not covered: what the text is worth (`checks.reward`).
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers


def completion_text(tokenizer: tokenizers.Tokenizer, tokens: Sequence[int], stop_tokens: Sequence[int]) -> str:
    """The text that is scored: the sampled tokens without the stop token that ended them.

    Special tokens inside stay visible as text, so that they cannot be hidden in an answer.
    """
    ids = [int(t) for t in tokens]
    if ids and ids[-1] in stop_tokens:
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text
