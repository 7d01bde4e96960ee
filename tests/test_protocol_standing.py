"""The way back: what a node's record makes of it when verdicts, or a row of the manifest, count no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import decision, draws, standing
from protocol.errors import ManifestError, ReasonCode
from protocol.evidence_rows import EvidenceRow
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, DropEvidence, NodeEvidence
from protocol.state import ACCEPTED, DISCARDED, PENDING, REJECTED, UNDECIDED, NodeState, RunState, fold
from tests.ledger_builder import Chain, identity, make_manifest
from tests.ledger_histories import judged, play, steps
from tests.test_protocol_distrust import accuse, say, statuses
from tests.test_protocol_rounds import opened, state_of, submitted

A, R, I = ACCEPT, REJECT, INCONCLUSIVE  # noqa: E741
ROW = EvidenceRow("precision", "proof_median", 2e-4, 1e-4, 0.5, 30.0, 200, 3e-7, 2)


def node(chain: Chain, who: str = "ann") -> NodeState:
    return state_of(chain).nodes[identity(who).public]


def pooled(chain: Chain, who: str = "ann") -> int:
    size = len(chain.sink.entries)
    said = NodeEvidence(identity(who).public, "precision", "proof_median", size, 64, 3, 40.0, 60.0, 2e-4)
    return chain.append("evidence.node", said)


def dropped(chain: Chain, who: str = "ann") -> int:
    size = len(chain.sink.entries)
    return chain.append("evidence.drop", DropEvidence(identity(who).public, size, 9, 9, 20.0, -0.5, 0.5))


def refused(chain: Chain, who: str = "ann", second: str = "vic") -> tuple[int, bytes]:
    """A submission that val and a second validator reject."""
    number, digest = submitted(chain, who)
    say(chain, number, digest, 1, [R, A, A, A], "val")
    say(chain, number, digest, 2, [R, A, A, A], second)
    assert node(chain, who).state == "suspended"
    return number, digest


# --- rejections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("third", "state"), [(A, "probation"), (R, "suspended")])
def test_two_rejections_of_which_one_is_void_are_one_and_a_third_validator_decides(third: int, state: str) -> None:
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    number, digest = refused(chain)
    since = node(chain).suspended_index
    lost, _ = submitted(chain, "bob")
    at = accuse(chain, clean)
    ann = node(chain)
    assert (ann.state, ann.reason, ann.contested) == ("paused", "format", {number}), "one honest REJECT is left"
    assert statuses(chain, number) == [PENDING, ACCEPTED, ACCEPTED, ACCEPTED]
    assert decision.next_round(state_of(chain).submissions[number]) == 3
    say(chain, number, digest, 3, [third, A, A, A], "vin")
    ann = node(chain)
    assert ann.state == state and ann.suspended_index == (None if third == A else len(chain.sink.entries) - 1)
    if third == A:
        assert statuses(chain, number)[0] == UNDECIDED, "a tie, and nobody else may settle it"
    # as of every entry it is known whether it was suspended
    assert [standing.gone(ann, upto) for upto in (since, since + 1, at, at + 1)] == [False, True, True, False]
    assert lost in state_of(chain).nodes[identity("bob").public].undecided


def test_what_was_rejected_and_holds_after_all_is_not_trained_since_others_sampled_it_again() -> None:
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    number, digest = submitted(chain)
    for round_, who in ((1, "val"), (2, "vic")):
        say(chain, number, digest, round_, [R, R, A, A], who)
    first = state_of(chain).submissions[number].verdicts[2].index
    accuse(chain, clean)
    accuse(chain, first, 2)  # vic too: nothing of either counts
    assert statuses(chain, number) == [PENDING] * 4 and node(chain).state == "probation"
    say(chain, number, digest, 3, [A, A, A, A], "vin")
    state = state_of(chain)
    assert statuses(chain, number) == [UNDECIDED, UNDECIDED, ACCEPTED, ACCEPTED], "nobody was asked for those again"
    ann = state.nodes[identity("ann").public]
    assert (ann.state, ann.accepted, ann.rejected, ann.inconclusive) == ("probation", 2, 0, 2)


def test_two_other_rejections_keep_it_suspended() -> None:
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    number, digest = submitted(chain)
    for round_, who, said in ((1, "val", [I, A, A, A]), (2, "vic", [R, A, A, A]), (3, "vin", [R, A, A, A])):
        say(chain, number, digest, round_, said, who)
    since = node(chain).suspended_index
    accuse(chain, clean)
    assert (node(chain).state, node(chain).suspended_index, node(chain).cleared) == ("suspended", since, [])


def test_what_else_would_have_suspended_it_does() -> None:
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    judged(chain, [A] * 4), judged(chain, [A] * 4), judged(chain, [A] * 4), judged(chain, [A] * 4)
    assert node(chain).state == "active"
    two = [submitted(chain), submitted(chain)]
    judges = (("val", "vic"), ("vic", "vin"))
    jobs = [(chain.job(number, who, r), digest, who, r) for (number, digest), pair in zip(two, judges, strict=True)
            for r, who in enumerate(pair, start=1)]  # fmt: skip
    # The first ends trust by val and vic; the second is discarded with it, and vic and vin reject that.
    for job, digest, who, r in jobs:
        chain.verdict(job, digest, who, [R, A, A, A], r)
    assert node(chain).case == two[0][0] and statuses(chain, two[1][0]) == [DISCARDED] * 4
    accuse(chain, clean)
    ann = node(chain)
    assert (ann.state, ann.case, ann.cleared, ann.rejected) == ("suspended", two[1][0], [], 0)
    assert statuses(chain, two[0][0]) == [DISCARDED] * 4


def test_when_the_secret_is_known_nobody_can_judge_it_again_and_it_is_inconclusive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 1)
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    number, _ = refused(chain)
    chain.open_draws()
    chain.reveal(0)
    accuse(chain, clean)
    assert node(chain).state == "probation" and statuses(chain, number) == [UNDECIDED, ACCEPTED, ACCEPTED, ACCEPTED]


# --- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entered", [pooled, dropped])
def test_sums_that_a_liars_verdicts_went_into_condemn_nobody_any_more(entered) -> None:
    """The coordinator makes them again without its numbers; entered anew they suspend as before."""
    chain = opened(make_manifest(evidence=(ROW,)))
    _, said = judged(chain, [A] * 4, "bob")
    open_, _ = submitted(chain)
    entered(chain)
    assert statuses(chain, open_) == [DISCARDED] * 4
    at = accuse(chain, said)
    state = state_of(chain)
    ann = state.nodes[identity("ann").public]
    assert (ann.state, ann.reason, ann.suspended_index) == ("probation", "", None)
    assert state.cleared == [ann.key] and ann.cleared[0].index == at
    assert statuses(chain, open_) == [DISCARDED] * 4, "others were asked for it since"
    entered(chain)
    assert node(chain).state == "suspended"


@pytest.mark.parametrize("entered", [pooled, dropped])
def test_sums_that_came_before_the_liars_first_verdict_stay(entered) -> None:
    chain = opened(make_manifest(evidence=(ROW,)))
    number, digest = submitted(chain, "bob")
    say(chain, number, digest, 1, [A] * 4, "vic")
    entered(chain)
    number, digest = submitted(chain, "bob")
    accuse(chain, say(chain, number, digest, 1, [A] * 4, "val"))
    assert node(chain).state == "suspended"


def test_a_key_that_was_revoked_meanwhile_does_not_come_back() -> None:
    chain = opened(make_manifest(evidence=(ROW,)))
    _, said = judged(chain, [A] * 4, "bob")
    pooled(chain)
    chain.update(revoke={"ann": len(chain.sink.entries)})
    assert node(chain).reason == "pooled-evidence"
    accuse(chain, said)
    assert (node(chain).state, node(chain).reason) == ("suspended", "key-revoked")


def test_a_lying_relay_stays_out_whichever_validator_lied() -> None:
    chain = opened()
    _, said = judged(chain, [A] * 4, "bob")
    chain.update(revoke={"ann": len(chain.sink.entries)})
    accuse(chain, said)
    assert (node(chain).state, node(chain).reason) == ("suspended", "key-revoked")


def test_a_revoked_validators_numbers_count_no_more_and_pooled_sums_are_made_again() -> None:
    chain = opened(make_manifest(evidence=(ROW,)))
    judged(chain, [A] * 4, "bob")
    pooled(chain)
    dropped(chain, "bob")
    chain.update(revoke={"vin": len(chain.sink.entries)})
    assert node(chain).state == "probation"
    assert node(chain, "bob").state == "suspended", "rewards are not a validator's word"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"no_evidence": True}, "probation"),
        ({"evidence": (replace(ROW, honest=1.5e-4),)}, "probation"),
        ({"evidence": (replace(ROW, log_bar=41.0),)}, "probation"),
        ({"evidence": (replace(ROW, log_bar=29.0),)}, "suspended"),
        ({"evidence": (replace(ROW, statistic="reward_claimed", hypothesis="reward", honest=1.0, clip=2.0),)},
         "probation"),
        ({"note": "nothing about it"}, "suspended"),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_is_withdrawn_or_loosened_takes_back_what_it_did(changes: dict, state: str) -> None:
    chain = opened(make_manifest(evidence=(ROW,)))
    pooled(chain)
    dropped(chain, "bob")
    chain.update(**changes)
    assert node(chain).state == state and node(chain, "bob").state == "suspended"


# --- counts ---------------------------------------------------------------------------------------------------------


def test_acceptances_by_a_liar_alone_are_no_step_out_of_probation() -> None:
    chain = opened(make_manifest(steps=3))
    said = [judged(chain, [A] * 4) for _ in range(4)]
    assert node(chain).state == "active" and node(chain).accepted == 16
    for step in range(3):
        number, verdict = said[step]
        chain.batch(step, [(number, verdict, i) for i in range(4)])
    accuse(chain, said[0][1])
    ann = node(chain)
    assert (ann.state, ann.accepted) == ("probation", 0)
    assert statuses(chain, said[0][0]) == [ACCEPTED] * 4, "what was trained stays in its batch"


def test_two_of_whom_one_is_void_outvote_nobody() -> None:
    chain = opened()
    _, clean = judged(chain, [A] * 4, "bob")
    number, digest = submitted(chain)
    jobs = [(chain.job(number, who, r), who, r, said) for r, who, said in ((1, "val", A), (2, "vin", R))]
    for job, who, r, said in jobs:
        chain.verdict(job, digest, who, [said] * 4, r)
    say(chain, number, digest, 3, [A] * 4, "vic")
    assert node(chain, "vin").outvoted == 4
    accuse(chain, clean)
    assert node(chain, "vin").outvoted == 0


@settings(max_examples=60, deadline=None)
@given(steps, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 5), st.sampled_from([A, R])), max_size=6))
def test_property_counts_and_suspensions_are_those_of_the_verdicts_that_count(commands, accusations) -> None:
    """In any history with any accusations: who is suspended by rejections has two that count; counts add up."""
    chain = Chain(make_manifest())
    chain.sink.entries = list(play(commands))
    for verdict, rollout, outcome in accusations:
        accuse(chain, verdict, rollout, outcome, {A: "verdict-wrong", R: "proof-mismatch"}[outcome])
    state = RunState()
    for index, entry in enumerate(chain.sink.entries):
        state.apply(index, entry)
    assert state == fold(chain.sink.entries)
    tally: dict[bytes, int] = {}
    for submission in state.submissions.values():
        for who, count in decision.outvoted(submission).items() if submission.verdict_index is not None else ():
            tally[who] = tally.get(who, 0) + count
    for one in state.nodes.values():
        own = [submission for submission in state.submissions.values() if submission.owner == one.key]
        decided = [submission for submission in own if submission.verdict_index is not None]
        flat = [outcome.status for submission in decided for outcome in submission.outcomes]
        assert one.accepted == sum(standing.credited(submission) for submission in decided)
        assert (one.rejected, one.inconclusive) == (flat.count(REJECTED), flat.count(UNDECIDED))
        assert one.outvoted == tally.get(one.key, 0)
        if one.case is not None:
            case = state.submissions[one.case]
            assert REJECTED in {outcome.status for outcome in decision.weigh(case)}
        else:
            assert one.state != "suspended" or one.reason in ("dropped-results", "validator-wrong")
        assert one.state == "suspended" or not one.rejected
        assert all(earlier.suspended < earlier.index for earlier in one.cleared)
        for number in one.undecided:
            held = state.submissions[number]
            assert held.open_rounds or decision.next_round(held) or decision.tied(held)
    for number, position in state.trained:
        assert position not in state.submissions[number].spent


# --- what a manifest and its updates may leave ------------------------------------------------------------------------


def test_an_update_that_leaves_a_row_stricter_than_its_thresholds_is_refused() -> None:
    """A new kind of machine joins by wider thresholds; the row that stayed behind would have suspended it."""
    manifest = make_manifest(evidence=(ROW,))
    wider = replace(manifest.thresholds, proof_median=4e-4, measured_proof_median=8e-5)
    for changes, reason in (
        ({"thresholds": wider}, ReasonCode.EVIDENCE_TOO_STRICT),
        ({"thresholds": wider, "evidence": (ROW,)}, ReasonCode.EVIDENCE_TOO_STRICT),
        ({"evidence": (replace(ROW, statistic="unheard_of"),)}, ReasonCode.EVIDENCE_UNKNOWN),
        ({"evidence": (replace(ROW, clip=1e-5),)}, ReasonCode.EVIDENCE_BOUNDS),
        ({"evidence": (ROW,), "no_evidence": True}, ReasonCode.EVIDENCE_BOUNDS),
    ):
        with pytest.raises(ManifestError) as caught:
            opened(manifest).update(**changes)
        assert caught.value.code is reason
    for changes in (
        {"thresholds": wider, "evidence": (replace(ROW, honest=2e-4, clip=4e-4),)},
        {"thresholds": wider, "no_evidence": True},
    ):
        chain = opened(manifest)
        chain.update(**changes)
        assert state_of(chain).manifest.thresholds == wider
    with pytest.raises(ManifestError) as caught:
        Chain(make_manifest(evidence=(replace(ROW, honest=4e-5),)))
    assert caught.value.code is ReasonCode.EVIDENCE_TOO_STRICT
