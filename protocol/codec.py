"""Typed, bounded records on msgpack arrays.

A record is a frozen dataclass whose fields are `Annotated` with a spec from this module. It is encoded as a
msgpack array of its fields in order. Decoding is total: every length is bounded before it is used, every value
is checked against its spec, and anything else raises `DecodeError`, never another exception.

Compatibility: extra trailing fields are ignored (a later minor version may add some); missing trailing fields
take the dataclass default where there is one. Hashes are always taken over the bytes that arrived.

Not covered: signatures (`envelope`), and semantics beyond shape and bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from protocol.errors import DecodeError, ReasonCode

R = TypeVar("R")


class Spec:
    """One field's shape. `read` turns a decoded msgpack value into the field's value or raises DecodeError."""

    def read(self, value: Any, where: str) -> Any:
        raise DecodeError(f"{where}: no spec")

    def write(self, value: Any) -> Any:
        return value


@dataclasses.dataclass(frozen=True)
class UInt(Spec):
    """An unsigned integer of at most `bits` bits."""

    bits: int = 64

    def read(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value < (1 << self.bits):
            raise DecodeError(f"{where}: not an unsigned integer of {self.bits} bits")
        return value


@dataclasses.dataclass(frozen=True)
class Real(Spec):
    """A finite double."""

    def read(self, value: Any, where: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise DecodeError(f"{where}: not a finite number")
        return float(value)

    def write(self, value: Any) -> float:
        return float(value)


@dataclasses.dataclass(frozen=True)
class Flag(Spec):
    """A boolean."""

    def read(self, value: Any, where: str) -> bool:
        if type(value) is not bool:
            raise DecodeError(f"{where}: not a boolean")
        return value


@dataclasses.dataclass(frozen=True)
class Fixed(Spec):
    """Exactly `size` bytes."""

    size: int

    def read(self, value: Any, where: str) -> bytes:
        if type(value) is not bytes or len(value) != self.size:
            raise DecodeError(f"{where}: not exactly {self.size} bytes")
        return value


@dataclasses.dataclass(frozen=True)
class Blob(Spec):
    """At most `limit` bytes, whose length is a multiple of `unit`."""

    limit: int
    unit: int = 1

    def read(self, value: Any, where: str) -> bytes:
        if type(value) is not bytes:
            raise DecodeError(f"{where}: not bytes")
        if len(value) > self.limit:
            raise DecodeError(f"{where}: {len(value)} bytes, over the bound of {self.limit}", ReasonCode.OVERSIZE)
        if len(value) % self.unit:
            raise DecodeError(f"{where}: length is no multiple of {self.unit}")
        return value


@dataclasses.dataclass(frozen=True)
class Text(Spec):
    """At most `limit` bytes of UTF-8."""

    limit: int

    def read(self, value: Any, where: str) -> str:
        if type(value) is not str:
            raise DecodeError(f"{where}: not text")
        if len(value) > self.limit or len(value.encode("utf-8", "surrogatepass")) > self.limit:
            raise DecodeError(f"{where}: over the bound of {self.limit} bytes", ReasonCode.OVERSIZE)
        return value


@dataclasses.dataclass(frozen=True)
class Seq(Spec):
    """A tuple of at most `limit` items."""

    item: Spec
    limit: int

    def read(self, value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise DecodeError(f"{where}: not a list")
        if len(value) > self.limit:
            raise DecodeError(f"{where}: {len(value)} items, over the bound of {self.limit}", ReasonCode.OVERSIZE)
        return tuple(self.item.read(v, where) for v in value)

    def write(self, value: Any) -> list[Any]:
        return [self.item.write(v) for v in value]


@dataclasses.dataclass(frozen=True)
class Sub(Spec):
    """A nested record."""

    record: type

    def read(self, value: Any, where: str) -> Any:
        return _from_list(self.record, value, f"{where}.{self.record.__name__}")

    def write(self, value: Any) -> list[Any]:
        return _to_list(value)


@dataclasses.dataclass(frozen=True)
class Maybe(Spec):
    """Nil or the inner spec."""

    item: Spec

    def read(self, value: Any, where: str) -> Any:
        return None if value is None else self.item.read(value, where)

    def write(self, value: Any) -> Any:
        return None if value is None else self.item.write(value)


def _fields(cls: type[Any]) -> tuple[tuple[str, Spec, bool], ...]:
    """Name, spec and whether there is a default, per field; worked out once a class."""
    known = _KNOWN.get(cls)
    if known is None:
        known = _KNOWN[cls] = _read_fields(cls)
    return known


_KNOWN: dict[type[Any], tuple[tuple[str, Spec, bool], ...]] = {}


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


def _from_list(cls: type[R], value: Any, where: str) -> R:
    fields = _fields(cls)
    if type(value) is not list:
        raise DecodeError(f"{where}: not a record")
    values: dict[str, Any] = {}
    for i, (name, spec, has_default) in enumerate(fields):
        if i < len(value):
            values[name] = spec.read(value[i], f"{where}.{name}")
        elif not has_default:
            raise DecodeError(f"{where}.{name}: missing")
    return cls(**values)


def _to_list(record: Any) -> list[Any]:
    return [spec.write(getattr(record, name)) for name, spec, _ in _fields(type(record))]


def record(max_bytes: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: bounds the encoded size of a record and checks its field specs at import."""

    def apply(cls: type[R]) -> type[R]:
        cls.MAX_BYTES = max_bytes  # type: ignore[attr-defined]
        _fields(cls)
        return cls

    return apply


def encode(record: Any) -> bytes:
    """The canonical bytes of a record.

    Raises:
        DecodeError: the record would be refused by its own decoder (a bug of the sender, caught before sending).
    """
    raw: bytes = msgpack.packb(_to_list(record), use_bin_type=True)
    decode(type(record), raw)
    return raw


def decode(cls: type[R], raw: bytes) -> R:
    """Parse bytes into a record of class `cls`.

    Raises:
        DecodeError: over the record's size bound, not msgpack, or a field outside its spec.
    """
    limit: int = cls.MAX_BYTES  # type: ignore[attr-defined]
    if len(raw) > limit:
        raise DecodeError(f"{cls.__name__}: {len(raw)} bytes, over the bound of {limit}", ReasonCode.OVERSIZE)
    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException, UnicodeDecodeError) as exc:
        raise DecodeError(f"{cls.__name__}: not msgpack ({type(exc).__name__})") from exc
    return _from_list(cls, value, cls.__name__)
