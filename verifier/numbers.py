"""The numbers that a verdict's details hold of an accepted rollout: each name once, with how two verifiers may differ.

Whoever compares two verifiers' details takes the names from here and the tolerance of each kind from what it measured
(`derive`); which of them a manifest's row sums up is `statistics.READS`.

Not covered: numbers of a rollout that failed (`token_at`, `chunk_at`, ...): they say where, and nothing reads them.
"""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Why honest values of one number are not equal everywhere."""

    NOISE = "noise"
    """A distance between node and verifier of the size of rounding itself: a second verifier has its own."""
    POINTS = "points"
    """A mean over proof points whose states were rounded to bfloat16: one that lies between two falls to either."""
    ROUNDING = "rounding"
    """Computed from states or logits: off by a verifier's own rounding, per token where it is a sum."""
    COUNT = "count"
    """A whole number: what lies at an edge counts on one machine and not on another."""
    EXACT = "exact"
    """Follows from the submission and the lease alone."""


NUMBERS: dict[str, Kind] = {
    "proof_median": Kind.NOISE,
    "proof_outliers": Kind.COUNT,
    "mantissa_mean": Kind.POINTS,
    "exponents": Kind.COUNT,
    "token_margin": Kind.ROUNDING,
    "margin_sum": Kind.ROUNDING,
    "tokens_not_first": Kind.COUNT,
    "logprob_error": Kind.ROUNDING,
    "mismatch_kl": Kind.ROUNDING,
    "mismatch_k3": Kind.ROUNDING,
    "route_shortfall": Kind.ROUNDING,
    "routes_not_first": Kind.COUNT,
    "route_choices": Kind.EXACT,
    "reward_claimed": Kind.EXACT,
}
"""A mean or a sum is over the whole rollout, the others are its largest. `mismatch_kl`, `mismatch_k3`, `mantissa_mean`
and `exponents` are of bf16 runs, `proof_median` and `proof_outliers` of fp32 ones, those of routes of mixtures of
experts, `reward_claimed` of environments whose scoring is not `pure`."""
