"""The benchmark of the weights tree measures what it says: peers that must be there, an ideal that is one, bytes that
are compared, and all its parts at a small size."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import contract, shardcast_peers, shardcast_rig
from benchmarks import shardcast as benchmark
from protocol.limits import MIB

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def measured(part: str, monkeypatch: pytest.MonkeyPatch, out: Path) -> dict[str, contract.Goal]:
    """The goals of one part at 16 MiB, by their words, as the command finds them."""
    goals: list[contract.Goal] = []
    for module in (benchmark, shardcast_peers):
        monkeypatch.setattr(module, "DELIVERY_S", 60.0)

    def measure(args: argparse.Namespace) -> list[contract.Goal]:
        goals.extend(benchmark.measure(args))
        return goals

    argv = ["benchmark", "--json", "--part", part, "--mib", "16", "--repeat", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert contract.run(measure, "", benchmark._arguments) in (0, 1)
    return {goal.goal: goal for goal in goals}


def test_a_missing_peer_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(shardcast_peers, "PEERS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", "--part", "tree"])
    assert contract.run(benchmark.measure, "", benchmark._arguments) == 2
    assert "make bench-peers" in capsys.readouterr().err


def test_an_unknown_part_is_no_run_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--part", "treee"])
    assert contract.run(benchmark.measure, "", benchmark._arguments) == 2


def test_the_fluid_ideal_counts_no_corrupt_relay_and_loses_another_at_the_kill() -> None:
    # 2048 MB from seven relays of 10 MB/s until 512 MB are there, from six afterwards
    assert benchmark.fluid_ideal_s(2048e6, 0.25, 10e6) == pytest.approx(512 / 70 + 1536 / 60)
    assert benchmark.fluid_ideal_s(700e6, 1.0, 10e6) == pytest.approx(10.0)


def test_other_bytes_are_no_delivery(tmp_path: Path) -> None:
    weights = shardcast_rig.make_weights(tmp_path / "weights", 1)
    assert weights.file.stat().st_size > MIB
    copy = tmp_path / "copy"
    data = bytearray(weights.file.read_bytes())
    copy.write_bytes(data)
    shardcast_peers.check_files("a peer", [str(copy)], weights)
    data[-1] ^= 1
    copy.write_bytes(data)
    with pytest.raises(contract.CouldNotRunError, match="a peer delivered other bytes"):
        shardcast_peers.check_files("a peer", [str(copy)], weights)


def test_a_corrupt_relay_changes_each_stored_shard_and_nothing_small(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(MIB))
    (tmp_path / "records").write_bytes(bytes(100))
    assert benchmark.corrupt(tmp_path) == 1
    assert sum((tmp_path / "shard").read_bytes()) == 1
    assert not any((tmp_path / "records").read_bytes())


@pytest.mark.heavy
@pytest.mark.skipif(not (shardcast_peers.PEERS / "libtorrent").exists(), reason="needs make bench-peers")
def test_the_tree_beside_its_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    goals = measured("tree", monkeypatch, tmp_path / "out.json")
    assert len(goals) == 5 and all(goal.measured > 0 for goal in goals.values())
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]["tree"]
    assert rows.keys() == {"ours", "shardcast", "nginx", "libtorrent"}
    assert all(sum(row["cpu"].values()) > 0 for each in rows.values() for row in each)


@pytest.mark.heavy
@AS_ROOT
def test_a_chain_of_limited_links_takes_at_least_what_one_link_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert len(measured("chain", monkeypatch, tmp_path / "out.json")) == 2
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]["chain"]
    for hops in ("1", "4"):
        assert rows[hops][0][0] > 0.6 * 16 * MIB / 60e6, "the token bucket holds back nothing"


@pytest.mark.heavy
@AS_ROOT
def test_with_bad_relays_nothing_wrong_is_seen_and_nobody_honest_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goals = measured("relays", monkeypatch, tmp_path / "out.json")
    assert goals["shards with wrong bytes that a child was given"].holds
    assert goals["honest relays blamed"].holds
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]["relays"]["runs"]
    assert row["guilty_named"], "the corrupt relay served nobody: the measurement lacks what it is about"


@pytest.mark.heavy
def test_memory_is_measured_while_shards_travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    goals = measured("memory", monkeypatch, tmp_path / "out.json")
    assert len(goals) == 4
    assert all(10 < goal.measured < 100 for goal in goals.values())
