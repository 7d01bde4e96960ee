"""Leases, pacing and the window: pure decisions over a ledger in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import decision
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, Lease, LedgerEntry
from protocol.state import RunState
from tests.archive_builder import Chain, ListSink, identity, make_manifest
from trainer import batches, leases
from trainer.window import Window

SECRET = bytes(range(32))


@dataclass
class Following(ListSink):
    """A ledger in memory whose state and window follow every entry."""

    state: RunState = field(default_factory=RunState)
    window: Window = field(init=False)

    def __post_init__(self) -> None:
        self.window = Window(2, self.state)

    def append(self, event: str, body: object = b"", subject: bytes = b"") -> int:
        index = super().append(event, body, subject)
        self.follow(self.entries[index])
        assert self.state.problems == []
        return index

    def follow(self, entry: LedgerEntry) -> None:
        self.state.apply(entry.index, entry)
        self.window.observe(entry.index, entry)


class Bench:
    """A run with two validators and the desk's decisions, without disk or network."""

    def __init__(self, nodes: int = 2, **changes) -> None:
        self.chain = Chain(make_manifest(**changes), Following())
        self.book: Following = self.chain.sink
        self.chain.open()
        self.later_ms = 0
        """How long after the last ledger entry the desk is asked."""
        self.nodes = self.present = [f"node-{i}" for i in range(nodes)]
        """`present` are those heard from lately."""
        for name in ("v0", "v1"):
            self.chain.join(name, "validator")
        for name in self.nodes:
            self.chain.join(name, "inference")

    @property
    def state(self) -> RunState:
        return self.book.state

    @property
    def window(self) -> Window:
        return self.book.window

    def ask(
        self, who: str, capacity: int = 64, uploading: frozenset[bytes] = frozenset(), near: tuple[str, ...] = ()
    ) -> leases.Decision:
        node = self.state.nodes[identity(who).public]
        return leases.decide(
            self.state,
            self.window,
            node,
            capacity=capacity,
            uploading=uploading,
            secret=SECRET,
            bounds=leases.Bounds(1 << 20, 2),
            now_ms=self.book.time + self.later_ms,
            present={identity(name).public for name in self.present},
            neighbours={identity(name).public for name in near},
        )

    def take(self, who: str) -> Lease:
        """Ask, and write the lease that was decided into the ledger."""
        decision = self.ask(who)
        assert decision.kind == "issue", decision.reason
        assert decision.lease is not None
        return self.write(who, decision.lease)

    def write(self, who: str, lease: Lease) -> Lease:
        self.chain.leases[lease.lease_id], self.chain.owners[lease.lease_id] = lease, who
        self.chain.append("lease", b"", self.chain.sealed("coordinator", "lease", lease, identity(who).public))
        return lease

    def submit(self, lease: Lease) -> int:
        return self.chain.submit(lease.lease_id)

    def judge(self, submission: int, outcome: int = ACCEPT, validator: str = "v0", round_number: int = 1) -> None:
        held = self.state.submissions[submission]
        job = self.chain.job(submission, validator, round_number)
        outcomes = [outcome] * len(held.outcomes)
        self.chain.verdict(job, held.intent.digest, validator, outcomes, round_number)

    def accept(self, who: str) -> Lease:
        lease = self.take(who)
        self.judge(self.submit(lease))
        return lease

    def close_batch(self) -> list[batches.BatchEntry]:
        groups = batches.choose(self.state, self.window)
        entries = batches.entries_of(self.state, groups)
        if entries:
            named = [(e.submission, e.verdict, e.rollout) for e in entries]
            self.chain.batch(self.window.batches, named)
        return list(entries)


def test_a_strangers_first_lease_is_small_and_the_next_one_whole() -> None:
    bench = Bench()
    bench.chain.policy(0)
    first = bench.accept("node-0")
    assert len(first.tasks) * first.samples == bench.chain.manifest.leases.probation_first_rollouts
    second = bench.take("node-0")
    rules = bench.chain.manifest.leases
    assert (len(second.tasks), second.samples) == (rules.tasks_per_lease, rules.samples_per_task)
    assert not set(first.tasks) & set(second.tasks) and first.nonce != second.nonce


