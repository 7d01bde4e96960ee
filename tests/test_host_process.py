"""The libp2p host process under supervision: real processes on loopback, honest and hostile."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.errors import ReasonCode, TransportError, UsageError
from protocol.host import ControlFrame, HostProcess
from protocol.identity import Identity, load_or_create_identity

STRANGERS = Path(__file__).parent / "peers" / "strangers.py"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


async def answer(key: bytes, frame: ControlFrame) -> ControlFrame:
    if frame.kind == "slow":
        await asyncio.sleep(2)
        return ControlFrame("slow.reply", b"")
    if frame.kind == "wait":
        await asyncio.sleep(float(frame.envelope))
    if frame.kind == "fail":
        raise RuntimeError("a bug of the application")
    if frame.kind == "large":
        return ControlFrame("large.reply", b"", bytes(4 << 20))
    return ControlFrame(f"{frame.kind}.reply", key, frame.attachment)


@pytest.fixture
async def make_host(tmp_path):
    hosts = []

    async def make(listen: str | None = None, **options) -> HostProcess:
        home = tmp_path / f"host{len(hosts)}"
        host = HostProcess(home=home, key=home / "transport.pem", listen=listen, **options)
        hosts.append(host)
        await host.start()
        return host

    yield make
    pids = [h.pid for h in hosts if h.pid]
    await asyncio.gather(*(h.close() for h in hosts))
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def stranger(*arguments: object) -> dict:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(STRANGERS), *map(str, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 170)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


async def until_answered(host: HostProcess, address: str, deadline_s: float) -> int:
    """Ask until a reply comes; how many requests failed before."""
    end, failed = time.monotonic() + deadline_s, 0
    while True:
        left = end - time.monotonic()
        assert left > 0, f"no reply within {deadline_s} s"
        try:
            await host.request(address, ControlFrame("echo", b""), left, dial_s=left)
            return failed
        except TransportError:
            failed += 1
            await asyncio.sleep(0.05)


async def test_requests_share_one_stream_and_are_answered_in_any_order(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    address = server.addresses[0]
    waiting = [asyncio.create_task(client.request(address, ControlFrame("wait", b"3"), 20)) for _ in range(20)]
    quick = await client.request(address, ControlFrame("echo", b"", b"body"), 10)
    assert quick == ControlFrame("echo.reply", client.transport, b"body")
    assert not any(w.done() for w in waiting)
    assert (await server.stats())["visitors"] == 1
    assert {r.kind for r in await asyncio.gather(*waiting)} == {"wait.reply"}


async def test_the_largest_frame_goes_both_ways(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    body = os.urandom(8 << 20)
    reply = await client.request(server.addresses[0], ControlFrame("echo", bytes(1 << 20), body), 60)
    assert reply.attachment == body


async def test_another_key_than_the_address_names_is_refused(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    address = server.addresses[0].rpartition("/")[0] + "/" + Identity.generate().peer_id
    with pytest.raises(TransportError) as caught:
        await client.request(address, ControlFrame("echo", b""), 3)
    assert caught.value.code is ReasonCode.UNREACHABLE
    with pytest.raises(TransportError) as caught:
        await client.request("/ip4/127.0.0.1/udp/1/quic-v1", ControlFrame("echo", b""), 3)
    assert caught.value.code is ReasonCode.MALFORMED


@pytest.mark.parametrize("kind", ["plaintext", "mplex"])
async def test_a_dialer_without_noise_or_yamux_is_refused(make_host, kind):
    server = await make_host(LOOPBACK, handler=answer)
    outcome = await stranger(kind, server.addresses[0])
    assert not outcome["connected"]
    assert ("secur" if kind == "plaintext" else "mux") in outcome["error"]
    client = await make_host()
    assert await until_answered(client, server.addresses[0], 20) == 0


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_killed_host_process_heals_and_keeps_its_port(make_host, side):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    address = server.addresses[0]
    await client.request(address, ControlFrame("echo", b""), 10)
    in_flight = asyncio.create_task(client.request(address, ControlFrame("wait", b"30"), 60))
    await asyncio.sleep(0.3)
    killed = server if side == "server" else client
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(in_flight, 10)
    assert caught.value.code is ReasonCode.UNREACHABLE
    await until_answered(client, address, 10)
    assert killed.restarts == 1
    assert server.addresses[0] == address


async def test_a_host_told_to_end_with_its_owner_is_not_restarted_and_nobody_is_alarmed(make_host, caplog):
    host = await make_host(LOOPBACK, handler=answer)
    pid = host.pid
    os.kill(pid, signal.SIGTERM)  # as a service manager does, or a demo that ends: to every process
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    await host.close()
    assert time.monotonic() - begun < 1 and host.restarts == 0
    assert "restarting" not in caplog.text


async def test_a_host_that_alone_was_told_to_end_comes_back(make_host, caplog, monkeypatch):
    monkeypatch.setattr("protocol.host.OWNER_STOPS_S", 0.2)
    server, client = await make_host(LOOPBACK, handler=answer), await make_host()
    os.kill(server.pid, signal.SIGTERM)
    await asyncio.sleep(0.5)
    await until_answered(client, server.addresses[0], 20)
    assert server.restarts == 1 and "restarting it (restart 1)" in caplog.text


async def test_broken_frames_get_a_reason_code_and_others_never_notice(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    await client.request(server.addresses[0], ControlFrame("echo", b""), 10)
    noticed = []

    async def keep_asking() -> None:
        while True:
            reply = await client.request(server.addresses[0], ControlFrame("echo", b""), 20)
            noticed.append(reply.kind == "echo.reply")
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(keep_asking())
    codes = await stranger("frames", server.addresses[0])
    cut = await stranger("garbage", server.addresses[0], 100)
    asking.cancel()
    assert {codes[k] for k in codes if k.endswith(", then")} == {"echo.reply"}
    assert {codes[k] for k in ("empty kind", "long kind", "kind not ascii", "cut in its head")} == {"malformed"}
    assert codes["envelope longer than frame"] == codes["shorter than a head"] == "malformed"
    assert codes["envelope over the bound"] == codes["attachment over the bound"] == codes["oversize"] == "oversize"
    assert cut["answered"] == 16, "a connection is cut after sixteen bad frames"
    assert len(noticed) > 5
    assert all(noticed)
    assert server.restarts == 0


async def test_a_flood_neither_bloats_nor_stops_the_host(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    await client.request(server.addresses[0], ControlFrame("echo", b""), 10)
    before = (await server.stats())["rss_kib"]
    limits = Path(f"/proc/{server.pid}/limits").read_text()
    assert next(line for line in limits.splitlines() if "address space" in line).split()[3].isdigit()
    flood = asyncio.create_task(stranger("flood", server.addresses[0], 300))
    most = before
    while not flood.done():
        await client.request(server.addresses[0], ControlFrame("echo", b""), 20)
        most = max(most, (await server.stats(20))["rss_kib"])
        await asyncio.sleep(0.05)
    outcome = await flood
    assert outcome["pushed_mib"] < 32, "the window's offender was cut"
    assert outcome["busy"] > 0, "what does not fit is refused, not kept"
    assert most - before < 200 * 1024
    assert server.restarts == 0
    assert await until_answered(client, server.addresses[0], 10) == 0
    assert (await server.stats())["held_bytes"] == 0


async def test_large_frames_that_are_announced_and_never_sent_keep_nobody_out(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    client = await make_host()
    await client.request(server.addresses[0], ControlFrame("echo", b""), 10)
    silent = asyncio.create_task(stranger("silent", server.addresses[0], 16))
    while (await server.stats())["inbound"] < 17:
        assert not silent.done()
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # all have announced what they will not send
    assert (await server.stats())["held_bytes"] == 0
    body = os.urandom(200_000)
    assert (await client.request(server.addresses[0], ControlFrame("echo", b"", body), 10)).attachment == body
    body = os.urandom(8 << 20)
    assert (
        await client.request(server.addresses[0], ControlFrame("echo", bytes(1 << 20), body), 60)
    ).attachment == body
    outcome = await silent
    assert outcome["cut"] == 16, "not after the ten minutes in which such a frame may come"
    assert outcome["longest_s"] < 25


async def test_a_frozen_peer_blocks_nobody_else(make_host):
    server = await make_host(LOOPBACK, handler=answer)
    other = await make_host(LOOPBACK, handler=answer)
    frozen, client = await make_host(), await make_host()
    address = server.addresses[0]
    await frozen.request(address, ControlFrame("echo", b""), 10)
    await client.request(address, ControlFrame("echo", b""), 10)
    replies = [asyncio.create_task(frozen.request(address, ControlFrame("large", b""), 5)) for _ in range(16)]
    await asyncio.sleep(0.05)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        for _ in range(20):  # a peer that takes none of its 64 MiB of replies
            assert (await client.request(address, ControlFrame("echo", b""), 10)).kind == "echo.reply"
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    await asyncio.gather(*replies, return_exceptions=True)
    os.kill(server.pid, signal.SIGSTOP)  # and a host that answers nobody
    try:
        stuck = asyncio.create_task(client.request(address, ControlFrame("echo", b""), 3))
        assert (await client.request(other.addresses[0], ControlFrame("echo", b""), 10)).kind == "echo.reply"
        with pytest.raises(TransportError) as caught:
            await stuck
        assert caught.value.code is ReasonCode.DEADLINE
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until_answered(client, address, 10)


async def test_a_peer_has_a_bounded_number_of_requests_and_connections(make_host):
    server = await make_host(LOOPBACK, handler=answer, max_per_address=2)
    first, second = await make_host(), await make_host()
    address = server.addresses[0]
    asked = [asyncio.create_task(first.request(address, ControlFrame("wait", b"2"), 20)) for _ in range(50)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    busy = [o for o in outcomes if isinstance(o, TransportError) and o.code is ReasonCode.BUSY]
    assert len(busy) == 50 - 32
    await second.request(address, ControlFrame("echo", b""), 10)
    third = await make_host()
    with pytest.raises(TransportError):
        await third.request(address, ControlFrame("echo", b""), 3)
    assert (await server.stats())["refused"] > 0
    await second.close()
    await until_answered(third, address, 10)


async def test_sockets_that_never_shake_hands_leave_room_for_others(make_host):
    server = await make_host(LOOPBACK, handler=answer, max_connections=40)
    client = await make_host()
    port = int(server.addresses[0].split("/")[4])
    half_open = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    assert await until_answered(client, server.addresses[0], 20) == 0
    assert (await server.stats())["inbound"] <= 21
    for _, writer in half_open:
        writer.close()


async def test_a_failing_handler_is_an_internal_error_and_a_gone_peer_cancels_its_handler(make_host):
    cancelled = asyncio.Event()

    async def handler(key: bytes, frame: ControlFrame) -> ControlFrame:
        try:
            return await answer(key, frame)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = await make_host(LOOPBACK, handler=handler)
    client = await make_host()
    with pytest.raises(TransportError) as caught:
        await client.request(server.addresses[0], ControlFrame("fail", b""), 10)
    assert caught.value.code is ReasonCode.INTERNAL
    waiting = asyncio.create_task(client.request(server.addresses[0], ControlFrame("wait", b"60"), 90))
    await asyncio.sleep(0.3)
    await client.close()
    await asyncio.wait_for(cancelled.wait(), 10)
    with pytest.raises(TransportError):
        await waiting


async def test_a_port_in_use_and_a_readable_key_are_the_person_s_to_fix(make_host, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="in use"):
            await make_host(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
    key = tmp_path / "open.pem"
    load_or_create_identity(key)
    key.chmod(0o644)
    host = HostProcess(home=tmp_path, key=key, listen=None)
    with pytest.raises(UsageError, match="chmod 600"):
        await host.start()


def start_bare_host(tmp_path: Path) -> tuple[subprocess.Popen, socket.socket]:
    key = tmp_path / "bare.pem"
    load_or_create_identity(key)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "protocol.hostd", "--socket-fd", str(theirs.fileno()), "--key", str(key)]
    command += ["--listen", LOOPBACK, "--parent", str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.settimeout(60)
    assert ours.recv(4096), "it is ready"
    return process, ours


@pytest.mark.parametrize("how", ["signal", "socket"])
def test_the_host_ends_on_a_signal_and_with_its_application_s_socket(tmp_path, how):
    process, ours = start_bare_host(tmp_path)
    try:
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            ours.close()
        assert process.wait(10) in (0, -signal.SIGALRM)
    finally:
        process.kill()
        process.wait()
        ours.close()


def test_the_host_dies_with_its_application(tmp_path):
    """Even stopped, so that it cannot see its socket close."""
    program = f"""
import asyncio, pathlib
from protocol.host import HostProcess
async def main():
    home = pathlib.Path({str(tmp_path)!r})
    host = HostProcess(home=home, key=home / "k.pem", listen=None)
    await host.start()
    print(host.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    app = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(app.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
    finally:
        app.kill()
        app.wait()
    for _ in range(100):
        if not alive(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the host process outlived its application")
