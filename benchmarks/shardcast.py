"""How fast, how dearly and how safely weights reach everybody, beside what others offer.

    make bench-peers                                     shardcast 0.3.2, libtorrent, nginx, curl, wget
    python -m benchmarks.shardcast --json [--part tree,chain,relays,memory] [--repeat 5] [--mib N] [--out FILE]

tree     origin -> relay -> 4 clients, 512 MiB of random bytes on loopback, files in memory. Ours, `shardcast==0.3.2`
         looking for news every second, nginx's cut-through cache with curl, and libtorrent's full mesh take turns. From
         handing over the file to the last client's end; CPU is of all processes together, from handing over on. The
         first shard: verified at a client, with ours; merely there, with shardcast, which verifies only at the end
chain    256 MiB over links of 60 MB/s (namespaces with a token bucket), one hop and four in turns
relays   8 relays that hold 512 MiB, each sending 10 MB/s; four clients, one of them a relay with a child of its own.
         One relay's shards were changed on its disk, one is killed when a quarter has arrived. The fluid ideal: whoever
         is honest and alive sends at its full rate all the time
memory   most anonymous memory of relay and puller (`smaps_rollup`, looked at all the time) at 512 MiB and 4 GiB, files
         on disk

Each figure is the median of `--repeat` runs; all of them are told. Needs root for namespaces, 5 GiB in /dev/shm for
tree, 13 GiB of disk for memory.

Not covered: deltas (`benchmarks.codec`), links with a long round trip, more machines than this one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contract import CouldNotRunError, Goal, at_least, at_most, machine, run
from benchmarks.shardcast_links import network
from benchmarks.shardcast_peers import (
    DELIVERY_S,
    Delivery,
    by_libtorrent,
    by_nginx,
    by_shardcast,
    check_files,
    require_peers,
)
from benchmarks.shardcast_rig import START_S, Cast, Process, Weights, cast, make_run, make_weights, publish_checkpoint
from protocol.errors import ReasonCode
from protocol.limits import MIB, SHARD_BYTES
from shardcast.limits import SHARDS_IN_FLIGHT, WIRE_SLACK_BYTES

PARTS = ("tree", "chain", "relays", "memory")
CLIENTS = 4
REPEAT = 5
MIB_OF = {"tree": 512, "chain": 256, "relays": 512, "memory": 512}

CHAIN_MB_S = 60.0
RELAYS = 8
RELAY_MB_S = 10.0
KILLED_AT = 0.25
LARGE = 8
"""How much larger the second checkpoint of `memory` is."""

ANONYMOUS_MIB = 64.0
_SETTLE_S = 1.5
"""From the last process's being ready to handing over: everybody waits for news by then."""


# --- our own tree ----------------------------------------------------------------------------------------------------


def start_pull(
    actors: Cast, name: str, run_dir: Path, sources: Sequence[dict[str, Any]], *more: str, kind: str = "pull"
) -> Process:
    """A relay or puller below `sources`, which are events `ready` of others; it may not be ready yet."""
    named = [word for source in sources for word in ("--source", f"{source['key']}@{source['url']}")]
    return actors.role(name, kind, run_dir / "manifest.hw", actors.folder / name, *named, *more)


def wait_ready(processes: Sequence[Process]) -> None:
    for process in processes:
        process.wait("ready", START_S)


def by_us(folder: Path, weights: Weights, clients: int) -> Delivery:
    """Origin, relay, clients."""
    run_dir = make_run(folder / "run", weights)
    with cast(folder) as actors:
        origin = actors.role("origin", "origin", run_dir).wait("ready", START_S)
        relay = start_pull(actors, "relay", run_dir, [origin], kind="relay").wait("ready", START_S)
        pullers = [start_pull(actors, f"client-{number}", run_dir, [relay]) for number in range(clients)]
        wait_ready(pullers)
        time.sleep(_SETTLE_S)
        actors.mark()
        begun = publish_checkpoint(run_dir, weights)
        whole = [puller.wait("whole", DELIVERY_S) for puller in pullers]
        cpu = actors.cpu_s()
        first = min(float(puller.wait("first", START_S)["t"]) for puller in pullers)
    check_files("our tree", [str(event["file"]) for event in whole], weights)
    return Delivery(max(float(event["t"]) for event in whole) - begun, first - begun, cpu)


