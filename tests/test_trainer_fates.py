"""What counts as caught: by the ledger's verdicts and the program's own log, whatever became of the submission."""

from __future__ import annotations

import json
from pathlib import Path

from protocol.records import ACCEPT, REJECT, DropEvidence
from protocol.state import RunState, fold
from tests.archive_builder import Chain, identity
from trainer.fates import fate, own_words, rejected

A, R = ACCEPT, REJECT
ANN = identity("ann").public


def opened() -> Chain:
    chain = Chain()
    chain.open()
    for name in ("ann", "bob"):
        chain.join(name, "inference")
    for name in ("val", "vic", "vin"):
        chain.join(name, "validator")
    chain.policy(0)
    chain.ready("val", "vic", "vin")
    return chain


def judged(chain: Chain, lease_id: bytes, *rounds: list[int]) -> int:
    number = chain.submit(lease_id)
    for round_, outcomes in enumerate(rounds, start=1):
        verdict(chain, number, lease_id, round_, outcomes)
    return number


def verdict(chain: Chain, number: int, lease_id: bytes, round_: int, outcomes: list[int]) -> None:
    who = ("val", "vic", "vin")[round_ - 1]
    chain.verdict(chain.job(number, who, round_), chain.digest_of(lease_id), who, outcomes, round_)


def log_of(tmp_path: Path, chain: Chain, said: dict[bytes, list[bool]]) -> Path:
    """The program's own log: lease -> what it says of each rollout."""
    path = tmp_path / "own-log.jsonl"
    lines = []
    for lease_id, truths in said.items():
        lease = chain.leases[lease_id]
        names = [f"{lease_id.hex()}:{task}:{sample}" for task in lease.tasks for sample in range(lease.samples)]
        lines += [
            json.dumps({"request_id": name, "dishonest": truth}) for name, truth in zip(names, truths, strict=True)
        ]
    path.write_text("\n".join(lines) + '\n{"request_id": "torn')
    return path


def state_of(chain: Chain) -> RunState:
    state = fold(chain.sink.entries)
    assert state.problems == []
    return state


def test_dishonest_rollouts_count_as_caught_and_honest_ones_as_identical(tmp_path: Path) -> None:
    chain = opened()
    lease = chain.lease("ann")
    judged(chain, lease, [R, R, A, A], [R, R, A, A])
    found = fate(tmp_path, state_of(chain), "edit", ANN, log_of(tmp_path, chain, {lease: [True, True, False, False]}))
    assert found == {
        "submitted": 4, "dishonest": 2, "identical": 2, "identical_rejected": 0, "caught": 2,
        "first_caught_after_tokens": 0, "node_state": "suspended",
    }  # fmt: skip


def test_a_false_rejection_of_a_dishonest_nodes_honest_rollout_is_counted(tmp_path: Path) -> None:
    chain = opened()
    lease, other = chain.lease("ann"), chain.lease("bob")
    judged(chain, lease, [R, R, A, A], [R, A, A, A])
    judged(chain, other, [R] * 4, [R] * 4)
    said = log_of(tmp_path, chain, {lease: [True, False, False, False], other: [False] * 4})
    found = fate(tmp_path, state_of(chain), "edit", ANN, said)
    assert (found["identical"], found["identical_rejected"], found["caught"]) == (3, 1, 1), "one word is enough"
    assert fate(tmp_path, state_of(chain), "edit", identity("bob").public, said)["identical_rejected"] == 4


def test_what_was_discarded_because_its_node_was_suspended_is_caught_if_a_validator_rejected_it(tmp_path: Path) -> None:
    chain = opened()
    for _ in range(4):
        judged(chain, chain.lease("ann"), [A] * 4)
    first, second = chain.lease("ann"), chain.lease("ann")
    later = chain.submit(second)
    judged(chain, first, [R] * 4, [R] * 4)
    verdict(chain, later, second, 1, [R, R, A, A])
    state = state_of(chain)
    assert [outcome.status for outcome in state.submissions[later].outcomes] == ["discarded"] * 4
    log = log_of(tmp_path, chain, {first: [True] * 4, second: [True, True, True, False]})
    found = fate(tmp_path, state, "edit", ANN, log)
    assert (found["dishonest"], found["caught"]) == (7, 6), "one dishonest rollout was accepted by its only verdict"


