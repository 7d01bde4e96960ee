"""The learner's door: what it refuses to train on, and what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol import codec
from protocol.manifest import Run
from protocol.records import Batch
from tests.learner_actor import sample_batch, small_run
from trainer.incoming import BatchError, Door, batch_path, read_batch
from verifier.model import PolicyModel, load_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, PolicyModel, Path]:
    directory = tmp_path_factory.mktemp("incoming") / "run"
    run = small_run(directory, 4, leases__tasks_per_step=2, leases__tasks_per_lease=2, leases__samples_per_task=4)
    return run, load_policy(directory / "model"), directory


def _write(made: tuple[Run, PolicyModel, Path], change: Callable[[dict[str, Any], int], None], step: int = 3) -> Path:
    run, policy, directory = made
    path = batch_path(directory, step)
    path.write_bytes(sample_batch(run, policy, step, step - 1, change))
    return path


def _door(made: tuple[Run, PolicyModel, Path]) -> Door:
    return Door.of(made[0], made[1].vocabulary)


def test_a_good_batch_is_read_as_it_was_made(made: tuple[Run, PolicyModel, Path]) -> None:
    batch = read_batch(_write(made, lambda *_: None), 3, _door(made))
    assert len(batch.sequences) == 8
    assert len({s.group for s in batch.sequences}) == 2
    assert {s.staleness for s in batch.sequences} == {1}
    assert all(len(s.tokens) == len(s.behaviour) > 0 and s.finite for s in batch.sequences)
    assert len(batch.identities) == 8


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "too stale": (lambda f: f.update(step=0), "staleness"),
    "from the future": (lambda f: f.update(step=4), "staleness"),
    "another epoch": (lambda f: f.update(epoch=1), "staleness"),
    "twice in the batch": (lambda f: f.update(rollout=1), "second time"),
    "no tokens": (lambda f: f.update(tokens=b"", logprobs=b""), "0 sampled"),
    "no prompt": (lambda f: f.update(prompt=b""), "0 prompt"),
    "log-probabilities missing": (lambda f: f.update(logprobs=f["logprobs"][4:]), "log-probabilities"),
    "outside the vocabulary": (lambda f: f.update(tokens=np.full(2, 64, "<u4").tobytes(), logprobs=bytes(8)), "vocab"),
    "longer than the context": (lambda f: f.update(prompt=np.full(300, 5, "<u4").tobytes()), "context"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_one_wrong_rollout_refuses_the_batch_and_names_the_reason(
    made: tuple[Run, PolicyModel, Path], name: str
) -> None:
    spoil, words = WRONG[name]
    path = _write(made, lambda fields, position: spoil(fields) if position == 2 else None)
    with pytest.raises(BatchError, match=words) as caught:
        read_batch(path, 3, _door(made))
    assert str(path) in str(caught.value)
    assert "operator" in str(caught.value)


def test_a_rollout_is_never_trained_on_twice(made: tuple[Run, PolicyModel, Path]) -> None:
    earlier = read_batch(_write(made, lambda *_: None), 3, _door(made)).identities
    path = _write(made, lambda fields, _: fields.update(submission=3), step=4)
    with pytest.raises(BatchError, match="second time"):
        read_batch(path, 4, _door(made), [frozenset(), earlier])


def test_another_runs_or_steps_batch_is_refused(made: tuple[Run, PolicyModel, Path]) -> None:
    path = _write(made, lambda *_: None)
    with pytest.raises(BatchError, match="another run"):
        read_batch(path, 3, Door(bytes(32), 0, 64, 256, 2))
    with pytest.raises(BatchError, match="not epoch 0 step 2"):
        read_batch(path, 2, _door(made))
    path.write_bytes(codec.encode(Batch(made[0].id, 0, 3, ())))
    with pytest.raises(BatchError, match="no rollouts"):
        read_batch(path, 3, _door(made))
    with pytest.raises(BatchError, match="cannot be read"):
        read_batch(path.with_name("step-99999999.hwb"), 3, _door(made))


def test_numbers_that_are_not_finite_are_left_to_be_dropped(made: tuple[Run, PolicyModel, Path]) -> None:
    def spoil(fields: dict[str, Any], position: int) -> None:
        if position == 5:
            values = np.frombuffer(fields["logprobs"], "<f4").copy()
            values[0] = np.nan
            fields["logprobs"] = values.tobytes()

    batch = read_batch(_write(made, spoil), 3, _door(made))
    assert [s.finite for s in batch.sequences] == [i != 5 for i in range(8)]


def test_damaged_bytes_give_a_typed_error_or_a_batch_within_the_rules(made: tuple[Run, PolicyModel, Path]) -> None:
    path = _write(made, lambda *_: None)
    good = path.read_bytes()
    rng = random.Random(7)
    refused = 0
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw[: rng.randint(0, len(raw))] if rng.random() < 0.3 else raw)
        try:
            batch = read_batch(path, 3, _door(made))
        except BatchError:
            refused += 1
        else:
            assert all(max(s.prompt + s.tokens) < 64 and 0 <= s.staleness <= 2 for s in batch.sequences)
    assert refused > 100
