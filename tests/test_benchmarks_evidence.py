"""The simulation of `benchmarks.evidence`, scaled down: its goals hold, and its arrays are the sums a run makes."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks import evidence
from protocol.evidence_rows import check_rows
from verifier.evidence import Cusum


@pytest.fixture(scope="module")
def kinds():
    return evidence.read_pool(evidence.POOL)


def test_no_honest_node_day_of_thousands_is_banned_and_dishonest_ones_take_what_theory_says(monkeypatch):
    monkeypatch.setitem(evidence.SEEN_BY, ("seed-choice", "not_first_rate"), [])  # 40,000 rollouts of each node
    args = argparse.Namespace(days=2000, rollouts=100, nodes=60, seed=1, pool=evidence.POOL)
    goals = evidence.measure(args)
    assert len(goals) > 16 and [goal.goal for goal in goals if not goal.holds] == []


def test_the_rows_of_the_pool_are_ones_a_manifest_may_have(kinds):
    rows = evidence.rows_of(kinds)
    check_rows(rows[:1], "fp32", {})
    check_rows(rows[1:], "bf16", {})
    assert {row.hypothesis for row in rows} >= {"precision", "seed-choice", "margin-steer"}
    assert set(evidence.SEEN_BY) >= {(row.hypothesis, row.statistic) for row in rows}


def test_the_simulated_sums_are_those_of_the_run(kinds):
    (row,) = [row for row in evidence.rows_of(kinds) if row.statistic == "mantissa_mean"]
    x = [one for lease in kinds["bf16 fp8"]["mantissa_mean"] for one in lease][:60]
    cusum = Cusum(row)
    seen = []
    for one in x:
        cusum.add(b"v", [one])
        seen.append(cusum.log_all)
    logs = iter([np.full(3, log) for log in evidence.log_factors(row, x)])
    assert evidence.highest(logs, 3, len(x)) == pytest.approx(np.full(3, max(seen)))


def test_what_suspends_in_the_simulation_is_what_suspends_in_a_run(kinds):
    (row,) = [row for row in evidence.rows_of(kinds) if row.statistic == "mantissa_mean"]
    leases = kinds["bf16 fp8"]["mantissa_mean"]
    flat = [one for lease in leases for one in lease][: 40 * evidence.TASK]
    for says in (None, 0.0):
        rng = np.random.default_rng(3)
        numbers = iter([np.array([log]) for log in evidence.log_factors(row, flat)])
        _, taken = evidence.until(rng, row, numbers, 1, len(flat), liar_says=says)
        again, cusum, found = np.random.default_rng(3), Cusum(row), evidence.MOST_ROLLOUTS
        for who in range(1, 4):  # the simulation knows all three from the start
            cusum.validators.append(bytes([who]))
        cusum._logs_VV = np.zeros((4, 4))
        for task in range(40):
            (who,) = again.integers(1, 4, size=1)
            for n in range(task * evidence.TASK, (task + 1) * evidence.TASK):
                cusum.add(bytes([who]), [flat[n] if says is None or who != 1 else says])
                if cusum.condemns:
                    found = min(found, n + 1)
        assert taken[0] == found


def test_half_the_bar_bans_in_half_the_rollouts(kinds):
    (row,) = [row for row in evidence.rows_of(kinds) if row.statistic == "proof_median"]
    leases = kinds["fp32 drift"]["proof_median"]
    rng = np.random.default_rng(2)
    lower = evidence.replace(row, log_bar=row.log_bar / 2)
    whole, half = (evidence.rollouts_to_ban(rng, one, leases, 100) for one in (row, lower))
    assert half.believed.mean() == pytest.approx(whole.believed.mean() / 2, rel=0.15)
    for field, expected in whole.theory(row).items():
        assert getattr(whole, field).mean() == pytest.approx(expected, rel=0.3)
    assert evidence.rollouts_to_ban(rng, row, kinds["fp32 honest"]["proof_median"], 10).growth < 0
