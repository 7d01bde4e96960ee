"""The fold: the rules of trust one by one, then the same ledger giving the same state under arbitrary entries."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, draws
from protocol.errors import ProtocolError
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    BatchClosed,
    BatchEntry,
    LeaseClosed,
    LeaseFailed,
    LedgerEntry,
    Outcome,
    Verdict,
)
from protocol.state import ACCEPTED, DISCARDED, PENDING, REJECTED, UNDECIDED, PolicyHead, RunState, fold
from shardcast.records import Head
from tests.ledger_builder import START_MS, Chain, identity, make_manifest
from tests.ledger_histories import base_entries, check_invariants, dump, judged, play, steps, submitted

A, R, I = ACCEPT, REJECT, INCONCLUSIVE  # noqa: E741


@pytest.fixture(autouse=True)
def short_periods(monkeypatch):
    """Random histories open draw periods at random."""
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 0)


def opened(*members):
    """A run with a policy at step 0 and these (name, role) members."""
    chain = Chain()
    chain.open()
    members = members or [("ann", "inference"), *((who, "validator") for who in ("val", "vic", "vin"))]
    for who, role in members:
        chain.join(who, role)
    chain.policy(0)
    chain.ready(*(who for who, role in members if role == "validator"))
    return chain


def state_of(chain):
    state = fold(chain.sink.entries)
    assert state.problems == []
    return state


def problems_of(chain):
    return [text for _, text in fold(chain.sink.entries).problems]


def node(state, who):
    return state.nodes[identity(who).public]


def statuses(state, number):
    return [outcome.status for outcome in state.submissions[number].outcomes]


def test_one_accepting_verdict_decides():
    chain = opened()
    number, verdict = judged(chain, [A] * 4)
    state = state_of(chain)
    assert statuses(state, number) == [ACCEPTED] * 4
    assert state.submissions[number].verdict_index == verdict
    assert (node(state, "ann").accepted, node(state, "ann").inconclusive) == (4, 0)
    assert node(state, "ann").state == "probation"


def test_what_three_validators_could_not_decide_is_inconclusive():
    chain = opened()
    number, verdict = judged(chain, [A, A, I, A], second=[A, I, I, A], third=[I] * 4)
    state = state_of(chain)
    held = state.submissions[number]
    assert statuses(state, number) == [ACCEPTED, ACCEPTED, UNDECIDED, ACCEPTED] and held.verdict_index == verdict
    assert (node(state, "ann").accepted, node(state, "ann").inconclusive) == (3, 1)
    assert [outcome.verdict for outcome in held.outcomes] == [
        held.verdicts[2].index, held.verdicts[1].index, None, held.verdicts[2].index
    ], "a batch names the newest verdict that accepts the rollout"  # fmt: skip


def test_probation_ends_after_enough_accepted_rollouts():
    chain = opened()
    for _ in range(4):
        assert node(state_of(chain), "ann").state == "probation"
        judged(chain, [A] * 4)
    assert node(state_of(chain), "ann").state == "active"
    chain.lease("ann")
    chain.lease("ann")
    assert len(node(state_of(chain), "ann").open_leases) == 2


def test_a_node_in_probation_has_one_lease_at_a_time():
    chain = opened()
    number, _ = submitted(chain)
    assert "one lease" in state_of(chain).may_lease(identity("ann").public)
    chain.lease("ann")
    assert "one lease at a time" in problems_of(chain)[0]
    assert len(fold(chain.sink.entries).leases) == 1
    assert statuses(fold(chain.sink.entries), number) == [PENDING] * 4


def test_a_first_rejection_only_pauses():
    chain = opened()
    number, _ = judged(chain, [A, R, A, A])
    state = state_of(chain)
    assert node(state, "ann").state == "paused" and node(state, "ann").reason == "format"
    assert statuses(state, number) == [PENDING] * 4
    assert "paused" in state.may_lease(identity("ann").public)
    chain.lease("ann")
    assert "paused" in problems_of(chain)[0]


def test_a_rejection_that_is_not_repeated_is_forgiven():
    chain = opened()
    number, verdict = judged(chain, [A, R, A, A], second=[R, A, A, A], third=[I, A, A, A])
    state = state_of(chain)
    assert statuses(state, number) == [UNDECIDED, ACCEPTED, ACCEPTED, ACCEPTED]
    assert state.submissions[number].verdict_index == verdict
    assert node(state, "ann").state == "probation" and node(state, "ann").reason == ""


def test_a_repeated_rejection_suspends_and_discards_what_is_undecided():
    chain = opened()
    for _ in range(4):
        judged(chain, [A] * 4)
    other, digest = submitted(chain)
    still_open = chain.lease("ann")
    number, verdict = judged(chain, [A, R, A, A], second=[A, R, R, A])
    state = state_of(chain)
    assert statuses(state, number) == [ACCEPTED, REJECTED, UNDECIDED, ACCEPTED]
    assert statuses(state, other) == [DISCARDED] * 4
    ann = node(state, "ann")
    assert (ann.state, ann.suspended_index, ann.reason, ann.rejected) == ("suspended", verdict, "format", 1)
    # nothing that comes later changes that: not an accepting verdict, not a late submission
    chain.verdict(chain.job(other, "val"), digest, "val", [A] * 4)
    late = chain.submit(still_open)
    state = state_of(chain)
    assert node(state, "ann").state == "suspended"
    assert statuses(state, other) == statuses(state, late) == [DISCARDED] * 4
    assert 1 in state.submissions[other].verdicts, "the verdict is kept for the audit"


def test_a_second_draw_ahead_of_time_is_waited_for():
    chain = opened()
    number, digest = submitted(chain)
    job = chain.job(number, "val")
    second = chain.job(number, "vic", 2)
    chain.verdict(job, digest, "val", [A] * 4)
    assert statuses(state_of(chain), number) == [PENDING] * 4
    chain.validators("val", "vic")
    chain.verdict(second, digest, "vic", [A, A, I, R], 2)
    state = state_of(chain)
    assert statuses(state, number) == [ACCEPTED, ACCEPTED, ACCEPTED, UNDECIDED]
    assert node(state, "ann").state == "probation"


def test_verdicts_may_arrive_in_either_order():
    chain = opened()
    number, digest = submitted(chain)
    job, second = chain.job(number, "val"), chain.job(number, "vic", 2)
    chain.verdict(second, digest, "vic", [R, A, A, A], 2)
    assert node(state_of(chain), "ann").state == "paused"
    chain.verdict(job, digest, "val", [R, A, A, A])
    assert node(state_of(chain), "ann").state == "suspended"


def test_a_vanished_validators_job_is_drawn_again():
    chain = opened()
    number, digest = submitted(chain)
    first = chain.job(number, "val")
    again = chain.job(number, "vic")
    chain.verdict(again, digest, "vic", [A] * 4)
    state = state_of(chain)
    assert statuses(state, number) == [ACCEPTED] * 4
    chain.verdict(first, digest, "val", [R] * 4)
    assert "no such job is open" in problems_of(chain)[0]
    assert statuses(fold(chain.sink.entries), number) == [ACCEPTED] * 4


def test_a_verdict_counts_only_from_whom_it_was_drawn_and_for_these_bytes():
    chain = opened()
    number, digest = submitted(chain)
    job = chain.job(number, "val")
    chain.verdict(job, digest, "vic", [R] * 4)
    chain.verdict(job, bytes(32), "val", [R] * 4)
    chain.verdict(job, digest, "val", [R] * 3)
    chain.verdict(job, digest, "val", [Outcome(7, "x")] * 4)
    chain.verdict(job, digest, "val", [R] * 4, round_=2)
    assert len(problems_of(chain)) == 5
    assert node(fold(chain.sink.entries), "ann").state == "probation"


def test_the_second_validator_is_another_one_and_admitted():
    chain = opened(("ann", "inference"), ("val", "validator"), ("bob", "inference"))
    number, _ = submitted(chain)
    chain.job(number, "val")
    chain.job(number, "val", 2)
    chain.job(number, "bob", 2)
    chain.job(number, "stranger", 2)
    chain.validators()
    chain.job(number, "val")
    assert len(problems_of(chain)) == 4 and "not present" in problems_of(chain)[3]
    assert list(fold(chain.sink.entries).submissions[number].jobs) == [1]


def test_an_expired_lease_is_issued_again_under_its_nonce():
    chain = opened(("ann", "inference"), ("bob", "inference"), ("val", "validator"))
    first = chain.lease("ann")
    chain.close_lease(first, "expired")
    again = chain.lease("bob", nonce=chain.leases[first].nonce)
    state = state_of(chain)
    assert state.leases[first].status == "closed" and state.leases[first].reason == "expired"
    assert state.leases[again].reissue_of == first and state.leases[again].owner == identity("bob").public
    chain.submit(first)
    chain.close_lease(again)
    chain.lease("bob", nonce=chain.leases[first].nonce, tasks=(5, 6))
    assert ["no open lease" in problems_of(chain)[0], "other tasks" in problems_of(chain)[1]] == [True, True]


def test_a_batch_holds_accepted_rollouts_once():
    chain = opened()
    number, verdict = judged(chain, [A, A, R, A], second=[A, A, I, A], third=[A] * 4)
    chain.batch(0, [(number, verdict, 0), (number, verdict, 1)])
    state = state_of(chain)
    assert state.trained == {(number, 0), (number, 1)} and state.batches[0].closed.step == 0
    other, second = judged(chain, [A] * 4)
    pair = [(other, second, 0), (other, second, 1)]
    for step, entries, expected in [
        (0, pair, "a second batch"),
        (1, [(number, verdict, 0), (number, verdict, 1)], "trained twice"),
        (1, [(number, verdict, 2), (number, verdict, 3)], "not accepted"),
        (1, [(other, second + 1, 0), (other, second + 1, 1)], "not accepted"),
        (1, [(number, verdict, 9)], "there is none"),
        (1, [*pair, *pair], "trained twice"),
        (1, pair[:1], "whole or not at all"),
        (3, pair, "out of order"),
        (1, [], "empty"),
    ]:
        chain.batch(step, entries)
        assert expected in problems_of(chain)[-1]
    assert len(problems_of(chain)) == 9
    assert fold(chain.sink.entries).trained == {(number, 0), (number, 1)}
    chain.append("batch", BatchClosed(1, 5, tuple(BatchEntry(*item) for item in pair), bytes(32)))
    assert "another epoch" in problems_of(chain)[-1]
    chain.batch(1, pair)  # what was refused changes nothing else
    assert len(problems_of(chain)) == 10


def test_nothing_too_old_or_beyond_the_last_step_is_trained():
    chain = Chain(make_manifest(steps=4))
    chain.open()
    for who, role in (("ann", "inference"), ("val", "validator")):
        chain.join(who, role)
    chain.policy(0)
    chain.ready("val")
    done = [judged(chain, [A] * 4) for _ in range(6)]
    for step in range(4):
        number, verdict = done[step]
        chain.batch(step, [(number, verdict, i) for i in range(4)])
    assert "too old" in problems_of(chain)[0], "batch 3 of policy 0, and the staleness bound is 2"
    chain.policy(3)
    for step in (3, 4):
        number, verdict = judged(chain, [A] * 4, step=3)
        chain.batch(step, [(number, verdict, i) for i in range(4)])
    assert "of a run of 4 steps" in problems_of(chain)[1] and len(problems_of(chain)) == 2
    chain.finish(3)
    assert "ends after 3 of 4 steps" in problems_of(chain)[2]
    chain.finish(4)
    chain.lease("ann", step=3)
    assert "the run is finished" in problems_of(chain)[3]


def test_whoever_issues_a_lease_may_not_change_its_terms():
    """The terms decide what is sampled and checked: a ledger's owner could else lease two tokens instead of eight."""
    chain = opened()
    for change, expected in [
        ({"manifest": bytes(32)}, "another manifest"),
        ({"environment": b"\1" * 32}, "none of the run's"),
        ({"max_new_tokens": 2}, "2 tokens"),
        ({"tasks": tuple(range(9))}, "first lease larger"),
        ({"duration_ms": 1}, "lasts 1 ms"),
    ]:
        chain.lease("ann", **change)
        assert expected in problems_of(chain)[-1]
    small = chain.lease("ann", max_bytes=10)
    chain.submit(small, bytes(11))
    chain.submit(small, bytes(10), raw_length=1 << 20)
    assert ["larger than its lease" in text for text in problems_of(chain)[5:]] == [True, True]
    chain.join("bob", "inference")
    chain.lease("bob", max_bytes=11)
    assert "bounds its upload otherwise" in problems_of(chain)[-1]
    chain.append("incarnation")
    chain.lease("bob", max_bytes=11)
    assert len(problems_of(chain)) == 8, "the operator may change its settings between two starts"


