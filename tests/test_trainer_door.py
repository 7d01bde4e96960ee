"""The coordinator's doors taken apart: what one stranger, or one lying validator, may not do to everybody else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import zstandard
from aiohttp import web
from blake3 import blake3

from protocol import codec
from protocol.clock import Clock
from protocol.control import Member
from protocol.envelope import Envelope, seal
from protocol.errors import DecodeError, ReasonCode
from protocol.identity import Identity, load_identity
from protocol.ledger import StoredEntry
from protocol.limits import details_bound, submission_raw_bound
from protocol.records import (
    ACCEPT,
    JoinRequest,
    Lease,
    Number,
    Outcome,
    RolloutDetail,
    UploadIntent,
    Verdict,
    VerdictDetails,
)
from shardcast.records import Head
from tests.scripted_swarm import NOISE, SMALL, submission_of
from trainer import batches, config, leases
from trainer.coordinator import Coordinator
from trainer.door import Door, Slots
from trainer.init import make_run

NODE, VALIDATOR, SECOND = (Identity.from_seed(bytes([n]) * 32) for n in (11, 12, 13))


class Later(Clock):
    """A wall clock that a test moves."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


@dataclass
class Desk:
    """A coordinator's parts in this process, with its HTTP application on a port; no libp2p host."""

    coordinator: Coordinator
    clock: Later
    url: str
    http: aiohttp.ClientSession
    sequence: int = 0

    def sealed(self, who: Identity, kind: str, record: object) -> Envelope:
        self.sequence += 1
        run = self.coordinator.run
        return seal(
            who,
            kind,
            record,
            run=run.id,
            sequence=self.sequence,
            issued_at=self.clock.now_ms(),
            audience=run.manifest.coordinator,
        )

    async def join(self, who: Identity, role: str, **changes: str) -> None:
        values = {"name": role, "software": "", "engine": "", **changes}
        request = JoinRequest(
            role, values["name"], who.public, bytes(16), values["software"], (256,), (), values["engine"]
        )
        await self.coordinator.members.join(Member(self.sealed(who, "join", request), who.public), request, b"")

    async def lease(self) -> Lease:
        """The node's next lease, as the desk decides and signs it."""
        book, leasing = self.coordinator.book, self.coordinator.leasing
        if book.state.newest_policy is None:
            origin = load_identity(self.coordinator.run_dir / "keys" / "origin.pem")
            head = Head(0, 0, bytes(16), bytes(32), bytes(32), 0)
            book.append("policy", subject=self.sealed(origin, "head", head).raw)
        node = book.state.nodes[NODE.public]
        decision = leases.decide(
            book.state,
            book.window,
            node,
            capacity=64,
            uploading=frozenset(),
            secret=book.secret,
            bounds=leasing.bounds,
            now_ms=self.clock.now_ms(),
        )
        assert decision.lease is not None, decision.reason
        await leasing._issue(node, decision.lease)
        return decision.lease

    async def put(self, lease: Lease, blob: bytes, **changes: int) -> tuple[int, str]:
        """Upload; returns status and reason code."""
        values = {"raw_length": zstandard.frame_content_size(blob), **changes}
        intent = UploadIntent(lease.lease_id, len(blob), values["raw_length"], blake3(blob).digest())
        headers = {"Headwater-Intent": base64.b64encode(self.sealed(NODE, "intent", intent).raw).decode()}
        async with self.http.put(f"{self.url}/submissions/{lease.lease_id.hex()}", data=blob, headers=headers) as reply:
            return reply.status, "" if reply.status == 200 else (await reply.json())["code"]

    def verdict(self, index: int, which: float) -> tuple[Member, Verdict, bytes]:
        """An accepting verdict of the drawn validator on a submission, and a number by which to tell its details."""
        book = self.coordinator.book
        submission = book.state.submissions[index]
        job = submission.jobs[1]
        who = next(key for key in (VALIDATOR, SECOND) if key.public == job.validator)
        count = len(submission.outcomes)
        claimed = batches.read_submission(self.coordinator.files, submission).rollouts
        details = (RolloutDetail(one.logprobs, one.reward, (Number("which", which),)) for one in claimed)
        raw = codec.encode(VerdictDetails(tuple(details)))
        outcomes = (Outcome(ACCEPT, "holds"),) * count
        verdict = Verdict(job.job_id, submission.intent.digest, 1, outcomes, blake3(raw).digest(), 1)
        return Member(self.sealed(who, "verdict", verdict), who.public), verdict, raw


