"""Accused relays, looked at again: one that lied, a coordinator that only says so, an origin that signed twice."""

from dataclasses import replace

import pytest

from protocol.envelope import parse
from protocol.errors import ReasonCode
from protocol.evidence import REPORT_KIND, STAMP_KIND
from protocol.identity import peer_id_text
from protocol.records import RelayReport, RelayStamp
from shardcast.publication import split_frames
from shardcast.records import SHARD_KIND, ShardRecord
from tests.archive_builder import build_archive, copy_archive, identity, rewrite
from verifier.archive import RunArchive
from verifier.audit import Options, audit
from verifier.explain import EXPLANATIONS

FILES_ONLY = Options(fraction=1e-12)
OTHER = b"w" * 32
ORIGIN, REL = peer_id_text(identity("origin").public), peer_id_text(identity("rel").public)


def published_shard(root):
    """What everybody got from the origin for the first shard of step 0."""
    frames = split_frames((root / "published" / "e0000-s00000000" / "publication.hw").read_bytes())
    return next(envelope for envelope in map(parse, frames) if envelope.kind == SHARD_KIND)


def accusation(chain, relay, stamped, shard):
    """Subject of an entry: bob shows `relay`'s stamp over `stamped` beside an envelope of a shard's record."""
    record = parse(shard).record(ShardRecord)
    stamp = chain.sealed(relay, STAMP_KIND, RelayStamp(record.publication, record.index, stamped, 5))
    return chain.sealed("bob", REPORT_KIND, RelayReport(identity(relay).public, stamp, shard, "flipped"))


def two_lies(builder):
    builder.chain.join("rel2", "relay")
    shard = published_shard(builder.root).raw
    for relay in ("rel", "rel2"):
        builder.chain.append("relay.accused", b"", accusation(builder.chain, relay, OTHER, shard))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run", steps=1, before_end=two_lies)


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


def indices(root):
    return [s.index for s in RunArchive.open(root).log.entries if s.entry.event == "relay.accused"]


def with_accusations(built, copy, *subjects):
    """The coordinator enters others instead, and signs everything again."""
    swapped = dict(zip(indices(copy), subjects, strict=False))
    rewrite(
        copy, built.chain.run, built.identities,
        lambda entry: replace(entry, subject=swapped[entry.index]) if entry.index in swapped else entry,
    )  # fmt: skip
    return audit(copy, FILES_ONLY)


def second_record(built, copy, signer="origin", **changes):
    """Another record by the origin for that shard."""
    record = published_shard(copy).record(ShardRecord)
    changes = changes or {"wire_hash": OTHER, "new_hash": OTHER}
    return built.chain.sealed(signer, SHARD_KIND, replace(record, **changes))


def found(report):
    return [(failure.record, failure.reason) for failure in report.failures]


def test_a_relay_that_lied_is_rightly_accused(copy):
    report = audit(copy, FILES_ONLY)
    assert (report.failures, report.unchecked) == ([], []) and report.exit_code == 0


def test_an_accusation_that_proves_nothing_is_the_coordinators_failure(built, copy):
    shard = published_shard(copy)
    true = shard.record(ShardRecord).wire_hash
    report = with_accusations(built, copy, accusation(built.chain, "rel", true, shard.raw))
    assert found(report) == [(f"ledger/{indices(copy)[0]}", ReasonCode.ACCUSATION_FALSE)], "named once, and as that"
    assert f"the coordinator accuses relay {REL}" in report.failures[0].message
    assert "coordinator's fault" in EXPLANATIONS[ReasonCode.ACCUSATION_FALSE].evidence


def test_a_record_that_the_origin_never_signed_proves_nothing(built, copy):
    forged = accusation(built.chain, "rel", OTHER, second_record(built, copy, signer="ann", wire_hash=bytes(32)))
    assert found(with_accusations(built, copy, forged)) == [(f"ledger/{indices(copy)[0]}", ReasonCode.ACCUSATION_FALSE)]


def test_a_ledger_that_is_broken_before_a_false_accusation_does_not_hide_it(built, copy):
    shard = published_shard(copy)
    true = shard.record(ShardRecord).wire_hash
    with_accusations(built, copy, accusation(built.chain, "rel", true, shard.raw))
    at = indices(copy)[0]
    sorted((copy / "ledger").glob("*.hwl"))[0].unlink()
    assert (f"ledger/{at}", ReasonCode.ACCUSATION_FALSE) in found(audit(copy, FILES_ONLY))


def test_a_relay_that_stamped_what_was_published_is_innocent_and_the_origin_is_named(built, copy):
    """The fold believes it: both signatures hold, and the two contradict each other. Only the archive shows a third."""
    true = published_shard(copy).record(ShardRecord).wire_hash
    framed = accusation(built.chain, "rel", true, second_record(built, copy))
    report = with_accusations(built, copy, framed)
    assert found(report) == [(f"ledger/{indices(copy)[0]}", ReasonCode.ORIGIN_FORKED)] and report.exit_code == 1
    text = report.failures[0].message
    assert f"relay {REL} stamped exactly the other one's bytes, and did not lie" in text
    assert f"The origin ({ORIGIN}) signed both" in text


def test_a_record_of_a_shard_that_the_publication_does_not_have_names_the_origin(built, copy):
    beyond = accusation(built.chain, "rel", b"v" * 32, second_record(built, copy, index=99))
    assert found(with_accusations(built, copy, beyond)) == [(f"ledger/{indices(copy)[0]}", ReasonCode.ORIGIN_FORKED)]


def test_two_accusations_with_two_records_of_one_shard_name_the_origin(built, copy):
    """Of a publication that is not in the archive: a crashed origin left it, or somebody took it out."""
    gone = {"publication": b"g" * 16}
    one = accusation(built.chain, "rel", OTHER, second_record(built, copy, **gone))
    two = accusation(built.chain, "rel2", OTHER, second_record(built, copy, **gone, wire_hash=b"v" * 32))
    report = with_accusations(built, copy, one, one)
    first, second = (f"ledger/{index}" for index in indices(copy))
    assert first in dict(report.unchecked) and "not in the archive" in dict(report.unchecked)[first]
    report = with_accusations(built, copy, one, two)
    assert found(report) == [(second, ReasonCode.ORIGIN_FORKED)] and list(dict(report.unchecked)) == [first]


def test_an_accusation_by_a_key_that_was_taken_back_later_is_nobodys_failure(tmp_path):
    """The coordinator could not know; whoever stole the key could accuse anybody."""

    def stolen(builder):
        two_lies(builder)
        size = builder.chain.sink.size
        builder.chain.update(rotate={"origin": "origin-2"}, revoke={"origin": size - 2})

    built = build_archive(tmp_path / "run", steps=1, before_end=stolen)
    report = audit(built.root, FILES_ONLY)
    accused = {f"ledger/{index}" for index in indices(built.root)}
    assert accused <= {record for record, why in report.unchecked if "later revoked" in why}
    assert not accused & {failure.record for failure in report.failures}


def test_two_heads_of_one_step_with_different_roots_name_the_origin(tmp_path):
    built = build_archive(tmp_path / "run", steps=1, before_end=lambda b: b.chain.policy(0, root=b"r" * 32))
    index = [s.index for s in RunArchive.open(built.root).log.entries if s.entry.event == "policy"][1]
    assert found(audit(built.root, FILES_ONLY)) == [(f"ledger/{index}", ReasonCode.ORIGIN_FORKED)]
