"""`trainer`: make a run, serve it, learn, and show it. Each subcommand imports what it needs when it runs.

Exit codes: 0 done, 1 ran and did not succeed, 2 could not start (usage, port, keys, lock), 130 interrupted
(`serve` by SIGTERM: 143; `learn` loses nothing by it: 0).
Errors go to stderr with cause, fix and who must act; with `--json` as one object {"error": {code, message}}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.commands import SayVersion, fail
from protocol.errors import HeadwaterError, ReasonCode, UsageError

if TYPE_CHECKING:
    from trainer.config import RunConfig

Command = Callable[[argparse.Namespace], int]

_EPILOG = """example: trainer demo --cheats all

see it             demo, then status
a run of your own  init; then, each in a terminal of its own: serve, learn, and `shardcast publish`
operate it         status --watch, key, block
check it           `verifier audit RUN`, which anybody can do from the files"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    command: Command | None = getattr(args, "run_command", None)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return command(args)
    except HeadwaterError as exc:
        could_not_start = exc.code in (ReasonCode.USAGE, ReasonCode.LEDGER_LOCKED)
        return fail(f"trainer {args.command}", exc, as_json=args.json, code=2 if could_not_start else 1)
    except OSError as exc:
        return fail(f"trainer {args.command}", exc, as_json=args.json)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer",
        description="Reinforcement learning from rollouts that were checked.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=SayVersion)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add(commands, "demo", _demo, "the whole system on this machine", "trainer demo --cheats all", None)
    about = "who does what in a run, and who waits for whom"
    _add(commands, "status", _status, about, "trainer status runs/first --watch", _status_arguments)
    _add(commands, "init", _init, "make a run directory", "trainer init runs/first --preset tiny", _init_arguments)
    _add(commands, "serve", _serve, "run the coordinator", "trainer serve runs/first/run.toml", _config_argument)
    _add(commands, "learn", _learn, "run the learner", "trainer learn runs/first/run.toml", _config_argument)
    _add(commands, "sft", _sft, "run the supervised stage alone", "trainer sft runs/first/run.toml", _config_argument)
    _add_keys(commands)
    _add(commands, "block", _block, "stop all traffic with an address", "trainer block 203.0.113.7 runs/first",
         _block_arguments)  # fmt: skip
    return parser


def _add(
    commands: Any,
    name: str,
    command: Command,
    about: str,
    example: str,
    arguments: Callable[[argparse.ArgumentParser], None] | None,
) -> None:
    sub = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"example: {example}"
    )
    if arguments is None:
        from trainer import demo

        demo.add_arguments(sub)
    else:
        arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    sub.set_defaults(run_command=command)


def _add_keys(commands: Any) -> None:
    sub = commands.add_parser(
        "key",
        help="change or take back keys of a run, or rows of its evidence",
        description="Change or take back keys of a run, or rows of its evidence. Needs the run's root key.",
        epilog="example: trainer key rotate origin runs/first --root /media/stick/root.pem",
    )
    sub.set_defaults(run_command=lambda args: _no_key_command(sub))
    actions = sub.add_subparsers(dest="action", metavar="ACTION")
    _add(actions, "rotate", _rotate, "give the run a new online key", "trainer key rotate origin runs/first",
         _rotate_arguments)  # fmt: skip
    _add(actions, "revoke", _revoke, "take a key back",
         "trainer key revoke 12D3KooW... runs/first --reason 'laptop stolen'", _revoke_arguments)  # fmt: skip
    _add(actions, "withdraw", _withdraw, "take back a row of evidence, and what it suspended nodes for",
         "trainer key withdraw proof_median runs/first --reason 'a louder GPU'", _withdraw_arguments)  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _no_key_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _rotate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=("coordinator", "origin", "transport"), help="which key")
    parser.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml")
    parser.add_argument("--root", type=Path, default=None, metavar="PATH", help="root key (default: RUN/keys/root.pem)")


def _revoke_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="PEER", help="peer id of the key")
    parser.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml")
    parser.add_argument("--reason", required=True, help="why, for everybody who looks at the run")
    parser.add_argument("--from", dest="index", type=int, default=None, metavar="N",
                        help="ledger entry from which its signatures don't count (default: the next)")  # fmt: skip
    parser.add_argument("--root", type=Path, default=None, metavar="PATH", help="root key (default: RUN/keys/root.pem)")


def _withdraw_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("statistic", metavar="STATISTIC", help="of the row, for example proof_median; or all")
    parser.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml")
    parser.add_argument("--reason", required=True, help="why, for everybody who looks at the run")
    parser.add_argument("--root", type=Path, default=None, metavar="PATH", help="root key (default: RUN/keys/root.pem)")