def test_a_small_engine_gets_fewer_tasks_but_whole_groups() -> None:
    bench = Bench()
    bench.chain.policy(0)
    bench.accept("node-0")
    decision = bench.ask("node-0", capacity=1)
    assert decision.lease is not None
    assert (len(decision.lease.tasks), decision.lease.samples) == (1, 4)


def test_in_probation_there_is_one_lease_at_a_time_and_it_is_sent_again_on_request() -> None:
    bench = Bench()
    bench.chain.policy(0)
    lease = bench.take("node-0")
    assert bench.ask("node-0") == leases.Decision("again", lease_id=lease.lease_id)
    assert bench.ask("node-0", uploading=frozenset({lease.lease_id})).kind == "wait"
    submission = bench.submit(lease)
    assert bench.ask("node-0").kind == "wait" and "being checked" in bench.ask("node-0").reason
    bench.judge(submission)
    assert bench.ask("node-0").kind == "issue"


def test_an_active_node_may_hold_two_leases() -> None:
    bench = Bench(leases=replace(make_manifest().leases, probation_accepted=4))
    bench.chain.policy(0)
    bench.accept("node-0")
    first = bench.take("node-0")
    bench.take("node-0")
    assert bench.ask("node-0").lease_id == first.lease_id


def test_leases_stop_when_their_rollouts_would_be_too_old_and_flow_again_with_new_weights() -> None:
    # 8 rollouts a batch, 2 steps of staleness: batches 0, 1 and 2 may be sampled by policy 0, batch 3 may not.
    bench = Bench(leases=replace(make_manifest().leases, probation_accepted=4))
    assert bench.ask("node-0").reason == "no weights are published yet"
    bench.chain.policy(0)
    bench.accept("node-0")
    while bench.ask("node-0").kind == "issue":
        bench.accept("node-0")
    assert leases.in_flight(bench.window) == 24, "cut to fit: nothing runs over into batch 3"
    assert "next weights" in bench.ask("node-0").reason
    bench.chain.policy(1)
    assert bench.ask("node-0").kind == "issue"


def test_no_lease_is_issued_beyond_the_last_step() -> None:
    bench = Bench(steps=1, leases=replace(make_manifest().leases, probation_accepted=4))
    bench.chain.policy(0)
    bench.accept("node-0")
    bench.accept("node-0")
    assert "last step" in bench.ask("node-0").reason


def test_a_closed_lease_goes_to_another_node_with_the_same_nonce_tasks_and_samples() -> None:
    bench = Bench()
    bench.chain.policy(0)
    lease = bench.take("node-0")
    bench.chain.close_lease(lease.lease_id)
    assert bench.ask("node-0").reason == "its last lease is being done again by another node"
    other = bench.take("node-1")
    assert (other.nonce, other.tasks, other.samples, other.root) == (
        lease.nonce,
        lease.tasks,
        lease.samples,
        lease.root,
    )
    assert other.lease_id != lease.lease_id
    assert bench.state.leases[other.lease_id].reissue_of == lease.lease_id
    assert not bench.window.again, "it is not issued a third time"
    assert "done again" in bench.ask("node-0").reason, "the other one has it now"
    bench.judge(bench.submit(other))
    assert bench.take("node-0").nonce != lease.nonce, "it came back: the node goes on, with something else"


def test_a_lost_lease_holds_its_node_back_only_while_somebody_could_do_it_again() -> None:
    bench = Bench()
    bench.chain.policy(0)
    lost = bench.take("node-0")
    bench.chain.close_lease(lost.lease_id)
    assert bench.ask("node-0").kind == "wait"
    bench.present = ["node-0"]
    assert bench.ask("node-0").kind == "issue", "nobody else is there"
    bench.present = ["node-0", "node-1"]
    bench.later_ms = bench.chain.manifest.leases.lease_ms
    assert bench.ask("node-0").kind == "issue", "nobody took it for as long as a lease lasts"


def test_a_lease_lost_while_the_coordinator_was_away_holds_nobody_back() -> None:
    bench = Bench()
    bench.chain.policy(0)
    lost = bench.take("node-0")
    bench.book.time += 30_000
    bench.chain.append("incarnation")
    bench.chain.close_lease(lost.lease_id)
    assert bench.ask("node-0").kind == "issue"
    assert bench.take("node-1").nonce == lost.nonce, "it is done again all the same"


