"""The two-sided clip, the advantages and the ratio statistics: worked by hand, then as properties."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantages import group_advantages
from trainer.losses import two_sided, two_sided_masked
from trainer.metrics import ratio_statistics, staleness_statistics

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 5.0)


def _tokens(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    behaviour = torch.full((len(ratios),), -1.0)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_(True)
    return logprobs, behaviour, torch.tensor(advantages)


def test_the_loss_is_the_one_worked_by_hand() -> None:
    # ratio 1.5, A +1: min(1.5, 1.2)        =  1.2     the clip binds
    # ratio 0.5, A +1: min(0.5, 0.8)        =  0.5     free
    # ratio 0.5, A -1: min(-0.5, -0.8)      = -0.8     the clip binds
    # ratio 3.0, A -1: min(-3.0, -1.2)      = -3.0     free: plain GRPO and ours agree below delta
    # ratio 9.0, A -1: min(-4.0, -1.2)      = -4.0     delta binds; plain GRPO would say -9
    # ratio 1.1, A -0.5: min(-0.55, -0.55)  = -0.55    inside the region
    logprobs, behaviour, advantages = _tokens([1.5, 0.5, 0.5, 3.0, 9.0, 1.1], [1, 1, -1, -1, -1, -0.5])
    loss = two_sided(logprobs, behaviour, advantages, tokens=6)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 0.8 - 3.0 - 4.0 - 0.55) / 6, rel=1e-6)
    loss.backward()
    assert logprobs.grad is not None
    # d(ratio)/d(logprob) = ratio where the term is free, 0 where it is clipped or capped.
    expected = [0.0, -0.5 / 6, 0.0, 3.0 / 6, 0.0, 0.55 / 6]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert two_sided_masked(logprobs, behaviour, advantages).tolist() == [True, False, True, False, True, False]


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    logprobs, behaviour, advantages = _tokens([1.0] * 4, [0.75, -0.25, -0.25, -0.25])
    two_sided(logprobs, behaviour, advantages, tokens=4).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-a / 4 for a in advantages.tolist()])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-60, 60), st.floats(-1, 1)), min_size=1, max_size=30),
    st.floats(0.05, 0.9),
    st.floats(0.05, 2.0),
    st.floats(0.1, 6.0),
)
def test_no_token_has_an_unbounded_pull_and_masked_means_no_gradient(
    tokens: list[tuple[float, float]], low: float, high: float, beyond: float
) -> None:
    cap = 1 + high + beyond
    behaviour = torch.full((len(tokens),), -3.0, dtype=torch.float64)
    logprobs = (behaviour + torch.tensor([t[0] for t in tokens], dtype=torch.float64)).requires_grad_(True)
    advantages = torch.tensor([t[1] for t in tokens], dtype=torch.float64)
    region = {"clip_low": low, "clip_high": high, "ratio_cap": cap}
    two_sided(logprobs, behaviour, advantages, tokens=1, **region).backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad.abs() <= cap * advantages.abs() + 1e-9).all()
    masked = two_sided_masked(logprobs, behaviour, advantages, **region)
    assert (logprobs.grad[masked] == 0).all()
    inside = ~masked & (advantages.abs() > 1e-12) & ((logprobs - behaviour).abs() < 20)
    assert (logprobs.grad[inside] != 0).all()


def test_the_parts_of_a_batch_sum_to_the_batch() -> None:
    ratios = list(RATIOS)
    advantages = [(-1.0) ** i * (i + 1) / 8 for i in range(len(ratios))]
    whole = two_sided(*_tokens(ratios, advantages), tokens=7)
    parts = [two_sided(*_tokens(ratios[a:b], advantages[a:b]), tokens=7) for a, b in ((0, 3), (3, 7))]
    assert sum(p.item() for p in parts) == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("constants", [(0.0, 0.2, 4.0), (0.2, 0.0, 4.0), (0.2, 0.2, 1.2), (1.0, 0.2, 4.0)])
def test_constants_that_make_no_region_are_refused(constants: tuple[float, float, float]) -> None:
    low, high, cap = constants
    with pytest.raises(ValueError, match="trust region"):
        two_sided(*_tokens([1.0], [1.0]), tokens=1, clip_low=low, clip_high=high, ratio_cap=cap)


def test_advantages_are_reward_minus_mean_and_equal_groups_are_dropped() -> None:
    groups = [b"a", b"b", b"a", b"b", b"a", b"c", b"a", b"c"]
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    result = group_advantages(groups, rewards)
    assert result.values_B.tolist() == [0.75, 0.0, -0.25, 0.0, -0.25, 0.0, -0.25, 0.0]
    assert result.keep_B.tolist() == [True, False, True, False, True, False, True, False]
    assert (result.groups, result.groups_kept) == (3, 1)
    with pytest.raises(ValueError, match="groups"):
        group_advantages([b"a"], [])


@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3, 0.3], [0.3 - (0.1 + 0.2), 0.0], [1e6 / 3 * 3, 1e6], [-0.3, -0.1 - 0.2]]
)
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float]) -> None:
    result = group_advantages([b"g"] * len(rewards), rewards)
    assert not result.keep_B.any() and not result.values_B.any() and result.groups_kept == 0


@pytest.mark.parametrize("rewards", [[0.0, 1e-6], [1.0, 1.000001], [1e6, 1e6 + 0.5], [-1e6, -1e6 - 0.5]])
def test_rewards_that_differ_by_more_are_not(rewards: list[float]) -> None:
    assert group_advantages([b"g"] * 2, rewards).keep_B.all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12), st.integers(0, 1000))
def test_advantages_do_not_depend_on_a_groups_order(rewards: list[float], seed: int) -> None:
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    straight = group_advantages([b"g"] * len(rewards), rewards).values_B
    shuffled = group_advantages([b"g"] * len(rewards), [rewards[i] for i in order]).values_B
    assert [float(straight[i]) for i in order] == shuffled.tolist()
    assert float(straight.sum()) == pytest.approx(0.0, abs=1e-4)


def test_ratio_statistics_are_those_worked_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)])
    behaviour = torch.tensor([math.log(0.25), math.log(0.25)])
    got = ratio_statistics(logprobs, behaviour)  # ratios 2 and 1
    assert got["ratio_max"] == pytest.approx(2.0)
    assert got["mismatch_kl"] == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert got["effective_sample_size"] == pytest.approx(3**2 / (2 * 5))
    same = ratio_statistics(behaviour, behaviour)
    assert (same["ratio_max"], same["mismatch_kl"], same["effective_sample_size"]) == (1.0, 0.0, 1.0)


def test_staleness_is_a_histogram_with_its_mean() -> None:
    got = staleness_statistics([0, 1, 1, 2])
    assert got == {"staleness_mean": 1.0, "staleness_max": 2, "staleness": {"0": 1, "1": 2, "2": 1}}
