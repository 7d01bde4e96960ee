"""`verifier.judge` in the bf16 profile: what a single rollout shows, what it can't, and where the bounds come from.

Nodes compute in bfloat16 here, the verifier in float32 on the same rounded weights. `tiny` is the checked-in model with
the thresholds measured of it; `long` a small random one whose rollouts have up to six chunks.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from environments.registry import make
from protocol.errors import ManifestError
from protocol.manifest import PROFILES, Bf16Thresholds, open_manifest
from protocol.records import ACCEPT, Rollout, RolloutDetail, Submission
from tests.judge_rig import TINY, Rig, make_rig, open_run, random_policy, reasons, tokens_of, words
from tests.test_verifier_judge import without_top_layer
from verifier import blocks, fused, points, profiles, toploc
from verifier.errors import VerifierError
from verifier.judge import Judgement, judge
from verifier.model import PolicyModel, load_policy, prompt_ids
from verifier.profiles import load_to_sample, load_to_verify
from verifier.statistics import measured as measured_of
from verifier.statistics import values

NOISE = Path(__file__).parents[1] / "verifier" / "data"


def measured(name: str) -> Bf16Thresholds:
    """The checked-in thresholds of a model."""
    values = json.loads((NOISE / f"noise-{name}-bf16.json").read_text())
    return Bf16Thresholds(**{field.name: values[field.name] for field in dataclasses.fields(Bf16Thresholds)})


@pytest.fixture(scope="module")
def tiny() -> Rig:
    sampler = load_to_sample(TINY, "bf16").model
    return make_rig(load_to_verify(TINY, "bf16"), make("word"), 4, 8, 9, (1,), bf16=measured("tiny"), generator=sampler)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("long")
    random_policy(folder, 1)
    sampler = load_to_sample(folder, "bf16").model
    verifier = load_to_verify(folder, "bf16")
    # of a chunk of one row, all 48 values are points: nobody measured this model's, so the ceilings hold
    bf16 = dataclasses.replace(measured("tiny"), short_exponents=32, short_mantissa=16.0)
    rig = make_rig(verifier, make("word"), 2, 5, 180, (1,), bf16=bf16, generator=sampler)
    return dataclasses.replace(rig, policy_folder=folder)


def numbers(detail: RolloutDetail) -> dict[str, float]:
    return {number.name: number.value for number in detail.numbers}


def column(judged: Judgement, name: str) -> list[float]:
    return [numbers(detail)[name] for detail in judged.details]


def with_limits(rig: Rig, **limits: float) -> Rig:
    """The same rollouts under another manifest: no code is touched."""
    before = rig.run.manifest
    assert before.bf16 is not None
    manifest = dataclasses.replace(before, bf16=dataclasses.replace(before.bf16, **limits))
    return dataclasses.replace(rig, run=dataclasses.replace(rig.run, manifest=manifest))


def with_rollouts(rig: Rig, change: Callable[[Rollout], Rollout]) -> Submission:
    return dataclasses.replace(rig.honest, rollouts=tuple(change(rollout) for rollout in rig.honest.rollouts))


def rounded_to(model: Any, levels: int) -> Any:
    """Every matrix rounded to `levels` steps either side of 0, one scale a row."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-9) / levels
                weight.copy_((weight.float() / scale).round() * scale)
    return other


