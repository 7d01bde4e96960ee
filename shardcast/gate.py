"""The door of a weights server: connection caps before anything is read, TLS handshakes under a deadline, and
answers with a reason also for what is no HTTP.

    accept -> caps -> [TLS handshake, HEADER_DEADLINE_S] -> request header, HEADER_DEADLINE_S -> `server`

A connection counts from the moment it is accepted: half a handshake holds a place no longer than half a header does.

Not covered: what is answered to a well-formed request (`server`).
"""

from __future__ import annotations

import asyncio
import logging
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


def refusal(status: int, code: ReasonCode, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """An answer other than 200: a reason for programs and one for people. No cache may keep it."""
    return web.json_response(
        {"code": str(code), "message": message}, status=status, headers={"Cache-Control": "no-store", **(headers or {})}
    )


class _Handler(RequestHandler):
    """One connection. What is no HTTP gets a typed reason instead of aiohttp's page."""

    __slots__ = ()

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
        super().__init__(handler, **options)
        self._open: dict[str, int] = {}
        self._address_of: dict[int, str] = {}
        self.turned_away = 0
        """Connections closed because of the caps."""

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)

    def enter(self, who: object, transport: asyncio.BaseTransport) -> bool:
        """Count a connection; False (and it is cut) over the caps. `leave` must follow either way."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        self._address_of[id(who)] = address
        self._open[address] = self._open.get(address, 0) + 1
        if self._open[address] <= MAX_CONNECTIONS_PER_ADDRESS and len(self._address_of) <= MAX_CONNECTIONS:
            return True
        self.turned_away += 1
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()
        return False

    def leave(self, who: object) -> None:
        address = self._address_of.pop(id(who), None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.enter(handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.leave(handler)


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
        else:
            self._server.leave(self)

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
    factory = server if context is None else lambda: _Handshake(server, context)
    return await loop.create_server(factory, host, port, backlog=_BACKLOG)
