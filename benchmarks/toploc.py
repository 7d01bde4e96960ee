"""Our bf16 proofs against the `toploc` package 0.1.6: the same bytes, the same statistics, and what each costs.

    make bench-peers                                    builds the package from its sdist into .peers/toploc; needs g++
    python -m benchmarks.toploc --json
    python -m benchmarks.toploc --vectors FILE          writes the package's answers that the tests compare with

Bytes: 1,000 chunks of 32 rows at each hidden size, of all kinds of `tests.toploc_states`, among them some that need a
modulus below 65497 wherever 32 rows can need one (not at 576: 18,432 values). Each is built by both; each other's bytes
are then checked against states moved as noise would, and by the package's choice among equals our statistics must be
its own; what our verifier says, which takes of equals those that agree best, may find fewer points off and never more.
The package's two ways of checking differ from each other: its list path forgets the modulus (what it says counts for
chunks of modulus 65497 only) and takes the mean of the middle two as median, as we do; its tensor path (C++) takes the
upper one.

Cost: CPU seconds of 1,024 tokens of normally distributed bfloat16 states, all runs interleaved on one processor, torch
on one thread. A ratio is the median over the rounds of theirs / ours. Both start from the same bfloat16 tensor. The
package's list path starts an OpenMP team for every chunk, of as many threads as there are processors: what it costs as
it comes, on all of them, is measured beside.

A missing peer is exit code 2. Not covered: the fp32 profile (the package has none), wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.contract import CouldNotRunError, Goal, at_least, run
from tests import toploc_states
from verifier import compiled, field, points, toploc

U16 = npt.NDArray[np.uint16]

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".peers" / "toploc" / "bin" / "python"
PEER_SCRIPT = ROOT / "tests" / "peers" / "toploc_peer.py"

HIDDEN = (576, 2048, 4096)
ROWS = 32
CHUNKS = 1000
AT_ONCE = 25
TOKENS = 1024
ROUNDS = 15
BUILD = {576: 1.5, 2048: 1.5, 4096: 1.0}
VERIFY_LIST = 10.0
VERIFY_TENSOR = 0.5

VECTORS = [
    ("sums", 1, 5), ("sums", 1, 96), ("bits", 7, 96), ("sums", 40, 96), ("equal", 32, 256), ("equal", 32, 257),
    ("zeros", 32, 576), ("sums", 45, 576), ("bits", 32, 2048), ("apart", 32, 2048),
    ("equal", 32, 4096), ("apart", 32, 4096),
]  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """What the package says about one chunk."""

    exponents: int
    mean: float
    median: float


class Peer:
    """The package in its own process and environment."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def about(self) -> dict[str, Any]:
        return self._ask({"op": "about"}, [])[0]

    def build(self, bits_NH: U16) -> tuple[list[bytes], float]:
        """One proof per 32 rows, and CPU seconds."""
        header, proofs = self._ask(
            {"op": "build", "rows": bits_NH.shape[0], "hidden": bits_NH.shape[1]}, [_le(bits_NH)]
        )
        return proofs, header["cpu_s"]

    def verify(self, bits_NH: U16, proofs: Sequence[bytes], path: str) -> tuple[list[Checked], float]:
        """What the `list` or the `tensor` path says of each chunk, and CPU seconds."""
        header = {"op": "verify", "path": path, "rows": bits_NH.shape[0], "hidden": bits_NH.shape[1]}
        answer, _ = self._ask(header, [_le(bits_NH), *proofs])
        return [Checked(*stats) for stats in answer["stats"]], answer["cpu_s"]

    def _ask(self, header: dict[str, Any], parts: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        text = json.dumps({**header, "sizes": [len(part) for part in parts]}).encode()
        try:
            stdin.write(struct.pack(">I", len(text)) + text + b"".join(parts))
            stdin.flush()
            answer = json.loads(stdout.read(struct.unpack(">I", stdout.read(4))[0]))
        except (OSError, struct.error) as exc:
            raise CouldNotRunError(f"the peer ended (exit {self._child.poll()}); run `make bench-peers` again") from exc
        return answer, [stdout.read(size) for size in answer["sizes"]]


@contextmanager
def peer(cpu: int | None) -> Iterator[Peer]:
    """The package, on one processor or on all we may use.

    Raises:
        CouldNotRunError: it is not installed.
    """
    if not PEER.exists():
        raise CouldNotRunError(f"no peer at {PEER.relative_to(ROOT)}; run `make bench-peers`")
    command = [str(PEER), str(PEER_SCRIPT), *([] if cpu is None else [str(cpu)])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield Peer(child)
        finally:
            assert child.stdin is not None
            child.stdin.close()
            child.wait(timeout=30)


def _le(bits: U16) -> bytes:
    return bits.astype("<u2").tobytes()


# --- bytes and statistics ------------------------------------------------------------------------------------------


def kinds(hidden: int) -> list[str]:
    """The kinds of chunks in turn. A modulus below 65497 needs values that far apart."""
    able = ROWS * hidden > toploc_states.P + 3
    return ["sums", "bits", "sums", "apart" if able else "bits", "equal", "sums", "apart" if able else "sums", "zeros"]


def compare(hidden: int, chunks: int, other: Peer) -> tuple[int, int, int]:
    """How many chunks both build to the same bytes and judge alike both ways; how many of those have a smaller modulus;
    how many there are."""
    alike = smaller = 0
    turn = kinds(hidden)
    for first in range(0, chunks, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, chunks))
        bits_NH = np.concatenate([toploc_states.bits(turn[s % len(turn)], ROWS, hidden, s) for s in seeds])
        moved_NH = toploc_states.moved(bits_NH, first)
        ours = toploc.build_proofs(toploc_states.floats(bits_NH), limbs=1)
        theirs, _ = other.build(bits_NH)
        own_NH = toploc_states.floats(moved_NH)
        of_theirs = without_sign(own_NH, theirs)
        (with_sign,) = toploc.verify_many_bf16([own_NH], [theirs])
        by_tensor, _ = other.verify(moved_NH, ours, "tensor")
        by_list, _ = other.verify(moved_NH, ours, "list")
        for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            modulus = int.from_bytes(its[:2], "big")
            # what we count beyond the package's exponents is points of another sign, which it doesn't look at
            most = by_tensor[i].exponents + of_theirs[i].signs
            same = mine == its and of_theirs[i].agrees(by_tensor[i], median=False) and with_sign[i].exponents <= most
            alike += same and (modulus < toploc_states.P or of_theirs[i].agrees(by_list[i], median=True))
            smaller += same and modulus < toploc_states.P
    return alike, smaller, chunks


@dataclass(frozen=True)
class WithoutSign:
    """One chunk's statistics by the package's rule, and how many points only our rule counts: their sign differs."""

    exponents: int
    mean: float
    median: float
    signs: int

    def agrees(self, its: Checked, median: bool) -> bool:
        near = abs(self.mean - its.mean) <= 1e-6 * max(1.0, self.mean)
        return self.exponents == its.exponents and near and (not median or self.median == its.median)


def without_sign(own_NH: npt.NDArray[np.float32], proofs: Sequence[bytes]) -> list[WithoutSign]:
    """The statistics again, point by point from our own polynomials, blind to signs as the package is."""
    found = [WithoutSign(0, 0.0, 0.0, 0)] * len(proofs)
    for group in points.largest([own_NH], 1):
        for (_, chunk), index_K, own_K in zip(group.where, group.index_CK, group.bits_CK, strict=True):
            modulus, coefficients = toploc.parse_proof(proofs[chunk], len(own_NH[:ROWS]) * own_NH.shape[1], limbs=1)
            claimed = field.evaluate(coefficients[None].astype(np.float64), index_K[None] % modulus)
            claimed_K = claimed[0, 0].astype(np.uint32)
            same_K = (own_K ^ claimed_K) & 0x7F80 == 0
            signs = int((same_K & ((own_K ^ claimed_K) & 0x8000 != 0) & ((own_K | claimed_K) & 0x7FFF != 0)).sum())
            apart = np.abs((own_K & 127).astype(int) - (claimed_K & 127).astype(int))[same_K].tolist()
            mean = statistics.mean(apart) if apart else 2.0**64
            median = statistics.median(apart) if apart else 2.0**64
            found[chunk] = WithoutSign(int((~same_K).sum()), mean, median, signs)
    return found


# --- cost ----------------------------------------------------------------------------------------------------------


def cost(hidden: int, rounds: int, pinned: Peer, as_it_comes: Peer) -> dict[str, list[float]]:
    """Ratios of CPU seconds theirs / ours, one per round."""
    states_NH = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(hidden)).to(torch.bfloat16)
    bits_NH: U16 = states_NH.view(torch.int16).numpy().view(np.uint16)
    proofs = toploc.build_proofs(bits_NH, limbs=1)
    ratios: dict[str, list[float]] = {"build": [], "list": [], "list, as it comes": [], "tensor": []}
    for turn in range(rounds + 1):
        build_s = cpu(lambda: toploc.build_proofs(bits_NH, limbs=1))
        its_build_s = pinned.build(bits_NH)[1]
        verify_s = cpu(lambda: toploc.verify_many_bf16([bits_NH], [proofs]))
        its_s = {
            "tensor": pinned.verify(bits_NH, proofs, "tensor")[1],
            "list": pinned.verify(bits_NH, proofs, "list")[1],
            "list, as it comes": as_it_comes.verify(bits_NH, proofs, "list")[1],
        }
        if turn:  # the first warms both up
            ratios["build"].append(its_build_s / build_s)
            for path, seconds in its_s.items():
                ratios[path].append(seconds / verify_s)
    return ratios


def cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# --- the command ---------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[Goal]:
    torch.set_num_threads(1)
    if not compiled.load():  # as in a process that has judged a few rollouts of a real model (`verifier.compiled`)
        raise CouldNotRunError("inner loops can't be compiled here; the log says why (HEADWATER_COMPILED, numba)")
    if args.vectors:
        write_vectors(Path(args.vectors))
        return []
    goals = []
    everywhere = os.sched_getaffinity(0)
    one = min(everywhere)
    with peer(None) as as_it_comes, peer(one) as pinned:
        about = pinned.about()
        for hidden in HIDDEN:
            alike, smaller, of = compare(hidden, args.chunks, pinned)
            goal = f"chunks of {of} at H = {hidden} built and judged alike by toploc {about['toploc']}"
            goals.append(at_least(f"{goal} ({smaller} of a modulus below 65497)", of, alike, [alike]))
        os.sched_setaffinity(0, {one})
        try:
            for hidden in HIDDEN:
                ratios = cost(hidden, args.rounds, pinned, as_it_comes)
                goals += [
                    speed(f"build at H = {hidden}", BUILD[hidden], ratios["build"]),
                    speed(
                        f"verify at H = {hidden}, its list path as it comes", VERIFY_LIST, ratios["list, as it comes"]
                    ),
                    speed(f"verify at H = {hidden}, its list path on one processor", 1.0, ratios["list"]),
                    speed(f"verify at H = {hidden}, its C++ path", VERIFY_TENSOR, ratios["tensor"]),
                ]
        finally:
            os.sched_setaffinity(0, everywhere)
    return goals