def test_a_lease_is_done_again_in_pieces_by_nodes_with_smaller_engines() -> None:
    bench = Bench(nodes=4, leases=replace(make_manifest().leases, probation_accepted=4))
    bench.chain.policy(0)
    for who in bench.nodes:
        bench.accept(who)
    large = bench.take("node-0")
    assert len(large.tasks) == 2
    bench.chain.close_lease(large.lease_id)
    decision = bench.ask("node-1", capacity=4)
    assert decision.lease is not None
    assert (decision.lease.nonce, decision.lease.tasks) == (large.nonce, large.tasks[:1])
    bench.write("node-1", decision.lease)
    assert bench.take("node-2").tasks == large.tasks[1:]
    assert not bench.window.again
    bench.submit(decision.lease)
    assert "done again" in bench.ask("node-0").reason, "half of it is still missing"


def test_groups_that_no_validator_could_decide_are_sampled_again_by_somebody_else() -> None:
    bench = Bench(leases=replace(make_manifest().leases, probation_accepted=4, second_draw=0.0))
    bench.chain.policy(0)
    bench.accept("node-0")
    bench.accept("node-1")
    lease = bench.take("node-0")
    held = bench.state.submissions[bench.submit(lease)]
    for number in (1, 2, 3):
        outcomes = [ACCEPT] * 3 + [INCONCLUSIVE] + [ACCEPT] * 4
        validator = "v0" if number % 2 else "v1"
        bench.chain.verdict(bench.chain.job(held.index, validator, number), held.intent.digest, validator, outcomes,
                            number)  # fmt: skip
    assert bench.ask("node-0").kind == "issue", "it dropped nothing: it goes on"
    again = bench.take("node-1")
    assert (again.nonce, again.tasks, again.samples) == (lease.nonce, lease.tasks[:1], lease.samples)
    bench.judge(bench.submit(again))
    trained = bench.close_batch()
    bench.chain.policy(1)
    trained += bench.close_batch()
    assert {(e.submission, e.rollout) for e in trained} >= {(held.index, i) for i in (4, 5, 6, 7)}


def test_what_an_accomplice_answers_with_garbage_is_sampled_again_by_somebody_else() -> None:
    bench = Bench(nodes=4, leases=replace(make_manifest().leases, probation_accepted=4, second_draw=0.0))
    bench.chain.policy(0)
    for name in ("node-0", "node-2"):
        bench.accept(name)
    lost = bench.take("node-0")
    bench.chain.close_lease(lost.lease_id)
    garbage = bench.take("node-1")
    assert garbage.nonce == lost.nonce
    other = bench.submit(garbage)
    for number, validator in ((1, "v0"), (2, "v1")):
        bench.judge(other, REJECT, validator, number)
    assert bench.state.nodes[identity("node-1").public].state == "suspended"
    pieces = []
    while bench.window.again:
        lease = bench.take("node-2")
        assert lease.nonce == lost.nonce
        bench.judge(bench.submit(lease))
        pieces += lease.tasks
    assert sorted(pieces) == sorted(lost.tasks), "its rewards become known after all"
    assert bench.take("node-0").nonce != lost.nonce


def test_a_closed_lease_is_dropped_when_its_policy_is_too_old() -> None:
    bench = Bench(nodes=3)
    bench.chain.policy(0)
    lost = bench.take("node-0")
    bench.chain.close_lease(lost.lease_id)
    for step in range(1, 4):
        while not bench.close_batch():
            bench.accept("node-2")
        bench.chain.policy(step)
    assert not bench.window.again
    assert bench.take("node-1").nonce != lost.nonce


def test_a_lost_lease_is_done_again_even_when_newer_work_fills_the_room() -> None:
    bench = Bench(nodes=3, leases=replace(make_manifest().leases, probation_accepted=4))
    bench.chain.policy(0)
    bench.accept("node-1")
    bench.accept("node-0")
    assert bench.close_batch()
    lost = bench.take("node-0")
    bench.chain.policy(1)
    while bench.ask("node-1").kind == "issue":
        bench.accept("node-1")  # it has all the room of policy 1 now
    bench.chain.close_lease(lost.lease_id)
    assert bench.take("node-1").nonce == lost.nonce, "batches take the oldest first: it is in nobody's way"


