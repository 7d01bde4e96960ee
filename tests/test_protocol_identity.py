"""Signatures: what is remembered of a key never lets anything through that would be refused without it."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from protocol.errors import EnvelopeError
from protocol.identity import Identity, check_public_key, verify

PRIME = 2**255 - 19


def test_a_key_that_verified_before_verifies_nothing_else() -> None:
    one, other = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
    signature = one.sign(b"message")
    for _ in range(3):
        verify(one.public, signature, b"message")
        with pytest.raises(EnvelopeError, match="not 12D3Koo"):
            verify(one.public, signature, b"massage")
        with pytest.raises(EnvelopeError, match="not 12D3Koo"):
            verify(other.public, signature, b"message")
        with pytest.raises(EnvelopeError, match="not 12D3Koo"):
            verify(one.public, signature[:-1], b"message")


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"k" * 31,
        b"k" * 33,
        (0).to_bytes(32, "little"),
        (1).to_bytes(32, "little"),
        (1 | 1 << 255).to_bytes(32, "little"),
        (PRIME - 1).to_bytes(32, "little"),
        PRIME.to_bytes(32, "little"),
        (PRIME + 1).to_bytes(32, "little"),
    ],
)
def test_a_key_of_small_order_or_of_another_form_is_refused_each_time(key: bytes) -> None:
    for _ in range(3):
        with pytest.raises(EnvelopeError, match="public key"):
            check_public_key(key)
        with pytest.raises(EnvelopeError, match="public key"):
            verify(key, bytes(64), b"message")


def test_keys_of_strangers_fill_no_memory() -> None:
    """Whoever sends envelopes under ever new keys."""
    keys = [Identity.generate().public for _ in range(13_500)]
    tracemalloc.start()
    held = []
    for start in (0, 4500, 9000):
        for key in keys[start : start + 4500]:
            with pytest.raises(EnvelopeError):
                verify(key, bytes(64), b"")
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[2] - held[1] < held[0] / 10, "old keys make room for new ones"
