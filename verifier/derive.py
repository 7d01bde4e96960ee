"""One submission judged again from the archive, and held against every verdict on it.

What comes out is plain data about one submission, the same in whichever process and order it was made: the audit makes
it in several (`workers`), keeps it over an interruption (`progress_file`) and puts it into its report.

Not covered: which submissions (`audit`), what a judgement is (`judge`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from environments.base import Environment
from protocol.errors import ProtocolError, ReasonCode
from protocol.identity import peer_id_text
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT
from shardcast.archive import Archive
from shardcast.heads import publication_name
from verifier import compare
from verifier.archive import RunArchive, SubmissionFact, VerdictFact
from verifier.compare import Apart
from verifier.judge import Judgement, judge_upload
from verifier.model import PolicyModel
from verifier.profiles import load_to_verify
from verifier.report import Derived, Failure

WORDS = {ACCEPT: "accept", REJECT: "reject", INCONCLUSIVE: "inconclusive"}

NOT_ONE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading JSON of another shape raises."""


@dataclass(frozen=True)
class Part:
    """Submissions of one policy (ledger indices), which one process derives one after another."""

    epoch: int
    step: int
    submissions: tuple[int, ...]

    @property
    def policy(self) -> str:
        """The record that the weights are."""
        return f"published/{publication_name((self.epoch, self.step))}"


@dataclass(frozen=True)
class Begun:
    """Said before a submission is derived, with the weights loaded: what ends the process now is its doing."""

    submission: int


@dataclass(frozen=True)
class Wrong:
    """A verdict that is not what was derived."""

    verdict: int
    positions: tuple[int, ...]
    message: str
    numbers: Mapping[str, float]
    """Of the first position."""


@dataclass(frozen=True)
class Derivation:
    """What was derived about one submission."""

    submission: int
    known: tuple[int, ...] = ()
    """Positions that this machine decided."""
    undecided: tuple[tuple[int, str], ...] = ()
    """(position, reason) of the others."""
    wrong: tuple[Wrong, ...] = ()
    decided_here: Mapping[str, int] = field(default_factory=dict)
    """Validator (peer id) -> rollouts that it left undecided and this machine decided."""
    apart: Mapping[int, Mapping[str, Apart]] = field(default_factory=dict)
    """Verdict -> number -> how far it is off here, for the sum over its validator."""
    derived: tuple[Derived, ...] = ()
    """With `--rollout`: what was derived about it."""
    failed: str = ""
    """Why nothing could be derived; then all the rest is empty."""

    def to_json(self) -> dict[str, Any]:
        return {"submission": self.submission} | {name: value for name, value in asdict(self).items() if value}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Derivation:
        """The inverse. Raises what Python does for what is none: any of `NOT_ONE`."""
        known = tuple(int(one) for one in raw.get("known", ()))
        return Derivation(
            submission=int(raw["submission"]),
            known=known,
            undecided=tuple((int(at), str(why)) for at, why in raw.get("undecided", ())),
            wrong=tuple(
                Wrong(int(w["verdict"]), tuple(map(int, w["positions"])), str(w["message"]), dict(w["numbers"]))
                for w in raw.get("wrong", ())
            ),
            decided_here={str(who): int(count) for who, count in raw.get("decided_here", {}).items()},
            apart={
                int(verdict): {str(name): _apart(one) for name, one in dict(numbers).items()}
                for verdict, numbers in raw.get("apart", {}).items()
            },
            derived=tuple(Derived(**one) for one in raw.get("derived", ())),
            failed=str(raw.get("failed", "")),
        )

    def fits(self, fact: SubmissionFact, verdicts: Iterable[VerdictFact]) -> bool:
        """Whether it says something about each rollout of this submission, once, and about nothing else."""
        positions = sorted([*self.known, *(at for at, _ in self.undecided)])
        about = {verdict.index for verdict in verdicts}
        return (
            positions == list(range(fact.rollouts))
            and self.apart.keys() <= about
            and all(
                wrong.verdict in about and wrong.positions and set(wrong.positions) <= set(self.known)
                for wrong in self.wrong
            )
        )

    def failures(self, fact: SubmissionFact, verdicts: Iterable[VerdictFact]) -> Iterator[Failure]:
        """One for each wrong verdict, in the verdicts' order."""
        records = {verdict.index: verdict.record for verdict in verdicts}
        for wrong in self.wrong:
            ids = tuple(fact.rollout_id(i) for i in wrong.positions)
            checked = len(self.known)
            text = f"{wrong.message}; {len(ids)} of {checked} rollouts, the first is {ids[0]}"
            yield Failure(records[wrong.verdict], ReasonCode.VERDICT_WRONG, text, ids, dict(wrong.numbers))


