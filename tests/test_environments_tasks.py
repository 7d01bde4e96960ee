"""Environments: the same tasks on every machine, exact rewards, and a hash that no other rule has."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.base import Draws
from environments.errors import EnvironmentSpecError
from environments.registry import load, make
from protocol import codec
from protocol.manifest import EnvironmentSpec

KINDS = [
    ("word", {}),
    ("word", {"transform": "sort"}),
    ("word", {"transform": "rotate", "low": 1, "high": 64, "letters": "xyz"}),
    ("addition", {}),
    ("addition", {"high": 1000}),
]


@pytest.mark.parametrize(("name", "configuration"), KINDS)
def test_an_environment_survives_its_own_specification(name: str, configuration: dict[str, str | int]) -> None:
    here = make(name, configuration)
    spec = codec.decode(EnvironmentSpec, codec.encode(here.spec()))
    there = load(spec)
    assert there.digest == here.digest == spec.digest and spec.scoring == "pure"
    assert [there.task(i) for i in range(50)] == [here.task(i) for i in range(50)]


def test_every_configuration_has_its_own_hash_and_tasks() -> None:
    made = [make(name, configuration) for name, configuration in KINDS]
    assert len({e.digest for e in made}) == len(made)
    assert len({e.task(3).prompt for e in made}) == len(made)


@given(index=st.integers(0, (1 << 64) - 1))
def test_any_index_is_a_task_whose_answer_and_nothing_else_is_rewarded(index: int) -> None:
    for name, configuration in KINDS:
        environment = make(name, configuration)
        task = environment.task(index)
        assert task == environment.task(index) and task.index == index
        assert environment.score(task, task.answer, True) == 1.0
        for text, finished in ((task.answer, False), (task.answer + "x", True), ("", True), (task.prompt, True)):
            assert environment.score(task, text, finished) == 0.0


@given(text=st.text(), finished=st.booleans())
def test_a_score_is_defined_for_any_text(text: str, finished: bool) -> None:
    for name, configuration in KINDS:
        environment = make(name, configuration)
        assert environment.score(environment.task(0), text, finished) in (0.0, 1.0)


def test_words_are_transformed() -> None:
    for transform, want in (("reverse", lambda w: w[::-1]), ("sort", lambda w: "".join(sorted(w))),
                            ("rotate", lambda w: w[1:] + w[0])):  # fmt: skip
        environment = make("word", {"transform": transform})
        for index in range(100):
            task = environment.task(index)
            word = task.prompt.removesuffix("=")
            assert 4 <= len(word) <= 7 and set(word) <= set("abcdefghij") and task.answer == want(word)


def test_sums_are_sums_and_blanks_around_them_do_not_matter() -> None:
    environment = make("addition")
    seen = set()
    for index in range(500):
        task = environment.task(index)
        assert task.prompt.startswith("2+5=7\n8+4=12\n")
        left, right = task.prompt.rsplit("\n", 1)[1].removesuffix("=").split("+")
        assert int(left) + int(right) == int(task.answer) and 1 <= int(left) <= 9 and 1 <= int(right) <= 9
        assert environment.score(task, f" {task.answer}", True) == 1.0
        assert environment.score(task, f"{task.answer}\n", True) == 0.0
        seen.add((left, right))
    assert len(seen) == 81


def test_draws_are_uniform_and_fixed() -> None:
    draws = Draws(b"material")
    counts = Counter(draws.below(7) for _ in range(7000))
    assert set(counts) == set(range(7)) and min(counts.values()) > 850
    assert [Draws(b"material").below(1000) for _ in range(2)] == [Draws(b"material").below(1000)] * 2


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        ("nothing", {}),
        ("word", {"transform": "copy"}),
        ("word", {"low": 0}),
        ("word", {"low": 5, "high": 4}),
        ("word", {"high": 65}),
        ("word", {"high": "7"}),
        ("word", {"letters": ""}),
        ("word", {"colour": "red"}),
        ("addition", {"high": 0}),
        ("addition", {"low": 1}),
    ],
)
def test_a_configuration_that_is_not_there_is_refused(name: str, configuration: dict[str, str | int]) -> None:
    with pytest.raises(EnvironmentSpecError):
        make(name, configuration)


def test_a_specification_that_is_not_ours_is_refused_and_says_where() -> None:
    spec = make("word").spec()
    for change, message in (
        ({"name": "strange"}, "strange"),
        ({"source": bytes(32)}, "source"),
        ({"version": "2"}, "version"),
        ({"scoring": "judge"}, "scoring"),
        ({"digest": bytes(32)}, "digest"),
        ({"configuration": "{}"}, "configuration"),
        ({"configuration": "not json"}, "JSON"),
        ({"configuration": "[1]"}, "table"),
        ({"configuration": '{"low": 1.5}'}, "table"),
        ({"configuration": "[" * 4000}, "JSON"),
    ):
        with pytest.raises(EnvironmentSpecError, match=message):
            load(dataclasses.replace(spec, **change))
