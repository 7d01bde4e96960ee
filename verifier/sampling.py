"""Seeded Gumbel-max sampling (RULES 4): the lease forces every token, so a verifier can replay the choice.

    token = argmax over v of  float32(logits[v] / T) + g(seed, position, v)
    g     = float32(-log(-log1p(-u))),  u = (x + 0.5) / 2^32,  in float64

    x is word v mod 4 of Philox4x32-10 with
        key     = the seed's first 8 bytes as two big-endian u32 (k0, k1)
        counter = (position mod 2^32, position div 2^32, v div 4, 0)

`position` is the token's absolute index in prompt + completion, counted from 0. (Gumbel-max: Maddison, Tarlow and
Minka, "A* sampling", 2014.) The logarithms run in float64 because float32 ones differ between instruction sets.

Not covered: top-p and top-k (a run that wants them must ship the support mask), greedy decoding (T = 0).

Shape suffixes: N sampled tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verifier import compiled
from verifier.errors import VerifierError
from verifier.philox import philox4x32, word_rows

_TILE_VALUES = 1 << 17
"""Noise values made at once: keeps every intermediate in the processor's second cache and bounds memory."""

_LARGE = 1e4
"""Scores beyond it are compared one by one: a float32 is no longer fine enough for the slack below."""


def gumbel_noise(seeds: Sequence[bytes], positions: npt.ArrayLike, vocabulary: int) -> npt.NDArray[np.float32]:
    """The noise that decides N tokens.

    Args:
        seeds: N sampling seeds (`protocol.seeds.sampling_seed`), at least 8 bytes each.
        positions: N absolute token indices.
        vocabulary: V, the number of logits.

    Returns:
        float32 [N, V]. Equal on every machine up to one unit in the last place.

    Raises:
        VerifierError: not one position per seed, or an empty vocabulary.
    """
    key_N2, position_N = _counters(seeds, positions, vocabulary)
    noise_NV = np.empty((len(seeds), vocabulary), dtype=np.float32)
    for at, words_RV in _word_tiles(key_N2, position_N, vocabulary):
        noise_NV[at] = _gumbel(words_RV)
    return noise_NV


