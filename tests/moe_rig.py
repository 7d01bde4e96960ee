"""Small mixture-of-experts policies with random, well spread routers: what tests of routes start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.judge_rig import TINY
from verifier.model import PolicyModel, load_policy

FAMILIES = ("qwen3", "glm4", "glm4-groups")

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "moe_intermediate_size": 32, "num_experts_per_tok": 4,
}  # fmt: skip


def moe_model(family: str, seed: int, **other: Any) -> Any:
    """A Transformers model with random weights. `glm4-groups` first chooses 2 of 4 groups of experts."""
    torch.manual_seed(seed)
    sizes = _SIZES | other
    if family == "qwen3":
        config = transformers.Qwen3MoeConfig(**{"num_experts": 16, "norm_topk_prob": True, **sizes})
        model = transformers.Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    else:
        groups = {"n_group": 4, "topk_group": 2} if family == "glm4-groups" else {}
        config = transformers.Glm4MoeConfig(
            **{
                "n_routed_experts": 16, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "n_shared_experts": 1,
                "use_qk_norm": True, **groups, **sizes,
            }
        )  # fmt: skip
        model = transformers.Glm4MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    model.eval()
    with torch.no_grad():
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            if hasattr(gate, "e_score_correction_bias"):
                gate.e_score_correction_bias.copy_(0.1 * torch.randn(16))
        model.lm_head.weight[1] = 0.0  # the end of text is rarer than the average token
    return model


def save_policy(model: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A policy directory as a learner publishes it: all of `state_dict()`, what a class keeps in fp32 as fp32."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(model.config.to_json_string(use_diff=False))
    (directory / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    kept = model._keep_in_fp32_modules_strict or ()
    weights = {
        name: one.detach().clone().to(torch.float32 if any(part in name for part in kept) else dtype)
        for name, one in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory


def moe_policy(directory: Path, family: str, seed: int, **other: Any) -> PolicyModel:
    return load_policy(save_policy(moe_model(family, seed, **other), directory))
