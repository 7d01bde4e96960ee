"""What a puller does with the folders of policies that it lets go: the next download begins with one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from shardcast.puller import Policy, Puller
from tests.shardcast_run import SMALL_SHAPES, WAIT_S, MadeRun, holds, make_run, publishing, pulling, write_checkpoint

OWN = {"model.safetensors", "publication.hw"}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    monkeypatch.setattr("shardcast.puller.GRACE_S", 0.0)
    return make_run(tmp_path / "run", SMALL_SHAPES)


async def step(made: MadeRun, puller: Puller, number: int) -> Policy:
    write_checkpoint(made.directory, 0, number, SMALL_SHAPES, seed=number)
    return await puller.wait_newer((0, number - 1) if number else None, WAIT_S)


def is_whole(made: MadeRun, policy: Policy, seed: int) -> bool:
    """Exactly what a policy's folder has to hold, and nothing of another policy."""
    files = made.run.manifest.model.files
    return (
        holds(policy, SMALL_SHAPES, seed)
        and {path.name for path in policy.directory.iterdir()} == {*OWN, *(file.name for file in files)}
        and all(blake3((policy.directory / file.name).read_bytes()).digest() == file.digest for file in files)
    )


async def test_a_policys_folder_is_used_again_and_holds_what_a_new_one_would(small: MadeRun, tmp_path: Path) -> None:
    folder = tmp_path / "node" / "policies"
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "node", keep=2) as puller:
        for number in range(8):
            policy = await step(small, puller, number)
            assert is_whole(small, policy, number)
        (spare,) = folder.glob(".part-*")
        assert {path.name for path in spare.iterdir()} == {file.name for file in small.run.manifest.model.files}
        await step(small, puller, 8)
        assert not spare.exists(), "the next download began with it"
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "node", keep=2) as puller:
        assert is_whole(small, await step(small, puller, 9), 9)
        assert len(list(folder.glob(".part-*"))) <= 1, "what an earlier process left is swept"


async def test_what_somebody_put_into_a_policys_folder_does_not_come_back(small: MadeRun, tmp_path: Path) -> None:
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "node", keep=2) as puller:
        for number in range(9):
            policy = await step(small, puller, number)
            assert is_whole(small, policy, number)
            if number % 3 == 0:
                (policy.directory / "more.txt").write_text("?")
            elif number % 3 == 1:
                (policy.directory / "config.json").unlink()
                (policy.directory / "config.json").write_text("{}")
            else:
                (policy.directory / "tokenizer.json").unlink()
                (policy.directory / "tokenizer.json").symlink_to(tmp_path / "elsewhere")


async def test_a_spare_folder_may_be_removed_or_spoilt_under_the_puller(small: MadeRun, tmp_path: Path) -> None:
    async with publishing(small) as origin, pulling(small, [origin.server.url], tmp_path / "node", keep=2) as puller:
        for number in range(9):
            assert is_whole(small, await step(small, puller, number), number)
            for spare in (tmp_path / "node" / "policies").glob(".part-gone-*"):
                if number % 2:
                    spare.rename(tmp_path / f"taken-{number}")
                else:
                    (spare / "more.txt").write_text("?")
