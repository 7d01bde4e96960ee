"""What a node and an engine say to each other over a local Unix socket.

An engine is any program that answers these requests: ours (`python -m node.engine`), an adapter, or somebody's
own. It never sees keys, leases or the network. Frame: u32 big-endian length, u8 kind length, kind, payload.

    request     reply
    info        EngineInfo
    load        Loaded
    generate    Generated
    (any)       EngineFailure     kind `failure`

Requests are answered in order on one connection; a client waits with a deadline.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Annotated, TypeVar

from protocol import codec
from protocol.codec import Blob, Fixed, Seq, Sub, record
from protocol.errors import DecodeError, EngineError, ReasonCode
from protocol.limits import KIB, MAX_PROOF_CHUNKS, MAX_ROLLOUTS_PER_LEASE, MIB, PROOF_TOPK
from protocol.records import U8, U32, U64, Float, Floats, Hash, Line, Note, Routes, Tokens, Word

MAX_FRAME_BYTES = 256 * MIB
R = TypeVar("R")


@record(1 * KIB)
@dataclass(frozen=True)
class InfoRequest:
    protocol: Word = "1"


@record(4 * KIB)
@dataclass(frozen=True)
class EngineInfo:
    name: Line
    """Engine and version, for example `transformers 5.24.0`."""
    profile: Word
    device: Word
    capacity: U32
    """Rollouts it takes in one request."""


@record(8 * KIB)
@dataclass(frozen=True)
class LoadRequest:
    """Load a policy from a verified local directory (`shardcast` layout plus model files)."""

    directory: Note
    epoch: U64
    step: U64
    root: Hash


@record(1 * KIB)
@dataclass(frozen=True)
class Loaded:
    root: Hash


@record(4 * MIB)
@dataclass(frozen=True)
class GenerateItem:
    request_id: Line
    """`<lease id hex>:<task>:<sample>`; comes back with the output."""
    prompt: Tokens
    seed: Annotated[bytes, Fixed(32)]
    max_new_tokens: U32


@record(256 * MIB)
@dataclass(frozen=True)
class GenerateRequest:
    root: Hash
    """The policy that must produce the tokens; an engine holding another answers `wrong-policy`."""
    temperature: Float
    stop_tokens: Annotated[tuple[int, ...], Seq(codec.UInt(32), 16)]
    items: Annotated[tuple[GenerateItem, ...], Seq(Sub(GenerateItem), MAX_ROLLOUTS_PER_LEASE)]


@record(96 * MIB)
@dataclass(frozen=True)
class GenerateOutput:
    request_id: Line
    tokens: Tokens
    logprobs: Floats
    finish: U8
    text: Annotated[str, codec.Text(MIB)]
    """The completion as text, stop token left out. The node scores this."""
    proofs: Annotated[tuple[bytes, ...], Seq(Blob(2 + 4 * PROOF_TOPK), MAX_PROOF_CHUNKS)]
    routes: Routes = b""
    """The experts of every token that went through the model; empty where it has none."""


@record(256 * MIB)
@dataclass(frozen=True)
class Generated:
    outputs: Annotated[tuple[GenerateOutput, ...], Seq(Sub(GenerateOutput), MAX_ROLLOUTS_PER_LEASE)]


@record(8 * KIB)
@dataclass(frozen=True)
class EngineFailure:
    code: Word
    message: Note


async def read_frame(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Read one frame. The caller sets the deadline.

    Raises:
        DecodeError: a frame over the bound or without a kind.
        asyncio.IncompleteReadError: the other side closed.
    """
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    if not 2 <= size <= MAX_FRAME_BYTES:
        raise DecodeError(f"engine frame of {size} bytes is out of bounds", ReasonCode.OVERSIZE)
    body = await reader.readexactly(size)
    name = body[1 : 1 + body[0]]
    if not name or not name.isascii():
        raise DecodeError("engine frame without a kind")
    return name.decode("ascii"), body[1 + body[0] :]


def frame(kind: str, payload: object) -> bytes:
    """The bytes of one frame."""
    name = kind.encode("ascii")
    body = bytes([len(name)]) + name + codec.encode(payload)
    return struct.pack(">I", len(body)) + body


class EngineClient:
    """The node's side: one connection, one request at a time, every wait with a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()

    @staticmethod
    async def connect(path: str, deadline_s: float) -> EngineClient:
        """Connect to an engine's socket, waiting for it to appear.

        Raises:
            EngineError: no engine answered within `deadline_s`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
                return EngineClient(reader, writer)
            except (FileNotFoundError, ConnectionRefusedError) as exc:
                if loop.time() > end:
                    raise EngineError(
                        f"no engine answered at {path} within {deadline_s:.0f} s; start one that listens there "
                        "(`node join` starts its own where it gets no --engine-socket)",
                        ReasonCode.DEADLINE,
                    ) from exc
                await asyncio.sleep(0.05)

    async def call(self, kind: str, request: object, reply: type[R], deadline_s: float) -> R:
        """Send one request and decode its reply.

        Raises:
            EngineError: refused, failed, closed, or not answered within `deadline_s`.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(deadline_s):
                    self._writer.write(frame(kind, request))
                    await self._writer.drain()
                    got, payload = await read_frame(self._reader)
            except TimeoutError as exc:
                raise EngineError(
                    f"the engine did not answer {kind} within {deadline_s:.0f} s", ReasonCode.DEADLINE
                ) from exc
            except (OSError, asyncio.IncompleteReadError, DecodeError) as exc:
                raise EngineError(f"the engine's connection broke during {kind}: {exc}") from exc
        if got == "failure":
            failure = codec.decode(EngineFailure, payload)
            known = failure.code in ReasonCode._value2member_map_
            raise EngineError(failure.message, ReasonCode(failure.code) if known else ReasonCode.ENGINE_FAILED)
        if got != kind:
            raise EngineError(f"the engine answered {got} to {kind}")
        try:
            return codec.decode(reply, payload)
        except DecodeError as exc:
            raise EngineError(f"the engine's answer to {kind} does not hold: {exc}") from exc

    async def close(self) -> None:
        self._writer.close()
