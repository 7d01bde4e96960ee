"""Every bound of the protocol in one place. Each says what breaks when it changes.

Bounds protect the receiver: raising one costs memory on every machine that decodes the record, lowering one
makes older peers' records undecodable and needs a new protocol version.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

PROTOCOL_VERSION = 0x0100
"""Major in the high byte, minor in the low. Another major is refused with `unsupported-version`."""

CONTROL_PROTOCOL = "/headwater/1/control"
"""The libp2p protocol id. Changing it splits the network: old and new peers no longer find a handler."""

HASH_BYTES = 32
MAX_ENVELOPE_BYTES = 1 * MIB
"""Largest envelope. The libp2p host allocates at most this much for one frame of a stranger."""

MAX_ATTACHMENT_BYTES = 8 * MIB
"""Largest unsigned attachment of a control frame (verdict details); its hash is in the signed part."""

MAX_INTENT_BYTES = 4 * KIB
"""Largest upload intent header. Read before anything is known about the sender."""

MAX_SUBMISSION_BYTES = 64 * MIB
"""Largest compressed submission. A lease names a smaller bound; this one caps what a lease may name."""

MAX_SUBMISSION_RAW_BYTES = 256 * MIB
"""Largest decompressed submission: compared with the frame's declared size before opening it."""

MAX_TASKS_PER_LEASE = 256
MAX_SAMPLES_PER_TASK = 256
MAX_ROLLOUTS_PER_LEASE = 1024
MAX_TOKENS_PER_ROLLOUT = 131_072
PROOF_CHUNK_TOKENS = 32
"""Tokens one TOPLOC chunk covers. Part of every proof's meaning: changing it breaks all stored proofs."""

PROOF_TOPK = 128
"""Values one chunk commits to. Changing it changes the proof's length and every calibrated threshold."""

PROOF_MODULUS_MAX = 65497
PROOF_MODULUS_MIN = 32769
MAX_PROOF_CHUNKS = MAX_TOKENS_PER_ROLLOUT // PROOF_CHUNK_TOKENS

MAX_ROUTES_BYTES = 64 * MIB
"""Expert ids of one rollout. The run's own bound is far lower: what its model can name over its whole context."""

MAX_MODEL_FILES = 32
MAX_MODEL_FILE_BYTES = 64 * MIB
"""Config and tokenizer files travel whole in memory; weights never do."""

SHARD_BYTES = 8 * MIB
"""Raw bytes of a state shard. Part of every root: changing it changes the root of the same weights."""

MAX_SHARDS = 1 << 20
MAX_TENSORS = 1 << 16
MAX_LAYOUT_BYTES = 16 * MIB
MAX_ANNOUNCEMENT_BYTES = 10 * KIB
MAX_BATCH_ENTRIES = 1 << 16
MAX_ADDRESSES = 16
MAX_TEXT = 4 * KIB
MAX_NUMBERS = 32
MAX_EVIDENCE_ROWS = 16
"""Sums that a manifest may ask for over each node's rollouts: every one is kept for every node."""

MAX_REWARD = 1e6
"""Largest reward, either sign, that may be trained on. Advantages are float32: far larger ones overflow."""

FRESHNESS_MS = 120_000
"""How far a signed time may lie from ours after correction (RULES 3)."""

HEADER_DEADLINE_S = 10.0
MINIMUM_RATE_BYTES_S = 16 * KIB
REQUEST_DEADLINE_S = 30.0
FALLBACK_AFTER_S = 10.0
"""libp2p must have failed this long before a client tries the HTTP door."""


def submission_raw_bound(rollouts: int, max_new_tokens: int, routes: int = 0) -> int:
    """Bytes above which no honest answer to a lease lies, decompressed: a decoder may need many times what it is given.

    Twice what our own encoder can need, so that a later minor version has room for more fields.

    Args:
        routes: most bytes that one rollout's expert ids can have (`manifest.routes_bound`).
    """
    tokens = min(max_new_tokens, MAX_TOKENS_PER_ROLLOUT)
    proofs = -(-tokens // PROOF_CHUNK_TOKENS) * (2 + 4 * PROOF_TOPK + 3)
    return min(MAX_SUBMISSION_RAW_BYTES, 2 * (KIB + rollouts * (8 * tokens + proofs + routes + 64)))


def details_bound(rollouts: int, max_new_tokens: int) -> int:
    """The same for a verdict's details: log-probabilities, a reward and at most `MAX_NUMBERS` named numbers each."""
    tokens = min(max_new_tokens, MAX_TOKENS_PER_ROLLOUT)
    return min(MAX_ATTACHMENT_BYTES, 2 * (KIB + rollouts * (4 * tokens + 80 * MAX_NUMBERS + 64)))
