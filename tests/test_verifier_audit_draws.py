"""What the audit says of draws, evidence, changed manifests and runs that are not over."""

import json
import shutil
from dataclasses import replace

import pytest

from protocol import codec, draws
from protocol.envelope import parse
from protocol.errors import ReasonCode
from protocol.evidence_rows import EvidenceRow
from protocol.records import ACCEPT, REJECT, DrawsOpened, DropEvidence, JobDrawn, NodeEvidence, Verdict
from protocol.segments import SealedEntry
from shardcast.records import Head
from tests.archive_builder import Chain, build_archive, copy_archive, identity, reseal, rewrite
from verifier import cli
from verifier.archive import RunArchive
from verifier.audit import Options, audit
from verifier.draws import Draws
from verifier.drops import drop_evidence
from verifier.report import Report

FILES_ONLY = Options(fraction=1e-12)


def late(builder):
    """What happens to the second run before it ends: new rules, another coordinator key, a false accusation."""
    chain = builder.chain
    chain.join("cat", "inference")
    strict = replace(chain.manifest.thresholds, logprob=-1.0)
    row = EvidenceRow("precision", "proof_median", 3e-6, 1.5e-6, 0.5, 20.0, 200, 3e-7, 2)
    rules = {"thresholds": strict, "evidence": (row,)}
    chain.update(**rules, rotate={"coordinator": "coordinator-2"}, note="nothing passes any more")
    builder.work("cat", 1, builder.policy_of(1), (150, 151), honest=True, refused=True)
    chain.append("evidence.drop", DropEvidence(identity("bob").public, 10, 5, 5, 20.0, 0.1, 0.5))
    state = builder.state()
    counted = drop_evidence(state, identity("ann").public, lambda submission, rollout: (0.5, 4), state.size)
    assert counted.returned > 0
    chain.append("evidence.drop", replace(counted, log_e=20.0, lost_mean=-0.5, returned_mean=0.5))
    chain.join("dog", "inference")
    dog = identity("dog").public
    chain.append("evidence.node", NodeEvidence(dog, "precision", "proof_median", state.size, 9, 2, 21.0, 42.0, 2e-6))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run")


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("changed") / "run", before_end=late)


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


def events(root, name):
    return [sealed for sealed in RunArchive.open(root).log.entries if sealed.entry.event == name]


def failures(report, reason):
    return [failure for failure in report.failures if failure.reason == reason]


def test_every_draw_of_an_honest_run_is_made_again(built, copy):
    report = audit(copy, Options())
    assert report.exit_code == 0 and report.draws_checked == len(events(copy, "job")) >= 6
    assert (report.draws_waiting, report.jobs_redrawn, report.jobs_unanswered) == (0, 0, 0)
    assert f"draws: {report.draws_checked} made again" in report.lines()


def test_a_validator_that_was_chosen_is_named(built, copy):
    """The coordinator hands one job to the other validator, who answers it: all signatures hold."""
    jobs = [(sealed, codec.decode(JobDrawn, sealed.entry.body)) for sealed in events(copy, "job")]
    seconds = {job.submission for _, job in jobs if job.round > 1}
    sealed, job = next(pair for pair in reversed(jobs) if pair[1].submission not in seconds)
    other = next(identity(name) for name in ("val", "vic") if identity(name).public != job.validator)

    def change(entry):
        if entry.index == sealed.index:
            return replace(entry, body=codec.encode(replace(job, validator=other.public)))
        if entry.event == "verdict":
            envelope = parse(entry.subject)
            verdict = envelope.record(Verdict)
            if verdict.job_id == job.job_id:
                answered = reseal(other, replace(envelope, signer=other.public), verdict)
                return replace(entry, subject=answered.raw)
        return entry

    rewrite(copy, built.chain.run, built.identities, change)
    report = audit(copy, FILES_ONLY)
    assert [(f.record, f.reason) for f in report.failures] == [(f"ledger/{sealed.index}", ReasonCode.DRAW_WRONG)]
    assert "but the draw gives" in report.failures[0].message


def test_second_draws_that_were_due_and_left_out_are_named(built, copy):
    def change(entry):
        if entry.event == "draws.opened":
            return replace(entry, body=codec.encode(replace(codec.decode(DrawsOpened, entry.body), second_draw=1.0)))
        return entry

    rewrite(copy, built.chain.run, built.identities, change)
    found = failures(audit(copy, FILES_ONLY), ReasonCode.DRAW_WRONG)
    assert found and all("had to get a second validator" in failure.message for failure in found)


