"""Room for a model is checked before it comes, and the first download tells how far it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from node.join import START_MEMORY_MIB, run_join
from node.log import EventLog
from node.options import JoinOptions
from node.weights import check_room, download_line, memory_need_mib, show_first_download
from protocol import preflight
from protocol.errors import UsageError
from protocol.limits import MIB
from shardcast.layout import encode_layout, layout_hash, make_layout
from shardcast.puller import Puller
from tests.archive_builder import Chain, make_manifest


def puller_of(folder, rows: int, dtype: str = "F32") -> Puller:
    """A puller whose run has a model of `rows` x 1024 values, and that already knows its layout."""
    layout = make_layout({"w": (dtype, (rows, 1024))})
    manifest = make_manifest()
    storage = "bfloat16" if dtype == "BF16" else "float32"
    model = replace(manifest.model, layout=layout_hash(layout), storage_dtype=storage)
    run = Chain(replace(manifest, model=model)).run
    puller = Puller(run, list, folder)
    (folder / "blobs" / model.layout.hex()).write_bytes(encode_layout(layout))
    return puller


async def test_a_model_that_fits_is_let_through_and_one_too_large_is_refused_with_numbers(tmp_path, monkeypatch):
    small = puller_of(tmp_path / "small", 256)
    check_room(await small.policy_bytes(), small.run.manifest.model, tmp_path / "small")
    large = puller_of(tmp_path / "large", 1 << 25)  # 128 GiB
    with pytest.raises(UsageError, match=r"needs \d+ MiB of memory.*close other programs"):
        check_room(await large.policy_bytes(), large.run.manifest.model, tmp_path / "large")
    monkeypatch.setattr(preflight, "memory", lambda root=None: None)  # a machine that tells nothing of its memory
    monkeypatch.setattr(preflight, "disk", lambda path: preflight.Room(200_000, "the disk has"))
    with pytest.raises(UsageError, match=r"needs 262145 MiB of disk, .* larger disk"):
        check_room(await large.policy_bytes(), large.run.manifest.model, tmp_path / "large")


async def test_policies_on_the_disk_need_no_room_again(tmp_path, monkeypatch):
    puller = puller_of(tmp_path, 1 << 16)  # 256 MiB
    monkeypatch.setattr(preflight, "disk", lambda path: preflight.Room(300, "the disk has"))
    with pytest.raises(UsageError, match="513 MiB of disk"):
        check_room(await puller.policy_bytes(), puller.run.manifest.model, tmp_path)
    (tmp_path / "policies" / "e0000-s00000001").mkdir(parents=True)
    check_room(await puller.policy_bytes(), puller.run.manifest.model, tmp_path)


def test_half_precision_on_disk_is_full_precision_in_memory():
    assert memory_need_mib(512 * MIB, "float32") < memory_need_mib(512 * MIB, "bfloat16")
    assert memory_need_mib(0, "float32") > 0


def test_a_machine_without_memory_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(START_MEMORY_MIB, "inference", 1 << 40)
    code = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    options = JoinOptions(role="inference", run=code, home=tmp_path / "h", log=tmp_path / "log")
    with pytest.raises(UsageError, match="the role inference needs"):
        run_join(options)
    assert not (tmp_path / "h" / "host.log").exists()
    second = JoinOptions(role="inference", run=code, home=tmp_path / "h")
    with pytest.raises(UsageError, match="the role inference needs"):  # and not that the home is in use
        run_join(second)


@dataclass
class Download:
    """The two facts that the progress line is made of."""

    current: object = None
    progress: tuple[int, int] | None = None


async def test_the_first_download_is_told_and_nothing_after_it(monkeypatch, tmp_path):
    monkeypatch.setattr("node.weights.LOOK_S", 0.01)
    monkeypatch.setattr("node.weights.PLAIN_EVERY_S", 0.0)
    said = []
    log = EventLog(file=tmp_path / "log")
    log.say = said.append
    download = Download(progress=(0, 64 * MIB))
    task = asyncio.create_task(show_first_download(download, log))
    async with asyncio.timeout(10):
        while not any("MiB/s" in line for line in said):
            await asyncio.sleep(0.02)
            download.progress = (16 * MIB, 64 * MIB)
        download.current = object()
        await task
    assert said[0] == "weights 0.0 of 64.0 MiB" and "16.0 of 64.0 MiB" in said[-1] and "s left" in said[-1]


def test_the_line_of_a_download():
    assert download_line(8 * MIB, 24 * MIB, 8 * MIB, 2.0) == "weights 8.0 of 24.0 MiB, 4.0 MiB/s, 4 s left"
    assert download_line(8 * MIB, 24 * MIB, 0, 0.0) == "weights 8.0 of 24.0 MiB"
