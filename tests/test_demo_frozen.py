"""Both validators stopped for a minute in a whole demo: learning waits within the staleness bound, and resumes.

Not covered: shorter stops and kills (`test_demo_kill.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo_run import Demo, freeze
from tests.test_demo_kill import audit, check_batches
from trainer.summary import read_state


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_minute_without_validators_costs_a_minute(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "run", "--steps", "40", "--nodes", "3")
    try:
        demo.await_("step 10", lambda: demo.step() >= 10, 300)
        frozen = freeze(demo, 60.0)
        demo.await_("steps after the thaw", lambda: demo.finished() or demo.step() >= frozen.steps[-1] + 3, 120)
        summary = demo.end(400)
        _, state = read_state(demo.dir)
    finally:
        demo.close()
    assert frozen.problems(state) == []
    assert summary["steps"] == 40 and summary["honest_rejected"] == 0 and summary["rollouts_pending"] == 0
    assert {node.state for node in state.nodes.values()} <= {"active", "probation"}
    check_batches(state)
    audit(demo.dir)
