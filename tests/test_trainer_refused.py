"""What nobody may write into a ledger: requests that contradict it, and entries by keys that count for nothing.

Every test ends as an auditor would: the sealed segments hold, and the fold has nothing to say against them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from pathlib import Path

import pytest
from blake3 import blake3

from protocol import codec
from protocol.chain import RunUpdate, delegate, seal_update
from protocol.clock import Clock
from protocol.control import Member
from protocol.envelope import parse, seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import Identity, load_identity, peer_id_text
from protocol.records import (
    JoinRequest,
    Outcome,
    RelayReport,
    RoleGrant,
    RolloutDetail,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from protocol.run_files import key_file, load_chain, update_file
from protocol.segments import SealedLog, read_segments
from protocol.state import RunState, fold
from shardcast.records import HEAD_KIND, Head
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer import config, keys
from trainer.errors import KeyLapsedError, RefusedEntryError

DAY_MS = 86_400_000


async def audited(desk: Desk) -> tuple[SealedLog, RunState]:
    """The log and the state of an auditor, who finds nothing wrong with either."""
    await desk.book.commit()
    desk.book.seal(desk.run_dir / "ledger")
    log = read_segments(desk.run_dir / "ledger", load_chain(desk.run_dir).genesis)
    assert log.problems == []
    state = fold([sealed.entry for sealed in log.entries])
    assert state.problems == [] and state == desk.state
    return log, state


def judged(desk: Desk, index: int, outcomes: tuple[Outcome, ...]) -> tuple[str, Verdict, bytes]:
    """The verdict of the submission's drawn validator with any outcomes: who, what, and its details."""
    job = desk.open_jobs(index)[0]
    raw = codec.encode(VerdictDetails(tuple(RolloutDetail(b"", 0.0, ()) for _ in outcomes)))
    verdict = Verdict(
        job.job_id, desk.state.submissions[index].intent.digest, job.round, outcomes, blake3(raw).digest(), 1
    )
    return desk.state.nodes[job.validator].name, verdict, raw


