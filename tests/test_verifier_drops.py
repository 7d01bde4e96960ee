"""The drop test: honest keys are never condemned, however they lose leases; keys that choose are, and how soon.

Rewards are simulated as a run makes them: binary, alike within a task, climbing from 2% to 95% over the run.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.evidence import DROP_LOG_E
from protocol.records import ACCEPT
from protocol.state import fold
from tests.ledger_builder import Chain, identity, make_manifest
from verifier.drops import BLOCK, DropTest, LeaseOutcome, drop_evidence, drop_result, lease_outcomes


def advantages(rng, runs, leases, others=6, tasks=4, samples=4):
    """x of every lease of `runs` nodes, [runs, leases]: its mean reward less that of six other nodes' leases."""
    climb = 0.02 + 0.93 / (1 + np.exp(-10 * (np.arange(leases) / leases - 0.5)))

    def rewards(*shape):
        solved = rng.beta(2 * climb, 2 * (1 - climb), size=(*shape, tasks, leases))
        return rng.binomial(samples, solved).sum(-2) / (tasks * samples)

    return rewards(runs) - rewards(runs, others).mean(1)


def leases_until(x, lost):
    """How many leases until one key is condemned, looking after each; infinity when it never is."""
    test = DropTest()
    for n, (value, gone) in enumerate(zip(x, lost, strict=True), start=1):
        test.add(LeaseOutcome(bool(gone), float(value)))
        if gone and test.result.condemns:
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
    [(1.0, 60, 70), (0.5, 190, 260), (0.25, 700, 1000)],
    ids=["all", "half", "quarter"],
)
def test_who_drops_low_rewards_is_condemned_soon(share, median, nine_of_ten):
    rng = np.random.default_rng(3)
    x = advantages(rng, 60, 1200)
    lost = (x < 0) & (rng.random(x.shape) < share)
    found = sorted(leases_until(*one) for one in zip(x, lost, strict=True))
    assert found[30] <= median and found[54] <= nine_of_ten


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


outcomes = st.lists(
    st.builds(LeaseOutcome, st.booleans(), st.sampled_from([-0.5, -0.1, 0.0, 0.2, 0.7])), max_size=2 * BLOCK + 5
)


@settings(max_examples=200, deadline=None)
@given(outcomes)
def test_property_counts_add_up_and_leases_at_the_mean_say_nothing(found):
    result = drop_result(found)
    assert (result.lost, result.returned) == (sum(o.lost for o in found), sum(not o.lost for o in found))
    assert math.isfinite(result.log_e)
    telling = [one for one in found if one.x]
    neutral = [one for one in found if not one.x]
    both = {one.lost for one in telling}
    if both == {True, False} and result.lost_mean < result.returned_mean:
        again = drop_result([*neutral, *telling])
        assert again.log_e == pytest.approx(result.log_e)
    assert not result.condemns or (result.log_e >= DROP_LOG_E and result.lost_mean < result.returned_mean)


def exact(counts, blocks=1):
    """The e-value of one block written out with probabilities instead of logarithms."""
    top = 1.0
    for lost, returned in counts:
        top *= math.gamma(lost + 0.5) * math.gamma(returned + 0.5) / math.pi / math.factorial(lost + returned)
    lost, returned = (sum(cell[i] for cell in counts) for i in (0, 1))
    n = lost + returned
    bottom = (lost / n) ** lost * (returned / n) ** returned
    return math.log(0.5 * top / bottom + 0.5)


def test_the_number_is_the_formula():
    found = [LeaseOutcome(True, -0.2)] * 9 + [LeaseOutcome(False, -0.1)] * 2 + [LeaseOutcome(False, 0.3)] * 12
    assert drop_result(found).log_e == pytest.approx(exact([(9, 2), (0, 12)]))


def test_an_e_value_is_one_on_average_for_honest_keys():
    """What the guarantee rests on: the mean over honest labels, not just the absence of alarms, is at most one."""
    rng = np.random.default_rng(6)
    total = 0.0
    for _ in range(4000):
        test = DropTest()
        for below in rng.random(30) < 0.6:
            test.add(LeaseOutcome(bool(rng.random() < 0.3), -0.2 if below else 0.1))
        total += math.exp(test.result.log_e) if test.result.log_e else 0.0
    assert total / 4000 < 1.1


