"""Rows, goals and the table of `benchmarks.detection`, from what a verifier measured.

Everything here is arithmetic over `Seen`: no model is run. A pool that was not measured has no row, and its goals say
"not run" instead of a number.

Not covered: measuring (`detection_judge`), the command (`detection`).

Shape suffixes: R rollouts, C proof chunks, G best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import detection_rules as rules
from benchmarks.contract import Goal, at_least, machine
from benchmarks.detection_judge import OWN_MODEL, Seen
from benchmarks.detection_pool import STALE_KINDS, TOKENS
from benchmarks.detection_rules import Rate, rate
from benchmarks.detection_tiny import Honest
from protocol.manifest import Bf16Thresholds, Thresholds

TITLES = {
    "int8": "int8 weights",
    "fp8": "fp8 (e4m3) weights",
    "int4": "4-bit weights",
    "bf16-compute": "bf16 arithmetic",
    "fp8-kv": "fp8 keys and values",
    "drop-layer": "a layer left out",
    "prompt": "another system prompt",
    "prompt-longer": "a sentence added to the system prompt",
    "stale-bf16": "weights one step old (lr 1e-6, published in bf16)",
    "stale-fp32": "weights one step old (lr 1e-6, published in fp32)",
    "greedy": "greedy",
    "t0.7": "T = 0.7",
    "t0.9": "T = 0.9",
    "wrong-seed": "another lease's seed",
    "best-of-4": "best of 4 other seeds",
    "splice": "one token exchanged",
}
LAZY_WHOLE = ("int8", "fp8", "int4", "fp8-kv", "drop-layer", "prompt", "prompt-longer")
"""Issue 4: every rollout, by its proofs."""
AGAIN_WHOLE = ("int4", "drop-layer", "greedy", "t0.7", "wrong-seed", "best-of-4", "splice")
"""Issue 4: every rollout, by its tokens, once proved again."""
AGAIN_TOKENS = ("int8", "fp8", "bf16-compute", "fp8-kv", "prompt", "prompt-longer")
"""Issue 4: within so many tokens at 99%."""
TOKENS_GOAL = 300
STUDY = {
    "lazy": {"int8": (0.88, 0.88), "fp8": (1.0, 1.0), "int4": (1.0, 1.0), "fp8-kv": (1.0, 1.0),
             "drop-layer": (1.0, 1.0), "prompt": (1.0, 1.0), "prompt-longer": (1.0, 1.0)},
    "again": {"int8": (0.0, 0.0), "fp8": (0.75, 0.81), "int4": (1.0, 1.0), "fp8-kv": (0.44, 0.62),
              "drop-layer": (1.0, 1.0), "prompt": (0.25, 0.44), "prompt-longer": (0.25, 0.44),
              "greedy": (1.0, 1.0), "t0.7": (1.0, 1.0),
              "t0.9": (0.75, 0.81), "wrong-seed": (1.0, 1.0)},
}  # fmt: skip
"""What the first study reports of a 128-token rollout in bf16, at no false positive of its own 68: from, to. Its other
prompt was the right one and a sentence more; `prompt`, as long as the right one and quieter, is held to the same."""


@dataclass(frozen=True)
class Limits:
    """Thresholds, and where those of bf16 come from."""

    fp32: Thresholds
    bf16: Bf16Thresholds
    bf16_from: str


@dataclass(frozen=True)
class Found:
    """All that was measured. honest: by compute dtype, variant -> numbers. kinds: (kind, compute dtype) -> numbers.
    tiny: by profile."""

    honest: Mapping[str, Mapping[str, Seen]]
    kinds: Mapping[tuple[str, str], Seen]
    tiny: Mapping[str, Honest]


# --- rows ------------------------------------------------------------------------------------------------------------


def honest_row(variants: Mapping[str, Seen], limits: Limits, profile: str) -> dict[str, Any]:
    """What honest rollouts of one compute dtype look like, and how many a profile's rules reject."""
    every = list(variants.values())
    rejected = sum(int(rejects(one, limits, profile, "own").sum()) for one in every)
    rollouts = sum(one.rollouts for one in every)
    row: dict[str, Any] = {
        "variants": {name: one.rollouts for name, one in variants.items()},
        "rollouts": rollouts,
        "tokens": sum(one.margins_RN.size for one in every),
        "chunks": sum(one.own.median.size for one in every),
        "rejected": rejected,
        "false_positives_at_most": 3 / rollouts if rejected == 0 else None,
        "study_rejects": sum(int((rules.study_proofs(one.own) | rules.study_tokens(one)).sum()) for one in every),
        "study_bans": sum(int(rules.study_bans(one, True).sum()) for one in every),
        "published_rejects": sum(int(rules.published_chunks(one.own).any(axis=1).sum()) for one in every),
        "margin_max": _largest(every, lambda one: one.margins_RN),
        "logprob_max": _largest(every, lambda one: np.abs(one.logprobs_RN)),
        "tokens_not_first": sum(int((one.margins_RN > 0).sum()) for one in every),
    }
    if profile == "fp32":
        row["median_max"] = _largest(every, lambda one: one.own.median)
        row["outliers_max"] = _largest(every, lambda one: one.own.outliers)
    else:
        row["exponents_max"] = _largest(every, lambda one: one.own.exponents)
        row["mantissa_max"] = _largest(every, lambda one: one.own.mean)
        row["mantissa_mean"] = float(np.mean(np.concatenate([one.own.mean.mean(axis=1) for one in every])))
        row["rollout_mantissa_max"] = _largest(every, lambda one: one.own.mean.mean(axis=1))
        row["margin_sum_mean"] = float(np.mean(np.concatenate([rules.margin_sums(one) for one in every])))
        row["margin_sum_max"] = _largest(every, rules.margin_sums)
    return row


