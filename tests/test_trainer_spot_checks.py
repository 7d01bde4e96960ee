"""The coordinator checks validators: who accepts what is false is found, who is honest is never accused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import distrust, draws
from protocol.errors import DecodeError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.evidence_rows import EvidenceRow
from protocol.identity import peer_id_text
from protocol.records import ACCEPT, REJECT, Number, Rollout, RolloutDetail
from tests.checked_run import CheckedRun
from trainer.spot_request import Answer, Request, answer_s
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
    run.here("validator-2", present=False)  # it may have been heard again, with a verdict
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


ROW = EvidenceRow("precision", "proof_median", 1e-3, 5e-5, 0.5, 14.0, 200, 2e-7, 2)
"""Of the bound that these runs reject by, 1e-4."""


def bent(name: str, by: float) -> Callable[[RolloutDetail], RolloutDetail]:
    """The same details with more in one number."""

    def bend(detail: RolloutDetail) -> RolloutDetail:
        numbers = tuple(Number(one.name, one.value + by if one.name == name else one.value) for one in detail.numbers)
        return dataclasses.replace(detail, numbers=numbers)

    return bend


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_two_validators_of_three_that_frame_a_node_with_numbers_are_named_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """They judge as they should, and add to one number what condemns its owner. Without a check an audit names each of
    their verdicts and nobody else's; a check of the coordinator's ends trust in them, and the node is left alone."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", share)
    run = await CheckedRun.make(tmp_path, validators=3, evidence=(ROW,))
    lying = {"validator-0", "validator-1"}
    run.bends = dict.fromkeys(lying, bent("proof_median", 9e-4))
    indices = []
    for _ in range(6):
        index = run.work("ann")
        await run.judge_all(index)
        await run.check()
        for waiting in list(run.book.window.unjudged):
            await run.judge_all(waiting)  # what the liars alone let in
        indices.append(index)
    name_of = lambda key: run.state.nodes[key].name  # noqa: E731
    said = {
        state.index: name_of(state.validator) for i in indices for state in run.state.submissions[i].verdicts.values()
    }
    suspended = {node.name for node in run.state.nodes.values() if node.reason == ReasonCode.VALIDATOR_WRONG}
    if share:
        assert suspended == lying & set(said.values()) and suspended
        assert {one.number for one in run.accusations()} == {"proof_median"}
        assert "handed over other numbers: proof_median is off by 0.0009" in run.news()
    else:
        assert suspended == set()
    await run.seal()
    report = audit(run.run_dir, Options())
    named = {failure.record for failure in report.failures}
    assert {one.reason for one in report.failures} == {ReasonCode.VERDICT_WRONG}
    assert named == {f"verdict/{index}" for index, name in said.items() if name in lying} != set()
    assert all("details give proof_median" in failure.message for failure in report.failures)
    assert report.checks_silent == 0
    run.close()


async def test_a_lie_that_chance_allows_in_one_verdict_is_seen_over_all_of_a_validators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.5 times what one honest machine's noise may add, to each rollout: a group shows it from ten texts on."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.0)
    run = await CheckedRun.make(tmp_path, validators=2, evidence=(ROW,), leases__tasks_per_step=60)
    run.bends = {"validator-0": bent("proof_median", 3e-5)}
    for _ in range(8):
        for name in ("ann", "bob"):
            await run.judge_all(run.work(name))
    await run.seal()
    (failure,) = audit(run.run_dir, Options()).failures
    liar = next(node.key for node in run.state.nodes.values() if node.name == "validator-0")
    assert failure.reason == ReasonCode.VERDICT_WRONG and peer_id_text(liar) in failure.message
    assert "in proof_median" in failure.message and "no one of them shows it" in failure.message
    again = audit(run.run_dir, Options(jobs=1))
    assert again.failures == [failure]
    run.close()


