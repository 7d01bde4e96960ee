"""The manifest's updates as files of an archive: what the root signed, against what the ledger says it signed."""

import os
import shutil
from dataclasses import replace

import pytest

from protocol.chain import Chain, Revocation, RunUpdate, delegate, seal_update
from protocol.errors import ReasonCode
from tests.archive_builder import START_MS, build_archive, copy_archive, identity, write_updates
from verifier.archive import RunArchive
from verifier.audit import Options, audit

FILES_ONLY = Options(fraction=1e-12)
LONG_BEFORE, AFTERWARDS = START_MS - 10**6, START_MS + 10**6


def two_updates(builder):
    builder.chain.update(note="the first")
    builder.chain.update(revoke={"vic": 9999}, note="the second")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run", steps=1, before_end=two_updates)


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


def further(built, issued_at, signer="root", links=None, **changes):
    """What the root signs behind the chain that the ledger knows, or behind `links` of it."""
    chain = Chain(built.chain.run)
    for raw in built.chain.links.updates[:links]:
        chain = chain.extend(raw)
    update = RunUpdate(note="from the safe", **changes)
    if signer == "root":
        return seal_update(identity("root"), chain, update, sequence=10**6, issued_at=issued_at)
    whole = replace(update, previous=chain.hash, number=len(chain.links) + 1)
    return built.chain.sealed(signer, "manifest.update", whole)


def found(root):
    report = audit(root, FILES_ONLY)
    return [(failure.record, failure.reason) for failure in report.failures], dict(report.unchecked)


def cut(root):
    """The newest segment is not there: the run goes on, as far as anybody can tell."""
    sorted((root / "ledger").glob("*.hwl"))[-1].unlink()


def test_the_updates_of_an_honest_run_hold(copy):
    assert sorted(path.name for path in (copy / "updates").iterdir()) == ["000001.hw", "000002.hw"]
    (copy / "updates" / ".000003.hw.0123.part").write_bytes(b"left by a writer that was killed")
    assert found(copy) == ([], {})


def test_an_update_that_is_gone_or_changed_is_named(copy):
    (copy / "updates" / "000001.hw").unlink()
    path = copy / "updates" / "000002.hw"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    assert found(copy)[0] == [
        ("updates/000001.hw", ReasonCode.RECORD_MISSING),
        ("updates/000002.hw", ReasonCode.HASH_MISMATCH),
    ]
    shutil.rmtree(copy / "updates")
    assert {reason for _, reason in found(copy)[0]} == {ReasonCode.RECORD_MISSING}


def test_two_updates_that_the_root_signed_for_one_place_are_a_fork_of_the_manifest(built, copy):
    write_updates(copy, [further(built, START_MS, links=0), built.chain.links.updates[1]])
    assert found(copy)[0] == [("updates/000001.hw", ReasonCode.MANIFEST_FORKED)]


def test_another_update_that_the_root_did_not_sign_is_no_fork(built, copy):
    write_updates(copy, [further(built, START_MS, signer="ann", links=0)])
    assert found(copy)[0] == [("updates/000001.hw", ReasonCode.HASH_MISMATCH)]


def test_what_the_root_said_and_the_coordinator_passed_over_is_named(built, copy):
    write_updates(copy, [*built.chain.links.updates, further(built, LONG_BEFORE)])
    assert found(copy) == ([("updates/000003.hw", ReasonCode.LEDGER_BROKEN)], {})


def test_what_the_root_said_after_the_end_is_nobodys_failure(built, copy):
    write_updates(copy, [*built.chain.links.updates, further(built, AFTERWARDS)])
    assert found(copy) == ([], {})


def test_a_key_that_is_taken_back_after_the_end_is_told_with_what_it_signed(built, copy):
    joined = next(sealed.index for sealed in RunArchive.open(copy).log.entries if sealed.entry.event == "node.joined")
    gone = tuple(Revocation(identity(who).public, joined, "stolen") for who in ("val", "cat"))
    write_updates(copy, [*built.chain.links.updates, further(built, AFTERWARDS, revocations=gone)])
    failures, unchecked = found(copy)
    assert failures == [] and list(unchecked) == [f"ledger/{joined}"], "val joined there; cat signed nothing"


def test_an_update_whose_delegation_did_not_hold_yet_could_not_be_entered(built, copy):
    key = identity("origin-2").public
    later = delegate(
        identity("root"), built.chain.run_id, key, ("origin",), not_before=AFTERWARDS, expires=2 * START_MS,
        sequence=10**6,
    )  # fmt: skip
    write_updates(copy, [*built.chain.links.updates, further(built, LONG_BEFORE, origin=key, delegations=(later,))])
    failures, unchecked = found(copy)
    assert failures == [] and list(unchecked) == ["updates/000003.hw"]


def test_an_update_newer_than_the_seal_of_a_run_that_goes_on_could_not_be_checked(copy):
    cut(copy)  # with it go the ledger's entries of both
    failures, unchecked = found(copy)
    assert failures == [] and {"updates/000001.hw", "updates/000002.hw"} <= unchecked.keys()


def test_files_that_continue_nothing_are_named(built, copy):
    write_updates(copy, [*built.chain.links.updates, further(built, START_MS, signer="mal")])
    (copy / "updates" / "000009.hw").write_bytes(further(built, START_MS))
    (copy / "updates" / "notes.txt").write_text("trust me")
    assert found(copy)[0] == [
        ("updates/000003.hw", ReasonCode.BAD_SIGNATURE),
        ("updates/000009.hw", ReasonCode.LEDGER_BROKEN),
        ("updates/notes.txt", ReasonCode.LEDGER_BROKEN),
    ]


def test_what_can_not_be_read_is_not_waited_for(copy):
    for name in ("000001.hw", "000003.hw"):
        (copy / "updates" / name).unlink(missing_ok=True)
        os.mkfifo(copy / "updates" / name)
    failures, unchecked = found(copy)
    assert failures == [] and list(unchecked) == ["updates/000001.hw", "updates/000003.hw"]