def parts(facts: Sequence[SubmissionFact], processes: int) -> list[Part]:
    """Cut submissions, ordered by policy, into parts of one policy each, at least a few for each process."""
    most = max(1, -(-len(facts) // (4 * processes)))
    found: list[Part] = []
    for fact in facts:
        last = found[-1] if found else None
        if last is None or (last.epoch, last.step) != (fact.lease.epoch, fact.lease.step):
            found.append(Part(fact.lease.epoch, fact.lease.step, (fact.index,)))
        elif len(last.submissions) >= most:
            found.append(Part(last.epoch, last.step, (fact.index,)))
        else:
            found[-1] = Part(last.epoch, last.step, (*last.submissions, fact.index))
    return found


class Deriver:
    """Derives parts one after another, in one process; keeps the model between them."""

    def __init__(
        self,
        archive: RunArchive,
        published: Archive,
        scratch: Path,
        *,
        environment: Callable[[bytes], Environment | None],
        verdicts: Mapping[int, Sequence[VerdictFact]],
        damaged: frozenset[str],
        only: str = "",
    ) -> None:
        """
        Args:
            scratch: a folder outside the archive for weights, one policy's at a time.
            environment: by digest; None when it can't be had.
            verdicts: submission's ledger index -> the verdicts on it.
            damaged: files that do not hold; what rests on one is left out.
            only: the one rollout that is asked about, or all.
        """
        self._archive = archive
        self._published = published
        self._scratch = scratch
        self._environment = environment
        self._verdicts = verdicts
        self._damaged = damaged
        self._only = only
        self._policy: PolicyModel | None = None
        self._loaded: tuple[int, int] | None = None

    def derive(self, part: Part) -> Iterator[Begun | Derivation]:
        """For each submission of the part, in its order, first that it is begun, then what was derived.

        Raises:
            ProtocolError, OSError: the part's weights can't be had.
        """
        policy = self._load(part.epoch, part.step)
        for index in part.submissions:
            yield Begun(index)
            yield self._derive(self._archive.facts.submissions[index], policy)

    def _load(self, epoch: int, step: int) -> PolicyModel:
        if self._policy is not None and self._loaded == (epoch, step):
            return self._policy
        self._loaded = None
        with tempfile.TemporaryDirectory(dir=self._scratch) as into:
            published = self._published.materialise(epoch, step, Path(into))
            if self._policy is None:
                profile = self._archive.run.manifest.profile
                self._policy = load_to_verify(published.directory, profile, root=published.root)
            else:
                self._policy.load_weights(published.directory, root=published.root)
        self._loaded = epoch, step
        return self._policy

    def _derive(self, fact: SubmissionFact, policy: PolicyModel) -> Derivation:
        environment = self._environment(fact.lease.environment)
        if environment is None:
            return Derivation(fact.index)  # named once for all of its submissions
        try:
            blob = self._archive.submission(fact)
            run = self._archive.rules(fact.lease)
            judgement = judge_upload(run, fact.lease, blob, fact.intent.raw_length, policy, environment)
            return self._compare(fact, judgement)
        except (ProtocolError, OSError) as exc:  # a file may go between the first look at it and this one
            return Derivation(fact.index, failed=unreadable(exc))

    def _compare(self, fact: SubmissionFact, judgement: Judgement) -> Derivation:
        """Hold every stored verdict on one submission against what was derived."""
        positions = [i for i in range(fact.rollouts) if not self._only or fact.rollout_id(i) == self._only]
        known = tuple(i for i in positions if judgement.outcomes[i].outcome != INCONCLUSIVE)
        undecided = tuple((i, judgement.outcomes[i].reason) for i in positions if i not in known)
        verdicts = self._verdicts[fact.index]
        decided_here: Counter[str] = Counter()
        apart: dict[int, Mapping[str, Apart]] = {}
        wrong = [self._compare_one(verdict, judgement, known, decided_here, apart) for verdict in verdicts]
        derived: tuple[Derived, ...] = ()
        if self._only:
            derived = tuple(
                Derived(
                    rollout=self._only,
                    outcome=WORDS[judgement.outcomes[i].outcome],
                    reason=judgement.outcomes[i].reason,
                    numbers=_numbers(judgement, i),
                    verdicts={v.record: WORDS.get(v.verdict.outcomes[i].outcome, "nothing") for v in verdicts},
                )
                for i in positions
            )
        found = tuple(one for one in wrong if one is not None)
        return Derivation(fact.index, known, undecided, found, dict(decided_here), apart, derived)

    def _compare_one(
        self,
        fact: VerdictFact,
        judgement: Judgement,
        positions: Sequence[int],
        decided_here: Counter[str],
        apart: dict[int, Mapping[str, Apart]],
    ) -> Wrong | None:
        """What one verdict is wrong about. An inconclusive one claims nothing."""
        details = self._archive.details(fact).rollouts if fact.file not in self._damaged else None
        wrong: dict[int, str] = {}
        accepted: list[int] = []
        for i in positions:
            said, ours = fact.verdict.outcomes[i], judgement.outcomes[i]
            if said.outcome == INCONCLUSIVE:
                decided_here[peer_id_text(fact.validator)] += 1
                continue
            if said.outcome != ours.outcome:
                wrong[i] = f"says {WORDS.get(said.outcome, 'nothing')}, but it is {WORDS[ours.outcome]} ({ours.reason})"
            elif said.outcome == ACCEPT:
                accepted.append(i)
        if details is not None and accepted:
            lease = fact.submission.lease
            rules = compare.Rules.of(self._archive.rules(lease).manifest, lease)
            theirs = {i: details[i] if i < len(details) else None for i in accepted}
            own = {i: judgement.details[i] for i in accepted}
            held = compare.Held(theirs, own, rules)
            for group in [*compare.by_task(accepted, lease.samples), accepted]:  # by task as the coordinator looks
                for one in held.differences(group):
                    wrong.setdefault(one.position, f"its details {one.message}")
            sums = held.sums()
            if sums:
                apart[fact.index] = sums
        if not wrong:
            return None
        first = min(wrong)
        return Wrong(fact.index, tuple(sorted(wrong)), wrong[first], _numbers(judgement, first))


def _numbers(judgement: Judgement, position: int) -> dict[str, float]:
    return {number.name: number.value for number in judgement.details[position].numbers}


def _apart(raw: Mapping[str, Any]) -> Apart:
    return Apart(float(raw["off"]), float(raw["jump"]), float(raw["noise"]))


def unreadable(exc: ProtocolError | OSError) -> str:
    return f"can't be read: {exc.strerror or exc}" if isinstance(exc, OSError) else str(exc)
