"""The checking process itself: it answers, dies alone, and another one comes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import draws
from tests.checked_run import CheckedRun
from trainer.spot_process import CheckProcess
from trainer.spot_request import Answer, Request


async def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CheckedRun, Request]:
    """A run with one honest submission, and the request that its check makes."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 1.0)
    run = await CheckedRun.make(tmp_path)
    await run.judge_all(run.work("ann"))
    await run.check()
    return run, run.process.asked[0]


def process_of(run: CheckedRun) -> CheckProcess:
    return CheckProcess(run.run_dir, run.run_dir / "state" / "checks", run.run_dir / "logs" / "checks.log")


@pytest.mark.heavy
async def test_a_killed_or_broken_checking_process_fails_its_request_alone_and_another_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, request = await asked(tmp_path, monkeypatch)
    process = process_of(run)
    try:
        await process.start()
        assert process._process is not None
        first = process._process.pid
        answer = await process.ask(request)
        assert answer == Answer(decided=len(request.positions)), answer
        assert process._process.pid == first, "it was ready"
        stat = Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()
        assert int(stat[16]) == 19, "whatever else the machine has to do comes first"
        lost = await process.ask(replace(request, digest=bytes(32)))
        assert "not the file that the ledger names" in lost.failed and process._process.pid == first
        waiting = asyncio.create_task(process.ask(request))
        os.kill(first, signal.SIGKILL)
        assert "the checking process ended" in (await waiting).failed and process.restarts == 1
        assert await process.ask(request) == answer
        assert process._process.pid != first
        assert await process.ask(replace(request, confirm=True)) == answer
    finally:
        await process.close()
    run.close()


async def test_a_process_that_never_starts_is_a_failed_check_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, request = await asked(tmp_path, monkeypatch)
    process = process_of(run)
    monkeypatch.setattr("sys.executable", "/bin/false")
    await process.start()
    assert process._process is None and process.restarts == 0
    for tries in (1, 2):
        process._pause_s = 0.0
        assert (await process.ask(request)).failed and process.restarts == tries
    run.judging.checks.process = process
    run.judging.checks.note(next(iter(run.state.submissions.values())))
    process._pause_s = 0.0
    assert await run.judging.checks.turn()
    counts = run.judging.checks.counts()
    assert counts["left_out"] == len(request.positions) and counts["waiting"] == 0
    run.close()


def test_requests_and_answers_are_the_same_after_their_journey() -> None:
    from protocol.evidence import VerdictEvidence
    from trainer.spot_request import Said

    request = Request(
        b"lease",
        b"\1" * 32,
        7,
        (0, 3),
        (Said(9, 2, b"\2" * 32, (0, 1, 2, 0), ("holds", "format", "x", "holds")),),
        True,
    )
    assert Request.from_json(request.to_json()) == request
    answer = Answer(3, True, (VerdictEvidence(9, 3, 1, "proof-mismatch", 0.0, 0.5),), "why")
    assert Answer.from_json(answer.to_json()) == answer
    for line in (b"", b"{}", b"[]", b'{"decided": "x"}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Answer.from_json(line)
