"""The fused forward pass against Transformers: the same weights give the same states, however rows come and go."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verifier import fused

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 600,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    "qwen3 one key head": Qwen3Config(**SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=32),
    "qwen3 biases": Qwen3Config(
        **SMALL, num_attention_heads=4, num_key_value_heads=4, head_dim=8, attention_bias=True, rope_parameters=YARN
    ),
    "llama": LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=3),
    "llama biases": LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3,
    ),
}


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = (Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start at 1 and 0, which would hide their absence
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def whole(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """States of each sequence alone, by Transformers, without cache or padding."""
    return [model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in sequences]


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_columns_give_the_states_of_transformers(name: str) -> None:
    model = model_of(CONFIGS[name])
    prompts = [(1, 2, 3), (4,), (1, 2, 3), (5, 6, 7, 8, 9)]
    answers = [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21], [22, 23, 24, 25]]
    expected = whole(copy.deepcopy(model), [[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    laid = fused.Prompts.of(prompts)
    assert len(laid.ids_BL) == 3 and laid.real_BL is not None
    going = fused.start(model, 9)
    assert isinstance(going, fused.FusedPass)
    states = [going.run(laid.ids_BL, laid.positions_BL, laid.real_BL)[:, -1:][laid.rows]]
    going.select(laid.rows)
    real, position = laid.real_BL[laid.rows], laid.positions_BL[laid.rows, -1:]
    for columns in (slice(0, 1), slice(1, 3), slice(3, 4)):  # one column, several at once, one again
        ids = torch.tensor(answers)[:, columns]
        real = torch.cat([real, torch.ones(ids.shape, dtype=torch.bool)], dim=1)
        positions = position + 1 + torch.arange(ids.shape[1])
        states.append(going.run(ids, positions, real))
        position = positions[:, -1:]
    got = torch.cat(states, dim=1)
    for row, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        assert torch.allclose(got[row], wanted[len(prompt) - 1 :], atol=2e-5, rtol=0), name


@pytest.mark.parametrize("make", [fused.start, lambda model, _: fused.Reference(model)])
def test_rows_leave_and_the_others_do_not_notice(make: Any) -> None:
    model = model_of(CONFIGS["qwen3"])
    sequences = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    expected = whole(copy.deepcopy(model), sequences)
    going = make(model, 5)
    ids = torch.tensor(sequences)
    going.run(ids[:, :3], torch.arange(3).expand(3, 3), None)
    assert going.columns == 3
    going.select(torch.tensor([2, 0]))
    one = going.run(ids[[2, 0], 3:4], torch.tensor([[3], [3]]), None)
    two = going.run(ids[[2, 0], 4:], torch.tensor([[4], [4]]), None)
    for row, sequence in enumerate((2, 0)):
        assert torch.allclose(torch.cat([one[row], two[row]]), expected[sequence][3:], atol=2e-5, rtol=0)


def test_a_long_prompt_without_padding_needs_no_mask_and_positions_beyond_the_first_table() -> None:
    model = model_of(CONFIGS["llama"])
    ids = torch.randint(0, 50, (2, 400), generator=torch.Generator().manual_seed(1))
    expected = whole(copy.deepcopy(model), ids.tolist())
    got = fused.start(model, 400).run(ids, torch.arange(400).expand(2, 400), None)
    assert torch.allclose(got, torch.stack(expected), atol=5e-5, rtol=0)


def states_of(model: Any) -> torch.Tensor:
    return fused.start(model, 3).run(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], None)[0]


def test_weights_that_change_in_place_or_are_exchanged_are_the_ones_that_run() -> None:
    model, other = model_of(CONFIGS["qwen3"]), model_of(CONFIGS["qwen3"], seed=1)
    before = states_of(model)
    with torch.no_grad():
        for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(theirs)
    assert torch.allclose(states_of(model), whole(copy.deepcopy(other), [[1, 2, 3]])[0], atol=2e-5, rtol=0)
    assert not torch.allclose(states_of(model), before, atol=1e-2)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data * 1.1
    assert torch.allclose(states_of(model), whole(copy.deepcopy(model), [[1, 2, 3]])[0], atol=2e-5, rtol=0)


def test_training_goes_through_the_joined_weights() -> None:
    """A model that samples for itself between updates (the bare loop, tests) runs what the optimiser wrote."""
    model = model_of(CONFIGS["llama"])
    states_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model.model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.square().sum().backward()
    optimizer.step()
    assert torch.allclose(states_of(model), whole(copy.deepcopy(model), [[1, 2, 3]])[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "llama biases"])
def test_bfloat16_rounds_no_worse_than_transformers_does(name: str) -> None:
    """Against float32 on the same rounded weights: what lies between is bfloat16's own noise, in either pass."""
    rounded = model_of(CONFIGS[name]).bfloat16()
    exact = copy.deepcopy(rounded).float()
    ids = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(1))
    expected = torch.stack(whole(exact, ids.tolist()))
    theirs = torch.stack(whole(copy.deepcopy(rounded), ids.tolist())).float()
    going = fused.start(rounded, 24)
    assert isinstance(going, fused.FusedPass)
    real = torch.ones(3, 24, dtype=torch.bool)
    real[0, :3] = False  # a padded row takes the pass with a mask
    parts = [going.run(ids[1:, :20], torch.arange(20).expand(2, 20), None)]
    parts += [going.run(ids[1:, at : at + 1], torch.full((2, 1), at), None) for at in range(20, 24)]
    ours = torch.cat(parts, dim=1)
    assert ours.dtype == torch.bfloat16
    noise, own = (theirs[1:] - expected[1:]).norm(), (ours.float() - expected[1:]).norm()
    assert 0 < own < 1.3 * noise and own < 0.03 * expected[1:].norm()
    padded = fused.start(rounded, 24).run(ids, (torch.cumsum(real, dim=1) - 1).clip(min=0), real)
    assert (padded[1:].float() - expected[1:]).norm() < 1.3 * noise
    assert torch.isfinite(padded).all()


def test_another_kernel_runs_through_transformers() -> None:
    model = model_of(CONFIGS["llama"])
    model.config._attn_implementation = "eager"
    assert isinstance(fused.start(model, 4), fused.Reference)


def test_what_it_does_not_know_runs_through_transformers() -> None:
    sliding = Qwen3Config(
        **SMALL,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=2,
        max_window_layers=0,
    )
    assert isinstance(fused.start(model_of(sliding), 4), fused.Reference)


def test_a_model_that_is_gone_is_not_kept() -> None:
    model = model_of(CONFIGS["qwen3"])
    states_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