def test_nobody_but_its_node_ends_a_lease_before_its_time():
    """A lost lease counts against its node: the coordinator could else lose for it those that went badly."""
    chain = opened(("ann", "inference"), ("bob", "inference"), ("val", "validator"))
    lease = chain.lease("ann")
    other = chain.lease("bob")

    def refused(reason, subject=b""):
        known = len(problems_of(chain))
        chain.append("lease.closed", LeaseClosed(lease, reason), subject)
        problems = problems_of(chain)
        assert len(problems) == known + 1, reason
        return problems[-1]

    duration = chain.leases[lease].duration_ms
    assert "its time is not over" in refused("expired")
    assert refused("failed: so says the coordinator")
    word = LeaseFailed(lease, "x")
    assert "own word" in refused("failed: x", chain.sealed("bob", "lease.failed", word))
    assert "own word" in refused("failed: x", chain.sealed("ann", "lease.failed", replace(word, lease_id=other)))
    assert "own word" in refused("failed: x", chain.sealed("ann", "heartbeat", word))
    assert "for a reason that is one" in refused("owner suspended: format")
    assert "for a reason that is one" in refused("lost")
    chain.sink.time += duration - 1000
    assert "its time is not over" in refused("expired")
    chain.sink.time += 5000
    chain.append("incarnation")  # five seconds of that the coordinator was away, and nobody could bring anything
    assert "its time is not over" in refused("expired")
    chain.close_lease(other, "failed: out of memory")
    chain.sink.time += 5000
    chain.append("lease.closed", LeaseClosed(lease, "expired"))
    state = fold(chain.sink.entries)
    assert [held.status for held in state.leases.values()] == ["closed", "closed"]
    assert state.problems[-1][0] < len(chain.sink.entries) - 2


