"""Loading policies: what is refused, what is loaded, and that the prefill does not depend on its batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from verifier.errors import PolicyError, VerifierError
from verifier.model import completion_text, load_policy, load_tokenizer, prompt_ids

torch.set_num_threads(1)
TINY = Path(__file__).parent.parent / "trainer" / "data" / "tiny"


def copy_with(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(TINY, directory)
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture"),
        ({"architectures": None}, "architecture"),
        ({"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, "architecture"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary"),
        ({"hidden_size": -3}, "config.json"),
        ({"hidden_size": "many"}, "config.json"),
        ({"num_hidden_layers": 2}, "config.json"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "tensors"),
        ({"intermediate_size": 96}, "shape"),
    ],
)
def test_a_configuration_that_is_not_ours_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(copy_with(tmp_path / "m", lambda config: config.update(change)))


def test_a_configuration_cannot_choose_code_paths(tmp_path: Path) -> None:
    wanted = {"attn_implementation": "eager", "_attn_implementation": "eager", "unknown_key": 1, "dtype": "bfloat16"}
    policy = load_policy(copy_with(tmp_path / "m", lambda config: config.update(wanted)))
    assert policy.model.config._attn_implementation == "sdpa" and not hasattr(policy.model.config, "unknown_key")
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32} and not policy.model.training


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str) -> None:
    directory = copy_with(tmp_path / "m", lambda config: None)
    whole = (directory / name).read_bytes()
    for content in (None, b"", whole[: len(whole) // 2]):
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)
        with pytest.raises(PolicyError, match=name):
            load_policy(directory)


def test_weights_that_do_not_fit_leave_the_old_ones_untouched(tmp_path: Path) -> None:
    policy = load_policy(TINY, root=b"r" * 32)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    tensors = load_file(TINY / "model.safetensors")
    name = sorted(tensors)[-1]
    for wrong in (
        {k: v for k, v in tensors.items() if k != name},
        tensors | {"model.extra": torch.zeros(1)},
        tensors | {name: torch.zeros(3)},
        tensors | {name: tensors[name].to(torch.int32)},
    ):
        save_file({k: v.contiguous() for k, v in wrong.items()}, tmp_path / "model.safetensors")
        with pytest.raises(PolicyError):
            policy.load_weights(tmp_path, root=b"s" * 32)
        assert policy.root == b"r" * 32
        assert all(torch.equal(before[k], v) for k, v in policy.model.named_parameters())


def test_storage_may_be_bfloat16_and_tied_heads_may_be_stored(tmp_path: Path) -> None:
    policy = load_policy(TINY)
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(TINY / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    policy.load_weights(tmp_path)
    embedding = policy.model.model.embed_tokens.weight
    assert embedding.dtype == torch.float32 and policy.model.lm_head.weight is embedding
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].float())


def test_ours_is_the_same_model_as_transformers_own_loader() -> None:
    policy = load_policy(TINY)
    reference = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = torch.tensor([prompt_ids(policy.tokenizer, "badge=egdab")])
    with torch.no_grad():
        theirs, ours = reference(ids).logits, policy.model(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_prefill_gives_the_rows_that_produced_each_token_whatever_the_batch() -> None:
    policy = load_policy(TINY)
    rng = np.random.default_rng(0)
    sequences = [
        (rng.integers(2, 60, int(rng.integers(1, 12))).tolist(), rng.integers(2, 60, int(rng.integers(1, 50))).tolist())
        for _ in range(40)
    ]
    whole = policy.prefill(sequences)
    for (prompt, tokens), got, alone in zip(sequences, whole, policy.prefill(sequences, batch=1), strict=True):
        assert got.states_NH.shape == (len(tokens), 96) and got.logits_NV.shape == (len(tokens), 64)
        np.testing.assert_allclose(got.states_NH, alone.states_NH, atol=2e-4)
        with torch.no_grad():
            want = policy.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(got.logits_NV, want.numpy(), atol=2e-4)


def test_what_cannot_be_prefilled_is_refused() -> None:
    policy = load_policy(TINY)
    for prompt, tokens in (([], [2]), ([2], []), ([2] * 200, [2] * 58)):
        with pytest.raises(VerifierError):
            policy.prefill([(prompt, tokens)])


def test_text_goes_in_and_comes_out_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY)
    ids = prompt_ids(tokenizer, "badge=")
    assert len(ids) == 6, "no special tokens are added"
    assert completion_text(tokenizer, [*ids, 1], (1,)) == "badge="
    assert completion_text(tokenizer, ids, (1,)) == "badge="
    assert completion_text(tokenizer, [1], (1,)) == ""
    assert completion_text(tokenizer, [ids[0], 0, ids[1], 1], (1,)) != "ba", "special tokens stay visible"
