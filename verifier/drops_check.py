"""The audit of dropped results: every `evidence.drop` computed again from ledger and details (`drops`).

Not covered: what is pooled over a node's rollouts (`evidence_check`).
"""

from __future__ import annotations

import functools
import math

from protocol.errors import ProtocolError, ReasonCode
from protocol.state import RunState
from verifier.archive import RunArchive
from verifier.drops import drop_evidence
from verifier.report import Report

_KEPT = 4096
"""Verdicts whose rewards are kept at once: one suspension reads a run's whole past, and the next one too."""


def check_drops(archive: RunArchive, state: RunState, report: Report) -> None:
    """Hold every number that suspended a key for keeping results back against what the archive gives."""

    @functools.lru_cache(maxsize=_KEPT)
    def details(index: int) -> tuple[tuple[float, int], ...]:
        fact = archive.facts.verdicts.get(index)
        if fact is None:
            return ()
        return tuple((one.reward, len(one.logprobs) // 4) for one in archive.details(fact).rollouts)

    def seen(submission: int, rollout: int) -> tuple[float, int] | None:
        """(reward, sampled tokens) of an accepted rollout."""
        index = state.submissions[submission].accepting(rollout)
        known = details(index) if index is not None else ()
        return known[rollout] if rollout < len(known) else None

    for index, said in archive.facts.drops.items():
        try:
            ours = drop_evidence(state, said.key, seen, said.upto)
        except (ProtocolError, OSError) as exc:
            report.unchecked.append((f"ledger/{index}", f"rests on rewards that can't be read: {exc}"))
            continue
        exact = (said.lost, said.returned) == (ours.lost, ours.returned)
        close = all(
            math.isclose(getattr(said, name), getattr(ours, name), rel_tol=1e-6, abs_tol=1e-9)
            for name in ("log_e", "lost_mean", "returned_mean")
        )
        if not exact or not close:
            report.fail(
                f"ledger/{index}",
                ReasonCode.VERDICT_WRONG,
                f"says {said.lost} lost, {said.returned} returned, log e {said.log_e:.4g}, but it is {ours.lost}, "
                f"{ours.returned}, {ours.log_e:.4g}",
            )
