"""A prefill that runs in blocks and stops reading a rollout at its first hard failure (RULES 6).

Sending garbage costs its sender nothing, and reading all of it would cost a validator a whole prefill. So rollouts
of more than `BLOCK` sampled tokens are read block by block, each going on from the keys and values that the blocks
before it left; whoever runs the checks says after each block which rollouts still stand, and the others are dropped
from the batch. Garbage of any length then costs one block. Each block reads as much as all before it together: what
turns bad later costs at most twice what was good, and a long honest rollout is few blocks. Shorter rollouts are read at
once.

A rollout's states are those of one pass over everything, but for rounding far below the thresholds.

Not covered: what the checks are (`checks`), the forward pass (`fused`), logits (`model`).

Shape suffixes: B rows, L new columns, C columns so far, N sampled tokens of one rollout in a block, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from verifier import fused
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
    prompts = fused.Prompts.of([tuple(int(token) for token in sequences[i][0]) for i in members])
    longest = max(len(sequences[i][1]) for i in members)
    going = fused.start(policy.model, prompts.ids_BL.shape[1] + longest - 1)
    first_B1H = going.run(prompts.ids_BL, prompts.positions_BL, prompts.real_BL)[:, -1:][prompts.rows]
    going.select(prompts.rows)
    begins_B1 = prompts.positions_BL[prompts.rows, -1:] + 1
    real_BC = None if prompts.real_BL is None else prompts.real_BL[prompts.rows]
    at, width = 0, BLOCK
    while members:
        # A token was drawn from the state of the token before it, the first one from the prompt's last.
        end = min(at + width, max(len(sequences[i][1]) for i in members))
        since = max(0, at - 1)
        ids_BL = np.zeros((len(members), end - 1 - since), dtype=np.int64)
        for row, i in enumerate(members):
            tokens = sequences[i][1][since : end - 1]
            ids_BL[row, : len(tokens)] = tokens
        if real_BC is not None:
            real_BC = torch.cat([real_BC, real_BC.new_ones(ids_BL.shape)], dim=1)
        states_BLH = going.run(torch.from_numpy(ids_BL), begins_B1 + torch.arange(since, end - 1), real_BC)
        if at == 0:
            states_BLH = torch.cat([first_B1H, states_BLH], dim=1)
        yield [(i, at, states_BLH[row, : len(sequences[i][1]) - at]) for row, i in enumerate(members)]
        kept = [row for row, i in enumerate(members) if end < len(sequences[i][1]) and stands(i)]
        if len(kept) < len(members):
            members = [members[row] for row in kept]
            going.select(torch.tensor(kept, dtype=torch.long))
            begins_B1 = begins_B1[kept]
            real_BC = None if real_BC is None else real_BC[kept]
        at, width = end, end
