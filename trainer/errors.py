"""The error tree of the trainer package.

protocol.errors.HeadwaterError
├── UsageError            a command, path or configuration that the person must change (exit 2)
├── ProtocolError ...     what arrived does not hold
│   └── LedgerError
│       ├── RefusedEntryError   an entry that contradicts the ledger: not written, and who caused it is told
│       └── KeyLapsedError      the coordinator's own key may sign nothing now (exit 1)
└── TrainerError          a trainer's own process cannot go on (exit 1)
    ├── StartError        it could not start: a port in use, a half-written run directory (exit 2)
    └── UploadError       one upload is refused with an HTTP status; nobody else notices
"""

from __future__ import annotations

from protocol.errors import HeadwaterError, LedgerError, ReasonCode


class RefusedEntryError(LedgerError):
    """An entry that contradicts the ledger's state. It was not written, and the state is as before."""

    code = ReasonCode.MALFORMED


class KeyLapsedError(LedgerError):
    """The coordinator's key may sign nothing now: its delegation has not begun, is over, or it was revoked."""


class TrainerError(HeadwaterError):
    """A trainer's own process cannot go on. The message names cause, fix and who must act."""


class StartError(TrainerError):
    """The process could not start; nothing was changed."""

    code = ReasonCode.USAGE


class UploadError(TrainerError):
    """One upload is refused.

    Args:
        status: HTTP status.
        retry_after_s: seconds until another try makes sense; None when it never does.
    """

    def __init__(self, status: int, message: str, code: ReasonCode, retry_after_s: int | None = None) -> None:
        super().__init__(message, code)
        self.status = status
        self.retry_after_s = retry_after_s
