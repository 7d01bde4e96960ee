"""The schedule of a download with simulated sources and time: it ends, fairly, whatever sources do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.limits import SHARD_BYTES
from shardcast.schedule import SPARE_AFTER_S
from tests.simulated_download import Peer, Simulation, bound_s

BAD = ("dead", "silent", "missing", "stalls", "lies", "forges", "trickles", "vanishes")
SIZES = (13_000, 1_300_000, SHARD_BYTES)


@st.composite
def swarms(draw: st.DrawFn) -> tuple[list[Peer], int, int, int]:
    """Planned sources of every kind, one honest one among them or as the spare, maybe at a new address later."""
    bad = draw(st.lists(st.sampled_from(BAD), min_size=0, max_size=5))
    peers = [
        Peer(
            f"bad-{number}",
            kind,
            rate=draw(st.sampled_from((2e5, 5e6, 1e8))),
            until=draw(st.floats(0, 5)),
            named=(0.0, draw(st.sampled_from((1e9, 1e9, 3.0)))),
        )
        for number, kind in enumerate(bad)
    ]
    appears = draw(st.sampled_from((0.0, 0.0, 4.0))) if peers else 0.0
    spare = draw(st.booleans()) and bool(peers)
    honest = Peer("honest", rate=draw(st.sampled_from((1e6, 2e7, 1e9))), spare=spare, named=(appears, 1e9))
    at = draw(st.integers(0, len(peers)))
    peers.insert(at, honest)
    if peers[0].named[0] > 0:
        peers.append(peers.pop(0))
    return peers, draw(st.integers(1, 40)), draw(st.sampled_from(SIZES)), draw(st.integers(0, 1000))


@settings(max_examples=400, deadline=None)
@given(swarms())
def test_a_download_ends_if_one_source_is_honest_and_alive(swarm: tuple[list[Peer], int, int, int]) -> None:
    peers, shards, size, seed = swarm
    simulation = Simulation(peers, shards, size, seed)
    honest = simulation.peers["honest"]
    simulation.run(bound_s(shards, size, honest.rate, honest.named[0]))
    assert "honest" not in simulation.charged and not honest.health.lied
    assert simulation.schedule.bytes_twice <= max(0.1 * shards * size, SHARD_BYTES)


@pytest.mark.parametrize("kind", ["dead", "silent", "missing", "stalls", "trickles"])
def test_a_spare_is_asked_two_seconds_after_planned_ones_brought_nothing(kind: str) -> None:
    """Whatever is being tried meanwhile: the clock does not begin again with each attempt."""
    peers = [Peer("parent", kind), Peer("origin", spare=True)]
    simulation = Simulation(peers, 1, 1_300_000, seed=1)
    assert simulation.run(10) < SPARE_AFTER_S + 1
    assert simulation.first_spare is not None and simulation.first_spare - 100 >= SPARE_AFTER_S


def test_a_spare_is_asked_at_once_when_every_planned_one_sent_something_wrong() -> None:
    simulation = Simulation([Peer("parent", "lies"), Peer("origin", spare=True)], 1, 1_300_000, seed=1)
    assert simulation.run(10) < SPARE_AFTER_S
    assert simulation.charged == {"parent"}


def test_a_spare_is_left_alone_while_planned_ones_deliver() -> None:
    peers = [Peer("parent", rate=3e6), Peer("origin", rate=1e9, spare=True)]
    simulation = Simulation(peers, 20, SHARD_BYTES, seed=1)
    simulation.peers["parent"].health.worked(3_000_000, 1.0)  # known to be slow
    simulation.run(100)
    assert simulation.first_spare is None


def test_several_sources_share_a_download_by_what_they_deliver() -> None:
    peers = [Peer("slow", rate=1e7), Peer("fast", rate=3e7), Peer("other", rate=2e7)]
    simulation = Simulation(peers, 64, SHARD_BYTES, seed=1)
    ideal = 64 * SHARD_BYTES / 6e7
    assert simulation.run(100) < 1.15 * ideal


def test_the_last_shard_of_a_slow_source_is_got_elsewhere() -> None:
    peers = [Peer("fast", rate=5e7), Peer("trickle", "trickles")]
    simulation = Simulation(peers, 16, SHARD_BYTES, seed=3)
    assert simulation.run(100) < 1.5 * 16 * SHARD_BYTES / 5e7 + 1
    assert simulation.schedule.bytes_twice <= max(0.1 * 16 * SHARD_BYTES, SHARD_BYTES)
    assert simulation.charged == set(), "slow is no offence"


def test_one_corrupt_and_one_that_dies_of_eight_cost_little() -> None:
    peers = [Peer(f"relay-{n}", rate=1e7) for n in range(8)]
    peers[0].kind = "lies"
    peers[1].kind, peers[1].until = "vanishes", 2.0
    simulation = Simulation(peers, 64, SHARD_BYTES, seed=5)
    before = 2.0 * 7e7  # what seven bring until one is gone
    ideal = 2.0 + (64 * SHARD_BYTES - before) / 6e7
    assert simulation.run(100) < 1.3 * ideal
    assert simulation.charged == {"relay-0", "relay-1"}
