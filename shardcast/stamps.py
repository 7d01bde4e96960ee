"""Stamps: a relay signs which bytes it sends, so that a wrong byte can be shown to anybody (RULES 8).

    response header X-Headwater-Stamp = base64 of a `relay.stamp` envelope {publication, index, wire hash, time},
    made once per shard when somebody first asks for it

    stamp missing, forged, of another shard          refuse; the address is charged, reported without proof
    stamp's hash differs from the origin's record    refuse; both signatures together are proof (`LieError`)
    stamp right, bytes wrong                         refuse; the address is charged, reported without proof

An honest relay signs the hash it verified on arrival and never hashes its disk again: damage there makes it send bytes
that its stamp doesn't cover, which costs it children and not its name.

Not covered: what a proof is (`protocol.evidence`), and what the coordinator does with it (`trainer.reports`).
"""

from __future__ import annotations

import base64
import binascii

from protocol.envelope import open_envelope, seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import Identity
from protocol.records import RelayStamp
from protocol.sequences import Sequences
from shardcast.errors import LieError, SourceError
from shardcast.records import STAMP_KIND, ShardRecord

STAMP_HEADER = "X-Headwater-Stamp"

STAMP_LIFETIME_MS = 365 * 24 * 3_600_000
"""A stamp says what was sent, not how things are now: it does not go stale."""

MAX_STAMP_CHARS = 2048


def make_stamp(
    identity: Identity, sequences: Sequences, run: bytes, now_ms: int, publication: bytes, index: int, wire_hash: bytes
) -> str:
    """The header's value for one shard."""
    envelope = seal(
        identity,
        STAMP_KIND,
        RelayStamp(publication, index, wire_hash, now_ms),
        run=run,
        sequence=sequences.next(STAMP_KIND),
        issued_at=now_ms,
        lifetime_ms=STAMP_LIFETIME_MS,
    )
    return base64.b64encode(envelope.raw).decode("ascii")


def check_stamp(header: str | None, run: bytes, relay: bytes, record: ShardRecord, address: str) -> None:
    """A relay's stamp against the origin's record of the shard asked for.

    Raises:
        LieError: `relay` validly signed other bytes for this very shard; carries the stamp.
        SourceError(`bad-signature`): there is no valid stamp of `relay` for this shard; proves nothing.
    """
    try:
        raw = base64.b64decode((header or "")[:MAX_STAMP_CHARS], validate=True)
        stamp = open_envelope(raw, run=run, kind=STAMP_KIND, signer=relay).record(RelayStamp)
    except (ProtocolError, binascii.Error, ValueError) as exc:
        raise SourceError(
            address, f"shard {record.index} came without a valid stamp of its relay ({exc})", ReasonCode.BAD_SIGNATURE
        ) from exc
    if (stamp.publication, stamp.index) != (record.publication, record.index):
        raise SourceError(
            address, f"shard {record.index} came with the stamp of another shard", ReasonCode.BAD_SIGNATURE
        )
    if stamp.wire_hash != record.wire_hash:
        raise LieError(address, f"its relay signed other bytes for shard {record.index} than the origin did", raw)
