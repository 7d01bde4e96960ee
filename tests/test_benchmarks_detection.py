"""`benchmarks.detection`: rules are the judge's, statistics hold, pools are kept, tables are complete."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import detection, detection_judge, detection_pool, detection_rules, detection_table, detection_tiny
from benchmarks.contract import CouldNotRunError
from benchmarks.detection_judge import Proofs, Seen, Work
from benchmarks.detection_pool import Made, Maker, Pool, altered, honest_pools
from benchmarks.detection_rules import Rate
from benchmarks.detection_tiny import Honest, rig_of
from environments.word import Word
from node.decode import DecodeRequest
from protocol.records import ACCEPT
from verifier.profiles import load_to_sample

torch.set_num_threads(1)
LIMITS = detection.limits_of("tiny")


@dataclass
class Asked:
    """Prompts and seeds of a lease, as `detection_judge.measure` asks a `Maker` for them."""

    requests: list[DecodeRequest]

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.requests[index].prompt

    def seed(self, index: int) -> bytes:
        return self.requests[index].seed


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
def test_each_rollout_is_rejected_by_the_same_rules_as_the_judge_has(profile: str) -> None:
    rig = rig_of(profile, Word({}), (LIMITS.fp32, LIMITS.bf16 if profile == "bf16" else None), stop=())
    lease = rig.lease(7)
    outcomes = set()
    for kind, temperature in (("honest", 1.0), ("int8", 1.0), ("fp8", 1.0), ("drop-layer", 1.0), ("honest", 0.9)):
        node = load_to_sample(detection_tiny.TINY, profile).model
        with altered(node, kind):
            outputs = rig.decoded(lease, node, temperature=temperature)
        judged = rig.judge(lease, rig.submission(lease, outputs))
        made = Made(
            np.asarray([out.tokens for out in outputs]),
            np.stack([out.logprobs for out in outputs]),
            np.stack([out.states_NH for out in outputs]),
        )
        asked, work = Asked(rig.requests(lease)), Work("pool", kind, list(range(len(outputs))), made)
        seen = detection_judge.measure(asked, [work], rig.policy)["pool"]  # type: ignore[arg-type]
        expected = [outcome.outcome != ACCEPT for outcome in judged.outcomes]
        assert detection_table.rejects(seen, LIMITS, profile, "own").tolist() == expected, (kind, temperature)
        outcomes |= set(expected)
    assert outcomes == {True, False}


def test_proving_again_hides_other_weights_from_the_proofs_and_not_from_the_tokens() -> None:
    rig = rig_of("fp32", Word({}), (LIMITS.fp32, None), stop=())
    lease = rig.lease(3)
    node = load_to_sample(detection_tiny.TINY, "fp32").model
    with altered(node, "int4"):
        outputs = rig.decoded(lease, node)
    made = Made(
        np.asarray([out.tokens for out in outputs]),
        np.stack([out.logprobs for out in outputs]),
        np.stack([out.states_NH for out in outputs]),
    )
    work = Work("pool", "int4", list(range(len(outputs))), made)
    seen = detection_judge.measure(Asked(rig.requests(lease)), [work], rig.policy)["pool"]  # type: ignore[arg-type]
    row = detection_table.fp32_row(seen, LIMITS)
    assert row["lazy_rollouts"]["hits"] == row["again_rollouts"]["hits"] == len(outputs)
    assert row["again_by_proofs"]["hits"] == 0
    assert row["published_again_rollouts"]["hits"] == 0
    assert row["again_tokens"]["tokens"] < 100


def test_the_published_rule_is_more_than_38_exponents_or_a_mean_above_10_or_a_median_above_8() -> None:
    def chunk(exponents: int, mean: float, middle: float) -> bool:
        proofs = Proofs(*(np.asarray([[value]]) for value in (0.0, 0, exponents, mean, middle)))
        return bool(detection_rules.published_chunks(proofs)[0, 0])

    assert not chunk(38, 10.0, 8.0)
    assert chunk(39, 0.0, 0.0) and chunk(0, 10.1, 0.0) and chunk(0, 0.0, 8.5) and chunk(128, math.inf, math.inf)


def test_the_first_studys_rule_has_bounds_for_a_chunk_a_rollout_a_token_and_two() -> None:
    def proofs(exponents: list[int], means: list[float]) -> bool:
        seen = Proofs(*(np.asarray([values]) for values in ([0.0] * 2, [0] * 2, exponents, means, means)))
        return bool(detection_rules.study_proofs(seen)[0])

    assert not proofs([12, 12], [3.0, 1.3])
    assert proofs([13, 0], [0.0, 0.0]) and proofs([0, 0], [3.1, 0.0]) and proofs([0, 0], [2.2, 2.2])
    assert proofs([0, 0], [math.nan, 0.0])

    def tokens(*margins: float) -> bool:
        seen = _seen([0.0, 0.0], [0.0, 0.0])
        seen.margins_RN[0, : len(margins)] = margins
        return bool(detection_rules.study_tokens(seen)[0])

    assert not tokens(0.28) and not tokens(0.14, 0.14)  # 32 tokens: 0.288 in sum
    assert tokens(0.29) and tokens(0.1, 0.1, 0.1)
    long = np.zeros((1, 128), dtype=np.float32)
    long[0, :2] = 0.31
    seen = dataclasses.replace(_seen([0.0, 0.0], [0.0, 0.0]), margins_RN=long)
    assert detection_rules.study_tokens(seen)[0], "two above 0.3, though the mean is below"
    long[0, 1] = 0.29
    assert not detection_rules.study_tokens(seen)[0] and not detection_rules.study_bans(seen, True)[0]
    long[0, :2] = 0.51
    assert detection_rules.study_bans(seen, False)[0]
    long[0, 1] = 0.5
    assert not detection_rules.study_bans(seen, False)[0]
    far = dataclasses.replace(seen, own=dataclasses.replace(seen.own, exponents=np.asarray([[17]])))
    assert detection_rules.study_bans(far, True)[0] and not detection_rules.study_bans(far, False)[0]


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(0, 16, 0.0, 0.1936), (16, 16, 0.8064, 1.0), (3, 16, 0.0659, 0.4301), (1, 2, 0.0945, 0.9055)],
)
def test_intervals_are_wilsons(hits: int, of: int, low: float, high: float) -> None:
    assert Rate(hits, of).interval == pytest.approx((low, high), abs=5e-4)


def test_tokens_to_detect_are_those_after_which_one_in_a_hundred_still_passes() -> None:
    flags_RN = np.zeros((40, 100), dtype=np.bool_)
    flags_RN[:, ::50] = True  # 2% of the tokens of every rollout
    told = detection_rules.tokens_to_detect(flags_RN)
    assert told["rate"] == pytest.approx(0.02)
    assert 0.98 ** told["tokens"] <= 0.01 < 0.98 ** (told["tokens"] - 1)
    assert told["tokens_at_most"] == told["tokens"], "every rollout has the same rate"
    uneven_RN = flags_RN.copy()
    uneven_RN[:20] = False
    uneven = detection_rules.tokens_to_detect(uneven_RN)
    assert uneven["tokens_at_most"] > uneven["tokens"] > told["tokens"]
    assert detection_rules.tokens_to_detect(np.zeros((4, 8), dtype=np.bool_))["tokens"] == math.inf


def test_rollouts_to_tell_keep_both_errors_of_a_test_of_the_mean() -> None:
    draws = np.random.default_rng(5)
    honest, other = draws.normal(1.0, 1.0, 40_000), draws.normal(1.5, 1.2, 40_000)
    needed = int(detection_rules.rollouts_to_tell(honest[:4000].tolist(), other[:4000].tolist()))
    means = [np.asarray([draws.choice(pool, needed).mean() for _ in range(4000)]) for pool in (honest, other)]
    bar = 1.0 + 3.090232 * 1.0 / math.sqrt(needed)
    assert (means[0] > bar).mean() < 0.004
    assert (means[1] > bar).mean() == pytest.approx(0.99, abs=0.01)
    assert detection_rules.rollouts_to_tell([1.0, 2.0], [0.5, 0.6]) == math.inf


def test_free_bits_bound_the_number_of_choices_that_pass() -> None:
    gaps_G = np.asarray([0.0, 0.3, 0.8, 2.0], dtype=np.float32)
    gaps_RNG = np.broadcast_to(gaps_G, (1, 7, 4))
    assert detection_rules.free_bits_below(gaps_RNG, 0.1) == 0.0
    assert detection_rules.free_bits_below(gaps_RNG, 0.5) == 1.0
    for budget in (0.5, 1.5, 4.0):
        passing = sum(sum(choice) <= budget for choice in itertools.product(gaps_G.tolist(), repeat=7))
        bits = detection_rules.free_bits_of_sum(gaps_RNG, 1e9, budget)
        assert math.log2(passing) <= bits <= math.log2(passing) + 4
    assert detection_rules.free_bits_of_sum(gaps_RNG, 0.5, 100.0) == pytest.approx(7.0, abs=0.2)


@pytest.mark.parametrize(("kind", "values"), [("int8", 255), ("int4", 16)])
def test_rounded_weights_have_as_many_values_as_their_bits(kind: str, values: int) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    rounded = {"int8": detection_pool.int8, "int4": detection_pool.int4}[kind](weight)
    for row, full in zip(rounded, weight, strict=True):
        steps = row / (full.abs().max() / (values // 2 if kind == "int8" else 7))
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert len(torch.unique(steps.round())) <= values
    error = (rounded - weight).abs().amax(dim=1) / weight.abs().amax(dim=1)
    assert (error <= 0.5 / (values // 2) * 1.01 + 0.01).all() and (error > 0).all()


def test_honest_variants_are_twelve_of_sixteen_rollouts_or_more_with_a_prompt_each() -> None:
    pools = honest_pools("fp32")
    prompts = [index for pool in pools for index in pool.prompts]
    assert len(pools) == 12 and min(pool.rollouts for pool in pools) >= 16
    assert len(prompts) == len(set(prompts)) >= 200 and max(prompts) < detection_pool.PROMPTS
    texts = {detection_pool.chat(index, detection_pool.HONEST_SYSTEM) for index in prompts}
    assert len(texts) == len(prompts)
    assert {pool.attention for pool in pools} == {"sdpa", "eager"} and {pool.threads for pool in pools} == {1, 2}


def test_what_was_sampled_once_is_read_the_next_time(tmp_path: Path) -> None:
    said: list[str] = []
    maker = detection.quick_maker(tmp_path, said.append)
    pool = Pool("two", "honest", rollouts=2, batch=2)
    first = maker.made(pool)
    seen = detection_judge.seen(maker, [pool])["two"]
    assert len(said) == 2
    again = Maker(maker.directory, tmp_path, said.append, tokens=maker.tokens, wording=maker.wording)
    assert np.array_equal(again.made(pool).states_RNH, first.states_RNH)
    assert np.array_equal(detection_judge.seen(again, [pool])["two"].margins_RN, seen.margins_RN)
    assert len(said) == 2, "nothing was sampled or judged again"
    assert Maker(maker.directory, tmp_path, said.append, tokens=8, wording=maker.wording).folder != maker.folder


def test_a_millionfold_of_honest_tokens_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection_tiny, "LEASES", 1)
    said: list[str] = []
    limits = (LIMITS.fp32, None)
    first = detection_tiny.measure("fp32", 900, limits, tmp_path, said.append)
    assert first.tokens >= 900 and first.rejected == 0 and first.rollouts == 32 * len(said)
    more = detection_tiny.measure("fp32", first.tokens + 1, limits, tmp_path, said.append)
    assert more.rollouts == first.rollouts + 32 and len(said) * 32 == more.rollouts
    assert detection_tiny.measure("fp32", 10**6, limits, tmp_path, said.append, make=False) == more
    with_bf16 = detection_tiny.measure("bf16", 10**6, (LIMITS.fp32, LIMITS.bf16), tmp_path, said.append, make=False)
    assert with_bf16 == Honest()


def test_goals_of_what_was_not_measured_are_named_and_those_measured_have_their_numbers() -> None:
    seen = _seen(margins=[0.0, 0.5], medians=[1e-7, 1e-2])
    found = detection_table.Found({"fp32": {"one": _seen([0.0, 0.0], [1e-7, 2e-7])}}, {("int8", "fp32"): seen}, {})
    rows = detection_table.summary(found, LIMITS)
    goals, missing = detection_table.goals(rows, 100, 200)
    assert any("fp8 keys and values" in one for one in missing)
    by_text = {goal.goal: goal for goal in goals}
    lazy = next(goal for text, goal in by_text.items() if text.startswith("fp32, lazy") and "int8" in text)
    assert (lazy.measured, lazy.holds) == (0.5, False)
    accepted = next(goal for text, goal in by_text.items() if "accepted of 2" in text)
    assert accepted.holds and "150.00%" in accepted.goal
    judged = next(goal for text, goal in by_text.items() if text.endswith("judged"))
    assert (judged.measured, judged.holds) == (2, False)
    table = detection_table.markdown(rows)
    assert "int8 weights" in table and "margin-steer" in table
    json.dumps(rows, allow_nan=False)


def test_tables_go_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{detection.BEGIN}\nold\n{detection.END}\nafter\n")
    detection.write_table(page, "new\n")
    assert page.read_text() == f"before\n{detection.BEGIN}\nnew\n{detection.END}\nafter\n"
    page.write_text("no markers\n")
    with pytest.raises(CouldNotRunError, match="has no lines"):
        detection.write_table(page, "new\n")


@pytest.mark.heavy
def test_the_whole_measurement_runs_on_the_tiny_model(tmp_path: Path) -> None:
    args = _arguments("--quick", "--cache", str(tmp_path), "--out", str(tmp_path / "out.json"))
    goals = detection.measure(args)
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["not_run"] == [] and len(results["goals"]) == len(goals)
    honest = [goal for goal in goals if "accepted of" in goal.goal]
    assert len(honest) == 4 and all(goal.holds for goal in honest)
    whole = [goal for goal in goals if goal.goal.startswith("fp32, lazy") and "step old" not in goal.goal]
    assert len(whole) == 7 and all(goal.holds for goal in whole)
    again = [goal for goal in goals if goal.goal.startswith("fp32, proved again: share")]
    assert len(again) == 7 and all(goal.holds for goal in again)


@pytest.mark.heavy
def test_smollm2_in_int8_is_seen_and_the_honest_one_is_not(tmp_path: Path) -> None:
    limits = detection.limits_of("smollm2")
    maker = Maker(detection_pool.smollm2.export(), tmp_path, lambda _: None, tokens=32)
    pools = [Pool("right", "honest", rollouts=4), Pool("rounded", "int8", rollouts=4)]
    seen = detection_judge.seen(maker, pools)
    assert not detection_table.rejects(seen["right"], limits, "fp32", "own").any()
    assert detection_rules.fp32_chunks(seen["rounded"].own, limits.fp32).all()
    assert not detection_rules.published_chunks(seen["rounded"].own).any(), "the published thresholds pass int8"
    assert not detection_rules.fp32_chunks(seen["rounded"].again, limits.fp32).any()


def _seen(margins: list[float], medians: list[float]) -> Seen:
    """Two rollouts of 32 tokens; a margin is that of one token of each, a median that of its chunk."""
    proofs = Proofs(
        *(np.asarray([[one] for one in values]) for values in (medians, [0, 0], [1, 1], [1.0, 1.2], [1.0, 1.0]))
    )
    margins_RN = np.zeros((2, 32), dtype=np.float32)
    margins_RN[:, 5] = margins
    gaps_RNG = np.broadcast_to(np.asarray([0.0, 0.7, 1.5], dtype=np.float32), (2, 32, 3)).copy()
    return Seen(proofs, proofs, margins_RN, np.zeros_like(margins_RN), gaps_RNG, np.zeros((2, 1), dtype=np.bool_))


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    detection.arguments(parser)
    return parser.parse_args(words)
