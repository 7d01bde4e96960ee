"""Which values of a rollout's states a TOPLOC proof is about: the largest of each chunk, of many rollouts at once.

Magnitudes are compared as whole numbers: a float's bits without its sign, which order as the floats do, with all that
is not finite above all that is. So one pass over the states makes what is compared, and a state that is not finite is
found among the points.

Among equal magnitudes the profiles choose differently:

    fp32    the lowest flat index
    bf16    what `torch.topk` on a CPU takes, since the `toploc` package asks it and ties are common in bfloat16

Not covered: what the points' values mean (`verifier.toploc`).

Shape suffixes: N sampled tokens, H hidden, C chunks of equal k, K points of a chunk, F flat values of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.limits import PROOF_CHUNK_TOKENS, PROOF_MODULUS_MAX, PROOF_MODULUS_MIN, PROOF_TOPK
from verifier.errors import ProofError

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Magnitudes = npt.NDArray[np.signedinteger]

_NOT_FINITE = {1: 0x7F80, 2: 0x7F800000}
"""By number of limbs: the smallest magnitude, as a whole number, that is infinite or no number."""

_GROUP_CHUNKS = 64
"""Chunks whose polynomials are worked on side by side: enough to pay numpy's call overhead, few enough to be cached."""

_GROUP_VALUES = 1 << 16
"""Values of chunks searched side by side, or one chunk: bounds memory at any hidden size, and stays in the cache."""


@dataclass(frozen=True)
class Points:
    """The points of chunks with equally many.

    where: (rollout, chunk) of each.
    values: rows * H of each, one more than its largest possible index.
    index_CK: flat index row * H + column, int64.
    bits_CK: the values' bits, uint32: all 32 in fp32, the upper 16 in bf16.
    """

    where: list[tuple[int, int]]
    values: list[int]
    index_CK: I64
    bits_CK: U32


def chunk_rows(tokens: int) -> list[int]:
    """Rows of each chunk of a rollout of `tokens` sampled tokens."""
    full, rest = divmod(tokens, PROOF_CHUNK_TOKENS)
    return [PROOF_CHUNK_TOKENS] * full + ([rest] if rest else [])


def check_states(states_NH: F32) -> int:
    """The number of rows.

    Raises:
        ProofError: not float32 [N, H].
    """
    if states_NH.dtype != np.float32 or states_NH.ndim != 2 or states_NH.shape[1] == 0:
        raise ProofError(f"states are float32 [tokens, hidden], not {states_NH.dtype} {list(states_NH.shape)}")
    return len(states_NH)


def largest(states: Sequence[F32], limbs: int) -> Iterator[Points]:
    """The points of every chunk of many rollouts, in groups.

    Args:
        states: per rollout float32 [N, H], as `check_states` takes it.
        limbs: 2 for fp32, 1 for bf16.

    Raises:
        ProofError: a state is not finite, or in bf16 not exactly a bfloat16.
    """
    by_shape: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for rollout, states_NH in enumerate(states):
        hidden = states_NH.shape[1]
        for chunk, rows in enumerate(chunk_rows(len(states_NH))):
            points = min(PROOF_TOPK, rows * hidden)
            # torch's choice among equals depends on how many values there are: no chunk is padded in bf16
            by_shape.setdefault((hidden, points, rows if limbs == 1 else 0), []).append((rollout, chunk, rows))
    for (hidden, points, _), members in by_shape.items():
        for start in range(0, len(members), _GROUP_CHUNKS):
            yield _group(states, members[start : start + _GROUP_CHUNKS], hidden, points, limbs)


def injective_moduli(points: Points) -> list[int]:
    """Per chunk the largest modulus <= 65497 for which all its indices stay apart.

    Raises:
        ProofError: there is none above 32768.
    """
    if max(points.values) <= PROOF_MODULUS_MAX:
        return [PROOF_MODULUS_MAX] * len(points.values)
    return [_injective_modulus(index_K) for index_K in points.index_CK]


