"""Derive an audit's parts in several processes of this machine; whatever ends one of them, the audit goes on.

    a part is done          its derivations came one by one, each as one line of JSON
    weights can't be had    the part's error; the process goes on
    a process ends          at a submission, whatever ended it: that one is named (`Died`), the rest of its part goes to
                            a new process. However many do so, each costs itself and one start: who uploads what kills
                            a process takes nobody else's rollouts out of an audit
    it ends before one      while it loads weights: tried again, `MOST_DEATHS` times for one policy, then its
                            submissions are named; after so many policies in a row it is the machine, and all the rest
                            is named too
    it says nothing         for `SILENT_S`: it is killed, and counts as one that ended
    the caller stops        `close()` of the generator kills them all at once and waits for them

Processes are forked: each has the archive that the caller read, and no other cost than its own model. They compute on
one thread: what several cores gain in one process, several processes gain whole. Nothing is unpickled.

Not covered: what a part is and what is derived (`derive`).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from protocol.errors import ProtocolError
from protocol.lifeline import die_with_parent
from protocol.preflight import memory
from verifier import compiled, stopping
from verifier.allocator import keep_freed_memory
from verifier.derive import Begun, Derivation, Part, unreadable

THREADS = 1
"""Of each process. With more a process hangs whose parent has used OpenMP's threads: they don't survive the fork."""

SILENT_S = 1800.0
"""So long may one submission take: 512 rollouts of the largest model a CPU checks. A process that says nothing for
longer is stuck; killing one that works would call a rollout uncheckable that is not."""

MOST_DEATHS = 3
"""Processes that end while they load one policy's weights, and policies in a row that none could load. Fewer call a
passing want of memory the policy's doing; more only take longer."""

_WORKING_MIB = 1024
"""What a process needs beside its weights and compiled loops: imports that it writes to, one batch of states, one tile
of logits."""

Derive = Callable[[Part], Iterator[Begun | Derivation]]


@dataclass(frozen=True)
class Unloaded:
    """A part whose weights can't be had, and why."""

    part: Part
    why: str


@dataclass(frozen=True)
class Died:
    """Submissions (of one part) that nothing was derived about, because the process that was at it ended."""

    part: Part
    why: str


