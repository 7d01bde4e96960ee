"""Invariants (DESIGN 7) that no other file tests as such: what holds for all of the code at once, not for one part.

Each of the nine has its test somewhere, and a mutation in `tests/mutations/` that makes it fail (`test_mutations.py`).
Here are the ones that are a property of the whole tree (1, 5), of several parts together (3), or that need one quick
look at one place (4, 9).

Not covered: awaiting a bare future or task: its deadline is that of whatever completes it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, records
from protocol.errors import DecodeError, ReasonCode
from shardcast.archive import open_published
from shardcast.errors import PublicationError, SourceError
from shardcast.layout import root_of_safetensors
from shardcast.origin import Origin
from shardcast.records import ShardRecord
from shardcast.source import Source, new_session
from shardcast.store import read_publication
from tests.archive_builder import make_manifest
from tests.shardcast_run import SMALL_SHAPES, MadeRun, lying, make_run, publishing, until, write_checkpoint
from tests.test_trainer_leases import Bench
from trainer import leases

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "shardcast", "environments", "verifier", "trainer", "node")

WAITS = {"wait", "communicate", "acquire", "drain", "read", "readany", "readexactly", "readline", "readuntil"}
WAITS |= {"receive", "receive_some", "recv", "send_all", "sendall", "connect"}
"""Methods that may wait for somebody else."""

BOUNDS = {"timeout", "timeout_at", "fail_after", "fail_at", "move_on_after", "move_on_at"}

UNBOUNDED = {
    # The process's own end, which a signal or the end of its parent brings: waiting for it is what a daemon does.
    ("node/engine.py", "run"): "until it is told to stop",
    ("node/join.py", "_until_stopped"): "until SIGINT or SIGTERM",
    ("node/join.py", "supervise"): "until the first of the node's loops ends; it is cancelled from outside",
    ("node/worker.py", "work"): "after the last assignment, until it is cancelled from outside",
    ("protocol/hostd.py", "receive"): "the socket pair ends with the application",
    ("protocol/hostd.py", "run"): "calls `receive`, above",
    ("protocol/hostd.py", "send"): "the application reads always, or both end",
    ("protocol/libp2p_fixes.py", "_handle_inbound_connection"): "holds a connection; `visitors` closes idle ones",
    ("trainer/coordinator.py", "_attend"): "until the run ends or a signal comes",
    ("trainer/coordinator.py", "_seal_policies"): "until a policy comes; cancelled when the coordinator ends",
    ("trainer/learner.py", "watch"): "a signal's wake-up socket, in a daemon thread",
    ("shardcast/origin.py", "_publish_at_once"): "its own thread, with one shard to encode, write and flush",
    ("shardcast/origin.py", "_publish_shards"): "its own threads, each with one shard to encode and write",
    # The caller holds the deadline.
    ("protocol/engine.py", "read_frame"): "both ends call it under a timeout",
    ("protocol/libp2p_fixes.py", "_read"): "a body under a timeout; a header whenever the peer has something",
    ("protocol/libp2p_fixes.py", "read"): "`streams` and handshakes read under a timeout; see `_read`",
    ("protocol/libp2p_fixes.py", "write"): "`streams` writes under a timeout",
    ("protocol/lines.py", "request"): "`Lines.request` runs it under `move_on_at`",
    ("protocol/trio_turns.py", "__aenter__"): "its holder writes under a timeout, or to `hostd`'s application",
    ("shardcast/source.py", "_refusal"): "aiohttp's sock_read and total deadlines, set with the request",
    ("shardcast/wire.py", "_receive_some"): "the socket's own timeout, a part of STALL_S",
    ("trainer/members.py", "_challenge"): "the session's total deadline, PROBE_S",
    # Our own processes over private sockets.
    ("node/engine.py", "_serve"): "a node that does not read its engine's answer blocks that connection only",
    ("protocol/host.py", "_answer"): "the host process reads always, or is restarted",
    ("protocol/host.py", "drain"): "the same; when it ends the wait does",
    ("protocol/host.py", "_reap"): "waits for a process after SIGKILL",
    # A wait that a newer event ends.
    ("shardcast/follower.py", "_fetch"): "a newer publication drops the track and cancels this",
}
"""(file, function) -> why a wait without a deadline of its own is sound there."""


class Waits(ast.NodeVisitor):
    """Collects the waits of one file that are not inside a deadline."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.bounded = 0
        self.found: list[tuple[str, int, str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self.bounded = self.bounded, 0
        self.functions.append(node.name)
        self.generic_visit(node)
        self.functions.pop()
        self.bounded = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        bounded = any(isinstance(i.context_expr, ast.Call) and _name(i.context_expr) in BOUNDS for i in node.items)
        self.bounded += bounded
        self.generic_visit(node)
        self.bounded -= bounded

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            self._look(node.value, node.value.func, waits=_name(node.value) in WAITS)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        bounded = _name(node) in BOUNDS
        self.bounded += bounded
        if isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            thread = _name(node) == "join" and not node.args and not of.startswith("self.member")
            blocking = _name(node) in ("wait", "communicate", "acquire", "recv") and of != "asyncio"
            program = of == "subprocess" and _name(node) in ("run", "call", "check_call", "check_output")
            self._look(node, node.func, waits=program or blocking or (thread and of in ("thread", "self._thread")))
        self.generic_visit(node)
        self.bounded -= bounded

    def _look(self, call: ast.Call, function: ast.Attribute, waits: bool) -> None:
        named = {keyword.arg for keyword in call.keywords} & {"timeout", "deadline_s"}
        of = ast.unparse(function.value)
        timed = named or (call.args and function.attr in ("wait", "acquire") and of != "asyncio")
        # `Backoff.wait` and `EngineClient.connect` are ours: a bounded sleep, and a required deadline.
        if waits and not self.bounded and not timed and "backoff" not in of.lower() and of != "EngineClient":
            self.found.append((self.functions[-1] if self.functions else "", call.lineno, ast.unparse(call)))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def unbounded_waits() -> Iterator[tuple[str, str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            waits = Waits()
            waits.visit(ast.parse(path.read_text()))
            for function, line, text in waits.found:
                yield str(path.relative_to(ROOT)), function, f"line {line}: {text}"


def test_no_wait_without_a_deadline() -> None:
    """Invariant 1. A new wait needs a deadline, or a line in UNBOUNDED that says what ends it."""
    found = list(unbounded_waits())
    unknown = [f"{file} {function}, {what}" for file, function, what in found if (file, function) not in UNBOUNDED]
    assert unknown == []
    unused = set(UNBOUNDED) - {(file, function) for file, function, _ in found}
    assert unused == set(), "exceptions that nothing needs any more"


RECORDS = sorted(
    (value for value in vars(records).values() if dataclasses.is_dataclass(value) and hasattr(value, "MAX_BYTES")),
    key=lambda cls: cls.__name__,
)
"""Every record that comes over the wire or from a ledger."""

HOSTILE = [
    b"",
    b"\xc1",
    b"\x91" * 3000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xa2\xff\xff",
    b"\xd4\x05\x00",
]
"""Nothing, a byte that is no type, nesting without end, lengths without bytes, text that is none, a foreign type."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)


def test_no_deadline_swallows_a_cancellation() -> None:
    """Before Python 3.12 `asyncio.wait_for` returns what has just arrived to a task that was just cancelled. A relay
    whose heartbeat was answered when it was stopped went on until its last resort. `asyncio.timeout` doesn't do so.
    """
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += [str(path) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
                      and ast.unparse(node.func) in ("asyncio.wait_for", "wait_for")]  # fmt: skip
    assert found == []


def test_there_are_records() -> None:
    assert len(RECORDS) >= 30


@settings(max_examples=300, deadline=None)
@given(
    cls=st.sampled_from(RECORDS),
    raw=st.sampled_from(HOSTILE) | st.binary(max_size=200) | st.lists(VALUES, max_size=14).map(msgpack.packb),
)
def test_no_bytes_make_a_records_decoder_raise_anything_but_its_error(cls: type, raw: bytes) -> None:
    """Invariant 5. Whatever arrives is a record within its bounds, or a DecodeError."""
    try:
        record = codec.decode(cls, raw)
    except DecodeError:
        return
    assert type(record) is cls


def test_a_peer_that_vanishes_costs_only_its_own_unfinished_leases() -> None:
    """Invariant 3: others keep what they hold, what it had uploaded is trained on, what it had not goes to others."""
    rules = replace(make_manifest().leases, probation_accepted=4, max_staleness=5)
    bench = Bench(nodes=2, leases=rules)
    lease_ms = bench.chain.manifest.leases.lease_ms
    bench.chain.policy(0)
    finished = [bench.accept("node-0").lease_id]
    uploaded = bench.take("node-0")
    bench.submit(uploaded)  # no verdict yet
    unfinished = bench.take("node-0")
    # ... and it is never heard of again. The other one goes on and holds a lease when that one's time is over.
    bench.accept("node-1")
    bench.book.time += lease_ms // 2
    others = bench.take("node-1")
    now = bench.state.leases[unfinished.lease_id].time + unfinished.duration_ms + leases.GRACE_MS + 1
    over = leases.expired(bench.state, bench.window, now, frozenset())
    assert [held.lease_id for held in over] == [unfinished.lease_id]
    bench.chain.close_lease(unfinished.lease_id)
    assert bench.state.leases[others.lease_id].status == "open"
    bench.judge(bench.submit(others))
    held = bench.state.leases[uploaded.lease_id].submission
    assert held is not None
    bench.judge(held)
    assert {o.status for o in bench.state.submissions[held].outcomes} == {"accepted"}
    again = bench.take("node-1")
    assert (again.nonce, again.tasks) == (unfinished.nonce, unfinished.tasks)
    bench.judge(bench.submit(again))
    trained = set()
    while entries := bench.close_batch():
        trained |= {bench.state.submissions[entry.submission].lease_id for entry in entries}
        bench.chain.policy(bench.window.batches)
    assert trained >= {uploaded.lease_id, others.lease_id}
    assert bench.state.nodes[bench.state.leases[finished[0]].owner].state == "active", "vanishing is no offence"


# --- 4 and 9: weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    """A run of one small shard whose step 0 is ready to be published."""
    made = make_run(tmp_path / "run", SMALL_SHAPES)
    write_checkpoint(made.directory, 0, 0, SMALL_SHAPES, seed=0)
    return made


async def test_a_flipped_bit_in_a_shard_is_refused_by_whoever_pulls_it(made: MadeRun) -> None:
    """Invariant 4, and attributed: the error names the source that sent it."""

    def flip(path: str, status: int, body: bytes) -> tuple[int, bytes]:
        return status, bytes([body[0] ^ 1]) + body[1:] if "/shard/" in path else body

    async with publishing(made) as origin, lying(origin.server.url, flip) as liar, new_session() as session:
        await until(lambda: bool(origin.store.keys), "the publication")
        record = next(iter(_shard_records(origin)))
        received = await Source(session, origin.server.url, made.run.id).shard((0, 0), record)
        assert blake3(received).digest() == record.wire_hash
        with pytest.raises(SourceError, match=liar) as caught:
            await Source(session, liar, made.run.id).shard((0, 0), record)
        assert caught.value.code == ReasonCode.SHARD_MISMATCH


def _shard_records(origin: Origin) -> Iterator[ShardRecord]:
    publication = read_publication(origin.store.folder((0, 0)), origin.store.run)
    for index in range(publication.shards):
        record = publication.expect(index)
        assert record is not None
        yield record


async def test_weights_that_do_not_hold_never_lie_under_the_name_they_are_loaded_by(
    made: MadeRun, tmp_path: Path
) -> None:
    """Invariant 9: a shard of the right length and another content leaves nothing that a loader would take."""
    origin = Origin(made.directory, identity=made.origin)
    await origin.start()
    await origin.publish_ready()
    await origin.close()
    shard = made.directory / "published" / "e0000-s00000000" / "shard-000000.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(PublicationError) as caught:
        open_published(made.directory, made.run).materialise(0, 0, tmp_path / "out")
    assert caught.value.code == ReasonCode.SHARD_MISMATCH
    assert list((tmp_path / "out").rglob("model.safetensors")) == []
    shard.write_bytes(good)
    policy = open_published(made.directory, made.run).materialise(0, 0, tmp_path / "out")
    assert root_of_safetensors(policy.directory / "model.safetensors") == policy.root
