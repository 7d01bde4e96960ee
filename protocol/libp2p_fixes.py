"""Every fix of libp2p 0.8.1, in one place. Importing this module is the only way our code reaches libp2p.

    slots     an inbound slot and its task live as long as their connection, not as long as the host, and an
              address holds a bounded share of them                                          (HardenedSwarm)
    window    a peer that sends past its receive window, opens too many streams or speaks no yamux is cut; the
              window is fixed, so a stream buffers at most 256 KiB                  (StrictYamux, StrictStream)
    writes    a frame is written whole or its connection ends: cancelling never leaves half a Noise message;
              a slow reader is waited for as long as the caller's deadline says              (StrictYamux)
    dialing   no 60 s blackout after a failed dial, no constant 250 ms, nobody dialed unasked    (HardenedSwarm)
    port      a second process cannot share our listening port unnoticed                   (_reuse_address_only)
    names     a protocol name in a negotiation is at most 1 KiB; strangers' keys are Ed25519 or refused unread
    turns     a message costs the scheduler few turns: what is there is read at once, and a lock nobody holds is
              taken without one: half of each side's CPU a request            (ReadAhead, StrictStream, trio_turns)
    imports   QUIC, TLS, WebSocket, RSA and DNS over QUIC are not loaded: 91 -> 56 MB and a third of the time

Not covered: gossip, relays and DHT (no code of ours uses them yet), transports other than TCP, and bugs that
cannot reach us: mplex and plaintext are never offered, identify never runs, QUIC never starts.
Each fix has a test in `tests/test_host_fixes.py` that fails without it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import struct
import sys
import types
from typing import Any

import trio

from protocol.admission import Admission, address_group
from protocol.errors import ProtocolError, ReasonCode, TransportError, UsageError
from protocol.identity import parse_peer_id, peer_id_text
from protocol.trio_turns import QuickLock, write_now

PINNED = "0.8.1"
_installed = importlib.metadata.version("libp2p")
if _installed != PINNED:
    raise UsageError(
        f"libp2p {_installed} is installed, and our fixes were written against {PINNED}; "
        f"whoever installed headwater must run: pip install libp2p=={PINNED}"
    )


def _skip_unused_imports() -> None:
    """Keep libp2p's package `__init__`s from pulling in transports we never start."""
    spec = importlib.util.find_spec("libp2p")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("libp2p is not installed; whoever installed headwater must run: make install")
    base = next(iter(spec.submodule_search_locations))
    for name in ("libp2p", "libp2p.transport", "libp2p.transport.quic", "libp2p.security"):
        package = types.ModuleType(name)
        package.__path__ = [base + name.removeprefix("libp2p").replace(".", "/")]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    # Only named in annotations, isinstance checks and tables of key types that `names` (above) never reaches.
    for name, classes in {
        "libp2p.transport.quic.stream": ("QUICStream",),
        "libp2p.crypto.rsa": ("RSAPrivateKey", "RSAPublicKey"),
        "libp2p.crypto.secp256k1": ("Secp256k1PrivateKey", "Secp256k1PublicKey"),
    }.items():
        stub = types.ModuleType(name)
        for cls in classes:
            setattr(stub, cls, type(cls, (), {"from_bytes": None}))
        sys.modules[name] = stub
    import dns._features

    dns._features.force("doq", False)
    dns._features.force("doh", False)


if "libp2p" not in sys.modules:
    _skip_unused_imports()

# ruff: noqa: E402  (libp2p may only be imported after the packages above are in place)
import libp2p.protocol_muxer.multiselect_communicator as _communicator
import libp2p.security.noise.messages as _noise_messages
import libp2p.stream_muxer.muxer_multistream as _muxer
import libp2p.transport.tcp.tcp as _tcp
from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519
from libp2p.exceptions import BaseLibp2pError, ParseError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux as _yamux
from libp2p.tools.anyio_service import background_trio_service as run_service
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

__all__ = [
    "STREAM_ERRORS",
    "HardenedSwarm",
    "Multiaddr",
    "StrictYamux",
    "abort",
    "accept_protocol",
    "new_swarm",
    "parse_address",
    "remote_group",
    "remote_key",
    "run_service",
    "select_protocol",
]

logger = logging.getLogger("headwater.libp2p")

WINDOW = _yamux.DEFAULT_WINDOW_SIZE
"""Receive window of a stream in bytes, fixed by the yamux specification at 256 KiB."""

