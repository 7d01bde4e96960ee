"""Shares: a folder of checkpoints published, relayed and pulled by the command alone, without a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from protocol.errors import ManifestError, ReasonCode
from protocol.identity import Identity
from shardcast import checkpoints
from shardcast.share import (
    MAX_CODE_CHARS,
    ShareCode,
    ShareManifest,
    ShareSource,
    format_code,
    make_share,
    open_share,
    parse_code,
)
from tests.shardcast_run import WAIT_S
from tests.share_rig import command, pull, same, tensors, write


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


def test_a_folder_is_published_relayed_and_pulled_as_it_grows(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    first, second = tensors(1), tensors(2)
    write(folder / "checkpoint-5", first, parts=3, **{"trainer_state.json": "{}"})
    with command("publish", str(folder)) as origin:
        code = origin.line("code")["code"]
        assert origin.line("published")["published"] == 5
        with command("relay", code, "--store", str(tmp_path / "relay"), "--allow-private") as relay:
            through = relay.line("code")["code"]
            assert [source.url for source in parse_code(through).sources][1:] == [
                source.url for source in parse_code(code).sources
            ]
            status, got, _ = pull(through, tmp_path / "out")
            assert (status, got["step"]) == (0, 5)
            assert same(tmp_path / "out" / "latest", first)
            assert (tmp_path / "out" / "latest" / "tokenizer.json").read_text() == '{"version": "1.0"}'
            assert not (tmp_path / "out" / "latest" / "trainer_state.json").exists()
            with command("pull", through, str(tmp_path / "on"), "--allow-private", "--follow") as following:
                assert following.line("step")["step"] == 5
                write(folder / "checkpoint-10", second, **{"trainer_state.json": "changed"})
                assert origin.line("published")["published"] == 10
                assert following.line("step")["step"] == 10
                following.process.send_signal(signal.SIGINT)
                assert following.process.wait(WAIT_S) == 130
            assert same(tmp_path / "on" / "latest", second)
            status, got, _ = pull(through, tmp_path / "out")  # the same command again fetches what is newest now
            assert (status, got["step"]) == (0, 10)
        for place in (str(folder), str(tmp_path / "out"), str(tmp_path / "relay"), code):
            with command("status", place, "--allow-private") as asked:
                status, told, error = asked.end()
                assert (status, told.get("step")) == (0, 10), error
        origin.process.send_signal(signal.SIGTERM)
        assert origin.process.wait(WAIT_S) == 130
    with command("publish", str(folder)) as origin:  # goes on where it was: nothing is published twice
        assert parse_code(origin.line("code")["code"]).share == parse_code(code).share
        write(folder / "checkpoint-15", first)
        assert origin.line()["published"] == 15


def test_what_does_not_fit_is_refused_once_and_the_next_is_published(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    write(folder / "step-1", tensors(1))
    with command("publish", str(folder)) as origin:
        assert origin.line("published")["published"] == 1
        write(folder / "step-2", tensors(2, rows=41))
        assert origin.line("refused")["code"] == "hash-mismatch"
        write(folder / "step-3", tensors(3), config='{"model_type": "other"}')
        assert "config.json" in origin.line("refused")["message"]
        (folder / "step-4").mkdir()
        (folder / "step-4" / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{} no wts")
        write(folder / "step-1", tensors(9))  # the same number again, with other weights
        assert "new number" in origin.line("refused")["message"]
        write(folder / "step-5", tensors(5))
        assert origin.line()["published"] == 5


def test_an_adapter_of_mixed_dtypes_that_is_written_again_is_published_again(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    values = {name: torch.from_numpy(value).bfloat16() for name, value in tensors(1).items()}
    values |= {"router.bias": torch.arange(7, dtype=torch.float32), "empty": torch.zeros((0, 3))}
    safetensors.torch.save_file(values, folder / "adapter_model.safetensors")
    with command("publish", str(folder), "--name", "an adapter") as origin:
        code = origin.line("code")["code"]
        assert origin.line("published")["published"] == 0
        for step in (0, 1):
            status, got, _ = pull(code, tmp_path / "out")
            assert (status, got["step"]) == (0, step)
            loaded = safetensors.torch.load_file(tmp_path / "out" / "latest" / "adapter_model.safetensors")
            assert loaded.keys() == values.keys()
            assert all(torch.equal(loaded[name], values[name]) for name in values)
            os.utime(folder / "adapter_model.safetensors")  # the same weights again are nothing new
            values["router.bias"] = values["router.bias"] + 1
            if step == 0:
                safetensors.torch.save_file(values, folder / "adapter_model.safetensors")
                assert origin.line("published")["published"] == 1


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["pull", "hw1abc", "d"], 2, "node join"),
        (["pull", "hws1abcdefgh", "d"], 2, "checksum"),
        (["pull", "nowhere.txt", "d"], 2, "neither the code"),
        (["pull"], 2, "the code of a share"),
        (["relay"], 2, "the code of a share"),
        (["publish", ".", "--listen", "0.0.0.0:0"], 2, "--announce"),
        (["publish", ".", "--announce", "ftp://x"], 2, "http://HOST:PORT"),
        (["publish", ".", "--up", "50Mb/s"], 2, "bits or bytes"),
        (["publish", ".", "--keep-bytes", "much"], 2, "20G"),
        (["publish", ".", "--quota", "0"], 2, "100GB/day"),
        (["publish", ".", "--allow", "nobody"], 2, "--allow"),
        (["publish", ".", "--tls-cert", "x.pem"], 2, "come together"),
        (["status", "http://127.0.0.1:9"], 1, "--manifest"),
    ],
)
def test_mistakes_get_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, word: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "checkpoint-1", tensors(1))
    with command(*args) as done:
        status, told, error = done.end()
    assert status == code, error
    assert word in error
    assert told["error"]["message"]
    assert "Traceback" not in error


def test_an_address_that_a_code_must_not_name_is_never_connected_to(tmp_path: Path) -> None:
    share = bytes(32)
    for url, more in (
        ("http://127.0.0.1:1", ()),
        ("http://10.0.0.1", ()),
        ("http://169.254.169.254", ("--allow-private",)),
        ("http://[::ffff:169.254.169.254]", ("--allow-private",)),
        ("http://[64:ff9b::a9fe:a9fe]:80", ("--allow-private",)),
    ):
        code = format_code(ShareCode(share, (ShareSource(url, b"", b"", False),)))
        with command("pull", code, str(tmp_path / "out"), *more) as done:
            status, told, _ = done.end()
        assert (status, told["error"]["code"]) == (1, "not-granted"), url


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
    from dataclasses import replace

    from protocol.manifest import ModelFile

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
