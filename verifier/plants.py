"""The audit of plants: which keys were phantoms, and whether anything they altered was trained (`protocol.phantoms`).

When a draw period's secret is shown, its phantoms follow from it, and which of their leases were plants. A batch that
holds a rollout of one was closed by a coordinator that knew it to be false: `batch-wrong`, whatever validators said.

Not covered: verdicts on plants, which are derived again like all others (`verdicts`), and whether the coordinator
named the wrong ones (`spot_audit`); phantoms of periods whose secret is not shown, nor those of periods that the run
ended before.
"""

from __future__ import annotations

from collections import Counter

from protocol import phantoms
from protocol.errors import ReasonCode
from protocol.phantoms import Phantom
from protocol.state import RunState
from verifier.archive import RunArchive, batch_file
from verifier.report import Report


def phantoms_of(state: RunState) -> dict[bytes, Phantom]:
    """Key -> phantom, of every period whose secret is shown."""
    return {
        key: Phantom(period, number)
        for period, held in enumerate(state.periods)
        if held.secret is not None
        for key, number in phantoms.keys(held.secret).items()
    }


def check_plants(archive: RunArchive, state: RunState, report: Report) -> None:
    """Count the plants of the periods that are shown; each batch that holds one goes into `report`."""
    known = phantoms_of(state)
    plants = set()
    for index, fact in archive.facts.submissions.items():
        found = known.get(fact.owner)
        if found is None:
            continue
        report.phantom_submissions += 1
        secret = state.periods[found.period].secret
        assert secret is not None
        if phantoms.is_plant(secret, found.number, fact.lease.lease_id):
            plants.add(index)
    report.plants = len(plants)
    for index, closed in archive.facts.batches.items():
        held = Counter(entry.submission for entry in closed.entries if entry.submission in plants)
        if held:
            named = ", ".join(f"{count} rollouts of submission {number}" for number, count in sorted(held.items()))
            text = f"ledger entry {index}: holds plants, which the coordinator knew to be false: {named}"
            report.fail(batch_file(closed), ReasonCode.BATCH_WRONG, text)