def _largest(every: Sequence[Seen], values: Any) -> float:
    return float(max(np.max(values(one)) for one in every))


def rejects(seen: Seen, limits: Limits, profile: str, proofs: str) -> Any:
    """Rollouts [R] that a profile's rules reject. proofs: `own` for a node that proves the states it sampled from (and
    claims its own log-probabilities), `again` for one that proves, and claims, those of the right model."""
    own = proofs == "own"
    compared = seen.own if own else seen.again
    if profile == "fp32":
        flags = rules.fp32_chunks(compared, limits.fp32).any(axis=1) | rules.fp32_tokens(seen, limits.fp32).any(axis=1)
        return flags | rules.fp32_logprobs(seen, limits.fp32) if own else flags
    flags = rules.bf16_proofs(compared, limits.bf16) | rules.bf16_tokens(seen, limits.bf16)
    return flags | rules.bf16_logprobs(seen, limits.bf16) if own else flags


def fp32_row(seen: Seen, limits: Limits) -> dict[str, Any]:
    """One kind of node under the fp32 profile."""
    chunks_RC = rules.fp32_chunks(seen.own, limits.fp32)
    changed_RC = ~seen.unchanged_RC
    tokens_RN = rules.fp32_tokens(seen, limits.fp32)
    return {
        "rollouts": seen.rollouts,
        "tokens": int(seen.margins_RN.size),
        "chunks_unchanged": int(seen.unchanged_RC.sum()),
        "lazy_chunks": Rate(int((chunks_RC & changed_RC).sum()), int(changed_RC.sum())).as_json(),
        "lazy_rollouts": rate(chunks_RC.any(axis=1)).as_json(),
        "lazy_median": [float(np.min(seen.own.median)), float(np.median(seen.own.median))],
        "again_by_proofs": rate(rules.fp32_chunks(seen.again, limits.fp32).any(axis=1)).as_json(),
        "again_rollouts": rate(tokens_RN.any(axis=1)).as_json(),
        "again_tokens": {name: _finite(value) for name, value in rules.tokens_to_detect(tokens_RN).items()},
        **_published(seen),
    }