MAX_STREAMS = 8
"""Streams a peer may have open on one connection; it needs one. Each may buffer a window."""

MAX_FRAME = 32 * 1024
"""Bytes of one yamux data frame we write: short enough to finish under a deadline on a slow link."""

FRAME_DEADLINE_S = 15.0
"""A frame that is not taken within this time ends its connection: the peer is frozen or gone."""

UPGRADE_DEADLINE_S = 8.0
"""Noise and yamux must be agreed within this time; until then a stranger holds a slot without a proven key."""

READ_AHEAD = 4 * 1024
"""Bytes taken from a socket at once while less is asked for: a small message with its length. It is also what a
connection may make us handle before others get their turn, and hold before its windows count."""

STREAM_ERRORS = (
    BaseLibp2pError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    OSError,
    EOFError,
    ValueError,
)
"""What libp2p raises when a peer, its socket or its bytes fail. None of them says more about us than about the peer."""

_MAX_NAME = 1024
_ED25519_PEER_ID = bytes.fromhex("002408011220")
_HEADER = struct.Struct(_yamux.YAMUX_HEADER_FORMAT)


# --- names: bounded protocol names, Ed25519 only ------------------------------------------------------------------


async def _read_name(reader: Any) -> bytes:
    raw: bytes = await read_varint_prefixed_bytes_limited(reader, _MAX_NAME)
    if raw[-1:] != b"\n":
        raise ParseError("a protocol name that does not end in a newline")
    return raw[:-1]


def _read_ed25519_key(data: bytes) -> Any:
    key = PublicKey.deserialize_from_protobuf(data)
    if key.key_type != 1 or len(key.data) != 32:
        raise ValueError("only Ed25519 peers are spoken to")
    return Ed25519PublicKey.from_bytes(key.data)


_communicator.read_delim = _read_name
_noise_messages.deserialize_public_key = _read_ed25519_key


# --- port: no sharing --------------------------------------------------------------------------------------------


def _reuse_address_only(sock: Any) -> None:
    """A restarted host gets its port back at once, and a second one gets EADDRINUSE (SO_REUSEPORT hides that)."""
    sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)


_tcp._set_reuse_flags = _reuse_address_only


# --- turns: sockets ---------------------------------------------------------------------------------------------


class ReadAhead(_tcp.TrioTCPStream):  # type: ignore[misc]
    """A socket read in large pieces, a Noise message's two bytes of length with its body, and written at once."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.read_lock, self.write_lock, self._order = QuickLock(), QuickLock(), QuickLock()
        self._ahead = b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._ahead or self.stream.socket.fileno() < 0:  # closed by us: what came before counts no more
            if n is None or n == 0 or n >= READ_AHEAD:
                self._ahead = b""
                arrived: bytes = await super().read(n)
                return arrived
            self._ahead = bytes(await super().read(READ_AHEAD))
        size = len(self._ahead) if n is None else n
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        return piece

    async def write(self, data: bytes) -> None:
        async with self._order:
            sent = write_now(self.stream.socket, data)
            if sent < len(data):
                await super().write(data[sent:])


_tcp.TrioTCPStream = ReadAhead


# --- window and writes: yamux ------------------------------------------------------------------------------------


class YamuxViolationError(Exception):
    """The peer broke yamux; its connection ends."""


class StrictStream(_yamux.YamuxStream):  # type: ignore[misc]
    """A stream with a fixed receive window that never polls."""

    def __init__(self, stream_id: int, conn: Any, is_initiator: bool) -> None:
        super().__init__(stream_id, conn, is_initiator)
        self.wake_writer = trio.Event()
        self._read_since_grant = 0

    async def read(self, n: int | None = -1) -> bytes:
        """What is there, at most `n` bytes, or what comes next. libp2p's own way takes a lock at every look."""
        while n is not None and n > 0 and self._is_open():
            buffer = self.conn.stream_buffers.get(self.stream_id)
            if buffer:
                data = bytes(buffer[:n])
                del buffer[:n]
                await self._auto_tune_and_send_window_update(bytes_read=len(data))
                return data
            event = self.conn.stream_events.get(self.stream_id)
            if event is None:
                break
            await event.wait()
            if self.stream_id in self.conn.stream_events:
                self.conn.stream_events[self.stream_id] = trio.Event()
        rest: bytes = await super().read(n)  # which knows how a stream ends
        return rest

    def _is_open(self) -> bool:
        return not (self.closed or self.recv_closed or self.reset_received or self.conn.event_shutting_down.is_set())

    async def write(self, data: bytes) -> None:
        """Write all of `data`, waiting for window as long as the caller's own deadline allows."""
        sent = 0
        while sent < len(data):
            if self.send_closed or self.closed or self.conn.event_shutting_down.is_set():
                raise MuxedStreamError("the stream is closed for sending")
            if self.send_window <= 0:
                self.wake_writer = trio.Event()
                await self.wake_writer.wait()
                continue
            size = min(self.send_window, MAX_FRAME, len(data) - sent)
            self.send_window -= size
            header = _HEADER.pack(0, _yamux.TYPE_DATA, 0, self.stream_id, size)
            await self.conn._write_frame(header + data[sent : sent + size])
            sent += size

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        self._read_since_grant += bytes_read
        if self._read_since_grant >= WINDOW // 2:
            grant, self._read_since_grant = self._read_since_grant, 0
            self.recv_window += grant
            await self.send_window_update(grant)


