"""The tiny model's corpus: a word, then one of six transforms of it, drawn uniformly.

The base model has seen every transform and cannot know which one is wanted, so it does each about one time in six.
That is the small, honest analogue of pretraining: the right behaviour is in there, and RL elicits it. An RL
environment rewards one transform; SFT on this mixture never learns which.

Not covered: environments and rewards (`environments.word`), which this module neither imports nor knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = "abcdefghij"
TRANSFORMS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "reverse-sort": lambda word: "".join(sorted(word, reverse=True)),
    "rotate": lambda word: word[1:] + word[0],
    "first-letter": lambda word: word[0] * len(word),
}
"""Adding or removing one changes what the checked-in base knows: make it again (`python -m trainer.tiny_base`)."""


@dataclass(frozen=True)
class Example:
    """One line of the corpus: `prompt` is conditioned on, `answer` (then end of text) is learned."""

    prompt: str
    answer: str
    transform: str


def draw(rng: random.Random, low: int = 4, high: int = 7, letters: str = LETTERS) -> Example:
    """A word of `low`..`high` letters followed by `=`, and one transform of it chosen at random."""
    word = "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))
    name = rng.choice(list(TRANSFORMS))
    return Example(f"{word}=", TRANSFORMS[name](word), name)
