"""Compiled inner loops: when they are used, what happens where they can't be, and that no number depends on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig import Rig, anything
from environments.registry import make
from protocol.records import Lease, Submission
from verifier import compiled, field, kernels, toploc
from verifier.errors import ProofError
from verifier.judge import Judgement
from verifier.profiles import load_to_sample, load_to_verify
from verifier.sampling import replayed_margins

TINY = Path(__file__).parent.parent / "trainer" / "data" / "tiny"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has made no noise yet."""
    monkeypatch.setattr(compiled, "_off", False)
    monkeypatch.setattr(compiled, "_made", 0)


def by_numpy(action: Callable[[], Any]) -> Any:
    compiled._off = True
    try:
        return action()
    finally:
        compiled._off = False


def by_loops(action: Callable[[], Any]) -> Any:
    assert compiled.load(), "the test environment has numba"
    return action()


def test_nothing_is_compiled_before_it_pays_nor_where_numba_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_ready", {})
    assert compiled.loop("philox_rows", compiled.PAYS_FROM - 1) is None
    assert compiled.loop("polynomials") is None
    monkeypatch.setitem(sys.modules, "verifier.kernels", None)  # as on a machine without numba
    monkeypatch.delattr("verifier.kernels", raising=False)
    assert not caplog.records
    for name in (*kernels.LOOPS, *kernels.LOOPS):
        assert compiled.loop(name, 1) is None
    assert caplog.text.count("nothing is compiled here") == 1


def no_numba_knows(*arguments: Any) -> None:
    raise json.JSONDecodeError(*arguments)


ALL_LOOPS = """
import resource
from pathlib import Path
import numpy
from verifier import compiled
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
most = used + (compiled.MEMORY_MIB << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
raise SystemExit(0 if compiled.load() else 1)
"""


@pytest.mark.heavy
def test_loops_are_compiled_in_the_memory_that_is_counted_for_them() -> None:
    """As `trainer.spot_worker` bounds it; 10 s of CPU."""
    subprocess.run([sys.executable, "-c", ALL_LOOPS], check=True, cwd=TINY.parents[2], timeout=120)


@pytest.fixture(scope="module")
def submission() -> tuple[Rig, Lease, Submission]:
    """A bf16 submission of the tiny model with one rollout of somebody else's tokens."""
    torch.set_num_threads(1)
    rig = Rig("test", "bf16", make("word"), load_to_verify(TINY, "bf16"), anything("test"), cap=40, stop=(), tasks=2)
    lease = rig.lease(0)
    made = rig.answer(lease, load_to_sample(TINY, "bf16").model)
    strange = replace(made.rollouts[0], tokens=made.rollouts[9].tokens)
    return rig, lease, replace(made, rollouts=(strange, *made.rollouts[1:]))


def judged(submission: tuple[Rig, Lease, Submission]) -> Judgement:
    rig, lease, made = submission
    return rig.judge(lease, made)


def test_a_verdict_has_the_same_numbers_whoever_made_them(submission: tuple[Rig, Lease, Submission]) -> None:
    expected = by_numpy(lambda: judged(submission))
    assert by_loops(lambda: judged(submission)) == expected
    assert any(number.value > 0 for detail in expected.details for number in detail.numbers)


@pytest.mark.parametrize("name", ["decisive", "bf16_chunks"])
def test_a_loop_that_cannot_be_compiled_ends_no_judgement(
    name: str,
    submission: tuple[Rig, Lease, Submission],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = by_numpy(lambda: judged(submission))
    compiled.load()
    monkeypatch.delitem(compiled._ready, name)
    monkeypatch.setitem(kernels.LOOPS, name, (no_numba_knows, kernels.LOOPS[name][1]))
    for _ in range(2):
        assert judged(submission) == expected
    assert caplog.text.count("isn't compiled here") == 1 and name in caplog.text


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 5, 32, 33, 64, 70]),
    hidden=st.sampled_from([1, 3, 64, 100, 576, 2048]),
    levels=st.sampled_from([1, 2, 40, 400, 65_536]),
    moved=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_statistics_do_not_depend_on_who_counts(rows: int, hidden: int, levels: int, moved: float, seed: int) -> None:
    """From states without ties to states of one value, of which a chunk has more than a uint16 counts."""
    rng = np.random.default_rng(seed)
    words = rng.choice(rng.permutation(1 << 16)[:levels], (rows, hidden)).astype(np.uint16)
    states = np.where(words & 0x7F80 == 0x7F80, words ^ 0x4000, words).astype(np.uint16)
    proofs = toploc.build_proofs(states, limbs=1)
    near = rng.random(states.shape) < moved
    own = np.where(near, states ^ rng.integers(0, 128, states.shape).astype(np.uint16), states)
    others = [own, (own.astype(np.uint32) << 16).view(np.float32)]
    expected = by_numpy(lambda: toploc.verify_many_bf16(others, [proofs, proofs]))
    assert by_loops(lambda: toploc.verify_many_bf16(others, [proofs, proofs])) == expected
    assert expected[0] == expected[1] and (moved or expected[0][0].exponents == 0)


def test_bytes_that_are_no_proof_are_refused_whoever_reads_them() -> None:
    states = np.random.default_rng(0).integers(0, 0x7F00, (33, 96)).astype(np.uint16)
    proofs = toploc.build_proofs(states, limbs=1)
    last = proofs[1]
    infinite = states.copy()
    infinite[32, 5] = 0x7F80
    wrong = {
        "bytes": [(states, [proofs[0], last[:-2]]), (states, [proofs[0] + bytes(2), last[2:]])],
        "modulus": [(states, [proofs[0], bytes(2) + last[2:]]), (states, [b"\xff\xff" + proofs[0][2:], last])],
        "coefficient": [(states, [proofs[0], last[:-2] + b"\xff\xd9"])],
        "finite": [(infinite, proofs)],
        "proof chunks": [(states, proofs[:1])],
    }
    for word, cases in wrong.items():
        for own, chunks in cases:
            for way in (by_numpy, by_loops):
                with pytest.raises(ProofError, match=word):
                    way(lambda own=own, chunks=chunks: toploc.verify_many_bf16([states, own], [proofs, chunks]))


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.integers(1, 3),
    limbs=st.integers(1, 2),
    count=st.integers(1, 128),
    places=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_polynomials_have_the_same_values_whoever_evaluates(
    chunks: int, limbs: int, count: int, places: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    most = seed % 2 * 65_495  # every other time all elements are the largest two
    coefficients = rng.integers(most, 65_497, (chunks, limbs, count)).astype(np.float64)
    x = rng.integers(most, 65_497, (chunks, places))
    values = by_numpy(lambda: field.evaluate(coefficients, x))
    assert np.array_equal(by_loops(lambda: field.evaluate(coefficients, x)), values)
    plain = sum(int(c) * pow(int(x[-1, -1]), k, 65_497) for k, c in enumerate(coefficients[-1, -1].tolist()))
    assert values[-1, -1, -1] == plain % 65_497


def test_a_claim_of_nothing_likely_is_measured_in_pieces() -> None:
    """All values of a row pass, and there is room for one row and a little more."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((5, 5000), dtype=np.float32))
    logits[:, 17] = -300.0
    seeds, positions, tokens = [rng.bytes(32) for _ in range(5)], np.arange(5), torch.full((5,), 17)
    expected = by_numpy(lambda: replayed_margins(logits, 1.0, seeds, positions, tokens))
    assert torch.equal(by_loops(lambda: replayed_margins(logits, 1.0, seeds, positions, tokens)), expected)
    assert bool((expected > 290).all())
