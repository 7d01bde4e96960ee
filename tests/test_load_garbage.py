"""Garbage at full speed: what it costs everybody else, measured against the same run without it.

A real coordinator, origin, relay, two validators with models, two honest nodes with engines. The learner is played by
the test (weights move a little whenever a batch is there), the stranger too: it computes nothing, signs what it must,
asks again the moment it is refused. In between are stretches without it, so that both halves of every comparison come
from the same minutes of the same machine.

    one     one key, which is paused at the first rejection and suspended at the second, and goes on knocking
    keys    one address that joins with ever new keys, each as soon as the last one has sent its first lease

Not covered: floods below the protocol (`test_host_process.py`), slow or broken uploads (`test_trainer_ingress.py`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import zstandard

from protocol import codec
from protocol.errors import ProtocolError
from protocol.host import HostProcess
from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.records import FINISH_LENGTH, Lease, Rollout, Submission
from protocol.segments import read_segments
from protocol.state import RunState, fold
from tests.node_run import NodeRun
from tests.scripted_swarm import Actor, Swarm
from verifier.toploc import build_many

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

STRETCH_S = 20.0
"""Seconds of each stretch: some hundred honest leases on two cores."""

PRESET = {
    "leases.samples_per_task": 8,
    "leases.tasks_per_step": 16,
    "leases.tasks_per_lease": 4,
    "leases.probation_first_rollouts": 4,
    "leases.probation_accepted": 32,
}
"""As in the preset `tiny`: what a stranger may hold is a share of what a run has under way."""


class Garbage:
    """Submissions that look right from outside: lengths, token ids, log-probabilities, well-formed proofs."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        self._random = np.random.default_rng(7)
        self._vocabulary = vocabulary
        states = self._random.standard_normal((64, PROOF_CHUNK_TOKENS, hidden)).astype(np.float32)
        self._proofs = {
            rows: [chunk for (chunk,) in build_many([one[:rows] for one in states])]
            for rows in range(1, PROOF_CHUNK_TOKENS + 1)
        }

    def submission(self, lease: Lease) -> bytes:
        rollouts = []
        for task in lease.tasks:
            for sample in range(lease.samples):
                count = lease.max_new_tokens
                full, rest = divmod(count, PROOF_CHUNK_TOKENS)
                chunks = [PROOF_CHUNK_TOKENS] * full + [rest] * bool(rest)
                tokens = self._random.integers(2, self._vocabulary, count).astype("<u4").tobytes()
                logprobs = (-self._random.exponential(1.0, count)).astype("<f4").tobytes()
                proofs = tuple(self._proofs[rows][int(self._random.integers(64))] for rows in chunks)
                rollouts.append(Rollout(task, sample, tokens, logprobs, FINISH_LENGTH, 0.0, proofs))
        raw = codec.encode(Submission(lease.lease_id, "garbage", tuple(rollouts)))
        return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(raw)


@dataclass
class Stranger:
    """One machine that only wastes others' time."""

    swarm: Swarm = field(repr=False)
    garbage: Garbage = field(repr=False)
    sent: int = 0
    refused: int = 0
    knocks: int = 0

    async def one(self) -> None:
        """One key, as fast as it is let."""
        actor = await self._join("one")
        while True:
            await self._work(actor)

    async def keys(self) -> None:
        """Ever new keys; the next joins when the last one has sent its lease or was refused one."""
        number = 0
        while True:
            number += 1
            try:
                actor = await self._join(f"key-{number}")
            except ProtocolError:
                self.refused += 1
                await asyncio.sleep(0.02)  # less would only be this process's own load
                continue
            for _ in range(3):
                if await self._work(actor):
                    break

    async def _join(self, name: str) -> Actor:
        actor = Actor(self.swarm, name, "inference")
        await actor.join()
        return actor

    async def _work(self, actor: Actor) -> bool:
        """Ask once, and answer at once. Whether something was sent."""
        self.knocks += 1
        try:
            reply = await actor.ask(wait_ms=500)
        except ProtocolError:
            self.refused += 1
            await asyncio.sleep(0.02)
            return False
        if reply.lease is None:
            self.refused += 1
            return False
        done = await actor.upload(actor.open_lease(reply.lease), self.garbage.submission(actor.open_lease(reply.lease)))
        self.sent += done.status == 200
        return done.status == 200


