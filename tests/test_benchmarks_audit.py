"""`benchmarks.audit` and `benchmarks.verification` measure what they say, in small."""

from argparse import Namespace

import pytest

from benchmarks import audit, verification
from tests.archive_builder import build_archive


def test_verification_is_measured_on_rollouts_that_hold():
    goals = verification.measure(Namespace(quick=True, tokens=24, profiles="fp32,bf16", batches="16,1"))
    assert [goal.target for goal in goals] == [1 / 2.5, 1 / 12, 1 / 4, 1 / 20]
    for goal in goals:
        *verifying, generating, engine = goal.samples
        assert goal.measured > 0 and min(*verifying, generating, engine) > 0
    assert {len(goal.samples) for goal in goals} == {3, 5}


@pytest.mark.heavy
def test_an_archive_is_audited_with_one_process_and_several(tmp_path):
    run = build_archive(tmp_path / "run", steps=1).root
    goals = audit.measure(Namespace(run=run, steps=0, share=1.0, quick=True))
    assert all(goal.holds for goal in goals[3:]) and goals[0].samples[0] > 0
