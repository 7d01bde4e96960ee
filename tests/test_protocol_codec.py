"""Long lists are read and written by columns: the same records, bytes and refusals as one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import DecodeError


@codec.record(1 << 16)
@dataclass(frozen=True)
class Part:
    name: Annotated[str, codec.Text(5)]
    value: Annotated[float, codec.Real()]


@codec.record(1 << 16)
@dataclass(frozen=True)
class Item:
    number: Annotated[int, codec.UInt(16)]
    digest: Annotated[bytes, codec.Fixed(2)]
    tokens: Annotated[bytes, codec.Blob(8, 4)]
    flag: Annotated[bool, codec.Flag()]
    maybe: Annotated[int | None, codec.Maybe(codec.UInt(8))]
    parts: Annotated[tuple[Part, ...], codec.Seq(codec.Sub(Part), 3)]
    names: Annotated[tuple[str, ...], codec.Seq(codec.Text(4), 2)]
    added: Annotated[int, codec.UInt(8)] = 7


@codec.record(1 << 16)
@dataclass(frozen=True)
class Plain:
    """A record all of whose fields can be read by columns."""

    number: Annotated[int, codec.UInt(16)]
    digest: Annotated[bytes, codec.Fixed(2)]
    tokens: Annotated[bytes, codec.Blob(8, 4)]
    parts: Annotated[tuple[Part, ...], codec.Seq(codec.Sub(Part), 3)]
    names: Annotated[tuple[str, ...], codec.Seq(codec.Text(4), 2)]


@codec.record(1 << 20)
@dataclass(frozen=True)
class Items:
    items: Annotated[tuple[Item, ...], codec.Seq(codec.Sub(Item), 40)]


@codec.record(1 << 20)
@dataclass(frozen=True)
class Plains:
    items: Annotated[tuple[Plain, ...], codec.Seq(codec.Sub(Plain), 40)]


SCALARS: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 16,
    1 << 63,
    0.5,
    float("nan"),
    float("inf"),
    3,
    "",
    "long text",
    "ü",
    "üü",
]
BYTES: list[Any] = [b"", b"xyz", b"\0" * 4, b"\0" * 12]
LISTS: list[Any] = [[], [1], ["a", 1.0], ["a", 1.0, 2], [["a", 1.0]] * 4, ["a", "b", "c"], {}]
ODD: st.SearchStrategy[Any] = st.sampled_from([*SCALARS, *BYTES, *LISTS])
PARTS = st.lists(st.tuples(st.text("ab", max_size=5), st.floats(allow_nan=False, allow_infinity=False)), max_size=3)
PLAIN: list[st.SearchStrategy[Any]] = [
    st.integers(0, (1 << 16) - 1),
    st.binary(min_size=2, max_size=2),
    st.sampled_from([b"", b"1234", b"12345678"]),
    PARTS.map(lambda parts: [list(part) for part in parts]),
    st.lists(st.sampled_from(["", "abcd", "üü"]), max_size=2),
]
ITEM = [*PLAIN[:3], st.booleans(), st.none() | st.integers(0, 255), *PLAIN[3:], st.integers(0, 255)]


def rows(fields: list[st.SearchStrategy[Any]]) -> st.SearchStrategy[list[Any]]:
    """Lists of rows: all good, or with some odd value, a field more or a field less in some."""
    good = st.tuples(*fields).map(list)
    place = st.tuples(st.integers(0, 19), st.integers(0, len(fields)), ODD, st.booleans())

    def spoil(drawn: tuple[list[Any], list[Any]]) -> list[Any]:
        made, places = drawn
        for at, field, odd, cut in places:
            row = made[at % len(made)]
            row[field : None if cut else field + 1] = [odd]
        return made

    return st.tuples(st.lists(good, min_size=codec.MANY, max_size=20), st.lists(place, max_size=2)).map(spoil)


def read(cls: type[Any], values: list[Any]) -> tuple[Any, str]:
    try:
        return codec.decode(cls, msgpack.packb([values], use_bin_type=True)).items, ""
    except DecodeError as exc:
        return None, str(exc)


@pytest.mark.parametrize(("cls", "fields"), [(Items, ITEM), (Plains, PLAIN)])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_long_list_gives_what_its_items_give_one_by_one(cls: Any, fields: Any, data: st.DataObject) -> None:
    values = data.draw(rows(fields))
    together, refusal = read(cls, values)
    alone = [read(cls, [value]) for value in values]
    assert refusal == next((why for _, why in alone if why), "")
    if not refusal:
        assert together == tuple(items[0] for items, _ in alone)
        assert [type(part) for item in together for part in item.parts] == [
            Part for item in together for _ in item.parts
        ]
        written = codec.encode(cls(together))
        assert codec.decode(cls, written).items == together
        one_by_one = [msgpack.unpackb(codec.encode(cls((item,))))[0][0] for item in together]
        assert written == msgpack.packb([one_by_one], use_bin_type=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"number": 1 << 16},
        {"number": True},
        {"digest": b"x"},
        {"tokens": b"123"},
        {"tokens": bytes(12)},
        {"parts": (Part("a", float("nan")),)},
        {"parts": (Part("a", 0.5),) * 4},
        {"names": ("long text",)},
        {"names": ("a",) * 3},
    ],
)
@pytest.mark.parametrize("place", [0, 11])
def test_nothing_is_encoded_that_would_be_refused(bad: dict[str, Any], place: int) -> None:
    good = Plain(1, b"ab", b"1234", (Part("a", 0.5), Part("b", 1)), ("a", "ü"))
    items = [good] * 12
    assert codec.decode(Plains, codec.encode(Plains(tuple(items)))).items == tuple(items)
    items[place] = replace(good, **bad)
    with pytest.raises(DecodeError):
        codec.encode(Plains(tuple(items)))
    with pytest.raises(DecodeError):
        codec.encode(Plains(tuple([good] * 41)))


def test_what_was_decoded_lately_is_the_same_record_and_a_refusal_is_said_each_time() -> None:
    raw = codec.encode(Part("a", 0.5))
    assert codec.decode(Part, raw) is codec.decode(Part, bytes(bytearray(raw)))
    for _ in range(2):
        with pytest.raises(DecodeError):
            codec.decode(Part, raw[:-1])
        with pytest.raises(DecodeError):
            codec.decode(Item, raw)
