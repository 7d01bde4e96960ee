"""An HTTP listener that strangers cannot hold open: a deadline for every request header and a cap on connections.

aiohttp has no deadline for a header that arrives one byte at a time, and opens compressed request bodies by itself;
here both are off limits.

Not covered: what is served (`ingress`).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from protocol.admission import Blocked, address_group, is_loopback
from protocol.errors import UsageError
from protocol.limits import HEADER_DEADLINE_S
from trainer.config import split_endpoint
from trainer.errors import StartError

KEEPALIVE_S = 30.0
UNREAD_S = 20.0
"""A receiver that takes nothing of an answer for this long is cut: it would hold connection and bytes for ever."""

SHARE = 4
"""One address may hold this fraction of all connections. Loopback may hold all: behind it are a demo's nodes, or a
reverse proxy that has limits of its own."""

_LISTEN = re.compile(r"^/ip[46]/(?P<host>[0-9a-fA-F.:]+)/tcp/(?P<port>\d{1,5})$")

LINGER_S = 2.0
"""How long a refused body is read and dropped, so that the refusal arrives before the connection closes."""


class Slots:
    """Connections held, in all and by each address.

    Args:
        total: connections all addresses may hold together.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.blocked = Blocked()
        self.open: set[GuardedHandler] = set()
        self._held: Counter[str] = Counter()

    def take(self, group: str) -> bool:
        """Hold one more for an address group. False: it is blocked, has its share, or there is none left."""
        if self.blocked.covers(group):
            return False
        share = self.total if is_loopback(group) else max(1, self.total // SHARE)
        if self._held.total() >= self.total or self._held[group] >= share:
            return False
        self._held[group] += 1
        return True

    def give_back(self, group: str) -> None:
        self._held[group] -= 1
        if not self._held[group]:
            del self._held[group]


class GuardedHandler(RequestHandler):
    """One connection. Closed when a request's header is not whole within `HEADER_DEADLINE_S`, or an answer unread."""

    __slots__ = ("_group", "_header_timer", "_slots", "_unread_timer")

    def __init__(self, server: web.Server, slots: Slots, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._slots = slots
        self._group: str | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        group = address_group(str(peer[0]) if peer else "")
        if not self._slots.take(group):
            transport.close()
            return
        self._group = group
        self._slots.open.add(self)
        self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self._loop.call_later(UNREAD_S, self._cut)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def _cut(self) -> None:
        transport = self.transport
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._current_request is None and self._header_timer is None:
            self._start_timer()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.header_arrived()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        if self._group is not None:
            self._slots.open.discard(self)
            self._slots.give_back(self._group)
            self._group = None
        super().connection_lost(exc)

    def cut_if_blocked(self) -> None:
        """End the connection at once when its address was blocked since it came."""
        if self._group is not None and self._slots.blocked.covers(self._group):
            self._cut()

    def header_arrived(self) -> None:
        """The header is whole: the handler's own deadlines count from here."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _start_timer(self) -> None:
        self._header_timer = self._loop.call_later(HEADER_DEADLINE_S, self.force_close)


def header_arrived(request: web.Request) -> None:
    """Call first in every handler of a guarded listener."""
    if isinstance(request.protocol, GuardedHandler):
        request.protocol.header_arrived()


class Door:
    """A listening HTTP application.

    Args:
        endpoint: HOST:PORT.
        connections: cap on open connections.
    """

    def __init__(self, app: web.Application, endpoint: str, connections: int) -> None:
        self._runner = web.AppRunner(app, access_log=None)
        self._endpoint = endpoint
        self._slots = Slots(connections)
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            StartError: the address is in use or not ours.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        host, port = split_endpoint(self._endpoint)
        loop = asyncio.get_running_loop()

        def connection() -> GuardedHandler:
            return GuardedHandler(
                server,
                self._slots,
                loop=loop,
                access_log=None,
                keepalive_timeout=KEEPALIVE_S,
                lingering_time=LINGER_S,
                auto_decompress=False,
            )

        try:
            self._listener = await loop.create_server(connection, host, port, backlog=256)
        except OSError as exc:
            await self._runner.cleanup()
            raise StartError(port_in_use(self._endpoint, "ingress", exc)) from exc

    def block(self, addresses: Iterable[str]) -> None:
        """From now on take no connection from these addresses and networks, and cut those that are open."""
        self._slots.blocked = Blocked(addresses)
        for handler in list(self._slots.open):
            handler.cut_if_blocked()

    async def close(self) -> None:
        """Stop listening and end what is open, within a few seconds."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        await self._runner.cleanup()


def port_in_use(endpoint: str, section: str, exc: OSError) -> str:
    """What to tell the operator when an address cannot be listened on."""
    return (
        f"cannot listen on {endpoint} ({exc.strerror or exc}); stop whatever uses it, or change [{section}] listen in "
        "run.toml and tell the nodes the new address"
    )


def check_listen(listen: str) -> None:
    """Find out that a port is in use before a process is started for it."""
    match = _LISTEN.match(listen)
    if match is None:
        raise UsageError(f"[control] listen {listen!r} is no TCP multiaddr, for example /ip4/127.0.0.1/tcp/4801")
    host, port = match["host"], int(match["port"])
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise StartError(port_in_use(f"{host}:{port}", "control", exc)) from exc
