"""What was typed after `node join`, and whether it can hold at all: looked at before anything is asked of the network.

A mistake that only this machine can have made is told at once, with exit code 2; else a person waits minutes for a
coordinator to learn of a typing error.

Not covered: which run is meant (`protocol.targets`), the home (`home`), memory and disk (`protocol.preflight`).
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.inference import Alter

ANY_PORT = "127.0.0.1:0"

MAX_NAME_BYTES = 64
"""What the join request has room for."""

MAX_THREADS = 1024
"""More than any machine has cores; a slip of the finger would have torch start so many."""

MAX_SOCKET_BYTES = 107
"""The longest path that Linux takes for a Unix socket."""


@dataclass(frozen=True)
class JoinOptions:
    """What was typed, and this machine's clocks (seconds), which tests replace."""

    role: str
    run: str
    home: Path
    name: str = ""
    engine_socket: Path | None = None
    engine_later: bool = False
    """The engine may begin to listen after the node has started."""
    threads: int = 1
    listen: str = ANY_PORT
    yes: bool = False
    log: Path | None = None
    as_json: bool = False
    alter: Alter | None = None
    """What a phantom makes of its answers (`plant`); it can't be typed."""
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @property
    def command(self) -> str:
        """The command that starts this node again."""
        words = ["node", "join", "--role", self.role, "--run", self.run, "--home", str(self.home)]
        for option, value in (("--name", self.name), ("--engine-socket", self.engine_socket), ("--log", self.log)):
            words += [option, str(value)] if value else []
        words += ["--engine-later"] * self.engine_later
        words += ["--threads", str(self.threads)] if self.threads != 1 else []
        words += ["--listen", self.listen] if self.role == "relay" else []
        words += ["--yes"] * self.yes + ["--json"] * self.as_json
        return shlex.join(words)

    @property
    def shown_name(self) -> str:
        """What people see: the name given, else as much of the host's as fits."""
        return self.name or socket.gethostname().encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "ignore")


def check_options(options: JoinOptions) -> None:
    """Raises UsageError: an option that can't hold on this machine, or that this role does not have."""
    for option, given, role in (
        ("--engine-socket", options.engine_socket is not None, "inference"),
        ("--engine-later", options.engine_later, "inference"),
        ("--listen", options.listen != ANY_PORT, "relay"),
    ):
        if given and options.role != role:
            raise UsageError(f"{option} is for the role {role} only; leave it out for {options.role}")
    if len(options.name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
        raise UsageError(f"--name is longer than {MAX_NAME_BYTES} bytes; give a shorter one")
    if not options.name.isprintable():
        raise UsageError("--name holds characters that can't be shown; give letters, digits and signs")
    if not 1 <= options.threads <= MAX_THREADS:
        raise UsageError(f"--threads {options.threads}: give a number between 1 and {MAX_THREADS}")
    if options.engine_later and options.engine_socket is None:
        raise UsageError("--engine-later says when an engine listens; name its socket with --engine-socket PATH")
    if options.engine_socket is not None:
        _check_engine_socket(options.engine_socket, later=options.engine_later)
    if options.role == "relay":
        _check_listen(options.listen)


def _check_engine_socket(path: Path, *, later: bool) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise UsageError(f"--engine-socket {path}: the path of a socket has at most {MAX_SOCKET_BYTES} bytes")
    try:
        found = path.stat()
    except FileNotFoundError as exc:
        if later and path.parent.is_dir():
            return
        fix = "start the engine first, allow for it with --engine-later, or leave this out for the built-in one"
        raise UsageError(f"--engine-socket {path}: nothing is there; {fix}") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"--engine-socket {path}: it can't be looked at ({exc})") from exc
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"--engine-socket {path}: that is no socket; give the path an engine listens at")
    if not os.access(path, os.R_OK | os.W_OK):
        raise UsageError(f"--engine-socket {path}: this user may not speak to it; mend its permissions")


def _check_listen(listen: str) -> None:
    """HOST:PORT of a relay, and whether this machine can listen there; what the run says of it is asked later."""
    from node.relay import check_listen

    host, port = check_listen(listen, allow_private=True)
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as exc:
        why = {
            errno.EADDRINUSE: "another program listens there; give another port, or 0 for any that is free",
            errno.EADDRNOTAVAIL: "this machine does not have that address; give one of its own",
            errno.EACCES: "this user may not listen there; give a port above 1023",
        }.get(exc.errno or 0, str(exc))
        raise UsageError(f"--listen {listen}: {why}") from exc
