"""The documents say what is so: vectors, links, commands, and that nothing private slipped in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import build_parser as node_parser
from protocol.envelope import open_envelope, seal
from protocol.errors import ReasonCode
from protocol.identity import Identity
from protocol.records import Ack
from shardcast.cli import _parser as cast_parser
from trainer.cli import _parser as trainer_parser
from verifier.cli import _parser as verifier_parser

ROOT = Path(__file__).resolve().parent.parent
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_envelope_vector_is_true() -> None:
    block = PROTOCOL.split("issued 5, lifetime 120000:")[1].split("## ")[0]
    vector = bytes.fromhex("".join(block.split()))
    sealed = seal(
        Identity.from_seed(bytes(range(32))), "ack", Ack("x"), run=b"\x11" * 32, sequence=1, issued_at=5,
        lifetime_ms=120_000,
    )  # fmt: skip
    assert sealed.raw == vector
    assert open_envelope(vector, run=b"\x11" * 32, kind="ack").record(Ack) == Ack("x")


def test_every_reason_code_is_listed() -> None:
    listed = set(re.findall(r"`([a-z-]+)`", PROTOCOL.split("## Reason codes")[1]))
    assert {code.value for code in ReasonCode} <= listed


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_files_and_commands_named_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"`((?:docs|tests|protocol|shardcast|environments|verifier|trainer|node|docker|examples|"
                           r"benchmarks)/[A-Za-z0-9_./-]+)`", text):  # fmt: skip
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def _typed() -> list[list[str]]:
    """Every command line of ours in the README: in its shell blocks and in its tables."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [part for block in blocks for line in block.splitlines() for part in line.partition("#")[0].split(";")]
    lines += [code for row in text.splitlines() if row.startswith("|") for code in re.findall(r"`([^`]+)`", row)]
    words = [line.split() for line in lines]
    return [line for line in words if len(line) > 1 and line[0] in ("node", "trainer", "verifier", "shardcast")]


@pytest.mark.parametrize("command", _typed(), ids=" ".join)
def test_every_command_line_of_the_readme_can_be_typed(command: list[str]) -> None:
    parser = {"node": node_parser, "trainer": trainer_parser, "verifier": verifier_parser, "shardcast": cast_parser}
    parser[command[0]]().parse_args(command[1:])  # exits with 2 for an option or a subcommand that is not there


def test_the_readme_shows_every_role_being_started() -> None:
    typed = [" ".join(command) for command in _typed()]
    for start in ("trainer init", "trainer serve", "trainer learn", "shardcast publish", "node join --role validator",
                  "node join --role inference", "verifier audit", "trainer status", "node id"):  # fmt: skip
        assert any(line.startswith(start) for line in typed), start


@pytest.mark.parametrize(
    "command",
    [
        ["trainer", "demo"],
        ["trainer", "init"],
        ["trainer", "serve"],
        ["trainer", "learn"],
        ["trainer", "status"],
        ["verifier", "audit"],
        ["verifier", "explain"],
        ["verifier", "ledger"],
        ["verifier", "calibrate"],
        ["shardcast", "publish"],
        ["shardcast", "relay"],
        ["shardcast", "pull"],
        ["shardcast", "status"],
        ["node", "join"],
        ["node", "status"],
        ["node", "id"],
    ],
    ids=" ".join,
)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:], "--help"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "xample" in done.stdout
