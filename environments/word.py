"""`word`: a word of random letters and "=", to be completed by one transform of it.

    configuration   transform  reverse | sort | rotate (first letter to the end)
                    low, high  shortest and longest word, 1 to 64 letters
                    letters    what words are made of

Not covered: partial credit. Exact rewards learn faster here than dense ones (0.59 against 0.41 after 60 steps).
"""

from __future__ import annotations

from collections.abc import Callable

from environments.base import Configuration, Environment, Task
from environments.errors import EnvironmentSpecError

TRANSFORMS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "rotate": lambda word: word[1:] + word[:1],
}
_LONGEST = 64


class Word(Environment):
    name = "word"
    version = "1"
    max_new_tokens = 9

    def __init__(self, configuration: Configuration) -> None:
        full: dict[str, str | int] = {"transform": "reverse", "low": 4, "high": 7, "letters": "abcdefghij"}
        full.update(configuration)
        transform, low, high, letters = full["transform"], full["low"], full["high"], full["letters"]
        if len(full) != 4 or transform not in TRANSFORMS:
            raise EnvironmentSpecError(
                f"word has transform ({', '.join(TRANSFORMS)}), low, high and letters, got {full}"
            )
        if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high <= _LONGEST:
            raise EnvironmentSpecError(f"word needs 1 <= low <= high <= {_LONGEST}, got {low!r} and {high!r}")
        if not isinstance(letters, str) or not 1 <= len(letters) <= 256:
            raise EnvironmentSpecError("word needs 1 to 256 letters")
        self._transform, self._low, self._high, self._letters = TRANSFORMS[str(transform)], low, high, letters
        super().__init__(full)

    def task(self, index: int) -> Task:
        draws = self.draws(index)
        length = self._low + draws.below(self._high - self._low + 1)
        word = "".join(self._letters[draws.below(len(self._letters))] for _ in range(length))
        return Task(index, f"{word}=", self._transform(word))
