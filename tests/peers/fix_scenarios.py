"""One scenario per fix of libp2p, run as a program: `fix_scenarios.py NAME,..|all upstream|fixed`; prints JSON lines.

Each scenario does the same to libp2p 0.8.1 as it ships and to our hardened swarm; tests/test_host_fixes.py compares.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import libp2p
import libp2p.network.swarm as swarm_module
import libp2p.stream_muxer.yamux.yamux as yamux
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

FIXED = sys.argv[2] == "fixed"
SLOTS = 5
if FIXED:
    from protocol import libp2p_fixes
    from protocol.admission import Admission


def make_swarm(key_pair=None):
    if FIXED and key_pair is None:
        return libp2p_fixes.new_swarm(os.urandom(32), Admission(SLOTS, None, time.monotonic))
    key_pair = key_pair or create_new_key_pair(os.urandom(32))
    return libp2p.new_swarm(
        key_pair=key_pair,
        sec_opt={NOISE_ID: Noise(key_pair, noise_privkey=create_x25519().private_key)},
        muxer_opt={yamux.PROTOCOL_ID: yamux.Yamux},
        connection_config=ConnectionConfig(
            max_connections=SLOTS, high_watermark=SLOTS, min_connections=0, low_watermark=0, inbound_upgrade_timeout=5
        ),
    )


async def listen(swarm, port=0):
    if not await swarm.listen(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")):
        return None
    return next(iter(swarm.listeners.values())).get_addrs()[0]


async def dial(swarm, address, peer_id):
    if FIXED and isinstance(swarm, libp2p_fixes.HardenedSwarm):
        return await swarm.dial(address, peer_id)
    swarm.peerstore.clear_addrs(peer_id) if peer_id in swarm.peerstore.peer_ids() else None
    swarm.peerstore.add_addrs(peer_id, [address], 600)
    return (await swarm.dial_peer(peer_id))[0]


async def slots():
    """More peers join and leave, one after another, than the host has slots."""
    host, joined = make_swarm(), 0
    async with background_trio_service(host):
        address = await listen(host)
        for _ in range(2 * SLOTS):
            peer = make_swarm()
            async with background_trio_service(peer):
                try:
                    with trio.fail_after(10):
                        connection = await dial(peer, address, host.get_peer_id())
                        joined += 1
                        await connection.close()
                except Exception:
                    pass
            await trio.sleep(0.2)
        await trio.sleep(1)
        return {"joined": joined, "wanted": 2 * SLOTS, "left": len(host.get_connections())}


async def window():
    """A peer sends 4 MiB on a stream whose reader never reads, past a window of 256 KiB."""
    host, peer = make_swarm(), make_swarm()
    held = []

    async def never_read(stream):
        held.append(stream.muxed_stream)
        await trio.sleep(30)

    async with background_trio_service(host), background_trio_service(peer):
        host.set_stream_handler(never_read)
        address = await listen(host)
        connection = await dial(peer, address, host.get_peer_id())
        stream = (await connection.new_stream()).muxed_stream
        await trio.sleep(0.3)
        most = 0
        for _ in range(64):
            try:
                await stream.conn._write_frame(struct.pack("!BBHII", 0, 0, 0, stream.stream_id, 65536) + bytes(65536))
            except Exception:
                break
            await trio.sleep(0.005)
            most = max(most, sum(len(b) for b in held[0].conn.stream_buffers.values()))
        await trio.sleep(0.5)
        return {"buffered": most, "cut": held[0].conn.event_shutting_down.is_set()}


async def strays():
    """A peer sends 4 MiB to a stream that was never opened; then its own side closes the connection, and it writes."""
    host, peer = make_swarm(), make_swarm()

    async def never_read(stream):
        await trio.sleep(30)

    async with background_trio_service(host), background_trio_service(peer):
        host.set_stream_handler(never_read)
        address = await listen(host)
        connection = await dial(peer, address, host.get_peer_id())
        await connection.new_stream()
        await trio.sleep(0.3)
        served = host.get_connections()[0].muxed_conn
        frame = struct.pack("!BBHII", 0, 0, 0, 4001, 65536) + bytes(65536)
        sent = 0
        with contextlib.suppress(Exception):
            for _ in range(64):
                await connection.muxed_conn._write_frame(frame)
                await trio.sleep(0.005)
                sent += len(frame)
        await trio.sleep(0.5)
        cut = served.event_shutting_down.is_set()

        layer = connection.muxed_conn
        for name in ("secured_conn", "conn", "read_writer", "read_write_closer", "stream", "stream"):
            layer = getattr(layer, name, layer)
        await trio.aclose_forcefully(layer)
        refused = False
        try:
            await connection.muxed_conn._write_frame(frame)
        except Exception:
            refused = True
        return {"sent": sent, "cut": cut, "write_refused": refused}


async def streams():
    """A peer opens 500 streams on one connection."""
    host, peer = make_swarm(), make_swarm()

    async def never_read(stream):
        await trio.sleep(30)

    async with background_trio_service(host), background_trio_service(peer):
        host.set_stream_handler(never_read)
        address = await listen(host)
        connection = await dial(peer, address, host.get_peer_id())
        await trio.sleep(0.3)
        served = host.get_connections()[0].muxed_conn
        most = 0
        for i in range(500):
            try:
                await connection.muxed_conn._write_frame(struct.pack("!BBHII", 0, 1, 1, 1001 + 2 * i, 0))
            except Exception:
                break
            most = max(most, len(served.streams))
        with trio.move_on_after(20):  # until all of them are there, however slow the machine is, or it was cut
            while len(served.streams) < 500 and not served.event_shutting_down.is_set():
                most = max(most, len(served.streams))
                await trio.sleep(0.05)
        return {"streams": max(most, len(served.streams)), "cut": served.event_shutting_down.is_set()}


async def writes():
    """A write to a frozen peer is cancelled; the peer thaws; does the connection still carry a stream?"""
    child = subprocess.Popen([sys.executable, __file__, "echo-server", sys.argv[2]], stdout=subprocess.PIPE, text=True)
    try:
        line = await trio.to_thread.run_sync(child.stdout.readline)
        address, peer_text = line.split()
        peer = make_swarm()
        async with background_trio_service(peer):
            connection = await dial(peer, Multiaddr(address), ID.from_base58(peer_text))
            layer = connection
            for name in ("muxed_conn", "secured_conn", "conn", "read_writer", "read_write_closer", "stream", "stream"):
                layer = getattr(layer, name, layer)
            layer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            stream = await connection.new_stream()
            os.kill(child.pid, signal.SIGSTOP)
            muxed = stream.muxed_stream
            with trio.move_on_after(15):
                async with trio.open_nursery() as nursery:

                    async def flood():
                        # Straight to the connection: a whole window may fit into the kernel's buffers.
                        while True:
                            size = 30000
                            header = struct.pack("!BBHII", 0, 0, 0, muxed.stream_id + 2, size)
                            await muxed.conn._write_frame(header + bytes(size))

                    nursery.start_soon(flood)
                    await trio.sleep(1.0)  # by now the kernel's buffers are full and a frame is half written
                    nursery.cancel_scope.cancel()
                    trio.lowlevel.spawn_system_task(thaw, child.pid)
            try:
                with trio.fail_after(8):
                    await stream.write(b"hello")
                    echoed = await stream.read(5)
            except Exception as exc:
                return {"alive": False, "error": repr(exc)[:200]}
            return {"alive": echoed == b"hello"}
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.wait()


async def thaw(pid):
    await trio.sleep(0.5)
    os.kill(pid, signal.SIGCONT)


async def echo_server():
    host = make_swarm()

    async def echo(stream):
        try:
            while data := await stream.muxed_stream.read(65536):
                await stream.muxed_stream.write(data)
        except Exception:
            return

    async with background_trio_service(host):
        host.set_stream_handler(echo)
        print(await listen(host), host.get_peer_id(), flush=True)
        await trio.sleep(60)


async def dialing():
    """A peer is away, is dialed, comes back; and how long does a dial take that succeeds?"""
    peer, seed = make_swarm(), os.urandom(32)
    key_pair = create_new_key_pair(seed)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, peer_id = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), ID.from_pubkey(key_pair.public_key)
    async with background_trio_service(peer):
        try:
            await dial(peer, address, peer_id)
        except Exception:
            pass
        host = libp2p_fixes.new_swarm(seed, Admission(SLOTS, None, time.monotonic)) if FIXED else make_swarm(key_pair)
        async with background_trio_service(host):
            await listen(host, port)
            try:
                await dial(peer, address, peer_id)
            except Exception as exc:
                return {"reached": False, "error": str(exc)[:200]}
            return {"reached": True}


async def delay():
    """One dial that succeeds, with libp2p's wait for a second address (250 ms) made 6 s long to stand out."""
    swarm_module._HAPPY_EYEBALLS_DELAY = 6.0
    host, peer = make_swarm(), make_swarm()
    async with background_trio_service(host), background_trio_service(peer):
        address = await listen(host)
        started = time.perf_counter()
        await dial(peer, address, host.get_peer_id())
        return {"seconds": time.perf_counter() - started}


