"""`node join`: from what the person typed to a machine at work, and back out again.

    find the run        share code, file or address -> manifest, checked against the run id
    say what it is      who runs it, who may read what this machine sends
    become a member     identity, libp2p host process, join
    work                the role's loop beside heartbeats and weights, until the run or the person ends it

Not covered: what a role does (`inference`, `validator`, `relay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from environments.base import Environment
from environments.errors import EnvironmentSpecError
from environments.registry import load as load_environment
from node.backoff import Backoff
from node.errors import LeavingError, NodeError, UpgradeRequiredError
from node.home import Home, RunHome
from node.log import EventLog
from node.member import UPGRADE_COMMAND, Member
from protocol.control import Clock, ControlClient, fetch_manifest
from protocol.errors import ManifestError, ProtocolError, UsageError
from protocol.files import write_atomic
from protocol.host import HostProcess
from protocol.identity import Identity, parse_peer_id, peer_id_text
from protocol.limits import PROTOCOL_VERSION
from protocol.manifest import Run, open_manifest, parse_share_code
from protocol.sequences import Sequences
from shardcast.puller import Puller

FIND_DEADLINE_S = 180.0
"""How long a first contact is tried. A run that starts at the same moment as its nodes needs most of a minute."""

RUN_MARK = "HEADWATER_RUN"
"""Environment variable that says which run a child process works for. Nothing reads it but people and supervisors."""

HOST_DEADLINE_S = 150.0
"""Importing libp2p on a slow machine that starts many processes at once takes over a minute."""

STOP_DEADLINE_S = 1.9
"""After SIGTERM or Ctrl-C the process is gone within this long; its children end with it."""

KEEP_POLICIES = {"inference": 2, "validator": 8}
"""Policies kept on disk. A validator judges leases a few steps old; fewer would be pulled again."""

_MULTIADDR = ("/ip4/", "/ip6/", "/dns/", "/dns4/", "/dns6/")


@dataclass(frozen=True)
class JoinOptions:
    """What was typed."""

    role: str
    run: str
    home: Path
    name: str = ""
    engine_socket: Path | None = None
    threads: int = 1
    listen: str = "127.0.0.1:0"
    yes: bool = False
    log: Path | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Target:
    """Which run, and whom to ask for its manifest. `run` is None when only an address was given."""

    run: bytes | None
    addresses: tuple[str, ...]


class Role(Protocol):
    """What the supervisor knows of a role."""

    async def wind_down(self, leaving: LeavingError) -> None: ...

    async def abandon(self, reason: str) -> None: ...


def resolve(text: str) -> Target:
    """The run that `--run` names.

    Raises:
        UsageError: neither an address, a share code nor a file that holds one.
    """
    word = text.strip()
    if not word.startswith(_MULTIADDR) and not word.startswith("hw1"):
        path = Path(word).expanduser()
        try:
            word = path.read_text(encoding="utf-8")[:65536].strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(
                f"--run {text}: no share code (hw1...), no multiaddr, and no file that can be read ({exc}); "
                "ask the run's operator for its share code"
            ) from exc
    if word.startswith(_MULTIADDR):
        try:
            parse_peer_id(word.partition("/p2p/")[2])
        except ProtocolError as exc:
            raise UsageError(f"--run {text}: the address must end in /p2p/ and the coordinator's peer id") from exc
        return Target(None, (word,))
    try:
        code = parse_share_code(word)
    except ManifestError as exc:
        raise UsageError(f"--run {text}: {exc}") from exc
    suffix = "/p2p/" + peer_id_text(code.transport)
    return Target(code.run, tuple(a if "/p2p/" in a else a + suffix for a in code.addresses))


def run_join(options: JoinOptions) -> int:
    """The whole command. Returns its exit code."""
    log = EventLog(as_json=options.as_json, file=options.log)
    home = Home(options.home)
    try:
        target = resolve(options.run)
        home.lock()
        return asyncio.run(_until_stopped(options, target, home, log))
    except LeavingError as exc:
        log.event("left", code=exc.code.value, reason=str(exc))
        log.say(str(exc))
        return exc.exit_code
    except Exception as exc:
        log.event("failed", error=type(exc).__name__, reason=str(exc))
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
    log.say("left the run")
    log.event("stopped")
    return 0


async def _take_part(options: JoinOptions, target: Target, home: Home, log: EventLog) -> None:
    """Join and work. Raises LeavingError when it is over."""
    async with contextlib.AsyncExitStack() as stack:
        identity = home.identity()
        if target.run is not None:
            os.environ[RUN_MARK] = target.run.hex()
        host = HostProcess(home=home.path, key=home.transport_key, listen=None)
        stack.push_async_callback(host.close)
        await host.start(HOST_DEADLINE_S)
        run = await find_run(target, host, home, log)
        confirm(run, target, options, identity, log)
        os.environ[RUN_MARK] = run.id.hex()
        part = home.run(run.id)
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        sequences, clock = Sequences(part.sequences), Clock()
        control = ControlClient(run=run, identity=identity, sequences=sequences, host=host, clock=clock)
        stack.push_async_callback(control.close)
        member = Member(
            run=run,
            identity=identity,
            transport=host.transport,
            control=control,
            clock=clock,
            home=part,
            log=log,
            role=options.role,
            name=(options.name or socket.gethostname())[:64],
        )
        begin = {"inference": _inference, "validator": _validator, "relay": _relay}[options.role]
        await begin(_Place(options, part, member, sequences, session, stack, log))


@dataclass(frozen=True)
class _Place:
    """What every role starts from."""

    options: JoinOptions
    part: RunHome
    member: Member
    sequences: Sequences
    session: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack
    log: EventLog

    def puller(self) -> Puller:
        keep = KEEP_POLICIES[self.options.role]
        return Puller(
            self.member.run, self.member.sources, self.part.weights, keep=keep, clock_ms=self.member.clock.now_ms
        )


async def _inference(place: _Place) -> None:
    from node.engine_link import EngineLink
    from node.inference import InferenceNode
    from node.receipts import ReceiptStore
    from node.upload import Outbox, Uploader

    options, member = place.options, place.member
    environments = load_environments(member.run, place.log)
    engine = EngineLink(
        socket=options.engine_socket, threads=options.threads, output=place.part.path / "engine.log", log=place.log
    )
    place.stack.push_async_callback(engine.close)
    info = await engine.start()
    profile = member.run.manifest.profile
    if info.profile != profile:
        raise NodeError(f"the engine computes in {info.profile}, the run asks for {profile}; use another engine")
    await member.join(engine=info.name)
    puller = place.puller()
    uploader = Uploader(
        run=member.run,
        identity=member.identity,
        sequences=place.sequences,
        clock=member.clock,
        ingress=lambda: member.ingress,
        outbox=Outbox(place.part.submissions),
        receipts=ReceiptStore(place.part.receipts),
        session=place.session,
        log=place.log,
    )
    node = InferenceNode(
        member=member, engine=engine, puller=puller, uploader=uploader, environments=environments, log=place.log
    )
    await supervise(node, node.run(info), member.heartbeats(), puller.run_forever())


async def _validator(place: _Place) -> None:
    from node.validator import ValidatorNode

    member = place.member
    environments = load_environments(member.run, place.log)
    await member.join()
    puller = place.puller()
    node = ValidatorNode(
        member=member,
        puller=puller,
        environments=environments,
        session=place.session,
        threads=place.options.threads,
        log=place.log,
    )
    await supervise(node, node.run(), member.heartbeats(), puller.run_forever())


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
    await place.member.join(addresses=(url,))
    await supervise(node, node.run(), place.member.heartbeats())


async def supervise(role: Role, *parts: Awaitable[None]) -> None:
    """Run all parts until one ends; that one's error is the reason.

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
                raise reason
        raise NodeError("a part of this node ended without saying why; look into its log and report it")
    except asyncio.CancelledError:
        with contextlib.suppress(ProtocolError, TimeoutError):
            async with asyncio.timeout(0.8):
                await role.abandon("the node was stopped by its owner")
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def find_run(target: Target, host: HostProcess, home: Home, log: EventLog) -> Run:
    """The run's manifest, from disk if this home knows it, else from its coordinator.

    Raises:
        NodeError: nobody answered in time. ManifestError: what answered is another run.
    """
    if target.run is not None:
        known = home.path / "runs" / target.run.hex() / "manifest.hw"
        if known.exists():
            return open_manifest(known.read_bytes(), target.run)
    loop = asyncio.get_running_loop()
    end, backoff = loop.time() + FIND_DEADLINE_S, Backoff()
    told = False
    while True:
        problem = "the share code names no address"
        for address in target.addresses:
            try:
                run = await fetch_manifest(host, address, 10.0, target.run)
            except ManifestError:
                raise
            except ProtocolError as exc:
                problem = f"{address}: {exc}"
            else:
                write_atomic(home.run(run.id).path / "manifest.hw", run.envelope.raw)
                return run
        if loop.time() > end or not target.addresses:
            raise NodeError(
                f"no coordinator answered within {FIND_DEADLINE_S:.0f} s ({problem}); check that the run is up and "
                "the share code is current, and ask its operator if it is"
            )
        if not told:
            log.event("coordinator.away", kind="manifest", reason=problem)
            log.say("the coordinator does not answer yet; trying on")
            told = True
        await backoff.wait()


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
        run=run.id,
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
            log.event("environment.missing", name=spec.name, reason=problem)
    if not found:
        raise NodeError(f"this machine has none of the run's environments: {problem}")
    return found
