"""A publication is only what its origin signed and only what holds together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.envelope import seal
from protocol.errors import DecodeError, EnvelopeError, ReasonCode
from protocol.identity import Identity
from protocol.limits import SHARD_BYTES
from shardcast.errors import ForkError, HeadError, PublicationError
from shardcast.follower import Candidate, choose_focus
from shardcast.heads import SeenHeads
from shardcast.layout import layout_hash, make_layout, root_of_states, shard_length
from shardcast.publication import manifest_for, pack_frames, publication_from, split_frames
from shardcast.records import (
    CODEC_FULL,
    HEAD_KIND,
    MANIFEST_KIND,
    NO_HASH,
    OPEN_KIND,
    SHARD_KIND,
    Head,
    PublicationOpen,
    ShardRecord,
)
from tests.shardcast_run import WIDE_SHAPES, MadeRun, make_run

NOW = 1_800_000_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("made") / "run", WIDE_SHAPES)


class Signed:
    """All records of one publication, signed by the run's origin."""

    def __init__(self, made: MadeRun, step: int = 3, salt: bytes = b"") -> None:
        self.made = made
        self.sequence = 0
        total = 4 * sum(a * (b[0] if b else 1) for a, *b in WIDE_SHAPES.values())
        count = -(-total // SHARD_BYTES)
        self.opening = PublicationOpen(
            0, step, b"p" * 16, NO_HASH, made.run.manifest.model.layout, CODEC_FULL, total, count, total
        )
        self.records = []
        for index in range(count):
            state = blake3(salt + bytes([index])).digest()
            length = shard_length(total, index)
            self.records.append(ShardRecord(b"p" * 16, index, length, length, state, NO_HASH, state))
        self.manifest = manifest_for(self.opening, self.records)
        self.open_raw = self.seal(OPEN_KIND, self.opening)
        self.shards_raw = [self.seal(SHARD_KIND, record) for record in self.records]
        self.manifest_raw = self.seal(MANIFEST_KIND, self.manifest)
        self.head = Head(0, step, b"p" * 16, blake3(self.manifest_raw).digest(), self.manifest.root, step)
        self.head_raw = self.seal(HEAD_KIND, self.head)

    def seal(self, kind: str, record: object, signer: Identity | None = None, at: int = NOW) -> bytes:
        self.sequence += 1
        envelope = seal(
            signer or self.made.origin, kind, record, run=self.made.run.id, sequence=self.sequence, issued_at=at
        )
        return envelope.raw

    @property
    def frames(self) -> list[bytes]:
        return [self.open_raw, *self.shards_raw, self.manifest_raw, self.head_raw]


def test_all_records_in_order_make_a_publication(made: MadeRun) -> None:
    signed = Signed(made)
    publication = publication_from(made.run, signed.frames)
    assert publication.key == (0, 3)
    assert publication.head == signed.head
    assert publication.frames() == signed.frames
    assert [publication.expect(i) for i in range(publication.shards)] == signed.records


def test_the_manifest_alone_says_what_to_expect_of_every_shard(made: MadeRun) -> None:
    signed = Signed(made)
    publication = publication_from(made.run, [signed.open_raw, signed.manifest_raw])
    assert [publication.expect(i) for i in range(publication.shards)] == signed.records
    assert publication.expect(publication.shards) is None


def test_shards_may_come_in_any_order_and_twice(made: MadeRun) -> None:
    signed = Signed(made)
    frames = [signed.open_raw, *reversed(signed.shards_raw), signed.shards_raw[0], signed.manifest_raw]
    assert publication_from(made.run, frames).manifest == signed.manifest


@pytest.mark.parametrize(
    "change",
    [
        {"codec": 9},
        {"layout": bytes(32)},
        {"shards": 2},
        {"shards": 0},
        {"shards": 1 << 31, "raw_bytes": (1 << 31) * SHARD_BYTES},
        {"raw_bytes": 1},
        {"base": b"\1" * 32},
        {"max_wire_bytes": 1 << 40},
    ],
)
def test_an_open_record_out_of_bounds_is_refused(made: MadeRun, change: dict[str, object]) -> None:
    signed = Signed(made)
    raw = signed.seal(OPEN_KIND, replace(signed.opening, **change))  # type: ignore[arg-type]
    with pytest.raises(PublicationError):
        publication_from(made.run, [raw])


@pytest.mark.parametrize(
    "change",
    [
        {"publication": b"q" * 16},
        {"index": 3},
        {"wire_bytes": 7},
        {"raw_bytes": 7},
        {"old_hash": b"\1" * 32},
        {"wire_hash": b"\1" * 32},
    ],
)
def test_a_shard_record_that_does_not_fit_is_refused(made: MadeRun, change: dict[str, object]) -> None:
    signed = Signed(made)
    raw = signed.seal(SHARD_KIND, replace(signed.records[0], **change))  # type: ignore[arg-type]
    with pytest.raises(PublicationError):
        publication_from(made.run, [signed.open_raw, raw])


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"publication": b"q" * 16},
        {"raw_bytes": 1},
        {"wire_bytes": 1},
        {"root": bytes(32)},
        {"states": bytes(64)},
        {"states": bytes(96)},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(made: MadeRun, change: dict[str, object]) -> None:
    signed = Signed(made)
    raw = signed.seal(MANIFEST_KIND, replace(signed.manifest, **change))  # type: ignore[arg-type]
    with pytest.raises(PublicationError):
        publication_from(made.run, [signed.open_raw, raw])


