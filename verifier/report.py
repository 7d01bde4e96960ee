"""What an audit found, for people and for programs.

    exit 0   all that was looked at holds
    exit 1   something does not hold; `failures` names each record
    exit 2   nothing false was found, but something could not be checked; `unchecked` says what and why

Not covered: finding it (`audit`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol.commands import several
from protocol.errors import ReasonCode
from protocol.segments import Problem


@dataclass(frozen=True)
class Failure:
    """One record that does not hold."""

    record: str
    reason: ReasonCode
    message: str
    rollouts: tuple[str, ...] = ()
    """Ids of the rollouts a wrong verdict is wrong about."""
    numbers: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "record": self.record,
            "reason": self.reason.value,
            "message": self.message,
            "rollouts": list(self.rollouts),
            "numbers": self.numbers,
        }


@dataclass(frozen=True)
class Derived:
    """What the audit itself says about one rollout (`--rollout`)."""

    rollout: str
    outcome: str
    reason: str
    numbers: dict[str, float]
    verdicts: dict[str, str]
    """Record of each stored verdict -> its outcome."""


_NAMED_ALIKE = 3
"""So many records that fail alike are all named in one line; of more, the first and the number."""


def _named(said: str, records: list[tuple[str, str]], most: int) -> list[str]:
    """A line for each thing that is wrong; what is wrong alike is one line."""
    alike: dict[str, list[str]] = {}
    for record, why in records:
        alike.setdefault(why, []).append(record)
    out = []
    for why, names in list(alike.items())[:most]:
        few = len(names) <= _NAMED_ALIKE
        out.append(f"{said}{', '.join(names) if few else f'{names[0]} and {len(names) - 1} more (--json)'}: {why}")
    left = sum(len(names) for names in list(alike.values())[most:])
    return [*out, f"... and {left} more; --json lists all"] if left else out


@dataclass
class Report:
    run: str = ""
    """The run id that the archive's own manifest gives, hex."""
    expected: str = ""
    """The run id that the auditor came with, hex."""
    run_compared: bool = False
    """The two were compared; a difference is the failure `wrong-run`. Otherwise the archive alone says which run it is.
    """
    examined: bool = False
    """What is in the run was looked at. False when the audit ended before, and then every count below is 0."""
    promises_kept: int = 0
    """Receipts and heads that the auditor brought and the ledger holds."""
    entries: int = 0
    """Ledger entries read."""
    publications: int = 0
    batches: int = 0
    rollouts_total: int = 0
    """Rollouts that have a verdict."""
    rollouts_checked: int = 0
    """Of those, rollouts whose verdicts were derived again."""
    rollouts_held: int = 0
    """Of those, rollouts all of whose verdicts are the same again."""
    rollouts_resumed: int = 0
    """Of those checked, rollouts that an earlier, interrupted audit of the same archive had derived."""
    accepted_total: int = 0
    accepted_checked: int = 0
    rollouts_pending: int = 0
    """Submitted, without any verdict yet."""
    jobs_unanswered: int = 0
    """Jobs that were drawn and hold no verdict: one that was kept out of the ledger would be among them."""
    jobs_redrawn: int = 0
    """Jobs drawn again because a validator did not answer."""
    draws_checked: int = 0
    """Jobs whose validator was drawn again, from a revealed secret."""
    draws_waiting: int = 0
    """Jobs of periods whose secret is not due yet."""
    checks_drawn: int = 0
    """Accepted rollouts that the coordinator had to check itself, of periods whose secret is shown."""
    checks_silent: int = 0
    """Of those, rollouts whose verdict is wrong and whose validator the coordinator never accused."""
    phantom_submissions: int = 0
    """Submissions of the operator's phantoms, of periods whose secret is shown."""
    plants: int = 0
    """Of those, submissions that were altered on purpose."""
    groups_untrained: int = 0
    """Groups accepted whole that no batch took. Some come too late or are left over at the end; whoever chooses
    batches could leave out what it likes."""
    decided_here: Counter[str] = field(default_factory=Counter)
    """Validator (peer id) -> rollouts it left undecided and this audit decides. Memory runs out honestly; whoever
    leaves out what it likes looks the same, but for the number."""
    finished: bool = False
    fraction: float = 1.0
    seed: str = ""
    """With `--fraction`: the same seed draws the same rollouts again."""
    failures: list[Failure] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    """(record, why it could not be checked)."""
    derived: list[Derived] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the auditor should know about how it went; nothing in it speaks of the run."""
    seconds: float = 0.0

    def fail(self, record: str, reason: ReasonCode, message: str) -> None:
        self.failures.append(Failure(record, reason, message))

    def add(self, problem: Problem) -> None:
        self.fail(problem.record, problem.reason, problem.message)

    @property
    def exit_code(self) -> int:
        if self.failures:
            return 1
        return 2 if self.unchecked else 0

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            name: getattr(self, name)
            for name in (
                "run",
                "run_compared",
                "examined",
                "promises_kept",
                "entries",
                "publications",
                "batches",
                "rollouts_total",
                "rollouts_checked",
                "rollouts_held",
                "rollouts_resumed",
                "accepted_total",
                "accepted_checked",
                "rollouts_pending",
                "jobs_unanswered",
                "jobs_redrawn",
                "draws_checked",
                "draws_waiting",
                "checks_drawn",
                "checks_silent",
                "phantom_submissions",
                "plants",
                "groups_untrained",
                "finished",
                "fraction",
                "seed",
            )
        }
        out["decided_here"] = dict(self.decided_here)
        out["failures"] = [failure.to_json() for failure in self.failures]
        out["unchecked"] = [{"record": record, "why": why} for record, why in self.unchecked]
        out["derived"] = [vars(derived) for derived in self.derived]
        out["notes"] = self.notes
        out["seconds"] = round(self.seconds, 3)
        return out

    def lines(self, most: int = 20) -> list[str]:
        """The report for a person: what was checked, what fails, what to do next."""
        out = [self._which_run(), *(self._counts() if self.examined else [])]
        if self.seed:
            out.append(f"a share of {self.fraction:g} was drawn; draw the same again with --seed {self.seed}")
        if self.rollouts_resumed:
            resumed = several(self.rollouts_resumed, "rollout")
            out.append(f"went on with an interrupted audit, which had derived {resumed}")
        out += [f"NOTE  {note}" for note in self.notes]
        for item in self.derived:
            numbers = ", ".join(f"{name} {value:.6g}" for name, value in item.numbers.items())
            out.append(f"{item.rollout}: {item.outcome} ({item.reason}) {numbers}")
            out += [f"  {record} says {said}" for record, said in item.verdicts.items()]
        wrong = [(failure.record, f"{failure.reason.value}: {failure.message}") for failure in self.failures]
        out += _named("DOES NOT HOLD  ", wrong, most)
        out += _named("NOT CHECKED    ", self.unchecked, most)
        if self.failures:
            counts = Counter(failure.reason.value for failure in self.failures).most_common()
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
            out.append(
                f"{several(len(self.failures), 'failure')}: {reasons}. What a reason means: "
                f"verifier explain {counts[0][0]}"
            )
        elif self.unchecked:
            out.append("nothing false was found, but not everything could be checked")
        else:
            out.append("everything that was checked holds")
        return out

    def _which_run(self) -> str:
        said = f"run id {self.run or 'unknown'}: "
        if self.run and self.run_compared:
            said += (
                "the one you asked for" if self.run == self.expected else f"not the one you asked for, {self.expected}"
            )
        elif self.run:
            said += (
                "not compared with anything. Whoever writes a whole run anew gets another id: compare it, or pass "
                "the run's share code with --run"
            )
        else:
            said += "it could not be read"
        if self.promises_kept:
            said += f"; {several(self.promises_kept, 'kept promise')} found in its ledger"
        return said if self.examined else f"{said}; nothing in the run was looked at"

    def _counts(self) -> list[str]:
        """What was looked at, in numbers."""
        out = [
            f"run {self.run[:16]}: {several(self.entries, 'ledger entry', 'ledger entries')}, "
            f"{several(self.publications, 'publication')}, {several(self.batches, 'batch', 'batches')}"
            + ("" if self.finished else ", not finished yet"),
            f"rollouts: {self.rollouts_checked} of {self.rollouts_total} derived again, {self.rollouts_held} held; "
            f"accepted: {self.accepted_checked} of {self.accepted_total} derived again"
            + (f"; without a verdict yet: {self.rollouts_pending}" if self.rollouts_pending else ""),
            f"draws: {self.draws_checked} made again"
            + (f", waiting for their secret: {self.draws_waiting}" if self.draws_waiting else "")
            + (f"; {several(self.jobs_redrawn, 'job')} drawn more than once" if self.jobs_redrawn else "")
            + (f"; {several(self.jobs_unanswered, 'job')} never got a verdict" if self.jobs_unanswered else ""),
        ]
        if self.checks_silent:
            out.append(
                f"of the {self.checks_drawn} rollouts that the coordinator had to check itself, "
                f"{several(self.checks_silent, 'wrong verdict')} stayed unnamed: left out, or passed over"
            )
        if self.phantom_submissions:
            out.append(
                f"phantoms: {several(self.phantom_submissions, 'submission')} by keys of the operator's, "
                f"{self.plants} altered on purpose"
            )
        if self.groups_untrained or self.decided_here:
            who = ", ".join(f"{count} by {name[-8:]}" for name, count in self.decided_here.most_common())
            out.append(
                f"left out: {several(self.groups_untrained, 'accepted group')} never trained; "
                f"{several(self.decided_here.total(), 'rollout')} left undecided by a validator and decided here"
                + (f" ({who})" if who else "")
            )
        return out
