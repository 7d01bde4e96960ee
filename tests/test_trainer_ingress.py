"""The HTTP door of a real coordinator: what is taken, what is refused, and when."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import zstandard
from blake3 import blake3

from protocol.frames import ControlFrame, pack_frame, unpack_frame
from protocol.manifest import open_manifest
from protocol.records import Ack, Heartbeat, LeaseFailed
from protocol.segments import read_segments
from protocol.state import fold
from tests.scripted_swarm import Actor, Swarm, Upload, actor_identity, honest, submission_of


def code(upload: Upload) -> tuple[int, str]:
    return upload.status, json.loads(upload.body)["code"]


async def leased(swarm: Swarm, name: str):
    actor = await swarm.join(name)
    return actor, await actor.lease()


async def test_uploads_are_refused_before_their_first_byte_and_nobody_else_notices(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", ingress__max_submission_bytes=4096)
    async with swarm:
        swarm.publish(0)
        node, lease = await leased(swarm, "node")
        other, others = await leased(swarm, "other")
        blob = submission_of(lease)
        put, intent, name = node.put, node.intent, lease.lease_id
        good = intent(name, blob)

        missing = await put(name, blob, b"")
        assert code(missing) == (400, "malformed")
        assert code(await put(name, blob, bytes(5000))) == (400, "malformed")
        assert code(await put(name, blob, b"no envelope")) == (400, "malformed")
        forged = good[:-1] + bytes([good[-1] ^ 1])
        assert code(await put(name, blob, forged)) == (401, "bad-signature")
        assert code(await put(name, blob, other.intent(name, blob))) == (403, "not-owner")
        assert code(await put(bytes(16), blob, intent(bytes(16), blob))) == (404, "unknown-lease")
        assert code(await put(others.lease_id, blob, good)) == (404, "unknown-lease")
        assert code(await put(name, blob, intent(name, blob, length=len(blob) + 1))) == (400, "length-mismatch")
        assert code(await put(name, bytes(5000), intent(name, bytes(5000)))) == (413, "oversize")
        assert code(await put(name, blob, intent(name, blob, raw_length=1 << 40))) == (413, "oversize")
        assert code(await put(name, blob, intent(name, blob, digest=bytes(32)))) == (400, "hash-mismatch")
        assert list((swarm.run_dir / "submissions").iterdir()) == [], "nothing refused is kept"

        taken = await node.upload(lease)
        assert taken.status == 200, taken.body
        receipt = node.receipts[name]
        assert receipt.digest == blake3(blob).digest() and receipt.tree_size > receipt.index
        assert (swarm.run_dir / "submissions" / f"{name.hex()}.hws").read_bytes() == blob
        assert (await node.upload(lease)).status == 200
        assert node.receipts[name].index == receipt.index, "the same bytes again get the same entry's receipt"
        assert node.receipts[name].leaf == receipt.leaf
        assert code(await node.upload(lease, submission_of(lease, salt=1))) == (409, "conflicting-submission")
        evidence = list((swarm.run_dir / "submissions").glob("*.conflict-*"))
        assert len(evidence) == 1, "the second intent is kept"

        failed = await other.control.call("lease.failed", LeaseFailed(others.lease_id, "out of memory"), Ack)
        assert "closed" in failed.note
        assert code(await other.upload(others)) == (410, "lease-closed")
        late, fresh = await leased(swarm, "late")
        assert (await late.upload(fresh)).status == 200


async def test_quotas_and_deadlines_of_uploads(tmp_path: Path) -> None:
    """One upload in flight a lease, a bounded spool, no slow senders: with Retry-After where trying again helps."""
    swarm = Swarm.make(tmp_path / "run", ingress__max_submission_bytes=2 << 20, ingress__spool_bytes=1 << 20)
    async with swarm:
        swarm.publish(0)
        node, lease = await leased(swarm, "node")
        big, bigs = await leased(swarm, "big")
        blob = submission_of(lease)
        full = await big.put(bigs.lease_id, os.urandom(3 << 19), big.intent(bigs.lease_id, bytes(3 << 19)))
        assert code(full) == (507, "quota") and int(full.headers["Retry-After"]) > 0

        async with asyncio.timeout(60):
            slow = asyncio.create_task(_trickle(node, lease.lease_id, blob))
            header = asyncio.create_task(_endless_header(swarm))
            await asyncio.sleep(1.0)
            second = await node.put(lease.lease_id, blob, node.intent(lease.lease_id, blob))
            assert code(second) == (429, "busy") and int(second.headers["Retry-After"]) > 0
            assert "408" in await slow
            assert await header < 20, "a header that never ends is cut off"
        # The bytes are what was hashed: the door opens no Content-Encoding on its own.
        taken = await node.put(lease.lease_id, blob, node.intent(lease.lease_id, blob), {"Content-Encoding": "gzip"})
        assert taken.status == 200, taken.body


def _address(swarm: Swarm) -> tuple[str, int]:
    parts = urlsplit(swarm.ingress)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


async def _trickle(node: Actor, lease_id: bytes, blob: bytes) -> str:
    """Send a good intent, then the body a few bytes at a time; returns the answer's first line."""
    reader, writer = await asyncio.open_connection(*_address(node.swarm))
    intent = base64.b64encode(node.intent(lease_id, blob)).decode()
    path = f"/v1/{node.swarm.run.id.hex()}/submissions/{lease_id.hex()}"
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(blob)}\r\nHeadwater-Intent: {intent}\r\n\r\n"
    writer.write(head.encode() + blob[:20])
    await writer.drain()
    try:
        return (await reader.readline()).decode()
    finally:
        writer.close()


