"""Peers of every kind against one real host, run as a program: `strangers.py KIND ADDRESS [COUNT] [RUN HEX]`.

Prints one JSON object. `plaintext` and `mplex` use libp2p as it ships, the others break rules above our own swarm.
"""

# ruff: noqa: E402  (the library as it ships must be imported before our fixes skip half of it)
import json
import os
import struct
import sys
import time

KIND, ADDRESS = sys.argv[1:3]
COUNT = int(sys.argv[3]) if len(sys.argv) > 3 else 0
if KIND in ("plaintext", "mplex"):
    import libp2p
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_x25519
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
    from libp2p.security.noise.transport import Transport as Noise
    from libp2p.stream_muxer.mplex.mplex import MPLEX_PROTOCOL_ID, Mplex
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.tools.anyio_service import background_trio_service
    from multiaddr import Multiaddr

import trio

from protocol.admission import Admission
from protocol.envelope import seal
from protocol.frames import ControlFrame, pack_frame, read_error, unpack_frame
from protocol.identity import Identity
from protocol.libp2p_fixes import new_swarm, parse_address, run_service
from protocol.records import JoinRequest
from protocol.streams import ControlStream


def stranger():
    seed = os.urandom(32)
    return Identity.from_seed(seed), new_swarm(seed, Admission(8, None, time.monotonic))


async def connect(swarm):
    return await ControlStream.open(await swarm.dial(*parse_address(ADDRESS)))


async def exchange(stream, number, packed):
    """Send bytes as one frame and return the reply's kind and, if the host refused, its code."""
    await stream.send(number, packed)
    return await read_reply(stream, number)


async def read_reply(stream, number):
    with trio.fail_after(20):
        size, got = await stream.read_head()
        reply = unpack_frame(await stream.read_body(size))
    assert got == number
    return {"kind": reply.kind, "code": read_error(reply.attachment)[0] if reply.kind == "refused" else ""}


async def joins():
    """New identities join one after another; every other one leaves."""
    run, joined, refused = bytes.fromhex(sys.argv[4]), 0, []
    async with trio.open_nursery() as nursery:

        async def one(i, task_status=trio.TASK_STATUS_IGNORED):
            identity, swarm = stranger()
            async with run_service(swarm):
                try:
                    with trio.fail_after(20):
                        stream = await connect(swarm)
                        record = JoinRequest(
                            "inference", f"n{i}", identity.public, os.urandom(16), "test", (256, 256), (), ""
                        )
                        envelope = seal(
                            identity,
                            "join",
                            record,
                            run=run,
                            sequence=1,
                            issued_at=int(1000 * time.time()),
                            audience=bytes.fromhex(sys.argv[5]),
                        )
                        answer = await exchange(stream, 1, pack_frame(ControlFrame("join", envelope.raw)))
                except Exception as exc:
                    answer = {"kind": "failed", "code": repr(exc)[:200]}
                task_status.started(answer)
                if i % 2:
                    await trio.sleep_forever()
                await swarm.close()

        for i in range(COUNT):
            answer = await nursery.start(one, i)
            joined += answer["kind"] == "join.reply"
            if answer["kind"] != "join.reply":
                refused.append(answer)
        nursery.cancel_scope.cancel()
    return {"joined": joined, "refused": refused[:3]}


async def frames():
    """Broken frames of every kind on connections of their own; the reason code each gets."""
    _, swarm = stranger()
    out = {}
    async with run_service(swarm):
        head = struct.Struct(">IQ")
        packed = {
            "empty kind": b"\0" + bytes(8),
            "long kind": b"\xff" + b"k" * 255 + bytes(8),
            "kind not ascii": b"\2\xff\xfe" + bytes(4),
            "cut in its head": b"\5ab",
            "envelope longer than frame": b"\1x" + struct.pack(">I", 1000) + b"short",
            "envelope over the bound": b"\1x" + struct.pack(">I", 2 << 20) + bytes(2 << 20),
            "attachment over the bound": b"\1x" + struct.pack(">I", 0) + bytes((8 << 20) + 1),
        }
        for name, raw in packed.items():
            stream = await connect(swarm)
            out[name] = (await exchange(stream, 7, raw))["code"]
            out[name + ", then"] = (await exchange(stream, 8, pack_frame(ControlFrame("echo", b""))))["kind"]
            await stream.abort()
            await trio.sleep(0.05)
        for name, announced in {"oversize": 1 << 31, "shorter than a head": 3}.items():
            stream = await connect(swarm)
            await stream._muxed.write(head.pack(announced, 9) + bytes(100))
            out[name] = (await read_reply(stream, 9))["code"]
            await stream.abort()
            await trio.sleep(0.05)
    return out


