"""`node join`: from what the person typed to a machine at work, and back out again.

    find the run        share code, file or address -> manifest, checked against the run id (`find`)
    say what it is      who runs it, who may read what this machine sends
    become a member     identity, libp2p host process, join
    make room           memory and disk for the weights, once their size is known
    work                the role's loop beside heartbeats and weights, until the run or the person ends it

Not covered: what a role does (`inference`, `validator`, `relay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from environments.base import Environment
from environments.errors import EnvironmentSpecError
from environments.registry import load as load_environment
from node.errors import LeavingError, NodeError, UpgradeRequiredError
from node.find import find_run
from node.heads import HeadKeeper
from node.home import Home, RunHome
from node.log import EventLog
from node.manifest import HeldManifest
from node.member import UPGRADE_COMMAND, Member
from node.options import JoinOptions, check_options
from node.status import StatusFile
from node.weights import follow_weights
from protocol.control import Clock, ControlClient
from protocol.engine import EngineInfo
from protocol.errors import HeadwaterError, ManifestError, UsageError
from protocol.heap import return_large_blocks, settle_heap
from protocol.host import HostProcess
from protocol.identity import Identity
from protocol.limits import PROTOCOL_VERSION
from protocol.manifest import PROFILES, Run
from protocol.preflight import require
from protocol.sequences import Sequences
from protocol.targets import Target, resolve
from shardcast.pacing import Pacing
from shardcast.passes import Presenter
from shardcast.puller import Puller

RUN_MARK = "HEADWATER_RUN"
"""Environment variable that says which run a child process works for. Nothing reads it but people and supervisors."""

HOST_DEADLINE_S = 150.0
"""Importing libp2p on a slow machine that starts many processes at once takes over a minute."""

STOP_DEADLINE_S = 4.8
"""After SIGTERM or Ctrl-C the process is gone within this long; its children end with it."""

ABANDON_S = 3.0
"""What a role hands back in its last moments is handed back by then, or not at all."""

KEEP_POLICIES = {"inference": 2, "validator": 8}
"""Policies kept on disk. A validator judges leases a few steps old; fewer would be pulled again."""

START_MEMORY_MIB = {"inference": 500, "validator": 400, "relay": 120}
"""What the role's processes take before any weights: Python, the libp2p host, torch where there is a model."""

START_DISK_MIB = 64
"""Keys, receipts and finished leases; weights are counted once their size is known."""


class Role(Protocol):
    """What the supervisor knows of a role."""

    async def wind_down(self, leaving: LeavingError) -> None: ...

    async def abandon(self, reason: str) -> None: ...


def run_join(options: JoinOptions) -> int:
    """The whole command. Returns its exit code."""
    log = EventLog(as_json=options.as_json, file=options.log)
    home = Home(options.home)
    try:
        target = resolve(options.run)
        check_options(options)
        home.lock()
        require(
            f"the role {options.role}",
            memory_mib=START_MEMORY_MIB[options.role],
            disk_mib=START_DISK_MIB,
            where=home.path,
        )
        return_large_blocks()
        settle_heap()
        return asyncio.run(_until_stopped(options, target, home, log))
    except LeavingError as exc:
        log.event("left", code=exc.code.value, reason=str(exc))
        log.last_words(str(exc))
        return exc.exit_code
    except Exception as exc:
        log.event("failed", level="error", error=type(exc).__name__, reason=str(exc))
        raise
    finally:
        log.close()
        home.unlock()


