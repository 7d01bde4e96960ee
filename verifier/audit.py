"""`verifier audit`: check a run from its files alone, as somebody who trusts nobody in it.

    which run    the id that the auditor came with, and promises that members kept; see `promises`
    ledger       segments, tree heads, the manifest chain, every subject's signature, and the rules of the fold
    updates      the manifest's updates as files, against the chain that the ledger tells; see `updates`
    draws        who judged what follows from secrets bound before and revealed after; see `draws`
    files        every upload and verdict's details against the hashes that were signed
    weights      every publication: signatures, shard hashes, root, and the ledger's announcement of it
    verdicts     derived again with the validators' own `judge`, against the published weights and under the manifest
                 that the lease names
    evidence     what suspended a key without a verdict, computed again, see `evidence_check` too; relays that were
                 accused, see `accusations`
    batches      rebuilt from ledger, uploads and details, and compared with the file
    copies       `model/`, checkpoints and the reward curve of `metrics.jsonl`, where they are there; see `copies`

Nothing is written inside the archive, no key and no `state_dir` is needed, and neither `trainer` nor `node` is
imported. Verdicts are found from the signed entries themselves, not from the fold: a rewritten ledger can't hide one.

Not covered: whether the learner computed its steps from the batches (it can't be derived without repeating them), and
what no signature binds, see "Not part of the archive" in docs/protocol.md: `keys/`, `state/`, `nodes/`, `logs/`,
`run.toml`, `join.hw`, `demo.json`, `status.json`, `summary.json`; `stats.json`, `server.json` and
`origin-sequences.json` in `published/`; of `metrics.jsonl` all but each step's `reward_mean` and `rollouts`; of
`checkpoints/` all but the weights of published steps; the base weights' values.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from environments.base import Environment
from environments.errors import EnvironmentSpecError
from environments.registry import load
from protocol.errors import ProtocolError, ReasonCode, UsageError
from protocol.identity import peer_id_text
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT, RolloutDetail
from protocol.state import ACCEPTED, PENDING, RunState
from shardcast.archive import Archive, open_published
from shardcast.heads import publication_name
from verifier.accusations import Accusation, check_accusations, check_origin
from verifier.archive import MANIFEST, NOT_STARTED, RunArchive, SubmissionFact, VerdictFact, batch_file
from verifier.batches import check_batches, groups_untrained
from verifier.copies import check_copies
from verifier.details import check_claims
from verifier.draws import Draws
from verifier.drops import drop_evidence
from verifier.errors import VerifierError
from verifier.evidence_check import check_node_evidence
from verifier.judge import Judgement, judge_upload
from verifier.model import PolicyModel, prompt_ids
from verifier.profiles import load_to_verify
from verifier.promises import check_promises, read_promises
from verifier.report import Derived, Failure, Report
from verifier.updates import check_updates

_ONE_THREAD_HIDDEN = 512
"""Models this narrow run on one thread: with two, the threads wait for each other (50 s of CPU instead of 6)."""

WORDS = {ACCEPT: "accept", REJECT: "reject", INCONCLUSIVE: "inconclusive"}
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


def audit(root: Path, options: Options, progress: Progress = lambda done, total: None) -> Report:
    """Audit a run directory.

    Raises:
        UsageError: not a run directory, no such rollout in it, or a receipt or head is none.
    """
    started = time.monotonic()
    report = Report()
    brought = read_promises(options.receipts, options.heads)
    try:
        archive = RunArchive.open(root)
    except UsageError:
        raise
    except ProtocolError as exc:
        report.fail(MANIFEST, exc.code, f"{exc}; nothing else in {root} can be believed")
        return report
    except OSError as exc:
        report.unchecked.append((_inside(root, exc), f"can't be read, so nothing can be checked: {exc.strerror}"))
        return report
    report.run, report.expected = archive.run.id.hex(), options.run.hex()
    report.run_compared = bool(options.run)
    if options.run and options.run != archive.run.id:
        text = f"is the manifest of run {archive.run.id.hex()}, not of {options.run.hex()}; nothing else was checked"
        report.fail(MANIFEST, ReasonCode.WRONG_RUN, text)
        return report
    if not archive.started:
        report.unchecked.append(("ledger", NOT_STARTED))
        return report
    report.examined, report.entries = True, archive.log.size
    for problem in archive.problems:
        report.add(problem)
    accusations = check_accusations(archive, report)
    state = _check_rules(archive, report)
    check_promises(archive, brought, report)
    check_updates(archive, report)
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-audit-") as scratch:
            auditor = Auditor(archive, report, Path(scratch), options, progress)
            auditor.check_files()
            auditor.check_weights()
            auditor.check_origin(accusations)
            auditor.derive_verdicts(state)
            check_claims(archive, report)
            auditor.check_evidence(state)
            check_node_evidence(archive, state, report)
            trained = check_batches(archive, report, auditor.prompt)
            auditor.check_unnamed()
            check_copies(archive, auditor.published, trained, report)
            report.groups_untrained = groups_untrained(state)
    finally:
        torch.set_num_threads(threads)
    report.seconds = time.monotonic() - started
    return report


def _inside(root: Path, exc: OSError) -> str:
    """The file an error is about, as a record's name."""
    name = str(exc.filename or root)
    return name.removeprefix(f"{root}{os.sep}")