def test_the_same_tokens_are_not_trained_under_a_second_lease():
    chain = opened(("ann", "inference"), ("bob", "inference"), ("val", "validator"))
    number, verdict = judged(chain, [A] * 4)
    nonce = next(iter(chain.leases.values())).nonce
    again, second = judged(chain, [A] * 4, who="bob", nonce=nonce)
    chain.batch(0, [(number, verdict, 0), (number, verdict, 1)])
    chain.batch(1, [(again, second, 0), (again, second, 1)])
    assert "trained twice" in problems_of(chain)[0]


def test_a_suspended_nodes_rollouts_enter_no_batch():
    chain = opened()
    number, verdict = judged(chain, [A] * 4)
    judged(chain, [R] * 4, second=[R] * 4)
    chain.batch(0, [(number, verdict, 0)])
    assert "suspended node" in problems_of(chain)[0]


def test_policies_only_rise_and_have_one_root():
    chain = opened()
    chain.policy(1, b"\x01" * 32)
    chain.policy(1, b"\x01" * 32)
    chain.policy(0, bytes(32), epoch=1)
    state = state_of(chain)
    assert (state.newest_policy.epoch, state.newest_policy.step) == (1, 0)
    assert set(state.policies) == {(0, 0), (0, 1), (1, 0)}
    chain.policy(1, b"\x02" * 32)
    chain.policy(2, b"\x02" * 32)
    assert len(problems_of(chain)) == 2


