"""One machine of a weights tree as a process, for `benchmarks.shardcast`; ends when its standard input does.

    python -m benchmarks.data.shardcast_role origin RUN [--listen HOST:PORT]
    python -m benchmarks.data.shardcast_role relay MANIFEST STORE --source KEY@URL ... [--listen HOST:PORT]
    python -m benchmarks.data.shardcast_role pull MANIFEST STORE --source KEY@URL ... [--wait]

KEY is the parent's public key in hex, empty for none. Prints one JSON object a line, times of the monotonic clock:

    {"event": "ready", "url", "key"}             it serves, or would pull; with --wait it pulls from the next line of
                                                 standard input on
    {"event": "first", "t"}                      the first verified shard is here
    {"event": "progress", "bytes"}               four times a second
    {"event": "whole", "t", "file", "received", "reports", "problems"}

`reports` are the keys of relays that it complained about, `problems` the reason of the
last trouble with each source.

Not covered: roles of a real run, which the coordinator sends to their parents (`node.relay`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from protocol.errors import ProtocolError
from protocol.heap import settle_heap
from protocol.identity import Identity, load_identity
from protocol.manifest import open_manifest
from protocol.records import RelayReport
from shardcast.codecs import Codec
from shardcast.origin import Origin
from shardcast.passes import Parent
from shardcast.puller import Puller
from shardcast.relay import RelayServer

_LOOK_S = 0.01
_PROGRESS_S = 0.25


def say(event: str, **table: object) -> None:
    print(json.dumps({"event": event, **table}), flush=True)


async def next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line of standard input; empty at its end. The harness ends this process, whatever happens."""
    with suppress(ValueError):
        return await reader.readline()
    return b""


def parent(text: str) -> Parent:
    """`KEY@URL`."""
    key, _, url = text.partition("@")
    return Parent(url, bytes.fromhex(key))


async def origin(args: argparse.Namespace, stdin: asyncio.StreamReader) -> None:
    # The weights are random: nothing shortens them, and looking for a way to is another benchmark's.
    identity = load_identity(args.run / "keys" / "origin.pem")
    server = Origin(args.run, identity=identity, listen=args.listen, codec=Codec.RAW)
    await server.start()
    work = asyncio.create_task(server.run_forever())
    say("ready", url=server.server.url, key=server.run.manifest.origin.hex())
    await _until_over(work, stdin)
    await server.close()


async def relay(args: argparse.Namespace, stdin: asyncio.StreamReader) -> None:
    run, identity = open_manifest(args.manifest.read_bytes()), Identity.generate()
    args.store.mkdir(parents=True, exist_ok=True)
    reports: list[RelayReport] = []
    sources = [parent(text) for text in args.source]
    server = RelayServer(run, sources, args.listen, args.store, identity, report=reports.append)
    await server.start()
    say("ready", url=server.url, key=identity.public.hex())
    if args.wait:
        await next_line(stdin)
    work = asyncio.create_task(server.run_forever())
    watch = asyncio.create_task(_watch_relay(server, reports))
    await _until_over(work, stdin)
    watch.cancel()
    await server.close()


async def _watch_relay(server: RelayServer, reports: list[RelayReport]) -> None:
    """Say when the first shard and when all of the first publication can be had here."""
    first, told = False, time.monotonic()
    while True:
        feed = server.store.newest(None)
        if feed is not None and feed.shards and not first:
            first = True
            say("first", t=time.monotonic())
        if feed is not None and feed.complete:
            break
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            say("progress", bytes=sum(record.raw_bytes for record in feed.shards.values()) if feed else 0)
        await asyncio.sleep(_LOOK_S if not first else 4 * _LOOK_S)
    _say_whole("", server.bytes_received, reports, server.problems)


async def pull(args: argparse.Namespace, stdin: asyncio.StreamReader) -> None:
    run = open_manifest(args.manifest.read_bytes())
    reports: list[RelayReport] = []
    sources = [parent(text) for text in args.source]
    puller = Puller(run, lambda: sources, args.store, report=reports.append)
    say("ready", url="", key="")
    if args.wait:
        await next_line(stdin)
    work = asyncio.create_task(puller.run_forever())
    watch = asyncio.create_task(_watch_puller(puller, reports))
    await _until_over(work, stdin)
    watch.cancel()


async def _watch_puller(puller: Puller, reports: list[RelayReport]) -> None:
    first, told = False, time.monotonic()
    while puller.current is None:
        done = (puller.progress or (0, 0))[0]
        if done and not first:
            first = True
            say("first", t=time.monotonic())
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            say("progress", bytes=done)
        await asyncio.sleep(_LOOK_S)
    if not first:
        say("first", t=time.monotonic())
    _say_whole(str(puller.current.directory / "model.safetensors"), puller.bytes_received, reports, puller.problems)


def _say_whole(file: str, received: int, reports: list[RelayReport], problems: Mapping[str, ProtocolError]) -> None:
    told = {address: error.code.value for address, error in problems.items()}
    blamed = sorted({report.relay.hex() for report in reports})
    say("whole", t=time.monotonic(), file=file, received=received, reports=blamed, problems=told)


async def _until_over(work: asyncio.Task[None], stdin: asyncio.StreamReader) -> None:
    """Until standard input ends, or the work fails."""
    end = asyncio.create_task(_end_of(stdin))
    await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
    for task in (work, end):
        task.cancel()
    for result in await asyncio.gather(work, end, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _end_of(stdin: asyncio.StreamReader) -> None:
    while await next_line(stdin):
        pass


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(required=True)
    for name, work in (("origin", origin), ("relay", relay), ("pull", pull)):
        role = roles.add_parser(name)
        role.set_defaults(work=work)
        if name == "origin":
            role.add_argument("run", type=Path)
        else:
            role.add_argument("manifest", type=Path)
            role.add_argument("store", type=Path)
            role.add_argument("--source", action="append", required=True)
            role.add_argument("--wait", action="store_true")
        role.add_argument("--listen", default="127.0.0.1:0")
    return parser.parse_args()


async def _main(args: argparse.Namespace) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await args.work(args, reader)


if __name__ == "__main__":
    settle_heap()
    asyncio.run(_main(_arguments()))
