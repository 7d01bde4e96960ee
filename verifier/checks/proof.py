"""`proof-malformed` before the prefill, `proof-mismatch` after it: the weights and the prompt are the right ones.

Not covered: what a single bf16 rollout cannot show (int8 weights, weights a few steps old): `mantissa_mean` goes into
the details, and is added up per node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import ReasonCode
from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.manifest import Bf16Thresholds
from verifier import toploc
from verifier.checks.claim import Claim, Setting, standing
from verifier.errors import ProofError

_MANTISSA_VALUES = 128.0
"""The mantissa mean of a chunk none of whose exponents agree: above any that can be measured."""


def check_shape(claims: Sequence[Claim], setting: Setting) -> None:
    """Exactly one well-formed chunk of the run's profile per 32 sampled tokens."""
    open_claims = standing(claims)
    proofs = [claim.rollout.proofs for claim in open_claims]
    hidden, limbs = setting.policy.hidden, setting.limbs
    if toploc.are_well_formed(proofs, [len(claim.tokens_N) for claim in open_claims], hidden, limbs):
        return
    for claim in open_claims:
        try:
            toploc.check_shape(claim.rollout.proofs, len(claim.tokens_N), hidden, limbs)
        except ProofError:
            claim.fail(ReasonCode.PROOF_MALFORMED, chunks=float(len(claim.rollout.proofs)))


def check_match(claims: Sequence[Claim], setting: Setting) -> None:
    """No chunk, and in bf16 no rollout, further from the verifier's own states than the calibrated bounds."""
    open_claims = standing(claims)
    # Rollouts with equal tokens share their states, and most have equal proofs: those are compared once.
    keys = [(id(claim.states_NH), _proofs(claim)) for claim in open_claims]
    distinct = {
        key: claim.states_NH for key, claim in zip(keys, open_claims, strict=True) if claim.states_NH is not None
    }
    states, proofs = list(distinct.values()), [proofs for _, proofs in distinct]
    if setting.bf16 is None:
        limits = setting.thresholds
        stats = dict(zip(distinct, toploc.verify_many(states, proofs, limits.proof_gate), strict=True))
        for claim, key in zip(open_claims, keys, strict=True):
            chunks = stats[key]
            claim.note("proof_median", _finite(max(chunk.median for chunk in chunks)))
            claim.note("proof_outliers", float(max(chunk.outliers for chunk in chunks)))
            for i, chunk in enumerate(chunks):
                if not chunk.median <= limits.proof_median or chunk.outliers > limits.proof_outliers:
                    claim.fail(ReasonCode.PROOF_MISMATCH, chunk_at=float(claim.at // PROOF_CHUNK_TOKENS + i))
                    break
        return
    rounded = [as_bf16(states_NH) for states_NH in states]
    bf16 = dict(zip(distinct, toploc.verify_many_bf16(rounded, proofs), strict=True))
    for claim, key in zip(open_claims, keys, strict=True):
        _match_bf16(claim, bf16[key], setting.bf16)


def _match_bf16(claim: Claim, chunks: Sequence[toploc.Bf16Stats], limits: Bf16Thresholds) -> None:
    means = [min(chunk.mantissa_mean, _MANTISSA_VALUES) for chunk in chunks]
    claim.sums["mantissa"] = claim.sums.get("mantissa", 0.0) + sum(means)
    first = claim.at // PROOF_CHUNK_TOKENS
    count = first + len(chunks)
    mean = claim.sums["mantissa"] / count
    claim.numbers["mantissa_mean"] = mean
    claim.note("exponents", float(max(chunk.exponents for chunk in chunks)))
    for i, (chunk, chunk_mean) in enumerate(zip(chunks, means, strict=True)):
        exponents, mantissa = limits.chunk_bounds(len(claim.tokens_N) - PROOF_CHUNK_TOKENS * (first + i))
        if chunk.exponents > exponents or chunk_mean > mantissa:
            claim.fail(ReasonCode.PROOF_MISMATCH, chunk_at=float(first + i))
            return
    if claim.at_end and count >= limits.rollout_chunks and mean > limits.rollout_mantissa:
        claim.fail(ReasonCode.PROOF_MISMATCH)


def as_bf16(states_NH: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of what a machine whose arithmetic was exact until here would have committed: rounded, ties to even."""
    bits_NH: npt.NDArray[np.uint16] = torch.from_numpy(states_NH).bfloat16().view(torch.uint16).numpy()
    return bits_NH


def _proofs(claim: Claim) -> tuple[bytes, ...]:
    """The chunks over the block's tokens. Blocks begin where a chunk begins."""
    assert claim.states_NH is not None
    first = claim.at // PROOF_CHUNK_TOKENS
    return claim.rollout.proofs[first : first + -(-len(claim.states_NH) // PROOF_CHUNK_TOKENS)]


def _finite(value: float) -> float:
    """Numbers in a verdict are finite: an infinite error reads as 1e300."""
    return min(value, 1e300)