async def garbage():
    """Broken frames until the host cuts the connection; raw noise on the port; streams of unknown protocols."""
    _, swarm = stranger()
    async with run_service(swarm):
        stream, answered = await connect(swarm), 0
        try:
            for number in range(100):
                await exchange(stream, number, b"\0" + os.urandom(40))
                answered += 1
        except Exception:
            pass
        port = int(ADDRESS.split("/")[4])
        for _ in range(COUNT):
            try:
                raw = await trio.open_tcp_stream("127.0.0.1", port)
                await raw.send_all(os.urandom(2000))
                await raw.aclose()
            except OSError:
                pass
        return {"answered": answered}


async def flood():
    """Push past every bound at once: window, streams, and 24 of the largest frames without reading a reply."""
    out = {}
    _, swarm = stranger()
    async with run_service(swarm):
        stream = await connect(swarm)
        muxed, pushed = stream._muxed, 0
        try:
            with trio.move_on_after(20):
                while pushed < COUNT << 20:
                    header = struct.pack("!BBHII", 0, 0, 0, muxed.stream_id, 65000)
                    await muxed.conn._write_frame(header + os.urandom(65000))
                    pushed += 65000
        except Exception as exc:
            out["window"] = type(exc).__name__
        out["pushed_mib"] = pushed >> 20
    _, swarm = stranger()
    async with run_service(swarm):
        stream, sent = await connect(swarm), 0
        largest = pack_frame(ControlFrame("slow", bytes(1 << 20), bytes(8 << 20)))
        try:
            for number in range(24):
                await stream.send(number, largest)
                sent += 1
        except Exception as exc:
            out["frames"] = repr(exc)[:100]
        out["sent"] = sent
        codes = []
        with trio.move_on_after(3):
            for _ in range(24):
                size, _number = await stream.read_head()
                reply = unpack_frame(await stream.read_body(size))
                codes.append(read_error(reply.attachment)[0] if reply.kind == "refused" else reply.kind)
        out["busy"] = codes.count("busy")
    return out


async def silent():
    """COUNT connections from one address that announce a large frame and send nothing more; when each was cut."""
    sizes = [9 << 20] * 5 + [1 << 20] * 3 + [150_000] * COUNT
    seconds = []

    async def one(size):
        _, swarm = stranger()
        async with run_service(swarm):
            stream = await connect(swarm)
            await stream._muxed.write(struct.pack(">IQ", size + 8, 1))
            started = trio.current_time()
            with trio.move_on_after(40):
                try:
                    while await stream._muxed.read(1000):
                        pass
                except Exception:
                    pass
                seconds.append(trio.current_time() - started)

    async with trio.open_nursery() as nursery:
        for size in sizes[:COUNT]:
            nursery.start_soon(one, size)
    return {"cut": len(seconds), "longest_s": max(seconds, default=0.0)}


async def upstream():
    """A dialer that offers only plaintext, or only mplex."""
    key_pair = create_new_key_pair(os.urandom(32))
    noise = {NOISE_ID: Noise(key_pair, noise_privkey=create_x25519().private_key)}
    host = libp2p.new_host(
        key_pair=key_pair,
        sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(key_pair)} if KIND == "plaintext" else noise,
        muxer_opt={MPLEX_PROTOCOL_ID: Mplex} if KIND == "mplex" else {YAMUX_ID: Yamux},
    )
    async with background_trio_service(host.get_network()):
        try:
            with trio.fail_after(20):
                await host.connect(info_from_p2p_addr(Multiaddr(ADDRESS)))
        except Exception as exc:
            words, cause = [], exc
            while cause is not None:
                words.append(str(cause))
                cause = cause.__cause__ or getattr(cause, "exceptions", [None])[0]
            return {"connected": False, "error": " | ".join(words)[:600]}
        return {"connected": True}


async def bounded():
    kinds = {"joins": joins, "frames": frames, "garbage": garbage, "flood": flood, "silent": silent}
    with trio.fail_after(150):
        print(json.dumps(await kinds.get(KIND, upstream)()), flush=True)
    os._exit(0)


trio.run(bounded)
