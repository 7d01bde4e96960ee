"""What the coordinator asks its checking process, and what that answers: one line of JSON each. No torch.

Not covered: asking (`spot_process`), answering (`spot_worker`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from protocol.evidence import VerdictEvidence


@dataclass(frozen=True)
class Said:
    """One verdict that accepted some of the rollouts asked about."""

    verdict: int
    """Ledger index."""
    round: int
    details: bytes
    """BLAKE3 of its details file."""
    outcomes: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """Check some rollouts of one submission against the verdicts that accepted them."""

    lease: bytes
    """The lease's record."""
    digest: bytes
    """BLAKE3 of the upload."""
    raw_length: int
    positions: tuple[int, ...]
    said: tuple[Said, ...]
    confirm: bool = False
    """The whole upload, and its rejections with doubled bounds; otherwise a first look."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @staticmethod
    def from_json(line: str) -> Request:
        raw: dict[str, Any] = json.loads(line)
        said = tuple(
            Said(one["verdict"], one["round"], bytes.fromhex(one["details"]), tuple(one["outcomes"]))
            for one in raw["said"]
        )
        return Request(
            lease=bytes.fromhex(raw["lease"]),
            digest=bytes.fromhex(raw["digest"]),
            raw_length=raw["raw_length"],
            positions=tuple(raw["positions"]),
            said=said,
            confirm=raw["confirm"],
        )


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    decided: int = 0
    """Rollouts that were judged one way or the other."""
    suspicious: bool = False
    """A first look found something: it must be confirmed."""
    evidence: tuple[VerdictEvidence, ...] = ()
    failed: str = ""
    """Why nothing could be judged."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str | bytes) -> Answer:
        """Raises ValueError, TypeError, KeyError for what is none."""
        raw: dict[str, Any] = json.loads(line)
        evidence = tuple(VerdictEvidence(**one) for one in raw["evidence"])
        return Answer(int(raw["decided"]), bool(raw["suspicious"]), evidence, str(raw["failed"]))
