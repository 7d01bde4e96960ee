"""Typed, bounded records on msgpack arrays.

A record is a frozen dataclass whose fields are `Annotated` with a spec from this module. It is encoded as a
msgpack array of its fields in order. Decoding is total: every length is bounded before it is used, every value
is checked against its spec, and anything else raises `DecodeError`, never another exception.

Compatibility: extra trailing fields are ignored (a later minor version may add some); missing trailing fields
take the dataclass default where there is one. Hashes are always taken over the bytes that arrived.

Not covered: signatures (`envelope`), and semantics beyond shape and bounds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from protocol.errors import DecodeError, ReasonCode

R = TypeVar("R")

REMEMBERED = 32
REMEMBERED_BYTES = 64 * 1024
"""Small records decoded last are not decoded again: a verdict or lease is read by its handler, the fold and the window,
each from the same bytes. At most 2 MiB of bytes, and some ten times that as objects."""

MANY = 8
"""From this many items on a list is looked at by columns: fewer are read as fast one by one."""

Read = Callable[[Any], Any]
"""Turns a decoded msgpack value into a field's value or raises DecodeError."""

HoldMany = Callable[[Sequence[Any]], bool]
"""Whether one field's values in many records are all plainly as they should be, without a Python call for each. False
proves nothing wrong: each is then read by its `Read`, which says what is. Never called with no values."""

ReadMany = Callable[[Sequence[Any]], Sequence[Any]]
"""Turns values that hold into the fields' values."""


def _never(values: Sequence[Any]) -> bool:
    return False


