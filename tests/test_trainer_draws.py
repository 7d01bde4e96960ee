"""Draws with commit and reveal, rounds, and what a coordinator killed between any two entries does next."""

from __future__ import annotations

import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import decision, draws
from protocol.control import Member
from protocol.envelope import parse
from protocol.errors import DecodeError, ReasonCode
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, JobRequest
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer.picture import Picture
from trainer.roster import rows
from trainer.show import as_object


def desk_with(tmp_path: Path, validators: int = 2, **overrides: object) -> Desk:
    desk = Desk(tmp_path / "run", validators=validators, **{"leases__tasks_per_step": 400, **overrides})
    for i in range(validators):
        desk.join(f"validator-{i}", "validator")
    desk.publish(0)
    return desk


async def test_every_draw_follows_from_secrets_committed_before_and_revealed_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 3)
    desk = desk_with(tmp_path, leases__second_draw=0.3, leases__probation_accepted=2)
    for _ in range(8):
        index = desk.upload(desk.lease("node"))
        while desk.open_jobs(index):
            await desk.judge(index)
        desk.tick()
    events = desk.events()
    assert events.index("draws.opened") < events.index("submission")
    assert events.count("draws.opened") == 3 and events.count("draws.revealed") == 2
    desk.judging.drawing.reveal_all()
    assert events.count("job") > 8, "some were drawn twice, by rate"
    assert desk.state.problems == [] and await desk.audit_draws() == []
    desk.close()


async def test_a_period_is_not_revealed_and_no_third_opened_while_one_of_its_jobs_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 1)
    desk = desk_with(tmp_path)
    first = desk.upload(desk.lease("a"))
    second = desk.upload(desk.lease("b"))
    third = desk.upload(desk.lease("c"))
    assert [desk.state.submissions[i].period for i in (first, second, third)] == [0, 1, 1]
    await desk.judge(second)
    await desk.judge(third)
    desk.tick()
    assert "draws.revealed" not in desk.events()
    await desk.judge(first)
    desk.tick()
    assert desk.events()[-2:] == ["draws.revealed", "draws.opened"]
    assert desk.state.periods[0].secret is not None and desk.state.periods[1].secret is None
    desk.close()


async def test_a_verdict_that_decides_nothing_is_followed_by_another_validator_in_its_own_transaction(
    tmp_path: Path,
) -> None:
    desk = desk_with(tmp_path)
    index = desk.upload(desk.lease("node"))
    first = await desk.judge(index, INCONCLUSIVE)
    assert desk.events()[-2:] == ["verdict", "job"]
    second = await desk.judge(index, INCONCLUSIVE)
    third = await desk.judge(index, ACCEPT)
    assert first.validator != second.validator and third.round == 3
    assert {outcome.status for outcome in desk.state.submissions[index].outcomes} == {"accepted"}
    assert desk.open_jobs(index) == []
    desk.close()


async def test_one_validator_alone_condemns_nobody_and_the_operator_is_told_what_is_missing(tmp_path: Path) -> None:
    desk = desk_with(tmp_path)
    desk.here("validator-1", present=False)
    index = desk.upload(desk.lease("node"))
    await desk.judge(index, REJECT)
    desk.tick()
    assert desk.open_jobs(index) == [] and desk.state.nodes[actor_identity("node").public].state == "paused"
    assert "needs a second one to repeat it" in desk.news()
    said = len(desk.coordinator.news.events)
    desk.tick()
    assert len(desk.coordinator.news.events) == said, "once"
    desk.here("validator-1")
    desk.tick()
    assert [job.round for job in desk.open_jobs(index)] == [2]
    await desk.judge(index, REJECT)
    assert desk.state.nodes[actor_identity("node").public].state == "suspended"
    desk.close()


@pytest.mark.parametrize(
    ("third", "decided", "standing"), [(REJECT, "rejected", "suspended"), (ACCEPT, "accepted", "active")]
)
async def test_a_third_validator_settles_what_two_contradict_each_other_about(
    tmp_path: Path, third: int, decided: str, standing: str
) -> None:
    desk = desk_with(tmp_path, validators=3, leases__probation_accepted=2)
    index = desk.upload(desk.lease("node"))
    one = await desk.judge(index, REJECT)
    assert desk.state.nodes[actor_identity("node").public].state == "paused"
    two = await desk.judge(index, ACCEPT)
    assert desk.state.nodes[actor_identity("node").public].state == "probation", "one word against one holds up nobody"
    assert desk.events()[-2:] == ["verdict", "job"], "drawn in the transaction of the verdict that made it necessary"
    three = await desk.judge(index, third)
    assert len({one.validator, two.validator, three.validator}) == 3
    assert {outcome.status for outcome in desk.state.submissions[index].outcomes} == {decided}
    assert desk.state.nodes[actor_identity("node").public].state == standing
    wrong = two if third == REJECT else one
    count = len(desk.state.submissions[index].outcomes)
    shown = {
        one["key"]: one["outvoted"] for one in as_object(picture_of(desk))["processes"] if one["role"] == "validator"
    }
    assert shown == {job.validator.hex(): count * (job is wrong) for job in (one, two, three)}
    name = desk.state.nodes[wrong.validator].name
    assert f"two validators contradict {name} on {count} rollouts of node" in desk.news()
    assert any(f"outvoted on {count} rollouts by two other" in row.doing[0] for row in rows(picture_of(desk)))
    assert desk.state.problems == [] and await desk.audit_draws() == []
    desk.close()


