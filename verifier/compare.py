"""May two honest verifiers have found this, both? What a verdict's details say, held against details computed here.

Whoever checks a rollout computes in float32 on the weights that its lease names, in either profile (decision 018), so
two of them differ by their own rounding and by nothing a node does. Per number of an accepted rollout, with d = said -
computed here:

    one rollout       |d| <= jump + noise                     what lies at an edge falls to one side here and there
    n of one task     sum of |d| <= jump + sum of noise       and does so once among them, not in every one. The same of
                                                              all that an audit looks at of one verdict, and of one
                                                              validator

Rollouts with the same prompt and tokens share their states, and with them such an accident: they count once, by the
largest |d| among them.

    number                            jump                          noise, of each rollout
    proof_median                      proof_median                  proof_median / 5, the honest maximum
    mantissa_mean                     1.4 a chunk                   1/128: one mantissa of a chunk rounded otherwise
    proof_outliers                    proof_outliers                proof_outliers: a node may put points on the gate
    exponents                         4                             1
    token_margin, logprob_error       logprob                       logprob
    margin_sum                        logprob                       logprob x tokens_not_first: only those have a margin
    tokens_not_first                  2                             tokens / 1,000
    mismatch_kl                       logprob                       logprob / 10, the honest maximum
    mismatch_k3                       logprob / 10                  logprob / 100: it is flat where both agree
    route_shortfall                   route margin                  route margin
    routes_not_first                  3                             2 x measured_not_first_rate x route_choices

`logprob`, `proof_median`, `proof_outliers` and the route margin are the manifest's thresholds. What these allow a false
validator is less than the room that rows leave above honest means (docs/decisions/024 has both in figures, and what was
measured).

Log-probabilities may be off by `thresholds.logprob`. Rewards are equal where scoring is `pure`, and may differ
elsewhere (RULES 10). A number that is missing, not finite or named twice is a difference; so is one too many, if a row
of the manifest could read it.

Not covered: which rollouts are compared (`derive`, `spot`), outcomes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from protocol.limits import PROOF_CHUNK_TOKENS
from protocol.manifest import RunManifest
from protocol.records import Lease, RolloutDetail
from verifier.claims import scored_purely
from verifier.numbers import NUMBERS, Kind
from verifier.statistics import READS

REWARD, LOGPROBS, TEXT = "reward", "logprobs", "digest"
"""What a difference is about when it is no number."""

_SAFETY = 5.0
"""A fp32 bound over the honest maximum it was made from (`thresholds.SAFETY`); log-probabilities have twice that."""

_MANTISSA_JUMP = 1.4
"""An edge point that is in one verifier's proof and not in the other's changes the mean of its chunk by up to 127 over
the points that agree, 96 at least. Smaller, and chance accuses: about one honest chunk in 300,000 has one."""

_MANTISSA_NOISE = 1.0 / 128
_EDGE_POINTS = 4.0
"""Points of a chunk that may be others: `thresholds.PROOF_OUTLIERS`."""

_NOT_FIRST_JUMP, _NOT_FIRST_A_TOKEN = 2.0, 1e-3
"""Scores level within a verifier's rounding, 1e-5, come once in 10^5 tokens or less."""

_ROUTES_JUMP = 3.0
"""Choices that may be level beside those which the mean gives: short rollouts have one or none."""


@dataclass(frozen=True)
class Difference:
    """Something that two honest verifiers would not have said both."""

    position: int
    """In the submission; where only the sum is too large, of the rollout that is furthest off."""
    number: str
    """A name of `verifier.numbers`, or `REWARD`, `LOGPROBS`, `TEXT`."""
    off: float
    """By how much, without sign; 0 where that can't be said."""
    message: str
    """In words, after "its details "."""


@dataclass(frozen=True)
class Tolerance:
    """By how much one number of honest verifiers may be apart."""

    jump: float
    """Once among however many rollouts."""
    noise: float
    """In each."""


@dataclass(frozen=True)
class Apart:
    """How far one number is off over some rollouts, each text once, and how far it may be."""

    off: float
    """Sum of |d|."""
    jump: float
    """The largest."""
    noise: float
    """Their sum."""

    @property
    def allowed(self) -> float:
        return self.jump + self.noise

    def __add__(self, other: Apart) -> Apart:
        return Apart(self.off + other.off, max(self.jump, other.jump), self.noise + other.noise)


