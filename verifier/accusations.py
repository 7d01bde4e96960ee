"""Accusations of relays (`relay.accused`), derived again from what both sides signed.

    what it shows is not signed by both, or does not    `accusation-false`: the coordinator entered what proves nothing
    contradict itself
    its record of the shard is not the published one    `origin-forked`: the origin signed two, and a relay that stamped
    (or not that of another accusation)                 the other one did not lie
    its publication is not in the archive               not checked: an origin that crashed leaves some behind

Found from the signed entries themselves, not from the fold: a ledger that is broken before an accusation can't hide it.

Not covered: the same proof on its way in (`protocol.evidence`, `trainer.reports`); reports without proof, which are in
no ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.envelope import Envelope, parse
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import ShardView, check_relay_lie
from protocol.identity import peer_id_text
from protocol.records import RelayReport, RelayStamp
from shardcast.archive import Archive, Published
from verifier.archive import RunArchive
from verifier.report import Report


@dataclass(frozen=True)
class Accusation:
    """One whose proof holds: both signed what it says."""

    index: int
    """Ledger index."""
    report: RelayReport
    record: Envelope
    """The shard record that it shows."""
    shard: ShardView
    stamp: RelayStamp


def check_accusations(archive: RunArchive, report: Report) -> list[Accusation]:
    """Hold each accusation's proof against the keys that counted at its entry; returns those that hold."""
    held = []
    for index, said in archive.facts.accusations.items():
        chain = archive.chain_at(index)
        try:
            check_relay_lie(said, archive.run.id, chain.keys_at("origin", index))
            record = parse(said.shard)
            stamp = parse(said.stamp).record(RelayStamp)
        except ProtocolError as exc:
            text = f"the coordinator accuses relay {peer_id_text(said.relay)}, but what it shows proves nothing: {exc}"
            report.fail(f"ledger/{index}", ReasonCode.ACCUSATION_FALSE, text)
            continue
        if archive.chain.revoked(record.signer, index):
            text = (
                f"rests on a shard record signed by {peer_id_text(record.signer)}, a key of the origin that the run's "
                "root later revoked from an entry before it on: whoever stole it could accuse any relay"
            )
            report.unchecked.append((f"ledger/{index}", text))
            continue
        held.append(Accusation(index, said, record, record.record(ShardView), stamp))
    return held


def check_origin(accusations: list[Accusation], published: Archive, report: Report) -> None:
    """Whether the records that accusations show are those that everybody got."""
    by_id = {one.publication.open.publication: one for one in published.publications.values()}
    shown: dict[tuple[bytes, int], Accusation] = {}
    for one in accusations:
        first = shown.setdefault((one.shard.publication, one.shard.index), one)
        found = by_id.get(one.shard.publication)
        if found is not None:
            _compare(one, found, report)
        elif first.record.payload != one.record.payload:
            text = f"shows another record of this shard than the accusation in ledger/{first.index}"
            _forked(one, f"{text}; {_innocence(one, first.shard.wire_hash)}", report)
        else:
            text = (
                f"is about publication {one.shard.publication.hex()}, which is not in the archive: whether its origin "
                "signed only this record of the shard can't be told"
            )
            report.unchecked.append((f"ledger/{one.index}", text))


def _compare(one: Accusation, found: Published, report: Report) -> None:
    where = f"published/{found.folder.name}"
    raw = found.publication.shard_envelope(one.shard.index)
    if raw is None:
        _forked(one, f"shows a record of shard {one.shard.index}, which {where} does not have", report)
        return
    known = parse(raw)
    if known.payload != one.record.payload:
        text = f"shows another record of shard {one.shard.index} than {where} holds"
        _forked(one, f"{text}; {_innocence(one, known.record(ShardView).wire_hash)}", report)


def _innocence(one: Accusation, other: bytes) -> str:
    relay = peer_id_text(one.report.relay)
    if one.stamp.wire_hash == other:
        return f"relay {relay} stamped exactly the other one's bytes, and did not lie"
    return f"relay {relay} stamped neither"


def _forked(one: Accusation, text: str, report: Report) -> None:
    text = f"{text}. The origin ({peer_id_text(one.record.signer)}) signed both, and has to explain it, not the relay"
    report.fail(f"ledger/{one.index}", ReasonCode.ORIGIN_FORKED, text)