@contextlib.asynccontextmanager
async def open_desk(tmp_path: Path) -> AsyncIterator[Desk]:
    run_dir = tmp_path / "run"
    make_run(
        run_dir, steps=3, thresholds=NOISE, validators=[VALIDATOR.public, SECOND.public], overrides=SMALL, relays=[]
    )
    clock = Later()
    coordinator = Coordinator(config.load(run_dir), clock)
    (run_dir / "submissions").mkdir(exist_ok=True)
    coordinator.book.grant("validator", [VALIDATOR.public, SECOND.public])
    runner = web.AppRunner(coordinator.ingress.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/{coordinator.run.id.hex()}"
    async with aiohttp.ClientSession() as http:
        desk = Desk(coordinator, clock, url, http)
        try:
            await desk.join(NODE, "inference")
            yield desk
        finally:
            await runner.cleanup()
            coordinator.book.close()


async def test_two_different_verdicts_at_once_leave_the_details_that_the_ledger_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lying validator answers one job twice at once: the wrong file under the counted verdict would end the run."""
    from trainer import judging

    async with open_desk(tmp_path) as desk:
        await desk.join(VALIDATOR, "validator")
        await desk.join(SECOND, "validator")
        lease = await desk.lease()
        assert (await desk.put(lease, submission_of(lease)))[0] == 200
        index = desk.coordinator.book.state.leases[lease.lease_id].submission
        assert index is not None
        first, second = desk.verdict(index, 1.0), desk.verdict(index, 0.0)
        write, slow = judging.write_atomic, [0.0, 0.3]

        def write_atomic(path: Path, data: bytes) -> None:
            time.sleep(slow.pop())
            write(path, data)

        monkeypatch.setattr(judging, "write_atomic", write_atomic)
        notes = await asyncio.gather(
            desk.coordinator.judging.verdict(*first), desk.coordinator.judging.verdict(*second)
        )
        assert sorted(ack.note for ack in notes) == ["already counted", "counted"]
        counted = desk.coordinator.book.state.submissions[index].verdicts[1].verdict
        kept = desk.coordinator.files.details(lease.lease_id, 1).read_bytes()
        assert blake3(kept).digest() == counted.details


async def test_a_receipt_and_an_acknowledgement_are_given_only_for_what_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, their name, the ledger, then the promise. Killing a process can't show it: the kernel keeps its pages."""
    from trainer import ingress, judging

    async with open_desk(tmp_path) as desk:
        await desk.join(VALIDATOR, "validator")
        await desk.join(SECOND, "validator")
        lease = await desk.lease()
        files, ledger = desk.coordinator.files, desk.coordinator.book.ledger
        done: list[str] = []
        fsync, fsync_dir, flush, write = os.fsync, ingress.fsync_dir, ledger._flush, judging.write_atomic
        disk = threading.Event()

        def slow_flush(batch: list[StoredEntry]) -> None:
            disk.wait(30)
            flush(batch)
            done.append("ledger")

        def fsync_seen(fd: int) -> None:
            fsync(fd)
            if lease.lease_id.hex() in str(Path(f"/proc/self/fd/{fd}").readlink()):
                done.append("bytes")

        def fsync_dir_seen(path: Path) -> None:
            assert files.submission(lease.lease_id).exists()
            done.append("name")
            fsync_dir(path)

        def write_seen(path: Path, data: bytes) -> None:
            write(path, data)
            done.append("details")

        monkeypatch.setattr(ingress.os, "fsync", fsync_seen)
        monkeypatch.setattr(ingress, "fsync_dir", fsync_dir_seen)
        monkeypatch.setattr(judging, "write_atomic", write_seen)
        monkeypatch.setattr(ledger, "_flush", slow_flush)
        upload = asyncio.create_task(desk.put(lease, submission_of(lease)))
        await asyncio.wait([upload], timeout=0.5)
        assert not upload.done(), "a receipt before the ledger was on the disk"
        disk.set()
        assert (await upload)[0] == 200
        assert done == ["bytes", "name", "ledger"]

        index = desk.coordinator.book.state.leases[lease.lease_id].submission
        assert index is not None
        disk.clear()
        done.clear()
        verdict = asyncio.create_task(desk.coordinator.judging.verdict(*desk.verdict(index, 1.0)))
        await asyncio.wait([verdict], timeout=0.5)
        assert not verdict.done(), "acknowledged before the ledger was on the disk"
        disk.set()
        assert (await verdict).note == "counted"
        assert [step for step in done if step != "bytes"][:2] == ["details", "ledger"]


async def test_an_upload_must_begin_within_its_lease_and_fit_it(tmp_path: Path) -> None:
    """Begun again and again, uploads would keep a lease open for ever; a huge one costs whoever decodes it."""
    async with open_desk(tmp_path) as desk:
        lease = await desk.lease()
        bound = submission_raw_bound(len(lease.tasks) * lease.samples, lease.max_new_tokens)
        assert await desk.put(lease, submission_of(lease), raw_length=bound + 1) == (413, "oversize")
        desk.clock.ahead_ms = lease.duration_ms + leases.GRACE_MS + 1000
        assert await desk.put(lease, submission_of(lease)) == (410, "lease-closed")
        desk.clock.ahead_ms = lease.duration_ms
        assert (await desk.put(lease, submission_of(lease)))[0] == 200


async def test_other_answers_to_one_lease_are_kept_up_to_a_number(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        lease = await desk.lease()
        assert (await desk.put(lease, submission_of(lease)))[0] == 200
        answers = await asyncio.gather(*(desk.put(lease, submission_of(lease, salt)) for salt in range(1, 25)))
        assert {code for _, code in answers} == {"conflicting-submission"}
        assert len(list((desk.coordinator.run_dir / "submissions").glob("*.conflict-*"))) == 4


async def test_a_token_that_is_no_hex_is_a_wrong_token(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        for token in ("é", "ÿ", ""):
            async with desk.http.get(f"{desk.url}/jobs/{bytes(16).hex()}", headers={"Headwater-Token": token}) as reply:
                assert (reply.status, (await reply.json())["code"]) == (404, "unknown-job")


async def test_details_are_bounded_by_their_lease_before_they_are_decoded(tmp_path: Path) -> None:
    """Eight megabytes of empty arrays cost a decoder fifty times that."""
    async with open_desk(tmp_path) as desk:
        await desk.join(VALIDATOR, "validator")
        lease = await desk.lease()
        await desk.put(lease, submission_of(lease))
        book = desk.coordinator.book
        index = book.state.leases[lease.lease_id].submission
        assert index is not None
        _, verdict, _ = desk.verdict(index, 0.0)
        raw = b"\x90" * (details_bound(len(verdict.outcomes), lease.max_new_tokens) + 1)
        lying = Verdict(verdict.job_id, verdict.digest, 1, verdict.outcomes, blake3(raw).digest(), 1)
        with pytest.raises(DecodeError) as caught:
            submission = book.state.submissions[index]
            opens = lambda: batches.read_submission(desk.coordinator.files, submission)  # noqa: E731
            judging = desk.coordinator.judging
            batches.check_details(lying, raw, submission, lease, opens, judging.trainable, judging.prompt_ids, 1.0)
        assert caught.value.code is ReasonCode.OVERSIZE


@pytest.mark.parametrize("field", ["name", "software", "engine"])
async def test_what_people_are_shown_is_one_line_and_moves_no_cursor(tmp_path: Path, field: str) -> None:
    async with open_desk(tmp_path) as desk:
        for text in ("\x1b[2Jowned", "two\nlines", "\u202eevil"):
            with pytest.raises(DecodeError):
                await desk.join(Identity.generate(), "inference", **{field: text})
        await desk.join(Identity.generate(), "inference", **{field: "Zoë’s GPU"})


# --- the listener alone -------------------------------------------------------------------------------------------


def test_one_address_holds_its_share_of_connections_and_gives_it_back() -> None:
    slots = Slots(16)
    assert [slots.take("203.0.113.5") for _ in range(5)] == [True] * 4 + [False]
    assert all(slots.take(f"198.51.100.{n}") for n in range(12)) and not slots.take("192.0.2.1")
    slots.give_back("203.0.113.5")
    assert slots.take("203.0.113.5") and not slots.take("203.0.113.5")
    loopback = Slots(16)
    assert [loopback.take("127.0.0.1") for _ in range(17)] == [True] * 16 + [False]


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.door.UNREAD_S", 0.3)
    size = 16 << 20

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(size))

    app = web.Application()
    app.router.add_get("/", large)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    door = Door(app, f"127.0.0.1:{port}", 8)
    await door.start()
    try:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", port))
            await loop.sock_sendall(slow, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(1.5)
            got = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    while piece := await loop.sock_recv(slow, 1 << 20):
                        got += len(piece)
            assert got < size
    finally:
        await door.close()
        assert not door._slots._held


async def test_what_only_people_read_neither_ends_the_coordinator_nor_moves_their_cursor(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        status, news = desk.coordinator.status, desk.coordinator.news
        status.path = tmp_path / "gone" / "status.json"
        status.write("running")
        status.write("running")
        told = [event for event in news.events if "is not up to date" in str(event["text"])]
        assert len(told) == 1, "said once, not once a second"
        status.path = tmp_path / "status.json"
        status.write("running")
        assert status.path.exists()
        news.say("hello \x1b[2Jthere\nand more")
        text = str(news.events[-1]["text"])
        assert text.isprintable() and "there" in text
