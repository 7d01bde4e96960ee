"""The allocator keeps what was freed, so that the next allocations need no new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch
if "keep" in sys.argv:
    from verifier.allocator import keep_freed_memory
    keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
torch.ones(1)
before = resident()
kept = [torch.ones(1 << 18) for _ in range(64)]  # 1 MiB each
assert resident() - before >= 60
del kept
print(resident() - before)
"""


def kept_mib(*words: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *words]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_stays_in_the_process() -> None:
    assert kept_mib() < 10 < 55 < kept_mib("keep")
