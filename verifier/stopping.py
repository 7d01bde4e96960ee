"""Being told to stop, heard also where Python drops what a handler raises.

A handler's exception ends a command wherever it is, but not if that is a fork's hook, a destructor, or a library's
`except:` around an import: then the command goes on as if nothing had been said. So what was heard is kept, long work
looks at it (`check`), and a command that ended all the same says that it was told to stop.

Not covered: processes beside this one, which their parent ends.
"""

from __future__ import annotations

import signal

_heard: list[int] = []


def listen() -> None:
    """From now on SIGINT and SIGTERM end this process's command, by an exception: its temporary files go with it."""
    _heard.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def heard() -> int:
    """Exit status of a command that was told to stop; 0 while it was not."""
    return 128 + _heard[0] if _heard else 0


def check() -> None:
    """Raise what a handler raised before and somebody dropped."""
    if _heard:
        _end(_heard[0])


def _leave(number: int, _: object) -> None:
    _heard.append(number)
    _end(number)


def _end(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
