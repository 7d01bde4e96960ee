"""A prefill that runs in blocks and stops reading a rollout at its first hard failure (RULES 6).

Sending garbage costs its sender nothing, and reading all of it would cost a validator a whole prefill. So rollouts
of more than `BLOCK` sampled tokens are read block by block, each going on from the keys and values that the blocks
before it left; whoever runs the checks says after each block which rollouts still stand, and the others are dropped
from the batch. Garbage of any length then costs one block. Each block reads as much as all before it together: what
turns bad later costs at most twice what was good, and a long honest rollout is few blocks. Shorter rollouts are read at
once.

All rows of a batch stand at the same position, so no padding lies between a row's tokens: a block's states are those
of one pass over everything, but for rounding far below the thresholds.

Not covered: what the checks are (`checks`), logits (`model`).

Shape suffixes: B batch, T tokens of one block, N sampled tokens of one rollout in it, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from verifier.model import PolicyModel, Sampled

BLOCK = 256
"""Sampled tokens of the first block, and of the longest rollout that is read at once. A larger one makes garbage
dearer to refute, a smaller one slows long honest rollouts; what is accepted does not depend on it. Validators and
audits must use the same: it decides which of several faults of one rollout is found first."""

_CACHED_TOKENS = 8_192
"""Padded tokens of a batch whose keys and values are kept (SmolLM2-135M: 46 KB each, 380 MB). Only memory and speed
change with it."""

Piece = tuple[int, int, torch.Tensor]
"""Position in `sequences`, first sampled token, states [N, H] in the model's dtype."""


def states_in_blocks(
    policy: PolicyModel, sequences: Sequence[Sampled], stands: Callable[[int], bool]
) -> Iterator[list[Piece]]:
    """The final-norm states that produced each sampled token, a block at a time.

    Args:
        sequences: prompt and sampled ids of each rollout, within the model's context.
        stands: asked about each rollout of a block after the block was taken; False ends its reading.

    Yields:
        One block of one batch. A rollout's blocks come in order and without gaps; every block but its last begins and
        ends at a multiple of 32 sampled tokens, the length of a proof chunk.

    Raises:
        VerifierError: see `PolicyModel.states`.
    """
    short = [i for i, (_, tokens) in enumerate(sequences) if len(tokens) <= BLOCK]
    for batch in policy.states([sequences[i] for i in short]):
        yield [(short[i], 0, states_NH) for i, states_NH in batch]
    for members in _batches(sequences, set(range(len(sequences))) - set(short)):
        yield from _read(policy, sequences, members, stands)


def _batches(sequences: Sequence[Sampled], long: set[int]) -> Iterator[list[int]]:
    """Long rollouts in batches of similar length."""
    members: list[int] = []
    for i in sorted(long, key=lambda i: (len(sequences[i][0]) + len(sequences[i][1]), i)):
        length = len(sequences[i][0]) + len(sequences[i][1])
        if members and (len(members) + 1) * length > _CACHED_TOKENS:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


def _read(
    policy: PolicyModel, sequences: Sequence[Sampled], members: list[int], stands: Callable[[int], bool]
) -> Iterator[list[Piece]]:
    """One batch from its first block to its last, or until nobody stands."""
    cache = transformers.DynamicCache(config=policy.model.config)
    done = dict.fromkeys(members, 0)
    """Sampled tokens of each rollout that were handed out."""
    held: dict[int, torch.Tensor] = {}
    """States behind the last whole proof chunk, kept for the next block."""
    base, width = max(len(sequences[i][0]) for i in members) - 1, BLOCK
    start, end = 0, base + width
    while members:
        states_BTH = _forward(policy, cache, sequences, members, start, end)
        pieces: list[Piece] = []
        for row, i in enumerate(members):
            prompt, tokens = sequences[i]
            first, last = len(prompt) - 1, len(prompt) + len(tokens) - 1  # positions whose states produced a token
            fresh_NH = states_BTH[row, max(0, first - start) : last - start]
            states_NH = torch.cat([held.pop(i), fresh_NH]) if i in held else fresh_NH
            whole = len(states_NH) if end >= last else len(states_NH) // 32 * 32
            if whole < len(states_NH):
                held[i] = states_NH[whole:].clone()
            pieces.append((i, done[i], states_NH[:whole]))
            done[i] += whole
        yield pieces
        kept = [row for row, i in enumerate(members) if done[i] < len(sequences[i][1]) and stands(i)]
        if len(kept) < len(members):
            members = [members[row] for row in kept]
            if members:
                with torch.inference_mode():
                    cache.batch_select_indices(torch.tensor(kept))
        width *= 2
        start, end = end, base + width


@torch.inference_mode()
def _forward(
    policy: PolicyModel,
    cache: transformers.DynamicCache,
    sequences: Sequence[Sampled],
    members: list[int],
    start: int,
    end: int,
) -> torch.Tensor:
    """Final-norm states [B, T, H] of positions `start` to `end`, padded on the right where a rollout is over."""
    end = min(end, max(len(sequences[i][0]) + len(sequences[i][1]) - 1 for i in members))
    ids_BT = np.zeros((len(members), end - start), dtype=np.int64)
    for row, i in enumerate(members):
        prompt, tokens = sequences[i]
        ids = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(tokens, dtype=np.int64)[:-1]])[start:end]
        ids_BT[row, : len(ids)] = ids
    kept = {_cache_argument(policy.model.model): cache}
    states_BTH: torch.Tensor = policy.model.model(
        input_ids=torch.from_numpy(ids_BT), use_cache=True, **kept
    ).last_hidden_state
    return states_BTH


def _cache_argument(model: Any) -> str:
    """The name Transformers gives the cache argument: `cache`, before 5.20 or so `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
