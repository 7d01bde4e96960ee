"""Records of patches: what an origin may sign, and what is refused. Joined frames. Layouts of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.envelope import seal
from protocol.errors import ProtocolError, ReasonCode
from protocol.limits import SHARD_BYTES
from shardcast.archive import open_published
from shardcast.codecs import Codec, Segment, decode, encode
from shardcast.codecs.frames import join
from shardcast.encoding import OpenCheckpoint, patch_pays
from shardcast.errors import CodecError, PublicationError
from shardcast.layout import open_safetensors, root_of_states, shard_length
from shardcast.limits import WIRE_SLACK_BYTES
from shardcast.publication import Publication, manifest_for, publication_from
from shardcast.records import MANIFEST_KIND, NO_HASH, OPEN_KIND, SHARD_KIND, PublicationOpen, ShardRecord
from tests.shardcast_run import (
    WIDE_SHAPES,
    MadeRun,
    drifted,
    holds,
    make_run,
    publishing,
    pulling,
    until,
    weights,
    write_checkpoint,
)

NOW = 1_800_000_000_000
TOTAL = sum(4 * int(np.prod(shape)) for shape in WIDE_SHAPES.values())
COUNT = -(-TOTAL // SHARD_BYTES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("made") / "run", WIDE_SHAPES)


def opened(made: MadeRun, number: int = Codec.GAPS, /, **changes: object) -> PublicationOpen:
    base = root_of_states([blake3(b"old%d" % i).digest() for i in range(COUNT)]) if number >= Codec.GAPS else NO_HASH
    layout = made.run.manifest.model.layout
    opening = PublicationOpen(0, 3, b"p" * 16, base, layout, int(number), TOTAL, COUNT, TOTAL + COUNT)
    return replace(opening, **changes)  # type: ignore[arg-type]


def shard(index: int, codec: int = Codec.GAPS, **changes: object) -> ShardRecord:
    old = blake3(b"old%d" % index).digest() if codec >= Codec.GAPS else NO_HASH
    wire, new = blake3(b"wire%d" % index).digest(), blake3(b"new%d" % index).digest()
    record = ShardRecord(b"p" * 16, index, 1000, shard_length(TOTAL, index), wire, old, new)
    return replace(record, **changes)  # type: ignore[arg-type]


def taken(made: MadeRun, *records: tuple[str, object]) -> Publication:
    raws = [
        seal(made.origin, kind, record, run=made.run.id, sequence=number, issued_at=NOW).raw
        for number, (kind, record) in enumerate(records, 1)
    ]
    return publication_from(made.run, raws)


@pytest.mark.parametrize("codec", [Codec.ANCHOR, Codec.GAPS, Codec.CLASSES])
def test_a_publication_of_frames_holds_together(made: MadeRun, codec: Codec) -> None:
    opening, records = opened(made, codec), [shard(index, codec) for index in range(COUNT)]
    manifest = manifest_for(opening, records)
    publication = taken(
        made, (OPEN_KIND, opening), *((SHARD_KIND, record) for record in records), (MANIFEST_KIND, manifest)
    )
    assert [publication.expect(index) for index in range(COUNT)] == records
    assert manifest.wire_bytes == 1000 * COUNT
    alone = taken(made, (OPEN_KIND, opening), (MANIFEST_KIND, manifest)).expect(0)
    assert alone is not None and (alone.wire_hash, alone.wire_bytes, alone.new_hash) == (
        NO_HASH,
        0,
        records[0].new_hash,
    )


@pytest.mark.parametrize(
    ("codec", "change"),
    [
        (Codec.GAPS, {"base": NO_HASH}),
        (Codec.CLASSES, {"base": NO_HASH}),
        (Codec.ANCHOR, {"base": b"b" * 32}),
        (Codec.RAW, {"base": b"b" * 32}),
        (Codec.GAPS, {"codec": 4}),
        (Codec.GAPS, {"max_wire_bytes": TOTAL + COUNT * WIRE_SLACK_BYTES + 1}),
    ],
)
def test_an_open_record_of_patches_names_a_base_and_no_other_does(
    made: MadeRun, codec: Codec, change: dict[str, object]
) -> None:
    with pytest.raises(PublicationError) as caught:
        taken(made, (OPEN_KIND, opened(made, codec, **change)))
    assert (caught.value.code == ReasonCode.UNSUPPORTED_VERSION) == (change.get("codec") == 4)


@pytest.mark.parametrize(
    ("codec", "change"),
    [
        (Codec.GAPS, {"old_hash": NO_HASH}),
        (Codec.ANCHOR, {"old_hash": b"o" * 32}),
        (Codec.GAPS, {"wire_hash": NO_HASH}),
        (Codec.GAPS, {"wire_bytes": 0}),
        (Codec.GAPS, {"wire_bytes": SHARD_BYTES + WIRE_SLACK_BYTES + 1}),
        (Codec.GAPS, {"raw_bytes": SHARD_BYTES - 1}),
    ],
)
def test_a_record_of_a_frame_out_of_bounds_is_refused(made: MadeRun, codec: Codec, change: dict[str, object]) -> None:
    with pytest.raises(PublicationError):
        taken(made, (OPEN_KIND, opened(made, codec)), (SHARD_KIND, shard(0, codec, **change)))


def test_frames_longer_than_announced_or_of_another_base_are_refused(made: MadeRun) -> None:
    long = opened(made, max_wire_bytes=1500)
    with pytest.raises(PublicationError) as caught:
        taken(made, (OPEN_KIND, long), (SHARD_KIND, shard(0)), (SHARD_KIND, shard(1)))
    assert caught.value.code == ReasonCode.OVERSIZE
    opening, records = opened(made, base=b"b" * 32), [shard(index) for index in range(COUNT)]
    with pytest.raises(PublicationError, match="another root"):
        taken(
            made,
            (OPEN_KIND, opening),
            *((SHARD_KIND, record) for record in records),
            (MANIFEST_KIND, manifest_for(opening, records)),
        )
    opening = opened(made)
    miscounted = replace(manifest_for(opening, records), wire_bytes=7)
    with pytest.raises(ProtocolError):
        taken(made, (OPEN_KIND, opening), *((SHARD_KIND, r) for r in records), (MANIFEST_KIND, miscounted))


async def test_adapters_travel_as_any_other_tensors(tmp_path: Path) -> None:
    """LoRA: the state is the adapter's tensors only, here of two dtypes; a step of them is a patch like any other."""
    layers = range(2)
    names = {f"base_model.model.layers.{i}.q_proj.lora_{side}.weight": side for i in layers for side in "AB"}

    def adapter(step: int) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = {}
        for number, (name, side) in enumerate(names.items()):
            rng = np.random.default_rng(number)
            shape, kind = ((8, 3000), np.float32) if side == "A" else ((3000, 8), np.float16)
            tensor = rng.standard_normal(shape).astype(kind)
            bits = tensor.reshape(-1).view(np.uint32 if side == "A" else np.uint16)
            bits[:: 97 + number] += np.asarray(step, bits.dtype)
            tensors[name] = tensor
        return tensors

    shapes = {name: tensor.shape for name, tensor in adapter(0).items()}
    kinds = {name: "F32" if side == "A" else "F16" for name, side in names.items()}
    made = make_run(tmp_path / "run", shapes, kinds)
    async with publishing(made, codec=Codec.GAPS) as origin, pulling(made, [origin.server.url], tmp_path / "a") as one:
        for step in range(3):
            write_checkpoint(made.directory, 0, step, shapes, 0, adapter(step))
            await until(lambda step=step: one.current is not None and one.current.step == step, f"step {step}")
            assert one.current is not None and holds(one.current, shapes, 0, adapter(step))
    archive = open_published(made.directory, made.run)
    assert [archive.publications[0, step].publication.open.codec for step in range(3)] == [1, 2, 2]
    assert list(archive.problems()) == []


