"""The door of a weights server: connection caps before anything is read, TLS handshakes under a deadline, and
answers with a reason also for what is no HTTP.

    accept -> caps -> [TLS handshake, HEADER_DEADLINE_S] -> request header, HEADER_DEADLINE_S -> no body -> `server`

A connection counts from the moment it is accepted: half a handshake holds a place no longer than half a header does.
Places are shared fairly: in a full house whoever holds most of them (an IPv4 address, a /64 of IPv6) gives one up to a
newcomer that holds fewer. A client that hangs up ends its request, so nobody can leave waiting ones behind.

Not covered: what is answered to a well-formed request (`server`), and strangers with more addresses than there are
places.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from protocol.errors import ReasonCode
from protocol.limits import HEADER_DEADLINE_S
from shardcast.limits import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS

log = logging.getLogger("shardcast.server")

_BACKLOG = 256
"""Connections that wait, and that asyncio accepts in one go, before the door sees them."""

_FILES = 8192
"""Open files that a server asks the system for, within what it may. Many systems begin with 1024: as many connections
as are let in here would leave none for shards, and the relay behind them would take that for a broken disk."""


def refusal(status: int, code: ReasonCode, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """An answer other than 200: a reason for programs and one for people. No cache may keep it."""
    return web.json_response(
        {"code": str(code), "message": message}, status=status, headers={"Cache-Control": "no-store", **(headers or {})}
    )


def network_of(address: str) -> str:
    """Whose places an address fills: its own, or those of its /64, since whoever has one of these has all of it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


class _Handler(RequestHandler):
    """One connection. What is no HTTP gets a typed reason instead of aiohttp's page."""

    __slots__ = ("_door", "_let_in")

    def __init__(self, door: CappedServer, **options: Any) -> None:
        super().__init__(door, **options)
        self._door = door
        self._let_in = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Who is turned away costs no task, and no line of a log.
        self._let_in = self._door.enter(self, transport)
        if self._let_in:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.leave(self)
        if self._let_in:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._let_in:
            super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer was already on its way")
        answer = refusal(status, ReasonCode.MALFORMED, "this is no HTTP request that is served here")
        answer.force_close()
        return answer


class CappedServer(web.Server):
    """Closes connections over the caps before anything is read from them."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **options: Any) -> None:
        async def without_body(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "GET" and request.body_exists:
                # It could go on for as long as the answer is waited for.
                answer = refusal(400, ReasonCode.MALFORMED, "a request that is served here has no body")
                answer.force_close()
                return answer
            return await handler(request)

        super().__init__(without_body, handler_cancellation=True, **options)
        self._options = {"auto_decompress": False, **options}
        self._held: dict[str, dict[object, asyncio.BaseTransport]] = {}
        """The connections of each network, the newest last."""
        self._network_of: dict[object, str] = {}
        self.files = _FILES
        """Open files this process may have."""
        self.turned_away = 0
        """Connections closed because of the caps."""

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._options)

    @property
    def open(self) -> int:
        """Connections that are let in now."""
        return len(self._network_of)

    def enter(self, who: object, transport: asyncio.BaseTransport) -> bool:
        """Count a connection; False (and it is cut) over the caps. `leave` must follow either way."""
        peer = transport.get_extra_info("peername")
        network = network_of(str(peer[0]) if peer else "")
        held = self._held.get(network, {})
        full = self.open >= min(MAX_CONNECTIONS, self.files // 2)
        if len(held) >= MAX_CONNECTIONS_PER_ADDRESS or (full and not self._make_room(len(held))):
            self._cut(transport)
            return False
        self._held.setdefault(network, {})[who] = transport
        self._network_of[who] = network
        return True

    def leave(self, who: object) -> None:
        network = self._network_of.pop(who, None)
        if network is not None:
            del self._held[network][who]
            if not self._held[network]:
                del self._held[network]

    def _make_room(self, held: int) -> bool:
        """Cut the newest connection of whoever holds most, if that is more than a newcomer, who holds so many, would
        have then."""
        crowd = max(self._held.values(), key=len, default={})
        if len(crowd) <= held + 1:
            return False
        who, transport = next(reversed(crowd.items()))
        self.leave(who)
        self._cut(transport)
        return True

    def _cut(self, transport: asyncio.BaseTransport) -> None:
        self.turned_away += 1
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()


class _Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is over; then the server's own handler takes it."""

    def __init__(self, server: CappedServer, context: ssl.SSLContext) -> None:
        self._server = server
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """Requests that came together with the end of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("TLS needs a stream")
        transport.pause_reading()  # the first bytes belong to TLS
        if self._server.enter(self, transport):
            self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    async def _shake(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HEADER_DEADLINE_S,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, ssl.SSLError, TimeoutError) as exc:
            log.debug("a TLS handshake failed: %s", exc)
            transport.abort()
            return
        finally:
            self._server.leave(self)
        if secured is None or secured.is_closing():
            return
        handler = self._server()
        secured.set_protocol(handler)
        handler.connection_made(secured)
        for data in self._early:
            handler.data_received(data)


async def listen(server: CappedServer, host: str, port: int, context: ssl.SSLContext | None) -> asyncio.Server:
    """Accept connections at an address, over TLS where a context is given. Raises OSError."""
    loop = asyncio.get_running_loop()
    server.files = _allow_files()
    factory = server if context is None else lambda: _Handshake(server, context)
    # Up to four times as many are accepted before the first of them is turned away and closed.
    return await loop.create_server(factory, host, port, backlog=max(1, min(_BACKLOG, server.files // 16)))


def _allow_files() -> int:
    """Let this process open as many files as a full house takes; returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _FILES if soft == resource.RLIM_INFINITY else soft
