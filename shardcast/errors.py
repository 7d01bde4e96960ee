"""The error tree of the shardcast package.

    ProtocolError
    └── ShardcastError
        ├── LayoutError        a weights file or layout that is not the one the run's manifest names
        ├── PublicationError   records of a publication that do not hold together
        ├── ForkError          the origin signed two different things for one place; carries both as evidence
        ├── HeadError          a head that is stale, or older than one already seen
        ├── SourceError        what one source sent, or failed to send; charged to that address alone
        │   └── LieError       a relay validly signed other bytes than the origin did; carries its stamp
        ├── CodecError         wire bytes that are no encoding of the shard they are said to be
        ├── WrongBodyError     an unsigned answer that is not the state asked for; whoever sent it is charged
        ├── StoreError         a local store that is damaged, or is held by another process
        └── PublishError       a checkpoint that the origin must not publish

A source is blamed for what it sent (SourceError), a key only for what it validly signed (LieError: a relay's,
ForkError: the origin's).
"""

from __future__ import annotations

from protocol.errors import ProtocolError, ReasonCode


class ShardcastError(ProtocolError):
    """Root of this package's errors."""


class LayoutError(ShardcastError):
    """A weights file or layout that is not the one the run's manifest names."""


class UnfinishedFileError(LayoutError):
    """A weights file that is not whole, or not yet: more bytes may mend it."""


class PublicationError(ShardcastError):
    """Records of a publication that do not hold together."""


class ForkError(ShardcastError):
    """The origin's key signed two different things for one (epoch, step) or shard.

    `evidence` holds both envelopes as they arrived. Whoever sees this stops swapping weights and says so.
    """

    code = ReasonCode.ORIGIN_FORKED

    def __init__(self, message: str, evidence: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.evidence = evidence


class HeadError(ShardcastError):
    """A head that is stale, or older than one already seen."""

    code = ReasonCode.EXPIRED


class SourceError(ShardcastError):
    """What one source sent, or failed to send. `address` is the only thing that is blamed."""

    code = ReasonCode.UNREACHABLE

    def __init__(
        self, address: str, message: str, code: ReasonCode | None = None, *, retry_after_s: float = 0.0
    ) -> None:
        """
        Args:
            retry_after_s: for how long the source said not to ask again.
        """
        super().__init__(f"{address}: {message}", code)
        self.address = address
        self.retry_after_s = retry_after_s


class LieError(SourceError):
    """A relay validly signed other bytes for a shard than the origin did. `stamp` is its envelope."""

    code = ReasonCode.RELAY_LIED

    def __init__(self, address: str, message: str, stamp: bytes) -> None:
        super().__init__(address, message)
        self.stamp = stamp


class CodecError(ShardcastError):
    """Wire bytes that are no encoding of the shard they are said to be. Whoever signed their hash made them."""


class WrongBodyError(ShardcastError):
    """An answer whose bytes nobody signed (`state/I`) is not the state asked for. The source is charged for it."""

    code = ReasonCode.SHARD_MISMATCH


class StoreError(ShardcastError):
    """A local store that is damaged, or is held by another process."""

    code = ReasonCode.RECORD_MISSING


class PublishError(ShardcastError):
    """A checkpoint that the origin must not publish. The message says who must do what."""

    code = ReasonCode.HASH_MISMATCH
