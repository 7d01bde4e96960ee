"""The summary of a run, computed from its archive and nothing else.

`summarise` reads sealed ledger segments, verdict details, submissions and `metrics.jsonl`. What only a demo knows
(which nodes were told to misbehave, and their own log of it; memory; seconds) is passed in as `Witness`.

Not covered: whether any of it is true. That is `verifier audit`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol import codec, distrust
from protocol.errors import ProtocolError, ReasonCode
from protocol.manifest import Run, open_manifest
from protocol.records import VerdictDetails
from protocol.segments import read_segments
from protocol.state import RunState, SubmissionState, fold
from trainer.fates import fate, rejected

WINDOW = 10
"""Steps averaged for `reward_first` and `reward_last`; fixed by the summary's definition."""


@dataclass
class Witness:
    """What the person who staged a run knows and the network does not.

    `cheats` maps a kind to (node key, path of its own log); everything else is measured by the supervisor.
    """

    cheats: dict[str, tuple[bytes, Path]] = field(default_factory=dict)
    peak_pss_mib: float = 0.0
    seconds: float = 0.0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of `metrics.jsonl`; a torn last line (a kill while writing) is left out."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_state(run_dir: Path) -> tuple[Run, RunState]:
    """The run and the fold over its sealed ledger."""
    run = open_manifest((run_dir / "manifest.hw").read_bytes())
    log = read_segments(run_dir / "ledger", run)
    return run, fold(sealed.entry for sealed in log.entries)


def summarise(run_dir: Path, witness: Witness | None = None) -> dict[str, Any]:
    """The object of `summary.json` (DESIGN section 8)."""
    witness = witness or Witness()
    _, state = read_state(run_dir)
    metrics = latest_steps(read_metrics(run_dir / "metrics.jsonl"))
    dishonest_keys = {key for key, _ in witness.cheats.values()}
    honest = [s for s in state.submissions.values() if s.owner not in dishonest_keys]
    rewards = _rewards_by_step(run_dir, state, honest)
    steps_seen = sorted(rewards)
    counts = _count(state.submissions.values())
    status = _read_json(run_dir / "status.json")
    traffic = _traffic(run_dir)
    return {
        "steps": max((row["step"] + 1 for row in metrics), default=0),
        "reward_first": _mean(r for s in steps_seen[:WINDOW] for r in rewards[s]),
        "reward_last": _mean(r for s in steps_seen[-WINDOW:] for r in rewards[s]),
        "rollouts_accepted": counts["accepted"],
        "rollouts_rejected": counts["rejected"],
        "rollouts_inconclusive": counts["inconclusive"],
        "rollouts_pending": counts["pending"],
        "rollouts_discarded": counts["discarded"],
        "rollouts_unverified_trained": distrust.unverified(state.submissions, state.trained),
        "validators_checked": _checks(state, status),
        "honest_verified": sum(len(s.outcomes) for s in honest if s.verdicts),
        "honest_rejected": sum(len(rejected(s)) for s in honest),
        "cheats": {kind: fate(run_dir, state, kind, key, log) for kind, (key, log) in sorted(witness.cheats.items())},
        "bytes_full": sum(full for _, full in traffic.values()),
        "bytes_sent": sum(sent for sent, _ in traffic.values()),
        "bytes_sent_by": {name: sent for name, (sent, _) in sorted(traffic.items())},
        "http_fallbacks": int(status.get("http_fallbacks", 0)),
        "trainer_idle_share": _mean(row["idle_share"] for row in metrics if "idle_share" in row),
        "staleness_mean": _mean(row["staleness_mean"] for row in metrics if "staleness_mean" in row),
        "peak_pss_mib": round(witness.peak_pss_mib, 1),
        "seconds": round(witness.seconds, 1),
    }


def _checks(state: RunState, status: dict[str, Any]) -> dict[str, int]:
    """The coordinator's own checks of validators: how many is its word, whom they suspended is in the ledger."""
    counts = status.get("validators_checked")
    said = counts if isinstance(counts, dict) else {}
    return {
        "checked": int(said.get("checked", 0)),
        "contradicted": sum(node.reason == ReasonCode.VALIDATOR_WRONG for node in state.nodes.values()),
        "left_out": int(said.get("left_out", 0)) + int(said.get("waiting", 0)),
        "unconfirmed": int(said.get("unconfirmed", 0)),
    }


def latest_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a step, the last written: a learner that was killed repeats the steps it had not saved."""
    steps = {row["step"]: row for row in rows if row.get("event") == "step" and isinstance(row.get("step"), int)}
    return [steps[step] for step in sorted(steps)]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4) if numbers else 0.0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _traffic(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Per origin and relay: weight bytes sent, and what full checkpoints to the same receivers would have cost."""
    files = {"origin": run_dir / "published" / "stats.json"}
    files |= {path.parents[3].name: path for path in run_dir.glob("nodes/*/runs/*/relay/stats.json")}
    stats = {name: _read_json(path) for name, path in files.items()}
    return {name: (int(s.get("bytes_sent", 0)), int(s.get("bytes_full", 0))) for name, s in stats.items() if s}


def _count(submissions: Iterable[SubmissionState]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for submission in submissions:
        for outcome in submission.outcomes:
            counts[outcome.status] += 1
    return counts


def _rewards_by_step(run_dir: Path, state: RunState, submissions: list[SubmissionState]) -> dict[int, list[float]]:
    """Verified rewards of all accepted rollouts, by the policy step that sampled them."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for submission in submissions:
        step = state.leases[submission.lease_id].lease.step
        for round_, held in submission.verdicts.items():  # each rollout's is in the details of the verdict that took it
            accepted = [
                i for i, o in enumerate(submission.outcomes) if o.status == "accepted" and o.verdict == held.index
            ]
            details = _details(run_dir, submission, round_) if accepted else None
            if details is not None:
                rewards[step].extend(details.rollouts[i].reward for i in accepted if i < len(details.rollouts))
    return rewards


def _details(run_dir: Path, submission: SubmissionState, round_: int) -> VerdictDetails | None:
    path = run_dir / "submissions" / f"{submission.lease_id.hex()}.{round_}.hwv"
    try:
        return codec.decode(VerdictDetails, path.read_bytes())
    except (OSError, ProtocolError):  # a damaged archive is the audit's business; the summary counts what is there
        return None
