"""A policy in memory: loading it from a verified directory, and the prefill every check rests on.

A policy directory holds `config.json`, `tokenizer.json` and `model.safetensors`. Nothing in it is ever executed:
the architecture comes from an allow-list, `auto_map` and quantisation are refused, and only configuration keys the
class itself knows are passed on. The tokenizer is `tokenizer.json` read by the `tokenizers` library, so what a
prompt's ids are depends on that one file and on no code beside it.

`PolicyModel` is not for two threads at once.

What a model's own class keeps in float32 whatever its dtype (GLM4-MoE's router weights and correction biases) is stored
and held in float32 here too. Tensors have the names that the model itself has in memory, so experts are stacked.

Not covered: decoding (`node.decode`), sharded checkpoints, which experts were used (`routes`, `replay`).

Shape suffixes: B batch, L padded length, N sampled tokens of one rollout, M rows of several rollouts, H hidden,
V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers
from safetensors import SafetensorError, safe_open

from protocol.limits import MAX_MODEL_FILE_BYTES
from verifier import fused
from verifier.completion import completion_text as completion_text
from verifier.errors import PolicyError, VerifierError
from verifier.routes import Experts

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "Qwen3MoeForCausalLM": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "Glm4MoeForCausalLM": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
}
"""What a run may train. Each entry needs its honest noise measured before a run can name it."""

_EXTRA_KEYS = {"rope_theta", "rope_scaling", "head_dim", "partial_rotary_factor"}
"""Keys that classes read although they do not list them: without GLM4's own `head_dim` it would be another model."""

_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that do not depend on the batch: `dynamic` and `longrope` give other states beside longer rows."""

_WEIGHT_DTYPES = {"F32", "BF16", "F16"}
_PREFILL_TOKENS = 16_384
"""Padded tokens of one forward pass. Only memory and speed change with it."""

Ids = Sequence[int] | npt.NDArray[np.int64]
Sampled = tuple[Ids, Ids]
"""Prompt ids and sampled ids of one rollout."""


@dataclass(frozen=True)
class Prefilled:
    """What one rollout's sampled tokens were drawn from: float32 states [N, H] and raw logits [N, V]."""

    states_NH: npt.NDArray[np.float32]
    logits_NV: npt.NDArray[np.float32]


