"""What all commands share towards the person at the terminal: how they end, and how strangers' words are shown.

    0 done    1 ran and did not succeed    2 could not start or check    130 interrupted

A command that can't go on says one message with cause, fix and who must act; with `--json` the same goes to stdout as
one object {"error": {"code", "message"}}. What the operating system refuses (a path, a right, a full disk) is put into
words here, so that no command shows a traceback for it.

Not covered: defects of our own. They keep their traceback, which is what a bug report needs.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from typing import Any

from protocol.errors import HeadwaterError, ReasonCode
from protocol.limits import PROTOCOL_VERSION

_FULL = {errno.ENOSPC, errno.EDQUOT}
_WORDS = {
    errno.ENOENT: "does not exist; check the path",
    errno.ENOTDIR: "goes through a file where a folder is needed; give another path",
    errno.EISDIR: "is a folder where a file is needed; give another path",
    errno.EEXIST: "is already there; give another path",
    errno.EACCES: "may not be used by this user; its owner must allow it (chmod, chown), or give another path",
    errno.EPERM: "may not be used by this user; its owner must allow it (chmod, chown), or give another path",
    errno.EROFS: "is on a read-only file system; give a path on another one",
    errno.ENAMETOOLONG: "is too long a name for this file system; give a shorter path",
    errno.EMFILE: "could not be opened: this process has too many open files; raise the limit with: ulimit -n 4096",
    errno.ENOSPC: "could not be written: the disk is full. What was written before is whole; whoever runs this machine "
    "must free some space, and the same command goes on",
    errno.EDQUOT: "could not be written: this user's quota is used up. What was written before is whole; whoever runs "
    "this machine must free some space, and the same command goes on",
}


class SayVersion(argparse.Action):
    """`--version`: prints the release and the protocol it speaks, `trainer 0.1.0, protocol 1.0`, and ends."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the release and the protocol's version")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        protocol = f"{PROTOCOL_VERSION >> 8}.{PROTOCOL_VERSION & 255}"
        sys.stdout.write(f"{parser.prog} {version('headwater')}, protocol {protocol}\n")
        parser.exit()


def several(count: int, word: str, words: str = "") -> str:
    """A number of things: 1 lease, 3 leases."""
    return f"{count} {word if count == 1 else words or word + 's'}"


def printable(text: str) -> str:
    """Text that somebody else chose, safe on a terminal: no escape sequence, line break or change of direction."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def os_error_in_words(exc: OSError) -> str:
    """Cause, fix and who must act, for what the operating system refused."""
    number = exc.errno or 0
    target = exc.filename2 if exc.filename2 is not None else exc.filename  # a copy's target, not its source
    what = str(target) if target is not None else "a file"
    words = _WORDS.get(number)
    if words is None:
        return f"{what}: {exc.strerror or exc}; whoever runs this machine must check the disk and its permissions"
    return f"{what} {words}"


def fail(command: str, exc: HeadwaterError | OSError, *, as_json: bool, code: int | None = None) -> int:
    """Say why a command ends and return its exit code.

    Args:
        command: as typed, for example `trainer serve`.
        code: exit code; by default 2, and 1 for a disk that filled up on the way.
    """
    if isinstance(exc, BrokenPipeError):  # whoever read our output has gone: nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(exc, OSError):
        message, reason = os_error_in_words(exc), ReasonCode.USAGE
        code = code if code is not None else (1 if exc.errno in _FULL else 2)
    else:
        message, reason = str(exc), exc.code
        code = 2 if code is None else code
    if as_json:
        sys.stdout.write(json.dumps({"error": {"code": reason.value, "message": message}}) + "\n")
        sys.stdout.flush()
    sys.stderr.write(f"{command}: {message}\n")
    return code
