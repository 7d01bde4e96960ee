"""The timeline of `benchmarks.overhead`: whose CPU it is, how much, and where the tables go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import timeline
from benchmarks.timeline import Reading, Watch


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("/v/bin/python /v/bin/trainer serve /r/run.toml", "coordinator"),
        ("/v/bin/python /v/bin/trainer learn /r/run.toml", "learner"),
        ("/v/bin/python /v/bin/shardcast publish /r", "origin"),
        ("/v/bin/python /v/bin/node join --role inference --run /r/join.hw --name node-1", "inference"),
        ("/v/bin/python /v/bin/node join --role validator --run /r/join.hw", "validator"),
        ("/v/bin/python -P -m node.engine --socket /tmp/x/engine.sock --threads 1", "engine"),
        ("/v/bin/python -P -m protocol.hostd --key /r/keys/k.pem", "host"),
        ("/v/bin/python -m trainer.spot_worker /r /r/state/checks", "check"),
    ],
)
def test_a_process_is_known_by_the_command_it_was_started_with(line: str, role: str) -> None:
    assert timeline._role(line.split()) == role


def test_cpu_of_a_process_is_read_and_charged_to_its_role(tmp_path: Path) -> None:
    me = os.getpid()
    watch = Watch(tmp_path, roles={me: "learner"})
    watch.first = timeline._read(10, 100.0, [me])
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    watch.last = timeline._read(13, 101.5, [me])
    (row,) = watch.costs()
    assert (row.role, row.processes) == ("learner", 1)
    assert row.cpu_ms >= 90  # 0.3 s of this process in 3 steps; ticks are 10 ms
    assert watch.wall_ms() == 500


def test_a_process_that_ended_is_left_out_and_a_short_run_has_no_table(tmp_path: Path) -> None:
    reading = timeline._read(10, 0.0, [os.getpid(), 2**22 + 1])
    assert set(reading.used) == {os.getpid()}
    assert Watch(tmp_path).costs() == []
    assert Watch(tmp_path, first=Reading(10, 0.0, {}, {}, 0.0)).costs() == []


def test_the_tables_replace_what_stood_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{timeline.BEGIN}\nold\n{timeline.END}\nafter\n")
    timeline.replace_between_marks(page, "new")
    timeline.replace_between_marks(page, "newer")
    assert page.read_text() == f"before\n{timeline.BEGIN}\nnewer\n{timeline.END}\nafter\n"
