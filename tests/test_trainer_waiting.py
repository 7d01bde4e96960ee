"""Who waits for what, from ledgers in memory: the words name the batch, the counts and the people."""

from __future__ import annotations

from protocol.records import REJECT, RunFinished
from tests.archive_builder import identity
from tests.test_trainer_leases import Bench
from trainer.waiting import member, names, next_batch


def waits(bench: Bench, who: str, validators: int = 2) -> str:
    return member(bench.state, bench.window, bench.state.nodes[identity(who).public], validators)


def opened(nodes: int = 2) -> Bench:
    """A run whose first policy is out and whose draws are open."""
    bench = Bench(nodes)
    if not bench.chain.periods:
        bench.chain.ready("v0", "v1")
    bench.chain.policy(0)
    return bench


def test_before_the_first_weights_everybody_waits_for_them() -> None:
    bench = Bench()
    assert next_batch(bench.state, bench.window).startswith("the first weights")
    assert waits(bench, "node-0") == "the first weights" and waits(bench, "v0") == "rollouts to check"


def test_the_next_batch_names_who_samples_and_who_checks() -> None:
    bench = opened()
    wanted = bench.state.manifest.leases.tasks_per_step * bench.state.manifest.leases.samples_per_task
    assert next_batch(bench.state, bench.window) == f"0 of {wanted} rollouts for batch 0; no node holds a lease"
    assert waits(bench, "node-0") == "a lease"
    first = bench.take("node-0")
    size = len(first.tasks) * first.samples
    assert next_batch(bench.state, bench.window).endswith(f"{size} being sampled by node-0")
    assert waits(bench, "node-0") == "", "it has work"
    submission = bench.submit(first)
    assert next_batch(bench.state, bench.window).endswith(f"{size} without a validator to check them")
    assert waits(bench, "node-0") == "its first verdict" and waits(bench, "node-0", validators=0) == "a validator"
    bench.chain.job(submission, "v1")
    assert next_batch(bench.state, bench.window).endswith(f"{size} with v1")
    assert waits(bench, "v1") == "" and waits(bench, "v0") == "rollouts to check"


def test_a_paused_node_waits_for_a_second_verdict_and_a_suspended_one_for_nothing() -> None:
    bench = opened()
    submission = bench.submit(bench.take("node-0"))
    bench.judge(submission, REJECT, "v0")
    assert bench.state.nodes[identity("node-0").public].state == "paused"
    assert waits(bench, "node-0") == "a second verdict"
    bench.judge(submission, REJECT, "v1", 2)
    assert bench.state.nodes[identity("node-0").public].state == "suspended"
    assert waits(bench, "node-0") == ""


def test_when_enough_is_under_way_nodes_wait_for_the_next_weights() -> None:
    bench = opened(4)
    for _ in range(400):
        asked = [who for who in bench.nodes if bench.ask(who).kind == "issue"]
        if not asked:
            break
        bench.accept(asked[0])
    assert waits(bench, "node-0") == "next weights"
    ready = next_batch(bench.state, bench.window)
    assert "being sampled" not in ready and "no node holds a lease" not in ready


def test_a_late_learner_is_named_with_the_weights_it_owes() -> None:
    bench = opened(4)
    for _ in range(2):
        while not bench.close_batch():
            bench.accept(next(who for who in bench.nodes if bench.ask(who).kind == "issue"))
    assert bench.window.batches == 2
    assert next_batch(bench.state, bench.window) == "the learner and the origin: the weights of step 1"


def test_a_finished_run_waits_for_nothing() -> None:
    bench = opened()
    bench.state.finished = RunFinished(0, "done")
    assert next_batch(bench.state, bench.window) == "" and waits(bench, "node-0") == ""


def test_many_names_are_counted() -> None:
    assert names(["b", "a"]) == "a, b" and names("edcba") == "a, b, c and 2 more"