async def _endless_header(swarm: Swarm) -> float:
    """Send one header byte a second until the connection is cut; returns how long that took."""
    begun = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection(*_address(swarm))
    writer.write(b"PUT / HTTP/1.1\r\nHost: x\r\nX: ")
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reader.read(1)
    writer.close()
    return asyncio.get_running_loop().time() - begun


async def test_jobs_are_for_the_drawn_validator_only_and_control_messages_also_come_over_http(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", validators=1)
    async with swarm:
        swarm.publish(0)
        assert swarm.http is not None
        validator = await swarm.join("validator-0", "validator")
        node, lease = await leased(swarm, "node")
        await node.upload(lease)
        job = await validator.job()
        assert job is not None and job.round == 1
        assert node.identity.public not in job.lease, "a job does not say whose it is"
        assert code(await validator.fetch(job, token=bytes(16))) == (404, "unknown-job")
        assert (await validator.fetch(job)).body == submission_of(lease)
        assert (await validator.judge(job, honest)).note == "counted"
        assert code(await validator.fetch(job)) == (404, "unknown-job"), "a judged job is no longer served"

        async with swarm.http.get(f"{swarm.ingress}/manifest") as reply:
            assert open_manifest(await reply.read(), swarm.run.id).id == swarm.run.id
        frame = ControlFrame("heartbeat", node.control._seal("heartbeat", Heartbeat(0, 0, "", 0)))
        async with swarm.http.post(f"{swarm.ingress}/heartbeat", data=pack_frame(frame)) as reply:
            assert unpack_frame(await reply.read()).kind == "heartbeat.reply"
        async with asyncio.timeout(10):
            while json.loads((swarm.run_dir / "status.json").read_text())["http_fallbacks"] != 1:
                await asyncio.sleep(0.1)
    log = read_segments(swarm.run_dir / "ledger", swarm.run)
    state = fold([sealed.entry for sealed in log.entries])
    assert state.nodes[actor_identity("node").public].accepted == 2


async def test_members_are_refused_with_a_reason(tmp_path: Path) -> None:
    """Roles need grants, keys keep their role, and a stranger's validator gets no work."""
    import pytest

    from protocol.errors import ProtocolError, ReasonCode

    swarm = Swarm.make(tmp_path / "run", validators=1, relays=1)
    async with swarm:
        swarm.publish(0)
        node = await swarm.join("node")

        async def refused(work) -> ReasonCode:
            with pytest.raises(ProtocolError) as caught:
                await work
            return caught.value.code

        assert await refused(Actor(swarm, "stranger", "validator").join()) is ReasonCode.NOT_GRANTED
        assert await refused(Actor(swarm, "stranger", "king").join()) is ReasonCode.USAGE
        assert await refused(node.join(role="relay")) is ReasonCode.NOT_GRANTED
        assert await refused(node.join(versions=(0x0200,))) is ReasonCode.UPGRADE_REQUIRED
        assert await refused(node.join(transport_key=actor_identity("x").public)) is ReasonCode.NOT_OWNER
        assert await refused(node.job()) is ReasonCode.NOT_GRANTED
        assert await refused(Actor(swarm, "nobody", "inference").heartbeat()) is ReasonCode.NOT_JOINED
        # A relay's address is handed out only once it proved to be the relay's; nobody answers here.
        relay = await swarm.join("relay-0", "relay", ("http://127.0.0.1:9",))
        assert (await relay.heartbeat()).weights == (f"http://127.0.0.1:{_origin_port(swarm)}",)
        assert (await node.heartbeat()).weights == ()
        assert zstandard is not None


def _origin_port(swarm: Swarm) -> int:
    from trainer import config

    return int(config.load(swarm.run_dir).origin.listen.rsplit(":", 1)[1])
