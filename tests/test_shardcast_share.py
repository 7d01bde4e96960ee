"""Shares: a folder of checkpoints published and pulled without a run, and what codes and manifests may say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from protocol.errors import ManifestError, ReasonCode
from protocol.identity import Identity
from protocol.manifest import ModelFile
from shardcast import checkpoints, share_commands
from shardcast.addresses import may_connect
from shardcast.cli import _parser, main
from shardcast.folder import FolderOrigin
from shardcast.origin import Origin
from shardcast.passes import Parent
from shardcast.puller import Puller
from shardcast.share import (
    MAX_CODE_CHARS,
    Share,
    ShareCode,
    ShareManifest,
    ShareSource,
    format_code,
    make_share,
    open_share,
    parents_in,
    parse_code,
)
from shardcast.terms import Terms
from shardcast.tls import own_certificate
from tests.shardcast_run import WAIT_S, until
from tests.share_rig import same, tensors, write

WAITS = {"quiet": "shardcast.checkpoints.QUIET_S", "look": "shardcast.folder.LOOK_S"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written in one go here."""
    for name in WAITS.values():
        monkeypatch.setattr(name, 0.05)


class Published:
    """A folder being published in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.share: Share | None = None
        self.origin: Origin | None = None
        terms = options.pop("terms", lambda store, share: Terms(share=share))
        self.publisher = FolderOrigin(
            folder, lambda text, table: self.events.append(table), self._opened, terms=terms, **options
        )
        self.task = asyncio.create_task(self.publisher.run_forever())

    def _opened(self, share: Share, origin: Origin) -> None:
        self.share, self.origin = share, origin

    async def event(self, key: str, value: object) -> dict[str, Any]:
        """The event that has this value, once it happened."""

        def found() -> list[dict[str, Any]]:
            if self.task.done():
                self.task.result()
            return [event for event in self.events if event.get(key) == value]

        await until(lambda: bool(found()), f"{key}: {value}")
        return found()[0]

    @property
    def parent(self) -> Parent:
        assert self.origin is not None
        assert self.share is not None
        return Parent(self.origin.server.url, self.share.manifest.origin)


@asynccontextmanager
async def publishing_folder(folder: Path, **options: Any) -> AsyncIterator[Published]:
    published = Published(folder, **options)
    try:
        yield published
    finally:
        published.task.cancel()
        await asyncio.gather(published.task, return_exceptions=True)


@asynccontextmanager
async def pulling_share(published: Published, store: Path) -> AsyncIterator[Puller]:
    assert published.share is not None
    puller = Puller(published.share.as_run(), lambda: [published.parent], store)
    task = asyncio.create_task(puller.run_forever())
    try:
        yield puller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_folder_is_published_and_pulled_as_it_grows(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    folder.mkdir()
    async with publishing_folder(folder) as published:
        await published.event("waiting", str(folder))
        write(folder / "checkpoint-5", tensors(1), parts=3, **{"trainer_state.json": "1"})
        await published.event("published", 5)
        async with pulling_share(published, tmp_path / "out") as puller:
            first = await puller.wait_newer(None, WAIT_S)
            assert same(first.directory, tensors(1))
            assert (first.directory / "tokenizer.json").read_text() == '{"version": "1.0"}'
            assert not (first.directory / "trainer_state.json").exists()
            write(folder / "checkpoint-10", tensors(2), **{"trainer_state.json": "2"})
            assert same((await puller.wait_newer(first.key, WAIT_S)).directory, tensors(2))
        share = published.share
    async with publishing_folder(folder) as published:  # goes on where it was: nothing is published twice
        write(folder / "checkpoint-15", tensors(3))
        await published.event("published", 15)
        assert published.share == share
        assert [event for event in published.events if "published" in event or "refused" in event] == [
            await published.event("published", 15)
        ]


async def test_what_does_not_fit_is_refused_once_and_the_next_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.folder.NEVER_WHOLE_S", 0.2)
    folder = tmp_path / "ckpts"
    write(folder / "step-1", tensors(1))
    async with publishing_folder(folder) as published:
        await published.event("published", 1)
        write(folder / "step-2", tensors(2, rows=41))
        assert (await published.event("refused", "step-2"))["reason"] == "hash-mismatch"
        write(folder / "step-3", tensors(3), config='{"model_type": "other"}')
        assert "config.json" in (await published.event("refused", "step-3"))["message"]
        write(folder / "step-4", tensors(4), **{"vocab.txt": "more"})
        assert "vocab.txt" in (await published.event("refused", "step-4"))["message"]
        write(folder / "step-5", tensors(5), parts=2)
        shutil.copy(folder / "step-5" / "model-00001-of-00002.safetensors", folder / "step-5" / "x.safetensors")
        index = {"weight_map": {"a": "x.safetensors", "b": "model-00001-of-00002.safetensors"}}
        (folder / "step-5" / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "another file" in (await published.event("refused", "step-5"))["message"]
        (folder / "step-6").mkdir()
        (folder / "step-6" / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{} no wts")
        assert "shorter" in (await published.event("refused", "step-6"))["message"]
        write(folder / "step-1", tensors(9))  # the same number again, with other weights
        assert "new number" in (await published.event("refused", "step-1"))["message"]
        write(folder / "step-0", tensors(9))
        assert (await published.event("refused", "step-0"))["reason"] == "stale-sequence"
        write(folder / "step-7", tensors(7))
        await published.event("published", 7)
        refused = [event["refused"] for event in published.events if "refused" in event]
        assert sorted(refused) == sorted(set(refused)), "each is told once"


async def test_an_adapter_of_mixed_dtypes_that_is_written_again_is_published_again(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    values = {name: torch.from_numpy(value).bfloat16() for name, value in tensors(1).items()}
    values |= {"router.bias": torch.arange(7, dtype=torch.float32), "empty": torch.zeros((0, 3))}
    safetensors.torch.save_file(values, folder / "adapter_model.safetensors")
    async with publishing_folder(folder) as published:
        await published.event("published", 0)
        assert published.share is not None
        assert published.share.manifest.weights == "adapter_model.safetensors"
        async with pulling_share(published, tmp_path / "out") as puller:
            policy = await puller.wait_newer(None, WAIT_S)
            for step in (1, 2):
                loaded = safetensors.torch.load_file(policy.directory / "model.safetensors")
                assert loaded.keys() == values.keys()
                assert all(torch.equal(loaded[name], values[name]) for name in values)
                os.utime(folder / "adapter_model.safetensors")  # the same weights again are nothing new
                await asyncio.sleep(0.5)
                values["router.bias"] = values["router.bias"] + 1
                safetensors.torch.save_file(values, folder / "adapter_model.safetensors")
                await published.event("published", step)
                policy = await puller.wait_newer(policy.key, WAIT_S)
            assert puller.current is not None
            assert puller.current.step == 2


async def test_a_limit_of_bytes_removes_the_oldest_and_a_pinned_step_can_be_had_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    write(folder / "step-1", tensors(1, rows=400))
    one = 8 * 400 * 64 * 4
    async with publishing_folder(
        folder,
        keep_bytes=2 * one,
        pins=(2,),
        terms=lambda store, share: Terms(share=share, in_use_s=0.0),
    ) as published:
        for step in range(1, 7):
            write(folder / f"step-{step}", tensors(step, rows=400))
            await published.event("published", step)
        assert published.origin is not None
        store = published.origin.store
        await published.event("removed", 4)
        kept = {key[1] for key in store.keys}
        assert 6 in kept
        assert 2 in kept
        assert not kept & {3, 4}
        assert published.share is not None
        puller = Puller(published.share.as_run(), lambda: [published.parent], tmp_path / "out")
        try:
            policy = await puller.fetch(0, 2, None, WAIT_S)
            assert same(policy.directory, tensors(2, rows=400))
        finally:
            await puller.close()


async def test_older_checkpoints_are_published_when_they_are_asked_for_and_kept_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    for step in (1, 2, 3):
        write(folder / f"step-{step}", tensors(step))
    async with publishing_folder(folder, state=tmp_path / "a") as published:
        await published.event("published", 3)
        assert [event["refused"] for event in published.events if "refused" in event] == ["step-1", "step-2"]
    async with publishing_folder(folder, state=tmp_path / "b", everything=True, name="all of them") as published:
        await published.event("published", 3)
        assert [event["published"] for event in published.events if "published" in event] == [1, 2, 3]
        assert published.share is not None
        assert published.share.manifest.name == "all of them"
    assert not (folder / ".shardcast").exists()


def test_a_code_names_caches_first_then_this_server_as_others_reach_it_then_where_it_pulls_itself(
    tmp_path: Path,
) -> None:
    certificate = own_certificate(tmp_path)
    key, upstream = bytes([1]) * 32, ShareSource("http://up.example:1", bytes(32), b"", False)
    share = make_share(
        identity := Identity.generate(),
        ShareManifest("x", 1, identity.public, bytes(32), "model.safetensors", ()),
        1,
    )
    args = _parser().parse_args(
        ["relay", "CODE", "--cache", "http://cache.example", "--announce", "https://me.example:5", "--tls"]
    )
    code = parse_code(
        share_commands.code_of(args, share, "https://10.0.0.1:5", key, Terms(certificate=certificate), [upstream])
    )
    assert code.share == share.id
    assert code.sources == (
        ShareSource("http://cache.example", b"", b"", True),
        ShareSource("https://me.example:5", key, certificate.pin, False),
        upstream,
    )
    cache, own, _ = parents_in(code)
    assert (cache.cached, cache.key) == (True, b"")
    assert (own.cached, own.key, own.pin) == (False, key, certificate.pin)


async def test_a_puller_asks_no_private_address_unless_it_is_wished_for(tmp_path: Path) -> None:
    """Names and numbers of this machine, in a code or a plan: a stranger wrote them."""
    folder = tmp_path / "ckpts"
    write(folder / "step-1", tensors(1))
    async with publishing_folder(folder) as published:
        await published.event("published", 1)
        assert published.share is not None
        assert published.origin is not None
        run = published.share.as_run(allow_private=False)
        for host in ("127.0.0.1", "localhost"):
            parent = replace(published.parent, url=published.parent.url.replace("127.0.0.1", host))
            puller = Puller(run, lambda parent=parent: [parent], tmp_path / host)  # type: ignore[misc]
            task = asyncio.create_task(puller.run_forever())
            await until(lambda p=puller: bool(p.problems), "the refusal")  # type: ignore[misc]
            assert puller.problems[parent.url].code == ReasonCode.NOT_GRANTED
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert published.origin.server.counters.table()["children"] == 0


def run_here(*args: str) -> int:
    """A command in this process, with `--json`."""
    return main([*args, "--json"])


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["pull", "hw1abc", "d"], 2, "node join"),
        (["pull", "hws1abcdefgh", "d"], 2, "checksum"),
        (["pull", "nowhere.txt", "d"], 2, "neither the code"),
        (["pull"], 2, "the code of a share"),
        (["pull", "hws1abcdefgh"], 2, "CODE DIR"),
        (["relay"], 2, "the code of a share"),
        (["publish", "nowhere"], 2, "trainer init"),
        (["publish", ".", "--listen", "0.0.0.0:0"], 2, "--announce"),
        (["publish", ".", "--announce", "ftp://x"], 2, "http://HOST:PORT"),
        (["publish", ".", "--up", "50Mb/s"], 2, "bits or bytes"),
        (["publish", ".", "--keep-bytes", "much"], 2, "20G"),
        (["publish", ".", "--quota", "0"], 2, "100GB/day"),
        (["publish", ".", "--allow", "nobody"], 2, "--allow"),
        (["publish", ".", "--tls-cert", "x.pem"], 2, "come together"),
        (["publish", ".", "--tls-cert", "x.pem", "--tls-key", "y.pem"], 2, "no certificate"),
        (["status", "http://127.0.0.1:9"], 1, "--manifest"),
    ],
)
def test_mistakes_get_one_clear_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "checkpoint-1", tensors(1))
    assert run_here(*args) == code
    printed = capsys.readouterr()
    assert word in printed.err
    assert json.loads(printed.out.splitlines()[-1])["error"]["message"]


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("http://127.0.0.1:1", ()),
        ("http://10.0.0.1", ()),
        ("http://localhost:1", ()),
        ("https://192.168.1.1", ()),
        ("http://[fd00::1]", ()),
        ("http://169.254.169.254", ("--allow-private",)),
        ("http://[fd00:ec2::254]", ("--allow-private",)),
        ("http://[::ffff:169.254.169.254]", ("--allow-private",)),
        ("http://[64:ff9b::a9fe:a9fe]:80", ("--allow-private",)),
        ("http://[2002:a9fe:a9fe::1]:80", ("--allow-private",)),
        ("http://224.0.0.1", ("--allow-private",)),
        ("http://0.0.0.0:80", ("--allow-private",)),
        ("http://2852039166", ("--allow-private",)),
    ],
)
def test_an_address_that_a_code_must_not_name_is_never_connected_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    more: tuple[str, ...],
) -> None:
    def connect(*args: object, **options: object) -> None:
        raise AssertionError(f"connected to {args}")

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.create_connection", connect)
    monkeypatch.setattr("asyncio.selector_events.BaseSelectorEventLoop.sock_connect", connect)
    code = format_code(ShareCode(bytes(32), (ShareSource(url, b"", b"", False),)))
    assert run_here("pull", code, str(tmp_path / "out"), *more) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["code"] == "not-granted"


@pytest.mark.parametrize(
    ("ip", "alone", "wished_for"),
    [
        ("8.8.8.8", True, True),
        ("2606:4700::1111", True, True),
        ("::ffff:8.8.8.8", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("100.64.0.1", False, True),
        ("fd00::1", False, True),
        ("::1", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("64:ff9b::7f00:1", False, True),
        ("2002:a9fe:a9fe::1", False, False),
        ("fe80::1", False, False),
        ("fd00:ec2::254", False, False),
        ("100.100.100.200", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("240.0.0.1", False, False),
        ("255.255.255.255", False, False),
        ("no address", False, False),
    ],
)
def test_where_an_address_that_somebody_else_wrote_may_lead(ip: str, alone: bool, wished_for: bool) -> None:
    assert may_connect(ip, allow_private=False) == alone
    assert may_connect(ip, allow_private=True) == wished_for


def test_a_code_holds_whole_or_not_at_all() -> None:
    code = ShareCode(bytes(range(32)), (ShareSource("https://a.example:1", bytes(32), bytes(32), False),))
    text = format_code(code)
    assert parse_code(f"  {text[:20]}\n{text[20:].upper()} ") == code
    for at in range(4, len(text), 7):
        wrong = text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]
        with pytest.raises(ManifestError):
            parse_code(wrong)
    for wrong in ("", "hws1", "hws1!", text[:-1], text + "a", "hws1" + "a" * MAX_CODE_CHARS):
        with pytest.raises(ManifestError):
            parse_code(wrong)


def test_a_manifest_is_its_own_keys_and_names_no_file_outside() -> None:
    identity = Identity.generate()
    good = ShareManifest("x", 1, identity.public, bytes(32), "model.safetensors", ())
    share = make_share(identity, good, 1)
    assert open_share(share.envelope.raw, expect=share.id) == share
    with pytest.raises(ManifestError) as caught:
        open_share(share.envelope.raw, expect=bytes(32))
    assert caught.value.code == ReasonCode.WRONG_RUN
    with pytest.raises(ManifestError):  # signed by somebody else
        make_share(Identity.generate(), good, 1)
    for name in ("../x.json", "a/b.json", "model.safetensors", "run.py"):
        with pytest.raises(ManifestError):
            make_share(identity, replace(good, files=(ModelFile(name, 1, bytes(32)),)), 1)
    with pytest.raises(ManifestError):
        make_share(identity, replace(good, weights="pytorch_model.bin"), 1)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("step_12", 12),
        ("7", 7),
        ("global_step120", 120),
        ("best", None),
        ("epoch-1-final", None),
    ],
)
def test_a_checkpoints_number_is_what_its_name_ends_with(name: str, step: int | None) -> None:
    assert checkpoints.step_of(name) == step


def test_a_checkpoint_counts_only_when_all_of_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    write(folder, tensors(1), parts=3)
    part = folder / "model-00002-of-00003.safetensors"
    whole = part.read_bytes()
    for left in (0, 8, 100, len(whole) - 1):
        part.write_bytes(whole[:left])
        assert not checkpoints.is_whole(checkpoints.find(tmp_path, 0.0)[0]), left
    part.unlink()
    assert checkpoints.find(tmp_path, 0.0) == []
    (folder / "model.safetensors.index.json").unlink()  # the names alone say that there are three
    assert checkpoints.find(tmp_path, 0.0) == []
    part.write_bytes(whole)
    assert checkpoints.is_whole(checkpoints.find(tmp_path, 0.0)[0])
    shutil.move(folder, tmp_path / "tmp-checkpoint-2")
    assert checkpoints.find(tmp_path, 0.0) == []


def test_an_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1", tensors(1))
    for name in ("../../etc/passwd.safetensors", "/etc/x.safetensors", "a/b.safetensors"):
        (tmp_path / "checkpoint-1" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert checkpoints.find(tmp_path, 0.0) == []


def test_every_command_line_of_the_quickstart_can_be_typed() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "quickstart-move.md").read_text()
    lines = [line.split() for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert {line[1] for line in lines} == {"publish", "pull", "relay", "status"}
    for line in lines:
        _parser().parse_args(line[1:])
    for option in re.findall(r"`(--[a-z-]+)", text):
        assert option in _parser().format_help() + "".join(
            sub.format_help()
            for sub in _parser()._subparsers._group_actions[0].choices.values()  # type: ignore[union-attr]
        ), option
