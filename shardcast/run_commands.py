"""The commands of a run's weights: publish a run directory, relay and pull by its manifest, ask for either's state.

Heavy imports happen inside the commands.

Not covered: shares (`share_commands`) and the parser (`cli`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import EnvelopeError, ProtocolError, ReasonCode, UsageError

if TYPE_CHECKING:
    from shardcast.terms import Terms


def terms_of(args: argparse.Namespace, store: Path, share: Callable[[], bytes] | None = None) -> Terms:
    """The limits that a command was given. Raises UsageError."""
    from shardcast.allow import read_allow
    from shardcast.amounts import parse_quota, parse_rate
    from shardcast.rates import Bucket
    from shardcast.terms import Terms, quota_in
    from shardcast.tls import load_certificate, own_certificate

    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError("--tls-cert and --tls-key come together")
    certificate = None
    if args.tls_cert is not None:
        certificate = load_certificate(args.tls_cert, args.tls_key)
    elif args.tls:
        certificate = own_certificate(store)
    return Terms(
        up=Bucket(parse_rate(args.up)) if args.up else None,
        quota=quota_in(store, parse_quota(args.quota) if args.quota else None),
        allow=read_allow(args.allow),
        certificate=certificate,
        share=share,
    )


def say(args: argparse.Namespace, text: str, **table: object) -> None:
    print(json.dumps(table) if args.json else text, flush=True)  # noqa: T201


ORIGIN_LISTEN = "127.0.0.1:4803"
"""Where the coordinator expects the origin when run.toml does not say; another default here and nobody finds it."""


CODECS = ("gaps", "classes", "anchor", "raw")
"""How an origin may code what it publishes: as patches (`gaps`; `classes` for thin links), each checkpoint by itself,
or as it is."""


def _serving(run_dir: Path) -> tuple[str, bool, str]:
    """Where to listen, whether everybody is served, and the codec: `[origin]` of run.toml, or its defaults.

    Without a run.toml: any free port, open to all, since no coordinator is there that could hand out passes.

    Raises:
        UsageError: run.toml is no TOML, or its [origin] holds a key we don't know.
    """
    path = run_dir / "run.toml"
    if not path.exists():
        return "127.0.0.1:0", True, CODECS[0]
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is no valid TOML ({exc}); whoever edits this file must correct it") from exc
    origin = table.get("origin", {})
    unknown = sorted(set(origin) - {"listen", "open", "codec"}) if isinstance(origin, dict) else ["origin"]
    if unknown:
        raise UsageError(f"{path}: origin.{unknown[0]}: unknown key. Whoever edits this file must correct it")
    listen, everybody = origin.get("listen", ORIGIN_LISTEN), origin.get("open", False)
    if not isinstance(listen, str):
        raise UsageError(f"{path}: [origin] listen must be text like '127.0.0.1:8100'")
    if not isinstance(everybody, bool):
        raise UsageError(f"{path}: [origin] open must be true or false")
    codec = origin.get("codec", CODECS[0])
    if codec not in CODECS:
        raise UsageError(f"{path}: [origin] codec must be one of {', '.join(CODECS)}")
    return listen, everybody, codec


async def publish_run(args: argparse.Namespace) -> int:
    from protocol.identity import load_identity
    from protocol.run_files import key_file
    from shardcast.codecs import Codec
    from shardcast.origin import Origin, load_run

    if not args.run.is_dir():
        raise UsageError(
            f"{args.run} is no folder; give one with checkpoints (safetensors) in it, or make a run with: "
            f"trainer init {args.run}"
        )
    if args.tls or args.tls_cert:
        raise UsageError("a run's plan names http addresses, so --tls is for shares: publish the checkpoints' folder")
    if args.keep_bytes or args.announce or args.cache:
        raise UsageError("--keep-bytes, --announce and --cache are for shares; a run's archive keeps everything")
    key = args.key or key_file(args.run, "origin", load_run(args.run).manifest.origin)
    listen, everybody, codec = _serving(args.run)
    origin = Origin(
        args.run,
        identity=load_identity(key),
        listen=args.listen or listen,
        open_to_all=everybody or args.open,
        terms=terms_of(args, args.run / "published"),
        codec=Codec[codec.upper()],
    )
    try:
        await origin.start()
        say(args, f"publishing {args.run} at {origin.server.url}", url=origin.server.url)
        await origin.run_forever()
    finally:
        await origin.close()
    return 0


async def relay_run(args: argparse.Namespace) -> int:
    from protocol.identity import load_or_create_identity
    from shardcast.relay import RelayServer

    args.store.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(args.key or args.store / "relay.pem")
    terms = terms_of(args, args.store)
    relay = RelayServer(_run(args), args.source, args.listen, args.store, identity, keep=args.keep, terms=terms)
    try:
        await relay.start()
        say(args, f"relaying at {relay.url}", url=relay.url)
        following = asyncio.create_task(relay.run_forever())
        while not following.done():
            await asyncio.wait([following], timeout=1.0)
            give_up_if_refused(relay.problems, args.source)
        following.result()
    finally:
        await relay.close()
    return 0


def give_up_if_refused(problems: Mapping[str, ProtocolError], sources: Sequence[str]) -> None:
    """Raise the refusal once every source named by hand has refused us: asking again changes nothing."""
    refused = [problems[source] for source in sources if source in problems]
    if len(refused) == len(sources) and all(error.code == ReasonCode.NOT_GRANTED for error in refused):
        raise refused[0]


async def pull_run(args: argparse.Namespace) -> int:
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
                    give_up_if_refused(puller.problems, args.source)
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)  # what stops the puller ends both
            if following.done():
                following.result()
            policy = waiting.result()
            after = policy.key
            say(
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


async def status_run(args: argparse.Namespace) -> int:
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
    health = f"\n{in_words(stats)}" if stats else ""
    if raw is None:
        say(args, f"nothing is published yet{health}", published=0, **stats)
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
    say(args, text + health, signed_at=envelope.issued_at, **stats, **table)
    return 0


def in_words(stats: dict[str, int]) -> str:
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