def test_a_secret_that_is_never_shown_is_named_when_the_run_is_over(built, copy):
    opened = events(copy, "draws.opened")[0].index

    def change(entry):
        return replace(entry, event="unheard-of") if entry.event == "draws.revealed" else entry

    rewrite(copy, built.chain.run, built.identities, change)
    report = audit(copy, FILES_ONLY)
    assert [f.record for f in failures(report, ReasonCode.DRAW_NOT_REVEALED)] == [f"ledger/{opened}"]
    assert report.draws_checked == 0 and report.draws_waiting > 0


def test_a_stopped_run_has_failed_nothing(copy):
    """Its newest period can't be revealed yet; what is sealed so far holds."""
    for path in sorted((copy / "ledger").glob("*.hwl"))[1:]:
        path.unlink()
    (copy / "batches" / "step-00000001.hwb").unlink()
    for newer in (copy / "published").glob("e*[12]"):
        shutil.rmtree(newer)
    report = audit(copy, Options())
    assert report.failures == [] and report.draws_waiting > 0 and not report.finished
    assert any("waiting for their secret" in line for line in report.lines())


def test_a_run_that_never_started_has_nothing_to_check_yet(built, copy, tmp_path, capsys):
    (tmp_path / "fresh").mkdir()
    shutil.copy(copy / "manifest.hw", tmp_path / "fresh")
    report = audit(tmp_path / "fresh", Options())
    assert report.exit_code == 2 and "nothing to check yet" in report.unchecked[0][1]
    assert cli.main(["audit", str(tmp_path / "fresh"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["failures"] == []


# --- draws alone, without files -------------------------------------------------------------------------------------


class Listed:
    """A chain's entries as an archive shows them."""

    def __init__(self, chain):
        self.entries = chain.sink.entries

    def unbroken(self):
        return (SealedEntry(i, None, entry) for i, entry in enumerate(self.entries))


def drawn_run():
    chain = Chain()
    chain.open()
    chain.join("ann", "inference")
    for who in ("val", "vic", "vin"):
        chain.join(who, "validator")
    chain.policy(0)
    chain.ready("val", "vic", "vin")
    return chain


def state_of(chain):
    return Draws().fold(Listed(chain))


def report_of(chain):
    draws = Draws()
    state = draws.fold(Listed(chain))
    assert state.problems == []
    report = Report(examined=True)
    draws.check(report)
    return report


def honest(chain, by_rate=None, said=(ACCEPT,) * 4):
    """One submission with its draws as the rule makes them; returns its index and the round 1 validator."""
    lease_id = chain.lease("ann")
    number = chain.submit(lease_id)
    validator = chain.draw(state_of(chain), number)
    jobs = [(1, validator, chain.job(number, validator))]
    if chain.wants_second(state_of(chain), number) if by_rate is None else by_rate:
        second = chain.draw(state_of(chain), number, 2)
        jobs.append((2, second, chain.job(number, second, 2)))
    for round_, who, job in jobs:
        chain.verdict(job, chain.digest_of(lease_id), who, said, round_)
    return number, validator


def test_draws_as_the_rule_makes_them_hold_with_redraws_and_rounds():
    chain = drawn_run()
    for _ in range(6):
        honest(chain)
    chain.validators("val", "vic")
    lease_id = chain.lease("ann")
    number = chain.submit(lease_id)
    chain.job(number, chain.draw(state_of(chain), number))
    again = chain.draw(state_of(chain), number)
    report = report_of(chain)
    assert report.draws_checked == 0 and report.draws_waiting >= 7 and report.jobs_unanswered >= 1
    second = chain.wants_second(state_of(chain), number)
    job = chain.job(number, again)
    chain.verdict(job, chain.digest_of(lease_id), again, [REJECT] * 4)
    other = chain.draw(state_of(chain), number, 2)
    assert other != again
    job = chain.job(number, other, 2)
    chain.verdict(job, chain.digest_of(lease_id), other, [ACCEPT] * 4, 2)
    chain.reveal()
    report = report_of(chain)
    assert report.jobs_redrawn == 1 and report.jobs_unanswered == 0 and report.draws_waiting == 0
    # a due second draw follows round 1's first job at once; here only the redraw was answered
    assert all(second and "had to get a second" in f.message for f in report.failures)


def test_a_second_draw_that_nothing_asks_for_is_named():
    chain = drawn_run()
    while True:
        before = len(chain.sink.entries)
        number, _ = honest(chain, by_rate=True)
        if not chain.wants_second(state_of(chain), number):
            break
    chain.reveal()
    report = report_of(chain)
    assert [f.reason for f in report.failures] == [ReasonCode.DRAW_WRONG]
    assert "neither rate nor verdict" in report.failures[0].message
    assert int(report.failures[0].record.split("/")[1]) > before


def test_jobs_without_a_verdict_are_counted():
    """A coordinator that leaves a verdict out of the ledger can't leave out that the job was drawn."""
    chain = drawn_run()
    honest(chain, by_rate=False)
    lease_id = chain.lease("ann")
    number = chain.submit(lease_id)
    chain.job(number, chain.draw(state_of(chain), number))
    report = report_of(chain)
    assert report.jobs_unanswered == 1
    assert any("1 job never got a verdict" in line for line in report.lines())


def test_periods_are_due_two_openings_later(monkeypatch):
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 0)
    chain = drawn_run()
    first = next(i for i, e in enumerate(chain.sink.entries) if e.event == "draws.opened")
    chain.open_draws()
    assert report_of(chain).failures == []
    chain.open_draws()
    (failure,) = report_of(chain).failures
    assert (failure.record, failure.reason) == (f"ledger/{first}", ReasonCode.DRAW_NOT_REVEALED)
    chain.reveal(0)
    assert report_of(chain).failures == []


def test_a_wrong_job_id_is_named():
    chain = drawn_run()
    lease_id = chain.lease("ann")
    number = chain.submit(lease_id)
    who = chain.draw(state_of(chain), number)
    index = chain.append("job", JobDrawn(bytes(16), number, identity(who).public, 1, 0, 0))
    chain.verdict(bytes(16), chain.digest_of(lease_id), who, [ACCEPT] * 4)
    chain.reveal()
    found = [f for f in report_of(chain).failures if "id is not the one" in f.message]
    assert [f.record for f in found] == [f"ledger/{index}"]


# --- a manifest that changes, evidence that is false ----------------------------------------------------------------


def test_verdicts_are_held_against_the_manifest_their_lease_names(changed, tmp_path):
    """Under the genesis manifest cat's honest rollouts would be accepted; its lease names a stricter one."""
    copy = copy_archive(changed, tmp_path)
    report = audit(copy, Options())
    assert report.rollouts_checked == report.rollouts_held == report.rollouts_total == 24
    assert not failures(report, ReasonCode.LEDGER_BROKEN) and len(RunArchive.open(copy).chain.links) == 1
    assert RunArchive.open(copy).log.entries[-1].envelope.signer == identity("coordinator-2").public


def test_evidence_that_does_not_follow_is_named(changed, tmp_path):
    copy = copy_archive(changed, tmp_path)
    invented, overstated = events(copy, "evidence.drop")
    (pooled,) = events(copy, "evidence.node")
    report = audit(copy, FILES_ONLY)
    assert [(f.record, f.reason) for f in report.failures] == [
        (f"ledger/{sealed.index}", ReasonCode.VERDICT_WRONG) for sealed in (invented, overstated, pooled)
    ]
    assert "says 5 lost, 5 returned" in report.failures[0].message
    assert "log e 20, but it is" in report.failures[1].message, "the counts are right, the number is not"
    assert "says log e 21 over 9 rollouts and 2 validators, but it is 0 over" in report.failures[2].message


def test_weights_signed_by_a_rotated_origin_hold(tmp_path):
    """The origin signs its newest head again with its next key; what it published before stays as it is."""

    def rotate(builder):
        builder.chain.update(rotate={"origin": "origin-2"})
        path = builder.root / "published" / "HEAD.hw"
        held = parse(path.read_bytes())
        path.write_bytes(builder.chain.sealed("origin-2", held.kind, held.record(Head)))

    built = build_archive(tmp_path / "built", steps=1, before_end=rotate)
    report = audit(copy_archive(built, tmp_path), FILES_ONLY)
    assert report.exit_code == 0 and report.failures == []


def test_what_a_revoked_key_signed_before_its_revocation_is_named(tmp_path):
    built = build_archive(
        tmp_path / "built", steps=1, before_end=lambda b: b.chain.update(revoke={"vic": 0, "rel": 9999})
    )
    report = audit(copy_archive(built, tmp_path), FILES_ONLY)
    named = {record for record, why in report.unchecked if "revoked from an entry before" in why}
    vic = {
        f"ledger/{sealed.index}"
        for sealed in RunArchive.open(built.root).log.entries
        if sealed.entry.subject and parse(sealed.entry.subject).signer == identity("vic").public
    }
    assert named == vic and report.exit_code == 2 and report.failures == []


def test_the_listing_says_what_the_new_entries_mean(changed, capsys):
    assert cli.main(["ledger", str(changed.root)]) == 0
    out = capsys.readouterr().out
    for words in (
        "update 1: new coordinator, thresholds, evidence (nothing passes any more)",
        "period 0: 0.1 checked twice",
        "gave up 5 leases with +0.1 and returned 5 with +0.5: log e 20",
        "round 1 of submission",
    ):
        assert words in out