# --- from the ledger ------------------------------------------------------------------------------------------------


def run_of(lost_of, away=False):
    """ann loses the leases that `lost_of` says, bob does them again; cat's rollouts are the others' mean.

    Args:
        away: the coordinator is away while each of them is open.
    """
    chain = Chain(make_manifest(leases=replace(make_manifest().leases, probation_accepted=1)))
    chain.open()
    for who in ("ann", "bob", "cat"):
        chain.join(who, "inference")
    chain.join("val", "validator")
    chain.policy(0)
    chain.ready("val")
    rewards = {}

    def done(who, reward, **more):
        lease_id = chain.lease(who, **more)
        number = chain.submit(lease_id)
        chain.verdict(chain.job(number, "val"), chain.digest_of(lease_id), "val", [ACCEPT] * 4)
        rewards[number] = reward
        return number

    for who in ("ann", "bob", "cat"):
        done(who, 0.5)
    for i in range(30):
        reward = (0.1, 0.9)[i % 2]
        lease_id = chain.lease("ann")
        if lost_of(reward, i):
            if away:
                chain.append("incarnation")
            chain.close_lease(lease_id, "failed: out of memory" if i % 4 else "expired")
            done("bob", reward, nonce=chain.leases[lease_id].nonce, tasks=chain.leases[lease_id].tasks)
        else:
            number = chain.submit(lease_id)
            chain.verdict(chain.job(number, "val"), chain.digest_of(lease_id), "val", [ACCEPT] * 4)
            rewards[number] = reward
    return chain, lambda number, rollout: rewards[number]


def test_what_a_ledger_shows_condemns_the_one_who_drops():
    chain, reward = run_of(lambda value, i: value < 0.5)
    state = fold(chain.sink.entries)
    assert state.problems == []
    ann, bob = (identity(who).public for who in ("ann", "bob"))
    found = drop_evidence(state, ann, reward, state.size)
    assert (found.lost, found.returned) == (15, 15) and found.lost_mean < 0 < found.returned_mean
    assert found.log_e > 12 and drop_evidence(state, bob, reward, state.size).log_e == 0.0
    # the same number from a later state, and from the ledger only as far as it was
    cut = fold(chain.sink.entries[: len(chain.sink.entries) // 2])
    assert drop_evidence(cut, ann, reward, cut.size) == drop_evidence(state, ann, reward, cut.size)
    assert cut.size < state.size and drop_evidence(cut, ann, reward, cut.size).log_e < found.log_e


def test_a_lease_is_held_against_its_own_step_and_the_four_before():
    chain = Chain(make_manifest(leases=replace(make_manifest().leases, probation_accepted=1, max_staleness=100)))
    chain.open()
    for who in ("ann", "bob"):
        chain.join(who, "inference")
    chain.join("val", "validator")
    rewards = {}

    def done(who, step, reward):
        lease_id = chain.lease(who, step=step, root=bytes([step]) * 32)
        number = chain.submit(lease_id)
        chain.verdict(chain.job(number, "val"), chain.digest_of(lease_id), "val", [ACCEPT] * 4)
        rewards[number] = reward

    for step in range(7):
        chain.policy(step, bytes([step]) * 32)
        done("bob", step, step / 10)
    done("ann", 5, 0.9)
    done("bob", 5, 0.0)  # decided after ann's: her x stays what it was
    state = fold(chain.sink.entries)
    assert state.problems == []
    (found,) = lease_outcomes(state, identity("ann").public, lambda number, rollout: rewards[number], state.size)
    assert found.x == pytest.approx(0.9 - (0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5)


def test_losses_that_are_nobodys_choice_are_left_out():
    chain, reward = run_of(lambda value, i: value < 0.5)
    entries = [
        replace(e, body=e.body.replace(b"expired", b"ownersx").replace(b"failed:", b"closed:"))
        for e in chain.sink.entries
    ]
    ann = identity("ann").public
    assert {o.lost for o in lease_outcomes(fold(entries), ann, reward, len(entries))} == {False}
    chain, reward = run_of(lambda value, i: value < 0.5, away=True)
    state = fold(chain.sink.entries)
    assert state.problems == [] and len(state.restarts) == 15
    assert {o.lost for o in lease_outcomes(state, ann, reward, state.size)} == {False}
