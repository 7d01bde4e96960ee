"""The coordinator checks validators: who accepts what is false is found, who is honest is never accused."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import draws
from protocol.errors import ReasonCode
from tests.checked_run import CheckedRun
from verifier.audit import Options, audit


@pytest.mark.parametrize("how", ["reward", "tokens"])
async def test_a_validator_that_accepts_everything_is_found_and_nothing_more_of_what_it_let_in_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of n false rollouts that only it judged none is drawn with chance (1 - q)^n: at a quarter and 64, 1e-8."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.25)
    run = await CheckedRun.make(tmp_path, liars={"validator-1"})
    liar = run.state.nodes[run.join("validator-1", "validator")]
    while liar.state != "suspended":
        await run.step(["ann", "bob"], ["mal"], how)
        assert sum(run.false.values()) < 200, "half of them went to the liar"
    assert liar.reason == ReasonCode.VALIDATOR_WRONG and liar.key not in run.state.present
    assert "validator-1 is suspended" in run.news()
    trained = run.trained_of("mal")
    for _ in range(4):
        await run.step(["ann", "bob"], ["mal"], how)
    assert run.trained_of("mal") == trained, "one honest validator is left, and nothing false passes it"
    assert run.state.problems == []
    await run.seal()
    report = audit(run.run_dir, Options())
    assert {failure.reason for failure in report.failures} <= {ReasonCode.VERDICT_WRONG}
    run.close()
