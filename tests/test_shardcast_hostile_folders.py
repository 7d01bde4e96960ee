"""What lies about in a folder of checkpoints: none of it ends the publishing, hangs it, or reaches a terminal raw."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardcast import checkpoints
from shardcast.errors import LayoutError, PublishError
from shardcast.share import open_share
from tests.shardcast_run import WAIT_S
from tests.share_rig import command, pull, same, tensors, write


def _weights(folder: Path, header: bytes, data: bytes = bytes(16)) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_links_pipes_and_devices_are_no_checkpoints_and_the_next_one_is_published(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out / "checkpoint-1", tensors(1))
    for name in ("checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"):
        (out / name).mkdir()
    (out / "checkpoint-2" / "model.safetensors").symlink_to("model.safetensors")  # a circle
    os.mkfifo(out / "checkpoint-3" / "model.safetensors")
    (out / "checkpoint-4" / "model.safetensors").symlink_to("/dev/zero")
    (out / "checkpoint-5" / "model.safetensors").symlink_to(tmp_path / "gone")
    (out / "checkpoint-6").symlink_to("checkpoint-6")
    (out / "checkpoint-7").symlink_to("/proc/self/fd")
    write(out / "checkpoint-8", tensors(8))
    (out / "checkpoint-8" / "config.json").unlink()
    os.mkfifo(out / "checkpoint-8" / "config.json")  # no file of it: another set of files than the share's
    with command("publish", str(out), "--all") as published:
        code = published.line("code")["code"]
        assert published.line("published")["published"] == 1
        assert published.line("refused")["refused"] == "checkpoint-8"
        write(out / "checkpoint-9", tensors(9))
        assert published.line("published")["published"] == 9
        assert pull(code, tmp_path / "models")[0] == 0
    assert same(tmp_path / "models" / "latest", tensors(9))


def test_a_name_that_is_no_text_neither_ends_a_publishing_nor_reaches_a_terminal(tmp_path: Path) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m\n-dir"))
    write(out / "checkpoint-1", tensors(1))
    surrogate = json.dumps({"\ud800": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    bad = Path(os.fsdecode(os.fsencode(out) + b"/\xfe\x1b]0;x-2"))
    with command("publish", str(out)) as published:
        share = published.line("share")["share"]
        assert published.line("published")["published"] == 1
        _weights(bad, surrogate)
        assert published.line("refused")["refused"] == bad.name
        write(out / "checkpoint-3", tensors(3))
        assert published.line("published")["published"] == 3
    manifest = open_share((out / ".shardcast" / "share.hw").read_bytes(), bytes.fromhex(share)).manifest
    assert manifest.name.isprintable()
    assert manifest.name.endswith("[31m\ufffd-dir")


@pytest.mark.parametrize(
    "header",
    [
        b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":["F32"],"shape":[4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16,3]}}',
        b"[" * 100_000,
        b'{"a":null}',
        b"{}",
        b"\xff\xfe{",
    ],
)
def test_a_header_that_holds_no_tensors_has_its_reason(tmp_path: Path, header: bytes) -> None:
    _weights(tmp_path / "checkpoint-1", header)
    (found,) = checkpoints.find(tmp_path, time.time())
    with pytest.raises(LayoutError):
        checkpoints.layout_of(found)
    with pytest.raises(LayoutError):
        checkpoints.stage(found, 1, tmp_path / "staged")
    assert not (tmp_path / "staged" / "checkpoint.json").exists()


def test_a_pipe_that_takes_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1", {"a": np.zeros((4, 4), np.float32)})
    (found,) = checkpoints.find(tmp_path, time.time())
    found.weights[0].unlink()
    os.mkfifo(found.weights[0])
    told: list[BaseException] = []

    def look() -> None:
        try:
            assert not checkpoints.is_whole(found)
            checkpoints.stage(found, 1, tmp_path / "staged")
        except PublishError as exc:
            told.append(exc)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(WAIT_S)
    assert not looking.is_alive()
    assert len(told) == 1
