"""A command that is told to stop ends, though Python or a library dropped what the handler raised."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from verifier import cli, stopping

def command(args):
    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), {number})  # what a handler raises in here goes nowhere
    Dropping()
    {after}
    print("went on", flush=True)
    return 0

sys.argv = ["verifier", "explain", "token-not-forced"]
cli._explain = command
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("after", "said"), [("pass", "went on\n"), ("stopping.check()", "")])
def test_a_stop_that_was_dropped_is_heard_all_the_same(number: signal.Signals, after: str, said: str) -> None:
    program = PROGRAM.format(number=int(number), after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + number, said), done.stderr
