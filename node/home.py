"""The directory that makes a node the same node tomorrow.

    HOME/identity.pem  transport.pem        keys, mode 0600
    HOME/lock                               held by the running process
    HOME/runs/<run id hex>/manifest.hw      the run's genesis manifest; updates.hw: the links of its chain since
                           sequences.json   envelope numbers, never repeated
                           submissions/     finished leases without a receipt yet; refused/ holds what was turned down
                           receipts/        the coordinator's promises
                           weights/         verified policies; relay/ holds what a relay serves
                           head.hw          the newest signed promise about the ledger; conflict/: two that don't fit
                           status.json      what the running process is doing, for `node status`

Not covered: backing it up. A lost identity is a new probation; everything else can be rebuilt.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UsageError
from protocol.identity import Identity, load_or_create_identity

DEFAULT = Path("~/.headwater")


@dataclass(frozen=True)
class RunHome:
    """One run's part of a home."""

    path: Path

    @property
    def sequences(self) -> Path:
        return self.path / "sequences.json"

    @property
    def submissions(self) -> Path:
        return self.path / "submissions"

    @property
    def receipts(self) -> Path:
        return self.path / "receipts"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def status(self) -> Path:
        return self.path / "status.json"


class Home:
    """A node's directory, locked while this process runs."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock: int | None = None

    def lock(self) -> None:
        """Make this process the home's only user.

        Raises:
            UsageError: another process uses it, or it can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise UsageError(f"the home {self.path} can't be written ({exc}); give another --home") from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise UsageError(
                f"the home {self.path} is in use by process {holder}; stop it, or give this node a --home of its own"
            ) from exc
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def identity(self) -> Identity:
        """The node's key, made on first use."""
        return load_or_create_identity(self.path / "identity.pem")

    @property
    def transport_key(self) -> Path:
        """Key file of the libp2p host process, made on first use."""
        path = self.path / "transport.pem"
        load_or_create_identity(path)
        return path

    def run(self, run: bytes) -> RunHome:
        """The part of `run` (32 bytes), with its folders made."""
        part = RunHome(self.path / "runs" / run.hex())
        for folder in (part.submissions / "refused", part.receipts, part.weights):
            folder.mkdir(parents=True, exist_ok=True)
        return part