def test_a_rejection_that_another_validator_did_not_repeat_is_not_caught(tmp_path: Path) -> None:
    chain = opened()
    lease = chain.lease("ann")
    number = judged(chain, lease, [R, A, A, A], [A, A, A, A])
    state = state_of(chain)
    assert rejected(state.submissions[number]) == {0}, "an honest node's rollout would count as rejected"
    found = fate(tmp_path, state, "edit", ANN, log_of(tmp_path, chain, {lease: [True, False, False, False]}))
    assert (found["dishonest"], found["caught"], found["node_state"]) == (1, 0, "probation")


def test_withheld_rollouts_are_caught_when_another_node_returned_them_before_the_suspension(tmp_path: Path) -> None:
    chain = opened()
    said: dict[bytes, list[bool]] = {}
    kept = chain.lease("ann")
    judged(chain, kept, [A] * 4)
    said[kept] = [False] * 4
    withheld = []
    for reason in ("failed: engine-refused: out of memory", "expired", "failed: cancelled"):
        lease = chain.lease("ann")
        chain.close_lease(lease, reason)
        said[lease] = [reason != "failed: cancelled"] * 4  # the last was lost without meaning to
        withheld.append(lease)
    for lease in withheld[1:]:
        again = chain.lease("bob", nonce=chain.leases[lease].nonce)
        judged(chain, again, [A] * 4)
    for task in (0, 1):  # one lease is done again in two parts
        again = chain.lease("bob", nonce=chain.leases[withheld[0]].nonce, tasks=(task,))
        judged(chain, again, [A] * 2)
        if task == 0:
            half = chain.lease("ann")  # and of another one only the first half ever comes back
            chain.close_lease(half, "failed: engine-refused: out of memory")
            said[half] = [True] * 4
            judged(chain, chain.lease("bob", nonce=chain.leases[half].nonce, tasks=(0,)), [A] * 2)
    never_back = chain.lease("ann")
    chain.close_lease(never_back, "failed: engine-refused: out of memory")
    said[never_back] = [True] * 4
    twice = chain.lease("ann")  # whoever is given it next lies
    chain.close_lease(twice, "expired")
    said[twice] = [True] * 4
    judged(chain, chain.lease("bob", nonce=chain.leases[twice].nonce, tasks=(1,)), [R] * 2, [R] * 2)
    open_at_the_end = chain.lease("ann")
    said[open_at_the_end] = [True] * 4
    state = state_of(chain)
    log = log_of(tmp_path, chain, said)
    before = fate(tmp_path, state, "dropper", ANN, log)
    assert (before["submitted"], before["identical"], before["dishonest"], before["caught"]) == (4, 4, 20, 0)
    chain.append("evidence.drop", DropEvidence(ANN, len(chain.sink.entries), 3, 1, 40.0, -0.2, 0.2))
    chain.close_lease(open_at_the_end, "owner suspended: dropped-results")
    state = state_of(chain)
    assert state.nodes[ANN].state == "suspended"
    after = fate(tmp_path, state, "dropper", ANN, log)
    assert (after["dishonest"], after["caught"]) == (20, 12), "what never came back is not attributed"
    per_lease = 4 * chain.manifest.sampling.max_new_tokens
    assert after["first_caught_after_tokens"] == 2 * per_lease


def test_the_log_of_a_program_that_never_ran_is_empty(tmp_path: Path) -> None:
    assert own_words(tmp_path / "none") == {}
    chain = opened()
    found = fate(tmp_path, state_of(chain), "stale", identity("nobody").public, tmp_path / "none")
    assert (found["submitted"], found["node_state"]) == (0, "never joined")
