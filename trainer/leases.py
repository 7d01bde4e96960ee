"""Who may get a lease now, and which: pure functions of the state, the window and the request.

Pacing. Let p be the newest published policy step, b the step of the next batch to close, and q the rollouts that may
still enter a batch, in batches. A lease is issued iff `b + floor(q) - p <= max_staleness` and `b + floor(q) < steps`:
its first rollouts will be trained at step b + floor(q). It is cut to what fits before that bound (`room`), so that its
last rollouts are not too old either.

A lease that came back empty, whose rollouts no validator could decide or that did not hold, is issued again with the
same nonce, tasks and samples before anything fresh is, to somebody who never had it: the same tokens come back, and
dropping a lease, or having it dropped by a friend, gains nothing. Who lost one gets nothing new until it came back from
somebody else, and who loses several in a row waits longer each time. All who never returned anything together hold a
quarter of what may be under way, those of one address an eighth: keys are free, and would else hold all of it.

A lease that is `overdue`, out for several times as long as leases usually take, is not waited for: it leaves the
rollouts under way, its owner gets no second one beside it, and whoever lost the lease it repeats is not held back for
it. It may come back all the same and counts again then. Else two keys that earned trust could hold everything until the
last second of a lease, again and again, and be called honest.

Not covered: signing and answering (`leasing`), batches (`batches`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from protocol.draws import keyed
from protocol.manifest import RunManifest
from protocol.records import Lease
from protocol.state import LeaseState, NodeState, PolicyState, RunState
from trainer.window import Window

GRACE_MS = 10_000
"""Added to a lease's duration before it expires: the reply and the first bytes of the upload travel too."""


FREE_FAILURES = 2
"""Leases in a row a node may lose without waiting: an engine that restarts, a connection that broke."""

BACKOFF_MS = 1_000
BACKOFF_MAX_MS = 300_000
"""The wait doubles with each further lease lost in a row, up to five minutes. Without it one key fills the ledger with
leases taken and given up."""

NEWCOMERS_SHARE = 4
"""Nodes without an accepted rollout together hold this fraction of the rollouts that may be under way, until a
validator has seen them: that is also all the unverified work they can give the validators. More lets free keys starve
the run; less makes honest strangers wait longer for their first lease."""

ADDRESS_SHARE = 8
"""The same for the newcomers of one address: one machine with many fresh keys is half of the newcomers at most."""


OVERDUE_TIMES = 4
"""Median return times after which a lease is overdue: the slowest of thousands in a demo took 4.6 medians. Less lets
more be leased than fits whenever machines differ, and rollouts go stale; more lets who sits on leases stop the others
for longer."""

OVERDUE_MIN_MS = 2_000
"""And never sooner: a lease of a small model takes 0.2 s, and any machine pauses for a second."""


@dataclass(frozen=True)
class Bounds:
    """What the operator, not the manifest, decides about leases."""

    max_bytes: int
    """Bound on the compressed submission of a lease."""
    open_leases: int
    """Open leases of one active node."""


@dataclass(frozen=True)
class Decision:
    """`issue` a new lease, send one `again`, or `wait` for the reason given; `leave` when waiting is pointless."""

    kind: str
    reason: str = ""
    lease: Lease | None = None
    """The lease to sign, for `issue`."""
    lease_id: bytes = b""
    """The open lease to send once more, for `again`."""


def batch_rollouts(manifest: RunManifest) -> int:
    """Rollouts a batch is closed at."""
    return manifest.leases.tasks_per_step * manifest.leases.samples_per_task


def overdue_ms(window: Window, manifest: RunManifest) -> int:
    """How long a lease is out before nobody waits for it: several median return times, at most its duration."""
    if not window.usual_ms:
        return manifest.leases.lease_ms
    return min(manifest.leases.lease_ms, max(OVERDUE_MIN_MS, OVERDUE_TIMES * window.usual_ms))


