"""Does a verdict's word fit the upload it accepts? Told from the two records alone: no model is run for it.

A validator accepts a rollout only when its own reward equals the claimed one (where scoring is `pure`), and each of its
own log-probabilities is within the run's bound of the claimed one (`checks.reward`, `checks.logprobs`). So details that
contradict the upload contradict the ACCEPT: whoever handed them in would choose what is trained on, and what the drop
test counts.

The coordinator asks before a verdict counts, the audit (`verifier.details`) again of every verdict in the ledger.

Not covered: numbers that are off by less; those the audit derives again.
"""

from __future__ import annotations

import struct

import numpy as np
from blake3 import blake3

from protocol.manifest import RunManifest
from protocol.records import Lease, Rollout, RolloutDetail

DIGEST_BYTES = 16


def digest_of(prompt: bytes, tokens: bytes) -> bytes:
    """What rollouts with the same prompt and tokens share, and no others: `RolloutDetail.digest`.

    Args:
        prompt, tokens: ids, u32 little-endian.
    """
    return blake3(struct.pack("<I", len(prompt)) + prompt + tokens).digest(length=DIGEST_BYTES)


def scored_purely(manifest: RunManifest, lease: Lease) -> bool:
    """Whether the scoring of the lease's environment is `pure`: the same text has the same reward everywhere."""
    return any(one.digest == lease.environment and one.scoring == "pure" for one in manifest.environments)


def contradiction(
    rollout: Rollout, detail: RolloutDetail, bound: float, *, prompt: bytes | None = None, pure: bool = True
) -> str:
    """What in an accepted rollout's details is not as claimed, as the end of "rollout 3 was accepted "; else empty.

    Args:
        bound: the manifest's `thresholds.logprob`; compared in float32, as the check compares.
        prompt: ids of its task's prompt, u32 little-endian, where they are known: then its hash is held against them.
            A validator of an older release sends none.
        pure: its environment's scoring is `pure`. Else the validator's reward may be another than the claimed one.
    """
    if pure and detail.reward != rollout.reward:
        return f"with reward {detail.reward:g}, but it claims {rollout.reward:g}"
    if len(detail.logprobs) != len(rollout.logprobs):
        return "with another number of log-probabilities than it claims"
    if prompt is not None and detail.digest and detail.digest != digest_of(prompt, rollout.tokens):
        return "with the hash of other tokens than it claims"
    error_N = np.abs(np.frombuffer(detail.logprobs, "<f4") - np.frombuffer(rollout.logprobs, "<f4"))
    if not bool((error_N <= bound).all()):  # what is no number is not within it
        return f"with log-probabilities further than {bound:g} from the claimed ones"
    return ""