@asynccontextmanager
async def beside(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        if task.done():
            task.result()
        while not task.done():
            task.cancel()  # more than once: Python 3.11's wait_for can swallow a cancellation
            await asyncio.wait([task], timeout=0.5)


async def until(river: NodeRun, what: str, condition: Callable[[], bool], deadline_s: float = 180.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}\n{river.logs()}"
        await asyncio.sleep(0.1)


async def learn(river: NodeRun) -> None:
    """Whenever a batch is there, the weights that follow from it."""
    while True:
        while not (river.dir / "batches" / f"step-{river.step:08d}.hwb").exists():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(river.advance)


@dataclass(frozen=True)
class Stretch:
    name: str
    begin_ms: int
    end_ms: int


@dataclass(frozen=True)
class Cost:
    """What one stretch was like."""

    p95_s: float
    """Seconds from lease to decision, of honest leases issued in it."""
    leases: int
    honest_ms: int
    """Validators' CPU on honest submissions."""
    garbage_ms: int
    garbage: int
    """Submissions of anybody else."""


def measure(state: RunState, times: list[int], stretch: Stretch, honest: set[bytes]) -> Cost:
    waits, spent, garbage = [], {True: 0, False: 0}, 0
    for submission in state.submissions.values():
        lease = state.leases[submission.lease_id]
        if not stretch.begin_ms <= lease.time < stretch.end_ms:
            continue
        is_honest = submission.owner in honest
        spent[is_honest] += sum(held.verdict.cpu_ms for held in submission.verdicts.values())
        garbage += not is_honest
        if is_honest and submission.verdict_index is not None:
            waits.append((times[submission.verdict_index] - lease.time) / 1000)
    assert len(waits) >= 20, f"only {len(waits)} honest leases in a stretch of {STRETCH_S:.0f} s"
    return Cost(float(np.quantile(waits, 0.95)), len(waits), spent[True], spent[False], garbage)


@pytest.mark.parametrize("kind", ["one", "keys"])
async def test_garbage_at_full_speed_costs_others_little(tmp_path: Path, kind: str) -> None:
    river = NodeRun(tmp_path / "run", steps=2000, **PRESET)
    host = HostProcess(home=tmp_path / "stranger", key=tmp_path / "stranger" / "transport.pem", listen=None)
    try:
        river.serve()
        river.publish()
        river.advance()
        for name, role in (("relay-1", "relay"), ("validator-1", "validator"), ("validator-2", "validator")):
            river.join(name, role)
        nodes = ["node-1", "node-2"]
        for name in nodes:
            river.join(name, "inference")
        await host.start()
        async with aiohttp.ClientSession() as http:
            swarm = Swarm(river.dir, river.run, river.steps, host=host, http=http)
            model = json.loads((river.dir / "model" / "config.json").read_text())
            stranger = Stranger(swarm, Garbage(model["vocab_size"], model["hidden_size"]))
            stretches = []
            async with beside(learn(river)):
                for name in nodes:
                    await until(
                        river, f"{name} to be trusted", lambda name=name: river.node(name).get("state") == "active"
                    )
                for number in range(4):
                    begin = time.time_ns() // 1_000_000
                    if number % 2:
                        async with beside(getattr(stranger, kind)()):
                            await asyncio.sleep(STRETCH_S)
                    else:
                        await asyncio.sleep(STRETCH_S)
                    stretches.append(Stretch("garbage" if number % 2 else "quiet", begin, time.time_ns() // 1_000_000))
                await asyncio.sleep(3)
            honest = {bytes.fromhex(river.node(name)["key"]) for name in nodes}
    finally:
        await host.close()
        river.close()
    log = read_segments(river.dir / "ledger", river.run)
    assert log.problems == []
    times = [sealed.entry.time for sealed in log.entries]
    state = fold([sealed.entry for sealed in log.entries])
    assert state.problems == []
    costs = [measure(state, times, stretch, honest) for stretch in stretches]
    quiet, loud = costs[0::2], costs[1::2]
    ratio = statistics.median(c.p95_s for c in loud) / statistics.median(c.p95_s for c in quiet)
    shares = [c.garbage_ms / (c.garbage_ms + c.honest_ms) for c in loud]
    told = (
        f"{kind}: p95 x{ratio:.2f}, garbage {shares[0]:.1%}, then {shares[1]:.1%} of the validators' CPU; "
        f"{stranger}\nquiet {quiet}\nloud {loud}"
    )
    print(told)
    assert sum(c.garbage for c in loud) >= 1, told
    assert ratio <= 2, told
    # An address may join `joins_per_address` (64) keys in one burst, once; what it may do for ever comes after that.
    assert shares[1] < 0.1 and shares[0] < (0.1 if kind == "one" else 0.25), told
    for key in honest:
        assert state.nodes[key].state == "active" and state.nodes[key].rejected == 0
    strangers = [node for node in state.nodes.values() if node.role == "inference" and node.key not in honest]
    assert sum(node.accepted for node in strangers) == 0