def test_weights_ahead_of_their_batch_make_no_batch_that_the_ledger_refuses() -> None:
    bench = Bench()
    bench.chain.policy(0)
    bench.chain.policy(2)  # an origin that went wrong: policy 2 is what batch 1 makes
    while bench.ask("node-0").kind == "issue":
        bench.accept("node-0")
    assert bench.close_batch() == []


def test_a_stranger_gets_no_more_of_a_large_lease_than_its_first_may_hold() -> None:
    bench = Bench()
    bench.chain.policy(0)
    bench.accept("node-0")
    large = bench.take("node-0")
    bench.chain.close_lease(large.lease_id)
    piece = bench.take("node-1")
    assert (piece.nonce, piece.tasks) == (large.nonce, large.tasks[:1])


def test_paused_and_suspended_nodes_get_no_lease_and_are_told_why() -> None:
    bench = Bench()
    bench.chain.policy(0)
    submission = bench.submit(bench.take("node-0"))
    bench.judge(submission, REJECT)
    assert bench.ask("node-0").kind == "wait" and "second validator" in bench.ask("node-0").reason
    bench.judge(submission, REJECT, "v1", 2)
    assert bench.ask("node-0").kind == "leave" and "suspended" in bench.ask("node-0").reason
    assert leases.in_flight(bench.window) == 0


def test_leases_expire_by_duration_but_not_while_the_coordinator_was_away() -> None:
    bench = Bench()
    bench.chain.policy(0)
    lease = bench.take("node-0")
    over = bench.state.leases[lease.lease_id].time + lease.duration_ms + leases.GRACE_MS + 1
    assert [held.lease_id for held in leases.expired(bench.state, bench.window, over, frozenset())] == [lease.lease_id]
    assert leases.expired(bench.state, bench.window, over, frozenset({lease.lease_id})) == []
    bench.book.time += 30_000  # the coordinator was killed and came back half a minute later
    bench.chain.append("incarnation")
    assert leases.expired(bench.state, bench.window, over, frozenset()) == []
    assert len(leases.expired(bench.state, bench.window, over + 30_010, frozenset())) == 1


@pytest.mark.parametrize("outcome", [REJECT, INCONCLUSIVE])
def test_a_group_enters_whole_or_not_at_all(outcome: int) -> None:
    bench = Bench(leases=replace(make_manifest().leases, probation_accepted=4, second_draw=0.0))
    bench.chain.policy(0)
    bench.accept("node-0")
    lease = bench.take("node-0")
    held = bench.state.submissions[bench.submit(lease)]
    outcomes = [ACCEPT] * 3 + [outcome] + [ACCEPT] * 4
    bench.chain.verdict(bench.chain.job(held.index, "v0"), held.intent.digest, "v0", outcomes)
    if outcome == INCONCLUSIVE:
        for number, who in ((2, "v1"), (3, "v0")):
            bench.chain.verdict(bench.chain.job(held.index, who, number), held.intent.digest, who, outcomes, number)
    if outcome == REJECT:
        second = [ACCEPT] * 8  # not repeated: inconclusive, and nothing is held against the node
        bench.chain.verdict(bench.chain.job(held.index, "v1", 2), held.intent.digest, "v1", second, 2)
    entries = bench.close_batch()
    assert {e.rollout for e in entries if e.submission == held.index} == {4, 5, 6, 7}


def test_who_takes_leases_and_returns_nothing_waits_longer_each_time() -> None:
    """One key could otherwise fill the ledger with leases taken and given up, thousands a minute."""
    bench = Bench()
    bench.present = ["node-1"]  # nobody who could do its leases again: that alone would hold it back
    bench.chain.policy(0)
    bench.accept("node-0")
    for lost in range(1, 13):
        bench.chain.close_lease(bench.take("node-1").lease_id, "failed: nothing")
        wait = leases.backoff_ms(lost)
        assert wait == (0 if lost <= 2 else min(300_000, 1000 * 2 ** (lost - 3)))
        bench.later_ms = wait - 1
        if wait:
            assert bench.ask("node-1").kind == "wait" and "brought nothing" in bench.ask("node-1").reason
        bench.later_ms = wait
    assert bench.ask("node-0").kind == "issue", "nobody else waits"
    bench.judge(bench.submit(bench.take("node-1")))
    bench.later_ms = 0
    bench.chain.close_lease(bench.take("node-1").lease_id)
    assert bench.ask("node-1").kind == "issue", "what is returned makes good for what was lost"


