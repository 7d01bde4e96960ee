"""The benchmark of codecs measures what it says: bounds that hold, a peer that must be there, goals that can be
missed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import codec as benchmark
from benchmarks import contract
from benchmarks.codec_streams import Pair, read_pair
from benchmarks.codec_streams import _save as save
from tests.codec_shards import learned


def pair(items: int, rate: float, seed: int = 1) -> Pair:
    return Pair("made", *(np.frombuffer(side, dtype=np.uint16) for side in learned(items, rate, seed)))


def test_a_missing_peer_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "PEER", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json"])
    assert contract.run(benchmark.measure, "", benchmark._arguments) == 2
    assert "make bench-peers" in capsys.readouterr().err


def test_bounds_are_those_of_coins_and_symbols() -> None:
    old = np.repeat(np.array([0x3F80, 0x3C00], dtype=np.uint16), 1000)
    new = old.copy()
    new[:500] += 1  # half of the first exponent's items, all by one
    iid, split = benchmark.bounds(Pair("coin", old, new))
    assert iid == pytest.approx(2000 * 0.8112781 / 8)
    assert split == pytest.approx(1000 / 8)
    new[:500:2] -= 2  # half of them the other way: a bit for each
    assert benchmark.bounds(Pair("coin", old, new))[1] == pytest.approx((1000 + 500) / 8)


def test_codecs_are_above_the_bounds_and_below_what_pulse_sends() -> None:
    row = benchmark.measure_pair(pair(1 << 20, 1e-6), rounds=1)
    assert 0.98 * row.iid < row.share["gaps"] < 1.1 * row.iid < row.share["pulse"]
    assert row.by_exponent < row.share["classes"] < row.share["gaps"]
    assert {len(each) for each in row.speed.values()} == {1}


def test_goals_are_missed_by_a_worse_codec() -> None:
    def row(name: str, worse: float) -> benchmark.Row:
        names = [f"{c} {e} {w}" for c in ("gaps", "classes") for e in ("numba", "numpy") for w in ("encode", "decode")]
        names += [f"{one} {w}" for one in ("anchor numba", "zipnn") for w in ("encode", "decode")]
        share = {"gaps": 0.0015 * worse, "classes": 0.001 * worse, "pulse": 0.0032, "anchor": 0.66 * worse}
        speed = {one: [(1.0 if one.startswith("zipnn") else 3.0) / worse] for one in names}
        return benchmark.Row(name, 0.002, 0.9, 0.0015, 0.001, share, speed)

    for worse, held in ((1.0, True), (30.0, False)):
        rows = {rate: [row("lm", worse)] for rate in (1e-6, 5e-6, 1e-5, 1e-4)}
        found = benchmark.goals(rows, row("grpo", worse), row("anchor", worse))
        assert len(found) == 22
        assert [goal.holds for goal in found if "times zipnn" not in goal.goal] == [held] * 20


def test_a_kept_pair_is_the_pair(tmp_path: Path) -> None:
    made = pair(5000, 1e-3)
    save(tmp_path / "1e-06-10.npz", made.old_N, made.new_N)
    back = read_pair(tmp_path / "1e-06-10.npz")
    assert (back.old_N == made.old_N).all() and (back.new_N == made.new_N).all()
    assert [path.name for path in tmp_path.iterdir()] == ["1e-06-10.npz"]
