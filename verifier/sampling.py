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

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from verifier.errors import VerifierError
from verifier.philox import philox4x32

_TILE_VALUES = 1 << 17
"""Noise values made at once: keeps every intermediate in the processor's second cache and bounds memory. Smaller ones
pay more for numpy's 150 calls a tile: 34 ns a value at 1 << 15, 26 at 1 << 17 (vocabulary 49,152)."""


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
    position_N = np.asarray(positions, dtype=np.uint64).reshape(-1)
    if len(seeds) != len(position_N) or vocabulary < 1:
        raise VerifierError(
            f"noise needs one position per seed and a vocabulary, got {len(seeds)} seeds, "
            f"{len(position_N)} positions and a vocabulary of {vocabulary}"
        )
    count = len(seeds)
    key_N2 = np.frombuffer(b"".join(seed[:8] for seed in seeds), dtype=">u4").reshape(count, 2).astype(np.uint64)
    blocks = -(-vocabulary // 4)
    noise_NV = np.empty((count, vocabulary), dtype=np.float32)
    rows = max(1, _TILE_VALUES // (4 * blocks))
    width = min(blocks, _TILE_VALUES // 4)
    low_N, high_N = position_N & np.uint64(0xFFFFFFFF), position_N >> np.uint64(32)
    for row in range(0, count, rows):
        at = slice(row, min(row + rows, count))
        key = key_N2[at, :1], key_N2[at, 1:]
        for block in range(0, blocks, width):
            index = np.arange(block, min(block + width, blocks), dtype=np.uint64)[None, :]
            words = philox4x32((low_N[at, None], high_N[at, None], index, np.uint64(0)), key)
            integers = np.stack(words, axis=-1).reshape(len(words[0]), -1)
            noise = _gumbel(integers.astype(np.float64))
            columns = min(4 * (block + index.shape[1]), vocabulary) - 4 * block
            noise_NV[at, 4 * block : 4 * block + columns] = noise[:, :columns]
    return noise_NV


def _gumbel(integers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-log(-log1p(-u)) with u = (x + 0.5) / 2^32, in place."""
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
    return logits_NV.float() / temperature + noise


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
