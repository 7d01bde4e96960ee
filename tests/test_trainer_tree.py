"""Who pulls from whom: the plan as a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.tree import LAGGING_STEPS, MAX_PARENTS, Place, RelayView, plan

ORIGIN = Place(b"o" * 32, "http://origin")
SECRET = bytes(32)
NODE = b"n" * 32


def relay(number: int, *, lag: int = 0) -> RelayView:
    return RelayView(bytes([number]) * 32, f"http://relay-{number}", lag=lag)


def awaited(number: int) -> RelayView:
    return RelayView(bytes([number]) * 32, awaited=True)


def gone(number: int) -> RelayView:
    return RelayView(bytes([number]) * 32)


def urls(child: bytes, role: str, *relays: RelayView, planned: bool = True) -> list[str]:
    return [place.url for place in plan(child, role, relays, ORIGIN, SECRET, planned=planned)]


def test_two_relays_are_a_chain() -> None:
    one, two = relay(1), relay(2)
    assert urls(one.key, "relay", one, two) == ["http://origin"]
    assert urls(two.key, "relay", one, two) == ["http://relay-1"]
    assert urls(NODE, "inference", one, two) == ["http://relay-2", "http://relay-1"]
    assert urls(NODE, "validator", one, two) == ["http://relay-2", "http://relay-1", "http://origin"]


def test_more_relays_are_a_tree_with_two_below_each_and_the_way_up_as_alternatives() -> None:
    relays = [relay(number) for number in range(1, 8)]
    first = {number: urls(bytes([number]) * 32, "relay", *relays) for number in range(1, 8)}
    assert [first[number][0] for number in range(2, 8)] == [f"http://relay-{n}" for n in (1, 1, 2, 2, 3, 3)]
    assert first[6][:2] == ["http://relay-3", "http://relay-1"]


def test_a_run_without_relays_pulls_from_the_origin() -> None:
    assert urls(NODE, "inference", planned=False) == ["http://origin"]
    assert urls(NODE, "inference", planned=True) == [], "strangers never, when there should be relays"
    assert urls(NODE, "validator", planned=True) == ["http://origin"]


def test_with_the_first_relay_gone_the_next_takes_its_place() -> None:
    assert urls(relay(2).key, "relay", gone(1), relay(2)) == ["http://origin"]
    assert urls(relay(3).key, "relay", gone(1), relay(2), relay(3)) == ["http://relay-2"]
    assert urls(NODE, "inference", gone(1), relay(2)) == ["http://relay-2"]


def test_a_relay_that_may_still_come_keeps_its_place() -> None:
    assert urls(relay(2).key, "relay", awaited(1), relay(2)) == [], "it waits instead of being sent to the origin"
    assert urls(NODE, "inference", relay(1), awaited(2)) == ["http://relay-1"], "who has another parent does not wait"


def test_a_relay_that_nobody_admitted_is_a_leaf() -> None:
    assert urls(b"x" * 32, "relay", relay(1), relay(2)) == ["http://relay-2", "http://relay-1"]


def test_a_lagging_relay_is_used_last() -> None:
    slow = relay(2, lag=LAGGING_STEPS)
    assert urls(NODE, "inference", relay(1), slow) == ["http://relay-1", "http://relay-2"]
    assert urls(relay(3).key, "relay", relay(1, lag=LAGGING_STEPS), relay(2), relay(3))[0] == "http://relay-2"


def test_children_spread_over_equal_relays_and_stay_where_they_are() -> None:
    relays = [relay(number) for number in range(1, 8)]
    first = {child: urls(bytes([child]) * 32, "inference", *relays)[0] for child in range(100, 200)}
    assert set(first.values()) == {f"http://relay-{n}" for n in (4, 5, 6, 7)}, "the leaves of the tree"
    assert first == {child: urls(bytes([child]) * 32, "inference", *relays)[0] for child in first}


states = st.sampled_from([relay, awaited, gone, lambda n: relay(n, lag=9)])


@given(st.lists(states, max_size=20))
def test_no_plan_ever_has_a_ring_and_only_one_relay_reaches_the_origin(kinds) -> None:  # type: ignore[no-untyped-def]
    relays = [kind(number + 1) for number, kind in enumerate(kinds)]
    place = {view.url: number for number, view in enumerate(relays) if view.url}
    at_origin = []
    for number, view in enumerate(relays):
        parents = urls(view.key, "relay", *relays)
        assert len(parents) <= MAX_PARENTS
        if parents == ["http://origin"]:
            at_origin.append(number)
        else:
            assert all(place[url] < number for url in parents), "every parent comes before its child"
    usable = [number for number in at_origin if relays[number].url]
    assert len(usable) <= 1, "of the relays that serve, one pulls from the origin"
    leaf = urls(NODE, "inference", *relays)
    assert "http://origin" not in leaf and len(set(leaf)) == len(leaf) <= MAX_PARENTS
    assert bool(leaf) == bool(place), "whoever is there is used"
