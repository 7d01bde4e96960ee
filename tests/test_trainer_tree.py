"""Who pulls from whom: the plan as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from trainer.tree import (
    BELOW_WIDE,
    LAGGING_STEPS,
    MAX_PARENTS,
    PARENTS,
    SECOND_BELOW,
    TOO_DEEP,
    Place,
    RelayView,
    Tree,
    grow,
    places,
)

ORIGIN = Place(b"o" * 32, "http://origin")
SECRET = bytes(32)
NODE = b"n" * 32


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def relay(number: int, *, lag: int = 0, late: bool = False, uplink: float = 0.0, network: str = "") -> RelayView:
    return RelayView(key_of(number), f"http://relay-{number}", False, lag, late, uplink, network)


def awaited(number: int) -> RelayView:
    return RelayView(key_of(number), awaited=True)


def gone(number: int) -> RelayView:
    return RelayView(key_of(number))


def told(tree: Tree, child: bytes, role: str = "relay", *, planned: bool = True) -> list[str]:
    return [place.url for place in places(tree, child, role, ORIGIN, SECRET, planned=planned)]


def urls(child: bytes, role: str, *relays: RelayView, planned: bool = True) -> list[str]:
    return told(grow(relays), child, role, planned=planned)


def test_two_relays_are_a_chain_with_the_origin_as_the_second_ones_spare() -> None:
    one, two = relay(1), relay(2)
    assert urls(one.key, "relay", one, two) == ["http://origin"]
    assert urls(two.key, "relay", one, two) == ["http://relay-1", "http://origin"]
    assert urls(NODE, "inference", one, two) == ["http://relay-2", "http://relay-1"]
    assert urls(NODE, "validator", one, two) == ["http://relay-2", "http://relay-1", "http://origin"]


def test_more_relays_are_a_tree_with_two_below_each_and_a_second_parent_beside_the_first() -> None:
    relays = [relay(number) for number in range(1, 8)]
    found = {number: urls(key_of(number), "relay", *relays) for number in range(1, 8)}
    assert [found[number][0] for number in range(2, 8)] == [f"http://relay-{n}" for n in (1, 1, 2, 3, 2, 3)]
    assert found[3] == ["http://relay-1", "http://relay-2"], "only who has one relay before it needs the origin"
    assert all(len(found[number]) == PARENTS for number in range(3, 8))


def test_a_relay_that_sends_fast_has_a_third_child() -> None:
    relays = [relay(1, uplink=8e6), relay(2, uplink=2e6), relay(3, uplink=4e6), *map(relay, range(4, 12))]
    tree = grow(relays)
    mains = [parents[0] for parents in tree.parents.values()]
    assert [mains.count(key_of(number)) for number in (1, 2, 3)] == [3, 2, 3]


def test_the_second_parent_is_in_another_network_where_there_is_one() -> None:
    here, there = "10.0.0.0/16", "10.1.0.0/16"
    relays = [relay(1), *(relay(n, network=here) for n in (2, 3)), relay(4, network=there), relay(5)]
    tree = grow([*relays, relay(6), relay(7)])
    for child, (main, *second) in tree.parents.items():
        if child not in (key_of(2), key_of(3), key_of(4)) and main in (key_of(2), key_of(3)):
            assert second and second[0] not in (key_of(2), key_of(3))


def test_a_run_without_relays_pulls_from_the_origin() -> None:
    assert urls(NODE, "inference", planned=False) == ["http://origin"]
    assert urls(NODE, "inference", planned=True) == [], "strangers never, when there should be relays"
    assert urls(NODE, "validator", planned=True) == ["http://origin"]


def test_with_the_first_relay_gone_the_next_takes_its_place() -> None:
    assert urls(key_of(2), "relay", gone(1), relay(2)) == ["http://origin"]
    assert urls(key_of(3), "relay", gone(1), relay(2), relay(3)) == ["http://relay-2", "http://origin"]
    assert urls(NODE, "inference", gone(1), relay(2)) == ["http://relay-2"]


def test_a_relay_that_may_still_come_keeps_its_place() -> None:
    assert urls(key_of(2), "relay", awaited(1), relay(2)) == [], "it waits instead of being sent to the origin"
    assert urls(NODE, "inference", relay(1), awaited(2)) == ["http://relay-1"], "who has another parent does not wait"


def test_a_relay_that_nobody_admitted_is_a_leaf() -> None:
    assert urls(b"x" * 32, "relay", relay(1), relay(2)) == ["http://relay-2", "http://relay-1"]


def test_an_admitted_relay_to_which_nobody_can_be_sent_still_gets_the_weights() -> None:
    for others, wanted in (([relay(1)], ["http://relay-1"]), ([], ["http://origin"]), ([awaited(1)], [])):
        tree = grow([*others, gone(2)])
        found = places(tree, key_of(2), "relay", ORIGIN, SECRET, planned=True, admitted=True)
        assert [place.url for place in found] == wanted


def test_a_slow_relay_is_used_last() -> None:
    for slow in (relay(2, lag=LAGGING_STEPS), relay(2, late=True)):
        assert urls(NODE, "inference", relay(1), slow) == ["http://relay-1", "http://relay-2"]
    first_slow = [relay(1, lag=LAGGING_STEPS), relay(2), relay(3)]
    assert urls(key_of(3), "relay", *first_slow)[0] == "http://relay-2"
    assert urls(key_of(2), "relay", *first_slow) == ["http://origin"]
    assert urls(key_of(1), "relay", *first_slow)[0] == "http://relay-2", "it still gets the weights"


def test_children_of_a_relay_that_turns_slow_get_others_and_the_rest_stay() -> None:
    relays = [relay(number) for number in range(1, 16)]
    before = grow(relays)
    moved = before.below(key_of(2))
    after = grow([replace(view, late=view.key == key_of(2)) for view in relays], before)
    assert not after.below(key_of(2))
    assert {child for child in before.parents if after.parents[child] != before.parents[child]} <= {*moved, key_of(2)}


def test_children_spread_over_equal_relays_and_stay_where_they_are() -> None:
    relays = [relay(number) for number in range(1, 8)]
    first = {child: urls(bytes([child]) * 32, "inference", *relays)[0] for child in range(100, 200)}
    assert set(first.values()) == {f"http://relay-{n}" for n in (4, 5, 6, 7)}, "the leaves of the tree"
    assert first == {child: urls(bytes([child]) * 32, "inference", *relays)[0] for child in first}


# --- whatever comes and goes -----------------------------------------------------------------------------------------

networks = st.sampled_from(["", "10.0.0.0/16", "10.1.0.0/16"])
views = st.builds(
    lambda number, kind, lag, late, uplink, network: (
        relay(number, lag=lag, late=late, uplink=uplink, network=network) if kind == "here"
        else awaited(number) if kind == "awaited" else gone(number)
    ),
    st.integers(1, 20), st.sampled_from(["here", "here", "here", "awaited", "gone"]), st.sampled_from([0, 0, 0, 9]),
    st.sampled_from([False, False, False, True]), st.sampled_from([0.0, 1e6, 4e6]), networks,
)  # fmt: skip
swarms = st.lists(views, max_size=16, unique_by=lambda view: view.key)


def check(tree: Tree) -> None:
    """What holds of every plan, whatever went before."""
    standing = {view.key: number for number, view in enumerate(tree.line)}
    assert tree.parents.keys() == set(standing) - {view.key for view in tree.line[:1]}
    main: dict[bytes, int] = {}
    second: dict[bytes, int] = {}
    for child, parents in tree.parents.items():
        assert all(standing[parent] < standing[child] for parent in parents), "every parent comes before its child"
        assert len(set(parents)) == len(parents) == min(PARENTS, standing[child])
        for found, parent in zip((main, second), parents, strict=False):
            found[parent] = found.get(parent, 0) + 1
    assert max(main.values(), default=0) <= BELOW_WIDE and max(second.values(), default=0) <= SECOND_BELOW
    assert max(map(tree.depth, standing), default=0) <= len(standing).bit_length() + TOO_DEEP, "few hops"


def reached(tree: Tree, without: bytes = b"") -> set[bytes]:
    """Relays that get the weights though one relay is dead and nobody has noticed."""
    found: set[str] = {ORIGIN.url}
    out = set()
    for view in tree.line:
        if view.usable and view.key != without and found.intersection(told(tree, view.key)):
            found.add(view.url)
            out.add(view.key)
    return out


@given(swarms)
def test_no_plan_has_a_ring_and_one_dead_relay_cuts_nobody_off(relays: Sequence[RelayView]) -> None:
    tree = grow(relays)
    check(tree)
    if any(view.awaited for view in tree.line):
        return  # who waits for one that may come is told nobody, or fewer
    usable = {view.key for view in tree.line}
    for dead in usable:
        assert reached(tree, dead) == usable - {dead} or dead == tree.line[0].key
        assert reached(tree, dead) >= usable - {dead}
    at_origin = [key for key in usable if ORIGIN.url in told(tree, key)]
    assert len(at_origin) <= 2, "the origin serves two relays, however many there are"
    leaf = told(tree, NODE, "inference")
    assert ORIGIN.url not in leaf and len(set(leaf)) == len(leaf) == min(len(usable), MAX_PARENTS)


@given(st.lists(swarms, min_size=2, max_size=6))
def test_whatever_comes_and_goes_a_plan_stays_a_plan(times: Sequence[Sequence[RelayView]]) -> None:
    tree: Tree | None = None
    for relays in times:
        tree = grow(relays, tree)
        check(tree)


@given(swarms, st.integers(41, 60))
def test_who_joins_moves_nobody_and_who_leaves_only_its_children(relays: Sequence[RelayView], number: int) -> None:
    quick = [replace(view, lag=0, late=False, uplink=0.0) for view in relays]
    before = grow(quick)
    joined = grow([*quick, relay(number)], before)
    assert {key: joined.parents[key] for key in before.parents} == before.parents
    for leaver in list(joined.parents)[:3]:
        left = grow([view for view in (*quick, relay(number)) if view.key != leaver], joined)
        moved = {key for key in left.parents if left.parents[key] != joined.parents[key]}
        assert len(moved - set(joined.below(leaver))) <= BELOW_WIDE, "and few that stood too deep"