async def unasked():
    """Our host has heard of a peer and was not told to dial it."""
    host, other = make_swarm(), make_swarm()
    async with background_trio_service(other):
        host.peerstore.add_addrs(other.get_peer_id(), [await listen(other)], 600)
        async with background_trio_service(host):
            await trio.sleep(2)
            return {"dialed": len(other.get_connections())}


async def port():
    """A second process wants the same listening port."""
    first, second = make_swarm(), make_swarm()
    async with background_trio_service(first), background_trio_service(second):
        address = await listen(first)
        return {"shared": await listen(second, int(address.value_for_protocol("tcp"))) is not None}


async def names():
    """A stranger announces a protocol name of 4 MiB and begins to send it."""
    host = make_swarm()
    async with background_trio_service(host):
        address = await listen(host)
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.value_for_protocol("tcp")))
        try:
            await stream.send_all(b"\x80\x80\x80\x02" + bytes(200_000))
            with trio.move_on_after(3) as scope:
                while await stream.receive_some(65536):
                    pass
            return {"cut": not scope.cancelled_caught}
        except trio.BrokenResourceError:
            return {"cut": True}


async def keys():
    """A stranger with an RSA identity dials."""
    host, peer = make_swarm(), make_swarm(create_rsa())
    async with background_trio_service(host), background_trio_service(peer):
        address = await listen(host)
        try:
            with trio.fail_after(8):
                await dial(peer, address, host.get_peer_id())
                await trio.sleep(1)
        except Exception:
            pass
        return {"connected": len(host.get_connections())}


