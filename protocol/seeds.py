"""Seeds that decide which tokens a lease forces (RULES 4). Never derived from the peer."""

from __future__ import annotations

import struct

from blake3 import blake3

_SAMPLING_CONTEXT = "headwater/1 sampling seed"
"""BLAKE3 key-derivation context. Changing it changes every token of every run."""


def sampling_seed(run: bytes, nonce: bytes, task: int, sample: int) -> bytes:
    """The 32-byte seed of one rollout.

    Args:
        run: run id, 32 bytes.
        nonce: the lease's nonce, 32 bytes.
        task: task index inside the environment, u64.
        sample: sample number inside the lease, u32.
    """
    material = run + nonce + struct.pack(">QI", task, sample)
    return blake3(material, derive_key_context=_SAMPLING_CONTEXT).digest()


def group_id(nonce: bytes, task: int) -> bytes:
    """16 bytes that all rollouts of one task of one lease share."""
    return blake3(nonce + struct.pack(">Q", task), derive_key_context="headwater/1 group").digest()[:16]
