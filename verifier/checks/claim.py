"""What a check sees: one rollout as claimed, what its lease forces, and what the verifier measured so far.

A rollout is read in blocks (`verifier.blocks`). `at` is the first sampled token of the block under way; states_NH,
margins_N and logprobs_N are the block's. Checks see one block after another and keep running numbers in `numbers`.

Shape suffixes: N sampled tokens (of the block, or of the rollout where nothing else is said), H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from environments.base import Environment, Task
from protocol.errors import ReasonCode
from protocol.manifest import Bf16Thresholds, RouteThresholds, Thresholds
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, Rollout
from verifier.model import PolicyModel
from verifier.replay import Routed
from verifier.toploc import LIMBS


@dataclass(frozen=True)
class Setting:
    """What holds for every rollout of a submission."""

    policy: PolicyModel
    environment: Environment
    thresholds: Thresholds
    bf16: Bf16Thresholds | None
    """Of a run with this profile; None in fp32."""
    routes: RouteThresholds | None
    """Of a mixture-of-experts model; None for a dense one."""
    temperature: float
    stop_tokens: frozenset[int]
    max_new_tokens: int

    @property
    def limbs(self) -> int:
        """Of a proof of this run's profile."""
        return LIMBS["fp32" if self.bf16 is None else "bf16"]


@dataclass
class Claim:
    """One rollout the lease asks for.

    rollout is what the node sent in this place; prompt and seed are derived, never taken from it. states_NH,
    margins_N and logprobs_N are the verifier's own, of the block under way, and set between the stages of checks.
    """

    index: int
    task: Task
    sample: int
    prompt: tuple[int, ...]
    seed: bytes
    rollout: Rollout
    tokens_N: npt.NDArray[np.int64]
    claimed_logprobs_N: npt.NDArray[np.float32]
    routed: Routed | None = None
    """Its routes, once they are known to be well formed, and what the prefill found of them."""
    at: int = 0
    read: int = 0
    """Sampled tokens of the blocks closed so far."""
    states_NH: npt.NDArray[np.float32] | None = None
    margins_N: npt.NDArray[np.float32] | None = None
    logprobs_N: npt.NDArray[np.float32] | None = None
    reward: float = 0.0
    outcome: int = ACCEPT
    reason: ReasonCode = ReasonCode.HOLDS
    numbers: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    """What is added up over blocks and is no number of its own."""
    _own: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def stands(self) -> bool:
        return self.outcome == ACCEPT

    @property
    def whole(self) -> bool:
        """Whether every token was read and still stands."""
        return self.stands and self.read == len(self.tokens_N)

    @property
    def block_tokens_N(self) -> npt.NDArray[np.int64]:  # noqa: N802
        """The sampled tokens of the block under way."""
        assert self.states_NH is not None
        return self.tokens_N[self.at : self.at + len(self.states_NH)]

    @property
    def own_logprobs_N(self) -> npt.NDArray[np.float32]:  # noqa: N802
        """The verifier's log-probabilities of all tokens read."""
        return self._own[0] if len(self._own) == 1 else np.concatenate(self._own)

    def open_block(self, at: int, states_NH: npt.NDArray[np.float32]) -> None:
        self.at, self.states_NH = at, states_NH

    def close_block(self) -> None:
        """Count the block as read and let its states go."""
        assert self.states_NH is not None
        self.read = self.at + len(self.states_NH)
        if self.stands and self.logprobs_N is not None:
            self._own.append(self.logprobs_N)
        self.states_NH = self.margins_N = self.logprobs_N = None

    def note(self, name: str, value: float) -> None:
        """Keep the largest of a number over all blocks."""
        held = self.numbers.get(name)
        if held is None or not held > value:
            self.numbers[name] = value

    @property
    def at_end(self) -> bool:
        """Whether the block under way is the rollout's last."""
        assert self.states_NH is not None
        return self.at + len(self.states_NH) == len(self.tokens_N)

    def add(self, name: str, value: float) -> float:
        """Add up a number over all blocks; its value so far."""
        self.numbers[name] = self.numbers.get(name, 0.0) + value
        return self.numbers[name]

    def fail(self, reason: ReasonCode, **numbers: float) -> None:
        """Reject this rollout. The first failure is the one that is reported."""
        self.outcome, self.reason = REJECT, reason
        self.numbers.update(numbers)

    def give_up(self, reason: ReasonCode) -> None:
        """This verifier cannot decide; neither trained on nor held against the node."""
        self.outcome, self.reason = INCONCLUSIVE, reason


def joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array of many rollouts' own, so that a check costs numpy one call and not one a rollout."""
    return np.concatenate(parts) if parts else np.empty(0)


def begins_of(parts: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Where each part begins in `joined(parts)`."""
    return list(itertools.accumulate((len(part) for part in parts), initial=0))[:-1]


def standing(claims: Sequence[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.stands]
