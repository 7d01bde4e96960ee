"""One optimiser step on one batch: advantages, forward, loss, gradient, AdamW.

One batch, one update. Groups without variance teach nothing and are not even run; sequences with numbers that are
not finite are dropped and counted; the mean is over the sampled tokens of what is left.

Not covered: where batches come from (`trainer.incoming`), when to save (`trainer.learner`).
Shapes: N sampled tokens of the batch, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer import forward, metrics
from trainer.advantages import group_advantages
from trainer.config import LearnerSection
from trainer.errors import TrainerError
from trainer.incoming import Sequence, TrainingBatch
from trainer.losses import two_sided, two_sided_masked

MICRO_BATCH_VALUES = 1 << 23
"""Bound on padded tokens x hidden size x layers of one forward pass: about 1.5 GB of activations. More batches give the
same gradient up to rounding; changing it changes the low bits of every weight."""

NOTHING_LEARNED: dict[str, Any] = dict.fromkeys(
    ("loss", "entropy", "masked_share", "ratio_max", "mismatch_kl", "effective_sample_size", "grad_norm")
) | {"update_skipped": False}
"""The row of a batch in which no group had variance: every row has the same keys."""


@dataclass
class Policy:
    """The model being trained, its optimiser, and how its weights are stored.

    storage: tensor name -> dtype, in the layout that the run's manifest names.
    step: the policy's number; batch `step` trains it into step + 1.
    """

    model: Any
    settings: LearnerSection
    storage: Mapping[str, torch.dtype]
    temperature: float
    step: int = 0

    def __post_init__(self) -> None:
        self.named = dict(self.model.named_parameters())
        first, second = self.settings.betas
        self.optimizer = torch.optim.AdamW(
            self.named.values(),
            lr=self.settings.learning_rate,
            betas=(first, second),
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """What is published: parameters and buffers in storage dtypes."""
        state = self.model.state_dict()
        return {name: state[name].detach().to(dtype) for name, dtype in sorted(self.storage.items())}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """All that `weights` does not say: moments, and parameters that storage rounds."""
        tensors = {}
        for name, parameter in self.named.items():
            if self.storage.get(name) != parameter.dtype:
                tensors[f"full.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], step: int) -> None:
        """Become exactly what was saved.

        Raises:
            TrainerError: tensors of another model.
        """
        self.adopt(weights)
        with torch.no_grad():
            for key, value in optimizer.items():
                kind, _, name = key.partition(".")
                if name not in self.named:
                    raise TrainerError(f"the saved optimiser has a tensor {key!r} that this model has not")
                if kind == "full":
                    self.named[name].copy_(value)
                else:
                    self.optimizer.state[self.named[name]][kind] = value.clone()
        self.step = step

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take published weights over. Where ours round to them already, our extra digits stay."""
        state = self.model.state_dict()
        if weights.keys() != self.storage.keys():
            raise TrainerError("the saved weights have other tensors than this run's model")
        with torch.no_grad():
            for name, published in weights.items():
                own = state[name]
                own.copy_(torch.where(own.to(published.dtype) == published, own, published.to(own.dtype)))

    def learn(self, batch: TrainingBatch) -> dict[str, Any]:
        """One update; returns what happened, for the metrics."""
        sequences = batch.sequences
        advantages = group_advantages([s.group for s in sequences], [s.reward for s in sequences])
        chosen = [
            (sequence, float(advantages.values_B[i]))
            for i, sequence in enumerate(sequences)
            if advantages.keep_B[i] and sequence.finite
        ]
        row: dict[str, Any] = {
            "reward_mean": sum(s.reward for s in sequences) / len(sequences),
            "rollouts": len(sequences),
            "groups": advantages.groups,
            "groups_trained": advantages.groups_kept,
            "dropped_non_finite": sum(not s.finite for s in sequences),
            "tokens": sum(len(s.tokens) for s, _ in chosen),
            "tokens_mean": sum(len(s.tokens) for s in sequences) / len(sequences),
            "learning_rate": self._set_rate(),
            **metrics.staleness_statistics(s.staleness for s in sequences),
        }
        row |= NOTHING_LEARNED
        if chosen:
            row |= self._gradient(chosen, row["tokens"])
            row["dropped_non_finite"] += row.pop("dropped_in_forward")
        if row["loss"] is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.settings.grad_norm)
            row["grad_norm"] = float(norm)
            row["update_skipped"] = not bool(torch.isfinite(norm))
            if not row["update_skipped"]:
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.step += 1
        return row

    def _set_rate(self) -> float:
        settings = self.settings
        rate = settings.learning_rate * min(1.0, (self.step + 1) / max(1, settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _gradient(self, chosen: list[tuple[Sequence, float]], tokens: int) -> dict[str, Any]:
        """Accumulate the batch's gradient; returns loss and statistics."""
        settings = self.settings
        region = {"clip_low": settings.clip_low, "clip_high": settings.clip_high, "ratio_cap": settings.ratio_cap}
        self.model.train()
        total, dropped = 0.0, 0
        parts: list[tuple[torch.Tensor, ...]] = []
        for micro in self._micro_batches(chosen):
            kept, logprobs_N, entropy_N = self._forward(micro)
            dropped += len(micro) - len(kept)
            if not kept:
                continue
            behaviour_N = torch.cat([torch.tensor(s.behaviour) for s, _ in kept])
            advantages_N = torch.cat([torch.full((len(s.tokens),), advantage) for s, advantage in kept])
            loss = two_sided(logprobs_N, behaviour_N, advantages_N, tokens=tokens, **region)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            masked_N = two_sided_masked(logprobs_N, behaviour_N, advantages_N, **region)
            parts.append((logprobs_N.detach(), behaviour_N, entropy_N, masked_N))
        if not parts:
            return {"dropped_in_forward": dropped, "tokens": 0}
        logprobs_N, behaviour_N, entropy_N, masked_N = (torch.cat(column) for column in zip(*parts, strict=True))
        if len(logprobs_N) != tokens:
            # The divisor counted sequences that the forward pass then dropped: the mean is over what is left.
            total *= tokens / len(logprobs_N)
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad *= tokens / len(logprobs_N)
        return {
            "loss": total,
            "tokens": len(logprobs_N),
            "entropy": float(entropy_N.mean()),
            "masked_share": float(masked_N.float().mean()),
            "dropped_in_forward": dropped,
            **metrics.ratio_statistics(logprobs_N, behaviour_N),
        }

    def _forward(
        self, chosen: list[tuple[Sequence, float]]
    ) -> tuple[list[tuple[Sequence, float]], torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [N] of the sequences whose numbers are finite, and which those are."""
        packed = forward.pack([(s.prompt, s.tokens) for s, _ in chosen])
        logprobs_N, entropy_N = forward.logprobs_of(self.model, packed, self.temperature)
        finite = [bool(torch.isfinite(part).all()) for part in torch.split(logprobs_N.detach(), list(packed.lengths))]
        if all(finite):
            return chosen, logprobs_N, entropy_N
        kept = [pair for pair, good in zip(chosen, finite, strict=True) if good]
        # The pass is repeated without them: a masked NaN still makes every gradient NaN.
        return self._forward(kept) if kept else ([], logprobs_N, entropy_N)

    def _micro_batches(self, chosen: list[tuple[Sequence, float]]) -> Iterator[list[tuple[Sequence, float]]]:
        """Sequences of similar length together, each part within `MICRO_BATCH_VALUES`."""
        config = self.model.config
        limit = max(1, MICRO_BATCH_VALUES // (config.hidden_size * config.num_hidden_layers))
        micro: list[tuple[Sequence, float]] = []
        # Sorting is stable, so equal lengths keep the batch's order and a replay sums in the same order.
        for pair in sorted(chosen, key=lambda pair: len(pair[0].prompt) + len(pair[0].tokens)):
            length = len(pair[0].prompt) + len(pair[0].tokens)
            if micro and length * (len(micro) + 1) > limit:
                yield micro
                micro = []
            micro.append(pair)
        if micro:
            yield micro