def tree(folder: Path, args: argparse.Namespace) -> list[Goal]:
    """The four ways in turns."""
    require_peers()
    weights = make_weights(folder / "weights", args.mib or MIB_OF["tree"])
    ways: dict[str, Callable[[Path, Weights, int], Delivery]] = {
        "ours": by_us,
        "shardcast": by_shardcast,
        "nginx": by_nginx,
        "libtorrent": by_libtorrent,
    }
    took: dict[str, list[Delivery]] = {name: [] for name in ways}
    for turn in range(args.repeat):
        for name, way in ways.items():
            done = way(folder / f"{name}-{turn}", weights, CLIENTS)
            shutil.rmtree(folder / f"{name}-{turn}")
            took[name].append(done)
            first = "" if done.first_s is None else f", first shard {done.first_s:.2f} s"
            parts = ", ".join(f"{who} {cpu_s:.2f}" for who, cpu_s in done.cpu.items())
            _say(f"tree {turn}: {name} {done.wall_s:.2f} s{first}, {done.cpu_s:.2f} CPU s ({parts})")
    args.rows["tree"] = {name: [asdict(each) for each in done] for name, done in took.items()}

    def times(one: str, other: str, what: Callable[[Delivery], float]) -> tuple[float, list[float]]:
        each = [what(a) / what(b) for a, b in zip(took[one], took[other], strict=True)]
        return statistics.median(each), each

    def wall(one: Delivery) -> float:
        return one.wall_s

    def first_s(one: Delivery) -> float:
        return one.first_s or 0.0

    size = f"{weights.mib} MiB to {CLIENTS}"
    return [
        at_least(f"{size}: shardcast 0.3.2's time, in ours", 2.5, *times("shardcast", "ours", wall)),
        at_most(f"{size}: our CPU, in shardcast 0.3.2's", 0.45, *times("ours", "shardcast", lambda one: one.cpu_s)),
        at_least(
            f"{size}: shardcast's first shard at a client (not verified yet), in our first verified one's time",
            10.0,
            *times("shardcast", "ours", first_s),
        ),
        at_most(f"{size}: our time, in that of nginx's cache and curl", 1.5, *times("ours", "nginx", wall)),
        at_most(f"{size}: our time, in libtorrent's with its hashing", 1.0, *times("ours", "libtorrent", wall)),
    ]


# --- a chain ---------------------------------------------------------------------------------------------------------


def one_chain(folder: Path, weights: Weights, hops: int) -> tuple[float, float]:
    """Seconds to the chain's end; and by how much, at the least, a child's first shard was before its parent's last
    (negative: it was not)."""
    run_dir = make_run(folder / "run", weights)
    hosts = [f"host-{number}" for number in range(hops)]
    with network(folder / "net", hosts, CHAIN_MB_S) as net, cast(folder, net.prefix) as actors:
        origin = actors.role(hosts[0], "origin", run_dir, "--listen", f"{net.address(hosts[0])}:0")
        above = origin.wait("ready", START_S)
        chain = []
        for host in hosts[1:]:
            address = f"{net.address(host)}:0"
            chain.append(start_pull(actors, host, run_dir, [above], "--listen", address, kind="relay"))
            above = chain[-1].wait("ready", START_S)
        chain.append(start_pull(actors, "leaf", run_dir, [above]))
        wait_ready(chain)
        time.sleep(_SETTLE_S)
        begun = publish_checkpoint(run_dir, weights)
        whole = [float(each.wait("whole", DELIVERY_S)["t"]) for each in chain]
        first = [float(each.wait("first", START_S)["t"]) for each in chain]
        check_files("the chain", [str(chain[-1].events["whole"]["file"])], weights)
    ahead = [parent - child for parent, child in zip(whole[:-1], first[1:], strict=True)]
    return whole[-1] - begun, min(ahead, default=0.0)


def chain(folder: Path, args: argparse.Namespace) -> list[Goal]:
    weights = make_weights(folder / "weights", args.mib or MIB_OF["chain"])
    took: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
    for turn in range(args.repeat):
        for hops, done in took.items():
            done.append(one_chain(folder / f"chain-{turn}-{hops}", weights, hops))
            shutil.rmtree(folder / f"chain-{turn}-{hops}")
            ideal = weights.nbytes / CHAIN_MB_S / 1e6
            _say(f"chain {turn}: {hops} hops {done[-1][0]:.2f} s (one link alone: {ideal:.2f} s)")
    args.rows["chain"] = {str(hops): done for hops, done in took.items()}
    ratios = [four[0] / one[0] for one, four in zip(took[1], took[4], strict=True)]
    ahead = [ahead_s for _, ahead_s in took[4]]
    return [
        at_most(f"{weights.mib} MiB at 60 MB/s: time of 4 hops, in that of 1", 1.2, statistics.median(ratios), ratios),
        at_least("seconds that a child's first verified shard came before its parent's last", 0.0, min(ahead), ahead),
    ]


