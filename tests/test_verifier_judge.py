"""`verifier.judge` on real submissions: honest ones of the real decoder, and every way to be wrong.

The policy is the checked-in tiny model, or a small random one where rollouts must be long; rollouts come from
`node.decode`, exactly as an engine makes them.
"""

from __future__ import annotations

import copy
import dataclasses
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from environments.registry import make
from environments.word import Word
from protocol import codec
from protocol.errors import DecodeError, ReasonCode
from protocol.records import (
    FINISH_EOS,
    FINISH_LENGTH,
    INCONCLUSIVE,
    Lease,
    Rollout,
)
from tests.judge_rig import TINY, Rig, make_rig, random_policy, reasons, tokens_of, words
from verifier import toploc
from verifier.claims import contradiction, scored_purely
from verifier.errors import PolicyError, VerifierError
from verifier.judge import decompress_submission, judge, judge_upload
from verifier.model import PolicyModel, load_policy, prompt_ids
from verifier.statistics import measured, values


@pytest.fixture(scope="module")
def tiny() -> Rig:
    """Four tasks by eight samples of word reversal: what the demo's nodes submit all day."""
    return make_rig(load_policy(TINY), make("word"), 4, 8, 9, (1,))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Rollouts of up to 80 tokens, three chunks: nothing ends early but by its seed."""
    policy = random_policy(tmp_path_factory.mktemp("long"), 1)
    return make_rig(policy, make("word"), 2, 5, 80, (1,))


# --- honest ---------------------------------------------------------------------------------------------------------


def test_honest_rollouts_hold_whatever_the_decoding_batch(tiny: Rig, long: Rig) -> None:
    for rig in (tiny, long):
        for rows in (1, 3, 128):
            judged = rig.judge(rig.answer(batch_rows=rows))
            assert set(reasons(judged)) == {"holds"}
            limits = rig.run.manifest.thresholds
            for detail in judged.details:
                numbers = {n.name: n.value for n in detail.numbers}
                assert numbers["proof_median"] <= limits.proof_median / 3 and numbers["proof_outliers"] == 0
                assert numbers["token_margin"] <= limits.token_margin / 5
                assert numbers["logprob_error"] <= limits.logprob / 2
    assert max(len(r.proofs) for r in long.honest.rollouts) == 3


def test_an_accepted_rollout_carries_the_verifiers_own_numbers(tiny: Rig) -> None:
    judged = tiny.judge(tiny.honest)
    assert {r.reward for r in tiny.honest.rollouts} == {0.0, 1.0}, "the rig should earn some rewards and miss some"
    for rollout, detail in zip(tiny.honest.rollouts, judged.details, strict=True):
        own = np.frombuffer(detail.logprobs, dtype="<f4")
        np.testing.assert_allclose(own, np.frombuffer(rollout.logprobs, dtype="<f4"), atol=1e-4)
        assert detail.reward == rollout.reward
    assert codec.decode(type(judged.verdict_details()), codec.encode(judged.verdict_details()))


def test_a_submission_of_32_rollouts_is_cheap(tiny: Rig) -> None:
    raw = codec.encode(tiny.honest)
    judge(tiny.run, tiny.lease, raw, tiny.policy, tiny.environment)
    start = time.process_time()
    for _ in range(3):
        judge(tiny.run, tiny.lease, raw, tiny.policy, tiny.environment)
    assert (time.process_time() - start) / 3 < 0.25


# --- other weights ----------------------------------------------------------------------------------------------------


def quantise(model: torch.nn.Module) -> torch.nn.Module:
    """Every matrix rounded to 8 bits a weight, one scale a row."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
                weight.copy_((weight / scale).round() * scale)
    return other


def without_top_layer(model: torch.nn.Module) -> torch.nn.Module:
    other = copy.deepcopy(model)
    other.model.layers = other.model.layers[:-1]
    other.config.num_hidden_layers -= 1
    return other


@pytest.mark.parametrize("name", ["tiny", "long"])
def test_quantised_weights_with_their_own_states_do_not_match(name: str, request: pytest.FixtureRequest) -> None:
    rig = request.getfixturevalue(name)
    assert set(reasons(rig.judge(rig.answer(quantise(rig.policy.model))))) == {"proof-mismatch"}


