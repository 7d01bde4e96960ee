"""The prefill of a mixture-of-experts model over the experts that rollouts say they went through.

What `blocks` is for dense models: batches of rollouts of similar length, read 256 sampled tokens at first and then as
many as were read before, each rollout no further than the block after which it no longer stands. Each token goes
through the claimed experts as long as the claim falls short by no more than the margin (`routes`). The largest
shortfall of what was read is kept with the rollout, and how many of its choices are not the verifier's own.

Rollouts share a prompt's pass when prompt and claimed routes are equal. Memory is bounded by one batch.

Not covered: what follows from a shortfall (`checks.routes`).

Shape suffixes: B rows, L new columns, C columns so far, P positions, Y expert layers, K experts per token, N sampled
tokens of one rollout in a block, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verifier import blocks, fused
from verifier.blocks import Piece
from verifier.errors import VerifierError
from verifier.model import PolicyModel, Prefilled

_CACHED_TOKENS = 8_192
"""Padded tokens of a batch whose keys and values are kept. Only memory and speed change with it."""


@dataclass
class Routed:
    """One rollout: its prompt's and sampled ids, and the routes [P, Y, K] of all of them but the last.

    shortfall, position, layer: the largest of what was read so far and where it comes first (position counts from the
    prompt's begin); 0 where all claimed experts are the model's own choice. not_first: choices, a position and layer
    each, that are not.
    """

    prompt: tuple[int, ...]
    tokens: npt.NDArray[np.int64]
    routes_PYK: npt.NDArray[Any]
    shortfall: float = 0.0
    position: int = 0
    layer: int = 0
    not_first: int = 0

    @property
    def positions(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def choices(self) -> int:
        """Positions times layers."""
        return self.positions * int(self.routes_PYK.shape[1])

    def note(self, shortfall: float, position: int, layer: int, not_first: int) -> None:
        """Keep the larger shortfall and count what is new."""
        self.not_first += not_first
        if shortfall > self.shortfall:
            self.shortfall, self.position, self.layer = shortfall, position, layer


def states_in_blocks(
    policy: PolicyModel, rollouts: Sequence[Routed], margin: float, stands: Callable[[int], bool]
) -> Iterator[list[Piece]]:
    """The final-norm states that produced each sampled token, a block at a time; see `blocks.states_in_blocks`.

    Args:
        margin: the largest shortfall of a claim that is followed.
        stands: asked about each rollout of a block after the block was taken; False ends its reading.

    Raises:
        VerifierError: a rollout without prompt or sampled tokens, or longer than the model's context; routes of
            another length than the rollout's.
    """
    if policy.experts is None:
        raise VerifierError("this policy has no experts: read its rollouts with `blocks`")
    for rollout in rollouts:
        if not rollout.prompt or not len(rollout.tokens) or rollout.positions > policy.max_context:
            raise VerifierError(f"a rollout of {rollout.positions + 1} tokens does not fit {policy.max_context}")
        if len(rollout.routes_PYK) != rollout.positions:
            raise VerifierError(f"routes of {len(rollout.routes_PYK)} positions for {rollout.positions}")
    for members in _batches(rollouts):
        yield from _read(policy, rollouts, members, margin, stands)


def prefill(policy: PolicyModel, rollouts: Sequence[Routed], margin: float, batch: int = 32) -> list[Prefilled]:
    """States and logits of every sampled token, in the order given, at most `batch` rollouts side by side. Holds all
    logits; see `PolicyModel.prefill`.

    Raises:
        VerifierError: see `states_in_blocks`.
    """
    out: list[Prefilled] = []
    for begin in range(0, len(rollouts), batch):
        beside = rollouts[begin : begin + batch]
        parts: list[list[torch.Tensor]] = [[] for _ in beside]
        for pieces in states_in_blocks(policy, beside, margin, lambda _: True):
            for i, _, states_NH in pieces:
                parts[i].append(states_NH)
        for part in parts:
            states_NH = torch.cat(part)
            out.append(Prefilled(states_NH.float().numpy(), policy.logits(states_NH).numpy()))
    return out


def _batches(rollouts: Sequence[Routed]) -> Iterator[list[int]]:
    """Rollouts in batches of similar length."""
    members: list[int] = []
    for i in sorted(range(len(rollouts)), key=lambda i: (rollouts[i].positions, i)):
        if members and (len(members) + 1) * rollouts[i].positions > _CACHED_TOKENS:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


def _read(
    policy: PolicyModel, rollouts: Sequence[Routed], members: list[int], margin: float, stands: Callable[[int], bool]
) -> Iterator[list[Piece]]:
    """One batch from its first block to its last, or until nobody stands."""
    keys: dict[tuple[tuple[int, ...], bytes], int] = {}
    rows = [
        keys.setdefault((one.prompt, one.routes_PYK[: len(one.prompt)].tobytes()), len(keys))
        for one in (rollouts[i] for i in members)
    ]
    padded = fused.Prompts.of([prompt for prompt, _ in keys])
    ids_BL, positions_BL = padded.ids_BL[padded.rows], padded.positions_BL[padded.rows]
    real_BC = None if padded.real_BL is None else padded.real_BL[padded.rows]
    width = ids_BL.shape[1]
    going = fused.start(policy.model, width + max(len(rollouts[i].tokens) for i in members) - 1)
    sharing: list[list[int]] = [[] for _ in keys]
    for i, row in zip(members, rows, strict=True):
        sharing[row].append(i)
    spans = [(len(rollouts[ids[0]].prompt), 0) for ids in sharing]
    first_BH = _run(policy, going, rollouts, sharing, (ids_BL, positions_BL, real_BC), spans, margin)[:, -1]
    kept_B = torch.tensor(rows)
    going.select(kept_B)
    first_B1H, begins_B1 = first_BH[kept_B][:, None], positions_BL[kept_B, -1:] + 1
    real_BC = None if real_BC is None else real_BC[kept_B]
    at, block = 0, blocks.BLOCK
    while members:
        # A token was drawn from the state of the token before it, the first one from the prompt's last.
        end = min(at + block, max(len(rollouts[i].tokens) for i in members))
        since = max(0, at - 1)
        states_BLH = first_B1H
        if end - 1 > since:
            ids = np.zeros((len(members), end - 1 - since), dtype=np.int64)
            for row, i in enumerate(members):
                tokens = rollouts[i].tokens[since : end - 1]
                ids[row, : len(tokens)] = tokens
            if real_BC is not None:
                real_BC = torch.cat([real_BC, real_BC.new_ones(ids.shape)], dim=1)
            columns = torch.from_numpy(ids), begins_B1 + torch.arange(since, end - 1), real_BC
            spans = [
                (max(0, min(end, len(rollouts[i].tokens)) - 1 - since), len(rollouts[i].prompt) + since)
                for i in members
            ]
            states_BLH = _run(policy, going, rollouts, [[i] for i in members], columns, spans, margin)
            if at == 0:
                states_BLH = torch.cat([first_B1H, states_BLH], dim=1)
        yield [(i, at, states_BLH[row, : len(rollouts[i].tokens) - at]) for row, i in enumerate(members)]
        kept = [row for row, i in enumerate(members) if end < len(rollouts[i].tokens) and stands(i)]
        if len(kept) < len(members):
            members = [members[row] for row in kept]
            going.select(torch.tensor(kept, dtype=torch.long))
            begins_B1 = begins_B1[kept]
            real_BC = None if real_BC is None else real_BC[kept]
        at, block = end, end


def _run(
    policy: PolicyModel,
    going: fused.Pass,
    rollouts: Sequence[Routed],
    sharing: Sequence[Sequence[int]],
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    spans: Sequence[tuple[int, int]],
    margin: float,
) -> torch.Tensor:
    """One pass over new columns, each row through the experts its rollouts claim.

    Args:
        sharing: of each row the rollouts it stands for, whose claims are the same there.
        columns: ids, positions and padding as `Pass.run` takes them.
        spans: of each row how many of its columns are real, and the position of the first of these. Prompts are
            padded on the left, so theirs come last; sampled tokens come first.
    """
    experts = policy.experts
    assert experts is not None
    ids_BL, _, _ = columns
    prompts = going.columns == 0
    claimed_BLYK = experts.empty(*ids_BL.shape)
    claimed_BLYK[...] = 0
    real_BL = np.zeros(ids_BL.shape, dtype=np.bool_)
    offsets = []
    for row, (ids, (count, position)) in enumerate(zip(sharing, spans, strict=True)):
        first = ids_BL.shape[1] - count if prompts else 0
        claimed_BLYK[row, first : first + count] = rollouts[ids[0]].routes_PYK[position : position + count]
        real_BL[row, first : first + count] = True
        offsets.append(position - first)
    with experts.replayed(claimed_BLYK, real_BL, margin) as replay:
        states_BLH = going.run(*columns)
    found = (*replay.worst(), replay.not_first())
    for ids, offset, shortfall, column, layer, others in zip(
        sharing, offsets, *(one.tolist() for one in found), strict=True
    ):
        for i in ids:
            rollouts[i].note(shortfall, column + offset, layer, others)
    return states_BLH