@dataclass(frozen=True)
class Rules:
    """What comparing the rollouts of one lease depends on."""

    logprob: float
    proof_median: float
    proof_outliers: int
    route_margin: float
    route_rate: float
    """Share of choices of experts that are level within a verifier's rounding, twice as many as were measured."""
    pure: bool
    """Its environment's scoring is."""
    read: frozenset[str]
    """Numbers that some row of the manifest reads."""
    share: float = 1.0
    """Of every tolerance that is granted: less shows what another machine may have found to be a difference."""

    @staticmethod
    def of(manifest: RunManifest, lease: Lease) -> Rules:
        """Under the manifest that the lease names."""
        routes = manifest.routes
        return Rules(
            logprob=manifest.thresholds.logprob,
            proof_median=manifest.thresholds.proof_median,
            proof_outliers=manifest.thresholds.proof_outliers,
            route_margin=0.0 if routes is None else routes.margin,
            route_rate=0.0 if routes is None else 2.0 * routes.measured_not_first_rate,
            pure=scored_purely(manifest, lease),
            read=numbers_read(manifest),
        )

    def tolerances(self, ours: Mapping[str, float], tokens: int) -> dict[str, Tolerance]:
        """Of each number of one rollout.

        Args:
            ours: what was computed here of it.
        """
        logprob, median = self.logprob, self.proof_median
        known = {
            "proof_median": (median, median / _SAFETY),
            "proof_outliers": (float(self.proof_outliers), float(self.proof_outliers)),
            "mantissa_mean": (_MANTISSA_JUMP / max(1, -(-tokens // PROOF_CHUNK_TOKENS)), _MANTISSA_NOISE),
            "margin_sum": (logprob, logprob * ours.get("tokens_not_first", 0.0)),
            "tokens_not_first": (_NOT_FIRST_JUMP, _NOT_FIRST_A_TOKEN * tokens),
            "mismatch_kl": (logprob, logprob / (2 * _SAFETY)),
            "mismatch_k3": (logprob / (2 * _SAFETY), logprob / (20 * _SAFETY)),
            "route_shortfall": (self.route_margin, self.route_margin),
            "routes_not_first": (_ROUTES_JUMP, self.route_rate * ours.get("route_choices", 0.0)),
        }
        of_kind = {
            Kind.EXACT: (0.0, 0.0),
            Kind.COUNT: (_EDGE_POINTS, 1.0),
            Kind.NOISE: known["proof_median"],
            Kind.POINTS: known["mantissa_mean"],
            Kind.ROUNDING: (logprob, logprob),
        }
        found = {}
        for name in ours:
            jump, noise = known[name] if name in known else of_kind[NUMBERS.get(name, Kind.ROUNDING)]
            found[name] = Tolerance(self.share * jump, self.share * noise)
        return found


def numbers_read(manifest: RunManifest) -> frozenset[str]:
    """Numbers that the manifest's rows sum up."""
    return frozenset(name for row in manifest.evidence for name in READS.get(row.statistic, ()))


def required(manifest: RunManifest) -> frozenset[str]:
    """Numbers without which an ACCEPT under this manifest is none: those its rows read, of every validator's measuring.

    A verdict without them would shield its node from what is summed up. `reward_claimed` is measured where scoring is
    not `pure` only: it gives nothing where it is missing.
    """
    return (numbers_read(manifest) & NUMBERS.keys()) - {"reward_claimed"}


def differences(
    said: Mapping[int, RolloutDetail | None], ours: Mapping[int, RolloutDetail], rules: Rules
) -> list[Difference]:
    """What of a verdict's details on some accepted rollouts no honest verifier would have written, in order; at most
    one a rollout.

    Args:
        said: what it handed over of each; None for nothing.
        ours: what was computed here of the same positions, all of them accepted.
    """
    return Held(said, ours, rules).differences(ours)


class Held:
    """A verdict's details on its accepted rollouts, held against what was computed here of the same positions."""

    def __init__(
        self, said: Mapping[int, RolloutDetail | None], ours: Mapping[int, RolloutDetail], rules: Rules
    ) -> None:
        """See `differences`."""
        self._rules = rules
        self._wrong: dict[int, Difference] = {}
        self._off: dict[int, dict[str, tuple[float, Tolerance]]] = {}
        """Of rollouts that have all numbers."""
        self._text = {position: own.digest or position for position, own in ours.items()}
        for position, own in ours.items():
            detail = said.get(position)
            wrong = _apart_from_numbers(position, detail, own, rules)
            if wrong is None and detail is not None:
                theirs, computed = _named(detail), _named(own)
                may = rules.tolerances(computed, len(own.logprobs) // 4)
                off = {name: (abs(theirs[name] - value), may[name]) for name, value in computed.items()}
                self._off[position] = off
                for name, (amount, allowed) in off.items():
                    if not amount <= allowed.jump + allowed.noise:
                        text = f"give {name} {theirs[name]:.6g}, but it is {computed[name]:.6g}"
                        wrong = Difference(position, name, _finite(amount), text)
                        break
            if wrong is not None:
                self._wrong[position] = wrong

    def differences(self, positions: Iterable[int]) -> list[Difference]:
        """Of these rollouts, and of what they add up to."""
        among = sorted(positions)
        found = {position: self._wrong[position] for position in among if position in self._wrong}
        for name, (sum_of, furthest, count) in self._sums(among).items():
            if not sum_of.off <= sum_of.allowed:
                most = f"{sum_of.allowed:.3g} may be rounding"
                text = f"are off by {sum_of.off:.3g} in {name} over {count} rollouts, of which {most}"
                found.setdefault(furthest, Difference(furthest, name, _finite(self._off[furthest][name][0]), text))
        return [found[position] for position in sorted(found)]

    def sums(self) -> dict[str, Apart]:
        """How far the verdict is off in each number that a row reads, to be added up with its validator's other
        verdicts: a lie that is less than chance allows in one of them, and is in each, is more than it allows in all.
        """
        return {name: sum_of for name, (sum_of, _, _) in self._sums(self._off).items() if name in self._rules.read}

    def _sums(self, positions: Iterable[int]) -> dict[str, tuple[Apart, int, int]]:
        """Number -> how far it is off, the rollout that is furthest off, and how many texts there are."""
        texts: dict[str, dict[bytes | int, tuple[float, int, Tolerance]]] = {}
        for position in positions:
            text = self._text[position]
            for name, (amount, may) in self._off.get(position, {}).items():
                worst = texts.setdefault(name, {})
                if text not in worst or amount >= worst[text][0]:
                    worst[text] = amount, position, may
        return {
            name: (
                Apart(
                    math.fsum(amount for amount, _, _ in worst.values()),
                    max(may.jump for _, _, may in worst.values()),
                    math.fsum(may.noise for _, _, may in worst.values()),
                ),
                max((amount, position) for amount, position, _ in worst.values())[1],
                len(worst),
            )
            for name, worst in texts.items()
        }


def by_task(positions: Iterable[int], samples: int) -> list[list[int]]:
    """Positions of a submission, those of one task together."""
    tasks: dict[int, list[int]] = {}
    for position in sorted(positions):
        tasks.setdefault(position // samples, []).append(position)
    return list(tasks.values())


def _apart_from_numbers(
    position: int, said: RolloutDetail | None, own: RolloutDetail, rules: Rules
) -> Difference | None:
    if said is None or len(said.logprobs) != len(own.logprobs):
        return Difference(position, LOGPROBS, 0.0, "do not hold one log-probability per token")
    if rules.pure and said.reward != own.reward:
        off = _finite(abs(said.reward - own.reward))
        return Difference(position, REWARD, off, f"give reward {said.reward:g}, but it is {own.reward:g}")
    amount = np.abs(np.frombuffer(said.logprobs, "<f4") - np.frombuffer(own.logprobs, "<f4"))
    if len(amount) and not float(amount.max()) <= rules.share * rules.logprob:
        off = _finite(float(amount.max()))
        return Difference(position, LOGPROBS, off, f"are off by {float(amount.max()):.3g} in a log-probability")
    if said.digest and said.digest != own.digest:
        return Difference(position, TEXT, 0.0, "name the hash of another text")
    theirs, computed = _named(said), _named(own)
    name = unfit(said, computed)
    if name:
        return Difference(position, name, 0.0, f"do not name {name} once, with a finite number")
    more = sorted(theirs.keys() & (rules.read | NUMBERS.keys()) - computed.keys())
    if more:
        return Difference(position, more[0], 0.0, f"give {more[0]}, which this rollout does not have")
    return None


def unfit(detail: RolloutDetail, required: Collection[str]) -> str:
    """The first of `required` that an accepted rollout's details do not name once, with a finite value; else empty."""
    values = _named(detail)
    once = len(values) == len(detail.numbers)
    if once and all(name in values for name in required) and all(map(math.isfinite, values.values())):
        return ""
    counts = Counter(number.name for number in detail.numbers)
    return next((name for name in sorted(required) if counts[name] != 1 or not math.isfinite(values[name])), "")


def _named(detail: RolloutDetail) -> dict[str, float]:
    return {number.name: number.value for number in detail.numbers}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
