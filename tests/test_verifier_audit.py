"""The audit against a real archive, damaged and rewritten in every way a stranger might try."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
from blake3 import blake3

from protocol import codec
from protocol.envelope import parse
from protocol.errors import ReasonCode, UsageError
from protocol.identity import peer_id_text
from protocol.records import INCONCLUSIVE, Outcome, Verdict, VerdictDetails
from protocol.state import ACCEPTED
from tests.archive_builder import build_archive, copy_archive, invert_verdicts, reseal, rewrite
from verifier import cli
from verifier.archive import RunArchive
from verifier.audit import Options, audit
from verifier.draws import Draws

FILES_ONLY = Options(fraction=1e-12)
"""Everything but the derivation of verdicts, which no damaged byte needs."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run")


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


def records(report):
    return [failure.record for failure in report.failures]


def tree(root):
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def test_an_honest_archive_holds_and_every_accepted_rollout_is_counted(built, copy):
    before = tree(copy)
    report = audit(copy, Options())
    assert (report.failures, report.unchecked) == ([], [])
    assert report.exit_code == 0 and report.finished
    assert report.accepted_checked == report.accepted_total == built.accepted == 16
    assert report.rollouts_checked == report.rollouts_held == report.rollouts_total == 20
    assert (report.batches, report.publications) == (2, 3)
    assert tree(copy) == before, "the archive was written to"


def test_every_inverted_verdict_is_called_wrong(built, copy):
    count = invert_verdicts(copy, built.chain.run, built.identities)
    report = audit(copy, Options())
    wrong = {f.record for f in report.failures if f.reason == ReasonCode.VERDICT_WRONG}
    assert count == len(built.verdicts) >= 5  # second draws are what the hashes give
    assert wrong == {f"verdict/{index}" for index in built.verdicts}
    assert report.rollouts_held == 0 and report.rollouts_checked == 20 and report.exit_code == 1
    accepting = next(f for f in report.failures if f.record == f"verdict/{built.verdicts[0]}")
    assert "says reject, but it is accept (holds)" in accepting.message
    assert len(accepting.rollouts) == 4 and accepting.numbers["token_margin"] == 0


def flip(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)


def flips(root, pattern, count, seed):
    """`count` seeded single-bit damages in files that match, each undone before the next."""
    choose = random.Random(seed)
    paths = sorted(root.glob(pattern))
    for _ in range(count):
        path = choose.choice(paths)
        whole = path.read_bytes()
        flip(path, choose.randrange(len(whole)), choose.randrange(8))
        yield path
        path.write_bytes(whole)


def test_flipped_bits_in_uploads_and_details_are_named(copy):
    for path in flips(copy, "submissions/*", 50, 1):
        report = audit(copy, FILES_ONLY)
        assert report.exit_code == 1 and f"submissions/{path.name}" in records(report)


def test_flipped_bits_in_published_shards_are_named(copy):
    for path in flips(copy, "published/e*/shard-*.bin", 50, 2):
        report = audit(copy, FILES_ONLY)
        assert report.exit_code == 1 and str(path.relative_to(copy)) in records(report)


def test_flipped_bits_in_publication_records_are_named(copy):
    for path in flips(copy, "published/e*/*.hw", 20, 3):
        report = audit(copy, FILES_ONLY)
        assert report.exit_code == 1
        assert any(record.startswith(f"published/{path.parent.name}") for record in records(report))


def test_flipped_bits_in_ledger_leaves_are_named(copy):
    for path in flips(copy, "ledger/*.hwl", 50, 4):
        report = audit(copy, FILES_ONLY)
        assert report.exit_code == 1
        assert f"ledger/{path.name}" in records(report) or any(r[7:].isdigit() for r in records(report))


def test_flipped_bits_in_batches_and_manifest_are_named(copy):
    for path in flips(copy, "batches/*.hwb", 10, 5):
        assert f"batches/{path.name}" in records(audit(copy, FILES_ONLY))
    for _ in flips(copy, "manifest.hw", 10, 6):
        report = audit(copy, FILES_ONLY)
        assert report.exit_code == 1 and records(report) == ["manifest.hw"]