async def _until_stopped(options: JoinOptions, target: Target, home: Home, log: EventLog) -> int:
    """Take part until it ends by itself, or until SIGTERM or Ctrl-C."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    work = asyncio.create_task(_take_part(options, target, home, log))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        await work
        return 0
    log.event("stopping", reason="signal")
    # The promise to the person, even if a peer or a thread in a long prefill does not let go.
    last_resort = threading.Timer(STOP_DEADLINE_S, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    log.event("stopped")
    return 0


async def _take_part(options: JoinOptions, target: Target, home: Home, log: EventLog) -> None:
    """Join and work. Raises LeavingError when it is over."""
    async with to_the_end(contextlib.AsyncExitStack()) as stack:
        identity = home.identity()
        log.bind(node=identity.public)
        if target.run is not None:
            os.environ[RUN_MARK] = target.run.hex()
        host = HostProcess(home=home.path, key=home.transport_key, listen=None)
        stack.push_async_callback(host.close)
        await host.start(HOST_DEADLINE_S)
        found = await find_run(target, host, home, log)
        genesis = found.genesis
        log.bind(run=genesis.id)
        part = home.run(genesis.id)
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        manifest = HeldManifest(genesis, part.path, session=session, log=log, monotonic=options.monotonic)
        with contextlib.suppress(ManifestError):  # a fork: said and kept aside, and the held chain goes on
            manifest.take(found.links)
        confirm(manifest.run, target, options, identity, log)
        os.environ[RUN_MARK] = genesis.id.hex()
        sequences, clock = Sequences(part.sequences), Clock(wall=options.wall, monotonic=options.monotonic)
        control = ControlClient(run=manifest.run, identity=identity, sequences=sequences, host=host, clock=clock)
        stack.push_async_callback(control.close)
        heads = HeadKeeper(
            genesis.id,
            part.path,
            ingress=lambda: member.ingress,
            session=session,
            log=log,
            monotonic=options.monotonic,
        )
        member = Member(
            manifest=manifest,
            heads=heads,
            identity=identity,
            transport=host.transport,
            control=control,
            clock=clock,
            status=StatusFile(part.status),
            log=log,
            role=options.role,
            name=options.shown_name,
            come_back=options.command,
            wall=options.wall,
            monotonic=options.monotonic,
        )
        begin = {"inference": _inference, "validator": _validator, "relay": _relay}[options.role]
        place = _Place(options, part, member, sequences, session, stack, log)
        try:
            await begin(place)
        except asyncio.CancelledError:
            place.stopped()
            raise
        except LeavingError as exc:
            member.show(ended=str(exc))
            log.last_words(*place.summary())
            raise
        except HeadwaterError as exc:
            member.show(ended=f"could not go on: {exc}")
            raise


@contextlib.asynccontextmanager
async def to_the_end(stack: contextlib.AsyncExitStack) -> AsyncIterator[contextlib.AsyncExitStack]:
    """Close all of it, also when the signal to stop comes while a run that is over is being left: what is cut short
    there leaves processes and folders behind. `STOP_DEADLINE_S` bounds it."""
    try:
        yield stack
    finally:
        closing = asyncio.ensure_future(stack.aclose())
        while not closing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(closing)
        closing.result()


@dataclass
class _Place:
    """What every role starts from."""

    options: JoinOptions
    part: RunHome
    member: Member
    sequences: Sequences
    session: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack
    log: EventLog
    summary: Callable[[], list[str]] = list
    """What the role did and left, in sentences; the role sets it."""
    _said: bool = False

    def stopped(self) -> None:
        """The owner's wish was carried out: say so at once, there may be no time for it after the cleaning up."""
        if not self._said:
            self._said = True
            self.member.show(ended=self.member.stopped_words)
            self.log.last_words("left the run", *self.summary(), f"come back with: {self.options.command}")

    def puller(self, pacing: Pacing | None = None) -> Puller:
        member, clock_ms = self.member, self.member.clock.now_ms
        return Puller(
            lambda: member.run,
            member.sources,
            self.part.weights,
            keep=KEEP_POLICIES[self.options.role],
            clock_ms=clock_ms,
            presenter=Presenter(member.run.id, member.identity, self.sequences, clock_ms),
            report=member.report,
            pacing=pacing,
        )


def known_profile(profile: str) -> str:
    """The profile a run asks for. Raises NodeError when this software knows none of that name."""
    if profile not in PROFILES:
        raise NodeError(f"the run asks for the profile {profile!r}, which this software does not know; upgrade it")
    return profile


def require_profile(info: EngineInfo, profile: str) -> None:
    """Raises NodeError when an engine does not compute in what the run asks for: all its rollouts would be rejected."""
    if info.profile != profile:
        raise NodeError(f"the engine computes in {info.profile}, the run asks for {profile}; use another engine")


async def _inference(place: _Place) -> None:
    from node.engine_link import EngineLink
    from node.inference import InferenceNode
    from node.receipts import ReceiptStore
    from node.upload import Outbox, Uploader

    options, member = place.options, place.member
    environments = load_environments(member.run, place.log)
    profile = known_profile(member.run.manifest.profile)
    engine = EngineLink(
        socket=options.engine_socket,
        threads=options.threads,
        output=place.part.path / "engine.log",
        log=place.log,
        profile=profile,
    )
    place.stack.push_async_callback(engine.close)
    member.activity = "starting the engine"
    info = await engine.start()
    require_profile(info, profile)
    await member.join(engine=info.name)
    pacing = Pacing()
    puller = place.puller(pacing)
    uploader = Uploader(
        run=lambda: member.run,
        identity=member.identity,
        sequences=place.sequences,
        clock=member.clock,
        ingress=lambda: member.ingress,
        outbox=Outbox(place.part.submissions),
        receipts=ReceiptStore(place.part.receipts),
        session=place.session,
        log=place.log,
        on_receipt=member.take_receipt,
        on_refused=member.look_for_updates,
    )
    node = InferenceNode(
        member=member,
        engine=engine,
        puller=puller,
        uploader=uploader,
        environments=environments,
        pacing=pacing,
        log=place.log,
        alter=options.alter,
    )
    place.stack.push_async_callback(node.close)
    place.summary = node.summary

    def gauges() -> dict[str, Any]:
        running = "restarting" if member.activity == "restarting the engine" else "running"
        times = f", restarted {engine.restarts} times" if engine.restarts else ""
        return {
            "bytes_up": uploader.bytes_sent,
            "bytes_down": puller.bytes_received,
            "engine": f"{info.name}, {running}{times}",
            "waits_to_upload": uploader.waits_for,
        }

    member.gauges = gauges
    weights = follow_weights(puller, member, place.part.weights, place.log)
    await supervise(
        node, place.stopped, node.run(info), member.heartbeats(), weights, last_question=member.hear_the_end
    )


