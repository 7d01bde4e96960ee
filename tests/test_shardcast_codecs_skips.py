"""Ways from one policy to another: the fewest bytes, over patches, skip patches and anchors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.codecs.skips import STRIDES, Way, plan, skip_bases

ANCHOR, PATCH = 66_000, 385


def root(step: int) -> bytes:
    return step.to_bytes(32, "big")


def published(steps: int, anchors: tuple[int, ...] = (0,)) -> list[Way]:
    """What an origin has after so many steps; a skip patch costs as much as the field notes measured."""
    ways = [Way(None, root(step), ANCHOR) for step in anchors]
    for step in range(1, steps + 1):
        for base in skip_bases(step):
            ways.append(Way(root(base), root(step), {1: PATCH, 8: 1200, 64: 4500}[step - base]))
    return ways


def steps_of(ways: list[Way] | None) -> list[int]:
    assert ways is not None
    return [int.from_bytes(way.root, "big") for way in ways]


def test_a_node_that_keeps_up_takes_one_patch() -> None:
    assert steps_of(plan([root(99)], root(100), published(100))) == [100]
    assert plan([root(100)], root(100), published(100)) == []


def test_a_late_joiner_takes_the_anchor_and_few_patches() -> None:
    assert steps_of(plan([], root(151), published(160))) == [0, 64, 128, 136, 144, *range(145, 152)]
    for want in range(0, 512, 9):
        ways = plan([], root(want), published(512))
        assert ways is not None
        assert len(ways) <= 1 + want // 64 + 7 + 7


def test_who_is_behind_reaches_the_next_skip_step_first() -> None:
    assert steps_of(plan([root(5)], root(26), published(30))) == [6, 7, 8, 16, 24, 25, 26]


def test_an_old_state_is_given_up_for_an_anchor_that_is_shorter() -> None:
    ways = plan(
        [root(0)], root(2), [Way(root(0), root(1), 50_000), Way(root(1), root(2), 50_000), Way(None, root(2), ANCHOR)]
    )
    assert ways == [Way(None, root(2), ANCHOR)]


def test_nothing_leads_there() -> None:
    assert plan([], root(1), []) is None
    assert plan([root(3)], root(1), [Way(root(1), root(2), 1), Way(root(2), root(1), 1)]) is None


def test_of_equal_bytes_the_fewest_publications() -> None:
    ways = [Way(root(0), root(1), 5), Way(root(1), root(2), 5), Way(root(0), root(2), 10)]
    assert plan([root(0)], root(2), ways) == [ways[2]]


NODES = st.integers(0, 5)


@settings(max_examples=300)
@given(
    st.sets(NODES, max_size=2),
    NODES,
    st.lists(st.tuples(st.one_of(st.none(), NODES), NODES, st.integers(0, 20)), max_size=9),
)
def test_no_other_way_has_fewer_bytes(have: set[int], want: int, edges: list[tuple[int | None, int, int]]) -> None:
    available = [Way(None if a is None else root(a), root(b), cost) for a, b, cost in edges]
    held = {root(one) for one in have}
    found = plan(held, root(want), available)
    costs = [0] if root(want) in held else []
    for length in range(1, 6):
        for chain in itertools.permutations(available, length):
            starts = chain[0].base is None or chain[0].base in held
            if starts and all(a.root == b.base for a, b in itertools.pairwise(chain)) and chain[-1].root == root(want):
                costs.append(sum(way.wire_bytes for way in chain))
        if length == 3 and len(available) > 6:
            break  # longer ways of so many are too many to try; shorter ones still bound what is found
    if found is None:
        assert not costs
    else:
        assert sum(way.wire_bytes for way in found) <= min(costs, default=10**9)
        here = None if found and found[0].base is None else (found[0].base if found else root(want))
        assert here is None or here in held
        for way in found:
            assert way.base == here and way in available
            here = way.root
        assert here == root(want)


def test_skip_patches_span_their_strides() -> None:
    assert skip_bases(0) == []
    assert skip_bases(1) == [0]
    assert skip_bases(8) == [7, 0]
    assert skip_bases(64) == [63, 56, 0]
    assert skip_bases(64, first=60) == [63]
    assert skip_bases(130) == [129]
    assert STRIDES == (64, 8)
    with pytest.raises(ValueError):
        skip_bases(3, first=4)
    with pytest.raises(ValueError):
        Way(None, root(1), -1)