def test_weights_one_small_step_away_do_not_match(tiny: Rig) -> None:
    stale = copy.deepcopy(tiny.policy.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in stale.parameters():
            weight += 1e-5 * torch.sign(torch.randn(weight.shape, generator=generator))
    assert set(reasons(tiny.judge(tiny.answer(stale)))) == {"proof-mismatch"}


@pytest.mark.parametrize("name", ["tiny", "long"])
def test_other_weights_in_part_of_a_rollout_do_not_match(name: str, request: pytest.FixtureRequest) -> None:
    """The right weights for the first 60% of each chunk, int8 for the rest: its median is honest, its tail is not."""
    rig = request.getfixturevalue(name)
    other = PolicyModel(quantise(rig.policy.model), rig.policy.tokenizer)
    rollouts = []
    for rollout in rig.honest.rollouts:
        prompt = prompt_ids(rig.policy.tokenizer, rig.environment.task(rollout.task).prompt)
        sequence = [(prompt, tokens_of(rollout))]
        mixed, cheap = (policy.prefill(sequence)[0].states_NH for policy in (rig.policy, other))
        late = np.arange(len(mixed)) % 32 >= 0.6 * min(32, len(mixed))
        assert late.any()
        mixed[late] = cheap[late]
        rollouts.append(dataclasses.replace(rollout, proofs=tuple(toploc.build_proofs(mixed))))
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))
    assert set(reasons(judged)) == {"proof-mismatch"}


@pytest.mark.parametrize("name", ["tiny", "long"])
def test_a_smaller_models_tokens_reproved_by_the_right_one_are_not_forced(
    name: str, request: pytest.FixtureRequest
) -> None:
    rig = request.getfixturevalue(name)
    cheap = rig.answer(without_top_layer(rig.policy.model))
    proved = tuple(rig.prove(r, tokens_of(r)) for r in cheap.rollouts)
    judged = rig.judge(dataclasses.replace(cheap, rollouts=proved))
    for honest, made, outcome in zip(rig.honest.rollouts, proved, judged.outcomes, strict=True):
        assert outcome.reason == ("holds" if made.tokens == honest.tokens else "token-not-forced")
    assert "token-not-forced" in reasons(judged)


def test_another_temperature_is_not_forced(tiny: Rig) -> None:
    cold = tiny.answer(temperature=0.3)
    proved = tuple(tiny.prove(r, tokens_of(r)) for r in cold.rollouts)
    judged = tiny.judge(dataclasses.replace(cold, rollouts=proved))
    for honest, made, outcome in zip(tiny.honest.rollouts, proved, judged.outcomes, strict=True):
        assert outcome.reason == ("holds" if made.tokens == honest.tokens else "token-not-forced")
    assert "token-not-forced" in reasons(judged)


# --- one rollout wrong, each for its own reason -----------------------------------------------------------------------


def position_of(rig: Rig, wanted: Callable[[Rollout], bool]) -> tuple[int, Rollout]:
    return next((i, r) for i, r in enumerate(rig.honest.rollouts) if wanted(r))


def test_an_edited_token_with_its_old_proof_does_not_match(long: Rig) -> None:
    i, rollout = position_of(long, lambda r: len(tokens_of(r)) > 40)
    edited = tokens_of(rollout)
    edited[10] = 2 + (edited[10] - 1) % 40
    assert long.only(i, dataclasses.replace(rollout, tokens=words(edited))) == "proof-mismatch"


def test_an_edited_last_token_is_not_forced(long: Rig) -> None:
    """The last token produced no state, so the old proof still holds; its seed does not."""
    i, rollout = position_of(long, lambda r: r.finish == FINISH_LENGTH)
    edited = tokens_of(rollout)
    edited[-1] = 2 + (edited[-1] - 1) % 40
    assert long.only(i, dataclasses.replace(rollout, tokens=words(edited))) == "token-not-forced"


