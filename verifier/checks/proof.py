"""`proof-malformed` before the prefill, `proof-mismatch` after it: the weights and the prompt are the right ones."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ReasonCode
from protocol.limits import PROOF_CHUNK_TOKENS
from verifier import toploc
from verifier.checks.claim import Claim, Setting, standing
from verifier.errors import ProofError


def check_shape(claims: Sequence[Claim], setting: Setting) -> None:
    """Exactly one well-formed chunk per 32 sampled tokens."""
    open_claims = standing(claims)
    proofs = [claim.rollout.proofs for claim in open_claims]
    if toploc.are_well_formed(proofs, [len(claim.tokens_N) for claim in open_claims], setting.policy.hidden):
        return
    for claim in open_claims:
        try:
            toploc.check_shape(claim.rollout.proofs, len(claim.tokens_N), setting.policy.hidden)
        except ProofError:
            claim.fail(ReasonCode.PROOF_MALFORMED, chunks=float(len(claim.rollout.proofs)))


def check_match(claims: Sequence[Claim], setting: Setting) -> None:
    """No chunk whose median error or number of outliers is above the calibrated bound."""
    open_claims = standing(claims)
    # Rollouts with equal tokens share their states, and most have equal proofs: those are compared once.
    keys = [(id(claim.states_NH), _proofs(claim)) for claim in open_claims]
    distinct = {
        key: claim.states_NH for key, claim in zip(keys, open_claims, strict=True) if claim.states_NH is not None
    }
    limits = setting.thresholds
    found = toploc.verify_many(list(distinct.values()), [proofs for _, proofs in distinct], limits.proof_gate)
    stats = dict(zip(distinct, found, strict=True))
    for claim, key in zip(open_claims, keys, strict=True):
        chunks = stats[key]
        claim.note("proof_median", _finite(max(chunk.median for chunk in chunks)))
        claim.note("proof_outliers", float(max(chunk.outliers for chunk in chunks)))
        for i, chunk in enumerate(chunks):
            if not chunk.median <= limits.proof_median or chunk.outliers > limits.proof_outliers:
                claim.fail(ReasonCode.PROOF_MISMATCH, chunk_at=float(claim.at // PROOF_CHUNK_TOKENS + i))
                break


def _proofs(claim: Claim) -> tuple[bytes, ...]:
    """The chunks over the block's tokens. Blocks begin where a chunk begins."""
    first = claim.at // PROOF_CHUNK_TOKENS
    return claim.rollout.proofs[first : first + -(-len(claim.block_tokens_N) // PROOF_CHUNK_TOKENS)]


def _finite(value: float) -> float:
    """Numbers in a verdict are finite: an infinite error reads as 1e300."""
    return min(value, 1e300)