def test_free_keys_cannot_hold_what_the_run_needs() -> None:
    """Thirty strangers take a lease each and return nothing: a quarter of the room is theirs, no more."""
    bench = Bench(nodes=31, leases=replace(make_manifest().leases, probation_accepted=4))
    bench.chain.policy(0)
    bench.accept("node-0")
    held = 0
    for who in bench.nodes[1:]:
        decision = bench.ask(who)
        if decision.kind == "issue":
            held += bench.take(who).samples
        else:
            assert "newcomers" in decision.reason
    # 3 batches of 8 rollouts may be under way; 4 are accepted already and 6 are the newcomers' share.
    assert held == 4
    while bench.ask("node-0").kind == "issue":
        bench.accept("node-0")
    assert bench.close_batch(), "the run goes on"


class Simulation:
    """Random members over the pure decisions: what a run's state machine must survive."""

    def __init__(self, seed: int, nodes: int) -> None:
        self.random = random.Random(seed)
        rules = replace(make_manifest().leases, probation_accepted=8)
        self.bench = Bench(nodes, steps=6, leases=rules)
        self.bench.chain.policy(0)
        self.held: list[tuple[str, Lease]] = []
        self.submitted: list[int] = []
        self.bench.later_ms = 300_000  # whoever waits for having lost leases has waited
        self.trained: list[batches.BatchEntry] = []

    def run(self) -> None:
        bench, steps = self.bench, self.bench.chain.manifest.steps
        for _ in range(4000):
            self.random.choice([self.ask, self.ask, self.upload, self.judge, self.lose, self.learn, self.learn])()
            if bench.window.batches == steps:
                return
        why = leases.pacing(bench.state, bench.window, bench.chain.manifest)
        pytest.fail(f"no progress: {bench.window.batches} batches, {why}")

    def ask(self) -> None:
        who = self.random.choice(self.bench.nodes)
        if self.bench.ask(who).kind == "issue":
            self.held.append((who, self.bench.take(who)))

    def upload(self) -> None:
        if self.held:
            _, lease = self.held.pop(self.random.randrange(len(self.held)))
            self.submitted.append(self.bench.submit(lease))

    def lose(self) -> None:
        if self.held and self.random.random() < 0.3:
            _, lease = self.held.pop(self.random.randrange(len(self.held)))
            self.bench.chain.close_lease(lease.lease_id)

    def judge(self) -> None:
        if self.submitted:
            index = self.submitted.pop(self.random.randrange(len(self.submitted)))
            number = decision.next_round(self.bench.state.submissions[index])
            assert number is not None
            outcome = INCONCLUSIVE if self.random.random() < 0.3 else ACCEPT
            self.bench.judge(index, outcome, f"v{number % 2}", number)
            if index in self.bench.window.undecided:
                self.submitted.append(index)

    def learn(self) -> None:
        self.trained += self.bench.close_batch()
        newest = self.bench.state.newest_policy
        if newest is not None and newest.step < self.bench.window.batches and self.random.random() < 0.5:
            self.bench.chain.policy(newest.step + 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_property_any_order_of_events_reaches_the_last_step(seed: int, nodes: int) -> None:
    simulation = Simulation(seed, nodes)
    simulation.run()
    state, bench = simulation.bench.state, simulation.bench
    assert len({(e.submission, e.rollout) for e in simulation.trained}) == len(simulation.trained)
    for step, held in state.batches.items():
        for entry in held.closed.entries:
            lease = state.leases[state.submissions[entry.submission].lease_id].lease
            assert 0 <= step - lease.step <= bench.chain.manifest.leases.max_staleness
    again = Following()
    for entry in bench.book.entries:
        again.follow(entry)
    live, rebuilt = bench.window.__dict__, again.window.__dict__
    assert {k: v for k, v in live.items() if k != "state"} == {k: v for k, v in rebuilt.items() if k != "state"}
    assert again.state == state


# --- leases that are sat on ---------------------------------------------------------------------------------------


def with_usual_returns(**changes) -> Bench:
    """A run whose three nodes earned trust and return a lease in 10 ms each."""
    rules = replace(make_manifest().leases, probation_accepted=2, **changes)
    bench = Bench(nodes=3, leases=rules)
    bench.chain.policy(0)
    for name in bench.nodes * 4:
        bench.accept(name)
        while bench.close_batch():
            bench.chain.policy(bench.window.batches)
    assert {node.state for node in bench.state.nodes.values() if node.role == "inference"} == {"active"}
    assert 0 < bench.window.usual_ms < 1_000
    return bench


def fill(bench: Bench, *names: str) -> list[Lease]:
    held = []
    for _ in range(8):
        for name in names:
            decision = bench.ask(name)
            if decision.kind == "issue" and decision.lease is not None:
                held.append(bench.write(name, decision.lease))
    return held


def test_leases_that_are_sat_on_stop_nobody_else() -> None:
    bench = with_usual_returns()
    held = fill(bench, "node-0", "node-1")
    assert held and bench.ask("node-2").reason.startswith("enough rollouts are under way"), "they hold all the room"
    bench.later_ms = leases.OVERDUE_MIN_MS + 1_000
    assert bench.later_ms < bench.chain.manifest.leases.lease_ms / 10
    assert bench.ask("node-2").kind == "issue", "nobody waits for them any longer"
    for name in ("node-0", "node-1"):
        decision = bench.ask(name)
        assert decision.kind == "again" and decision.lease_id in {lease.lease_id for lease in held}, "no more of them"
    bench.book.time += bench.later_ms
    bench.later_ms = 0
    bench.accept("node-2")
    for lease in held:
        bench.judge(bench.submit(lease))  # late, and honest: it counts like any other
    assert (
        bench.ask("node-0").kind in ("issue", "wait") and bench.state.nodes[identity("node-0").public].state == "active"
    )
    assert bench.close_batch(), "what came late can still be trained"


def test_a_lease_is_not_overdue_before_anybody_knows_what_is_usual_nor_while_it_arrives() -> None:
    bench = Bench(leases=replace(make_manifest().leases, probation_accepted=2))
    bench.chain.policy(0)
    bench.accept("node-0")
    bench.take("node-0")
    manifest = bench.chain.manifest
    assert leases.overdue_ms(bench.window, manifest) == manifest.leases.lease_ms
    assert not leases.overdue(bench.state, bench.window, bench.book.time + manifest.leases.lease_ms - 100)
    bench = with_usual_returns()
    lease = bench.take("node-0")
    bench.later_ms = leases.OVERDUE_MIN_MS + 1_000
    assert bench.ask("node-0").kind == "again"
    assert bench.ask("node-0", uploading=frozenset({lease.lease_id})).kind == "issue", "its line is slow, not its owner"


def test_the_usual_time_is_the_median_of_what_trusted_nodes_returned() -> None:
    bench = with_usual_returns()
    usual = bench.window.usual_ms
    for _ in range(5):  # one node that sits on its leases moves it little
        late = bench.take("node-0")
        bench.book.time += 50_000
        bench.judge(bench.submit(late))
        while bench.close_batch():
            bench.chain.policy(bench.window.batches)
    assert bench.window.usual_ms <= 2 * usual
    again = Window(2, RunState())
    for entry in bench.book.entries:
        again.state.apply(entry.index, entry)
        again.observe(entry.index, entry)
    assert (again.usual_ms, again.returns) == (bench.window.usual_ms, bench.window.returns), "the same after a restart"


@pytest.mark.parametrize("stranger", ["takes it and sits", "never asks"])
def test_a_stranger_can_not_idle_a_node_with_what_it_lost(stranger: str) -> None:
    bench = with_usual_returns()
    lost = bench.take("node-0")
    bench.chain.close_lease(lost.lease_id, "failed: its engine died")
    if stranger == "takes it and sits":
        assert bench.take("node-1").nonce == lost.nonce
    assert "being done again" in bench.ask("node-0").reason
    bench.later_ms = leases.OVERDUE_MIN_MS + 1_000
    decision = bench.ask("node-0")
    assert decision.kind == "issue" and decision.lease is not None and decision.lease.nonce != lost.nonce
