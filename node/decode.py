"""Batched decoding with a key-value cache over a Transformers causal language model, with forced tokens.

One call takes rollouts of one policy and returns, for each, its sampled tokens, their log-probabilities and the
final-norm state that produced each of them (what TOPLOC commits to), all from the same forward passes.

    shared prompts    each distinct prompt is prefilled once and its cache rows are copied to its rollouts
    padding           prompts are padded on the left, so all rows write their next token at the same column
    finished rows     leave the batch at once; the others' numbers do not depend on who is beside them beyond
                      float32 rounding (about 1e-6), which the run's calibrated thresholds cover
    tokens            argmax(logits / T + Gumbel noise), the noise a function of (seed, absolute position, token)

    experts           where the model has any, which ones each token went through, prompts' tokens included

Not covered: paged caches, speculative decoding, weight updates in flight.

Shape suffixes: B rows alive, L prompt columns, C columns so far, H hidden, V vocabulary, N sampled tokens, S steps of
noise ahead, P positions, Y expert layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import EngineError
from protocol.records import FINISH_EOS, FINISH_LENGTH
from verifier import fused
from verifier.logprobs import token_logprobs
from verifier.routes import Experts, Recording
from verifier.sampling import choose, gumbel_noise

BATCH_ROWS = 128
"""Rows decoded together. Only speed and memory change with it."""

_NOISE_VALUES = 1 << 18
"""Noise values computed ahead in one call: small vocabularies pay the call once for many steps."""


@dataclass(frozen=True)
class DecodeRequest:
    """One rollout to sample."""

    prompt: tuple[int, ...]
    seed: bytes
    max_new_tokens: int


@dataclass(frozen=True)
class Decoded:
    """One sampled rollout.

    tokens: N ids, the stop token included. logprobs: float32 [N]. states_NH: float32 [N, H], row i is the
    final-norm state whose logits token i was drawn from. finish: FINISH_EOS or FINISH_LENGTH. routes: the wire form of
    the experts of the prompt's and the sampled tokens but the last; empty for a dense model.
    """

    tokens: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    states_NH: npt.NDArray[np.float32]
    finish: int
    routes: bytes = b""


class GenerationCancelledError(EngineError):
    """The caller went away before the tokens were made."""


def decode(
    model: Any,
    requests: Sequence[DecodeRequest],
    *,
    temperature: float,
    stop_tokens: Sequence[int],
    cancelled: Callable[[], bool] = lambda: False,
    batch_rows: int = BATCH_ROWS,
) -> list[Decoded]:
    """Sample every request, in the order given.

    Args:
        model: a Transformers `...ForCausalLM` in eval mode, with `.model` (returning the final-norm state as
            `last_hidden_state`) and `.lm_head`.
        temperature: above 0; the run's.
        stop_tokens: ids that end a rollout; the id itself is part of it.
        cancelled: asked before each forward pass.

    Raises:
        GenerationCancelledError: `cancelled` said so.
    """
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].prompt))
    results: list[Decoded | None] = [None] * len(requests)
    for start in range(0, len(order), batch_rows):
        rows = order[start : start + batch_rows]
        batch = _Batch(model, [requests[i] for i in rows], temperature, stop_tokens)
        for i, decoded in zip(rows, batch.run(cancelled), strict=True):
            results[i] = decoded
    return [r for r in results if r is not None]


class _Batch:
    """Rows that are decoded side by side until each has ended."""

    def __init__(
        self, model: Any, requests: list[DecodeRequest], temperature: float, stop_tokens: Sequence[int]
    ) -> None:
        self._model = model
        self._requests = requests
        self._temperature = temperature
        self._stop = np.asarray(sorted(stop_tokens), dtype=np.int64)
        self._vocab = int(model.config.vocab_size)

    def run(self, cancelled: Callable[[], bool]) -> list[Decoded]:
        experts = Experts.of(self._model)
        if experts is None:
            return self._run(cancelled, None)
        with experts.recorded() as recording:
            routes = _Routes(experts, recording, self._requests)
            return [
                replace(decoded, routes=routes.of(row, len(decoded.tokens)))
                for row, decoded in enumerate(self._run(cancelled, routes))
            ]

    @torch.inference_mode()
    def _run(self, cancelled: Callable[[], bool], routes: _Routes | None) -> list[Decoded]:
        requests = self._requests
        limits = np.asarray([r.max_new_tokens for r in requests])
        longest = int(limits.max())
        going = fused.start(self._model, max(len(r.prompt) for r in requests) + longest)
        state_BH, real_BC, position_B = self._prefill(going, cancelled, routes)
        # Untouched pages of these arrays cost no memory, so a cap far above the usual length is free.
        tokens = np.empty((len(requests), longest), dtype=np.int64)
        logprobs = np.empty((len(requests), longest), dtype=np.float32)
        states = np.empty((len(requests), longest, state_BH.shape[-1]), dtype=np.float32)
        lengths = np.zeros(len(requests), dtype=np.int64)
        alive = np.arange(len(requests))
        noise_BSV, noise_from = torch.empty(0, 0, 0), 0
        for step in range(longest):
            if step - noise_from >= noise_BSV.shape[1]:
                noise_BSV, noise_from = self._noise(alive, step, longest), step
            logits_BV = self._model.lm_head(state_BH).float()
            next_B = choose(logits_BV, self._temperature, noise_BSV[:, step - noise_from])
            ids_B = next_B.numpy()
            tokens[alive, step] = ids_B
            logprobs[alive, step] = token_logprobs(logits_BV, next_B, self._temperature).numpy()
            states[alive, step] = state_BH.float().numpy()
            lengths[alive] = step + 1
            keep_B = ~_is_any(ids_B, self._stop) & (step + 1 < limits[alive])
            if not keep_B.any():
                break
            if not keep_B.all():
                kept = torch.from_numpy(np.flatnonzero(keep_B))
                going.select(kept)
                alive, noise_BSV, next_B, position_B = alive[keep_B], noise_BSV[kept], next_B[kept], position_B[kept]
                real_BC = None if real_BC is None else real_BC[kept]
            if real_BC is not None:
                real_BC = torch.cat([real_BC, real_BC.new_ones(len(alive), 1)], dim=1)
            position_B = position_B + 1
            _check(cancelled)
            state_BH = going.run(next_B[:, None], position_B[:, None], real_BC)[:, -1]
            if routes is not None:
                routes.sampled(alive, step)
        return [
            Decoded(
                tuple(tokens[row, :n].tolist()),
                logprobs[row, :n].copy(),
                states[row, :n].copy(),
                FINISH_EOS if tokens[row, n - 1] in self._stop else FINISH_LENGTH,
            )
            for row, n in enumerate(lengths)
        ]

    def _prefill(
        self, going: fused.Pass, cancelled: Callable[[], bool], routes: _Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Run each distinct prompt once; return every row's last state, its padding (None: none), its position."""
        _check(cancelled)
        prompts = fused.Prompts.of([r.prompt for r in self._requests])
        states_BH = going.run(prompts.ids_BL, prompts.positions_BL, prompts.real_BL)[:, -1]
        if routes is not None:
            routes.prompts(prompts)
        going.select(prompts.rows)
        real_BC = None if prompts.real_BL is None else prompts.real_BL[prompts.rows]
        return states_BH[prompts.rows], real_BC, prompts.positions_BL[prompts.rows, -1]

    def _noise(self, alive: npt.NDArray[np.int64], step: int, longest: int) -> torch.Tensor:
        """Noise of the next S steps for the rows alive: float32 [B, S, V]."""
        ahead = max(1, min(longest - step, _NOISE_VALUES // (len(alive) * self._vocab)))
        seeds = [self._requests[row].seed for row in alive for _ in range(ahead)]
        first_B = np.asarray([len(self._requests[row].prompt) for row in alive]) + step
        positions = (first_B[:, None] + np.arange(ahead)[None, :]).reshape(-1)
        noise_NV = np.asarray(gumbel_noise(seeds, positions, self._vocab))
        return torch.from_numpy(noise_NV.reshape(len(alive), ahead, self._vocab))


class _Routes:
    """The experts of a batch's tokens, as they are recorded."""

    def __init__(self, experts: Experts, recording: Recording, requests: list[DecodeRequest]) -> None:
        self._experts, self._recording, self._requests = experts, recording, requests
        # Untouched pages cost no memory here either.
        self._sampled = experts.empty(len(requests), max(r.max_new_tokens for r in requests))
        self._prompts = experts.empty(0, 0)
        self._rows: list[int] = []

    def prompts(self, prompts: fused.Prompts) -> None:
        """After the pass over the distinct prompts, which are padded on the left."""
        self._prompts, self._rows = self._recording.take(len(prompts.ids_BL)), prompts.rows.tolist()

    def sampled(self, alive: npt.NDArray[np.int64], step: int) -> None:
        """After the pass over the tokens that the rows alive sampled in this step."""
        self._sampled[alive, step] = self._recording.take(len(alive))[:, 0]

    def of(self, row: int, tokens: int) -> bytes:
        """The wire form for one rollout of so many sampled tokens."""
        first = self._prompts.shape[1] - len(self._requests[row].prompt)
        prompt_PYK = self._prompts[self._rows[row], first:]
        return self._experts.encode(np.concatenate([prompt_PYK, self._sampled[row, : tokens - 1]]))


def _is_any(ids_B: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (ids_B[:, None] == stop[None, :]).any(axis=1)
    return found


def _check(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise GenerationCancelledError("generation was cancelled: whoever asked for it is gone")