def test_leases_name_a_known_policy_and_a_known_node():
    chain = opened()
    chain.lease("ann", step=7)
    chain.lease("ann", root=b"\x09" * 32)
    chain.lease("nobody")
    chain.lease("val")
    chain.lease("ann", tasks=(1, 1))
    chain.lease("ann", samples=1_000_000)
    assert len(problems_of(chain)) == 6 and fold(chain.sink.entries).leases == {}


def test_a_key_keeps_its_role_and_may_join_again():
    chain = opened()
    chain.join("ann", "inference")
    assert len(state_of(chain).nodes) == 4
    chain.join("ann", "relay")
    assert "one role" in problems_of(chain)[0]


def test_nothing_comes_before_the_run_is_opened_and_nothing_opens_it_twice():
    chain = Chain()
    chain.join("ann", "inference")
    chain.open()
    chain.open()
    chain.append("no.such.event")
    chain.finish(chain.manifest.steps)
    state = fold(chain.sink.entries)
    assert len(state.problems) == 3 and state.nodes == {} and state.finished.steps == chain.manifest.steps


def test_entries_out_of_order_are_refused():
    chain = opened()
    state = RunState()
    for index, entry in enumerate(chain.sink.entries):
        state.apply(index, entry)
    before = len(state.nodes)
    state.apply(1, chain.sink.entries[1])
    assert len(state.problems) == 1 and len(state.nodes) == before


