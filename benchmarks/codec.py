"""What travels of a step's weights, how near that is to what can be had, and what coding it costs.

    make bench-peers                                    zipnn 0.5.4 in .peers/zipnn
    python -m benchmarks.codec --json [--rounds 5] [--cache DIR] [--out FILE]

Weights: two steps of an LM stream at four learning rates and one recorded policy-gradient step (`codec_streams`; making
them takes minutes once), all SmolLM2-135M in bfloat16, 269 MB, coded shard by shard. And some steps of the demo's model
in float32, in which everything changes.

Bounds, computed from the same weights. iid: N H(p) + K H(v) bits, for K = p N changed items of N, whose differences
have the entropy H(v). By exponent: the same for the items of each exponent of the old value, added up. Neither counts
tables, lengths or ends of shards.

PULSE style (arXiv 2602.03839): gaps of the whole model in the smallest type that holds them, absolute values, zstd 1.

Cost: CPU seconds of one thread. Codecs and back ends take turns; a figure is the median over the rounds, in GB of
weights per CPU second, and a goal on several weights is on the worst of them.

Not covered: the tree and the network (`benchmarks.shardcast`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks import codec_streams
from benchmarks.codec_streams import Pair
from benchmarks.contract import CouldNotRunError, Goal, at_least, at_most, machine, run
from benchmarks.detection_pool import Maker
from protocol.files import cache_directory
from protocol.limits import SHARD_BYTES
from shardcast.codecs import Codec, Segment, compiled, decode, encode, gaps
from trainer import smollm2

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".peers" / "zipnn" / "bin" / "python"
PEER_SCRIPT = ROOT / "tests" / "peers" / "zipnn_peer.py"

ROUNDS = 5
SHARD_ITEMS = SHARD_BYTES // 2
NUMPY_SHARDS = 8
"""How many shards, spread over the model, numpy codes in each round."""
SLOW = 1e-4
"""From this learning rate on no goal but the classes' bound: a policy learns at a hundredth of it."""


@dataclass
class Row:
    """One pair of weights. Shares are of the whole checkpoint; speeds GB of it per CPU second, one for each round."""

    name: str
    changed: float
    by_one: float
    iid: float
    by_exponent: float
    share: dict[str, float] = field(default_factory=dict)
    speed: dict[str, list[float]] = field(default_factory=dict)

    def median(self, what: str) -> float:
        return statistics.median(self.speed[what])


@contextmanager
def back_end(name: str) -> Iterator[None]:
    """Only compiled loops, or only numpy."""
    before = compiled._off, compiled._spent_ns
    compiled._off, compiled._spent_ns = name != "numba", compiled.PAYS_FROM_NS
    try:
        yield
        if None in compiled._ready.values() or (name == "numba" and compiled._off):
            raise CouldNotRunError("numba compiles nothing here, or not all; this benchmark needs both back ends")
    finally:
        compiled._off, compiled._spent_ns = before


def bounds(pair: Pair) -> tuple[float, float]:
    """Both bounds in bytes."""
    exponent_N = (pair.old_N >> 7) & 255
    place_K = np.flatnonzero(pair.old_N != pair.new_N)
    code_K = gaps.zigzag(pair.old_N[place_K], pair.new_N[place_K])
    all_E = np.bincount(exponent_N, minlength=256)
    changed_E = np.bincount(exponent_N[place_K], minlength=256)
    iid = len(pair.old_N) * _coin(len(place_K) / len(pair.old_N)) + _entropy(code_K)
    split = sum(
        int(all_E[e]) * _coin(int(changed_E[e]) / int(all_E[e])) + _entropy(code_K[exponent_N[place_K] == e])
        for e in np.flatnonzero(changed_E)
    )
    return iid / 8, split / 8


def _coin(p: float) -> float:
    """Bits of a coin that falls so with probability p."""
    return 0.0 if p in (0.0, 1.0) else -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def _entropy(symbols: npt.NDArray[Any]) -> float:
    """Bits of all of them, by how often each occurs."""
    count = np.bincount(symbols)
    count = count[count > 0]
    return float(-(count * np.log2(count / max(1, len(symbols)))).sum())


def pulse_bytes(pair: Pair) -> int:
    """The length of gap + absolute value + zstd 1."""
    place_K = np.flatnonzero(pair.old_N != pair.new_N)
    gap_K = np.diff(place_K, prepend=-1)
    smallest = next(t for t in (np.uint8, np.uint16, np.uint32) if int(gap_K.max()) <= np.iinfo(t).max)
    coder = zstandard.ZstdCompressor(level=1)
    return len(coder.compress(gap_K.astype(smallest).data)) + len(coder.compress(pair.new_N[place_K].data))


