"""The origin's key changes while a run goes on: what was signed before stays, what is followed is signed anew."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.chain import Chain, RunUpdate, delegate, seal_update
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


def rotate(made: MadeRun, key: bytes) -> Chain:
    """What `trainer key rotate origin` leaves in the run directory."""
    now = time.time_ns() // 1_000_000
    allowed = delegate(made.root, made.run.id, key, ("origin",), not_before=now - 1000, expires=now + 10**9, sequence=1)
    raw = seal_update(
        made.root, load_chain(made.directory), RunUpdate(origin=key, delegations=(allowed,)), sequence=2, issued_at=now
    )
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