def _all_of(kind: type[Any], values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {kind}


class Spec:
    """One field's shape.

    Readers and writers are made once a field, with the field's place in the record already in their words: a lease of
    128 rollouts is a thousand fields, and putting its place together for each costs more than checking it.
    """

    def reader(self, where: str) -> Read:
        """A reader whose errors begin with `where`."""
        raise NotImplementedError

    def read(self, value: Any, where: str) -> Any:
        """One value by hand; whoever reads many makes a `reader`."""
        return self.reader(where)(value)

    def holder_of_many(self) -> HoldMany:
        """See `HoldMany`. What holds, `reader` reads as `reader_of_many` does."""
        return _never

    def reader_of_many(self) -> ReadMany | None:
        """None when values that hold are the fields' values as they are."""
        return None

    def checker(self, where: str) -> Read:
        """Raises as `reader` does, for who needs no value."""
        return self.reader(where)

    def writer(self) -> Callable[[Any], Any] | None:
        """Turns a field's value into what msgpack packs; None when it is packed as it is."""
        return None

    def writer_of_many(self) -> ReadMany | None:
        """The same for one field's values in many records, without a Python call for each."""
        write = self.writer()
        return None if write is None else lambda values: list(map(write, values))


@dataclasses.dataclass(frozen=True)
class UInt(Spec):
    """An unsigned integer of at most `bits` bits."""

    bits: int = 64

    def reader(self, where: str) -> Read:
        bits, end = self.bits, 1 << self.bits

        def read(value: Any) -> Any:
            if type(value) is int and 0 <= value < end:
                return value
            raise DecodeError(f"{where}: not an unsigned integer of {bits} bits")

        return read

    def holder_of_many(self) -> HoldMany:
        end = 1 << self.bits
        return lambda values: _all_of(int, values) and min(values) >= 0 and max(values) < end


@dataclasses.dataclass(frozen=True)
class Real(Spec):
    """A finite double."""

    def reader(self, where: str) -> Read:
        isfinite = math.isfinite

        def read(value: Any) -> Any:
            if type(value) is float and isfinite(value):
                return value
            if type(value) is int and isfinite(value):
                return float(value)
            raise DecodeError(f"{where}: not a finite number")

        return read

    def holder_of_many(self) -> HoldMany:
        # A sum is finite only when all of it is; of finite values that add up beyond a double each is looked at.
        return lambda values: _all_of(float, values) and math.isfinite(sum(values))

    def writer(self) -> Callable[[Any], Any]:
        return float


@dataclasses.dataclass(frozen=True)
class Flag(Spec):
    """A boolean."""

    def reader(self, where: str) -> Read:
        def read(value: Any) -> Any:
            if type(value) is bool:
                return value
            raise DecodeError(f"{where}: not a boolean")

        return read


@dataclasses.dataclass(frozen=True)
class Fixed(Spec):
    """Exactly `size` bytes."""

    size: int

    def reader(self, where: str) -> Read:
        size = self.size

        def read(value: Any) -> Any:
            if type(value) is bytes and len(value) == size:
                return value
            raise DecodeError(f"{where}: not exactly {size} bytes")

        return read

    def holder_of_many(self) -> HoldMany:
        size = self.size
        return lambda values: _all_of(bytes, values) and set(map(len, values)) == {size}


@dataclasses.dataclass(frozen=True)
class Blob(Spec):
    """At most `limit` bytes, whose length is a multiple of `unit`."""

    limit: int
    unit: int = 1

    def reader(self, where: str) -> Read:
        limit, unit = self.limit, self.unit

        def read(value: Any) -> Any:
            if type(value) is not bytes:
                raise DecodeError(f"{where}: not bytes")
            size = len(value)
            if size > limit:
                raise DecodeError(f"{where}: {size} bytes, over the bound of {limit}", ReasonCode.OVERSIZE)
            if size % unit:
                raise DecodeError(f"{where}: length is no multiple of {unit}")
            return value

        return read

    def holder_of_many(self) -> HoldMany:
        limit, unit = self.limit, self.unit

        def hold(values: Sequence[Any]) -> bool:
            if not _all_of(bytes, values):
                return False
            sizes = set(map(len, values))
            return max(sizes) <= limit and not any(size % unit for size in sizes)

        return hold


@dataclasses.dataclass(frozen=True)
class Text(Spec):
    """At most `limit` bytes of UTF-8."""

    limit: int

    def reader(self, where: str) -> Read:
        limit = self.limit

        def read(value: Any) -> Any:
            if type(value) is not str:
                raise DecodeError(f"{where}: not text")
            over = len(value) > limit or not (value.isascii() or len(value.encode("utf-8", "surrogatepass")) <= limit)
            if over:
                raise DecodeError(f"{where}: over the bound of {limit} bytes", ReasonCode.OVERSIZE)
            return value

        return read

    def holder_of_many(self) -> HoldMany:
        limit = self.limit

        def hold(values: Sequence[Any]) -> bool:
            if not _all_of(str, values):
                return False
            words = set(values)  # names and reasons: few in many records
            return all(map(str.isascii, words)) and max(map(len, words)) <= limit

        return hold


@dataclasses.dataclass(frozen=True)
class Seq(Spec):
    """A tuple of at most `limit` items."""

    item: Spec
    limit: int

    def reader(self, where: str) -> Read:
        limit, read_item = self.limit, self.item.reader(where)
        hold_many, read_many = self.item.holder_of_many(), self.item.reader_of_many()

        def read(value: Any) -> Any:
            _check_list(value, limit, where)
            if len(value) >= MANY and hold_many(value):
                return tuple(value if read_many is None else read_many(value))
            return tuple([read_item(item) for item in value])

        return read

    def checker(self, where: str) -> Read:
        limit, check_item, hold_many = self.limit, self.item.checker(where), self.item.holder_of_many()

        def check(value: Any) -> None:
            _check_list(value, limit, where)
            if len(value) < MANY or not hold_many(value):
                for item in value:
                    check_item(item)

        return check

    def holder_of_many(self) -> HoldMany:
        limit, hold_many = self.limit, self.item.holder_of_many()

        def hold(values: Sequence[Any]) -> bool:
            if not _all_of(list, values) or max(map(len, values)) > limit:
                return False
            items = list(itertools.chain.from_iterable(values))
            return not items or hold_many(items)

        return hold

    def reader_of_many(self) -> ReadMany:
        read_many = self.item.reader_of_many()
        if read_many is None:
            return lambda values: list(map(tuple, values))
        read_items = read_many  # a name of its own, which is never None

        def read(values: Sequence[Any]) -> Sequence[Any]:
            items = iter(read_items(list(itertools.chain.from_iterable(values))))
            return [tuple(itertools.islice(items, len(value))) for value in values]

        return read

    def writer(self) -> Callable[[Any], Any]:
        write_item, write_many = self.item.writer(), self.item.writer_of_many()
        if write_item is None or write_many is None:
            return list
        item, many = write_item, write_many  # names of their own, which are never None
        return lambda value: list(many(value)) if len(value) >= MANY else [item(one) for one in value]

    def writer_of_many(self) -> ReadMany:
        write_many = self.item.writer_of_many()
        if write_many is None:
            return lambda values: list(map(list, values))
        write_items = write_many  # a name of its own, which is never None

        def write(values: Sequence[Any]) -> Sequence[Any]:
            items = iter(write_items(list(itertools.chain.from_iterable(values))))
            return [list(itertools.islice(items, len(value))) for value in values]

        return write


@dataclasses.dataclass(frozen=True)
class Sub(Spec):
    """A nested record."""

    record: type

    def reader(self, where: str) -> Read:
        return _record_reader(self.record, f"{where}.{self.record.__name__}")

    def checker(self, where: str) -> Read:
        return _record_checker(self.record, f"{where}.{self.record.__name__}")

    def holder_of_many(self) -> HoldMany:
        return _record_holder_of_many(self.record)

    def reader_of_many(self) -> ReadMany:
        return _record_reader_of_many(self.record)

    def writer(self) -> Callable[[Any], Any]:
        return _record_writer(self.record)

    def writer_of_many(self) -> ReadMany:
        return _record_writer_of_many(self.record)


@dataclasses.dataclass(frozen=True)
class Maybe(Spec):
    """Nil or the inner spec."""

    item: Spec

    def reader(self, where: str) -> Read:
        read_item = self.item.reader(where)
        return lambda value: None if value is None else read_item(value)

    def writer(self) -> Callable[[Any], Any] | None:
        write_item = self.item.writer()
        return None if write_item is None else lambda value: None if value is None else write_item(value)


def _check_list(value: Any, limit: int, where: str) -> None:
    if type(value) is not list:
        raise DecodeError(f"{where}: not a list")
    if len(value) > limit:
        raise DecodeError(f"{where}: {len(value)} items, over the bound of {limit}", ReasonCode.OVERSIZE)


def _read_fields(cls: type[Any]) -> tuple[tuple[str, Spec, bool], ...]:
    hints = get_type_hints(cls, include_extras=True)
    out = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        specs = [a for a in get_args(hint)[1:] if isinstance(a, Spec)] if get_origin(hint) is Annotated else []
        if len(specs) != 1:
            raise TypeError(f"{cls.__name__}.{field.name} needs exactly one codec spec")
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        out.append((field.name, specs[0], has_default))
    return tuple(out)


def _record_reader(cls: type[Any], where: str) -> Read:
    """Reads a list into a record of class `cls`."""
    fields = [(name, spec.reader(f"{where}.{name}"), optional) for name, spec, optional in _read_fields(cls)]
    pairs = [(name, read) for name, read, _ in fields]
    count = len(fields)
    make = object.__new__

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise DecodeError(f"{where}: not a record")
        if len(value) >= count:
            made = make(cls)
            held = made.__dict__  # a frozen dataclass's own __init__ goes through object.__setattr__ for each field
            for (name, read_field), item in zip(pairs, value, strict=False):
                held[name] = read_field(item)
            return made
        values = {}
        for i, (name, read_field, optional) in enumerate(fields):
            if i < len(value):
                values[name] = read_field(value[i])
            elif not optional:
                raise DecodeError(f"{where}.{name}: missing")
        return cls(**values)

    return read


def _record_checker(cls: type[Any], where: str) -> Read:
    """Raises as `_record_reader` does for a list as `_record_writer` makes it."""
    checks = [spec.checker(f"{where}.{name}") for name, spec, _ in _read_fields(cls)]

    def check(value: Any) -> None:
        for check_field, item in zip(checks, value, strict=True):
            check_field(item)

    return check


def _record_holder_of_many(cls: type[Any]) -> HoldMany:
    """Looks at lists field by field: all their first values, all their second ones."""
    holders = [spec.holder_of_many() for _, spec, _ in _read_fields(cls)]

    def hold(values: Sequence[Any]) -> bool:
        if not holders or not _all_of(list, values) or set(map(len, values)) != {len(holders)}:
            return False
        return all(hold(column) for hold, column in zip(holders, zip(*values, strict=True), strict=True))

    return hold


def _record_reader_of_many(cls: type[Any]) -> ReadMany:
    """Turns lists that hold into records of class `cls`."""
    fields = [(name, spec.reader_of_many()) for name, spec, _ in _read_fields(cls)]
    make, put = object.__new__, object.__setattr__  # a frozen dataclass's own __setattr__ refuses

    def read(values: Sequence[Any]) -> Sequence[Any]:
        records = [make(cls) for _ in values]
        for (name, read_many), column in zip(fields, zip(*values, strict=True), strict=bool(values)):
            items = column if read_many is None else read_many(column)
            _exhaust(map(put, records, itertools.repeat(name), items))
        return records

    return read


def _exhaust(steps: Iterable[Any]) -> None:
    """Run an iterator to its end, without a Python loop around it."""
    collections.deque(steps, maxlen=0)


def _record_writer(cls: type[Any]) -> Callable[[Any], list[Any]]:
    """Writes a record as a list of its fields in order."""
    fields = [(name, spec.writer()) for name, spec, _ in _read_fields(cls)]
    if len(fields) < 2:
        return lambda record: [
            record.__dict__[name] if write is None else write(record.__dict__[name]) for name, write in fields
        ]
    take = operator.itemgetter(*(name for name, _ in fields))
    changed = [(at, write) for at, (_, write) in enumerate(fields) if write is not None]

    def write(record: Any) -> list[Any]:
        row = list(take(record.__dict__))
        for at, write_field in changed:
            row[at] = write_field(row[at])
        return row

    return write


def _record_writer_of_many(cls: type[Any]) -> ReadMany:
    """Writes many records, field by field."""
    fields = [(name, spec.writer_of_many()) for name, spec, _ in _read_fields(cls)]
    takes = [(operator.attrgetter(name), write) for name, write in fields]

    def write(records: Sequence[Any]) -> Sequence[Any]:
        columns = []
        for take, write_many in takes:
            column = list(map(take, records))
            columns.append(column if write_many is None else write_many(column))
        return list(map(list, zip(*columns, strict=True)))

    return write


_READERS: dict[type[Any], Read] = {}
_CHECKERS: dict[type[Any], Read] = {}
_WRITERS: dict[type[Any], Callable[[Any], list[Any]]] = {}


def record(max_bytes: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: bounds the encoded size of a record and checks its field specs at import."""

    def apply(cls: type[R]) -> type[R]:
        cls.MAX_BYTES = max_bytes  # type: ignore[attr-defined]
        if hasattr(cls, "__post_init__") or hasattr(cls, "__slots__"):
            raise TypeError(f"{cls.__name__}: a record is plain fields; check what they mean where it is used")
        _READERS[cls], _WRITERS[cls] = _record_reader(cls, cls.__name__), _record_writer(cls)
        _CHECKERS[cls] = _record_checker(cls, cls.__name__)
        return cls

    return apply


def encode(record: Any) -> bytes:
    """The canonical bytes of a record.

    Raises:
        DecodeError: the record would be refused by its own decoder (a bug of the sender, caught before sending).
    """
    cls = type(record)
    fields = _WRITERS[cls](record)
    _CHECKERS[cls](fields)
    raw: bytes = msgpack.packb(fields, use_bin_type=True)
    _check_size(cls, raw)
    return raw


def decode(cls: type[R], raw: bytes) -> R:
    """Parse bytes into a record of class `cls`.

    Raises:
        DecodeError: over the record's size bound, not msgpack, or a field outside its spec.
    """
    if type(raw) is bytes and len(raw) <= REMEMBERED_BYTES:
        again: R = _decode_once(cls, raw)  # a frozen record may be shared
        return again
    return _decode(cls, raw)


def _decode(cls: type[R], raw: bytes) -> R:
    _check_size(cls, raw)
    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException, UnicodeDecodeError) as exc:
        raise DecodeError(f"{cls.__name__}: not msgpack ({type(exc).__name__})") from exc
    decoded: R = _READERS[cls](value)
    return decoded


_decode_once: Any = functools.lru_cache(REMEMBERED)(_decode)
"""Only what was decoded is remembered: bytes that were refused are looked at, and refused, again."""


def _check_size(cls: type[Any], raw: bytes) -> None:
    limit: int = cls.MAX_BYTES
    if len(raw) > limit:
        raise DecodeError(f"{cls.__name__}: {len(raw)} bytes, over the bound of {limit}", ReasonCode.OVERSIZE)
