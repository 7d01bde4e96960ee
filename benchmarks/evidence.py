"""Pooled evidence, simulated: how often it bans honest nodes, and how many rollouts it takes against dishonest ones.

    python -m benchmarks.evidence --json [--days 100000] [--rollouts 500]

Rows are those that a manifest gets by rule (`verifier.evidence_rows`) from the honest numbers of the pool, real ones of
the tiny model (`benchmarks.data.evidence_pool`). A node-day is `--rollouts` rollouts, and the bar that of its length.
Honest nodes, per row:

    pool       whole leases drawn from the pool, so that rollouts of one lease stay as alike as they are
    at bound   gamma numbers whose mean is exactly the row's honest bound: the worst that theory allows
    heavy      Pareto numbers with infinite variance and that same mean

    framed     the pool, and one of three validators says the most that counts of every rollout it is drawn for

At the bar of one false ban in 10^7 node-days none can be counted; the same sums against a bar of one in 100 can, and
show whether the bound is true. Dishonest nodes draw leases from the pool's dishonest kinds, three validators, each
drawn for a third of the tasks:

    theory          for the sum of
    all numbers     log_bar / E[log e] rollouts                        everybody's numbers, which nobody is banned by
    what suspends   until (log_bar + ln 2) / E[log e] were judged      those without any one validator's (rule 2)
                    by others than any one validator
    one hides       until (log_bar + ln 2 + ln 12) / E[log e] were     those without two, since one says 0 of all
                    judged by each of two

The last two are 3/2 and 3 times as long, and the wait until draws were even enough (`wait`). E over the kind's numbers.
Kinds whose E[log e] is not positive are invisible to the row: they are named on stderr, and are no goal.

Not covered: what the numbers of other models are; validators that lie together; the coordinator around it (tests).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.contract import CouldNotRunError, Goal, machine, run
from protocol.evidence_rows import EvidenceRow
from protocol.manifest import Thresholds
from verifier.evidence import log_condemning, log_factors
from verifier.evidence_rows import FALSE_BANS_A_DAY, JUDGED, DeviceClass, Noise, bf16_rows, fp32_rows
from verifier.thresholds import PROOF_GATE

POOL = Path(__file__).resolve().parent / "data" / "evidence-pool.json"
COUNTABLE = 0.01
"""False bans a node-day at the bar where they can be counted."""
VALIDATORS = 3
OF_THEORY = 1.3
FRAMED_SHARE = 10
"""Of the node-days, one in this many is simulated with a liar: sixteen sums each."""
TASK = 8
"""Rollouts of one task, judged by one validator."""
WAITS = 2000
"""Histories of draws that a mean wait is taken over."""
MOST_ROLLOUTS = 60_000
"""Rollouts after which a dishonest node is taken as never banned."""

F64 = npt.NDArray[np.float64]
Leases = list[list[float]]
Kinds = Mapping[str, Mapping[str, Leases]]
"""Kind -> statistic -> numbers, lease by lease."""

SEEN_BY = {
    ("precision", "proof_median"): ["fp32 drift"],
    ("precision", "mantissa_mean"): ["bf16 int8", "bf16 fp8"],
    ("seed-choice", "not_first_rate"): ["bf16 int8", "bf16 fp8", "bf16 warmer"],
    ("seed-choice", "margin_rate"): ["bf16 int8", "bf16 fp8", "bf16 warmer"],
    ("margin-steer", "margin_reward"): ["bf16 answers steer"],
    ("logprob-lean", "mismatch_k3"): ["bf16 answers zigzag"],
    ("logprob-lean", "lean_above"): ["bf16 answers lean up"],
    ("logprob-lean", "lean_below"): ["bf16 answers lean"],
    ("logprob-lean", "lean_reward_above"): [],
    ("logprob-lean", "lean_reward_below"): ["bf16 answers lean tied"],
    ("reward", "reward_claimed"): ["claims 0.3 more"],
}
"""Of every row that a run may have; those that no rule makes are not simulated."""


def measure(args: argparse.Namespace) -> list[Goal]:
    rng = np.random.default_rng(args.seed)
    kinds = read_pool(args.pool)
    goals: list[Goal] = []
    for row in rows_of(kinds):
        today = replace(row, log_bar=day_bar(row, args.rollouts))
        goals += honest_goals(rng, today, kinds, args.days, args.rollouts)
        for kind in SEEN_BY.get((row.hypothesis, row.statistic), []):
            goals += dishonest_goals(rng, row, kind, kinds[kind][row.statistic], args.nodes)
    return goals


def read_pool(path: Path) -> dict[str, dict[str, Leases]]:
    """The pool, with the rewards of a judge that errs both ways added: no environment of ours has one."""
    try:
        kinds: dict[str, dict[str, Leases]] = json.loads(path.read_text())["kinds"]
    except (OSError, ValueError, KeyError) as exc:
        raise CouldNotRunError(f"{path} is no pool ({exc!r}): python -m benchmarks.data.evidence_pool") from exc
    rng = np.random.default_rng(0)
    errors = rng.normal(0.0, 0.1, (64, 32))
    kinds["judged"] = {"reward_claimed": (1.0 + np.clip(errors, -1, 1)).tolist()}
    kinds["claims 0.3 more"] = {"reward_claimed": (1.0 + np.clip(errors + 0.3, -1, 1)).tolist()}
    return kinds


def noise_of(kinds: Kinds, kind: str) -> dict[str, Noise]:
    """What the rows follow from: honest numbers of each statistic."""
    return {name: Noise.of([x for lease in leases for x in lease]) for name, leases in kinds[kind].items()}


def rows_of(kinds: Kinds) -> list[EvidenceRow]:
    """The rows of an fp32 run and of a bf16 run whose environments are not pure."""
    medians = [x for lease in kinds["fp32 honest"]["proof_median"] for x in lease]
    bounds = Thresholds(3e-6, 4, PROOF_GATE, 1e-4, 3e-4, len(medians), 0, max(medians), 0, 0.0, 0.0, "pool")
    fp32 = fp32_rows(bounds, [DeviceClass("another", "as loud as the pool's", 1, {"proof_median": max(medians)})])
    noise = noise_of(kinds, "bf16 honest")
    for name in ("margin_reward", "lean_reward_above", "lean_reward_below"):
        noise[name] = noise_of(kinds, "bf16 answers honest")[name]
    return [*fp32, *bf16_rows(noise, has=[JUDGED])]


def day_bar(row: EvidenceRow, rollouts: int) -> float:
    """The bar of a node-day of so many rollouts; the row's own is made for 10^6."""
    return row.log_bar + math.log(rollouts / 1e6)


