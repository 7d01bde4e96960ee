"""Event logs: one line of JSON an event, bounded whatever is put in, and files that rotate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from protocol.logs import FILES_KEPT, MAX_FIELD, MAX_FIELDS, EventFile, event_line

_ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(),
    st.text(),
    st.lists(st.text()),
    st.sets(st.text()),
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), _ANY, max_size=40))
def test_property_whatever_is_logged_is_one_bounded_line_of_json(fields: dict) -> None:
    line = event_line("x", fields)
    assert "\n" not in line and line.isprintable()
    assert json.loads(line)["event"] == "x"
    assert len(json.loads(line)) <= 3 + MAX_FIELDS


def test_events_carry_ids_in_hex_and_strangers_words_cut_and_harmless() -> None:
    line = json.loads(
        event_line("lease", {"run": bytes(32), "node": None, "step": 4, "why": "a\x1b[2J\nb" + "c" * 9999}, time_ms=7)
    )
    assert line["time"] == 7 and line["level"] == "info" and line["run"] == "00" * 32 and line["step"] == 4
    assert "node" not in line
    assert "\x1b" not in line["why"] and len(line["why"]) == MAX_FIELD and line["why"].endswith("…")


def test_a_full_file_is_renamed_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    log = EventFile(path, {"run": b"\1"}, rotate_bytes=1000)
    for number in range(100):
        log.event("tick", number=number)
    log.close()
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["a.jsonl", "a.jsonl.1", "a.jsonl.2"] and len(files) == FILES_KEPT
    assert all(file.stat().st_size <= 1000 for file in files)
    lines = [json.loads(line) for file in (files[2], files[1], files[0]) for line in file.read_text().splitlines()]
    numbers = [line["number"] for line in lines]
    assert numbers == list(range(numbers[0], 100)), "the newest are whole and in order"
    assert {line["run"] for line in lines} == {"01"}


def test_a_log_goes_on_where_a_killed_process_left_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"time": 1, "le')
    EventFile(path).event("again")
    first, second = path.read_text().splitlines()
    assert first.startswith('{"time": 1') and json.loads(second)["event"] == "again"


def test_a_disk_that_refuses_costs_lines_and_not_the_process(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    log = EventFile(path)
    log.close()
    path.unlink()
    path.mkdir()  # a folder where the file was: opening fails, as on a full or read-only disk
    log.event("one")
    log.event("two")
    assert log.lost == 2 and capsys.readouterr().err.count("takes no more events") == 1
    path.rmdir()
    log.event("three")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["three", "log.lost"] and events[1]["events"] == 2
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="can't be written"):
        EventFile(path)
