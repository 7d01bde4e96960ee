"""From what one verdict measured to the numbers that evidence sums up: one x >= 0 for each rollout it accepts.

    proof_median       largest median error of the rollout's proofs                fp32: other precision
    mantissa_mean      mean mantissa error over its proofs                         bf16: other precision, old weights
    not_first_rate     share of its tokens that another one beats in the verifier's arithmetic     choosing tokens
    margin_rate        by how much, a token                                        choosing tokens
    margin_reward      1 + how far better answers to a task have larger margins    choosing tokens for the reward
    route_rate         share of a task's choices of experts that are not the verifier's own        choosing experts
    mismatch_k3        mean of exp(-d) - 1 + d of its tokens                       bf16: claiming other numbers
    lean_above         1 + mean d / LEAN_SCALE, from 0 to 2                        claiming too likely, all one way
    lean_below         1 - the same                                                claiming too unlikely
    lean_reward_above  1 + how far better answers to a task have the larger mean d     damping what is learned
    lean_reward_below  1 - the same                                                driving it too far
    reward_claimed     1 + how far the claimed reward is above the validator's     the reward, where it is not pure

with d = claimed - own log-probability of a token.

Names the validator did not measure give nothing. Rollouts with the same prompt and tokens count once: their errors
are the same, and the same accident is no second piece of evidence. Which those are is told by the hash of both
(`RolloutDetail.digest`), of which a node chooses nothing; what it claims of them would be its choice. A validator's
numbers are its word, so every x is finite and at least 0 whatever they say; how large it may count is the manifest's
(`clip`).

`margin_reward` is one number a task: over all pairs of its rollouts of which one has the higher reward,

    1 + mean of clip((m_better - m_worse) / MARGIN_SCALE, -1, 1),      m = margin a token

so its mean is 1 when margins have nothing to do with the reward at a given prompt. Longer answers have more margin in
sum, and may be wrong more often, or less: m is a mean over tokens, so that the length cancels, and only pairs of nearly
the same length are compared, since short answers scatter more and a difference that is clipped would not cancel then.
The `lean_reward` pair is the same of d with `LEAN_SCALE`.

`mismatch_k3` (J. Schulman, "Approximating KL divergence", 2020) sees what the lean does not, errors that cancel: it is
the KL divergence between the node's policy and the verifier's for a node that claims what it sampled from, and grows
with the square of whatever is claimed beside the verifier's own numbers, which alone give 0.

`route_rate` is one number a task: the same level pair of experts in its prompt is met by all of its rollouts.

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

LEAN_SCALE = 0.025
"""Mean signed error a token that counts as one: half an honest SmolLM2 token's deviation (0.048 over 8,960 tokens), six
times a rollout's of 128 tokens. Smaller clips short honest answers, larger hides a lean of a few thousandths."""

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
        value = self.signed(name)
        return None if value is None else max(0.0, value)

    def signed(self, name: str) -> float | None:
        """A finite number; None when it was not measured."""
        value = self.numbers.get(name)
        return None if value is None or not math.isfinite(value) else value


