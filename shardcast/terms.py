"""On which terms a server serves: how fast, how much, whom, and over what.

Not covered: the caps and deadlines that hold for every server (`gate`, `sending`), and passes of a run (`passes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardcast.allow import AllowList
from shardcast.quotas import Quota
from shardcast.rates import Bucket
from shardcast.tls import Certificate


@dataclass(frozen=True)
class Terms:
    """What one server grants. Without any, it serves everybody as fast as it can."""

    up: Bucket | None = None
    """Bytes per second of all answers together."""
    quota: Quota | None = None
    """Bytes a day by network; over it: 429, `quota`, with Retry-After."""
    allow: AllowList | None = None
    """Whom to serve; others: 403, `not-granted`."""
    certificate: Certificate | None = None
    """Serve over TLS with this certificate."""
    share: Callable[[], bytes] | None = None
    """The envelope of the share that is served (`share`), for those who come with its code."""
    in_use_s: float = 30.0
    """Seconds after its last request for which a publication counts as being downloaded."""


OPEN_TERMS = Terms()


def quota_in(store: Path, limit: int | None) -> Quota | None:
    """A quota that is kept in a server's store; None without a limit."""
    return None if limit is None else Quota(limit, store / "quotas.json")
