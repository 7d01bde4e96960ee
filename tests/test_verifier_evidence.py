"""Pooled evidence as statistics: honest nodes stay below the bar, and nobody's word is enough to get them there."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.chain import Revocation, RunUpdate
from protocol.errors import ManifestError
from protocol.manifest import EvidenceRow, Thresholds, check_evidence
from protocol.records import ACCEPT, REJECT, NodeEvidence, Number, Outcome, RolloutDetail, VerdictDetails
from protocol.state import SubmissionState, VerdictState
from verifier.errors import CalibrationError
from verifier.evidence import Cusum, counted, log_factors
from verifier.evidence_rows import FALSE_BANS_A_DAY, ROLLOUTS_A_DAY, Noise, bf16_rows, fp32_rows, read, rows_of_run
from verifier.statistics import MARGIN_SCALE, Measured, measured, previous_nearer, values

ROW = EvidenceRow("precision", "mantissa_mean", 4.0, 1.0, 0.5, 8.0, 100, 0.8)
LIAR, OTHERS = b"liar", (b"one", b"two", b"three")


def plain_cusum(numbers):
    """The definition, one number at a time."""
    log_m = 0.0
    for x in numbers:
        factor = 1 + ROW.bet * (min(max(x, 0.0), ROW.clip) / ROW.honest - 1)
        log_m = max(log_m, 0.0) + math.log(factor)
    return log_m


# --- framing (invariant 8) ------------------------------------------------------------------------------------------

says = st.tuples(st.sampled_from([LIAR, *OTHERS]), st.floats(0, 1e300))


@settings(max_examples=300, deadline=None)
@given(st.lists(says, min_size=1, max_size=60))
def test_no_sum_condemns_by_the_numbers_of_one_validator(history):
    """Invariant 8: whatever one validator says, the sum that counts is no larger than the others' alone."""
    cusum = Cusum(ROW)
    for validator, x in history:
        cusum.add(validator, [x])
    for one in {validator for validator, _ in history}:
        alone = plain_cusum([x for validator, x in history if validator != one])
        assert cusum.log_e <= max(0.0, alone) + 1e-9
    assert cusum.log_all == pytest.approx(plain_cusum([x for _, x in history]))


def test_the_rule_that_keeps_a_liar_from_framing_costs_a_fair_swarm_little():
    """Three validators: every sum has two thirds of the numbers, so it takes half as many rollouts again."""
    cusum, alone = Cusum(ROW), Cusum(ROW)
    rollouts = {}
    for n in range(200):
        cusum.add(OTHERS[n % 3], [2.0])
        alone.add(OTHERS[0], [2.0])
        if cusum.condemns:
            rollouts.setdefault("three", n + 1)
        if cusum.suspicious:
            rollouts.setdefault("believed", n + 1)
    assert rollouts["three"] <= 1.6 * rollouts["believed"]
    assert alone.suspicious and not alone.condemns


def test_only_the_validator_drawn_first_counts_and_only_if_it_answered():
    """A later draw is the choice of those before it: a liar could pass on what looks bad, and keep what looks good."""
    verdicts = {number: VerdictState(10 + number, None, bytes([number])) for number in (1, 2)}
    first = SubmissionState(1, b"", b"", None, 0, (), verdicts=verdicts, attempts={1: 1, 2: 1})
    assert counted(first) is verdicts[1]
    assert counted(replace(first, attempts={1: 2, 2: 1})) is None, "somebody was asked before, and said nothing"
    assert counted(replace(first, verdicts={2: verdicts[2]})) is None


# --- honest nodes ---------------------------------------------------------------------------------------------------

HONEST = {
    "at the bound": lambda rng, shape: rng.gamma(4.0, 0.25, shape),
    "two points": lambda rng, shape: 40.0 * (rng.random(shape) < 0.025),
    "heavy tails": lambda rng, shape: rng.pareto(1.1, shape) * 0.1,
    "nothing": lambda rng, shape: np.zeros(shape),
}


