"""A validator that was found to be wrong, as the fold takes it: whose word still counts, and what is judged again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, decision, distrust, draws
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT
from protocol.state import ACCEPTED, PENDING, UNDECIDED, RunState, fold
from tests.ledger_builder import Chain, identity, make_manifest
from tests.ledger_histories import judged, play, steps
from tests.test_protocol_rounds import last_problem, opened, state_of, submitted

A, R, I = ACCEPT, REJECT, INCONCLUSIVE  # noqa: E741


def accuse(chain: Chain, verdict: int, rollout: int = 0, outcome: int = R, reason: str = "proof-mismatch") -> int:
    return chain.append("evidence.verdict", VerdictEvidence(verdict, rollout, outcome, reason, 0.0, 0.0))


def say(chain: Chain, number: int, digest: bytes, round_: int, said: list[int], who: str) -> int:
    return chain.verdict(chain.job(number, who, round_), digest, who, said, round_)


def statuses(chain: Chain, number: int) -> list[str]:
    return [outcome.status for outcome in state_of(chain).submissions[number].outcomes]


@pytest.mark.parametrize(
    ("verdict", "rollout", "outcome", "reason"),
    [
        (1, 0, R, "proof-mismatch"),  # no verdict
        (0, 4, R, "proof-mismatch"),  # no such rollout
        (0, 1, R, "proof-mismatch"),  # the verdict rejected it
        (0, 0, I, "validator-failed"),
        (0, 0, R, "validator-failed"),
        (0, 0, R, "no such reason"),
        (0, 0, A, "holds"),
        (0, 1, A, "verdict-wrong"),
        (0, 1, R, "holds"),
        (0, 2, A, "holds"),  # it decided nothing
    ],
)
def test_what_contradicts_no_verdict_is_refused(verdict: int, rollout: int, outcome: int, reason: str) -> None:
    chain = opened()
    number, _ = judged(chain, [A, R, I, A])
    said = state_of(chain).submissions[number].verdicts[1].index
    accuse(chain, said + verdict, rollout, outcome, reason)
    assert last_problem(chain)
    assert fold(chain.sink.entries).nodes[identity("val").public].state != "suspended"


@pytest.mark.parametrize(("rollout", "outcome", "reason"), [(0, R, "format"), (0, A, "verdict-wrong"), (1, A, "holds")])
def test_either_word_of_a_verdict_may_be_contradicted(rollout: int, outcome: int, reason: str) -> None:
    chain = opened()
    number, _ = judged(chain, [A, R, A, A])
    accuse(chain, state_of(chain).submissions[number].verdicts[1].index, rollout, outcome, reason)
    state = fold(chain.sink.entries)
    assert state.problems == [] and state.nodes[identity("val").public].reason == "validator-wrong"


def test_rejections_are_drawn_by_the_same_draw_as_acceptances_and_no_other() -> None:
    chain = opened()
    number, _ = judged(chain, [A, R, A, R])
    submission, samples = state_of(chain).submissions[number], 2
    said = submission.verdicts[1].index
    drawn = set()
    for n in range(400):
        secret = n.to_bytes(32, "big")
        found = distrust.rejections_to_check(submission, samples, secret)
        wanted = [draws.wants_check(secret, submission.intent.digest, submission.number, 1, task) for task in (0, 1)]
        assert found == [(said, position) for position in (1, 3) if wanted[position // samples]]
        drawn.update(found)
    assert drawn == {(said, 1), (said, 3)}


def test_trust_ends_once_and_with_it_the_validators_presence_and_its_open_jobs() -> None:
    chain = opened()
    number, said = judged(chain, [A] * 4)
    other, digest = submitted(chain, "bob")
    job = chain.job(other, "val", 1)
    accuse(chain, said)
    state = state_of(chain)
    val = state.nodes[identity("val").public]
    assert (val.state, val.reason) == ("suspended", ReasonCode.VALIDATOR_WRONG) and val.key not in state.present
    accuse(chain, said, 1)
    assert "already suspended" in last_problem(chain)
    chain.verdict(job, digest, "val", [A] * 4)
    assert "found to be wrong" in last_problem(chain)
    chain.job(other, "vic", 1)
    assert number in state.submissions and other in state.submissions


def test_what_only_it_accepted_waits_for_another_round_and_what_others_did_too_stays() -> None:
    chain = opened()
    alone, said = judged(chain, [A] * 4, "ann")
    both, digest = submitted(chain, "bob")
    jobs = [(who, chain.job(both, who, round_), round_) for round_, who in ((1, "val"), (2, "vic"))]  # by rate
    for who, job, round_ in reversed(jobs):
        chain.verdict(job, digest, who, [A] * 4, round_)
    held = state_of(chain).submissions[both]
    assert held.outcomes[0].verdict == held.verdicts[1].index, "the newest one's"
    at = accuse(chain, said)
    state = state_of(chain)
    ann, bob = state.nodes[identity("ann").public], state.nodes[identity("bob").public]
    assert statuses(chain, alone) == [PENDING] * 4 and ann.accepted == 0 and ann.undecided == {alone}
    held = state.submissions[both]
    assert [one.verdict for one in held.outcomes] == [held.verdicts[2].index] * 4 and bob.accepted == 4
    assert decision.next_round(state.submissions[alone]) == 2
    assert state.submissions[alone].decided_below(at)[1][0].status == ACCEPTED, (
        "as an auditor of earlier entries sees it"
    )
    digest = chain.digest_of(state.submissions[alone].lease_id)
    say(chain, alone, digest, 2, [A] * 4, "vic")
    assert statuses(chain, alone) == [ACCEPTED] * 4
    assert state_of(chain).nodes[ann.key].accepted == 4


def test_the_void_round_is_none_of_the_three() -> None:
    chain = opened()
    number, said = judged(chain, [A] * 4)
    accuse(chain, said)
    digest = chain.digest_of(state_of(chain).submissions[number].lease_id)
    say(chain, number, digest, 2, [R] * 4, "vic")
    assert decision.next_round(state_of(chain).submissions[number]) == 3
    say(chain, number, digest, 3, [R] * 4, "vin")
    state = state_of(chain)
    assert state.nodes[identity("ann").public].state == "suspended", "two that count say so"
    assert statuses(chain, number) == ["rejected"] * 4


def test_what_a_batch_took_stays_there_and_is_counted_and_what_it_may_not_take_any_more_is_left() -> None:
    chain = opened(make_manifest(steps=3))
    number, said = judged(chain, [A] * 4)
    chain.batch(0, [(number, said, 0), (number, said, 1)])
    accuse(chain, said)
    state = state_of(chain)
    assert distrust.unverified(state.submissions, state.trained) == 2
    digest = chain.digest_of(state.submissions[number].lease_id)
    say(chain, number, digest, 2, [A] * 4, "vic")
    state = state_of(chain)
    assert distrust.unverified(state.submissions, state.trained) == 0, "somebody who is believed says the same"
    chain = opened(make_manifest(steps=3))
    number, said = judged(chain, [A] * 4)
    chain.batch(0, [(number, said, i) for i in range(4)])
    accuse(chain, said)
    state = state_of(chain)
    assert statuses(chain, number) == [ACCEPTED] * 4 and not state.submissions[number].taken_back
    assert distrust.unverified(state.submissions, state.trained) == 4


def test_when_the_secret_is_known_nobody_can_be_drawn_and_it_becomes_inconclusive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 1)
    chain = opened()
    number, said = judged(chain, [A] * 4)
    chain.open_draws()
    chain.reveal(0)
    accuse(chain, said)
    assert statuses(chain, number) == [UNDECIDED] * 4
    state = state_of(chain)
    ann = state.nodes[identity("ann").public]
    assert (ann.accepted, ann.inconclusive, ann.undecided) == (0, 4, set())


def test_what_was_inconclusive_stays_so_it_may_have_been_sampled_again() -> None:
    chain = opened()
    number, digest = submitted(chain)
    for round_, who, said in ((1, "val", [I, A, A, A]), (2, "vic", [I, I, I, I]), (3, "vin", [I, I, I, I])):
        say(chain, number, digest, round_, said, who)
    assert statuses(chain, number) == [UNDECIDED, ACCEPTED, ACCEPTED, ACCEPTED]
    accuse(chain, state_of(chain).submissions[number].verdicts[1].index, 1)
    assert statuses(chain, number) == [UNDECIDED, PENDING, PENDING, PENDING]
    say(chain, number, digest, 4, [A] * 4, "vic")
    assert statuses(chain, number) == [UNDECIDED, ACCEPTED, ACCEPTED, ACCEPTED]


@settings(max_examples=60, deadline=None)
@given(steps, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 5), st.sampled_from([A, R, I])), max_size=6))
def test_property_accusations_fold_alike_and_change_nothing_when_they_are_refused(commands, accusations) -> None:
    """In any history: refused ones change nothing; those taken leave the counts of a fresh fold."""
    entries = list(play(commands))
    state = fold(entries)
    chain = Chain(make_manifest())
    for verdict, rollout, outcome in accusations:
        reason = {A: "verdict-wrong", R: "proof-mismatch", I: "holds"}[outcome]
        chain.sink.entries = list(entries)
        accuse(chain, verdict, rollout, outcome, reason)
        entry = chain.sink.entries[-1]
        before = copy.deepcopy(state)
        try:
            state.take(len(entries), entry)
        except ProtocolError:
            assert state == before
            continue
        entries.append(entry)
        fresh = RunState()
        for index, one in enumerate(entries):
            fresh.apply(index, one)
        assert fresh == state
        for node in state.nodes.values():
            assert node.accepted >= 0 and node.inconclusive >= 0
            for number in node.undecided:
                held = state.submissions[number]
                assert held.open_rounds or decision.next_round(held) or decision.tied(held)


def test_the_vectors_of_the_specification_are_true() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text()
    for record in (
        VerdictEvidence(41, 3, R, "proof-mismatch", 0.0, 0.0),
        VerdictEvidence(41, 3, A, "verdict-wrong", 1.0, 0.0625, "mantissa_mean"),
    ):
        assert f"`{codec.encode(record).hex()}`" in text
    before = bytes.fromhex("96290301ae70726f6f662d6d69736d61746368cb0000000000000000cb0000000000000000")
    assert codec.decode(VerdictEvidence, before) == VerdictEvidence(41, 3, R, "proof-mismatch", 0.0, 0.0, "")
    secret, digest = bytes(range(32)), b"\x44" * 32
    number = draws.keyed(secret, "check", digest, 17, 1, 3)[:8]
    assert f"`{number.hex()}`" in text
    drawn = [draws.wants_check(secret, digest, n, 1, 3) for n in range(20_000)]
    assert draws.wants_check(secret, digest, 17, 1, 3) == (int.from_bytes(number, "big") < 0.02 * 2**64)
    assert 300 < sum(drawn) < 500, "two in a hundred"
