"""The allocator keeps what was freed: a second round of the same allocations costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
if "keep" in sys.argv:
    from verifier.allocator import keep_freed_memory
    keep_freed_memory()
def work():
    kept = [torch.ones(1 << 18) for _ in range(16)]  # 1 MiB each
    del kept
work(); work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str) -> int:
    return int(
        subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, check=True, timeout=60).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert 4 * faults("keep") < faults()