# --- honest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "long"])
def test_honest_rollouts_hold_whatever_the_decoding_batch(name: str, request: pytest.FixtureRequest) -> None:
    rig: Rig = request.getfixturevalue(name)
    limits = rig.run.manifest.bf16
    assert limits is not None
    for rows in (1, 3, 128):
        submission = rig.answer(batch_rows=rows)
        judged = rig.judge(submission)
        assert set(reasons(judged)) == {"holds"}
        enough = [len(rollout.proofs) >= limits.rollout_chunks for rollout in submission.rollouts]
        means = column(judged, "mantissa_mean")
        assert max(means) > 0.5 and max(itertools.compress(means, enough), default=0) <= limits.rollout_mantissa
        assert max(column(judged, "exponents")) <= limits.chunk_exponents / 1.5
        assert max(column(judged, "token_margin")) <= limits.token_margin / 3
        assert max(column(judged, "logprob_error")) <= limits.logprob / 2
        assert max(map(abs, column(judged, "mismatch_kl"))) <= 0.1
        for rollout, detail in zip(submission.rollouts, judged.details, strict=True):
            assert detail.logprobs == rollout.logprobs, "the node's, whose rounding chose the tokens"
            rows = points.chunk_rows(len(rollout.tokens) // 4)
            sizes = [toploc.proof_bytes(count, rig.policy.hidden, limbs=1) for count in rows]
            assert [len(chunk) for chunk in rollout.proofs] == sizes and set(sizes[:-1]) <= {258}


def test_details_hold_the_numbers_that_evidence_is_made_from(long: Rig) -> None:
    judged = long.judge(long.honest)
    for rollout, detail in zip(long.honest.rollouts, judged.details, strict=True):
        found = numbers(detail)
        assert set(found) == {
            "mantissa_mean", "exponents", "token_margin", "margin_sum", "tokens_not_first", "logprob_error",
            "mismatch_kl", "mismatch_k3",
        }  # fmt: skip
        assert all(np.isfinite(value) for value in found.values())
        assert found["token_margin"] <= found["margin_sum"]
        assert (found["tokens_not_first"] == 0) == (found["margin_sum"] == 0)
        assert abs(found["mismatch_kl"]) <= found["logprob_error"] < 1 and len(rollout.logprobs) == len(rollout.tokens)
        assert 0 < found["mismatch_k3"] < found["logprob_error"] ** 2
    assert sum(column(judged, "tokens_not_first")) > 0, "rounding decides some tokens, and no rollout is forgiven them"


def test_fp32_details_have_the_sum_of_margins_too(tmp_path: Path) -> None:
    rig = make_rig(load_policy(TINY), make("word"), 2, 2, 9, (1,))
    judged = rig.judge(rig.honest)
    assert all(0 <= numbers(detail)["margin_sum"] < 1e-4 for detail in judged.details)


def test_two_verifiers_reach_the_same_numbers_however_they_compute(long: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel, batch and block change a float32 verifier's numbers far below any bound: the verdict is the same."""
    expected = long.judge(long.honest)
    other = load_policy(long.policy_folder, torch.float32, weights=torch.bfloat16, attention="eager")
    assert isinstance(fused.start(other.model, 8), fused.Reference)
    monkeypatch.setattr(blocks, "BLOCK", 64)
    monkeypatch.setattr(blocks, "_CACHED_TOKENS", 400)
    again = dataclasses.replace(long, policy=other).judge(long.honest)
    assert again.outcomes == expected.outcomes
    for one, two in zip(expected.details, again.details, strict=True):
        assert one.logprobs == two.logprobs
        for name, value in numbers(one).items():
            # a value that lies between two bfloat16 may round to the other one: a point of 128 moves by 1
            assert numbers(two)[name] == pytest.approx(value, abs=0.05 if name == "mantissa_mean" else 2e-3), name


# --- dishonest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "long"])
def test_four_bit_weights_a_missing_layer_and_anothers_proofs_are_rejected(
    name: str, request: pytest.FixtureRequest
) -> None:
    rig: Rig = request.getfixturevalue(name)
    for other in (rounded_to(rig.generator, 7), without_top_layer(rig.generator)):
        judged = rig.judge(rig.answer(other))
        assert reasons(judged).count("proof-mismatch") >= 0.95 * len(judged.outcomes)
    lengths: dict[int, list[Rollout]] = {}
    for rollout in rig.honest.rollouts:
        lengths.setdefault(len(rollout.proofs), []).append(rollout)
    strangers = [group for group in lengths.values() if len({rollout.proofs for rollout in group}) > 1]
    proofs = {rollout.proofs for rollout in strangers[0]}
    for rollout in strangers[0]:
        another = next(other for other in proofs if other != rollout.proofs)
        at = rig.honest.rollouts.index(rollout)
        assert rig.only(at, dataclasses.replace(rollout, proofs=another)) == "proof-mismatch"


def test_int8_and_stale_weights_pass_as_single_rollouts_and_leave_a_trace(tiny: Rig) -> None:
    """What bf16 cannot see in one rollout, said by a test: only numbers over many of them tell."""
    many = dataclasses.replace(tiny, lease=dataclasses.replace(tiny.lease, tasks=tuple(range(100, 116))))
    honest = many.judge(many.answer())
    int8 = many.judge(many.answer(rounded_to(tiny.generator, 127)))
    assert set(reasons(honest)) == set(reasons(int8)) == {"holds"}
    spread = np.std(column(honest, "mantissa_mean")) / len(honest.outcomes) ** 0.5
    assert np.mean(column(int8, "mantissa_mean")) > np.mean(column(honest, "mantissa_mean")) + 4 * spread
    stale = copy.deepcopy(tiny.generator)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in stale.parameters():
            weight.add_(1e-5 * torch.sign(torch.randn(weight.shape, generator=generator)).to(weight.dtype))
    assert set(reasons(many.judge(many.answer(stale)))) == {"holds"}


def test_tokens_that_another_seed_or_greed_chose_are_rejected_after_an_honest_prefill(long: Rig) -> None:
    """The proofs and log-probabilities are the right model's own: only the forced tokens can tell."""
    elsewhere = long.answer(lease=dataclasses.replace(long.lease, nonce=bytes(32)))
    greedy = long.answer(temperature=1e-3)
    for submission in (elsewhere, greedy):
        proved = [long.prove(rollout, tokens_of(rollout)) for rollout in submission.rollouts]
        judged = long.judge(dataclasses.replace(long.honest, rollouts=tuple(proved)))
        said = [
            reason for reason, rollout in zip(reasons(judged), proved, strict=True) if len(tokens_of(rollout)) >= 32
        ]
        assert len(said) >= 4 and set(said) == {"token-not-forced"}


def shifted(rollout: Rollout, at: slice, by: float) -> Rollout:
    values = np.frombuffer(rollout.logprobs, "<f4").copy()
    values[at] += by
    return dataclasses.replace(rollout, logprobs=values.tobytes())


def test_log_probabilities_that_are_trained_on_must_agree_each_and_together(long: Rig) -> None:
    limits = long.run.manifest.bf16
    assert limits is not None
    at = max(range(10), key=lambda i: len(long.honest.rollouts[i].tokens))
    rollout = long.honest.rollouts[at]
    count = len(rollout.tokens) // 4
    assert long.only(at, shifted(rollout, slice(7, 8), -2 * limits.logprob)) == "logprob-mismatch"
    little = 1.5 * (limits.logprob / count + limits.logprob_mean)
    assert little < limits.logprob / 4
    for by in (-little, little):
        assert long.only(at, shifted(rollout, slice(None), by)) == "logprob-mismatch"
    assert long.only(at, shifted(rollout, slice(None), -little / 4)) == "holds"
    likely = int(np.frombuffer(rollout.logprobs, "<f4").argmax())
    above = 0.01 - float(np.frombuffer(rollout.logprobs, "<f4")[likely])
    if above < limits.logprob:
        assert long.only(at, shifted(rollout, slice(likely, likely + 1), above)) == "logprob-mismatch"


def pooled(judged: Judgement, statistic: str, samples: int) -> list[float]:
    return values(statistic, measured_of(judged.verdict_details(), judged.outcomes, samples))


def test_claims_that_lean_within_every_bound_are_accepted_and_add_up(tiny: Rig) -> None:
    """The lie steers what is trained on, by e^sum of a rollout's ratio: nothing is rejected for it, so it counts."""
    limits = tiny.run.manifest.bf16
    assert limits is not None

    def leaning(rollout: Rollout) -> Rollout:
        count = len(rollout.tokens) // 4
        by = min(0.8 * limits.logprob, 0.8 * (limits.logprob + limits.logprob_mean * count) / count)
        return shifted(rollout, slice(None), -by)

    honest, judged = tiny.judge(tiny.honest), tiny.judge(with_rollouts(tiny, leaning))
    assert set(reasons(judged)) == {"holds"}
    below = pooled(judged, "lean_below", 8)
    assert len(below) == len(pooled(honest, "lean_below", 8)) and min(below) == 2.0
    assert np.mean(pooled(honest, "lean_below", 8)) == pytest.approx(1.0, abs=0.15)
    assert pooled(judged, "lean_above", 8) == [0.0] * len(below)


def test_claims_that_cancel_have_no_lean_and_a_divergence(long: Rig) -> None:
    limits = long.run.manifest.bf16
    assert limits is not None

    def zigzag(rollout: Rollout) -> Rollout:
        """Too low on even tokens and as much too high on odd ones, where there is room below 0."""
        own = np.frombuffer(rollout.logprobs, "<f4").copy()
        free = np.flatnonzero(own < -limits.logprob / 2)
        free = free[: len(free) // 2 * 2]
        own[free] += np.where(np.arange(len(free)) % 2, 0.5, -0.5).astype("<f4") * np.float32(limits.logprob)
        return dataclasses.replace(rollout, logprobs=own.tobytes())

    honest, judged = long.judge(long.honest), long.judge(with_rollouts(long, zigzag))
    assert set(reasons(judged)) == {"holds"}
    before, after = (np.array(column(one, "mismatch_kl")) for one in (honest, judged))
    assert np.abs(after - before).max() < 1e-5, "the sum, which moves a rollout's ratio, is as it was"
    assert min(pooled(judged, "mismatch_k3", 5)) > 10 * max(pooled(honest, "mismatch_k3", 5))


def test_equal_claims_hide_no_rollout_of_a_task_from_what_is_summed_up(tiny: Rig) -> None:
    """A node that claims one vector for all answers of a length, within the bounds, and so would be counted once."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, rollout in enumerate(tiny.honest.rollouts):
        groups.setdefault((rollout.task, len(rollout.tokens)), []).append(i)
    rollouts = list(tiny.honest.rollouts)
    for group in groups.values():
        claims = np.stack([np.frombuffer(tiny.honest.rollouts[i].logprobs, "<f4") for i in group])
        middle = np.minimum((claims.max(0) + claims.min(0)) / 2, 0).astype("<f4")
        for i in group:
            rollouts[i] = dataclasses.replace(rollouts[i], logprobs=middle.tobytes())
    wide = with_limits(tiny, logprob=1e3)
    honest, judged = wide.judge(tiny.honest), wide.judge(dataclasses.replace(tiny.honest, rollouts=tuple(rollouts)))
    assert set(reasons(judged)) == {"holds"}
    different = {(rollout.task, rollout.tokens) for rollout in rollouts}
    assert len({rollout.logprobs for rollout in rollouts}) < len(different)
    assert pooled(judged, "mantissa_mean", 8) == pooled(honest, "mantissa_mean", 8)
    assert len(pooled(judged, "mantissa_mean", 8)) == len(different)


# --- thresholds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "number", "reason"),
    [
        ("chunk_exponents", "exponents", "proof-mismatch"),
        ("chunk_mantissa", "mantissa_mean", "proof-mismatch"),
        ("rollout_mantissa", "mantissa_mean", "proof-mismatch"),
        ("token_margin", "token_margin", "token-not-forced"),
        ("logprob", "logprob_error", "logprob-mismatch"),
    ],
)
def test_the_manifests_numbers_decide_and_no_code(long: Rig, limit: str, number: str, reason: str) -> None:
    judged = long.judge(long.honest)
    at = max(range(10), key=lambda i: (len(long.honest.rollouts[i].proofs), column(judged, number)[i]))
    value = column(judged, number)[at]
    assert value > 0 and len(long.honest.rollouts[at].proofs) >= 4
    half = int(value / 2) if limit == "chunk_exponents" else value / 2
    assert reasons(with_limits(long, **{limit: half}).judge(long.honest))[at] == reason


def test_sums_have_their_own_bounds_and_short_rollouts_no_mean(long: Rig) -> None:
    judged = long.judge(long.honest)
    at = int(np.argmax(column(judged, "margin_sum")))
    largest, total = column(judged, "token_margin")[at], column(judged, "margin_sum")[at]
    assert total > 1.01 * largest, "the rig needs a rollout with two margins"
    tight = with_limits(long, token_margin=largest, margin_mean=0.0)
    assert reasons(tight.judge(long.honest))[at] == "token-not-forced"
    enough = with_limits(long, token_margin=largest, margin_mean=total)
    assert reasons(enough.judge(long.honest))[at] == "holds"
    strict = with_limits(long, rollout_mantissa=0.0).judge(long.honest)
    for rollout, reason in zip(long.honest.rollouts, reasons(strict), strict=True):
        assert reason == ("proof-mismatch" if len(rollout.proofs) >= 4 else "holds")


def test_the_chunk_in_which_an_answer_ends_has_bounds_of_its_own(long: Rig) -> None:
    lengths = [len(rollout.tokens) // 4 for rollout in long.honest.rollouts]
    assert {length % 32 > 0 for length in lengths} == {True} and {length >= 32 for length in lengths} == {True, False}
    for strict, kind in (({"chunk_mantissa": 0.01}, "whole"), ({"chunk_exponents": 0}, "whole"),
                         ({"short_mantissa": 0.01}, "short")):  # fmt: skip
        judged = with_limits(long, **strict).judge(long.honest)
        for length, reason, detail in zip(lengths, reasons(judged), judged.details, strict=True):
            fails = kind == "short" or length >= 32
            assert reason == ("proof-mismatch" if fails else "holds")
            if fails and "chunk_exponents" not in strict:
                assert numbers(detail)["chunk_at"] == (0 if kind == "whole" else length // 32)
    both = with_limits(long, chunk_mantissa=0.01, short_mantissa=0.0).judge(long.honest)
    assert set(reasons(both)) == {"proof-mismatch"}, "0 is a whole chunk's bound, as before there were two"


# --- things that do not belong together -----------------------------------------------------------------------------


def test_the_profiles_do_not_mix(tiny: Rig, tmp_path: Path) -> None:
    raw_fp32 = make_rig(load_policy(TINY), tiny.environment, 4, 8, 9, (1,))
    assert {*reasons(tiny.judge(raw_fp32.honest))} == {"proof-malformed"}, "514 bytes where 258 belong"
    assert {*reasons(raw_fp32.judge(tiny.honest))} == {"proof-malformed"}
    with pytest.raises(VerifierError, match=r"checked on weights in torch\.bfloat16.*load the policy for the run"):
        judge(tiny.run, tiny.lease, b"", raw_fp32.policy, tiny.environment)
    with pytest.raises(VerifierError, match=r"checked on weights in torch\.float32"):
        judge(raw_fp32.run, raw_fp32.lease, b"", tiny.policy, tiny.environment)
    manifest = dataclasses.replace(tiny.run.manifest, profile="fp8")
    with pytest.raises(VerifierError, match="'fp8'; upgrade it"):
        judge(dataclasses.replace(tiny.run, manifest=manifest), tiny.lease, b"", tiny.policy, tiny.environment)


def test_a_bf16_run_without_thresholds_is_no_run(tiny: Rig) -> None:
    from protocol.envelope import seal
    from protocol.identity import Identity
    from protocol.manifest import MANIFEST_KIND, run_id_of

    without = dataclasses.replace(tiny.run.manifest, bf16=None)
    with pytest.raises(VerifierError, match="no bf16 thresholds"):
        judge(dataclasses.replace(tiny.run, manifest=without), tiny.lease, b"", tiny.policy, tiny.environment)
    root = Identity.from_seed(b"a" * 32)
    raw = seal(root, MANIFEST_KIND, without, run=run_id_of(without), sequence=1, issued_at=1).raw
    with pytest.raises(ManifestError, match="without bf16 thresholds"):
        open_manifest(raw)
    assert open_run(make("word"), 1.0, 9, (1,)).manifest.bf16 is None


def test_protocol_and_verifier_know_the_same_profiles() -> None:
    assert tuple(profiles.PROFILES) == PROFILES


def test_weights_are_rounded_when_they_are_loaded_again(tmp_path: Path) -> None:
    random_policy(tmp_path, 2)
    policy = load_to_verify(tmp_path, "bf16")
    for parameter in policy.model.parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, parameter.bfloat16().float())
    random_policy(tmp_path, 3)
    policy.load_weights(tmp_path)
    fresh = load_to_sample(tmp_path, "bf16")
    for mine, theirs in zip(policy.model.parameters(), fresh.model.parameters(), strict=True):
        assert theirs.dtype == torch.bfloat16 and torch.equal(mine, theirs.float())


@pytest.mark.parametrize("wrong", ["cut", "fp32", "none"])
def test_malformed_proofs_are_named_before_the_model_runs(tiny: Rig, wrong: str) -> None:
    rollout = tiny.honest.rollouts[3]
    proofs = {"cut": (rollout.proofs[0][:-1],), "fp32": (rollout.proofs[0] + bytes(256),), "none": ()}[wrong]
    assert tiny.only(3, dataclasses.replace(rollout, proofs=proofs)) == "proof-malformed"


def test_an_accepted_rollouts_details_fit_the_upload_for_who_has_no_model(tiny: Rig) -> None:
    """Coordinator and audit hold details against the upload by the fp32 record's bound: in bf16 they repeat it."""
    from verifier.claims import contradiction

    judged = tiny.judge(tiny.honest)
    for rollout, outcome, detail in zip(tiny.honest.rollouts, judged.outcomes, judged.details, strict=True):
        assert outcome.outcome == ACCEPT and contradiction(rollout, detail, 0.0) == ""
    other = dataclasses.replace(judged.details[0], logprobs=words([1] * (len(judged.details[0].logprobs) // 4)))
    assert contradiction(tiny.honest.rollouts[0], other, 3e-4)


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_smollm2_in_bf16() -> None:
    """SmolLM2-135M, 4 chunks a rollout: honest ones hold; states of 4-bit weights and of a missing layer do not, and of
    int8 weights one rollout says little more than that its number is larger."""
    from trainer.smollm2 import export

    folder = export()
    sampler, verifier = load_to_sample(folder, "bf16"), load_to_verify(folder, "bf16")
    limits = measured("smollm2")
    rig = make_rig(verifier, make("addition"), 1, 2, 97, (), bf16=limits, generator=sampler.model)
    honest = rig.judge(rig.honest)
    assert reasons(honest) == ["holds", "holds"] and len(rig.honest.rollouts[0].proofs) == 4
    assert max(column(honest, "mantissa_mean")) < limits.rollout_mantissa / 1.3
    assert max(column(honest, "margin_sum")) < limits.token_margin

    def computed_by(other: Any) -> Judgement:
        """The honest tokens with the states of another model, at the cost of one prefill."""
        prompt = prompt_ids(verifier.tokenizer, rig.environment.task(rig.lease.tasks[0]).prompt)
        sequences = [(prompt, tokens_of(rollout)) for rollout in rig.honest.rollouts]
        states = [one.states_NH for one in PolicyModel(other, verifier.tokenizer).prefill(sequences)]
        proofs = toploc.build_many(states, 1)
        rollouts = [
            dataclasses.replace(rollout, proofs=tuple(chunks))
            for rollout, chunks in zip(rig.honest.rollouts, proofs, strict=True)
        ]
        return rig.judge(dataclasses.replace(rig.honest, rollouts=tuple(rollouts)))

    for other in (rounded_to(sampler.model, 7), without_top_layer(sampler.model)):
        assert set(reasons(computed_by(other))) == {"proof-mismatch"}
    int8 = computed_by(rounded_to(sampler.model, 127))
    assert np.mean(column(int8, "mantissa_mean")) > 1.5 * np.mean(column(honest, "mantissa_mean"))
    assert max(column(int8, "mantissa_mean")) < 2 * limits.rollout_mantissa
