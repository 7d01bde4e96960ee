"""Pooled evidence in the coordinator: who is a little off everywhere is suspended, and no validator frames anybody."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import codec
from protocol.chain import Revocation, RunUpdate, seal_update
from protocol.errors import ReasonCode, UsageError
from protocol.evidence import VerdictEvidence
from protocol.evidence_rows import EvidenceRow
from protocol.identity import load_identity
from protocol.records import ACCEPT, REJECT, NodeEvidence, Number, RolloutDetail
from protocol.run_files import update_file
from protocol.state import NodeState
from tests.coordinator_desk import Desk
from tests.scripted_swarm import actor_identity
from trainer import config, keys
from trainer import evidence as evidence_module
from verifier.archive import RunArchive
from verifier.evidence_check import check_node_evidence
from verifier.report import Report

ROW_NAMES = ("precision", "proof_median")
ROW = EvidenceRow(*ROW_NAMES, 10.0, 1.0, 0.5, 14.0, 200, 0.7, 2)
HONEST, ROUGH = 0.7, 2.0

Measure = Callable[[str, str], float]
"""(node, validator) -> the number the validator gives for each of its rollouts."""


def truth(node: str, validator: str) -> float:
    return ROUGH if node == "rough" else HONEST


class Measured:
    """A run in which validators measure what a test says, and accept everything."""

    def __init__(self, tmp_path: Path, validators: int = 3, row: EvidenceRow = ROW, measure: Measure = truth) -> None:
        self.measure = measure
        self.desk = Desk(
            tmp_path / "run", validators=validators, evidence=(row,), leases__tasks_per_step=4000,
            leases__probation_accepted=2,
        )  # fmt: skip
        for i in range(validators):
            self.desk.join(f"validator-{i}", "validator")
        self.desk.publish(0)

    async def lease(self, node: str) -> None:
        """One lease of four rollouts, answered and judged."""
        index = self.desk.upload(self.desk.lease(node))
        while jobs := self.desk.open_jobs(index):
            x = self.measure(node, self.desk.state.nodes[jobs[0].validator].name)
            count = iter(range(1000))

            def spoil(detail: RolloutDetail, x: float = x, count=count) -> RolloutDetail:
                own = struct.pack("<2f", -1.0, -1.0 - next(count) * 1e-6)  # no two rollouts are the same
                return replace(detail, logprobs=own, numbers=(Number("proof_median", x),))

            await self.desk.judge(index, ACCEPT, spoil)

    async def rounds(self, nodes: tuple[str, ...], most: int = 60) -> int:
        """Leases of each node until somebody is suspended; `most` when nobody is."""
        for done in range(most):
            for name in nodes:
                if self.desk.join(name) and self.node(name).state != "suspended":
                    await self.lease(name)
            if any(self.node(name).state == "suspended" for name in nodes):
                return done + 1
        return most

    def node(self, name: str) -> NodeState:
        return self.desk.state.nodes[actor_identity(name).public]

    async def audit(self) -> Report:
        """What an auditor of the sealed archive says of the evidence in it."""
        await self.desk.book.commit()
        self.desk.book.seal(self.desk.run_dir / "ledger")
        archive, report = RunArchive.open(self.desk.run_dir), Report()
        assert archive.problems == []
        check_node_evidence(archive, archive.fold(), report)
        return report

    def said(self) -> list[NodeEvidence]:
        entries = [stored.entry() for stored in self.desk.book.ledger.entries()]
        return [codec.decode(NodeEvidence, entry.body) for entry in entries if entry.event == "evidence.node"]


async def test_a_node_that_is_a_little_off_everywhere_is_suspended_by_numbers_that_follow_from_the_archive(
    tmp_path: Path,
) -> None:
    run = Measured(tmp_path)
    leases = await run.rounds(("rough", "ann", "bob"))
    assert 8 <= leases < 60
    assert (run.node("rough").state, run.node("rough").reason) == ("suspended", "pooled-evidence")
    assert {run.node(name).state for name in ("ann", "bob")} == {"active"}
    assert "rough is suspended: the proof_median of its rollouts, lately 2" in run.desk.news()
    (said,) = run.said()
    assert said.log_all > said.log_e >= ROW.log_bar and said.validators == 3 and said.rollouts > 3 * leases
    for _ in range(5):
        await run.lease("ann")  # an auditor sees more than the coordinator did then
    report = await run.audit()
    assert (report.failures, report.unchecked) == ([], [])
    assert run.desk.state.problems == [] and not run.node("rough").open_leases
    run.desk.close()


async def test_one_lying_validator_of_three_frames_no_honest_node(tmp_path: Path) -> None:
    """Invariant 8. It says the worst that the manifest lets it say, of everybody, for as long as it likes."""
    run = Measured(tmp_path, measure=lambda node, who: ROW.clip if who == "validator-0" else truth(node, who))
    for _ in range(40):
        for name in ("ann", "bob"):
            await run.lease(name)
    assert {run.node(name).state for name in ("ann", "bob")} == {"active"} and run.said() == []
    sums = run.desk.judging.evidence._sums.of(run.node("ann").key)[ROW_NAMES]
    assert sums.log_all > ROW.log_bar and sums.log_e < 1, "its word alone would have been enough"
    assert "nobody is suspended on one validator's word" in run.desk.news()
    run.desk.close()


async def test_what_a_validator_said_counts_no_more_once_trust_in_it_has_ended(tmp_path: Path) -> None:
    """Else two liars could frame, one after the other. Here one that is known frames, and its key is revoked."""
    lying = {"validator-0", "validator-1"}
    run = Measured(tmp_path, validators=4, measure=lambda node, who: ROW.clip if who in lying else truth(node, who))
    for _ in range(4):
        for name in ("ann", "bob"):
            await run.lease(name)
    evidence, ann = run.desk.judging.evidence, run.node("ann").key
    before = evidence._sums.of(ann)[ROW_NAMES]
    root = load_identity(run.desk.run_dir / "keys" / "root.pem")
    gone = Revocation(actor_identity("validator-0").public, run.desk.book.ledger.size, "a test")
    update = seal_update(root, run.desk.state.chain, RunUpdate(revocations=(gone,)), sequence=9, issued_at=1)
    run.desk.book.append("run.updated", subject=update)
    run.desk.tick()
    after = evidence._sums.of(ann)[ROW_NAMES]
    assert actor_identity("validator-0").public not in after.validators and after.numbers <= before.numbers
    assert after.log_e < 1, "the other liar is the one that is left out"
    run.desk.close()


async def test_one_liar_of_three_shields_nobody_by_what_it_says_of_others(tmp_path: Path) -> None:
    """It makes all honest nodes look bad and the dishonest one good. Before, that switched pooled evidence off."""

    def measure(node: str, who: str) -> float:
        return truth(node, who) if who != "validator-0" else 0.0 if node == "rough" else ROW.clip

    run = Measured(tmp_path, measure=measure)
    await run.rounds(("rough", "ann", "bob"), most=50)
    assert run.node("rough").state == "suspended" and (await run.audit()).failures == []
    assert {run.node(name).state for name in ("ann", "bob")} == {"active"}
    run.desk.close()


async def test_who_was_framed_is_heard_again_when_one_of_two_liars_is_found(tmp_path: Path) -> None:
    lying = {"validator-0", "validator-1"}
    run = Measured(tmp_path, measure=lambda node, who: ROW.clip if node == "ann" and who in lying else truth(node, who))
    await run.rounds(("ann", "bob", "cid"))
    assert run.node("ann").state == "suspended", "two liars of three can frame"
    liar = actor_identity("validator-0").public
    verdict = next(v for s in run.desk.state.submissions.values() for v in s.verdicts.values() if v.validator == liar)
    run.desk.book.append("evidence.verdict", VerdictEvidence(verdict.index, 0, REJECT, "proof-mismatch", 0.0, 0.0))
    run.desk.tick()
    assert run.node("ann").state == "active" and "ann is suspended no more, but active" in run.desk.news()
    report = await run.audit()
    assert report.failures == [], "what was entered before followed from what was known then"
    await run.lease("ann")
    run.desk.close()


async def test_a_dishonest_node_that_comes_back_by_it_is_suspended_again_by_what_is_left(tmp_path: Path) -> None:
    run = Measured(tmp_path, validators=4)
    await run.rounds(("rough", "ann", "bob"))
    for _ in range(30):  # what others measured is enough without one of them, and without one more
        await run.lease("ann")
    first = run.node("rough").suspended_index
    liar = actor_identity("validator-0").public
    verdict = next(v for s in run.desk.state.submissions.values() for v in s.verdicts.values() if v.validator == liar)
    run.desk.book.append("evidence.verdict", VerdictEvidence(verdict.index, 0, REJECT, "proof-mismatch", 0.0, 0.0))
    assert run.node("rough").state == "active"
    run.desk.here("rough")
    for _ in range(30):
        if run.node("rough").state == "suspended" or not run.desk.join("rough"):
            break
        await run.lease("rough")
    rough = run.node("rough")
    assert rough.state == "suspended" and rough.suspended_index != first
    assert len(run.said()) == 2 and (await run.audit()).failures == []
    run.desk.close()


async def test_a_row_that_its_operator_withdraws_takes_back_what_it_did(tmp_path: Path) -> None:
    run = Measured(tmp_path)
    await run.rounds(("rough", "ann", "bob"))
    assert run.node("rough").state == "suspended"
    settings = config.load(run.desk.run_dir)
    with pytest.raises(UsageError, match="sums up no margin_rate; it sums up proof_median"):
        keys.withdraw(settings, "margin_rate", "a mistake", None)
    done = keys.withdraw(settings, "proof_median", "a louder kind of machine", None)
    assert (done["withdrawn"], done["left"]) == (["proof_median"], [])
    run.desk.book.append("run.updated", subject=update_file(run.desk.run_dir, done["update"]).read_bytes())
    run.desk.tick()
    assert run.node("rough").state == "active" and "rough is suspended no more, but active" in run.desk.news()
    assert (await run.audit()).failures == []
    with pytest.raises(UsageError, match="it sums up nothing"):
        keys.withdraw(settings, "all", "once more", None)
    run.desk.close()


async def test_rollouts_of_leases_from_before_a_row_count_nothing_under_it(tmp_path: Path) -> None:
    """Who took those leases was held to nothing of the kind."""
    run = Measured(tmp_path, row=replace(ROW, honest=5.0, clip=50.0))
    assert await run.rounds(("rough", "ann", "bob"), most=20) == 20
    root = load_identity(run.desk.run_dir / "keys" / "root.pem")
    update = seal_update(root, run.desk.state.chain, RunUpdate(evidence=(ROW,)), sequence=9, issued_at=1)
    run.desk.book.append("run.updated", subject=update)
    run.desk.tick()
    assert run.node("rough").state == "active"
    assert run.desk.judging.evidence._sums.of(run.node("rough").key) == {}
    await run.rounds(("rough", "ann", "bob"))
    assert run.node("rough").state == "suspended" and (await run.audit()).failures == []
    run.desk.close()


async def test_the_only_validator_of_a_run_condemns_nobody(tmp_path: Path) -> None:
    run = Measured(tmp_path, validators=1)
    assert await run.rounds(("rough", "ann"), most=30) == 30
    assert run.node("rough").state == "active" and run.said() == []
    assert "nobody is suspended on one validator's word" in run.desk.news()
    run.desk.close()


async def test_nobody_is_suspended_for_what_most_nodes_show(tmp_path: Path) -> None:
    """The policy grew sharper, or the bound was wrong: honest nodes are above it as well."""
    run = Measured(tmp_path, measure=lambda node, who: ROUGH if node != "ann" else HONEST)
    assert await run.rounds(("rough", "bob", "cat", "ann"), most=30) == 30
    assert run.said() == [] and "most other nodes are no better" in run.desk.news()
    run.desk.close()


async def test_nor_while_nobody_else_is_there_to_compare_with(tmp_path: Path) -> None:
    run = Measured(tmp_path)
    assert await run.rounds(("rough",), most=30) == 30
    assert await run.rounds(("rough", "ann")) < 60, "as soon as somebody is"
    assert run.node("rough").state == "suspended" and (await run.audit()).failures == []
    run.desk.close()


async def test_a_lower_bar_in_the_manifest_decides_otherwise(tmp_path: Path) -> None:
    taken = {}
    for bar in (14.0, 24.0, 600.0):
        run = Measured(tmp_path / str(bar), row=replace(ROW, log_bar=bar))
        assert await run.rounds(("ann",), most=25) == 25
        taken[bar] = await run.rounds(("rough",), most=40)
        run.desk.close()
    assert taken[14.0] < taken[24.0] < taken[600.0] == 40


async def test_a_restart_goes_on_with_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Measured(tmp_path)
    for _ in range(8):
        for name in ("rough", "ann", "bob"):
            await run.lease(name)
    held = dict(run.desk.judging.evidence._sums._by_node)
    await run.desk.book.commit()
    run.desk.close()
    run.desk.open()
    for name in ("validator-0", "validator-1", "validator-2", "rough", "ann", "bob"):
        run.desk.here(name)
    run.desk.judging.drawing.keep_in_step()
    monkeypatch.setattr(evidence_module, "MAX_PAUSE_S", -1.0)
    assert not run.desk.judging.evidence.run() and run.desk.judging.evidence._queue, "a turn's time was over at once"
    await run.lease("rough")  # waits its turn
    monkeypatch.undo()
    run.desk.tick()
    sums = run.desk.judging.evidence._sums._by_node
    assert [sums[run.node(name).key] for name in ("ann", "bob")] == [
        held[run.node(name).key] for name in ("ann", "bob")
    ]
    await run.rounds(("rough", "ann", "bob"))
    assert run.node("rough").state == "suspended" and (await run.audit()).failures == []
    run.desk.close()


async def test_details_that_are_lost_end_it_rather_than_change_a_number(tmp_path: Path) -> None:
    run = Measured(tmp_path)
    await run.lease("rough")
    (index,) = run.desk.state.submissions
    path = run.desk.coordinator.files.details(run.desk.state.submissions[index].lease_id, 1)
    await run.desk.book.commit()
    run.desk.close()
    path.rename(path.with_suffix(".gone"))
    run.desk.open()
    for name in ("validator-0", "validator-1", "validator-2"):
        run.desk.here(name)
    run.desk.tick()
    assert await run.rounds(("rough", "ann"), most=25) == 25
    assert "no node is suspended by pooled evidence any more" in run.desk.news()
    run.desk.close()


async def test_an_audit_names_evidence_that_does_not_follow(tmp_path: Path) -> None:
    run = Measured(tmp_path)
    for _ in range(12):
        for name in ("ann", "bob"):
            await run.lease(name)
    ann, size = run.node("ann").key, run.desk.book.ledger.size
    run.desk.book.append("evidence.node", NodeEvidence(ann, *ROW_NAMES, size, 48, 3, 15.0, 20.0, 2.0))
    assert run.node("ann").state == "suspended", "the fold can't read details"
    report = await run.audit()
    ((record, reason, message),) = [(f.record, f.reason, f.message) for f in report.failures]
    assert (record, reason) == (f"ledger/{size}", ReasonCode.VERDICT_WRONG) and "but it is 0 over 46 and" in message
    run.desk.close()
