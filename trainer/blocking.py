"""Addresses a run has no traffic with: `trainer block ADDRESS RUN` notes them, the coordinator follows (RULES 11).

    RUN/blocked.json  {"addresses": ["203.0.113.7", "2001:db8::/48"]}

A blocked address gets no connection from anybody's door here, its open ones are cut, and no relay address in it is
probed or handed to a member; members drop it with their next heartbeat. All of that within a few seconds.

Not covered: what members already have open with each other, and firewalls, which stop packets too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.admission import parse_network
from protocol.errors import UsageError
from protocol.files import write_atomic
from trainer.news import News

MAX_BLOCKED = 4096
"""Addresses and networks in the file. More belong into a firewall; here every new connection is compared with all."""


def block_file(run_dir: Path) -> Path:
    return run_dir / "blocked.json"


def read_blocked(run_dir: Path) -> list[str]:
    """The blocked addresses and networks of a run, sorted.

    Raises:
        UsageError: the file is there and does not hold.
    """
    path = block_file(run_dir)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["addresses"]
        return sorted(str(parse_network(text)) for text in found)[:MAX_BLOCKED]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"{path} does not hold ({exc}); whoever edited it must correct it: "
            '{"addresses": ["203.0.113.7", "2001:db8::/48"]}'
        ) from exc


def change(run_dir: Path, address: str, *, undo: bool = False) -> list[str]:
    """Block an address or network, or take that back. Returns all that are blocked now.

    Raises:
        UsageError: no address, too many, or nothing to undo.
    """
    try:
        network = str(parse_network(address))
    except ValueError as exc:
        raise UsageError(f"{address!r} is no IP address or network, for example 203.0.113.7 or 2001:db8::/48") from exc
    known = set(read_blocked(run_dir))
    if undo and network not in known:
        raise UsageError(f"{address} is not blocked here; blocked are: {', '.join(sorted(known)) or 'none'}")
    known = known - {network} if undo else known | {network}
    if len(known) > MAX_BLOCKED:
        raise UsageError(f"more than {MAX_BLOCKED} addresses are blocked; block networks, or use a firewall")
    write_atomic(block_file(run_dir), json.dumps({"addresses": sorted(known)}, indent=1).encode() + b"\n")
    return sorted(known)


@dataclass
class Blocking:
    """Follows the file.

    Args:
        apply: told all blocked addresses and networks, whenever they changed.
    """

    run_dir: Path
    apply: Callable[[list[str]], None]
    news: News
    _mark: tuple[int, int] | None = None
    _known: list[str] = field(default_factory=list)

    def refresh(self) -> None:
        """Look at the file; cheap when it did not change. A file that does not hold changes nothing."""
        try:
            found = block_file(self.run_dir).stat()
            mark: tuple[int, int] | None = (found.st_mtime_ns, found.st_ino)
        except FileNotFoundError:
            mark = None
        if mark == self._mark:
            return
        self._mark = mark
        try:
            addresses = read_blocked(self.run_dir)
        except UsageError as exc:
            self.news.say(str(exc))
            return
        if addresses != self._known:
            self._known = addresses
            self.apply(addresses)
            more = f" and {len(addresses) - 5} more" if len(addresses) > 5 else ""
            listed = ", ".join(addresses[:5])
            self.news.say(f"all traffic with {listed}{more} is stopped" if listed else "no address is blocked any more")
