"""The commands of shares: publish a folder, relay and pull by a code, ask for the state of either.

Heavy imports happen inside the commands. A pull keeps `share.hw` and `code.txt` in its folder, so that `status` knows
what it is, and `latest`, a link to the newest checkpoint that is whole and verified.

Not covered: runs (`run_commands`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import EnvelopeError, ManifestError, ProtocolError, ReasonCode, TransportError, UsageError
from shardcast.run_commands import give_up_if_refused, in_words, say, terms_of

if TYPE_CHECKING:
    from protocol.identity import Identity
    from shardcast.origin import Origin
    from shardcast.passes import Parent, Presenter
    from shardcast.puller import Policy, Puller
    from shardcast.relay import RelayServer
    from shardcast.share import Share, ShareCode
    from shardcast.terms import Terms

_LOOK_S = 0.25
_FOR_EVER_S = 1e9
_RETAIN_S = 5.0
_PREFIX = "hws1"
SHARE_FILE, CODE_FILE, LATEST = "share.hw", "code.txt", "latest"


def is_share(place: str) -> bool:
    """Whether `status PLACE` means a share: a code, a folder of one, or a URL without a manifest."""
    if place.startswith(("http://", "https://", _PREFIX)):
        return True
    folder = Path(place)
    return folder.is_file() or _share_file(folder).exists()


def _share_file(folder: Path) -> Path:
    """Where a published folder, a pull's folder or a relay's store keeps its share."""
    published = folder / ".shardcast" / SHARE_FILE
    return published if published.exists() else folder / SHARE_FILE


# --- publish ---------------------------------------------------------------------------------------------------------


async def publish_folder(args: argparse.Namespace) -> int:
    """`shardcast publish FOLDER`."""
    from shardcast.amounts import parse_bytes
    from shardcast.codecs import Codec
    from shardcast.folder import FolderOrigin

    listen = args.listen or "127.0.0.1:0"
    check_reachable(listen, args.announce, args.cache)
    terms: list[Terms] = []

    def make_terms(store: Path, share: Any) -> Terms:
        terms.append(terms_of(args, store, share))
        return terms[-1]

    def opened(share: Share, origin: Origin) -> None:
        code = code_of(args, share, origin.server.url, share.manifest.origin, terms[-1])
        (folder.state / CODE_FILE).write_text(code + "\n")
        say(
            args,
            f"publishing {args.run} at {origin.server.url}\n\n    shardcast pull {code} DIR\n",
            url=origin.server.url,
            code=code,
            share=share.id.hex(),
        )

    folder = FolderOrigin(
        args.run,
        lambda text, table: say(args, text, **table),
        opened,
        state=args.store,
        listen=listen,
        terms=make_terms,
        name=args.name,
        keep_bytes=parse_bytes(args.keep_bytes) if args.keep_bytes else None,
        pins=args.pin,
        everything=args.all,
        codec=Codec[args.codec.upper()],
    )
    await folder.run_forever()
    return 0


def check_reachable(listen: str, announce: list[str], cache: list[str]) -> None:
    """Raise UsageError for addresses that no code can name."""
    from shardcast.addresses import parse_url
    from shardcast.server import parse_listen

    host, _ = parse_listen(listen)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified and not announce:
            raise UsageError(
                f"--listen {listen} is every address of this machine; name one others reach: --announce URL"
            )
    for url in (*announce, *cache):
        try:
            parse_url(url)
        except ProtocolError as exc:
            raise UsageError(f"{exc}; a code names http://HOST:PORT or https://HOST:PORT") from exc


def code_of(args: argparse.Namespace, share: Share, url: str, key: bytes, terms: Terms, more: Any = ()) -> str:
    """The code for whoever pulls from here: caches first, then this server, then `more`."""
    from protocol.limits import MAX_ADDRESSES
    from shardcast.share import ShareCode, ShareSource, format_code

    pin = terms.certificate.pin if terms.certificate is not None else b""
    sources = [ShareSource(cache, b"", b"", True) for cache in args.cache]
    for place in args.announce or [url]:
        sources.append(ShareSource(place, key, pin if place.startswith("https:") else b"", False))
    known = {source.url for source in sources}
    sources.extend(source for source in more if source.url not in known)
    return format_code(ShareCode(share.id, tuple(sources[:MAX_ADDRESSES])))


# --- opening a code --------------------------------------------------------------------------------------------------


def read_code(text: str) -> ShareCode:
    """A code, or the file that holds it. Raises UsageError."""
    from protocol.limits import KIB
    from shardcast.share import parse_code
    from shardcast.store import read_bounded

    if not text.lstrip().lower().startswith("hw"):
        path = Path(text)
        try:
            text = read_bounded(path, 64 * KIB).decode("utf-8")
        except (OSError, UnicodeDecodeError, ProtocolError) as exc:
            raise UsageError(
                f"{text[:100]!r} is neither the code of a share (hws1...) nor a file that holds one"
            ) from exc
    try:
        return parse_code(text)
    except ManifestError as exc:
        raise UsageError(str(exc)) from exc


async def open_code(code: ShareCode, store: Path, *, allow_private: bool, presenter: Any = None) -> Share:
    """The share that a code names: the one kept in `store`, else from the first of its places that has it.

    Raises:
        SourceError: no place has it, or none may be connected to.
    """
    from protocol.limits import MAX_ENVELOPE_BYTES
    from shardcast.errors import SourceError, StoreError
    from shardcast.share import best_error, fetch_share, open_share, parents_in
    from shardcast.source import new_session
    from shardcast.store import read_bounded

    kept = store / SHARE_FILE
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ProtocolError):
        return open_share(read_bounded(kept, MAX_ENVELOPE_BYTES), expect=code.share)
    errors: list[SourceError] = []
    async with new_session() as session:
        for parent in parents_in(code):
            try:
                share = await fetch_share(session, parent, code.share, allow_private=allow_private, presenter=presenter)
            except SourceError as exc:
                errors.append(exc)
                continue
            if kept.exists():
                raise StoreError(f"{store} holds another share; give an empty folder", ReasonCode.WRONG_RUN)
            return share
    if not errors:
        raise SourceError("(no place)", "the code names no address to ask", ReasonCode.UNREACHABLE)
    raise best_error(errors)


def _keep(store: Path, share: Share, code: str) -> None:
    from shardcast.heads import replace_file

    store.mkdir(parents=True, exist_ok=True)
    replace_file(store / SHARE_FILE, share.envelope.raw)
    replace_file(store / CODE_FILE, (code + "\n").encode())


def _presenter(code: ShareCode, key: Path | None, store: Path) -> tuple[Identity | None, Presenter | None]:
    """What shows our key to servers with a list, when a key was given."""
    from protocol.identity import load_identity
    from protocol.sequences import Sequences
    from shardcast.allow import KeyPresenter
    from shardcast.server import wall_clock_ms

    if key is None:
        return None, None
    identity = load_identity(key)
    store.mkdir(parents=True, exist_ok=True)
    sequences = Sequences(store / "key-sequences.json")
    return identity, KeyPresenter(code.share, identity, sequences, wall_clock_ms)


def _down(args: argparse.Namespace) -> dict[str, Any]:
    """The download limit as an argument; none without one."""
    from shardcast.amounts import parse_rate
    from shardcast.rates import Bucket

    return {"down": Bucket(parse_rate(args.down))} if args.down else {}


# --- pull ------------------------------------------------------------------------------------------------------------


async def pull_share(args: argparse.Namespace) -> int:
    """`shardcast pull CODE DIR`."""
    from shardcast.puller import Puller
    from shardcast.share import format_code, parents_in

    code = read_code(args.code)
    directory: Path = args.directory
    _, presenter = _presenter(code, args.key, directory)
    share = await open_code(code, directory, allow_private=args.allow_private, presenter=presenter)
    _keep(directory, share, format_code(code))
    parents = parents_in(code)
    run = share.as_run(allow_private=args.allow_private)
    puller = Puller(run, lambda: parents, directory, keep=args.keep, presenter=presenter, **_down(args))
    await puller.start()
    shown = asyncio.create_task(_show_progress(args, puller))
    try:
        if args.step is not None:
            wanted = puller.fetch(0, args.step, None, _FOR_EVER_S)
            _tell_policy(args, share, await _moving(puller, wanted, args.deadline, parents))
        else:
            newest = None if args.follow else await _newest(run, parents, args, presenter)
            await _follow(args, puller, share, parents, newest)
    finally:
        shown.cancel()
        await asyncio.gather(shown, return_exceptions=True)
        await puller.close()
    return 0


async def _follow(
    args: argparse.Namespace, puller: Puller, share: Share, parents: list[Parent], target: tuple[int, int] | None
) -> None:
    """Hand over each newer checkpoint; without `--follow` only the one that is newest now, or a newer one."""
    following = asyncio.create_task(puller.run_forever())
    after: tuple[int, int] | None = None
    try:
        while True:
            wanted = puller.wait_newer(after, _FOR_EVER_S)
            deadline_s = args.deadline if after is None or not args.follow else _FOR_EVER_S
            policy = await _moving(puller, wanted, deadline_s, parents, following)
            after = policy.key
            if target is not None and policy.key < target:
                continue
            _tell_policy(args, share, policy)
            _point_at(args.directory, policy)
            if not args.follow:
                return
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _newest(
    run: Any, parents: list[Parent], args: argparse.Namespace, presenter: Presenter | None
) -> tuple[int, int] | None:
    """What the places say is newest, so that an older one on this disk is not taken for it.

    Raises:
        SourceError: no place answers, or all refuse.
    """
    from protocol.envelope import open_envelope
    from shardcast.errors import SourceError
    from shardcast.records import HEAD_KIND, Head
    from shardcast.share import best_error
    from shardcast.source import Source, new_session

    found: list[tuple[int, int]] = []
    errors: list[SourceError] = []
    async with new_session() as session:
        for parent in parents:
            source = Source(session, parent, run.id, presenter=presenter, allow_private=args.allow_private)
            try:
                raw = await source.head()
                if raw is not None:
                    head = open_envelope(raw, run=run.id, kind=HEAD_KIND, signer=run.manifest.origin).record(Head)
                    found.append((head.epoch, head.step))
            except SourceError as exc:
                errors.append(exc)
            except ProtocolError as exc:
                errors.append(SourceError(parent.url, f"its head does not hold: {exc}", exc.code))
    if len(errors) == len(parents):
        raise best_error(errors)
    return max(found, default=None)


async def _moving(
    puller: Puller,
    wanted: Coroutine[Any, Any, Policy],
    deadline_s: float,
    parents: list[Parent],
    following: asyncio.Task[None] | None = None,
) -> Policy:
    """What is waited for, given up when nothing moves for `deadline_s`.

    Raises:
        TransportError(`deadline`), and what stopped the puller.
    """
    task = asyncio.create_task(wanted)
    seen: tuple[int, tuple[int, int] | None] = (-1, None)
    moved = time.monotonic()
    try:
        while True:
            both = {task} if following is None else {task, following}
            await asyncio.wait(both, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if following is not None and following.done():
                following.result()
            if (now := (puller.bytes_received, puller.progress)) != seen:
                seen, moved = now, time.monotonic()
            give_up_if_refused(puller.problems, [parent.url for parent in parents])
            if time.monotonic() - moved > deadline_s:
                told = "; ".join(str(error) for error in puller.problems.values())
                words = f"nothing arrived for {deadline_s:g} s{': ' + told if told else ''}"
                raise TransportError(words, ReasonCode.DEADLINE)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _tell_policy(args: argparse.Namespace, share: Share, policy: Policy) -> None:
    """Say what arrived, after naming its weights as what loads them wants."""
    name = share.manifest.weights
    if name != "model.safetensors":
        with contextlib.suppress(FileExistsError):
            (policy.directory / name).symlink_to("model.safetensors")
    say(
        args,
        f"step {policy.step} root {policy.root.hex()[:16]} in {policy.directory}",
        epoch=policy.epoch,
        step=policy.step,
        root=policy.root.hex(),
        directory=str(policy.directory),
    )


def _point_at(directory: Path, policy: Policy) -> None:
    """`latest` is this checkpoint from now on."""
    aside = directory / f".{LATEST}.part"
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(policy.directory, directory))
    aside.replace(directory / LATEST)


async def _show_progress(args: argparse.Namespace, puller: Puller) -> None:
    """A bar on a terminal; nothing elsewhere."""
    if args.json or not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        while True:
            now = puller.progress
            if now is not None:
                bar.update(task, completed=now[0], total=now[1])
            await asyncio.sleep(0.2)


# --- relay -----------------------------------------------------------------------------------------------------------


async def relay_share(args: argparse.Namespace) -> int:
    """`shardcast relay CODE`."""
    from protocol.identity import load_or_create_identity
    from shardcast.relay import RelayServer
    from shardcast.share import format_code, parents_in

    check_reachable(args.listen, args.announce, args.cache)
    code = read_code(args.code)
    store: Path = args.store or Path(f"shardcast-{code.share.hex()[:8]}")
    store.mkdir(parents=True, exist_ok=True)
    identity = load_or_create_identity(args.key or store / "relay.pem")
    _, presenter = _presenter(code, args.key or store / "relay.pem", store)
    share = await open_code(code, store, allow_private=args.allow_private, presenter=presenter)
    _keep(store, share, format_code(code))
    terms = terms_of(args, store, lambda: share.envelope.raw)
    parents = parents_in(code)
    relay = RelayServer(
        share.as_run(allow_private=args.allow_private),
        parents,
        args.listen,
        store,
        identity,
        keep=args.keep if not args.keep_bytes else 1 << 30,
        presenter=presenter,
        terms=terms,
        **_down(args),
    )
    try:
        await relay.start()
        own = code_of(args, share, relay.url, identity.public, terms, code.sources)
        say(args, f"relaying at {relay.url}\n\n    shardcast pull {own} DIR\n", url=relay.url, code=own)
        following = asyncio.create_task(relay.run_forever())
        retained = 0.0
        while not following.done():
            await asyncio.wait([following], timeout=1.0)
            give_up_if_refused(relay.problems, [parent.url for parent in parents])
            if args.keep_bytes and time.monotonic() - retained > _RETAIN_S:
                retained = time.monotonic()
                await retain(args, relay)
        following.result()
    finally:
        await relay.close()
    return 0


async def retain(args: argparse.Namespace, relay: RelayServer) -> None:
    """Remove what is over `--keep-bytes` at a relay, and say so."""
    from shardcast.amounts import parse_bytes
    from shardcast.retention import folder_bytes, to_remove

    sizes = {key: folder_bytes(relay.store.folder(key)) for key in relay.store.keys}
    for key in to_remove(sizes, parse_bytes(args.keep_bytes), args.pin, relay.server.in_use):
        await relay.remove(key)
        say(args, f"removed step {key[1]} (--keep-bytes)", removed=key[1], bytes=sizes[key])


# --- status ----------------------------------------------------------------------------------------------------------


async def status_share(args: argparse.Namespace) -> int:
    """`shardcast status CODE|URL|FOLDER` of a share."""
    from protocol.limits import MAX_ENVELOPE_BYTES
    from shardcast.share import open_share
    from shardcast.store import read_bounded

    place: str = args.place
    folder = Path(place)
    if place.startswith(("http://", "https://", _PREFIX)) or folder.is_file():
        share, raw, stats = await _ask(args)
        return _tell(args, share, raw, None, stats)
    share = open_share(read_bounded(_share_file(folder), MAX_ENVELOPE_BYTES))
    return _status_of_folder(args, share, _share_file(folder).parent)


def _status_of_folder(args: argparse.Namespace, share: Share, folder: Path) -> int:
    from shardcast.heads import parse_publication_name, publication_name
    from shardcast.store import published_heads, read_publication

    run = share.as_run()
    stats: dict[str, int] = {}
    store = folder / "published" if (folder / "published").is_dir() else folder
    with contextlib.suppress(OSError, ValueError):
        table = json.loads((store / "stats.json").read_text())
        stats = {str(name): value for name, value in table.items() if type(value) is int}
    if (folder / "policies").is_dir():
        names = sorted(entry.name for entry in (folder / "policies").iterdir())
        kept = [key for name in names if (key := parse_publication_name(name)) is not None]
        if not kept:
            say(args, f"{share.manifest.name}: nothing is here yet", name=share.manifest.name, published=0, **stats)
            return 0
        publication = read_publication(folder / "policies" / publication_name(max(kept)), run)
        raw = publication.head_envelope.raw if publication.head_envelope is not None else None
        return _tell(args, share, raw, len(kept), stats)
    heads = published_heads(store, run)
    return _tell(args, share, heads[-1][0] if heads else None, len(heads), stats)


async def _ask(args: argparse.Namespace) -> tuple[Share, bytes | None, dict[str, int]]:
    """A server's share, head and numbers. Raises SourceError."""
    from shardcast.errors import SourceError
    from shardcast.passes import Parent
    from shardcast.share import best_error, fetch_share, parents_in
    from shardcast.source import Source, new_session

    place: str = args.place
    typed = place.startswith(("http://", "https://"))
    code = None if typed else read_code(place)
    parents = [Parent(place)] if code is None else parents_in(code)
    errors: list[SourceError] = []
    async with new_session() as session:
        for parent in parents:
            try:
                private = typed or args.allow_private
                wanted = b"" if code is None else code.share
                share = await fetch_share(session, parent, wanted, allow_private=private)
                source = Source(session, parent, share.id, allow_private=private)
                return share, await source.head(), await source.stats()
            except SourceError as exc:
                errors.append(exc)
    error = best_error(errors) if errors else SourceError("(no place)", "the code names no address to ask")
    hint = ". For a run give its manifest, too: --manifest RUN/manifest.hw" if typed else ""
    raise SourceError(error.address, f"{str(error).removeprefix(f'{error.address}: ')}{hint}", error.code)


