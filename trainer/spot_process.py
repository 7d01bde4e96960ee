"""Keeps the checking process (`spot_worker`): starts it, kills it when it is late, starts another.

One request at a time. Whatever goes wrong with a request ends the process and fails that request alone; the next one
gets a new process, after a pause that grows while they fail.

Not covered: what is asked (`spot_checks`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from trainer.spot_request import Answer, Request

START_S = 150.0
"""Importing torch on a machine that starts a whole run may take minutes. It is not done with the lowest priority: then
it would fall into the time in which the run learns, and cost as much as it."""

PAUSE_MAX_S = 60.0
_LINE_BYTES = 1 << 20
"""Longest answer: evidence on every rollout of a submission has a fifth of it."""


@dataclass
class CheckProcess:
    """One at a time; `close` it when the coordinator ends."""

    run_dir: Path
    scratch: Path
    """A folder of its own, on a disk with room for one policy's weights."""
    log: Path
    restarts: int = 0
    _process: asyncio.subprocess.Process | None = None
    _pause_s: float = 0.0
    _random: random.Random = field(default_factory=random.Random)

    async def start(self) -> None:
        """Have it ready before anything is asked: its imports cost as much as a thousand checks, and fall into the time
        in which a run still prepares. When it fails, the first request tries again."""
        try:
            await self._running()
        except (TimeoutError, OSError, EOFError):
            await self.close()

    async def ask(self, request: Request) -> Answer:
        """The answer; a failed one when there is none."""
        try:
            process = await self._running()
            line = await self._exchange(process, request)
            answer = Answer.from_json(line)
        except (TimeoutError, OSError, ValueError, TypeError, KeyError, EOFError) as exc:
            self.restarts += 1
            self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s + self._random.random())
            await self.close()
            return Answer(failed=f"the checking process ended or was late: {type(exc).__name__} {exc}"[:400])
        self._pause_s = 0.0
        return answer

    async def fresh(self) -> None:
        """The next request is answered by a process that has nothing in common with those before it."""
        await self.close()

    async def close(self) -> None:
        """End the process, whatever it is at."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await asyncio.sleep(self._pause_s)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "trainer.spot_worker",
                str(self.run_dir),
                str(self.scratch),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LINE_BYTES,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        await self._line(self._process, START_S)
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, request: Request) -> bytes:
        assert process.stdin is not None
        process.stdin.write(request.to_json().encode() + b"\n")
        async with asyncio.timeout(request.deadline_s):
            await process.stdin.drain()
        return await self._line(process, request.deadline_s)

    async def _line(self, process: asyncio.subprocess.Process, deadline_s: float) -> bytes:
        assert process.stdout is not None
        async with asyncio.timeout(deadline_s):
            line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it ended")
        return line
