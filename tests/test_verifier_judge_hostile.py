"""`verifier.judge` on hostile bytes: it never raises, accepts only what is honest, and answers for each rollout."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.registry import make
from protocol import codec
from protocol.records import (
    ACCEPT,
    INCONCLUSIVE,
    REJECT,
    Rollout,
    Submission,
)
from tests.judge_rig import TINY, Rig, make_rig, open_run, reasons, words
from verifier.judge import judge
from verifier.model import load_policy


@pytest.fixture(scope="module")
def tiny() -> Rig:
    """Four tasks by eight samples of word reversal: what the demo's nodes submit all day."""
    return make_rig(load_policy(TINY), make("word"), 4, 8, 9, (1,))


# --- hostile bytes ----------------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_judged(rig: Rig, raw: bytes) -> list[int]:
    """Judge bytes, check the answer's shape, and return which rollouts were accepted."""
    judged = judge(rig.run, rig.lease, raw, rig.policy, rig.environment)
    assert len(judged.outcomes) == len(judged.details) == len(rig.honest.rollouts)
    assert all(o.outcome in (ACCEPT, REJECT, INCONCLUSIVE) for o in judged.outcomes)
    codec.encode(judged.verdict_details())
    return [i for i, o in enumerate(judged.outcomes) if o.outcome == ACCEPT]


@pytest.fixture(scope="module")
def small() -> Rig:
    return make_rig(load_policy(TINY), make("word"), 1, 2, 9, (1,))


@FUZZ
@given(data=st.data())
def test_flipped_bytes_never_raise_and_are_never_accepted_unless_harmless(small: Rig, data: st.DataObject) -> None:
    raw = bytearray(codec.encode(small.honest))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    accepted = check_judged(small, bytes(raw))
    for i in accepted:
        made, honest = codec.decode(Submission, bytes(raw)).rollouts[i], small.honest.rollouts[i]
        assert dataclasses.replace(made, logprobs=honest.logprobs, proofs=honest.proofs) == honest
        for proof, right in zip(made.proofs, honest.proofs, strict=True):
            # the constant of limb 2 moves all points alike; its low bits, by less than rounding does
            constant = slice(len(right) // 2 + 1, len(right) // 2 + 3)
            assert proof[: constant.start] + proof[constant.stop :] == right[: constant.start] + right[constant.stop :]


@FUZZ
@given(raw=st.binary(max_size=300))
def test_random_bytes_never_raise(small: Rig, raw: bytes) -> None:
    check_judged(small, raw)


ROLLOUTS = st.builds(
    Rollout,
    task=st.sampled_from([100, 101, 0, (1 << 64) - 1]),
    sample=st.sampled_from([0, 1, 2, (1 << 32) - 1]),
    tokens=st.lists(st.sampled_from([0, 1, 2, 30, 63, 64, (1 << 32) - 1]), max_size=12).map(words),
    logprobs=st.lists(st.floats(width=32), max_size=12).map(lambda v: struct.pack(f"<{len(v)}f", *v)),
    finish=st.integers(0, 3),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    proofs=st.lists(
        st.one_of(st.binary(max_size=514), st.binary(min_size=512, max_size=512).map(lambda b: b"\xff\xd9" + b)),
        max_size=2,
    ).map(tuple),
)  # fmt: skip


@FUZZ
@given(rollouts=st.lists(ROLLOUTS, min_size=2, max_size=2))
def test_well_formed_nonsense_never_raises_and_is_never_accepted(small: Rig, rollouts: list[Rollout]) -> None:
    raw = codec.encode(Submission(small.lease.lease_id, "", tuple(rollouts)))
    judged = judge(small.run, small.lease, raw, small.policy, small.environment)
    assert all(o.outcome == REJECT for o in judged.outcomes)


@FUZZ
@given(data=st.data())
def test_one_mutated_field_touches_only_its_own_rollout(small: Rig, data: st.DataObject) -> None:
    nonsense = data.draw(ROLLOUTS)
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(Rollout)]))
    first, second = small.honest.rollouts
    mixed = dataclasses.replace(first, **{name: getattr(nonsense, name)})
    judged = small.judge(dataclasses.replace(small.honest, rollouts=(mixed, second)))
    assert reasons(judged)[1] == "holds"
    assert (judged.outcomes[0].outcome == ACCEPT) == (mixed == first)


def test_the_run_id_is_part_of_every_seed(tiny: Rig) -> None:
    other = open_run(tiny.environment, 1.0, 9, (1,), b"b")
    assert other.id != tiny.run.id and blake3(codec.encode(other.manifest)).digest() == other.id
    judged = judge(other, tiny.lease, codec.encode(tiny.honest), tiny.policy, tiny.environment)
    assert "token-not-forced" in reasons(judged)