async def test_an_acceptance_that_leaves_out_what_the_run_sums_up_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would shield the node. Nothing of it is trained; another validator is drawn."""
    run = await CheckedRun.make(tmp_path, evidence=(ROW,))
    index = run.work("ann")
    for numbers in ((), (Number("proof_median", 1e-7), Number("proof_median", 1e-7)), (Number("token_margin", 0.0),)):
        with pytest.raises(DecodeError, match="without naming proof_median") as refused:
            await run.judge(index, spoil=lambda one, numbers=numbers: dataclasses.replace(one, numbers=numbers))
        assert refused.value.code == ReasonCode.VERDICT_WRONG
    assert run.state.submissions[index].verdicts == {} and "verdict" not in run.events()
    await run.judge_all(index)
    assert {one.status for one in run.state.submissions[index].outcomes} == {"accepted"}
    run.close()


async def test_a_validator_that_rejects_honest_work_is_found_and_the_audit_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path, validators=3)
    run.refusing = {"validator-1"}
    made = 0
    while not run.accusations():
        await run.judge_all(run.work("ann"))
        await run.check()
        made += 1
        assert made <= 40, "a third of them went to it"
    (said,) = run.accusations()
    assert (said.outcome, said.reason) == (ACCEPT, "holds")
    suspended = {node.name for node in run.state.nodes.values() if node.state == "suspended"}
    assert suspended == {"validator-1"} and "it holds, also under narrower bounds" in run.news()
    await run.seal()
    report = audit(run.run_dir, Options())
    assert {failure.reason for failure in report.failures} == {ReasonCode.VERDICT_WRONG}
    assert f"verdict/{said.verdict}" in {failure.record for failure in report.failures}
    run.close()


async def test_checks_of_rejections_wait_for_all_others_and_take_a_tenth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends garbage makes them."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    monkeypatch.setattr("trainer.spot_checks.MAX_REJECTIONS", 3)
    run = await CheckedRun.make(tmp_path, validators=3)
    checks, now = run.judging.checks, [100.0]
    checks.monotonic = lambda: now[0]
    ask = run.process.ask

    async def slow(request: Request) -> Answer:
        now[0] += 2.0
        return await ask(request)

    run.process.ask = slow
    bad = []
    for name in ("mal", "mac", "max", "meg"):
        bad.append(run.work(name, "tokens"))
        await run.judge_all(bad[-1])
    good = run.work("ann")
    await run.judge_all(good)
    assert list(checks.rejections) == bad[1:] and checks.counts()["left_out"] > 0
    digests = lambda: [run.state.submissions[i].intent.digest for i in (good, *bad)]  # noqa: E731
    await run.check()
    assert [request.digest for request in run.process.asked] == digests()[:1] + digests()[2:3], "one, and then a pause"
    now[0] += 17.0
    assert not await checks.turn()
    now[0] += 1.5
    assert await checks.turn() and not await checks.turn()
    assert "evidence.verdict" not in run.events(), "who rejects garbage is right"
    run.close()


async def late_confirmations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> tuple[CheckedRun, list[float], list[Request]]:
    """A run in which a lie was seen once; so many confirmations come to nothing."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path, liars={"validator-0", "validator-1"})
    now, late, left = [0.0], [], [answers]

    def install() -> None:
        run.judging.checks.monotonic = lambda: now[0]
        ask = run.process.ask

        async def busy(request: Request) -> Answer:
            if request.confirm and left[0]:
                left[0] -= 1
                late.append(request)
                return Answer(failed="the checking process ended or was late: TimeoutError")
            return await ask(request)

        run.process.ask = busy

    reopen = run.open
    run.open = lambda: (reopen(), install())
    install()
    await run.judge_all(run.work("mal", "reward"))
    await run.check()
    return run, now, late


async def test_a_lie_whose_confirmation_is_late_is_tried_again_with_more_time_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, late = await late_confirmations(tmp_path, monkeypatch, answers=3)
    counts = run.judging.checks.counts()
    assert len(late) == 1 and counts["unconfirmed"] == 2 and counts["left_out"] == counts["waiting"] == 0
    assert "evidence.verdict" not in run.events() and run.news().count("could not be made a second time yet") == 1
    assert not await run.judging.checks.turn(), "not at once"
    now[0] += 31.0
    await run.check()
    run.close()
    run.open()
    assert run.judging.checks.counts()["unconfirmed"] == 2, "kept over a restart"
    await run.check()
    assert [request.deadline_s for request in late] == [300.0, 600.0, 1200.0]
    now[0] += 3600.0
    await run.check()
    assert [one.reason for one in run.accusations()] == ["reward-mismatch"]
    counts = run.judging.checks.counts()
    assert counts["unconfirmed"] == counts["left_out"] == 0 and counts["contradicted"] == 1
    run.close()


async def test_a_lie_that_can_never_be_confirmed_is_given_up_at_last_said_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, late = await late_confirmations(tmp_path, monkeypatch, answers=1000)
    for _ in range(100):
        now[0] += 4000.0
        await run.check()
    assert len(late) == 8 and late[-1].deadline_s == 7200.0
    counts = run.judging.checks.counts()
    assert counts["unconfirmed"] == 2 and counts["left_out"] == 0 and not run.judging.checks.suspects
    assert "is given up" in run.news() and run.accusations() == []
    run.close()
    run.open()
    assert run.judging.checks.counts()["unconfirmed"] == 2
    run.close()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"checked": 1, "left_out": 0, "since": 0, "suspects": 7}',
        '{"checked": 1, "left_out": 0, "since": 0, "suspects": [{"submission": 999, "tries": 0, "drawn": [[1, 0]]}]}',
        '{"checked": 1, "left_out": 0, "since": 0, "suspects": [{"submission": 9, "tries": 1e999, "drawn": []}]}',
        "[" * 50_000,
    ],
    ids=lambda text: text[:60],
)
async def test_a_file_of_counts_that_is_none_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path)
    index = run.work("ann")
    await run.judge_all(index)
    run.close()
    (run.run_dir / "state" / "checks.json").write_text(text)
    run.open()
    checks = run.judging.checks
    assert list(checks.waiting) == [index] and not checks.suspects and checks.checked == 0
    run.close()


def test_a_deadline_grows_with_the_tokens_and_with_each_time_it_was_missed() -> None:
    assert answer_s(10) == 300.0 and answer_s(10_000) == 500.0 and answer_s(10**9) == 7200.0
    assert [answer_s(10, tries) for tries in (0, 1, 3, 99)] == [300.0, 600.0, 2400.0, 7200.0]


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
