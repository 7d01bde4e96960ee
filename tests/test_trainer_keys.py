"""Keys changed and taken back, rules changed, addresses blocked: by the commands, under a coordinator that serves."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from protocol.chain import RunUpdate, seal_update, split_updates
from protocol.errors import ProtocolError, ReasonCode, UsageError
from protocol.identity import load_identity, peer_id_text
from protocol.records import HeartbeatReply, TreeHead
from protocol.run_files import key_file, load_chain, update_file
from protocol.segments import read_segments
from protocol.state import RunState, fold
from tests.coordinator_desk import Desk
from tests.scripted_swarm import Actor, Swarm, actor_identity
from tests.test_trainer_cli import trainer
from trainer import config, keys


def command(*words: str) -> dict:
    done = trainer(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sealed_state(swarm: Swarm) -> RunState:
    """What an auditor makes of the sealed segments; fails on any damage or wrong signature."""
    log = read_segments(swarm.run_dir / "ledger", load_chain(swarm.run_dir).genesis)
    assert log.problems == []
    state = fold([sealed.entry for sealed in log.entries])
    assert state.problems == []
    return state


async def follow(swarm: Swarm, *actors: Actor) -> None:
    """What `node` does when its coordinator is signed by another key: walk the chain, go on with the newest link."""
    swarm.run = load_chain(swarm.run_dir).current
    for actor in actors:
        await actor.control.close()
        actor.reconnect()


async def until(ask, deadline_s: float = 60.0):
    """The first answer that is not None; what fails before that is asked again."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            answer = await ask()
            if answer is not None:
                return answer
        except (ProtocolError, aiohttp.ClientError, OSError) as exc:
            last = exc
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s:.0f} s: {last}") from exc
        assert time.monotonic() < end, f"not within {deadline_s:.0f} s"
        await asyncio.sleep(0.1)


@pytest.mark.heavy
async def test_a_coordinator_goes_on_with_the_key_its_root_gives_it_while_serving_and_while_away(
    tmp_path: Path,
) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=9)
    async with swarm:
        swarm.publish(0)
        node = await swarm.join("node")
        validator = await swarm.join("validator-0", "validator")
        lease = await node.lease()
        old = swarm.run.manifest.coordinator
        done = command("key", "rotate", "coordinator", str(swarm.run_dir))
        assert done["update"] == 1 and "begins again" in done["next"]
        before = node.intent(lease.lease_id, blob := node.submission(lease))  # signed for the key it knew

        async def updates() -> list[bytes] | None:
            assert swarm.http is not None
            async with swarm.http.get(f"{swarm.ingress}/updates") as reply:
                return split_updates(await reply.read()) or None

        assert len(await until(updates)) == 1
        await follow(swarm, node, validator)
        assert swarm.run.manifest.coordinator != old
        reply = await until(node.heartbeat)
        assert reply.manifest == load_chain(swarm.run_dir).hash
        assert (await node.put(lease.lease_id, blob, before)).status == 200
        job = await until(validator.job)
        await validator.judge(job)
        fresh = await until(node.lease)
        assert fresh.manifest == reply.manifest, "leases name the newest link"

        swarm.kill()  # and once more while nobody serves: the old key says that it is back, the new one goes on
        command("key", "rotate", "coordinator", str(swarm.run_dir))
        swarm.serve()
        await follow(swarm, node, validator)
        assert (await until(node.heartbeat)).manifest == load_chain(swarm.run_dir).hash
        used = command("status", str(swarm.run_dir))
        assert used["ledger_problems"] == 0
    state = sealed_state(swarm)
    assert state.chain is not None and len(state.chain.keys("coordinator")) == 3
    assert state.incarnation == 2


async def test_revoked_keys_are_refused_with_the_reason_and_not_drawn(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=9)
    async with swarm:
        swarm.publish(0)
        node = await swarm.join("node")
        first = await swarm.join("validator-0", "validator")
        second = await swarm.join("validator-1", "validator")
        lease = await node.lease()
        for actor, why in ((first, "laptop stolen"), (node, "asked for it")):
            command("key", "revoke", peer_id_text(actor.identity.public), str(swarm.run_dir), "--reason", why)

        async def refused(actor: Actor) -> ProtocolError | None:
            try:
                await actor.heartbeat()
            except ProtocolError as exc:
                if exc.code is ReasonCode.KEY_REVOKED:
                    return exc
            return None

        assert "laptop stolen" in str(await until(lambda: refused(first)))
        assert "asked for it" in str(await until(lambda: refused(node)))
        with pytest.raises(ProtocolError, match="revoked"):
            await node.join()
        assert (await node.upload(lease)).status == 403
        other = await swarm.join("other")
        await other.upload(await other.lease())
        assert await until(second.job) is not None
        again = trainer("key", "revoke", peer_id_text(node.identity.public), str(swarm.run_dir), "--reason", "x")
        assert again.returncode == 2 and "already revoked" in again.stderr

        async def told() -> bool | None:
            news = json.loads((swarm.run_dir / "status.json").read_text())["recent_events"]
            return any("is revoked (laptop stolen)" in event["text"] for event in news) or None

        await until(told)
    state = sealed_state(swarm)
    assert state.present == (second.identity.public,)
    assert state.nodes[node.identity.public].reason == "key-revoked"
    assert state.leases[lease.lease_id].status == "closed"


