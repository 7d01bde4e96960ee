"""A relay that changes one byte of one shard of every policy, and signs what it sends.

It joins as any relay does (`node join --role relay`, same options), pulls and verifies honestly, and lies to its
children only. The signature makes the lie provable: whoever receives it holds the relay's word against the origin's.

    python examples/cheats/flipping-relay.py --truth LOG --run RUN/join.hw --home DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from aiohttp import web
from blake3 import blake3

import node.relay
from node.cli import main as node_command
from shardcast.records import ShardRecord
from shardcast.relay import RelayServer
from shardcast.server import WeightsServer
from shardcast.stamps import STAMP_HEADER
from shardcast.store import Feed

LIED_ABOUT = 0
"""The shard that is changed: every policy has this one."""


class FlippingServer(WeightsServer):
    """Serves what it holds, but for one byte."""

    truth: Path

    def shard(self, feed: Feed, record: ShardRecord) -> web.StreamResponse:
        if record.index != LIED_ABOUT:
            return super().shard(feed, record)
        data = bytearray(self._store.shard_path(feed.key, record.index).read_bytes())
        data[len(data) // 2] ^= 1
        stamp = self.sign(record.publication, record.index, blake3(data).digest())
        with self.truth.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": feed.key[1], "index": record.index, "dishonest": True}) + "\n")
        return web.Response(body=bytes(data), headers={STAMP_HEADER: stamp})


class FlippingRelay(RelayServer):
    serving = FlippingServer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, metavar="LOG", help="own log of what it did (JSONL)")
    args, join = parser.parse_known_args()
    args.truth.parent.mkdir(parents=True, exist_ok=True)
    args.truth.touch()
    FlippingServer.truth = args.truth
    node.relay.RelayServer = FlippingRelay
    sys.argv = ["node", "join", "--role", "relay", *join]
    return node_command()


if __name__ == "__main__":
    sys.exit(main())
