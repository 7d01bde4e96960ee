"""What an interrupted audit derived, kept outside the archive, so that the same command goes on where it stopped.

    line 1   MAGIC
    line 2   BLAKE3 of line 3, hex
    line 3   JSON: key (whose results these are), seed, derivations

The key is a hash of all that a derivation rests on and the archive does not prove again each time: the run, the
ledger's entries, the options that choose what is derived, and the software. A file with another key, cut or flipped is
left aside with a sentence, never half used. What it holds is the auditor's own word to themselves: nothing in it is
signed, and who can write it can write the report as well.

Not covered: whether the files of the archive still hold. The audit hashes all of them each time, and leaves aside what
was derived from one that doesn't.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3

import environments
import protocol
import shardcast
import verifier
from protocol.errors import UsageError
from protocol.files import cache_directory, read_at_most, write_atomic
from verifier.derive import NOT_ONE, Derivation

MAGIC = b"headwater audit state 1\n"
"""First line. Another form of what follows needs another number, or old files are read as damaged ones."""

_RESTS_ON = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
"""Packages whose versions decide states, tokens or noise."""

_MOST_BYTES = 1 << 30
"""About five million submissions; a larger file was not written by an audit."""

_SAVE_EVERY_S = 5.0
_SHARE = 0.05
"""Of the time goes to saving at most: a file of many submissions is written less often."""


def software() -> str:
    """What decides derivations beside the archive: a hash of our own sources, and the versions of what they rest on."""
    sources = blake3()
    for package in (protocol, shardcast, environments, verifier):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            sources.update(
                path.relative_to(folder.parent).as_posix().encode() + b"\0" + blake3(path.read_bytes()).digest()
            )
    return " ".join([sources.hexdigest(), *(f"{name} {version(name)}" for name in _RESTS_ON)])


def key_of(run: bytes, ledger: bytes, options: Iterable[str]) -> str:
    """Whose results: hex.

    Args:
        ledger: a hash of all entries that were read.
        options: those that choose what is derived.
    """
    named = [run.hex(), ledger.hex(), software(), *options]
    return blake3(json.dumps(named).encode()).hexdigest(32)


@dataclass
class Kept:
    """The derivations of this audit so far, and where they are kept."""

    path: Path | None
    """None: nowhere."""
    key: str
    seed: str = ""
    found: dict[int, Derivation] = field(default_factory=dict)
    """By the submission's ledger index."""
    partial: set[int] = field(default_factory=set)
    """Those made while a file that they should be held against was missing or damaged: not kept, it may come back."""
    notes: list[str] = field(default_factory=list)
    """What the auditor should know about it."""
    clock: Callable[[], float] = time.monotonic
    _saved: float = field(default=float("-inf"), init=False)
    _cost: float = field(default=0.0, init=False)

    @staticmethod
    def open(path: Path | None, key: str, archive: Path, clock: Callable[[], float] = time.monotonic) -> Kept:
        """What an earlier audit left in `path`, or in the user's cache where that is None.

        Raises:
            UsageError: `path` lies in the archive, is something else than a state, or can't be written.
        """
        chosen = path is not None
        kept = Kept(path if path is not None else cache_directory() / "audits" / f"{key[:32]}.state", key, clock=clock)
        assert kept.path is not None
        try:
            if kept.path.resolve().is_relative_to(archive.resolve()):
                raise UsageError(f"{kept.path} lies in the archive, where nothing is written; give --state elsewhere")
            kept.path.parent.mkdir(parents=True, exist_ok=True)
            kept._read(kept.path)
            kept.save()
        except UsageError:
            if chosen:
                raise
            kept.path = None
        except OSError as exc:
            if chosen:
                raise UsageError(f"{kept.path} can't keep the audit's state: {exc.strerror or exc}") from exc
            kept.notes.append(f"what is derived can't be kept in {kept.path}, so an interruption begins anew: {exc}")
            kept.path = None
        return kept

    def _read(self, path: Path) -> None:
        try:
            raw = read_at_most(path, _MOST_BYTES)
        except FileNotFoundError:
            return
        if not raw.startswith(MAGIC) and raw:
            raise UsageError(f"{path} is no state of an audit, and is left as it is; name another file with --state")
        digest, _, text = raw[len(MAGIC) :].partition(b"\n")
        if blake3(text).hexdigest().encode() != digest:
            self.notes.append(f"{path} is damaged and was left aside: the audit began anew")
            return
        try:
            told: dict[str, Any] = json.loads(text)
            if told["key"] != self.key:
                why = "another run, other options, a ledger that has grown since, or other software"
                self.notes.append(f"{path} is the state of another audit ({why}) and was left aside")
                return
            found = [Derivation.from_json(one) for one in told["derivations"]]
            seed = str(told["seed"])
            bytes.fromhex(seed)
        except NOT_ONE as exc:
            self.notes.append(f"{path} can't be understood and was left aside: {exc}")
            return
        self.seed = seed
        self.found = {one.submission: one for one in found}

    def add(self, one: Derivation) -> None:
        """Take a derivation; it is on the disk a few seconds later."""
        self.found[one.submission] = one
        if self.clock() - self._saved >= max(_SAVE_EVERY_S, self._cost / _SHARE):
            self.save_if_possible()

    def save_if_possible(self) -> None:
        """A disk that is full since the beginning costs the way back, not the audit; said once."""
        try:
            self.save()
        except OSError as exc:
            self.notes.append(f"what is derived is kept no longer in {self.path}: {exc.strerror or exc}")
            self.path = None

    def save(self) -> None:
        """Write all of it, aside and renamed. Raises OSError."""
        if self.path is None:
            return
        started = self.clock()
        # What this machine could not decide, or read, it tries again.
        lasting = [
            one.to_json()
            for one in self.found.values()
            if not one.failed and not one.undecided and one.submission not in self.partial
        ]
        told = {"key": self.key, "seed": self.seed, "derivations": lasting}
        text = json.dumps(told).encode()
        write_atomic(self.path, MAGIC + blake3(text).hexdigest().encode() + b"\n" + text, 0o600)
        self._saved = self.clock()
        self._cost = self._saved - started

    def drop(self) -> None:
        """The audit came to its end: nothing is left to go on with."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
