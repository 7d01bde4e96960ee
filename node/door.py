"""Questions to the coordinator's HTTP door that need no signature: a bounded answer within a deadline, or a reason.

Not covered: uploads (`upload`), signed messages over HTTP (`protocol.control`).
"""

from __future__ import annotations

import aiohttp

from protocol.control import http_failure_in_words, read_bounded
from protocol.errors import TransportError

ANSWER_S = 10.0


async def ask_door(session: aiohttp.ClientSession, door: str, run: bytes, question: str, limit: int) -> bytes:
    """The body of `GET {door}/v1/{run}/{question}`, at most `limit` bytes.

    Raises:
        TransportError: not reached, or answered with anything but 200.
        DecodeError: longer than that.
    """
    url = f"{door.rstrip('/')}/v1/{run.hex()}/{question}"
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with session.get(url, timeout=timeout, allow_redirects=False) as reply:
            if reply.status != 200:
                raise TransportError(f"{url} answered HTTP {reply.status}")
            return await read_bounded(reply.content, limit)
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        raise TransportError(f"{url} was not reached: {http_failure_in_words(exc)}") from exc
