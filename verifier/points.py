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
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NOT_FINITE = 0x7F800000
"""The smallest magnitude, as a whole number, that is infinite or no number."""

_GROUP_CHUNKS = 64
"""Chunks whose polynomials are worked on side by side: enough to pay numpy's call overhead, few enough to be cached."""

_NARROW = 8192
_SLICE = 32
"""Chunks of more than `_NARROW` values are searched one by one, by the largest of every 32. Only speed changes."""

_HEAP_FROM = 64
"""From this many times K values on `torch.topk` keeps a heap. The bf16 points' choice among equals depends on it."""

_HEAD = 4096
_SEGMENT = 65536
"""How many values torch is given all of; how many later ones at most are compared at once. Only speed changes."""


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


def check_states(states_NH: F32 | U16, limbs: int = 2) -> int:
    """The number of rows.

    Raises:
        ProofError: not float32 [N, H] nor, in bf16, the bits of bfloat16s as uint16 [N, H].
    """
    kinds = (np.float32,) if limbs == 2 else (np.float32, np.uint16)
    if states_NH.dtype not in kinds or states_NH.ndim != 2 or states_NH.shape[1] == 0:
        raise ProofError(f"states are float32 [tokens, hidden], not {states_NH.dtype} {list(states_NH.shape)}")
    return len(states_NH)


def largest(states: Sequence[F32 | U16], limbs: int) -> Iterator[Points]:
    """The points of every chunk of many rollouts, in groups.

    Args:
        states: per rollout [N, H], as `check_states` takes it.
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


def _group(
    states: Sequence[F32 | U16], members: list[tuple[int, int, int]], hidden: int, points: int, limbs: int
) -> Points:
    bits = [_bits(states[rollout][chunk * PROOF_CHUNK_TOKENS :][:rows]) for rollout, chunk, rows in members]
    if limbs == 1 and any(int(np.bitwise_or.reduce(bits_F)) & 0xFFFF for bits_F in bits):
        raise ProofError("a state is not a bfloat16; the bf16 profile proves what was computed in bfloat16")
    find = _lowest_index if limbs == 2 else torch_choice
    index_CK = find(bits, points)
    bits_CK = np.stack([bits_F[index_K] for bits_F, index_K in zip(bits, index_CK, strict=True)])
    if int((bits_CK & _MAGNITUDE).max()) >= _NOT_FINITE:
        raise ProofError("a state is not finite; such a rollout can be neither proved nor checked")
    where = [(rollout, chunk) for rollout, chunk, _ in members]
    return Points(where, [len(bits_F) for bits_F in bits], index_CK, bits_CK >> np.uint32(16 if limbs == 1 else 0))


def _bits(rows_NH: F32 | U16) -> U32:
    """The bits of float32 values."""
    if rows_NH.dtype == np.uint16:
        return rows_NH.reshape(-1).astype(np.uint32) << np.uint32(16)
    bits_F: U32 = rows_NH.reshape(-1).view(np.uint32)
    return bits_F


class _Search:
    """Room for one chunk's magnitudes, used again for the next: fresh pages cost more than what is written to them."""

    def __init__(self, width: int) -> None:
        self._magnitude_F = np.empty(width, dtype=np.int32)
        self._above_F = np.empty(width, dtype=np.bool_)

    def magnitudes(self, bits_F: U32) -> I32:
        """The chunk's magnitudes; valid until the next call."""
        magnitude_F = self._magnitude_F[: len(bits_F)]
        np.bitwise_and(bits_F, _MAGNITUDE, out=magnitude_F.view(np.uint32))
        return magnitude_F

    def above(self, magnitude_F: I32, bound: np.int32) -> I64:
        """Indices of the magnitudes above the bound."""
        return np.flatnonzero(np.greater(magnitude_F, bound, out=self._above_F[: len(magnitude_F)]))


