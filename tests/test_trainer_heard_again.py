"""A node that two validators rejected, one of whom is found to be a liar: heard again, and nothing is sampled twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.evidence import VerdictEvidence
from protocol.records import ACCEPT, REJECT
from protocol.state import ACCEPTED, PENDING, UNDECIDED, fold
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity


async def rejected(tmp_path: Path) -> tuple[Desk, int, bytes]:
    """ann's first work was rejected by two validators. (desk, submission, one of the two)"""
    desk = Desk(tmp_path / "run", validators=3, leases__probation_accepted=2)
    for i in range(3):
        desk.join(f"validator-{i}", "validator")
    desk.publish(0)
    index = desk.upload(desk.lease("ann"))
    liar = (await desk.judge(index, REJECT)).validator
    await desk.judge(index, REJECT)
    assert desk.state.nodes[actor_identity("ann").public].state == "suspended"
    return desk, index, liar


def found_wrong(desk: Desk, liar: bytes, index: int) -> None:
    """The coordinator's own check says that this rejection was false."""
    state = next(one for one in desk.state.submissions[index].verdicts.values() if one.validator == liar)
    desk.book.append("evidence.verdict", VerdictEvidence(state.index, 0, ACCEPT, "holds", 0.0, 0.0))
    desk.tick()


@pytest.mark.parametrize(("third", "state"), [(ACCEPT, "probation"), (REJECT, "suspended")])
async def test_a_third_validator_decides_and_what_others_did_again_is_trained_once(
    tmp_path: Path, third: int, state: str
) -> None:
    desk, index, liar = await rejected(tmp_path)
    nonce = desk.state.leases[desk.state.submissions[index].lease_id].lease.nonce
    again = desk.lease("bob")
    assert again.nonce == nonce, "what was rejected is sampled again"
    second = desk.upload(again)
    while desk.open_jobs(second):
        await desk.judge(second)
    found_wrong(desk, liar, index)
    ann = desk.state.nodes[actor_identity("ann").public]
    assert "ann is suspended no more, but paused" in desk.news()
    assert ann.state == "paused" and desk.state.submissions[index].outcomes[0].status == PENDING
    assert desk.state.submissions[index].jobs[3].validator not in {
        job.validator for number, job in desk.state.submissions[index].jobs.items() if number < 3
    }
    await desk.judge(index, third)
    assert ann.state == state
    outcomes = {outcome.status for outcome in desk.state.submissions[index].outcomes}
    assert ACCEPTED not in outcomes and (third == REJECT or outcomes == {UNDECIDED})
    assert nonce not in desk.book.window.again, "nobody is asked for the same samples a third time"
    if third == ACCEPT:
        assert desk.join("ann") and desk.lease("ann").nonce != nonce
    assert desk.state.problems == [] and await desk.audit_draws() == []
    desk.close()


async def test_a_restart_finds_the_same(tmp_path: Path) -> None:
    desk, index, liar = await rejected(tmp_path)
    found_wrong(desk, liar, index)
    await desk.judge(index, ACCEPT)
    before, waiting = desk.state, dict(desk.book.window.again)
    await desk.book.commit()
    desk.close()
    desk.open()
    assert fold([stored.entry() for stored in desk.book.ledger.entries()][: before.size]) == before
    assert desk.book.window.again.keys() == waiting.keys()
    desk.close()
