"""`addition`: two solved sums, then one to complete on the same line; a newline ends it.

    configuration   high   the largest summand, 1 to 1,000,000; both are drawn from 1..high

With the default high = 9 there are 81 problems, so a run shows optimisation, not generalisation.
"""

from __future__ import annotations

from environments.base import Configuration, Environment, Task
from environments.errors import EnvironmentSpecError

_EXAMPLES = "2+5=7\n8+4=12\n"


class Addition(Environment):
    name = "addition"
    version = "1"
    stop = "\n"
    max_new_tokens = 4

    def __init__(self, configuration: Configuration) -> None:
        full: dict[str, str | int] = {"high": 9}
        full.update(configuration)
        high = full["high"]
        if len(full) != 1 or not isinstance(high, int) or not 1 <= high <= 1_000_000:
            raise EnvironmentSpecError(f"addition has high, from 1 to 1,000,000, got {full}")
        self._high = high
        super().__init__(full)

    def task(self, index: int) -> Task:
        draws = self.draws(index)
        left, right = 1 + draws.below(self._high), 1 + draws.below(self._high)
        return Task(index, f"{_EXAMPLES}{left}+{right}=", str(left + right))

    def score(self, task: Task, text: str, finished: bool) -> float:
        """1 for the sum and nothing else but blanks around it, ended by a newline, else 0."""
        return super().score(task, text.strip(" "), finished)
