"""The comparison with the `toploc` package cannot pass without the package, nor when it says something else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import contract
from benchmarks import toploc as benchmark
from tests import toploc_states
from verifier import toploc


def test_a_missing_peer_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "PEER", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json"])
    assert contract.run(benchmark.measure, "", benchmark.arguments) == 2
    assert "make bench-peers" in capsys.readouterr().err


class Stub(benchmark.Peer):
    """A package that builds and judges as we do, but for what `wrong` changes: what a comparison has to notice."""

    def __init__(self, wrong: str) -> None:
        self._wrong = wrong

    def build(self, bits_NH: np.ndarray) -> tuple[list[bytes], float]:
        proofs = toploc.build_proofs(toploc_states.floats(bits_NH), limbs=1)
        if self._wrong == "bytes":
            proofs[3] = proofs[3][:-1] + bytes([proofs[3][-1] ^ 1])
        return proofs, 0.0

    def verify(self, bits_NH: np.ndarray, proofs: Sequence[bytes], path: str) -> tuple[list[benchmark.Checked], float]:
        stats = benchmark.without_sign(toploc_states.floats(bits_NH), proofs)
        off = [(path == self._wrong) and i in (2, 5) for i in range(len(stats))]
        return [benchmark.Checked(s.exponents + o, s.mean, s.median) for s, o in zip(stats, off, strict=True)], 0.0


@pytest.mark.parametrize(("wrong", "alike"), [("", 8), ("bytes", 7), ("tensor", 6), ("list", 6)])
def test_each_difference_is_counted_against_the_chunks_alike(wrong: str, alike: int) -> None:
    """What the list path says of a chunk of smaller modulus does not count: at 576 there is none."""
    assert benchmark.compare(576, 8, Stub(wrong)) == (alike, 0, 8)