class PolicyModel:
    """A causal language model with its tokenizer, whose weights are replaced in place.

    Attributes: `model` (Transformers, eval mode), `tokenizer` (`tokenizers.Tokenizer`),
    `vocabulary` V, `hidden` H, `max_context`, `eos` (the model's own end ids, may be empty), `weights`, the dtype whose
    values the weights have, `experts` (None for a dense model), and `root`, the policy root the weights were loaded as
    (empty when the caller named none).

    Args:
        weights: by default the dtype of the model itself. A verifier of bf16 rollouts computes in float32 on weights
            rounded to bfloat16 (`profiles`).
    """

    def __init__(self, model: Any, tokenizer: tokenizers.Tokenizer, weights: torch.dtype | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        self.vocabulary = int(config.vocab_size)
        self.hidden = int(config.hidden_size)
        self.max_context = int(config.max_position_embeddings)
        eos = config.eos_token_id
        self.eos: tuple[int, ...] = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
        self.experts = Experts.of(model)
        self.weights: torch.dtype = model.model.embed_tokens.weight.dtype if weights is None else weights
        self.root = b""
        self._tensors = _tensors(model)
        self._kept_float32 = frozenset(name for name in self._tensors if _is_float32(model, name))

    def load_weights(self, directory: Path, *, root: bytes = b"") -> None:
        """Copy `directory/model.safetensors` over the weights, in place. Checked whole before the first byte moves.

        Args:
            root: the policy root these weights were verified against; `judge` refuses another lease's.

        Raises:
            PolicyError: other tensors, shapes or dtypes than this model's, or a file that does not read.
        """
        path = directory / "model.safetensors"
        own = self._tensors
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                if own.keys() - names or names - own.keys() - tied:
                    difference = sorted((own.keys() ^ names) - tied)[:4]
                    raise PolicyError(f"{path} does not hold this model's tensors (differs in {difference})")
                for name in sorted(own):
                    piece = file.get_slice(name)
                    dtypes = {"F32"} if name in self._kept_float32 else _WEIGHT_DTYPES
                    if list(piece.get_shape()) != list(own[name].shape) or piece.get_dtype() not in dtypes:
                        raise PolicyError(f"{path}: {name} has another shape or dtype than the configuration says")
                self.root = b""
                with torch.no_grad():
                    for name in sorted(own):
                        stored = file.get_tensor(name)
                        own[name].copy_(stored if name in self._kept_float32 else stored.to(self.weights))
        except (SafetensorError, OSError) as exc:
            raise PolicyError(f"{path} cannot be read: {exc}; pull the policy again") from exc
        self.root = root

    @torch.inference_mode()
    def states(self, sequences: Sequence[Sampled], batch: int = 128) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """The final-norm states that produced each sampled token, two forward passes per batch.

        Each distinct prompt of a batch is run once, padded on the left; then the sampled tokens of all its rows, padded
        on the right, which a causal model cannot see. Memory is bounded by one batch of rows of similar length: at most
        `batch` rows and 16,384 padded tokens, or one row.

        Yields:
            Per batch, (position in `sequences`, states [N, H] in the model's dtype).

        Raises:
            VerifierError: a sequence without prompt or without sampled tokens, or longer than the model's context.
        """
        lengths = [len(prompt) + len(tokens) - 1 for prompt, tokens in sequences]
        for (prompt, tokens), length in zip(sequences, lengths, strict=True):
            if not len(prompt) or not len(tokens) or length > self.max_context:
                raise VerifierError(
                    f"a rollout of {len(prompt)} prompt and {len(tokens)} sampled tokens cannot be "
                    f"prefilled with a context of {self.max_context}"
                )
        for members in _batches(lengths, batch):
            states_BNH = self._states([sequences[i] for i in members])
            yield [(i, states_BNH[row, : len(sequences[i][1])]) for row, i in enumerate(members)]

    def _states(self, sequences: Sequence[Sampled]) -> torch.Tensor:
        """States [B, longest N, H] of one batch; what lies behind a row's own tokens is padding."""
        prompts = fused.Prompts.of([tuple(int(token) for token in prompt) for prompt, _ in sequences])
        longest = max(len(tokens) for _, tokens in sequences)
        going = fused.start(self.model, prompts.ids_BL.shape[1] + longest - 1)
        last_B1H = going.run(prompts.ids_BL, prompts.positions_BL, prompts.real_BL)[:, -1:][prompts.rows]
        if longest == 1:
            return last_B1H
        going.select(prompts.rows)
        ids_BL = np.zeros((len(sequences), longest - 1), dtype=np.int64)
        for row, (_, tokens) in enumerate(sequences):
            ids_BL[row, : len(tokens) - 1] = tokens[:-1]
        positions_BL = prompts.positions_BL[prompts.rows, -1:] + torch.arange(1, longest)
        real_BC = None
        if prompts.real_BL is not None:
            real_BC = torch.cat([prompts.real_BL[prompts.rows], prompts.real_BL.new_ones(ids_BL.shape)], dim=1)
        return torch.cat([last_B1H, going.run(torch.from_numpy(ids_BL), positions_BL, real_BC)], dim=1)

    @torch.inference_mode()
    def logits(self, states_MH: torch.Tensor) -> torch.Tensor:
        """Raw logits, float32 [M, V]. The caller bounds M."""
        logits_MV: torch.Tensor = self.model.lm_head(states_MH)
        return logits_MV.float()

    def prefill(self, sequences: Sequence[Sampled], batch: int = 32) -> list[Prefilled]:
        """States and logits of every sampled token, in the order given. Holds all logits: N * V floats.

        Raises:
            VerifierError: see `states`.
        """
        out: dict[int, Prefilled] = {}
        for group in self.states(sequences, batch):
            for i, states_NH in group:
                out[i] = Prefilled(states_NH.float().numpy(), self.logits(states_NH).numpy())
        return [out[i] for i in range(len(sequences))]


def load_policy(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    root: bytes = b"",
    weights: torch.dtype | None = None,
    attention: str = "sdpa",
) -> PolicyModel:
    """Load a policy directory. Who loads it for a run asks `profiles`, which knows the dtypes.

    Args:
        dtype: compute dtype, whatever the storage dtype.
        root: see `PolicyModel.load_weights`.
        weights: dtype the weights are rounded to first; `dtype` by default.
        attention: Transformers' word for the kernel, `sdpa` or `eager`. Only noise and speed change with it.

    Raises:
        PolicyError: an architecture that is not allowed, code or quantisation in the configuration, a file that is
            missing or does not read.
    """
    raw = _read_config(directory / "config.json")
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise PolicyError(f"{directory}: architecture {named!r} is not one of {sorted(ARCHITECTURES)}")
    config_class, model_class = ARCHITECTURES[named[0]]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | _EXTRA_KEYS
    known -= {"architectures", "dtype", "transformers_version"}
    try:
        config = config_class(**{k: v for k, v in raw.items() if k in known and not k.startswith("_")})
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in _FIXED_ROPE:
            raise PolicyError(f"{directory}: rotary embedding {rope!r} depends on the batch and cannot be verified")
        model = model_class._from_config(config, attn_implementation=attention)
    except PolicyError:
        raise
    except Exception as exc:  # a hostile configuration meets whatever its library raises
        raise PolicyError(f"{directory}: config.json makes no {named[0]}: {exc}") from exc
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.float32 if _is_float32(model, name) else dtype)
    policy = PolicyModel(model, load_tokenizer(directory), weights or dtype)
    policy.load_weights(directory, root=root)
    return policy


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """What a policy's weights are: parameters, and the buffers that are stored with them."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in stored}


def _is_float32(model: Any, name: str) -> bool:
    """Whether the model's class keeps this tensor in float32 in a model of any dtype."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(f".{name}.".find(f".{part}.") >= 0 for part in kept)


def load_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a policy directory, with truncation and padding off.

    Raises:
        PolicyError: no `tokenizer.json`, over the bound, or one that does not read.
    """
    path = directory / "tokenizer.json"
    try:
        if path.stat().st_size > MAX_MODEL_FILE_BYTES:
            raise PolicyError(f"{path} is over the bound of {MAX_MODEL_FILE_BYTES} bytes")
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except PolicyError:
        raise
    except Exception as exc:  # the tokenizers library raises bare Exception
        raise PolicyError(f"{path} is no tokenizer: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def prompt_ids(tokenizer: tokenizers.Tokenizer, prompt: str) -> list[int]:
    """The ids of a task's prompt: no special tokens are added."""
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_MODEL_FILE_BYTES:
            raise PolicyError(f"{path} is over the bound of {MAX_MODEL_FILE_BYTES} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise PolicyError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(raw, dict):
        raise PolicyError(f"{path} is no configuration")
    for key in ("auto_map", "quantization_config"):
        if raw.get(key):
            raise PolicyError(f"{path} names {key}: code and quantised weights from a run are refused")
    return raw


def _batches(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Positions in batches of similar length, each ordered by length."""
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if members and (len(members) >= batch or (len(members) + 1) * lengths[i] > _PREFILL_TOKENS):
            yield members
            members = []
        members.append(i)
    if members:
        yield members
