"""Who is served and who lied: passes at the door, stamps on the shards, reports with proof."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3

from protocol.envelope import seal
from protocol.errors import EnvelopeError, ReasonCode
from protocol.evidence import check_relay_lie
from protocol.identity import Identity
from protocol.records import RelayReport, RelayStamp
from protocol.sequences import Sequences
from shardcast.origin import Origin
from shardcast.passes import (
    PASS_HEADER,
    PASS_LIFETIME_MS,
    SHOWN_LIFETIME_MS,
    Parent,
    PassCheck,
    Presenter,
    issue,
    open_passes,
)
from shardcast.records import STAMP_KIND, ShardRecord
from shardcast.relay import RelayServer
from shardcast.server import WeightsServer, wall_clock_ms
from shardcast.stamps import STAMP_HEADER
from shardcast.store import Feed
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    MadeRun,
    holds,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)

CHILD, OTHER, RELAY = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


class Keys:
    """Sequences of the keys of one test, and passes made with them."""

    def __init__(self, made: MadeRun, folder: Path) -> None:
        self.made = made
        self.folder = folder
        self.coordinator = Sequences(folder / "coordinator.json")

    def parent(self, child: Identity, key: bytes, url: str, now_ms: int | None = None) -> Parent:
        admission = issue(
            self.made.coordinator,
            self.coordinator,
            self.made.run.id,
            wall_clock_ms() if now_ms is None else now_ms,
            child.public,
            key,
            url,
        )
        return Parent(url, key, admission.raw)

    def presenter(self, child: Identity, now_ms: int | None = None) -> Presenter:
        path = self.folder / f"{child.peer_id}.json"
        return Presenter(self.made.run.id, child, Sequences(path), wall_clock_ms if now_ms is None else lambda: now_ms)


@pytest.fixture
def keys(small: MadeRun, tmp_path: Path) -> Keys:
    return Keys(small, tmp_path)


async def status(origin: Origin, header: str = "", path: str = "news") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = f"{origin.server.url}/v1/{origin.run.id.hex()}/{path}"
        async with session.get(url, headers={PASS_HEADER: header} if header else {}) as response:
            text = await response.text() if response.status == 403 else ""
            return response.status, text


async def test_the_origin_serves_whom_a_pass_sends_and_nobody_else(small: MadeRun, keys: Keys) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small, open_to_all=False) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        url, own = origin.server.url, small.origin.public
        mine = keys.parent(CHILD, own, url)
        assert (await status(origin, keys.presenter(CHILD).header(mine)))[0] == 200
        refused = {
            "none": "",
            "another parent's": keys.presenter(CHILD).header(keys.parent(CHILD, RELAY.public, url)),
            "another parent's, shown here": keys.presenter(CHILD).header(
                replace(keys.parent(CHILD, RELAY.public, url), key=own)
            ),
            "another child's": keys.presenter(OTHER).header(mine),
            "not the coordinator's": keys.presenter(CHILD).header(
                Parent(
                    url, own, issue(OTHER, keys.coordinator, small.run.id, wall_clock_ms(), CHILD.public, own, url).raw
                )
            ),
            "shown to another": keys.presenter(CHILD).header(replace(mine, key=RELAY.public)),
            "shown long ago": keys.presenter(CHILD, wall_clock_ms() - 10 * SHOWN_LIFETIME_MS).header(mine),
            "expired": keys.presenter(CHILD).header(
                keys.parent(CHILD, own, url, wall_clock_ms() - 2 * PASS_LIFETIME_MS)
            ),
            "garbage": "x.y",
            "half": keys.presenter(CHILD).header(mine).partition(".")[0],
            "long": "A" * 6000,
        }
        for name, header in refused.items():
            for path in ("news", "p/0-0/records", "p/0-0/shard/0", f"blob/{small.run.manifest.model.layout.hex()}"):
                code, text = await status(origin, header, path)
                assert code == 403, (name, path)
            assert "not-granted" in text and "node join" in text, name
        for path in ("head", f"challenge?nonce={'0' * 32}", "stats"):
            assert (await status(origin, "", path))[0] == 200, "open to all: they cost little and prove much"


def test_a_copied_header_is_refused_from_another_address(small: MadeRun, keys: Keys) -> None:
    check = PassCheck(small.run, RELAY.public, wall_clock_ms)
    header = keys.presenter(CHILD).header(keys.parent(CHILD, RELAY.public, "http://x"))
    assert check.child(header, "10.0.0.1") == check.child(header, "10.0.0.1") == CHILD.public
    with pytest.raises(EnvelopeError, match="another address") as caught:
        check.child(header, "10.0.0.2")
    assert caught.value.code == ReasonCode.NOT_GRANTED


def test_a_child_signs_once_a_minute_and_not_per_request(small: MadeRun, keys: Keys) -> None:
    presenter, parent = keys.presenter(CHILD), keys.parent(CHILD, RELAY.public, "http://x")
    assert presenter.header(parent) is presenter.header(parent)
    renewed = keys.parent(CHILD, RELAY.public, "http://x")
    assert presenter.header(renewed) != presenter.header(parent), "a renewed pass is shown at once"
    assert presenter.header(Parent("http://x")) == ""


def test_a_member_believes_only_passes_that_are_its_own(small: MadeRun, keys: Keys) -> None:
    mine = keys.parent(CHILD, RELAY.public, "http://x")
    assert open_passes(small.run, CHILD.public, [mine.admission]) == [mine]
    with pytest.raises(EnvelopeError):
        open_passes(small.run, OTHER.public, [mine.admission])


async def test_weights_flow_along_passes_and_a_chain_keeps_the_origin_for_the_first(
    small: MadeRun, keys: Keys, tmp_path: Path
) -> None:
    async with publishing(small, open_to_all=False) as origin:
        url = origin.server.url
        first = Identity.generate()
        at_origin = [keys.parent(first, small.origin.public, url)]
        async with relaying(small, at_origin, tmp_path / "1", identity=first, passes=True) as one:
            at_one = [keys.parent(OTHER, first.public, one.url), keys.parent(OTHER, RELAY.public, url)]
            async with relaying(small, at_one, tmp_path / "2", identity=OTHER, passes=True) as two:
                at_two = [keys.parent(CHILD, OTHER.public, two.url), keys.parent(CHILD, first.public, one.url)]
                async with pulling(small, at_two, tmp_path / "c", presenter=keys.presenter(CHILD)) as puller:
                    for step in range(3):
                        write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
                        policy = await puller.wait_newer((0, step - 1) if step else None, WAIT_S)
                        assert holds(policy, SMALL_SHAPES, seed=step)
                await until(lambda: url in two.problems, "the second having tried the origin")
                assert two.problems[url].code == ReasonCode.NOT_GRANTED
                assert origin.server.counters.shards_sent == 3 and origin.server.counters.table()["children"] == 1
                assert two.server.counters.stamps == 3


class Flipping(WeightsServer):
    """Sends one wrong byte, under a stamp over what it really sends."""

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        data = bytearray(self._store.shard_path(feed.key, record.index).read_bytes())
        data[0] ^= 1
        return web.Response(body=bytes(data), headers={STAMP_HEADER: self.sign(*self.stamped_as(record, data))})

    @staticmethod
    def stamped_as(record: ShardRecord, data: bytes) -> tuple[bytes, int, bytes]:
        return record.publication, record.index, blake3(data).digest()


class Hypocrite(Flipping):
    """Sends a wrong byte under a stamp over the right ones."""

    @staticmethod
    def stamped_as(record: ShardRecord, data: bytes) -> tuple[bytes, int, bytes]:
        return record.publication, record.index, record.wire_hash


class Misplaced(Flipping):
    """Stamps another shard than the one it sends."""

    @staticmethod
    def stamped_as(record: ShardRecord, data: bytes) -> tuple[bytes, int, bytes]:
        return record.publication, record.index + 1, blake3(data).digest()


class Silent(WeightsServer):
    """Sends the right bytes and signs nothing."""

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        return web.FileResponse(self._store.shard_path(feed.key, record.index))


class Forger(WeightsServer):
    """Sends wrong bytes with another key's signature under them: that key may not be charged for it."""

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        data = bytes(record.wire_bytes)
        stamp = RelayStamp(record.publication, record.index, blake3(data).digest(), 0)
        raw = seal(OTHER, STAMP_KIND, stamp, run=self._store.run.id, sequence=1, issued_at=wall_clock_ms()).raw
        return web.Response(body=data, headers={STAMP_HEADER: base64.b64encode(raw).decode()})