Event = Derivation | Unloaded | Died


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def affordable(cores: int, weights_bytes: int, available_mib: int | None) -> int:
    """How many processes there is memory for: at least 1, at most one a core.

    Args:
        weights_bytes: of the policy as it is published; in float32 it may take twice as much.
        available_mib: None where it can't be known.
    """
    if available_mib is None:
        return max(1, cores)
    each = _WORKING_MIB + compiled.MEMORY_MIB + (2 * weights_bytes >> 20)
    return max(1, min(cores, available_mib // each))


def processes(weights_bytes: int) -> int:
    """As many as this machine has cores and memory for."""
    room = memory()
    return affordable(usable_cores(), weights_bytes, room.mib if room is not None else None)


def derive_all(parts: Iterable[Part], derive: Derive, count: int, *, silent_s: float = SILENT_S) -> Generator[Event]:
    """Derive every part in at most `count` processes; events come in no particular order.

    Whoever stops early closes it (`contextlib.closing`), so that no process outlives the caller's interest.
    """
    pool = _Pool(deque(parts), derive, silent_s)
    try:
        yield from pool.run(count)
    finally:
        pool.kill()


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Hear SIGINT and SIGTERM at the end of this: Python drops what a handler raises in its hooks around a fork, and
    an audit would go on that was told to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    kept = {one: signal.signal(one, lambda number, _: heard.append(number)) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in kept.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
    for number in dict.fromkeys(heard):
        signal.raise_signal(number)


class _Worker:
    """One process, seen from its parent."""

    def __init__(self, derive: Derive, others: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        # A process that holds its siblings' pipes would keep them open when the parent is gone.
        inherited = [*others, self.connection]
        self.process: ForkProcess = context.Process(
            target=_work, args=(theirs, inherited, os.getpid(), derive), daemon=True, name="verifier-audit"
        )
        with signals_later():
            self.process.start()
        theirs.close()
        self.part: Part | None = None
        self.loaded = False
        """It has the part's weights."""
        self.heard = time.monotonic()

    def give(self, part: Part) -> None:
        self.part, self.loaded, self.heard = part, False, time.monotonic()
        try:
            _send(self.connection, {"epoch": part.epoch, "step": part.step, "submissions": part.submissions})
        except OSError:
            pass  # it has ended; the next look at its pipe says so

    def ended(self) -> str:
        """What ended it, in words. Waits for it."""
        self.connection.close()
        self.process.join(5.0)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "it was killed (SIGKILL): perhaps for want of memory"
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


class _Pool:
    def __init__(self, todo: deque[Part], derive: Derive, silent_s: float) -> None:
        self._todo = todo
        self._derive = derive
        self._silent_s = silent_s
        self._workers: list[_Worker] = []
        self._deaths: Counter[str] = Counter()
        """Policy -> processes that ended while they loaded it."""
        self._hopeless = 0
        """Policies in a row that were given up."""

    def run(self, count: int) -> Iterator[Event]:
        while self._todo or any(worker.part for worker in self._workers):
            stopping.check()
            self._hand_out(count)
            yield from self._listen()
        for worker in self._workers:
            worker.connection.close()  # it reads the end of its work, and ends
            worker.process.join(5.0)

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    def _hand_out(self, count: int) -> None:
        for worker in self._workers:
            if worker.part is None and self._todo:
                worker.give(self._todo.popleft())
        while self._todo and len(self._workers) < count:
            worker = _Worker(self._derive, [other.connection for other in self._workers])
            self._workers.append(worker)
            worker.give(self._todo.popleft())

    def _listen(self) -> Iterator[Event]:
        """Take what came, or find who has been silent for too long."""
        busy = {worker.connection: worker for worker in self._workers if worker.part is not None}
        until = min(worker.heard for worker in busy.values()) + self._silent_s
        ready = wait(list(busy), timeout=max(0.0, until - time.monotonic()))
        for connection, worker in busy.items():
            if connection in ready:
                yield from self._read(worker)
            elif time.monotonic() - worker.heard > self._silent_s:
                worker.process.kill()
                worker.ended()
                yield from self._bury(worker, f"it said nothing for {self._silent_s:.0f} s and was stopped")

    def _read(self, worker: _Worker) -> Iterator[Event]:
        part = worker.part
        assert part is not None
        try:
            said = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            yield from self._bury(worker, worker.ended())
            return
        worker.heard = time.monotonic()
        if "done" in said:
            worker.part = None
        elif "begun" in said:
            worker.loaded, self._hopeless = True, 0
        elif "unloaded" in said:
            worker.part = None
            yield Unloaded(part, str(said["unloaded"]))
        else:
            found = Derivation.from_json(said)
            worker.loaded, self._hopeless = True, 0
            worker.part = replace(part, submissions=part.submissions[1:])
            yield found

    def _bury(self, worker: _Worker, why: str) -> Iterator[Event]:
        self._workers.remove(worker)
        part = worker.part
        assert part is not None
        if worker.loaded:
            if part.submissions:
                yield Died(replace(part, submissions=part.submissions[:1]), f"the process that was at it ended: {why}")
            if len(part.submissions) > 1:
                self._todo.appendleft(replace(part, submissions=part.submissions[1:]))
            return
        self._todo.appendleft(part)
        self._deaths[part.policy] += 1
        if self._deaths[part.policy] < MOST_DEATHS:
            return
        self._hopeless += 1
        machine = self._hopeless >= MOST_DEATHS
        gone = [one for one in self._todo if machine or one.policy == part.policy]
        for one in gone:
            self._todo.remove(one)
            yield Died(one, f"{MOST_DEATHS} processes ended while they loaded the weights of {part.policy}: {why}")


# --- in the process itself ------------------------------------------------------------------------------------------


def _work(connection: Connection, inherited: list[Connection], parent: int, derive: Derive) -> None:
    """Derive part after part until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody on the terminal; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGKILL)
    for other in inherited:
        other.close()
    # Another thread of the parent may have held the lock of its stderr when it forked.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    while True:
        try:
            said = json.loads(connection.recv_bytes())
        except EOFError:
            return
        part = Part(said["epoch"], said["step"], tuple(said["submissions"]))
        try:
            for one in derive(part):
                _send(connection, {"begun": one.submission} if isinstance(one, Begun) else one.to_json())
            _send(connection, {"done": True})
        except BrokenPipeError:
            return
        except (ProtocolError, OSError) as exc:
            _send(connection, {"unloaded": unreadable(exc)})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
