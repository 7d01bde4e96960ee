"""The audit's largest part: which submissions are judged again, by whom, and what that says about their verdicts.

    draw       all of them, a share, or the one that was asked about
    kept       what an interrupted audit derived already (`resume`)
    derive     the rest, in several processes (`workers`)
    report     in the order of the draw, whoever derived what and when: the same report from any number of processes
    add up     by how much each validator's numbers are off, over all that was derived

What can't be derived here is reported as not checked; nothing is left out in silence.

Not covered: deriving one submission (`derive`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from environments.base import Environment
from protocol.errors import ReasonCode, UsageError
from protocol.identity import peer_id_text
from protocol.state import ACCEPTED, RunState
from shardcast.archive import Archive
from verifier.archive import RunArchive, SubmissionFact, VerdictFact
from verifier.compare import Apart
from verifier.derive import Derivation, Deriver, Part, parts
from verifier.report import Failure, Report
from verifier.resume import Kept, key_of
from verifier.workers import Died, Unloaded, derive_all, processes

Progress = Callable[[int, int], None]
"""(rollouts done, rollouts to do)."""


@dataclass(frozen=True)
class Options:
    rollout: str = ""
    """Derive only this one again, and report its numbers."""
    fraction: float = 1.0
    """Share of submissions whose verdicts are derived again; everything else is always checked."""
    seed: str = ""
    """Hex; empty draws a fresh one, so that nobody can know beforehand what will be looked at."""
    run: bytes = b""
    """Run id that the archive must have; empty takes whichever run it says it is."""
    receipts: tuple[Path, ...] = ()
    """Receipts that a node kept, to be held against the ledger."""
    heads: tuple[Path, ...] = ()
    """Signed tree heads that a member kept (`head.hw`)."""
    jobs: int = 0
    """Processes that derive at the same time; 0 takes one a core that this process may use, if memory allows."""
    resume: bool = False
    """Keep what is derived until the audit is done, and go on with what an interrupted one has kept."""
    state: Path | None = None
    """With `resume`: the file; None takes one in the user's cache."""


