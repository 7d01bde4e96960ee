"""What processes of one run directory read of it: the manifest chain, and the online keys it names.

    RUN/manifest.hw   RUN/updates/000001.hw ...   RUN/keys/coordinator.pem  coordinator-1.pem (made by update 1) ...

A rotated key gets a file of its own; the newest link says which one is in use, so nothing is renamed, and a crash
between key and update leaves a key nobody names.

Not covered: making them (`trainer.init`, `trainer.keys`), who is told (`trainer.coordinator`, `node`).
"""

from __future__ import annotations

import re
from pathlib import Path

from protocol.chain import MAX_LINKS, Chain
from protocol.errors import ManifestError, UsageError
from protocol.identity import load_identity
from protocol.limits import MAX_ENVELOPE_BYTES

KEY_FILES = {"coordinator": "coordinator", "origin": "origin", "coordinator_transport": "coordinator-transport"}
"""Role (as in the manifest) -> stem of its key files."""


def read_updates(run_dir: Path, after: int = 0) -> list[bytes]:
    """The envelopes in RUN/updates from number `after` + 1 on, in order; a gap ends them.

    Raises:
        OSError: a file is there and can't be read.
    """
    out: list[bytes] = []
    while after + len(out) < MAX_LINKS:
        path = update_file(run_dir, after + len(out) + 1)
        try:
            with path.open("rb") as read:
                out.append(read.read(MAX_ENVELOPE_BYTES + 1))
        except FileNotFoundError:
            break
    return out


def update_file(run_dir: Path, number: int) -> Path:
    """Where update `number` (1 for the first) is kept."""
    return run_dir / "updates" / f"{number:06d}.hw"


def load_chain(run_dir: Path) -> Chain:
    """The manifest chain of a run directory.

    Raises:
        UsageError: no manifest there, or manifest or an update does not hold.
    """
    path = run_dir / "manifest.hw"
    try:
        return Chain.walk(path.read_bytes(), read_updates(run_dir))
    except FileNotFoundError as exc:
        raise UsageError(f"{path} does not exist; restore it from your backup") from exc
    except ManifestError as exc:
        raise UsageError(
            f"{path}, or an update beside it in updates/, does not hold ({exc}); restore both from your backup"
        ) from exc


def key_file(run_dir: Path, role: str, public: bytes) -> Path:
    """The key file of an online role that holds the key the manifest names.

    Raises:
        UsageError: none of the role's key files does, or one can't be read.
    """
    stem = KEY_FILES[role]
    ours = re.compile(rf"{re.escape(stem)}(-\d+)?\.pem")
    folder = run_dir / "keys"
    paths = sorted(path for path in folder.glob(f"{stem}*.pem") if ours.fullmatch(path.name))
    for path in reversed(paths):
        if load_identity(path).public == public:
            return path
    raise UsageError(
        f"none of {folder}/{stem}*.pem is the {role.replace('_', ' ')} key that the run's manifest names; restore the "
        "right one from your backup"
    )
