"""The coordinator checks validators: who accepts what is false is found, who is honest is never accused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import distrust, draws
from protocol.errors import ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.records import ACCEPT, REJECT, Rollout
from tests.checked_run import CheckedRun
from verifier.audit import Options, audit


@pytest.mark.parametrize("how", ["reward", "tokens"])
async def test_a_validator_that_accepts_everything_is_found_and_nothing_more_of_what_it_let_in_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of n false groups that only it judged none is drawn with chance (1 - q)^n. Of 24 each is its own with chance 1/2,
    so at q = 0.9 it is still there after them with chance 0.55^24, 6e-7."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.9)
    run = await CheckedRun.make(tmp_path, liars={"validator-1"})
    liar = run.state.nodes[run.join("validator-1", "validator")]
    while liar.state != "suspended":
        await run.step(["ann", "bob"], ["mal"], how)
        assert sum(run.false.values()) <= 4 * 24, "half of them went to the liar"
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


async def test_what_it_let_in_and_no_batch_took_is_judged_again_by_somebody_else_and_what_was_trained_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.0)
    run = await CheckedRun.make(tmp_path, validators=3, liars={"validator-1", "validator-2"})
    run.here("validator-0", present=False)
    await run.step(["ann"], ["mal"])  # nothing is drawn: one batch of it is trained
    false, honest = [run.work(name, how) for name, how in (("mal", "reward"), ("ann", "honest"))]
    run.here("validator-2", present=False)
    run.here("validator-0")
    await run.judge_all(honest)
    waiting = run.work("bob")
    assert run.state.nodes[run.open_jobs(waiting)[0].validator].name in ("validator-0", "validator-1")
    for index in (false, honest):
        await run.judge_all(index)
        assert {one.status for one in run.state.submissions[index].outcomes} <= {"accepted", "inconclusive"}
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    trained = run.trained_of("mal")
    for submission in run.state.submissions.values():
        run.judging.checks.note(submission)
    await run.check()
    suspended = {node.name for node in run.state.nodes.values() if node.reason == ReasonCode.VALIDATOR_WRONG}
    assert suspended and suspended <= run.liars
    run.here("validator-0")
    run.tick()
    for index in list(run.book.window.unjudged):
        await run.judge_all(index)
    void = {number for one in run.state.submissions.values() for number in one.void}
    assert void and run.state.problems == []
    assert all(one.status != "accepted" for one in run.state.submissions[false].outcomes)
    assert {one.status for one in run.state.submissions[honest].outcomes} == {"accepted"}
    late = distrust.unverified(run.state.submissions, run.state.trained)
    said = [int(number) for number in re.findall(r"(\d+) rollouts of that were already trained", run.news())]
    assert sum(said) == late >= trained > 0
    before = run.judging.checks.counts()
    run.close()
    run.open()
    assert run.judging.checks.counts()["contradicted"] == before["contradicted"] == len(suspended)
    run.close()


async def test_honest_validators_are_never_accused_whatever_restarts_and_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every accepted rollout is drawn. The coordinator starts anew, once without its counts, and weights are gone."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path, validators=3, leases__tasks_per_step=2)
    made, gone = 0, run.run_dir.parent / "gone"
    for number in range(6):
        await run.step(["ann"], ["mal"] if number == 2 else [], checked=number in (0, 2))
        if number in (1, 3):
            made += run.judging.checks.checked
            run.close()
            if number == 3:
                (run.run_dir / "state" / "checks.json").unlink()
            run.open()
            assert run.judging.checks.waiting, "what was not checked yet, or what may still be trained"
            for i in range(3):
                run.here(f"validator-{i}")
    gone.mkdir()
    for folder in sorted((run.run_dir / "published").glob("e0000-*"))[:-1]:
        folder.rename(gone / folder.name)
    await run.check()
    counts = run.judging.checks.counts()
    assert counts["contradicted"] == counts["waiting"] == 0
    assert made + counts["checked"] > 16 and counts["left_out"] > 0, "checked what could be had, counted the rest"
    assert "evidence.verdict" not in run.events() and run.state.problems == []
    assert all(node.state != "suspended" for node in run.state.nodes.values() if node.role == "validator")
    run.close()


async def test_a_false_accusation_is_named_by_the_audit_and_a_true_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.0)
    run = await CheckedRun.make(tmp_path)
    await run.step(["ann", "bob"])
    accused = next(state for one in run.state.submissions.values() for state in one.verdicts.values())
    run.book.append("evidence.verdict", VerdictEvidence(accused.index, 1, REJECT, "proof-mismatch", 0.0, 0.0))
    false = run.work("mal", "tokens")
    await run.judge(false)  # by the one that is left
    (said,) = run.state.submissions[false].verdicts.values()
    run.book.append("evidence.verdict", VerdictEvidence(said.index, 0, REJECT, "proof-mismatch", 0.0, 0.0))
    await run.seal()
    failures = audit(run.run_dir, Options()).failures
    assert [one.reason for one in failures if one.reason != ReasonCode.VERDICT_WRONG] == [ReasonCode.ACCUSATION_FALSE]
    (named,) = [one for one in failures if one.reason == ReasonCode.ACCUSATION_FALSE]
    assert "the verdict is right" in named.message and named.record.startswith("ledger/")
    run.close()


@pytest.mark.parametrize(("times", "accused"), [(1.5, False), (3.0, True)])
async def test_only_what_no_honest_machine_could_have_found_is_held_against_a_validator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, accused: bool
) -> None:
    """A node claims log-probabilities that are off by a little more than the bound: honest noise of two machines may be
    as much, three times as much may not."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path, liars={"validator-0", "validator-1"})
    bound = run.book.run.manifest.thresholds.logprob

    def shifted(rollout: Rollout) -> Rollout:
        claimed = np.frombuffer(rollout.logprobs, "<f4") - np.float32(times * bound)
        return dataclasses.replace(rollout, logprobs=claimed.astype("<f4").tobytes())

    index = run.work("mal", shifted)
    await run.judge_all(index)
    await run.check()
    assert ("evidence.verdict" in run.events()) is accused
    assert [request.confirm for request in run.process.asked] == [False, True], "found, then looked at once more"
    assert ("Nobody is accused" in run.news()) is not accused
    run.close()