def speed(what: str, target: float, ratios: Sequence[float]) -> Goal:
    return at_least(f"CPU of {what}, theirs / ours", target, statistics.median(ratios), ratios)


def write_vectors(path: Path) -> None:
    """The package's bytes and statistics for `VECTORS`, one line each."""
    lines = []
    with peer(min(os.sched_getaffinity(0))) as other:
        about = other.about()
        for seed, (kind, rows, hidden) in enumerate(VECTORS):
            bits_NH = toploc_states.bits(kind, rows, hidden, seed)
            proofs, _ = other.build(bits_NH)
            moved_NH = toploc_states.moved(bits_NH, seed)
            stats, _ = other.verify(moved_NH, proofs, "tensor")
            vector = {"kind": kind, "rows": rows, "hidden": hidden, "seed": seed, "proofs": [p.hex() for p in proofs]}
            lines.append(json.dumps({**vector, "moved": [[s.exponents, s.mean] for s in stats]}))
    made_by = json.dumps(f"toploc {about['toploc']} built from its sdist with torch {about['torch']}")
    path.write_text(f'{{"made_by": {made_by}, "vectors": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="chunks compared at each hidden size")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds of the cost")
    parser.add_argument(
        "--vectors", metavar="FILE", help="write the vectors that the tests compare with, and measure nothing"
    )


if __name__ == "__main__":
    sys.exit(run(measure, "Our bf16 proofs against the toploc package.", arguments))
