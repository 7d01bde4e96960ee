"""The command `shardcast`: publish a run's checkpoints, relay, pull, and ask for the state of either.

Exit codes: 0 done, 1 something does not hold (a fork, a checkpoint that must not be published), 2 usage or
environment, 130 interrupted. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import tomllib
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from protocol.commands import SayVersion, fail
from protocol.errors import EnvelopeError, HeadwaterError, ProtocolError, ReasonCode, UsageError
from protocol.heap import settle_heap

EXAMPLES = """examples:
  shardcast publish RUN                                publish RUN/checkpoints as they appear
  shardcast relay --manifest RUN/manifest.hw --source http://HOST:PORT --store DIR --listen 127.0.0.1:8101
  shardcast pull --manifest RUN/manifest.hw --source http://HOST:PORT --store DIR --once
  shardcast status RUN --json
  shardcast status http://HOST:PORT --manifest RUN/manifest.hw
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s"
    )
    try:
        settle_heap()
        return asyncio.run(_until_signalled(args.command(args)))
    except KeyboardInterrupt:
        return 130
    except HeadwaterError as exc:
        code = 2 if isinstance(exc, UsageError) else 1
        return fail(f"shardcast {args.name_of_command}", exc, as_json=args.json, code=code)
    except OSError as exc:
        return fail(f"shardcast {args.name_of_command}", exc, as_json=args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardcast",
        description="Weights down the tree: signed, hashed, cut-through.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=SayVersion)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object per line, for programs")
    common.add_argument("--verbose", action="store_true", help="log what happens to stderr")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name_of_command")

    def add(name: str, command: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            parents=[common],
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    publish = add("publish", _publish, "publish a run directory's checkpoints and serve them")
    publish.add_argument("run", type=Path, metavar="RUN", help="run directory, from `trainer init`")
    publish.add_argument("--listen", help="HOST:PORT; default: [origin] listen of run.toml, else 127.0.0.1:0")
    publish.add_argument("--key", type=Path, help="origin key file; default: the one in RUN/keys that the run names")
    publish.add_argument(
        "--open",
        action="store_true",
        help="serve whoever asks; default: [origin] open of run.toml, else only nodes that the coordinator sends here",
    )

    relay = add("relay", _relay, "pull from sources and serve each shard as soon as it is verified")
    _add_sources(relay)
    relay.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT (default %(default)s)")
    relay.add_argument("--key", type=Path, help="identity key file; default STORE/relay.pem, made if missing")
    relay.add_argument("--keep", type=int, default=8, help="publications kept (default %(default)s)")

    pull = add("pull", _pull, "keep the newest policy as a verified model directory")
    _add_sources(pull)
    pull.add_argument("--keep", type=int, default=4, help="policies kept (default %(default)s)")
    pull.add_argument("--once", action="store_true", help="stop after the first policy")
    pull.add_argument("--deadline", type=float, default=60.0, help="seconds to wait with --once (default %(default)s)")

    status = add("status", _status, "what a run directory or a server has published")
    status.add_argument("place", metavar="RUN|URL", help="run directory, or address of an origin or relay")
    status.add_argument("--manifest", type=Path, help="manifest.hw of the run (needed for a URL)")
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest", type=Path, required=True, help="manifest.hw of the run")
    parser.add_argument("--source", action="append", required=True, help="http://HOST:PORT to pull from; repeat it")
    parser.add_argument("--store", type=Path, required=True, help="folder for blobs and publications")


async def _until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """Run until done, or cancel cleanly on SIGTERM and SIGINT."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


def _say(args: argparse.Namespace, text: str, **table: object) -> None:
    print(json.dumps(table) if args.json else text, flush=True)  # noqa: T201


ORIGIN_LISTEN = "127.0.0.1:4803"
"""Where the coordinator expects the origin when run.toml does not say; another default here and nobody finds it."""


def _serving(run_dir: Path) -> tuple[str, bool]:
    """Where to listen and whether everybody is served: `[origin] listen` and `open` of run.toml, or their defaults.

    Without a run.toml: any free port, open to all, since no coordinator is there that could hand out passes.

    Raises:
        UsageError: run.toml is no TOML, or its [origin] holds a key we don't know.
    """
    path = run_dir / "run.toml"
    if not path.exists():
        return "127.0.0.1:0", True
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is no valid TOML ({exc}); whoever edits this file must correct it") from exc
    origin = table.get("origin", {})
    unknown = sorted(set(origin) - {"listen", "open"}) if isinstance(origin, dict) else ["origin"]
    if unknown:
        raise UsageError(f"{path}: origin.{unknown[0]}: unknown key. Whoever edits this file must correct it")
    listen, everybody = origin.get("listen", ORIGIN_LISTEN), origin.get("open", False)
    if not isinstance(listen, str):
        raise UsageError(f"{path}: [origin] listen must be text like '127.0.0.1:8100'")
    if not isinstance(everybody, bool):
        raise UsageError(f"{path}: [origin] open must be true or false")
    return listen, everybody


async def _publish(args: argparse.Namespace) -> int:
    from protocol.identity import load_identity
    from protocol.run_files import key_file
    from shardcast.origin import Origin, load_run

    key = args.key or key_file(args.run, "origin", load_run(args.run).manifest.origin)
    listen, everybody = _serving(args.run)
    origin = Origin(
        args.run,
        identity=load_identity(key),
        listen=args.listen or listen,
        open_to_all=everybody or args.open,
    )
    try:
        await origin.start()
        _say(args, f"publishing {args.run} at {origin.server.url}", url=origin.server.url)
        await origin.run_forever()
    finally:
        await origin.close()
    return 0


async def _relay(args: argparse.Namespace) -> int:
    from protocol.identity import load_or_create_identity
    from shardcast.relay import RelayServer

    args.store.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(args.key or args.store / "relay.pem")
    relay = RelayServer(_run(args), args.source, args.listen, args.store, identity, keep=args.keep)
    try:
        await relay.start()
        _say(args, f"relaying at {relay.url}", url=relay.url)
        following = asyncio.create_task(relay.run_forever())
        while not following.done():
            await asyncio.wait([following], timeout=1.0)
            _give_up_if_refused(relay.problems, args.source)
        following.result()
    finally:
        await relay.close()
    return 0


def _give_up_if_refused(problems: Mapping[str, ProtocolError], sources: list[str]) -> None:
    """Raise the refusal once every source named by hand has refused us: asking again changes nothing."""
    refused = [problems[source] for source in sources if source in problems]
    if len(refused) == len(sources) and all(error.code == ReasonCode.NOT_GRANTED for error in refused):
        raise refused[0]


async def _pull(args: argparse.Namespace) -> int:
    from shardcast.puller import Puller

    puller = Puller(_run(args), lambda: args.source, args.store, keep=args.keep)
    following = asyncio.create_task(puller.run_forever())
    after: tuple[int, int] | None = None
    try:
        while True:
            waiting = asyncio.create_task(puller.wait_newer(after, args.deadline if args.once else 1e9))
            try:
                while not waiting.done() and not following.done():
                    await asyncio.wait({following, waiting}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                    _give_up_if_refused(puller.problems, args.source)
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)  # what stops the puller ends both
            if following.done():
                following.result()
            policy = waiting.result()
            after = policy.key
            _say(
                args,
                f"epoch {policy.epoch} step {policy.step} root {policy.root.hex()[:16]} in {policy.directory}",
                epoch=policy.epoch,
                step=policy.step,
                root=policy.root.hex(),
                directory=str(policy.directory),
            )
            if args.once:
                return 0
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _status(args: argparse.Namespace) -> int:
    from protocol.envelope import open_envelope
    from shardcast.errors import SourceError
    from shardcast.records import HEAD_KIND, Head

    place: str = args.place
    count: int | None = None
    stats: dict[str, int] = {}
    if place.startswith(("http://", "https://")):
        from shardcast.source import Source, new_session

        if args.manifest is None:
            raise UsageError("status of a URL needs --manifest RUN/manifest.hw, so that its head can be checked")
        run = _run(args)
        try:
            async with new_session() as session:
                source = Source(session, place, run.id)
                raw, stats = await source.head(), await source.stats()
        except SourceError as exc:
            raise SourceError(
                exc.address,
                f"{str(exc).removeprefix(f'{exc.address}: ')}. Check the address and that this machine may connect to "
                "it; whoever runs that server must start it",
                exc.code,
            ) from exc
    else:
        from shardcast.origin import load_run
        from shardcast.store import published_heads

        run = load_run(Path(place))
        heads = published_heads(Path(place) / "published", run) if (Path(place) / "published").is_dir() else []
        count = len(heads)
        raw = heads[-1][0] if heads else None
    health = f"\n{_in_words(stats)}" if stats else ""
    if raw is None:
        _say(args, f"nothing is published yet{health}", published=0, **stats)
        return 0
    envelope = open_envelope(raw, run=run.id, kind=HEAD_KIND)
    if envelope.signer not in run.origins:
        raise EnvelopeError("the newest head is not signed by the run's origin; whoever serves it must explain")
    head = envelope.record(Head)
    text = f"newest: epoch {head.epoch} step {head.step} root {head.root.hex()[:16]}"
    stats = {name: value for name, value in stats.items() if name not in ("epoch", "step")}
    table: dict[str, object] = {"epoch": head.epoch, "step": head.step, "root": head.root.hex()}
    if count is not None:
        text += f", {count} published"
        table["published"] = count
    _say(args, text + health, signed_at=envelope.issued_at, **stats, **table)
    return 0


def _in_words(stats: dict[str, int]) -> str:
    """What a server says of itself; nobody vouches for it."""
    sent = stats.get("bytes_sent", 0)
    return (
        f"serves {stats.get('children', 0)} children, {stats.get('lag', 0)} steps behind, {sent / 1e6:.1f} MB sent, "
        f"{stats.get('shards_sent', 0)} shards since its start, {stats.get('stamps', 0)} stamped, "
        f"{stats.get('refused', 0)} requests refused"
    )


def _run(args: argparse.Namespace) -> Any:
    from protocol.manifest import open_manifest
    from shardcast.store import read_bounded

    try:
        return open_manifest(read_bounded(args.manifest, 1 << 20))
    except FileNotFoundError as exc:
        raise UsageError(f"{args.manifest} does not exist; take manifest.hw from the run's directory") from exc


if __name__ == "__main__":
    sys.exit(main())