async def test_new_rules_count_from_their_entry_on_and_heads_prove_that_the_ledger_only_grew(tmp_path: Path) -> None:
    from protocol.envelope import open_envelope
    from protocol.merkle import verify_consistency

    swarm = Swarm.make(tmp_path / "run", steps=9)
    async with swarm:
        swarm.publish(0)
        node = await swarm.join("node")

        def head(reply: HeartbeatReply) -> TreeHead:
            run = swarm.run
            return open_envelope(reply.tree, run=run.id, kind="tree", signer=run.manifest.coordinator).record(TreeHead)

        old = head(await node.heartbeat())
        chain = load_chain(swarm.run_dir)
        rules = replace(chain.current.manifest.leases, probation_first_rollouts=3, samples_per_task=3)
        root = load_identity(swarm.run_dir / "keys" / "root.pem")
        raw = seal_update(root, chain, RunUpdate(leases=rules, note="smaller"), sequence=1, issued_at=1)
        update_file(swarm.run_dir, 1).parent.mkdir()
        update_file(swarm.run_dir, 2).write_bytes(b"no update: there is a gap before it anyway")
        update_file(swarm.run_dir, 1).write_bytes(raw)
        digest = chain.extend(raw).hash

        async def followed() -> HeartbeatReply | None:
            reply = await node.heartbeat()
            return reply if reply.manifest == digest and head(reply).size > old.size else None

        new = head(await until(followed))
        lease = await node.lease()
        assert lease.samples == 3 and lease.manifest == digest
        assert swarm.http is not None
        async with swarm.http.get(f"{swarm.ingress}/consistency?first={old.size}&second={new.size}") as reply:
            data = await reply.read()
        proof = [data[at : at + 32] for at in range(0, len(data), 32)]
        assert verify_consistency(old.size, new.size, old.root, new.root, proof)
        for wrong in ("first=0&second=1", "first=1&second=99999999", "first=5&second=2", "first=x&second=2", ""):
            async with swarm.http.get(f"{swarm.ingress}/consistency?{wrong}") as reply:
                assert reply.status in (400, 404), wrong


@pytest.mark.heavy
async def test_a_blocked_address_has_no_traffic_with_the_run_within_seconds_until_it_is_allowed_again(
    tmp_path: Path,
) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=9)
    async with swarm:
        node = await swarm.join("node")
        elsewhere = aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.9", 0)))
        async with elsewhere:

            async def manifest(session: aiohttp.ClientSession) -> bool:
                try:
                    async with session.get(f"{swarm.ingress}/manifest", timeout=aiohttp.ClientTimeout(5)) as reply:
                        return reply.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    return False

            assert await manifest(elsewhere)
            assert command("block", "127.0.0.9", str(swarm.run_dir)) == {"blocked": ["127.0.0.9/32"]}

            async def cut() -> bool | None:
                return None if await manifest(elsewhere) else True

            await until(cut, 30)
            assert swarm.http is not None
            assert await manifest(swarm.http) and await node.heartbeat(), "nobody else notices"
            command("block", "127.0.0.0/8", str(swarm.run_dir))

            async def silent() -> bool | None:
                try:
                    await node.control.call("heartbeat", node.beat(), HeartbeatReply, deadline_s=2)
                except ProtocolError:
                    return True
                return None

            await until(silent, 30)
            for address in ("127.0.0.9", "127.0.0.0/8"):
                command("block", address, str(swarm.run_dir), "--undo")
            await until(node.heartbeat, 30)
            assert await manifest(elsewhere)
    assert trainer("block", "nowhere", str(swarm.run_dir)).returncode == 2


def test_keys_are_changed_by_the_holder_of_the_root_key_alone_and_one_crash_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    settings = config.load(desk.run_dir)
    root, aside = desk.run_dir / "keys" / "root.pem", tmp_path / "root.pem"
    online = load_chain(desk.run_dir).current.manifest
    with pytest.raises(UsageError, match="trainer key rotate origin"):
        keys.revoke(settings, peer_id_text(online.origin), "stolen", None)
    root.rename(aside)
    with pytest.raises(UsageError, match="--root PATH"):
        keys.rotate(settings, "origin", None)
    with pytest.raises(UsageError, match="not the root key of this run"):
        keys.rotate(settings, "origin", desk.run_dir / "keys" / "origin.pem")
    with pytest.raises(UsageError, match="no peer id"):
        keys.revoke(settings, "nobody", "x", aside)
    left = desk.run_dir / "keys" / "origin-1.pem"  # a crash after the key and before the update
    from protocol.identity import load_or_create_identity

    public = load_or_create_identity(left).public
    done = keys.rotate(settings, "origin", aside)
    assert done["file"] == str(left)
    chain = load_chain(desk.run_dir)
    assert chain.current.manifest.origin == public and key_file(desk.run_dir, "origin", public) == left
    keys.revoke(settings, peer_id_text(online.origin), "rotated out", aside)
    done = keys.rotate(settings, "transport", aside)
    manifest = load_chain(desk.run_dir).current.manifest
    assert manifest.control[0].endswith(done["peer_id"])
    assert done["peer_id"] == peer_id_text(manifest.coordinator_transport)
    desk.close()
    desk.open()
    assert desk.state.problems == [] and len(desk.state.chain.links) == 3
    assert desk.book.origins() == (public,), "the revoked one counts no more"
    assert actor_identity("x").public not in desk.book.coordinators()
    desk.close()
