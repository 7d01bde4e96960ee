"""Draw periods, the three rounds of a decision, evidence and revocations, as the fold takes them in."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import decision, draws
from protocol.evidence import DROP_LOG_E
from protocol.evidence_rows import EvidenceRow
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    DrawsRevealed,
    DropEvidence,
    JobDrawn,
    NodeEvidence,
    Outcome,
    RelayReport,
    RelayStamp,
    RoleGrant,
    TieLapsed,
    UploadIntent,
    ValidatorsPresent,
    Verdict,
)
from protocol.state import ACCEPTED, DISCARDED, PENDING, REJECTED, UNDECIDED, RolloutOutcome, SubmissionState, fold
from protocol.state_types import VerdictState
from shardcast.records import ShardRecord
from tests.ledger_builder import Chain, identity, make_manifest

A, R, I = ACCEPT, REJECT, INCONCLUSIVE  # noqa: E741
VALIDATORS = ("val", "vic", "vin")


def opened(manifest=None):
    chain = Chain(manifest)
    chain.open()
    for who, role in [("ann", "inference"), ("bob", "inference"), ("rel", "relay")]:
        chain.join(who, role)
    for who in VALIDATORS:
        chain.join(who, "validator")
    chain.policy(0)
    chain.ready(*VALIDATORS)
    return chain


def state_of(chain):
    state = fold(chain.sink.entries)
    assert state.problems == []
    return state


def last_problem(chain):
    index, text = fold(chain.sink.entries).problems[-1]
    assert index == len(chain.sink.entries) - 1, "the newest entry is the one that is refused"
    return text


def submitted(chain, who="ann"):
    lease_id = chain.lease(who)
    return chain.submit(lease_id), chain.digest_of(lease_id)


def say(chain, number, digest, round_, said):
    validator = VALIDATORS[round_ - 1]
    return chain.verdict(chain.job(number, validator, round_), digest, validator, said, round_)


# --- decision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "statuses", "following"),
    [
        ([[A, A]], [ACCEPTED, ACCEPTED], None),
        ([[A, R]], [PENDING, PENDING], 2),
        ([[A, I]], [PENDING, PENDING], 2),
        ([[A, R], [A, R]], [ACCEPTED, REJECTED], None),
        ([[A, R], [A, A]], [PENDING, PENDING], 3),
        ([[A, R], [A, A], [A, A]], [ACCEPTED, ACCEPTED], None),
        ([[A, R], [A, A], [A, R]], [ACCEPTED, REJECTED], None),
        ([[R, R], [A, A], [A, A]], [ACCEPTED, ACCEPTED], None),
        ([[R, R], [A, A], [R, A]], [REJECTED, ACCEPTED], None),
        ([[A, R], [A, A], [R, I]], [ACCEPTED, UNDECIDED], None),
        ([[A, R], [A, I]], [PENDING, PENDING], 3),
        ([[A, R], [I, R]], [ACCEPTED, REJECTED], None),
        ([[A, R], [A, I], [A, R]], [ACCEPTED, REJECTED], None),
        ([[A, R], [A, I], [A, A]], [ACCEPTED, UNDECIDED], None),
        ([[A, R], [A, I], [A, I]], [ACCEPTED, UNDECIDED], None),
        ([[I, I], [I, I], [I, I]], [UNDECIDED, UNDECIDED], None),
        ([[A, I], [R, I]], [PENDING, PENDING], 3),
        ([[R, I], [A, I], [R, A]], [REJECTED, ACCEPTED], None),
    ],
)
def test_how_rounds_decide(rounds, statuses, following):
    chain = opened()
    lease_id = chain.lease("ann", tasks=(0,), samples=2)
    number, digest = chain.submit(lease_id), chain.digest_of(lease_id)
    for round_, said in enumerate(rounds, start=1):
        say(chain, number, digest, round_, said)
    held = state_of(chain).submissions[number]
    assert [outcome.status for outcome in held.outcomes] == statuses
    assert decision.next_round(held) == following


def test_two_rejections_end_it_although_another_rollout_is_open():
    chain = opened()
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [R, I, A, A])
    say(chain, number, digest, 2, [R, I, A, A])
    state = state_of(chain)
    assert [o.status for o in state.submissions[number].outcomes] == [REJECTED, UNDECIDED, ACCEPTED, ACCEPTED]
    assert state.nodes[identity("ann").public].state == "suspended"


def test_a_third_round_needs_a_reason():
    chain = opened()
    number, digest = submitted(chain)
    chain.job(number, "vin", 3)
    assert "nothing asks for round 3" in last_problem(chain)
    chain.job(number, "vic", 2)
    assert "nothing asks for round 2" in last_problem(chain)
    say(chain, number, digest, 1, [A, R, A, A])
    assert fold(chain.sink.entries).submissions[number].jobs.keys() == {1}


def test_a_rejection_that_is_contradicted_no_longer_pauses_while_the_rest_waits():
    chain = opened()
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [R, I, A, A])
    assert state_of(chain).nodes[identity("ann").public].state == "paused"
    say(chain, number, digest, 2, [A, I, A, A])
    state = state_of(chain)
    assert state.nodes[identity("ann").public].state == "probation"
    assert decision.next_round(state.submissions[number]) == 3


def test_the_verdict_on_a_suspended_nodes_other_work_is_kept_and_decides_nothing():
    chain = opened()
    for _ in range(4):
        number, digest = submitted(chain)
        say(chain, number, digest, 1, [A] * 4)
    other, other_digest = submitted(chain)
    waiting = chain.job(other, "val")
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [R] * 4)
    say(chain, number, digest, 2, [R] * 4)
    assert state_of(chain).periods[0].open_jobs == {(other, 1)}
    chain.verdict(waiting, other_digest, "val", [A] * 4)
    held = state_of(chain).submissions[other]
    assert {o.status for o in held.outcomes} == {DISCARDED} and held.verdicts[1].verdict.outcomes[0].outcome == A
    assert state_of(chain).periods[0].open_jobs == set()


def submission(count, jobs):
    """A submission with these rounds: (validator, outcomes or None while it is open)."""
    intent = UploadIntent(bytes(16), 1, 1, bytes(32))
    held = SubmissionState(7, bytes(16), b"o" * 32, intent, 0, (RolloutOutcome(),) * count)
    for round_, (validator, said) in enumerate(jobs, start=1):
        held.jobs[round_] = JobDrawn(bytes([round_]) * 16, 7, validator, round_, 0, 0)
        if said is not None:
            outcomes = tuple(Outcome(o, "x") for o in said)
            verdict = Verdict(bytes(16), bytes(32), round_, outcomes, bytes(32), 0)
            held.verdicts[round_] = VerdictState(10 + round_, verdict, validator)
    return held


said = st.lists(st.sampled_from([A, R, I]), min_size=3, max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"1", b"2", b"3"]), st.one_of(st.none(), said)), max_size=3))
def test_property_a_submission_is_decided_or_somebody_must_act(jobs):
    held = submission(3, jobs)
    outcomes, following = decision.decide(held), decision.next_round(held)
    waiting = bool(held.open_rounds)
    assert (outcomes is not None) + (following is not None) + waiting >= 1
    if outcomes is None:
        assert waiting != (following is not None)
        return
    assert following is None
    for position, outcome in enumerate(outcomes):
        heard = {o: {v for v, s in jobs if s is not None and s[position] == o} for o in (A, R, I)}
        assert (outcome.status == REJECTED) == (len(heard[R]) >= 2), "two different validators, and only then"
        assert (
            outcome.status != ACCEPTED or (heard[A] and not heard[R]) or len(heard[A] - heard[R]) == 2 > len(heard[R])
        )
        assert outcome.status in (ACCEPTED, REJECTED, UNDECIDED)


def test_a_tie_is_inconclusive_at_once_when_nobody_else_is_there():
    chain = opened()
    chain.validators("val", "vic")
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [A] * 4)
    assert state_of(chain).submissions[number].outcomes[0].status == ACCEPTED
    number, digest = submitted(chain, "bob")
    say(chain, number, digest, 1, [R, I, A, A])
    say(chain, number, digest, 2, [A, I, A, A])
    state = state_of(chain)
    assert decision.next_round(state.submissions[number]) == 3, "another rollout is open all the same"
    assert state.submissions[number].tie_over and state.nodes[identity("bob").public].state == "probation"
    chain.validators(*VALIDATORS)
    say(chain, number, digest, 3, [A, A, A, A])
    found = [o.status for o in state_of(chain).submissions[number].outcomes]
    assert found == [ACCEPTED] * 4, "a third word that came for another reason counts too"


@pytest.mark.parametrize("third", ["never drawn", "silent"])
def test_a_tie_whose_third_validator_never_answers_is_given_up_and_not_before(third):
    chain = opened()
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [R] * 4)
    assert state_of(chain).nodes[identity("ann").public].state == "paused"
    say(chain, number, digest, 2, [A] * 4)
    state = state_of(chain)
    assert state.nodes[identity("ann").public].state == "probation", "contradicted: nobody is paused by one word"
    assert decision.tied(state.submissions[number])
    if third == "silent":
        job = chain.job(number, "vin", 3)
    chain.append("tie.lapsed", TieLapsed(number))
    assert "may still be settled" in last_problem(chain)
    chain.sink.time += decision.TIE_LEASES * chain.manifest.leases.lease_ms
    if third == "never drawn":
        chain.append("tie.lapsed", TieLapsed(number))
        assert "never asked" in last_problem(chain)
        chain.validators("val", "vic")
    lapse = chain.append("tie.lapsed", TieLapsed(number))
    state = fold(chain.sink.entries)
    held = state.submissions[number]
    assert {o.status for o in held.outcomes} == {UNDECIDED} and held.verdict_index == lapse
    assert not state.periods[0].open_jobs and decision.next_round(held) is None
    assert [node.outvoted for node in state.nodes.values()] == [0] * 6, "nobody can say who was wrong"
    chain.append("tie.lapsed", TieLapsed(number))
    assert "no such tie" in last_problem(chain)
    if third == "silent":
        chain.verdict(job, digest, "vin", [R] * 4, 3)
        late = fold(chain.sink.entries)
        assert 3 in late.submissions[number].verdicts, "kept for the audit"
        assert late.submissions[number].outcomes == held.outcomes and late.nodes == state.nodes


def test_only_ties_lapse():
    chain = opened()
    number, digest = submitted(chain)
    say(chain, number, digest, 1, [R] * 4)
    chain.sink.time += 10**9
    for index in (number, 10**6):
        chain.append("tie.lapsed", TieLapsed(index))
        assert "no such tie" in last_problem(chain)


def test_who_was_outvoted_is_counted():
    chain = opened()
    for said in ([[R] * 4, [A] * 4, [A] * 4], [[A, R, R, A], [A, A, A, I], [A, R, I, A]]):
        number, digest = submitted(chain, "bob")
        for round_, words in enumerate(said, start=1):
            say(chain, number, digest, round_, words)
    number, digest = submitted(chain)
    for round_, words in enumerate(([A, A, R, R], [R, A, R, A]), start=1):
        say(chain, number, digest, round_, words)
    state = state_of(chain)
    assert {who: state.nodes[identity(who).public].outvoted for who in VALIDATORS} == {"val": 4, "vic": 1, "vin": 0}
    assert state.nodes[identity("bob").public].state == "suspended"
    assert state.nodes[identity("ann").public].state == "suspended"


def test_who_may_be_asked_once_more():
    assert dict(decision.others(submission(2, [(b"1", [I, I])]), 2)) == {b"1": True}
    assert dict(decision.others(submission(2, [(b"1", [A, I])]), 2)) == {b"1": True}, "nothing about the open one"
    assert dict(decision.others(submission(2, [(b"1", [A, A]), (b"2", None)]), 2)) == {b"1": False}
    assert dict(decision.others(submission(2, [(b"1", [R, A]), (b"2", [I, A])]), 3)) == {b"1": False, b"2": True}
    assert dict(decision.others(submission(2, [(b"1", None)]), 2)) == {b"1": False}
    assert draws.candidates([b"1", b"2"], {b"1": False, b"2": True}, None) == [b"2"]
    assert draws.candidates([b"1", b"2", b"3"], {b"1": False}, b"2") == [b"3"]
    assert draws.candidates([b"1", b"2"], {b"1": False}, b"2") == [b"2"]


# --- draw periods ---------------------------------------------------------------------------------------------------


def test_a_submission_belongs_to_the_newest_period_before_it(monkeypatch):
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 1)
    chain = opened()
    first, _ = submitted(chain)
    chain.open_draws()
    second, _ = submitted(chain, "bob")
    state = state_of(chain)
    assert [state.submissions[i].period for i in (first, second)] == [0, 1]
    assert state.submissions[first].probation
    chain.append("job", JobDrawn(bytes(16), second, identity("val").public, 1, 0, 0))
    assert "another draw period" in last_problem(chain)
    chain.append("job", JobDrawn(bytes(16), second, identity("val").public, 1, 1, 1))
    assert "another draw period or attempt" in last_problem(chain)


def test_nobody_opens_a_period_for_a_submission_it_has_at_hand(monkeypatch):
    """Whoever opens a period knows its secret: one opened at will gives every draw to whom it likes."""
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 2)
    chain = opened()
    for who in ("ann", "bob"):
        chain.open_draws()
        assert "a new secret after" in last_problem(chain)
        chain.periods -= 1
        submitted(chain, who)
    chain.open_draws()
    chain.join("cat", "inference")
    submitted(chain, "cat")
    state = fold(chain.sink.entries)
    assert [(held.period, held.number) for held in state.submissions.values()] == [(0, 0), (0, 1), (1, 0)]


def test_a_draw_does_not_depend_on_entries_in_front_of_its_submission():
    """Or the coordinator would write some that say nothing until the draw goes to a friend."""
    drawn = set()
    for filler in range(12):
        chain = opened()
        for number in range(filler):
            chain.append("grant", RoleGrant(bytes([number]) * 32, "relay"))
        lease = chain.lease("ann", lease_id=bytes(16))
        number = chain.submit(lease)
        drawn.add(chain.draw(fold(chain.sink.entries), number))
    assert len(drawn) == 1
    chain.validators(*VALIDATORS)
    assert "the one that is there already" in last_problem(chain)


def test_periods_follow_each_other_and_keep_the_manifests_rates(monkeypatch):
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 0)
    chain = opened()
    chain.periods += 1
    chain.open_draws()
    assert "period 2 came where 1 was expected" in last_problem(chain)
    chain.periods = 1
    chain.open_draws(rate=0.01)
    assert "fewer second draws" in last_problem(chain)
    chain.periods = 1
    chain.open_draws(factor=1.0)
    assert "in probation" in last_problem(chain)


def test_a_secret_is_shown_once_and_not_before_its_last_verdict():
    chain = opened()
    number, digest = submitted(chain)
    job = chain.job(number, "val")
    chain.reveal()
    assert "still wait for their verdict" in last_problem(chain)
    chain.verdict(job, digest, "val", [A] * 4)
    chain.append("draws.revealed", DrawsRevealed(0, bytes(32)))
    assert "not the secret" in last_problem(chain)
    chain.reveal()
    state = fold(chain.sink.entries)
    assert state.periods[0].secret == chain.secret(0) and len(state.problems) == 2
    chain.reveal()
    assert "already revealed" in last_problem(chain)
    chain.append("draws.revealed", DrawsRevealed(5, bytes(32)))
    assert "never opened" in last_problem(chain)


def test_nothing_is_drawn_with_a_secret_that_everybody_knows():
    chain = opened()
    early, _ = submitted(chain)
    chain.reveal()
    chain.job(early, "val")
    assert "already revealed" in last_problem(chain)
    late, _ = submitted(chain, "bob")
    chain.job(late, "val")
    assert "no draw period was open" in last_problem(chain)


def test_validators_are_named_in_order_and_admitted():
    chain = opened()
    chain.append("validators", ValidatorsPresent((identity("ann").public,)))
    assert "not admitted" in last_problem(chain)
    keys = sorted(identity(name).public for name in VALIDATORS)
    for wrong in (keys[::-1], [keys[0], keys[0]]):
        chain.append("validators", ValidatorsPresent(tuple(wrong)))
        assert "not sorted" in last_problem(chain)
    chain.validators()
    assert fold(chain.sink.entries).present == ()


# --- evidence -------------------------------------------------------------------------------------------------------


def evidence(who="ann", **changes):
    return replace(DropEvidence(identity(who).public, 0, 30, 30, DROP_LOG_E, 0.1, 0.4), **changes)


def test_evidence_of_dropped_results_suspends():
    chain = opened()
    number, _ = submitted(chain)
    for wrong, words in [
        (evidence(log_e=DROP_LOG_E - 0.1), "below the bar"),
        (evidence(lost_mean=0.5), "no worse"),
        (evidence("val"), "no inference node"),
        (evidence(upto=10**6), "not there yet"),
    ]:
        chain.append("evidence.drop", wrong)
        assert words in last_problem(chain)
    index = chain.append("evidence.drop", evidence())
    state = fold(chain.sink.entries)
    ann = state.nodes[identity("ann").public]
    assert (ann.state, ann.reason, ann.suspended_index) == ("suspended", "dropped-results", index)
    assert state.submissions[number].outcomes[0] == RolloutOutcome(DISCARDED, "dropped-results")
    assert "suspended" in state.may_lease(ann.key)
    chain.append("evidence.drop", evidence())
    assert "already suspended" in last_problem(chain)


ROW = EvidenceRow("precision", "proof_median", 2e-4, 1e-4, 0.5, 30.0, 200, 3e-7, 2)


def pooled(who="ann", **changes):
    said = NodeEvidence(identity(who).public, "precision", "proof_median", 0, 64, 2, 30.0, 60.0, 2e-6)
    return replace(said, **changes)


def test_pooled_evidence_suspends_over_the_bar_of_the_manifest_in_force():
    chain = opened(make_manifest(evidence=(ROW,)))
    number, _ = submitted(chain)
    for wrong, words in [
        (pooled(log_e=29.9), "below the bar of 30"),
        (pooled(validators=1), "nobody is condemned on one word"),
        (pooled(statistic="margin_rate"), "sums up no margin_rate for precision"),
        (pooled("val"), "no inference node"),
        (pooled(upto=10**6), "not there yet"),
    ]:
        chain.append("evidence.node", wrong)
        assert words in last_problem(chain)
    chain.update(evidence=(replace(ROW, log_bar=40.0),))
    chain.append("evidence.node", pooled(log_e=39.0))
    assert "below the bar of 40" in last_problem(chain), "the root raised it"
    index = chain.append("evidence.node", pooled(log_e=40.0))
    state = fold(chain.sink.entries)
    ann = state.nodes[identity("ann").public]
    assert (ann.state, ann.reason, ann.suspended_index) == ("suspended", "pooled-evidence", index)
    assert state.submissions[number].outcomes[0] == RolloutOutcome(DISCARDED, "pooled-evidence")
    chain.append("evidence.node", pooled(log_e=40.0))
    assert "already suspended" in last_problem(chain)


def test_a_run_whose_manifest_sums_up_nothing_suspends_nobody_by_it():
    chain = opened()
    chain.append("evidence.node", pooled(log_e=1000.0))
    assert "sums up no proof_median" in last_problem(chain)


def report(chain, relay="rel", wire=b"w" * 32, origin="origin", index=3):
    stamp = RelayStamp(b"p" * 16, 3, wire, 5)
    shard = ShardRecord(b"p" * 16, index, 100, 100, b"s" * 32, bytes(32), b"s" * 32)
    return RelayReport(
        identity(relay).public,
        chain.sealed(relay, "relay.stamp", stamp),
        chain.sealed(origin, "shard", shard),
        "flipped",
    )


def accuse(chain, found):
    return chain.append("relay.accused", b"", chain.sealed("bob", "relay.report", found))


def test_a_relay_is_suspended_by_its_own_stamp_and_by_nothing_less():
    chain = opened()
    for wrong, words in [
        (report(chain, wire=b"s" * 32), "proves nothing"),
        (report(chain, index=4), "different shards"),
        (report(chain, origin="ann"), "not signed by the run's origin"),
        (replace(report(chain), relay=identity("ann").public), "no relay"),
        (replace(report(chain), stamp=report(chain, relay="ann").stamp), "another key"),
        (replace(report(chain), stamp=b""), "envelope"),
    ]:
        accuse(chain, wrong)
        assert words in last_problem(chain)
    index = accuse(chain, report(chain))
    rel = fold(chain.sink.entries).nodes[identity("rel").public]
    assert (rel.state, rel.reason, rel.suspended_index) == ("suspended", "relay-lied", index)


# --- the manifest chain ---------------------------------------------------------------------------------------------


def test_leases_name_the_newest_link():
    chain = opened()
    before = chain.lease("ann")
    chain.update(leases=replace(make_manifest().leases, max_staleness=9))
    chain.submit(before)  # leased under the rules before: it still may be returned
    state = state_of(chain)
    assert state.manifest.leases.max_staleness == 9 and state.chain.hash == chain.links.hash
    chain.lease("bob", manifest=chain.run_id)
    assert "another manifest" in last_problem(chain)


def test_a_revoked_key_is_suspended_and_what_it_signs_contradicts():
    chain = opened()
    lease_id = chain.lease("ann")
    number, digest = submitted(chain, "bob")
    job = chain.job(number, "val")
    size = len(chain.sink.entries)
    chain.update(revoke={"ann": size, "val": size})
    state = state_of(chain)
    assert {state.nodes[identity(who).public].reason for who in ("ann", "val")} == {"key-revoked"}
    assert identity("val").public not in state.present and len(state.present) == 2
    chain.submit(lease_id)
    assert "was revoked" in last_problem(chain)
    chain.verdict(job, digest, "val", [A] * 4)
    assert "was revoked" in last_problem(chain)
    chain.validators("val")
    assert "revoked" in last_problem(chain)
    chain.job(number, "vic")
    assert fold(chain.sink.entries).submissions[number].jobs[1].validator == identity("vic").public


def test_heads_of_a_rotated_origin_hold_and_of_a_revoked_one_do_not():
    chain = opened()
    chain.update(rotate={"origin": "origin-2"})
    chain.policy(1)
    assert (0, 1) in state_of(chain).policies
    chain.update(revoke={"origin": len(chain.sink.entries)})
    chain.policy(2)
    assert "was revoked" in last_problem(chain)


def test_an_update_that_is_not_the_next_one_is_refused():
    chain = opened()
    chain.update(note="one")
    chain.append("run.updated", b"", chain.sink.entries[-1].subject)
    assert "does not follow" in last_problem(chain)
