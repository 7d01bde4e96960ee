"""The command `shardcast`: publish checkpoints, relay, pull, and ask for the state of either; of runs and of shares.

Exit codes: 0 done, 1 something does not hold (a fork, a checkpoint that must not be published), 2 usage or
environment, 130 interrupted. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from protocol.commands import SayVersion, fail
from protocol.errors import HeadwaterError, UsageError
from protocol.heap import return_large_blocks, settle_heap

EXAMPLES = """examples:
  shardcast publish CHECKPOINTS --listen 203.0.113.5:8100      any folder of safetensors; prints a code
  shardcast pull CODE models/                                  the newest, verified, in models/latest
  shardcast relay CODE --listen 203.0.113.9:8100               pass it on; prints a code with this relay first
  shardcast publish RUN                                        a run's checkpoints as they appear
  shardcast relay --manifest RUN/manifest.hw --source http://HOST:PORT --store DIR --listen 127.0.0.1:8101
  shardcast pull --manifest RUN/manifest.hw --source http://HOST:PORT --store DIR --once
  shardcast status RUN --json
  shardcast status http://HOST:PORT --manifest RUN/manifest.hw
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name need not be text
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s"
    )
    try:
        return_large_blocks()
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

    publish = add("publish", _publish, "publish a folder of checkpoints, or a run directory, and serve it")
    publish.add_argument("run", type=Path, metavar="DIR", help="checkpoints (safetensors), or a run directory")
    publish.add_argument("--listen", help="HOST:PORT; default: [origin] listen of run.toml, else 127.0.0.1:0")
    publish.add_argument("--key", type=Path, help="run: origin key file; default: the one in DIR/keys that it names")
    publish.add_argument(
        "--open",
        action="store_true",
        help="run: serve whoever asks; default: [origin] open of run.toml, else only whom the coordinator sends here",
    )
    publish.add_argument(
        "--store", type=Path, help="folder: where key and publications are kept; default DIR/.shardcast"
    )
    publish.add_argument("--name", default="", help="folder: what the share is called; default: the folder's name")
    publish.add_argument("--all", action="store_true", help="folder: also the older of the checkpoints there at first")
    publish.add_argument(
        "--codec", choices=("gaps", "classes", "raw"), default="gaps", help="folder: how steps are coded"
    )
    _add_announced(publish)
    _add_retention(publish)
    _add_limits(publish)

    relay = add("relay", _relay, "pull from sources and serve each shard as soon as it is verified")
    relay.add_argument("code", nargs="?", metavar="CODE", help="code of a share, or a file that holds it")
    _add_sources(relay)
    relay.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT (default %(default)s)")
    relay.add_argument("--key", type=Path, help="identity key file; default STORE/relay.pem, made if missing")
    relay.add_argument("--keep", type=int, default=8, help="publications kept (default %(default)s)")
    _add_announced(relay)
    _add_retention(relay)
    _add_limits(relay)

    pull = add("pull", _pull, "fetch the newest checkpoint as a verified model directory, and keep it newest")
    pull.add_argument("code", nargs="?", metavar="CODE", help="code of a share, or a file that holds it")
    pull.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="where to; the newest is DIR/latest")
    _add_sources(pull)
    pull.add_argument("--keep", type=int, default=4, help="checkpoints kept (default %(default)s)")
    pull.add_argument("--key", type=Path, help="identity key file to show to servers with a list (--allow)")
    until = pull.add_mutually_exclusive_group()
    until.add_argument("--once", action="store_true", help="stop after the first; default with CODE")
    until.add_argument("--follow", action="store_true", help="go on with each newer one; default with --manifest")
    until.add_argument("--step", type=int, metavar="N", help="fetch this step of a share, maybe an older one (--pin)")
    pull.add_argument(
        "--deadline", type=float, default=60.0, help="seconds without news to wait for (default %(default)s)"
    )

    status = add("status", _status, "what a folder, a run directory or a server has published")
    status.add_argument("place", metavar="DIR|URL|CODE", help="folder, run directory, address of a server, or code")
    status.add_argument("--manifest", type=Path, help="manifest.hw of the run (needed for a URL of a run)")
    status.add_argument("--allow-private", action="store_true", help=_PRIVATE)
    return parser


_PRIVATE = "connect to private addresses that a code names"


def _add_sources(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("a run instead of a code")
    run.add_argument("--manifest", type=Path, help="manifest.hw of the run")
    run.add_argument("--source", action="append", help="http://HOST:PORT to pull from; repeat it")
    run.add_argument("--store", type=Path, help="folder for blobs and publications; for a relay of a code, too")
    parser.add_argument("--down", metavar="RATE", help="download at most this much, e.g. 50MB/s")
    parser.add_argument("--allow-private", action="store_true", help=_PRIVATE)


def _add_announced(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--announce", action="append", default=[], metavar="URL", help="address that the code names")
    parser.add_argument(
        "--cache", action="append", default=[], metavar="URL", help="HTTP cache that the code names first"
    )


def _add_retention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-bytes", metavar="SIZE", help="remove the oldest beyond this much, e.g. 20G")
    parser.add_argument("--pin", action="append", type=int, default=[], metavar="STEP", help="never remove this step")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--up", metavar="RATE", help="upload at most this much, e.g. 50MB/s")
    limits.add_argument("--quota", metavar="SIZE", help="bytes a day for each network (/24, /48), e.g. 100GB/day")
    limits.add_argument(
        "--allow", action="append", default=[], metavar="WHO", help="serve only this address, network, peer id, or file"
    )
    limits.add_argument("--tls", action="store_true", help="serve over TLS; a certificate is made, the code names it")
    limits.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate to serve with; needs --tls-key")
    limits.add_argument("--tls-key", type=Path, metavar="PEM", help="its key")


async def _publish(args: argparse.Namespace) -> int:
    from shardcast import run_commands, share_commands

    # What is no folder at all gets the run's message, which names the way to either.
    as_run = (args.run / "manifest.hw").exists() or (args.run / "run.toml").exists() or not args.run.is_dir()
    return await (run_commands.publish_run if as_run else share_commands.publish_folder)(args)


async def _relay(args: argparse.Namespace) -> int:
    from shardcast import run_commands, share_commands

    if args.code is not None:
        return await share_commands.relay_share(args)
    _need(args, "manifest", "source", "store")
    return await run_commands.relay_run(args)


async def _pull(args: argparse.Namespace) -> int:
    from shardcast import run_commands, share_commands

    if args.code is not None:
        if args.directory is None:
            raise UsageError("say where to: shardcast pull CODE DIR")
        return await share_commands.pull_share(args)
    _need(args, "manifest", "source", "store")
    return await run_commands.pull_run(args)


async def _status(args: argparse.Namespace) -> int:
    from shardcast import run_commands, share_commands

    of_share = args.manifest is None and share_commands.is_share(args.place)
    return await (share_commands.status_share if of_share else run_commands.status_run)(args)


def _need(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError unless a command without a code has what stands for one."""
    missing = [f"--{name}" for name in names if not getattr(args, name)]
    if missing:
        raise UsageError(f"give the code of a share, or for a run: {', '.join(missing)}")


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


if __name__ == "__main__":
    sys.exit(main())
