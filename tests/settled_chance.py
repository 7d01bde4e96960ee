"""Runs whose draws hardly change from time to time: keys, draw secret, ports and date follow from the test's name.

Which validator judges, who is checked again and which lease is a trial are drawn by the run's secrets. With new ones
each time a test would fail as often as its draws are unlucky. What a test draws changes with its name, and with
HEADWATER_TEST_SALT: `HEADWATER_TEST_SALT=7 pytest tests/test_trainer_spot_checks.py` shows whether it holds by luck.

Not covered: what is drawn over bytes that hold a time, so a test still waits for what it wants; runs of several
processes, whose order is chance whatever is drawn.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

from blake3 import blake3

from protocol.files import write_atomic
from protocol.identity import Identity, write_identity
from protocol.manifest import Run
from trainer import init
from trainer.book import SECRET_BYTES

CREATED_S = 1_767_225_600.0
"""Each run's date, 1 January 2026."""


def make_run(run_dir: Path, **arguments: Any) -> Run:
    """`trainer.init.make_run` with all that is drawn at random given beforehand."""
    for name in ("root", "coordinator", "origin", "coordinator-transport"):
        write_identity(run_dir / "keys" / f"{name}.pem", Identity.from_seed(drawn(name)))
    (run_dir / "state").mkdir()
    write_atomic(run_dir / "state" / "draws.secret", drawn("draws")[:SECRET_BYTES], mode=0o600)
    ports = {"control_port": 4001, "ingress_port": 4002, "origin_port": 4003}
    with mock.patch.object(init, "time", mock.Mock(time=lambda: CREATED_S)):
        return init.make_run(run_dir, **ports, **arguments)


def drawn(purpose: str) -> bytes:
    """32 bytes for a purpose, this test and the salt."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)").removesuffix(" (setup)")
    salt = os.environ.get("HEADWATER_TEST_SALT", "")
    return blake3("\0".join((purpose, test, salt)).encode()).digest()
