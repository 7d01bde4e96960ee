"""Pooled evidence, simulated: how often it bans honest nodes, and how many rollouts it takes against dishonest ones.

    python -m benchmarks.evidence --json [--days 100000] [--rollouts 500]

Rows are those that a manifest gets by rule (`verifier.evidence_rows`) from the honest numbers of the pool, real ones of
the tiny model (`benchmarks.data.evidence_pool`). A node-day is `--rollouts` rollouts, and the bar that of its length.
Honest nodes, per row:

    pool       whole leases drawn from the pool, so that rollouts of one lease stay as alike as they are
    at bound   gamma numbers whose mean is exactly the row's honest bound: the worst that theory allows
    heavy      Pareto numbers with infinite variance and that same mean

At the bar of one false ban in 10^7 node-days none can be counted; the same sums against a bar of one in 100 can, and
show whether the bound is true. Dishonest nodes draw leases from the pool's dishonest kinds:

    theory     log_bar / E[log e], E over the kind's numbers, for the sum of all numbers
    rule 2     the sum that counts must clear the bar without any one of three validators, each drawn for a third of the
               tasks: half as many rollouts again, and more where only a few tasks decide

Kinds whose E[log e] is not positive are invisible to the row: they are named on stderr, and are no goal.

Not covered: what the numbers of other models are; validators that lie (tests); the coordinator around it (tests).
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
from protocol.manifest import EvidenceRow, Thresholds
from verifier.evidence import log_factors
from verifier.evidence_rows import FALSE_BANS_A_DAY, Noise, bf16_rows, fp32_rows
from verifier.thresholds import PROOF_GATE

POOL = Path(__file__).resolve().parent / "data" / "evidence-pool.json"
COUNTABLE = 0.01
"""False bans a node-day at the bar where they can be counted."""
VALIDATORS = 3
OF_THEORY = 1.3
OF_BELIEF = 2.5
"""Over theory, and with what it costs that no single of three validators can frame a node: half as many rollouts again,
and the wait until each of them was drawn often enough."""
TASK = 8
"""Rollouts of one task, judged by one validator."""
MOST_ROLLOUTS = 20_000
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
    ("stale", "previous_nearer"): ["bf16 paired stale"],
    ("reward", "reward_claimed"): ["claims 0.3 more"],
}


def measure(args: argparse.Namespace) -> list[Goal]:
    rng = np.random.default_rng(args.seed)
    kinds = read_pool(args.pool)
    goals: list[Goal] = []
    for row in rows_of(kinds):
        today = replace(row, log_bar=day_bar(row, args.rollouts))
        goals += honest_goals(rng, today, kinds, args.days, args.rollouts)
        for kind in SEEN_BY[(row.hypothesis, row.statistic)]:
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
    fp32 = fp32_rows(Thresholds(3e-6, 4, PROOF_GATE, 1e-4, 3e-4, len(medians), 0, max(medians), 0, 0.0, 0.0, "pool"))
    noise = noise_of(kinds, "bf16 honest")
    noise["margin_reward"] = noise_of(kinds, "bf16 answers honest")["margin_reward"]
    return [*fp32, *bf16_rows(noise, pure=False)]


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
    sys.stderr.write(f"{name}: banned {banned} of {days} each; at 1% a day: {[round(c, 5) for c in counted]}\n")
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
    ]  # fmt: skip


def honest_numbers(rng: np.random.Generator, row: EvidenceRow, kinds: Kinds, nodes: int) -> dict[str, Iterator[F64]]:
    """Source -> endless log e of the next rollout of each node."""
    fitting = ("fp32 honest", "bf16 answers honest", "bf16 paired honest", "judged", "bf16 honest")
    order = fitting if row.statistic in ("margin_reward", "proof_median") else fitting[::-1]
    pool = next(kinds[kind][row.statistic] for kind in order if row.statistic in kinds[kind])
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
    """Rollouts until a row bans nodes of one kind; infinite theory where the row does not see the kind."""

    theory: float
    believed: F64
    """Of each simulated node, if every validator could be believed; `MOST_ROLLOUTS` when it never was."""
    taken: F64
    """The same without any one of three validators."""


def rollouts_to_ban(rng: np.random.Generator, row: EvidenceRow, leases: Leases, nodes: int) -> Caught:
    """`Cusum.log_all` and `Cusum.log_e` of many nodes at once."""
    growth = float(log_factors(row, np.concatenate([np.asarray(lease) for lease in leases])).mean())
    never = np.full(nodes, float(MOST_ROLLOUTS))
    if growth <= 0:
        return Caught(math.inf, never, never)
    theory = row.log_bar / growth
    numbers = from_leases(rng, row, leases, nodes)
    believed, taken = never.copy(), never.copy()
    log_m = np.zeros((VALIDATORS + 1, nodes))
    for n in range(min(MOST_ROLLOUTS, int(20 * theory))):
        if n % TASK == 0:
            drawn = rng.integers(VALIDATORS, size=nodes)
        counts = np.arange(VALIDATORS + 1)[:, None] != drawn[None, :]
        log_m = np.where(counts, np.maximum(log_m, 0.0) + next(numbers)[None, :], log_m)
        for found, log_e in ((believed, log_m[VALIDATORS]), (taken, log_m.min(axis=0))):
            found[(log_e >= row.log_bar) & (found == MOST_ROLLOUTS)] = n + 1
        if (taken < MOST_ROLLOUTS).all():
            break
    return Caught(theory, believed, taken)


def dishonest_goals(
    rng: np.random.Generator, row: EvidenceRow, kind: str, leases: Leases, nodes: int
) -> Sequence[Goal]:
    name = f"{row.hypothesis} ({row.statistic}) against {kind}"
    caught = rollouts_to_ban(rng, row, leases, nodes)
    if math.isinf(caught.theory):
        sys.stderr.write(f"{name}: not seen by this row\n")
        return []
    mean, counted = float(caught.believed.mean()), float(caught.taken.mean())
    spread = [tuple(float(q) for q in np.quantile(x, (0.05, 0.5, 0.95))) for x in (caught.believed, caught.taken)]
    sys.stderr.write(f"{name}: {mean:.0f} rollouts, theory {caught.theory:.0f}; counted {counted:.0f}; {spread}\n")
    words = f"{name}: rollouts to ban over theory ({mean:.0f} over {caught.theory:.0f}), at most"
    rule = f"{name}: the same without any one of three validators ({counted:.0f}), at most"
    found = [(words, OF_THEORY, mean / caught.theory), (rule, OF_BELIEF, counted / caught.theory)]
    return [
        Goal(goal, target, round(ratio, 4), ratio <= target, samples, machine())
        for (goal, target, ratio), samples in zip(found, spread, strict=True)
    ]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=int, default=100_000, help="honest node-days for each row and source")
    parser.add_argument("--rollouts", type=int, default=500, help="rollouts of a node-day")
    parser.add_argument("--nodes", type=int, default=400, help="dishonest nodes of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=Path, default=POOL)


if __name__ == "__main__":
    sys.exit(run(measure, "Pooled evidence, simulated on numbers of real verdicts.", _arguments))
