"""The forward pass of Llama and Qwen3 in inference, without what Transformers does around each layer.

A small model on a CPU spends more time in Python and in separate small matrices than in arithmetic. Here one matrix
gives query, key and value, one gives gate and up, keys and values are written into one preallocated cache, and no mask
is made where none is needed. Transformers stays the reference: the same weights give the same states within float32
rounding (`tests/test_verifier_fused.py`), and models this file does not know run through it (`Reference`).

Weights are not copied twice: the modules' own parameters become views of the joined matrices, so what is loaded,
trained or changed in place there is what runs here. A parameter that was exchanged is noticed and joined again.

In bfloat16 the operations are the same and so is where they round, but for the norms, which round once here and twice
in Transformers: both lie within what any bfloat16 machine does, and are measured as such (`calibrate`).

Not covered: gradients, sliding windows, experts, other dtypes than float32 and bfloat16, devices other than the CPU.

Shape suffixes: B rows, L new columns, C columns so far (with the new ones), H hidden, D head, P positions.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache

_KNOWN = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_DTYPES = (torch.float32, torch.bfloat16)


class Pass(Protocol):
    """One batch of rows that is continued column by column; `columns` so far are kept."""

    columns: int

    def run(self, ids_BL: torch.Tensor, positions_BL: torch.Tensor, real_BC: torch.Tensor | None) -> torch.Tensor:
        """Append L columns; their final-norm states [B, L, H].

        Args:
            ids_BL: int64. positions_BL: int64, each token's place in its own row.
            real_BC: bool, False where a column is padding on the left; None when there is none.
        """
        ...

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; a row may be taken several times."""
        ...


def start(model: Any, columns: int) -> Pass:
    """Begin a batch of at most `columns` columns on a Transformers `...ForCausalLM` in eval mode."""
    fused = Fused.of(model)
    return Reference(model) if fused is None else FusedPass(fused, columns)


@dataclass(frozen=True)
class Prompts:
    """The distinct prompts of a batch, padded on the left to one width.

    ids_BL, positions_BL: int64. real_BL: bool, None when nothing is padded. rows: for each prompt asked for, its row.
    """

    ids_BL: torch.Tensor
    positions_BL: torch.Tensor
    real_BL: torch.Tensor | None
    rows: torch.Tensor

    @staticmethod
    def of(prompts: Sequence[tuple[int, ...]]) -> Prompts:
        distinct = sorted(set(prompts))
        width = max(len(prompt) for prompt in distinct)
        ids_BL = np.zeros((len(distinct), width), dtype=np.int64)
        for row, prompt in enumerate(distinct):
            ids_BL[row, width - len(prompt) :] = prompt
        padding_B1 = np.asarray([[width - len(prompt)] for prompt in distinct])
        columns_BL = np.arange(width)[None] - padding_B1
        where = {prompt: row for row, prompt in enumerate(distinct)}
        return Prompts(
            torch.from_numpy(ids_BL),
            torch.from_numpy(columns_BL.clip(min=0)),
            torch.from_numpy(columns_BL >= 0) if padding_B1.any() else None,
            torch.tensor([where[prompt] for prompt in prompts]),
        )


class Reference:
    """`Pass` through Transformers itself, for any causal language model."""

    def __init__(self, model: Any) -> None:
        self.columns = 0
        self._model = model.model
        self._cache = DynamicCache(config=model.config)
        # before 5.20 or so the argument was called `past_key_values`
        self._argument = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, ids_BL: torch.Tensor, positions_BL: torch.Tensor, real_BC: torch.Tensor | None) -> torch.Tensor:
        states_BLH: torch.Tensor = self._model(
            input_ids=ids_BL,
            attention_mask=None if real_BC is None else real_BC.long(),
            position_ids=positions_BL,
            use_cache=True,
            **{self._argument: self._cache},
        ).last_hidden_state
        self.columns += ids_BL.shape[1]
        return states_BLH

    @torch.inference_mode()
    def select(self, rows: torch.Tensor) -> None:
        self._cache.batch_select_indices(rows)