def test_an_edited_token_proved_again_is_not_forced(long: Rig) -> None:
    i, rollout = position_of(long, lambda r: len(tokens_of(r)) > 40)
    edited = tokens_of(rollout)
    edited[20] = 2 + (edited[20] - 1) % 40
    assert long.only(i, long.prove(rollout, edited)) == "token-not-forced"


def test_a_transplanted_proof_does_not_match(tiny: Rig, long: Rig) -> None:
    for rig in (tiny, long):
        i, rollout = 0, rig.honest.rollouts[0]
        donor = next(
            r for r in rig.honest.rollouts[1:] if r.tokens != rollout.tokens and len(r.proofs) == len(rollout.proofs)
        )
        assert rig.only(i, dataclasses.replace(rollout, proofs=donor.proofs)) == "proof-mismatch"


def test_a_proof_with_every_sign_flipped_does_not_match(long: Rig) -> None:
    rollout = long.honest.rollouts[0]
    prompt = prompt_ids(long.policy.tokenizer, long.environment.task(rollout.task).prompt)
    (pre,) = long.policy.prefill([(prompt, tokens_of(rollout))])
    assert long.only(0, dataclasses.replace(rollout, proofs=tuple(toploc.build_proofs(pre.states_NH)))) == "holds"
    flipped = tuple(toploc.build_proofs(-pre.states_NH))
    assert long.only(0, dataclasses.replace(rollout, proofs=flipped)) == "proof-mismatch"


@pytest.mark.parametrize(
    "mangle",
    [
        pytest.param(lambda p: (), id="none"),
        pytest.param(lambda p: (*p, p[0]), id="one too many"),
        pytest.param(lambda p: (p[0][:-2], *p[1:]), id="cut"),
        pytest.param(lambda p: (p[0][:2], *p[1:]), id="no coefficients"),
        pytest.param(lambda p: (b"", *p[1:]), id="empty chunk"),
        pytest.param(lambda p: (bytes(2) + p[0][2:], *p[1:]), id="modulus 0"),
        pytest.param(lambda p: ((32768).to_bytes(2, "big") + p[0][2:], *p[1:]), id="modulus too low"),
        pytest.param(lambda p: ((65498).to_bytes(2, "big") + p[0][2:], *p[1:]), id="modulus too high"),
        pytest.param(lambda p: (p[0][:2] + (65497).to_bytes(2, "big") + p[0][4:], *p[1:]), id="coefficient"),
    ],
)
def test_a_proof_of_the_wrong_shape_is_malformed(
    tiny: Rig, long: Rig, mangle: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]
) -> None:
    for rig in (tiny, long):
        rollout = rig.honest.rollouts[2]
        assert rig.only(2, dataclasses.replace(rollout, proofs=mangle(rollout.proofs))) == "proof-malformed"


def test_a_null_proof_does_not_match(tiny: Rig) -> None:
    rollout = tiny.honest.rollouts[0]
    null = (65497).to_bytes(2, "big") + bytes(len(rollout.proofs[0]) - 2)
    assert tiny.only(0, dataclasses.replace(rollout, proofs=(null,))) == "proof-mismatch"


def test_every_wrong_ending_is_termination(tiny: Rig) -> None:
    i, ended = position_of(tiny, lambda r: r.finish == FINISH_EOS and 5 <= len(tokens_of(r)) < 9)
    tokens = tokens_of(ended)
    wrong = {
        "stop inside": [tokens[0], 1, *tokens[2:]],
        "stop twice": [*tokens, 1],
        "early stop": tokens[:-1],
        "over the cap": [*tokens[:-1], *[5] * (9 - len(tokens) + 1), 1],
        "nothing": [],
    }
    for finish in (FINISH_EOS, FINISH_LENGTH):
        for name, ids in wrong.items():
            claim = dataclasses.replace(ended, tokens=words(ids), logprobs=bytes(4 * len(ids)), finish=finish)
            assert tiny.only(i, claim) == "termination", name
    assert tiny.only(i, dataclasses.replace(ended, finish=FINISH_LENGTH)) == "termination"


