"""A pull that is killed with -9 at any instant goes on where it was; a full disk ends it with a reason. Real processes,
real files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from protocol.identity import Identity
from protocol.limits import SHARD_BYTES
from shardcast.layout import (
    layout_of_safetensors,
    root_of_safetensors,
    safetensors_header,
    shard_length,
    states_of_safetensors,
)
from shardcast.origin import Origin
from shardcast.puller import WEIGHTS_NAME, Policy, Puller
from shardcast.relay import RelayServer
from tests.shardcast_run import (
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    lying,
    make_run,
    publishing,
    until,
    write_checkpoint,
)

SHAPES = {"embed.weight": (10 * 1024, 1024), "norm.weight": (77,)}
"""40 MiB and a little: five whole shards and one of 308 bytes."""

KILLS_OF_EACH, STEPS = 5, 4
SEED = 20261130


class Served:
    """What a source sent, by shard."""

    def __init__(self) -> None:
        self.shards: Counter[tuple[str, int]] = Counter()

    def count(self, path: str, status: int, body: bytes) -> tuple[int, bytes]:
        parts = path.split("?")[0].split("/")
        if status == 200 and len(parts) == 4 and parts[2] in ("shard", "state"):
            self.shards[parts[1], int(parts[3])] += 1
        return status, body


@asynccontextmanager
async def pull(made: MadeRun, url: str, store: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A puller as a process; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "benchmarks.data.shardcast_role",
            "pull",
            str(made.directory / "manifest.hw"),
            str(store),
        ),
        *("--source", f"@{url}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def whole_shards(store: Path, checkpoint: Path) -> set[int]:
    """Shards of the unfinished download whose bytes are all there and right."""
    layout, states = layout_of_safetensors(checkpoint), states_of_safetensors(checkpoint)
    found = set()
    for part in store.glob(f"policies/.part-*/{WEIGHTS_NAME}"):
        data = part.read_bytes()[len(safetensors_header(layout)) :]
        for index, state in enumerate(states):
            start = index * SHARD_BYTES
            if blake3(data[start : start + shard_length(layout.nbytes, index)]).digest() == state:
                found.add(index)
    return found


def loadable(store: Path) -> Iterator[Path]:
    """Every file below that somebody could load as weights."""
    for path in store.rglob("*.safetensors"):
        with contextlib.suppress(SafetensorError, OSError), safe_open(str(path), "np") as file:
            if file.keys():
                yield path


@pytest.mark.heavy
async def test_a_pull_killed_at_twenty_instants_resumes_and_fetches_no_verified_shard_again(tmp_path: Path) -> None:
    made, rng, served = make_run(tmp_path / "run", SHAPES), random.Random(SEED), Served()
    store, right, resumed = tmp_path / "store", set(), 0
    async with publishing(made) as origin, lying(origin.server.url, served.count) as url:
        for step in range(STEPS):
            checkpoint = write_checkpoint(made.directory, 0, step, SHAPES, seed=step) / WEIGHTS_NAME
            right.add(root_of_safetensors(checkpoint))
            await until(lambda step=step: (0, step) in origin.store.keys, f"step {step}")  # type: ignore[misc]
            here: set[int] = set()
            for _ in range(KILLS_OF_EACH):
                before, goal = served.shards.total(), rng.randint(0, 3)
                asked = Counter(served.shards)
                async with pull(made, url, store) as process:
                    started = asyncio.get_running_loop().time()
                    while served.shards.total() < before + goal and process.returncode is None:
                        if (store / "policies" / f"e0000-s{step:08d}").exists():
                            break
                        assert asyncio.get_running_loop().time() < started + WAIT_S
                        await asyncio.sleep(0.002)
                    await asyncio.sleep(rng.uniform(0.0, 0.05 if goal else 1.0))
                again = {index for _, index in served.shards - asked if index in here}
                assert not again, "a shard that was here and right was asked for again"
                resumed += bool(here)
                here |= whole_shards(store, checkpoint)
                assert all(root_of_safetensors(path) in right for path in loadable(store)), "loadable, and wrong"
            asked, done = Counter(served.shards), store / "policies" / f"e0000-s{step:08d}"
            async with pull(made, url, store):
                await until(done.exists, "the rest of the pull")
            assert holds(Policy(0, step, b"", done), SHAPES, seed=step)
            assert not {index for _, index in served.shards - asked if index in here}
    assert resumed >= STEPS, "hardly any kill fell into a download"


# --- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[Path]:
    """A file system of so many MiB."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)], check=False)
    if done.returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


async def failure(origin: Origin, work: Puller | RelayServer) -> BaseException:
    """What ends it."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises((Exception,)) as caught:
            await work.run_forever()
    return caught.value


@AS_ROOT
async def test_a_full_disk_ends_a_pull_with_its_reason_and_nothing_half_visible(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0)
    async with publishing(made) as origin:
        await until(lambda: bool(origin.store.keys), "a publication")
        with small_disk(tmp_path / "disk", 12) as disk:
            puller = Puller(made.run, lambda: [origin.server.url], disk / "store")
            error = await failure(origin, puller)
            assert "space" in str(error).lower(), "the reason is in words"
            assert puller.current is None
            assert not list(loadable(disk)) and not list(disk.glob("store/policies/e*"))


@AS_ROOT
async def test_a_full_disk_ends_a_relay_with_its_reason_and_children_see_only_whole_shards(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", WIDE_SHAPES)
    checkpoint = write_checkpoint(made.directory, 0, 0, WIDE_SHAPES, seed=0) / WEIGHTS_NAME
    states = states_of_safetensors(checkpoint)
    async with publishing(made) as origin:
        await until(lambda: bool(origin.store.keys), "a publication")
        with small_disk(tmp_path / "disk", 12) as disk:
            identity = Identity.generate()
            relay = RelayServer(made.run, [origin.server.url], "127.0.0.1:0", disk / "store", identity)
            await relay.start()
            try:
                error = await failure(origin, relay)
                assert "space" in str(error).lower()
                assert not relay.store.keys, "nothing is announced as whole"
                feed = relay.store.newest(None)
                for index, record in (feed.shards if feed is not None else {}).items():
                    assert record.new_hash == states[index]
            finally:
                await relay.close()
