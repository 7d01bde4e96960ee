"""`node receipts`: what a home was promised, against archives that kept it and archives that did not."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from protocol.envelope import seal
from protocol.files import write_atomic
from protocol.ledger import Ledger
from protocol.records import Receipt
from protocol.segments import seal_missing
from protocol.sequences import Sequences
from tests.archive_builder import START_MS, Chain, identity

NODE = Path(sys.executable).parent / "node"


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(NODE), "receipts", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


class Story:
    """One run's ledger, told by a coordinator that can also tell it in another way."""

    def __init__(self, folder: Path, blob: bytes = b"the node's rollouts") -> None:
        clock = itertools.count(START_MS, 10)
        self.folder = folder
        self.chain = Chain()
        self.ledger = Ledger.open(
            folder / "state" / "ledger.db",
            run=self.chain.run_id,
            coordinator=identity("coordinator"),
            sequences=Sequences(folder / "state" / "sequences.json"),
            clock_ms=lambda: next(clock),
            monotonic_ms=lambda: next(clock),
        )
        self.chain.sink = self.ledger
        self.chain.open()
        self.chain.join("node", "inference")
        self.blob = blob
        self.receipts: list[Receipt] = []

    async def work(self, times: int) -> None:
        """Leases answered, each with its receipt."""
        for _ in range(times):
            lease = self.chain.lease("node")
            index = self.chain.submit(lease, self.blob)
            await self.ledger.commit()
            stored = next(self.ledger.entries(index))
            head = self.ledger.head()
            digest = self.ledger_digest()
            self.receipts.append(Receipt(lease, digest, index, stored.leaf, head.size, head.root, START_MS))

    def ledger_digest(self) -> bytes:
        from blake3 import blake3

        return blake3(self.blob).digest()

    def archive(self) -> Path:
        """The run directory as an operator hands it out."""
        write_atomic(self.folder / "manifest.hw", self.chain.run.envelope.raw)
        seal_missing(self.ledger, self.folder / "ledger")
        return self.folder

    def home(self, path: Path, changed: dict[int, dict] | None = None, signer: str = "coordinator") -> Path:
        """A node's home with the receipts, some of them promising something else."""
        folder = path / "runs" / self.chain.run_id.hex() / "receipts"
        folder.mkdir(parents=True)
        pem = identity("node").private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_atomic(path / "identity.pem", pem, mode=0o600)
        for number, receipt in enumerate(self.receipts):
            promised = replace(receipt, **(changed or {}).get(number, {}))
            raw = seal(
                identity(signer), "receipt", promised, run=self.chain.run_id, sequence=number + 1, issued_at=1,
                audience=identity("node").public,
            ).raw  # fmt: skip
            (folder / f"{receipt.lease_id.hex()}.hw").write_bytes(raw)
        return path


@pytest.fixture
async def story(tmp_path):
    story = Story(tmp_path / "run")
    await story.work(3)
    yield story
    story.ledger.close()


async def test_promises_that_were_kept_are_shown_and_confirmed(story, tmp_path):
    home, run = story.home(tmp_path / "home"), story.archive()
    table = call("--home", home)
    assert table.returncode == 0 and "3 receipts" in table.stdout
    assert all(receipt.lease_id.hex()[:16] in table.stdout for receipt in story.receipts)
    checked = call("--home", home, "--ledger", run)
    assert checked.returncode == 0 and "3 of 3 hold" in checked.stdout, checked.stdout
    rows = json.loads(call("--home", home, "--ledger", run, "--json").stdout)[story.chain.run_id.hex()]
    assert [row["index"] for row in rows] == [receipt.index for receipt in story.receipts]
    assert not any(row["problem"] for row in rows)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"leaf": b"l" * 32}, "another entry"),
        ({"tree_root": b"r" * 32}, "another root"),
        ({"tree_size": 4000, "index": 3999}, "ends after"),
        ({"index": 1}, "another entry"),
        ({"digest": b"d" * 32}, "not this node's submission"),
        ({"lease_id": b"i" * 16}, "another lease"),
        ({"tree_size": 2}, "outside the promised tree"),
    ],
)
async def test_one_promise_that_was_not_kept_is_named_and_only_that_one(story, tmp_path, changed, words):
    home, run = story.home(tmp_path / "home", {1: changed}), story.archive()
    done = call("--home", home, "--ledger", run)
    assert done.returncode == 1
    assert done.stdout.count("DOES NOT HOLD") == 1 and words in done.stdout, done.stdout
    assert "2 of 3 hold" in done.stdout


async def test_receipts_signed_by_anybody_else_prove_nothing(story, tmp_path):
    home, run = story.home(tmp_path / "home", signer="stranger"), story.archive()
    done = call("--home", home, "--ledger", run)
    assert done.returncode == 1 and done.stdout.count("not signed by a coordinator") == 3


async def test_a_history_told_in_another_way_or_cut_short_is_found_out(story, tmp_path):
    home = story.home(tmp_path / "home")
    other = Story(tmp_path / "other")  # the same run, whose coordinator tells that the node sent something else
    other.blob = b"something else"
    await other.work(3)
    done = call("--home", home, "--ledger", other.archive())
    other.ledger.close()
    assert done.returncode == 1 and done.stdout.count("another entry") == 3, done.stdout
    short = Story(tmp_path / "short")
    await short.work(1)
    done = call("--home", home, "--ledger", short.archive())
    short.ledger.close()
    assert done.returncode == 1 and done.stdout.count("ends after") == 2, done.stdout


async def test_a_damaged_entry_is_named_for_the_receipt_it_belongs_to(story, tmp_path):
    home, run = story.home(tmp_path / "home"), story.archive()
    (segment,) = (run / "ledger").glob("*.hwl")
    raw = bytearray(segment.read_bytes())
    entry = next(story.ledger.entries(story.receipts[1].index)).raw_envelope
    at = raw.find(entry)
    raw[at + len(entry) - 10] ^= 1  # in its signature
    segment.write_bytes(bytes(raw))
    done = call("--home", home, "--ledger", run)
    assert done.returncode == 1
    assert done.stdout.count("DOES NOT HOLD") == 2 and "missing or damaged" in done.stdout, done.stdout


async def test_nothing_to_check_is_said_with_what_to_do(story, tmp_path):
    run = story.archive()
    (tmp_path / "empty").mkdir()
    done = call("--home", tmp_path / "empty", "--ledger", run)
    assert done.returncode == 2 and "holds no receipts" in done.stderr
    home = story.home(tmp_path / "home")
    done = call("--home", home, "--ledger", tmp_path / "empty")
    assert done.returncode == 2 and "no archive of a run" in done.stderr
    receipt = next((home / "runs").glob("*/receipts/*.hw"))
    receipt.write_bytes(receipt.read_bytes()[:50])
    done = call("--home", home)
    assert done.returncode == 1 and "damaged" in done.stdout
