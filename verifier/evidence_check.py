"""The audit of pooled evidence: every `evidence.node` computed again from ledger and details, in one pass.

Fails as `verdict-wrong` where the numbers do not follow, and where the evidence may not condemn: below its bar without
one of the validators, or while most other nodes are no better.

Not covered: the sums themselves (`evidence`), dropped results (`audit`), whether the numbers in the details are true:
only rewards and log-probabilities are held against what the audit derives.
"""

from __future__ import annotations

import math
from collections import deque

from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence_rows import EvidenceRow
from protocol.records import NodeEvidence
from protocol.state import RunState
from verifier.archive import RunArchive
from verifier.evidence import Sums, distrusted, in_order, key_of
from verifier.report import Report


def check_node_evidence(archive: RunArchive, state: RunState, report: Report) -> None:
    """Hold every entry against what the archive gives under the manifest that was in force there."""
    groups: dict[tuple[tuple[EvidenceRow, ...], frozenset[bytes]], list[tuple[int, NodeEvidence]]] = {}
    for index, said in archive.facts.pooled.items():
        group = archive.manifest_at(index).evidence, distrusted(state, said.upto)
        groups.setdefault(group, []).append((index, said))
    for (rows, wrong), entries in groups.items():
        _check_group(archive, state, report, Sums(rows, wrong), sorted(entries, key=lambda entry: entry[1].upto))


def _check_group(
    archive: RunArchive, state: RunState, report: Report, sums: Sums, entries: list[tuple[int, NodeEvidence]]
) -> None:
    waiting = deque(in_order(state))
    for index, said in entries:
        try:
            while waiting and waiting[0][1].index < said.upto:
                submission, verdict = waiting[0]
                fact = archive.facts.verdicts[verdict.index]
                sums.add(state, submission, verdict, archive.details(fact))
                waiting.popleft()
        except (ProtocolError, OSError, KeyError) as exc:
            report.unchecked.append((f"ledger/{index}", f"rests on numbers that can't be read: {exc}"))
            continue
        wrong = _wrong(sums, state, said)
        if wrong:
            report.fail(f"ledger/{index}", ReasonCode.VERDICT_WRONG, wrong)


def _wrong(sums: Sums, state: RunState, said: NodeEvidence) -> str:
    """What does not follow; empty when all does."""
    key = said.hypothesis, said.statistic
    row = next((row for row in sums.rows if key_of(row) == key), None)
    if row is None:
        return f"says {said.hypothesis} by {said.statistic}, which the manifest in force does not sum up"
    ours = sums.evidence(said.key, key, said.upto)
    exact = (said.rollouts, said.validators) == (ours.rollouts, ours.validators)
    close = all(
        math.isclose(getattr(said, name), getattr(ours, name), rel_tol=1e-6, abs_tol=1e-9)
        for name in ("log_e", "log_all", "mean")
    )
    if not exact or not close:
        return (
            f"says log e {said.log_e:.4g} over {said.rollouts} rollouts and {said.validators} validators, but it is "
            f"{ours.log_e:.4g} over {ours.rollouts} and {ours.validators}"
        )
    if key in sums.of(said.key) and sums.vouched(state, [said.key], row, said.upto):
        return ""
    return f"condemns a node for {said.hypothesis} while most other nodes were no better, or there were none"
