"""The error tree of the verifier package.

    HeadwaterError
    └── ProtocolError
        └── VerifierError       somebody gave the verifier things that do not belong together
            ├── PolicyError     a model directory that is not one of ours, or not whole
            ├── ProofError      a TOPLOC proof that is no proof, or states nobody can prove
            ├── RouteError      experts that no rollout of this model can have gone through
            └── CalibrationError  a measurement that no threshold can be taken from

What a *rollout* did wrong is never an exception: it is an `Outcome` with a `ReasonCode` (`verifier.judge`).
"""

from __future__ import annotations

from protocol.errors import ProtocolError, ReasonCode


class VerifierError(ProtocolError):
    """A lease, policy, environment or run that do not belong together: whoever called must act, not the node."""

    code = ReasonCode.VALIDATOR_FAILED


class PolicyError(VerifierError):
    """A model directory that is refused: an architecture outside the allow-list, code, or missing tensors."""


class ProofError(VerifierError):
    """Bytes that are no TOPLOC chunk of the expected shape, or states that are not finite."""

    code = ReasonCode.PROOF_MALFORMED


class RouteError(VerifierError):
    """Bytes that are no routes of a rollout of the expected length through this model's experts."""

    code = ReasonCode.ROUTES_MALFORMED


class CalibrationError(VerifierError):
    """Honest noise above the profile's ceiling, or a measurement file that does not hold."""