@pytest.mark.parametrize("kind", list(HONEST), ids=str)
def test_honest_nodes_cross_a_low_bar_as_seldom_as_the_bound_says(kind):
    """At the bar of one false ban in 100 node-days of 200 rollouts, where it can be counted."""
    rng = np.random.default_rng(5)
    nodes, rollouts = 5000, 200
    bar = math.log(rollouts * 100)
    row = replace(ROW, clip=50.0)
    log_m, crossed = np.zeros(nodes), np.zeros(nodes, bool)
    logs = log_factors(row, HONEST[kind](rng, (nodes, rollouts)))
    for n in range(rollouts):
        log_m = np.maximum(log_m, 0.0) + logs[:, n]
        crossed |= log_m >= bar
    assert crossed.mean() <= 0.01 + 3 * math.sqrt(0.01 / nodes)


def test_the_bars_split_one_chance_in_ten_million_a_node_day():
    noise = {"mantissa_mean": Noise.of([1.2, 1.4]), "margin_rate": Noise.of([0.0] * 9 + [0.01])}
    rows = bf16_rows(noise)
    assert {row.hypothesis for row in rows} == {"precision", "seed-choice", "stale"}
    assert sum(ROLLOUTS_A_DAY / math.exp(row.log_bar) for row in rows) == pytest.approx(FALSE_BANS_A_DAY)
    check_evidence(rows)
    margins = rows[1]
    assert margins.clip == pytest.approx(0.005), "five times the mean, and what counts is clipped"
    assert margins.honest == pytest.approx(2 * 0.0005 + 3 * 0.0005)


@pytest.mark.parametrize(
    "change",
    [{"honest": 0.0}, {"clip": 0.0}, {"bet": 0.0}, {"bet": 1.01}, {"log_bar": 0.0}, {"clip": 1e10}, {"honest": -1.0}],
    ids=str,
)
def test_a_manifest_with_a_row_that_cannot_be_summed_up_is_refused(change):
    with pytest.raises(ManifestError, match="out of its bounds"):
        check_evidence((replace(ROW, **change),))
    with pytest.raises(ManifestError, match="twice"):
        check_evidence((ROW, ROW))


def test_fp32_rows_follow_from_the_measurement_behind_the_thresholds():
    thresholds = Thresholds(3e-6, 4, 2.0**-14, 1e-4, 3e-4, 200, 2000, 8e-7, 1, 0.0, 1e-5, "test")
    (row,) = fp32_rows(thresholds)
    assert (row.statistic, row.honest, row.clip) == ("proof_median", pytest.approx(1.2e-6), 3e-6)
    assert fp32_rows(replace(thresholds, measured_proof_median=2.1e-6)) == (), "no room between noise and bound"
    assert fp32_rows(thresholds, pure=False)[1].hypothesis == "reward"


def test_bf16_rows_of_a_preset_follow_from_its_checked_in_numbers(tmp_path):
    thresholds = Thresholds(3e-6, 4, 2.0**-14, 1e-4, 3e-4, 200, 2000, 8e-7, 1, 0.0, 1e-5, "test")
    rows = rows_of_run("bf16", thresholds, "tiny")
    assert [row.statistic for row in rows][:3] == ["mantissa_mean", "not_first_rate", "margin_rate"]
    assert all(row.honest > row.measured_mean for row in rows if row.statistic == "mantissa_mean")
    assert rows_of_run("bf16", thresholds, "never-measured") == ()
    assert rows_of_run("fp32", thresholds, "tiny") == fp32_rows(thresholds)
    (tmp_path / "x.json").write_text(
        '{"statistics": {"mantissa_mean": {"numbers": 1, "mean": 1.0, "clipped": 2.0, "error": 0.1}}}'
    )
    with pytest.raises(CalibrationError, match="no honest node has"):
        read(tmp_path / "x.json")
    with pytest.raises(CalibrationError, match="holds no honest numbers"):
        read(tmp_path / "y.json")


# --- from verdicts to numbers ---------------------------------------------------------------------------------------


def detail(text: str, reward: float = 0.0, tokens: int = 4, **numbers: float) -> RolloutDetail:
    logprobs = text.encode().ljust(4 * tokens, b"\0")
    return RolloutDetail(logprobs, reward, tuple(Number(name, value) for name, value in numbers.items()))


def numbers(statistic, *details, outcomes=None, samples=2):
    stated = [Outcome(one, "holds") for one in outcomes or [ACCEPT] * len(details)]
    return values(statistic, measured(VerdictDetails(details), stated, samples))


