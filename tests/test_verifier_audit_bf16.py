"""A bf16 run from its ledger to its audit: other bytes, other numbers, the same verdicts for everybody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from protocol import codec
from protocol.envelope import open_envelope
from protocol.errors import ReasonCode
from protocol.records import Submission, Verdict, VerdictDetails
from tests.archive_builder import BuiltArchive, build_archive, copy_archive, reseal, rewrite
from tests.judge_rig import BF16
from verifier.archive import RunArchive
from verifier.audit import Options, audit
from verifier.judge import decompress_submission

QUIET = replace(BF16, chunk_mantissa=4.0, rollout_mantissa=2.5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltArchive:
    return build_archive(tmp_path_factory.mktemp("bf16") / "run", steps=1, bf16=QUIET)


def test_an_honest_bf16_archive_holds_whoever_derives_it(built: BuiltArchive, tmp_path: Path) -> None:
    report = audit(copy_archive(built, tmp_path), Options())
    assert (report.failures, report.unchecked) == ([], [])
    assert report.accepted_checked == report.accepted_total == built.accepted == 8
    assert report.rollouts_checked == report.rollouts_held == 12, "4 of them rejected for their claimed rewards"


def test_details_of_a_bf16_verdict_repeat_what_was_claimed_or_are_called_wrong(
    built: BuiltArchive, tmp_path: Path
) -> None:
    copy = copy_archive(built, tmp_path)
    archive = RunArchive.open(copy)
    fact = next(fact for fact in archive.facts.verdicts.values() if fact.verdict.outcomes[0].reason == "holds")
    raw = decompress_submission(archive.submission(fact.submission), fact.submission.intent.raw_length)
    claimed = codec.decode(Submission, raw).rollouts
    details = archive.details(fact)
    assert [one.logprobs for one in details.rollouts] == [one.logprobs for one in claimed]
    assert {len(chunk) for one in claimed for chunk in one.proofs} == {258}
    assert {number.name for number in details.rollouts[0].numbers} >= {"mantissa_mean", "margin_sum", "mismatch_kl"}

    # the validator's own log-probabilities, which lie within the node's bound: still not what is trained on here
    moved = (np.frombuffer(details.rollouts[0].logprobs, "<f4") - np.float32(0.01)).tobytes()
    lied = codec.encode(VerdictDetails((replace(details.rollouts[0], logprobs=moved), *details.rollouts[1:])))
    (copy / "submissions" / f"{fact.submission.lease.lease_id.hex()}.{fact.verdict.round}.hwv").write_bytes(lied)

    def change(entry):
        if entry.event != "verdict":
            return entry
        envelope = open_envelope(entry.subject, run=built.chain.run.id, kind="verdict")
        verdict = envelope.record(Verdict)
        if verdict.job_id != fact.verdict.job_id:
            return entry
        again = replace(verdict, details=blake3(lied).digest())
        return replace(entry, subject=reseal(built.identities[envelope.signer], envelope, again).raw)

    rewrite(copy, built.chain.run, built.identities, change)
    report = audit(copy, Options())
    wrong = [f for f in report.failures if f.record == fact.record and f.reason == ReasonCode.VERDICT_WRONG]
    assert wrong and any("log-probabilit" in failure.message for failure in wrong)
