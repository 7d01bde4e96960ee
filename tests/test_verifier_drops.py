"""The drop test: honest keys are never condemned, however they lose leases; keys that choose are, and how soon.

Rewards are simulated as a run makes them: binary, alike within a task, climbing from 2% to 95% over the run.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.evidence import DROP_LOG_E
from verifier.drops import BLOCK, GRID, DropTest, block_log_e, drop_result, log_most_likely
from verifier.outcomes import LeaseOutcome


def advantages(rng, runs, leases, others=6, tasks=4, samples=4):
    """x of every lease of `runs` nodes, [runs, leases]: its mean reward less that of six other nodes' leases."""
    climb = 0.02 + 0.93 / (1 + np.exp(-10 * (np.arange(leases) / leases - 0.5)))

    def rewards(*shape):
        solved = rng.beta(2 * climb, 2 * (1 - climb), size=(*shape, tasks, leases))
        return rng.binomial(samples, solved).sum(-2) / (tasks * samples)

    return rewards(runs) - rewards(runs, others).mean(1)


def leases_until(x, lost, tokens=None, longest=None, late=None):
    """How many leases until one key is condemned, looking after each; infinity when it never is."""
    test = DropTest()
    nothing = np.zeros(len(x), int)
    rows = (x, lost, *(nothing if one is None else one for one in (tokens, longest, late)))
    for n, (value, gone, total, most, slow) in enumerate(zip(*rows, strict=True), start=1):
        test.add(LeaseOutcome(bool(gone), float(value), bool(slow), int(total), int(most)))
        if (gone or slow) and value < 0 and test.result.condemns:
            return n
    return math.inf


RATES = {
    "steady": lambda u: np.full_like(u, 0.2),
    "always": lambda u: np.full_like(u, 0.7),
    "better and better": lambda u: 0.9 * (1 - u),
    "a bad morning": lambda u: np.where(u < 0.3, 0.9, 0.02),
    "a bad evening": lambda u: np.where(u > 0.7, 0.9, 0.02),
}


def test_no_honest_key_in_ten_thousand_is_condemned():
    rng = np.random.default_rng(1)
    condemned = 0
    for rate in RATES.values():
        x = advantages(rng, 2000, 50)
        lost = rng.random(x.shape) < rate(np.arange(50) / 50)
        condemned += sum(leases_until(*one) < math.inf for one in zip(x, lost, strict=True))
    assert condemned == 0


@pytest.mark.parametrize("rate", list(RATES), ids=str)
def test_nor_in_long_runs_in_which_rewards_and_losses_drift_together(rate):
    """One pooled rate would condemn honest keys here: a node that was flaky while rewards were low."""
    rng = np.random.default_rng(2)
    x = advantages(rng, 40, 1500)
    lost = rng.random(x.shape) < RATES[rate](np.arange(1500) / 1500)
    assert all(leases_until(*one) == math.inf for one in zip(x, lost, strict=True))


@pytest.mark.parametrize(
    ("share", "median", "nine_of_ten"),
    [(1.0, 45, 60), (0.5, 190, 260), (0.25, 600, 800)],
    ids=["all", "half", "quarter"],
)
def test_who_drops_low_rewards_is_condemned_soon(share, median, nine_of_ten):
    """At lengths that have nothing to do with the reward, which the test has to find out for itself."""
    rng = np.random.default_rng(3)
    x = advantages(rng, 60, 1200)
    lost = (x < 0) & (rng.random(x.shape) < share)
    tokens = rng.integers(200, 2000, x.shape)
    found = sorted(leases_until(*one) for one in zip(x, lost, tokens, strict=True))
    assert found[30] <= median and found[54] <= nine_of_ten


@pytest.mark.parametrize("by", ["total", "longest"])
@pytest.mark.parametrize("tasks", [1, 2])
def test_an_honest_machine_that_dies_on_long_answers_is_not_condemned_where_wrong_ones_are_long(by, tasks):
    """Wrong answers are three times as long as right ones, and the fifth of leases that takes longest is lost."""
    rng, n = np.random.default_rng(7), 1000
    climb = np.linspace(0.1, 0.7, n)
    for _ in range(20):
        right = rng.random((tasks, 8, n)) < rng.beta(2 * climb, 2 * (1 - climb), size=(tasks, 1, n))
        tokens = rng.gamma(2, np.where(right, 20, 60)).astype(int) + 1
        total, longest = tokens.sum((0, 1)), tokens.max((0, 1))
        x = right.mean((0, 1)) - climb - rng.normal(0, 0.3 / math.sqrt(30 * tasks), n)
        took = (total if by == "total" else longest) * rng.lognormal(0, 0.2, n)
        lost = took > np.quantile(took, 0.8)
        assert np.corrcoef(lost, x)[0, 1] < -0.05
        assert leases_until(x, lost, total, longest) == math.inf


def test_lengths_do_not_hide_who_drops_where_wrong_answers_are_a_little_longer():
    rng = np.random.default_rng(8)
    x = advantages(rng, 20, 400)
    tokens = 1000 - 300 * x + rng.normal(0, 100, x.shape)
    assert sorted(leases_until(*one) for one in zip(x, x < 0, tokens, strict=True))[18] <= 60


