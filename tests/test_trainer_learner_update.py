"""One update: the gradient is the batch's, whatever the layout; what is not finite is dropped; storage round-trips."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.manifest import Run
from tests.learner_actor import sample_batch, small_run
from trainer import forward, update
from trainer.config import LearnerSection
from trainer.incoming import Door, Sequence, TrainingBatch, batch_path, read_batch
from trainer.update import Policy
from verifier.model import PolicyModel, load_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    torch.set_num_threads(1)
    for number in range(50):
        directory = tmp_path_factory.mktemp("update") / f"run-{number}"
        run = small_run(directory, 4, leases__tasks_per_step=8, leases__tasks_per_lease=8)
        sequences = _batch(run, directory).sequences
        if len({(one.group, one.reward) for one in sequences}) > len({one.group for one in sequences}):
            return run, directory
    raise AssertionError("in 50 runs no group of answers has two rewards: there is nothing to learn from")


def _base(made: tuple[Run, Path]) -> PolicyModel:
    base = load_policy(made[1] / "model")
    for parameter in base.model.parameters():
        parameter.requires_grad_(True)
    return base


def _policy(made: tuple[Run, Path], dtype: torch.dtype = torch.float32) -> Policy:
    model = _base(made).model
    storage = {name: dtype for name, _ in model.named_parameters()}
    return Policy(model, LearnerSection(), storage, 1.0)


@pytest.fixture(scope="module")
def batch(made: tuple[Run, Path]) -> TrainingBatch:
    return _batch(*made)


def _batch(run: Run, directory: Path) -> TrainingBatch:
    """Step 0's, by seeds that follow from the run's id, which is another each time."""
    base = load_policy(directory / "model")
    path = batch_path(directory, 0)
    path.write_bytes(sample_batch(run, base, 0, 0))
    return read_batch(path, 0, Door.of(run, base.vocabulary))


def test_on_policy_the_ratio_is_one_so_engine_and_learner_agree(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    row = _policy(made).learn(batch)
    assert row["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert row["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert row["mismatch_kl"] == pytest.approx(0.0, abs=1e-8)
    assert row["masked_share"] == 0.0
    assert 0.0 < row["entropy"] < 2.0
    assert row["staleness"] == {"0": 64}
    assert row["groups"] == 8
    assert 0 < row["groups_trained"] <= 8
    assert row["dropped_non_finite"] == 0
    assert row["reward_mean"] == sum(s.reward for s in batch.sequences) / 64


def test_padding_and_neighbours_change_nothing(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    model = _base(made).model
    pairs = [(s.prompt, s.tokens) for s in batch.sequences[:20]]
    together, entropy = forward.logprobs_of(model, forward.pack(pairs, pad=33), 0.7)
    alone = torch.cat([forward.logprobs_of(model, forward.pack([pair]), 0.7)[0] for pair in pairs])
    assert torch.allclose(together, alone, atol=1e-5)
    assert len(entropy) == sum(len(tokens) for _, tokens in pairs)


def test_micro_batches_give_the_whole_batchs_gradient(
    made: tuple[Run, Path], batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = _policy(made), _policy(made)
    first = whole.learn(batch)
    monkeypatch.setattr(update, "MICRO_BATCH_VALUES", 96 * 3 * 40)
    second = parts.learn(batch)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
    assert second["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert second["tokens"] == first["tokens"]


def test_equal_rewards_teach_nothing(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    policy = _policy(made)
    before = policy.weights()
    flat = TrainingBatch(0, tuple(dataclasses.replace(s, reward=1.0) for s in batch.sequences), batch.identities)
    row = policy.learn(flat)
    assert (row["loss"], row["groups_trained"], row["tokens"]) == (None, 0, 0)
    assert policy.step == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights().items())


def test_sequences_that_are_not_finite_are_dropped_and_counted(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    broken = []
    for i, sequence in enumerate(batch.sequences):
        reward = float(i % 2)
        behaviour = np.full_like(sequence.behaviour, np.inf) if i in (3, 9) else sequence.behaviour
        broken.append(dataclasses.replace(sequence, reward=reward, behaviour=behaviour))
    policy = _policy(made)
    row = policy.learn(TrainingBatch(0, tuple(broken), batch.identities))
    assert row["dropped_non_finite"] == 2
    assert row["update_skipped"] is False
    assert all(torch.isfinite(tensor).all() for tensor in policy.weights().values())


def test_a_forward_pass_that_breaks_skips_the_update_and_keeps_the_weights(
    made: tuple[Run, Path], batch: TrainingBatch
) -> None:
    policy = _policy(made)
    token = batch.sequences[0].prompt[0]
    with torch.no_grad():
        policy.named["model.embed_tokens.weight"][token] = float("nan")
    before = policy.weights()
    row = policy.learn(batch)
    # The embedding is tied to the output, so every logit row has a NaN: nothing is left to learn from.
    assert row["loss"] is None
    assert row["dropped_non_finite"] > 0
    after = policy.weights()
    assert all(torch.equal(before[n].nan_to_num(), t.nan_to_num()) for n, t in after.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_restored_goes_on_bit_for_bit(
    made: tuple[Run, Path], batch: TrainingBatch, dtype: torch.dtype
) -> None:
    policy, other = _policy(made, dtype), _policy(made, dtype)
    policy.learn(batch)
    saved = {name: tensor.clone() for name, tensor in policy.optimizer_tensors().items()}
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    assert all(tensor.dtype == dtype for tensor in weights.values())
    policy.learn(batch)
    other.restore(weights, saved, 1)
    other.learn(batch)
    for name, parameter in policy.named.items():
        assert torch.equal(parameter, other.named[name]), name


def test_adopting_rounded_weights_keeps_the_digits_that_agree(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    policy = _policy(made, torch.bfloat16)
    policy.learn(batch)
    full = {name: parameter.detach().clone() for name, parameter in policy.named.items()}
    policy.adopt(policy.weights())
    assert all(torch.equal(full[name], parameter) for name, parameter in policy.named.items())
    changed = policy.weights()
    changed["model.norm.weight"] = changed["model.norm.weight"] + 1
    policy.adopt(changed)
    assert torch.equal(policy.named["model.norm.weight"], changed["model.norm.weight"].float())


def _reference(model: Any, sequences: list[Sequence], lost: int | None, temperature: float) -> dict[str, Any]:
    """The step again from its definition: float64, one sequence and one token at a time, nothing shared."""
    rewards: dict[bytes, list[float]] = {}
    for sequence in sequences:
        rewards.setdefault(sequence.group, []).append(sequence.reward)
    terms, ratios, entropies = [], [], []
    for i, sequence in enumerate(sequences):
        own = rewards[sequence.group]
        if max(own) == min(own) or i == lost or not np.isfinite(sequence.behaviour).all():
            continue
        advantage = sequence.reward - sum(own) / len(own)
        logits = model(input_ids=torch.tensor([[*sequence.prompt, *sequence.tokens]])).logits[0] / temperature
        for n, token in enumerate(sequence.tokens):
            logprobs = torch.log_softmax(logits[len(sequence.prompt) - 1 + n], -1)
            ratio = (logprobs[token] - float(sequence.behaviour[n])).exp()
            terms.append(torch.minimum(ratio.clip(max=4.0) * advantage, ratio.clip(0.8, 1.2) * advantage))
            ratios.append(float(ratio.detach()))
            entropies.append(float(-(logprobs.exp() * logprobs).sum().detach()))
    loss = -sum(terms) / len(terms)
    loss.backward()
    weights = np.asarray(ratios)
    return {
        "loss": float(loss.detach()),
        "tokens": len(terms),
        "entropy": np.mean(entropies),
        "mismatch_kl": np.mean(weights - 1 - np.log(weights)),
        "effective_sample_size": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "ratio_max": weights.max(),
    }


@pytest.mark.parametrize("lose", [False, True])
def test_the_update_is_that_of_an_independent_reference(
    made: tuple[Run, Path], batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch, lose: bool
) -> None:
    """Off-policy tokens on both sides of every clip, a group without variance, one sequence that is not finite, and
    one (`lose`) whose forward pass is not."""
    rng = np.random.default_rng(0)
    sequences = []
    for i, sequence in enumerate(batch.sequences[:32]):
        behaviour = (sequence.behaviour + rng.normal(0, 0.7, len(sequence.behaviour))).astype(np.float32)
        reward = 1.0 if sequence.group == batch.sequences[8].group else float(i % 3 == 0)
        if i == 3:
            behaviour[0] = np.nan
        sequences.append(dataclasses.replace(sequence, reward=reward, behaviour=behaviour))
    whole = [(*s.prompt, *s.tokens) for s in sequences]
    lost = (
        next(i for i, ids in enumerate(whole) if i not in (3, *range(8, 16)) and whole.count(ids) == 1)
        if lose
        else None
    )
    model = _base(made).model.double()
    expected = _reference(model, sequences, lost, 0.7)

    plain = forward.logprobs_of

    def losing(model: Any, packed: forward.Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N = plain(model, packed, temperature)
        for row, ids_L in enumerate(packed.ids_BL.tolist()):
            if lost is not None and tuple(ids_L[: len(whole[lost])]) == whole[lost]:
                logprobs_N = torch.where(packed.rows_N == row, torch.nan, logprobs_N)
        return logprobs_N, entropy_N

    monkeypatch.setattr(forward, "logprobs_of", losing)
    policy = _policy(made)
    policy.temperature = 0.7
    before = {name: parameter.detach().clone() for name, parameter in policy.named.items()}
    row = policy.learn(TrainingBatch(0, tuple(sequences), batch.identities))
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-4), name
    assert row["dropped_non_finite"] == 1 + lose
    assert 0.1 < row["masked_share"] < 0.9
    norm = float(torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())))
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # AdamW's first moment after one step is a tenth of the gradient it was given; the rate is a third of the peak.
    for name, parameter in model.named_parameters():
        moment = policy.optimizer.state[policy.named[name]]["exp_avg"].double()
        assert torch.allclose(moment, 0.1 * parameter.grad * min(1.0, 1.0 / norm), atol=1e-6 * norm, rtol=1e-3), name
        step = (policy.named[name].detach() - before[name]).abs().max()
        assert step <= 1.01e-4 and row["learning_rate"] == pytest.approx(1e-4)


def test_a_large_gradient_is_scaled_to_its_norm(made: tuple[Run, Path], batch: TrainingBatch) -> None:
    policy = _policy(made)
    policy.settings = policy.settings.model_copy(update={"grad_norm": 1e-3})
    row = policy.learn(batch)
    moments = [state["exp_avg"] for state in policy.optimizer.state.values()]
    assert row["grad_norm"] > 1e-2
    assert float(torch.sqrt(sum((m**2).sum() for m in moments))) == pytest.approx(1e-4, rel=1e-3)