def bf16_row(seen: Seen, honest: Mapping[str, Seen], limits: Limits) -> dict[str, Any]:
    """One kind of node under the bf16 profile; `honest` is the pool that "equal false-positive rate" is about."""
    every = list(honest.values())
    row = {
        "rollouts": seen.rollouts,
        "lazy_rollouts": rate(rejects(seen, limits, "bf16", "own")).as_json(),
        "again_rollouts": rate(rejects(seen, limits, "bf16", "again")).as_json(),
        "study_lazy_rollouts": rate(rules.study_proofs(seen.own) | rules.study_tokens(seen)).as_json(),
        "study_again_rollouts": rate(rules.study_tokens(seen)).as_json(),
        "study_bans_lazy": rate(rules.study_bans(seen, True)).as_json(),
        "study_bans_again": rate(rules.study_bans(seen, False)).as_json(),
        "mantissa_mean": float(seen.own.mean.mean()),
        "margin_sum_mean": float(rules.margin_sums(seen).mean()),
        "tokens_not_first": int((seen.margins_RN > 0).sum()),
        **_published(seen),
    }
    if every:
        exponents = _largest(every, lambda one: one.own.exponents)
        chunk = _largest(every, lambda one: one.own.mean)
        rollout = _largest(every, lambda one: one.own.mean.mean(axis=1))
        margin = _largest(every, lambda one: one.margins_RN)
        added = _largest(every, rules.margin_sums)
        chunks_RC = (seen.own.exponents > exponents) | (seen.own.mean > chunk)
        proofs_R = chunks_RC.any(axis=1) | (seen.own.mean.mean(axis=1) > rollout)
        tokens_R = (seen.margins_RN > margin).any(axis=1) | (rules.margin_sums(seen) > added)
        mantissas = np.concatenate([one.own.mean.mean(axis=1) for one in every])
        margins = np.concatenate([rules.margin_sums(one) for one in every])
        row |= {
            "lazy_at_no_false_positive": rate(proofs_R | tokens_R).as_json(),
            "again_at_no_false_positive": rate(tokens_R).as_json(),
            "lazy_rollouts_to_tell": _finite(rules.rollouts_to_tell(mantissas, seen.own.mean.mean(axis=1))),
            "again_rollouts_to_tell": _finite(rules.rollouts_to_tell(margins, rules.margin_sums(seen))),
        }
    return row


def _published(seen: Seen) -> dict[str, Any]:
    own, again = rules.published_chunks(seen.own), rules.published_chunks(seen.again)
    return {
        "published_lazy_chunks": rate(own).as_json(),
        "published_lazy_rollouts": rate(own.any(axis=1)).as_json(),
        "published_again_rollouts": rate(again.any(axis=1)).as_json(),
    }


def steer_row(honest: Mapping[str, Seen], rounding: Mapping[str, Seen], limits: Limits) -> dict[str, Any]:
    """What a node that computes exactly may choose freely: bits in fp32 and in bf16.

    honest: gaps of what the verifier itself would score. rounding: honest bf16 rollouts, whose margins are what a node
    can hide among.
    """
    gaps_RNG = np.concatenate([one.gaps_RNG for one in honest.values()])
    tokens = gaps_RNG.shape[0] * gaps_RNG.shape[1]
    length = gaps_RNG.shape[1]
    free = int((gaps_RNG[..., 1] <= limits.fp32.token_margin).sum())
    allowed = limits.bf16.token_margin + limits.bf16.margin_mean * length
    row: dict[str, Any] = {
        "tokens": tokens,
        "fp32_positions_with_a_choice": free,
        "fp32_bits_a_token": rules.free_bits_below(gaps_RNG, limits.fp32.token_margin),
        "fp32_bits_a_token_at_most": (free + 3 if free == 0 else free + 2 * math.sqrt(free) + 2) / tokens,
        "bf16_sum_that_passes": allowed,
        "bf16_bits_a_rollout": rules.free_bits_of_sum(gaps_RNG, limits.bf16.token_margin, allowed),
        "bf16_positions_within_the_token_bound": float((gaps_RNG[..., 1] <= limits.bf16.token_margin).mean()),
    }
    if rounding:
        sums = np.concatenate([rules.margin_sums(one) for one in rounding.values()])
        for word, budget in (("mean", float(sums.mean())), ("largest", float(sums.max()))):
            row[f"bf16_sum_honest_{word}"] = budget
            row[f"bf16_bits_at_honest_{word}"] = rules.free_bits_of_sum(gaps_RNG, limits.bf16.token_margin, budget)
    return row


