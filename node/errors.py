"""The error tree of the node package.

    HeadwaterError
    ├── UsageError                 (protocol) the person who typed the command must change something: exit 2
    └── NodeError                  this node can't go on: exit 1
        ├── HeadsConflictError     the coordinator signed two ledgers; the evidence is on disk
        ├── KeyRevokedError        the run's root took this key's rights away: exit 2, nothing changes by asking again
        └── LeavingError           not a fault: the node has nothing more to do here
            ├── RunFinishedError      exit 0
            ├── SuspendedError        exit 0, after saying why
            └── UpgradeRequiredError  exit 75 (EX_TEMPFAIL of sysexits.h), with the command that upgrades

Other packages' errors (`EngineError`, `TransportError`, ...) pass through: a role's loop handles them by code.
"""

from __future__ import annotations

from protocol.errors import HeadwaterError, ReasonCode


class NodeError(HeadwaterError):
    """This node can't go on; the message says who must act."""

    exit_code = 1


class HeadsConflictError(NodeError):
    """Two signed heads of one size with different roots: the run has two histories."""

    code = ReasonCode.HEADS_CONFLICT


class KeyRevokedError(NodeError):
    """The run's manifest chain revokes this node's own key."""

    code = ReasonCode.KEY_REVOKED
    exit_code = 2


class LeavingError(NodeError):
    """The node ends, and that is right."""

    exit_code = 0


class RunFinishedError(LeavingError):
    """The coordinator says the run is over."""


class SuspendedError(LeavingError):
    """The coordinator takes nothing more from this key."""

    code = ReasonCode.SUSPENDED


class UpgradeRequiredError(LeavingError):
    """The run speaks a newer protocol than this software."""

    code = ReasonCode.UPGRADE_REQUIRED
    exit_code = 75
