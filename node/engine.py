"""The built-in engine: a process that turns leases' prompts and seeds into tokens, log-probabilities and proofs.

    python -m node.engine --socket PATH [--profile fp32|bf16] [--threads N]

It answers `protocol.engine` on a Unix socket of mode 0600 and sees no key, lease or network. Any number of
connections may come and go; requests are answered one at a time. A request whose connection closes is cancelled
before its next forward pass. SIGTERM and the end of the parent process end it within two seconds.

It computes in one profile, which `info` names: a node refuses to work for a run of another. A CPU without instructions
for bfloat16 serves that profile too, slower than fp32; it is there for GPUs.

Not covered: CUDA, engines with an environment of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import math
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from protocol import codec
from protocol.engine import (
    EngineFailure,
    EngineInfo,
    Generated,
    GenerateOutput,
    GenerateRequest,
    InfoRequest,
    Loaded,
    LoadRequest,
    frame,
    read_frame,
)
from protocol.errors import EngineError, HeadwaterError, ReasonCode, UsageError
from protocol.heap import settle_heap
from protocol.lifeline import die_with_parent
from protocol.manifest import PROFILES

if TYPE_CHECKING:
    from node.decode import Decoded
    from verifier.model import PolicyModel

CAPACITY = 128
"""Rollouts the engine says it takes at once: one decoding batch."""

IDLE_DEADLINE_S = 3600.0
"""A connection that asks nothing this long is closed; the node opens another."""

STOP_GRACE_S = 1.0
"""After SIGTERM, how long the running request may take to notice before the process leaves anyway."""

_MAX_MESSAGE = 1000
_FAILURES = (RuntimeError, MemoryError, OSError, ValueError, KeyError)
"""What a model library raises when a request cannot be served; anything else ends the process loudly."""

Cancelled = Callable[[], bool]


class Backend(Protocol):
    """What answers requests behind the socket. Called from one worker thread, never concurrently."""

    def info(self) -> EngineInfo: ...

    def load(self, request: LoadRequest) -> Loaded: ...

    def generate(self, request: GenerateRequest, cancelled: Cancelled) -> Generated: ...


class TransformersEngine:
    """The honest backend over Transformers models.

    Args:
        profile: `fp32` or `bf16`: the dtype of weights, states and proofs.
        attention: `sdpa` or `eager`, which a calibration compares.
    """

    def __init__(self, profile: str = "fp32", attention: str = "sdpa") -> None:
        # The slow imports happen here, before the socket appears: an engine that answers is ready for work.
        for name in ("node.decode", "verifier.profiles"):
            importlib.import_module(name)
        self.profile, self.attention = profile, attention
        self.policy: PolicyModel | None = None
        self.root = b""
        self._files: dict[str, bytes] = {}

    def info(self) -> EngineInfo:
        import torch

        name = f"transformers {version('transformers')} torch {version('torch')}"
        if self.attention != "sdpa":
            name += f", {self.attention} attention"
        if torch.get_num_threads() > 1:
            name += f", {torch.get_num_threads()} threads"
        return EngineInfo(name=name, profile=self.profile, device="cpu", capacity=CAPACITY)

    def load(self, request: LoadRequest) -> Loaded:
        """Hold the policy in `request.directory`; a failed load leaves none loaded."""
        from verifier.profiles import load_to_sample

        directory = Path(request.directory)
        files = {name: (directory / name).read_bytes() for name in ("config.json", "tokenizer.json")}
        self.root = b""
        if self.policy is not None and files == self._files:
            self.policy.load_weights(directory, root=request.root)
        else:
            self.policy = load_to_sample(directory, self.profile, root=request.root, attention=self.attention)
        self._files = files
        self.root = request.root
        return Loaded(root=request.root)

    def generate(self, request: GenerateRequest, cancelled: Cancelled) -> Generated:
        policy = self.check(request)
        return Generated(outputs=self.outputs(policy, request, self.sample(policy, request, cancelled)))

    def check(self, request: GenerateRequest) -> PolicyModel:
        """The loaded policy, if it is the one asked for and every item fits it.

        Raises:
            EngineError: `wrong-policy` or `engine-refused`, naming the item.
        """
        policy = self.policy
        if policy is None or self.root != request.root:
            held = self.root.hex()[:16] or "no policy"
            raise EngineError(
                f"this engine holds {held}, the request names {request.root.hex()[:16]}; load it first",
                ReasonCode.WRONG_POLICY,
            )
        if not (math.isfinite(request.temperature) and request.temperature > 0):
            raise EngineError(f"temperature {request.temperature} is not above 0", ReasonCode.ENGINE_REFUSED)
        vocab, context = policy.vocabulary, policy.max_context
        for item in request.items:
            ids = read_tokens(item.prompt)
            wrong = None
            if not ids:
                wrong = "an empty prompt"
            elif max(ids) >= vocab:
                wrong = f"token id {max(ids)} outside the vocabulary of {vocab}"
            elif item.max_new_tokens < 1:
                wrong = "nothing to sample (max_new_tokens 0)"
            elif len(ids) + item.max_new_tokens > context:
                wrong = f"{len(ids)} + {item.max_new_tokens} tokens, over the context of {context}"
            if wrong:
                raise EngineError(f"{item.request_id}: {wrong}", ReasonCode.ENGINE_REFUSED)
        return policy

    def sample(self, policy: PolicyModel, request: GenerateRequest, cancelled: Cancelled) -> list[Decoded]:
        """The tokens the request forces, one `Decoded` per item."""
        from node.decode import DecodeRequest, decode

        return decode(
            policy.model,
            [DecodeRequest(read_tokens(i.prompt), i.seed, i.max_new_tokens) for i in request.items],
            temperature=request.temperature,
            stop_tokens=request.stop_tokens,
            cancelled=cancelled,
        )

    def outputs(
        self, policy: PolicyModel, request: GenerateRequest, decoded: list[Decoded]
    ) -> tuple[GenerateOutput, ...]:
        """The wire form of `decoded`: proofs are built for all of them at once, and once for equal states."""
        from verifier.model import completion_text
        from verifier.profiles import profile_of
        from verifier.toploc import build_many

        digests = [blake3(d.states_NH.data.cast("B")).digest() for d in decoded]
        distinct = {digest: d.states_NH for digest, d in zip(digests, decoded, strict=True)}
        limbs = profile_of(self.profile).limbs
        proofs = dict(zip(distinct, build_many(list(distinct.values()), limbs), strict=True))
        return tuple(
            GenerateOutput(
                request_id=item.request_id,
                tokens=write_tokens(d.tokens),
                logprobs=d.logprobs.astype("<f4").tobytes(),
                finish=d.finish,
                text=completion_text(policy.tokenizer, d.tokens, request.stop_tokens),
                proofs=tuple(proofs[digest]),
                routes=d.routes,
            )
            for item, d, digest in zip(request.items, decoded, digests, strict=True)
        )


def read_tokens(blob: bytes) -> tuple[int, ...]:
    """Ids of a `Tokens` field (u32 little-endian)."""
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def write_tokens(ids: tuple[int, ...]) -> bytes:
    """The inverse of `read_tokens`."""
    return struct.pack(f"<{len(ids)}I", *ids)


class EngineServer:
    """Serves one backend on one socket path until told to stop."""

    def __init__(self, backend: Backend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._turn = asyncio.Lock()
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then leave the process.

        Raises:
            UsageError: another engine answers at this path.
        """
        await self._refuse_second()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        old = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(self._serve, path=self._path)
        finally:
            os.umask(old)
        await stop.wait()
        self._stopping.set()
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S), self._turn:
                pass
        Path(self._path).unlink(missing_ok=True)
        sys.stderr.flush()
        os._exit(0)  # a worker inside a long forward pass can't be interrupted, and nothing of ours is left to flush

    async def _refuse_second(self) -> None:
        try:
            _, writer = await asyncio.open_unix_connection(self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        writer.close()
        raise UsageError(f"another engine already answers at {self._path}; stop it, or choose another --socket")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._stopping.is_set():
                async with asyncio.timeout(IDLE_DEADLINE_S):
                    kind, payload = await read_frame(reader)
                reply = await self._answer(kind, payload, reader)
                writer.write(reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the node left or was silent for an hour: it opens another connection when it needs one
        except HeadwaterError as exc:
            writer.write(_failure(exc.code, str(exc)))
        finally:
            writer.close()

    async def _answer(self, kind: str, payload: bytes, reader: asyncio.StreamReader) -> bytes:
        gone = threading.Event()

        def cancelled() -> bool:
            return gone.is_set() or self._stopping.is_set()

        async with self._turn:
            work = asyncio.get_running_loop().run_in_executor(self._worker, self._work, kind, payload, cancelled)
            while not work.done():
                await asyncio.wait([work], timeout=0.1)
                if reader.at_eof():
                    gone.set()
            return work.result()

    def _work(self, kind: str, payload: bytes, cancelled: Cancelled) -> bytes:
        try:
            if kind == "info":
                codec.decode(InfoRequest, payload)
                return frame(kind, self._backend.info())
            if kind == "load":
                return frame(kind, self._backend.load(codec.decode(LoadRequest, payload)))
            if kind == "generate":
                return frame(kind, self._backend.generate(codec.decode(GenerateRequest, payload), cancelled))
            raise EngineError(f"an engine has no answer to {kind!r}", ReasonCode.MALFORMED)
        except HeadwaterError as exc:
            return _failure(exc.code, str(exc))
        except _FAILURES as exc:
            return _failure(ReasonCode.ENGINE_FAILED, f"{kind} failed: {type(exc).__name__}: {exc}")


def _failure(code: ReasonCode, message: str) -> bytes:
    return frame("failure", EngineFailure(code=code.value, message=message[:_MAX_MESSAGE]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m node.engine",
        description="Serve generation requests on a local socket.",
        epilog="example: python -m node.engine --socket /tmp/engine.sock --threads 1",
    )
    add_arguments(parser)
    parser.add_argument("--profile", choices=PROFILES, default="fp32", help="what it computes in (default fp32)")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="kernel, to compare their noise")
    args = parser.parse_args(argv)
    return serve(args, lambda: TransformersEngine(args.profile, args.attention))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to listen; the file gets mode 0600")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of the model (default 1)")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process (default: whoever started it)")


def serve(args: argparse.Namespace, backend: Callable[[], Backend]) -> int:
    """Run the engine process with the backend that `backend()` makes. Returns an exit code."""
    die_with_parent(args.parent)
    gc.disable()  # half a million objects of the imports stay: looking for garbage among them is a sixth of the start
    import torch

    from verifier.allocator import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(max(1, args.threads))
    torch.set_num_interop_threads(1)
    try:
        made = backend()
        settle_heap()
        asyncio.run(EngineServer(made, args.socket).run())
    except UsageError as exc:
        print(f"engine: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as exc:
        print(f"engine: cannot listen at {args.socket}: {exc}; choose another --socket", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
