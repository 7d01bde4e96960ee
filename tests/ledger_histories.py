"""Histories for tests of the fold: random ones with allowed and forbidden entries, and what must hold of each.

Not covered: bytes that are no entries at all (`test_protocol_state`).
"""

from __future__ import annotations

from blake3 import blake3
from hypothesis import strategies as st

from protocol import decision
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, DropEvidence, TieLapsed
from protocol.state import ACCEPTED, DISCARDED, PENDING, REJECTED, UNDECIDED, fold
from tests.ledger_builder import Chain, identity, make_manifest

A, R, I = ACCEPT, REJECT, INCONCLUSIVE  # noqa: E741


def submitted(chain, who="ann", **lease):
    lease_id = chain.lease(who, **lease)
    return chain.submit(lease_id), chain.digest_of(lease_id)


def judged(chain, outcomes, who="ann", second=None, third=None, **lease):
    """One lease, submitted and judged by val; by vic and vin too when `second` and `third` are given."""
    number, digest = submitted(chain, who, **lease)
    last = 0
    for round_, (validator, said) in enumerate([("val", outcomes), ("vic", second), ("vin", third)], start=1):
        if said is not None:
            last = chain.verdict(chain.job(number, validator, round_), digest, validator, said, round_)
    return number, last


NAMES = ["ann", "bob", "cat", "val", "vic", "vin"]
small = st.integers(0, 7)
outcome = st.sampled_from([A, A, A, R, I])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), small, small),
        st.tuples(st.just("policy"), small, small),
        st.tuples(st.just("lease"), small, small),
        st.tuples(st.just("again"), small, small),
        st.tuples(st.just("close"), small, small),
        st.tuples(st.just("submit"), small, small),
        st.tuples(st.just("job"), small, small),
        st.tuples(st.just("verdict"), small, st.lists(outcome, min_size=4, max_size=4)),
        st.tuples(st.just("honest"), small, st.lists(outcome, min_size=4, max_size=4)),
        st.tuples(st.just("batch"), small, small),
        st.tuples(st.just("period"), small, small),
        st.tuples(st.just("reveal"), small, small),
        st.tuples(st.just("validators"), small, small),
        st.tuples(st.just("dropped"), small, small),
        st.tuples(st.just("lapse"), small, small),
    ),
    max_size=60,
)


