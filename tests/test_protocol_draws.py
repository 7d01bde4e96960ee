"""Draws of validators: keyed, even, and without a trace of who submitted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from blake3 import blake3

from protocol import codec, draws
from protocol.chain import Delegation, Revocation, RunUpdate
from protocol.records import (
    DrawsOpened,
    DrawsRevealed,
    DropEvidence,
    JobDrawn,
    RelayStamp,
    TieLapsed,
    ValidatorsPresent,
)

SECRET = bytes(range(32))
VALIDATORS = [bytes([i]) * 32 for i in range(1, 5)]


def test_a_draw_depends_on_the_secret_the_submission_the_round_and_the_attempt() -> None:
    def draw(secret: bytes, digest: bytes, index: int, round_number: int, attempt: int) -> list[bytes | None]:
        return [draws.draw_validator(secret, digest, index + i, round_number, attempt, VALIDATORS) for i in range(40)]

    first = draw(SECRET, bytes(32), 7, 1, 0)
    assert first == draw(SECRET, bytes(32), 7, 1, 0)
    assert first != draw(bytes(32), bytes(32), 7, 1, 0)
    assert first != draw(SECRET, bytes([1]) * 32, 7, 1, 0)
    assert first != draw(SECRET, bytes(32), 7, 2, 0)
    assert first != draw(SECRET, bytes(32), 7, 1, 1)


def test_a_draw_ignores_the_order_of_candidates_and_needs_one() -> None:
    forward = draws.draw_validator(SECRET, bytes(32), 1, 1, 0, VALIDATORS)
    assert draws.draw_validator(SECRET, bytes(32), 1, 1, 0, VALIDATORS[::-1]) == forward
    assert draws.draw_validator(SECRET, bytes(32), 1, 1, 0, []) is None


def test_draws_are_even() -> None:
    counts = Counter(draws.draw_validator(SECRET, bytes(32), index, 1, 0, VALIDATORS) for index in range(4000))
    assert set(counts) == set(VALIDATORS)
    assert max(abs(count - 1000) for count in counts.values()) < 140  # five standard deviations


def test_second_draws_come_at_their_rate_and_four_times_as_often_in_probation() -> None:
    def share(rate: float, probation: bool) -> float:
        drawn = [draws.wants_second(SECRET, bytes(32), index, rate, probation) for index in range(4000)]
        return sum(drawn) / len(drawn)

    assert share(0.0, True) == 0.0
    assert share(1.0, False) == 1.0
    assert abs(share(0.1, False) - 0.1) < 0.03
    assert abs(share(0.1, True) - 0.4) < 0.05


def test_parts_of_a_draw_cannot_be_moved_into_one_another() -> None:
    assert draws.keyed(SECRET, "x", b"ab", b"c") != draws.keyed(SECRET, "x", b"a", b"bc")
    assert draws.job_token(SECRET, draws.job_id(SECRET, 1, 1, 0)) != draws.job_token(
        SECRET, draws.job_id(SECRET, 2, 1, 0)
    )


def test_the_vectors_of_the_specification_are_true() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text()
    secret, digest = bytes(range(32)), b"\x44" * 32
    keys = [bytes([n]) * 32 for n in (1, 2, 3)]
    job = draws.job_id(secret, 17, 1, 0)
    assert draws.draw_validator(secret, digest, 17, 1, 0, keys) == keys[1]
    stolen = Revocation(b"\x06" * 32, 900, "stolen")
    update = RunUpdate(b"\x11" * 32, 1, revocations=(stolen,), lowest_version=0x0100, note="n")
    records = [
        DrawsOpened(3, blake3(secret).digest(), 0.1, 4.0),
        DrawsRevealed(3, secret),
        ValidatorsPresent((keys[0], keys[1])),
        JobDrawn(job, 17, keys[1], 1, 3, 0),
        TieLapsed(17),
        DropEvidence(b"\x05" * 32, 900, 30, 45, 16.5, -0.125, 0.0625),
        RelayStamp(b"\x22" * 16, 7, b"\x09" * 32, 1800000000000),
        stolen,
        Delegation(b"\x11" * 32, b"\x07" * 32, ("coordinator",), 1, 2, 1),
        update,
    ]
    numbers = [
        blake3(secret).digest(),
        draws.keyed(secret, "period", 3),
        draws.keyed(secret, "validator", digest, 17, 1, 0)[:16],
        draws.keyed(secret, "second", digest, 17)[:8],
        job,
        blake3(codec.encode(update)).digest(),
    ]
    for vector in [*map(codec.encode, records), *numbers]:
        assert f"`{vector.hex()}`" in text
