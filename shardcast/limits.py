"""Bounds and waits of the weights plane. `protocol.limits` holds those that are part of a root's meaning."""

from __future__ import annotations

from protocol.limits import HASH_BYTES, KIB, MAX_ENVELOPE_BYTES, MIB

MAX_STATE_HASHES = 30_000
"""Shards of one publication (240 GB of weights). The manifest carries all their hashes inside one envelope of at
most 1 MiB; more shards need a manifest in pieces, a new record version."""

MAX_STATES_BYTES = HASH_BYTES * MAX_STATE_HASHES

WIRE_SLACK_BYTES = 64 * KIB
"""How much longer than its raw bytes an encoded shard may be (RULES 8). Bounds what a decoder reads."""

MAX_FEED_BYTES = 2 * MIB
"""Frames in one answer. A receiver allocates at most this much, plus one envelope, for an unverified answer."""

MAX_ANSWER_BYTES = MAX_FEED_BYTES + MAX_ENVELOPE_BYTES + 4

PIECE_BYTES = 1 * MIB
"""Bytes read, hashed and written at a time; memory per shard in flight is about twice this."""

MAX_WAIT_MS = 25_000
"""Longest a server holds a long-poll open."""

DEFAULT_WAIT_MS = 20_000
"""What our clients ask for. Below `MAX_WAIT_MS`, so that the answer comes before the client gives up."""

CONNECT_DEADLINE_S = 5.0
ANSWER_DEADLINE_S = 10.0
"""Time a server has for an answer beyond the wait it was asked for."""

MISSING_WAIT_S = 5.0
"""How long a relay holds a child that asked for what the relay skipped and now fetches. Below `ANSWER_DEADLINE_S`, with
room for a second relay above it that does the same."""

NEXT_WAIT_S = 1.0
"""How long a relay holds a child that asks for one of the next publications: a lease may arrive before its policy. One
hop takes less; a relay that fell behind by more must let its child ask another parent."""

STALL_S = 3.0
"""A body that delivers nothing for this long is dropped and asked for elsewhere (field note, section 6)."""

SHARDS_IN_FLIGHT = 4
"""Shards asked for at once per download: 60 MB/s at 100 ms round trip needs about 6 MB in flight."""

WATCHED_SOURCES = 3
"""Sources whose news we follow at once. More costs requests; one would let it withhold news."""

SPARE_LOOK_S = 2.0
"""How often a source that isn't the first is asked for news. Longer lets the first one withhold news for longer;
shorter costs every source a request for nothing that often."""

HEAD_LIFETIME_MS = 3_600_000
"""How long a head is believed. The origin signs it again every third of this."""

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_ADDRESS = 256
"""Connections one address may hold. Each puller holds two or three; a whole demo shares 127.0.0.1."""

CHECKPOINT_LOOK_S = 1.0
"""How often the origin looks for a new checkpoint though nothing woke it."""

MAX_CHECKPOINT_JSON_BYTES = 1 * MIB
REMEMBERED_ROOTS = 64
"""Roots of past steps a follower keeps to notice a fork."""