def test_two_records_for_one_shard_are_evidence_against_the_origin(made: MadeRun) -> None:
    signed = Signed(made)
    other = Signed(made, salt=b"x")
    with pytest.raises(ForkError) as caught:
        publication_from(made.run, [signed.open_raw, signed.shards_raw[1], other.shards_raw[1]])
    assert caught.value.evidence == (signed.shards_raw[1], other.shards_raw[1])


def test_a_manifest_that_contradicts_the_records_is_evidence(made: MadeRun) -> None:
    signed, other = Signed(made), Signed(made, salt=b"x")
    with pytest.raises(ForkError):
        publication_from(made.run, [signed.open_raw, signed.shards_raw[0], other.manifest_raw])
    with pytest.raises(ForkError):
        publication_from(made.run, [signed.open_raw, signed.manifest_raw, other.shards_raw[0]])
    lying = signed.seal(MANIFEST_KIND, replace(signed.manifest, records=bytes(32)))
    with pytest.raises(ForkError):
        publication_from(made.run, [signed.open_raw, *signed.shards_raw, lying])


def test_a_head_must_name_this_manifest_and_root(made: MadeRun) -> None:
    signed = Signed(made)
    start = [signed.open_raw, signed.manifest_raw]
    for change in ({"manifest": bytes(32)}, {"root": bytes(32)}):
        with pytest.raises(ForkError):
            publication_from(made.run, [*start, signed.seal(HEAD_KIND, replace(signed.head, **change))])
    with pytest.raises(PublicationError):
        publication_from(made.run, [*start, signed.seal(HEAD_KIND, replace(signed.head, step=9))])
    with pytest.raises(PublicationError):
        publication_from(made.run, [signed.open_raw, signed.head_raw])