async def test_an_outcome_that_does_not_exist_is_refused_and_the_job_can_still_be_answered(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    desk.publish(0)
    for name in ("validator-0", "validator-1"):
        desk.join(name, "validator")
    index = desk.upload(desk.lease("node"))
    size, count = desk.book.ledger.size, len(desk.state.submissions[index].outcomes)
    for number in (3, 7, 255):
        name, verdict, raw = judged(desk, index, (Outcome(number, "holds"),) * count)
        with pytest.raises(ProtocolError, match="outcome"):
            await desk.judging.verdict(Member(parse(desk.sealed(name, "verdict", verdict)), b""), verdict, raw)
        assert desk.book.ledger.size == size
    await desk.judge(index)
    await audited(desk)
    desk.close()


def hostile(desk: Desk) -> list[tuple[str, object, bytes]]:
    """(event, body, subject) of entries that members cause, each with something wrong that the ledger alone shows."""
    lease = desk.lease("node")
    other = UploadIntent(bytes(16), 10, 10, bytes(32))
    vast = UploadIntent(lease.lease_id, lease.max_bytes + 1, 10, bytes(32))
    stolen = UploadIntent(lease.lease_id, 10, 10, bytes(32))
    index = desk.upload(desk.lease("second"))
    count = len(desk.state.submissions[index].outcomes)
    name, verdict, _ = judged(desk, index, (Outcome(7, "holds"),) * count)
    _, short, _ = judged(desk, index, (Outcome(0, "holds"),) * (count + 1))
    join = JoinRequest("relay", "node", bytes(32), bytes(16), "", (0x0100,), (), "")
    kingdom = JoinRequest("king", "new", bytes(32), bytes(16), "", (0x0100,), (), "")
    head = Head(0, 0, bytes(16), bytes(32), bytes(32), 0)
    foreign = seal(actor_identity("node"), "join", join, run=bytes(32), sequence=1, issued_at=1).raw
    return [
        ("submission", b"", desk.sealed("node", "intent", other)),
        ("submission", b"", desk.sealed("node", "intent", vast)),
        ("submission", b"", desk.sealed("stranger", "intent", stolen)),
        ("verdict", b"", desk.sealed(name, "verdict", verdict)),
        ("verdict", b"", desk.sealed(name, "verdict", short)),
        ("verdict", b"", desk.sealed("node", "verdict", verdict)),
        ("node.joined", b"", desk.sealed("node", "join", join)),
        ("node.joined", b"", desk.sealed("new", "join", kingdom)),
        ("node.joined", b"", foreign),
        ("policy", b"", desk.sealed("node", "head", head)),
        ("relay.accused", b"", desk.sealed("node", "relay.report", RelayReport(bytes(32), b"", b"", "x"))),
        ("run.updated", b"", desk.sealed("node", "manifest.update", RunUpdate())),
        ("lease.closed", b"\xff", b""),
        ("submission", b"", b"no envelope"),
    ]


async def test_what_contradicts_the_ledger_is_refused_in_words_and_kept_nowhere(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    desk.publish(0)
    for name in ("validator-0", "validator-1"):
        desk.join(name, "validator")
    entries = hostile(desk)
    size, before = desk.book.ledger.size, fold(stored.entry() for stored in desk.book.ledger.entries())
    for event, body, subject in entries:
        with pytest.raises(RefusedEntryError) as caught:
            desk.book.append(event, body, subject)
        assert caught.value.code is not ReasonCode.LEDGER_BROKEN and event in str(caught.value)
        assert desk.book.ledger.size == size and desk.state == before, event
    desk.book.append("grant", RoleGrant(bytes(32), "relay"))
    await audited(desk)
    desk.close()
    desk.open()
    assert desk.state.problems == []
    desk.close()


async def test_a_validator_revoked_while_its_details_are_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path / "run")
    desk.publish(0)
    for name in ("validator-0", "validator-1"):
        desk.join(name, "validator")
    index = desk.upload(desk.lease("node"))
    await desk.book.commit()
    job = desk.open_jobs(index)[0]
    keys.revoke(config.load(desk.run_dir), peer_id_text(job.validator), "stolen", None)
    to_thread = asyncio.to_thread

    async def slow(function, *args, **more):
        done = await to_thread(function, *args, **more)
        with contextlib.redirect_stderr(io.StringIO()):
            desk.coordinator._take_updates()
        return done

    monkeypatch.setattr("trainer.judging.asyncio.to_thread", slow)
    with pytest.raises(ProtocolError) as caught:
        await desk.judge(index)
    assert caught.value.code is ReasonCode.KEY_REVOKED
    monkeypatch.undo()
    lease = desk.state.submissions[index].lease_id
    assert not desk.coordinator.files.details(lease, job.round).exists()
    desk.tick()
    await desk.judge(index)
    await audited(desk)
    desk.close()


async def test_heads_of_a_revoked_origin_are_left_out_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path / "run")
    desk.publish(0)
    await desk.book.commit()
    stolen = load_identity(desk.run_dir / "keys" / "origin.pem")
    keys.rotate(config.load(desk.run_dir), "origin", None)
    keys.revoke(config.load(desk.run_dir), peer_id_text(stolen.public), "stolen", None)
    with contextlib.redirect_stderr(io.StringIO()):
        assert desk.coordinator._take_updates() == 2
    own = load_identity(key_file(desk.run_dir, "origin", desk.book.run.manifest.origin))

    def signed(who: Identity, step: int) -> bytes:
        head = Head(0, step, bytes(16), bytes(32), blake3(b"%d" % step).digest(), 0)
        return seal(who, HEAD_KIND, head, run=desk.book.run.id, sequence=step + 9, issued_at=1).raw

    path = desk.run_dir / "published" / "HEAD.hw"
    monkeypatch.setattr(desk.coordinator, "_between", lambda *args: [signed(stolen, 1)])
    path.write_bytes(signed(own, 2))
    for _ in range(2):  # seen again after a restart, say
        with contextlib.redirect_stderr(io.StringIO()):
            await desk.coordinator._take_head(path)
    assert list(desk.state.policies) == [(0, 0), (0, 2)]
    assert desk.news().count("the publication of step 1") == 1 and "revoked" in desk.news()
    await audited(desk)
    desk.close()


