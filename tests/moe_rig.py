"""Small mixture-of-experts policies with random, well spread routers: what tests of routes start from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from environments.registry import make
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.manifest import MANIFEST_KIND, RouteThresholds, Run, open_manifest, run_id_of
from protocol.records import Lease, Submission
from tests.judge_rig import NONCE, TINY, Rig, open_run
from verifier.model import PolicyModel, load_policy
from verifier.routes import Experts

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


MARGIN = 5e-5
"""What `route_noise.measure` gives for these models, about (docs/decisions/021-routes.md)."""


def moe_rig(policy: PolicyModel, *, tasks: int, samples: int, cap: int, margin: float = MARGIN) -> Rig:
    """A run whose manifest has the policy's experts, a lease and the honest answer to it."""
    environment = make("word")
    run = _with_experts(open_run(environment, 1.0, cap, (1,)), policy, margin)
    numbers = tuple(range(100, 100 + tasks))
    lease = Lease(bytes(16), run.id, 0, 0, bytes(32), environment.digest, NONCE, numbers, samples, cap, 60_000, 1 << 20)
    rig = Rig(run, lease, policy, environment, Submission(bytes(16), "test", ()))
    rig.honest = rig.answer()
    return rig


def with_margin(rig: Rig, margin: float, model: Any = None) -> Rig:
    """The same, but for the manifest's margin. Another manifest is another run with other seeds, so `honest` is the
    answer of `model`, by default the right one, anew."""
    run = _with_experts(rig.run, rig.policy, margin)
    other = dataclasses.replace(rig, run=run, lease=dataclasses.replace(rig.lease, manifest=run.id))
    other.honest = other.answer(model)
    return other


def _with_experts(run: Run, policy: PolicyModel, margin: float) -> Run:
    assert policy.experts is not None
    manifest = dataclasses.replace(
        run.manifest,
        model=dataclasses.replace(run.manifest.model, max_context=512, routing=policy.experts.routing),
        routes=RouteThresholds(margin, 0, 0, 0.0, 0.0, "test"),
    )
    root = Identity.from_seed(b"a" * 32)
    return open_manifest(seal(root, MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=1).raw)


def forging(model: Any, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
    """A copy that goes through the experts `choose(layer, logits [T, E])` [T, K] names, weighted as its routers would.

    Everything it decodes, proves and records follows from them: a forger who re-makes all of it.
    """
    copy_of = copy.deepcopy(model)
    experts = Experts.of(copy_of)
    assert experts is not None

    def hook(layer: int, kind: Any) -> Callable[[Any, Any, Any], Any]:
        def forge(module: Any, inputs: Any, output: Any) -> Any:
            chosen = choose(layer, output[0].flatten(0, -2))
            return output[0], kind.weights(output[0].flatten(0, -2), chosen), chosen

        return forge

    for layer, (gate, kind) in enumerate(zip(experts._gates, experts._kinds, strict=True)):
        gate.register_forward_hook(hook(layer, kind))
    return copy_of
