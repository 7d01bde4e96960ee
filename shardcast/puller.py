"""The puller: keeps a machine's newest policy as a model directory that is always whole and verified.

    <store>/policies/e0000-s00000012/   model.safetensors, the manifest's model files, publication.hw
    <store>/policies/.part-.../         a download; its weights file has no header until every shard is verified
    <store>/blobs/  seen.log  fork-evidence.hw  stats.json

A policy directory appears by one rename. What is found after a restart is verified again before it counts; an
unfinished download is resumed shard by shard, each re-hashed. Policies on disk are what later ones are patches to.
Policy files are not flushed to the disk: after power loss they fail that verification and are fetched again.

Not covered: loading weights into a model (`verifier.model`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from protocol.errors import ProtocolError, ReasonCode, TransportError
from protocol.limits import MAX_LAYOUT_BYTES, SHARD_BYTES
from protocol.manifest import Run
from protocol.records import RelayReport
from shardcast.asks import Sink
from shardcast.download import hash_region
from shardcast.errors import PublicationError, SourceError, StoreError
from shardcast.follower import Follower
from shardcast.heads import SeenHeads, parse_publication_name, publication_name, replace_file
from shardcast.layout import Layout, decode_layout, safetensors_header
from shardcast.pacing import Pacing
from shardcast.passes import Parent, Presenter
from shardcast.policy_sink import WEIGHTS_NAME, Base, PolicySink
from shardcast.publication import Key, Publication, pack_frames, publication_from, split_frames
from shardcast.rates import Bucket
from shardcast.records import NO_HASH
from shardcast.server import Clock, wall_clock_ms
from shardcast.states import Segments
from shardcast.stats import SAVE_S
from shardcast.store import MAX_PUBLICATION_BYTES, PUBLICATION_NAME, hash_file, read_bounded, remove_folder

log = logging.getLogger("shardcast.puller")

_BASES = 4
"""Policies that one download may change; each is a file kept open."""

GRACE_S = 30.0
"""A policy handed out less than this long ago is not removed, so that a reader can finish loading it."""


@dataclass(frozen=True)
class Policy:
    """A whole, verified policy on disk."""

    epoch: int
    step: int
    root: bytes
    directory: Path
    """A complete Hugging Face model directory."""

    @property
    def key(self) -> Key:
        return (self.epoch, self.step)


class Puller:
    """Follows a run's weights."""

    def __init__(
        self,
        run: Run | Callable[[], Run],
        sources: Callable[[], Sequence[str | Parent]],
        store: Path,
        keep: int = 4,
        session: aiohttp.ClientSession | None = None,
        *,
        clock_ms: Clock = wall_clock_ms,
        presenter: Presenter | None = None,
        report: Callable[[RelayReport], None] | None = None,
        pacing: Pacing | None = None,
        down: Bucket | None = None,
    ) -> None:
        """Open a store; `start` (or `run_forever`) then verifies what is in it.

        Args:
            run: with the newest manifest known; a callable when that may change.
            sources: relays or the origin, or their URLs, best first; read again every second.
            presenter: shows our passes.
            report: told of a relay that sent wrong bytes; must not block.
            keep: policies kept on disk (more for `GRACE_S` after use).
            clock_ms: corrected time; heads are believed for an hour.
            down: limits the bytes of shards received.
            pacing: told how long pulls take, and asked whether to look for news; None looks always.

        Raises:
            ForkError, StoreError: what an earlier process left here forbids going on.
        """
        self._run = run
        self.keep = keep
        self.store = store
        self.current: Policy | None = None
        """The newest policy, whole and verified."""
        self._policies: dict[Key, Policy] = {}
        self._used: dict[Key, float] = {}
        self._folder = store / "policies"
        self._folder.mkdir(parents=True, exist_ok=True)
        (store / "blobs").mkdir(exist_ok=True)
        self._arrived = asyncio.Event()
        self.room_for: Callable[[int], None] | None = None
        """Told the bytes of one policy before anything is fetched of the first; what it raises stops this puller."""
        self._layout: Layout | None = None
        self._header = b""
        self._segments = Segments(self._known_layout)
        self._states: dict[Key, Sequence[bytes]] = {}
        """State hashes of the policies on disk."""
        self._has_files = False
        self._spare: Path | None = None
        """The hidden folder of a policy that was removed, its model files still in it, for the next download."""
        self._swept = False
        self._started = False
        self._starting = asyncio.Lock()
        self._sinks: dict[Key, PolicySink] = {}
        self._saved_at = 0.0
        self._pacing = pacing
        self._began: dict[Key, float] = {}
        """When each download under way began."""
        self._follower = Follower(
            run,
            sources=sources,
            seen=SeenHeads(store),
            clock_ms=clock_ms,
            make_sink=self._make_sink,
            on_whole=self._on_whole,
            on_head=lambda raw: None,
            session=session,
            presenter=presenter,
            report=report,
            down=down,
            hold=lambda: pacing.hold_s(time.monotonic()) if pacing is not None else 0.0,
        )

    @property
    def run(self) -> Run:
        return self._run() if callable(self._run) else self._run

    @property
    def bytes_received(self) -> int:
        """Bytes of shards received by this process."""
        return self._follower.bytes_received

    @property
    def progress(self) -> tuple[int, int] | None:
        """(bytes that are here and verified, bytes in all) of the policy under way; None between two."""
        return self._follower.progress

    @property
    def problems(self) -> dict[str, SourceError]:
        """The last failure of each source, by address."""
        return self._follower.problems

    async def policy_bytes(self) -> int:
        """Bytes of one policy's weights, from the run's layout; so that room can be checked before they come.

        Raises:
            SourceError: no source has the layout now.
        """
        return (await self._weights_layout()).nbytes

    async def start(self) -> None:
        """Verify the policies on disk; the newest that holds becomes `current`. Idempotent."""
        async with self._starting:
            if self._started:
                return
            for entry in sorted(self._folder.iterdir(), reverse=True):
                if entry.name.startswith(".part-"):
                    continue
                key = parse_publication_name(entry.name)
                publication = await asyncio.to_thread(self._verify, entry) if key is not None else None
                if publication is None or publication.manifest is None:
                    log.warning("%s is not a whole verified policy and is removed", entry)
                    await asyncio.to_thread(_discard, entry)
                    continue
                policy = Policy(*publication.key, publication.manifest.root, entry)
                self._policies[policy.key] = policy
                self._states[policy.key] = publication.states()
                if self.current is None or policy.key > self.current.key:
                    self.current = policy
                    self._follower.newest = publication
            self._started = True

    async def run_forever(self) -> None:
        """Follow the newest policy until cancelled.

        Raises:
            ForkError: the origin signed two contradicting things; a person must decide.
            StoreError, OSError: this disk cannot hold the weights.
        """
        await self.start()
        try:
            await self._follower.run_forever()
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop; unfinished downloads stay on disk and are resumed by the next start."""
        await self._follower.close()
        for sink in self._sinks.values():
            sink.close()
        self._save_stats(last=True)

    async def wait_newer(self, after: Key | None, deadline_s: float) -> Policy:
        """The current policy once it is newer than `after`.

        Raises:
            TransportError(`deadline`): none arrived in time; the message says what the sources answered.
            ForkError, StoreError, OSError: what stopped this puller.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    self._follower.check()
                    if self.current is not None and (after is None or self.current.key > after):
                        return self._handed_out(self.current)
                    event = self._arrived
                    try:
                        async with asyncio.timeout(1.0):
                            await event.wait()
                    except TimeoutError:
                        continue
        except TimeoutError as exc:
            name = "any policy" if after is None else f"a policy newer than {publication_name(after)}"
            raise TransportError(
                f"{name} did not arrive within {deadline_s:g} s{self._why()}", ReasonCode.DEADLINE
            ) from exc

    async def fetch(self, epoch: int, step: int, root: bytes | None, deadline_s: float) -> Policy:
        """One policy by name, maybe older than `current`.

        Args:
            root: 32 bytes; None takes what the origin signed.

        Raises:
            PublicationError(`hash-mismatch`): the origin published another root at (epoch, step).
            TransportError(`deadline`): no source delivered it in time.
            SourceError(`record-missing`): it is so old that all sources have removed it.
            ForkError, StoreError, OSError: what stopped this puller.
        """
        key = (epoch, step)
        await self.start()
        try:
            async with asyncio.timeout(deadline_s):
                if key not in self._policies:
                    await self._follower.fetch(key, root)
        except TimeoutError as exc:
            raise TransportError(
                f"{publication_name(key)} did not arrive within {deadline_s:g} s{self._why()}", ReasonCode.DEADLINE
            ) from exc
        policy = self._policies[key]
        if root is not None and policy.root != root:
            raise PublicationError(
                f"{publication_name(key)} was published with root {policy.root.hex()[:16]}, not {root.hex()[:16]}",
                ReasonCode.HASH_MISMATCH,
            )
        return self._handed_out(policy)

    def _why(self) -> str:
        told = "; ".join(str(error) for error in self.problems.values())
        return f": {told}" if told else ""

    def _handed_out(self, policy: Policy) -> Policy:
        self._used[policy.key] = time.monotonic()
        return policy

    # --- what the follower calls -----------------------------------------------------------------------------------

    async def _make_sink(self, publication: Publication) -> tuple[Sink, bool]:
        size = (await self._weights_layout()).nbytes
        if publication.open.raw_bytes != size:
            raise PublicationError(
                f"{publication_name(publication.key)} has {publication.open.raw_bytes} bytes, the run's layout {size}; "
                "the origin signed it: the run's operator must explain",
                ReasonCode.LENGTH_MISMATCH,
            )
        if self.room_for is not None:
            self.room_for(size)
            self.room_for = None
        await self._model_files()
        directory = self._folder / f".part-{publication_name(publication.key)}-{publication.open.publication.hex()}"
        self._reuse(directory)
        sink = PolicySink(directory, publication, self._header, self._segments, self._bases(publication))
        self._sinks[publication.key] = sink
        self._began[publication.key] = time.monotonic()
        return sink, True

    def _bases(self, publication: Publication) -> list[Base]:
        """Policies on disk that a frame may change: the publication's own base first, then the newest ones."""
        order = sorted(
            self._policies, key=lambda key: (self._policies[key].root == publication.open.base, key), reverse=True
        )
        found = []
        for key in order[:_BASES]:
            base = Base(key, self._policies[key].directory / WEIGHTS_NAME, len(self._header), self._states[key])
            if publication.open.base != NO_HASH:  # else it is read only where a shard did not change: then it is opened
                try:
                    base.open()
                except OSError:
                    continue
            found.append(base)
        return found

    async def _on_whole(self, publication: Publication, sink: Sink) -> None:
        if not isinstance(sink, PolicySink) or publication.manifest is None:
            raise StoreError("a whole publication without its sink or manifest")
        sink.finish()
        self._sinks.pop(publication.key, None)
        began = self._began.pop(publication.key, None)
        if began is not None and self._pacing is not None:
            self._pacing.pulled(time.monotonic() - began)
        for file in self.run.manifest.model.files:
            _link(self._blob(file.digest), sink.directory / file.name)
        (sink.directory / PUBLICATION_NAME).write_bytes(pack_frames(publication.frames()))
        directory = self._folder / publication_name(publication.key)
        if directory.exists():
            _discard(directory)
        sink.directory.rename(directory)
        policy = Policy(*publication.key, publication.manifest.root, directory)
        self._policies[policy.key] = policy
        self._states[policy.key] = publication.states()
        self._handed_out(policy)
        if self.current is None or policy.key > self.current.key:
            self.current = policy
        self._evict()
        self._save_stats()
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _evict(self) -> None:
        """Remove the policies used longest ago beyond `keep`, and downloads that nothing will resume."""
        now = time.monotonic()
        by_use = sorted(self._policies, key=lambda k: (k == self._current_key(), self._used.get(k, 0.0)))
        for key in by_use[: -self.keep]:
            if now - self._used.get(key, 0.0) > GRACE_S:
                self._discard(self._policies.pop(key).directory)
                self._used.pop(key, None)
                self._states.pop(key, None)
                self._follower.forget(key)
        self._sinks = {key: sink for key, sink in self._sinks.items() if not sink.closed}
        self._began = {key: began for key, began in self._began.items() if key in self._sinks}
        if not self._swept:
            # Only an earlier process leaves any: this one removes what it drops.
            self._swept = True
            open_parts = {self._spare, *(sink.directory for sink in self._sinks.values())}
            for entry in self._folder.glob(".part-*"):
                if entry not in open_parts:
                    shutil.rmtree(entry, ignore_errors=True)

    def _discard(self, directory: Path) -> None:
        """Remove a policy so that no instant leaves a half of it under a loadable name. Its folder and the model files
        in it serve the next download, if nothing else is in it: making them anew is a fourth of a small policy's disk
        work."""
        aside, own = _set_aside(directory), (WEIGHTS_NAME, PUBLICATION_NAME)
        names = {*own, *self._file_names()}
        try:
            if self._spare is None and {entry.name for entry in os.scandir(aside)} == names:
                for name in own:
                    (aside / name).unlink()
                self._spare = aside
                return
        except OSError as exc:
            log.warning("%s: %s", aside, exc)
        remove_folder(aside)

    def _reuse(self, directory: Path) -> None:
        """Begin a download's folder with one that has the model files in it, if there is one."""
        spare, self._spare = self._spare, None
        if spare is None:
            return
        try:
            if not directory.exists() and {entry.name for entry in os.scandir(spare)} == self._file_names():
                spare.rename(directory)
                return
        except OSError as exc:
            log.warning("%s: %s", spare, exc)
        remove_folder(spare)

    def _file_names(self) -> set[str]:
        return {file.name for file in self.run.manifest.model.files}

    def _current_key(self) -> Key | None:
        return self.current.key if self.current is not None else None

    # --- model files and layout ------------------------------------------------------------------------------------

    def _blob(self, digest: bytes) -> Path:
        return self.store / "blobs" / digest.hex()

    async def _weights_layout(self) -> Layout:
        """The layout; the header of a weights file is known with it. Raises SourceError."""
        if self._layout is None:
            self._layout = decode_layout(await self._blob_bytes(self.run.manifest.model.layout, MAX_LAYOUT_BYTES))
            self._header = safetensors_header(self._layout)
        return self._layout

    def _known_layout(self) -> Layout:
        if self._layout is None:
            raise StoreError("the layout is not here yet")
        return self._layout

    async def _model_files(self) -> None:
        if not self._has_files:
            for file in self.run.manifest.model.files:
                await self._blob_bytes(file.digest, file.size)
            self._has_files = True

    async def _blob_bytes(self, digest: bytes, limit: int) -> bytes:
        """A blob from disk or from the first source that has it.

        Raises:
            SourceError: no source has it now.
        """
        path = self._blob(digest)
        if path.exists() and hash_file(path) == digest:
            return path.read_bytes()
        data = await self._follower.blob(digest, limit)
        path.unlink(missing_ok=True)
        replace_file(path, data)
        return data

    # --- verification of what is on disk ---------------------------------------------------------------------------

    def _verify(self, directory: Path) -> Publication | None:
        """The publication of a policy directory if every byte of it holds, else None. Blocking."""
        try:
            raw = read_bounded(directory / PUBLICATION_NAME, MAX_PUBLICATION_BYTES)
            publication = publication_from(self.run, split_frames(raw), revoked=True)
            layout = decode_layout(read_bounded(self._blob(self.run.manifest.model.layout), MAX_LAYOUT_BYTES))
            if publication_name(publication.key) != directory.name or publication.manifest is None:
                return None
            holds = weights_hold(directory / WEIGHTS_NAME, layout, publication)
            for file in self.run.manifest.model.files:
                holds = holds and hash_file(directory / file.name) == file.digest
        except (ProtocolError, FileNotFoundError) as exc:
            log.warning("%s: %s", directory, exc)
            return None
        return publication if holds else None

    def _save_stats(self, *, last: bool = False) -> None:
        if last or time.monotonic() - self._saved_at >= SAVE_S:
            self._saved_at = time.monotonic()
            replace_file(self.store / "stats.json", json.dumps({"bytes_received": self.bytes_received}).encode())


def weights_hold(path: Path, layout: Layout, publication: Publication) -> bool:
    """Whether a weights file is byte for byte what the publication's manifest says. Blocking."""
    header = safetensors_header(layout)
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != len(header) + layout.nbytes or os.pread(fd, len(header), 0) != header:
            return False
        for index, state in enumerate(publication.states()):
            start = index * SHARD_BYTES
            length = min(SHARD_BYTES, layout.nbytes - start)
            if hash_region(fd, len(header) + start, length) != state:
                return False
        return True
    finally:
        os.close(fd)


def _link(blob: Path, target: Path) -> None:
    """Have a model file in a policy's folder. Where it is there already it is the same file, not one of its name."""
    try:
        if os.path.samestat(target.stat(follow_symlinks=False), blob.stat()):
            return
        target.unlink()
    except FileNotFoundError:
        pass
    os.link(blob, target)


def _set_aside(directory: Path) -> Path:
    """Hide a policy's folder."""
    aside = directory.with_name(f".part-gone-{directory.name}-{time.monotonic_ns()}")
    directory.rename(aside)
    return aside


def _discard(directory: Path) -> None:
    """Remove a policy so that no instant leaves a half of it under a loadable name."""
    remove_folder(_set_aside(directory))
