"""Every row that a run is opened with gets its numbers from the checks: a row nobody feeds protects nobody."""

from __future__ import annotations

import dataclasses

import pytest

from environments.registry import make
from protocol.records import ACCEPT
from tests.judge_rig import TINY, make_rig
from trainer.init import load_bf16_thresholds, load_thresholds
from verifier.evidence_rows import rows_of_run
from verifier.profiles import load_to_sample, load_to_verify
from verifier.statistics import measured, values


@pytest.mark.parametrize(("profile", "preset"), [("bf16", "tiny"), ("bf16", "smollm2"), ("fp32", "smollm2")])
def test_every_row_of_a_run_is_fed_by_what_validators_measure(profile: str, preset: str) -> None:
    """By the tiny model's verdicts; what a preset's rows are called is what counts here."""
    bf16 = load_bf16_thresholds(preset) if profile == "bf16" else None
    rig = make_rig(
        load_to_verify(TINY, profile), make("word"), 4, 4, 9, (1,), bf16=bf16 and load_bf16_thresholds("tiny"),
        generator=load_to_sample(TINY, profile).model if bf16 else None,
    )  # fmt: skip
    judged = rig.judge(rig.honest)
    assert {outcome.outcome for outcome in judged.outcomes} == {ACCEPT}
    details = judged.verdict_details()
    halves = (dataclasses.replace(one, reward=float(i % 2)) for i, one in enumerate(details.rollouts))
    rollouts = measured(dataclasses.replace(details, rollouts=tuple(halves)), judged.outcomes, 4)
    rows = rows_of_run(profile, load_thresholds(preset), preset, True, bf16)
    assert rows and [row.statistic for row in rows if not values(row.statistic, rollouts)] == []