def _folder(epoch: int, step: int) -> str:
    return f"published/{publication_name((epoch, step))}"


def _check_rules(archive: RunArchive, report: Report) -> RunState:
    """What the fold ignored is what the ledger's writer must answer for; then the draws."""
    draws = Draws()
    state = draws.fold(archive)
    named = {failure.record for failure in report.failures}
    for index, text in state.problems:
        if f"ledger/{index}" not in named:
            report.fail(f"ledger/{index}", ReasonCode.LEDGER_BROKEN, f"contradicts the entries before it: {text}")
    draws.check(report)
    for index, key in archive.signed_by_revoked():
        if index not in {at for at, _ in state.problems}:
            why = f"signed by {peer_id_text(key)}, whose key the run's root later revoked from an entry before it on"
            report.unchecked.append((f"ledger/{index}", why))
    report.finished = state.finished is not None
    statuses = [outcome.status for s in state.submissions.values() for outcome in s.outcomes]
    report.accepted_total = statuses.count(ACCEPTED)
    report.rollouts_pending = statuses.count(PENDING)
    return state


class Auditor:
    """Carries what the steps share: the damaged files, the loaded policy, the environments."""

    def __init__(
        self, archive: RunArchive, report: Report, scratch: Path, options: Options, progress: Progress
    ) -> None:
        self.archive = archive
        self.report = report
        self.published: Archive | None = None
        self._scratch = scratch
        self._options = options
        self._progress = progress
        self._damaged: set[str] = set()
        self._policy: PolicyModel | None = None
        self._environments: dict[bytes, Environment | None] = {}
        self._details = functools.lru_cache(maxsize=4096)(self._read_details)

    # --- files --------------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Every upload and every verdict's details against their signed hashes."""
        facts = self.archive.facts
        for submission in facts.submissions.values():
            self._attempt(submission.file, functools.partial(self.archive.submission, submission))
        for verdict in facts.verdicts.values():
            self._attempt(verdict.file, functools.partial(self.archive.details, verdict))

    def _attempt(self, name: str, read: Callable[[], object]) -> None:
        try:
            read()
        except ProtocolError as exc:
            self._damaged.add(name)
            self.report.fail(name, exc.code, str(exc))
        except OSError as exc:
            self._damaged.add(name)
            self.report.unchecked.append((name, f"can't be read: {exc.strerror or exc}"))

    # --- weights ------------------------------------------------------------------------------------------------

    def check_weights(self) -> None:
        """Every publication, and that the ledger announced exactly these roots."""
        try:
            archive = self.archive
            self.published = open_published(archive.root, archive.chain.current, archive.announced())
            self.report.publications = len(self.published.publications)
            for problem in self.published.problems():
                self.report.fail(problem.record, problem.reason, problem.message)
        except OSError as exc:
            name = _inside(self.archive.root, exc)
            self.report.unchecked.append((name, f"can't be read, nor was what comes after it: {exc.strerror}"))
        if self.published is None:
            return
        gone = {index for index, _ in archive.signed_by_revoked()}
        for (epoch, step), (index, root) in self.archive.facts.policies.items():
            published = self.published.publications.get((epoch, step))
            if published is None and not self._named(epoch, step):
                self.report.fail(_folder(epoch, step), ReasonCode.RECORD_MISSING, "announced by the ledger, not there")
            elif published is not None and published.root != root:
                stolen = index in gone or published.publication.opener in archive.chain.current.revoked_origins
                reason = ReasonCode.LEDGER_BROKEN if stolen else ReasonCode.ORIGIN_FORKED
                text = f"announces another root of step {step} than published; the origin signed both"
                self.report.fail(f"ledger/{index}", reason, text)

    def check_origin(self, accusations: list[Accusation]) -> None:
        """Whether relays were accused with records that the origin published."""
        if self.published is not None:
            check_origin(accusations, self.published, self.report)

    def check_unnamed(self) -> None:
        """Batches and policies that are there although the ledger does not name them: its end was cut off, or somebody
        put them there. Of a run that goes on, what is newer than the last sealed segment; then it could not be checked.
        """
        known = {batch_file(closed) for closed in self.archive.facts.batches.values()}
        found = [f"batches/{path.name}" for path in (self.archive.root / "batches").glob("*.hwb")]
        if self.published is not None:
            known |= {_folder(*key) for key in self.archive.facts.policies}
            found += [_folder(*key) for key in self.published.publications]
        for name in sorted(set(found) - known):
            text = "is there, but no entry of the sealed ledger names it: the ledger's end was cut off, or it was added"
            if self.report.finished:
                self.report.fail(name, ReasonCode.LEDGER_BROKEN, text)
            else:
                self.report.unchecked.append((name, f"{text}, or it is newer than the last seal of a run that goes on"))

    def _named(self, epoch: int, step: int) -> bool:
        """Whether the report already says what is wrong with this publication."""
        known = [failure.record for failure in self.report.failures] + [record for record, _ in self.report.unchecked]
        return any(record.startswith(_folder(epoch, step)) for record in known)

    # --- verdicts -----------------------------------------------------------------------------------------------

    def derive_verdicts(self, state: RunState) -> None:
        """Judge the drawn submissions again, policy by policy, and compare with every verdict on them."""
        verdicts: dict[int, list[VerdictFact]] = {}
        for verdict in self.archive.facts.verdicts.values():
            verdicts.setdefault(verdict.submission.index, []).append(verdict)
        self.report.rollouts_total = sum(self.archive.facts.submissions[i].rollouts for i in verdicts)
        drawn = self._draw(self.archive.facts.submissions[i] for i in verdicts)
        todo = sum(fact.rollouts for fact in drawn)
        done = 0
        for (epoch, step), facts in itertools.groupby(drawn, key=lambda fact: (fact.lease.epoch, fact.lease.step)):
            policy = self._load_policy(epoch, step)
            for fact in facts:
                judgement = self._judge(fact, policy) if policy is not None else None
                if judgement is not None:
                    self._compare(fact, judgement, verdicts[fact.index], state)
                done += fact.rollouts
                self._progress(done, todo)

    def _draw(self, facts: Iterable[SubmissionFact]) -> list[SubmissionFact]:
        """The submissions to judge again, in the order of their policies."""
        options = self._options
        drawn = sorted(facts, key=lambda fact: (fact.lease.epoch, fact.lease.step, fact.index))
        if options.rollout:
            lease = options.rollout.split(":")[0]
            drawn = [fact for fact in drawn if fact.lease.lease_id.hex() == lease]
            if not any(options.rollout == fact.rollout_id(i) for fact in drawn for i in range(fact.rollouts)):
                raise UsageError(
                    f"no rollout {options.rollout!r} with a verdict in {self.archive.root}; its id is "
                    "<lease id>:<task>:<sample>"
                )
        elif options.fraction < 1:
            seed = bytes.fromhex(options.seed) if options.seed else os.urandom(8)
            self.report.fraction, self.report.seed = options.fraction, seed.hex()
            bound = int(options.fraction * 2**64)
            drawn = [
                fact for fact in drawn if int.from_bytes(blake3(seed + fact.lease.lease_id).digest(8), "big") < bound
            ]
        return drawn

    def _load_policy(self, epoch: int, step: int) -> PolicyModel | None:
        """The published weights of a step, or None when they can't be had (then the reason is in the report)."""
        if self.published is None:
            return None
        try:
            with tempfile.TemporaryDirectory(dir=self._scratch) as into:
                published = self.published.materialise(epoch, step, Path(into))
                if self._policy is None:
                    profile = self.archive.run.manifest.profile
                    self._policy = load_to_verify(published.directory, profile, root=published.root)
                    if self._policy.hidden <= _ONE_THREAD_HIDDEN:
                        torch.set_num_threads(1)
                else:
                    self._policy.load_weights(published.directory, root=published.root)
        except (ProtocolError, OSError) as exc:
            if not self._named(epoch, step):
                self.report.unchecked.append((_folder(epoch, step), f"the verdicts on this policy's rollouts: {exc}"))
            return None
        return self._policy

    def _judge(self, fact: SubmissionFact, policy: PolicyModel) -> Judgement | None:
        if fact.file in self._damaged:
            return None
        environment = self._environment(fact.lease.environment)
        if environment is None:
            return None
        try:
            blob = self.archive.submission(fact)
            run = self.archive.rules(fact.lease)
            return judge_upload(run, fact.lease, blob, fact.intent.raw_length, policy, environment)
        except VerifierError as exc:
            self.report.unchecked.append((f"submission/{fact.index}", str(exc)))
        return None

    def _environment(self, digest: bytes) -> Environment | None:
        if digest not in self._environments:
            self._environments[digest] = None
            spec = next((s for s in self.archive.run.manifest.environments if s.digest == digest), None)
            try:
                if spec is None:
                    raise EnvironmentSpecError("a lease names an environment that the manifest does not have")
                self._environments[digest] = load(spec)
            except EnvironmentSpecError as exc:
                self.report.unchecked.append((f"environment/{digest.hex()[:16]}", str(exc)))
        return self._environments[digest]

    def _compare(
        self, fact: SubmissionFact, judgement: Judgement, verdicts: list[VerdictFact], state: RunState
    ) -> None:
        """Hold every stored verdict on one submission against what was derived."""
        only = self._options.rollout
        positions = [i for i in range(fact.rollouts) if not only or fact.rollout_id(i) == only]
        known = [i for i in positions if judgement.outcomes[i].outcome != INCONCLUSIVE]
        for i in set(positions) - set(known):
            why = f"this machine could not decide: {judgement.outcomes[i].reason}"
            self.report.unchecked.append((f"rollout/{fact.rollout_id(i)}", why))
        wrong: set[int] = set()
        for verdict in verdicts:
            wrong |= self._compare_one(verdict, judgement, known)
        self.report.rollouts_checked += len(known)
        self.report.rollouts_held += len(known) - len(wrong)
        decided = state.submissions.get(fact.index)
        if decided is not None:
            self.report.accepted_checked += sum(decided.outcomes[i].status == ACCEPTED for i in known)
        if only:
            self.report.derived += [
                Derived(
                    rollout=only,
                    outcome=WORDS[judgement.outcomes[i].outcome],
                    reason=judgement.outcomes[i].reason,
                    numbers={n.name: n.value for n in judgement.details[i].numbers},
                    verdicts={v.record: WORDS.get(v.verdict.outcomes[i].outcome, "nothing") for v in verdicts},
                )
                for i in positions
            ]

    def _compare_one(self, fact: VerdictFact, judgement: Judgement, positions: list[int]) -> set[int]:
        """The positions one verdict is wrong about. An inconclusive one claims nothing."""
        details = self.archive.details(fact).rollouts if fact.file not in self._damaged else None
        wrong: dict[int, str] = {}
        for i in positions:
            said, ours = fact.verdict.outcomes[i], judgement.outcomes[i]
            if said.outcome == INCONCLUSIVE:
                self.report.decided_here[peer_id_text(fact.validator)] += 1
                continue
            if said.outcome != ours.outcome:
                wrong[i] = f"says {WORDS.get(said.outcome, 'nothing')}, but it is {WORDS[ours.outcome]} ({ours.reason})"
            elif said.outcome == ACCEPT and details is not None:
                bound = self.archive.rules(fact.submission.lease).manifest.thresholds.logprob
                text = _differs(details[i] if i < len(details) else None, judgement.details[i], bound)
                if text:
                    wrong[i] = text
        if wrong:
            first = min(wrong)
            numbers = {n.name: n.value for n in judgement.details[first].numbers}
            ids = tuple(fact.submission.rollout_id(i) for i in sorted(wrong))
            text = f"{wrong[first]}; {len(wrong)} of {len(positions)} rollouts, the first is {ids[0]}"
            self.report.failures.append(Failure(fact.record, ReasonCode.VERDICT_WRONG, text, ids, numbers))
        return set(wrong)

    # --- evidence -----------------------------------------------------------------------------------------------

    def check_evidence(self, state: RunState) -> None:
        """Compute again every number that suspended a key for keeping results back."""
        for index, said in self.archive.facts.drops.items():
            try:
                ours = drop_evidence(state, said.key, functools.partial(self._seen, state), said.upto)
            except (ProtocolError, OSError) as exc:
                self.report.unchecked.append((f"ledger/{index}", f"rests on rewards that can't be read: {exc}"))
                continue
            exact = (said.lost, said.returned) == (ours.lost, ours.returned)
            close = all(
                math.isclose(getattr(said, name), getattr(ours, name), rel_tol=1e-6, abs_tol=1e-9)
                for name in ("log_e", "lost_mean", "returned_mean")
            )
            if not exact or not close:
                self.report.fail(
                    f"ledger/{index}",
                    ReasonCode.VERDICT_WRONG,
                    f"says {said.lost} lost, {said.returned} returned, log e {said.log_e:.4g}, but it is {ours.lost}, "
                    f"{ours.returned}, {ours.log_e:.4g}",
                )

    def _seen(self, state: RunState, submission: int, rollout: int) -> tuple[float, int] | None:
        """(reward, sampled tokens) of an accepted rollout."""
        index = state.submissions[submission].outcomes[rollout].verdict
        known = self._details(index) if index is not None else ()
        return known[rollout] if rollout < len(known) else None

    def _read_details(self, index: int) -> tuple[tuple[float, int], ...]:
        fact = self.archive.facts.verdicts.get(index)
        if fact is None:
            return ()
        return tuple((one.reward, len(one.logprobs) // 4) for one in self.archive.details(fact).rollouts)

    # --- prompts ------------------------------------------------------------------------------------------------

    def prompt(self, environment: bytes, task: int) -> bytes | None:
        """A task's prompt as token ids, u32 little-endian; None when tokenizer or environment can't be had."""
        known = self._environment(environment)
        policy = self._policy or self._any_policy()
        if known is None or policy is None:
            return None
        return np.asarray(prompt_ids(policy.tokenizer, known.task(task).prompt), dtype="<u4").tobytes()

    def _any_policy(self) -> PolicyModel | None:
        for epoch, step in self.archive.facts.policies:
            if self._load_policy(epoch, step) is not None:
                break
        return self._policy


def _differs(said: RolloutDetail | None, ours: RolloutDetail, bound: float) -> str:
    """What is wrong with the numbers an accepting validator handed to the learner; empty when nothing is."""
    if said is None or len(said.logprobs) != len(ours.logprobs):
        return "its details do not hold one log-probability per token"
    if said.reward != ours.reward:
        return f"its details give reward {said.reward:g}, but it is {ours.reward:g}"
    difference = np.abs(np.frombuffer(said.logprobs, "<f4") - np.frombuffer(ours.logprobs, "<f4"))
    if len(difference) and not float(difference.max()) <= bound:
        return f"its details are off by {float(difference.max()):.3g} in a log-probability"
    return ""
