"""Work done on a GPU must hold when it is checked on a CPU: four rollouts that an NVIDIA H200 sampled and proved.

`data/h200-fp32.npz` holds prompts, tokens, log-probabilities and proofs of SmolLM2-135M in float32 without TF32,
decoded with a cache in a batch of 32 on the GPU (docs/decisions/016-other-hardware.md says how). Here a CPU prefills
them, and every number must lie within the thresholds that were measured on CPUs only.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.smollm2 import find_gguf
from verifier.sampling import gumbel_noise
from verifier.toploc import verify_many

VECTORS = Path(__file__).parent / "data" / "h200-fp32.npz"
NOISE = Path(__file__).parents[1] / "verifier" / "data" / "noise-smollm2.json"


@pytest.mark.heavy
def test_what_a_gpu_sampled_and_proved_holds_on_a_cpu() -> None:
    from transformers import AutoModelForCausalLM

    bounds = json.loads(NOISE.read_text())
    held = np.load(VECTORS)
    prompts, tokens, logprobs = held["prompts"], held["tokens"].astype(np.int64), held["logprobs"]
    gguf = find_gguf()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.concatenate([prompts.astype(np.int64), tokens], axis=1))
    first = prompts.shape[1]
    with torch.no_grad():
        states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, first - 1 :]
        logits = model.lm_head(states).float()

    proofs = [[chunk.tobytes() for chunk in rollout] for rollout in held["proofs"]]
    stats = verify_many(list(states.numpy()), proofs, bounds["proof_gate"])
    assert max(chunk.median for rollout in stats for chunk in rollout) <= bounds["proof_median"]
    assert max(chunk.outliers for rollout in stats for chunk in rollout) <= bounds["proof_outliers"]

    own = torch.log_softmax(logits, -1).gather(-1, ids[:, first:, None])[..., 0].numpy()
    assert np.abs(own - logprobs).max() <= bounds["logprob"]

    seeds = [number.to_bytes(8, "big") * 4 for number in range(1, len(tokens) + 1)]
    for position in range(tokens.shape[1]):
        noise = gumbel_noise(seeds, [first + position] * len(seeds), logits.shape[-1])
        scores = logits[:, position].numpy() + noise
        margin = scores.max(axis=1) - scores[np.arange(len(seeds)), tokens[:, position]]
        assert margin.max() <= bounds["token_margin"], f"token {position} is not forced here"
