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
                 accused, see `accusations`; validators that were, see `spot_audit`
    batches      rebuilt from ledger, uploads and details, and compared with the file; that none holds what the
                 operator's phantoms altered, see `plants`
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
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers

from environments.base import Environment
from environments.errors import EnvironmentSpecError
from environments.registry import load
from protocol.errors import ProtocolError, ReasonCode, UsageError
from protocol.identity import peer_id_text
from protocol.state import ACCEPTED, PENDING, RunState
from shardcast.archive import Archive, open_published
from shardcast.heads import publication_name
from verifier.accusations import Accusation, check_accusations, check_origin
from verifier.archive import MANIFEST, NOT_STARTED, RunArchive, batch_file
from verifier.batches import check_batches, groups_untrained
from verifier.copies import check_copies
from verifier.details import check_claims
from verifier.draws import Draws
from verifier.drops_check import check_drops
from verifier.evidence_check import check_node_evidence
from verifier.model import load_tokenizer, prompt_ids
from verifier.plants import check_plants
from verifier.promises import check_promises, read_promises
from verifier.report import Report
from verifier.spot_audit import check_verdict_evidence, count_checks
from verifier.updates import check_updates
from verifier.verdicts import Options, Progress, Verdicts

__all__ = ["Options", "Progress", "audit"]

_PROMPTS_KEPT = 4096
"""Prompts kept as token ids: the samples of one task are neighbours in a batch."""


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
    with tempfile.TemporaryDirectory(prefix="headwater-audit-") as scratch:
        auditor = Auditor(archive, report, Path(scratch))
        auditor.check_files()
        auditor.check_weights()
        auditor.check_origin(accusations)
        auditor.check_verdicts(state, options, progress)
        check_claims(archive, report)
        check_drops(archive, state, report)
        check_node_evidence(archive, state, report)
        auditor.check_verdict_evidence(state)
        trained = check_batches(archive, report, auditor.prompt)
        check_plants(archive, state, report)
        auditor.check_unnamed()
        check_copies(archive, auditor.published, trained, report)
        report.groups_untrained = groups_untrained(state)
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
    """Carries what the steps share: the damaged files, the environments, the tokenizer."""

    def __init__(self, archive: RunArchive, report: Report, scratch: Path) -> None:
        self.archive = archive
        self.report = report
        self.published: Archive | None = None
        self._scratch = scratch
        self._damaged: set[str] = set()
        self._environments: dict[bytes, Environment | None] = {}
        self.prompt = functools.lru_cache(maxsize=_PROMPTS_KEPT)(self._prompt)

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
            if published is None and not self._is_named(_folder(epoch, step)):
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

    def _is_named(self, record: str) -> bool:
        """Whether the report already says what is wrong with this record, or with something in it."""
        known = [failure.record for failure in self.report.failures] + [record for record, _ in self.report.unchecked]
        return any(one.startswith(record) for one in known)

    # --- verdicts -----------------------------------------------------------------------------------------------

    def check_verdicts(self, state: RunState, options: Options, progress: Progress) -> None:
        """Derive the drawn verdicts again."""
        verdicts = Verdicts(
            self.archive,
            self.published,
            self.report,
            options,
            environment=self._environment,
            damaged=frozenset(self._damaged),
            named=self._is_named,
            scratch=self._scratch,
            progress=progress,
        )
        verdicts.check(state)

    def check_verdict_evidence(self, state: RunState) -> None:
        """What the coordinator's own checks accused validators of, and which of them were to be made."""
        check_verdict_evidence(self.archive, self.published, self._environment, self._scratch, self.report)
        count_checks(self.archive, state, self.report)

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

    # --- prompts ------------------------------------------------------------------------------------------------

    def _prompt(self, environment: bytes, task: int) -> bytes | None:
        """A task's prompt as token ids, u32 little-endian; None when tokenizer or environment can't be had."""
        known, tokenizer = self._environment(environment), self._tokenizer
        if known is None or tokenizer is None:
            return None
        return np.asarray(prompt_ids(tokenizer, known.task(task).prompt), dtype="<u4").tobytes()

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer | None:
        """The run's, as published; None when it does not hold, which `check_weights` names."""
        if self.published is None:
            return None
        try:
            self.published.write_model_files(self._scratch)
            return load_tokenizer(self._scratch)
        except (ProtocolError, OSError):
            return None
