"""Batches held against what they claim to be made of: ledger, uploads, and the deciding verdicts' details.

A batch is a function of those, so the audit builds each rollout again and compares. That an entry names an accepted
rollout, a live owner and nothing twice is the fold's business; here are bytes, staleness and whole groups.

Not covered: what the learner makes of a batch.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from protocol import codec
from protocol.errors import LedgerError, ProtocolError, ReasonCode
from protocol.records import Batch, BatchClosed, BatchEntry, Rollout, RolloutDetail, Submission, TrainingRollout
from protocol.seeds import group_id
from protocol.state import ACCEPTED, RunState
from verifier.archive import RunArchive, SubmissionFact, batch_file
from verifier.judge import decompress_submission
from verifier.report import Report

Prompt = Callable[[bytes, int], bytes | None]
"""(environment digest, task) -> prompt ids as u32 little-endian, or None when they can't be had here."""

_KEPT = 256
"""Uploads and details kept decoded: a batch draws on a few leases, neighbours on the same ones."""


@dataclass(frozen=True)
class Trained:
    """What a batch whose bytes have the ledger's hash gave to one step."""

    rollouts: int
    reward_mean: float

    @staticmethod
    def of(batch: Batch) -> Trained:
        count = len(batch.rollouts)
        return Trained(count, sum(one.reward for one in batch.rollouts) / max(1, count))

    def told_by(self, reward_mean: object, rollouts: object) -> bool:
        """Whether a row of metrics says the same; the last digits are the learner's own summation."""
        try:
            said = float(reward_mean) if isinstance(reward_mean, int | float) else math.nan
        except OverflowError:  # whoever wrote the row chose it
            return False
        return rollouts == self.rollouts and math.isclose(said, self.reward_mean, rel_tol=1e-6, abs_tol=1e-9)


def check_batches(archive: RunArchive, report: Report, prompt: Prompt) -> dict[int, list[Trained]]:
    """Check every batch the ledger closed; failures go into `report`.

    Returns:
        step -> what its batch gave, of each batch that could be read.
    """
    sources = _Sources(archive)
    trained: dict[int, list[Trained]] = {}
    for index, closed in archive.facts.batches.items():
        report.batches += 1
        name = batch_file(closed)
        try:
            batch = archive.batch(closed)
            trained.setdefault(closed.step, []).append(Trained.of(batch))
            _check_group_and_age(archive, closed, archive.manifest_at(index).leases.max_staleness)
            _check_bytes(batch, closed, archive.run.id, sources, prompt)
        except Unavailable as exc:
            report.unchecked.append((name, str(exc)))
        except ProtocolError as exc:
            report.fail(name, exc.code, f"ledger entry {index}: {exc}")
        except OSError as exc:
            report.unchecked.append((name, f"can't be read: {exc.strerror or exc}"))
    return trained


class Unavailable(Exception):  # noqa: N818
    """Something a batch rests on is not there to compare with; it is named elsewhere in the report."""


def _wrong(text: str) -> LedgerError:
    return LedgerError(text, ReasonCode.BATCH_WRONG)


