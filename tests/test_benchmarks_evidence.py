"""The simulation of `benchmarks.evidence`, scaled down: its goals hold, and its arrays are the sums a run makes."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest

from benchmarks import evidence
from protocol.manifest import check_evidence
from verifier.evidence import Cusum


@pytest.fixture(scope="module")
def kinds():
    return evidence.read_pool(evidence.POOL)


def test_no_honest_node_day_of_thousands_is_banned_and_dishonest_ones_take_what_theory_says():
    args = argparse.Namespace(days=4000, rollouts=120, nodes=150, seed=1, pool=evidence.POOL)
    goals = evidence.measure(args)
    assert len(goals) > 20 and [goal.goal for goal in goals if not goal.holds] == []


def test_the_rows_of_the_pool_are_ones_a_manifest_may_have(kinds):
    rows = evidence.rows_of(kinds)
    check_evidence(tuple(rows))
    assert {row.hypothesis for row in rows} == {"precision", "seed-choice", "margin-steer", "stale", "reward"}
    assert set(evidence.SEEN_BY) == {(row.hypothesis, row.statistic) for row in rows}


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


def test_half_the_bar_bans_in_half_the_rollouts(kinds):
    (row,) = [row for row in evidence.rows_of(kinds) if row.statistic == "proof_median"]
    leases = kinds["fp32 drift"]["proof_median"]
    rng = np.random.default_rng(2)
    whole = evidence.rollouts_to_ban(rng, row, leases, 100)
    half = evidence.rollouts_to_ban(rng, evidence.replace(row, log_bar=row.log_bar / 2), leases, 100)
    assert half.theory == whole.theory / 2 and half.believed.mean() == pytest.approx(
        whole.believed.mean() / 2, rel=0.15
    )
    assert math.isinf(evidence.rollouts_to_ban(rng, row, kinds["fp32 honest"]["proof_median"], 10).theory)