@pytest.mark.parametrize("in_time", [0.0, 1.0, 0.7], ids=["never", "for the last batch", "now and then"])
def test_who_sends_bad_leases_too_late_is_condemned(in_time):
    """Too late for any batch, or so that only the last one could take it: either way the model learns from the rest."""
    rng = np.random.default_rng(9)
    x = advantages(rng, 20, 200)
    late = (x < 0) & (rng.random(x.shape) < in_time)
    found = [leases_until(a, (a < 0) & ~c, late=c) for a, c in zip(x, late, strict=True)]
    assert max(found) <= 75


def test_who_is_slow_whatever_the_reward_is_not():
    rng = np.random.default_rng(10)
    x = advantages(rng, 100, 400)
    for slow in (rng.random(x.shape) < 0.5, np.arange(400) % 50 < np.arange(100)[:, None] % 50):
        lost = slow & (rng.random(x.shape) < 0.3)
        found = [leases_until(a, b, late=c) for a, b, c in zip(x, lost, slow & ~lost, strict=True)]
        assert min(found) == math.inf


def test_who_begins_late_is_condemned_too():
    rng = np.random.default_rng(4)
    x = advantages(rng, 20, 1000)
    lost = (x < 0) & (np.arange(1000) >= 600)
    found = [leases_until(*one) for one in zip(x, lost, strict=True)]
    assert all(600 < n < 800 for n in found)


def test_dropping_high_rewards_is_no_gain_and_no_evidence():
    rng = np.random.default_rng(5)
    (x,) = advantages(rng, 1, 300)
    assert leases_until(x, x > 0) == math.inf
    assert drop_result(LeaseOutcome(bool(v > 0), float(v)) for v in x).log_e == 0.0


leases = st.builds(
    LeaseOutcome,
    st.booleans(),
    st.sampled_from([None, -0.5, -0.1, 0.0, 0.2, 0.7]),
    st.booleans(),
    st.sampled_from([5, 6, 9, 40]),
    st.sampled_from([1, 2, 3]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(leases, max_size=2 * BLOCK + 5))
def test_property_counts_add_up_and_the_number_is_finite(found):
    result = drop_result(found)
    assert result.lost + result.returned == len(found)
    assert result.lost in (sum(o.lost for o in found), sum(o.lost or o.late for o in found))
    assert math.isfinite(result.log_e)
    assert not result.condemns or (result.log_e >= DROP_LOG_E and result.lost_mean < result.returned_mean)


@settings(max_examples=200, deadline=None)
@given(st.lists(leases, max_size=60), st.data())
def test_property_whatever_stays_unknown_counts_for_the_key(found, data):
    """Who keeps the reward of a lease from becoming known never raises the e-value, of either way to label it."""
    known = [o if o.x is not None else replace(o, x=data.draw(st.sampled_from([-0.3, 0.0, 0.4]))) for o in found]
    one, two = DropTest(), DropTest()
    for outcome, truth in zip(found, known, strict=True):
        one.add(outcome)
        two.add(truth)
    for a, b in ((one.strict, two.strict), (one.wide, two.wide)):
        assert block_log_e(a.rows) <= block_log_e(b.rows) + 1e-9


def exact(below, above):
    """The e-value of one block of leases of equal length, with probabilities instead of logarithms."""
    rates = [math.sin((2 * k + 1) * math.pi / (4 * GRID)) ** 2 for k in range(GRID)]
    pairs = [(high, low) for low, high in itertools.combinations(rates, 2)]
    (a, b), (c, d) = below, above
    top = sum(high**a * (1 - high) ** b * low**c * (1 - low) ** d for high, low in pairs) / len(pairs)
    rate = (a + c) / (a + b + c + d)
    return math.log(0.5 * top / (rate ** (a + c) * (1 - rate) ** (b + d)) + 0.5)


def test_the_number_is_the_formula():
    found = [LeaseOutcome(True, -0.2)] * 9 + [LeaseOutcome(False, -0.1)] * 2 + [LeaseOutcome(False, 0.3)] * 12
    assert drop_result(found).log_e == pytest.approx(exact((9, 2), (0, 12)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.booleans()), min_size=1, max_size=12))
def test_property_no_rising_rate_explains_the_losses_better(rows):
    lengths, lost = [length for length, _ in rows], [gone for _, gone in rows]
    best = log_most_likely(lengths, lost)
    grid = [i / 10 for i in range(11)]
    for rates in itertools.combinations_with_replacement(grid, 4):
        chances = [rates[int(length) - 1] if gone else 1 - rates[int(length) - 1] for length, gone in rows]
        assert math.prod(chances) <= math.exp(best) * (1 + 1e-9)


def test_an_e_value_is_one_on_average_for_honest_keys():
    """What the guarantee rests on: the mean over honest labels, not just the absence of alarms, is at most one."""
    rng = np.random.default_rng(6)
    total = 0.0
    for _ in range(4000):
        test = DropTest()
        for below in rng.random(30) < 0.6:
            length = rng.integers(1, 100)
            test.add(LeaseOutcome(bool(rng.random() < length / 100), -0.2 if below else 0.1, tokens=length))
        total += math.exp(test.result.log_e) if test.result.log_e else 0.0
    assert total / 4000 < 1.1
