"""The error tree of the environments package.

HeadwaterError
└── ProtocolError
    └── EnvironmentSpecError    a specification that this machine's environments do not match
"""

from __future__ import annotations

from protocol.errors import ProtocolError, ReasonCode


class EnvironmentSpecError(ProtocolError):
    """Unknown name, other source, or a configuration this environment does not have. The operator must act."""

    code = ReasonCode.UNSUPPORTED_VERSION