def _block_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="IP address or network, for example 203.0.113.0/24")
    parser.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml")
    parser.add_argument("--undo", action="store_true", help="allow the address again")


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="RUN.TOML", help="run.toml of the run, or its directory")


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml; live or stopped")
    parser.add_argument("--watch", action="store_true", help="keep looking until the run is over (Ctrl-C ends it)")


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    from trainer.demo import ENVIRONMENTS_HELP

    parser.add_argument("dir", type=Path, metavar="DIR", help="where the run goes; must hold none yet")
    parser.add_argument("--preset", default="tiny", choices=("tiny", "smollm2"), help="model and its settings")
    parser.add_argument("--profile", default="fp32", choices=("fp32", "bf16"), help="what nodes compute in")
    parser.add_argument("--steps", type=int, default=None, help="optimiser steps (default: the preset's)")
    parser.add_argument("--environments", default=None, metavar="A,B", help=ENVIRONMENTS_HELP)
    parser.add_argument("--seed", type=int, default=0, help="the learner's seed")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="IP", help="this machine's address for members (default: 127.0.0.1)"
    )
    parser.add_argument("--control-port", type=int, default=None, help="libp2p port (default: a free one)")
    parser.add_argument("--ingress-port", type=int, default=None, help="HTTP port (default: a free one)")
    parser.add_argument("--origin-port", type=int, default=None, help="port of the origin (default: a free one)")
    parser.add_argument("--validator", action="append", default=[], metavar="PEER", help="peer id to admit; repeatable")
    parser.add_argument("--relay", action="append", default=[], metavar="PEER", help="peer id to admit; repeatable")


def _init(args: argparse.Namespace) -> int:
    from protocol.errors import ProtocolError
    from protocol.identity import parse_peer_id
    from trainer import preflight
    from trainer.init import make_run

    preflight.init(args.preset, args.dir)
    try:
        validators = [parse_peer_id(text) for text in args.validator]
        relays = [parse_peer_id(text) for text in args.relay]
    except ProtocolError as exc:
        raise UsageError(f"--validator and --relay take peer ids (`node id` prints one): {exc}") from exc
    run = make_run(
        args.dir,
        preset=args.preset,
        profile=args.profile,
        steps=args.steps,
        environment=args.environments,
        seed=args.seed,
        host=args.host,
        control_port=args.control_port,
        ingress_port=args.ingress_port,
        origin_port=args.origin_port,
        validators=validators,
        relays=relays,
    )
    if args.json:
        sys.stdout.write(json.dumps({"run": run.id.hex(), "directory": str(args.dir)}) + "\n")
        return 0
    sys.stdout.write(
        f"made run {run.id.hex()} in {args.dir}\n"
        f"  share code       {(args.dir / 'join.hw').read_text(encoding='utf-8').strip()}\n"
        f"                   (also in {args.dir}/join.hw)\n"
        f"  keep offline     {args.dir}/keys/root.pem\n"
        "next, each in a terminal of its own:\n"
        f"  trainer serve {args.dir}/run.toml\n"
        f"  trainer learn {args.dir}/run.toml\n"
        f"  shardcast publish {args.dir}\n"
    )
    if not validators:
        sys.stdout.write(
            "no validator is admitted yet, so nothing can be accepted: run `node id --home DIR` where it will run, "
            f"and put the peer id into {args.dir}/run.toml, [grants] validators, before `trainer serve`\n"
        )
    return 0


def _rotate(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import keys

    done = keys.rotate(config, args.role, args.root)
    if args.json:
        sys.stdout.write(json.dumps(done) + "\n")
        return 0
    sys.stdout.write(
        f"the run's {done['role']} key is now {done['peer_id']}\n"
        f"  key file  {done['file']}\n  next      {done['next']}\n"
    )
    return 0


def _revoke(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import keys

    done = keys.revoke(config, args.peer, args.reason, args.root, args.index)
    if args.json:
        sys.stdout.write(json.dumps(done) + "\n")
        return 0
    sys.stdout.write(f"{done['peer_id']} is revoked from ledger entry {done['from']} on\n  next  {done['next']}\n")
    return 0


def _withdraw(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import keys

    done = keys.withdraw(config, args.statistic, args.reason, args.root)
    if args.json:
        sys.stdout.write(json.dumps(done) + "\n")
        return 0
    left = ", ".join(done["left"]) or "nothing"
    sys.stdout.write(f"withdrawn: {', '.join(done['withdrawn'])}; the run goes on summing up {left}\n")
    sys.stdout.write(f"  next  {done['next']}\n")
    return 0


def _block(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import blocking

    blocked = blocking.change(config.run_dir, args.address, undo=args.undo)
    if args.json:
        sys.stdout.write(json.dumps({"blocked": blocked}) + "\n")
        return 0
    sys.stdout.write(
        f"blocked: {', '.join(blocked) or 'nobody'}\n"
        "a running `trainer serve` follows within seconds, members drop relays there with their next heartbeat\n"
    )
    return 0


def _load(args: argparse.Namespace) -> RunConfig:
    from trainer import config

    return config.load(args.config)


def _serve(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import coordinator, preflight

    preflight.serve(config.model.preset, config.run_dir)
    return coordinator.main(config, as_json=args.json)


def _learn(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import learner, preflight

    preflight.learn(config.model.preset, config.run_dir)
    return learner.main(config, as_json=args.json)


def _sft(args: argparse.Namespace) -> int:
    config = _load(args)
    from trainer import sft

    return sft.main(config, as_json=args.json)


def _demo(args: argparse.Namespace) -> int:
    from trainer import demo

    return demo.main(args)


def _status(args: argparse.Namespace) -> int:
    from trainer import show

    return show.show(_load(args).run_dir, watch=args.watch, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