class Verdicts:
    """Derives verdicts again and reports on them."""

    def __init__(
        self,
        archive: RunArchive,
        published: Archive | None,
        report: Report,
        options: Options,
        *,
        environment: Callable[[bytes], Environment | None],
        damaged: frozenset[str],
        named: Callable[[str], bool],
        scratch: Path,
        progress: Progress,
    ) -> None:
        """
        Args:
            environment: by digest; None when it can't be had, which is then in the report.
            damaged: files of the archive that do not hold.
            named: whether the report says already what is wrong with a record.
            scratch: a folder outside the archive.
        """
        self._archive = archive
        self._published = published
        self._report = report
        self._options = options
        self._environment = environment
        self._damaged = damaged
        self._named = named
        self._scratch = scratch
        self._progress = progress
        self._verdicts: dict[int, list[VerdictFact]] = {}
        for verdict in archive.facts.verdicts.values():
            self._verdicts.setdefault(verdict.submission.index, []).append(verdict)

    def check(self, state: RunState) -> None:
        """Judge the drawn submissions again and compare with every verdict on them.

        Raises:
            UsageError: no such rollout, or a state file that can't be used.
        """
        facts = self._archive.facts.submissions
        self._report.rollouts_total = sum(facts[i].rollouts for i in self._verdicts)
        kept = self._open_state()
        self._report.notes = kept.notes
        drawn = self._draw((facts[i] for i in self._verdicts), kept)
        todo = [fact for fact in drawn if self._derivable(fact)]
        kept.found = self._still_holding(todo, kept)
        self._report.rollouts_resumed = sum(facts[i].rollouts for i in kept.found)
        missing = _Missing()
        try:
            self._derive(todo, kept, missing, sum(fact.rollouts for fact in drawn))
        finally:
            kept.save_if_possible()
        if not missing:
            kept.drop()
        for fact in todo:
            self._take(fact, kept.found.get(fact.index), missing, state)
        self._add_up(kept.found[fact.index] for fact in todo if fact.index in kept.found)

    # --- which --------------------------------------------------------------------------------------------------

    def _open_state(self) -> Kept:
        options = self._options
        if options.rollout or not options.resume:
            return Kept(None, "")
        entries = blake3()
        for sealed in self._archive.log.entries:
            entries.update(sealed.envelope.raw)
        key = key_of(self._archive.run.id, entries.digest(), (repr(options.fraction), options.seed))
        return Kept.open(options.state, key, self._archive.root)

    def _draw(self, facts: Iterable[SubmissionFact], kept: Kept) -> list[SubmissionFact]:
        """The submissions to judge again, in the order of their policies."""
        options = self._options
        drawn = sorted(facts, key=lambda fact: (fact.lease.epoch, fact.lease.step, fact.index))
        if options.rollout:
            lease = options.rollout.split(":")[0]
            drawn = [fact for fact in drawn if fact.lease.lease_id.hex() == lease]
            if not any(options.rollout == fact.rollout_id(i) for fact in drawn for i in range(fact.rollouts)):
                raise UsageError(
                    f"no rollout {options.rollout!r} with a verdict in {self._archive.root}; its id is "
                    "<lease id>:<task>:<sample>"
                )
        elif options.fraction < 1:
            kept.seed = options.seed or kept.seed or os.urandom(8).hex()
            self._report.fraction, self._report.seed = options.fraction, kept.seed
            seed, bound = bytes.fromhex(kept.seed), int(options.fraction * 2**64)
            drawn = [
                fact for fact in drawn if int.from_bytes(blake3(seed + fact.lease.lease_id).digest(8), "big") < bound
            ]
        return drawn

    def _derivable(self, fact: SubmissionFact) -> bool:
        """Whether what a derivation rests on is there; what is not is in the report."""
        known = self._environment(fact.lease.environment) is not None
        return known and fact.file not in self._damaged and self._published is not None

    def _still_holding(self, todo: Sequence[SubmissionFact], kept: Kept) -> dict[int, Derivation]:
        """The kept derivations whose files are still as the ledger says."""
        named = {policy: self._named(policy) for policy in {_policy(fact) for fact in todo}}
        found = {}
        for fact in todo:
            verdicts = self._verdicts[fact.index]
            if self._damaged.intersection([fact.file, *(verdict.file for verdict in verdicts)]):
                kept.partial.add(fact.index)
            elif fact.index in kept.found and not named[_policy(fact)] and kept.found[fact.index].fits(fact, verdicts):
                found[fact.index] = kept.found[fact.index]
        return found

    # --- deriving -----------------------------------------------------------------------------------------------

    def _derive(self, todo: Sequence[SubmissionFact], kept: Kept, missing: _Missing, total: int) -> None:
        """Fill `kept`, and `missing` with why something could not be."""
        facts, published = self._archive.facts.submissions, self._published
        left = [fact for fact in todo if fact.index not in kept.found]
        done = total - sum(fact.rollouts for fact in left)
        self._progress(done, total)
        if published is None or not left:
            return
        weights = max((one.publication.open.raw_bytes for one in published.publications.values()), default=0)
        count = self._options.jobs or processes(weights)
        deriver = Deriver(
            self._archive,
            published,
            self._scratch,
            environment=self._environment,
            verdicts=self._verdicts,
            damaged=self._damaged,
            only=self._options.rollout,
        )
        with contextlib.closing(derive_all(parts(left, count), deriver.derive, count)) as events:
            for event in events:
                if isinstance(event, Derivation):
                    done += facts[event.submission].rollouts
                    kept.add(event)
                else:
                    done += sum(facts[index].rollouts for index in event.part.submissions)
                    missing.add(event)
                self._progress(done, total)

    def _take(self, fact: SubmissionFact, one: Derivation | None, missing: _Missing, state: RunState) -> None:
        """Put what is known of one submission into the report."""
        report = self._report
        if one is None or one.failed:
            why = one.failed if one is not None else missing.died.get(fact.index, "")
            if why:
                report.unchecked.append((f"submission/{fact.index}", why))
            elif not self._named(_policy(fact)):
                why = missing.unloaded.get(fact.index, "nothing was derived")
                report.unchecked.append((_policy(fact), f"the verdicts on this policy's rollouts: {why}"))
            return
        for i, reason in one.undecided:
            report.unchecked.append((f"rollout/{fact.rollout_id(i)}", f"this machine could not decide: {reason}"))
        report.failures += one.failures(fact, self._verdicts[fact.index])
        wrong = {position for verdict in one.wrong for position in verdict.positions}
        report.rollouts_checked += len(one.known)
        report.rollouts_held += len(one.known) - len(wrong)
        report.decided_here.update(one.decided_here)
        report.derived += one.derived
        decided = state.submissions.get(fact.index)
        if decided is not None:
            report.accepted_checked += sum(decided.outcomes[i].status == ACCEPTED for i in one.known)

    def _add_up(self, found: Iterable[Derivation]) -> None:
        """Name each validator whose numbers are off by more in sum than chance allows, where no verdict shows it."""
        facts = self._archive.facts.verdicts
        named = {failure.record for failure in self._report.failures}
        wrong = {fact.validator for fact in facts.values() if fact.record in named}
        sums: dict[tuple[bytes, str], Apart] = {}
        furthest: dict[tuple[bytes, str], tuple[float, int]] = {}
        for one in found:
            for index, numbers in one.apart.items():
                for number, apart in numbers.items():
                    key = facts[index].validator, number
                    sums[key] = sums[key] + apart if key in sums else apart
                    furthest[key] = max(furthest.get(key, (-1.0, 0)), (apart.off, index))
        for (validator, number), apart in sorted(sums.items()):
            if validator not in wrong and not apart.off <= apart.allowed:
                wrong.add(validator)
                text = (
                    f"its details, with those of all verdicts of validator {peer_id_text(validator)}, are off by "
                    f"{apart.off:.3g} in {number}, where rounding makes {apart.allowed:.3g} at most; no one of them "
                    "shows it"
                )
                record = facts[furthest[validator, number][1]].record
                self._report.failures.append(Failure(record, ReasonCode.VERDICT_WRONG, text))


class _Missing:
    """Submissions that nothing was derived about, by ledger index, and why."""

    def __init__(self) -> None:
        self.unloaded: dict[int, str] = {}
        self.died: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self.unloaded or self.died)

    def add(self, event: Unloaded | Died) -> None:
        into = self.unloaded if isinstance(event, Unloaded) else self.died
        into.update(dict.fromkeys(event.part.submissions, event.why))


def _policy(fact: SubmissionFact) -> str:
    return Part(fact.lease.epoch, fact.lease.step, ()).policy