def _finite(value: float) -> float | None:
    """JSON has no infinity: `null` is never."""
    return value if math.isfinite(value) else None


def summary(found: Found, limits: Limits) -> dict[str, Any]:
    """All rows, for the results file."""
    fp32, bf16 = found.honest.get("fp32", {}), found.honest.get("bf16", {})
    rows: dict[str, Any] = {"bf16_thresholds_from": limits.bf16_from, "honest": {}, "fp32": {}, "bf16": {}, "tiny": {}}
    for dtype, variants in (("fp32", fp32), ("bf16", bf16)):
        if variants:
            rows["honest"][dtype] = honest_row(variants, limits, dtype)
    for (kind, dtype), seen in found.kinds.items():
        if dtype == "fp32":
            rows["fp32"][kind] = fp32_row(seen, limits)
        if kind != "stale-fp32":
            rows["bf16"][kind if dtype == "bf16" else f"{kind}, computed in fp32"] = bf16_row(seen, bf16, limits)
    if bf16:
        rows["fp32"]["bf16-compute"] = fp32_row(_joined(list(bf16.values())), limits)
    if fp32:
        rows["steer"] = steer_row(fp32, bf16, limits)
    for profile, honest in found.tiny.items():
        rows["tiny"][profile] = dict(honest.__dict__)
    return rows


def _joined(every: Sequence[Seen]) -> Seen:
    def proofs(part: str) -> Any:
        names = ("median", "outliers", "exponents", "mean", "middle")
        parts = [getattr(one, part) for one in every]
        return type(parts[0])(*(np.concatenate([getattr(one, name) for one in parts]) for name in names))

    rest = ("margins_RN", "logprobs_RN", "gaps_RNG", "unchanged_RC")
    return Seen(proofs("own"), proofs("again"), *(np.concatenate([getattr(o, name) for o in every]) for name in rest))


# --- goals -----------------------------------------------------------------------------------------------------------


def goals(rows: Mapping[str, Any], tiny_tokens: int, honest_rollouts: int) -> tuple[list[Goal], list[str]]:
    """The goals of what was measured, and in words what was not."""
    made: list[Goal] = []
    missing: list[str] = []
    for dtype in ("fp32", "bf16"):
        row = rows["honest"].get(dtype)
        if row is None:
            missing.append(f"honest {dtype} rollouts of SmolLM2")
            continue
        n = row["rollouts"]
        text = f"honest {dtype} rollouts of {TOKENS} tokens, {len(row['variants'])} variants"
        made.append(at_least(f"{text}: judged", honest_rollouts, n, []))
        bound = f"at 95% at most {3 / n:.2%} are rejected" if row["rejected"] == 0 else f"{row['rejected']} rejected"
        made.append(at_least(f"{text}: accepted of {n} ({bound})", n, n - row["rejected"], []))
    for profile in ("fp32", "bf16"):
        tiny = rows["tiny"].get(profile)
        if tiny is None or not tiny["tokens"]:
            missing.append(f"honest {profile} tokens of the tiny model")
            continue
        n = tiny["rollouts"]
        bound = f"at 95% at most {3 / n:.1e} are rejected" if not tiny["rejected"] else f"{tiny['rejected']} rejected"
        made.append(at_least(f"honest {profile} tokens of the tiny model: judged", tiny_tokens, tiny["tokens"], []))
        made.append(at_least(f"their rollouts: accepted of {n} ({bound})", n, n - tiny["rejected"], []))
    fp32 = rows["fp32"]
    for kind in LAZY_WHOLE:
        _share(made, missing, fp32, kind, "lazy_rollouts", "fp32, lazy", "rollouts rejected by their proofs")
    for kind in STALE_KINDS:
        _share(made, missing, fp32, kind, "lazy_chunks", "fp32, lazy", "changed chunks rejected")
    for kind in AGAIN_WHOLE:
        _share(made, missing, fp32, kind, "again_rollouts", "fp32, proved again", "rollouts rejected by their tokens")
    for kind in AGAIN_TOKENS:
        if kind not in fp32:
            missing.append(f"fp32, proved again: {TITLES[kind]}")
            continue
        tokens = fp32[kind]["again_tokens"]["tokens"]
        text = f"fp32, proved again: tokens until {TITLES[kind]} is seen at 99%, at most"
        made.append(_at_most(text, TOKENS_GOAL, math.inf if tokens is None else tokens))
    for word, reported in STUDY.items():
        for kind, (share, _) in reported.items():
            row = rows["bf16"].get(kind)
            if row is None or f"{word}_at_no_false_positive" not in row:
                missing.append(f"bf16, {word}: {TITLES[kind]}, computed in bf16")
                continue
            one, theirs = row[f"{word}_at_no_false_positive"], row[f"study_{word}_rollouts"]
            text = f"bf16, {word}, at no false positive of the honest pool: share of rollouts of {TITLES[kind]}"
            made.append(at_least(text, share, one["hits"] / one["of"], one["interval"]))
            text = f"bf16, {word}: rollouts of {TITLES[kind]}, as many as the first study's bounds reject of them"
            made.append(at_least(text, theirs["hits"], one["hits"], []))
    return made, missing