def _injective_modulus(index_K: I64) -> int:
    for modulus in range(PROOF_MODULUS_MAX, PROOF_MODULUS_MIN - 1, -1):
        if len(np.unique(index_K % modulus)) == len(index_K):
            return modulus
    raise ProofError(f"no modulus in [{PROOF_MODULUS_MIN}, {PROOF_MODULUS_MAX}] keeps {len(index_K)} indices apart")


def _group(states: Sequence[F32], members: list[tuple[int, int, int]], hidden: int, points: int, limbs: int) -> Points:
    index_CK = np.empty((len(members), points), dtype=np.int64)
    bits_CK = np.empty((len(members), points), dtype=np.uint32)
    step = max(1, _GROUP_VALUES // (hidden * max(rows for _, _, rows in members)))
    for first in range(0, len(members), step):
        some = members[first : first + step]
        bits_CF, magnitude_CF = _bits(states, some, hidden, limbs)
        chosen_CK = _lowest_index(magnitude_CF, points) if limbs == 2 else _torch_order(magnitude_CF, points)
        index_CK[first : first + step] = chosen_CK
        bits_CK[first : first + step] = np.take_along_axis(bits_CF, chosen_CK, axis=1)
    if limbs == 1:
        bits_CK >>= np.uint32(16)
    sign = np.uint32(0x8000 if limbs == 1 else 0x80000000)
    if int((bits_CK & ~sign).max()) >= _NOT_FINITE[limbs]:
        raise ProofError("a state is not finite; such a rollout can be neither proved nor checked")
    where = [(rollout, chunk) for rollout, chunk, _ in members]
    return Points(where, [rows * hidden for _, _, rows in members], index_CK, bits_CK)


def _bits(
    states: Sequence[F32], members: list[tuple[int, int, int]], hidden: int, limbs: int
) -> tuple[U32, Magnitudes]:
    """The chunks' bits and magnitudes [C, F]; rows that shorter ones lack have the magnitude -1."""
    widest = max(rows for _, _, rows in members)
    bits_CF = np.zeros((len(members), widest * hidden), dtype=np.uint32)
    for i, (rollout, chunk, rows) in enumerate(members):
        start = chunk * PROOF_CHUNK_TOKENS
        bits_CF[i, : rows * hidden] = states[rollout][start : start + rows].reshape(-1).view(np.uint32)
    magnitude_CF: Magnitudes
    if limbs == 2:
        magnitude_CF = (bits_CF & np.uint32(0x7FFFFFFF)).view(np.int32)
    else:
        if int(np.bitwise_or.reduce(bits_CF, axis=None)) & 0xFFFF:
            raise ProofError("a state is not a bfloat16; the bf16 profile proves what was computed in bfloat16")
        magnitude_CF = ((bits_CF >> np.uint32(16)).astype(np.uint16) & np.uint16(0x7FFF)).view(np.int16)
    for i, (_, _, rows) in enumerate(members):
        magnitude_CF[i, rows * hidden :] = -1
    return bits_CF, magnitude_CF


def _lowest_index(magnitude_CF: Magnitudes, points: int) -> I64:
    """Indices [C, K] of the K largest of each chunk; among equals the lowest index."""
    width = magnitude_CF.shape[1]
    threshold_C1 = np.partition(magnitude_CF, width - points, axis=1)[:, width - points, None]
    above_CF = magnitude_CF > threshold_C1
    room_C1 = points - above_CF.sum(axis=1, keepdims=True)
    equal_CF = magnitude_CF == threshold_C1
    chosen_CF = above_CF | (equal_CF & (np.cumsum(equal_CF, axis=1) <= room_C1))
    index_CK: I64 = np.flatnonzero(chosen_CF).reshape(-1, points) % width
    return index_CK


def _torch_order(magnitude_CF: Magnitudes, points: int) -> I64:
    """Indices [C, K] of the K largest of each chunk; among equals those that `torch.topk` takes."""
    import torch

    index_CK: I64 = torch.topk(torch.from_numpy(magnitude_CF), points, dim=1).indices.numpy()
    return index_CK