class StrictYamux(_yamux.Yamux):  # type: ignore[misc]
    """Yamux that believes nothing: windows, stream counts, versions and ids are enforced before bytes are kept."""

    stray_left = 0
    """Bytes that may still come for streams that are closed: a window for each stream there ever was. They are dropped,
    and without a bound a peer could send them for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_lock = QuickLock()
        self._arrived = bytearray()
        """Of the Noise message that came last, what no frame took yet."""
        self._socket = _socket_stream(self)

    async def start(self) -> None:
        try:
            await super().start()
        except Exception as exc:  # noqa: BLE001  (whatever one hostile connection does ends that connection only)
            logger.info("connection of %s ended: %s: %s", self.peer_id, type(exc).__name__, exc)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                await abort(self)
                await self._cleanup_on_error()
            self.event_closed.set()

    async def _cleanup_on_error(self) -> None:
        streams = list(self.streams.values())
        await super()._cleanup_on_error()
        for stream in streams:
            stream.wake_writer.set()

    async def _write_frame(self, data: bytes) -> None:
        async with self._write_lock:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FRAME_DEADLINE_S) as scope:
                await self.secured_conn.write(data)
            if scope.cancelled_caught:
                await abort(self)
                raise ConnectionClosedError("the peer took no data for too long", transport="tcp")
        if self._socket is not None and self._socket.socket.fileno() < 0:  # libp2p returns as if it had written
            raise ConnectionClosedError("the connection is closed", transport="tcp")
        await trio.lowlevel.checkpoint_if_cancelled()

    async def open_stream(self) -> StrictStream:
        if self.event_shutting_down.is_set():
            raise MuxedStreamError("the connection is closing")
        stream = StrictStream(self.next_stream_id, self, True)
        self.next_stream_id += 2
        self._register(stream)
        await self._write_frame(_HEADER.pack(0, _yamux.TYPE_WINDOW_UPDATE, _yamux.FLAG_SYN, stream.stream_id, 0))
        return stream

    def _register(self, stream: StrictStream) -> None:
        self.streams[stream.stream_id] = stream
        self.stray_left += WINDOW
        self.stream_buffers[stream.stream_id] = bytearray()
        self.stream_events[stream.stream_id] = trio.Event()

    async def handle_incoming(self) -> None:
        try:
            while not self.event_shutting_down.is_set():
                await self._receive_frame()
        except YamuxViolationError as exc:
            logger.warning("peer %s broke yamux and is cut: %s", self.peer_id, exc)
        except Exception as exc:  # noqa: BLE001  (Noise, sockets and trio all end a connection in their own words)
            logger.debug("connection of %s ended: %s: %s", self.peer_id, type(exc).__name__, exc)
        self.event_shutting_down.set()

    async def _read(self, size: int) -> bytes:
        while len(self._arrived) < size:
            self._arrived += await self.secured_conn.read()  # a whole Noise message, or raises
        piece = bytes(self._arrived[:size])
        del self._arrived[:size]
        return piece

    async def _read_data_body(self, length: int) -> bytes:
        if length <= len(self._arrived):
            return await self._read(length)  # a deadline for what is here costs more than reading it
        with trio.fail_after(_yamux._yamux_data_read_timeout()):
            return await self._read(length)

    async def _receive_frame(self) -> None:
        header = await self._read(_yamux.HEADER_SIZE)
        version, kind, flags, stream_id, length = _HEADER.unpack(header)
        if version != 0:
            raise YamuxViolationError(f"version {version}")
        if kind == _yamux.TYPE_PING:
            await self._receive_ping(flags, length)
        elif kind == _yamux.TYPE_GO_AWAY:
            self.event_shutting_down.set()
        elif kind in (_yamux.TYPE_DATA, _yamux.TYPE_WINDOW_UPDATE):
            await self._receive_stream_frame(kind, flags, stream_id, length)
        else:
            raise YamuxViolationError(f"frame type {kind}")

    async def _receive_ping(self, flags: int, value: int) -> None:
        if flags & _yamux.FLAG_SYN:
            await self._write_frame(_HEADER.pack(0, _yamux.TYPE_PING, _yamux.FLAG_ACK, 0, value))
        elif flags & _yamux.FLAG_ACK:
            self._ping_event.set()

    async def _receive_stream_frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        stream = self.streams.get(stream_id)
        opened = None
        if flags & _yamux.FLAG_SYN:
            if stream is not None or stream_id == 0 or (stream_id % 2 == 1) == self.is_initiator_value:
                raise YamuxViolationError(f"opened stream {stream_id}, which is not its to open")
            if sum(not s.is_initiator for s in self.streams.values()) >= MAX_STREAMS:
                raise YamuxViolationError(f"more than {MAX_STREAMS} streams")
            stream = opened = StrictStream(stream_id, self, False)
            self._register(stream)
        if kind == _yamux.TYPE_DATA and length:
            if length > (self.stray_left if stream is None else stream.recv_window):
                raise YamuxViolationError(f"{length} bytes past the window of stream {stream_id}")
            body = await self._read_data_body(length)
            if stream is None:
                self.stray_left -= length
            if stream is not None and stream_id in self.stream_buffers:
                stream.recv_window -= length
                self.stream_buffers[stream_id].extend(body)
        elif kind == _yamux.TYPE_WINDOW_UPDATE and stream is not None:
            stream.send_window += length
        if stream is not None:
            self._apply_flags(stream, flags)
        if opened is not None:
            await self._write_frame(_HEADER.pack(0, _yamux.TYPE_WINDOW_UPDATE, _yamux.FLAG_ACK, stream_id, 0))
            await self.new_stream_send_channel.send(opened)

    def _apply_flags(self, stream: StrictStream, flags: int) -> None:
        if flags & _yamux.FLAG_FIN:
            stream.recv_closed = True
            stream.closed = stream.closed or stream.send_closed
        if flags & _yamux.FLAG_RST:
            stream.closed = stream.recv_closed = stream.send_closed = stream.reset_received = True
        stream.wake_writer.set()
        event = self.stream_events.get(stream.stream_id)
        if event is not None:
            event.set()
        if stream.closed:
            self._finalize_stream_locked(stream, fully_closed=True)


_muxer.Yamux = StrictYamux


def _socket_stream(connection: Any) -> trio.SocketStream | None:
    """The TCP socket under a muxed, secured or raw connection."""
    layer = connection
    for name in ("muxed_conn", "secured_conn", "conn", "read_writer", "read_write_closer", "stream", "stream"):
        layer = getattr(layer, name, layer)
    return layer if isinstance(layer, trio.SocketStream) else None


async def abort(connection: Any) -> None:
    """Close a connection's socket at once: blocked readers and writers wake, and everything above cleans up."""
    stream = _socket_stream(connection)
    if stream is not None:
        await trio.aclose_forcefully(stream)