def test_stopping_early_with_an_honest_proof_is_not_forced(tiny: Rig) -> None:
    i, rollout = position_of(tiny, lambda r: len(tokens_of(r)) >= 5)
    assert tiny.only(i, tiny.prove(rollout, [*tokens_of(rollout)[:2], 1])) == "token-not-forced"
    assert tiny.only(i, tiny.prove(rollout, [1])) == "token-not-forced"


def test_a_token_outside_the_vocabulary_is_out_of_range(tiny: Rig) -> None:
    i, rollout = position_of(tiny, lambda r: r.finish == FINISH_EOS)
    for bad in (64, 1 << 20, (1 << 32) - 1):
        ids = [bad, *tokens_of(rollout)[1:]]
        assert tiny.only(i, dataclasses.replace(rollout, tokens=words(ids))) == "token-range"


def test_a_rollout_in_anothers_place_is_the_wrong_task(tiny: Rig) -> None:
    rollouts = tiny.honest.rollouts
    assert tiny.only(0, rollouts[1]) == "wrong-task"
    assert tiny.only(8, dataclasses.replace(rollouts[8], task=rollouts[0].task)) == "wrong-task"
    assert tiny.only(3, dataclasses.replace(rollouts[3], sample=99)) == "wrong-task"
    swapped = (rollouts[1], rollouts[0], *rollouts[2:])
    judged = tiny.judge(dataclasses.replace(tiny.honest, rollouts=swapped))
    assert reasons(judged) == ["wrong-task"] * 2 + ["holds"] * 30


def test_another_samples_tokens_are_not_forced(tiny: Rig) -> None:
    """Best of n: the better of two samples handed in as both. Task, proof and reward are right, the seed is not."""
    rollouts = tiny.honest.rollouts
    i = next(i for i in range(0, 32, 8) if rollouts[i].tokens != rollouts[i + 1].tokens)
    assert tiny.only(i, dataclasses.replace(rollouts[i + 1], sample=0)) == "token-not-forced"


def test_a_rollout_longer_than_the_context_is_held_against_nobody(tmp_path: Path) -> None:
    rig = make_rig(random_policy(tmp_path / "m", 3), make("word"), 1, 2, 250, (1,))
    judged = rig.judge(rig.honest)
    assert set(reasons(judged)) == {"holds"}
    rig.policy.max_context = 40
    for rollout, outcome in zip(rig.honest.rollouts, rig.judge(rig.honest).outcomes, strict=True):
        fits = len(tokens_of(rollout)) < 30
        assert outcome.reason == ("holds" if fits else "validator-failed")


def test_a_replay_under_a_new_lease_is_not_forced(tiny: Rig) -> None:
    """The same tasks with another nonce: everything is right but the seed."""
    rig = dataclasses.replace(tiny, lease=dataclasses.replace(tiny.lease, lease_id=b"n" * 16, nonce=b"n" * 32))
    replayed = dataclasses.replace(tiny.honest, lease_id=b"n" * 16)
    judged = rig.judge(replayed)
    fresh = rig.answer()
    for old, new, outcome in zip(replayed.rollouts, fresh.rollouts, judged.outcomes, strict=True):
        assert outcome.reason == ("holds" if old.tokens == new.tokens else "token-not-forced")
    assert reasons(judged).count("token-not-forced") > 16
    assert set(reasons(rig.judge(tiny.honest))) == {"wrong-task"}, "another lease's submission"


def test_a_reward_that_is_not_earned_is_a_mismatch(tiny: Rig) -> None:
    i, lost = position_of(tiny, lambda r: r.reward == 0.0)
    assert tiny.only(i, dataclasses.replace(lost, reward=1.0)) == "reward-mismatch"
    j, won = position_of(tiny, lambda r: r.reward == 1.0)
    assert tiny.only(j, dataclasses.replace(won, reward=0.0)) == "reward-mismatch"
    assert tiny.only(j, dataclasses.replace(won, reward=1.0 + 1e-12)) == "reward-mismatch"


class Judged(Word):
    """Words whose answers somebody judges, who may see it otherwise the next time."""

    name = "word-judged"
    scoring = "judge"