def picture_of(desk: Desk) -> Picture:
    return Picture("x", status=desk.coordinator.status.picture("running"), now=time.time())


async def test_a_validator_that_is_outvoted_again_and_again_shows_and_shields_nobody(tmp_path: Path) -> None:
    desk = desk_with(tmp_path, validators=3, leases__probation_accepted=2)
    friend = actor_identity("validator-0").public
    outvoted = 0
    for k in range(60):
        if outvoted >= 6:
            break
        index = desk.upload(desk.lease(f"evil-{k}"))
        judges = []
        while desk.open_jobs(index):
            judges.append(desk.open_jobs(index)[0].validator)
            await desk.judge(index, ACCEPT if judges[-1] == friend else REJECT)
        if judges != [friend]:
            outvoted += len(desk.state.submissions[index].outcomes) * (friend in judges)
        assert (desk.state.nodes[actor_identity(f"evil-{k}").public].state == "suspended") == (judges != [friend])
    assert desk.state.nodes[friend].outvoted == outvoted >= 6
    assert sum(node.outvoted for node in desk.state.nodes.values()) == outvoted, "nobody else is named"
    desk.close()


@pytest.mark.parametrize("third", ["absent", "vanished", "silent"])
async def test_a_tie_that_nobody_settles_ends_and_nothing_hangs(tmp_path: Path, third: str) -> None:
    desk = desk_with(tmp_path, validators=3, leases__lease_ms=200)
    index = desk.upload(desk.lease("node"))
    names = [f"validator-{i}" for i in range(3)]
    one = await desk.judge(index, REJECT)
    two = desk.open_jobs(index)[0]
    (left,) = {actor_identity(name).public for name in names} - {one.validator, two.validator}
    if third == "absent":
        desk.here(desk.state.nodes[left].name, present=False)
    await desk.judge(index, ACCEPT)
    if third != "absent":
        assert [job.validator for job in desk.open_jobs(index)] == [left]
        if third == "vanished":
            desk.here(desk.state.nodes[left].name, present=False)
        desk.tick()
        assert {outcome.status for outcome in desk.state.submissions[index].outcomes} == {"pending"}
        desk.seconds += decision.TIE_LEASES * 0.2 + 0.05
        desk.tick()
        assert "tie.lapsed" in desk.events()
    assert {outcome.status for outcome in desk.state.submissions[index].outcomes} == {"inconclusive"}
    assert index not in desk.book.window.unjudged and "contradict each other" in desk.news()
    assert desk.decide("node").kind == "issue", "its owner works on"
    desk.judging.drawing.reveal_all()
    assert desk.state.problems == [] and await desk.audit_draws() == []
    desk.close()


async def test_a_verdict_that_contradicts_the_upload_it_accepts_does_not_count_and_another_validator_is_drawn(
    tmp_path: Path,
) -> None:
    desk = desk_with(tmp_path)
    index = desk.upload(desk.lease("node"))
    (liar,) = desk.open_jobs(index)
    for spoil in (lambda one: replace(one, reward=1e5), lambda one: replace(one, logprobs=bytes(8))):
        with pytest.raises(DecodeError) as caught:
            await desk.judge(index, ACCEPT, spoil)
        assert caught.value.code is ReasonCode.VERDICT_WRONG
    assert desk.state.submissions[index].verdicts == {} and "refused" in desk.news()
    desk.tick()
    (drawn,) = desk.open_jobs(index)
    assert drawn.validator != liar.validator and drawn.attempt == 1
    await desk.judge(index)
    assert {outcome.status for outcome in desk.state.submissions[index].outcomes} == {"accepted"}
    desk.close()


async def test_a_validator_that_asks_again_and_never_answers_does_not_keep_its_job(tmp_path: Path) -> None:
    desk = desk_with(tmp_path)
    index = desk.upload(desk.lease("node"))
    (job,) = desk.open_jobs(index)
    now = desk.judging.monotonic()
    desk.judging.monotonic = lambda: now
    member = Member(parse(desk.sealed(desk.state.nodes[job.validator].name, "job.next", JobRequest(0))), b"")
    for _ in range(5):
        reply = await desk.judging.next(member, JobRequest(0), b"")
        assert (reply.job is not None) == (desk.open_jobs(index) == [job])
        now += 16.0
        desk.tick()
    assert desk.open_jobs(index)[0].validator != job.validator
    desk.close()