# --- many relays, some of them bad -----------------------------------------------------------------------------------


def fluid_ideal_s(nbytes: float, killed_at: float, rate: float, relays: int = RELAYS) -> float:
    """Seconds for `nbytes` in all, from relays of `rate` bytes/s each: one of them is corrupt and counts for nothing,
    one is lost once the share `killed_at` has arrived."""
    before = killed_at * nbytes / ((relays - 1) * rate)
    return before + (1 - killed_at) * nbytes / ((relays - 2) * rate)


def corrupt(store: Path) -> int:
    """Change one bit in the middle of every stored shard; returns how many."""
    count = 0
    for path in store.rglob("*"):
        if path.is_file() and path.stat().st_size >= MIB // 2 and not path.is_symlink():
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
            count += 1
    return count


def one_storm(folder: Path, weights: Weights) -> dict[str, Any]:
    """One run of `relays`: `seconds`, `wrong` bytes seen by a child, keys `blamed` though honest, bytes `received`."""
    run_dir = make_run(folder / "run", weights)
    hosts = [f"relay-{number}" for number in range(RELAYS)]
    with network(folder / "net", hosts, RELAY_MB_S) as net, cast(folder, net.prefix) as actors:
        # They are filled from the hub, whose link has no limit; only what they send is slow.
        origin = actors.role("origin", "origin", run_dir, "--listen", f"{net.address('hub')}:0")
        above = origin.wait("ready", START_S)
        publish_checkpoint(run_dir, weights)
        relays = []
        for host in hosts:
            address = f"{net.address(host)}:0"
            relays.append(start_pull(actors, host, run_dir, [above], "--listen", address, kind="relay"))
        for relay in relays:
            relay.wait("whole", DELIVERY_S)
        origin.end()
        if not corrupt(folder / hosts[0]):
            raise CouldNotRunError("the corrupt relay stores no shards as files; the benchmark must learn how it does")
        sources = [relay.events["ready"] for relay in relays]
        listen = ("--listen", f"{net.address('hub')}:0", "--wait")
        clients = [start_pull(actors, "client-0", run_dir, sources, *listen, kind="relay")]
        clients += [start_pull(actors, f"client-{number}", run_dir, sources, "--wait") for number in range(1, CLIENTS)]
        child = start_pull(actors, "child", run_dir, [clients[0].wait("ready", START_S)])
        wait_ready([*clients, child])
        time.sleep(_SETTLE_S)
        begun = time.monotonic()
        for client in clients:
            client.say("go")
        _kill_at(relays[-1], clients, KILLED_AT * CLIENTS * weights.nbytes)
        whole = [client.wait("whole", DELIVERY_S) for client in clients]
        end = child.wait("whole", DELIVERY_S)
        check_files("the relays", [str(event["file"]) for event in [*whole[1:], end]], weights)
    bad = str(relays[0].events["ready"]["key"])
    blamed = {key for event in [*whole, end] for key in event["reports"]} - {bad}
    return {
        "seconds": max(float(event["t"]) for event in whole) - begun,
        "wrong": sum(code == ReasonCode.SHARD_MISMATCH.value for code in end["problems"].values()),
        "blamed": sorted(blamed),
        "guilty_named": any(bad in event["reports"] for event in whole),
        "received": [int(event["received"]) for event in whole],
        "problems": [event["problems"] for event in [*whole, end]],
    }


def _kill_at(relay: Process, clients: Sequence[Process], nbytes: float) -> None:
    """Kill -9 once so many bytes have arrived in all."""
    end = time.monotonic() + DELIVERY_S
    while time.monotonic() < end:
        for client in clients:
            client.poll()
        if sum(int(client.events.get("progress", {"bytes": 0})["bytes"]) for client in clients) >= nbytes:
            relay.end()
            return
        time.sleep(0.02)
    raise CouldNotRunError("a quarter of the bytes did not arrive in time")


def relays(folder: Path, args: argparse.Namespace) -> list[Goal]:
    weights = make_weights(folder / "weights", args.mib or MIB_OF["relays"])
    ideal = fluid_ideal_s(CLIENTS * weights.nbytes, KILLED_AT, RELAY_MB_S * 1e6)
    rows = []
    for turn in range(args.repeat):
        rows.append(one_storm(folder / f"relays-{turn}", weights))
        shutil.rmtree(folder / f"relays-{turn}")
        more = sum(rows[-1]["received"]) / CLIENTS / weights.nbytes - 1
        _say(
            f"relays {turn}: {rows[-1]['seconds']:.2f} s (fluid ideal {ideal:.2f} s), {100 * more:.1f}% of the bytes "
            f"twice, the corrupt relay reported: {rows[-1]['guilty_named']}, honest ones: {len(rows[-1]['blamed'])}"
        )
    args.rows["relays"] = {"ideal_s": ideal, "runs": rows}
    ratios = [row["seconds"] / ideal for row in rows]
    return [
        at_most(
            f"{CLIENTS} x {weights.mib} MiB from {RELAYS} relays, one corrupt, one killed: time, in the fluid ideal "
            f"of {ideal:.2f} s",
            1.3,
            statistics.median(ratios),
            ratios,
        ),
        at_most("shards with wrong bytes that a child was given", 0, sum(row["wrong"] for row in rows)),
        at_most("honest relays blamed", 0, sum(len(row["blamed"]) for row in rows)),
    ]


