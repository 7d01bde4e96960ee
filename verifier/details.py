"""The audit of what accepting validators handed over: each accepted rollout's details against the upload (`claims`).

Costs no model, so it is done for every verdict, also where only a share of them is derived again.

Not covered: files that are missing or changed, which the audit names elsewhere; numbers that fit and are false, which
deriving the verdict shows.
"""

from __future__ import annotations

from protocol import codec
from protocol.errors import ProtocolError, ReasonCode
from protocol.records import ACCEPT, Rollout, RolloutDetail, Submission
from verifier.archive import RunArchive, VerdictFact
from verifier.claims import contradiction, scored_purely
from verifier.compare import required, unfit
from verifier.judge import decompress_submission
from verifier.report import Failure, Report


def check_claims(archive: RunArchive, report: Report) -> None:
    """Hold every accepting verdict's details against the upload. Files that do not hold are named elsewhere."""
    uploads: dict[int, tuple[Rollout, ...]] = {}
    named = {failure.record for failure in report.failures}
    for fact in sorted(archive.facts.verdicts.values(), key=lambda fact: fact.submission.index):
        if fact.record in named or all(outcome.outcome != ACCEPT for outcome in fact.verdict.outcomes):
            continue
        index = fact.submission.index
        try:
            if index not in uploads:
                uploads = {index: _rollouts(archive, fact)}
            _check_one(archive, report, fact, uploads[index])
        except (ProtocolError, OSError):
            continue


def _check_one(archive: RunArchive, report: Report, fact: VerdictFact, rollouts: tuple[Rollout, ...]) -> None:
    details = archive.details(fact).rollouts
    manifest = archive.rules(fact.submission.lease).manifest
    bound, needed = manifest.thresholds.logprob, required(manifest)
    pure = scored_purely(manifest, fact.submission.lease)
    wrong = {
        i: text
        for i, outcome in enumerate(fact.verdict.outcomes)
        if outcome.outcome == ACCEPT
        and i < min(len(rollouts), len(details), fact.submission.rollouts)
        and (text := contradiction(rollouts[i], details[i], bound, pure=pure) or _lacking(details[i], needed))
    }
    if wrong:
        first = min(wrong)
        ids = tuple(fact.submission.rollout_id(i) for i in wrong)
        text = f"{len(wrong)} rollouts contradict the upload it accepts: {ids[0]} was accepted {wrong[first]}"
        report.failures.append(Failure(fact.record, ReasonCode.VERDICT_WRONG, text, ids))


def _lacking(detail: RolloutDetail, needed: frozenset[str]) -> str:
    name = unfit(detail, needed)
    return name and f"without {name}, which the run sums up"


def _rollouts(archive: RunArchive, fact: VerdictFact) -> tuple[Rollout, ...]:
    raw = decompress_submission(archive.submission(fact.submission), fact.submission.intent.raw_length)
    return codec.decode(Submission, raw).rollouts