def test_where_scoring_is_not_pure_a_claimed_reward_is_written_down_and_the_verifiers_counts() -> None:
    rig = make_rig(load_policy(TINY), Judged({}), 1, 8, 9, (1,))
    claims = [0.25 + rollout.reward / 2 for rollout in rig.honest.rollouts]
    claimed = tuple(dataclasses.replace(r, reward=c) for r, c in zip(rig.honest.rollouts, claims, strict=True))
    judged = rig.judge(dataclasses.replace(rig.honest, rollouts=claimed))
    assert reasons(judged) == ["holds"] * 8
    assert [detail.reward for detail in judged.details] == [rollout.reward for rollout in rig.honest.rollouts]
    numbers = [{number.name: number.value for number in detail.numbers} for detail in judged.details]
    assert [one["reward_claimed"] for one in numbers] == claims
    x = values("reward_claimed", measured(judged.verdict_details(), judged.outcomes, 8))
    assert set(x) <= {1.25, 0.75}, "0.25 more than an answer earned, or 0.25 less"
    pure = [scored_purely(rig.run.manifest, lease) for lease in (rig.lease, make_lease(rig, bytes(32)))]
    assert pure == [False, False], "and none of another environment"
    for rollout, detail in zip(claimed, judged.details, strict=True):
        bound = rig.run.manifest.thresholds.logprob
        assert contradiction(rollout, detail, bound, pure=False) == ""
        assert contradiction(rollout, detail, bound).startswith("with reward")
        prompt = np.asarray(prompt_ids(rig.policy.tokenizer, rig.environment.task(rollout.task).prompt), "<u4")
        assert contradiction(rollout, detail, bound, prompt=prompt.tobytes(), pure=False) == ""
        assert "other tokens" in contradiction(rollout, detail, bound, prompt=b"", pure=False)


def make_lease(rig: Rig, environment: bytes) -> Lease:
    return dataclasses.replace(rig.lease, environment=environment)


def test_a_log_probability_that_is_off_is_a_mismatch(tiny: Rig) -> None:
    rollout = tiny.honest.rollouts[5]
    claimed = np.frombuffer(rollout.logprobs, dtype="<f4").copy()
    for at, change in ((0, 1e-3), (len(claimed) - 1, -1e-3), (1, 3e38)):
        wrong = claimed.copy()
        wrong[at] += np.float32(change)
        assert tiny.only(5, dataclasses.replace(rollout, logprobs=wrong.tobytes())) == "logprob-mismatch"


def under(rig: Rig, **limits: float) -> Rig:
    """The same rig in a run whose manifest has other thresholds."""
    manifest = rig.run.manifest
    manifest = dataclasses.replace(manifest, thresholds=dataclasses.replace(manifest.thresholds, **limits))
    return dataclasses.replace(rig, run=dataclasses.replace(rig.run, manifest=manifest))


def test_every_threshold_is_the_manifests_and_binds_where_it_says(long: Rig) -> None:
    """One claim off by a known amount for each threshold: a bound just above it accepts, one just below it rejects."""
    i, rollout = position_of(long, lambda r: r.finish == FINISH_LENGTH)
    other = tokens_of(rollout)
    other[-1] = 2 + (other[-1] - 1) % 40
    claimed = np.frombuffer(rollout.logprobs, dtype="<f4") + np.float32(0.01)
    prompt = prompt_ids(long.policy.tokenizer, long.environment.task(rollout.task).prompt)
    states_NH = long.policy.prefill([(prompt, tokens_of(rollout))])[0].states_NH
    wide = {"proof_median": 1.0, "proof_gate": 1.0, "token_margin": 1e3, "logprob": 1e3}
    for name, number, reason, claim in (
        ("token_margin", "token_margin", "token-not-forced", long.prove(rollout, other)),
        ("logprob", "logprob_error", "logprob-mismatch", dataclasses.replace(rollout, logprobs=claimed.tobytes())),
        ("proof_median", "proof_median", "proof-mismatch",
         dataclasses.replace(rollout, proofs=tuple(toploc.build_proofs(states_NH * np.float32(1.01))))),
    ):  # fmt: skip
        rollouts = (*long.honest.rollouts[:i], claim, *long.honest.rollouts[i + 1 :])
        submission = dataclasses.replace(long.honest, rollouts=rollouts)
        judged = under(long, **wide).judge(submission)
        assert reasons(judged)[i] == "holds"
        off = {n.name: n.value for n in judged.details[i].numbers}[number]
        assert 0.005 < off < 100
        for factor, expected in ((1.001, "holds"), (0.999, reason)):
            assert reasons(under(long, **wide | {name: factor * off}).judge(submission))[i] == expected
    for gate, allowed, expected in ((0.02, 0, "holds"), (0.005, 127, "proof-mismatch"), (0.005, 128, "holds")):
        limits = wide | {"proof_gate": gate, "proof_outliers": allowed}
        assert reasons(under(long, **limits).judge(submission))[i] == expected


