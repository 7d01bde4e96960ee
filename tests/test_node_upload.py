"""Uploads over real HTTP: what a node does with every answer, and that nothing finished is ever lost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os

import aiohttp
import pytest
import zstandard
from aiohttp import web
from blake3 import blake3

from node.backoff import LONGEST_ASKED_S, LONGEST_S, Backoff
from node.log import EventLog
from node.receipts import ReceiptStore
from node.upload import INTENT_HEADER, Outbox, Uploader, UploadRefusedError, compress, read_refusal
from protocol import codec
from protocol.control import Clock
from protocol.envelope import open_envelope, seal
from protocol.errors import ReasonCode
from protocol.identity import Identity
from protocol.records import Receipt, Rollout, Submission, UploadIntent
from protocol.sequences import Sequences
from tests.archive_builder import Chain, identity

LEASE = b"L" * 16
OWNER = identity("node")


def blob_of(lease_id: bytes = LEASE, size: int = 3) -> bytes:
    rollouts = tuple(Rollout(1, i, b"\1\0\0\0" * 8, os.urandom(32), 0, 1.0, (os.urandom(514),)) for i in range(size))
    return compress(Submission(lease_id, "test", rollouts))


class Ingress:
    """A real HTTP server that answers uploads as the test scripts it: one answer per request, then receipts."""

    def __init__(self, run) -> None:
        self.run = run
        self.script: list[object] = []
        self.bodies: list[bytes] = []
        self.intents: list[tuple[int, UploadIntent]] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_put(f"/v1/{self.run.id.hex()}/submissions/{{lease}}", self._put)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _put(self, request: web.Request) -> web.Response:
        raw = base64.b64decode(request.headers[INTENT_HEADER], validate=True)
        envelope = open_envelope(
            raw, run=self.run.id, kind="intent", signer=OWNER.public, audience=identity("coordinator").public
        )
        intent = envelope.record(UploadIntent)
        assert request.match_info["lease"] == intent.lease_id.hex()
        body = await request.read()
        assert len(body) == intent.length and blake3(body).digest() == intent.digest
        assert zstandard.get_frame_parameters(body).content_size == intent.raw_length
        self.bodies.append(body)
        self.intents.append((envelope.sequence, intent))
        answer = self.script.pop(0) if self.script else {}
        if answer == "drop":
            request.transport.close()
            return web.Response()
        if isinstance(answer, web.Response):
            return answer
        return web.Response(body=self.receipt(intent, **answer))

    def receipt(self, intent: UploadIntent, signer: Identity | None = None, audience: bytes = OWNER.public, **changes):
        fields = {"lease_id": intent.lease_id, "digest": intent.digest, "index": 3, "leaf": bytes(32), "tree_size": 4,
                  "tree_root": bytes(32), "time": 1, **changes}  # fmt: skip
        sealed = seal(
            signer or identity("coordinator"), "receipt", Receipt(**fields), run=self.run.id, sequence=1,
            issued_at=Clock().now_ms(), audience=audience,
        )  # fmt: skip
        return sealed.raw


def refusal(status: int, code: str, **headers: str) -> web.Response:
    return web.json_response({"code": code, "message": "because"}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def sending(folder, run):
    ingress = Ingress(run)
    await ingress.start()
    (folder / "submissions" / "refused").mkdir(parents=True, exist_ok=True)
    (folder / "receipts").mkdir(exist_ok=True)
    async with aiohttp.ClientSession() as session:
        uploader = Uploader(
            run=lambda: run,
            identity=OWNER,
            sequences=Sequences(folder / "sequences.json"),
            clock=Clock(),
            ingress=lambda: ingress.url,
            outbox=Outbox(folder / "submissions"),
            receipts=ReceiptStore(folder / "receipts"),
            session=session,
            log=EventLog(file=folder / "log.jsonl"),
        )
        try:
            yield ingress, uploader
        finally:
            await ingress.stop()


@pytest.fixture(scope="module")
def run():
    return Chain().run


async def test_a_submission_leaves_the_disk_only_after_its_receipt_is_on_it(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        blob = blob_of()
        uploader.outbox.put(LEASE, blob)
        assert uploader.outbox.waiting() == [LEASE]
        receipt = await uploader.send(LEASE)
        assert receipt.index == 3 and ingress.bodies == [blob]
        assert LEASE in uploader.receipts and uploader.outbox.waiting() == []


async def test_what_time_may_heal_is_tried_again_with_the_same_bytes_and_a_new_intent(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        uploader.outbox.put(LEASE, blob_of())
        ingress.script = [
            "drop",
            refusal(429, "busy", **{"Retry-After": "1"}),
            refusal(500, "internal"),
            refusal(401, "expired"),
            web.Response(status=502, text="<html>a proxy's own words</html>"),
        ]
        await uploader.send(LEASE)
        assert len(ingress.bodies) == 6 and len(set(ingress.bodies)) == 1
        # aiohttp itself repeats an idempotent request, bit by bit, when a kept connection turns out to be closed.
        sequences = [sequence for sequence, _ in ingress.intents]
        assert sequences == sorted(sequences) and len(set(sequences)) >= 5
        assert LEASE in uploader.receipts


async def test_receipts_that_do_not_hold_are_never_believed(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        uploader.outbox.put(LEASE, blob_of())
        ingress.script = [
            {"signer": identity("stranger")},
            {"digest": bytes(32)},
            {"lease_id": bytes(16)},
            {"audience": identity("other").public},
            {"index": 4},
            web.Response(body=b"\x00" * 500),
        ]
        wrong = len(ingress.script)
        await uploader.send(LEASE)
        assert len(ingress.bodies) == wrong + 1
        log = (tmp_path / "log.jsonl").read_text()
        assert log.count("does not hold") == wrong


@pytest.mark.parametrize(
    ("status", "code", "tries"),
    [
        (410, "lease-closed", 1), (404, "unknown-lease", 1), (403, "not-owner", 1), (409, "conflicting-submission", 1),
        (413, "oversize", 1), (403, "suspended", 1), (400, "hash-mismatch", 3), (400, "malformed", 3),
    ],
)  # fmt: skip
async def test_a_final_refusal_keeps_the_bytes_aside_and_says_why(tmp_path, run, status, code, tries):
    async with sending(tmp_path, run) as (ingress, uploader):
        blob = blob_of()
        uploader.outbox.put(LEASE, blob)
        ingress.script = [refusal(status, code) for _ in range(5)]
        with pytest.raises(UploadRefusedError) as caught:
            await uploader.send(LEASE)
        assert caught.value.code == ReasonCode(code)
        assert len(ingress.bodies) == tries
        assert uploader.outbox.waiting() == [] and LEASE not in uploader.receipts
        assert (tmp_path / "submissions" / "refused" / f"{LEASE.hex()}.hws").read_bytes() == blob


async def test_a_process_that_died_before_its_receipt_sends_the_same_bytes_next_time(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        blob = blob_of()
        uploader.outbox.put(LEASE, blob)
        ingress.script = ["drop"] * 50
        task = asyncio.create_task(uploader.send(LEASE))
        await asyncio.sleep(0.5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        first = [sequence for sequence, _ in ingress.intents]
    async with sending(tmp_path, run) as (ingress, uploader):  # a new process: everything is read from disk
        assert uploader.outbox.waiting() == [LEASE]
        await uploader.send(LEASE)
        assert ingress.bodies == [blob]
        assert ingress.intents[0][0] > max(first)


async def test_an_absent_coordinator_is_waited_for(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        port = int(ingress.url.rpartition(":")[2])
        await ingress.stop()
        uploader.outbox.put(LEASE, blob_of())
        task = asyncio.create_task(uploader.send(LEASE))
        await asyncio.sleep(0.7)
        assert not task.done()
        await ingress.start(port)
        async with asyncio.timeout(20):
            await task
        assert LEASE in uploader.receipts


async def test_a_quota_is_honoured_and_said_once(tmp_path, run, monkeypatch, capsys):
    waits = []

    async def wait(self, at_least_s=0.0):
        waits.append(self.delay(at_least_s))

    monkeypatch.setattr(Backoff, "wait", wait)
    async with sending(tmp_path, run) as (ingress, uploader):
        uploader.outbox.put(LEASE, blob_of())
        ingress.script = [
            refusal(429, "quota", **{"Retry-After": "90"}),
            refusal(507, "busy", **{"Retry-After": "10"}),
            refusal(429, "quota", **{"Retry-After": "99999999999999"}),
            refusal(429, "busy", **{"Retry-After": "2"}),
        ]
        told = []
        uploader._log.say = lambda sentence: told.append((sentence, uploader.waits_for))
        await uploader.send(LEASE)
        assert uploader.waits_for == "" and uploader.bytes_sent == 5 * len(ingress.bodies[0])
    assert waits[0] >= 90 and waits[1] >= 10 and waits[3] >= 2 and max(waits) <= LONGEST_ASKED_S
    assert len(told) == 1  # once for all the waiting, with the reason and how long
    assert "quota" in told[0][0] and "90 s" in told[0][0] and "because" in told[0][1]


async def test_a_changed_coordinator_key_is_looked_for_and_the_upload_goes_on(tmp_path, run):
    async with sending(tmp_path, run) as (ingress, uploader):
        asked = []

        async def look():
            asked.append(True)

        uploader._on_refused = look
        uploader.outbox.put(LEASE, blob_of())
        ingress.script = [refusal(400, "wrong-audience"), {"signer": identity("coordinator-2")}]
        await uploader.send(LEASE)
        assert len(asked) == 2 and LEASE in uploader.receipts


def test_refusals_are_read_totally():
    assert read_refusal(b'{"code": "busy", "message": "later"}', 429) == (ReasonCode.BUSY, "later")
    for body in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"code": "dance", "message": "x"}',
        b'{"code": 1}',
        b"\xff",
        b"[" * 9999,
    ):
        assert read_refusal(body, 500)[0] == ReasonCode.INTERNAL


def test_backoff_grows_to_its_bound_and_respects_the_peer():
    backoff = Backoff()
    delays = [backoff.delay() for _ in range(20)]
    assert delays[0] <= 0.2 and LONGEST_S / 2 <= delays[-1] <= LONGEST_S
    assert backoff.delay(30.0) == 30.0
    assert backoff.delay(1e9) == LONGEST_ASKED_S
    backoff.reset()
    assert backoff.delay() <= 0.2


def test_a_compressed_submission_declares_its_size():
    blob = blob_of(size=50)
    size = zstandard.get_frame_parameters(blob).content_size
    raw = zstandard.ZstdDecompressor().decompress(blob)
    assert len(raw) == size
    assert len(codec.decode(Submission, raw).rollouts) == 50
