"""Weights on their way to this machine: whether there is room for them, and how far the first download is.

Room is checked before the first shard is fetched, as soon as the run's layout says how large a policy is: memory for
the model that runs it, disk for two policies (the one in use and the next). A person at a terminal sees bytes, rate and
time left of the first download in the last line; without a terminal a plain line now and then; `--json` shows nothing.

Not covered: pulling and verifying (`shardcast.puller`), and a relay, which holds no model.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from node.log import EventLog
from node.member import Member
from protocol.limits import MIB
from protocol.manifest import ModelSpec
from protocol.preflight import require
from shardcast.errors import SourceError
from shardcast.puller import Puller

POLICIES = 2
"""Policies that must fit on the disk: the one in use, and the next while it arrives."""

WORKING_MIB = 160
"""Memory beside the weights themselves: activations, keys and values of a batch, logits."""

LOOK_S = 0.5
PLAIN_EVERY_S = 15.0
"""Without a terminal a line this often; a log of a slow download stays readable."""


async def follow_weights(puller: Puller, member: Member, store: Path, log: EventLog) -> None:
    """Check the room, then pull until cancelled.

    Raises:
        UsageError: too little memory or disk for this run's model.
        ForkError, StoreError, OSError: what stopped the puller.
    """

    def check(size: int) -> None:
        check_room(size, member.run.manifest.model, store)

    try:
        check(await puller.policy_bytes())
    except SourceError:
        puller.room_for = check  # nothing is published yet: asking until it is would be late by half a pause
    progress = asyncio.create_task(show_first_download(puller, log))
    try:
        await puller.run_forever()
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


def check_room(size: int, model: ModelSpec, store: Path) -> None:
    """Whether a policy of `size` bytes fits here, beside those that `store` has.

    Raises:
        UsageError: it doesn't; says what is missing. OSError: the disk can't be asked.
    """
    held = sum(1 for _ in (store / "policies").glob("e*-s*"))
    require(
        "this run's model",
        memory_mib=memory_need_mib(size, model.storage_dtype),
        disk_mib=-(-max(0, POLICIES - held) * size // MIB) + 1,
        where=store,
    )


def memory_need_mib(policy_bytes: int, storage_dtype: str) -> int:
    """MiB to run a model in float32: its weights, and the file they are read from while they are loaded."""
    weights = policy_bytes * (2 if storage_dtype == "bfloat16" else 1)
    return (weights + policy_bytes) // MIB + WORKING_MIB


async def show_first_download(puller: Puller, log: EventLog) -> None:
    """Tell how far the first download is; ends with the first whole policy."""
    started = time.monotonic()
    first: tuple[float, int] | None = None
    told = started
    while puller.current is None:
        await asyncio.sleep(LOOK_S)
        now, progress = time.monotonic(), puller.progress
        if progress is None:
            continue
        here, whole = progress
        if first is None:
            first = (now, here)
        line = download_line(here, whole, here - first[1], now - first[0])
        log.status(line)
        if not log.terminal and now - told >= PLAIN_EVERY_S:
            told = now
            log.say(line)


def download_line(here: int, whole: int, gained: int, seconds: float) -> str:
    """One line: `weights 12.0 of 256.0 MiB, 4.1 MiB/s, 60 s left`.

    Args:
        here, whole: bytes that are verified, and in all.
        gained: bytes that came within the last `seconds`.
    """
    line = f"weights {here / MIB:.1f} of {whole / MIB:.1f} MiB"
    if gained <= 0 or seconds <= 0:
        return line
    rate = gained / seconds
    return f"{line}, {rate / MIB:.1f} MiB/s, {max(0, whole - here) / rate:.0f} s left"
