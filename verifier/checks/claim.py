"""What a check sees: one rollout as claimed, what its lease forces, and what the verifier measured so far.

Shape suffixes: N sampled tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from environments.base import Environment, Task
from protocol.errors import ReasonCode
from protocol.manifest import Thresholds
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, Rollout
from verifier.model import PolicyModel


@dataclass(frozen=True)
class Setting:
    """What holds for every rollout of a submission."""

    policy: PolicyModel
    environment: Environment
    thresholds: Thresholds
    temperature: float
    stop_tokens: frozenset[int]
    max_new_tokens: int


@dataclass
class Claim:
    """One rollout the lease asks for.

    rollout is what the node sent in this place; prompt and seed are derived, never taken from it. states_NH,
    margins_N and logprobs_N are the verifier's own and set between the stages of checks.
    """

    index: int
    task: Task
    sample: int
    prompt: tuple[int, ...]
    seed: bytes
    rollout: Rollout
    tokens_N: npt.NDArray[np.int64]
    claimed_logprobs_N: npt.NDArray[np.float32]
    states_NH: npt.NDArray[np.float32] | None = None
    margins_N: npt.NDArray[np.float32] | None = None
    logprobs_N: npt.NDArray[np.float32] | None = None
    reward: float = 0.0
    outcome: int = ACCEPT
    reason: ReasonCode = ReasonCode.HOLDS
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def stands(self) -> bool:
        return self.outcome == ACCEPT

    def fail(self, reason: ReasonCode, **numbers: float) -> None:
        """Reject this rollout. The first failure is the one that is reported."""
        self.outcome, self.reason = REJECT, reason
        self.numbers.update(numbers)

    def give_up(self, reason: ReasonCode) -> None:
        """This verifier cannot decide; neither trained on nor held against the node."""
        self.outcome, self.reason = INCONCLUSIVE, reason


def standing(claims: Sequence[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.stands]
