"""The published archive: checked from its files alone; one flipped bit anywhere is named."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from protocol.errors import ReasonCode
from shardcast.archive import Archive, open_published
from shardcast.errors import PublicationError
from shardcast.layout import root_of_safetensors
from shardcast.origin import Origin
from tests.shardcast_run import WIDE_SHAPES, MadeRun, holds, make_run, write_checkpoint

FLIPS = 50


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """A run with two published steps of three shards."""
    made = make_run(tmp_path_factory.mktemp("archive") / "run", WIDE_SHAPES)

    async def publish() -> None:
        origin = Origin(made.directory, identity=made.origin)
        await origin.start()
        for step in (0, 1):
            write_checkpoint(made.directory, 0, step, WIDE_SHAPES, seed=step)
            await origin.publish_ready()
        await origin.close()

    asyncio.run(publish())
    return made


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_a_whole_archive_has_no_problems_and_is_only_read(made: MadeRun, tmp_path: Path) -> None:
    before = listing(made.directory / "published")
    archive = open_published(made.directory, made.run)
    assert list(archive.problems()) == []
    assert sorted(archive.publications) == [(0, 0), (0, 1)]
    for step in (0, 1):
        policy = archive.materialise(0, step, tmp_path)
        assert holds(policy, WIDE_SHAPES, seed=step)
        assert policy.root == archive.publications[(0, step)].root
        assert policy.root == root_of_safetensors(policy.directory / "model.safetensors")
        assert (policy.directory / "tokenizer.json").exists()
    assert listing(made.directory / "published") == before


def test_every_flipped_bit_is_named(made: MadeRun, tmp_path: Path) -> None:
    rng = random.Random(7)
    shutil.copytree(made.directory, tmp_path / "copy")
    published = tmp_path / "copy" / "published"
    evidence = [p for p in sorted(published.rglob("*")) if p.suffix in (".hw", ".bin") or p.parent.name == "blobs"]
    assert len(evidence) == 2 * 4 + 3 + 1
    for number in range(FLIPS):
        path = evidence[number] if number < len(evidence) else rng.choice(evidence)
        data = path.read_bytes()
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        problems = list(open_published(tmp_path / "copy", made.run).problems())
        name = f"published/{path.relative_to(published)}"
        assert [problem.record for problem in problems] == [name], f"byte {at}"
        assert problems[0].reason != ReasonCode.INTERNAL
        path.write_bytes(data)
    assert list(open_published(tmp_path / "copy", made.run).problems()) == []


def test_damaged_weights_are_never_materialised(made: MadeRun, tmp_path: Path) -> None:
    shutil.copytree(made.directory, tmp_path / "copy")
    shard = tmp_path / "copy" / "published" / "e0000-s00000001" / "shard-000002.bin"
    for data in (shard.read_bytes()[:-1], shard.read_bytes() + b"x", b"", None):
        original = shard.read_bytes()
        shard.unlink()
        if data is not None:
            shard.write_bytes(data)
        archive = open_published(tmp_path / "copy", made.run)
        assert [p.record for p in archive.problems()] == ["published/e0000-s00000001/shard-000002.bin"]
        with pytest.raises(PublicationError, match=r"e0000-s00000001/shard-000002\.bin") as caught:
            archive.materialise(0, 1, tmp_path / "out")
        assert caught.value.code == ReasonCode.SHARD_MISMATCH
        assert not (tmp_path / "out" / "e0000-s00000001" / "model.safetensors").exists()
        shard.write_bytes(original)


def test_what_was_not_published_is_said_to_be_missing(made: MadeRun, tmp_path: Path) -> None:
    with pytest.raises(PublicationError) as caught:
        open_published(made.directory, made.run).materialise(0, 9, tmp_path)
    assert caught.value.code == ReasonCode.RECORD_MISSING


@pytest.mark.parametrize("name", ["e0000-s00000001/publication.hw", "HEAD.hw"])
def test_a_missing_or_huge_record_is_named(made: MadeRun, tmp_path: Path, name: str) -> None:
    shutil.copytree(made.directory, tmp_path / "copy")
    published = tmp_path / "copy" / "published"
    path = published / name
    with path.open("ab") as file:
        file.truncate(20 << 20)
    problems = list(open_published(tmp_path / "copy", made.run).problems())
    assert [problem.record for problem in problems] == [f"published/{path.relative_to(published)}"]
    path.unlink()
    archive = open_published(tmp_path / "copy", made.run)
    records = [problem.record for problem in archive.problems()]
    if name != "HEAD.hw":
        assert (0, 1) not in archive.publications, "without records it was never published; the ledger knows better"
    else:
        assert records == [f"published/{path.relative_to(published)}"]


def test_an_empty_archive_says_what_is_missing(made: MadeRun, tmp_path: Path) -> None:
    archive = Archive(tmp_path / "nothing", made.run)
    assert archive.publications == {}
    assert len(list(archive.problems())) == 3, "layout and two model files"


def test_a_layout_bigger_than_what_is_there_makes_no_room_for_itself(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that promise 240 GB may not fill an auditor's disk."""
    copy = tmp_path / "run"
    shutil.copytree(made.directory, copy)
    (copy / "published" / "e0000-s00000001" / "shard-000002.bin").write_bytes(b"")
    monkeypatch.setattr("shardcast.archive.preallocate", lambda *_: pytest.fail("room was made first"))
    with pytest.raises(PublicationError, match="shard-000002"):
        open_published(copy, made.run).materialise(0, 1, tmp_path / "into")
