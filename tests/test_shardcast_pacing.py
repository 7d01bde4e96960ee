"""When a node looks for news: by what it measured of its own leases and pulls, on a clock that the tests turn."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from shardcast.pacing import ENOUGH, Pacing
from shardcast.puller import Puller
from tests.shardcast_run import SMALL_SHAPES, WAIT_S, MadeRun, holds, make_run, publishing, relaying, until
from tests.shardcast_run import write_checkpoint as write

ROLLOUTS = 128


@pytest.fixture
def small(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", SMALL_SHAPES)


class Node:
    """A node whose leases, pulls and policies take given times; `pulled` is what it fetched, in order.

    Policy n is published at n * `every`. A lease names the newest policy; the next one is given `wait` after the last
    ended. While the node may look for news it fetches the newest policy it lacks.
    """

    TICK = 0.25

    def __init__(self, *, lease: float, pull: float, every: float, wait: float = 0.0) -> None:
        self.lease, self.pull, self.every, self.wait = lease, pull, every, wait
        self.pacing = Pacing()
        self.now = 0.0
        self.pulled: list[int] = [0]
        self._pulling: tuple[int, float] | None = None
        self.engine_waited: list[float] = []
        """Seconds between each lease and its weights."""
        self.by_name = 0

    @property
    def newest(self) -> int:
        return int(self.now / self.every)

    def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += self.TICK
            if self._pulling is not None and self.now >= self._pulling[1]:
                self.pulled.append(self._pulling[0])
                self._pulling = None
                self.pacing.pulled(self.pull)
            if self._pulling is None and self.newest > self.pulled[-1] and not self.pacing.hold_s(self.now):
                self._pulling = (self.newest, self.now + self.pull)

    def works(self, leases: int) -> None:
        for _ in range(leases):
            # The lease names what is newest and here, or at least begun: as a coordinator that hears of our policies.
            step = self._pulling[0] if self._pulling is not None else self.newest
            given = self.now
            self.pacing.leased(self.now, 0, step, ROLLOUTS)
            if self._pulling is None and step > self.pulled[-1]:
                self.by_name += 1
                self._pulling = (step, self.now + self.pull)
            while step > self.pulled[-1]:
                self.passes(self.TICK)
            self.engine_waited.append(self.now - given)
            self.pacing.loaded(self.now)
            self.passes(self.lease)
            self.pacing.ended(self.now, done=True)
            self.passes(self.wait)


def test_with_nothing_measured_news_are_looked_for_all_the_time() -> None:
    pacing = Pacing()
    assert pacing.hold_s(0.0) == 0.0
    pacing.leased(0.0, 0, 0, ROLLOUTS)
    assert pacing.hold_s(1.0) == 0.0


@pytest.mark.parametrize(("pull", "most"), [(10.0, 2.0), (2.0, 1.3)])
def test_a_lease_of_several_steps_fetches_the_newest_policy_and_has_it_when_it_ends(pull: float, most: float) -> None:
    """A second one only if it was published within the last pulls of the lease: the next lease may name it."""
    node = Node(lease=60.0, pull=pull, every=15.0)
    node.works(ENOUGH + 1)
    before, published = len(node.pulled), node.newest
    node.works(20)
    assert node.newest - published >= 80
    assert 20 <= len(node.pulled) - before <= 20 * most
    for_new_ones = [waited for waited in node.engine_waited[ENOUGH + 2 :] if waited > 0]
    assert all(waited <= pull for waited in for_new_ones)
    assert node.by_name == 0, "whenever a lease came, the policy it names was here or on its way"
    # What is fetched is what is newest when the pull begins, which is shortly before the lease's end.
    pacing = node.pacing
    pacing.leased(node.now, 0, node.newest, ROLLOUTS)
    pacing.loaded(node.now)
    assert 60 - 1.5 * pull - 2 < pacing.hold_s(node.now) <= 60 - 1.5 * pull
    assert pacing.hold_s(node.now + 60 - 1.5 * pull) == 0.0


def test_leases_shorter_than_a_step_look_for_news_all_the_time() -> None:
    """A pull as long as the lease, and a policy a lease: there is nothing to save."""
    node = Node(lease=4.0, pull=4.0, every=8.0, wait=4.0)
    node.works(3 * ENOUGH)
    for _ in range(16):
        assert node.pacing.hold_s(node.now) == 0.0
        node.passes(0.25)
    assert node.pulled == list(range(node.pulled[-1] + 1)), "every policy was fetched"


def test_a_node_that_gets_a_lease_of_every_policy_pulls_while_it_waits() -> None:
    """A run that waits for its learner: idle time alone is no reason to come late."""
    node = Node(lease=5.0, pull=4.0, every=60.0, wait=55.0)
    node.works(3 * ENOUGH)
    assert node.pacing.hold_s(node.now) == 0.0
    assert node.by_name <= 1


def test_a_superfluous_node_fetches_what_its_leases_name_and_nothing_else() -> None:
    node = Node(lease=20.0, pull=2.0, every=20.0, wait=60.0)
    node.works(3 * ENOUGH)
    assert node.pacing.hold_s(node.now) == math.inf
    before, named = len(node.pulled), node.by_name
    node.works(10)
    assert len(node.pulled) - before == node.by_name - named == 10
    # Once others leave and it is needed for every policy it pulls ahead again.
    node.wait = 0.0
    node.works(40)
    assert node.pacing.hold_s(node.now) < math.inf


def test_a_node_that_is_left_out_pulls_nothing_until_it_has_a_lease_again() -> None:
    node = Node(lease=5.0, pull=4.0, every=60.0, wait=55.0)
    node.works(3 * ENOUGH)
    node.passes(3600.0)
    assert node.pacing.hold_s(node.now) == math.inf
    assert node.newest - node.pulled[-1] > 40
    node.works(2)
    assert node.pacing.hold_s(node.now) == 0.0, "one long wait is no rule"


def test_a_thin_line_never_comes_later_for_the_sake_of_its_bytes() -> None:
    node = Node(lease=20.0, pull=12.0, every=20.0, wait=60.0)
    node.works(3 * ENOUGH)
    assert node.pacing.hold_s(node.now) == 0.0


def test_a_lease_given_back_teaches_nothing_about_how_long_leases_take() -> None:
    pacing = Pacing()
    for number in range(3 * ENOUGH):
        pacing.pulled(1.0)
        pacing.leased(100.0 * number, 0, number, ROLLOUTS)
        pacing.ended(100.0 * number + 50, done=False)
    pacing.leased(2400.0, 0, 24, ROLLOUTS)
    assert pacing.hold_s(2400.0) == 0.0


class Held(Pacing):
    """Holds while the test says so."""

    hold = 0.0

    def hold_s(self, now: float) -> float:
        return self.hold


async def test_news_are_held_and_then_the_newest_comes_alone(small: MadeRun, tmp_path: Path) -> None:
    pacing = Held()
    async with publishing(small) as origin:
        puller = Puller(small.run, lambda: [origin.server.url], tmp_path / "a", pacing=pacing)
        task = asyncio.create_task(puller.run_forever())
        try:
            write(small.directory, 0, 0, SMALL_SHAPES, seed=0)
            await puller.wait_newer(None, WAIT_S)
            assert pacing.pull.samples == 1 and 0 < pacing.pull.value < WAIT_S
            pacing.hold = 60.0
            for step in (1, 2, 3):
                write(small.directory, 0, step, SMALL_SHAPES, seed=step)
                await until(lambda step=step: origin.store.keys[-1] == (0, step), "the publication")  # type: ignore[misc]
            await asyncio.sleep(0.3)
            assert puller.current is not None and puller.current.key == (0, 0), "nobody has use for more"
            received = puller.bytes_received
            # What a lease names is fetched all the same.
            root = next(head.root for _, head in heads(origin.store.root, small) if head.step == 1)
            assert (await puller.fetch(0, 1, root, WAIT_S)).key == (0, 1)
            pacing.hold = 0.0
            assert holds(await puller.wait_newer((0, 1), WAIT_S), SMALL_SHAPES, seed=3)
            assert puller.bytes_received == 3 * received, "the superseded one was never asked for"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_hold_is_bounded_so_that_heads_are_seen(
    small: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.follower.HOLD_MAX_S", 0.3)
    pacing = Held()
    pacing.hold = math.inf
    write(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with publishing(small) as origin:
        puller = Puller(small.run, lambda: [origin.server.url], tmp_path / "a", pacing=pacing)
        task = asyncio.create_task(puller.run_forever())
        assert holds(await puller.wait_newer(None, WAIT_S), SMALL_SHAPES, seed=0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_lease_that_is_here_before_its_policy_finds_it_at_the_relay(small: MadeRun, tmp_path: Path) -> None:
    """The coordinator hears of a head before the relays hold it."""
    write(small.directory, 0, 0, SMALL_SHAPES, seed=0)
    async with (
        publishing(small) as origin,
        relaying(small, [origin.server.url], tmp_path / "relay") as relay,
    ):
        await until(lambda: relay.store.keys == [(0, 0)], "the first policy at the relay")
        puller = Puller(small.run, lambda: [relay.url], tmp_path / "a")
        root = root_at(write(small.directory, 0, 1, SMALL_SHAPES, seed=1) / "model.safetensors")
        policy = await puller.fetch(0, 1, root, WAIT_S)
        assert holds(policy, SMALL_SHAPES, seed=1)
        assert puller.problems == {}, "the relay had it wait instead of refusing"
        await puller.close()


def root_at(path: Path) -> bytes:
    from shardcast.layout import root_of_safetensors

    return root_of_safetensors(path)


def heads(root: Path, made: MadeRun):  # type: ignore[no-untyped-def]
    from shardcast.store import published_heads

    return published_heads(root, made.run)
