"""Several sources under one download, over real HTTP: planned ones that fail in their ways, spare ones, moved ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from protocol.identity import Identity
from protocol.limits import SHARD_BYTES
from shardcast.passes import Parent
from shardcast.puller import Puller
from shardcast.server import WeightsServer
from shardcast.store import published_heads
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
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

SHARDS = 6


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


@asynccontextmanager
async def holding_shards(upstream: str) -> AsyncIterator[str]:
    """Passes everything on, but never answers for a shard."""
    async with aiohttp.ClientSession() as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            if "/shard/" in request.path:
                await asyncio.sleep(WAIT_S)
            async with session.get(f"{upstream}{request.path_qs}") as response:
                return web.Response(status=response.status, body=await response.read())

        app = web.Application()
        app.router.add_get("/{tail:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("how", ["refuses", "never answers"])
@pytest.mark.parametrize("by_name", [False, True])
async def test_a_parent_that_has_news_and_no_shards_does_not_hold_its_child(
    small: MadeRun, tmp_path: Path, how: str, by_name: bool
) -> None:
    """The plan names the origin as well, which is spare; its key says so."""

    def refuse(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (404, b"{}") if "/shard/" in path else (status, body)

    write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        await until(lambda: bool(origin.store.keys), "the publication")
        url = origin.server.url
        async with lying(url, refuse) if how == "refuses" else holding_shards(url) as bad:
            parents = [Parent(bad, Identity.generate().public), Parent(url, small.origin.public)]
            async with pulling(small, parents, tmp_path / "a") as puller:
                if by_name:
                    wanted = published_heads(origin.store.root, small.run)[0][1].root
                    policy = await puller.fetch(0, 0, wanted, 30)
                else:
                    policy = await puller.wait_newer(None, 30)
                assert holds(policy, SMALL_SHAPES, seed=0)


async def test_several_sources_share_one_download(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", SHARDS * SHARD_BYTES)
    write_checkpoint(made.directory, 0, 0, made.shapes, 1)
    async with (
        publishing(made) as origin,
        relaying(made, [origin.server.url], tmp_path / "one") as one,
        relaying(made, [origin.server.url], tmp_path / "two") as two,
    ):
        await until(lambda: bool(one.store.keys and two.store.keys), "both relays")
        # Slow enough that the second is asked what it holds while the first sends.
        for relay in (one, two):
            slow_down(relay.server)
        async with pulling(made, [one.url, two.url], tmp_path / "child") as child:
            policy = await child.wait_newer(None, WAIT_S)
            assert holds(policy, made.shapes, seed=1)
        sent = [relay.server.counters.shards_sent for relay in (one, two)]
        assert min(sent) > 0 and sum(sent) <= SHARDS + 1, "both sent some; at most one came twice"


def slow_down(server: WeightsServer) -> None:
    """Hold each shard back for a while."""
    answer = server._answer

    async def late(request: web.BaseRequest) -> web.StreamResponse:
        if "/shard/" in request.path:
            await asyncio.sleep(0.3)
        return await answer(request)

    server._answer = late  # type: ignore[method-assign]


async def test_a_relay_that_starts_again_elsewhere_is_found_and_its_old_address_forgotten(
    small: MadeRun, tmp_path: Path
) -> None:
    identity = Identity.generate()
    named: list[Parent] = []
    async with publishing(small) as origin:
        write_checkpoint(small.directory, 0, 0, SMALL_SHAPES, seed=0)
        async with relaying(small, [origin.server.url], tmp_path / "relay", identity=identity) as relay:
            old = relay.url
            named[:] = [Parent(old, identity.public)]
            puller = Puller(small.run, lambda: list(named), tmp_path / "child")
            task = asyncio.create_task(puller.run_forever())
            assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        async with relaying(small, [origin.server.url], tmp_path / "relay", identity=identity) as relay:
            assert relay.url != old
            named[:] = [Parent(relay.url, identity.public)]
            write_checkpoint(small.directory, 0, 1, SMALL_SHAPES, seed=1)
            assert holds(await puller.wait_newer((0, 0), WAIT_S), SMALL_SHAPES, seed=1)
            await until(lambda: old not in puller._follower._known, "the old address being forgotten")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