def _tell(args: argparse.Namespace, share: Share, raw: bytes | None, count: int | None, stats: dict[str, int]) -> int:
    from protocol.envelope import open_envelope
    from shardcast.records import HEAD_KIND, Head

    table: dict[str, object] = {"name": share.manifest.name, "share": share.id.hex()}
    if count is not None:
        table["published"] = count
    stats = {name: value for name, value in stats.items() if name not in ("epoch", "step")}
    served = f"\n{in_words(stats)}" if "children" in stats else ""
    title = f"{share.manifest.name} (share {share.id.hex()[:16]})"
    if raw is None:
        say(args, f"{title}: nothing is published yet{served}", **{**stats, **table, "published": 0})
        return 0
    try:
        envelope = open_envelope(raw, run=share.id, kind=HEAD_KIND, signer=share.manifest.origin)
    except EnvelopeError as exc:
        raise EnvelopeError(
            f"the newest head is not signed by the share's key ({exc}); whoever serves it must explain"
        ) from exc
    head = envelope.record(Head)
    several = f", {count} there" if count is not None else ""
    say(
        args,
        f"{title}\nnewest: step {head.step} root {head.root.hex()[:16]}{several}{served}",
        **{**stats, **table, "epoch": head.epoch, "step": head.step, "root": head.root.hex()},
    )
    return 0