class Steps(trio.abc.Instrument):
    """Counts what the scheduler runs."""

    count = 0

    def before_task_step(self, task):
        self.count += 1


async def turns():
    """A hundred small messages go there and back, one after another, then a large one."""
    host, peer, steps = make_swarm(), make_swarm(), Steps()

    async def echo(stream):
        with contextlib.suppress(Exception):
            while True:
                await stream.muxed_stream.write(await stream.muxed_stream.read(65536))

    async with background_trio_service(host), background_trio_service(peer):
        host.set_stream_handler(echo)
        connection = await dial(peer, await listen(host), host.get_peer_id())
        stream = (await connection.new_stream()).muxed_stream
        trio.lowlevel.add_instrument(steps)
        whole = True
        for number in range(100):
            sent = bytes([number]) * 200
            await stream.write(sent)
            whole = whole and await stream.read(65536) == sent
        trio.lowlevel.remove_instrument(steps)
        sent, back = os.urandom(200_000), b""

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, sent)
            while len(back) < len(sent):
                back += await stream.read(65536)
        return {"steps": steps.count / 100, "whole": whole and back == sent}


SCENARIOS = (slots, window, strays, streams, writes, dialing, delay, unasked, port, names, keys, turns)


async def bounded(scenario):
    with trio.fail_after(45):
        return await scenario()


if sys.argv[1] == "echo-server":
    trio.run(echo_server)
else:
    for scenario in SCENARIOS:
        if sys.argv[1] == "all" or scenario.__name__ in sys.argv[1].split(","):
            print(json.dumps({scenario.__name__: trio.run(bounded, scenario)}), flush=True)
    os._exit(0)
