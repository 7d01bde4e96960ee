"""What a store's readers cost it: whoever goes round its old publications makes it check each once, not each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import envelope
from protocol.errors import ProtocolError
from shardcast import store
from shardcast.heads import publication_name
from shardcast.publication import pack_frames, split_frames
from tests.shardcast_run import SMALL_SHAPES, make_run, publishing, until, write_checkpoint

PUBLICATIONS = 4


async def test_an_old_publication_is_checked_once_and_again_when_its_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_FEEDS_IN_MEMORY", 1)
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    for step in range(PUBLICATIONS):
        write_checkpoint(made.directory, 0, step, SMALL_SHAPES, seed=step)
    async with publishing(made) as origin:
        await until(lambda: len(origin.store.keys) == PUBLICATIONS, "all publications")
    checks = []
    check = envelope.check_signature
    monkeypatch.setattr(envelope, "check_signature", lambda *args: checks.append(args) or check(*args))
    async with publishing(made) as origin:  # after a restart nothing counts as checked
        keys = origin.store.keys
        assert len(keys) == PUBLICATIONS
        checks.clear()
        first = [origin.store.feed(key).frames for key in keys[:-1]]
        once = len(checks)
        assert once >= 3 * len(first)
        for _ in range(3):
            assert [origin.store.feed(key).frames for key in keys[:-1]] == first
        assert len(checks) == once
        path = origin.store.folder(keys[0]) / "publication.hw"
        frames = split_frames(path.read_bytes())
        frames[1] = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
        path.write_bytes(pack_frames(frames))
        with pytest.raises(ProtocolError, match=publication_name(keys[0])):
            origin.store.feed(keys[0])
