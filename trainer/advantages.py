"""Advantages inside a group: reward minus the group's mean, and nothing else.

Source: GRPO (arXiv:2402.03300, equation for A_i) without the division by the group's standard deviation, which
weights easy and hard tasks up (Dr. GRPO, arXiv:2503.20783, section 3.1). Groups whose rewards are all equal teach
nothing (their advantages are zero) and are dropped before the forward pass (DAPO, arXiv:2503.14476, section 3.2).

Not covered: which rollouts form a group (the coordinator decides; a group enters a batch whole or not at all).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAME_RELATIVE, SAME_ABSOLUTE = 1e-9, 1e-12
"""Rewards of one group this close, beside the largest of them or beside 0, are equal: sums of the same tenths taken in
another order differ by 1e-16 of themselves, rewards that mean something by far more than 1e-9. Exact comparison would
keep the group and train it on rounding; much more would drop groups that teach."""


@dataclass(frozen=True)
class Advantages:
    """values_B: float32, one per rollout. keep_B: bool, False where the group has no variance."""

    values_B: npt.NDArray[np.float32]
    keep_B: npt.NDArray[np.bool_]
    groups: int
    groups_kept: int


def group_advantages(groups: Sequence[bytes], rewards: Sequence[float]) -> Advantages:
    """Advantages of B rollouts, given each one's group and reward.

    The mean is taken in float64 so that the result does not depend on the order of a group's members.

    Raises:
        ValueError: `groups` and `rewards` differ in length.
    """
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} groups for {len(rewards)} rewards")
    members: dict[bytes, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    values_B = np.zeros(len(rewards), dtype=np.float32)
    keep_B = np.zeros(len(rewards), dtype=np.bool_)
    kept = 0
    for indices in members.values():
        own = np.sort(np.array([rewards[i] for i in indices], dtype=np.float64))
        if own[-1] - own[0] <= max(SAME_ABSOLUTE, SAME_RELATIVE * max(-own[0], own[-1])):
            continue
        kept += 1
        mean = own.sum() / len(own)
        for i in indices:
            values_B[i] = rewards[i] - mean
            keep_B[i] = True
    return Advantages(values_B, keep_B, len(members), kept)
