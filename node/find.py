"""From the run a person named (`protocol.targets`) to the manifest that its run id names.

Not covered: following the manifest chain later on (`manifest`), and joining (`join`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from node.backoff import Backoff
from node.errors import NodeError
from node.home import Home
from node.log import EventLog
from protocol.control import fetch_chain
from protocol.errors import ManifestError, ProtocolError
from protocol.files import write_atomic
from protocol.host import HostProcess
from protocol.limits import MAX_ENVELOPE_BYTES
from protocol.manifest import Run, open_manifest
from protocol.targets import Target

FIND_DEADLINE_S = 180.0
"""How long a first contact is tried. A run that starts at the same moment as its nodes needs most of a minute."""

_ASK_S = 10.0


@dataclass(frozen=True)
class Found:
    """A run's genesis manifest, and links of its chain that came with it (none when it was on disk)."""

    genesis: Run
    links: list[bytes]


async def find_run(target: Target, host: HostProcess, home: Home, log: EventLog) -> Found:
    """The run's manifest, from disk if this home knows it, else from its coordinator.

    A share code may name addresses that a manifest on disk does not: the coordinator moved. Then it is asked too.

    Raises:
        NodeError: nobody answered in time. ManifestError: what answered is another run.
    """
    if target.run is not None:
        known = home.path / "runs" / target.run.hex() / "manifest.hw"
        if known.exists():
            with known.open("rb") as file:
                genesis = open_manifest(file.read(MAX_ENVELOPE_BYTES + 1), target.run)
            moved = tuple(a for a in target.addresses if a not in genesis.manifest.control)
            return await _asked(moved, target.run, host) or Found(genesis, [])
    loop = asyncio.get_running_loop()
    end, backoff = loop.time() + FIND_DEADLINE_S, Backoff()
    told = False
    while True:
        problems: list[str] = []
        found = await _asked(target.addresses, target.run, host, problems)
        if found is not None:
            write_atomic(home.run(found.genesis.id).path / "manifest.hw", found.genesis.envelope.raw)
            return found
        problem = problems[-1] if problems else "the share code names no address"
        if loop.time() > end or not target.addresses:
            raise NodeError(
                f"no coordinator answered within {FIND_DEADLINE_S:.0f} s ({problem}); check that the run is up and "
                "the share code is current, and ask its operator if it is"
            )
        if not told:
            log.event("coordinator.away", level="warning", kind="manifest", reason=problem)
            log.say(f"the coordinator does not answer yet ({problem}); trying on for {FIND_DEADLINE_S:.0f} s")
            told = True
        await backoff.wait()


async def _asked(
    addresses: tuple[str, ...], run: bytes | None, host: HostProcess, problems: list[str] | None = None
) -> Found | None:
    """What the first address that answers says; None when none does. Raises ManifestError."""
    for address in addresses:
        try:
            chain = await fetch_chain(host, address, _ASK_S, run)
        except ManifestError:
            raise
        except ProtocolError as exc:
            if problems is not None:
                problems.append(str(exc))
        else:
            return Found(chain.genesis, chain.updates)
    return None
