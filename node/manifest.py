"""The manifest chain on a member's side: what this machine holds, and how it learns of the next link (RULES 1).

A heartbeat, a lease or a job names the newest link's hash. When it is not the one held, the whole chain is fetched
from the coordinator's HTTP door, walked from the genesis manifest that the run id names, and kept in the home. Every
link is signed by the run's root, so it does not matter who hands it over.

A chain that is shorter than the held one is an old copy and changes nothing. One that differs from it inside is a fork
by the run's root: it is kept aside and not followed.

Not covered: what a link may say and whether it holds (`protocol.chain`), and what the member does about it (`member`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from node.door import ask_door
from node.log import EventLog
from protocol.chain import MAX_CHAIN_BYTES, Chain, pack_updates, split_updates
from protocol.errors import ManifestError, ProtocolError, ReasonCode, TransportError
from protocol.files import write_atomic
from protocol.manifest import Run

ASK_EVERY_S = 5.0
"""The same unknown hash is asked about no more often."""


class HeldManifest:
    """One run's manifest chain on this machine.

    Args:
        genesis: the run as its id names it.
        folder: where `updates.hw` is kept.
        monotonic: seconds.
    """

    def __init__(
        self,
        genesis: Run,
        folder: Path,
        *,
        session: aiohttp.ClientSession,
        log: EventLog,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._genesis = genesis
        self._path = folder / "updates.hw"
        self._session = session
        self._log = log
        self._monotonic = monotonic
        self._fetching = asyncio.Lock()
        self._asked = 0.0
        self._told_fork = False
        self.chain = self._load()

    @property
    def run(self) -> Run:
        """The run with the newest manifest."""
        return self.chain.current

    @property
    def hash(self) -> bytes:
        """What names the newest link: the run id while there is none."""
        return self.chain.hash

    def knows(self, link: bytes) -> bool:
        """Whether `link` is one of the chain held."""
        return self.chain.holds(link)

    def at(self, link: bytes) -> Run:
        """The run as of one link. Raises ManifestError: unknown."""
        return self.chain.at(link)

    async def learn(self, doors: Sequence[str]) -> bool:
        """Fetch the chain from the first door that has it; True when it brought something new.

        Args:
            doors: URLs of the coordinator's HTTP door, best first.

        Raises:
            TransportError: none answered now, or it is too soon to ask again.
            ManifestError: what came does not hold.
        """
        async with self._fetching:
            if self._asked and self._monotonic() - self._asked < ASK_EVERY_S:
                raise TransportError("the manifest chain was asked for a moment ago", ReasonCode.BUSY)
            self._asked = self._monotonic()
            failure: ProtocolError = TransportError("no address of the coordinator's HTTP door is known")
            for door in dict.fromkeys(door for door in doors if door):
                try:
                    raw = await ask_door(self._session, door, self._genesis.id, "updates", MAX_CHAIN_BYTES)
                    return self.take(split_updates(raw))
                except ProtocolError as exc:
                    failure = exc
            raise failure

    def take(self, links: list[bytes]) -> bool:
        """Follow a longer chain; True when it is one. Raises ManifestError."""
        chain = Chain.walk(self._genesis.envelope.raw, links, expect=self._genesis.id)
        held = self.chain.updates
        common = min(len(links), len(held))
        if links[:common] != held[:common]:
            aside = self._path.with_name("updates-fork.hw")
            write_atomic(aside, pack_updates(links))
            self._log.event("manifest.fork", level="error", links=len(links), path=str(aside))
            if not self._told_fork:
                self._log.say(
                    f"WARNING: the run's root signed two different continuations of its manifest; the other one is in "
                    f"{aside}. This node stays with the one it followed; ask the run's operator"
                )
            self._told_fork = True
            raise ManifestError("the run's root signed two different continuations of its manifest")
        if len(links) <= len(held):
            return False
        write_atomic(self._path, pack_updates(links))
        self.chain = chain
        self._log.event("manifest.updated", links=len(links), manifest=chain.hash)
        return True

    def _load(self) -> Chain:
        """The chain an earlier process kept; a damaged file counts as none and is fetched again."""
        genesis = self._genesis
        try:
            links = split_updates(self._path.read_bytes())
            return Chain.walk(genesis.envelope.raw, links, expect=genesis.id)
        except FileNotFoundError:
            return Chain(genesis)
        except ProtocolError as exc:
            self._log.event("manifest.damaged", level="warning", path=str(self._path), reason=str(exc))
            return Chain(genesis)