def _check_group_and_age(archive: RunArchive, closed: BatchClosed, oldest: int) -> None:
    """A group enters whole or not at all, and nothing is older than the run allowed then."""
    counts: Counter[tuple[int, int]] = Counter()
    for entry in closed.entries:
        fact = _submission(archive, entry)
        if fact.lease.epoch == closed.epoch and not 0 <= closed.step - fact.lease.step <= oldest:
            raise _wrong(f"{fact.rollout_id(entry.rollout)} is of step {fact.lease.step}, too old for this batch")
        counts[(fact.index, entry.rollout // fact.lease.samples)] += 1
    for (index, task), count in counts.items():
        lease = archive.facts.submissions[index].lease
        if count != lease.samples:
            raise _wrong(f"holds {count} of {lease.samples} rollouts of task {lease.tasks[task]} of submission {index}")


def _submission(archive: RunArchive, entry: BatchEntry) -> SubmissionFact:
    fact = archive.facts.submissions.get(entry.submission)
    if fact is None or entry.rollout >= fact.rollouts:
        raise _wrong(f"names rollout {entry.rollout} of submission {entry.submission}: there is none")
    return fact


def _check_bytes(batch: Batch, closed: BatchClosed, run: bytes, sources: _Sources, prompt: Prompt) -> None:
    if (batch.run, batch.epoch, batch.step) != (run, closed.epoch, closed.step):
        raise _wrong("the file says it is another run's or step's batch")
    if len(batch.rollouts) != len(closed.entries):
        raise _wrong(f"the file holds {len(batch.rollouts)} rollouts, the ledger names {len(closed.entries)}")
    for stored, entry in zip(batch.rollouts, closed.entries, strict=True):
        ours = sources.training_rollout(entry, prompt)
        if stored != ours:
            fields = [name for name in vars(ours) if getattr(ours, name) != getattr(stored, name)]
            fact = sources.archive.facts.submissions[entry.submission]
            raise _wrong(f"{fact.rollout_id(entry.rollout)} differs from what was verified, in {', '.join(fields)}")


class _Sources:
    """Uploads and details, decoded once while they are in use."""

    def __init__(self, archive: RunArchive) -> None:
        self.archive = archive
        self.rollouts = functools.lru_cache(maxsize=_KEPT)(self._rollouts)
        self.details = functools.lru_cache(maxsize=_KEPT)(self._details)

    def training_rollout(self, entry: BatchEntry, prompt: Prompt) -> TrainingRollout:
        """What the batch must hold for `entry`."""
        fact = _submission(self.archive, entry)
        verdict = self.archive.facts.verdicts.get(entry.verdict)
        if verdict is None or verdict.submission.index != entry.submission:
            raise _wrong(f"names verdict {entry.verdict}, which is none on submission {entry.submission}")
        rollouts, details = self.rollouts(entry.submission), self.details(entry.verdict)
        if entry.rollout >= len(rollouts) or entry.rollout >= len(details):
            raise _wrong(f"{fact.rollout_id(entry.rollout)} was never submitted, or its verdict has no details for it")
        rollout, detail = rollouts[entry.rollout], details[entry.rollout]
        task = fact.lease.tasks[entry.rollout // fact.lease.samples]
        prompt_ids = prompt(fact.lease.environment, task)
        if prompt_ids is None:
            raise Unavailable("the prompts can't be rebuilt: the tokenizer or the environment is not available")
        return TrainingRollout(
            submission=entry.submission,
            verdict=entry.verdict,
            rollout=entry.rollout,
            group=group_id(fact.lease.nonce, task),
            epoch=fact.lease.epoch,
            step=fact.lease.step,
            prompt=prompt_ids,
            tokens=rollout.tokens,
            logprobs=detail.logprobs,
            reward=detail.reward,
        )

    def _rollouts(self, index: int) -> tuple[Rollout, ...]:
        fact = self.archive.facts.submissions[index]
        try:
            raw = decompress_submission(self.archive.submission(fact), fact.intent.raw_length)
            return codec.decode(Submission, raw).rollouts
        except (OSError, ProtocolError) as exc:
            raise Unavailable(f"rests on {fact.file}, which does not hold or can't be read") from exc

    def _details(self, index: int) -> tuple[RolloutDetail, ...]:
        fact = self.archive.facts.verdicts[index]
        try:
            return self.archive.details(fact).rollouts
        except (OSError, ProtocolError) as exc:
            raise Unavailable(f"rests on {fact.file}, which does not hold or can't be read") from exc


def groups_untrained(state: RunState) -> int:
    """Groups whose rollouts were all accepted and that no batch took: too late, left over at
    the end, of a node that was suspended then, or left out."""
    found = 0
    for submission in state.submissions.values():
        samples = state.leases[submission.lease_id].lease.samples
        for first in range(0, len(submission.outcomes), samples):
            group = submission.outcomes[first : first + samples]
            found += (submission.index, first) not in state.trained and all(one.status == ACCEPTED for one in group)
    return found