LIES = {
    Flipping: (ReasonCode.RELAY_LIED, True),
    Hypocrite: (ReasonCode.SHARD_MISMATCH, False),
    Misplaced: (ReasonCode.BAD_SIGNATURE, False),
    Silent: (ReasonCode.BAD_SIGNATURE, False),
    Forger: (ReasonCode.BAD_SIGNATURE, False),
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_wrong_shard_is_got_from_the_second_parent_and_only_a_signed_lie_is_proof(
    small: MadeRun, keys: Keys, tmp_path: Path, kind: type[WeightsServer]
) -> None:
    code, proven = LIES[kind]
    lying = type("Lying", (RelayServer,), {"serving": kind})
    reports: list[RelayReport] = []
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "liar", identity=RELAY, kind=lying) as liar,
        relaying(small, [origin.server.url], tmp_path / "honest", identity=OTHER) as honest,
    ):
        await until(lambda: bool(liar.store.keys and honest.store.keys), "both relays")
        parents = [keys.parent(CHILD, RELAY.public, liar.url), keys.parent(CHILD, OTHER.public, honest.url)]
        async with pulling(small, parents, tmp_path / "c", report=reports.append) as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
            health = puller._follower.source(liar.url)[1]
            assert health.last_error is not None and health.last_error.code == code
            await until(lambda: bool(reports), "the report")
            assert reports[0].relay == RELAY.public
            if proven:
                check_relay_lie(reports[0], small.run.id, [small.origin.public])
                assert liar.url not in [source.address for source, _ in puller._follower.sources()], "never asked again"
            else:
                assert reports[0].stamp == b"", "it signed no lie: nothing is proven"


async def test_an_honest_relay_with_a_broken_disk_never_signs_its_own_accusation(
    small: MadeRun, keys: Keys, tmp_path: Path
) -> None:
    reports: list[RelayReport] = []
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "relay", identity=RELAY) as relay,
    ):
        await until(lambda: bool(relay.store.keys), "the relay")
        shard = relay.store.shard_path((0, 0), 0)
        shard.write_bytes(bytes(shard.stat().st_size))
        parents = [keys.parent(CHILD, RELAY.public, relay.url), Parent(origin.server.url, small.origin.public)]
        async with pulling(small, parents, tmp_path / "c", report=reports.append) as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
            await until(lambda: bool(reports), "the report")
    assert reports[0].stamp == b""