# --- honest nodes ---------------------------------------------------------------------------------------------------


def honest_goals(rng: np.random.Generator, row: EvidenceRow, kinds: Kinds, days: int, rollouts: int) -> list[Goal]:
    """No false ban at the design bar, and no more than its bound says at one where they can be counted."""
    name = f"{row.hypothesis} ({row.statistic})"
    banned, counted = [], []
    for numbers in honest_numbers(rng, row, kinds, days).values():
        high = highest(numbers, days, rollouts)
        banned.append(float((high >= row.log_bar).sum()))
        counted.append(float((high >= math.log(rollouts / COUNTABLE)).mean()))
    few = max(1, days // FRAMED_SHARE)
    pool = from_leases(rng, row, pool_of(row, kinds), few)
    _, taken = until(rng, row, pool, few, rollouts, liar_says=row.clip)
    framed = float((taken < MOST_ROLLOUTS).sum())
    sys.stderr.write(
        f"{name}: banned {banned} of {days} each, {framed:.0f} of {few} framed; at 1% a day: "
        f"{[round(c, 5) for c in counted]}\n"
    )
    bound = 3.0 / days
    return [
        Goal(
            f"{name}: honest node-days banned of {days} from the pool, at the bound, heavy-tailed (design figure "
            f"{FALSE_BANS_A_DAY:g} a node-day for all rows; 0 of n bounds it at {bound:.1g})",
            0.0, max(banned), max(banned) == 0, tuple(banned), machine(),
        ),
        Goal(
            f"{name}: share of honest node-days over a bar of one in 100, at most that",
            COUNTABLE, round(max(counted), 5), max(counted) <= COUNTABLE, tuple(round(c, 5) for c in counted),
            machine(),
        ),
        Goal(
            f"{name}: honest node-days banned of {few} while one of three validators says the most of each",
            0.0, framed, framed == 0, (framed,), machine(),
        ),
    ]  # fmt: skip


def honest_numbers(rng: np.random.Generator, row: EvidenceRow, kinds: Kinds, nodes: int) -> dict[str, Iterator[F64]]:
    """Source -> endless log e of the next rollout of each node."""
    pool = pool_of(row, kinds)
    shape = 1.5
    pareto = row.honest * (shape - 1) / shape

    def made(draw: Callable[[], F64]) -> Iterator[F64]:
        while True:
            yield log_factors(row, draw())

    return {
        "pool": from_leases(rng, row, pool, nodes),
        "at bound": made(lambda: rng.gamma(4.0, row.honest / 4.0, nodes)),
        "heavy": made(lambda: pareto * (1.0 + rng.pareto(shape, nodes))),
    }


def pool_of(row: EvidenceRow, kinds: Kinds) -> Leases:
    """Honest numbers of a row's statistic."""
    fitting = ("fp32 honest", "bf16 answers honest", "judged", "bf16 honest")
    order = fitting if row.statistic in ("margin_reward", "proof_median") else fitting[::-1]
    return next(kinds[kind][row.statistic] for kind in order if row.statistic in kinds[kind])


def from_leases(rng: np.random.Generator, row: EvidenceRow, leases: Leases, nodes: int) -> Iterator[F64]:
    """log e of each node's next rollout, lease after lease drawn with replacement."""
    flat = log_factors(row, np.concatenate([np.asarray(lease) for lease in leases]))
    ends = np.cumsum([len(lease) for lease in leases])
    starts = ends - [len(lease) for lease in leases]
    chosen = rng.integers(len(leases), size=nodes)
    at, end = starts[chosen], ends[chosen]
    while True:
        yield flat[at]
        at = at + 1
        over = np.flatnonzero(at >= end)
        chosen = rng.integers(len(leases), size=len(over))
        at[over], end[over] = starts[chosen], ends[chosen]


def highest(numbers: Iterator[F64], nodes: int, rollouts: int) -> F64:
    """The largest ln M of each node over its rollouts."""
    log_m, high = np.zeros(nodes), np.zeros(nodes)
    for _ in range(rollouts):
        np.maximum(log_m, 0.0, out=log_m)
        log_m += next(numbers)
        np.maximum(high, log_m, out=high)
    return high


# --- dishonest nodes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caught:
    """Rollouts until a row bans nodes of one kind; `MOST_ROLLOUTS` when it never did."""

    growth: float
    """E[log e]; at most 0 where the row does not see the kind."""
    believed: F64
    """Of each simulated node, by the sum of all numbers."""
    taken: F64
    """By what suspends."""
    hidden: F64
    """By what suspends while one of the validators says 0 of everything."""

    def theory(self, row: EvidenceRow) -> dict[str, float]:
        """What each of them should be: every rollout brings `growth`, and chance only says who judges it."""
        need, half = row.log_bar / self.growth, math.log(2.0) / self.growth
        ranks = math.log(VALIDATORS * (VALIDATORS + 1)) / self.growth
        return {"believed": need, "taken": wait(need + half, False), "hidden": wait(need + half + ranks, True)}


def wait(need: float, hidden: bool) -> float:
    """Mean rollouts until enough of them were judged by somebody else than any one validator.

    Args:
        need: rollouts that are enough.
        hidden: the first validator's don't count, so that without one of the others it is those of a single one.
    """
    rng = np.random.default_rng(0)
    tasks = int(3 * VALIDATORS * (need / TASK + 20))
    drawn = rng.integers(VALIDATORS, size=(WAITS, tasks))
    each = np.stack([np.cumsum(drawn == one, axis=1) for one in range(VALIDATORS)])
    if hidden:
        each = each[1:]
    least = TASK * (each.sum(axis=0) - each.max(axis=0)) if len(each) > 1 else TASK * each[0]
    last = (least >= need).argmax(axis=1)
    before = np.where(last > 0, np.take_along_axis(least, np.maximum(0, last - 1)[:, None], axis=1)[:, 0], 0)
    return float((last * TASK + need - before).mean())


def rollouts_to_ban(rng: np.random.Generator, row: EvidenceRow, leases: Leases, nodes: int) -> Caught:
    """`Cusum.log_all` and `Cusum.log_e` of many nodes at once, without and with a validator that hides."""
    growth = float(log_factors(row, np.concatenate([np.asarray(lease) for lease in leases])).mean())
    never = np.full(nodes, float(MOST_ROLLOUTS))
    if growth <= 0:
        return Caught(growth, never, never, never)
    numbers = from_leases(rng, row, leases, nodes)
    most = min(MOST_ROLLOUTS, int(20 * row.log_bar / growth) + 1)
    believed, taken = until(rng, row, numbers, nodes, most)
    _, hidden = until(rng, row, numbers, nodes, most, liar_says=0.0)
    return Caught(growth, believed, taken, hidden)


def until(
    rng: np.random.Generator,
    row: EvidenceRow,
    numbers: Iterator[F64],
    nodes: int,
    most: int,
    liar_says: float | None = None,
) -> tuple[F64, F64]:
    """Rollouts until the sum of all numbers, and the one that counts, are over the bar.

    Args:
        liar_says: what the first validator says of every rollout it is drawn for; None for the truth.
    """
    believed, taken = (np.full(nodes, float(MOST_ROLLOUTS)) for _ in range(2))
    lie = None if liar_says is None else float(log_factors(row, [liar_says])[0])
    places = np.arange(VALIDATORS + 1)
    logs = np.zeros((nodes, VALIDATORS + 1, VALIDATORS + 1))  # as in `Cusum`
    for n in range(most):
        if n % TASK == 0:
            drawn = rng.integers(1, VALIDATORS + 1, size=nodes)
            others = places[None, :] != drawn[:, None]
            counts = others[:, :, None] & others[:, None, :]
        said = next(numbers)
        if lie is not None:
            said = np.where(drawn == 1, lie, said)
        logs = np.where(counts, np.maximum(logs, 0.0) + said[:, None, None], logs)
        for found, log_e in ((believed, logs[:, 0, 0]), (taken, log_condemning(logs))):
            found[(log_e >= row.log_bar) & (found == MOST_ROLLOUTS)] = n + 1
        if (taken < MOST_ROLLOUTS).all() and (believed < MOST_ROLLOUTS).all():
            break
    return believed, taken


def dishonest_goals(
    rng: np.random.Generator, row: EvidenceRow, kind: str, leases: Leases, nodes: int
) -> Sequence[Goal]:
    name = f"{row.hypothesis} ({row.statistic}) against {kind}"
    caught = rollouts_to_ban(rng, row, leases, nodes)
    if caught.growth <= 0:
        sys.stderr.write(f"{name}: not seen by this row\n")
        return []
    theory, found = caught.theory(row), []
    for field, words in (
        ("believed", "all numbers"),
        ("taken", "what suspends"),
        ("hidden", "what suspends while one of three validators hides"),
    ):
        x: F64 = getattr(caught, field)
        mean, spread = float(x.mean()), tuple(float(q) for q in np.quantile(x, (0.05, 0.5, 0.95)))
        ratio = mean / theory[field]
        said = f"{name}, {words}: rollouts to ban over theory ({mean:.0f} over {theory[field]:.0f}"
        if field == "taken":
            said += f", {mean / theory['believed']:.2f} of that of all numbers"
        sys.stderr.write(f"{said}); {spread}\n")
        found.append(Goal(f"{said}), at most", OF_THEORY, round(ratio, 4), ratio <= OF_THEORY, spread, machine()))
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=int, default=100_000, help="honest node-days for each row and source")
    parser.add_argument("--rollouts", type=int, default=500, help="rollouts of a node-day")
    parser.add_argument("--nodes", type=int, default=400, help="dishonest nodes of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=Path, default=POOL)


if __name__ == "__main__":
    sys.exit(run(measure, "Pooled evidence, simulated on numbers of real verdicts.", _arguments))