def test_parts_that_do_not_fit_together_are_format(tiny: Rig) -> None:
    rollout = tiny.honest.rollouts[4]
    count = len(tokens_of(rollout))
    for bad in (
        dataclasses.replace(rollout, logprobs=b""),
        dataclasses.replace(rollout, logprobs=rollout.logprobs + bytes(4)),
        dataclasses.replace(rollout, logprobs=struct.pack("<f", float("nan")) * count),
        dataclasses.replace(rollout, logprobs=struct.pack("<f", float("-inf")) * count),
        dataclasses.replace(rollout, finish=2),
        dataclasses.replace(rollout, finish=255),
    ):
        assert tiny.only(4, bad) == "format"


def test_a_one_token_rollout_can_be_honest(tmp_path: Path) -> None:
    policy = load_policy(TINY)
    rig = make_rig(policy, make("word"), 1, 4, 1, (1,))
    assert all(len(tokens_of(r)) == 1 for r in rig.honest.rollouts)
    assert len(rig.honest.rollouts[0].proofs[0]) == 2 + 4 * 96
    assert set(reasons(rig.judge(rig.honest))) == {"holds"}


# --- whole submissions ------------------------------------------------------------------------------------------------


def test_missing_or_extra_rollouts_fail_the_submission(tiny: Rig) -> None:
    rollouts = tiny.honest.rollouts
    for wrong in (rollouts[:-1], (*rollouts, rollouts[0]), ()):
        judged = tiny.judge(dataclasses.replace(tiny.honest, rollouts=wrong))
        assert reasons(judged) == ["format"] * 32


def test_bytes_that_are_no_submission_fail_it(tiny: Rig) -> None:
    for raw in (b"", b"\xc1", b"\x93", codec.encode(tiny.lease), codec.encode(tiny.honest)[:-1]):
        judged = judge(tiny.run, tiny.lease, raw, tiny.policy, tiny.environment)
        assert reasons(judged) == ["format"] * 32


def test_a_submission_longer_than_its_lease_allows_is_not_even_decoded(tiny: Rig) -> None:
    """64 MiB of nils would be half a gigabyte of Python list."""
    raw = b"\xdd" + struct.pack(">I", 64 << 20) + b"\xc0" * (64 << 20)
    tracemalloc.start()
    judged = judge(tiny.run, tiny.lease, raw, tiny.policy, tiny.environment)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons(judged) == ["format"] * 32 and peak < 1 << 20


