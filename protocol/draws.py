"""Which validator judges a submission, and whether a second one does: keyed draws that nobody else can predict.

Each draw is BLAKE3 keyed with a draw period's secret over (purpose, submission digest, number, round, attempt), so it
is independent of who submitted and of earlier draws. The number counts the submissions of the period: a ledger index
would let the coordinator put harmless entries in front until it likes the draw. The secret of a period is committed to
in the ledger before the period's first submission and revealed after its last verdict: then everybody recomputes every
draw.

Not covered: when periods open and close (`trainer.judging`), checking the draws (`verifier.audit`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping

from blake3 import blake3

PERIOD_SUBMISSIONS = 256
"""Submissions after which the next period opens, and not before: whoever opens one may choose its secret with the first
submission of it at hand. Fewer let more draws be chosen; more keep draws unproven for longer, and lose more proof if
the coordinator's secret is lost. Another number makes the fold refuse ledgers that were written with this one."""

SECOND_DRAW_IN_PROBATION = 4.0
"""A node in probation is checked by a second validator this many times as often as an active one."""

SPOT_CHECKS = 0.02
"""Share of the accepted groups that the coordinator checks itself. Of n false ones that a validator let through none
is drawn with chance (1 - 0.02)^n. More costs the trainer's machine as much per rollout as a validator's; less lets a
lying validator go on for longer. Another number makes audits look for other checks than were made."""


def keyed(secret: bytes, purpose: str, *parts: bytes | int) -> bytes:
    """32 bytes from the secret (32 bytes); integers enter as u64 big-endian, every part with its length."""
    raw = purpose.encode() + b"\0"
    for part in parts:
        piece = part if isinstance(part, bytes) else struct.pack(">Q", part)
        raw += struct.pack(">I", len(piece)) + piece
    return blake3(raw, key=secret).digest()


def period_secret(own: bytes, number: int) -> bytes:
    """A draw period's secret, from the coordinator's own (32 bytes)."""
    return keyed(own, "period", number)


def candidates(present: Collection[bytes], others: Mapping[bytes, bool], previous: bytes | None) -> list[bytes]:
    """Whom one round's job is drawn from, sorted: the first of these sets that is not empty.

        present, without the validators of the other rounds and the one drawn before for this round
        present, without the validators of the other rounds
        present, without those validators of other rounds that found anything or have not answered

    Args:
        present: keys of the newest `validators` entry.
        others: validator of each other round's current job -> whether its verdict is there and wholly inconclusive.
        previous: validator of this round's earlier attempt, if there was one.
    """
    fresh = sorted(set(present) - set(others))
    silent = sorted(key for key in set(present) if others.get(key, True))
    return [key for key in fresh if key != previous] or fresh or silent


def draw_validator(
    secret: bytes, digest: bytes, number: int, round_number: int, attempt: int, candidates: Collection[bytes]
) -> bytes | None:
    """One of `candidates` (public keys), uniformly; None when there is none.

    Args:
        digest: the submission's BLAKE3, 32 bytes.
        number: submissions of the period before this one.
        attempt: jobs drawn before for this round; another attempt is another draw.
    """
    ordered = sorted(candidates)
    if not ordered:
        return None
    drawn = int.from_bytes(keyed(secret, "validator", digest, number, round_number, attempt)[:16], "big")
    return ordered[drawn % len(ordered)]


def job_id(secret: bytes, number: int, round_number: int, attempt: int) -> bytes:
    """16 bytes naming one draw."""
    return keyed(secret, "job", number, round_number, attempt)[:16]


def job_token(secret: bytes, job: bytes) -> bytes:
    """The 16-byte capability to fetch a job's bytes; only the drawn validator is told."""
    return keyed(secret, "token", job)[:16]


def wants_second(
    secret: bytes,
    digest: bytes,
    number: int,
    rate: float,
    probation: bool,
    factor: float = SECOND_DRAW_IN_PROBATION,
) -> bool:
    """Whether a second validator checks this submission whatever the first one says.

    Args:
        rate: share of an active node's submissions, 0..1; `factor` times that in probation.
    """
    share = min(1.0, rate * (factor if probation else 1.0))
    return int.from_bytes(keyed(secret, "second", digest, number)[:8], "big") < share * 2.0**64


def wants_check(secret: bytes, digest: bytes, number: int, round_number: int, task: int) -> bool:
    """Whether the coordinator checks the rollouts of a group itself that the verdict of this round accepted.

    Args:
        task: place of the group's task in the lease.
    """
    drawn = int.from_bytes(keyed(secret, "check", digest, number, round_number, task)[:8], "big")
    return drawn < SPOT_CHECKS * 2.0**64
