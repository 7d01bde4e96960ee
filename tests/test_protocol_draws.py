"""Draws of validators: keyed, even, and without a trace of who submitted."""

from __future__ import annotations

from collections import Counter

from protocol import draws

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
