"""Phantoms: inference keys that the operator works under, so that some jobs have a known answer (RULES 6).

Each draw period's secret gives `PER_PERIOD` keys. Whoever holds the coordinator's secret can join the run with one of
them and work like any stranger. Some of its leases, drawn by the same secret, are plants: the answer to them is altered
in one thing on purpose. Nobody can tell a phantom from a stranger before the period's secret is shown; then everybody
can name its keys and its plants, and no key of it gets another lease, for anybody can sign with it by then.

    joins with a key of period q    while the newest period is q - `AHEAD` to q: it may be old when it is named
    works                           until q is nearly full (`over`)
    is named                        when q is revealed

Not covered: what is altered (`trainer.plants`), who runs a phantom (`node.plant`), what a wrong verdict on one means
(`protocol.distrust`: it is a wrong verdict like any other).
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol import draws
from protocol.identity import Identity

PER_PERIOD = 8
"""Keys that one period's secret gives. Fewer run out before the period does; more are more keys to look for. Another
number makes audits look for other keys than were used."""

AHEAD = 3
"""Periods whose keys are in use beside the newest one's. More lets a phantom be older when its secret is shown, and
names it later; without any a phantom would be no older than 256 submissions of the run."""

LAST_SUBMISSIONS = 32
"""Of a period no phantom of it gets a lease while these are entered: a lease takes time, and its answer should be
judged before the secret is shown."""

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Share of plants among the leases of a period's key 0, 1, ... and so on. Whoever is honest towards newcomers only
meets keys that are old; who is honest towards old keys only meets some that are new."""


@dataclass(frozen=True)
class Phantom:
    """Which key of which period."""

    period: int
    number: int


def identity(secret: bytes, number: int) -> Identity:
    """The key pair of one phantom of a period.

    Args:
        secret: the draw period's, 32 bytes.
        number: 0 to `PER_PERIOD` - 1.
    """
    return Identity.from_seed(draws.keyed(secret, "phantom", number))


def keys(secret: bytes) -> dict[bytes, int]:
    """Public key -> number, of all phantoms of a period."""
    return {identity(secret, number).public: number for number in range(PER_PERIOD)}


def is_plant(secret: bytes, number: int, lease_id: bytes) -> bool:
    """Whether a phantom alters its answer to a lease."""
    drawn = int.from_bytes(draws.keyed(secret, "plant", lease_id)[:8], "big")
    return drawn < SHARES[number % len(SHARES)] * 2.0**64


def over(period: int, newest: int, submissions: int) -> bool:
    """Whether phantoms of a period get no more leases.

    Args:
        newest: number of the newest period.
        submissions: entered in it so far.
    """
    if newest != period:
        return newest > period
    return submissions >= draws.PERIOD_SUBMISSIONS - LAST_SUBMISSIONS
