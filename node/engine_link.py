"""The node's end of an engine: starts the built-in one and brings it back, or speaks to somebody else's.

A built-in engine is a child in a session of its own (Ctrl-C reaches the node first), listening in a private
folder under /tmp because Unix socket paths are short. It dies with the node, whatever happens.

Not covered: more than one engine a node.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from node.log import EventLog
from protocol.engine import (
    EngineClient,
    EngineInfo,
    Generated,
    GenerateRequest,
    InfoRequest,
    Loaded,
    LoadRequest,
)
from protocol.errors import EngineError, ReasonCode
from protocol.limits import MAX_TEXT

START_DEADLINE_S = 240.0
"""Importing torch and transformers on a slow machine that starts many processes takes minutes."""

INFO_DEADLINE_S = 30.0
LOAD_DEADLINE_S = 300.0
_STOP_S = 1.2


class EngineLink:
    """One engine, reconnected or restarted on demand.

    Args:
        socket: an engine that somebody else started; None starts the built-in one.
        threads: CPU threads of the built-in engine.
        profile: what the built-in engine computes in; the run's.
        output: file the built-in engine's stderr goes to.
    """

    def __init__(
        self, *, socket: Path | None, threads: int, output: Path, log: EventLog, profile: str = "fp32"
    ) -> None:
        self._external = socket
        self._threads = threads
        self._profile = profile
        self._output = output
        self._log = log
        self._folder: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._client: EngineClient | None = None
        self.loaded = b""
        self.restarts = 0

    async def start(self) -> EngineInfo:
        """Connect, starting the built-in engine if it isn't running.

        Raises:
            EngineError: no engine answered in time.
        """
        client = await self._connect()
        info = await client.call("info", InfoRequest(), EngineInfo, INFO_DEADLINE_S)
        self._log.event("engine.ready", name=info.name, capacity=info.capacity, profile=info.profile)
        return info

    async def load(self, directory: Path, epoch: int, step: int, root: bytes) -> None:
        """Make the engine hold this policy; nothing happens if it already does.

        Raises:
            EngineError: it could not.
        """
        if self.loaded == root and self._client is not None:
            return
        if len(str(directory)) > MAX_TEXT:
            raise EngineError(f"the path {directory} is too long for an engine", ReasonCode.ENGINE_REFUSED)
        client = await self._connect()
        request = LoadRequest(directory=str(directory), epoch=epoch, step=step, root=root)
        self.loaded = b""
        answer = await client.call("load", request, Loaded, LOAD_DEADLINE_S)
        if answer.root != root:
            raise EngineError("the engine says it loaded another policy", ReasonCode.WRONG_POLICY)
        self.loaded = root

    async def generate(self, request: GenerateRequest, deadline_s: float) -> Generated:
        """Raises EngineError: refused, failed, closed or too slow."""
        client = await self._connect()
        return await client.call("generate", request, Generated, deadline_s)

    async def recover(self) -> None:
        """After a failure that leaves the connection or process in doubt: drop it, so the next call starts anew."""
        await self._disconnect()
        if self._external is None:
            self.restarts += 1
            self._log.event("engine.restart", restarts=self.restarts)
            await self._stop_child()

    async def close(self) -> None:
        """Stop the built-in engine; leave somebody else's running."""
        await self._disconnect()
        await self._stop_child()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _connect(self) -> EngineClient:
        if self._client is not None:
            return self._client
        self.loaded = b""
        path = self._external or self._spawn()
        deadline = asyncio.get_running_loop().time() + START_DEADLINE_S
        while True:
            if self._external is None and self._child is not None and self._child.poll() is not None:
                raise EngineError(f"the built-in engine ended with status {self._child.returncode}; see {self._output}")
            try:
                self._client = await EngineClient.connect(str(path), 1.0)
                return self._client
            except EngineError:
                if asyncio.get_running_loop().time() > deadline:
                    raise

    def _spawn(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="headwater-"))  # mode 0700
        path = self._folder / "engine.sock"
        if self._child is None or self._child.poll() is not None:
            path.unlink(missing_ok=True)
            command = [sys.executable, "-P", "-m", "node.engine", "--profile", self._profile]
            with self._output.open("ab") as output:
                self._child = subprocess.Popen(
                    [*command, "--socket", str(path), "--threads", str(self._threads), "--parent", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        return path

    async def _disconnect(self) -> None:
        client, self._client, self.loaded = self._client, None, b""
        if client is not None:
            await client.close()

    async def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
        try:
            await asyncio.to_thread(child.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            await asyncio.to_thread(child.wait, 5)
