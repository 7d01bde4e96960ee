"""What the learner writes to `metrics.jsonl`, and the statistics in it.

One JSON object a line, written before the checkpoint it describes; an `event` and a `step` name each:

    {"event": "sft", "step": 1, "steps": 200, "loss": .., "cpu_seconds": .., "done": false, "time": ..}
    {"event": "step", "step": 0, "reward_mean": .., "loss": .., ...}      step N trained policy N into N + 1
    {"event": "resume", "step": 25, ...}

A learner that replays steps after a kill does not write their rows twice. Units: seconds, nats, shares in 0..1.

Not covered: who reads them (`trainer.view`, `trainer.summary`); the reward of a run's summary comes from the ledger.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from protocol.files import write_atomic
from trainer.losses import LOG_RATIO_LIMIT


class MetricsFile:
    """Appends rows, each `(event, step)` once. One writer.

    Opening it drops a line that a kill left without its end.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._seen: set[tuple[str, int]] = set()
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            write_atomic(path, whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self._seen.add((str(row.get("event")), int(row.get("step", -1))))

    def has(self, event: str, step: int) -> bool:
        return (event, step) in self._seen

    def append(self, event: str, step: int, fields: dict[str, Any], *, again: bool = False) -> None:
        """Add a row, unless one with this event and step is there and `again` is False."""
        if self.has(event, step) and not again:
            return
        row = {"event": event, "step": step, **{k: _finite(v) for k, v in fields.items()}}
        row["time"] = round(self._clock(), 3)
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row, allow_nan=False) + "\n")
        self._seen.add((event, step))


def _finite(value: Any) -> Any:
    """JSON has no NaN; None says that there was no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ratio_statistics(logprobs_N: torch.Tensor, behaviour_N: torch.Tensor) -> dict[str, float]:
    """How far the trained policy is from the one that sampled, over N tokens.

    ratio_max: largest importance ratio.
    mismatch_kl: mean of ratio - 1 - log ratio >= 0, the k3 estimate of KL(behaviour || policy) in nats a token
        (J. Schulman, "Approximating KL divergence", 2020).
    effective_sample_size: (sum w)^2 / (N sum w^2) of the ratios w; 1 when on policy.
    """
    log_N = (logprobs_N - behaviour_N).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_N = log_N.exp()
    return {
        "ratio_max": float(ratio_N.max()),
        "mismatch_kl": float((ratio_N - 1 - log_N).mean()),
        "effective_sample_size": float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
    }


def staleness_statistics(staleness: Iterable[int]) -> dict[str, Any]:
    """Mean, maximum and histogram of steps between the policy trained and the one that sampled, a rollout each."""
    counts = Counter(staleness)
    total = max(1, sum(counts.values()))
    return {
        "staleness_mean": sum(k * n for k, n in counts.items()) / total,
        "staleness_max": max(counts, default=0),
        "staleness": {str(k): counts[k] for k in sorted(counts)},
    }
