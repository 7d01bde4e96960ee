"""Amounts as people write them: `20G`, `50MB/s`, `100GB/day`.

K, M, G, T are powers of 1000 as on a link's or a disk's label; Ki, Mi, Gi, Ti are powers of 1024. The B is free.
"""

from __future__ import annotations

import re

from protocol.errors import UsageError

_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?)(I?)B?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """`20G` is 20,000,000,000; `512MiB` is 536,870,912. Raises UsageError."""
    match = _AMOUNT.fullmatch(text.strip().upper())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is no amount of bytes; write 500M, 20G or 512MiB")
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
    if value < 1:
        raise UsageError(f"{text!r} is no amount of bytes above 0")
    return value


def parse_rate(text: str) -> int:
    """Bytes per second: `50MB/s`, `50M`. Raises UsageError."""
    return _parse_per(text, ("/s", "/sec", "ps"), "50MB/s")


def parse_quota(text: str) -> int:
    """Bytes a day: `100GB/day`, `100G`. Raises UsageError."""
    return _parse_per(text, ("/day", "/d"), "100GB/day")


def _parse_per(text: str, ends: tuple[str, ...], example: str) -> int:
    amount = text.strip()
    for end in ends:
        if amount.lower().endswith(end):
            amount = amount[: -len(end)]
            break
    if amount.endswith("b"):
        raise UsageError(f"{text!r}: bits or bytes? Write bytes, with a capital B: {example}")
    try:
        return parse_bytes(amount)
    except UsageError as exc:
        raise UsageError(f"{text!r} is no such limit; write {example}") from exc
