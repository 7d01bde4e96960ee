"""What the four commands do with what the operating system refuses: one message, an exit code, no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.commands import fail, os_error_in_words, printable
from protocol.errors import ReasonCode, UsageError
from protocol.manifest import Thresholds
from trainer.init import make_run

BIN = Path(sys.executable).parent
NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / words[0]), *words[1:]], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    make_run(path, thresholds=NOISE)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("trainer", "init", "FILE/run"),
        ("trainer", "init", "/proc/run"),
        ("trainer", "demo", "--dir", "/proc/run"),
        ("trainer", "demo", "--dir", "FILE/run"),
        ("trainer", "status", "FILE/run"),
        ("trainer", "serve", "FILE/run.toml"),
        ("node", "id", "--home", "FILE/home"),
        ("node", "id", "--home", "/proc/home"),
        ("node", "status", "--home", "FILE/home"),
        ("verifier", "audit", "FILE/run"),
        ("verifier", "ledger", "FILE/run"),
        ("shardcast", "status", "FILE/run"),
        ("shardcast", "publish", "FILE/run"),
        ("shardcast", "pull", "--manifest", "MANIFEST", "--source", "http://127.0.0.1:9", "--store", "FILE/store"),
        ("shardcast", "relay", "--manifest", "MANIFEST", "--source", "http://127.0.0.1:9", "--store", "/proc/store"),
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_used_is_one_message(words: tuple[str, ...], run_dir: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    place = {"FILE": str(blocked), "MANIFEST": str(run_dir / "manifest.hw")}
    filled = [place.get(w.partition("/")[0], w.partition("/")[0]) + "".join(w.partition("/")[1:]) for w in words]
    done = call(*filled, "--json")
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    message = done.stderr.strip()
    assert message.startswith(f"{words[0]} {words[1]}: ") and len(message.splitlines()) == 1
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message"} and error["message"] in message
    assert blocked.read_text() == "in the way"


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        (errno.ENOSPC, "the disk is full", 1),
        (errno.EDQUOT, "quota", 1),
        (errno.EACCES, "its owner must allow it", 2),
        (errno.EROFS, "read-only", 2),
        (errno.EMFILE, "ulimit -n", 2),
        (errno.EIO, "must check the disk", 2),
    ],
)
def test_what_the_system_refuses_is_said_with_cause_fix_and_who(
    number: int, words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    exc = OSError(number, os.strerror(number), "/some/file")
    assert fail("trainer serve", exc, as_json=False) == code
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("trainer serve: /some/file") and words in told.err
    assert words in os_error_in_words(exc)
    copied = OSError(number, os.strerror(number), "/source", None, "/target")
    assert os_error_in_words(copied).startswith("/target")


def test_programs_get_the_code_and_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("node id", UsageError("do this"), as_json=True) == 2
    told = capsys.readouterr()
    assert json.loads(told.out) == {"error": {"code": ReasonCode.USAGE.value, "message": "do this"}}
    assert told.err == "node id: do this\n"


def test_words_of_strangers_are_shown_as_plain_text() -> None:
    assert printable("Jörg 12 ✓") == "Jörg 12 ✓"
    assert set(printable("\x1b\n\r\x07\u202e\x9b")) == {"\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize(("section", "key"), [("origin", "lisen"), ("coordinator", "drain"), ("learner", "lr")])
def test_an_unknown_key_in_run_toml_stops_every_command_that_reads_it(tmp_path: Path, section: str, key: str) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    path = tmp_path / "run" / "run.toml"
    path.write_text(path.read_text().replace(f"[{section}]\n", f"[{section}]\n{key} = 1\n"))
    commands = [("trainer", name, str(path)) for name in ("serve", "learn", "sft", "status")]
    commands += [("shardcast", "publish", str(path.parent))] if section == "origin" else []
    for words in commands:
        done = call(*words)
        assert done.returncode == 2 and f"{section}.{key}: unknown key" in done.stderr, words
        assert "whoever edits this file must correct it" in done.stderr.lower()


def test_origin_and_coordinator_have_the_same_default_address() -> None:
    from shardcast.run_commands import ORIGIN_LISTEN
    from trainer.config import OriginSection

    assert OriginSection().listen == ORIGIN_LISTEN


@pytest.mark.parametrize("codec", ["classes", "raw", "zip"])
def test_the_codec_of_run_toml_is_what_the_origin_publishes_with(tmp_path: Path, codec: str) -> None:
    from protocol.errors import UsageError
    from shardcast.run_commands import _serving
    from trainer.config import load

    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(f'[origin]\ncodec = "{codec}"\n')
    if codec == "zip":
        with pytest.raises(UsageError, match="codec"):
            _serving(run)
        with pytest.raises(UsageError, match="codec"):
            load(run / "run.toml")
        return
    assert _serving(run)[2] == codec == load(run / "run.toml").origin.codec
