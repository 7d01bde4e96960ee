"""Which run is meant: what a person types after `--run`, read into a run id and the addresses to ask.

Not covered: asking them (`node.find`), and whether a manifest is that run's (`manifest.open_manifest`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ManifestError, ProtocolError, UsageError
from protocol.identity import parse_peer_id, peer_id_text
from protocol.limits import HASH_BYTES
from protocol.manifest import parse_share_code

_MULTIADDR = ("/ip4/", "/ip6/", "/dns/", "/dns4/", "/dns6/")
_MAX_CODE_BYTES = 65536


@dataclass(frozen=True)
class Target:
    """Which run, and whom to ask for its manifest. `run` is None when only an address was given."""

    run: bytes | None
    addresses: tuple[str, ...]


def resolve(text: str) -> Target:
    """The run that `--run` names.

    Raises:
        UsageError: neither an address, a share code nor a file that holds one.
    """
    word = text.strip()
    if not word:
        raise UsageError(
            "--run is empty (a variable that is not set?); give the run's share code (hw1...), or a file that holds it"
        )
    if not word.startswith(_MULTIADDR) and not word.startswith("hw1"):
        word = _read_code(word)
    if word.startswith(_MULTIADDR):
        try:
            parse_peer_id(word.partition("/p2p/")[2])
        except ProtocolError as exc:
            raise UsageError(f"--run {text}: the address must end in /p2p/ and the coordinator's peer id") from exc
        return Target(None, (word,))
    try:
        code = parse_share_code(word)
    except ManifestError as exc:
        raise UsageError(f"--run {text}: {exc}") from exc
    suffix = "/p2p/" + peer_id_text(code.transport)
    return Target(code.run, tuple(a if "/p2p/" in a else a + suffix for a in code.addresses))


def _read_code(name: str) -> str:
    """What a file holds that somebody named, or why it is none that could help. Raises UsageError."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            raise UsageError(f"--run {name}: a folder; name the file in it that holds the share code (join.hw)")
        with path.open(encoding="utf-8") as file:
            word = file.read(_MAX_CODE_BYTES).strip()
    except OSError as exc:
        why = (
            "there is no such file" if isinstance(exc, FileNotFoundError) else f"the file can't be read: {exc.strerror}"
        )
    except UnicodeDecodeError:
        why = "the file is no text"
    except (ValueError, RuntimeError):  # a zero byte, or ~nobody
        why = "no file can have this name"
    else:
        if word:
            return word
        why = "the file is empty"
    raise UsageError(
        f"--run {name}: no share code (hw1...), no multiaddr, and no file that holds one ({why}); ask the run's "
        "operator for its share code"
    )


def resolve_id(text: str) -> bytes:
    """The run id (32 bytes) that a person wrote down: in hex, or as a share code or a file that holds one.

    Raises:
        UsageError: none of these; an address alone says nothing about which run is meant.
    """
    word = text.strip()
    if len(word) == 2 * HASH_BYTES and all(letter in "0123456789abcdefABCDEF" for letter in word):
        return bytes.fromhex(word)
    found = resolve(word).run
    if found is None:
        raise UsageError(
            f"--run {text}: an address does not say which run is meant; give the run's id (64 hex digits) or its "
            "share code (hw1...), from whoever told you of the run"
        )
    return found
