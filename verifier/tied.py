"""Which values of its own states a verifier asks a bf16 proof about, whatever the prover's `topk` takes among equals.

A chunk's points are its K values of largest magnitude. In bfloat16 some eight of them share the K-th magnitude, and a
prover proves only as many of those as there is room for: which ones depends on the release of torch and on the device.
So a verifier takes what is above the K-th magnitude, and of all that equal it those the proof agrees with best, as many
as there is room for. A value that was not proved agrees by chance once in 512 times (sign and exponent of a random
field element), so the freedom says nothing for a prover of other states.

Where more than K values too many are equal (a state of zeros), all of them would cost more than they tell: there the
points are those of the prover's rule, `points.largest`.

Not covered: a prover's choice (`verifier.points`), what claimed values mean (`verifier.toploc`), the same in one pass
with the statistics (`verifier.kernels`).

Shape suffixes: N sampled tokens, H hidden, C chunks of equal width, F flat values of a chunk, M candidates, S slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.limits import PROOF_CHUNK_TOKENS, PROOF_TOPK
from verifier.errors import ProofError
from verifier.points import F32, I64, U16, chunk_rows, torch_choice

I16 = npt.NDArray[np.int16]
T = TypeVar("T", bound=np.generic)

_MAGNITUDE = np.uint16(0x7FFF)
_NOT_FINITE = 0x7F80
"""The smallest magnitude, as a whole number, that is infinite or no number."""

INFINITE = "a state is not finite; such a rollout can be neither proved nor checked"

_NARROW = 8192
_SLICE = 32
"""Chunks of more than `_NARROW` values are searched by the largest of every 32. Only speed changes."""

_SEARCHED_BYTES, _GROUP_CHUNKS = 1 << 19, 64
"""Values that are searched side by side, and chunks whose polynomials are evaluated so: enough to pay numpy's call
overhead, few enough to be cached."""


@dataclass(frozen=True)
class Tied:
    """Candidates of chunks of one width.

    where: (rollout, chunk) of each. values: rows * H of each. points: K.
    index_CM: flat index row * H + column. bits_CM: the bfloat16's bits. above_CM: points in any case.
    equal_CM: those that share the K-th magnitude. What is neither fills a row up.
    """

    where: list[tuple[int, int]]
    values: list[int]
    points: int
    index_CM: I64
    bits_CM: U16
    above_CM: npt.NDArray[np.bool_]
    equal_CM: npt.NDArray[np.bool_]


def candidates(states: Sequence[F32 | U16], only: Collection[tuple[int, int]] | None = None) -> Iterator[Tied]:
    """The candidates of every chunk of many rollouts, in groups.

    Args:
        states: per rollout [N, H], as `points.check_states` takes it.
        only: (rollout, chunk) of those that are asked about; all by default.

    Raises:
        ProofError: a state is not finite, or not exactly a bfloat16.
    """
    by_width: dict[int, list[tuple[int, int]]] = {}
    for rollout, states_NH in enumerate(states):
        for chunk, rows in enumerate(chunk_rows(len(states_NH))):
            if only is None or (rollout, chunk) in only:
                by_width.setdefault(rows * states_NH.shape[1], []).append((rollout, chunk))
    for width, where in by_width.items():
        search = _Search(width, min(len(where), max(1, _SEARCHED_BYTES // (2 * width))))
        for start in range(0, len(where), _GROUP_CHUNKS):
            group = where[start : start + _GROUP_CHUNKS]
            begun = [states[rollout][chunk * PROOF_CHUNK_TOKENS :] for rollout, chunk in group]
            found = [search.found(begun[at : at + search.chunks]) for at in range(0, len(begun), search.chunks)]
            yield _tied(group, width, search.points, [np.concatenate(part) for part in zip(*found, strict=True)])


class _Search:
    """Room for some chunks' values, used again for the next: fresh pages cost more than what is written to them."""

    def __init__(self, width: int, chunks: int) -> None:
        self.width, self.chunks, self.points = width, chunks, min(PROOF_TOPK, width)
        self._bits_CF = np.empty((chunks, width), dtype=np.uint16)
        self._magnitude_CF = np.empty((chunks, width), dtype=np.uint16)
        self._reached_CF = np.empty((chunks, width), dtype=np.bool_)

    def found(self, rows: Sequence[F32 | U16]) -> tuple[I64, U16, I64, I16]:
        """Of chunks that begin the arrays given: flat index and bits of the candidates, all chunks' one behind the
        other; how many each has; the magnitude that decides, [C], or -1 where torch chose."""
        chunks = len(rows)
        bits_CF = self._bits_CF[:chunks]
        for bits_F, rows_NH in zip(bits_CF, rows, strict=True):
            _read(rows_NH[:PROOF_CHUNK_TOKENS], bits_F)
        magnitude_CF = np.bitwise_and(bits_CF, _MAGNITUDE, out=self._magnitude_CF[:chunks]).view(np.int16)
        bound_C = _lower_bound(magnitude_CF, self.points)
        reached_CF = np.greater_equal(magnitude_CF, bound_C[:, None], out=self._reached_CF[:chunks])
        flat = np.flatnonzero(reached_CF)
        starts = np.arange(chunks + 1) * self.width
        count_C = np.diff(np.searchsorted(flat, starts))
        found_CM = _rows(magnitude_CF.reshape(-1)[flat], count_C, np.int16(-1))
        if int(found_CM.max()) >= _NOT_FINITE:
            raise ProofError(INFINITE)
        last = found_CM.shape[1] - self.points
        least_C = np.partition(found_CM, last, axis=1)[:, last]
        kept_CM = found_CM >= least_C[:, None]
        count_C = kept_CM.sum(axis=1)
        flat = flat[kept_CM[found_CM >= 0]]
        if int(count_C.max()) > 2 * self.points:
            flat, count_C, least_C = self._by_torch(bits_CF, flat, count_C, least_C)
        return flat - np.repeat(starts[:-1], count_C), bits_CF.reshape(-1)[flat], count_C, least_C

    def _by_torch(self, bits_CF: U16, flat: I64, count_C: I64, least_C: I16) -> tuple[I64, I64, I16]:
        """The same with torch's choice for chunks with too many equals."""
        parts = np.split(flat, np.cumsum(count_C)[:-1])
        for i in np.flatnonzero(count_C > 2 * self.points):
            whole_F = bits_CF[i].astype(np.uint32) << np.uint32(16)
            parts[i] = np.sort(torch_choice([whole_F], self.points)[0]) + i * self.width
            least_C[i] = -1
        return np.concatenate(parts), np.asarray([len(part) for part in parts]), least_C