def test_only_the_runs_origin_can_publish(made: MadeRun, tmp_path: Path) -> None:
    signed = Signed(made)
    with pytest.raises(EnvelopeError):
        publication_from(made.run, [signed.seal(OPEN_KIND, signed.opening, Identity.generate())])
    other = make_run(tmp_path / "other", WIDE_SHAPES)
    with pytest.raises(EnvelopeError) as caught:
        publication_from(other.run, [signed.open_raw])
    assert caught.value.code == ReasonCode.WRONG_RUN
    with pytest.raises(PublicationError):
        publication_from(made.run, [signed.shards_raw[0]])
    with pytest.raises(PublicationError):
        publication_from(made.run, [signed.seal("lease", signed.opening)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_flipped_bit_in_any_record_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = make_run(tmp_path_factory.mktemp("flip") / "run", WIDE_SHAPES)
    frames = Signed(made).frames
    which = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[which]) - 1))
    damaged = bytearray(frames[which])
    damaged[bit // 8] ^= 1 << (bit % 8)
    frames[which] = bytes(damaged)
    with pytest.raises((EnvelopeError, DecodeError, PublicationError)):
        publication_from(made.run, frames)


@given(st.binary(max_size=300))
def test_frames_are_split_totally(data: bytes) -> None:
    try:
        frames = split_frames(data)
    except DecodeError:
        return
    assert pack_frames(frames) == data


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_frames_survive_packing(frames: list[bytes]) -> None:
    assert split_frames(pack_frames(frames)) == frames


def test_a_frame_over_its_bound_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(DecodeError) as caught:
        split_frames(b"\xff\xff\xff\xff")
    assert caught.value.code == ReasonCode.OVERSIZE


def head(made: MadeRun, step: int, root: bytes, at: int = NOW) -> tuple[Head, object]:
    record = Head(0, step, b"p" * 16, bytes(32), root, step)
    return record, seal(made.origin, HEAD_KIND, record, run=made.run.id, sequence=1, issued_at=at)


def test_the_highest_head_is_remembered_across_restarts(made: MadeRun, tmp_path: Path) -> None:
    seen = SeenHeads(tmp_path / "s")
    for step in range(200):
        seen.accept(*head(made, step, bytes([step]) * 32), NOW)  # type: ignore[arg-type]
    again = SeenHeads(tmp_path / "s")
    assert again.highest == (0, 199)
    again.accept(*head(made, 199, bytes([199]) * 32), NOW)  # type: ignore[arg-type]
    with pytest.raises(HeadError) as caught:
        again.accept(*head(made, 198, bytes([198]) * 32), NOW)  # type: ignore[arg-type]
    assert caught.value.code == ReasonCode.STALE_SEQUENCE
    for step in (199, 198):
        with pytest.raises(ForkError):
            again.accept(*head(made, step, b"\xff" * 32), NOW)  # type: ignore[arg-type]
    assert (tmp_path / "s" / "seen.log").stat().st_size < 64 * 1024


def test_a_line_cut_by_a_crash_is_ignored(made: MadeRun, tmp_path: Path) -> None:
    SeenHeads(tmp_path / "s").accept(*head(made, 5, bytes(32)), NOW)  # type: ignore[arg-type]
    with (tmp_path / "s" / "seen.log").open("a") as log:
        log.write("0 6 abc")
    assert SeenHeads(tmp_path / "s").highest == (0, 5)


def test_a_head_that_is_not_fresh_is_refused(made: MadeRun, tmp_path: Path) -> None:
    seen = SeenHeads(tmp_path / "s")
    for at in (NOW - 10**7, NOW + 10**7):
        with pytest.raises(HeadError) as caught:
            seen.accept(*head(made, 1, bytes(32), at), NOW)  # type: ignore[arg-type]
        assert caught.value.code == ReasonCode.EXPIRED


def test_a_fork_found_once_stops_every_later_process(tmp_path: Path) -> None:
    SeenHeads(tmp_path / "s").record_fork(b"evidence")
    with pytest.raises(ForkError, match=r"fork-evidence\.hw"):
        SeenHeads(tmp_path / "s")


def test_focus_follows_the_newest_without_starving() -> None:
    def at(step: int, announced: bool = True) -> Candidate:
        return Candidate((0, step), announced)

    assert choose_focus(None, [], False) is None
    assert choose_focus(None, [at(1), at(2, False)], False) == (0, 2)
    assert choose_focus(at(1), [at(2)], False) == (0, 2), "the newest wins"
    assert choose_focus(at(1), [at(2)], True) == (0, 1), "but not twice in a row: a slow link must finish one"
    assert choose_focus(at(1), [at(2, False)], False) == (0, 1), "an unannounced one may never be finished"
    assert choose_focus(at(1, False), [at(2, False)], True) == (0, 2), "one whose origin died is left at once"
    assert choose_focus(at(2), [at(1)], False) == (0, 2)


@given(st.integers(1, 30), st.integers(1, 7))
def test_some_download_is_always_finished_however_slow_the_link(needed: int, interval: int) -> None:
    """A publication takes `needed` ticks to fetch and a new one comes every `interval` ticks."""
    focus: Candidate | None = None
    waiting: list[Candidate] = []
    dropped, progress, finished = False, 0, 0
    for tick in range(10 * (needed + interval)):
        if tick % interval == 0:
            waiting.append(Candidate((0, tick), True))
        chosen = choose_focus(focus, waiting, dropped)
        if focus is not None and chosen != focus.key:
            dropped, progress = True, 0
        focus = next((c for c in [*waiting, *([focus] if focus else [])] if c.key == chosen), None)
        waiting = [c for c in waiting if focus is None or c.key > focus.key]
        progress += focus is not None
        if progress >= needed:
            focus, dropped, progress, finished = None, False, 0, finished + 1
    assert finished >= 2


def test_records_encode_within_their_bounds(made: MadeRun) -> None:
    signed = Signed(made)
    for record in (signed.opening, signed.records[0], signed.manifest, signed.head):
        assert codec.decode(type(record), codec.encode(record)) == record


def test_the_vectors_of_the_specification() -> None:
    """Guards the formats: these bytes are in docs/protocol.md. Changing one splits every run from its archive."""
    layout = make_layout({"b": ("BF16", (2, 3)), "a": ("F32", (4,))})
    state = blake3(bytes(range(28))).digest()
    assert layout_hash(layout).hex() == "46de0cef456c9ed53270d86bc710fef0afc238c2b2cb65a4a4fc750565d03bbd"
    assert root_of_states([state]).hex() == "c07d136fee2436e468e759dc55d79d8cad9937e1fe21f8f981fae15d2f775fa0"
    assert root_of_states([state, state]).hex() == "81c7a9dea1914a7b5ce56329b3e550850b8026c4a10fbc66ff80d8abfaa2f553"
    name, h, zero = "c410" + "22" * 16, "c420" + layout_hash(layout).hex(), "c420" + "00" * 32
    new = "c420" + state.hex()
    root = "c420" + root_of_states([state]).hex()
    opening = PublicationOpen(0, 12, b"\x22" * 16, NO_HASH, layout_hash(layout), CODEC_FULL, 28, 1, 28)
    record = ShardRecord(b"\x22" * 16, 0, 28, 28, state, NO_HASH, state)
    assert codec.encode(opening).hex() == f"99000c{name}{zero}{h}001c011c"
    assert codec.encode(record).hex() == f"97{name}001c1c{new}{zero}{new}"
    manifest = manifest_for(opening, [record])
    digest = "c420a7a406dc0bd28ca5b6ff29f1be7ce3310151cfab9262005db7fd8768a18fbd48"
    assert codec.encode(manifest).hex() == f"9b000c{name}{zero}{h}001c1c{root}{digest}{new}"
    key = Identity.from_seed(bytes(32))
    sealed = seal(key, MANIFEST_KIND, manifest, run=b"\x11" * 32, sequence=3, issued_at=NOW, lifetime_ms=1000)
    announced = Head(0, 12, b"\x22" * 16, sealed.digest, manifest.root, 12)
    named = "c420286dbdc31432a6baf883c1c3870d2caa2335402890d7d4c92ea8fa5448517601"
    assert codec.encode(announced).hex() == f"96000c{name}{named}{root}0c"
    assert pack_frames([b"ab", b""]).hex() == "00000002616200000000"
