"""`verifier`: check a run's archive, list its ledger, explain a reason, measure honest noise.

Exit codes: 0 all hold, 1 something does not, 2 could not check (usage, unreadable files), 130 or 143 stopped.
Errors go to stderr with cause, fix and who must act. Each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol.commands import SayVersion, fail
from protocol.errors import HeadwaterError, UsageError
from verifier import stopping

Command = Callable[[argparse.Namespace], int]

_EPILOG = """examples:
  verifier audit runs/first                    check everything; nothing is written there
  verifier audit runs/first --run hw1...       and that it is the run whose share code you hold
  verifier audit runs/first --fraction 0.1     a tenth of the rollouts, all of the rest
                                               (stopped? the same command goes on)
  verifier explain token-not-forced            what a rejection means, and what to do"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    if argv is None:
        stopping.listen()
    parser = _parser()
    args = parser.parse_args(argv)
    command: Command | None = getattr(args, "run_command", None)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code = command(args)
        return stopping.heard() or code
    except HeadwaterError as exc:
        return fail(f"verifier {args.command}", exc, as_json=args.json, code=2)
    except OSError as exc:
        return fail(f"verifier {args.command}", exc, as_json=args.json, code=2)
    except KeyboardInterrupt:
        return 130


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verifier",
        description="Is this run honest? Checks rollouts, verdicts, weights and ledger from files alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=SayVersion)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, command: Command, about: str, example: str) -> argparse.ArgumentParser:
        text = f"{about[0].upper()}{about[1:]}."
        sub = commands.add_parser(name, help=about, description=text, epilog=f"example: {example}")
        sub.add_argument("--json", action="store_true", help="print JSON, for programs")
        sub.set_defaults(run_command=command)
        return sub

    sub = add("audit", _audit, "check a run's archive offline", "verifier audit runs/first --run hw1...")
    sub.add_argument("path", type=Path, metavar="RUN", help="run directory; nothing is written into it")
    files: dict[str, Any] = {"type": Path, "action": "append", "default": [], "metavar": "FILE"}
    sub.add_argument("--run", metavar="CODE", help="it must be this run: share code, file with one, or id")
    sub.add_argument("--receipt", **files, help="its ledger must keep this: HOME/runs/ID/receipts/*.hw; repeatable")
    sub.add_argument("--head", **files, help="its ledger must begin as signed here: HOME/runs/ID/head.hw; repeatable")
    sub.add_argument("--rollout", default="", metavar="ID", help="derive only this one: <lease id>:<task>:<sample>")
    sub.add_argument("--fraction", type=_share, default=1.0, metavar="P", help="share of submissions to derive again")
    sub.add_argument("--seed", type=_hex, default="", metavar="HEX", help="with --fraction: repeat an earlier draw")
    sub.add_argument(
        "--jobs", type=_count, default=0, metavar="N", help="processes (default: one a core, if memory allows)"
    )
    sub.add_argument(
        "--state", type=Path, metavar="FILE", help="keep what is derived here until done (default: a cache)"
    )

    sub = add("ledger", _ledger, "list a run's ledger", "verifier ledger runs/first | less")
    sub.add_argument("path", type=Path, metavar="PATH", help="run directory, or its ledger folder")
    sub.add_argument("--event", default="", metavar="NAME", help="only these, for example `verdict`")

    sub = add("explain", _explain, "say what a reason code means", "verifier explain token-not-forced")
    sub.add_argument("reason", nargs="?", default="", metavar="REASON", help="a reason code; none lists all")

    sub = add(
        "calibrate",
        _calibrate,
        "measure honest noise of an engine",
        "verifier calibrate model/ --engine-socket /tmp/engine.sock --out noise.json",
    )
    sub.add_argument("model", type=Path, metavar="MODEL_DIR", help="config, tokenizer and weights the engine loads")
    sub.add_argument("--engine-socket", required=True, action="append", metavar="PATH",
                     help="socket of a running engine; repeatable: other threads, kernels, devices")  # fmt: skip
    sub.add_argument("--environment", default="word", metavar="NAME", help="whose prompts to sample from")
    sub.add_argument("--rollouts", type=int, default=200, metavar="N",
                     help="how many for each engine, batch size, context and length (default: 200)")  # fmt: skip
    sub.add_argument("--contexts", type=_numbers(0), default=(0,), metavar="N,..",
                     help="tokens that prompts are filled up to (default: 0, the environment's own)")  # fmt: skip
    sub.add_argument("--tokens", type=_numbers(0), default=(0,), metavar="N,..",
                     help="lengths to sample, whatever ends one (default: 0, as the environment does)")  # fmt: skip
    sub.add_argument("--batches", type=_numbers(1), default=(1, 8, 32, 128), metavar="N,..",
                     help="rollouts that are decoded at once (default: 1,8,32,128)")  # fmt: skip
    sub.add_argument("--attention", type=_kernels, default=("sdpa", "eager"), metavar="A,..",
                     help="kernels to prefill with (default: sdpa,eager)")  # fmt: skip
    sub.add_argument("--threads", type=_numbers(1), default=(1, 2), metavar="N,..",
                     help="CPU threads to prefill with (default: 1,2)")  # fmt: skip
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the measurement goes")
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give a number above 0 and at most 1, such as 0.1")
    return value


