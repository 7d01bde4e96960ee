"""What the coordinator asks its checking process, and what that answers: one line of JSON each. No torch.

Not covered: asking (`spot_process`), answering (`spot_worker`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from protocol.evidence import VerdictEvidence

FLOOR_S, A_TOKEN_S, CAP_S = 300.0, 0.05, 7200.0
"""What a request may take: at least, for each sampled token, at most. A token costs 2 to 5 ms of one core on a 135M
model; a thread that nobody else wants, on a busy machine, takes ten times as long. Shorter leaves out the checks of
slow machines, longer lets a process that is stuck hold up the others."""


def answer_s(tokens: int, tries: int = 0) -> float:
    """The deadline of a request: twice as long for each time that it was missed.

    Args:
        tokens: most sampled tokens that are read for it.
    """
    budget = min(CAP_S, max(FLOOR_S, A_TOKEN_S * tokens))
    return min(CAP_S, budget * 2.0 ** min(tries, 16))


@dataclass(frozen=True)
class Said:
    """One verdict on the rollouts asked about."""

    verdict: int
    """Ledger index."""
    round: int
    details: bytes
    """BLAKE3 of its details file."""
    outcomes: tuple[int, ...]
    reasons: tuple[str, ...]
    """Of every rollout, as the outcomes."""


@dataclass(frozen=True)
class Request:
    """Check some rollouts of one submission against the verdicts on them."""

    lease: bytes
    """The lease's record."""
    digest: bytes
    """BLAKE3 of the upload."""
    raw_length: int
    positions: tuple[int, ...]
    said: tuple[Said, ...]
    confirm: bool = False
    """The whole upload, and what contradicts a verdict under other bounds too; otherwise a first look."""
    deadline_s: float = 300.0
    """What the answer may take (`answer_s`)."""

    def to_json(self) -> str:
        said = [vars(one) for one in self.said]  # `asdict` would copy every outcome of every verdict by itself
        return json.dumps({**vars(self), "said": said}, default=bytes.hex)

    @staticmethod
    def from_json(line: str) -> Request:
        raw: dict[str, Any] = json.loads(line)
        said = tuple(
            Said(
                one["verdict"],
                one["round"],
                bytes.fromhex(one["details"]),
                tuple(one["outcomes"]),
                tuple(one["reasons"]),
            )
            for one in raw["said"]
        )
        return Request(
            lease=bytes.fromhex(raw["lease"]),
            digest=bytes.fromhex(raw["digest"]),
            raw_length=raw["raw_length"],
            positions=tuple(raw["positions"]),
            said=said,
            confirm=raw["confirm"],
            deadline_s=raw["deadline_s"],
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