def test_equal_rollouts_of_a_task_are_one_piece_of_evidence():
    same, other = detail("a", mantissa_mean=3.0), detail("b", mantissa_mean=1.0)
    assert numbers("mantissa_mean", same, same, same, other) == [3.0, 3.0, 1.0]
    assert numbers("mantissa_mean", same, other, outcomes=[REJECT, ACCEPT]) == [1.0]
    assert numbers("mantissa_mean", detail("", tokens=0, mantissa_mean=3.0)) == []


def test_rates_are_per_token_and_what_was_not_measured_is_left_out():
    assert numbers("not_first_rate", detail("a", tokens_not_first=1), detail("b")) == [0.25]
    assert numbers("margin_rate", detail("a", tokens=8, margin_sum=0.4)) == [pytest.approx(0.05)]
    assert numbers("margin_rate", detail("a", margin_sum=-5.0)) == [0.0], "a validator's word is at least no credit"
    assert numbers("no-such-statistic", detail("a", margin_sum=1.0)) == []


def test_claimed_rewards_that_are_right_in_the_mean_add_up_to_nothing():
    rng = random.Random(3)
    claims = [(rng.random(), rng.random()) for _ in range(4000)]
    x = [numbers("reward_claimed", detail("a", own, reward_claimed=claim))[0] for claim, own in claims]
    assert np.mean(x) == pytest.approx(1.0, abs=0.02)
    assert numbers("reward_claimed", detail("a", 0.0, reward_claimed=1e308)) == [2.0]


def test_the_paired_test_is_fair_when_both_policies_fit_alike():
    rng = random.Random(4)
    coins = [previous_nearer(rng.gauss(1, 0.1), rng.gauss(1, 0.1)) for _ in range(4000)]
    assert np.mean(coins) == pytest.approx(0.5, abs=0.03)
    assert (previous_nearer(2.0, 1.0), previous_nearer(1.0, 1.0), previous_nearer(1.0, 2.0)) == (1.0, 0.5, 0.0)


@pytest.mark.parametrize("longer_wins", [True, False])
def test_margins_that_grow_with_the_length_are_no_steering_whatever_wins(longer_wins):
    """Honest: margins come a token at a time, and the reward depends on the length alone."""
    rng = np.random.default_rng(6)
    x = []
    for _ in range(3000):
        lengths = rng.integers(8, 200, size=4)
        margins = [0.1 * (rng.random(n) < 0.02) for n in lengths]
        middle = np.median(lengths)
        group = [
            Measured(0, int(n), float((n > middle) == longer_wins), {"margin_sum": float(margin.sum())})
            for n, margin in zip(lengths, margins, strict=True)
        ]
        x += values("margin_reward", group)
    assert len(x) > 500 and abs(np.mean(x) - 1.0) < 3 * np.std(x) / math.sqrt(len(x)) + 0.002


def test_margins_that_buy_reward_add_up():
    steered = [Measured(0, 50, float(i < 2), {"margin_sum": 50 * MARGIN_SCALE * (i < 2)}) for i in range(4)]
    assert values("margin_reward", steered) == [2.0]
    assert values("margin_reward", [replace(one, reward=1.0) for one in steered]) == [], "all rewards are equal"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 10**6), st.floats(allow_nan=False), st.floats(allow_nan=False)),
        max_size=8,
    )
)
def test_every_statistic_of_any_numbers_is_finite_and_not_negative(claims):
    rollouts = [
        Measured(task, tokens, reward, dict.fromkeys(("margin_sum", "tokens_not_first", "reward_claimed"), number))
        for task, tokens, reward, number in claims
        if math.isfinite(reward) and math.isfinite(number)
    ]
    for statistic in ("margin_rate", "not_first_rate", "margin_reward", "reward_claimed"):
        assert all(0 <= x < math.inf for x in values(statistic, rollouts))


def test_the_vectors_of_the_specification_are_true():
    text = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text()
    gone = (Revocation(b"\x06" * 32, 900, "stolen"),)
    update = RunUpdate(previous=b"\x11" * 32, number=1, revocations=gone, lowest_version=0x0100, note="n")
    names = ("precision", "mantissa_mean")
    for record in (
        NodeEvidence(b"\x05" * 32, *names, 900, 64, 3, 31.5, 40.25, 2.5),
        EvidenceRow(*names, 4.0, 1.5, 0.75, 31.5, 200, 1.25),
        update,
    ):
        assert f"`{codec.encode(record).hex()}`" in text
    assert f"`{blake3(codec.encode(update)).hexdigest()}`" in text
