"""Pooled evidence as statistics: honest nodes stay below the bar, and nobody's word is enough to get them there."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.chain import Revocation, RunUpdate
from protocol.errors import ManifestError, ReasonCode
from protocol.evidence_rows import KINDS, LEAST_LOG_BAR, EvidenceRow, as_loose, check_rows
from protocol.manifest import Thresholds, least_honest
from protocol.records import ACCEPT, REJECT, NodeEvidence, Number, Outcome, RolloutDetail, VerdictDetails
from protocol.state import NodeState, SubmissionState, VerdictState
from trainer.init import load_bf16_thresholds, load_thresholds
from verifier.errors import CalibrationError
from verifier.evidence import Cusum, Sums, counted, log_factors
from verifier.evidence_rows import (
    DATA,
    FALSE_BANS_A_DAY,
    ROLLOUTS_A_DAY,
    RULES,
    DeviceClass,
    Noise,
    bf16_rows,
    fp32_rows,
    read,
    read_classes,
    rows_of_run,
)
from verifier.statistics import MARGIN_SCALE, STATISTICS, Measured, measured, values

ROW = EvidenceRow("precision", "mantissa_mean", 4.0, 1.0, 0.5, 14.0, 100, 0.8, 1)
LIAR, OTHERS = b"liar", (b"one", b"two", b"three")


def plain_cusum(numbers):
    """The definition, one number at a time."""
    log_m = 0.0
    for x in numbers:
        factor = 1 + ROW.bet * (min(max(x, 0.0), ROW.clip) / ROW.honest - 1)
        log_m = max(log_m, 0.0) + math.log(factor)
    return log_m


# --- framing (invariant 8) ------------------------------------------------------------------------------------------

says = st.tuples(st.sampled_from([LIAR, *OTHERS]), st.lists(st.floats(0, 1e300), min_size=1, max_size=4))


@settings(max_examples=300, deadline=None)
@given(st.lists(says, min_size=1, max_size=40))
def test_no_sum_condemns_by_the_numbers_of_one_validator(history):
    """Invariant 8: whatever one validator says, the sum that counts is one of the others' numbers alone, and no larger
    than the e-value weighted over whom else to leave out allows."""
    cusum = Cusum(ROW)
    for validator, x in history:
        cusum.add(validator, x)
    flat = [(validator, one) for validator, x in history for one in x]
    seen = list(dict.fromkeys(validator for validator, _ in history))
    each = []
    for liar in seen:
        honest = [plain_cusum([x for who, x in flat if who != liar]) - math.log(2)]
        for rank, other in enumerate(seen, start=1):
            left = plain_cusum([x for who, x in flat if who not in (liar, other)])
            honest.append(left - math.log(2 * rank * (rank + 1)))
        assert cusum.log_e <= max(0.0, *honest) + 1e-9
        each.append(max(honest))
    assert cusum.log_e == pytest.approx(max(0.0, min(each)) if len(seen) > 1 else 0.0)
    assert cusum.log_all == pytest.approx(plain_cusum([x for _, x in flat]))


def frame(share, says, validators=3, rollouts=400):
    """Numbers of rollouts until a node is condemned; None when it never is. Validator 0 lies."""
    cusum, rng = Cusum(ROW), random.Random(1)
    for n in range(rollouts):
        who = rng.randrange(validators)
        cusum.add(bytes([who]), [says if who == 0 else share])
        if cusum.condemns:
            return n + 1
    return None


@pytest.mark.parametrize("validators", [2, 3, 4, 8])
def test_one_liar_neither_frames_nor_shields_among_three_or_more(validators):
    """It can make evidence take longer: what is left without two of three validators is a third of the numbers."""
    assert frame(0.7, ROW.clip, validators, 4000) is None
    fair, shielded = frame(2.0, 2.0, validators), frame(2.0, 0.0, validators, 4000)
    assert fair is not None
    if validators == 2:
        assert shielded is None, "nobody can tell which of two is right"
    else:
        price = 1 + math.log(validators * (validators + 1)) / ROW.log_bar
        assert shielded is not None and shielded <= 1.3 * price * fair * (validators - 1) / (validators - 2)


def test_the_rule_that_keeps_a_liar_from_framing_costs_a_fair_swarm_little():
    """Three validators: every sum has two thirds of the numbers, so it takes half as many rollouts again."""
    cusum, alone = Cusum(ROW), Cusum(ROW)
    rollouts = {}
    for n in range(200):
        cusum.add(OTHERS[n % 3], [2.0])
        alone.add(OTHERS[0], [2.0])
        if cusum.condemns:
            rollouts.setdefault("three", n + 1)
        if cusum.log_all >= ROW.log_bar:
            rollouts.setdefault("believed", n + 1)
    assert rollouts["three"] <= 1.6 * rollouts["believed"]
    assert alone.suspicious and not alone.condemns


# --- others vouch ---------------------------------------------------------------------------------------------------


def swarm(means, numbers=None, validators=3, liar=None, says=None):
    """Sums of nodes 0, 1, .. with these means; `liar` says of all of them what it likes."""
    sums, rng = Sums((ROW,)), random.Random(2)
    state = SimpleNamespace(
        nodes={bytes([i]): NodeState(bytes([i]), "inference", "", b"", 0) for i in range(len(means))}
    )
    for i, mean in enumerate(means):
        cusum = Cusum(ROW)
        sums._by_node[bytes([i])] = {("precision", "mantissa_mean"): cusum}
        for _ in range((numbers or [400] * len(means))[i] // 8):
            who = rng.randrange(validators)
            true = [max(0.0, rng.gauss(mean, 0.15 * mean)) for _ in range(8)]
            cusum.add(bytes([100 + who]), [says] * 8 if liar == who and says is not None else true)
    return sums, bool(sums.vouched(state, [b"\0"], ROW, 1))


@pytest.mark.parametrize("validators", [3, 4, 6])
@pytest.mark.parametrize("says", [0.0, ROW.clip])
def test_one_liar_of_three_does_not_change_who_vouches(validators, says):
    """Before, one validator that says the worst of everybody switched pooled evidence off for all."""
    assert swarm([2.0, 0.7, 0.7, 0.7], validators=validators, liar=0, says=says)[1]
    assert not swarm([2.0, 2.0, 2.0, 0.7], validators=validators, liar=0, says=says)[1]


def test_of_two_validators_the_higher_number_counts_which_suspends_nobody_by_one_word():
    assert swarm([2.0, 0.7, 0.7], validators=2)[1]
    assert not swarm([2.0, 0.7, 0.7], validators=2, liar=0, says=ROW.clip)[1]
    assert not swarm([2.0, 2.0, 2.0], validators=2, liar=0, says=0.0)[1]
    assert not swarm([2.0, 0.7], validators=1)[1], "one validator's word is none"


def test_new_keys_with_little_work_do_not_outvote_those_with_much():
    """Eight keys of one owner, all above the bound, 32 rollouts each; the honest ones have done their 256."""
    assert swarm([2.0, 0.7, 0.7, *[2.0] * 8], [400, 400, 400, *[56] * 8])[1]
    assert not swarm([2.0, 0.7, 0.7, *[2.0] * 8], [400] * 11)[1], "as much work each: they are most of the run"


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
    assert [row.statistic for row in rows] == ["mantissa_mean", "margin_rate"]
    assert sum(ROLLOUTS_A_DAY / math.exp(row.log_bar) for row in rows) == pytest.approx(FALSE_BANS_A_DAY)
    check_rows(rows, "bf16", {})
    margins = rows[1]
    assert margins.clip == pytest.approx(0.005), "five times the mean, and what counts is clipped"
    assert margins.honest == pytest.approx(2.25 * 0.0005 + 3 * 0.0005)


BF16 = EvidenceRow("precision", "mantissa_mean", 6.0, 1.5, 0.5, 30.0, 100, 0.8, 1)
FP32 = EvidenceRow("precision", "proof_median", 3e-6, 1.5e-6, 0.5, 30.0, 100, 5e-7, 2)
REFUSED = [
    (BF16, {"honest": 0.0}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"honest": -1.0}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"clip": 1.0}, ReasonCode.EVIDENCE_BOUNDS),  # it could never rise
    (BF16, {"clip": 1e10}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"bet": 0.0}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"bet": 1.0}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"log_bar": 1e-9}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"log_bar": LEAST_LOG_BAR - 0.1}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"measured_mean": -1.0}, ReasonCode.EVIDENCE_BOUNDS),
    (BF16, {"hypothesis": "precison"}, ReasonCode.EVIDENCE_UNKNOWN),
    (BF16, {"statistic": "mantisa_mean"}, ReasonCode.EVIDENCE_UNKNOWN),
    (BF16, {"statistic": "proof_median"}, ReasonCode.EVIDENCE_UNKNOWN),  # of the other profile
    (BF16, {"honest": 1.2}, ReasonCode.EVIDENCE_TOO_STRICT),  # half of the rollout's bound, 2.5
    (BF16, {"hypothesis": "margin-steer", "statistic": "margin_reward", "honest": 0.9}, ReasonCode.EVIDENCE_TOO_STRICT),
    (BF16, {"hypothesis": "logprob-lean", "statistic": "lean_below", "honest": 0.9}, ReasonCode.EVIDENCE_TOO_STRICT),
    (
        BF16,
        {"hypothesis": "stale", "statistic": "previous_nearer"},
        ReasonCode.EVIDENCE_UNKNOWN,
    ),  # of the first release
    (FP32, {"honest": 1e-6}, ReasonCode.EVIDENCE_TOO_STRICT),  # a machine at 1.2e-6 passes every check
    (FP32, {"classes": 1}, ReasonCode.EVIDENCE_TOO_STRICT),
]


@pytest.mark.parametrize(
    ("row", "change", "reason"), REFUSED, ids=lambda one: str(one) if isinstance(one, dict) else ""
)
def test_a_manifest_with_a_row_that_makes_no_sum_or_is_stricter_than_the_checks_is_refused(row, change, reason):
    """Beside the bounds that every run has at least: 3e-6 for a proof's median, 2.5 for a rollout's mantissa mean."""
    profile = "fp32" if row is FP32 else "bf16"
    least = least_honest(TIGHT) if row is FP32 else {"mantissa_mean": 1.25}
    check_rows((row,), profile, least)
    with pytest.raises(ManifestError) as caught:
        check_rows((replace(row, **change),), profile, least)
    assert caught.value.code is reason
    with pytest.raises(ManifestError, match="twice"):
        check_rows((row, row), profile, least)


def test_the_lists_of_statistics_are_one():
    assert {rule.statistic for rule in RULES} <= set(KINDS) <= set(STATISTICS)


def test_a_row_is_as_loose_as_another_only_if_no_number_counts_for_more():
    assert as_loose(BF16, BF16) and as_loose(replace(BF16, log_bar=31.0), BF16)
    assert as_loose(replace(BF16, honest=2.0), BF16) and not as_loose(BF16, replace(BF16, honest=2.0))
    assert not as_loose(replace(BF16, clip=7.0), BF16) and not as_loose(replace(BF16, log_bar=29.0), BF16)
    assert not as_loose(FP32, BF16)


TIGHT = Thresholds(3e-6, 4, 2.0**-14, 1e-4, 3e-4, 200, 2000, 5e-7, 1, 0.0, 1e-5, "test")
SECOND = DeviceClass("another", "a test", 32, {"proof_median": 5.2e-7})


def test_fp32_rows_need_two_kinds_of_machine_and_leave_half_the_bound_to_honest_ones():
    (row,) = fp32_rows(TIGHT, [SECOND])
    assert (row.statistic, row.honest, row.clip, row.classes) == ("proof_median", pytest.approx(1.5e-6), 3e-6, 2)
    check_rows((row,), "fp32", least_honest(TIGHT))
    assert fp32_rows(TIGHT) == fp32_rows(TIGHT, [replace(SECOND, machine=TIGHT.machine)]) == (), "one kind of machine"
    loud = replace(SECOND, statistics={"proof_median": 1.2e-6})
    assert fp32_rows(TIGHT, [loud])[0].honest == pytest.approx(1.8e-6), "the loudest that was measured"
    assert fp32_rows(replace(TIGHT, measured_proof_median=2.1e-6), [SECOND]) == (), "no room between noise and bound"


@pytest.mark.parametrize("mean", [1.2e-6, 1.45e-6])
def test_a_louder_kind_of_machine_that_passes_every_check_is_not_suspended(mean):
    """The row of the first release banned a machine at 1.2e-6 after 496 rollouts. Nobody had calibrated on it."""
    (row,) = fp32_rows(TIGHT, [SECOND])
    rng = np.random.default_rng(1)
    cusum = Cusum(row)
    for n in range(500):
        cusum.add(OTHERS[n % 3], rng.normal(mean, 0.15 * mean, 8).tolist())
        assert not cusum.suspicious


@pytest.mark.parametrize("preset", ["tiny", "smollm2"])
def test_checked_in_rows_of_a_preset_are_ones_its_manifest_may_have(preset, tmp_path):
    fp32, bf16 = load_thresholds(preset), load_bf16_thresholds(preset)
    rows = rows_of_run("bf16", fp32, preset, True, bf16)
    assert [row.statistic for row in rows][:3] == ["mantissa_mean", "not_first_rate", "margin_rate"]
    check_rows(rows, "bf16", least_honest(bf16))
    rows = rows_of_run("fp32", fp32, preset)
    check_rows(rows, "fp32", least_honest(fp32))
    assert len(rows) == (preset == "smollm2"), "the tiny model was measured on one kind of machine"
    assert rows_of_run("bf16", fp32, "never-measured") == ()


def test_files_of_honest_numbers_that_do_not_hold_are_refused(tmp_path):
    (tmp_path / "x.json").write_text(
        '{"statistics": {"mantissa_mean": {"numbers": 1, "mean": 1.0, "clipped": 2.0, "error": 0.1}}}'
    )
    with pytest.raises(CalibrationError, match="no honest node has"):
        read(tmp_path / "x.json")
    with pytest.raises(CalibrationError, match="holds no honest numbers"):
        read(tmp_path / "y.json")
    for text in ("[]", '{"classes": [{"machine": "m"}]}', "{"):
        (tmp_path / "z.json").write_text(text)
        with pytest.raises(CalibrationError, match="no device classes"):
            read_classes(tmp_path / "z.json")
    (tmp_path / "z.json").write_text(
        '{"classes": [{"machine": "m", "source": "s", "rollouts": 1, "statistics": {"proof_median": -1}}]}'
    )
    with pytest.raises(CalibrationError, match="no honest machine"):
        read_classes(tmp_path / "z.json")
    assert read_classes(tmp_path / "none.json") == []


def test_the_second_kind_of_machine_of_smollm2_is_what_the_results_file_says():
    (one,) = read_classes(DATA / "classes-smollm2.json")
    root = Path(__file__).resolve().parent.parent
    cases = {case["case"]: case for case in json.loads((root / one.source).read_text())["rows"]}
    fp32 = [case["toploc32_median"]["max"] for name, case in cases.items() if "gpu fp32 decode" in name
            and "TF32" not in name and "bf16" not in name]  # fmt: skip
    bf16 = cases["gpu bf16 decode -> gpu fp32 prefill"]
    assert one.statistics == {
        "proof_median": max(fp32),
        "mantissa_mean": bf16["bf16_mant_mean"]["mean"],
        "margin_rate": bf16["margin"]["mean"],
        "not_first_rate": bf16["margin_nonzero"] / (32 * 160),
    }


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
        EvidenceRow(*names, 4.0, 1.5, 0.75, 31.5, 200, 1.25, 2),
        update,
    ):
        assert f"`{codec.encode(record).hex()}`" in text
    assert f"`{blake3(codec.encode(update)).hexdigest()}`" in text
