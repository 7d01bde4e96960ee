"""What the ledger tells of a key's leases, and what of it others could steer: nothing that condemns an honest key.

Real entries, the real fold, the real test over them; only the details files are a dictionary.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.evidence import VerdictEvidence
from protocol.records import ACCEPT, REJECT
from protocol.state import ACCEPTED, LeaseState, RolloutOutcome, SubmissionState, fold
from tests.ledger_builder import Chain, identity, make_manifest
from verifier.drops import DropTest, drop_evidence, drop_result
from verifier.outcomes import LeaseOutcome, lease_outcomes

ANN = identity("ann").public


class Run:
    """A ledger under way, and what its validators found."""

    def __init__(self, *nodes, validators=("val",), staleness=2, tasks=2, samples=2):
        rules = replace(
            make_manifest().leases, probation_accepted=1, max_staleness=staleness, probation_first_rollouts=200
        )
        self.chain = Chain(make_manifest(leases=rules, steps=100_000))
        self.chain.open()
        for who in nodes:
            self.chain.join(who, "inference")
        for who in validators:
            self.chain.join(who, "validator")
        self.step, self.shape = 0, (tuple(range(tasks)), samples)
        self.chain.policy(0)
        self.chain.ready(*validators)
        self.found = {}
        self.worth = {}
        """(nonce, task) -> its rewards: forced, whoever samples it."""
        self.length = 8

    def next_step(self):
        self.step += 1
        self.chain.policy(self.step)

    def lease(self, who, **more):
        tasks, samples = self.shape
        return self.chain.lease(who, **{"step": self.step, "tasks": tasks, "samples": samples} | more)

    def again(self, who, lost, tasks=None):
        """Take over what `lost` was about, all tasks or some."""
        was = self.chain.leases[lost]
        return self.lease(who, step=was.step, tasks=tasks or was.tasks, samples=was.samples, nonce=was.nonce)

    def rewards(self, lease_id):
        lease = self.chain.leases[lease_id]
        return [reward for task in lease.tasks for reward in self.worth[(lease.nonce, task)]]

    def give(self, lease_id, *rewards):
        """Fix what a lease is worth, task by task."""
        lease = self.chain.leases[lease_id]
        for task, reward in zip(lease.tasks, rewards, strict=True):
            values = reward if isinstance(reward, list) else [reward] * lease.samples
            self.worth[(lease.nonce, task)] = values
        return lease_id

    def back(self, lease_id, *rounds):
        """It comes back and is judged: accepted, unless `rounds` of (validator, outcomes) say otherwise."""
        number = self.chain.submit(lease_id)
        self.found[number] = self.rewards(lease_id)
        for round_, (who, said) in enumerate(rounds or [("val", [ACCEPT] * len(self.found[number]))], start=1):
            job = self.chain.job(number, who, round_)
            self.chain.verdict(job, self.chain.digest_of(lease_id), who, said, round_)
        return number

    def lose(self, lease_id, reason="expired"):
        self.chain.close_lease(lease_id, reason)
        return lease_id

    def begin(self, *nodes, reward=0.5):
        for who in nodes:
            lease = self.lease(who)
            self.back(self.give(lease, *[reward] * len(self.shape[0])))

    def seen(self, submission, rollout):
        return self.found[submission][rollout], self.length

    def state(self):
        state = fold(self.chain.sink.entries)
        assert state.problems == []
        return state

    def outcomes(self, who="ann"):
        state = self.state()
        return lease_outcomes(state, identity(who).public, self.seen, state.size)


class Quick(Run):
    """The same without signatures and entries: what the fold would hold is put there. For many long runs."""

    def __init__(self, *nodes, **shape):
        super().__init__(*nodes, **shape)
        self.template = self.chain.leases[super().lease(nodes[0])]
        self.held = self.state()
        self.held.leases.clear()
        self.index = self.held.size

    def count(self):
        self.index += 1
        return self.index - 1

    def next_step(self):
        self.step, self.index = self.step + 1, self.index + 1

    def lease(self, who, **more):
        tasks, samples = self.shape
        fresh = {"lease_id": self.chain.fresh(), "nonce": self.chain.fresh(32), "step": self.step, "tasks": tasks}
        lease = replace(self.template, **fresh | {"samples": samples} | more)
        first = next((one for one in (self.chain.leases.get(lease.nonce),) if one), None)
        held = LeaseState(lease.lease_id, lease, identity(who).public, self.count(), 0)
        held.reissue_of = first.lease_id if first else None
        self.held.leases[lease.lease_id] = held
        self.chain.leases[lease.lease_id] = lease
        self.chain.leases.setdefault(lease.nonce, lease)
        return lease.lease_id

    def back(self, lease_id):
        held, number = self.held.leases[lease_id], self.count()
        job, verdict = self.count(), self.count()
        outcome = RolloutOutcome(ACCEPTED, "holds", verdict)
        self.held.submissions[number] = SubmissionState(
            number, lease_id, held.owner, None, 0, (outcome,) * held.rollouts, verdict_index=job + 1
        )
        held.status, held.submission = "submitted", number
        self.found[number] = self.rewards(lease_id)
        return number

    def lose(self, lease_id, reason="expired"):
        held = self.held.leases[lease_id]
        held.status, held.reason, held.closed_index = "closed", reason, self.count()
        return lease_id

    def state(self):
        if not hasattr(self, "held"):
            return super().state()
        self.held.size = self.index
        return self.held


def condemned(outcomes):
    test = DropTest()
    for outcome in outcomes:
        test.add(outcome)
        if outcome.lost and test.result.condemns:
            return True
    return False


# --- nobody misbehaves ----------------------------------------------------------------------------------------------


def flaky_swarm(make, seed, keys=4, rounds=128, loss=0.5):
    """`keys` honest nodes lose leases at random; a node with room for one task takes that, the rest follows, or never
    comes. Rewards are rare, as early in a run: one task's mean is far more skewed than a lease's."""
    rng = random.Random(seed)
    names = [f"flaky-{i}" for i in range(keys)]
    run = make(*names, "bob", "cat", "dan", tasks=12, samples=2)
    hope = 0.03

    def worth(lease_id):
        chances = [rng.betavariate(2 * hope, 2 * (1 - hope)) for _ in run.shape[0]]
        return run.give(lease_id, *[[float(rng.random() < chance) for _ in range(2)] for chance in chances])

    for who in ("bob", "cat", "dan", *names):
        run.back(worth(run.lease(who)))
    for i in range(rounds):
        hope = 0.03 + 0.05 * i / rounds
        if i % 2:
            run.next_step()
        for who in ("cat", "dan"):
            run.back(worth(run.lease(who)))
        for who in names:
            lease = worth(run.lease(who))
            if rng.random() >= loss:
                run.back(lease)
                continue
            run.lose(lease)
            tasks = list(run.shape[0])
            rng.shuffle(tasks)
            while tasks and rng.random() < 0.98:
                size = 1 if len(tasks) == 12 else 11
                piece, tasks = tasks[:size], tasks[size:]
                run.back(run.again(rng.choice(["bob", "cat", "dan"]), lease, tuple(piece)))
    return run, names


def mean_e_value(seeds):
    """Over the honest keys of these runs, none of which is ever condemned."""
    values = []
    for seed in seeds:
        run, names = flaky_swarm(Quick, seed, loss=(0.2, 0.5, 0.8)[seed % 3])
        state = run.state()
        for who in names:
            found = lease_outcomes(state, identity(who).public, run.seen, state.size)
            assert not condemned(found) and any(o.lost and o.x is not None for o in found)
            values.append(math.exp(drop_result(found).log_e))
    return sum(values) / len(values)


def test_what_the_quick_runs_hold_is_what_the_fold_holds():
    """So that the runs below speak of ledgers."""
    (one, names), (two, _) = (flaky_swarm(make, 3, keys=3, rounds=8) for make in (Run, Quick))
    for who in (*names, "cat"):
        told = [[replace(o, index=0) for o in run.outcomes(who)] for run in (one, two)]
        assert told[0] == told[1] and len(told[0]) > 4


def test_no_honest_key_is_condemned_whose_losses_are_done_again_in_pieces():
    """Nor does one come near."""
    assert mean_e_value(range(8)) < 1.2


@pytest.mark.heavy
def test_no_honest_key_of_hundreds_is_condemned_whose_losses_are_done_again_in_pieces():
    assert mean_e_value(range(8, 60)) < 1.2


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_honest_key_in_ten_thousand_is_condemned_by_the_ledger():
    assert mean_e_value(range(60, 2560)) < 1.2


# --- pieces ---------------------------------------------------------------------------------------------------------


worths = st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=5, max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(5)), st.sets(st.integers(1, 4)), worths)
def test_property_a_lost_lease_is_worth_the_same_in_any_number_and_order_of_pieces(order, cuts, worth):
    run = Run("ann", "bob", "cat", tasks=5)
    run.begin("ann", "bob", "cat")
    lost = run.lose(run.give(run.lease("ann"), *worth))
    for n, (begin, end) in enumerate(pairwise([0, *sorted(cuts), 5])):
        before = run.outcomes()[-1]
        assert before.lost and before.x is None
        run.back(run.again(("bob", "cat")[n % 2], lost, tuple(order[begin:end])))
    after = run.outcomes()[-1]
    assert after.x == pytest.approx(sum(worth) / 5 - 0.5) and after.tokens == 80 and after.index == before.index


def test_another_task_of_the_same_nonce_tells_nothing():
    run = Run("ann", "bob", "cat")
    run.begin("ann", "bob", "cat")
    lost = run.lose(run.give(run.lease("ann"), 0.0, 1.0), "failed: x")
    mine, other = run.again("bob", lost, (0,)), run.again("cat", lost, (1,))
    run.lose(mine)
    run.back(other)
    assert run.outcomes()[-1].x is None


def test_what_is_left_of_a_group_tells_nothing():
    """One validator rejects what was rewarded: what remains looks worthless, so nothing is read."""
    run = Run("ann", "bob", "cat", validators=("val", "liar"))
    run.begin("ann", "bob", "cat")
    lost = run.lose(run.give(run.lease("ann"), [1.0, 0.0], [0.0, 0.0]))
    again = run.again("bob", lost)
    run.back(again, ("liar", [REJECT, ACCEPT, ACCEPT, ACCEPT]), ("val", [ACCEPT] * 4))
    assert run.outcomes()[-1] == replace(run.outcomes()[-1], lost=True, x=None)
    run.back(run.again("cat", lost, (0,)))  # the group nobody could decide, done once more
    assert run.outcomes()[-1].x == pytest.approx(0.25 - 0.5)


def test_a_lease_that_was_somebody_elses_is_not_held_against_who_takes_it_over():
    """Else whoever gives up bad leases while somebody is flaky would hand their own choice on."""
    run = Run("ann", "bob", "cat")
    run.begin("bob", "cat", "ann")
    lost = run.lose(run.give(run.lease("cat"), 0.0, 0.0))
    run.back(run.again("bob", run.lose(run.again("ann", lost))))
    assert [o.lost for o in run.outcomes()] == [False] and run.outcomes("cat")[-1].lost


# --- silence --------------------------------------------------------------------------------------------------------


def test_who_returns_only_the_bad_leases_an_honest_node_lost_does_not_frame_it():
    """mal looks at what ann lost, sends what went badly and sits on the rest until nobody can do it again."""
    rng = random.Random(1)
    run = Run("ann", "mal", "cat", "dan")
    run.begin("ann", "mal", "cat", "dan")
    held, known = [], 0
    for i in range(200):
        if i % 2:
            run.next_step()
        for lease in [one for one in held if run.chain.leases[one].step < run.step - 2]:
            held.remove(run.lose(lease, "failed: out of memory"))
        mine = run.give(run.lease("ann"), *[rng.random()] * 2)
        for who in ("cat", "dan", "mal"):
            run.back(run.give(run.lease(who), *[rng.random()] * 2))
        if rng.random() < 0.5:
            run.back(mine)
        elif run.rewards(run.lose(mine))[0] < 0.5:
            run.back(run.again("mal", mine))
            known += 1
        else:
            held.append(run.again("mal", mine))
    found = run.outcomes()
    assert known > 40 and sum(o.lost and o.x is not None for o in found) == known
    assert not condemned(found)


def test_a_dropper_whose_leases_come_back_is_condemned_in_the_same_run():
    rng = random.Random(2)
    run = Run("ann", "bob", "cat")
    run.begin("ann", "bob", "cat")
    for i in range(90):
        if i % 2:
            run.next_step()
        for who in ("bob", "cat"):
            run.back(run.give(run.lease(who), *[rng.random()] * 2))
        mine = run.give(run.lease("ann"), *[rng.random()] * 2)
        if run.rewards(mine)[0] < 0.5:
            run.back(run.again("bob", run.lose(mine)))
        else:
            run.back(mine)
    assert condemned(run.outcomes())


# --- lateness -------------------------------------------------------------------------------------------------------


def test_a_lease_that_came_too_late_for_any_batch_is_lost_and_its_reward_is_known():
    run = Run("ann", "bob", staleness=2)
    run.begin("ann", "bob")
    number = run.back(run.give(run.lease("bob"), 0.5, 0.5))
    mine = [run.give(run.lease("ann"), 0.25, 0.25) for _ in range(3)]
    state = run.state()
    for step in range(3):
        if step:
            run.next_step()
        for lease in mine[step - 1 : step] if step else ():
            run.back(lease)
        other = number if not step else run.back(run.give(run.lease("bob"), 0.5, 0.5))
        verdict = run.state().submissions[other].verdict_index
        run.chain.batch(step, [(other, verdict, i) for i in range(4)])
    run.back(mine[2])
    state = run.state()
    assert len(state.batches) == 3
    (*_, first, second, third) = run.outcomes()
    assert [(o.lost, o.late) for o in (first, second, third)] == [(False, False), (False, True), (True, False)]
    assert {o.x for o in (first, second, third)} == {-0.25}


# --- numbers --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=8, max_size=8))
def test_property_no_reward_breaks_the_test(claims):
    run = Run("ann", "bob", "cat")
    run.begin("ann", "bob", "cat")
    run.back(run.give(run.lease("bob"), *[claims[0]] * 2))
    run.back(run.give(run.lease("cat"), [claims[1], 1.7e308], [claims[2], 1.7e308]))
    for claim in claims[3:]:
        run.back(run.again("bob", run.lose(run.give(run.lease("ann"), claim, claim))))
        run.back(run.give(run.lease("ann"), 1.0, 1.0))
    state = run.state()
    said = drop_evidence(state, ANN, run.seen, state.size)
    assert all(math.isfinite(value) for value in (said.log_e, said.lost_mean, said.returned_mean))


def test_a_lease_is_held_against_what_was_known_when_it_was_issued():
    run = Run("ann", "bob", staleness=100)
    for step in range(7):
        if step:
            run.next_step()
        run.back(run.give(run.lease("bob"), *[step / 10] * 2))
    mine = run.give(run.lease("ann"), 0.9, 0.9)
    run.back(run.give(run.lease("bob"), 0.0, 0.0))
    run.back(mine)  # what bob brought meanwhile changes nothing
    (found,) = run.outcomes()
    assert found.x == pytest.approx(0.9 - (0.1 + 0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 6)
    assert (found.tokens, found.longest) == (32, 8)


# --- what a whole ledger says ---------------------------------------------------------------------------------------


def run_of(lost_of, away=False):
    """ann loses the leases that `lost_of` says, bob does them again; cat's rollouts are the others' mean.

    Args:
        away: the coordinator is away while each of them is open.
    """
    run = Run("ann", "bob", "cat")
    run.begin("ann", "bob", "cat")
    for i in range(30):
        lease = run.give(run.lease("ann"), *[(0.1, 0.9)[i % 2]] * 2)
        if lost_of((0.1, 0.9)[i % 2], i):
            if away:
                run.chain.append("incarnation")
            run.back(run.again("bob", run.lose(lease, "failed: out of memory" if i % 4 else "expired")))
        else:
            run.back(lease)
    return run


def test_what_a_ledger_shows_condemns_the_one_who_drops():
    run = run_of(lambda value, i: value < 0.5)
    state = run.state()
    found = drop_evidence(state, ANN, run.seen, state.size)
    assert (found.lost, found.returned) == (15, 15) and found.lost_mean < 0 < found.returned_mean
    assert found.log_e > 14 and drop_evidence(state, identity("bob").public, run.seen, state.size).log_e == 0.0
    # the same number from a later state, and from the ledger only as far as it was
    entries = run.chain.sink.entries
    for size in range(0, len(entries), 7):
        cut = fold(entries[:size])
        assert drop_evidence(cut, ANN, run.seen, size) == drop_evidence(state, ANN, run.seen, size)
    assert drop_evidence(state, ANN, run.seen, len(entries) // 2).log_e < found.log_e


def test_losses_that_are_nobodys_choice_are_left_out():
    run = run_of(lambda value, i: value < 0.5)
    entries = [
        replace(e, body=e.body.replace(b"expired", b"ownersx").replace(b"failed:", b"closed:"))
        for e in run.chain.sink.entries
    ]
    assert {o.lost for o in lease_outcomes(fold(entries), ANN, run.seen, len(entries))} == {False}
    run = run_of(lambda value, i: value < 0.5, away=True)
    assert len(run.state().restarts) == 15
    assert {o.lost for o in run.outcomes()} == {False}


def test_what_is_not_known_is_a_lease_all_the_same():
    run = Run("ann", "bob")
    run.begin("ann", "bob")
    run.chain.submit(run.give(run.lease("ann"), 0.0, 0.0))
    run.lose(run.give(run.lease("ann"), 0.0, 0.0))
    assert [(o.lost, o.x) for o in run.outcomes()] == [(False, None), (True, None)]
    assert isinstance(run.outcomes()[0], LeaseOutcome)


# --- a validator that was found to be wrong ---------------------------------------------------------------------------


def test_what_a_liar_alone_accepted_counts_no_more_and_earlier_evidence_follows_as_before():
    """Two validators; val alone let in what bob did again, and both let in what cat did."""
    run = Run("ann", "bob", "cat", validators=("val", "vic"))
    for who in ("bob", "cat"):
        run.back(run.give(run.lease(who), 0.5, 0.5), ("vic", [ACCEPT] * 4))
    one, two = (run.lose(run.give(run.lease("ann"), reward, reward)) for reward in (-1.0, -2.0))
    run.back(run.again("bob", one))
    number = run.chain.submit(run.again("cat", two))
    run.found[number] = [-2.0] * 4
    digest = run.chain.digest_of(run.state().submissions[number].lease_id)
    jobs = [(who, run.chain.job(number, who, round_), round_) for round_, who in ((1, "val"), (2, "vic"))]
    for who, job, round_ in jobs:
        run.chain.verdict(job, digest, who, [ACCEPT] * 4, round_)
    for step in range(3):  # after these no batch can take what is of policy 0: nothing is judged again
        taken = run.back(run.give(run.lease("bob"), 0.5, 0.5))
        run.chain.batch(step, [(taken, run.state().submissions[taken].verdict_index, i) for i in range(4)])
        run.next_step()
    before = run.outcomes()
    upto = run.state().size
    assert [outcome.x for outcome in before] == [-1.5, -2.5]
    said = next(v for v in run.state().submissions[number].verdicts.values() if v.validator == identity("val").public)
    run.chain.append("evidence.verdict", VerdictEvidence(said.index, 0, REJECT, "proof-mismatch", 0.0, 0.0))
    state = run.state()
    assert lease_outcomes(state, ANN, run.seen, upto) == before, "as an auditor computes the entry of that time"
    assert [outcome.x for outcome in run.outcomes()] == [None, -2.5], "vic accepted the second one too"