def bits_of(states_NH: F32 | U16) -> U16:
    """The bfloat16s' bits of one rollout's states, [N, H] side by side; the states themselves where they are such.

    Raises:
        ProofError: a state is not exactly a bfloat16.
    """
    if states_NH.dtype == np.uint16:
        return np.ascontiguousarray(states_NH)
    bits_NH = np.empty(states_NH.shape, dtype=np.uint16)
    for start in range(0, len(states_NH), PROOF_CHUNK_TOKENS):
        rows_NH = states_NH[start : start + PROOF_CHUNK_TOKENS]
        _read(rows_NH, bits_NH[start : start + PROOF_CHUNK_TOKENS].reshape(-1))
    return bits_NH


def _read(rows_NH: F32 | U16, bits_F: U16) -> None:
    if rows_NH.dtype == np.uint16:
        bits_F[:] = rows_NH.reshape(-1)
        return
    whole_F = rows_NH.reshape(-1).view(np.uint32)
    if int(np.bitwise_or.reduce(whole_F)) & 0xFFFF:
        raise ProofError("a state is not a bfloat16; the bf16 profile proves what was computed in bfloat16")
    np.right_shift(whole_F, 16, out=bits_F, casting="unsafe")


def _tied(where: list[tuple[int, int]], width: int, points: int, found: list[npt.NDArray[Any]]) -> Tied:
    index, bits, count_C, least_C = found
    index_CM, bits_CM = _rows(index, count_C, np.int64(0)), _rows(bits, count_C, np.uint16(0))
    real_CM = np.arange(index_CM.shape[1]) < count_C[:, None]
    above_CM = real_CM & ((bits_CM & _MAGNITUDE).view(np.int16) > least_C[:, None])
    return Tied(where, [width] * len(where), points, index_CM, bits_CM, above_CM, real_CM & ~above_CM)


def _lower_bound(magnitude_CF: I16, points: int) -> I16:
    """A magnitude that at least K values of a chunk reach: the K-th largest, of wide chunks that of slices' maxima."""
    chunks, width = magnitude_CF.shape
    if width > _NARROW:
        slices = width // _SLICE
        magnitude_CF = magnitude_CF[:, : slices * _SLICE].reshape(chunks, _SLICE, slices).max(axis=1)
    last = magnitude_CF.shape[1] - points
    bound_C: I16 = np.partition(magnitude_CF, last, axis=1)[:, last]
    return bound_C


def _rows(values: npt.NDArray[T], count_C: I64, fill: T) -> npt.NDArray[T]:
    """Values that lie one chunk behind the other as [C, M], filled up."""
    width = int(count_C.max())
    filled_CM = np.full((len(count_C), width), fill, dtype=values.dtype)
    filled_CM[np.arange(width) < count_C[:, None]] = values
    return filled_CM
