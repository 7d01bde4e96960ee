"""The learner's door: reading `batches/step-N.hwb` and refusing what must not be trained on.

A batch is judged as a whole, because it is the coordinator's: one that does not belong here means that the two
processes disagree, and the learner stops and says how. Single rollouts are dropped (and counted) only for numbers
that are not finite, which a stranger's hardware can cause.

Not covered: whether a rollout is honest (`verifier`); what is learned from it (`trainer.update`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol import codec
from protocol.errors import DecodeError, ReasonCode
from protocol.limits import MAX_REWARD
from protocol.manifest import Run
from protocol.records import Batch, TrainingRollout
from trainer.errors import TrainerError
from trainer.trainable import Trainable


class BatchError(TrainerError):
    """A batch file that this learner must not train on. Nothing was learned from any of it."""

    code = ReasonCode.BATCH_WRONG


@dataclass(frozen=True)
class Door:
    """What a batch must fit: ids below `vocabulary`, at most `max_context` tokens, at most `max_staleness` old."""

    run: bytes
    epoch: int
    vocabulary: int
    max_context: int
    max_staleness: int

    @staticmethod
    def of(run: Run, vocabulary: int, epoch: int = 0) -> Door:
        manifest = run.manifest
        return Door(run.id, epoch, vocabulary, manifest.model.max_context, manifest.leases.max_staleness)


@dataclass(frozen=True)
class Sequence:
    """One verified rollout. behaviour: float32 log-probabilities, one per sampled token."""

    group: bytes
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    behaviour: npt.NDArray[np.float32]
    reward: float
    staleness: int

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.behaviour).all())


@dataclass(frozen=True)
class TrainingBatch:
    step: int
    sequences: tuple[Sequence, ...]
    identities: frozenset[tuple[int, int]]
    """(submission, position in it) of every rollout: none may be trained on twice."""


def batch_path(run_dir: Path, step: int) -> Path:
    return run_dir / "batches" / f"step-{step:08d}.hwb"


def read_batch(path: Path, step: int, door: Door, trained: Iterable[frozenset[tuple[int, int]]] = ()) -> TrainingBatch:
    """Read and check one batch file.

    Args:
        step: the step this batch must train.
        trained: identities of earlier batches. Those of the last `max_staleness` steps are enough: anything older is
            too stale to come again.

    Raises:
        BatchError: not a batch, another run's or step's, empty, a token outside the vocabulary, a rollout that is too
            stale, from the future, or was trained on before.
    """
    try:
        batch = codec.decode(Batch, path.read_bytes())
    except DecodeError as exc:
        raise _refuse(path, f"is no batch ({exc})", exc.code) from exc
    except OSError as exc:
        raise _refuse(path, f"cannot be read ({exc.strerror})") from exc
    if batch.run != door.run:
        raise _refuse(path, "belongs to another run", ReasonCode.WRONG_RUN)
    if (batch.epoch, batch.step) != (door.epoch, step):
        raise _refuse(path, f"says epoch {batch.epoch} step {batch.step}, not epoch {door.epoch} step {step}")
    if not batch.rollouts:
        raise _refuse(path, "holds no rollouts")
    identities = [(r.submission, r.rollout) for r in batch.rollouts]
    before = frozenset[tuple[int, int]]().union(*trained)
    twice = [i for i, count in Counter(identities).items() if count > 1 or i in before]
    if twice:
        submission, position = min(twice)
        raise _refuse(path, f"names rollout {position} of submission {submission} a second time")
    _check(path, batch.rollouts, step, door)
    return TrainingBatch(step, _sequences(batch.rollouts, step), frozenset(identities))


def _check(path: Path, rollouts: tuple[TrainingRollout, ...], step: int, door: Door) -> None:
    """Raises BatchError for the first rollout that this learner must not train on."""
    rules = Trainable(door.vocabulary, door.max_context)
    fit = rules.all_fit([r.prompt for r in rollouts], [r.tokens for r in rollouts], [r.logprobs for r in rollouts])
    for index, rollout in enumerate(rollouts):
        wrong = None if fit else rules.misfit(rollout.prompt, rollout.tokens, rollout.logprobs)
        if wrong is not None:
            raise _refuse(path, f"rollout {index} {wrong[0]}", wrong[1])
        if not abs(rollout.reward) <= MAX_REWARD:
            raise _refuse(path, f"rollout {index} has a reward of {rollout.reward:g}")
        if rollout.epoch != door.epoch or not 0 <= step - rollout.step <= door.max_staleness:
            raise _refuse(path, f"rollout {index} was sampled by the policy of epoch {rollout.epoch} step "
                                f"{rollout.step}, outside the staleness bound of {door.max_staleness}")  # fmt: skip


def _sequences(rollouts: tuple[TrainingRollout, ...], step: int) -> tuple[Sequence, ...]:
    """As arrays and ids, of rollouts that were checked. A group's share one prompt."""
    prompts = {raw: _ids(raw) for raw in {rollout.prompt for rollout in rollouts}}
    return tuple(
        Sequence(r.group, prompts[r.prompt], _ids(r.tokens), np.frombuffer(r.logprobs, "<f4"), r.reward, step - r.step)
        for r in rollouts
    )


def _ids(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def _refuse(path: Path, what: str, code: ReasonCode = ReasonCode.BATCH_WRONG) -> BatchError:
    return BatchError(
        f"{path} {what}; nothing of it was learned. The operator must restore the file from the ledger (restarting "
        "`trainer serve` builds a missing batch again) or give the learner the run it belongs to",
        code,
    )