def test_damage_stops_only_what_rests_on_it(built, copy):
    """A full audit beside one damaged upload still derives everything else."""
    flip(next(iter(sorted(copy.glob("submissions/*.hws")))), 40, 3)
    report = audit(copy, Options())
    assert report.rollouts_checked == report.rollouts_held == 16 and report.exit_code == 1
    flip(copy / "published" / "e0000-s00000001" / "shard-000000.bin", 1000, 0)
    report = audit(copy, Options())
    assert "published/e0000-s00000001/shard-000000.bin" in records(report)
    assert 0 < report.rollouts_checked == report.rollouts_held <= 12


@pytest.mark.parametrize("pattern", ["submissions/*.hws", "submissions/*.hwv", "batches/*.hwb"])
def test_missing_files_are_failures(copy, pattern):
    path = sorted(copy.glob(pattern))[0]
    path.unlink()
    report = audit(copy, FILES_ONLY)
    assert [f.reason for f in report.failures if f.record == str(path.relative_to(copy))] == [ReasonCode.RECORD_MISSING]
    assert report.exit_code == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "submissions/*.hws",
        "submissions/*.hwv",
        "batches/*.hwb",
        "ledger/*.hwl",
        "manifest.hw",
        "published/e*/shard-*.bin",
    ],
)
def test_unreadable_files_are_could_not_check(copy, pattern):
    path = sorted(copy.glob(pattern))[-1]
    path.unlink()
    path.symlink_to(path.name)  # a loop: the operating system refuses to open it, for root as well
    report = audit(copy, Options())
    assert report.failures == [] and report.exit_code == 2
    assert any(record == str(path.relative_to(copy)) for record, _ in report.unchecked)


@pytest.mark.parametrize(
    "pattern",
    ["submissions/*.hws", "submissions/*.hwv", "batches/*.hwb", "ledger/*.hwl", "published/e*/publication.hw",
     "published/e*/shard-*.bin", "manifest.hw"],
)  # fmt: skip
def test_a_pipe_in_an_archive_is_named_and_not_waited_for(copy, pattern):
    path = sorted(copy.glob(pattern))[0]
    path.unlink()
    os.mkfifo(path)
    waited = []

    def end_a_wait():
        with contextlib.suppress(OSError):  # nobody has it open
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            waited.append(path)

    watchdog = threading.Timer(30, end_a_wait)
    watchdog.start()
    report = audit(copy, FILES_ONLY)
    watchdog.cancel()
    assert not waited and report.exit_code in (1, 2)
    named = [*records(report), *(record for record, _ in report.unchecked)]
    assert str(path.relative_to(copy)) in " ".join(named) or path.parent.name in " ".join(named)


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        audit(tmp_path, Options())


def test_a_ledger_without_segments_fails(copy):
    shutil.rmtree(copy / "ledger")
    report = audit(copy, FILES_ONLY)
    assert records(report) == ["ledger"] and report.exit_code == 1


def test_a_reward_changed_in_the_details_is_a_wrong_verdict(built, copy):
    """A lying validator keeps its outcome but hands the learner another reward, all of it properly signed."""
    archive = RunArchive.open(copy)
    fact = archive.facts.verdicts[built.verdicts[0]]
    first, *rest = archive.details(fact).rollouts
    raw = codec.encode(VerdictDetails((replace(first, reward=0.5), *rest)))
    (copy / fact.file).write_bytes(raw)

    def change(entry):
        if entry.index != fact.index:
            return entry
        held = parse(entry.subject)
        verdict = replace(held.record(Verdict), details=blake3(raw).digest())
        return replace(entry, subject=reseal(built.identities[held.signer], held, verdict).raw)

    rewrite(copy, built.chain.run, built.identities, change)
    (failure,) = [f for f in audit(copy, FILES_ONLY).failures if f.record == fact.record]
    assert failure.reason == ReasonCode.VERDICT_WRONG and "contradict the upload" in failure.message, "without a model"
    assert failure.rollouts == (fact.submission.rollout_id(0),)
    report = audit(copy, Options())
    (failure,) = [f for f in report.failures if f.record == fact.record]
    assert failure.reason == ReasonCode.VERDICT_WRONG and "reward 0.5" in failure.message
    assert any(f.reason == ReasonCode.BATCH_WRONG for f in report.failures), "the batch holds the true reward"


