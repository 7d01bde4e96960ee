"""What an auditor brings along: the id of the run that is meant, and promises that members kept."""

import json
import shutil
from dataclasses import replace

import pytest

from protocol.errors import ReasonCode
from protocol.ledger import TREE_KIND
from protocol.manifest import ShareCode, format_share_code
from protocol.merkle import leaf_hash, root_of
from protocol.records import Receipt, RunFinished, TreeHead
from tests.archive_builder import START_MS, build_archive, copy_archive, identity, rewrite, seal
from verifier import cli
from verifier.archive import RunArchive
from verifier.audit import Options, audit

FILES_ONLY = Options(fraction=1e-12)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run", steps=1)


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


def leaves(built):
    return [leaf_hash(sealed.envelope.raw) for sealed in RunArchive.open(built.root).log.entries]


def receipt_for(built, path, signer="coordinator", run=None, **changes):
    """What the first submission's node got, some moments later, when the ledger had three more entries."""
    archive = RunArchive.open(built.root)
    fact = next(iter(archive.facts.submissions.values()))
    known = leaves(built)
    size = fact.index + 4
    receipt = Receipt(
        fact.lease.lease_id, fact.intent.digest, fact.index, known[fact.index], size, root_of(known[:size]), START_MS
    )
    return written(path, signer, "receipt", replace(receipt, **changes), run or archive.run.id, fact.owner)


def head_for(built, path, size, root=None):
    head = TreeHead(size, root or root_of(leaves(built)[:size]), START_MS)
    return written(path, "coordinator", TREE_KIND, head, built.chain.run_id)


def written(path, signer, kind, record, run, audience=b""):
    path.write_bytes(
        seal(identity(signer), kind, record, run=run, sequence=1, issued_at=START_MS, audience=audience).raw
    )
    return path


def found(report):
    return [(failure.record, failure.reason) for failure in report.failures]


# --- which run ------------------------------------------------------------------------------------------------------


def test_the_run_that_is_meant_is_compared_by_id_share_code_or_file(built, copy, tmp_path, capsys):
    run = built.chain.run_id
    code = format_share_code(ShareCode(run, identity("coordinator-transport").public, ("/ip4/127.0.0.1/tcp/1",)))
    (tmp_path / "join.hw").write_text(code + "\n")
    for said in (run.hex(), run.hex().upper(), code, str(tmp_path / "join.hw")):
        assert cli.main(["audit", str(copy), "--run", said, "--fraction", "1e-12"]) == 0
        assert f"run id {run.hex()}: the one you asked for" in capsys.readouterr().out