def measure_pair(pair: Pair, rounds: int) -> Row:
    """Every round each codec by numba on all shards, and by numpy on some."""
    count = len(pair.old_N)
    changed_N = pair.old_N != pair.new_N
    step_K = gaps.zigzag(pair.old_N[changed_N], pair.new_N[changed_N])
    iid, split = bounds(pair)
    row = Row(pair.name, float(changed_N.mean()), float((step_K <= 2).mean()), iid / 2 / count, split / 2 / count)
    row.share["pulse"] = pulse_bytes(pair) / 2 / count
    starts = list(range(0, count, SHARD_ITEMS))
    few = starts[:: max(1, len(starts) // NUMPY_SHARDS)]
    for turn in range(rounds + 1):  # the first one compiles, and doesn't count
        for codec, engine, chosen in (
            (Codec.GAPS, "numba", starts), (Codec.CLASSES, "numba", starts), (Codec.GAPS, "numpy", few),
            (Codec.CLASSES, "numpy", few[:2]),
        ):  # fmt: skip
            with back_end(engine):
                wire, encode_s, decode_s = _there_and_back(pair, codec, chosen)
            nbytes = sum(_sides(pair, start)[0].nbytes for start in chosen)
            if engine == "numba":
                row.share[codec.name.lower()] = wire / nbytes
            if turn:
                for way, seconds in (("encode", encode_s), ("decode", decode_s)):
                    row.speed.setdefault(f"{codec.name.lower()} {engine} {way}", []).append(nbytes / 1e9 / seconds)
    return row


def _sides(pair: Pair, start: int) -> tuple[memoryview, memoryview]:
    old, new = (side[start : start + SHARD_ITEMS].data.cast("B") for side in (pair.old_N, pair.new_N))
    return old, new


def _there_and_back(pair: Pair, codec: Codec, starts: Sequence[int]) -> tuple[int, float, float]:
    """Bytes on the wire, CPU seconds of encoding and of decoding.

    Raises:
        CouldNotRunError: a shard did not come back.
    """
    wire = 0
    encode_s = decode_s = 0.0
    space = bytearray(SHARD_BYTES)  # as a puller writes into a file that is already there
    for start in starts:
        old, new = _sides(pair, start)
        segments = (Segment(len(new) // 2, 2, 7),)
        out = memoryview(space)[: len(new)]
        begin = time.process_time()
        frame = encode(codec, old, new, segments)
        middle = time.process_time()
        decode(frame, old, out, segments)
        decode_s += time.process_time() - middle
        encode_s += middle - begin
        wire += len(frame)
        if out != new:
            raise CouldNotRunError(
                f"{pair.name}, shard {start // SHARD_ITEMS}: other bytes came back; a codec is wrong"
            )
    return wire, encode_s, decode_s


def measure_anchor(pair: Pair, rounds: int) -> Row:
    """Our anchor and zipnn in turns, on the same weights.

    Raises:
        CouldNotRunError: zipnn is not installed, or ended.
    """
    if not PEER.exists():
        raise CouldNotRunError(f"no peer at {PEER.relative_to(ROOT)}; run `make bench-peers`")
    row = Row("anchor", 1.0, 0.0, 0.0, 0.0)
    starts = range(0, len(pair.new_N), SHARD_ITEMS)
    nbytes = pair.new_N.nbytes
    with tempfile.NamedTemporaryFile(suffix=".bf16") as file:
        pair.new_N.tofile(file.name)
        with subprocess.Popen(
            [str(PEER), str(PEER_SCRIPT), file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            for turn in range(rounds + 1):
                with back_end("numba"):
                    wire, encode_s, decode_s = _there_and_back(pair, Codec.ANCHOR, starts)
                try:
                    child.stdin.write("\n")
                    child.stdin.flush()
                    its = json.loads(child.stdout.readline())
                except (OSError, ValueError) as exc:
                    raise CouldNotRunError("zipnn ended; run `make bench-peers` again") from exc
                if not its["same"]:
                    raise CouldNotRunError("zipnn gave other bytes back")
                row.share["anchor"], row.share["zipnn"] = wire / nbytes, its["size"] / nbytes
                if turn:
                    for what, seconds in (
                        ("anchor numba encode", encode_s), ("anchor numba decode", decode_s),
                        ("zipnn encode", its["compress_s"]), ("zipnn decode", its["decompress_s"]),
                    ):  # fmt: skip
                        row.speed.setdefault(what, []).append(nbytes / 1e9 / seconds)
            child.stdin.close()
            child.wait(timeout=30)
    return row


# --- goals -----------------------------------------------------------------------------------------------------------


def goals(lm: dict[float, list[Row]], grpo: Row, anchor: Row) -> list[Goal]:
    """Issue 5's, each on the worst of the weights it is about."""
    usual = [row for rate, rows in lm.items() if rate < SLOW for row in rows]
    every = [row for rows in lm.values() for row in rows] + [grpo]
    found = [
        _most("gaps / iid bound, LM, lr <= 1e-5", 1.06, [row.share["gaps"] / row.iid for row in usual]),
        _most("gaps / iid bound, GRPO", 1.12, [grpo.share["gaps"] / grpo.iid]),
        _most("classes / bound by exponent", 1.2, [row.share["classes"] / row.by_exponent for row in every]),
    ]
    for rate, gap, by_class in ((1e-6, 0.40, 0.25), (5e-6, 0.90, 0.65)):
        for name, target in (("gaps", gap), ("classes", by_class)):
            shares = [100 * row.share[name] for row in lm[rate]]
            found.append(_most(f"{name}, % of the checkpoint, LM, lr {rate:g}", target, shares))
    for label, rows in (("LM, lr <= 1e-5", usual), ("GRPO", [grpo])):
        for name, target in (("gaps", 1.8), ("classes", 3.0)):
            times = [row.share["pulse"] / row.share[name] for row in rows]
            found.append(_least(f"gap + absolute + zstd / {name}, {label}", target, times))
    some = [*usual, grpo]
    for what, target, rows in (
        ("gaps numba", 2.0, some), ("classes numba", 0.7, some), ("gaps numpy", 0.5, lm[1e-6]),
    ):  # fmt: skip
        for way in ("encode", "decode"):
            worst = min(rows, key=lambda row, key=f"{what} {way}": row.median(key))  # type: ignore[misc]
            key = f"{what} {way}"
            label = f"{key}, GB/s of a core ({worst.name})"
            found.append(at_least(label, target, worst.median(key), worst.speed[key]))
    found.append(_most("anchor, % of the checkpoint", 67.0, [100 * anchor.share["anchor"]]))
    for way in ("encode", "decode"):
        ours, theirs = anchor.speed[f"anchor numba {way}"], anchor.speed[f"zipnn {way}"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        found.append(at_least(f"anchor {way}, GB/s of a core", 0.5, statistics.median(ours), ours))
        found.append(at_least(f"anchor {way}, times zipnn", 1.5, statistics.median(ratios), ratios))
    return found


def _most(goal: str, target: float, values: Sequence[float]) -> Goal:
    return at_most(goal, target, max(values), values)


def _least(goal: str, target: float, values: Sequence[float]) -> Goal:
    return at_least(goal, target, min(values), values)


def tiny_shares() -> list[float]:
    """Patches of the demo's model in float32, as shares of the checkpoint.

    Raises:
        CouldNotRunError: a shard did not come back.
    """
    shares = []
    for old, new in pairwise(codec_streams.tiny_sides()):
        segments = (Segment(len(new) // 4, 4, 23),)
        out = bytearray(len(new))
        frame = encode(Codec.GAPS, old, new, segments)
        decode(frame, old, out, segments)
        if out != new:
            raise CouldNotRunError("other float32 weights came back; a codec is wrong")
        shares.append(len(frame) / len(new))
    return shares


def measure(args: argparse.Namespace) -> list[Goal]:
    torch.set_num_threads(1)
    if not PEER.exists():
        raise CouldNotRunError(f"no peer at {PEER.relative_to(ROOT)}; run `make bench-peers`")
    cache = args.cache or cache_directory()
    directory = smollm2.export()
    maker = Maker(directory, cache, _say)
    rounds = max(1, args.rounds)
    recorded = codec_streams.grpo_pair(maker.folder / "before", maker.folder / "after")
    grpo = _told(measure_pair(recorded, rounds))
    anchor = _told(measure_anchor(recorded, rounds))
    lm = {
        rate: [_told(measure_pair(codec_streams.read_pair(path), rounds)) for path in paths]
        for rate, paths in codec_streams.lm_pairs(directory, cache, _say).items()
    }
    found = goals(lm, grpo, anchor)
    found.append(_most("gaps, share of the checkpoint, the demo's model in float32", 1.0, tiny_shares()))
    if args.out:
        rows = [asdict(row) for row in (grpo, anchor, *(row for rows in lm.values() for row in rows))]
        held = {"machine": machine(), "rows": rows, "goals": [asdict(goal) for goal in found]}
        args.out.write_text(json.dumps(held, indent=1) + "\n")
    return found


def _told(row: Row) -> Row:
    """Say what came out, beside the goals."""
    shares = ", ".join(f"{name} {100 * share:.3f}%" for name, share in row.share.items())
    speeds = ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in row.speed.items())
    changed = f"{100 * row.changed:.3f}% changed, {100 * row.by_one:.0f}% of them by one"
    least = f"iid {100 * row.iid:.3f}%, by exponent {100 * row.by_exponent:.3f}%"
    _say(f"{row.name}: {changed}; {least}; {shares}\n    GB/s: {speeds}")
    return row


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often everything is measured")
    parser.add_argument("--cache", type=Path, help="where weights are kept; the user's cache by default")
    parser.add_argument("--out", type=Path, help="write every number here, as JSON")


if __name__ == "__main__":
    sys.exit(run(measure, __doc__ or "", _arguments))
