"""Who waits for what, in plain words: pure functions of the fold and the window, for people.

`next_batch` says what the run as a whole waits for, `member` what one of its members waits for. The words end up in
status.json, on the live screen and in heartbeat replies (`node status`); no decision reads them.

Not covered: whether a process lives (`trainer.roster`), which the ledger does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protocol.records import JobDrawn
from protocol.state import NodeState, RunState, SubmissionState
from trainer.leases import batch_rollouts, pacing
from trainer.window import Window

NAMES = 3
"""Names in one sentence; the rest is counted."""


def next_batch(state: RunState, window: Window) -> str:
    """What has to happen before the next batch closes, or the run ends; empty when nothing has to."""
    manifest = state.manifest
    if manifest is None or state.finished is not None:
        return ""
    step, policy = window.batches, state.newest_policy
    if policy is None:
        return "the first weights: the learner makes them, the origin publishes them"
    if policy.step < step - 1 or (step >= manifest.steps and policy.step < manifest.steps):
        return f"the learner and the origin: the weights of step {policy.step + 1}"
    if step >= manifest.steps:
        left = len(window.unjudged)
        return f"the last verdicts: {left} submission{'s' * (left != 1)}, {_judges(state, window)}" if left else ""
    counts = dict.fromkeys(("accepted", "undecided", "open"), 0)
    for lease_id in window.live:
        for group in window.groups(lease_id):
            if group.status in counts:
                counts[group.status] += len(group.rollouts)
    wanted = batch_rollouts(manifest)
    parts = [f"{min(wanted, counts['accepted'])} of {wanted} rollouts for batch {step}"]
    if counts["undecided"]:
        parts.append(f"{counts['undecided']} {_judges(state, window)}")
    if counts["open"]:
        owners = {state.leases[lease_id].owner for lease_id in window.open}
        parts.append(f"{counts['open']} being sampled by {names(_called(state, owners))}")
    elif not counts["undecided"] and counts["accepted"] < wanted:
        parts.append("no node holds a lease")
    return "; ".join(parts)


def member(state: RunState, window: Window, node: NodeState, validators: int) -> str:
    """What one member waits for; empty while it has work, or has nothing more to do here.

    Args:
        validators: how many live, admitted validators there are.
    """
    if state.finished is not None or node.state == "suspended":
        return ""
    newest = state.newest_policy
    if node.role == "relay":
        return "" if newest is not None else "the first weights"
    if node.role == "validator":
        busy = any(job.validator == node.key for _, job in open_jobs(state, window))
        return "" if busy else "rollouts to check"
    if node.role != "inference" or node.open_leases:
        return ""
    if node.undecided and not validators:
        return "a validator"
    if node.state == "paused":
        return "a second verdict"
    if node.undecided and node.state == "probation":
        return "its first verdict"
    reason = "" if state.manifest is None else pacing(state, window, state.manifest)
    if newest is None:
        return "the first weights"
    return "next weights" if reason else "a lease"


def names(called: Iterable[str]) -> str:
    """A few names as a list, the rest as a number."""
    known = sorted(called)
    shown = ", ".join(known[:NAMES])
    return f"{shown} and {len(known) - NAMES} more" if len(known) > NAMES else shown


def _judges(state: RunState, window: Window) -> str:
    """With whom the undecided rollouts are."""
    drawn = {job.validator for _, job in open_jobs(state, window)}
    return f"with {names(_called(state, drawn))}" if drawn else "without a validator to check them"


def _called(state: RunState, keys: Iterable[bytes]) -> list[str]:
    return [state.nodes[key].name or key.hex()[:8] for key in keys if key in state.nodes]


def open_jobs(state: RunState, window: Window) -> Iterator[tuple[SubmissionState, JobDrawn]]:
    """Drawn jobs without a verdict."""
    for index in window.unjudged:
        submission = state.submissions[index]
        for number, job in submission.jobs.items():
            if number not in submission.verdicts:
                yield submission, job