async def test_a_validator_that_hands_other_numbers_to_the_learner_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node and validator shift their log-probabilities together, each within what the other may be off."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path, liars={"validator-0", "validator-1"})
    bound = run.book.run.manifest.thresholds.logprob
    shift = lambda raw: (np.frombuffer(raw, "<f4") - np.float32(0.8 * bound)).astype("<f4").tobytes()  # noqa: E731
    index = run.work("mal", lambda one: dataclasses.replace(one, logprobs=shift(one.logprobs)))
    await run.judge(index, spoil=lambda detail: dataclasses.replace(detail, logprobs=shift(detail.logprobs)))
    assert {one.status for one in run.state.submissions[index].outcomes} == {"accepted"}
    await run.check()
    (said,) = run.accusations()
    assert (said.outcome, said.reason) == (ACCEPT, "verdict-wrong") and bound < said.difference < 2 * bound
    run.close()


async def test_a_machine_that_falls_behind_leaves_checks_out_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    monkeypatch.setattr("trainer.spot_checks.MAX_WAITING", 2)
    run = await CheckedRun.make(tmp_path)
    made = [run.work(name) for name in ("ann", "bob", "cat", "dan")]
    for index in made:
        await run.judge_all(index)
    drawn = {index: len(run.state.submissions[index].outcomes) for index in made}
    counts = run.judging.checks.counts()
    assert list(run.judging.checks.waiting) == made[2:], "the newest can still be kept out of a batch"
    assert counts["left_out"] == drawn[made[0]] + drawn[made[1]] and counts["waiting"] == sum(
        drawn[index] for index in made[2:]
    )
    await run.check()
    assert run.judging.checks.counts() == {**counts, "checked": counts["waiting"], "waiting": 0}
    assert run.coordinator.status.picture("running")["validators_checked"]["left_out"] == counts["left_out"]
    run.close()


async def test_a_contradiction_that_a_fresh_process_does_not_find_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit falls over in the weights of the first one."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path)
    await run.judge_all(run.work("ann"))
    await run.check()
    policy = run.process._checker._policy
    with torch.no_grad():
        next(policy.model.parameters()).mul_(1.5)
    index = run.work("ann")
    await run.judge_all(index)
    await run.check()
    assert [request.confirm for request in run.process.asked] == [False, False, True]
    assert "evidence.verdict" not in run.events() and "test the memory" in run.news()
    run.close()
