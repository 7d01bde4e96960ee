"""What others need for the same: `shardcast==0.3.2`, nginx with curl, and libtorrent, each from one origin to four.

    shardcast    origin -> relay -> clients, its own roles, looking for news every second (its default is 30)
    nginx        a static server -> `proxy_cache` in slices of 8 MiB -> curl; nothing is hashed or signed
    libtorrent   a seed and as many peers, all connected to all; the seed's hashing counts

Everything is on loopback and below one folder (memory, if it is in /dev/shm). What was delivered is compared.

Not covered: our own tree (`benchmarks.shardcast`).
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contract import CouldNotRunError
from benchmarks.shardcast_rig import ROOT, START_S, Cast, Weights, cast
from shardcast.store import hash_file

PEERS = ROOT / ".peers"
SCRIPTS = ROOT / "tests" / "peers"
DELIVERY_S = 300.0


@dataclass
class Delivery:
    """What one way of delivering took.

    Attributes:
        wall_s: from handing over the file to the last client's end.
        first_s: until the first shard was at a client: verified, with ours; merely there, with others.
        cpu: CPU seconds of each process, from handing over on.
    """

    wall_s: float
    first_s: float | None = None
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu.values())


def require_peers() -> None:
    """Raises CouldNotRunError when one of the others is not installed."""
    missing = [name for name in ("shardcast", "libtorrent") if not _python(name).exists()]
    missing += [name for name in ("nginx", "curl", "wget") if _which(name) is None]
    if missing:
        raise CouldNotRunError(f"missing to compare with: {', '.join(missing)}; run `make bench-peers`")


def _python(name: str) -> Path:
    return PEERS / name / "bin" / "python"


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def check_files(name: str, files: list[str], weights: Weights) -> None:
    """Raises CouldNotRunError when one of them is not the file that was handed over."""
    if any(hash_file(Path(file)) != weights.digest for file in files):
        raise CouldNotRunError(f"{name} delivered other bytes")


# --- shardcast 0.3.2 -------------------------------------------------------------------------------------------------


def by_shardcast(folder: Path, weights: Weights, clients: int) -> Delivery:
    """Origin, relay and clients of the package that INTELLECT-2 used."""
    script, ports = SCRIPTS / "shardcast_peer.py", free_ports(2)
    with cast(folder) as actors:
        _start_shardcast(actors, "origin", [script, "origin", folder / "origin", str(ports[0]), weights.file])
        upstream = f"http://127.0.0.1:{ports[0]}"
        _start_shardcast(actors, "relay", [script, "relay", folder / "relay", str(ports[1]), upstream])
        names = [f"client-{number}" for number in range(clients)]
        for name in names:  # one after the other: all clients of a host share a file in /tmp while they start
            _start_shardcast(actors, name, [script, "client", folder / name, f"http://127.0.0.1:{ports[1]}"])
        time.sleep(2.0)
        actors.mark()
        actors.processes["origin"].say()
        begun = float(actors.processes["origin"].wait("begun", START_S)["t"])
        first = _first_file([folder / name / "temp_v1" for name in names], begun)
        files, ends = [], []
        for name in names:
            event = actors.processes[name].wait("whole", DELIVERY_S)
            files.append(str(event["file"]))
            ends.append(float(event["t"]))
        cpu = actors.cpu_s()
    check_files("shardcast 0.3.2", files, weights)
    return Delivery(max(ends) - begun, first, cpu)


def _start_shardcast(actors: Cast, name: str, args: list[str | Path]) -> None:
    """A role with a copy of the package for itself."""
    library = next((PEERS / "shardcast" / "lib").glob("python3*/site-packages/shardcast"))
    copy = actors.folder / f"{name}-package"
    shutil.copytree(library, copy / "shardcast", ignore=shutil.ignore_patterns("__pycache__"))
    process = actors.start(name, [_python("shardcast"), *args], env={"PYTHONPATH": str(copy)}, cwd=actors.folder)
    process.wait("ready", START_S)


def _first_file(folders: list[Path], begun: float) -> float:
    """Seconds until the first whole shard lies in one of the folders."""
    while time.monotonic() - begun < DELIVERY_S:
        for folder in folders:
            if any(folder.glob("shard_*.bin")):
                return time.monotonic() - begun
        time.sleep(0.02)
    raise CouldNotRunError("shardcast 0.3.2 delivered no shard in time")


# --- nginx and curl --------------------------------------------------------------------------------------------------

_NGINX = """
daemon off;
user {user};
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/temp; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {cache}
  server {{ listen 127.0.0.1:{port}; {server} }}
}}
"""
_CACHE = "proxy_cache_path {folder}/cache keys_zone=weights:10m max_size=16g use_temp_path=off;"
_CUT_THROUGH = """
    location / {{
      slice 8m;
      proxy_pass http://127.0.0.1:{origin};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Range $slice_range;
      proxy_cache weights;
      proxy_cache_key $uri$slice_range;
      proxy_cache_valid 200 206 1h;
      proxy_cache_lock on;
    }}