async def test_a_validator_that_vanished_is_replaced_and_the_attempt_counted(tmp_path: Path) -> None:
    desk = desk_with(tmp_path)
    index = desk.upload(desk.lease("node"))
    (before,) = desk.open_jobs(index)
    desk.here(desk.state.nodes[before.validator].name, present=False)
    desk.tick()
    (after,) = desk.open_jobs(index)
    assert after.validator != before.validator and (after.round, after.attempt) == (1, 1)
    desk.here(desk.state.nodes[after.validator].name, present=False)
    desk.tick()
    assert desk.open_jobs(index) == [after], "nobody is left: the same one is asked again"
    assert desk.state.present == ()
    desk.close()


async def test_jobs_of_a_suspended_node_stay_open_and_their_verdicts_are_kept(tmp_path: Path) -> None:
    desk = desk_with(tmp_path, leases__probation_accepted=2)
    await desk.judge(desk.upload(desk.lease("node")))
    one, two = desk.upload(desk.lease("node")), desk.upload(desk.lease("node"))
    await desk.judge(one, REJECT)
    await desk.judge(one, REJECT)
    assert {outcome.status for outcome in desk.state.submissions[two].outcomes} == {"discarded"}
    job = await desk.judge(two, REJECT)
    assert desk.state.submissions[two].verdicts[1].validator == job.validator
    desk.tick()
    assert desk.open_jobs(two) == [], "nothing more is drawn for it"
    assert two not in desk.book.window.unjudged
    desk.close()


async def test_validators_take_trusted_nodes_first_and_leave_a_tenth_to_newcomers(tmp_path: Path) -> None:
    desk = desk_with(tmp_path, validators=1, leases__probation_accepted=2)
    await desk.judge(desk.upload(desk.lease("trusted")))
    fresh = [desk.upload(desk.lease(f"fresh-{i}")) for i in range(6)]
    mine = [desk.upload(desk.lease("trusted")) for _ in range(12)]
    validator = actor_identity("validator-0").public
    order = []
    while (found := desk.judging._choose(validator)) is not None:
        desk.judging.delivered[found[1].job_id] = desk.judging.monotonic()
        order.append(found[0].index)
    assert sorted(order) == sorted(fresh + mine)
    assert [index in mine for index in order[:2]] == [True, False]
    rollouts = {index: len(desk.state.submissions[index].outcomes) for index in order}
    both = order[: order.index(mine[-1]) + 1]
    given = sum(rollouts[i] for i in both if i in fresh) / sum(rollouts[i] for i in both)
    assert given <= 0.15, "garbage from new keys can't take more of a busy validator"
    desk.close()


async def test_the_status_says_how_many_jobs_a_validator_holds_and_how_long_it_takes(tmp_path: Path) -> None:
    desk = desk_with(tmp_path, validators=1)
    index = desk.upload(desk.lease("node"))

    def validator() -> dict:
        nodes = desk.coordinator.status.picture("running")["nodes"]
        return next(node for node in nodes if node["role"] == "validator")

    assert (validator()["open_jobs"], validator()["verdict_s"]) == (1, None)
    (job,) = desk.open_jobs(index)
    desk.judging.delivered[job.job_id] = desk.judging.monotonic() - 8.0
    await desk.judge(index)
    assert validator()["open_jobs"] == 0 and 8.0 <= validator()["verdict_s"] < 60.0
    desk.close()


async def test_a_coordinator_killed_between_any_two_entries_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the ledger after each entry in turn, begin again, finish the run's open work: nothing contradicts."""
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 2)
    desk = desk_with(tmp_path, leases__second_draw=1.0)
    for who, outcome in (("a", ACCEPT), ("b", INCONCLUSIVE), ("c", ACCEPT), ("d", REJECT)):
        index = desk.upload(desk.lease(who))
        while desk.open_jobs(index):
            await desk.judge(index, outcome)
        desk.tick()
    size, events = desk.book.ledger.size, [*desk.events(), ""]
    desk.close()
    assert size > 30
    for cut in range(5, size + 1):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(desk.run_dir, copy)
        with sqlite3.connect(copy / "state" / "ledger.db") as db:
            db.execute("DELETE FROM leaves WHERE idx >= ?", (cut,))
        db.close()
        again = Desk(copy)
        for name in ("validator-0", "validator-1"):
            again.join(name, "validator")
        again.tick()
        for lease in [held.lease for held in again.state.leases.values() if held.status == "open"]:
            again.upload(lease)
        while again.book.window.undecided:
            waiting = next(iter(again.book.window.undecided))
            submission = again.state.submissions[waiting]
            assert submission.open_rounds or decision.next_round(submission) is None, f"cut at {cut}: nobody judges it"
            await again.judge(waiting)
        again.tick()
        again.judging.drawing.reveal_all()
        assert again.state.problems == [], f"cut at {cut}"
        # A first and a second draw are one transaction: no disk keeps one without the other, only this test does.
        apart = events[cut - 1] == events[cut] == "job"
        assert apart or await again.audit_draws() == [], f"cut at {cut}"
        assert all(period.secret is not None for period in again.state.periods)
        again.close()
        shutil.rmtree(copy)
