"""A member and its coordinator: changed manifests and keys, wrong clocks, broken promises, and the last word."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from node.errors import HeadsConflictError, KeyRevokedError, RunFinishedError, SuspendedError, UpgradeRequiredError
from node.heads import ASK_EVERY_S, WRONG_PROOFS
from node.manifest import ASK_EVERY_S as CHAIN_EVERY_S
from protocol.control import ControlFrame
from protocol.envelope import parse, seal
from protocol.errors import ManifestError
from protocol.manifest import Thresholds
from protocol.merkle import leaf_hash
from protocol.records import ErrorReply, TreeHead
from tests.archive_builder import identity
from tests.member_rig import Rig, Time, events

STRICT = Thresholds(2e-4, 8, 1e-3, 1e-3, 1e-3, 200, 2000, 1e-6, 0, 1e-5, 1e-5, "stricter")


@pytest.fixture
async def rig(tmp_path):
    rig = Rig(tmp_path)
    await rig.start()
    yield rig
    await rig.stop()


@contextlib.asynccontextmanager
async def beating(member):
    """The member's heartbeats beside the test; ends with them."""
    task = asyncio.create_task(member.heartbeats())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def until(condition, task=None, deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            if task is not None and task.done():
                task.result()
            await asyncio.sleep(0.02)


async def ending(member) -> None:
    """Heartbeats until they end by themselves."""
    async with asyncio.timeout(20):
        await member.heartbeats()


# --- the manifest chain -------------------------------------------------------------------------------------------


async def test_a_new_manifest_is_followed_kept_and_known_by_both_hashes(rig, tmp_path, capsys):
    member = rig.member(tmp_path / "home")
    await member.join()
    async with beating(member) as task:
        rig.update(thresholds=STRICT, note="measured again")
        await until(lambda: member.manifest.hash == rig.chain.hash, task)
    assert member.run.manifest.thresholds == STRICT and member.run.id == rig.genesis.id
    assert member.manifest.at(rig.genesis.id).manifest.thresholds == rig.genesis.manifest.thresholds
    said = capsys.readouterr().out
    assert "thresholds" in said and "measured again" in said
    again = rig.member(tmp_path / "home")  # nothing is fetched for this
    assert again.manifest.hash == rig.chain.hash and again.run.manifest.thresholds == STRICT


async def test_a_coordinator_with_new_keys_and_a_new_address_is_followed_without_anybody_doing_anything(rig, tmp_path):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    async with beating(member) as task:
        moved = f"/ip4/127.0.0.1/tcp/2/p2p/{identity('transport-2').peer_id}"
        rig.update(
            rotate={"coordinator": identity("coordinator-2"), "coordinator_transport": identity("transport-2")},
            control=(moved,),
        )
        member.newest_step = 0
        await until(lambda: member.newest_step == 7, task)  # it got an answer signed by the new key
    assert member.run.manifest.coordinator == identity("coordinator-2").public
    assert member.run.manifest.control == (moved,)


async def test_a_reply_by_a_key_that_no_manifest_names_is_never_believed(rig, tmp_path):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    rig.coordinator = identity("stranger")
    rig.serve()
    async with beating(member) as task:
        await until(lambda: bool(events(tmp_path / "home", "coordinator.away")), task)
        assert member.newest_step == 0
        rig.coordinator = identity("coordinator")
        rig.serve()
        await until(lambda: member.newest_step == 7, task)


async def test_the_own_key_revoked_ends_with_exit_2_and_words(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    rig.update(revoke=member.identity.public)
    with pytest.raises(KeyRevokedError, match="lost on a train") as caught:
        await ending(member)
    assert caught.value.exit_code == 2
    with pytest.raises(KeyRevokedError):  # the next start knows it before it asks anybody
        await rig.member(tmp_path / "home").join()
    assert rig.joins == 1


async def test_a_manifest_that_asks_for_a_newer_protocol_ends_with_exit_75_and_the_command(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    rig.update(lowest_version=0x0101)
    with pytest.raises(UpgradeRequiredError, match="make install") as caught:
        await ending(member)
    assert caught.value.exit_code == 75


async def test_two_continuations_by_the_root_are_kept_aside_and_the_first_stays(rig, tmp_path, capsys):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    other = rig.extended(rig.chain, note="the other one")
    rig.update(thresholds=STRICT)
    await member.learn(rig.chain.hash)
    rig.served = rig.extended(other, note="and further")
    time.passes(CHAIN_EVERY_S)
    with pytest.raises(ManifestError, match="two different"):
        await member.learn(rig.served.hash)
    assert member.run.manifest.thresholds == STRICT
    assert (tmp_path / "home" / "updates-fork.hw").read_bytes()
    assert "WARNING" in capsys.readouterr().out


async def test_an_old_copy_of_the_chain_and_a_damaged_file_change_nothing(rig, tmp_path):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    rig.update(thresholds=STRICT)
    await member.learn(rig.chain.hash)
    rig.served = type(rig.chain)(rig.genesis)
    time.passes(CHAIN_EVERY_S)
    with pytest.raises(ManifestError):
        await member.learn(b"?" * 32)
    assert member.manifest.hash == rig.chain.hash
    path = tmp_path / "home" / "updates.hw"
    path.write_bytes(path.read_bytes()[:-1])
    rig.served = rig.chain
    fresh = rig.member(tmp_path / "home")
    assert fresh.manifest.hash == rig.genesis.id
    await fresh.join()  # its reply names the newest link
    assert fresh.manifest.hash == rig.chain.hash


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
async def test_a_clock_one_hour_off_works_and_is_said_once(rig, tmp_path, capsys, off_s):
    time = Time()
    time.wall_s += off_s
    member = rig.member(tmp_path / "home", time)
    await member.join()
    async with beating(member) as task:
        await until(lambda: member.newest_step == 7, task)
        rig.server._guard.seen.clear()
        for _ in range(2):
            await member._join_until_answered()
    assert rig.joins == 3  # no heartbeat had to be repeated after another join
    said = capsys.readouterr().out
    assert said.count("please set the clock") == 1
    assert ("60 minutes ahead of" if off_s > 0 else "60 minutes behind") in said
    assert abs(member.clock.now_ms() - 1000 * rig.time_s) < 1000
    assert json.loads((tmp_path / "home" / "status.json").read_text())["clock_off_s"] == -off_s


async def test_a_wall_clock_that_jumps_during_the_run_does_no_harm(rig, tmp_path, capsys):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    async with beating(member) as task:
        await until(lambda: member.newest_step == 7, task)
        for jump in (86_400.0, -200_000.0):
            time.wall_s += jump
            member.newest_step = 0
            await until(lambda: member.newest_step == 7, task)
    assert rig.joins == 1 and "clock" not in capsys.readouterr().out
    assert abs(member.clock.now_ms() - 1000 * rig.time_s) < 1000


async def test_a_machine_that_slept_for_an_hour_learns_the_time_anew(rig, tmp_path):
    """Its monotonic clock stood still meanwhile: everything it signs is an hour old."""
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    async with beating(member) as task:
        await until(lambda: member.newest_step == 7, task)
        rig.time_s += 3600
        time.wall_s += 3600
        member.newest_step = 0
        await until(lambda: member.newest_step == 7, task)
    assert rig.joins == 2
    assert abs(member.clock.now_ms() - 1000 * rig.time_s) < 1000


async def test_a_heartbeat_held_back_on_its_way_moves_no_clock(rig, tmp_path):
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    rig.late_ms = 100_000
    async with beating(member) as task:
        await until(lambda: member.newest_step == 7, task)
        assert abs(member.clock.now_ms() - 1000 * rig.time_s) < 1000 and rig.joins == 1
        time.monotonic_s += 61  # long enough after the join to ask again, by a challenge that can't be held back
        rig.time_s += 61
        await until(lambda: rig.joins == 2, task)
    assert abs(member.clock.now_ms() - 1000 * rig.time_s) < 1000


# --- the last word ------------------------------------------------------------------------------------------------


async def test_only_what_the_coordinator_signed_ends_a_node(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    forged = seal(
        identity("stranger"), "error", ErrorReply("suspended", "go away"), run=rig.genesis.id, sequence=1,
        issued_at=1, audience=member.identity.public,
    )  # fmt: skip
    rig.wire.lie = ControlFrame("error", forged.raw)
    async with beating(member) as task:
        await until(lambda: bool(events(tmp_path / "home", "coordinator.away")), task)
        rig.wire.lie = None
        await until(lambda: member.newest_step == 7, task)
        rig.state, rig.reason = "suspended", "proof-mismatch"
        with pytest.raises(SuspendedError, match="did not compute them"):
            await asyncio.wait_for(asyncio.shield(task), 20)


async def test_bytes_of_another_protocol_version_that_nobody_signed_end_no_node(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    forged = seal(
        identity("stranger"), "heartbeat.reply", ErrorReply("x", "y"), run=rig.genesis.id, sequence=1, issued_at=1,
        audience=member.identity.public,
    ).raw  # fmt: skip
    at = 1 + len("heartbeat.reply")
    rig.wire.lie = ControlFrame("heartbeat.reply", forged[:at] + b"\x07\x00" + forged[at + 2 :])
    async with beating(member) as task:
        await until(lambda: bool(events(tmp_path / "home", "coordinator.away")), task)
        assert events(tmp_path / "home", "coordinator.away")[0]["code"] == "unsupported-version"
        rig.wire.lie = None
        await until(lambda: member.newest_step == 7, task)


async def test_a_suspended_node_that_joins_again_is_told_why(rig, tmp_path):
    rig.state, rig.reason = "suspended", "dropped-results"
    with pytest.raises(SuspendedError, match="dropped-results"):
        await rig.member(tmp_path / "home").join()


async def test_the_status_says_who_is_waited_for_and_how_it_ended(rig, tmp_path, monkeypatch):
    monkeypatch.setattr("node.member.HEARTBEAT_DEADLINE_S", 1.0)
    time = Time()
    member = rig.member(tmp_path / "home", time)
    await member.join()
    path = tmp_path / "home" / "status.json"
    member.activity = "waiting for a lease"
    async with beating(member) as task:
        await until(lambda: path.exists() and json.loads(path.read_text())["accepted"] == 12, task)
        shown = json.loads(path.read_text())
        assert shown["waits_for"] == "the learner and the origin: the weights of step 8"
        assert shown["rejected"] == 1 and shown["away_s"] is None and not shown["ended"]
        rig.wire.cut = True
        await until(lambda: json.loads(path.read_text())["away_s"] is not None, task)
        rig.wire.cut = False
        await until(lambda: json.loads(path.read_text())["away_s"] is None, task)
        rig.finished = True
        with pytest.raises(RunFinishedError):
            await asyncio.wait_for(asyncio.shield(task), 20)
    member.show(ended="the run is finished; thank you")
    assert json.loads(path.read_text())["ended"].startswith("the run is finished")


# --- promises about the ledger ------------------------------------------------------------------------------------


async def test_a_growing_ledger_is_followed_and_asked_about_once_a_minute(rig, tmp_path):
    time = Time()
    rig.size = 10
    member = rig.member(tmp_path / "home", time)
    await member.join()
    assert member.heads.kept.size == 10
    async with beating(member) as task:
        rig.size = 20
        await until(lambda: member.heads.kept.size == 20, task)
        rig.size = 33
        await until(lambda: member.heads.size == 33, task)
        for _ in range(5):
            member.newest_step = 0
            await until(lambda: member.newest_step == 7, task)
        assert member.heads.kept.size == 20
        time.passes(ASK_EVERY_S)
        rig.time_s += ASK_EVERY_S
        await until(lambda: member.heads.kept.size == 33, task)
    again = rig.member(tmp_path / "home", time)
    assert again.heads.kept.size == 33 and not again.heads.conflict


async def test_two_roots_of_one_size_end_the_node_and_both_signatures_are_kept(rig, tmp_path):
    rig.size = 10
    member = rig.member(tmp_path / "home")
    await member.join()
    rig.leaves[3] = leaf_hash(b"another history")
    with pytest.raises(HeadsConflictError, match="two different ledgers"):
        await ending(member)
    kept = [parse(path.read_bytes()) for path in (tmp_path / "home" / "conflict").iterdir()]
    heads = [envelope.record(TreeHead) for envelope in kept]
    assert {envelope.signer for envelope in kept} == {rig.coordinator.public}
    assert len(heads) == 2 and heads[0].size == heads[1].size and heads[0].root != heads[1].root
    assert rig.member(tmp_path / "home").heads.conflict  # the next start still knows


async def test_a_proof_that_never_fits_is_said_loudly_and_the_node_goes_on(rig, tmp_path, capsys):
    time = Time()
    rig.size = 10
    member = rig.member(tmp_path / "home", time)
    await member.join()
    rig.size, rig.proof_broken = 20, True
    async with beating(member) as task:
        for times in range(1, WRONG_PROOFS + 2):
            await until(lambda times=times: len(events(tmp_path / "home", "heads.wrong-proof")) >= times, task)
            assert ("heads-conflict" in capsys.readouterr().out) == (times == WRONG_PROOFS)
            time.passes(ASK_EVERY_S)
            rig.time_s += ASK_EVERY_S
        assert member.heads.kept.size == 10 and not task.done()
    assert len(list((tmp_path / "home" / "conflict").iterdir())) == 2


async def test_a_head_that_the_coordinator_did_not_sign_is_no_promise(rig, tmp_path):
    rig.size = 10
    member = rig.member(tmp_path / "home")
    await member.join()
    honest, rig.coordinator = rig.coordinator, identity("stranger")
    forged = rig.tree(10, [leaf_hash(b"x")] * 10)
    rig.coordinator = honest
    rig.tree = lambda size, leaves=None: forged
    async with beating(member) as task:
        await until(lambda: bool(events(tmp_path / "home", "heads.invalid")), task)
        assert not task.done() and not member.heads.conflict


@pytest.mark.parametrize(("role", "shown"), [("inference", "probation"), ("relay", "active"), ("validator", "active")])
async def test_who_has_the_operators_grant_is_in_no_probation(rig, tmp_path, role, shown):
    rig.state = "probation"
    member = rig.member(tmp_path / role, role=role)
    await member.join()
    assert member.picture()["state"] == shown
    member.policy = (0, 56)
    assert member.picture()["newest_step"] == 56, "weights that are here were published"


async def test_a_node_stopped_after_the_end_says_that_the_run_is_finished(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    await member.hear_the_end()
    assert member.stopped_words == "stopped by its owner"
    rig.finished = True
    await member.hear_the_end()
    assert member.stopped_words == "the run is finished; stopped by its owner"
    alone = rig.member(tmp_path / "alone", role="relay")
    await alone.join()
    rig.wire.cut = True
    await alone.hear_the_end()
    assert alone.stopped_words == "stopped by its owner"
    alone.policy = (0, rig.genesis.manifest.steps)
    assert f"has done all its {rig.genesis.manifest.steps} steps" in alone.stopped_words


async def test_who_is_told_to_come_back_much_later_asks_at_once_whether_the_run_is_over(rig, tmp_path):
    member = rig.member(tmp_path / "home")
    await member.join()
    member._heartbeat_s = 3600.0
    task = asyncio.create_task(member.heartbeats())
    await until(lambda: member.newest_step == 7, task)
    rig.finished = True
    member.ask_soon()
    with pytest.raises(RunFinishedError):
        await asyncio.wait_for(task, 10)