def test_long_vocabularies_are_replayed_in_tiles(tiny: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    import verifier.judge as module

    whole = tiny.judge(tiny.honest)
    monkeypatch.setattr(module, "_TILE_LOGITS", 64 * 5)
    tiled = tiny.judge(tiny.honest)
    assert reasons(tiled) == reasons(whole)
    for a, b in zip(whole.details, tiled.details, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(a.logprobs, dtype="<f4"), np.frombuffer(b.logprobs, dtype="<f4"), atol=2e-5
        )


def test_an_upload_is_opened_only_as_declared(tiny: Rig) -> None:
    raw = codec.encode(tiny.honest)
    blob = zstandard.ZstdCompressor(level=3).compress(raw)
    assert decompress_submission(blob, len(raw)) == raw
    good = judge_upload(tiny.run, tiny.lease, blob, len(raw), tiny.policy, tiny.environment)
    assert set(reasons(good)) == {"holds"}
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    undeclared = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(raw)
    for bad, length, code in (
        (blob, len(raw) - 1, ReasonCode.LENGTH_MISMATCH),
        (bomb, len(raw), ReasonCode.LENGTH_MISMATCH),
        (undeclared, len(raw), ReasonCode.LENGTH_MISMATCH),
        (blob, 1 << 40, ReasonCode.OVERSIZE),
        (blob + blob, len(raw), ReasonCode.MALFORMED),
        (blob[:-3], len(raw), ReasonCode.MALFORMED),
        (b"", 0, ReasonCode.MALFORMED),
        (b"not zstd at all", 15, ReasonCode.MALFORMED),
    ):
        with pytest.raises(DecodeError) as caught:
            decompress_submission(bad, length)
        assert caught.value.code == code
        judged = judge_upload(tiny.run, tiny.lease, bad, length, tiny.policy, tiny.environment)
        assert reasons(judged) == ["format"] * 32
    judged = judge_upload(tiny.run, tiny.lease, bomb, 64 << 20, tiny.policy, tiny.environment)
    assert reasons(judged) == ["format"] * 32


def test_a_frame_may_not_ask_for_more_window_than_a_submission_needs() -> None:
    """Hand-made, since a compressor never asks for more than it has: 64 MiB of window for 5 bytes."""
    for exponent, code in ((16, ReasonCode.OVERSIZE), (13, None)):
        body = b"hello"
        frame = b"\x28\xb5\x2f\xfd\x80" + bytes([exponent << 3]) + struct.pack("<I", len(body))
        frame += ((len(body) << 3) | 1).to_bytes(3, "little") + body
        if code is None:
            assert decompress_submission(frame, len(body)) == body
            continue
        with pytest.raises(DecodeError) as caught:
            decompress_submission(frame, len(body))
        assert caught.value.code == code


def test_the_wrong_policy_environment_or_lease_is_the_callers_error(tiny: Rig) -> None:
    raw = codec.encode(tiny.honest)
    with pytest.raises(VerifierError, match="environment"):
        judge(tiny.run, tiny.lease, raw, tiny.policy, make("word", {"transform": "sort"}))
    for samples in (0, 1 << 31):
        with pytest.raises(VerifierError, match="rollouts"):
            judge(tiny.run, dataclasses.replace(tiny.lease, samples=samples), raw, tiny.policy, tiny.environment)
    policy = load_policy(TINY, root=b"r" * 32)
    with pytest.raises(VerifierError, match="policy"):
        judge(tiny.run, tiny.lease, raw, policy, tiny.environment)
    lease = dataclasses.replace(tiny.lease, root=b"r" * 32)
    assert set(reasons(judge(tiny.run, lease, raw, policy, tiny.environment))) == {"holds"}


def test_a_policy_that_computes_nan_decides_nothing(tiny: Rig, tmp_path: Path) -> None:
    policy = load_policy(TINY)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    judged = judge(tiny.run, tiny.lease, codec.encode(tiny.honest), policy, tiny.environment)
    assert {(o.outcome, o.reason) for o in judged.outcomes} == {(INCONCLUSIVE, "validator-failed")}


def test_weights_are_swapped_in_place_between_policies(tmp_path: Path) -> None:
    """The audit's way: one model object, the weights of one policy after the other."""
    first, second = random_policy(tmp_path / "a", 1, "qwen3"), random_policy(tmp_path / "b", 2, "qwen3")
    environment = make("word")
    rig = make_rig(second, environment, 1, 4, 40, (1,))
    assert "proof-mismatch" in reasons(judge(rig.run, rig.lease, codec.encode(rig.honest), first, environment))
    first.load_weights(tmp_path / "b", root=bytes(32))
    assert set(reasons(judge(rig.run, rig.lease, codec.encode(rig.honest), first, environment))) == {"holds"}
    with pytest.raises(PolicyError):
        first.load_weights(TINY)
    assert set(reasons(judge(rig.run, rig.lease, codec.encode(rig.honest), first, environment))) == {"holds"}
