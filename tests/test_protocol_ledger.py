"""The live ledger: durable when it says so, one writer, honest about clocks; and the segments sealed from it."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from blake3 import blake3

from protocol import codec, segments
from protocol import ledger as ledger_module
from protocol.envelope import open_envelope, seal
from protocol.errors import LedgerError, ReasonCode
from protocol.ledger import Ledger, file_system_of
from protocol.merkle import MerkleLog, leaf_hash
from protocol.records import LeaseClosed, LedgerEntry, RoleGrant, TreeHead
from protocol.segments import Sealer, pack_segment, read_segments, seal_missing, segment_name
from protocol.sequences import Sequences
from tests.ledger_builder import START_MS, Chain, identity, make_manifest


class Clocks:
    """A wall clock and a monotonic clock a test can turn."""

    def __init__(self):
        self.wall, self.monotonic = START_MS, 1000

    def pass_ms(self, ms):
        self.wall += ms
        self.monotonic += ms


def open_ledger(folder, clocks=None, chain=None):
    clocks = clocks or Clocks()
    chain = chain or Chain()
    return Ledger.open(
        folder / "ledger.db",
        run=chain.run_id,
        coordinator=identity("coordinator"),
        sequences=Sequences(folder / "sequences.json"),
        clock_ms=lambda: clocks.wall,
        monotonic_ms=lambda: clocks.monotonic,
    )


async def test_what_was_committed_is_there_after_reopening(tmp_path):
    ledger = open_ledger(tmp_path)
    first = ledger.append("run.opened")
    second = ledger.append("grant", b"body", b"subject")
    assert (first.index, second.index, ledger.size, ledger.durable_size) == (0, 1, 2, 0)
    await ledger.commit()
    head = ledger.head()
    assert ledger.durable_size == head.size == 2
    ledger.close()

    again = open_ledger(tmp_path)
    stored = list(again.entries())
    assert [s.index for s in stored] == [0, 1, 2]
    assert [s.leaf for s in stored][:2] == [first.leaf, second.leaf]
    assert again.incarnation == 1 and stored[2].entry().event == "incarnation"
    entry = open_envelope(
        stored[1].raw_envelope, run=Chain().run_id, kind="entry", signer=identity("coordinator").public
    ).record(LedgerEntry)
    assert (entry.event, entry.body, entry.subject, entry.index) == ("grant", b"body", b"subject", 1)
    assert again.head_at(2).root == head.root
    again.close()


async def test_a_head_never_covers_what_is_not_durable(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.append("run.opened")
    assert ledger.head().size == 0
    await ledger.commit()
    ledger.append("grant")
    assert ledger.head().size == 1
    assert [s.index for s in ledger.entries()] == [0, 1]
    ledger.close()


async def test_many_appenders_share_flushes_and_keep_their_order(tmp_path):
    ledger = open_ledger(tmp_path)

    async def one(number):
        appended = ledger.append("grant", str(number).encode())
        await ledger.commit()
        assert ledger.durable_size > appended.index
        return appended

    appended = await asyncio.gather(*(one(i) for i in range(300)))
    assert [a.index for a in appended] == list(range(300))
    log = MerkleLog()
    for stored in ledger.entries():
        log.append(leaf_hash(stored.raw_envelope))
    assert log.root() == ledger.head().root
    ledger.close()


def test_append_many_is_durable_on_return(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.append_many([("run.opened", b"", b""), ("grant", b"x", b"")])
    assert ledger.durable_size == 2
    ledger.close()


def test_every_transaction_is_flushed_to_the_disk(tmp_path):
    """No test can cut the power; with less than FULL a committed entry may be gone after it."""
    ledger = open_ledger(tmp_path, Clocks(), Chain())
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ledger.close()


def test_a_second_writer_is_refused_and_told_who_holds_it(tmp_path):
    ledger = open_ledger(tmp_path)
    with pytest.raises(LedgerError, match=f"held by process {os.getpid()} on ") as caught:
        open_ledger(tmp_path)
    assert caught.value.code == ReasonCode.LEDGER_LOCKED
    ledger.close()
    open_ledger(tmp_path).close()


def test_another_runs_database_is_refused(tmp_path):
    open_ledger(tmp_path).close()
    with pytest.raises(LedgerError, match="belongs to run") as caught:
        open_ledger(tmp_path, chain=Chain(make_manifest(name="another")))
    assert caught.value.code == ReasonCode.WRONG_RUN


def test_a_damaged_database_is_named(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.append_many([("run.opened", b"", b""), ("grant", b"x", b""), ("grant", b"y", b"")])
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("UPDATE leaves SET envelope = x'00' WHERE idx = 1")
    db.close()
    with pytest.raises(LedgerError, match=r"entry 1 .* damaged"):
        open_ledger(tmp_path)
    (tmp_path / "ledger.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerError, match="restore it from a backup"):
        open_ledger(tmp_path)


def test_clocks_that_do_not_hold_are_refused(tmp_path):
    clocks = Clocks()
    ledger = open_ledger(tmp_path, clocks)
    ledger.append("run.opened")
    clocks.wall -= 900
    assert ledger.append("grant").entry.time == START_MS, "jitter within a second is read as the last entry's time"
    clocks.wall -= 5_000
    with pytest.raises(LedgerError, match="before the ledger's last entry"):
        ledger.append("grant")
    clocks.wall = START_MS
    clocks.pass_ms(3_600_000)
    ledger.append("grant")
    clocks.wall += 61_000
    with pytest.raises(LedgerError, match="leapt 61 s ahead"):
        ledger.append("grant")
    ledger.close()
    ledger = open_ledger(tmp_path, clocks)
    assert ledger.size == 4, "a restart is how the operator accepts the clock"
    ledger.close()
    clocks.wall -= 100_000
    with pytest.raises(LedgerError, match="before the ledger's last entry"):
        open_ledger(tmp_path, clocks)


def test_network_file_systems_are_told_apart():
    mountinfo = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /mnt/share rw shared:7 - nfs4 server:/x rw\n"
        "31 30 0:41 / /mnt/share/local\\040disk rw - xfs /dev/sdb rw\n"
    )
    assert file_system_of(Path("/home/x"), mountinfo) == "ext4"
    assert file_system_of(Path("/mnt/share/run"), mountinfo) == "nfs4"
    assert file_system_of(Path("/mnt/shareholder"), mountinfo) == "ext4"
    assert file_system_of(Path("/mnt/share/local disk/run"), mountinfo) == "xfs"


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "file_system_of", lambda path, text: "nfs4")
    with pytest.raises(LedgerError, match="network file system"):
        open_ledger(tmp_path)


_WRITER = """
    import asyncio, sys, time
    from pathlib import Path
    from protocol.ledger import Ledger
    from protocol.segments import seal_missing
    from protocol.sequences import Sequences
    from tests.archive_builder import Chain, identity

    async def main(folder):
        ledger = Ledger.open(folder / "ledger.db", run=Chain().run_id, coordinator=identity("coordinator"),
                             sequences=Sequences(folder / "sequences.json"), clock_ms=lambda: time.time_ns() // 10**6)
        number = 0
        while True:
            appended = ledger.append("grant", str(number).encode())
            await ledger.commit()
            print(appended.index, appended.leaf.hex(), flush=True)
            number += 1
            if number % 20 == 0:
                seal_missing(ledger, folder / "ledger")

    asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("moment", [0.6, 1.1])
def test_kill_9_loses_nothing_that_was_committed_and_sealing_continues(tmp_path, moment):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        said = [child.stdout.readline()]
        end = time.monotonic() + moment
        while time.monotonic() < end:
            said.append(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    finally:
        child.kill()
        child.wait(timeout=10)
        child.stdout.close()
    promised = {int(i): leaf for i, leaf in (line.split() for line in said if line.endswith("\n"))}
    assert len(promised) >= 20
    clocks = Clocks()
    clocks.wall = time.time_ns() // 10**6
    ledger = open_ledger(tmp_path, clocks)
    stored = {s.index: s.leaf.hex() for s in ledger.entries()}
    assert promised.items() <= stored.items()
    seal_missing(ledger, tmp_path / "ledger")
    assert seal_missing(ledger, tmp_path / "ledger") == []
    log = read_segments(tmp_path / "ledger", Chain().run)
    assert log.problems == [] and log.size == ledger.size == len(log.entries)
    assert log.head.root == ledger.head().root
    ledger.close()


# --- segments -----------------------------------------------------------------------------------------------------


def sealed_folder(tmp_path, segments=3, each=4):
    clocks, chain = Clocks(), Chain()
    ledger = open_ledger(tmp_path, clocks, chain)
    for segment in range(segments):
        items = [("grant", bytes([segment, i]), bytes(40)) for i in range(each)]
        ledger.append_many(items)
        clocks.pass_ms(1000)
        assert len(seal_missing(ledger, tmp_path / "ledger")) == 1
    ledger.close()
    return tmp_path / "ledger", chain.run


def test_segments_hold_every_entry_and_a_signed_head_each(tmp_path):
    folder, run = sealed_folder(tmp_path)
    log = read_segments(folder, run)
    assert log.problems == []
    assert [e.index for e in log.entries] == list(range(12)) and log.size == 12
    assert [e.entry.body for e in log.entries[4:6]] == [b"\x01\x00", b"\x01\x01"]
    assert isinstance(log.head, TreeHead) and log.head.size == 12


def test_sealing_splits_large_ledgers(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 5)
    ledger = open_ledger(tmp_path)
    ledger.append_many([("grant", b"", b"")] * 12)
    paths = seal_missing(ledger, tmp_path / "ledger")
    assert [p.name for p in paths] == [segment_name(0), segment_name(5), segment_name(10)]
    assert read_segments(tmp_path / "ledger", Chain().run).problems == []
    ledger.close()


def test_a_sealed_segment_is_not_opened_again_however_long_the_run_is(tmp_path, monkeypatch):
    opened = []
    plain = Path.open

    def counting(path, *args, **kwargs):
        opened.append(path.name)
        return plain(path, *args, **kwargs)

    ledger = open_ledger(tmp_path)
    sealer = Sealer(ledger, tmp_path / "ledger")
    ledger.append_many([("grant", b"", b"")])
    sealer.seal()
    monkeypatch.setattr(Path, "open", counting)
    for number in range(20):
        ledger.append_many([("grant", bytes([number]), b"")])
        assert [p.name for p in sealer.seal()] == [segment_name(1 + number)]
    assert [name for name in opened if name.endswith(".hwl")] == []
    assert sealer.seal() == []
    monkeypatch.undo()
    assert read_segments(tmp_path / "ledger", Chain().run).problems == []
    ledger.close()


async def test_a_segment_written_beside_the_run_holds_a_prefix_and_the_next_one_the_rest(tmp_path):
    """The coordinator seals in a thread while entries come; a disk that refuses costs a later call nothing."""
    ledger = open_ledger(tmp_path)
    sealer = Sealer(ledger, tmp_path / "ledger")
    for _ in range(6):
        sealing = asyncio.create_task(asyncio.to_thread(sealer.seal))
        for number in range(30):
            ledger.append("grant", bytes([number]))
            if number % 10 == 9:
                await ledger.commit()
        await sealing
    sealer.seal()
    ledger.append("grant", b"not sealed")
    await ledger.commit()
    (tmp_path / "ledger").rename(tmp_path / "away")
    with pytest.raises(OSError):
        sealer.seal()
    (tmp_path / "away").rename(tmp_path / "ledger")
    assert len(sealer.seal()) == 1
    log = read_segments(tmp_path / "ledger", Chain().run)
    assert log.problems == [] and log.size == ledger.size
    ledger.close()


async def test_what_an_entry_wakes_shares_its_flush(tmp_path):
    """A lease after its policy, a batch after the last verdict: one write to the disk, not two."""
    ledger = open_ledger(tmp_path)
    before, woken = ledger.durable_size, asyncio.Event()

    async def follow() -> None:
        await woken.wait()
        ledger.append("grant", b"what follows")
        await ledger.commit()

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    ledger.append("grant", b"what it waited for")
    woken.set()
    await ledger.commit()
    assert ledger.durable_size == before + 2
    await following
    ledger.close()


def test_every_flipped_bit_in_a_segment_is_named(tmp_path):
    folder, run = sealed_folder(tmp_path, segments=2, each=2)
    path = folder / segment_name(2)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        problems = read_segments(folder, run).problems
        assert problems, f"the flip at byte {at} was not seen"
        assert any(p.record in (f"ledger/{path.name}", "ledger/2", "ledger/3") for p in problems)


def test_a_segment_of_any_size_costs_a_reader_no_more_than_the_bound(tmp_path, monkeypatch):
    folder, run = sealed_folder(tmp_path)
    path = sorted(folder.glob("*.hwl"))[-1]
    with path.open("r+b") as file:
        file.truncate(1 << 38)  # sparse: 256 GiB that cost its owner nothing
    log = read_segments(folder, run)
    assert [(p.record, "bound" in p.message) for p in log.problems] == [(f"ledger/{path.name}", True)]


def test_cut_missing_and_foreign_segments_are_named(tmp_path):
    folder, run = sealed_folder(tmp_path)
    path = folder / segment_name(4)
    whole = path.read_bytes()
    for cut in (0, 10, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert any(p.record.startswith("ledger/") for p in read_segments(folder, run).problems)
    path.unlink()
    problems = read_segments(folder, run).problems
    assert [(p.record, p.reason) for p in problems] == [(f"ledger/{segment_name(8)}", ReasonCode.RECORD_MISSING)]
    for other in folder.iterdir():
        other.unlink()
    assert read_segments(folder, run).problems[0].reason == ReasonCode.RECORD_MISSING


def test_a_log_rewritten_without_the_coordinators_key_is_seen(tmp_path):
    """Entries are swapped and the file hash is made to fit: the signatures and the signed root still say no."""
    folder, run = sealed_folder(tmp_path, segments=1, each=3)
    path = folder / segment_name(0)
    body = path.read_bytes()[:-32]
    changed = body.replace(b"\x00\x01" + b"\xc4\x28", b"\x00\x02" + b"\xc4\x28")
    assert changed != body
    path.write_bytes(changed + blake3(changed).digest())
    problems = read_segments(folder, run).problems
    assert [p.record for p in problems] == ["ledger/1"] and problems[0].reason == ReasonCode.BAD_SIGNATURE


def test_sealing_refuses_a_folder_that_is_not_this_ledgers(tmp_path):
    folder, _ = sealed_folder(tmp_path)
    clocks = Clocks()
    clocks.pass_ms(60_000)
    ledger = open_ledger(tmp_path, clocks)
    (folder / segment_name(4)).unlink()
    with pytest.raises(LedgerError, match="does not continue this ledger at entry 4"):
        seal_missing(ledger, folder)
    ledger.close()


def test_the_specifications_vectors():
    entry = LedgerEntry(
        7, 1, 1_760_000_000_000, "lease.closed", codec.encode(LeaseClosed(bytes(range(16)), "expired")), b""
    )
    assert codec.encode(entry).hex() == (
        "960701cf00000199c82cc000ac6c656173652e636c6f736564c41b92c410000102030405060708090a0b0c0d0e0f"
        "a765787069726564c400"
    )
    assert pack_segment(bytes(32), 7, [b"\x01\x02"], b"\x03").hex() == (
        "6865616477617465722d7365676d656e742f3100" + "00" * 32 + "0000000000000007" + "00000001"
        "00000002"
        "0102"
        "00000001"
        "03"
        "53ed3f4b6cda5d8bcf0fd32ccfef0507e163b676968716625da6864eaf35c2bc"
    )


def test_an_unreadable_folder_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        read_segments(tmp_path / "nothing", Chain().run)


# --- the coordinator's key changes --------------------------------------------------------------------------------


async def rotated(tmp_path, revoke=None):
    """A sealed ledger whose coordinator signs with another key from the middle on."""
    chain = Chain()
    chain.sink = ledger = open_ledger(tmp_path, chain=chain)
    chain.open()
    chain.join("ann", "inference")
    chain.policy(0)
    await ledger.commit()
    seal_missing(ledger, tmp_path / "sealed")
    chain.lease("ann")
    index = chain.update(rotate={"coordinator": "coordinator-2"}, revoke=revoke)
    chain.close_lease(next(iter(chain.leases)))
    await ledger.commit()
    seal_missing(ledger, tmp_path / "sealed")
    ledger.close()
    return chain, index


async def test_a_rotated_coordinator_signs_on_and_every_reader_follows(tmp_path):
    chain, index = await rotated(tmp_path)
    log = read_segments(tmp_path / "sealed", chain.run)
    assert log.problems == [] and log.chain.hash == chain.links.hash and log.head.size == index + 2
    signers = [sealed.envelope.signer for sealed in log.entries]
    assert signers == [identity("coordinator").public] * index + [identity("coordinator-2").public] * 2


async def test_a_ledger_opens_with_the_key_that_follows_the_last_entrys(tmp_path):
    chain, _ = await rotated(tmp_path)

    def reopen(name, earlier=()):
        Ledger.open(
            tmp_path / "ledger.db",
            run=chain.run_id,
            coordinator=identity(name),
            sequences=Sequences(tmp_path / "sequences.json"),
            clock_ms=lambda: START_MS * 2,
            earlier=earlier,
        ).close()

    with pytest.raises(LedgerError, match="never was this coordinator's"):
        reopen("coordinator-3")
    reopen("coordinator-3", [identity("coordinator-2").public])


async def test_the_key_before_signs_nothing_after_its_successor(tmp_path):
    chain, _ = await rotated(tmp_path)
    old = identity("coordinator")
    path = sorted((tmp_path / "sealed").glob("*.hwl"))[-1]
    log = read_segments(tmp_path / "sealed", chain.run)
    last = log.entries[-1]
    kept = [sealed.envelope.raw for sealed in log.entries if sealed.index >= 3]
    forged = seal(
        old, "entry", last.entry, run=chain.run_id, sequence=999, issued_at=last.entry.time
    ).raw  # fmt: skip
    tree = MerkleLog()
    for sealed in log.entries[:-1]:
        tree.append(leaf_hash(sealed.envelope.raw))
    tree.append(leaf_hash(forged))
    head = seal(old, "tree", TreeHead(tree.size, tree.root(), 1), run=chain.run_id, sequence=999, issued_at=1)
    first = int(path.stem.split("-")[1])
    path.write_bytes(pack_segment(chain.run_id, first, [*kept[:-1], forged], head.raw))
    problems = read_segments(tmp_path / "sealed", chain.run).problems
    assert [(p.record, p.reason) for p in problems] == [(f"ledger/{last.index}", ReasonCode.BAD_SIGNATURE)]


async def test_entries_of_a_coordinator_key_that_was_revoked_backwards_are_named(tmp_path):
    chain, _ = await rotated(tmp_path, revoke={"coordinator": 2})
    problems = read_segments(tmp_path / "sealed", chain.run).problems
    assert {p.record for p in problems if p.reason == ReasonCode.KEY_REVOKED} == {"ledger/2", "ledger/3"}


@pytest.mark.parametrize(("named", "wrong"), [(True, []), (False, [1, 2])])
async def test_a_key_signs_the_updates_it_begins_with_and_no_others(tmp_path, named, wrong):
    """What a coordinator key that was changed while nobody served begins with: the updates up to the one naming it."""
    chain = Chain()
    ledger = open_ledger(tmp_path, chain=chain)
    chain.sink = ledger
    chain.open()
    ledger.sign_with(identity("coordinator-2"))
    chain.update(note="of another matter")
    chain.update(note="and one more")
    if named:
        chain.update(rotate={"coordinator": "coordinator-2"}, revoke={"coordinator": 1})
    else:
        ledger.sign_with(identity("coordinator"))
    chain.append("grant", RoleGrant(bytes(32), "relay"))
    await ledger.commit()
    seal_missing(ledger, tmp_path / "sealed")
    ledger.close()
    problems = read_segments(tmp_path / "sealed", chain.run).problems
    assert [problem.record for problem in problems] == [f"ledger/{index}" for index in wrong]
    assert {problem.reason for problem in problems} <= {ReasonCode.BAD_SIGNATURE}
