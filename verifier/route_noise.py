"""How far honest routers are from each other: what a run's route margin is taken from (`thresholds.route_thresholds`).

Shortfalls alone say little: one shows only where two experts happen to be level, in one choice of some ten thousand.
If every score is off by at most e, though, no honest choice falls short by more than 2 e. So the scores themselves are
compared, over the same rollouts and through the same experts: all columns at once and one by one, side by side and row
by row.

How many choices are not the verifier's own first follows from the same: leads (by how much a choice beats the next best
one) are spread evenly close to 0, with a density of r a unit of score, and a choice turns where the difference d of the
errors of two scores is larger than its lead, which happens in r E|d| / 2 <= r E|e| of choices. That is a mean over all
scores and needs no rare event to be seen.

Not covered: asking an engine for rollouts (`calibrate`), what is decided by the margin (`checks.routes`).

Shape suffixes: B rows, L columns, P positions, Y expert layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protocol.manifest import RouteThresholds
from verifier import fused, replay
from verifier.errors import VerifierError
from verifier.model import PolicyModel
from verifier.replay import Routed
from verifier.thresholds import ROUTE_CEILING, route_thresholds


@dataclass(frozen=True)
class ScoreNoise:
    """How far scores are from each other between honest ways to compute them, and how close choices are.

    largest, mean: difference of one score, without its sign. choices: positions times layers that were looked at.
    level: those of them that beat the next best choice by less than `ROUTE_CEILING`.
    """

    largest: float
    mean: float
    choices: int
    level: int


def measure(policy: PolicyModel, rollouts: Sequence[Routed], *, model: str, machine: str) -> RouteThresholds:
    """Measure an honest engine's rollouts, with the routes it recorded, and take a run's thresholds from it.

    Raises:
        CalibrationError: see `route_thresholds`. VerifierError: see `replay.states_in_blocks`.
    """
    for _ in replay.states_in_blocks(policy, rollouts, ROUTE_CEILING, lambda _: True):
        pass
    noise = score_noise(policy, rollouts)
    return route_thresholds(
        model=model,
        machine=machine,
        rollouts=len(rollouts),
        choices=sum(rollout.choices for rollout in rollouts),
        shortfall=max((rollout.shortfall for rollout in rollouts), default=math.nan),
        scores=noise.largest,
        mean=noise.mean,
        level=noise.level / max(1, noise.choices),
        not_first=sum(rollout.not_first for rollout in rollouts),
    )


def score_noise(policy: PolicyModel, rollouts: Sequence[Routed]) -> ScoreNoise:
    """Between computing everything at once, row by row, and column by column."""
    experts = policy.experts
    if experts is None:
        raise VerifierError("this policy has no experts")
    largest, added, count = 0.0, 0.0, 0
    whole = _scores(policy, rollouts)
    rows = [_scores(policy, [rollout])[0] for rollout in rollouts]
    for other in (rows, _scores(policy, rollouts, width=1)):
        for ours, theirs in zip(whole, other, strict=True):
            difference = (ours - theirs).abs()
            most = float(difference.max())
            largest = most if not most <= largest else largest
            added, count = added + float(difference.double().sum()), count + difference.numel()
    choices, level = sum(rollout.choices for rollout in rollouts), 0
    for ours, rollout in zip(whole, rollouts, strict=True):
        level += int((experts.lead(ours, rollout.routes_PYK).abs() < ROUTE_CEILING).sum())
    return ScoreNoise(largest, added / max(1, count), choices, level)


def leads(policy: PolicyModel, rollouts: Sequence[Routed]) -> list[torch.Tensor]:
    """By how much each choice beats the next best one, float32 [P, Y] a rollout (`Experts.lead`)."""
    experts = policy.experts
    if experts is None:
        raise VerifierError("this policy has no experts")
    scores = _scores(policy, rollouts)
    return [experts.lead(ours, one.routes_PYK) for ours, one in zip(scores, rollouts, strict=True)]


def _scores(policy: PolicyModel, rollouts: Sequence[Routed], width: int | None = None) -> list[torch.Tensor]:
    """What the routers rank by at each position, [P, Y, E] a rollout, `width` columns at a time."""
    experts = policy.experts
    if experts is None:
        raise VerifierError("this policy has no experts")
    longest = max((rollout.positions for rollout in rollouts), default=0)
    ids_BL = np.zeros((len(rollouts), longest), dtype=np.int64)
    claimed_BLYK = experts.empty(len(rollouts), longest)
    claimed_BLYK[...] = 0
    real_BL = np.zeros((len(rollouts), longest), dtype=np.bool_)
    for row, rollout in enumerate(rollouts):
        count = rollout.positions
        ids_BL[row, :count] = np.concatenate([np.asarray(rollout.prompt), rollout.tokens[:-1]])
        claimed_BLYK[row, :count], real_BL[row, :count] = rollout.routes_PYK, True
    going = fused.start(policy.model, longest)
    parts = []
    for begin in range(0, longest, width or longest):
        at = slice(begin, min(longest, begin + (width or longest)))
        positions_BL = torch.arange(at.start, at.stop).expand(len(rollouts), -1)
        with (
            experts.scored() as scored,
            experts.replayed(claimed_BLYK[:, at].copy(), real_BL[:, at].copy(), ROUTE_CEILING),
        ):
            going.run(torch.from_numpy(ids_BL[:, at].copy()), positions_BL, None)
        parts.append(torch.stack(scored, dim=1).reshape(len(rollouts), at.stop - at.start, *_shape(policy)))
    scores_BLYE = torch.cat(parts, dim=1)
    return [scores_BLYE[row, : rollout.positions] for row, rollout in enumerate(rollouts)]


def _shape(policy: PolicyModel) -> tuple[int, int]:
    assert policy.experts is not None
    return policy.experts.routing.layers, policy.experts.routing.experts