def test_what_a_validator_left_undecided_and_what_no_batch_took_is_counted(built, copy):
    """Neither is false by itself; both are quiet ways to choose what is learned from."""
    before = audit(copy, Options())
    archive = RunArchive.open(copy)
    state = Draws().fold(archive)
    fact = archive.facts.verdicts[built.verdicts[0]]
    whole = 0
    for held in state.submissions.values():
        samples = state.leases[held.lease_id].lease.samples
        starts = range(0, len(held.outcomes), samples)
        whole += sum(all(one.status == ACCEPTED for one in held.outcomes[at : at + samples]) for at in starts)
    trained = {(e.submission, e.rollout // 2) for b in state.batches.values() for e in b.closed.entries}
    assert before.groups_untrained == whole - len(trained) == 0

    def change(entry):
        if entry.index != fact.index:
            return entry
        held = parse(entry.subject)
        verdict = held.record(Verdict)
        silent = (Outcome(INCONCLUSIVE, "validator-failed"),) * len(verdict.outcomes)
        return replace(
            entry, subject=reseal(built.identities[held.signer], held, replace(verdict, outcomes=silent)).raw
        )

    rewrite(copy, built.chain.run, built.identities, change)
    report = audit(copy, Options())
    name, count = peer_id_text(fact.validator), len(fact.verdict.outcomes)
    assert report.decided_here[name] == before.decided_here[name] + count == report.to_json()["decided_here"][name]
    assert not [f for f in report.failures if f.record == fact.record], "it claims nothing"
    assert report.groups_untrained > 0, "the batch that rested on it does not count, nor what else it held"
    said = f"{report.decided_here.total()} rollouts left undecided by a validator and decided here"
    assert any(said in line for line in report.lines())


def rewrite_batch(copy, built, change_batch, change_closed=lambda closed: closed):
    """The trainer's operator rewrites a batch and its ledger entry, with valid signatures."""
    archive = RunArchive.open(copy)
    index, closed = next(iter(archive.facts.batches.items()))
    raw = codec.encode(change_batch(archive.batch(closed)))
    (copy / "batches" / f"step-{closed.step:08d}.hwb").write_bytes(raw)
    new = change_closed(replace(closed, digest=blake3(raw).digest()))

    def change(entry):
        return replace(entry, body=codec.encode(new)) if entry.index == index else entry

    rewrite(copy, built.chain.run, built.identities, change)
    return audit(copy, Options()), f"batches/step-{closed.step:08d}.hwb", f"ledger/{index}"


def test_a_batch_with_another_reward_is_wrong(built, copy):
    def change(batch):
        return replace(batch, rollouts=(replace(batch.rollouts[0], reward=7.0), *batch.rollouts[1:]))

    report, name, _ = rewrite_batch(copy, built, change)
    assert [(f.record, f.reason) for f in report.failures] == [(name, ReasonCode.BATCH_WRONG)]
    assert "differs from what was verified, in reward" in report.failures[0].message


def test_a_batch_that_trains_a_rollout_twice_is_wrong(built, copy):
    report, name, entry = rewrite_batch(
        copy,
        built,
        lambda batch: replace(batch, rollouts=(*batch.rollouts[:-1], batch.rollouts[0])),
        lambda closed: replace(closed, entries=(*closed.entries[:-1], closed.entries[0])),
    )
    assert {name, entry} <= set(records(report))
    assert any("trained twice" in f.message for f in report.failures if f.record == entry)


def test_a_batch_with_half_a_group_is_wrong(built, copy):
    report, name, entry = rewrite_batch(
        copy,
        built,
        lambda batch: replace(batch, rollouts=batch.rollouts[1:]),
        lambda closed: replace(closed, entries=closed.entries[1:]),
    )
    assert records(report) == [entry, name] and "1 of 2 rollouts" in report.failures[1].message


def test_a_ledger_cut_off_at_its_end_leaves_batches_and_policies_that_it_does_not_name(copy):
    segments = sorted((copy / "ledger").glob("*.hwl"))
    for path in segments[1:]:
        path.unlink()
    report = audit(copy, FILES_ONLY)
    named = {record for record, _ in report.unchecked}
    assert {"batches/step-00000001.hwb", "published/e0000-s00000001"} <= named and report.exit_code == 2


def test_a_batch_that_no_entry_names_is_wrong_in_a_finished_run(copy):
    shutil.copy(copy / "batches" / "step-00000000.hwb", copy / "batches" / "step-00000009.hwb")
    assert records(audit(copy, FILES_ONLY)) == ["batches/step-00000009.hwb"]


def test_a_rule_broken_by_the_coordinator_is_named(built, copy):
    """A batch entry is dropped from the ledger: what rested on it contradicts the fold."""
    job = next(e.index for e in RunArchive.open(copy).log.entries if e.entry.event == "job")
    rewrite(
        copy, built.chain.run, built.identities, lambda e: replace(e, event="no.such.event") if e.index == job else e
    )
    report = audit(copy, Options())
    assert f"ledger/{job}" in records(report) and report.exit_code == 1


def test_a_coordinator_that_signs_nonsense_is_named_and_nothing_crashes(built, copy):
    """Random damage inside entries, signed again: only subjects' signatures and the rules are left to say no."""
    choose = random.Random(7)
    size = RunArchive.open(copy).log.size
    ledger = {path: path.read_bytes() for path in (copy / "ledger").iterdir()}
    for round_ in range(40):
        victim = choose.randrange(1, size)

        def change(entry, victim=victim):
            if entry.index != victim:
                return entry
            raw = bytearray(entry.subject or entry.body)
            for _ in range(choose.choice((1, 1, 4))):
                raw[choose.randrange(len(raw))] ^= choose.randrange(1, 256)
            return replace(entry, subject=bytes(raw)) if entry.subject else replace(entry, body=bytes(raw))

        rewrite(copy, built.chain.run, built.identities, change)
        report = audit(copy, FILES_ONLY if round_ % 6 else Options())
        event = RunArchive.open(copy).log.entries[victim].entry.event
        own = ("grant", "lease.closed", "job", "draws.opened", "run.finished")  # its own word; rates may rise
        assert report.failures or event in own, event
        for path, whole in ledger.items():
            path.write_bytes(whole)


def test_one_rollout_can_be_looked_at(built, copy):
    archive = RunArchive.open(copy)
    fact = next(iter(archive.facts.submissions.values()))
    wanted = fact.rollout_id(1)
    report = audit(copy, Options(rollout=wanted))
    assert report.exit_code == 0 and report.rollouts_checked == 1
    (derived,) = report.derived
    assert (derived.rollout, derived.outcome, derived.reason) == (wanted, "accept", "holds")
    assert derived.numbers["token_margin"] == 0 and set(derived.verdicts.values()) == {"accept"}
    with pytest.raises(UsageError, match="no rollout"):
        audit(copy, Options(rollout="00:1:2"))


def test_a_fraction_can_be_drawn_again(copy):
    first = audit(copy, Options(fraction=0.5))
    again = audit(copy, Options(fraction=0.5, seed=first.seed))
    assert again.rollouts_checked == first.rollouts_checked and again.seed == first.seed
    assert first.exit_code == again.exit_code == 0


# --- the command ----------------------------------------------------------------------------------------------------


BLOCKED = """
    import sys

    class Gone:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("trainer", "node"):
                raise ModuleNotFoundError(f"{name} is not installed")

    sys.meta_path.insert(0, Gone())
    from verifier.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def run_blocked(*args, cwd):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BLOCKED), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_command_works_without_trainer_and_node(built, copy, tmp_path, capsys):
    done = run_blocked("audit", copy, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["accepted_checked"] == built.accepted and report["failures"] == []
    assert {"rollouts_checked", "rollouts_held", "seconds"} <= report.keys()

    flip(sorted(copy.glob("submissions/*.hws"))[0], 10, 1)
    assert cli.main(["audit", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT HOLD  submissions/" in out and "verifier explain hash-mismatch" in out
    assert cli.main(["audit", str(tmp_path / "nothing")]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_weights_by_a_revoked_origin_key_hold_where_the_ledger_announced_them_before(tmp_path):
    def stolen(builder):
        builder.chain.update(rotate={"origin": "origin-2"}, revoke={"origin": 10**6})  # long after all that is here

    built = build_archive(tmp_path / "run", steps=1, before_end=stolen)
    report = audit(built.root, FILES_ONLY)
    assert report.failures == [] and report.publications == 2
    path = built.root / "published" / "e0000-s00000001"
    shutil.copytree(path, path.with_name("e0000-s00000007"))
    assert audit(built.root, FILES_ONLY).failures[0].record == "published/e0000-s00000007/publication.hw"
