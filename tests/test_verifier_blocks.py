"""Reading rollouts block by block: the same answers, and nothing read behind the block of the first failure."""

import dataclasses

import numpy as np
import pytest
import torch

from environments.registry import make
from protocol.records import ACCEPT, REJECT
from tests.judge_rig import TINY, make_rig, random_policy, reasons, tokens_of, words
from verifier import blocks, fused, toploc
from verifier.blocks import states_in_blocks
from verifier.model import load_policy

CAP = 150


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    policy = random_policy(tmp_path_factory.mktemp("policy"), 3)
    return make_rig(policy, make("word"), tasks=2, samples=3, cap=CAP, stop=(1,))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 32)


class Counted:
    """Counts the columns of new tokens that the model is run over, padding included."""

    def __init__(self, monkeypatch, fail_at=0):
        self.columns = self.calls = 0
        start = fused.start

        def counting(model, columns):
            going = start(model, columns)
            inner = going.run

            def run(ids_BL, positions_BL, real_BC):
                self.calls += 1
                self.columns += ids_BL.numel()
                if self.calls == fail_at:
                    raise RuntimeError("out of memory")
                return inner(ids_BL, positions_BL, real_BC)

            going.run = run
            return going

        monkeypatch.setattr(fused, "start", counting)


def sequences_of(rig, counts):
    rng = np.random.default_rng(0)
    return [(list(rng.integers(2, 60, prompt)), list(rng.integers(2, 60, count))) for prompt, count in counts]


SHAPES = [(3, 150), (17, 40), (9, 32), (5, 33), (30, 1), (12, 97), (40, 128), (2, 64)]


@pytest.mark.parametrize("architecture", ["llama", "qwen"])
def test_blocks_hold_the_states_of_one_pass(rig, small, tmp_path, architecture):
    policy = random_policy(tmp_path / "p", 5, architecture)
    sequences = sequences_of(rig, SHAPES)
    whole = {i: states for batch in policy.states(sequences) for i, states in batch}
    parts: dict[int, list[torch.Tensor]] = {i: [] for i in whole}
    for pieces in states_in_blocks(policy, sequences, lambda i: True):
        for i, at, states_NH in pieces:
            assert at == sum(map(len, parts[i])), "in order, without gaps"
            assert at % 32 == 0 and len(states_NH), "a block begins where a proof chunk begins"
            parts[i].append(states_NH.clone())
    for i, states_NH in whole.items():
        again = torch.cat(parts[i])
        assert again.shape == states_NH.shape
        assert torch.allclose(again, states_NH, atol=2e-5), "the same but for rounding"
    assert [len(parts[i]) for i in range(len(SHAPES))] == [4, 2, 1, 2, 1, 3, 3, 2]


def test_a_rollout_that_no_longer_stands_is_read_no_further(rig, small, monkeypatch):
    sequences = sequences_of(rig, SHAPES)
    counted = Counted(monkeypatch)
    everything = [i for pieces in states_in_blocks(rig.policy, sequences, lambda i: True) for i, _, _ in pieces]
    honest, counted.columns = counted.columns, 0
    seen = [i for pieces in states_in_blocks(rig.policy, sequences, lambda i: i == 0) for i, _, _ in pieces]
    assert [seen.count(i) for i in range(8)] == [everything.count(0)] + [1] * 7 and everything.count(0) == 4
    assert counted.columns < honest * 0.8
    # the one that goes on alone gets the states it would have had beside the others
    alone = [s for pieces in states_in_blocks(rig.policy, sequences, lambda i: i == 0) for i, _, s in pieces if i == 0]
    (whole,) = [s for batch in rig.policy.states(sequences[:1]) for _, s in batch]
    assert torch.allclose(torch.cat(alone), whole, atol=2e-5)


def test_honest_rollouts_hold_in_blocks_as_in_one_pass(rig, monkeypatch):
    once = rig.judge(rig.honest)
    assert max(len(tokens_of(r)) for r in rig.honest.rollouts) > 64
    monkeypatch.setattr(blocks, "BLOCK", 32)
    parted = rig.judge(rig.honest)
    assert parted.outcomes == once.outcomes and set(reasons(once)) == {"holds"}
    for one, other in zip(once.details, parted.details, strict=True):
        assert one.reward == other.reward and [n.name for n in one.numbers] == [n.name for n in other.numbers]
        assert np.allclose(np.frombuffer(one.logprobs, "<f4"), np.frombuffer(other.logprobs, "<f4"), atol=1e-5)
        assert len(one.logprobs) == len(other.logprobs)


