"""The two compute profiles: what a node computes in, and on what weights its verifier checks it.

    fp32    nodes compute in float32, verifiers too
    bf16    nodes compute in bfloat16 on weights rounded to it; verifiers in float32 on the same rounded weights

A verifier of bf16 rollouts adds no noise of its own: two of them agree to about 1e-6, so a verdict is the same on every
machine, and only the node's rounding lies between it and the numbers it is held against. Checking in bfloat16 would add
as much again and decide differently on another CPU (docs/decisions/018-bf16.md has both measured).

Not covered: thresholds (`thresholds`), the proofs' forms (`toploc`), devices other than the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from verifier.errors import VerifierError
from verifier.model import PolicyModel, load_policy
from verifier.toploc import LIMBS


@dataclass(frozen=True)
class Profile:
    """One word of the manifest's `profile`.

    dtype: nodes compute in it, on weights rounded to it. limbs: of a TOPLOC proof.
    """

    name: str
    dtype: torch.dtype
    limbs: int


PROFILES = {
    "fp32": Profile("fp32", torch.float32, LIMBS["fp32"]),
    "bf16": Profile("bf16", torch.bfloat16, LIMBS["bf16"]),
}


def profile_of(name: str) -> Profile:
    """The profile that a manifest or engine names.

    Raises:
        VerifierError: one this software does not know.
    """
    if name not in PROFILES:
        raise VerifierError(f"this software knows the profiles {' and '.join(PROFILES)}, not {name!r}; upgrade it")
    return PROFILES[name]


def load_to_verify(directory: Path, profile: str, *, root: bytes = b"", attention: str = "sdpa") -> PolicyModel:
    """A policy whose prefill rollouts of a run with this profile are checked against.

    Raises:
        VerifierError: an unknown profile. PolicyError: see `load_policy`.
    """
    return load_policy(directory, torch.float32, root=root, weights=profile_of(profile).dtype, attention=attention)


def load_to_sample(directory: Path, profile: str, *, root: bytes = b"", attention: str = "sdpa") -> PolicyModel:
    """A policy that an engine samples rollouts of a run with this profile from.

    Raises:
        VerifierError: an unknown profile. PolicyError: see `load_policy`.
    """
    return load_policy(directory, profile_of(profile).dtype, root=root, attention=attention)
