"""Nodes in a whole run, each role as its real process: what they do, survive, and say when they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.receipts import check_receipt
from protocol.envelope import parse
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import load_identity
from protocol.records import Receipt
from tests.node_run import BIN, ROOT, NodeRun, is_running, kill_hard


@pytest.fixture
def river(tmp_path):
    """Coordinator, origin, relay and both validators are up, step 0 is published."""
    run = NodeRun(tmp_path / "run")
    try:
        run.serve()
        run.publish()
        run.advance()
        run.join("relay-1", "relay")
        run.join("validator-1", "validator")
        run.join("validator-2", "validator")
        yield run
    finally:
        run.close()


@pytest.mark.soak
def test_a_node_works_through_failures_of_everything_around_it(river):
    node = river.join("node-1", "inference")
    river.wait("first accepted rollouts", lambda: river.node("node-1").get("accepted", 0) >= 4)
    joined = node.events("joined")[0]
    relay = river.members["relay-1"].events("relay.listening")[0]["url"]
    assert joined["weights"] == [relay]  # and not the origin
    river.wait("the node to be active", lambda: river.node("node-1").get("state") == "active")

    # every finished lease has a receipt on disk that holds, and nothing is left unsent
    river.wait("idle", lambda: bool(node.events("lease.none")))
    part = node.home / "runs" / river.run.id.hex()
    river.wait("uploads", lambda: not list((part / "submissions").glob("*.hws")))
    receipts = list((part / "receipts").glob("*.hw"))
    assert len(receipts) >= 3
    own = load_identity(node.home / "identity.pem").public
    raw = receipts[0].read_bytes()
    receipt = parse(raw).record(Receipt)
    check_receipt(raw, run=river.run, owner=own, lease_id=receipt.lease_id, digest=receipt.digest)
    with pytest.raises(ProtocolError):
        check_receipt(raw, run=river.run, owner=own, lease_id=receipt.lease_id, digest=bytes(32))
    with pytest.raises(ProtocolError):
        check_receipt(raw, run=river.run, owner=bytes(32), lease_id=receipt.lease_id, digest=receipt.digest)

    # new weights reach it through the relay and are swapped in between leases
    river.advance()
    river.wait("a lease of policy 1", lambda: any(e["step"] == 1 for e in node.events("lease")))
    river.wait("idle again", lambda: node.events("lease.none")[-1]["time"] > node.events("lease")[-1]["time"])

    # its engine dies: it is brought back, the lease goes back, and work goes on
    engine = next(pid for pid, command in node.children() if "node.engine" in command)
    kill_hard(engine)
    done = len(node.events("lease.done"))
    river.advance()
    river.wait("work after the engine's death", lambda: len(node.events("lease.done")) > done)
    assert node.events("engine.restart")
    assert node.events("lease.failed")

    # the coordinator dies and comes back: nobody needs to do anything
    river.wait("idle once more", lambda: node.events("lease.none")[-1]["time"] > node.events("lease")[-1]["time"])
    coordinator = river.processes[0]
    coordinator.kill()
    coordinator.wait(5)
    river.wait("the node to notice", lambda: bool(node.events("coordinator.away")))
    done = len(node.events("upload.receipt"))
    river.serve()
    river.advance()
    river.wait("work after the coordinator's return", lambda: len(node.events("upload.receipt")) > done)
    assert node.events("coordinator.back")
    assert river.node("node-1")["rejected"] == 0

    # the person ends it: engine and host process go with it
    shown = subprocess.run(
        [str(BIN / "node"), "status", "--home", str(node.home), "--json"], capture_output=True, text=True, timeout=30
    )
    picture = json.loads(shown.stdout)
    assert shown.returncode == 0 and picture["alive"] and picture["state"] == "active" and picture["receipts"] > 0
    children = [pid for pid, _ in node.children()]
    assert len(children) >= 2
    assert node.stop() == 0
    river.wait("its children to be gone", lambda: not any(is_running(pid) for pid in children), 10)
    assert "Traceback" not in node.errors.read_text()


WRONG_CLOCK = """
import pathlib, sys, time
flag, real, real_ns = pathlib.Path(sys.argv.pop(1)), time.time, time.time_ns
off = lambda: float(flag.read_text())
time.time = lambda: real() + off()
time.time_ns = lambda: real_ns() + int(off() * 1e9)
from node.cli import main
sys.exit(main())
"""
"""The real command in a process whose wall clock is as wrong as a file says, for everything in it."""


@pytest.mark.heavy
def test_members_leave_and_come_back_and_nothing_is_lost(river, tmp_path):
    # a machine whose clock is one hour ahead works and is warned once; a jump during the run does no harm
    clock = tmp_path / "clock"
    clock.write_text("3600")
    node = river.join("node-1", "inference", program=(sys.executable, "-c", WRONG_CLOCK, str(clock)))
    river.wait("first accepted rollouts", lambda: river.node("node-1").get("accepted", 0) >= 4, 240)
    clock.write_text("-90000")
    river.advance()
    receipts = len(node.events("upload.receipt"))
    river.wait("work after the jump", lambda: len(node.events("upload.receipt")) > receipts)
    assert len(node.events("clock.wrong")) == 1
    assert node.said.read_text().count("please set the clock") == 1

    # Ctrl-C in the middle of a lease: it is handed back, and the person reads how to come back
    engine = next(pid for pid, command in node.children() if "node.engine" in command)
    os.kill(engine, signal.SIGSTOP)
    leased = len(node.events("lease"))
    river.advance()
    river.wait("a lease in work", lambda: len(node.events("lease")) > leased)
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(10) == 0
    given = node.events("lease.given-back")
    assert [event["lease"] for event in given] == [node.events("lease")[-1]["lease"]]
    said = node.said.read_text()
    assert "left the run" in said and "handed back" in said and "come back with: node join --role inference" in said
    shown = status_of(node)
    assert shown["ended"] == "stopped by its owner" and not shown["alive"]
    part = node.home / "runs" / river.run.id.hex()
    before = json.loads((part / "sequences.json").read_text())

    # it comes back with its home, and the coordinator dies while it works: what is finished waits on the disk
    node = river.join("node-1", "inference")
    leased = len(node.events("lease"))
    river.wait("a lease again", lambda: len(node.events("lease")) > leased)
    coordinator = river.processes[0]
    coordinator.kill()
    coordinator.wait(5)
    river.wait("a finished lease on the disk", lambda: bool(list((part / "submissions").glob("*.hws"))))
    unsent = next((part / "submissions").glob("*.hws")).stem
    assert node.stop() == 0
    assert "wait on disk and are sent when this node comes back" in node.said.read_text()
    after = json.loads((part / "sequences.json").read_text())
    assert all(after[kind] > number for kind, number in before.items() if kind in ("heartbeat", "lease.next"))

    # both come back, in any order, and go on: the submission gets its receipt
    node = river.join("node-1", "inference")
    river.serve()
    river.wait("the receipt", lambda: (part / "receipts" / f"{unsent}.hw").exists())
    assert node.events("upload.resend")[-1]["lease"] == unsent

    # a validator leaves with jobs drawn for it: the other one does them. Both stand still first, whoever is drawn
    first, second = river.members["validator-1"], river.members["validator-2"]
    for validator in (first, second):
        validator.process.send_signal(signal.SIGSTOP)
    river.advance_until("submissions that wait", lambda: river.status()["rollouts"]["pending"] > 8)
    first.process.send_signal(signal.SIGCONT)
    assert first.stop() == 0
    second.process.send_signal(signal.SIGCONT)
    assert "submissions judged" in first.said.read_text()
    accepted = river.node("node-1")["accepted"]
    river.wait("work with one validator", lambda: river.node("node-1")["accepted"] > accepted)
    river.wait("no submission to wait", lambda: river.status()["rollouts"]["pending"] == 0)
    assert river.node("node-1")["rejected"] == 0

    # the run's root changes both of the coordinator's keys: nobody needs to do anything
    for which in ("coordinator", "transport"):
        subprocess.run([str(BIN / "trainer"), "key", "rotate", which, str(river.dir)], check=True, timeout=60)
    river.wait("the new keys to be followed", lambda: len(node.events("manifest.updated")) >= 1)
    river.advance()
    receipts = len(node.events("upload.receipt"))
    river.wait("a receipt by the new key", lambda: len(node.events("upload.receipt")) > receipts)
    assert river.node("node-1")["rejected"] == 0

    # every promise it holds was kept, those of the old key too
    assert node.stop() == 0
    river.processes[-1].terminate()
    assert river.processes[-1].wait(15) == 143
    command = [str(BIN / "node"), "receipts", "--home", str(node.home), "--ledger", str(river.dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "hold against" in done.stdout, done.stdout + done.stderr

    # its key is taken back while it is away: it hears so at its next start, and it is told what to do
    peer = json.loads((node.home / "runs" / river.run.id.hex() / "status.json").read_text())["peer_id"]
    revoke = [str(BIN / "trainer"), "key", "revoke", peer, str(river.dir), "--reason", "it was lost on a train"]
    subprocess.run(revoke, check=True, timeout=60)
    river.serve()
    node = river.join("node-1", "inference")
    river.wait("the node to end", lambda: node.process.poll() is not None)
    assert node.process.returncode == 2
    assert "lost on a train" in node.errors.read_text() and "another --home" in node.errors.read_text()
    assert "Traceback" not in node.errors.read_text() + first.errors.read_text()


def status_of(member) -> dict:
    command = [str(BIN / "node"), "status", "--home", str(member.home), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout)


@pytest.mark.heavy
def test_a_dishonest_node_is_suspended_told_why_and_leaves_with_exit_0(river, tmp_path):
    socket = tmp_path / "cheat.sock"
    river.program(
        str(ROOT / "examples" / "cheats" / "quantised.py"), "--socket", str(socket), "--truth", str(tmp_path / "truth")
    )
    node = river.join("stranger", "inference", "--engine-later", "--engine-socket", str(socket))
    river.wait("the node to end", lambda: node.process.poll() is not None, 180)
    assert node.process.returncode == 0, river.logs()
    left = node.events("left")[0]
    assert left["code"] == "suspended"
    assert "suspended this node" in left["reason"] and "proof-mismatch" in left["reason"]
    # status.json is written about once a second: the node is told before it says so
    river.wait("the status to say so", lambda: river.node("stranger").get("state") == "suspended", 20)
    # asked again it is told the same, at once
    again = river.join("stranger", "inference", "--engine-socket", str(socket))
    river.wait("the second attempt to end", lambda: again.process.poll() is not None, 60)
    assert again.process.returncode == 0
    for name in ("validator-1", "validator-2"):
        validator = river.members[name]
        assert validator.events("verdict")
        assert validator.stop() == 0
    assert river.members["relay-1"].stop() == 0
    assert river.members["relay-1"].events("stopped")


@pytest.mark.heavy
def test_everybody_leaves_by_themselves_when_the_run_is_finished(tmp_path):
    river = NodeRun(tmp_path / "run", steps=1)
    try:
        river.serve()
        river.publish()
        river.advance()
        river.join("relay-1", "relay")
        river.join("validator-1", "validator")
        river.join("node-1", "inference")
        river.wait("batch 0", lambda: (river.dir / "batches" / "step-00000000.hwb").exists())
        river.advance()
        for member in river.members.values():
            river.wait(f"{member.home.name} to end", lambda member=member: member.process.poll() is not None, 60)
            assert member.process.returncode == 0, river.logs()
            assert "finished" in member.events("left")[0]["reason"]
    finally:
        river.close()


def test_a_node_process_of_inference_or_relay_never_imports_torch():
    script = (
        "import sys\n"
        "import node.cli, node.join, node.inference, node.relay, node.engine_link, node.upload, node.status\n"
        "import node.doctor\n"
        "heavy = [m for m in ('torch', 'transformers', 'verifier.model', 'trio', 'libp2p') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_running_inference_node_has_no_torch_in_its_memory(tmp_path):
    """The code path above can't see lazy imports: look into the mapped files of the real process."""
    river = NodeRun(tmp_path / "run")
    try:
        river.serve()
        river.publish()
        river.advance()
        river.join("relay-1", "relay")
        node = river.join("node-1", "inference")
        river.wait("a receipt", lambda: bool(node.events("upload.receipt")))
        for member in river.members.values():
            mapped = Path(f"/proc/{member.process.pid}/maps").read_text()
            assert "libtorch" not in mapped
        # both leave at a word, cleanly
        for member in river.members.values():
            member.process.send_signal(signal.SIGINT)
        for member in river.members.values():
            assert member.process.wait(10) == 0
            assert member.events("stopped"), river.logs()
    finally:
        river.close()


def test_a_relay_of_a_public_run_refuses_to_announce_a_private_address():
    from node.relay import check_listen
    from protocol.errors import UsageError

    assert check_listen("127.0.0.1:0", allow_private=True) == ("127.0.0.1", 0)
    for listen in ("127.0.0.1:0", "10.0.0.7:80", "[::1]:80"):
        with pytest.raises(UsageError):
            check_listen(listen, allow_private=False)
    for listen in ("localhost", "127.0.0.1:99999", "nowhere:80", ":80"):
        with pytest.raises(UsageError) as caught:
            check_listen(listen, allow_private=True)
        assert caught.value.code == ReasonCode.USAGE
