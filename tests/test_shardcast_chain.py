"""Relays in a chain, and one that lies, in a real run: coordinator, origin and members, each its process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.envelope import parse
from protocol.evidence import check_relay_lie
from protocol.identity import load_identity
from protocol.records import RelayReport
from protocol.segments import read_segments
from shardcast.store import read_publication, verify_shards
from tests.node_run import BIN, ROOT, Member, NodeRun

FLIPPING = ROOT / "examples" / "cheats" / "flipping-relay.py"
PACE = {"coordinator.member_timeout_s": 3.0}


@pytest.fixture
def river(tmp_path: Path) -> Iterator[NodeRun]:
    """Coordinator and origin are up and step 0 is published; relay-1 and relay-2 are admitted."""
    run = NodeRun(tmp_path / "run", relays=("relay-1", "relay-2"), **PACE)
    try:
        run.serve()
        run.publish()
        run.advance()
        yield run
    finally:
        run.close()


def store(run: NodeRun, name: str) -> Path:
    return run.dir / "nodes" / name / "runs" / run.run.id.hex() / "relay"


def stats(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "stats.json").read_text()))
    except (OSError, ValueError):
        return {}


def holds(run: NodeRun, name: str, step: int) -> bool:
    """Whether a relay's store has this step, byte for byte the origin's."""
    place, origin = (folder / f"e0000-s{step:08d}" for folder in (store(run, name), run.dir / "published"))
    if not (place / "publication.hw").exists():
        return False
    publication = read_publication(place, run.run)
    assert verify_shards(place, publication) == []
    return (place / "shard-000000.bin").read_bytes() == (origin / "shard-000000.bin").read_bytes()


def parents(member: Member) -> list[str]:
    """Whom this relay was last told to pull from."""
    told = member.events("relay.parents")
    return [str(url) for url in told[-1]["urls"]] if told else []


def url_of(member: Member) -> str:
    return str(member.events("relay.listening")[-1]["url"])


@pytest.mark.heavy
def test_two_relays_in_a_chain_come_and_go_and_nothing_is_lost(river: NodeRun, tmp_path: Path) -> None:
    first = river.join("relay-1", "relay")
    second = river.join("relay-2", "relay")
    guest = river.join("guest", "relay")  # admitted by nobody: it pulls like any stranger and has no children
    river.wait("the first policy at the end of the chain", lambda: holds(river, "guest", 0))
    origin = json.loads((river.dir / "published" / "server.json").read_text())["url"]
    assert origin not in parents(guest)
    assert parents(second) == [url_of(first), origin], "the origin is its spare"

    for step in (1, 2):
        river.advance()
        river.wait(f"step {step} at the end", lambda step=step: holds(river, "guest", step))  # type: ignore[misc]
    river.wait("the count", lambda: stats(river.dir / "published").get("shards_sent") == 3)
    assert stats(river.dir / "published")["children"] == 1, "the origin serves its planned child and nobody else"

    # The second relay tries the origin with its own key, which the run admitted: but not there.
    tried = subprocess.run(
        [str(BIN / "shardcast"), "relay", "--manifest", str(river.dir / "manifest.hw"), "--source", origin, "--json",
         "--store", str(tmp_path / "try"), "--key", str(second.home / "identity.pem")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert tried.returncode == 1
    assert json.loads(tried.stdout.splitlines()[-1])["error"]["code"] == "not-granted"
    assert "coordinator names" in tried.stderr and "node join" in tried.stderr

    # The first relay dies without a word. The second takes its place at the origin, and steps go on.
    first.process.kill()
    first.process.wait(10)
    river.advance()
    river.wait("step 3 without the first relay", lambda: holds(river, "guest", 3))
    river.wait("the second's word that it pulls from the origin", lambda: parents(second) == [origin])

    # It comes back, at the end of the line; what it missed it does not need.
    first = river.join("relay-1", "relay")
    river.wait("the first relay to be back", lambda: len(first.events("relay.listening")) == 2)
    river.wait("the children to be told", lambda: url_of(first) in parents(second) + parents(guest))
    river.advance()
    river.wait("step 4 through both", lambda: holds(river, "relay-1", 4) and holds(river, "guest", 4))
    assert all(holds(river, "guest", step) for step in range(5)), "and no step was lost"

    # The second leaves as it should: nobody is sent there any more.
    assert second.stop() == 0
    river.wait("the guest to be told", lambda: parents(guest) == [url_of(first)])
    river.advance()
    river.wait("step 5 without the second relay", lambda: holds(river, "guest", 5))


@pytest.mark.heavy
def test_a_relay_that_flips_a_byte_is_named_with_proof_and_its_child_has_the_right_weights(
    river: NodeRun, tmp_path: Path
) -> None:
    river.join("relay-1", "relay")
    truth = river.dir / "nodes" / "relay-2" / "own-log.jsonl"
    log = river.dir / "logs" / "relay-2.jsonl"
    liar = river.program(
        str(FLIPPING), "--truth", str(truth), "--run", str(river.dir / "join.hw"), "--log", str(log),
        "--home", str(river.dir / "nodes" / "relay-2"), "--name", "relay-2",
    )  # fmt: skip
    river.wait("the liar to be handed out", lambda: bool(stats(store(river, "relay-2"))))
    river.wait("its first policy", lambda: holds(river, "relay-2", 0))
    guest = river.join("guest", "relay")
    river.wait("the right weights at its child", lambda: holds(river, "guest", 0))
    river.wait("the accusation", lambda: river.node("relay-2").get("state") == "suspended")
    assert truth.read_text(), "it did flip a byte"
    assert river.node("relay-2")["reason"] == "relay-lied"
    river.wait("the guest to be told", lambda: len(parents(guest)) == 1)
    assert liar.wait(60) == 0, "it is told that it is suspended, and leaves"
    assert "suspended" in log.read_text() and "relay-lied" in log.read_text()
    river.advance()
    river.wait("step 1 from the honest one", lambda: holds(river, "guest", 1))
    assert river.node("relay-1")["state"] != "suspended"

    river.processes[0].send_signal(signal.SIGTERM)
    river.processes[0].wait(30)
    sealed = read_segments(river.dir / "ledger", river.run)
    accusations = [item.entry for item in sealed.entries if item.entry.event == "relay.accused"]
    assert len(accusations) == 1
    report = parse(accusations[0].subject).record(RelayReport)
    assert report.relay == load_identity(river.dir / "nodes" / "relay-2" / "identity.pem").public
    check_relay_lie(report, river.run.id, [river.run.manifest.origin])  # by anybody, from these bytes alone
    audit = subprocess.run(
        [str(BIN / "verifier"), "audit", str(river.dir), "--json"], capture_output=True, text=True, timeout=120
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
