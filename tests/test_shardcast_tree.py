"""Origin, relay and puller over real HTTP: whole weights arrive, and nothing else ever does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from blake3 import blake3

from protocol.envelope import open_envelope
from protocol.errors import ReasonCode, TransportError, UsageError
from protocol.limits import SHARD_BYTES
from shardcast.codecs import Codec
from shardcast.encoding import OpenCheckpoint
from shardcast.errors import ForkError, PublicationError, SourceError, StoreError
from shardcast.layout import root_of_safetensors
from shardcast.origin import Origin
from shardcast.publication import Publication, pack_frames, split_frames
from shardcast.puller import Puller
from shardcast.records import HEAD_KIND, MANIFEST_KIND, Head, PublicationManifest, ShardRecord
from shardcast.source import Source, new_session
from shardcast.store import published_heads, read_publication
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    lying,
    make_run,
    publishing,
    pulling,
    relaying,
    until,
    write_checkpoint,
)


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


@pytest.fixture
def wide(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", WIDE_SHAPES)


async def test_weights_flow_from_learner_through_relay_to_pullers(small: MadeRun, tmp_path: Path) -> None:
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "relay") as relay,
        pulling(small, [relay.url], tmp_path / "a") as a,
        pulling(small, [relay.url], tmp_path / "b") as b,
    ):
        for step in range(5):
            folder = write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
            for puller in (a, b):
                policy = await puller.wait_newer((0, step - 1) if step else None, WAIT_S)
                assert policy.key == (0, step)
                assert policy.root == root_of_safetensors(folder / "model.safetensors")
                assert holds(policy, SMALL_SHAPES, seed=step)
                assert (policy.directory / "config.json").read_text() == '{"model_type": "qwen3"}'
        assert a.current == await a.wait_newer((0, 3), WAIT_S)
        size = 4 * sum(int(np.prod(shape)) for shape in SMALL_SHAPES.values())
        assert relay.bytes_received == a.bytes_received == 5 * size
        assert relay.server.counters.bytes_sent == relay.server.counters.bytes_full == 10 * size


async def test_many_shards_flow_and_late_joiners_start_at_the_newest(wide: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
    write_checkpoint(wide.directory, 0, 1, WIDE_SHAPES, seed=1)
    async with (
        publishing(wide) as origin,
        relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
    ):
        await until(lambda: relay.store.keys[-1:] == [(0, 1)], "the relay having step 1")
        async with pulling(wide, [relay.url, origin.server.url], tmp_path / "a") as puller:
            policy = await puller.wait_newer(None, WAIT_S)
            assert policy.key == (0, 1)
            assert holds(policy, WIDE_SHAPES, seed=1)
            older = await puller.fetch(0, 0, published_heads(origin.store.root, wide.run)[0][1].root, WAIT_S)
            assert holds(older, WIDE_SHAPES, seed=0)
            assert puller.current == policy, "an older policy never becomes the current one"


async def test_relays_fetch_what_they_skipped_when_a_child_asks_for_it(small: MadeRun, tmp_path: Path) -> None:
    """An origin that comes back publishes several steps at once; relays go on with the newest, leases name all."""
    folders = [write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step) for step in range(4)]
    async with publishing(small) as origin:
        await until(lambda: (0, 3) in origin.store.keys, "four publications")
        async with (
            relaying(small, [origin.server.url], tmp_path / "one") as first,
            relaying(small, [first.url], tmp_path / "two") as second,
            pulling(small, [second.url], tmp_path / "child") as child,
        ):
            assert (await child.wait_newer(None, WAIT_S)).key == (0, 3)
            assert first.store.keys == second.store.keys == [(0, 3)]
            for step in (1, 2):
                root = root_of_safetensors(folders[step] / "model.safetensors")
                policy = await child.fetch(0, step, root, WAIT_S)
                assert holds(policy, SMALL_SHAPES, seed=step)
            assert first.store.keys == second.store.keys == [(0, 1), (0, 2), (0, 3)]
            assert child.current is not None and child.current.key == (0, 3), "the newest stays the newest"
            # Nothing that is not there yet, and nothing it would not keep: nobody makes a relay pull the archive.
            for step in (4, 1 << 40):
                with pytest.raises(TransportError):
                    await child.fetch(0, step, bytes(32), 0.5)
            assert first.store.keys == [(0, 1), (0, 2), (0, 3)]


async def test_children_get_shards_before_the_origin_has_finished(wide: MadeRun, tmp_path: Path) -> None:
    """Cut-through: with the origin held before its last shard, a child of the relay already has the first ones."""
    origin = Origin(wide.directory, identity=wide.origin, codec=Codec.RAW)
    await origin.start()
    hold, store_shard = asyncio.Event(), origin._store_shard
    loop = asyncio.get_running_loop()

    def held(publication: Publication, fresh: OpenCheckpoint, base: OpenCheckpoint | None, index: int) -> ShardRecord:
        if index == 2:
            asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(WAIT_S)
        return store_shard(publication, fresh, base, index)

    origin._store_shard = held  # type: ignore[method-assign]
    task = asyncio.create_task(origin.run_forever())
    async with (
        relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
        pulling(wide, [relay.url], tmp_path / "a") as puller,
    ):
        write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
        await until(lambda: relay.server.counters.bytes_sent >= 2 * SHARD_BYTES, "two shards at the child")
        assert puller.current is None
        assert not list((tmp_path / "a" / "policies").glob("e*"))
        hold.set()
        assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await origin.close()


async def refusal_of(puller: Puller, address: str) -> SourceError:
    """The first failure charged to a source."""
    health = puller._follower.source(address)[1]
    await until(lambda: health.last_error is not None, "the refusal")
    assert health.last_error is not None
    return health.last_error


def on_shard(change: Callable[[bytes], bytes]) -> Callable[[str, int, bytes], tuple[int, bytes]]:
    return lambda path, status, body: (status, change(body) if "/shard/" in path else body)


LIES = {
    "flipped bit": (on_shard(lambda b: b[:-1] + bytes([b[-1] ^ 1])), ReasonCode.SHARD_MISMATCH),
    "truncated": (on_shard(lambda b: b[:-1]), ReasonCode.LENGTH_MISMATCH),
    "oversize": (on_shard(lambda b: b + b"x"), ReasonCode.OVERSIZE),
    "empty": (on_shard(lambda b: b""), ReasonCode.LENGTH_MISMATCH),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_wrong_shard_is_refused_and_the_pull_goes_on_with_the_next_source(
    small: MadeRun, tmp_path: Path, name: str
) -> None:
    change, code = LIES[name]
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin, lying(origin.server.url, change) as liar:
        async with pulling(small, [liar], tmp_path / "alone") as puller:
            assert (await refusal_of(puller, liar)).code == code
            assert puller.current is None
            assert not list((tmp_path / "alone" / "policies").glob("e*"))
        async with pulling(small, [liar, origin.server.url], tmp_path / "both") as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)


async def test_swapped_shards_are_refused(wide: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
    async with publishing(wide) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        shards = [origin.store.shard_path((0, 0), index).read_bytes() for index in range(3)]

        def swap(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            return (status, shards[1]) if path.endswith("/shard/0") else (status, body)

        async with lying(origin.server.url, swap) as liar, pulling(wide, [liar], tmp_path / "a") as puller:
            assert (await refusal_of(puller, liar)).code == ReasonCode.SHARD_MISMATCH
            assert puller.current is None
        async with (
            lying(origin.server.url, swap) as liar,
            pulling(wide, [liar, origin.server.url], tmp_path / "b") as puller,
        ):
            assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)


def frames_changed(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[str, int, bytes], tuple[int, bytes]]:
    def answer(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        listed = path.startswith("news") or path.endswith("/records")
        return status, pack_frames(change(split_frames(body))) if listed and status == 200 else body

    return answer


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


RECORD_LIES = {
    "open": frames_changed(lambda f: [flipped(f[0], 200), *f[1:]]),
    "record": frames_changed(lambda f: [f[0], flipped(f[1], 200), *f[2:]]),
    "manifest": frames_changed(lambda f: [*f[:2], flipped(f[2], 200), *f[3:]]),
    "head": frames_changed(lambda f: [*f[:3], flipped(f[3], 200)]),
    "order": frames_changed(lambda f: [*reversed(f)]),
    "garbage": lambda path, status, body: (status, os.urandom(200)) if path.startswith("news") else (status, body),
    "flood": lambda path, status, body: (200, bytes(8 << 20)) if path.startswith("news") else (status, body),
    "refusal": lambda path, status, body: (503, b"{") if path.startswith("news") else (status, body),
    "hang up": lambda path, status, body: None if path.startswith("news") else (status, body),
}


@pytest.mark.parametrize("name", RECORD_LIES)
async def test_a_wrong_record_is_refused_with_a_reason_and_others_do_not_notice(
    small: MadeRun, tmp_path: Path, name: str
) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin, lying(origin.server.url, RECORD_LIES[name]) as liar:
        await until(lambda: bool(origin.store.keys), "the publication")
        async with pulling(small, [liar], tmp_path / "alone") as puller:
            await until(lambda: liar in puller.problems, "the refusal")
            assert puller.problems[liar].code != ReasonCode.INTERNAL
            assert puller.current is None
        async with pulling(small, [liar, origin.server.url], tmp_path / "both") as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
            assert puller._follower._failure is None


async def test_a_source_that_repeats_itself_for_ever_is_left(small: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        first = pack_frames([origin.store.feed((0, 0)).frames[0]])  # type: ignore[union-attr]

        def repeat(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            return (200, first) if path.startswith("news") or path.endswith("/records") else (status, body)

        async with lying(origin.server.url, repeat) as liar, pulling(small, [liar], tmp_path / "a") as puller:
            await until(lambda: liar in puller.problems, "the refusal")
            assert puller.problems[liar].code == ReasonCode.OVERSIZE
        root = published_heads(origin.store.root, small.run)[0][1].root
        async with lying(origin.server.url, repeat) as liar, pulling(small, [liar], tmp_path / "b") as puller:
            with pytest.raises(TransportError):
                await puller.fetch(0, 0, root, 2.0)
            assert puller.problems[liar].code == ReasonCode.OVERSIZE


@pytest.mark.parametrize("junk", [b"no envelope", None])
async def test_a_lying_parent_neither_ends_a_relay_nor_holds_it_back(
    small: MadeRun, tmp_path: Path, junk: bytes | None
) -> None:
    """One parent keeps the shards' records back and answers for them with junk, or with one frame for ever."""
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        frames = origin.store.feed((0, 0)).frames  # type: ignore[union-attr]

        def change(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            if path.startswith("news"):
                return 200, pack_frames([frames[0], *frames[-2:]])
            return (200, pack_frames([junk or frames[0]])) if path.endswith("/records") else (status, body)

        def late(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            return (503, b"") if path.startswith("news") else (status, body)

        async with (
            lying(origin.server.url, change) as liar,
            lying(origin.server.url, late) as honest,
            relaying(small, [liar, honest], tmp_path / "relay") as relay,
        ):
            await until(lambda: relay.store.keys == [(0, 0)] or relay._follower._failure is not None, "the policy")
            assert relay._follower._failure is None
            assert liar in relay.problems and relay.store.feed((0, 0)) is not None


async def test_a_wrong_model_file_or_layout_is_refused(small: MadeRun, tmp_path: Path) -> None:
    def change(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (status, body + b" ") if path.startswith("blob/") else (status, body)

    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin, lying(origin.server.url, change) as liar:
        async with pulling(small, [liar, origin.server.url], tmp_path / "a") as puller:
            policy = await puller.wait_newer(None, WAIT_S)
        for file in small.run.manifest.model.files:
            assert blake3((policy.directory / file.name).read_bytes()).digest() == file.digest


async def test_a_head_below_the_highest_seen_is_refused_also_after_a_restart(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        await until(lambda: origin.store.keys == [(0, 0)], "step 0")
        async with aiohttp.ClientSession() as session:
            base = f"{origin.server.url}/v1/{small.run.id.hex()}"
            old = await (await session.get(f"{base}/news")).read()

        def rollback(path: str, status: int, body: bytes) -> tuple[int, bytes]:
            return (200, old) if path.startswith("news") else (status, body)

        write_checkpoint(small.directory, 0, 1, SMALL_SHAPES, seed=1)
        async with pulling(small, [origin.server.url], tmp_path / "a") as puller:
            newest = await puller.wait_newer((0, 0), WAIT_S)
        async with lying(origin.server.url, rollback) as liar, pulling(small, [liar], tmp_path / "a") as puller:
            await until(lambda: liar in puller.problems, "the refusal")
            assert puller.problems[liar].code == ReasonCode.STALE_SEQUENCE
            assert puller.current == newest
            # Also when the policy itself is gone from the disk, only the memory of its head remains.
        for file in (tmp_path / "a" / "policies" / newest.directory.name).iterdir():
            file.unlink()
        async with lying(origin.server.url, rollback) as liar, pulling(small, [liar], tmp_path / "a") as puller:
            await until(lambda: liar in puller.problems, "the refusal")
            assert puller.problems[liar].code == ReasonCode.STALE_SEQUENCE
            assert puller.current is None or puller.current.key == (0, 0)


async def test_two_roots_for_one_step_stop_the_puller_and_leave_evidence(small: MadeRun, tmp_path: Path) -> None:
    twin = make_run(tmp_path / "twin", SMALL_SHAPES)
    for name in ("manifest.hw",):
        (twin.directory / name).write_bytes((small.directory / name).read_bytes())
    twin = MadeRun(twin.directory, small.run, small.origin, SMALL_SHAPES)
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    write_checkpoint(twin.directory, 0, 0, SMALL_SHAPES, seed=99)
    async with publishing(small) as one, publishing(twin) as two:
        await until(lambda: bool(one.store.keys and two.store.keys), "both publications")
        async with pulling(small, [one.server.url], tmp_path / "a") as puller:
            first = await puller.wait_newer(None, WAIT_S)
        for file in first.directory.iterdir():
            file.unlink()
        puller = Puller(small.run, lambda: [two.server.url], tmp_path / "a")
        with pytest.raises(ForkError):
            async with asyncio.timeout(WAIT_S):
                await puller.run_forever()
        with pytest.raises(ForkError):
            await puller.wait_newer(None, 1.0)
        evidence = split_frames((tmp_path / "a" / "fork-evidence.hw").read_bytes())
        envelopes = [open_envelope(raw, run=small.run.id, signer=small.origin.public) for raw in evidence]
        roots = {e.record(Head).root for e in envelopes if e.kind == HEAD_KIND}
        roots |= {e.record(PublicationManifest).root for e in envelopes if e.kind == MANIFEST_KIND}
        assert len(roots) == 2, "both contradicting signatures are kept"
        with pytest.raises(ForkError):
            Puller(small.run, lambda: [one.server.url], tmp_path / "a")


async def test_asking_for_another_root_than_was_published_says_so(small: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        puller = Puller(small.run, lambda: [origin.server.url], tmp_path / "a")
        with pytest.raises(PublicationError) as caught:
            await puller.fetch(0, 0, bytes(32), WAIT_S)
        assert caught.value.code == ReasonCode.HASH_MISMATCH
        with pytest.raises(TransportError, match="e0000-s00000007"):
            await puller.fetch(0, 7, bytes(32), 1.0)
        await puller.close()


async def test_fetch_works_without_following(small: MadeRun, tmp_path: Path) -> None:
    folder = write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        puller = Puller(small.run, lambda: ["http://127.0.0.1:9", origin.server.url], tmp_path / "a")
        root = root_of_safetensors(folder / "model.safetensors")
        policies = await asyncio.gather(*(puller.fetch(0, 0, root, WAIT_S) for _ in range(3)))
        assert len(set(policies)) == 1
        assert holds(policies[0], SMALL_SHAPES, seed=0)
        await puller.close()


async def test_a_machine_without_room_stops_before_anything_is_fetched(small: MadeRun, tmp_path: Path) -> None:
    """It learns the size with the first publication, which may come long after it began to follow."""

    def refuse(size: int) -> None:
        raise UsageError(f"{size} bytes do not fit")

    async with publishing(small) as origin:
        puller = Puller(small.run, lambda: [origin.server.url], tmp_path / "a")
        puller.room_for = refuse
        following = asyncio.create_task(puller.run_forever())
        write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
        size = sum(int(np.prod(shape)) * 4 for shape in SMALL_SHAPES.values())
        with pytest.raises(UsageError, match=f"{size} bytes do not fit"):
            await asyncio.wait_for(following, WAIT_S)
        assert puller.bytes_received == 0
        assert not any((tmp_path / "a" / "policies").iterdir())


async def test_policies_are_verified_again_after_a_restart(small: MadeRun, tmp_path: Path) -> None:
    async with publishing(small) as origin:
        for step in (0, 1):
            write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
            async with pulling(small, [origin.server.url], tmp_path / "a") as puller:
                newest = await puller.wait_newer((0, step - 1) if step else None, WAIT_S)
        received = puller.bytes_received
        assert received > 0
        idle = Puller(small.run, lambda: [], tmp_path / "a")
        await idle.start()
        assert idle.current == newest
        weights_file = newest.directory / "model.safetensors"
        data = bytearray(weights_file.read_bytes())
        data[-1] ^= 1
        weights_file.write_bytes(data)
        idle = Puller(small.run, lambda: [], tmp_path / "a")
        await idle.start()
        assert idle.current is not None
        assert idle.current.key == (0, 0), "a damaged policy is not believed"
        async with pulling(small, [origin.server.url], tmp_path / "a") as puller:
            assert holds(await puller.wait_newer((0, 0), WAIT_S), SMALL_SHAPES, seed=1)


async def test_a_download_cut_off_is_resumed_without_asking_again_for_what_is_there(
    wide: MadeRun, tmp_path: Path
) -> None:
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)

    def only_two(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (404, b"{}") if path.endswith("/shard/2") else (status, body)

    async with publishing(wide) as origin:
        async with lying(origin.server.url, only_two) as liar, pulling(wide, [liar], tmp_path / "a") as puller:
            await until(lambda: len(puller._follower._tracks) == 1, "the download")
            track = next(iter(puller._follower._tracks.values()))
            await until(lambda: track.download.missing == {2}, "two shards")
            part = next((tmp_path / "a" / "policies").glob(".part-*"))
        assert (part / "model.safetensors").read_bytes()[:8] == bytes(8), "an unfinished file has no header"
        sent = origin.server.counters.bytes_sent
        async with pulling(wide, [origin.server.url], tmp_path / "a") as puller:
            assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)
            assert origin.server.counters.bytes_sent - sent < SHARD_BYTES, "only the missing shard was sent"


async def test_old_policies_are_removed_but_not_under_a_reader(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "a", keep=2) as puller:
        for step in range(4):
            write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
            await puller.wait_newer((0, step - 1) if step else None, WAIT_S)
        folder = tmp_path / "a" / "policies"
        assert len(list(folder.glob("e*"))) == 4, "all were handed out just now"
        monkeypatch.setattr("shardcast.puller.GRACE_S", 0.0)
        write_checkpoint(small.directory, 0, 4, SMALL_SHAPES, seed=4)
        await puller.wait_newer((0, 3), WAIT_S)
        assert sorted(path.name for path in folder.glob("e*")) == ["e0000-s00000003", "e0000-s00000004"]


async def test_a_relay_survives_damage_on_its_disk(wide: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
    async with publishing(wide) as origin:
        async with relaying(wide, [origin.server.url], tmp_path / "relay") as relay:
            await until(lambda: bool(relay.store.keys), "the publication at the relay")
        shard = tmp_path / "relay" / "e0000-s00000000" / "shard-000001.bin"
        data = bytearray(shard.read_bytes())
        data[7] ^= 1
        shard.write_bytes(data)
        async with (
            relaying(wide, [origin.server.url], tmp_path / "relay") as relay,
            pulling(wide, [relay.url], tmp_path / "a") as puller,
        ):
            assert holds(await puller.wait_newer(None, WAIT_S), WIDE_SHAPES, seed=0)


async def test_a_relay_killed_in_the_middle_goes_on_with_the_shards_it_has(wide: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(wide.directory, 0, 0, WIDE_SHAPES, seed=0)
    folder = tmp_path / "relay" / "e0000-s00000000"

    def only_two(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (404, b"{}") if path.endswith("/shard/2") else (status, body)

    async with publishing(wide) as origin:
        async with lying(origin.server.url, only_two) as liar, relaying(wide, [liar], tmp_path / "relay"):
            await until(lambda: len(list(folder.glob("shard-*.bin"))) == 2, "two shards")
        assert sorted(path.name for path in folder.iterdir()) == ["open.hw", "shard-000000.bin", "shard-000001.bin"]
        sent = origin.server.counters.bytes_sent
        async with relaying(wide, [origin.server.url], tmp_path / "relay") as relay:
            await until(lambda: relay.store.keys == [(0, 0)], "the publication")
            assert origin.server.counters.bytes_sent - sent < SHARD_BYTES, "only the missing shard was sent"
            names = ["publication.hw", *(f"shard-00000{index}.bin" for index in range(3))]
            for place in (folder, origin.store.folder((0, 0))):
                assert sorted(path.name for path in place.iterdir()) == names, "nothing but what is served"


async def test_a_publication_without_all_its_records_does_not_count(small: MadeRun, tmp_path: Path) -> None:
    """Cut where a frame ends, so that what is left still holds frame by frame."""
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        async with relaying(small, [origin.server.url], tmp_path / "relay") as relay:
            await until(lambda: relay.store.keys == [(0, 0)], "the publication")
        path = tmp_path / "relay" / "e0000-s00000000" / "publication.hw"
        frames = split_frames(path.read_bytes())
        assert len(frames) == 4
        for kept in (frames[:3], frames[:2], frames[:1] + frames[2:]):
            path.write_bytes(pack_frames(kept))
            with pytest.raises(StoreError, match=r"publication\.hw"):
                read_publication(path.parent, small.run)
        async with relaying(small, [origin.server.url], tmp_path / "relay") as relay:
            assert relay.store.keys == [], "damaged, removed, and fetched again"
            await until(lambda: relay.store.keys == [(0, 0)], "the publication again")
        assert split_frames(path.read_bytes()) == frames


async def test_a_relay_keeps_only_what_it_is_told_to(small: MadeRun, tmp_path: Path) -> None:
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "relay", keep=2) as relay,
    ):
        for step in range(4):
            write_checkpoint(small.directory, 0, step, SMALL_SHAPES, seed=step)
            await until(lambda step=step: relay.store.keys[-1:] == [(0, step)], "the step at the relay")  # type: ignore[misc]
        assert sorted(path.name for path in (tmp_path / "relay").glob("e*")) == ["e0000-s00000002", "e0000-s00000003"]
        assert len(list((small.directory / "published").glob("e*"))) == 4, "the archive keeps everything"


async def test_an_unreachable_source_costs_nothing_but_its_own_turn(small: MadeRun, tmp_path: Path) -> None:
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        dead = "http://127.0.0.1:9"
        async with pulling(small, [dead, origin.server.url], tmp_path / "a") as puller:
            await puller.wait_newer(None, WAIT_S)
            await until(lambda: dead in puller.problems, "the failure")
            assert puller.problems[dead].code == ReasonCode.UNREACHABLE
    async with pulling(small, [dead], tmp_path / "b") as puller:
        with pytest.raises(TransportError, match=r"127\.0\.0\.1:9") as caught:
            await puller.wait_newer(None, 1.5)
        assert caught.value.code == ReasonCode.DEADLINE


async def test_a_source_that_stalls_is_left_after_seconds(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.wire.STALL_S", 0.3)

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12416\r\n\r\nabc")
        await asyncio.sleep(WAIT_S)

    server = await asyncio.start_server(stall, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    record = type("R", (), {"index": 0, "wire_bytes": 12416, "wire_hash": bytes(32)})
    async with new_session() as session:
        with pytest.raises(SourceError) as caught:
            await Source(session, address, small.run.id).shard((0, 0), record)  # type: ignore[arg-type]
    assert caught.value.code == ReasonCode.TOO_SLOW
    server.close()


async def test_a_stale_record_of_an_older_attempt_does_not_replace_a_newer_one(small: MadeRun, tmp_path: Path) -> None:
    """A relay that still offers the crashed attempt is refused; the new attempt goes on."""
    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    origin = Origin(small.directory, identity=small.origin)
    await origin.publish_ready()
    old = split_frames((origin.store.folder((0, 0)) / "publication.hw").read_bytes())[0]
    (origin.store.folder((0, 0)) / "publication.hw").unlink()
    await origin.close()

    def stale(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (200, pack_frames([old])) if path.startswith("news") else (status, body)

    async with (
        publishing(small) as origin,
        lying(origin.server.url, stale) as liar,
        pulling(small, [origin.server.url, liar], tmp_path / "a") as puller,
    ):
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