def rotate_two_days_ahead(desk: Desk, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trainer key rotate` on a machine whose clock is two days ahead."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(keys.time, "time", lambda: real() + 2 * 86_400)
        keys.rotate(config.load(desk.run_dir), role, None)


@pytest.mark.parametrize("role", ["origin", "transport", "coordinator"])
async def test_an_update_from_the_future_waits_for_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    desk = Desk(tmp_path / "run")
    rotate_two_days_ahead(desk, role, monkeypatch)
    size = desk.book.ledger.size
    with contextlib.redirect_stderr(io.StringIO()):
        assert [desk.coordinator._take_updates() for _ in range(3)] == [0, 0, 0]
    assert desk.coordinator._next_coordinator() == b"", "it does not begin again for a key it can't use"
    assert desk.book.ledger.size == size and desk.news().count("clocks is wrong") == 1
    await audited(desk)
    desk.close()
    desk.open()  # nor does a start end with it
    assert desk.state.chain is not None and desk.state.chain.links == ()
    desk.close()
    desk.clock_ahead_ms = 2 * DAY_MS
    desk.open()
    assert len(desk.state.chain.links) == 1
    await audited(desk)
    desk.close()


# --- the coordinator's own key ------------------------------------------------------------------------------------


async def test_the_answer_to_a_stolen_coordinator_key_leaves_a_ledger_that_holds(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    desk.publish(0)
    desk.join("validator-0", "validator")
    index = desk.upload(desk.lease("node"))
    await audited(desk)
    old = desk.book.run.manifest.coordinator
    desk.close()
    size, settings = keys.ledger_size(config.load(desk.run_dir)), config.load(desk.run_dir)
    keys.rotate(settings, "origin", None)  # an update that names no new coordinator is in front
    keys.rotate(settings, "coordinator", None)
    assert keys.revoke(settings, peer_id_text(old), "stolen", None)["from"] == size
    desk.open()
    assert desk.state.restarts == [size] and desk.state.outages[0][0] == size, "the update announces the start"
    await desk.judge(index)
    log, state = await audited(desk)
    assert [sealed.entry.event for sealed in log.entries[size : size + 3]] == ["run.updated"] * 3
    assert all(sealed.envelope.signer != old for sealed in log.entries[size:])
    assert state.incarnation == 1 and state.chain is not None and state.chain.revoked(old, size)
    desk.close()
    desk.open()
    await audited(desk)
    desk.close()


async def test_keys_changed_before_the_first_start_leave_a_ledger_that_holds(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "other")  # only for its run directory
    desk.close()
    for path in (desk.run_dir / "state").iterdir():
        path.unlink()
    settings, genesis = config.load(desk.run_dir), load_chain(desk.run_dir).genesis
    keys.rotate(settings, "coordinator", None)
    keys.revoke(settings, peer_id_text(genesis.manifest.coordinator), "stolen", None)
    desk.open()
    desk.publish(0)
    log, _ = await audited(desk)
    assert log.entries[0].envelope.signer == genesis.manifest.coordinator
    assert {one.envelope.signer for one in log.entries[1:]} == {desk.book.run.manifest.coordinator}
    desk.close()


def test_a_coordinator_key_is_not_revoked_under_a_running_coordinator_that_signs_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path / "run")
    desk.book.ledger.flush()
    monkeypatch.setattr(keys, "FOLLOW_S", 0.2)
    settings, old = config.load(desk.run_dir), desk.book.run.manifest.coordinator
    keys.rotate(settings, "coordinator", None)
    with pytest.raises(keys.UsageError, match="still signs"):
        keys.revoke(settings, peer_id_text(old), "stolen", None)
    desk.close()
    desk.open()
    assert keys.revoke(settings, peer_id_text(old), "stolen", None)["from"] == desk.book.ledger.durable_size
    desk.close()


async def test_a_lapsed_key_stops_the_coordinator_in_words_and_a_new_one_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    for role in ("coordinator", "origin"):
        keys.rotate(config.load(desk.run_dir), role, None)
    desk.close()
    desk.open()
    await audited(desk)
    size = desk.book.ledger.size
    assert keys.ending(desk.state.chain, desk.book.now_ms(), "RUN") == []
    soon = keys.ending(desk.state.chain, desk.book.now_ms() + 350 * DAY_MS, "RUN")
    assert len(soon) == 2 and "trainer key rotate coordinator RUN" in soon[0]
    desk.close()
    desk.clock_ahead_ms = 367 * DAY_MS
    with pytest.raises(KeyLapsedError, match="trainer key rotate coordinator"):
        desk.open()
    assert keys.ledger_size(config.load(desk.run_dir)) == size, "a start that may not sign leaves nothing behind"

    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys.time, "time", lambda: real() + 367 * 86_400)
        keys.rotate(config.load(desk.run_dir), "origin", None)  # prolongs the coordinator's, which ended with it
    desk.open()
    await audited(desk)
    desk.close()


async def test_a_key_that_lapses_while_it_serves_signs_nothing_more(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    chain, now = load_chain(desk.run_dir), desk.book.now_ms()
    root, key = load_identity(desk.run_dir / "keys" / "root.pem"), desk.book.coordinator.public
    paper = delegate(root, chain.genesis.id, key, ("coordinator",), not_before=now - 1000, expires=now + 60_000,
                     sequence=1)  # fmt: skip
    update_file(desk.run_dir, 1).parent.mkdir()
    update_file(desk.run_dir, 1).write_bytes(
        seal_update(root, chain, RunUpdate(delegations=(paper,)), sequence=1, issued_at=now)
    )
    with contextlib.redirect_stderr(io.StringIO()):
        desk.coordinator._take_updates()
    desk.book.check_key()
    later = Clock(monotonic=lambda: time.monotonic() + 55)
    later.adjust(now + 55_000)
    desk.book.ledger._clock_ms = later.now_ms
    desk.book.append("grant", RoleGrant(bytes(32), "relay"))
    later.adjust(now + 61_000)
    desk.book.now_ms = later.now_ms
    size = desk.book.ledger.size
    with pytest.raises(KeyLapsedError):
        desk.book.append("grant", RoleGrant(bytes(32), "validator"))
    with pytest.raises(KeyLapsedError):
        desk.book.check_key()
    assert desk.book.ledger.size == size
    await audited(desk)
    desk.close()
