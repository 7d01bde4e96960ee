"""Publishes a folder of checkpoints that anybody's program writes: no run, no trainer, no coordinator.

    FOLDER/.shardcast/   key.pem  share.hw  code.txt  settled.json  model/  checkpoints/  published/

The first checkpoint decides what the share is: its tensors, and the files beside them. Each later one is staged
(`checkpoints`), compared with that, and published by an `Origin` of the share. One that does not fit is refused with
its reason, once, and the next is looked at: nothing that a program writes there ends the publishing.

Not covered: HTTP (`server`), limits (`terms`), what the commands print (`share_commands`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from blake3 import blake3

from protocol.commands import printable
from protocol.errors import DecodeError, ProtocolError, ReasonCode, UsageError
from protocol.files import write_atomic
from protocol.identity import Identity, load_or_create_identity
from protocol.limits import MAX_ENVELOPE_BYTES
from protocol.manifest import ModelFile
from protocol.sequences import Sequences
from shardcast import checkpoints
from shardcast.checkpoints import Found
from shardcast.codecs import Codec
from shardcast.errors import LayoutError, PublishError
from shardcast.heads import publication_name, replace_file
from shardcast.layout import layout_hash, root_of_safetensors
from shardcast.origin import Origin, read_checkpoint
from shardcast.publication import Key
from shardcast.records import NO_HASH
from shardcast.retention import folder_bytes, to_remove
from shardcast.server import wall_clock_ms
from shardcast.share import SHARE_KIND, Share, ShareManifest, make_share, open_share
from shardcast.store import read_bounded, read_publication
from shardcast.terms import Terms

STATE_NAME = ".shardcast"
LOOK_S = 1.0
"""How often a folder is looked at. Checkpoints come every few minutes; a look costs a few file names."""

NEVER_WHOLE_S = 60.0
"""A checkpoint in which nothing changed for this long and that is not whole is said to be broken."""

Say = Callable[[str, dict[str, object]], None]
"""Told what happened: words for people, and the same for programs."""


class FolderOrigin:
    """Publishes one folder as a share."""

    def __init__(
        self,
        folder: Path,
        say: Say,
        opened: Callable[[Share, Origin], None],
        *,
        state: Path | None = None,
        listen: str = "127.0.0.1:0",
        terms: Callable[[Path, Callable[[], bytes]], Terms],
        name: str = "",
        keep_bytes: int | None = None,
        pins: Collection[int] = (),
        everything: bool = False,
        codec: Codec = Codec.GAPS,
    ) -> None:
        """
        Args:
            opened: told once the share is served.
            state: where the share's key and publications are kept; by default `.shardcast` in the folder.
            terms: made with the store and what gives the share's envelope.
            name: what the share is called; by default as the folder.
            keep_bytes: publications beyond this many bytes are removed, oldest first.
            pins: steps that are kept.
            everything: publish also the older ones of the checkpoints that are there at first, in order.

        Raises:
            UsageError: the folder is not there.
        """
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is no folder; give one with checkpoints (safetensors) in it, or a run directory"
            )
        self.folder = folder
        self.state = state if state is not None else folder / STATE_NAME
        self.share: Share | None = None
        """Known from the first checkpoint on."""
        self.origin: Origin | None = None
        self._say = say
        self._opened = opened
        self._listen = listen
        self._terms = terms
        self._name = printable(name or folder.resolve().name)
        self._keep_bytes = keep_bytes
        self._pins = pins
        self._everything = everything
        self._codec = codec
        self._identity: Identity = load_or_create_identity(self.state / "key.pem")
        self._settled: dict[str, str] = self._load_settled()
        """Checkpoint folder's name -> hash of the mark it had when it was published or refused."""
        self._roots: dict[Key, tuple[bytes, bytes]] = {}
        """Root of each publication, and the one it applies to."""
        self._seen: dict[str, tuple[str, float]] = {}
        """Checkpoint folder's name -> hash of its mark, and the monotonic time at which it was first seen."""
        self._waited = False
        self._ending = threading.Event()

    async def run_forever(self) -> None:
        """Publish each checkpoint as it becomes whole, until cancelled.

        Raises:
            UsageError: the address cannot be bound, or the share's own files are damaged.
            OSError: the disk is full, or the folder went away.
        """
        try:
            await self._open_share()
            while True:
                await self._look()
                if self.origin is not None:
                    self.origin.refresh_head()
                    self._retain(self.origin)
                await asyncio.sleep(LOOK_S)
        finally:
            self._ending.set()
            if self.origin is not None:
                await self.origin.close()

    # --- the share -------------------------------------------------------------------------------------------------

    async def _open_share(self) -> None:
        """Go on with the share that is there."""
        path = self.state / "share.hw"
        if not path.exists():
            return
        try:
            share = open_share(read_bounded(path, MAX_ENVELOPE_BYTES))
        except ProtocolError as exc:
            raise UsageError(
                f"{path} does not hold ({exc}); restore it, or remove {self.state} for a new share"
            ) from exc
        if share.manifest.origin != self._identity.public:
            raise UsageError(f"{self.state / 'key.pem'} is not the key of {path}; restore the right one")
        await self._serve(share)

    async def _begin_share(self, found: Found) -> None:
        """Make the share that a first checkpoint decides."""
        layout = await asyncio.to_thread(checkpoints.layout_of, found)
        files = await asyncio.to_thread(checkpoints.read_model_files, found)
        manifest = ShareManifest(
            name=self._name[:500],
            created=wall_clock_ms(),
            origin=self._identity.public,
            layout=layout_hash(layout),
            weights=checkpoints.weights_name(found),
            files=tuple(ModelFile(name, len(data), blake3(data).digest()) for name, data in sorted(files.items())),
        )
        (self.state / "model").mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(self.state / "model" / name, data)
        share = make_share(self._identity, manifest, Sequences(self.state / "sequences.json").next(SHARE_KIND))
        write_atomic(self.state / "share.hw", share.envelope.raw)
        await self._serve(share)

    async def _serve(self, share: Share) -> None:
        self.share = share
        raw = share.envelope.raw
        self.origin = Origin(
            self.state,
            identity=self._identity,
            listen=self._listen,
            run=share.as_run(),
            terms=self._terms(self.state / "published", lambda: raw),
            codec=self._codec,
        )
        await self.origin.start()
        self._opened(share, self.origin)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Publish what became whole since the last look."""
        found = [
            one for one in await asyncio.to_thread(checkpoints.find, self.folder, time.time()) if self._is_new(one)
        ]
        ready = [one for one in found if self._is_quiet(one) and await self._is_whole(one)]
        if not found and self.share is None and not self._waited:
            self._waited = True
            self._say(f"waits for a first checkpoint (safetensors) in {self.folder}", {"waiting": str(self.folder)})
        if self.share is None and not self._everything:
            for one in ready[:-1]:
                if one.step not in self._pins:
                    self._settle(one)
                    newer = "a newer one is there; publish with --all to pass on all of them"
                    self._refuse(one, PublishError(newer, ReasonCode.STALE_SEQUENCE))
            ready = [one for one in ready[:-1] if one.step in self._pins] + ready[-1:]
        for one in ready:
            try:
                await self._publish(one)
                self._settle(one)
            except* (DecodeError, LayoutError, PublishError) as group:
                error = _first(group)
                if not (isinstance(error, PublishError) and error.code == ReasonCode.LENGTH_MISMATCH):
                    self._settle(one)  # looked at again only when it changes
                    self._refuse(one, error)

    def _is_quiet(self, found: Found) -> bool:
        """Whether nothing in it changed for a while: by its files' times, or by what was seen of it here, so that a
        file server's clock that is ahead holds nothing up."""
        now, mark = time.monotonic(), _digest(found)
        if self._seen.get(found.folder.name, ("", 0.0))[0] != mark:
            self._seen[found.folder.name] = (mark, now)
        return max(found.age_s, now - self._seen[found.folder.name][1]) >= checkpoints.QUIET_S

    async def _is_whole(self, found: Found) -> bool:
        if await asyncio.to_thread(checkpoints.is_whole, found):
            return True
        if time.monotonic() - self._seen[found.folder.name][1] > NEVER_WHOLE_S:
            self._settle(found)
            self._refuse(
                found, LayoutError("a weights file is shorter than its header says, is none, or may not be read")
            )
        return False

    async def _publish(self, found: Found) -> None:
        """Stage, compare and publish one checkpoint. Raises LayoutError, PublishError."""
        if self.share is None:
            await self._begin_share(found)
        origin, share = self.origin, self.share
        if origin is None or share is None:
            raise PublishError("the share is not open")
        newest = origin.store.keys[-1] if origin.store.keys else None
        step = found.step if found.step is not None else (newest[1] + 1 if newest is not None else 0)
        key = (0, step)
        if newest is not None and key < newest and key not in origin.store.keys:
            raise PublishError(
                f"it is older than {publication_name(newest)}, which is published", ReasonCode.STALE_SEQUENCE
            )
        await self._compare_files(found, share)
        target = self.state / "checkpoints" / f"step-{step:08d}"
        if key in origin.store.keys:
            target = self.state / "checkpoints" / "again"
        layout = await asyncio.to_thread(checkpoints.stage, found, step, target, self._ending.is_set)
        if layout_hash(layout) != share.manifest.layout:
            shutil.rmtree(target, ignore_errors=True)
            raise PublishError(
                "it has other tensors, shapes or dtypes than the share began with; publish it as another one"
            )
        checkpoint = read_checkpoint(target)
        if checkpoint is None:
            raise PublishError(f"{target} vanished; leave {self.state} to this program")
        if key in origin.store.keys or (found.step is None and newest is not None):
            if await self._is_known(origin, key if key in origin.store.keys else newest, target):
                shutil.rmtree(target, ignore_errors=True)
                return
            if key in origin.store.keys:
                shutil.rmtree(target, ignore_errors=True)
                raise PublishError(
                    f"{publication_name(key)} was published with other weights; write it under a new number",
                    ReasonCode.HASH_MISMATCH,
                )
        publication = await origin.publish(checkpoint)
        for other in target.parent.iterdir():
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
        origin.server.counters.newest = origin.store.keys[-1]
        manifest = publication.manifest
        root = manifest.root.hex() if manifest is not None else ""
        size = folder_bytes(origin.store.folder(key))
        self._say(
            f"published step {step}, root {root[:16]}: {size / 1e6:.1f} of {publication.open.raw_bytes / 1e6:.1f} MB",
            {"published": step, "root": root, "bytes": size, "bytes_full": publication.open.raw_bytes},
        )

    async def _compare_files(self, found: Found, share: Share) -> None:
        """Whether the files beside the weights are the share's. Raises PublishError."""
        files = await asyncio.to_thread(checkpoints.read_model_files, found)
        for file in share.manifest.files:
            data = files.pop(file.name, None)
            if data is None or len(data) != file.size or blake3(data).digest() != file.digest:
                what = "lacks" if data is None else "has another"
                raise PublishError(
                    f"it {what} {file.name} than the share began with; publish it as another share (--store ANOTHER)",
                    ReasonCode.HASH_MISMATCH,
                )
        if files:
            raise PublishError(f"it has {sorted(files)[0]}, which the share began without; publish it as another share")

    async def _is_known(self, origin: Origin, key: Key | None, target: Path) -> bool:
        """Whether a staged checkpoint is what was published at `key`."""
        manifest = read_publication(origin.store.folder(key), origin.run).manifest if key is not None else None
        root = await asyncio.to_thread(root_of_safetensors, target / "model.safetensors")
        return manifest is not None and manifest.root == root

    def _retain(self, origin: Origin) -> None:
        """Remove what is over the limit of bytes and nobody downloads."""
        if self._keep_bytes is None:
            return
        sizes = {key: folder_bytes(origin.store.folder(key)) for key in origin.store.keys}
        if sum(sizes.values()) <= self._keep_bytes:
            return
        for key in to_remove(sizes, self._keep_bytes, self._pins, origin.server.in_use, self._bases(origin)):
            origin.store.remove(key)
            self._roots.pop(key, None)
            self._say(f"removed step {key[1]} (--keep-bytes)", {"removed": key[1], "bytes": sizes[key]})

    def _bases(self, origin: Origin) -> dict[Key, Key | None]:
        """What each publication applies to; None for one that stands alone."""
        for key in origin.store.keys:
            if key not in self._roots:
                publication = read_publication(origin.store.folder(key), origin.run)
                root = publication.manifest.root if publication.manifest is not None else NO_HASH
                self._roots[key] = (root, publication.open.base)
        places = {root: key for key, (root, _) in sorted(self._roots.items())}
        return {key: places.get(base) for key, (_, base) in self._roots.items()}

    # --- what was looked at ----------------------------------------------------------------------------------------

    def _is_new(self, found: Found) -> bool:
        return self._settled.get(found.folder.name) != _digest(found)

    def _settle(self, found: Found) -> None:
        self._settled[found.folder.name] = _digest(found)
        replace_file(self.state / "settled.json", json.dumps(self._settled).encode())

    def _load_settled(self) -> dict[str, str]:
        """A damaged file only costs looking at everything again."""
        try:
            stored = json.loads((self.state / "settled.json").read_text())
            return {str(name): str(mark) for name, mark in dict(stored).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def _refuse(self, found: Found, error: ProtocolError) -> None:
        self._say(
            f"{printable(found.folder.name)} is left out: {printable(str(error))}",
            {"refused": found.folder.name, "reason": str(error.code), "message": str(error)},
        )


def _digest(found: Found) -> str:
    return blake3(json.dumps(found.mark).encode()).hexdigest()


def _first(group: BaseExceptionGroup[ProtocolError]) -> ProtocolError:
    """The first plain error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, ProtocolError):
        raise error
    return error
