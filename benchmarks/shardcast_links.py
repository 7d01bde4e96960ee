"""Machines with links of a given rate on this one: network namespaces on a bridge, each sending through a token bucket.

    hub (bridge, no limit) --- host a (its egress limited)
                           +-- host b ...

Processes are put on a host by a prefix to their command. Addresses are 10.77.0.0/24, known in these namespaces only;
they vanish with the processes that hold them.

Not covered: round-trip times and losses (add netem), and users that may not make namespaces: it needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contract import CouldNotRunError
from benchmarks.shardcast_rig import START_S, Cast, cast

_NET = "10.77.0"
_DEADLINE_S = 20.0


class Network:
    """Hosts by name. `hub` has no limit."""

    def __init__(self, holders: Cast, hosts: Sequence[str], megabytes_s: float) -> None:
        """
        Args:
            hosts: at most 250.
            megabytes_s: each of them sends at most this, in 10^6 bytes a second.

        Raises:
            CouldNotRunError: this system or user makes no namespaces, or the kernel has no token bucket.
        """
        self._number = {"hub": 1, **{name: number for number, name in enumerate(hosts, 2)}}
        self._pid: dict[str, int] = {}
        for name in ("hub", *hosts):
            # `cat` ends with its standard input: with us, however we end.
            held = 'echo \'{"event": "ready"}\'; exec cat'
            process = holders.start(f"net-{name}", ["unshare", "--net", "sh", "-c", held])
            process.wait("ready", START_S)
            self._pid[name] = process.popen.pid
        self._on("hub", "ip link add br0 type bridge", f"ip addr add {self.address('hub')}/24 dev br0")
        self._on("hub", "ip link set br0 up", "ip link set lo up")
        for name in hosts:
            number, pid = self._number[name], self._pid[name]
            self._on("hub", f"ip link add v{number} type veth peer name eth0 netns {pid}")
            self._on("hub", f"ip link set v{number} master br0 up")
            self._on(name, f"ip addr add {self.address(name)}/24 dev eth0", "ip link set lo up", "ip link set eth0 up")
            rate = f"{round(megabytes_s * 8000)}kbit"
            self._on(name, f"tc qdisc add dev eth0 root tbf rate {rate} burst 128kb latency 50ms")

    def address(self, name: str) -> str:
        return f"{_NET}.{self._number[name]}"

    def prefix(self, name: str) -> list[str]:
        """Put before a command so that it runs on that host; those that are none run on the hub."""
        return ["nsenter", "-t", str(self._pid.get(name, self._pid["hub"])), "-n"]

    def _on(self, name: str, *commands: str) -> None:
        for command in commands:
            words = [*self.prefix(name), *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
            if done.returncode:
                raise CouldNotRunError(f"{command!r} in a namespace: {done.stderr.strip()}; run it as root on Linux")


@contextmanager
def network(folder: Path, hosts: Sequence[str], megabytes_s: float) -> Iterator[Network]:
    """Hosts that do not outlive the block."""
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid():
        why = f"{', '.join(missing)} missing (Debian: iproute2, util-linux)" if missing else "it needs root"
        raise CouldNotRunError(f"links of a given rate are made of network namespaces: {why}")
    with cast(folder) as holders:
        yield Network(holders, hosts, megabytes_s)
