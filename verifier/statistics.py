"""From what one verdict measured to the numbers that evidence sums up: one x >= 0 for each rollout it accepts.

    proof_median      largest median error of the rollout's proofs                   fp32: other precision
    mantissa_mean     mean mantissa error over its proofs                            bf16: other precision, old weights
    not_first_rate    share of its tokens that another one beats in the verifier's arithmetic        choosing tokens
    margin_rate       by how much, a token                                           choosing tokens
    margin_reward     1 + how far better answers to a task have the larger margins   choosing tokens for the reward
    previous_nearer   whether the policy before fits the proof better                old weights
    reward_claimed    1 + how far the claimed reward is above the validator's        the reward, where it is not pure

Names the validator did not measure give nothing. Rollouts of one task with the same tokens count once: their errors
are the same, and the same accident is no second piece of evidence. A validator's numbers are its word, so every x is
finite and at least 0 whatever they say; how large it may count is the manifest's (`clip`).

`margin_reward` is one number a task: over all pairs of its rollouts of which one has the higher reward,

    1 + mean of clip((m_better - m_worse) / MARGIN_SCALE, -1, 1),      m = margin a token

so its mean is 1 when margins have nothing to do with the reward at a given prompt. Longer answers have more margin in
sum, and may be wrong more often, or less: m is a mean over tokens, so that the length cancels, and only pairs of nearly
the same length are compared, since short answers scatter more and a difference that is clipped would not cancel then.

Not covered: the sums (`evidence`), measuring (`checks`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.records import ACCEPT, Outcome, VerdictDetails

MARGIN_SCALE = 0.01
"""Margin a token that counts as one in `margin_reward`: ten times an honest bf16 machine's mean, so that few honest
pairs of long answers are clipped. Smaller lets clipping take part, larger leaves little of what steering does."""

LIKE_LENGTHS = 0.75
"""Shorter over longer of two answers that are compared. Lower mixes answers whose margins scatter differently."""


@dataclass(frozen=True)
class Measured:
    """One accepted rollout as its validator measured it."""

    task: int
    """Place of its task in the lease."""
    tokens: int
    """At least 1."""
    reward: float
    numbers: dict[str, float]

    def number(self, name: str) -> float | None:
        """A number that is at least 0; None when it was not measured."""
        value = self.numbers.get(name)
        return None if value is None or not math.isfinite(value) else max(0.0, value)


def measured(details: VerdictDetails, outcomes: Sequence[Outcome], samples: int) -> list[Measured]:
    """The accepted rollouts of one verdict, in order, equal ones of a task once.

    Args:
        samples: rollouts a task of the lease.
    """
    seen: set[tuple[int, bytes]] = set()
    found = []
    for position, (outcome, rollout) in enumerate(zip(outcomes, details.rollouts, strict=False)):
        key = position // samples, rollout.logprobs
        if outcome.outcome != ACCEPT or len(rollout.logprobs) < 4 or key in seen:
            continue
        seen.add(key)
        numbers = {number.name: number.value for number in rollout.numbers}
        found.append(Measured(key[0], len(rollout.logprobs) // 4, rollout.reward, numbers))
    return found


def previous_nearer(current: float, previous: float) -> float:
    """The paired test for old weights in bf16: a rollout's proofs against the policy it names and the one before.

    Args:
        current, previous: mean mantissa error against each.

    Returns:
        1 when the older policy fits better, 0.5 when both fit alike, else 0. At most 0.5 in the mean for honest nodes,
        whatever the update: at worst both differ from the proof by rounding alone.
    """
    return 0.5 if current == previous else float(previous < current)


def values(statistic: str, rollouts: Sequence[Measured]) -> list[float]:
    """One statistic of every rollout (or task) that has it, in order; nothing for a name that does not exist."""
    read = STATISTICS.get(statistic)
    return [] if read is None else read(rollouts)


def _number(name: str, a_token: bool = False) -> Callable[[Sequence[Measured]], list[float]]:
    def read(rollouts: Sequence[Measured]) -> list[float]:
        found = [(one.number(name), one.tokens if a_token else 1) for one in rollouts]
        return [value / over for value, over in found if value is not None]

    return read


def _margin_reward(rollouts: Sequence[Measured]) -> list[float]:
    tasks: dict[int, list[tuple[float, int, float]]] = {}
    for one in rollouts:
        margin = one.number("margin_sum")
        if margin is not None:
            tasks.setdefault(one.task, []).append((margin / one.tokens, one.tokens, one.reward))
    found = []
    for group in tasks.values():
        signs = [
            (m - other_m if reward > other else other_m - m) / MARGIN_SCALE
            for (m, tokens, reward), (other_m, others, other) in itertools.combinations(group, 2)
            if reward != other and min(tokens, others) >= LIKE_LENGTHS * max(tokens, others)
        ]
        if signs:
            found.append(1.0 + math.fsum(max(-1.0, min(1.0, sign)) for sign in signs) / len(signs))
    return found


def _reward_claimed(rollouts: Sequence[Measured]) -> list[float]:
    claims = [(one.numbers.get("reward_claimed"), one.reward) for one in rollouts]
    return [1.0 + max(-1.0, min(1.0, claim - own)) for claim, own in claims if claim is not None]


STATISTICS: dict[str, Callable[[Sequence[Measured]], list[float]]] = {
    "proof_median": _number("proof_median"),
    "mantissa_mean": _number("mantissa_mean"),
    "not_first_rate": _number("tokens_not_first", a_token=True),
    "margin_rate": _number("margin_sum", a_token=True),
    "margin_reward": _margin_reward,
    "previous_nearer": _number("previous_nearer"),
    "reward_claimed": _reward_claimed,
}
"""Every statistic a manifest's row may name."""
