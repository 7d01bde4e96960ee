"""Shares by the command alone, as real processes: publish, relay, pull, status, their limits, and kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol.identity import load_or_create_identity
from shardcast.share import parse_code
from tests.shardcast_run import WAIT_S
from tests.share_rig import command, pull, same, tensors, write

pytestmark = pytest.mark.heavy


def test_a_folder_is_published_relayed_and_pulled_by_its_code(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    first, second = tensors(1), tensors(2)
    write(folder / "checkpoint-5", first, parts=3)
    with command("publish", str(folder)) as origin:
        code = origin.line("code")["code"]
        assert origin.line("published")["published"] == 5
        with command("relay", code, "--store", str(tmp_path / "relay"), "--allow-private") as relay:
            through = relay.line("code")["code"]
            assert parse_code(through).sources[1:] == parse_code(code).sources
            status, got, error = pull(through, tmp_path / "out")
            assert (status, got.get("step")) == (0, 5), error
            assert same(tmp_path / "out" / "latest", first)
            with command("pull", through, str(tmp_path / "on"), "--allow-private", "--follow") as following:
                assert following.line("step")["step"] == 5
                write(folder / "checkpoint-10", second)
                assert origin.line("published")["published"] == 10
                assert following.line("step")["step"] == 10
                following.process.send_signal(signal.SIGINT)
                assert following.process.wait(WAIT_S) == 130
            assert same(tmp_path / "on" / "latest", second)
            (tmp_path / "code.txt").write_text(f"{through}\n")
            status, got, _ = pull(str(tmp_path / "code.txt"), tmp_path / "out")  # again: what is newest now
            assert (status, got["step"]) == (0, 10)
        url = parse_code(code).sources[0].url
        for place in (str(folder), str(tmp_path / "out"), str(tmp_path / "relay"), code, url):
            with command("status", place, *(["--allow-private"] if place == code else [])) as asked:
                status, told, error = asked.end()
                assert (status, told.get("step")) == (0, 10), error
        origin.process.send_signal(signal.SIGTERM)
        assert origin.process.wait(WAIT_S) == 130


def test_every_limit_that_can_be_typed_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    write(folder / "step-1", tensors(1))
    friend, _ = (load_or_create_identity(tmp_path / f"{name}.pem") for name in ("friend", "stranger"))
    limits = (
        "--tls",
        "--allow",
        friend.peer_id,
        "--up",
        "40MB/s",
        "--quota",
        "60k",
        "--keep-bytes",
        "1k",
        "--pin",
        "1",
    )
    with command("publish", str(folder), *limits, "--name", "ours", "--codec", "raw") as origin:
        code = origin.line("code")["code"]
        (source,) = parse_code(code).sources
        assert source.url.startswith("https://")
        assert len(source.pin) == 32
        assert origin.line("published") | {"root": ""} == {
            "published": 1, "root": "", "bytes": origin_bytes(folder), "bytes_full": 8 * 40 * 64 * 4,
        }  # fmt: skip
        status, told, _ = pull(code, tmp_path / "nobody")
        assert (status, told["error"]["code"]) == (1, "not-granted")
        status, told, _ = pull(code, tmp_path / "stranger", "--key", str(tmp_path / "stranger.pem"))
        assert (status, told["error"]["code"]) == (1, "not-granted")
        shows = ("--key", str(tmp_path / "friend.pem"), "--down", "40MB/s")
        status, _, error = pull(code, tmp_path / "friend", *shows)
        assert status == 0, error
        assert same(tmp_path / "friend" / "latest", tensors(1))
        status, told, _ = pull(code, tmp_path / "again", *shows, "--deadline", "3")
        assert status == 1, "the quota of this network is used up"
        assert "429" in told["error"]["message"]
        for step in (2, 3):
            write(folder / f"step-{step}", tensors(step))
            origin.line("published")
        assert origin.line("removed")["removed"] == 2


def origin_bytes(folder: Path) -> int:
    """Bytes of what was published of step 1."""
    return sum(path.stat().st_size for path in (folder / ".shardcast" / "published" / "e0000-s00000001").iterdir())


def test_a_publisher_killed_at_any_instant_goes_on_under_the_same_code(tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    codes = set()
    for step, wait in enumerate(("", "code", "published", "")):
        write(folder / f"step-{step}", tensors(step, rows=4000), parts=2)
        with command("publish", str(folder)) as origin:
            if wait:
                told = origin.line(wait)
                codes |= {told["code"]} if "code" in told else set()
            origin.process.send_signal(signal.SIGKILL)
            origin.process.wait(WAIT_S)
    write(folder / "step-9", tensors(9, rows=4000))
    with command("publish", str(folder)) as origin:
        code = origin.line("code")["code"]
        while origin.line("published")["published"] != 9:
            pass
        status, got, error = pull(code, tmp_path / "out")
        assert (status, got.get("step")) == (0, 9), error
        assert same(tmp_path / "out" / "latest", tensors(9, rows=4000))
    assert {parse_code(one).share for one in codes} <= {parse_code(code).share}
