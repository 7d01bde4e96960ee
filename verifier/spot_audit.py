"""The audit of the coordinator's checks of validators: every `evidence.verdict` made again, from the archive alone.

    rollout and details are as the verdict says    `accusation-false`: the coordinator's failure
    it is not, but by no more than verifiers        not checked
    may differ by
    it can't be judged here                         not checked

Which rollouts the coordinator had to check follows from secrets that are shown later: the drawn ones, and all of its
phantoms'. Of those whose verdict is found
wrong by this audit and whose validator the ledger never accuses the number is reported: a check may have been left out
for want of time; a coordinator that shields a validator looks the same.

Not covered: deriving verdicts (`verdicts`), which names the wrong ones whether they were drawn or not.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from environments.base import Environment
from protocol import distrust
from protocol.errors import ProtocolError, ReasonCode
from protocol.evidence import VerdictEvidence
from protocol.identity import peer_id_text
from protocol.records import ACCEPT, INCONCLUSIVE, REJECT
from protocol.state import RunState
from shardcast.archive import Archive
from verifier import spot
from verifier.archive import RunArchive, VerdictFact
from verifier.model import PolicyModel
from verifier.plants import phantoms_of
from verifier.profiles import load_to_verify
from verifier.report import Report


def check_verdict_evidence(
    archive: RunArchive,
    published: Archive | None,
    environment: Callable[[bytes], Environment | None],
    scratch: Path,
    report: Report,
) -> None:
    """Make every check again that accused a validator.

    Args:
        environment: by digest; None when it can't be had, which is named elsewhere.
        scratch: a folder outside the archive, for weights.
    """
    found = [
        (index, said, archive.facts.verdicts[said.verdict])
        for index, said in archive.facts.contradicted.items()
        if said.verdict in archive.facts.verdicts
    ]  # about no verdict at all: the fold names it
    policy_of = lambda one: (one[2].submission.lease.epoch, one[2].submission.lease.step)  # noqa: E731
    for (epoch, step), accusations in itertools.groupby(sorted(found, key=policy_of), key=policy_of):
        policy: PolicyModel | None = None
        for index, said, fact in accusations:
            try:
                policy = policy or _load(archive, published, epoch, step, scratch)
                known = environment(fact.submission.lease.environment)
                if known is None:
                    raise ProtocolError("its environment is not here")
                wrong = _wrong(archive, fact, said, policy, known)
            except (ProtocolError, OSError) as exc:
                report.unchecked.append((f"ledger/{index}", f"accuses a validator, which can't be checked here: {exc}"))
                continue
            if wrong:
                who = peer_id_text(fact.validator)
                text = f"the coordinator accuses validator {who} of a wrong verdict on {_name(fact, said)}, but {wrong}"
                report.fail(f"ledger/{index}", ReasonCode.ACCUSATION_FALSE, text)


def count_checks(archive: RunArchive, state: RunState, report: Report) -> None:
    """Which rollouts the coordinator had to check, and on which of their wrong verdicts the ledger is silent. Call it
    when the verdicts were derived."""
    known = phantoms_of(state)
    drawn = {
        one
        for submission in state.submissions.values()
        if submission.period is not None and (secret := state.periods[submission.period].secret) is not None
        for samples in [state.leases[submission.lease_id].lease.samples]
        for one in (
            *distrust.rejections_to_check(submission, samples, secret),
            *(
                one
                for outcomes in (submission.outcomes, *(earlier.outcomes for earlier in submission.taken_back))
                for one in distrust.to_check(submission, samples, secret, outcomes)
            ),
        )
    }
    drawn |= {
        one
        for submission in state.submissions.values()
        if submission.owner in known
        for one in distrust.all_said(submission)
    }
    report.checks_drawn = len(drawn)
    accused = {
        archive.facts.verdicts[said.verdict].validator
        for said in archive.facts.contradicted.values()
        if said.verdict in archive.facts.verdicts
    }
    wrong = {failure.record: failure.rollouts for failure in report.failures if failure.rollouts}
    for verdict, position in drawn:
        fact = archive.facts.verdicts.get(verdict)
        if fact is None or fact.validator in accused:
            continue
        report.checks_silent += fact.submission.rollout_id(position) in wrong.get(fact.record, ())


def _name(fact: VerdictFact, said: VerdictEvidence) -> str:
    inside = said.rollout < fact.submission.rollouts
    return fact.submission.rollout_id(said.rollout) if inside else f"rollout {said.rollout}"


def _load(archive: RunArchive, published: Archive | None, epoch: int, step: int, scratch: Path) -> PolicyModel:
    if published is None:
        raise ProtocolError("the published weights can't be read")
    with tempfile.TemporaryDirectory(dir=scratch) as into:
        policy = published.materialise(epoch, step, Path(into))
        return load_to_verify(policy.directory, archive.run.manifest.profile, root=policy.root)


def _wrong(
    archive: RunArchive, fact: VerdictFact, said: VerdictEvidence, policy: PolicyModel, environment: Environment
) -> str:
    """Why the accusation is false; empty when it holds. Raises ProtocolError when this machine can't tell."""
    submission, at = fact.submission, said.rollout
    if at >= submission.rollouts or fact.verdict.outcomes[at].outcome not in (ACCEPT, REJECT):
        return "the verdict says nothing of it"
    run, blob = archive.rules(submission.lease), archive.submission(submission)
    upload = spot.Upload(run, submission.lease, blob, submission.intent.raw_length, policy, environment)
    word = spot.Word(said.verdict, fact.verdict.outcomes, archive.details(fact).rollouts)
    found = spot.confirm(upload, [at], [word])
    # Numbers are held against those of the whole task: which of its rollouts is furthest off may differ by machine.
    if spot.contradictions(word, found, upload):
        return ""
    given, own = fact.verdict.outcomes[at].outcome, found[at].outcome
    if own.outcome == INCONCLUSIVE:
        raise ProtocolError(f"this machine could not decide: {own.reason}")
    if own.outcome != given:
        raise ProtocolError("the verdict is another here, but by less than honest machines may differ by")
    # A liar could be off by just so much that one machine sees it and the other one does not; no honest verifier is.
    if spot.contradictions(word, found, upload, share=0.5):
        raise ProtocolError("its numbers are off by nearly what honest machines may differ by")
    return "the verdict is right"