def garbage(rig, seed=0):
    """Random tokens with proofs and log-probabilities of the right shape, up to the lease's cap."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for rollout in rig.honest.rollouts:
        tokens = [int(t) for t in rng.integers(2, 60, CAP)]
        proofs = tuple(toploc.build_proofs(rng.standard_normal((CAP, rig.policy.hidden)).astype(np.float32)))
        rollouts.append(
            dataclasses.replace(
                rollout, tokens=words(tokens), logprobs=np.full(CAP, -3, "<f4").tobytes(), finish=1, proofs=proofs
            )
        )
    return dataclasses.replace(rig.honest, rollouts=tuple(rollouts))


def test_garbage_of_any_length_costs_one_block(rig, small, monkeypatch):
    counted = Counted(monkeypatch)
    judged = rig.judge(garbage(rig))
    assert set(reasons(judged)) == {"proof-mismatch"}
    longest = max(len(rig.policy.tokenizer.encode(rig.environment.task(t).prompt).ids) for t in rig.lease.tasks)
    assert counted.columns <= len(judged.outcomes) * (longest + 32)
    for detail in judged.details:
        numbers = {n.name: n.value for n in detail.numbers}
        assert numbers["tokens_read"] == 32 and numbers["chunk_at"] == 0 and detail.logprobs == b""


@pytest.mark.parametrize(("at", "read"), [(5, 32), (31, 32), (32, 64), (63, 64), (64, 128), (127, 128)])
def test_one_edited_token_is_found_in_its_block_and_the_rest_is_not_read(rig, small, at, read):
    position = max(range(len(rig.honest.rollouts)), key=lambda i: len(rig.honest.rollouts[i].tokens))
    rollout = rig.honest.rollouts[position]
    tokens = tokens_of(rollout)
    assert len(tokens) > 130
    tokens[at] = 2 + (tokens[at] + 7) % 50
    edited = rig.prove(rollout, tokens)  # proofs and log-probabilities are the right model's on these tokens
    rollouts = list(rig.honest.rollouts)
    rollouts[position] = edited
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))
    assert judged.outcomes[position].reason == "token-not-forced"
    numbers = {n.name: n.value for n in judged.details[position].numbers}
    assert numbers["token_at"] == at and numbers["tokens_read"] == read
    assert [o.outcome for i, o in enumerate(judged.outcomes) if i != position] == [ACCEPT] * 5


def test_a_fault_of_the_model_decides_only_what_was_not_read(rig, small, monkeypatch):
    """Memory runs out in the second block: what failed in the first is rejected, the rest is undecided."""
    rollouts = list(rig.honest.rollouts)
    rollouts[0] = garbage(rig).rollouts[0]
    at_once = any(len(rollout.tokens) <= 4 * blocks.BLOCK for rollout in rollouts)  # read first, in two passes
    Counted(monkeypatch, fail_at=5 if at_once else 3)  # the prompts, the first block, then this
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))
    assert judged.outcomes[0].outcome == REJECT and judged.outcomes[0].reason == "proof-mismatch"
    assert "validator-failed" in reasons(judged)[1:] and set(reasons(judged)[1:]) <= {"validator-failed", "holds"}


def test_equal_rollouts_are_prefilled_once_and_checked_one_by_one(monkeypatch):
    rig = make_rig(load_policy(TINY), make("word"), tasks=4, samples=8, cap=9, stop=(1,))
    rollouts = rig.honest.rollouts
    distinct = {(r.task, r.tokens): i for i, r in enumerate(rollouts)}
    assert len(distinct) < len(rollouts), "the rig should give some answers twice"
    last = next(i for i in distinct.values() if [r.tokens for r in rollouts].count(rollouts[i].tokens) > 1)
    twins = [i for i, r in enumerate(rollouts) if (r.task, r.tokens) == (rollouts[last].task, rollouts[last].tokens)]
    counted = Counted(monkeypatch)
    whole = rig.judge(rig.honest)
    longest = max(len(tokens_of(rollouts[i])) for i in distinct.values())
    prompts = counted.columns - len(distinct) * (longest - 1)
    assert prompts <= 4 * 16, "each distinct prompt once, each distinct rollout once"

    for position in twins:
        alone = rollouts[position]
        wrong_proof = bytes([*alone.proofs[0][:-2], alone.proofs[0][-2] ^ 1, alone.proofs[0][-1]])
        assert rig.only(position, dataclasses.replace(alone, proofs=(wrong_proof,))) == "proof-mismatch"
        wrong_logprobs = (np.frombuffer(alone.logprobs, "<f4") + np.float32(0.01)).tobytes()
        assert rig.only(position, dataclasses.replace(alone, logprobs=wrong_logprobs)) == "logprob-mismatch"
        assert rig.only(position, dataclasses.replace(alone, reward=7.0)) == "reward-mismatch"
        numbers = {n.name: n.value for n in whole.details[position].numbers}
        assert numbers["tokens_not_first"] == 0, "the margin is taken with each rollout's own seed"
    other = next(i for i in distinct.values() if rollouts[i].task == rollouts[last].task and i not in twins)
    forced = dataclasses.replace(rollouts[other], sample=rollouts[last].sample)
    assert rig.only(last, forced) == "token-not-forced", "another's honest tokens are not what this seed forces"
