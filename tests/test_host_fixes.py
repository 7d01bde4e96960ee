"""Each fix of libp2p 0.8.1: the same scenario against the library as it ships and against our swarm.

If a test fails on its `upstream` half, upstream repaired the bug and the fix can go.
"""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

SCENARIOS = Path(__file__).parent / "peers" / "fix_scenarios.py"


PARTS = ("streams", "writes", "slots,window,strays,dialing,delay,unasked,port,names,keys,turns")
"""What runs side by side: the first two take as long as all the others together."""


@pytest.fixture(scope="module")
def outcomes():
    """All scenarios, once with the library as it ships and once with the fixes, side by side."""
    runs = [
        (mode, subprocess.Popen([sys.executable, str(SCENARIOS), part, mode], stdout=PIPE, stderr=PIPE, text=True))
        for mode in ("upstream", "fixed")
        for part in PARTS
    ]
    found = {"upstream": {}, "fixed": {}}
    try:
        for mode, run in runs:
            out, err = run.communicate(timeout=200)
            assert run.returncode == 0, err[-3000:]
            found[mode] |= {k: v for line in out.splitlines() for k, v in json.loads(line).items()}
    finally:
        for _, run in runs:
            run.kill()
            run.wait()
    return lambda name: (found["upstream"][name], found["fixed"][name])


def test_a_host_takes_more_joins_over_its_life_than_it_has_slots(outcomes):
    upstream, fixed = outcomes("slots")
    assert upstream["joined"] < upstream["wanted"]
    assert fixed["joined"] == fixed["wanted"]
    assert fixed["left"] == 0


def test_a_peer_that_ignores_the_window_is_cut_and_buffers_one_window_at_most(outcomes):
    upstream, fixed = outcomes("window")
    assert upstream["buffered"] > 3_000_000
    assert not upstream["cut"]
    assert fixed["buffered"] <= 256 * 1024
    assert fixed["cut"]


def test_a_peer_that_sends_to_no_stream_is_cut_and_a_closed_connection_takes_no_bytes(outcomes):
    upstream, fixed = outcomes("strays")
    assert not upstream["cut"]
    assert fixed["cut"]
    assert fixed["sent"] <= 8 << 18
    assert not upstream["write_refused"], "bytes that go nowhere count as sent"
    assert fixed["write_refused"]


def test_a_peer_that_opens_streams_without_end_is_cut(outcomes):
    upstream, fixed = outcomes("streams")
    assert upstream["streams"] > 400
    assert fixed["streams"] <= 8
    assert fixed["cut"]


def test_a_cancelled_write_leaves_the_connection_whole(outcomes):
    upstream, fixed = outcomes("writes")
    assert not upstream["alive"]
    assert fixed["alive"]


def test_a_peer_that_was_away_is_reached_as_soon_as_it_is_back(outcomes):
    upstream, fixed = outcomes("dialing")
    assert not upstream["reached"]
    assert "negative cache" in upstream["error"]
    assert fixed["reached"]


def test_a_dial_does_not_wait_for_a_second_address_it_does_not_have(outcomes):
    upstream, fixed = outcomes("delay")
    assert upstream["seconds"] >= 6
    assert fixed["seconds"] < 6


def test_nobody_is_dialed_unasked(outcomes):
    upstream, fixed = outcomes("unasked")
    assert upstream["dialed"] == 1
    assert fixed["dialed"] == 0


def test_a_second_listener_on_our_port_is_refused(outcomes):
    upstream, fixed = outcomes("port")
    assert upstream["shared"]
    assert not fixed["shared"]


def test_a_protocol_name_without_end_is_cut(outcomes):
    upstream, fixed = outcomes("names")
    assert not upstream["cut"]
    assert fixed["cut"]


def test_only_ed25519_identities_are_spoken_to(outcomes):
    upstream, fixed = outcomes("keys")
    assert upstream["connected"] == 1
    assert fixed["connected"] == 0


def test_a_message_costs_few_turns_of_the_scheduler(outcomes):
    upstream, fixed = outcomes("turns")
    assert upstream["whole"]
    assert fixed["whole"]
    assert fixed["steps"] < 0.7 * upstream["steps"]


def test_transports_that_never_start_are_not_imported():
    code = (
        "import sys, protocol.libp2p_fixes;"
        "print([m for m in ('aioquic', 'OpenSSL', 'coincurve', 'trio_websocket', 'httpx', 'libp2p.security.tls',"
        " 'libp2p.security.insecure', 'libp2p.stream_muxer.yamux') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['libp2p.stream_muxer.yamux']"


def test_another_version_of_libp2p_is_refused():
    code = (
        "import importlib.metadata as m; real = m.version;"
        "m.version = lambda name: '0.8.2' if name == 'libp2p' else real(name);"
        "import protocol.libp2p_fixes"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "UsageError" in done.stderr
    assert "pip install libp2p==0.8.1" in done.stderr