def _share(
    made: list[Goal], missing: list[str], rows: Mapping[str, Any], kind: str, field: str, how: str, what: str
) -> None:
    if kind not in rows:
        missing.append(f"{how}: {TITLES[kind]}")
        return
    one = rows[kind][field]
    text = f"{how}: share of {one['of']} {what}, {TITLES[kind]}"
    made.append(at_least(text, 1.0, one["hits"] / one["of"] if one["of"] else 0.0, one["interval"]))


def _at_most(goal: str, target: float, measured: float) -> Goal:
    shown = measured if math.isfinite(measured) else 1e300
    return Goal(goal, target, shown, measured <= target, (), machine())


# --- for people ------------------------------------------------------------------------------------------------------


def markdown(rows: Mapping[str, Any]) -> str:
    """The tables of docs/detection.md."""
    lines = [*_honest_table(rows), "", *_fp32_table(rows["fp32"]), "", *_bf16_table(rows["bf16"])]
    lines += ["", *_study_table(rows["bf16"])]
    if "steer" in rows:
        lines += ["", *_steer_table(rows["steer"])]
    return "\n".join(lines) + "\n"


def _honest_table(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| honest | rollouts | tokens | rejected | at most, 95% | worst chunk | largest margin | tokens not first |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for dtype, row in rows["honest"].items():
        worst = f"{row['median_max']:.1e}" if dtype == "fp32" else f"{row['mantissa_max']:.2f} mantissa"
        lines.append(
            f"| SmolLM2-135M, {dtype}, {len(row['variants'])} variants | {row['rollouts']} | {row['tokens']:,} | "
            f"{row['rejected']} | {_bound(row)} | {worst} | {row['margin_max']:.2g} | {row['tokens_not_first']} |"
        )
    for profile, row in rows["tiny"].items():
        largest, name = row["largest"], "proof_median" if profile == "fp32" else "mantissa_mean"
        lines.append(
            f"| tiny, {profile} | {row['rollouts']:,} | {row['tokens']:,} | {row['rejected']} | {_bound(row)} | "
            f"{largest.get(name, 0):.2g} | {largest.get('token_margin', 0):.2g} | "
            f"{row['added'].get('tokens_not_first', 0):.0f} |"
        )
    return lines


def _bound(row: Mapping[str, Any]) -> str:
    return f"{100 * 3 / row['rollouts']:.2g}%" if row["rejected"] == 0 else "-"


def _fp32_table(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| fp32 profile | rollouts | lazy: chunks | lazy: rollouts | published rule, lazy | "
        "proved again: rollouts (95%) | tokens rejected | tokens to see it at 99% (at most) | "
        "published rule, proved again |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in TITLES:
        if kind not in rows:
            continue
        row, tokens = rows[kind], rows[kind]["again_tokens"]
        lazy = [
            "-" if kind in OWN_MODEL else _percent(row[field])
            for field in ("lazy_chunks", "lazy_rollouts", "published_lazy_rollouts")
        ]
        lines.append(
            f"| {TITLES[kind]} | {row['rollouts']} | {' | '.join(lazy)} | {_percent(row['again_rollouts'], True)} | "
            f"{tokens['rate']:.2%} | {_count(tokens['tokens'])} ({_count(tokens['tokens_at_most'])}) | "
            f"{_percent(row['published_again_rollouts'])} |"
        )
    return lines


def _bf16_table(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| bf16 profile | rollouts | mantissa mean | margin a rollout | lazy: rejected (95%) | at no false positive | "
        "rollouts to tell | proved again: rejected (95%) | at no false positive | rollouts to tell | published, lazy |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(rows, key=lambda name: (list(TITLES).index(name.partition(",")[0]), name)):
        row = rows[name]
        kind, _, rest = name.partition(",")
        told = [row.get(f"{word}_rollouts_to_tell", math.nan) for word in ("lazy", "again")]
        at_none = [row.get(f"{word}_at_no_false_positive") for word in ("lazy", "again")]
        if kind in OWN_MODEL:  # its proofs are honest ones
            told[0], at_none[0] = math.nan, None
        lines.append(
            f"| {TITLES[kind]}{',' + rest if rest else ''} | {row['rollouts']} | {row['mantissa_mean']:.2f} | "
            f"{row['margin_sum_mean']:.2f} | {_percent(row['lazy_rollouts'], True)} | {_percent(at_none[0])} | "
            f"{_count(told[0])} | {_percent(row['again_rollouts'], True)} | {_percent(at_none[1])} | "
            f"{_count(told[1])} | {_percent(row['published_lazy_rollouts'])} |"
        )
    return lines


def _study_table(rows: Mapping[str, Any]) -> list[str]:
    lines = [
        "| computed in bf16 | lazy: ours at no false positive | bounds of the first study | as it reported | "
        "proved again: ours at no false positive | bounds of the first study | as it reported |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in (kind for kind in TITLES if kind in rows):
        cells = []
        for word in ("lazy", "again"):
            hidden = word == "lazy" and kind in OWN_MODEL
            for name in (f"{word}_at_no_false_positive", f"study_{word}_rollouts"):
                cells.append("-" if hidden else _percent(rows[kind].get(name)))
            low, high = STUDY[word].get(kind, (math.nan, math.nan))
            cells.append("-" if math.isnan(low) else f"{low:.0%}" if low == high else f"{100 * low:.0f}-{high:.0%}")
        lines.append(f"| {TITLES[kind]} | {' | '.join(cells)} |")
    return lines


def _steer_table(row: Mapping[str, Any]) -> list[str]:
    lines = [
        f"| `margin-steer`, {row['tokens']:,} honest positions | free bits |",
        "|---|--:|",
        f"| fp32: positions with another token within the bound | {row['fp32_positions_with_a_choice']} |",
        f"| fp32: a token | {row['fp32_bits_a_token']:.1e}, at most {row['fp32_bits_a_token_at_most']:.1e} |",
        f"| bf16: a rollout whose margins add up to all that passes ({row['bf16_sum_that_passes']:.1f}) | "
        f"at most {row['bf16_bits_a_rollout']:.0f} |",
    ]
    for word in ("largest", "mean"):
        if f"bf16_bits_at_honest_{word}" in row:
            budget, bits = row[f"bf16_sum_honest_{word}"], row[f"bf16_bits_at_honest_{word}"]
            text = f"bf16: a rollout whose margins add up to the {word} honest sum ({budget:.2f})"
            lines.append(f"| {text} | at most {bits:.1f} |")
    return lines


def _percent(one: Mapping[str, Any] | None, interval: bool = False) -> str:
    if one is None or not one["of"]:
        return "-"
    text = f"{100 * one['hits'] / one['of']:.0f}%"
    low, high = one["interval"]
    return f"{text} ({100 * low:.0f}-{100 * high:.0f})" if interval else text


def _count(value: float | None) -> str:
    """None is never, NaN was not measured."""
    if value is None:
        return "never"
    return "-" if math.isnan(value) else f"{value:.0f}"
