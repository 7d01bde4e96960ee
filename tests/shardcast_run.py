"""A small real run for the tests of the weights plane: keys, manifest, model files and checkpoints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from blake3 import blake3
from safetensors.numpy import load_file, save_file

from protocol.envelope import seal
from protocol.identity import Identity
from protocol.manifest import (
    EnvironmentSpec,
    LeasePolicy,
    ModelFile,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    Thresholds,
    open_manifest,
    run_id_of,
)
from shardcast.codecs import Codec
from shardcast.layout import layout_hash, make_layout
from shardcast.origin import Origin
from shardcast.passes import Parent
from shardcast.puller import Policy, Puller
from shardcast.relay import RelayServer

WAIT_S = 60.0
"""Deadline of every wait in these tests."""

SMALL_SHAPES = {"embed.weight": (64, 32), "layers.0.weight": (32, 32), "norm.weight": (32,)}
"""A model of one small shard."""

WIDE_SHAPES = {"embed.weight": (2048, 1024), "layers.0.weight": (3000, 1024), "norm.weight": (77,)}
"""About 20 MB in float32: three shards, the last one short."""


@dataclass(frozen=True)
class MadeRun:
    directory: Path
    run: Run
    origin: Identity
    shapes: dict[str, tuple[int, ...]]
    coordinator: Identity = field(default_factory=Identity.generate)
    root: Identity = field(default_factory=Identity.generate)


def make_run(
    directory: Path, shapes: dict[str, tuple[int, ...]] | int, dtypes: dict[str, str] | None = None
) -> MadeRun:
    """A run directory with manifest and model files; no checkpoints yet. `dtypes`: of tensors that are not F32."""
    if isinstance(shapes, int):
        shapes = {"embed.weight": (shapes // 4 // 64, 64)}
    root, origin, coordinator = Identity.generate(), Identity.generate(), Identity.generate()
    (directory / "model").mkdir(parents=True)
    (directory / "checkpoints").mkdir()
    files = []
    for name, text in (("config.json", '{"model_type": "qwen3"}'), ("tokenizer.json", '{"version": "1.0"}')):
        (directory / "model" / name).write_text(text)
        files.append(ModelFile(name, len(text), blake3(text.encode()).digest()))
    layout = make_layout({name: ((dtypes or {}).get(name, "F32"), shape) for name, shape in shapes.items()})
    manifest = RunManifest(
        name="weights",
        created=time.time_ns() // 1_000_000,
        root=root.public,
        coordinator=coordinator.public,
        origin=origin.public,
        coordinator_transport=Identity.generate().public,
        control=(),
        ingress=(),
        profile="fp32",
        model=ModelSpec("Qwen3ForCausalLM", "float32", layout_hash(layout), 64, tuple(files)),
        environments=(EnvironmentSpec("word", "1", bytes(32), bytes(32), "{}", "pure"),),
        sampling=SamplingSpec(1.0, 8, (0,)),
        thresholds=Thresholds(1e-5, 1, 1e-4, 1e-4, 1e-4, 1, 1, 0.0, 0, 0.0, 0.0, "test"),
        leases=LeasePolicy(4, 4, 1, 2, 4, 32, 60_000, 5_000, 0.1),
        steps=100,
        versions=(0x0100, 0x0100),
        allow_private=True,
        contact="nobody",
        privacy="none",
    )
    envelope = seal(
        root, "manifest", manifest, run=run_id_of(manifest), sequence=1, issued_at=manifest.created, lifetime_ms=10**12
    )
    (directory / "manifest.hw").write_bytes(envelope.raw)
    return MadeRun(directory, open_manifest(envelope.raw), origin, shapes, coordinator, root)


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def drifted(shapes: dict[str, tuple[int, ...]], step: int, share: float = 0.01) -> dict[str, np.ndarray]:
    """`weights(shapes, 0)` after `step` steps, each of which moves so many of the values to their neighbours."""
    tensors = weights(shapes, 0)
    for number in range(step):
        rng = np.random.default_rng(1000 + number)
        for tensor in tensors.values():
            bits = tensor.reshape(-1).view(np.uint32)
            bits[rng.integers(0, len(bits), int(len(bits) * share))] += np.uint32(1)
    return tensors


def write_checkpoint(
    directory: Path,
    epoch: int,
    step: int,
    shapes: dict[str, tuple[int, ...]],
    seed: int,
    tensors: dict[str, np.ndarray] | None = None,
    **changes: object,
) -> Path:
    """What the learner writes: weights first, `checkpoint.json` last. `tensors`: instead of random ones."""
    folder = directory / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint.json").unlink(missing_ok=True)
    save_file(tensors if tensors is not None else weights(shapes, seed), folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    table = {
        "epoch": epoch,
        "step": step,
        "files": {"model.safetensors": {"size": len(data), "blake3": blake3(data).hexdigest()}},
        **changes,
    }
    aside = folder / ".checkpoint.part"
    aside.write_text(json.dumps(table))
    aside.replace(folder / "checkpoint.json")
    return folder


@asynccontextmanager
async def publishing(
    made: MadeRun, *, open_to_all: bool = True, codec: Codec = Codec.RAW, **more: Any
) -> AsyncIterator[Origin]:
    """A real origin that publishes in the background: by default as it is, so that bytes can be counted."""
    origin = Origin(made.directory, identity=made.origin, open_to_all=open_to_all, codec=codec, **more)
    await origin.start()
    task = asyncio.create_task(origin.run_forever())
    try:
        yield origin
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await origin.close()


@asynccontextmanager
async def relaying(
    made: MadeRun,
    sources: Sequence[str | Parent] | Callable[[], list[str]],
    store: Path,
    keep: int = 8,
    *,
    run: Callable[[], Run] | None = None,
    identity: Identity | None = None,
    kind: type[RelayServer] = RelayServer,
    **more: Any,
) -> AsyncIterator[RelayServer]:
    """A real relay that follows in the background."""
    relay = kind(run or made.run, sources, "127.0.0.1:0", store, identity or Identity.generate(), keep=keep, **more)
    await relay.start()
    task = asyncio.create_task(relay.run_forever())
    try:
        yield relay
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await relay.close()


@asynccontextmanager
async def pulling(
    made: MadeRun,
    sources: Sequence[str | Parent],
    store: Path,
    keep: int = 4,
    *,
    run: Callable[[], Run] | None = None,
    **more: Any,
) -> AsyncIterator[Puller]:
    """A real puller that follows in the background."""
    puller = Puller(run or made.run, lambda: sources, store, keep=keep, **more)
    task = asyncio.create_task(puller.run_forever())
    try:
        yield puller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Change = Callable[[str, int, bytes], tuple[int, bytes] | None]
"""(path after /v1/RUN/, status, body) -> what is answered instead; None hangs up without an answer."""


@asynccontextmanager
async def lying(upstream: str, change: Change) -> AsyncIterator[str]:
    """A real HTTP server that forwards to `upstream` and changes the answers."""
    async with aiohttp.ClientSession() as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            async with session.get(f"{upstream}{request.path_qs}") as response:
                status, body = response.status, await response.read()
            answer = change(request.path.split("/", 3)[3], status, body)
            if answer is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.Response(status=answer[0], body=answer[1])

        app = web.Application()
        app.router.add_get("/{tail:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def holds(
    policy: Policy, shapes: dict[str, tuple[int, ...]], seed: int, tensors: dict[str, np.ndarray] | None = None
) -> bool:
    """Whether a policy directory loads to exactly the weights that were written."""
    loaded = load_file(policy.directory / "model.safetensors")
    wanted = tensors if tensors is not None else weights(shapes, seed)
    return loaded.keys() == wanted.keys() and all(np.array_equal(loaded[name], wanted[name]) for name in wanted)


async def until(what: Callable[[], bool], name: str) -> None:
    """Wait for a condition of this process, with a deadline."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not what():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"{name} did not happen within {WAIT_S} s")