# --- memory ----------------------------------------------------------------------------------------------------------


def one_memory(folder: Path, weights: Weights) -> dict[str, float]:
    """Most anonymous MiB of a relay that serves while it pulls, and of the puller below it."""
    run_dir = make_run(folder / "run", weights)
    with cast(folder) as actors:
        origin = actors.role("origin", "origin", run_dir).wait("ready", START_S)
        relay = start_pull(actors, "relay", run_dir, [origin], kind="relay")
        puller = start_pull(actors, "puller", run_dir, [relay.wait("ready", START_S)])
        wait_ready([puller])
        publish_checkpoint(run_dir, weights)
        most = {"relay": 0, "puller": 0}
        end = time.monotonic() + DELIVERY_S
        while "whole" not in puller.events:
            if time.monotonic() > end:
                raise CouldNotRunError(f"{weights.mib} MiB did not arrive in {DELIVERY_S:g} s")
            for name, process in (("relay", relay), ("puller", puller)):
                most[name] = max(most[name], process.anonymous_bytes())
            puller.poll()
            time.sleep(0.01)
        check_files("the puller", [str(puller.events["whole"]["file"])], weights)
    return {name: nbytes / MIB for name, nbytes in most.items()}


def memory(folder: Path, args: argparse.Namespace) -> list[Goal]:
    limit = ANONYMOUS_MIB + SHARDS_IN_FLIGHT * (SHARD_BYTES + WIRE_SLACK_BYTES) / MIB
    small = args.mib or MIB_OF["memory"]
    goals = []
    args.rows["memory"] = {}
    for mib, repeat in ((small, args.repeat), (LARGE * small, 1 if args.repeat < REPEAT else 2)):
        weights = make_weights(folder / f"weights-{mib}", mib)
        rows = []
        for turn in range(repeat):
            rows.append(one_memory(folder / f"memory-{mib}-{turn}", weights))
            shutil.rmtree(folder / f"memory-{mib}-{turn}")
            _say(f"memory {turn}: {mib} MiB, relay {rows[-1]['relay']:.0f}, puller {rows[-1]['puller']:.0f} MiB")
        shutil.rmtree(folder / f"weights-{mib}")
        args.rows["memory"][str(mib)] = rows
        for name in ("relay", "puller"):
            each = [row[name] for row in rows]
            goals.append(at_most(f"{mib} MiB: most anonymous memory of a {name}, MiB", limit, max(each), each))
    return goals


# --- all of it -------------------------------------------------------------------------------------------------------

_MEASURE = {"tree": tree, "chain": chain, "relays": relays, "memory": memory}


def measure(args: argparse.Namespace) -> list[Goal]:
    parts = args.part.split(",")
    unknown = [part for part in parts if part not in _MEASURE]
    if unknown:
        raise CouldNotRunError(f"no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    args.repeat = max(1, args.repeat)
    args.rows = {}
    goals: list[Goal] = []
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="shardcast-bench-", dir=_place(part)) as folder:
            goals += _MEASURE[part](Path(folder), args)
    if args.out:
        held = {"machine": machine(), "rows": args.rows, "goals": [asdict(goal) for goal in goals]}
        args.out.write_text(json.dumps(held, indent=1) + "\n")
    return goals


def _place(part: str) -> str | None:
    """Memory, where there is some to put files into: a disk's own pace is not what is compared. None is the usual
    folder for temporary files."""
    shared = Path("/dev/shm")  # noqa: S108
    return str(shared) if part != "memory" and shared.is_dir() else None


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", default=",".join(PARTS), help="some of tree,chain,relays,memory (default all)")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="runs of each (default %(default)s)")
    parser.add_argument("--mib", type=int, default=0, help="size of the checkpoint instead of each part's own")
    parser.add_argument("--out", type=Path, help="write every number here, as JSON")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # as after Ctrl-C: nothing is left running, or in memory
    sys.exit(run(measure, __doc__ or "", _arguments))