KINDS = [(1, 0), (2, 7), (4, 23), (8, 52)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_frames_do_what_they_do_one_after_another(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(KINDS)), min_size=1, max_size=3))
    segments = tuple(Segment(items, *kind) for items, kind in kinds)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = sum(segment.nbytes for segment in segments)
    share = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    states = [rng.integers(0, 256, size, dtype=np.uint8)]
    frames = []
    for _ in range(data.draw(st.integers(0, 5))):
        after = states[-1].copy()
        hit = rng.random(size) < share
        after[hit] = rng.integers(0, 256, int(hit.sum()), dtype=np.uint8)
        # Patches even where an anchor were shorter: encoded against what `encode` can't prefer to them.
        frame = encode(Codec.GAPS, states[-1].tobytes(), after.tobytes(), segments)
        if frame[0] == Codec.GAPS:
            frames.append(frame)
            states.append(after)
    out = bytearray(size)
    decode(join(frames, segments), states[0].tobytes(), out, segments)
    assert bytes(out) == states[-1].tobytes()


def test_only_gaps_are_joined() -> None:
    with pytest.raises(CodecError) as caught:
        join([encode(Codec.ANCHOR, None, bytes(8), (Segment(4, 2, 7),))], (Segment(4, 2, 7),))
    assert caught.value.code == ReasonCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize(("share", "pays"), [(0.001, True), (0.02, True), (1.0, False)])
def test_samples_tell_whether_a_patch_pays(made: MadeRun, share: float, pays: bool) -> None:
    opened = []
    for number, tensors in enumerate((weights(WIDE_SHAPES, 0), drifted(WIDE_SHAPES, 1, share))):
        if share == 1.0 and number:
            tensors = weights(WIDE_SHAPES, 1)
        folder = write_checkpoint(made.directory, 0, 100 + number, WIDE_SHAPES, 0, tensors)
        opened.append(OpenCheckpoint((0, 100 + number), open_safetensors(Path(folder) / "model.safetensors")))
    assert patch_pays(opened[0], opened[1], Codec.GAPS) == pays
    for one in opened:
        one.close()