async def _validator(place: _Place) -> None:
    from node.validator import ValidatorNode

    member = place.member
    environments = load_environments(member.run, place.log)
    await member.join()
    pacing = Pacing()
    puller = place.puller(pacing)
    node = ValidatorNode(
        member=member,
        puller=puller,
        environments=environments,
        session=place.session,
        threads=place.options.threads,
        pacing=pacing,
        log=place.log,
    )
    place.summary = node.summary
    member.gauges = lambda: {"bytes_up": node.bytes_sent, "bytes_down": puller.bytes_received + node.bytes_received}
    weights = follow_weights(puller, member, place.part.weights, place.log)
    await supervise(node, place.stopped, node.run(), member.heartbeats(), weights, last_question=member.hear_the_end)


async def _relay(place: _Place) -> None:
    from node.relay import RelayNode

    node = RelayNode(
        member=place.member,
        listen=place.options.listen,
        store=place.part.path / "relay",
        sequences=place.sequences,
        log=place.log,
    )
    place.stack.push_async_callback(node.close)
    url = await node.start()
    member = place.member
    await member.join(addresses=(url,))
    member.gauges = lambda: {"bytes_up": node.bytes_sent, "bytes_down": node.bytes_received}
    await supervise(node, place.stopped, node.run(), member.heartbeats(), last_question=member.hear_the_end)


async def supervise(
    role: Role,
    stopped: Callable[[], None],
    *parts: Awaitable[None],
    last_question: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run all parts until one ends; that one's error is the reason.

    Args:
        last_question: asked beside handing back, when the owner ends the node.
        stopped: called when the owner ended the node and the role has handed back what it could.

    Raises:
        LeavingError: after the role wound down.
        NodeError: a part ended without a reason.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and (reason := task.exception()) is not None:
                if isinstance(reason, LeavingError):
                    await role.wind_down(reason)
                else:
                    await _abandon(role, f"the node could not go on: {reason}"[:500])
                raise reason
        raise NodeError("a part of this node ended without saying why; look into its log and report it")
    except asyncio.CancelledError:
        asked = [last_question()] if last_question is not None else []
        await asyncio.gather(_abandon(role, "the node was stopped by its owner"), *asked)
        stopped()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _abandon(role: Role, reason: str) -> None:
    with contextlib.suppress(HeadwaterError, TimeoutError):
        async with asyncio.timeout(ABANDON_S):
            await role.abandon(reason)


def confirm(run: Run, target: Target, options: JoinOptions, identity: Identity, log: EventLog) -> None:
    """Show what is being joined, and check that this software may.

    Raises:
        UpgradeRequiredError: the run speaks a newer protocol. UsageError: the person said no.
    """
    manifest = run.manifest
    lowest, highest = min(manifest.versions), max(manifest.versions)
    if lowest > PROTOCOL_VERSION:
        raise UpgradeRequiredError(f"the run needs a newer headwater; run: {UPGRADE_COMMAND}")
    if highest < PROTOCOL_VERSION & 0xFF00:
        raise NodeError("the run speaks an older protocol than this software; its operator must upgrade")
    log.event(
        "run",
        name=manifest.name,
        role=options.role,
        peer_id=identity.peer_id,
        contact=manifest.contact,
        privacy=manifest.privacy,
    )
    log.say(f"run       {manifest.name} ({run.id.hex()})")
    log.say(f"you are   {identity.peer_id}, role {options.role}")
    log.say(f"privacy   {manifest.privacy}")
    log.say(f"contact   {manifest.contact}")
    if target.run is None and not options.yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"only an address was given, which does not say which run is meant; it answers with run "
                f"{run.id.hex()}. "
                "If that is the one, repeat the command with --yes, or use its share code"
            )
        answer = input("join this run? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise UsageError("not joined")


def load_environments(run: Run, log: EventLog) -> dict[bytes, Environment]:
    """The run's environments that this machine has, by `env_hash`.

    Raises:
        NodeError: none of them.
    """
    found: dict[bytes, Environment] = {}
    problem = "the run names none"
    for spec in run.manifest.environments:
        try:
            found[spec.digest] = load_environment(spec)
        except EnvironmentSpecError as exc:
            problem = str(exc)
            log.event("environment.missing", level="warning", name=spec.name, reason=problem)
    if not found:
        raise NodeError(f"this machine has none of the run's environments: {problem}")
    return found