# --- slots and dialing: the swarm --------------------------------------------------------------------------------


class _NoAutoConnect:
    """We dial whom we are told to; libp2p would also dial whoever it has heard of, whenever it has free slots."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def run_background_task(self, nursery: trio.Nursery) -> None: ...

    async def maybe_connect(self) -> None: ...

    def record_disconnect(self, peer_id: Any) -> None: ...


class HardenedSwarm(Swarm):  # type: ignore[misc]
    """A swarm whose inbound slots are given back, shared fairly, and whose dials are neither cached nor delayed."""

    admission: Admission

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        stream = _socket_stream(read_write_closer)
        group = address_group(stream.socket.getpeername()[0]) if stream is not None else ""
        if not self.admission.admit(group):
            await trio.aclose_forcefully(stream or read_write_closer)
            return
        upgrading = True
        try:
            muxed = await self.upgrade_inbound_raw_conn(RawConnection(read_write_closer, False), maddr)
            upgrading = False
            self.admission.handshake_ended(group)
            await muxed.event_closed.wait()
        except Exception as exc:  # noqa: BLE001  (a stranger's failed handshake is nobody else's business)
            logger.debug("handshake with %s failed: %s", group, exc)
        finally:
            if upgrading:
                self.admission.handshake_ended(group)
            self.admission.release(group)
            if stream is not None:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    async def dial(self, address: Any, peer_id: Any) -> Any:
        """One attempt at one address; returns a live connection to exactly `peer_id`.

        Raises libp2p's own errors. The caller sets a deadline and backs off.
        """
        for connection in self.get_connections(peer_id):
            if not connection.is_closed and not connection.muxed_conn.event_shutting_down.is_set():
                stream = _socket_stream(connection)
                if stream is not None and stream.socket.fileno() != -1:
                    return connection
        self._negative_peer_cache.evict(str(peer_id))
        return await self.dial_addr(address, peer_id)

    async def drop(self, peer_id: Any) -> None:
        """End every connection to a peer: the next dial starts from nothing."""
        for connection in self.get_connections(peer_id):
            await abort(connection)

    def inbound_connections(self) -> list[Any]:
        """Connections that peers opened to us."""
        return [c for c in self.get_connections() if c.direction is Direction.INBOUND]


def new_swarm(seed: bytes, admission: Admission) -> HardenedSwarm:
    """A swarm over TCP, Noise and yamux, and nothing else.

    Args:
        seed: the 32 bytes of the Ed25519 transport key.
    """
    key_pair = create_new_key_pair(seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    peers = PeerStore()
    peers.add_key_pair(peer_id, key_pair)
    swarm = HardenedSwarm(
        peer_id,
        peers,
        TransportUpgrader(
            {NOISE_ID: Noise(key_pair, noise_privkey=create_x25519().private_key)},
            {_yamux.PROTOCOL_ID: StrictYamux},
            negotiate_timeout=int(UPGRADE_DEADLINE_S),
        ),
        [_tcp.TCP()],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=2 * admission.total + 64,  # `admission` bounds strangers; this bounds nothing before it
            min_connections=0,
            low_watermark=0,
            high_watermark=2 * admission.total + 64,
            inbound_upgrade_timeout=UPGRADE_DEADLINE_S,
            outbound_upgrade_timeout=UPGRADE_DEADLINE_S,
        ),
    )
    swarm.admission = admission
    swarm.auto_connector = _NoAutoConnect()
    return swarm


async def select_protocol(net_stream: Any, protocol: str, deadline_s: float) -> None:
    """Propose `protocol` on a stream we opened. Raises one of STREAM_ERRORS."""
    await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(net_stream), int(deadline_s))


async def accept_protocol(net_stream: Any, protocol: str, deadline_s: float) -> None:
    """Accept `protocol`, and only that, on a stream a peer opened. Raises one of STREAM_ERRORS."""
    await Multiselect({protocol: None}).negotiate(MultiselectCommunicator(net_stream), int(deadline_s))


def parse_address(text: str) -> tuple[Any, Any]:
    """A TCP multiaddr with /p2p/ as (address, peer id). Raises TransportError(`malformed`)."""
    try:
        address = Multiaddr(text[:512])
        host = next(iter(address.protocols())).name
        if host not in ("ip4", "ip6", "dns", "dns4", "dns6") or address.value_for_protocol("tcp") is None:
            raise ValueError("no TCP address")
        return address, ID.from_base58(peer_id_text(parse_peer_id(str(address.value_for_protocol("p2p")))))
    except (MultiaddrError, ProtocolError, ValueError, LookupError, StopIteration) as exc:
        raise TransportError(f"{text[:100]!r} is no TCP multiaddr with /p2p/ at its end", ReasonCode.MALFORMED) from exc


def remote_key(connection: Any) -> bytes:
    """The 32-byte Ed25519 key that the peer of a connection proved in its Noise handshake."""
    raw: bytes = connection.muxed_conn.peer_id.to_bytes()
    if len(raw) != 38 or not raw.startswith(_ED25519_PEER_ID):
        raise ValueError("the peer has no Ed25519 identity")
    return raw[len(_ED25519_PEER_ID) :]


def remote_group(connection: Any) -> str:
    """The peer's address as `admission` counts it, or empty when the socket is already closed."""
    stream = _socket_stream(connection)
    try:
        return "" if stream is None else address_group(stream.socket.getpeername()[0])
    except OSError:
        return ""
