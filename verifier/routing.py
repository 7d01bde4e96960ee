"""How many experts a model has, from its `config.json` alone: what a manifest says of it before any model is loaded.

    Qwen3MoeForCausalLM   num_experts (or num_local_experts); each decoder_sparse_step-th layer not in mlp_only_layers
    Glm4MoeForCausalLM    n_routed_experts; all layers from first_k_dense_replace on
    `DENSE`               none

A verifier compares it with the model itself (`judge`). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.manifest import Routing

DENSE = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""Architectures without experts."""


def routing_of(settings: Mapping[str, Any]) -> Routing | None:
    """Of a parsed `config.json`; None for a model whose layers are all dense.

    Raises:
        KeyError, TypeError, ValueError: it does not describe such a model, or one whose experts are not known here.
    """
    (architecture,) = settings["architectures"]
    if architecture == "Qwen3MoeForCausalLM":
        experts = settings["num_experts"] if "num_experts" in settings else settings["num_local_experts"]
        dense, step = set(settings.get("mlp_only_layers") or ()), int(settings.get("decoder_sparse_step", 1))
        layers = [n for n in range(settings["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0]
        count = len(layers) if experts else 0
    elif architecture == "Glm4MoeForCausalLM":
        experts = settings["n_routed_experts"]
        count = max(0, settings["num_hidden_layers"] - settings.get("first_k_dense_replace", 1))
    elif architecture in DENSE:
        return None
    else:
        raise ValueError(f"{architecture}: whether it has experts, and how it chooses them, is not known here")
    return Routing(count, int(experts), int(settings["num_experts_per_tok"])) if count else None