def overdue(state: RunState, window: Window, now_ms: int) -> set[bytes]:
    """Open leases that are out for longer; the time the coordinator was away does not count."""
    assert state.manifest is not None
    before = now_ms - overdue_ms(window, state.manifest)
    found = set()
    for lease_id in window.open:  # oldest first
        held = state.leases[lease_id]
        if held.time >= before:
            break
        if held.time + window.outage_ms(held.index) < before:
            found.add(lease_id)
    return found


def in_flight(window: Window, step: int | None = None, late: Collection[bytes] = ()) -> int:
    """Rollouts that may still enter a batch: leased, being checked, or accepted and waiting (q times batch size).

    Args:
        step: count only those of this policy step or older: batches take the oldest first, so no others are before it.
        late: open leases that are not waited for.
    """
    return sum(
        len(group.rollouts)
        for lease_id in window.live
        if lease_id not in late
        for group in window.groups(lease_id)
        if group.status in ("open", "undecided", "accepted") and (step is None or group.step <= step)
    )


def room(state: RunState, window: Window, manifest: RunManifest, step: int, late: Collection[bytes] = ()) -> int:
    """Rollouts of policy `step` that may still be leased: what fits before it is too old, and before the last step."""
    last = min(step + manifest.leases.max_staleness + 1, manifest.steps)
    return (last - window.batches) * batch_rollouts(manifest) - in_flight(window, step, late)


def pacing(state: RunState, window: Window, manifest: RunManifest, late: Collection[bytes] = ()) -> str:
    """Why nobody gets a lease now; empty when leases flow."""
    if state.finished is not None:
        return "the run is finished"
    if state.newest_policy is None:
        return "no weights are published yet"
    left = room(state, window, manifest, state.newest_policy.step, late)
    # Less than one group of room would be overrun by the next one. It waits, unless the next batch needs it.
    if left > 0 and (
        left >= manifest.leases.samples_per_task or in_flight(window, None, late) < batch_rollouts(manifest)
    ):
        return ""
    if state.newest_policy.step + manifest.leases.max_staleness + 1 >= manifest.steps:
        return "enough rollouts are under way for the last step"
    return "enough rollouts are under way; waiting for the learner's next weights"


def decide(
    state: RunState,
    window: Window,
    node: NodeState,
    *,
    capacity: int,
    uploading: frozenset[bytes],
    secret: bytes,
    bounds: Bounds,
    now_ms: int,
    present: Collection[bytes] = (),
    neighbours: Collection[bytes] = (),
    census: Census | None = None,
) -> Decision:
    """Answer one `lease.next`.

    Args:
        capacity: rollouts the node's engine takes at once.
        uploading: leases whose upload is arriving now; they are not sent again.
        secret: the coordinator's, 32 bytes: ids and nonces derive from it and the number of leases so far.
        now_ms: the coordinator's time.
        present: keys of inference nodes that were heard from lately.
        neighbours: keys that speak from this node's address, its own included.
        census: of this very state, where the caller has it already.
    """
    manifest, chain = state.manifest, state.chain
    assert manifest is not None and chain is not None
    if node.role != "inference":
        return Decision("leave", f"{node.role} nodes get no leases")
    if node.state == "suspended":
        return Decision("leave", f"this node is suspended: {node.reason}")
    if state.finished is not None:
        return Decision("leave", "the run is finished")
    if node.state == "paused":
        return Decision("wait", f"a second validator is checking this node's rollouts ({node.reason})")
    held = [state.leases[lease_id] for lease_id in node.open_leases]
    held.sort(key=lambda lease: lease.index)
    late = overdue(state, window, now_ms)
    sits = not late.isdisjoint(node.open_leases - uploading)
    limit = 1 if node.state == "probation" or sits else bounds.open_leases
    if len(held) >= limit:
        again = next((lease for lease in held if lease.lease_id not in uploading), None)
        if again is None:
            return Decision("wait", "its uploads are still arriving")
        return Decision("again", lease_id=again.lease_id)
    if state.may_lease(node.key):
        return Decision("wait", "a node in probation has one lease at a time; the last one is being checked")
    wait_s = (node.lost_time + backoff_ms(node.unreturned) - now_ms) / 1000
    if wait_s > 0:
        return Decision("wait", f"its last {node.unreturned} leases brought nothing; the next one in {wait_s:.0f} s")
    if is_held_back(state, window, node, present, now_ms, late):
        return Decision("wait", "its last lease is being done again by another node")
    policy = state.newest_policy
    if policy is None:
        return Decision("wait", "no weights are published yet")
    if node.accepted == 0:
        crowd = _crowd(state, window, manifest, neighbours, census or Census.of(state, window))
        if crowd:
            return Decision("wait", crowd)
    lease = reissue(state, window, node, capacity, late)
    if lease is None:
        refusal = pacing(state, window, manifest, late)
        if refusal:
            return Decision("wait", refusal)
        size = _size(manifest, node, capacity, room(state, window, manifest, policy.step, late))
        lease = _fresh(window, manifest, policy, size, secret)
    fixed = Lease(
        lease_id=keyed(secret, "lease", window.leases)[:16],
        manifest=chain.hash,
        epoch=lease.epoch,
        step=lease.step,
        root=lease.root,
        environment=lease.environment,
        nonce=lease.nonce,
        tasks=lease.tasks,
        samples=lease.samples,
        max_new_tokens=manifest.sampling.max_new_tokens,
        duration_ms=manifest.leases.lease_ms,
        max_bytes=bounds.max_bytes,
    )
    return Decision("issue", lease=fixed)


