"""The origin's key changes while a run goes on: what was signed before stays, what is followed is signed anew."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.chain import Chain, Revocation, RunUpdate, delegate, seal_update
from protocol.envelope import parse
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.manifest import Run
from protocol.run_files import load_chain, update_file
from shardcast.archive import open_published
from shardcast.origin import Origin
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


def rotate(made: MadeRun, key: bytes, revoke: bool = False) -> Chain:
    """What `trainer key rotate origin` leaves in the run directory, and `trainer key revoke` of the old key."""
    now = time.time_ns() // 1_000_000
    allowed = delegate(made.root, made.run.id, key, ("origin",), not_before=now - 1000, expires=now + 10**9, sequence=1)
    gone = (Revocation(made.origin.public, 0, "stolen"),) if revoke else ()
    update = RunUpdate(origin=key, delegations=(allowed,), revocations=gone)
    raw = seal_update(made.root, load_chain(made.directory), update, sequence=2, issued_at=now)
    path = update_file(made.directory, 1)
    path.parent.mkdir()
    path.write_bytes(raw)
    return load_chain(made.directory)


async def test_weights_flow_on_after_the_origins_key_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    known: list[Run] = [made.run]
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    url = ""

    async with (
        relaying(made, lambda: [url] if url else [], tmp_path / "relay", run=lambda: known[0]) as relay,
        pulling(made, [relay.url], tmp_path / "a", run=lambda: known[0]) as puller,
    ):
        async with publishing(made) as origin:
            url = origin.server.url
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        key = Identity.generate()
        chain = rotate(made, key.public)
        with pytest.raises(UsageError, match="newest manifest"):
            Origin(made.directory, identity=made.origin)
        new = replace(made, origin=key)
        write_checkpoint(made.directory, 0, 1, SMALL_SHAPES, seed=1)
        async with publishing(new) as origin:
            url = origin.server.url
            await until(lambda: origin.store.keys[-1] == (0, 1), "step 1 under the new key")
            await until(lambda: url in relay.problems, "its refusal by who doesn't know the key yet")
            assert relay.store.keys[-1] == (0, 0) and puller.current is not None and puller.current.step == 0
            known[0] = chain.current
            policy = await puller.wait_newer((0, 0), WAIT_S)
            assert holds(policy, SMALL_SHAPES, seed=1)
            assert parse(origin.store.head or b"").signer == key.public
            async with pulling(new, [relay.url], tmp_path / "b", run=lambda: known[0]) as late:
                older = await late.fetch(0, 0, load_root(made, chain.current, 0), WAIT_S)
                assert holds(older, SMALL_SHAPES, seed=0), "what the old key signed is still what it was"
    assert list(open_published(made.directory, chain.current).problems()) == []


def load_root(made: MadeRun, run: Run, step: int) -> bytes:
    return open_published(made.directory, run).publications[0, step].root


async def test_a_head_by_the_former_key_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stole a key that was rotated out can publish to nobody."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    thief = replace(make_run(tmp_path / "thief", SMALL_SHAPES), run=made.run, origin=made.origin)
    (thief.directory / "manifest.hw").write_bytes((made.directory / "manifest.hw").read_bytes())
    write_checkpoint(thief.directory, 0, 7, SMALL_SHAPES, seed=7)
    chain = rotate(made, Identity.generate().public)
    async with (
        publishing(thief) as origin,
        pulling(made, [origin.server.url], tmp_path / "a", run=lambda: chain.current) as puller,
    ):
        await until(lambda: origin.server.url in puller.problems, "the refusal")
        assert "key the origin had before" in str(puller.problems[origin.server.url])
        assert puller.current is None


def steal(made: MadeRun, folder: Path) -> MadeRun:
    """A copy of the run directory with the origin's key as it is now; whoever has it opens publications later than
    anybody else."""
    shutil.copytree(made.directory, folder)
    (folder / "published").mkdir(exist_ok=True)
    kinds = ("open", "publication", "shard", "manifest", "head", "publication.manifest")
    (folder / "published" / "origin-sequences.json").write_text(json.dumps(dict.fromkeys(kinds, 1 << 40)))
    return replace(made, directory=folder)


@pytest.mark.parametrize("revoke", [True, False], ids=["revoked", "rotated"])
async def test_a_thief_with_the_former_key_silences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revoke: bool
) -> None:
    """It opens the next step first, under a sequence no honest origin reaches; the genuine one is followed."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    thief = steal(made, tmp_path / "thief")
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    key = Identity.generate()
    run = rotate(made, key.public, revoke).current
    new = replace(made, origin=key)
    async with (
        publishing(new) as origin,
        publishing(thief) as bad,
        pulling(new, [bad.server.url, origin.server.url], tmp_path / "a", run=lambda: run) as puller,
    ):
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        write_checkpoint(thief.directory, 0, 1, SMALL_SHAPES, seed=66)
        await until(lambda: bad.server.url in puller.problems, "the refusal of the thief's publication")
        write_checkpoint(made.directory, 0, 1, SMALL_SHAPES, seed=1)
        assert holds(await puller.wait_newer((0, 0), WAIT_S), SMALL_SHAPES, seed=1)
        assert origin.server.url not in puller.problems


async def test_a_download_begun_under_a_key_that_was_stolen_gives_way_to_the_genuine_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child learns of the new key only after it began to follow the thief."""
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    thief = steal(made, tmp_path / "thief")
    known = [made.run]
    key = Identity.generate()
    chain = rotate(made, key.public, revoke=True)
    write_checkpoint(made.directory, 0, 1, SMALL_SHAPES, seed=1)
    write_checkpoint(thief.directory, 0, 1, SMALL_SHAPES, seed=66)
    async with publishing(thief) as bad, publishing(replace(made, origin=key)) as origin:
        await until(lambda: bad.store.keys[-1:] == origin.store.keys[-1:] == [(0, 1)], "both publications")
        feed = bad.store.feed((0, 1))
        assert feed is not None
        feed.frames, feed.complete = feed.frames[:1], False  # opened, and never finished
        urls = [bad.server.url]
        async with pulling(made, urls, tmp_path / "a", run=lambda: known[0]) as puller:
            await until(lambda: (0, 1) in puller._follower._tracks, "the thief's publication being followed")
            known[0] = chain.current
            urls.append(origin.server.url)
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=1)


async def test_what_a_revoked_key_signed_in_its_time_is_vouched_for_by_the_present_head_or_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.follower.DEFAULT_WAIT_MS", 200)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    for step in (0, 1):
        write_checkpoint(made.directory, 0, step, SMALL_SHAPES, seed=step)
    async with publishing(made) as origin:
        await until(lambda: origin.store.keys[-1:] == [(0, 1)], "both steps")
    roots = {key: one.root for key, one in open_published(made.directory, made.run).publications.items()}
    key = Identity.generate()
    run = rotate(made, key.public, revoke=True).current
    assert run.origins == (key.public,) and run.revoked_origins == (made.origin.public,)
    assert open_published(made.directory, run).publications == {}, "nothing vouches for them yet"
    async with (
        publishing(replace(made, origin=key)) as origin,
        pulling(made, [origin.server.url], tmp_path / "a", run=lambda: run) as puller,
    ):
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=1), "the new head names the old manifest"
        older = await puller.fetch(0, 0, roots[0, 0], WAIT_S)
        assert holds(older, SMALL_SHAPES, seed=0), "whoever names the root need not believe a key"
    archive = open_published(made.directory, run, {(0, 0): roots[0, 0], (0, 1): bytes(32)})
    assert list(archive.problems()) == [] and list(archive.publications) == [(0, 0)]