class Fused:
    """The joined weights of one model."""

    _of: ClassVar[weakref.WeakKeyDictionary[Any, Fused | None]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: Any) -> Fused | None:
        """This model's, made on first use; None when the model is not one this file knows."""
        if model not in cls._of:
            cls._of[model] = cls(model) if _is_known(model) else None
        found = cls._of[model]
        if found is not None:
            found.follow()
        return found

    def __init__(self, model: Any) -> None:
        config = model.config
        self.body = model.model  # not `model`: the dictionary above must not hold its own keys
        self.layers = [_Layer(layer) for layer in model.model.layers]
        self.key_heads = int(config.num_key_value_heads)
        self.group = int(config.num_attention_heads) // self.key_heads
        self.head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.epsilon = float(config.rms_norm_eps)
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def follow(self) -> None:
        """Join again what somebody exchanged since."""
        for layer in self.layers:
            layer.follow()

    def angles(self, positions_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary embedding, each [B, L, 1, D], from the model's own module."""
        needed = int(positions_BL.max()) + 1
        if self._angles is None or len(self._angles[0]) < needed:
            some = torch.empty(1, dtype=self.body.embed_tokens.weight.dtype)
            cos, sin = self.body.rotary_emb(some, torch.arange(max(256, 2 * needed))[None])
            self._angles = cos[0], sin[0]
        cos_PD, sin_PD = self._angles
        return cos_PD[positions_BL][:, :, None], sin_PD[positions_BL][:, :, None]


class _Layer:
    """One decoder layer: its modules, and the two joined matrices their parameters are views of."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm: Any = getattr(attention, "q_norm", None)
        self.key_norm: Any = getattr(attention, "k_norm", None)
        self.out, self.down, self.activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self.scaling = float(attention.scaling)
        self._parts = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        self._join()

    def _join(self) -> None:
        (self.qkv, self.qkv_bias), (self.gate_up, self.gate_up_bias) = map(_join, self._parts)
        self._places = list(self._where())

    def follow(self) -> None:
        if self._places != list(self._where()):
            self._join()

    def _where(self) -> Iterator[int]:
        for modules in self._parts:
            for module in modules:
                yield module.weight.data_ptr()
                yield 0 if module.bias is None else module.bias.data_ptr()


def _join(modules: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix (and bias) of several linear modules with equal inputs, whose parameters become views of it."""
    joined: list[torch.Tensor | None] = []
    with torch.inference_mode(False), torch.no_grad():
        for name in ("weight", "bias"):
            parameters = [getattr(module, name) for module in modules]
            if parameters[0] is None:
                joined.append(None)
                continue
            whole = torch.cat([parameter.detach() for parameter in parameters])
            at = 0
            for parameter in parameters:
                parameter.data = whole[at : at + len(parameter)]
                at += len(parameter)
            joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias


def _is_known(model: Any) -> bool:
    first = model.model.embed_tokens.weight if type(model).__name__ in _KNOWN else None
    if first is None or first.device.type != "cpu" or first.dtype not in _DTYPES:
        return False
    if model.config._attn_implementation != "sdpa":  # somebody asked for another kernel, to measure it
        return False
    return all(kind == "full_attention" for kind in getattr(model.config, "layer_types", None) or ())


class FusedPass:
    """`Pass` over joined weights."""

    def __init__(self, weights: Fused, columns: int) -> None:
        self.columns = 0
        self._weights = weights
        self._most = columns
        self._kept = torch.empty(0)
        """Keys and values so far: [layers, 2, B, key heads, room, D]; room grows as it is needed."""

    @torch.inference_mode()
    def select(self, rows: torch.Tensor) -> None:
        old = self._kept
        self._kept = old.new_empty(*old.shape[:2], len(rows), *old.shape[3:])
        torch.index_select(old[..., : self.columns, :], 2, rows, out=self._kept[..., : self.columns, :])

    def _reserve(self, rows: int, columns: int) -> None:
        room = self._kept.shape[-2] if self.columns else 0
        if columns <= room:
            return
        weights, old = self._weights, self._kept
        shape = len(weights.layers), 2, rows, weights.key_heads, max(columns, min(self._most, 2 * room)), weights.head
        self._kept = torch.empty(shape, dtype=weights.body.embed_tokens.weight.dtype)
        if self.columns:
            self._kept[..., : self.columns, :] = old[..., : self.columns, :]

    @torch.inference_mode()
    def run(self, ids_BL: torch.Tensor, positions_BL: torch.Tensor, real_BC: torch.Tensor | None) -> torch.Tensor:
        weights, (rows, new) = self._weights, ids_BL.shape
        self._reserve(rows, self.columns + new)
        before, self.columns = self.columns, self.columns + new
        mask = _mask(before, new, real_BC)
        if mask is not None:  # once for all layers: torch would make the same of it in each
            mask = torch.zeros(mask.shape, dtype=self._kept.dtype).masked_fill_(~mask, -math.inf)
        angles = weights.angles(positions_BL)
        x_BLH = functional.embedding(ids_BL, weights.body.embed_tokens.weight)
        for layer, kept in zip(weights.layers, self._kept, strict=True):
            x_BLH += self._attend(layer, x_BLH, angles, kept, before, mask)
            joined = functional.linear(_norm(layer.after, x_BLH), layer.gate_up, layer.gate_up_bias)
            gate, up = joined.chunk(2, dim=-1)
            x_BLH += layer.down(layer.activation(gate).mul_(up))
        return _norm(weights.body.norm, x_BLH)

    def _attend(
        self,
        layer: _Layer,
        x_BLH: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kept: torch.Tensor,
        before: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, (rows, new, _) = self._weights, x_BLH.shape
        heads, group, size = weights.key_heads, weights.group, weights.head
        joined = functional.linear(_norm(layer.before, x_BLH), layer.qkv, layer.qkv_bias)
        joined = joined.view(rows, new, heads * (group + 2), size)
        turned, value = joined[:, :, : heads * (group + 1)], joined[:, :, heads * (group + 1) :]
        if layer.query_norm is not None:
            turned = functional.rms_norm(turned, (size,), None, weights.epsilon)
            turned = turned * torch.cat(
                [layer.query_norm.weight.expand(heads * group, size), layer.key_norm.weight.expand(heads, size)]
            )
        turned = _turn(turned, *angles)
        kept[0, :, :, before : self.columns] = turned[:, :, -heads:].transpose(1, 2)
        kept[1, :, :, before : self.columns] = value.transpose(1, 2)
        key, value = kept[:, :, :, : self.columns]
        if new == 1:
            # The query heads that share a key head are rows of one attention.
            query = turned[:, 0, : heads * group].view(rows, heads, group, size)
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scaling)
        else:
            out = functional.scaled_dot_product_attention(
                turned[:, :, : heads * group].transpose(1, 2),
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=layer.scaling,
                enable_gqa=group > 1,
            ).transpose(1, 2)
        result: torch.Tensor = layer.out(out.reshape(rows, new, heads * group * size))
        return result


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, L, heads, D]: the first half of D pairs with the second."""
    half = x.shape[-1] // 2
    out, by_sin = x * cos, x * sin
    out[..., :half] -= by_sin[..., half:]
    out[..., half:] += by_sin[..., :half]
    return out


def _mask(before: int, new: int, real_BC: torch.Tensor | None) -> torch.Tensor | None:
    """Which columns each new column may see, bool [B or 1, 1, L, C]; None for all up to its own."""
    if real_BC is None and (new == 1 or before == 0):
        return None
    if new == 1:
        return real_BC[:, None, None, :] if real_BC is not None else None
    seen_LC = torch.ones(new, before + new, dtype=torch.bool).tril(before)
    if real_BC is None:
        return seen_LC[None, None]
    # A padded column sees itself: a row of the mask with nothing in it would give NaN.
    itself_LC = torch.zeros_like(seen_LC)
    itself_LC[:, before:] = torch.eye(new, dtype=torch.bool)
    return ((seen_LC & real_BC[:, None]) | itself_LC)[:, None]
