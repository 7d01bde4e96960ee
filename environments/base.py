"""What an environment is: tasks by index, a reward by text, and a hash that says exactly which rules those are.

    env_hash = BLAKE3 of the canonical JSON {configuration, name, scoring, source, version}

`source` is the BLAKE3 of this file and the environment's own, so that a changed rule is another environment.
Tasks are drawn from BLAKE3(env_hash, index) and never from a language's random module: the same on every machine.

Not covered: the environment lock and its sandbox; `scoring` is always `pure` here (same text, same reward, no I/O).
"""

from __future__ import annotations

import abc
import functools
import inspect
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from blake3 import blake3

from protocol.manifest import EnvironmentSpec

Configuration = Mapping[str, str | int]

_TASK_CONTEXT = "headwater/1 environment task"
"""BLAKE3 key-derivation context. Changing it changes every task of every run."""


@dataclass(frozen=True)
class Task:
    """One problem. `prompt` is what the model sees; `answer` is what earns the reward."""

    index: int
    prompt: str
    answer: str


class Environment(abc.ABC):
    """Tasks and their rewards. Pure: no state, no clock, no I/O after construction.

    Attributes:
        stop: the text whose token ends a completion; None means the model's own end of text.
        max_new_tokens: enough for any answer in the models this environment is meant for.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    scoring: ClassVar[str] = "pure"
    stop: ClassVar[str | None] = None
    max_new_tokens: ClassVar[int]

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = dict(configuration)
        self._spec = _spec(self)

    @abc.abstractmethod
    def task(self, index: int) -> Task:
        """The task of an index, any u64."""

    def score(self, task: Task, text: str, finished: bool) -> float:
        """The reward of a completion: 1 for exactly the answer, ended by a stop token, else 0.

        Args:
            text: the completion without its stop token.
            finished: whether a stop token ended it.
        """
        return 1.0 if finished and text == task.answer else 0.0

    def spec(self) -> EnvironmentSpec:
        """What the run's manifest says about this environment."""
        return self._spec

    @property
    def digest(self) -> bytes:
        """`env_hash`."""
        return self._spec.digest

    def draws(self, index: int) -> Draws:
        """The random draws that make task `index`."""
        return Draws(self.digest + struct.pack(">Q", index))


class Draws:
    """Uniform draws from BLAKE3's extendable output: u32 big-endian words, rejected where they would be biased."""

    def __init__(self, material: bytes) -> None:
        self._stream = blake3(material, derive_key_context=_TASK_CONTEXT)
        self._at = 0

    def below(self, bound: int) -> int:
        """A uniform integer in [0, bound), bound at most 2^32."""
        limit = (1 << 32) // bound * bound
        while True:
            word = int.from_bytes(self._stream.digest(length=4, seek=self._at), "big")
            self._at += 4
            if word < limit:
                return word % bound


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: one text per value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _spec(environment: Environment) -> EnvironmentSpec:
    source = _source_hash(type(environment))
    fields = {
        "configuration": environment.configuration,
        "name": environment.name,
        "scoring": environment.scoring,
        "source": source.hex(),
        "version": environment.version,
    }
    return EnvironmentSpec(
        name=environment.name,
        version=environment.version,
        digest=blake3(canonical_json(fields).encode("ascii")).digest(),
        source=source,
        configuration=canonical_json(environment.configuration),
        scoring=environment.scoring,
    )


@functools.cache
def _source_hash(kind: type[Environment]) -> bytes:
    digest = blake3()
    for path in (Path(__file__), Path(inspect.getfile(kind))):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(struct.pack(">Q", len(text)) + text)
    return digest.digest()
