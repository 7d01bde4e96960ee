"""Ed25519 identities: keys, their files, and libp2p peer ids.

A peer is its 32-byte public key. `peer_id_text` gives the libp2p form people see (`12D3Koo...`).
Only canonical keys of full order are accepted: a small-order key would verify signatures nobody made.

Not covered: transport keys' delegation (`records.JoinRequest` carries it inside a signed envelope).
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import EnvelopeError, UsageError
from protocol.files import write_atomic

_FIELD_PRIME = 2**255 - 19
_KEPT_KEYS = 4096
"""Keys whose check, and whose form for verifying, is remembered: a run's messages are signed by few keys. Each takes
less than 1 KiB; more keys than this only cost the check again."""

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash of the protobuf `PublicKey{type: Ed25519}`; fixed by libp2p's peer id specification."""

# y of the eight points of small order: 0, 1, -1 and the two with y^4 d + 2 y^2 - 1 = 0 (order 8).
_SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        2707385501144840649318225287225658788936804267575313519463743609750303402022,
        55188659117513257062467267217118295137698188065244968500265048394206261417927,
        _FIELD_PRIME - 1,
    }
)


@lru_cache(maxsize=_KEPT_KEYS)
def check_public_key(key: bytes) -> bytes:
    """Return `key` if it is a canonical Ed25519 public key of full order, else raise EnvelopeError."""
    if len(key) != 32:
        raise EnvelopeError("a public key has 32 bytes")
    y = int.from_bytes(key, "little") & ((1 << 255) - 1)
    if y >= _FIELD_PRIME or y in _SMALL_ORDER_Y:
        raise EnvelopeError("a public key that is not canonical or has small order")
    return key


def peer_id_text(key: bytes) -> str:
    """The libp2p peer id of a 32-byte Ed25519 public key, in base58."""
    number = int.from_bytes(_PEER_ID_PREFIX + key, "big")
    digits = ""
    while number:
        number, rest = divmod(number, 58)
        digits = _BASE58[rest] + digits
    return "1" + digits


def parse_peer_id(text: str) -> bytes:
    """The 32-byte public key inside a libp2p Ed25519 peer id.

    Raises:
        EnvelopeError: not a base58 Ed25519 peer id.
    """
    number = 0
    if not 40 <= len(text) <= 60:
        raise EnvelopeError("not an Ed25519 peer id")
    for char in text:
        digit = _BASE58.find(char)
        if digit < 0:
            raise EnvelopeError("not an Ed25519 peer id")
        number = number * 58 + digit
    size = len(_PEER_ID_PREFIX) + 32
    if number >> (8 * size):
        raise EnvelopeError("not an Ed25519 peer id")
    raw = number.to_bytes(size, "big")
    key = raw[len(_PEER_ID_PREFIX) :]
    if not raw.startswith(_PEER_ID_PREFIX) or peer_id_text(key) != text:
        raise EnvelopeError("not an Ed25519 peer id")
    return check_public_key(key)


@dataclass(frozen=True)
class Identity:
    """A private key. It is never printed: `repr` shows the peer id only."""

    private: Ed25519PrivateKey

    @staticmethod
    def generate() -> Identity:
        return Identity(Ed25519PrivateKey.generate())

    @staticmethod
    def from_seed(seed: bytes) -> Identity:
        """The identity of a private seed, 32 bytes: for keys that follow from a secret (`phantoms`), and for tests."""
        return Identity(Ed25519PrivateKey.from_private_bytes(seed))

    @cached_property
    def public(self) -> bytes:
        """The 32-byte public key."""
        return self.private.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> str:
        return peer_id_text(self.public)

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message)

    def private_seed(self) -> bytes:
        """The raw 32 bytes, for handing a transport key to libp2p inside the host process only."""
        return self.private.private_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


@lru_cache(maxsize=_KEPT_KEYS)
def _verifier(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(check_public_key(key))


def verify(key: bytes, signature: bytes, message: bytes) -> None:
    """Raise EnvelopeError unless `signature` is `key`'s over `message`."""
    try:
        _verifier(key).verify(signature, message)
    except (InvalidSignature, ValueError) as exc:
        raise EnvelopeError(f"the signature is not {peer_id_text(key)}'s") from exc


def load_identity(path: Path) -> Identity:
    """Read a key file.

    Raises:
        UsageError: missing, readable by others, or not an Ed25519 key.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError as exc:
        raise UsageError(
            f"key file {path} does not exist; restore it from your backup or start a new identity"
        ) from exc
    if mode & 0o077:
        raise UsageError(f"key file {path} can be read by others (mode {mode:o}); its owner must run: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as exc:
        raise UsageError(f"key file {path} holds no unencrypted private key; restore it from your backup") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key file {path} holds a key of another type; headwater uses Ed25519")
    return Identity(key)


def load_or_create_identity(path: Path) -> Identity:
    """Read the key file, or make a new identity there with mode 0600."""
    if path.exists():
        return load_identity(path)
    identity = Identity.generate()
    write_identity(path, identity)
    return identity


def write_identity(path: Path, identity: Identity) -> None:
    """Write a key file with mode 0600."""
    pem = identity.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, pem, mode=0o600)