def _counters(
    seeds: Sequence[bytes], positions: npt.ArrayLike, vocabulary: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Philox's keys, [N, 2], and positions, [N]."""
    position_N = np.asarray(positions, dtype=np.uint64).reshape(-1)
    if len(seeds) != len(position_N) or vocabulary < 1:
        raise VerifierError(
            f"noise needs one position per seed and a vocabulary, got {len(seeds)} seeds, "
            f"{len(position_N)} positions and a vocabulary of {vocabulary}"
        )
    key_N2 = np.frombuffer(b"".join(seed[:8] for seed in seeds), dtype=">u4").reshape(-1, 2).astype(np.uint64)
    return key_N2, position_N


def _word_tiles(
    key_N2: npt.NDArray[np.uint64], position_N: npt.NDArray[np.uint64], vocabulary: int
) -> Iterator[tuple[slice, npt.NDArray[np.uint32]]]:
    """Rows, and the whole numbers x of each row's values, [R, V]; few enough rows to stay in a cache."""
    rows = max(1, _TILE_VALUES // vocabulary)
    for row in range(0, len(key_N2), rows):
        at = slice(row, min(row + rows, len(key_N2)))
        yield at, word_rows(key_N2[at], position_N[at], -(-vocabulary // 4))[:, :vocabulary]


def _words_at(
    key_N2: npt.NDArray[np.uint64], position_N: npt.NDArray[np.uint64], token_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """The whole number x of one value in each row."""
    low_N, high_N = position_N & np.uint64(0xFFFFFFFF), position_N >> np.uint64(32)
    four = philox4x32((low_N, high_N, token_N // 4, 0), (key_N2[:, 0], key_N2[:, 1]))
    return np.choose(token_N % 4, four)


def _gumbel(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """-log(-log1p(-u)) with u = (x + 0.5) / 2^32."""
    integers = words.astype(np.float64)
    integers += 0.5
    integers *= -(2.0**-32)
    np.log1p(integers, out=integers)
    np.negative(integers, out=integers)
    np.log(integers, out=integers)
    return np.negative(integers, out=integers)


def _scores(
    logits_NV: torch.Tensor, temperature: float, noise_NV: torch.Tensor | npt.NDArray[np.float32]
) -> torch.Tensor:
    if not temperature > 0:
        raise VerifierError(f"a temperature of {temperature} cannot be sampled; it must be above 0")
    noise = torch.from_numpy(noise_NV) if isinstance(noise_NV, np.ndarray) else noise_NV
    scaled_NV = logits_NV.float() if temperature == 1 else logits_NV.float() / temperature
    return scaled_NV + noise


def choose(
    logits_NV: torch.Tensor, temperature: float, noise_NV: torch.Tensor | npt.NDArray[np.float32]
) -> torch.Tensor:
    """The forced tokens: int64 [N]. Among equal scores the lowest id wins.

    Raises:
        VerifierError: the temperature is not above 0.
    """
    return _scores(logits_NV, temperature, noise_NV).argmax(dim=-1)


def margins(
    logits_NV: torch.Tensor,
    temperature: float,
    noise_NV: torch.Tensor | npt.NDArray[np.float32],
    tokens_N: torch.Tensor,
) -> torch.Tensor:
    """How far each claimed token is from being the forced one: best score - its score, float32 [N], 0 when it is.

    NaN when a logit is NaN.

    Raises:
        VerifierError: the temperature is not above 0.
    """
    scores_NV = _scores(logits_NV, temperature, noise_NV)
    return scores_NV.amax(dim=-1) - scores_NV.gather(-1, tokens_N[:, None]).squeeze(-1)


def replayed_margins(
    logits_NV: torch.Tensor,
    temperature: float,
    seeds: Sequence[bytes],
    positions: npt.ArrayLike,
    tokens_N: torch.Tensor,
) -> torch.Tensor:
    """`margins` of these rows' own noise, without making most of it: float32 [N].

    A value's score is above the claimed token's only if its noise is above the difference, that is if its whole number
    is below 2^32 exp(logit / T - claimed score). So the numbers of all are made, and the logarithms of the few that
    pass, one a row on the average where the claim is honest.

    Args:
        logits_NV: raw logits [N, V].
        seeds, positions: as `gumbel_noise` takes them.
        tokens_N: the claimed tokens, int64.

    Raises:
        VerifierError: see `gumbel_noise` and `margins`.
    """
    if not temperature > 0:
        raise VerifierError(f"a temperature of {temperature} cannot be sampled; it must be above 0")
    vocabulary = logits_NV.shape[1]
    key_N2, position_N = _counters(seeds, positions, vocabulary)
    scaled_NV = logits_NV.float() if temperature == 1 else logits_NV.float() / temperature
    claimed_N = scaled_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
    score_N = claimed_N + _noise(_words_at(key_N2, position_N, tokens_N.numpy()))
    # wider than whatever float32 rounds off here, in the sums and in what they are compared with
    least_N = score_N - (1e-3 + 1e-6 * score_N.abs())
    odd_N = ~(claimed_N.abs() < _LARGE)  # true of NaN, too
    best_N = score_N.clone()
    loop = compiled.loop("decisive", scaled_NV.numel())
    find = _by_numpy if loop is None else functools.partial(_in_one_pass, loop)
    for row_M, token_M, word_M in find(scaled_NV, key_N2, position_N, least_N, odd_N.numpy()):
        row, token = torch.from_numpy(row_M), torch.from_numpy(token_M)
        best_N.scatter_reduce_(0, row, scaled_NV[row, token] + _noise(word_M), "amax")
    margin_N = best_N - score_N
    odd = np.flatnonzero(odd_N.numpy())
    for at, words_RV in _word_tiles(key_N2[odd], position_N[odd], vocabulary):
        rows = torch.from_numpy(odd[at])
        margin_N[rows] = margins(logits_NV[rows], temperature, _noise(words_RV), tokens_N[rows])
    return margin_N


def _noise(words: npt.NDArray[np.uint32]) -> torch.Tensor:
    return torch.from_numpy(_gumbel(words).astype(np.float32))


_Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Rows and columns of values that may lie above their rows' bounds, and their whole numbers."""


def _by_numpy(
    scaled_NV: torch.Tensor,
    key_N2: npt.NDArray[np.uint64],
    position_N: npt.NDArray[np.uint64],
    least_N: torch.Tensor,
    odd_N: npt.NDArray[np.bool_],
) -> Iterator[_Found]:
    """What may reach `least_N` once noise is added; rows with a large logit, or one that is no number, become odd."""
    for at, words_RV in _word_tiles(key_N2, position_N, scaled_NV.shape[1]):
        scaled_RV = scaled_NV[at]
        odd_N[at] |= ~(scaled_RV.amax(dim=-1) < _LARGE).numpy()
        least_R = least_N[at].masked_fill(torch.from_numpy(odd_N[at]), math.inf)
        bound_RV = (scaled_RV - least_R[:, None]).exp_().mul_(2.0**32).numpy()
        row_M, token_M = np.divmod(np.flatnonzero(words_RV.astype(np.float32) <= bound_RV), words_RV.shape[1])
        yield row_M + at.start, token_M, words_RV[row_M, token_M]


_ROOM = 4096
"""Values found that are looked at together, beside one whole row's."""


def _in_one_pass(
    loop: Any,
    scaled_NV: torch.Tensor,
    key_N2: npt.NDArray[np.uint64],
    position_N: npt.NDArray[np.uint64],
    least_N: torch.Tensor,
    odd_N: npt.NDArray[np.bool_],
) -> Iterator[_Found]:
    """The same by `kernels.LOOPS["decisive"]`."""
    logits_NV = np.ascontiguousarray(scaled_NV.numpy())
    with np.errstate(all="ignore"):
        edge_N = ((159.0 - least_N.double().numpy() / math.log(2.0)) * 2.0**23).astype(np.float32)
    room = scaled_NV.shape[1] + _ROOM
    row_M, token_M, word_M = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint32)
    found_odd_N = np.zeros(len(odd_N), dtype=np.bool_)
    row = 0
    while row < len(logits_NV):
        row, found = loop(logits_NV, key_N2, position_N, edge_N, _LARGE, row, row_M, token_M, word_M, found_odd_N)
        yield row_M[:found], token_M[:found], word_M[:found]
    odd_N |= found_odd_N