def play(commands):
    """Turn commands into entries, allowed ones and forbidden ones alike."""
    chain = Chain(make_manifest(leases=make_manifest().leases))
    chain.open()
    for who in NAMES:
        chain.join(who, "validator" if who.startswith("v") else "inference")
    chain.policy(0)
    chain.ready("val", "vic", "vin")
    jobs, submissions, leases = [], [], []
    for name, x, y in commands:
        who = NAMES[x % 6]
        if name == "join":
            chain.join(who, ["inference", "validator", "relay"][y % 3])
        elif name == "policy":
            chain.policy(x, bytes([y]) * 32)
        elif name == "lease":
            leases.append(chain.lease(NAMES[x % 3], step=0 if y < 6 else y))
        elif name == "again" and leases:
            leases.append(chain.lease(NAMES[x % 3], nonce=chain.leases[leases[y % len(leases)]].nonce))
        elif name == "close" and leases:
            chain.close_lease(leases[-1 - x % len(leases)])
        elif name == "submit" and leases:
            lease_id = leases[-1 - x % min(2, len(leases))]
            submissions.append((chain.submit(lease_id), chain.digest_of(lease_id)))
        elif name == "job" and submissions:
            number, digest = submissions[-1 - x % len(submissions)]
            jobs.append((chain.job(number, NAMES[3 + x % 3], 1 + y % 3), digest, NAMES[3 + x % 3], 1 + y % 3))
        elif name == "period":
            chain.open_draws(0.1 if y < 6 else 0.0)
        elif name == "reveal":
            chain.reveal(x % (chain.periods + 1))
        elif name == "validators":
            chain.validators(*NAMES[3 : 3 + x % 4], *NAMES[: y // 7])
        elif name == "dropped":
            evidence = DropEvidence(identity(who).public, 0, 3, 3, 10.0 + x, 0.1, 0.9)
            chain.append("evidence.drop", evidence)
        elif name == "lapse" and submissions:
            chain.sink.time += 30_000 * y
            chain.append("tie.lapsed", TieLapsed(submissions[-1 - x % len(submissions)][0]))
        elif name == "verdict" and jobs:
            job, digest, validator, round_ = jobs[-1 - x % len(jobs)]
            chain.verdict(job, digest, validator if x < 6 else "val", y, round_)
        elif name == "honest":
            number, _ = judged(chain, y, NAMES[x % 3], second=y if x % 2 else None)
            submissions.append((number, bytes(32)))
        elif name == "batch":
            state = fold(chain.sink.entries)
            pairs = [
                [(s.index, s.verdict_index or 0, i), (s.index, s.verdict_index or 0, i + 1)]
                for s in state.submissions.values()
                for i in range(0, len(s.outcomes), 2)
            ]
            chosen = [entry for pair in pairs[y :: 1 + y] for entry in (pair if x < 6 else pair[:1])]
            chain.batch(len(state.batches) if x % 2 else x, chosen)
    return chain.sink.entries


def check_invariants(state, entries):
    for member in state.nodes.values():
        own = [s for s in state.submissions.values() if s.owner == member.key]
        flat = [o.status for s in own for o in s.outcomes]
        assert member.accepted == flat.count(ACCEPTED)
        assert member.rejected == flat.count(REJECTED)
        assert member.inconclusive == flat.count(UNDECIDED)
        assert {s.index for s in own if s.verdict_index is None and s.outcomes[0].status == PENDING} == member.undecided
        assert member.state == "suspended" or not member.rejected
        assert member.state != "suspended" or member.rejected or member.reason == "dropped-results"
        if member.suspended_index is not None:
            assert all(
                lease.index < member.suspended_index for lease in state.leases.values() if lease.owner == member.key
            )
    for submission in state.submissions.values():
        for position, result in enumerate(submission.outcomes):
            said = {(v.validator, v.verdict.outcomes[position].outcome) for v in submission.verdicts.values()}
            rejecting = {who for who, outcome in said if outcome == R}
            if submission.verdict_index is None:
                assert result.status in (PENDING, DISCARDED)
            elif submission.index not in late(state):
                accepting = {who for who, outcome in said if outcome == A}
                assert (result.status == REJECTED) == (len(rejecting) > 1)
                agreed = bool(accepting) and not rejecting
                assert (result.status == ACCEPTED) == (agreed or len(accepting - rejecting) > len(rejecting) == 1)
            if result.status == ACCEPTED:
                verdict = next(v for v in submission.verdicts.values() if v.index == result.verdict)
                assert verdict.verdict.outcomes[position].outcome == A
        assert submission.period is None or state.periods[submission.period].index < submission.index
        if submission.outcomes[0].status == PENDING and not submission.open_rounds:
            assert decision.next_round(submission) in (1, 2, 3), "it waits for something that somebody must draw"
    assert sum(member.outvoted for member in state.nodes.values()) == minority(state)
    for period in state.periods:
        if period.secret is not None:
            assert blake3(period.secret).digest() == period.opened.commitment and not period.open_jobs
    for number, position in state.trained:
        assert state.submissions[number].outcomes[position].status == ACCEPTED
    assert sum(len(b.closed.entries) for b in state.batches.values()) == len(state.trained)
    assert state.size == len(entries)


def minority(state):
    """Verdicts on rollouts, before the decision, that two others contradicted."""
    opposite = {ACCEPTED: R, REJECTED: A}
    return sum(
        len(
            {
                verdict.validator
                for verdict in submission.verdicts.values()
                if verdict.index <= submission.verdict_index
                and verdict.verdict.outcomes[position].outcome == opposite[outcome.status]
            }
        )
        for submission in state.submissions.values()
        if submission.verdict_index is not None
        for position, outcome in enumerate(submission.outcomes)
        if outcome.status in opposite
    )


def late(state):
    """Submissions with a verdict that came after they were decided: it is kept, and changes nothing."""
    return {
        s.index
        for s in state.submissions.values()
        if s.verdict_index is not None and any(v.index > s.verdict_index for v in s.verdicts.values())
    }


def base_entries():
    commands = [
        *(("honest", i % 3, [A, A, A, A]) for i in range(6)),
        ("batch", 0, 0),
        ("honest", 1, [R, A, A, A]),
        ("lease", 0, 0),
        ("submit", 0, 0),
        ("job", 0, 0),
        ("close", 0, 0),
    ]
    return play(commands)


def dump(value):
    """A canonical text of a state: containers in sorted order, everything else by repr."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{dump(k)}:{dump(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set):
        return "{" + ",".join(sorted(map(dump, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dump, value)) + "]"
    if hasattr(value, "__dict__"):
        return type(value).__name__ + dump(vars(value))
    return repr(value)
