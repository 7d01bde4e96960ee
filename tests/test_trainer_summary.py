"""The summary counts what the ledger decided, from the details of the verdict that decided it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.records import ACCEPT, INCONCLUSIVE
from tests.coordinator_desk import Desk
from trainer.batches import read_submission
from trainer.summary import summarise


@pytest.mark.parametrize("answers", [(ACCEPT, INCONCLUSIVE), (INCONCLUSIVE, ACCEPT), (ACCEPT, ACCEPT)])
async def test_rewards_are_those_of_the_verdict_that_accepted(tmp_path: Path, answers: tuple[int, int]) -> None:
    desk = Desk(tmp_path / "run", leases__second_draw=1.0)
    for i in range(2):
        desk.join(f"validator-{i}", "validator")
    desk.publish(0)
    index = desk.upload(desk.lease("ann"))
    for answer in answers:
        await desk.judge(index, answer)
    submission = desk.state.submissions[index]
    rewards = [one.reward for one in read_submission(desk.coordinator.files, submission).rollouts]
    await desk.book.commit()
    desk.book.seal(desk.run_dir / "ledger")
    found = summarise(desk.run_dir)
    desk.close()
    assert found["rollouts_accepted"] == len(rewards)
    assert found["reward_first"] == found["reward_last"] == sum(rewards) / len(rewards) > 0