def test_another_runs_archive_fails_at_once(copy, capsys):
    """Whoever writes everything anew signs it with a root key of their own: every check of the archive alone holds."""
    other = (b"\x07" * 32).hex()
    assert cli.main(["audit", str(copy), "--run", other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (failure,) = report["failures"]
    assert (failure["record"], failure["reason"]) == ("manifest.hw", "wrong-run") and other in failure["message"]
    assert report["run_compared"] is True and report["examined"] is False and report["rollouts_checked"] == 0
    foreign = format_share_code(ShareCode(b"\x07" * 32, identity("x").public, ("/ip4/127.0.0.1/tcp/1",)))
    capsys.readouterr()
    assert cli.main(["audit", str(copy), "--run", foreign]) == 1
    out = capsys.readouterr().out
    assert f"not the one you asked for, {'07' * 32}; nothing in the run was looked at" in out and "1 failure:" in out
    assert "not compared" not in out and "entries" not in out and "not finished" not in out, out


def test_an_audit_that_could_not_begin_says_so_and_gives_no_zeros(copy, capsys):
    whole = (copy / "manifest.hw").read_bytes()
    (copy / "manifest.hw").write_bytes(whole[:-20])
    assert cli.main(["audit", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "run id unknown: it could not be read; nothing in the run was looked at" in out
    assert "entries" not in out and "not finished" not in out and "derived" not in out
    (copy / "manifest.hw").write_bytes(whole)
    for name in ("ledger", "submissions", "batches"):
        shutil.rmtree(copy / name)
    assert cli.main(["audit", str(copy)]) == 2
    out = capsys.readouterr().out
    assert "nothing in the run was looked at" in out and "NOT CHECKED    ledger" in out and "entries" not in out


@pytest.mark.parametrize("said", ["", "  ", "FOLDER", "EMPTY", "BYTES", "~nobody-of-this-name/join.hw", "no/such/file"])
def test_what_names_no_run_is_said_in_words(copy, tmp_path, said, capsys):
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe\xff")
    named = {"FOLDER": str(tmp_path), "EMPTY": str(tmp_path / "EMPTY"), "BYTES": str(tmp_path / "BYTES")}.get(
        said, said
    )
    assert cli.main(["audit", str(copy), "--run", named]) == 2
    told = capsys.readouterr().err
    assert "Errno" not in told and "--run" in told
    why = {"FOLDER": "a folder", "EMPTY": "is empty", "BYTES": "no text", "no/such/file": "no such file"}
    assert why.get(said, "" if said.strip() else "--run is empty") in told


def test_without_a_code_the_audit_says_that_the_id_was_not_compared(built, copy, capsys):
    assert cli.main(["audit", str(copy), "--fraction", "1e-12"]) == 0
    assert f"run id {built.chain.run_id.hex()}: not compared with anything" in capsys.readouterr().out
    report = audit(copy, FILES_ONLY).to_json()
    assert report["run"] == built.chain.run_id.hex() and report["run_compared"] is False


@pytest.mark.parametrize("said", ["f00d", "hw1broken", "/ip4/127.0.0.1/tcp/4001"])
def test_a_code_that_names_no_run_is_a_usage_mistake(copy, said, capsys):
    assert cli.main(["audit", str(copy), "--run", said]) == 2
    assert "--run" in capsys.readouterr().err


def test_an_address_alone_names_no_run(copy, capsys):
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{identity('coordinator-transport').peer_id}"
    assert cli.main(["audit", str(copy), "--run", address]) == 2
    assert "does not say which run" in capsys.readouterr().err


# --- promises -------------------------------------------------------------------------------------------------------


def test_promises_that_the_ledger_keeps_are_counted(built, copy, tmp_path, capsys):
    one, two = receipt_for(built, tmp_path / "one.hw"), receipt_for(built, tmp_path / "two.hw", time=7)
    head = head_for(built, tmp_path / "head.hw", 9)
    args = ["--receipt", str(one), "--receipt", str(two), "--head", str(head), "--head", str(one)]
    assert cli.main(["audit", str(copy), "--fraction", "1e-12", *args]) == 0
    assert "4 kept promises found in its ledger" in capsys.readouterr().out


def test_a_ledger_written_anew_by_the_coordinator_breaks_receipts_and_heads(built, copy, tmp_path):
    """All signatures hold and so does the audit alone: only what was given out before shows it."""
    receipt = receipt_for(built, tmp_path / "receipt.hw")
    early, late = head_for(built, tmp_path / "early.hw", 3), head_for(built, tmp_path / "late.hw", 12)

    def change(entry):  # every entry a moment later, from the fourth on
        return replace(entry, time=entry.time + 1) if entry.index >= 3 else entry

    rewrite(copy, built.chain.run, built.identities, change)
    assert audit(copy, FILES_ONLY).exit_code == 0
    report = audit(copy, replace(FILES_ONLY, receipts=(receipt,), heads=(early, late)))
    assert found(report) == [
        (f"receipt {receipt}", ReasonCode.PROMISE_BROKEN),
        (f"head {late}", ReasonCode.HEADS_CONFLICT),
    ]
    assert report.promises_kept == 1 and report.exit_code == 1


def test_an_entry_that_is_kept_in_a_ledger_with_another_beginning_breaks_the_receipts_head(built, copy, tmp_path):
    receipt = receipt_for(built, tmp_path / "receipt.hw", tree_root=b"r" * 32)
    assert found(audit(copy, replace(FILES_ONLY, receipts=(receipt,)))) == [
        (f"receipt {receipt}", ReasonCode.HEADS_CONFLICT)
    ]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"leaf": b"l" * 32}, ReasonCode.PROMISE_BROKEN),
        ({"digest": b"d" * 32}, ReasonCode.PROMISE_BROKEN),
        ({"tree_size": 4000, "index": 3999}, ReasonCode.PROMISE_BROKEN),
        ({"signer": "stranger"}, ReasonCode.BAD_SIGNATURE),
        ({"run": b"\x07" * 32}, ReasonCode.WRONG_RUN),
    ],
)
def test_a_receipt_that_the_archive_does_not_keep_is_named(built, copy, tmp_path, changed, reason):
    receipt = receipt_for(built, tmp_path / "receipt.hw", **changed)
    assert found(audit(copy, replace(FILES_ONLY, receipts=(receipt,)))) == [(f"receipt {receipt}", reason)]


def test_a_promise_beyond_what_a_run_that_goes_on_has_sealed_could_not_be_checked(built, copy, tmp_path):
    size = RunArchive.open(copy).log.size
    head = head_for(built, tmp_path / "head.hw", size)
    for path in sorted((copy / "ledger").glob("*.hwl"))[1:]:
        path.unlink()
    report = audit(copy, replace(FILES_ONLY, heads=(head,)))
    assert report.failures == [] and f"head {head}" in dict(report.unchecked) and report.exit_code == 2


def test_a_promise_by_a_key_that_was_taken_back_proves_nothing(tmp_path):
    def stolen(builder):
        size = builder.chain.sink.size
        builder.chain.update(rotate={"coordinator": "coordinator-2"}, revoke={"coordinator": size})

    built = build_archive(tmp_path / "run", steps=1, before_end=stolen)
    held, stolen_later = (head_for(built, tmp_path / f"{size}.hw", size) for size in (9, len(leaves(built))))
    report = audit(built.root, replace(FILES_ONLY, heads=(held, stolen_later)))
    assert report.failures == [] and report.promises_kept == 1
    assert list(dict(report.unchecked)) == [f"head {stolen_later}"]


def test_what_is_no_promise_is_a_usage_mistake(built, copy, tmp_path, capsys):
    whole = receipt_for(built, tmp_path / "receipt.hw").read_bytes()
    other = written(tmp_path / "other.hw", "coordinator", "finished", RunFinished(1, "x"), built.chain.run_id)
    (tmp_path / "cut.hw").write_bytes(whole[:60])
    (tmp_path / "bent.hw").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    head = head_for(built, tmp_path / "head.hw", 3)
    for option, path in [
        ("--receipt", tmp_path / "none.hw"), ("--receipt", tmp_path / "cut.hw"), ("--receipt", tmp_path / "bent.hw"),
        ("--receipt", other), ("--receipt", head), ("--head", other),
    ]:  # fmt: skip
        assert cli.main(["audit", str(copy), option, str(path)]) == 2
        assert path.name in capsys.readouterr().err