def _lowest_index(bits: Sequence[U32], points: int) -> I64:
    """Indices [C, K] of the K largest magnitudes of each chunk; among equals the lowest index."""
    index_CK = np.empty((len(bits), points), dtype=np.int64)
    search = _Search(max(len(bits_F) for bits_F in bits))
    narrow = []
    for i, bits_F in enumerate(bits):
        if len(bits_F) <= _NARROW:
            narrow.append(i)
            continue
        # K strided slices have maxima that large: so many values are at least as large as the K-th largest of those
        magnitude_F = search.magnitudes(bits_F)
        slices = len(bits_F) // _SLICE
        largest_S = magnitude_F[: slices * _SLICE].reshape(_SLICE, slices).max(axis=0)
        candidate_F = search.above(magnitude_F, np.partition(largest_S, slices - points)[slices - points] - 1)
        index_CK[i] = candidate_F[_lowest_of(magnitude_F[None, candidate_F], points)[0]]
    if narrow:
        index_CK[narrow] = _lowest_of(_side_by_side([bits[i] for i in narrow]), points)
    return index_CK


def _lowest_of(magnitude_CF: I32, points: int) -> I64:
    width = magnitude_CF.shape[1]
    threshold_C1 = np.partition(magnitude_CF, width - points, axis=1)[:, width - points, None]
    above_CF = magnitude_CF > threshold_C1
    room_C1 = points - above_CF.sum(axis=1, keepdims=True)
    equal_CF = magnitude_CF == threshold_C1
    chosen_CF = above_CF | (equal_CF & (np.cumsum(equal_CF, axis=1) <= room_C1))
    index_CK: I64 = np.flatnonzero(chosen_CF).reshape(-1, points) % width
    return index_CK


def _side_by_side(bits: Sequence[U32]) -> I32:
    """Magnitudes [C, F]; -1 behind the values of shorter chunks."""
    magnitude_CF = np.full((len(bits), max(len(bits_F) for bits_F in bits)), -1, dtype=np.int32)
    for magnitude_F, bits_F in zip(magnitude_CF, bits, strict=True):
        np.bitwise_and(bits_F, _MAGNITUDE, out=magnitude_F[: len(bits_F)].view(np.uint32))
    return magnitude_CF


def torch_choice(bits: Sequence[U32], points: int) -> I64:
    """Indices [C, K] of the K largest magnitudes of each chunk, all of one width; among equals torch's choice.

    From 64 K values on, `torch.topk` keeps a heap of K and takes a value in only if it is larger than the heap's
    smallest. So what comes after the first P values and is not larger than the K-th largest of those changes nothing,
    and nor do values of -1 at the end: both may be left out or added, as long as 64 K values remain. Below 64 K values
    torch partitions instead, and is given all of them.
    """
    import torch

    width = len(bits[0])
    if width <= _HEAP_FROM * points:
        index_CK: I64 = torch.topk(torch.from_numpy(_side_by_side(bits) >> 16), points, dim=1).indices.numpy()
        return index_CK
    search = _Search(min(width, _SEGMENT))
    kept = [_can_enter(bits_F, points, search) for bits_F in bits]
    longest = max(len(index_F) for index_F, _ in kept)
    magnitude_CF = np.full((len(bits), max(longest, _HEAP_FROM * points)), -1, dtype=np.int16)
    for short_F, (index_F, magnitude_F) in zip(magnitude_CF, kept, strict=True):
        np.right_shift(magnitude_F, 16, out=short_F[: len(index_F)], casting="unsafe")
    place_CK = torch.topk(torch.from_numpy(magnitude_CF), points, dim=1).indices.numpy()
    return np.stack([index_F[place_K] for (index_F, _), place_K in zip(kept, place_CK, strict=True)])


def _can_enter(bits_F: U32, points: int, search: _Search) -> tuple[I64, I32]:
    """Index and magnitude of all values that the K largest before them do not keep out, in order."""
    magnitude_F = search.magnitudes(bits_F[:_HEAD])
    index, magnitude = [np.arange(_HEAD)], [magnitude_F.copy()]
    best_K = magnitude[0]
    start, stop = _HEAD, 5 * _HEAD
    while start < len(bits_F):
        best_K = np.partition(best_K, len(best_K) - points)[len(best_K) - points :]
        magnitude_F = search.magnitudes(bits_F[start:stop])
        above_F = search.above(magnitude_F, best_K[0])
        index.append(above_F + start)
        magnitude.append(magnitude_F[above_F])
        best_K = np.concatenate([best_K, magnitude[-1]])
        start, stop = stop, stop + _SEGMENT
    return np.concatenate(index), np.concatenate(magnitude)