def _numbers(lowest: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            values = tuple(int(part) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or min(values) < lowest or max(values) > 1 << 20:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from {lowest} on, such as 1,32")
        return values

    return parse


def _kernels(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= {"sdpa", "eager"}:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of kernels; there are sdpa and eager")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 1 to 1024")
    return int(text)


def _hex(text: str) -> str:
    try:
        bytes.fromhex(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError("the seed is hexadecimal, as an earlier audit printed it") from exc
    return text


def _audit(args: argparse.Namespace) -> int:
    from protocol.targets import resolve_id
    from verifier.progress import bar

    run = resolve_id(args.run) if args.run is not None else b""

    with bar("checking", "rollouts", quiet=args.json) as progress:  # before the imports, which take seconds
        from verifier.audit import Options, audit

        options = Options(
            rollout=args.rollout,
            fraction=args.fraction,
            seed=args.seed,
            run=run,
            receipts=tuple(args.receipt),
            heads=tuple(args.head),
            jobs=args.jobs,
            resume=True,
            state=args.state,
        )
        try:
            report = audit(args.path, options, progress)
        except KeyboardInterrupt:
            if not args.json:
                sys.stderr.write("stopped; the same command goes on with what was derived\n")
            raise
    _print(json.dumps(report.to_json()) if args.json else "\n".join(report.lines()))
    return report.exit_code


def _ledger(args: argparse.Namespace) -> int:
    from verifier import listing

    archive = listing.open_ledger(args.path)
    rows = listing.only(list(listing.rows(archive)), args.event)
    problems = list(archive.problems) if archive.started else []
    unchecked = [] if archive.started else [("ledger", listing.NOT_STARTED)]
    if args.json:
        out: dict[str, object] = {"run": archive.run.id.hex(), "entries": rows}
        out["problems"] = [vars(problem) for problem in problems]
        out["unchecked"] = [{"record": record, "why": why} for record, why in unchecked]
        _print(json.dumps(out))
    else:
        for row in rows:
            _print(listing.line(row))
        for problem in problems:
            sys.stderr.write(f"DOES NOT HOLD  {problem.record}: {problem.reason.value}: {problem.message}\n")
        for record, why in unchecked:
            sys.stderr.write(f"NOT CHECKED    {record}: {why}\n")
    return 1 if problems else 2 if unchecked else 0


def _explain(args: argparse.Namespace) -> int:
    from verifier.explain import EXPLANATIONS, explain

    if not args.reason:
        table = {code.value: item.meaning for code, item in EXPLANATIONS.items()}
        width = max(map(len, table))
        _print(
            json.dumps(table) if args.json else "\n".join(f"{code:<{width}}  {text}" for code, text in table.items())
        )
        return 0
    found = explain(args.reason)
    if args.json:
        _print(json.dumps({"reason": args.reason, **vars(found)}))
    else:
        _print(f"{args.reason}\n\nWhat it means    {found.meaning}")
        _print(f"\nWhy it counts    {found.evidence}\n\nWhat to do       {found.action}")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from verifier import calibrate

    if args.rollouts < 1:
        raise UsageError("--rollouts must be at least 1; 200 is what the shipped measurements use")
    return calibrate.run(args)


if __name__ == "__main__":
    sys.exit(main())