"""


def by_nginx(folder: Path, weights: Weights, clients: int) -> Delivery:
    """A static server, a cache in front of it, curl to files."""
    ports = free_ports(2)
    nginx, curl = _which("nginx"), _which("curl")
    if nginx is None or curl is None:
        raise CouldNotRunError("nginx or curl is missing; run `make bench-peers`")
    user = "root" if os.geteuid() == 0 else "nobody"
    with cast(folder) as actors:
        for name, port, cache, server in (
            ("origin", ports[0], "", f"root {weights.file.parent};"),
            ("relay", ports[1], _CACHE, _CUT_THROUGH),
        ):
            own = folder / name
            own.mkdir()
            words = {"folder": own, "port": port, "origin": ports[0]}
            config = _NGINX.format(**words, user=user, cache=cache.format(**words), server=server.format(**words))
            (own / "nginx.conf").write_text(config)
            actors.start(name, [nginx, "-c", own / "nginx.conf", "-p", own, "-e", own / "error.log"])
            _wait_for_port(port)
        actors.mark()
        begun = time.monotonic()
        files = [str(folder / f"client-{number}.bin") for number in range(clients)]
        url = f"http://127.0.0.1:{ports[1]}/{weights.file.name}"
        # The shell waits for curl and then for us, so that what curl took can still be read.
        done = '"$0" --silent --fail --output "$1" "$2" && echo "{\\"event\\": \\"whole\\"}"; read wait'
        for number, file in enumerate(files):
            actors.start(f"client-{number}", ["/bin/sh", "-c", done, curl, file, url])
        ends = []
        for number in range(clients):
            actors.processes[f"client-{number}"].wait("whole", DELIVERY_S)
            ends.append(time.monotonic())
        cpu = actors.cpu_s()
    check_files("nginx", files, weights)
    return Delivery(max(ends) - begun, None, cpu)


def _wait_for_port(port: int) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError as exc:
            if time.monotonic() > end:
                raise CouldNotRunError(f"nobody listens on port {port}: nginx did not start") from exc
            time.sleep(0.05)


# --- libtorrent ------------------------------------------------------------------------------------------------------


def by_libtorrent(folder: Path, weights: Weights, clients: int) -> Delivery:
    """A seed that hashes first, then a full mesh."""
    script, ports = SCRIPTS / "libtorrent_peer.py", free_ports(clients + 1)
    torrent, name = folder / "weights.torrent", weights.file.name
    with cast(folder) as actors:
        places = [weights.file.parent, *(folder / f"client-{number}" for number in range(clients))]
        for number, (place, port) in enumerate(zip(places, ports, strict=True)):
            place.mkdir(exist_ok=True)
            role = ["peer", "seed"][number == 0]
            actors.start(
                f"{role}-{number}", [_python("libtorrent"), script, role, place, name, torrent, str(port)]
            ).wait("ready", START_S)
        actors.mark()
        begun = time.monotonic()
        seed, *peers = actors.processes.values()
        seed.say()
        seed.wait("seeding", DELIVERY_S)
        for number, peer in enumerate(peers, 1):
            peer.say(" ".join(str(port) for port in ports[:number]))  # all to all, each pair once
        events = [peer.wait("whole", DELIVERY_S) for peer in peers]
        cpu = actors.cpu_s()
    check_files("libtorrent", [str(event["file"]) for event in events], weights)
    return Delivery(max(float(event["t"]) for event in events) - begun, None, cpu)
