"""The `node` command: join a run, and look after one machine.

Starting it imports nothing heavy: `--help`, `id` and `status` answer without torch, transformers or libp2p.
Arguments that are not ours are Node.js's (`handover`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from node.errors import NodeError
from node.handover import hand_over
from node.home import DEFAULT
from protocol.commands import fail
from protocol.errors import HeadwaterError, UsageError

COMMANDS = ("join", "id", "status", "receipts", "doctor", "plant")
ROLES = ("inference", "relay", "validator")

_EPILOG = """examples:
  node join --role inference --run hw1abc...     lend this machine to a run
  node status                                    what it is doing, and whom it waits for
  node receipts --ledger RUN                     whether the run kept what it promised
Anything else (`node app.js`, `node --version`) goes to Node.js."""


def main() -> int:
    argv = sys.argv[1:]
    if not argv or argv[0] not in (*COMMANDS, "--help"):
        hand_over(argv)
    args = build_parser().parse_args(argv)
    try:
        code: int = args.command(args)
    except NodeError as exc:
        return fail(f"node {args.name_of_command}", exc, as_json=args.json, code=exc.exit_code)
    except HeadwaterError as exc:
        code = 2 if isinstance(exc, UsageError) else 1
        return fail(f"node {args.name_of_command}", exc, as_json=args.json, code=code)
    except OSError as exc:
        return fail(f"node {args.name_of_command}", exc, as_json=args.json)
    except KeyboardInterrupt:
        return 130
    return code


def build_parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="node", description="One machine of a headwater run.", epilog=_EPILOG, formatter_class=form
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="name_of_command")

    join = commands.add_parser(
        "join",
        help="join a run with a role and work until it ends",
        formatter_class=form,
        epilog="example: node join --role inference --run RUN/join.hw --home ~/.headwater",
    )
    join.add_argument("--role", required=True, choices=ROLES)
    join.add_argument(
        "--run", required=True, metavar="CODE|MULTIADDR|FILE", help="which run: what its operator gave you"
    )
    _home(join)
    join.add_argument("--name", default="", help="what people see; not an identity (default: the host's name)")
    join.add_argument("--engine-socket", type=Path, metavar="PATH", help="use the engine that listens here instead")
    join.add_argument("--engine-later", action="store_true", help="that engine may start after this node")
    join.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of the model (default 1)")
    join.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where a relay serves (default 127.0.0.1:0)",
    )
    join.add_argument("--yes", action="store_true", help="join without asking when only an address was given")
    join.add_argument("--log", type=Path, metavar="FILE", help="write events there instead of stderr")
    join.add_argument("--json", action="store_true", help="events as JSON lines on stdout, for programs")
    join.set_defaults(command=_join)

    ident = commands.add_parser("id", help="print this node's peer id", epilog="example: node id --home ~/.headwater")
    _home(ident)
    ident.add_argument("--json", action="store_true")
    ident.set_defaults(command=_id)

    status = commands.add_parser("status", help="what a home's node is doing", epilog="example: node status --json")
    _home(status)
    status.add_argument("--json", action="store_true")
    status.set_defaults(command=_status)

    receipts = commands.add_parser(
        "receipts",
        help="the coordinator's promises, checked against an archive",
        epilog="example: node receipts --home ~/.headwater --ledger RUN",
    )
    _home(receipts)
    receipts.add_argument("--ledger", type=Path, metavar="RUN", help="a run directory with a sealed ledger")
    receipts.add_argument("--json", action="store_true")
    receipts.set_defaults(command=_receipts)

    doctor = commands.add_parser("doctor", help="check that this machine can join", epilog="example: node doctor")
    _home(doctor)
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command=_doctor)

    plant = commands.add_parser(
        "plant",
        help="work as the phantoms of a run you serve: jobs with a known answer, which check its validators",
        epilog="example: node plant RUN/run.toml",
    )
    plant.add_argument("config", type=Path, metavar="RUN", help="run directory, or its run.toml")
    plant.add_argument("--home", type=Path, metavar="DIR", help="the phantoms' homes (default: in the run's state)")
    plant.add_argument("--engine-socket", type=Path, metavar="PATH", help="use the engine that listens here instead")
    plant.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of the model (default 1)")
    plant.add_argument(
        "--pause", type=float, default=90.0, metavar="S", help="longest wait until the next one joins (default 90)"
    )
    plant.add_argument("--log", type=Path, metavar="FILE", help="write events there instead of stderr")
    plant.add_argument("--json", action="store_true", help="events as JSON lines on stdout, for programs")
    plant.set_defaults(command=_plant)
    return parser


def _home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", type=Path, default=DEFAULT, metavar="DIR", help=f"keys and state (default {DEFAULT})")


def _join(args: argparse.Namespace) -> int:
    from node.join import run_join
    from node.options import JoinOptions

    return run_join(
        JoinOptions(
            role=args.role,
            run=args.run,
            home=args.home,
            name=args.name,
            engine_socket=args.engine_socket,
            engine_later=args.engine_later,
            threads=args.threads,
            listen=args.listen,
            yes=args.yes,
            log=args.log,
            as_json=args.json,
        )
    )


def _id(args: argparse.Namespace) -> int:
    from node.home import Home

    identity = Home(args.home).identity()
    print(json.dumps({"peer_id": identity.peer_id, "key": identity.public.hex()}) if args.json else identity.peer_id)  # noqa: T201
    return 0


def _status(args: argparse.Namespace) -> int:
    from node.status import show_status

    return show_status(args.home, as_json=args.json)


def _receipts(args: argparse.Namespace) -> int:
    from node.receipt_check import show_receipts

    return show_receipts(args.home, ledger=args.ledger, as_json=args.json)


def _doctor(args: argparse.Namespace) -> int:
    from node.doctor import examine

    return examine(args.home, as_json=args.json)


def _plant(args: argparse.Namespace) -> int:
    from node.plant import PlantOptions, run_plant

    return run_plant(
        PlantOptions(
            config=args.config,
            home=args.home,
            engine_socket=args.engine_socket,
            threads=args.threads,
            pause_s=args.pause,
            log=args.log,
            as_json=args.json,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