def _size(manifest: RunManifest, node: NodeState, capacity: int, left: int) -> tuple[int, int]:
    """(tasks, samples) of this node's next lease: what its engine takes and there is room for, at least one."""
    rules = manifest.leases
    if node.accepted == 0:
        samples = min(rules.samples_per_task, max(1, rules.probation_first_rollouts))
        return max(1, min(rules.tasks_per_lease, rules.probation_first_rollouts // samples)), samples
    return max(1, min(rules.tasks_per_lease, min(capacity, left) // rules.samples_per_task)), rules.samples_per_task


def backoff_ms(lost: int) -> int:
    """How long a node waits after its `lost`-th lease in a row that brought nothing."""
    return 0 if lost <= FREE_FAILURES else min(BACKOFF_MAX_MS, BACKOFF_MS << min(lost - FREE_FAILURES - 1, 20))


def is_held_back(
    state: RunState,
    window: Window,
    node: NodeState,
    present: Collection[bytes],
    now_ms: int,
    late: Collection[bytes] = (),
) -> bool:
    """Whether this node has lost a lease that somebody else is doing again, or could do.

    Without this a node could look at a lease, give it up and take the next one until it likes what it sampled. It ends
    when the lease came back, its policy is too old, whoever took it is overdue, or nobody took it for as long as it
    takes to be overdue: a stranger that takes it and sits on it, or is there and never asks, idles nobody for long.
    """
    manifest = state.manifest
    assert manifest is not None
    for lease_id, lost in window.lost.items():
        if lost.owner != node.key or now_ms >= lost.time + manifest.leases.lease_ms:
            continue
        nonce = state.leases[lease_id].lease.nonce
        if nonce not in window.again:
            with_others = [one for one in window.open if state.leases[one].lease.nonce == nonce]
            if not with_others or any(one not in late for one in with_others):
                return True  # somebody has it now
            continue
        if now_ms >= lost.time + overdue_ms(window, manifest):
            continue
        had = window.owners.get(nonce, set())
        if any(key not in had and state.nodes[key].state in ("active", "probation") for key in present):
            return True
    return False


def unverified(state: RunState, window: Window, keys: Collection[bytes]) -> int:
    """Rollouts leased to these keys that no validator has decided yet, those that were not uploaded included."""
    held = [*window.open, *(state.submissions[index].lease_id for index in window.undecided)]
    return sum(state.leases[lease_id].rollouts for lease_id in held if state.leases[lease_id].owner in keys)


@dataclass(frozen=True)
class Census:
    """What is the same for every newcomer who asks at one state."""

    newcomers: frozenset[bytes]
    """Inference nodes none of whose rollouts was accepted yet."""
    crowded: bool
    """One more first lease does not fit, whoever takes it."""

    @staticmethod
    def of(state: RunState, window: Window) -> Census:
        manifest = state.manifest
        assert manifest is not None
        newcomers = frozenset(
            key for key, node in state.nodes.items() if node.role == "inference" and node.accepted == 0
        )
        held = unverified(state, window, newcomers)
        most = _under_way(manifest) // NEWCOMERS_SHARE
        return Census(newcomers, bool(held) and held + manifest.leases.probation_first_rollouts > most)


def _under_way(manifest: RunManifest) -> int:
    return (manifest.leases.max_staleness + 1) * batch_rollouts(manifest)


def _crowd(
    state: RunState, window: Window, manifest: RunManifest, neighbours: Collection[bytes], census: Census
) -> str:
    """Why one more first lease does not fit; empty when it does. One always fits."""
    if census.crowded:
        return "enough newcomers are at work; one place is free when one of them is done"
    first = manifest.leases.probation_first_rollouts
    near = unverified(state, window, census.newcomers.intersection(neighbours))
    if near and near + first > _under_way(manifest) // ADDRESS_SHARE:
        return "enough newcomers of this address are at work; one place is free when a validator has seen one of them"
    return ""


def _fresh(window: Window, manifest: RunManifest, policy: PolicyState, size: tuple[int, int], secret: bytes) -> Lease:
    tasks, samples = size
    environment = manifest.environments[window.leases % len(manifest.environments)]
    return Lease(
        lease_id=bytes(16),
        manifest=bytes(32),
        epoch=policy.epoch,
        step=policy.step,
        root=policy.root,
        environment=environment.digest,
        nonce=keyed(secret, "nonce", window.leases),
        tasks=tuple(range(window.next_task, window.next_task + tasks)),
        samples=samples,
        max_new_tokens=0,
        duration_ms=0,
        max_bytes=0,
    )


def reissue(
    state: RunState, window: Window, node: NodeState, capacity: int, late: Collection[bytes] = ()
) -> Lease | None:
    """What this node takes over of the oldest lease that waits to be done again: fresh enough, no more than its own
    leases hold, and nothing it ever had itself. The rest goes to the next one who asks."""
    manifest = state.manifest
    assert manifest is not None
    rooms: dict[int, int] = {}
    for nonce, waiting in window.again.items():
        lease = state.leases[waiting.lease_id].lease
        if lease.step not in rooms:
            rooms[lease.step] = room(state, window, manifest, lease.step, late)
        if rooms[lease.step] <= 0 or node.key in window.owners.get(nonce, ()):
            continue
        tasks, samples = _size(manifest, node, capacity, rooms[lease.step])
        fitting = tasks * samples // lease.samples
        if fitting:
            return replace(lease, lease_id=bytes(16), tasks=tuple(waiting.tasks[:fitting]))
    return None


def ends_at(window: Window, held: LeaseState) -> int:
    """When a lease's duration is over, in ledger milliseconds; the time the coordinator was away does not count."""
    return held.time + held.lease.duration_ms + GRACE_MS + window.outage_ms(held.index)


def expired(state: RunState, window: Window, now_ms: int, uploading: frozenset[bytes]) -> list[LeaseState]:
    """Open leases whose duration is over; the time the coordinator was away does not count."""
    out = []
    for lease_id in window.open:
        held = state.leases[lease_id]
        if now_ms > ends_at(window, held) and lease_id not in uploading:
            out.append(held)
    return out