def measured(details: VerdictDetails, outcomes: Sequence[Outcome], samples: int) -> list[Measured]:
    """The accepted rollouts of one verdict, in order, those of the same prompt and tokens once.

    Args:
        samples: rollouts a task of the lease.
    """
    seen: set[tuple[int, bytes]] = set()
    found = []
    for position, (outcome, rollout) in enumerate(zip(outcomes, details.rollouts, strict=False)):
        task = position // samples
        # Validators of before the hash was sent leave it out: there the log-probabilities of a task's have to do.
        key = (-1, rollout.digest) if rollout.digest else (task, rollout.logprobs)
        if outcome.outcome != ACCEPT or len(rollout.logprobs) < 4 or key in seen:
            continue
        seen.add(key)
        numbers = {number.name: number.value for number in rollout.numbers}
        found.append(Measured(task, len(rollout.logprobs) // 4, rollout.reward, numbers))
    return found


def values(statistic: str, rollouts: Sequence[Measured]) -> list[float]:
    """One statistic of every rollout (or task) that has it, in order; nothing for a name that does not exist."""
    read = STATISTICS.get(statistic)
    return [] if read is None else read(rollouts)


Statistic = Callable[[Sequence[Measured]], list[float]]


def _number(name: str, a_token: bool = False) -> Statistic:
    def read(rollouts: Sequence[Measured]) -> list[float]:
        found = [(one.number(name), one.tokens if a_token else 1) for one in rollouts]
        return [value / over for value, over in found if value is not None]

    return read


def _tied_to_reward(name: str, scale: float, *, a_token: bool, sign: float = 1.0) -> Statistic:
    """One number a task: 1 + how far, in units of `scale`, the better of two of its rollouts has the larger number."""

    def read(rollouts: Sequence[Measured]) -> list[float]:
        tasks: dict[int, list[tuple[float, int, float]]] = {}
        for one in rollouts:
            value = one.number(name) if a_token else one.signed(name)
            if value is not None:
                m = sign * (value / one.tokens if a_token else value)
                tasks.setdefault(one.task, []).append((m, one.tokens, one.reward))
        found = []
        for group in tasks.values():
            signs = [
                (m - other_m if reward > other else other_m - m) / scale
                for (m, tokens, reward), (other_m, others, other) in itertools.combinations(group, 2)
                if reward != other and min(tokens, others) >= LIKE_LENGTHS * max(tokens, others)
            ]
            if signs:
                found.append(1.0 + math.fsum(max(-1.0, min(1.0, one)) for one in signs) / len(signs))
        return found

    return read


def _lean(sign: float) -> Statistic:
    def read(rollouts: Sequence[Measured]) -> list[float]:
        found = [one.signed("mismatch_kl") for one in rollouts]
        return [1.0 + max(-1.0, min(1.0, sign * value / LEAN_SCALE)) for value in found if value is not None]

    return read


_MOST_CHOICES = 1e12
"""More than any rollout has. Numbers are a validator's word, and sums of the largest floats are none."""


def _route_rate(rollouts: Sequence[Measured]) -> list[float]:
    tasks: dict[int, list[tuple[float, float]]] = {}
    for one in rollouts:
        others, choices = one.number("routes_not_first"), one.number("route_choices")
        if others is not None and choices:
            tasks.setdefault(one.task, []).append((min(others, _MOST_CHOICES), min(choices, _MOST_CHOICES)))
    return [
        min(1.0, math.fsum(others for others, _ in group) / math.fsum(choices for _, choices in group))
        for group in tasks.values()
    ]


def _reward_claimed(rollouts: Sequence[Measured]) -> list[float]:
    claims = [(one.signed("reward_claimed"), one.reward) for one in rollouts]
    return [1.0 + max(-1.0, min(1.0, claim - own)) for claim, own in claims if claim is not None]


STATISTICS: dict[str, Statistic] = {
    "proof_median": _number("proof_median"),
    "mantissa_mean": _number("mantissa_mean"),
    "not_first_rate": _number("tokens_not_first", a_token=True),
    "margin_rate": _number("margin_sum", a_token=True),
    "margin_reward": _tied_to_reward("margin_sum", MARGIN_SCALE, a_token=True),
    "route_rate": _route_rate,
    "mismatch_k3": _number("mismatch_k3"),
    "lean_above": _lean(1.0),
    "lean_below": _lean(-1.0),
    "lean_reward_above": _tied_to_reward("mismatch_kl", LEAN_SCALE, a_token=False),
    "lean_reward_below": _tied_to_reward("mismatch_kl", LEAN_SCALE, a_token=False, sign=-1.0),
    "reward_claimed": _reward_claimed,
}
"""Every statistic a manifest's row may name."""

READS: dict[str, tuple[str, ...]] = {
    "proof_median": ("proof_median",),
    "mantissa_mean": ("mantissa_mean",),
    "not_first_rate": ("tokens_not_first",),
    "margin_rate": ("margin_sum",),
    "margin_reward": ("margin_sum",),
    "route_rate": ("routes_not_first", "route_choices"),
    "mismatch_k3": ("mismatch_k3",),
    "lean_above": ("mismatch_kl",),
    "lean_below": ("mismatch_kl",),
    "lean_reward_above": ("mismatch_kl",),
    "lean_reward_below": ("mismatch_kl",),
    "reward_claimed": ("reward_claimed",),
}
"""Statistic -> the numbers of a rollout's details that it is made of (`numbers.NUMBERS`)."""
