"""The command `shardcast` as real processes, killed at any instant."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from protocol.files import write_atomic
from shardcast.archive import open_published
from shardcast.heads import parse_publication_name
from shardcast.puller import Policy
from tests.shardcast_run import (
    SMALL_SHAPES,
    WAIT_S,
    WIDE_SHAPES,
    MadeRun,
    holds,
    make_run,
    write_checkpoint,
)


def keyed(directory: Path, shapes: dict[str, tuple[int, ...]]) -> MadeRun:
    """A run directory with the origin's key file, as `trainer init` leaves it."""
    made = make_run(directory, shapes)
    pem = made.origin.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "keys").mkdir(mode=0o700)
    write_atomic(directory / "keys" / "origin.pem", pem, mode=0o600)
    return made


@contextmanager
def command(*args: str) -> Iterator[subprocess.Popen[str]]:
    """`shardcast ARGS --json` as a process that does not outlive the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardcast.cli", *args, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def line(stream: IO[str] | None) -> dict[str, object]:
    assert stream is not None
    text = stream.readline()
    assert text, "the process ended"
    table = json.loads(text)
    assert isinstance(table, dict)
    return table


def test_publish_relay_pull_and_status_from_the_command_line(tmp_path: Path) -> None:
    made = keyed(tmp_path / "run", SMALL_SHAPES)
    manifest = str(made.directory / "manifest.hw")
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    with command("publish", str(made.directory)) as origin:
        source = str(line(origin.stdout)["url"])
        with command("relay", "--manifest", manifest, "--source", source, "--store", str(tmp_path / "relay")) as relay:
            url = str(line(relay.stdout)["url"])
            with command(
                "pull", "--manifest", manifest, "--source", url, "--store", str(tmp_path / "a"), "--once"
            ) as pull:
                got = line(pull.stdout)
                assert pull.wait(WAIT_S) == 0
            assert holds(Policy(0, 0, b"", Path(str(got["directory"]))), SMALL_SHAPES, seed=0)
            for place, more in ((url, ["--manifest", manifest]), (str(made.directory), [])):
                with command("status", place, *more) as status:
                    told = line(status.stdout)
                    assert told["root"] == got["root"]
                    assert status.wait(WAIT_S) == 0
                if more:
                    assert (told["children"], told["lag"], told["shards_sent"], told["stamps"]) == (1, 0, 1, 1)
        origin.send_signal(signal.SIGTERM)
        assert origin.wait(WAIT_S) == 130
    assert not (made.directory / "published" / "server.json").exists()


def test_an_origin_with_a_coordinator_beside_it_serves_only_whom_that_sends_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    made = keyed(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    (made.directory / "run.toml").write_text('[origin]\nlisten = "127.0.0.1:0"\n')
    manifest = str(made.directory / "manifest.hw")
    for number, (flags, toml, code) in enumerate(
        [((), "", 1), (("--open",), "", 0), ((), "open = true\n", 0), ((), "open = false\n", 1)]
    ):
        (made.directory / "run.toml").write_text(f'[origin]\nlisten = "127.0.0.1:0"\n{toml}')
        with command("publish", str(made.directory), *flags) as origin:
            url = str(line(origin.stdout)["url"])
            store = str(tmp_path / f"p{number}")
            with command("pull", "--manifest", manifest, "--source", url, "--store", store, "--once") as pull:
                told = line(pull.stdout)
                assert pull.wait(WAIT_S) == code, told
            if code:
                assert told["error"]["code"] == "not-granted"  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["publish", "nowhere"], 2, "trainer init"),
        (["pull", "--manifest", "none.hw", "--source", "http://x", "--store", "s"], 2, "manifest.hw"),
        (["status", "http://127.0.0.1:9"], 1, "--manifest"),
        (["relay", "--manifest", "none.hw", "--source", "http://x", "--store", "s"], 2, "manifest.hw"),
    ],
)
def test_mistakes_get_one_clear_message(tmp_path: Path, args: list[str], code: int, word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardcast.cli", *args], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['shardcast', '--help']; import shardcast.cli\n"
        "try: shardcast.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'libp2p', 'aiohttp', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "examples:" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_checkpoint_that_contradicts_the_archive_ends_the_origin_with_a_reason(tmp_path: Path) -> None:
    made = keyed(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    with command("publish", str(made.directory)) as origin:
        line(origin.stdout)
        wait_for(made.directory / "published" / "e0000-s00000000" / "publication.hw")
        write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=1)
        assert origin.wait(WAIT_S) == 1
        assert line(origin.stdout)["error"]["code"] == "hash-mismatch"
        assert origin.stderr is not None
        assert "new epoch" in origin.stderr.read()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_an_origin_killed_at_any_instant_leaves_a_sound_archive_and_goes_on(tmp_path: Path) -> None:
    made = keyed(tmp_path / "run", WIDE_SHAPES)
    rng = random.Random(11)
    for step in range(4):
        write_checkpoint(made.directory, 0, step, WIDE_SHAPES, seed=step)
        with command("publish", str(made.directory)) as origin:
            line(origin.stdout)
            time.sleep(rng.uniform(0.0, 0.15))
            origin.send_signal(signal.SIGKILL)
            origin.wait(WAIT_S)
        archive = open_published(made.directory, made.run)
        first = len(archive.publications) <= 1  # killed before there was a head to keep, or between it and its file
        assert [p for p in archive.problems() if not (p.record.endswith("HEAD.hw") and first)] == []
    with command("publish", str(made.directory)) as origin:
        line(origin.stdout)
        wait_for(made.directory / "published" / "e0000-s00000003" / "publication.hw")
    archive = open_published(made.directory, made.run)
    assert list(archive.problems()) == []
    assert sorted(archive.publications) == [(0, step) for step in range(4)]
    for step in range(4):
        assert holds(archive.materialise(0, step, tmp_path / "out"), WIDE_SHAPES, seed=step)


def test_a_puller_killed_at_any_instant_never_leaves_a_wrong_file_and_goes_on(tmp_path: Path) -> None:
    made = keyed(tmp_path / "run", WIDE_SHAPES)
    rng = random.Random(13)
    policies = tmp_path / "a" / "policies"
    with command("publish", str(made.directory)) as origin:
        url = str(line(origin.stdout)["url"])
        pull = (
            "pull",
            "--manifest",
            str(made.directory / "manifest.hw"),
            "--source",
            url,
            "--store",
            str(tmp_path / "a"),
        )
        for step in range(3):
            write_checkpoint(made.directory, 0, step, WIDE_SHAPES, seed=step)
            with command(*pull) as puller:
                deadline = time.monotonic() + WAIT_S
                while not list(policies.glob(f".part-e*{step}-*")) and not (policies / f"e0000-s{step:08d}").exists():
                    assert time.monotonic() < deadline, "the download did not start"
                    time.sleep(0.002)
                time.sleep(rng.uniform(0.0, 0.1))
                puller.send_signal(signal.SIGKILL)
                puller.wait(WAIT_S)
            for folder in policies.glob("e*"):
                key = parse_publication_name(folder.name)
                assert key is not None
                assert holds(Policy(*key, b"", folder), WIDE_SHAPES, seed=key[1])
        with command(*pull) as puller:
            while (got := line(puller.stdout))["step"] != 2:
                pass
        assert holds(Policy(0, 2, b"", Path(str(got["directory"]))), WIDE_SHAPES, seed=2)


def test_a_relay_killed_and_restarted_at_its_port_serves_again(tmp_path: Path) -> None:
    made = keyed(tmp_path / "run", SMALL_SHAPES)
    manifest = str(made.directory / "manifest.hw")
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    with command("publish", str(made.directory)) as origin:
        source = str(line(origin.stdout)["url"])
        relay = ("relay", "--manifest", manifest, "--source", source, "--store", str(tmp_path / "relay"))
        with command(*relay) as first:
            url = str(line(first.stdout)["url"])
            with command("pull", "--manifest", manifest, "--source", url, "--store", str(tmp_path / "a")) as puller:
                assert line(puller.stdout)["step"] == 0
                first.send_signal(signal.SIGKILL)
                first.wait(WAIT_S)
                with command(*relay, "--listen", url.removeprefix("http://")) as second:
                    assert line(second.stdout)["url"] == url
                    write_checkpoint(made.directory, 0, 1, SMALL_SHAPES, seed=1)
                    assert line(puller.stdout)["step"] == 1