def test_the_folds_view_of_a_head_is_the_publications_head():
    head = Head(3, 9, b"p" * 16, b"m" * 32, b"r" * 32, 0)
    assert codec.decode(PolicyHead, codec.encode(head)) == PolicyHead(3, 9, b"p" * 16, b"m" * 32, b"r" * 32)


# --- properties ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 200))
def test_property_any_history_keeps_the_rules_and_folds_the_same(commands, cut):
    entries = play(commands)
    state = fold(entries)
    check_invariants(state, entries)
    assert state == fold(entries)
    resumed = fold(entries[:cut])
    for index, entry in enumerate(entries[:cut]):
        assert entry is entries[index]
    for index in range(min(cut, len(entries)), len(entries)):
        resumed.apply(index, entries[index])
    assert resumed == state


@settings(max_examples=40, deadline=None)
@given(steps)
def test_property_what_is_refused_changes_nothing(commands):
    """The coordinator tries entries on its live state before it keeps them; there is no copy to go back to."""
    state = RunState()
    for entry in play(commands):
        before, index = dump(state), state.size
        try:
            state.take(index, replace(entry, index=index))
        except ProtocolError:
            assert dump(state) == before, entry.event
        else:
            assert state.size == index + 1 and not state.problems


EVENTS = """run.opened run.updated draws.opened draws.revealed validators evidence.drop evidence.node relay.accused
incarnation grant node.joined policy lease lease.closed submission job verdict tie.lapsed batch
run.finished unheard-of"""
events = st.sampled_from(EVENTS.split())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(events, st.binary(max_size=120), st.binary(max_size=300), st.integers(0, 2**64 - 1)), max_size=8
    ),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_property_arbitrary_entries_never_raise(foreign, flips, swaps):
    """Random bytes, flipped bytes in real entries, and entries under another event's name."""
    entries = list(BASE)
    for which, at, value in flips:
        entry = entries[which % len(entries)]
        subject = bytearray(entry.subject or entry.body)
        if subject:
            subject[at % len(subject)] = value
        entries[which % len(entries)] = LedgerEntry(
            entry.index,
            entry.incarnation,
            entry.time,
            entry.event,
            entry.body if entry.subject else bytes(subject),
            bytes(subject) if entry.subject else b"",
        )
    for event, body, subject, number in foreign:
        entries.insert(number % len(entries), LedgerEntry(number, number, number, event, body, subject))
    for which in swaps:
        one, two = entries[which % len(entries)], entries[(which * 7 + 3) % len(entries)]
        entries[which % len(entries)] = LedgerEntry(one.index, 0, one.time, two.event, one.body, one.subject)
    renumbered = [LedgerEntry(i, e.incarnation, e.time, e.event, e.body, e.subject) for i, e in enumerate(entries)]
    for version in (entries, renumbered):
        state = fold(version)
        assert state.size == len(version)
        assert state == fold(version)
    check_invariants(fold(renumbered), renumbered)


BASE = base_entries()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_state_does_not_depend_on_the_process(hash_seed):
    """Python's string hashing differs between processes; the state must not."""
    code = "from tests.test_protocol_state import BASE, dump, fold; print(dump(fold(BASE)))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
    )
    assert out.stdout.strip() == dump(fold(BASE))


def test_the_base_history_exercises_the_rules():
    state = fold(BASE)
    assert {n.state for n in state.nodes.values() if n.role == "inference"} == {"probation", "suspended"}
    assert state.trained and state.batches
    assert isinstance(next(iter(state.submissions.values())).verdicts[1].verdict, Verdict)
    assert state.time > START_MS
