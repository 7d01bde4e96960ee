"""The `libtorrent` package behind a pipe: runs in its own environment (`make bench-peers`), imports nothing of ours.

    python libtorrent_peer.py seed FOLDER NAME TORRENT PORT    a line on stdin: hash FOLDER/NAME, write TORRENT, seed it
    python libtorrent_peer.py peer FOLDER NAME TORRENT PORT    a line on stdin, "PORT PORT ...": download from those

Prints one JSON object a line, with times of the monotonic clock; ends when stdin does. Pieces of 4 MiB, TCP on
127.0.0.1 only, no discovery, no limits; pieces are checked as they come, as always.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PIECE_BYTES = 4 << 20


def say(event: str, **table: object) -> None:
    print(json.dumps({"event": event, **table}), flush=True)


def main() -> None:
    import libtorrent as lt

    role, folder, name, torrent, port = sys.argv[1:]
    session = lt.session(
        {
            "listen_interfaces": f"127.0.0.1:{port}",
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "enable_incoming_utp": False,
            "enable_outgoing_utp": False,
            "allow_multiple_connections_per_ip": True,
            "unchoke_slots_limit": -1,
            "choking_algorithm": 0,
            "alert_mask": 0,
            "out_enc_policy": 2,
            "in_enc_policy": 2,
            "send_buffer_watermark": 4 << 20,
        }
    )
    say("ready")
    line = sys.stdin.readline()
    if role == "seed":
        storage = lt.file_storage()
        lt.add_files(storage, f"{folder}/{name}")
        made = lt.create_torrent(storage, PIECE_BYTES, lt.create_torrent.v1_only)
        lt.set_piece_hashes(made, folder)
        Path(torrent).write_bytes(lt.bencode(made.generate()))
        say("hashed", t=time.monotonic())
    params = lt.add_torrent_params()
    params.ti = lt.torrent_info(torrent)
    params.save_path = folder
    if role == "seed":
        params.flags |= lt.torrent_flags.seed_mode
    params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    handle = session.add_torrent(params)
    if role == "seed":
        say("seeding", t=time.monotonic())
    else:
        for other in line.split():
            handle.connect_peer(("127.0.0.1", int(other)))
        while not handle.status().is_seeding:
            time.sleep(0.02)
        say("whole", t=time.monotonic(), file=f"{folder}/{name}")
    for _ in sys.stdin:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
