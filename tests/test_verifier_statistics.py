"""From a verdict's details to the numbers that evidence sums up: what a node claims changes nothing but its own x."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import ManifestError, ReasonCode
from protocol.evidence_rows import check_rows
from protocol.manifest import RouteThresholds, Thresholds
from protocol.records import ACCEPT, Number, Outcome, RolloutDetail, VerdictDetails
from verifier.claims import DIGEST_BYTES, digest_of
from verifier.evidence import Cusum
from verifier.evidence_rows import DATA, Noise, bf16_rows, fp32_rows, noise_of_calibration
from verifier.numbers import NUMBERS
from verifier.statistics import LEAN_SCALE, READS, STATISTICS, Measured, measured, values
from verifier.thresholds import Bf16Measurement, read

PROMPT = np.asarray([7, 8], "<u4").tobytes()


def detail(tokens: list[int], claimed: float = -1.0, *, prompt: bytes = PROMPT, **numbers: float) -> RolloutDetail:
    ids = np.asarray(tokens, "<u4").tobytes()
    logprobs = np.full(len(tokens), claimed, "<f4").tobytes()
    return RolloutDetail(logprobs, 0.0, tuple(map(Number, numbers, numbers.values())), digest_of(prompt, ids))


def means(*details: RolloutDetail, samples: int = 8) -> list[float]:
    outcomes = [Outcome(ACCEPT, "holds")] * len(details)
    return values("mantissa_mean", measured(VerdictDetails(details), outcomes, samples))


# --- equal rollouts -----------------------------------------------------------------------------------------------


def test_equal_claims_do_not_make_rollouts_equal():
    """A node that claims the same log-probabilities for all of its rollouts is still counted for each."""
    assert means(detail([1, 2], mantissa_mean=3.0), detail([1, 3], mantissa_mean=4.0)) == [3.0, 4.0]


def test_other_claims_do_not_make_equal_rollouts_different():
    """One accident is one piece of evidence, whatever is claimed about it: in a task and across tasks of one prompt."""
    one, again = detail([1, 2], -1.0, mantissa_mean=3.0), detail([1, 2], -1.001, mantissa_mean=3.0)
    assert means(one, again) == [3.0] == means(one, again, samples=1)
    assert means(one, detail([1, 2], prompt=PROMPT[:4], mantissa_mean=3.0)) == [3.0, 3.0]


def test_the_hash_tells_prompt_and_tokens_apart():
    """Moving an id from the prompt to the tokens is another rollout."""
    assert digest_of(PROMPT, PROMPT[:4]) != digest_of(PROMPT[:4], PROMPT[4:] + PROMPT[:4])
    assert len(digest_of(b"", b"")) == DIGEST_BYTES
    vector = digest_of(PROMPT, np.asarray([5, 6, 1], "<u4").tobytes()).hex()
    text = (Path(__file__).resolve().parents[1] / "docs" / "protocol.md").read_text()
    assert f"prompt 7 8, sampled 5 6 1: `{vector}`" in text


def test_details_of_a_validator_that_sends_no_hash_are_read_as_before():
    """The field is the record's last: a decoder of either release reads the other's."""
    with_digest = VerdictDetails((detail([1, 2], mantissa_mean=3.0),))
    before = VerdictDetails((RolloutDetail(with_digest.rollouts[0].logprobs, 0.0, with_digest.rollouts[0].numbers),))
    assert codec.decode(VerdictDetails, codec.encode(before)) == before
    same = before.rollouts[0]
    assert means(same, same) == [3.0] and means(same, same, samples=1) == [3.0, 3.0]


# --- leaning log-probabilities --------------------------------------------------------------------------------------


def rollouts(*numbers: dict[str, float], rewards: tuple[float, ...] = (), tokens: int = 50) -> list[Measured]:
    rewards = rewards or (0.0,) * len(numbers)
    return [Measured(0, tokens, reward, one) for one, reward in zip(numbers, rewards, strict=True)]


def test_a_lean_counts_on_the_side_it_is_on():
    up, down = {"mismatch_kl": LEAN_SCALE / 2}, {"mismatch_kl": -LEAN_SCALE / 2}
    assert values("lean_above", rollouts(up, down)) == [1.5, 0.5]
    assert values("lean_below", rollouts(up, down)) == [0.5, 1.5]
    assert values("lean_above", rollouts({"mismatch_kl": 1e300}, {"mismatch_kl": -1e300})) == [2.0, 0.0]


def test_a_lean_that_goes_with_the_reward_adds_up_and_one_that_does_not_cancels():
    lie = [{"mismatch_kl": LEAN_SCALE * (i < 2)} for i in range(4)]
    tied, free = rollouts(*lie, rewards=(1, 1, 0, 0)), rollouts(*lie, rewards=(1, 0, 1, 0))
    assert (values("lean_reward_above", tied), values("lean_reward_below", tied)) == ([2.0], [0.0])
    assert values("lean_reward_above", free) == values("lean_reward_below", free) == [1.0]
    assert values("lean_reward_above", rollouts(*lie)) == [], "all rewards are equal"


# --- rows -----------------------------------------------------------------------------------------------------------

MADE = RouteThresholds(4e-5, 32, 10_000, 0.0, 4e-6, "here", 8, 8e-6, 0, 1.6e-6)
FP32 = Thresholds(3e-6, 4, 2.0**-14, 1e-4, 3e-4, 200, 2000, 5e-7, 1, 0.0, 1e-5, "test")


def test_the_row_of_expert_choices_allows_what_noise_within_the_margin_makes():
    """No machine whose scores stay within the margin is above it in the mean, so none that passes the checks is."""
    (row,) = fp32_rows(FP32, routes=MADE)
    assert (row.hypothesis, row.statistic, row.honest) == ("route-choice", "route_rate", MADE.not_first_rate)
    check_rows((row,), "fp32", {"route_rate": MADE.not_first_rate})
    assert fp32_rows(FP32) == fp32_rows(FP32, routes=replace(MADE, not_first_rate=1.0)) == (), "dense, or unbounded"
    strict = replace(row, honest=row.honest / 2)
    with pytest.raises(ManifestError) as caught:
        check_rows((strict,), "fp32", {"route_rate": MADE.not_first_rate})
    assert caught.value.code is ReasonCode.EVIDENCE_TOO_STRICT


def test_a_node_that_uses_near_ties_is_condemned_and_one_whose_noise_fills_the_margin_is_not():
    """Tasks of 8 rollouts with 2,000 choices: honest ones at the bound have one other choice in 60 tasks."""
    (row,) = fp32_rows(FP32, routes=MADE)
    rng, choices = np.random.default_rng(3), 2000
    loud, steering = (rng.poisson(rate * choices, 3000) / choices for rate in (MADE.not_first_rate, 4.0 * MADE.margin))
    assert np.mean(loud) == pytest.approx(row.honest, rel=0.5)
    for x, condemned in ((loud, False), (steering[:300], True)):
        cusum = Cusum(row)
        for n, one in enumerate(x):
            cusum.add(bytes([n % 3]), [float(one)])
        assert cusum.condemns == condemned


def test_the_rows_of_leaning_claims_follow_from_honest_numbers():
    lean = [1.0 + 0.2 * (i % 2) for i in range(400)]
    noise = {"mismatch_k3": Noise.of([1e-3] * 400), "lean_above": Noise.of(lean)}
    noise |= {name: Noise.of([2.0 - x for x in lean]) for name in ("lean_below", "lean_reward_below")}
    rows = {row.statistic: row for row in bf16_rows(noise)}
    check_rows(rows.values(), "bf16", {})
    assert rows["mismatch_k3"].honest == pytest.approx(2.25e-3), "half as loud again is honest too"
    assert rows["lean_above"].honest == pytest.approx(1.21, abs=0.02)
    assert rows["lean_below"].honest == 1.05 and rows["lean_reward_below"].honest == 1.1
    assert {row.hypothesis for row in rows.values()} == {"logprob-lean"} and len(rows) == 4


def test_a_calibration_that_measured_how_claims_lean_gives_their_rows():
    """So a device class whose engine reports with a lean is in the rows of its run; an older file gives none."""
    measured_before = read(DATA / "noise-smollm2-bf16.json")
    assert isinstance(measured_before, Bf16Measurement)
    lean = {"mismatch_k3_mean": 2e-3, "lean_above_mean": 1.3, "lean_deviation": 0.2}
    rows = {row.statistic: row for row in bf16_rows(noise_of_calibration(replace(measured_before, **lean)))}
    error = 0.2 / math.sqrt(measured_before.rollouts)
    assert rows["mismatch_k3"].honest > 2.25 * 2e-3 and rows["lean_above"].honest == pytest.approx(1.43 + 3 * error)
    assert rows["lean_below"].honest == 1.05, "0.7 was measured, and nothing is gained by a stricter row"
    never = replace(measured_before, mismatch_k3_mean=0.0)
    without = {row.statistic for row in bf16_rows(noise_of_calibration(never))}
    assert not {"mismatch_k3", "lean_above", "lean_below"} & without


# --- routes ---------------------------------------------------------------------------------------------------------


def test_choices_of_experts_are_one_number_a_task():
    """Its rollouts share the prompt, and with it a level pair of experts: eight times one accident is still one."""
    chosen = [{"routes_not_first": 3.0, "route_choices": 300.0}] * 8
    other = [Measured(1, 50, 0.0, {"routes_not_first": 0.0, "route_choices": 100.0})]
    assert values("route_rate", [*rollouts(*chosen), *other]) == [pytest.approx(0.01), 0.0]
    assert (
        values("route_rate", rollouts({"routes_not_first": 1.0}, {"routes_not_first": 1.0, "route_choices": 0.0})) == []
    )


# --- any numbers ----------------------------------------------------------------------------------------------------


def test_every_statistic_reads_numbers_that_have_a_name():
    assert READS.keys() == STATISTICS.keys()
    named = {name for reads in READS.values() for name in reads}
    assert named <= NUMBERS.keys()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(STATISTICS)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10**6), st.floats(), st.floats(), st.floats()), max_size=8),
)
def test_every_statistic_of_any_numbers_is_finite_and_not_negative(name, claims):
    """A validator's word may be any float: no x is below 0, infinite or no number."""
    found = [
        Measured(task, tokens, reward, dict(zip(READS[name], (number, other), strict=False)))
        for task, tokens, reward, number, other in claims
        if math.isfinite(reward)
    ]
    assert all(0 <= x < math.inf for x in values(name, found))
    assert values(name, [Measured(0, 1, 0.0, {}), Measured(0, 1, 1.0, {})]) == []
