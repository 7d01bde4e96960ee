"""One role of `shardcast==0.3.2` from PyPI: runs in its own environment (`make bench-peers`), imports nothing of ours.

    python shardcast_peer.py origin FOLDER PORT FILE        each line on stdin publishes FILE
    python shardcast_peer.py relay FOLDER PORT UPSTREAM     looks for new versions every second
    python shardcast_peer.py client FOLDER RELAY            looks every second, then downloads version v1

Prints one JSON object a line, with times of the monotonic clock; ends when stdin does. A folder that is served must
hold `data1.bin`, which the package asks for and never makes. Its client keeps a file beside its own package: each
client needs a copy of that (PYTHONPATH). It listens on all addresses; there is no option for that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

POLL_S = 1.0


def say(event: str, **table: object) -> None:
    print(json.dumps({"event": event, **table}), flush=True)


def main() -> None:
    os.environ.setdefault("SHARDCAST_LOG_LEVEL", "ERROR")
    role, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "data1.bin").write_bytes(bytes(1 << 16))
    {"origin": origin, "relay": relay, "client": client}[role](folder, *rest)


def origin(folder: str, port: str, file: str) -> None:
    from shardcast.origin_server import OriginServer

    server = OriginServer(folder, int(port))
    say("ready")
    for _ in sys.stdin:
        say("begun", t=time.monotonic())
        server.broadcast(file)
        say("published", t=time.monotonic())
    os._exit(0)


def relay(folder: str, port: str, upstream: str) -> None:
    from shardcast.middle_node import MiddleNode

    MiddleNode([upstream], folder, int(port), check_interval=int(POLL_S))
    say("ready")
    for _ in sys.stdin:
        pass
    os._exit(0)


def client(folder: str, relay_url: str) -> None:
    from shardcast.client_node import ClientNode

    node = ClientNode([relay_url], folder)
    say("ready")
    while "v1" not in node.list_available_versions():
        time.sleep(POLL_S)
    file = None
    while file is None:
        file = node.download_version("v1")
    say("whole", t=time.monotonic(), file=file)
    for _ in sys.stdin:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
