"""What became of each node that was told to misbehave: its own log against the public ledger.

    submitted   rollouts it sent             identical   those that equal what the lease forces, rightly accepted
    dishonest   those that don't             caught      those of them that validators rejected
    identical_rejected   identical ones that any validator rejected: a false rejection, whoever sent them

For a kind whose dishonesty is what it doesn't send, `dishonest` are the rollouts it withheld on purpose, and `caught`
those that by the time it was suspended were with another node under the same nonce, and came back and were judged.

Not covered: the rest of the summary (`trainer.summary`); whether verdicts are right (`verifier audit`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

from protocol import codec
from protocol.errors import ProtocolError
from protocol.records import REJECT, Lease, Submission
from protocol.state import RunState, SubmissionState
from trainer.deceivers import WITHHOLDING

_GIVEN_UP = ("failed", "expired")
"""How the ledger's reasons for a lost lease begin. One that a suspension closed was not withheld by its owner."""


def fate(run_dir: Path, state: RunState, kind: str, key: bytes, log: Path) -> dict[str, Any]:
    """What became of one node that was told to misbehave, by its own log and the public ledger."""
    truth = own_words(log)
    node = state.nodes.get(key)
    found: dict[str, Any] = {
        "submitted": 0,
        "dishonest": 0,
        "identical": 0,
        "identical_rejected": 0,
        "caught": 0,
        "first_caught_after_tokens": None,
        "node_state": node.state if node else "never joined",
    }
    tokens = 0
    for submission in sorted((s for s in state.submissions.values() if s.owner == key), key=lambda s: s.index):
        lease = state.leases[submission.lease_id].lease
        lengths = _token_counts(run_dir, submission)
        refused = rejected(submission)
        for position, outcome in enumerate(submission.outcomes):
            dishonest = truth.get(_request(lease, position), False)
            tokens += lengths[position] if position < len(lengths) else 0
            found["submitted"] += 1
            found["dishonest" if dishonest else "identical"] += 1
            found["identical_rejected"] += not dishonest and position in refused
            # What was on its way when its node was suspended is discarded unread by the run; its verdict still tells.
            if dishonest and (outcome.status == "rejected" or (outcome.status == "discarded" and position in refused)):
                found["caught"] += 1
                if found["first_caught_after_tokens"] is None:
                    found["first_caught_after_tokens"] = tokens
    if kind in WITHHOLDING:
        _add_withheld(found, state, key, truth)
    return found


def _add_withheld(found: dict[str, Any], state: RunState, key: bytes, truth: dict[str, bool]) -> None:
    """Rollouts withheld on purpose are `dishonest`; those done again by another node are `caught`.

    Caught means attributed: the node is suspended, the same nonce was with somebody else by then, and what came back
    was accepted, or rejected: the other may be dishonest too, and withholding has bought this one nothing either way.
    """
    node = state.nodes.get(key)
    until = node.suspended_index if node is not None and node.suspended_index is not None else -1
    known: set[tuple[bytes, int]] = set()
    """(nonce, task) of what came back: a re-issue may name a part of the tasks only."""
    for submission in state.submissions.values():
        held = state.leases[submission.lease_id]
        if submission.owner != key and held.index <= until:
            known |= {
                (held.lease.nonce, held.lease.tasks[position // held.lease.samples])
                for position, outcome in enumerate(submission.outcomes)
                if outcome.status in ("accepted", "rejected")
            }
    tokens = 0
    for held in sorted((lease for lease in state.leases.values() if lease.owner == key), key=lambda lease: lease.index):
        lease = held.lease
        tokens += held.rollouts * lease.max_new_tokens
        given_up = held.status == "closed" and held.reason.startswith(_GIVEN_UP)
        if not given_up or not truth.get(_request(lease, 0), False):
            continue
        caught = lease.samples * sum((lease.nonce, task) in known for task in lease.tasks)
        found["dishonest"] += held.rollouts
        found["caught"] += caught
        if caught and found["first_caught_after_tokens"] is None:
            found["first_caught_after_tokens"] = tokens


def _request(lease: Lease, position: int) -> str:
    """What the engine called a rollout: the name its own log has."""
    return f"{lease.lease_id.hex()}:{lease.tasks[position // lease.samples]}:{position % lease.samples}"


def _token_counts(run_dir: Path, submission: SubmissionState) -> list[int]:
    path = run_dir / "submissions" / f"{submission.lease_id.hex()}.hws"
    try:
        raw = zstandard.ZstdDecompressor().decompress(
            path.read_bytes(), max_output_size=max(1, submission.intent.raw_length), allow_extra_data=False
        )
        return [len(rollout.tokens) // 4 for rollout in codec.decode(Submission, raw).rollouts]
    except (OSError, zstandard.ZstdError, ProtocolError):  # what cannot be read has no tokens to count
        return []


def rejected(submission: SubmissionState) -> set[int]:
    """Positions of rollouts that any validator rejected, whatever was decided afterwards."""
    return {
        position
        for verdict in submission.verdicts.values()
        for position, outcome in enumerate(verdict.verdict.outcomes)
        if outcome.outcome == REJECT
    }


def own_words(log: Path) -> dict[str, bool]:
    """Request id -> whether the program says it was dishonest; of two lines the later one counts."""
    truth: dict[str, bool] = {}
    if not log.exists():
        return truth
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if isinstance(row, dict) and "request_id" in row:
            truth[str(row["request_id"])] = bool(row.get("dishonest"))
    return truth
